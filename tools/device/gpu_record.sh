#!/bin/sh
# gpu_record.sh - the first quarter of an hour on a device of compute capability 9.0
#
#     make gpu-record                              builds what is needed, then runs this
#     sh tools/device/gpu_record.sh [options]      from the top of the tree, with what `make gpu-programs` has built
#         --out DIR          where the files go (default BUILD/gpu_record)
#         --resume RECORD    appends to this record.jsonl of an earlier call: runs what failed there or was not reached
#         --minutes M        of this call (default 9.5; 3 for a second call). 0: only the summary anew
#         --programs DIR     what `make gpu-programs` has built, here or elsewhere (default BUILD/gpu); the rival's
#                            packages may lie in DIR/python
#         --limit S          no step takes longer than this (default 120)
#         --small            tiny sizes, for a device that is emulated
#
# In this order, because the time on a device may end at any moment:
#     1  canaries of 15 seconds: a path that hangs or is wrong there is not timed; 1,000 repeats, offsets past 2^31
#     2  gradients of whole models: both paths, streamed state, trees, kept outputs, sinks
#     3  speed of attention by both paths beside PyTorch's; with and without the order point
#     4  training steps with long documents, so that every step has dependent chunks; each beside its prediction
#     5  replays that keep attention's outputs, against forwards, at 64K to 256K tokens
#     6  the executor's measured timeline beside the simulated one
#     7  memory as a document grows, and losses chunked and unchunked
#     8  all tests, each under a limit of its own
#     9  profiles, passes of the paper's stages (train_paper.sh), and Hugging Face's Qwen2 as the rival
# Every step is a process of its own with a limit, and none stops the next one. record.jsonl gets a line for each result
# as it comes (standard output, where the disk is full), log.txt has what was printed, samples.txt the times of passes.
# summary.txt is made from the record by gpu_record.awk. Sanitizers are `make test-gpu`'s. The exit status is 0 if every
# step that was run ended well. An earlier form ran on a device for ten minutes (tools/bench/results/h200.txt).

set -u
LC_ALL=C
export LC_ALL

BUILD=${BUILD:-build}
PYTHON=${PYTHON:-python3}
out=$BUILD/gpu_record
programs=$BUILD/gpu
resume=
minutes=9.5
limit=120
small=
. tools/device/gpu_record_lib.sh
read_options 'out resume minutes programs limit' "$@"
need_numbers "$minutes" "$limit"
need_files "$resume"
open_record

# Times of passes lie elsewhere until this ends, however it ends, and then in one file.
mkdir -p "$work/times"
if [ -n "$resume" ] && [ -r "$(dirname "$resume")/samples.txt" ]; then
    awk -v to="$work/" '$1 ~ /^times\/[a-z0-9.]+$/ { file = to $1; sub(/^[^ ]* /, ""); print >file }' \
        "$(dirname "$resume")/samples.txt"
fi
at_exit() {
    (cd "$work" && for file in times/*; do [ ! -e "$file" ] || sed "s|^|$file |" "$file"; done) >"$out/samples.txt"
}

# ---- what the programs print ----

# The words of a training step: step N/M loss X lr X |gradient| X N chunks X tokens/s [utilisation X %] memory X MiB ...
take_step() { # WORD...
    loss='' speed='' used='' memory=''
    while [ $# -gt 1 ]; do
        case $1 in loss) loss=$2 ;; utilisation) used=$2 ;; memory) memory=$2 ;; esac
        [ "$2" != tokens/s ] || speed=$1
        shift
    done
    emit "\"loss\": $(number "$loss"), \"tokens_per_s\": $(number "$speed"), \"utilisation\": $(number "$used"), \
\"memory_mib\": $(number "$memory")" ""
}

take_attention() { # SHAPE VARIANT ...
    of="\"shape\": \"$(quoted "$1")\", \"variant\": \"$(quoted "$2")\""
    case $3 in
        check) emit "$of, \"check\": \"$4\"" "" ;;
        error) emit "$of" "$*" ;;
        *) emit "$of, \"pass\": \"$3\", \"ms\": $(number "$4"), \"tflops\": $(number "$6")" "" ;;
    esac
}

# A result, if a line of what a step prints is one. set -f: words of the line are no patterns of file names.
take_line() { # LINE
    set -f
    # shellcheck disable=SC2086
    case $1 in
        *' ms '*' TFLOP/s' | *' check ok '* | *' check FAIL '* | [a-z0-9]*' error '*) take_attention $1 ;;
        'step '*) take_step $1 ;;
        'executor '*' measured '*' simulated '*) # N measured X ms simulated Y ms ratio Z
            set -- $1
            emit "\"batch\": $2, \"measured_ms\": $(number "$4"), \"simulated_ms\": $(number "$7")" "" ;;
        '  batch, these together'*) # ... PREDICTED MEASURED
            set -- $1
            while [ $# -gt 2 ]; do shift; done
            emit "\"batch_mib\": $(number "$1"), \"measured_mib\": $(number "$2")" "" ;;
        *' ... ok'*) take_test "${1%% ... ok*}" true "" ;;
        '    FAILED '*) take_test "$(printf '%s' "$1" | sed 's/^ *FAILED //; s/,.*//')" false "${1#    }" ;;
        'ok '*) take_test "${1#ok }" true "" ;;
        'FAIL '*) take_test "$(printf '%s' "${1%%: *}" | sed 's/FAIL //')" false "$1" ;;
        *': ok') take_test "$(printf '%s' "${1%%:*}" | sed 's/^ *//')" true "" ;;
        *': NOT OK') take_test "$(printf '%s' "${1%%:*}" | sed 's/^ *//')" false "$1" ;;
    esac
    set +f
}

