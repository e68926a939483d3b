#!/bin/sh
# gpu_record_train.sh - what chunks are worth in training, on one device: tokens/s, memory, losses, beside a rival
#
#     make gpu-record-train                            builds what is needed, then runs this
#     sh tools/device/gpu_record_train.sh [options]           from the top of the tree
#         --out DIR          where the files go (default BUILD/gpu_record_train)
#         --resume RECORD    goes on where this record.jsonl of an earlier call ended
#         --minutes M        of this call; what is left over is for the next one (default 8)
#         --programs DIR     what `make gpu-programs` has built, here or elsewhere (default BUILD/gpu); the rival's
#                            packages may lie in DIR/python
#         --lengths FILE     its first 32 lengths in place of those drawn as a service's requests
#         --small            tiny sizes, for a device that is emulated
#
# In this order, because the time on a device may end at any moment:
#     1  are the gradients right?
#     2  speed of the same batches in three ways, each without and with recomputation: one document a micro-batch
#        (one), packed up to the longest document (packed), and chunkflow; chunkflow also with the other path of
#        attention, and on both with gradients that have the same bits in every run; and the rival where PyTorch is
#     3  memory, as the longest document grows at one ChunkSize and the state streams
#     4  losses of 200 steps, chunked and unchunked
#     5  passes of a stage of the paper's pipeline, from which its setting is simulated (train_paper.sh)
# What was predicted (train_predictions.csv) was written down before anything had run. train_judge.awk holds the record
# against it and against what was promised: judgements.csv, which summary.txt shows, says met, not met or not measured.
# record.jsonl, log.txt and summary.txt are as gpu_record.sh's; samples.txt has the lengths of batches and the times of
# passes, a line each after the name of its list. Not yet run on a device.

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
needed='train_cuda --help'
targets=gpu-programs

self=gpu_record_train
. tools/device/gpu_record_lib.sh
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

. tools/device/train_shapes.sh
grows='32768 262144 524288'
steps=6
curve_steps=200
curve_lengths='200 31 7 90 64 12 150 48'
checked=300,20,64,1,130
tiny='--layers 2 --hidden 64 --heads 4 --kv-heads 2 --ffn 160 --vocabulary 512'
shape=
if [ -n "$small" ]; then
    models=qwen2.5-0.5b
    chunk_size=32
    documents=2
    service_models=
    slice_model=qwen2.5-0.5b
    slice_chunks='32:16 64:8'
    slice_lengths=100,40,20
    whole_lengths=16,32,48,64
    longest=64
    grows='64 128'
    steps=2
    curve_steps=4
    curve_lengths='70 31 7 48 64 12'
    checked=150,20,64,1
    tiny='--layers 1 --hidden 16 --heads 2 --kv-heads 1 --ffn 24 --vocabulary 48'
    shape="$tiny --loss-rows 128"
fi
for list in chat service; do
    draw_lengths "$programs/chunkflow" "$list" >"$work/$list.lengths" ||
        usage "chunkflow in $programs does not start"
done
# shellcheck disable=SC2086
printf '%s\n' $curve_lengths >"$work/curves.lengths"
cp tools/device/train_predictions.csv "$out/predictions.csv" || exit 2
if [ -n "$lengths" ]; then # predicted now, before anything has run
    head -n "$requests" "$lengths" >"$work/service.lengths"
    grep -v ' service ' tools/device/train_predictions.csv >"$out/predictions.csv"
    CHUNKFLOW=$programs/chunkflow sh tools/device/train_predictions.sh service "$work/service.lengths" \
        >"$work/service.csv" || usage "no predictions for $lengths"
    sed 1d "$work/service.csv" >>"$out/predictions.csv"
fi

# Lengths and times lie elsewhere until this ends, however it ends, and then in one file. Times of steps that do not run
# again come from the record before.
mkdir -p "$work/times"
if [ -n "$resume" ] && [ -r "$(dirname "$resume")/samples.txt" ]; then
    awk -v to="$work/" '$1 ~ /^times\/[a-z0-9.]+$/ { file = to $1; sub(/^[^ ]* /, ""); print >file }' \
        "$(dirname "$resume")/samples.txt"
