#!/bin/sh
# gpu_first.sh - the first minutes on a device of compute capability 9.0: what has never run there, in one call
#
#     sh tools/device/gpu_first.sh [options]      from the top of the tree, with what `make gpu-programs` has built
#         --out DIR          where the files go (default BUILD/gpu_first)
#         --resume RECORD    goes on where this record.jsonl of an earlier call ended
#         --minutes M        of this call (default 8)
#         --programs DIR     what `make gpu-programs` has built (default BUILD/gpu); a second bench_attention without
#                            the order point may lie there as bench_free
#         --limit S          no step takes longer than this
#
# Canaries come first: a kernel that hangs or is wrong costs its own limit and is not timed. Then, in the order of what
# one wants to know: is path 3 right in 1,000 repeats and past 2^31 elements; how fast is attention by both paths beside
# PyTorch; training steps of a real shape with long documents, by both paths, with recomputation and whole; the
# executor's measured time beside the simulated one; the suites; memory as a document grows; losses; profiles; the rival.
# Every step is a process of its own with a limit. record.jsonl gets a line for each result as it comes, log.txt is what
# was printed. What gpu_record.sh and gpu_record_train.sh leave out of a quarter of an hour is in them.

set -u
LC_ALL=C
export LC_ALL

BUILD=${BUILD:-build}
PYTHON=${PYTHON:-python3}
out=$BUILD/gpu_first
programs=$BUILD/gpu
resume=
minutes=8
limit=120
small=
needed='cuda_tests --list
bench_attention --list
executor_cuda --help
train_cuda --help'
targets=gpu-programs

self=gpu_first
. tools/device/gpu_record_lib.sh
read_options 'out resume minutes programs limit' "$@"
need_numbers "$minutes" "$limit"
need_files "$resume"
open_record

# Lines of attention's benchmark and of tests are results; of all other steps the log has what they print.
take_line() { # LINE
    set -f
    # shellcheck disable=SC2086
    case $1 in
        *' ms '*' TFLOP/s')
            set -- $1
            emit "\"shape\": \"$1\", \"variant\": \"$2\", \"pass\": \"$3\", \"ms\": $(number "$4"), \"tflops\": $(number "$6")" "" ;;
        *' ... ok'*) take_test "${1%% ... ok*}" true "" ;;
        '    FAILED '*) take_test "$(printf '%s' "$1" | sed 's/^ *FAILED //; s/,.*//')" false "${1#    }" ;;
        'step '* | 'executor '* | *': ok' | *': NOT OK' | *' check '* | *' error '* | largest* | *' MiB'*)
            emit "\"said\": \"$(quoted "$1")\"" "" ;;
    esac
    set +f
}

sees_none() { timeout 20 "$programs/cuda_tests" --list 2>/dev/null | grep '^cuda: no device'; }

describe_device
prepare_programs
tests=$programs/cuda_tests
bench=$programs/bench_attention
trainer=$programs/train_cuda
failed() { grep -F "\"step\": \"$1\", \"done\": true" "$record" | grep -qvF '"status": 0'; }

# ---- canaries ----

run_step 1 "primitives" 15 "$tests" primitives.
variants=
for variant in mma wgmma mma+deterministic wgmma+deterministic; do
    run_step 1 "check $variant" 15 "$bench" --check --variant "$variant"
    failed "check $variant" || variants="$variants --variant $variant"
done
paths=mma
failed "check wgmma" || paths='mma wgmma'

twice() { # TEST: by each path
    run_step 1 "$1 mma" 25 "$tests" "$1"
    [ "$paths" = mma ] || run_step 1 "$1 wgmma" 25 env CHUNKFLOW_TEST_WGMMA=1 "$tests" "$1"
}
twice device.a_thousand_repeats
twice device.offsets_past_32_bits
twice device.chunk_of_8k_over_a_long_prefix

# ---- gradients of a whole model ----

tiny='--layers 2 --hidden 64 --heads 4 --kv-heads 2 --ffn 160 --vocabulary 512'
wide='--layers 2 --hidden 256 --heads 4 --kv-heads 2 --ffn 320 --vocabulary 512'
checked='--chunk-size 64 --k 2 --synthetic 300,20,64,1,130'
# shellcheck disable=SC2086
{
    run_step 2 "gradients fp32" 20 "$trainer" --check --type fp32 $tiny $checked
    run_step 2 "gradients bf16" 20 "$trainer" --check --type bf16 $tiny $checked
    run_step 2 "gradients bf16 wgmma" 20 "$trainer" --check --type bf16 $wide --attention wgmma $checked
    run_step 2 "gradients bf16 streamed" 20 "$trainer" --check --type bf16 $tiny --stream 65536 $checked
}