# ---- what runs ----

describe_device
if [ "$minutes" != 0 ]; then
    prepare_programs
    if sees_none >"$work/said"; then
        printf 'gpu_record: %s\n' "$(cat "$work/said")" | tee -a "$log"
        [ -z "$known" ]
        exit
    fi
fi
tests=$programs/cuda_tests
bench=$programs/bench_attention
trainer=$programs/train_cuda

shapes='causal-16k-hd128 packed-8k-hd128 causal-4k-hd128 prefix-8k-over-56k-hd128 causal-16k-hd64 packed-32k-hd128'
repeats='device.a_thousand_repeats device.offsets_past_32_bits device.chunk_of_8k_over_a_long_prefix'
suites='wgmma attention blocks state executor outputs'
tiny='--layers 2 --hidden 64 --heads 4 --kv-heads 2 --ffn 160 --vocabulary 512'
wide='--layers 2 --hidden 256 --heads 4 --kv-heads 2 --ffn 320 --vocabulary 512'
checked='--chunk-size 64 --k 2 --synthetic 300,200,64,1,130'
shared='--with 0,0,1,0,0 --shared 0,150,40,0,90'
named='--model qwen2.5-1.5b'
model=$named
documents='60000 20000 9000 5000 3000 2000 700 300'
chunk=8192
steps=3
kept='65536 131072 262144'
grows='32768 262144 524288'
four='--layers 4'
runs='--layers 8 --hidden 1024 --heads 8 --kv-heads 2 --ffn 2816 --chunk-size 4096 --type bf16'
batches='60000,20000,300,4096,1000,7000,2000,1,77,12000:33000,500,41000,900,2500,64,15000,8000,120'
curve='--steps 200'
stage='--model qwen2.5-7b --layers 7'
stage_chunks='4096 8192 16384'
stage_lengths=40000,3000,1500,700
whole_lengths=700,1500,3000,6000,12000,24000
size=
if [ -n "$small" ]; then
    shapes=small-packed
    repeats=state.bad_appends
    suites='primitives'
    checked='--chunk-size 32 --k 2 --synthetic 70,40,31,1'
    shared='--with 0,0,1,0 --shared 0,37,15,0'
    four='--layers 1 --hidden 16 --heads 2 --kv-heads 1 --ffn 24 --vocabulary 48 --loss-rows 128'
    tiny=$four
    wide=$four
    model="--model qwen2.5-0.5b $four"
    documents='100 40 7'
    chunk=32
    kept=96
    grows='64 128'
    runs='--type fp32 --layers 2 --hidden 32 --heads 4 --kv-heads 2 --ffn 48 --chunk-size 16'
    batches='56,5,16,3,1,0,33:40,7,90,2'
    curve='--steps 4'
    stage=$model
    stage_chunks='32 64'
    stage_lengths=100,40,20
    whole_lengths=16,32,48,64
    size=--small
fi
list=$(printf '%s' "$documents" | tr ' ' ,)
printf '%s\n' $documents >"$work/long.lengths"
printf '%s\n' 200 31 7 90 64 12 150 48 >"$work/curve.lengths"

# ---- 1: canaries ----

run_step 1 "primitives" 15 "$tests" primitives.
asked=
for variant in mma wgmma mma+deterministic wgmma+deterministic; do
    # shellcheck disable=SC2086
    run_step 1 "check $variant" 15 "$bench" --check $size --variant "$variant"
    failed "check $variant" || asked="$asked --variant $variant"