fi
at_exit() {
    (cd "$work" && for file in *.lengths times/*; do
        [ ! -e "$file" ] || sed "s|^|$file |" "$file"
    done) >"$out/samples.txt"
}
way_of() { # LIST one|packed|chunkflow RECOMPUTE
    case $2 in
        one) printf -- '--chunk-size 0 --max-slices 1' ;;
        packed) printf -- '--chunk-size 0' ;;
        chunkflow) chunks_of "$1" "$3" ;;
    esac
}

# The same documents in every way, for the seed is the same: all of the list in each step.
# shellcheck disable=SC2046,SC2086
speed() { # MODEL LIST WAY RECOMPUTE [VARIANT OPTIONS...]
    of="$1 $2 $3${5:+-$5} $4"
    set -- "$1" "$2" "$3" "$4" "$of" "${6:-}" "${7:-}" "${8:-}"
    run_step 2 "speed $5" 120 "$trainer" $(options_of "$1") $shape $(way_of "$2" "$3" "$4") --recompute "$4" \
        --lengths "$work/$2.lengths" --batch "$(grep -c . "$work/$2.lengths")" --steps "$steps" --peak-tflops 989 \
        $6 $7 $8
}

# The two fused paths, and each without atomic sums. By default the trainer takes wgmma where that can run.
both_paths() { # MODEL LIST
    speed "$1" "$2" chunkflow none exact --exact
    if [ "$capability" = 90 ]; then
        speed "$1" "$2" chunkflow none mma --attention mma
        speed "$1" "$2" chunkflow none mma-exact --attention mma --exact
    else
        for variant in mma mma-exact; do
            skip_step 2 "speed $1 $2 chunkflow-$variant none" "mma is the default for compute capability $capability"
        done
    fi
}

# The rival: its packages lie beside the programs (programs/python), or Python has them.
rival_says=
PYTHONPATH=$programs/python${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH
rival() { # MODEL LIST
    for compiled in '' --compile --liger; do
        name="speed $1 $2 rival${compiled:+-${compiled#--}} none"
        if [ -n "$small" ]; then skip_step 2 "$name" "not where a device is emulated"
        elif [ -n "$rival_says" ]; then skip_step 2 "$name" "$rival_says"
        else
            # shellcheck disable=SC2046,SC2086
            run_step 2 "$name" 180 env "CHUNKFLOW_BUILD=$library" "$PYTHON" tools/bench/bench_train_hf.py \
                $(options_of "$1") --lengths "$work/$2.lengths" --steps "$steps" --peak-tflops 989 $compiled
        fi
    done
}
library=$BUILD
[ ! -e "$programs/libchunkflow.so" ] || library=$programs
"$PYTHON" -c 'import torch, transformers, cffi' >"$work/imports" 2>&1 </dev/null ||
    rival_says="$PYTHON: $(tail -n 1 "$work/imports")"
[ -e "$library/libchunkflow.so" ] || rival_says="${rival_says:-no libchunkflow.so in $programs or $BUILD}"

{
    printf '\nPredicted before anything has run (tools/device/train_predictions.sh):\n'
    cat "$out/predictions.csv"
} | tee -a "$log"

# shellcheck disable=SC2086
for type in fp32 bf16; do
    run_step 1 "gradients $type" 120 "$trainer" --check --type $type $tiny --chunk-size 64 --k 2 \
        --synthetic $checked
done

for model in $models; do
    for list in $(lists_of "$model"); do
        for way in $ways; do
            for recompute in $recomputes; do speed "$model" "$list" "$way" "$recompute"; done
        done
        both_paths "$model" "$list"
        rival "$model" "$list"
    done
done

# shellcheck disable=SC2046,SC2086
for length in $grows; do
    run_step 3 "memory $length" 180 "$trainer" $(options_of "${models%% *}") $shape --chunk-size "$chunk_size" --k 1 \
        --stream $((chunk_size * 4096)) --synthetic "$length" --steps 1 --memory-table
done

whole_or_cut() { # one | chunkflow: short documents, so short chunks
    if [ "$1" = one ]; then way_of chat one none; else printf -- '--chunk-size 32'; fi
}

# shellcheck disable=SC2046,SC2086
for way in chunkflow one; do
    run_step 4 "losses $way" 200 "$trainer" $tiny --seed 7 $(whole_or_cut $way) \
        --lengths "$work/curves.lengths" --batch 4 --steps "$curve_steps"
done

# The same slice of layers with and without the head.
slice() { # middle|last FILE RECOMPUTE OPTIONS...
    headless=
    [ "$1" = last ] || headless=--headless
    file=$work/times/$1.$2
    recompute=$3
    shift 3
    # shellcheck disable=SC2046,SC2086
    run_step 5 "times ${file##*/}" 120 "$trainer" $(options_of "$slice_model") $shape $headless \
        --recompute "$recompute" --times "$file" --steps 4 "$@"
}

