#!/bin/sh
# gpu_record_train.sh - what chunks are worth in training, on one device: tokens/s, memory, losses, beside a rival
#
#     make gpu-record-train                            builds what is needed, then runs this
#     sh tools/gpu_record_train.sh [options]           from the top of the tree
#         --out DIR          where the files go (default BUILD/gpu_record_train)
#         --resume RECORD    goes on where this record.jsonl of an earlier call ended
#         --minutes M        of this call; what is left over is for the next one (default 8)
#         --programs DIR     train_cuda and chunkflow, built here or elsewhere (default BUILD/gpu)
#         --lengths FILE     a second list beside the chat-like one, such as long prompts of a service
#         --small            tiny sizes, for a device that is emulated
#
# In this order, because the time on a device may end at any moment:
#     1  are the gradients right?
#     2  speed of the same batches in three ways, each without and with recomputation: one document a micro-batch
#        (one), packed up to the longest document (packed), and chunkflow; and the rival where PyTorch is
#     3  memory, as the longest document grows at one ChunkSize
#     4  losses of 200 steps, chunked and unchunked
# What was predicted stands in the summary beside what was measured; it was written down before anything had run.
# record.jsonl, log.txt and summary.txt are as gpu_record.sh's. Not yet run on a device.

set -u
LC_ALL=C
export LC_ALL

BUILD=${BUILD:-build}
PYTHON=${PYTHON:-python3}
out=$BUILD/gpu_record_train
programs=$BUILD/gpu
resume=
minutes=8
limit=600
small=
lengths=
NVCC=${NVCC:-nvcc}
needed='train_cuda --help'
targets="gpu-programs $BUILD/gpu/train_cuda"

self=gpu_record_train
. tools/gpu_record_lib.sh
read_options 'out resume minutes programs lengths' "$@"
need_numbers "$minutes"
need_files "$resume" "$lengths"
open_record

# ---- what the trainer prints ----

# step N/M loss X lr X |gradient| X N chunks X tokens/s [utilisation X %] memory X MiB left X s
take_step() { # WORD...
    said=$(printf '%s' "$*" | awk '{
        for (i = 1; i < NF; i++) {
            if ($i == "loss") loss = $(i + 1)
            if ($(i + 1) == "tokens/s") speed = $i
            if ($i == "utilisation") used = $(i + 1)
            if ($i == "memory") memory = $(i + 1)
        }
        print loss, speed, used == "" ? "-" : used, memory }')
    # shellcheck disable=SC2086
    set -- $said
    emit "\"loss\": $(number "$1"), \"tokens_per_s\": $(number "$2"), \"utilisation\": $(number "$3"), \
\"memory_mib\": $(number "$4")" ""
}

take_line() { # LINE
    case $1 in
        'step '*) take_step "$1" ;;
        '  batch, these together'*) emit "\"batch_mib\": $(number "$(printf '%s' "$1" | awk '{ print $(NF - 1) }')"), \
\"measured_mib\": $(number "$(printf '%s' "$1" | awk '{ print $NF }')")" "" ;;
        *': ok' | *': NOT OK') take_test "$(printf '%s' "${1%%:*}" | sed 's/^ *//')" \
            "$(case $1 in *NOT*) echo false ;; *) echo true ;; esac)" "" ;;
    esac
}

# ---- what runs ----

# The trainer says so itself, in its first step.
sees_none() { false; }

describe_device
if [ -z "$known" ]; then
    printf 'gpu_record_train: there is no device\n'
    exit 0
fi
prepare_programs
trainer=$programs/train_cuda

# Model, then options. 7B does not fit with its optimizer, so it is a slice of 7 layers: a stage of four.
models='qwen2.5-0.5b qwen2.5-1.5b qwen2.5-3b qwen2.5-7b:7'
chunk_size=8192
documents=256
longest=32768
grows='32768 262144 524288'
steps=6
curve_steps=200
tiny='--layers 2 --hidden 64 --heads 4 --kv-heads 2 --ffn 160 --vocabulary 512'
shape=
if [ -n "$small" ]; then
    models=qwen2.5-0.5b
    chunk_size=32
    documents=4
    longest=64
    grows='64 128'
    steps=3
    curve_steps=4
    tiny='--layers 1 --hidden 16 --heads 2 --kv-heads 1 --ffn 24 --vocabulary 48'
    shape="$tiny --loss-rows 128"