done
paths=
for path in mma wgmma; do failed "check $path" || paths="$paths $path"; done
for test in $repeats; do
    run_step 1 "$test mma" 15 "$tests" "$test"
    failed "check wgmma" || run_step 1 "$test wgmma" 15 env CHUNKFLOW_TEST_WGMMA=1 "$tests" "$test"
done
best=${paths##* }
best=${best:-unfused}

# ---- 2: gradients ----

# shellcheck disable=SC2086
gradients() { # NAME OPTIONS...
    name="gradients $1"
    shift
    run_step 2 "$name" 20 "$trainer" --check "$@"
}
# shellcheck disable=SC2086
{
    gradients fp32 --type fp32 $tiny $checked
    for path in $paths; do
        gradients "bf16 $path" --type bf16 --attention "$path" $wide $checked
        gradients "streamed $path" --type bf16 --attention "$path" $wide $checked --stream 65536
        gradients "trees $path" --type bf16 --attention "$path" $wide $checked $shared
        gradients "outputs $path" --type bf16 --attention "$path" $wide $checked --outputs gpu
        gradients "outputs in host memory $path" --type bf16 --attention "$path" $wide $checked --outputs host
        gradients "sinks $path" --type bf16 --attention "$path" $wide $checked --sinks
    done
}

# ---- 3: attention ----

for shape in $shapes; do
    # shellcheck disable=SC2086
    run_step 3 "speed $shape by$paths" 40 env "BENCH_ATTENTION=$bench" sh tools/bench/bench_attention.sh $size --seconds 0.3 \
        ${asked:---variant unfused} "$shape"
done
for round in 1 2 3 4; do
    [ -x "$programs/bench_free" ] && [ "$best" = wgmma ] || break
    for program in bench_attention bench_free; do
        run_step 3 "order point: $program $round" 15 "$programs/$program" --seconds 0.3 --variant wgmma causal-16k-hd128
    done
done

# ---- 4: training ----

# Prediction and measurement of the same options: tokens/s by the models of time, once a step the optimizer.
# shellcheck disable=SC2086
predict() { # OPTIONS OF plan...
    once=$("$programs/chunkflow" time $named --gpu h200 --chunk-size $chunk 2>/dev/null |
        awk '/^once a step/ { print $4 / 1000 }')
    predicted=$("$programs/chunkflow" plan $named --gpu h200 --loss chunked --schedule paper --summary "$@" \
        "$work/long.lengths" 2>/dev/null | awk -v once="$once" '
        /^input/ { gsub(/,/, ""); tokens = $(NF - 1) }
        /^makespan/ { seconds = $2 }
        END { if (tokens > 0 && seconds > 0 && once > 0) printf "%.0f", tokens / (seconds + once) }')
}

# shellcheck disable=SC2086
train() { # NAME PATH CHUNKSIZE OPTIONS OF BOTH ...
    step="train $1, $2"
    path=$2
    cut=$3
    shift 3
    plan_cut=$cut
    [ "$cut" != 0 ] || plan_cut=${documents%% *}
    [ "$minutes" = 0 ] || has_ended "$step" || {
        part=4
        predict --chunk-size $plan_cut "$@"
        emit "\"predicted_tokens_per_s\": ${predicted:-null}" ""
    }
    run_step 4 "$step" 45 "$trainer" $model --synthetic "$list" --steps $steps --peak-tflops 989 --attention "$path" \
        --chunk-size "$cut" "$@"
}
[ -n "$small" ] || for path in $paths; do train chunks "$path" $chunk --k 1; done
train "outputs on the GPU" "$best" $chunk --k 1 --outputs gpu
train "outputs in host memory" "$best" $chunk --k 1 --outputs host
train "full recomputation" "$best" $chunk --k 1 --recompute full
train "whole" "$best" 0 --k 1
train "whole, full recomputation" "$best" 0 --k 1 --recompute full
[ -n "$small" ] || train "K 4" "$best" $chunk --k 4

# ---- 5: a replay that keeps attention's outputs ----

# shellcheck disable=SC2086
for length in $kept; do
    for where in none gpu host; do
        ! has_ended "replay $length $where" || continue
        option="--outputs $where"
        [ "$where" != none ] || option=
        run_step 5 "replay $length $where" 40 "$trainer" $model $four --headless --chunk-size $chunk --k 1 --steps 2 \
            --attention "$best" --synthetic "$length" --times "$work/times/replay.$length.$where" $option
        [ ! -s "$work/times/replay.$length.$where" ] || emit "\"replay_of_forward\": $(awk '
            $1 == "F" { n[$2, $3]++; forward[$2, $3] += $4 }
            $1 == "R" { m[$2, $3]++; again[$2, $3] += $4 }
            END {
                for (k in m) if (n[k]) { r += again[k] / m[k]; f += forward[k] / n[k] }
                if (f > 0) printf "%.4f", r / f; else printf "null"
            }' "$work/times/replay.$length.$where")" ""
    done
done

# ---- 6: the executor ----

[ -z "$small" ] || paths=unfused
for path in $paths; do
    # shellcheck disable=SC2086
    run_step 6 "executor $path" 40 sh tools/bench/bench_executor.sh "$programs" "$work" "$batches" --k 2 \
        --attention "$path" $runs
done

# ---- 7: memory and losses ----

# shellcheck disable=SC2086
{
    for length in $grows; do
        run_step 7 "memory $length" 60 "$trainer" $model $four --chunk-size $chunk --k 1 --stream $((chunk * 4096)) \
            --attention "$best" --synthetic "$length" --steps 1 --memory-table
    done
    run_step 7 "losses chunked" 20 "$trainer" $tiny --seed 7 $curve --lengths "$work/curve.lengths" --batch 4 \
        --chunk-size 32
    run_step 7 "losses whole" 20 "$trainer" $tiny --seed 7 $curve --lengths "$work/curve.lengths" --batch 4 \
        --chunk-size 0 --max-slices 1
}

# ---- 8: tests ----

for suite in $suites; do run_tests 8 "tests $suite" 15 60 "$suite." CHUNKFLOW_TEST=1; done
[ "$best" != wgmma ] || [ -n "$small" ] || run_tests 8 "tests attention wgmma" 15 60 attention. CHUNKFLOW_TEST_WGMMA=1

# ---- 9: profiles, slices, the rival ----

if has ncu; then
    for pass in forward backward; do
        # shellcheck disable=SC2086
        run_step 9 "profile $pass" 30 ncu --clock-control none --set full --kernel-name "regex:attention_$pass|hopper" \
            --launch-skip 1 --launch-count 1 --log-file "$out/profile_$pass.txt" "$bench" $size --variant "$best" \
            --seconds 0 "${shapes%% *}"
    done
else skip_step 9 "profiles" "there is no ncu"
fi

# The same slice of layers with and without the head, for the pipeline that train_paper.sh simulates.
# shellcheck disable=SC2086
slice() { # middle|last FILE OPTIONS...
    headless=--headless
    [ "$1" != last ] || headless=
    file=$work/times/$1.$2
    shift 2
    run_step 9 "times ${file##*/}" 30 "$trainer" $stage $headless --times "$file" --steps 2 --attention "$best" "$@"
}
for place in middle last; do
    for rows in $stage_chunks; do
        slice "$place" "chunked.$rows" --chunk-size "$rows" --k 1 --synthetic "$stage_lengths"
    done
    slice "$place" whole --recompute full --chunk-size 0 --max-slices 1 --synthetic "$whole_lengths"
done

PYTHONPATH=$programs/python${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH
if [ "$minutes" = 0 ]; then :
elif timeout 60 "$PYTHON" -c 'import torch, transformers, cffi' >"$work/imports" 2>&1 </dev/null; then
    for option in '' --checkpointing; do
        # shellcheck disable=SC2086
        run_step 9 "rival${option:+ with recomputation}" 60 env "CHUNKFLOW_BUILD=$programs" "$PYTHON" \
            tools/bench/bench_train_hf.py $model --lengths "$work/long.lengths" --steps $steps --peak-tflops 989 $option
    done
else skip_step 9 "rival" "$PYTHON: $(tail -n 1 "$work/imports")"
fi

# ---- the summary ----

CHUNKFLOW=$programs/chunkflow sh tools/device/train_paper.sh "$work/times" >"$work/paper.csv" 2>/dev/null ||
    echo "the paper's setting: not simulated, for passes are missing" >"$work/paper.csv"
{
    awk -v line="$(grep -n 'has_hopper_code())' chunkflow_cuda.cu | cut -d : -f 1)" -v shapes="$shapes" \
        -v repeats="$repeats" -f tools/device/gpu_record.awk "$work/record.all"
    printf '\n'
    cat "$work/paper.csv"
    [ -z "$left_over" ] ||
        printf '\nNot reached or cut short:%s. Go on with --minutes 3 --resume %s\n' "$left_over" "$record"
} | tee "$out/summary.txt"
[ "$failures" -eq 0 ]