# ---- speed of attention, beside PyTorch's ----

for shape in causal-16k-hd128 packed-8k-hd128 causal-4k-hd128 prefix-8k-over-56k-hd128 causal-16k-hd64 \
    packed-32k-hd128; do
    # shellcheck disable=SC2086
    run_step 3 "speed $shape" 40 env "BENCH_ATTENTION=$bench" sh tools/bench/bench_attention.sh --seconds 0.3 \
        ${variants:---variant unfused} "$shape"
done
if [ -x "$programs/bench_free" ] && [ "$paths" != mma ]; then
    for round in 1 2; do
        for program in bench_attention bench_free; do
            run_step 3 "order point: $program $round" 15 "$programs/$program" --seconds 0.3 --variant wgmma \
                causal-16k-hd128
        done
    done
fi

# ---- training ----

long='--synthetic 60000,20000,9000,5000,3000,2000,700,300'
train() { # NAME OPTIONS...
    name="train $1"
    shift
    # shellcheck disable=SC2086
    run_step 4 "$name" 45 "$trainer" --model qwen2.5-1.5b $long --steps 4 --peak-tflops 989 "$@"
}
train "1.5b mma" --chunk-size 8192 --attention mma
failed "check wgmma" || train "1.5b wgmma" --chunk-size 8192 --attention wgmma
train "1.5b wgmma full recomputation" --chunk-size 8192 --attention "${paths##* }" --recompute full
train "1.5b whole" --chunk-size 0 --attention "${paths##* }"
train "1.5b whole full recomputation" --chunk-size 0 --attention "${paths##* }" --recompute full
train "1.5b one document at a time" --chunk-size 0 --max-slices 1 --attention "${paths##* }"
train "1.5b chunks of 16K" --chunk-size 16384 --attention "${paths##* }"
train "1.5b K 4" --chunk-size 8192 --k 4 --attention "${paths##* }"

# ---- the executor: measured beside simulated ----

model='--layers 8 --hidden 1024 --heads 8 --kv-heads 2 --ffn 2816 --chunk-size 4096 --type bf16'
batch='60000,20000,300,4096,1000,7000,2000,1,77,12000'
other='33000,500,41000,900,2500,64,15000,8000,120'
for path in $paths; do
    # shellcheck disable=SC2086
    run_step 5 "executor $path" 40 sh tools/bench/bench_executor.sh "$programs" "$work" "$batch:$other" --k 2 \
        --attention "$path" $model
done

# ---- suites ----

for suite in wgmma. attention. blocks. state. executor. outputs.; do run_step 6 "tests $suite" 25 "$tests" "$suite"; done
[ "$paths" = mma ] || run_step 6 "tests attention. wgmma" 25 env CHUNKFLOW_TEST_WGMMA=1 "$tests" attention.

# ---- the rival ----

printf '%s\n' 60000 20000 9000 5000 3000 2000 700 300 >"$work/long.lengths"
for option in '' --checkpointing; do
    # shellcheck disable=SC2086
    run_step 8 "rival $option" 60 env "CHUNKFLOW_BUILD=$programs" "$PYTHON" tools/bench/bench_train_hf.py \
        --model qwen2.5-1.5b --lengths "$work/long.lengths" --steps 4 --peak-tflops 989 $option
done

# ---- memory and losses ----

for length in 32768 262144 524288; do
    run_step 7 "memory $length" 45 "$trainer" --model qwen2.5-1.5b --layers 4 --chunk-size 8192 --k 1 \
        --stream $((8192 * 4096)) --attention "${paths##* }" --synthetic "$length" --steps 1 --memory-table
done
printf '%s\n' 200 31 7 90 64 12 150 48 >"$work/curves.lengths"
for way in '--chunk-size 32' '--chunk-size 0 --max-slices 1'; do
    # shellcheck disable=SC2086
    run_step 7 "losses $way" 20 "$trainer" $tiny --seed 7 $way --lengths "$work/curves.lengths" --batch 4 --steps 200
done

# ---- profiles ----

if has ncu; then
    for pass in forward backward; do
        run_step 8 "profile $pass" 30 ncu --clock-control none --set full --kernel-name "regex:attention_$pass|hopper" \
            --launch-skip 1 --launch-count 1 --log-file "$out/profile_$pass.txt" "$bench" --variant "${paths##* }" \
            --seconds 0 causal-16k-hd128
    done
fi
printf '\ngpu_first: %s steps failed%s\n' "$failures" "${left_over:+; left for the next call:$left_over}"
grep -o '"step": "[^"]*", "done": true, "seconds": [0-9]*, "status": [0-9]*' "$record" |
    sed 's/"step": //; s/, "done": true//'
[ "$failures" -eq 0 ]