fi
"$programs/chunkflow" gen lmsys --n "$documents" --max "$longest" >"$out/chat.lengths" ||
    usage "chunkflow in $programs does not start"
printf '%s\n' 200 31 7 90 64 12 150 48 >"$out/curves.lengths"
lists=chat
if [ -n "$lengths" ]; then
    lists='chat second'
    head -n 32 "$lengths" >"$out/second.lengths"
fi

options_of() { # MODEL
    case $1 in
        *:*) printf -- '--model %s --layers %s' "${1%:*}" "${1#*:}" ;;
        *) printf -- '--model %s' "$1" ;;
    esac
    [ -z "$shape" ] || printf ' %s' "$shape"
}

way_of() { # one | packed | chunkflow
    case $1 in
        one) printf -- '--chunk-size 0 --max-slices 1' ;;
        packed) printf -- '--chunk-size 0' ;;
        chunkflow) printf -- '--chunk-size %s' "$chunk_size" ;;
    esac
}

# The same documents in every way, for the seed is the same: all of the list in each step.
# shellcheck disable=SC2046
speed() { # MODEL LIST WAY RECOMPUTE
    run_step 2 "speed $1 $2 $3 $4" 120 "$trainer" $(options_of "$1") $(way_of "$3") --recompute "$4" \
        --lengths "$out/$2.lengths" --batch "$(grep -c . "$out/$2.lengths")" --steps "$steps" --peak-tflops 989
}

cat <<'END' | tee -a "$log"

Predicted by rooflines, before anything has run: on the chat-like list chunkflow is 2.9 times as fast as one document a
micro-batch with recomputation at 0.5B, 1.6 at 1.5B, 1.55 at 3B, 1.5 with 7 layers of 7B (to 15 %); packed is nowhere
more than 3 % faster than chunkflow; what a batch takes is within 5 % of what is laid out for it.
END

# shellcheck disable=SC2086
for type in fp32 bf16; do
    run_step 1 "gradients $type" 120 "$trainer" --check --type $type $tiny --chunk-size 64 --k 2 \
        --synthetic 300,20,64,1,130
done

for model in $models; do
    for list in $lists; do
        for way in chunkflow one packed; do
            for recompute in none full; do speed "$model" "$list" "$way" "$recompute"; done
        done
        if [ -z "$small" ] && "$PYTHON" -c 'import torch, transformers, cffi' >/dev/null 2>&1; then
            for compiled in '' --compile; do
                # shellcheck disable=SC2046,SC2086
                run_step 2 "speed $model $list rival${compiled:+-compiled} none" 180 env "CHUNKFLOW_BUILD=$BUILD" \
                    "$PYTHON" tools/bench/bench_train_hf.py $(options_of "$model") --lengths "$out/$list.lengths" \
                    --steps "$steps" --peak-tflops 989 $compiled
            done
        fi
    done
done

# shellcheck disable=SC2046
for length in $grows; do
    run_step 3 "memory $length" 180 "$trainer" $(options_of "${models%% *}") --chunk-size "$chunk_size" --k 1 \
        --synthetic "$length" --steps 1 --memory-table
done

whole_or_cut() { # one | chunkflow: short documents, so short chunks
    if [ "$1" = one ]; then way_of one; else printf -- '--chunk-size 32'; fi
}

# shellcheck disable=SC2046,SC2086
for way in chunkflow one; do
    run_step 4 "losses $way" 200 "$trainer" $tiny --seed 7 $(whole_or_cut $way) \
        --lengths "$out/curves.lengths" --batch 4 --steps "$curve_steps"
done

# ---- the summary ----