for stage in middle last; do
    for chunk in $slice_chunks; do
        slice "$stage" "chunked.${chunk%:*}" none --chunk-size "${chunk%:*}" --k 1 --synthetic "$slice_lengths"
    done
    slice "$stage" whole full --chunk-size 0 --max-slices 1 --synthetic "$whole_lengths"
done

# ---- the summary ----

# Each step's last speed and memory, then what that is worth: the table of judgements.
summarize() {
    awk '
        function value(name,  text) {
            if (!match($0, "\"" name "\": (\"([^\"\\\\]|\\\\.)*\"|[^,}]*)")) return ""
            text = substr($0, RSTART + length(name) + 4, RLENGTH - length(name) - 4)
            gsub(/^"|"$/, "", text)
            return text
        }
        NR == 1 { printf "%s, driver %s, commit %s\n\n", value("device"), value("driver"), value("commit") }
        { step = value("step") }
        value("tokens_per_s") != "" && !(step in line) { steps[++chunks_per_rank] = step }
        value("tokens_per_s") != "" {
            line[step] = sprintf("%-44s %12s %10s %% %12s", step, value("tokens_per_s"), value("utilisation"),
                value("memory_mib"))
        }
        value("skipped") != "" { skipped[++n_skipped] = step ": " value("skipped") }
        value("done") == "true" && value("status") != 0 { bad[++n_bad] = step ": " value("error") }
        END {
            printf "%-44s %12s %12s %12s\n", "last step of", "tokens/s", "utilisation", "MiB"
            for (i = 1; i <= chunks_per_rank; i++) print line[steps[i]]
            for (i = 1; i <= n_bad; i++) print "    step " bad[i]
            for (i = 1; i <= n_skipped; i++) print "    left out: " skipped[i]
        }' "$record"
    printf '\n'
    if [ -s "$out/paper.csv" ]; then cat "$out/paper.csv"
    else printf 'the setting of the paper (7B, 256K, PP 4; 4.53): not simulated, for passes are missing\n'; fi
    printf '\n'
    awk -F, '{ printf "%-66s %12s  %-20s %s\n", $1, $2, $3, $4 }' "$out/judgements.csv"
    if [ -n "$left_over" ]; then
        printf '\nThe time of this call ended before some steps. Go on with --resume %s\n' "$record"
    fi
}
awk -f tools/device/train_judge.awk -v grows="$grows" -v curve_steps="$curve_steps" "$out/predictions.csv" "$record" \
    >"$out/judgements.csv"
CHUNKFLOW=$programs/chunkflow sh tools/device/train_paper.sh "$work/times" >"$out/paper.csv" 2>>"$log" ||
    : >"$out/paper.csv"
summarize >"$out/summary.txt"
printf '\n' && cat "$out/summary.txt"
[ "$failures" -eq 0 ]