# Medians over the steps behind the first one, beside what rooflines said before: how many times as fast chunkflow is as
# one document a micro-batch with recomputation, on the chat-like list.
summarize() {
    awk '
        function value(name,  text) {
            if (!match($0, "\"" name "\": (\"([^\"\\\\]|\\\\.)*\"|[^,}]*)")) return ""
            text = substr($0, RSTART + length(name) + 4, RLENGTH - length(name) - 4)
            gsub(/^"|"$/, "", text)
            return text
        }
        function median(step, what,  n, i, j, kept, own) {
            for (i = 2; i <= count[step]; i++) own[++n] = results[step, what, i]
            for (i = 2; i <= n; i++)
                for (j = i; j > 1 && own[j] < own[j - 1]; j--) { kept = own[j]; own[j] = own[j - 1]; own[j - 1] = kept }
            return n ? own[int((n + 1) / 2)] : 0
        }
        BEGIN {
            predicted["qwen2.5-0.5b chat"] = 2.9
            predicted["qwen2.5-1.5b chat"] = 1.6
            predicted["qwen2.5-3b chat"] = 1.55
            predicted["qwen2.5-7b:7 chat"] = 1.5
        }
        NR == 1 { printf "%s, driver %s, commit %s\n\n", value("device"), value("driver"), value("commit") }
        { step = value("step") }
        value("ok") != "" { printf "%s: %s: %s\n", step, value("test"), value("ok") == "true" ? "ok" : "NOT OK" }
        value("tokens_per_s") != "" {
            if (!(step in count)) steps[++n_steps] = step
            n = ++count[step]
            results[step, "speed", n] = value("tokens_per_s") + 0
            results[step, "used", n] = value("utilisation") + 0
            results[step, "memory", n] = value("memory_mib") + 0
            results[step, "loss", n] = value("loss") + 0
        }
        value("batch_mib") != "" { grown[++n_grown] = sprintf("%-16s %12s MiB predicted, %12s measured", step,
            value("batch_mib"), value("measured_mib")) }
        value("done") == "true" && value("status") != 0 { bad[++n_bad] = step ": " value("error") }
        END {
            printf "\n%-44s %12s %12s %12s\n", "", "tokens/s", "utilisation", "MiB"
            for (i = 1; i <= n_steps; i++)
                if (steps[i] ~ /^speed /)
                    printf "%-44s %12.0f %10.1f %% %12.1f\n", steps[i], median(steps[i], "speed"),
                        median(steps[i], "used"), median(steps[i], "memory")
            printf "\nchunkflow over one document a micro-batch, recomputed\n"
            for (i = 1; i <= n_steps; i++) {
                if (split(steps[i], word, " ") != 5 || word[4] != "chunkflow" || word[5] != "none") continue
                base = median("speed " word[2] " " word[3] " one full", "speed")
                of = word[2] " " word[3]
                if (base > 0) printf "%-44s %12.2f, predicted %s\n", of, median(steps[i], "speed") / base,
                    of in predicted ? predicted[of] : "-"
            }
            printf "\nmemory of a batch as its document grows\n"
            for (i = 1; i <= n_grown; i++) print grown[i]
            n = count["losses chunkflow"]
            if (n > 0 && n == count["losses one"]) {
                for (i = 1; i <= n; i++) {
                    a = results["losses chunkflow", "loss", i]
                    b = results["losses one", "loss", i]
                    off = b > 0 ? (a > b ? a - b : b - a) / b : 1
                    if (off > worst) worst = off
                    if (i > n - 20) { sum_a += a; sum_b += b }
                }
                off = (sum_a > sum_b ? sum_a - sum_b : sum_b - sum_a) / sum_b
                printf "\nlosses of %d steps: %.3f %% apart at most (1 %% allowed), means of the last 20 %.3f %% " \
                    "(0.2 %% allowed): %s\n", n, 100 * worst, 100 * off,
                    worst <= 0.01 && off <= 0.002 ? "ok" : "NOT OK"
            }
            for (i = 1; i <= n_bad; i++) print "    step " bad[i]
        }' "$record"
    if [ -n "$left_over" ]; then
        printf '\nThe time of this call ended before some steps. Go on with --resume %s\n' "$record"
    fi
}
summarize >"$out/summary.txt"
printf '\n' && cat "$out/summary.txt"
[ "$failures" -eq 0 ]
