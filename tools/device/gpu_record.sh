#!/bin/sh
# gpu_record.sh - the first minutes on a device: one command that tests, measures and compares, and leaves a few files
#
#     make gpu-record                              builds what is needed, then runs this
#     sh tools/device/gpu_record.sh [options]     from the top of the tree, with what `make gpu-programs` has built
#         --out DIR          where the files go (default BUILD/gpu_record)
#         --resume RECORD    goes on where this record.jsonl of an earlier call ended
#         --minutes M        of this call; what is left over is for the next one (default 8). 0: only the summary anew
#         --sweep M          of these, at most for trying variants of kernels (default 3)
#         --programs DIR     what `make gpu-programs` has built, here or elsewhere (default BUILD/gpu)
#         --limit S          no step takes longer than this
#         --small            tiny sizes, for a device that is emulated
#
# In this order, because the time on a device may end at any moment:
#     1  the primitives of the kernels against known bits
#     2  all tests, without a sanitizer
#     3  attention: is each variant right, then how fast is it, beside PyTorch's flash and cuDNN backends in turn with
#        them; then a sweep over variants (tiles, stages, sections, parts)
#     4  the executor: a measured timeline beside the simulated one of the same schedule
#     5  costs fitted to one batch predict another one
#     6  profiles, where there is a profiler
#     7  memcheck and racecheck, where there is a sanitizer
# Every step has a limit of its own, and none stops the next one. Three calls of 8 minutes are enough for everything.
#
# record.jsonl gets a line for each result as it comes, and one when a step ends; summary.txt is made from it, log.txt
# is what was printed. The exit status is 0 if every step that was run ended well. Not yet run on a device.

set -u
LC_ALL=C
export LC_ALL

BUILD=${BUILD:-build}
out=$BUILD/gpu_record
programs=$BUILD/gpu
resume=
minutes=8
sweep=3
limit=3600
small=
# The command runs anywhere: it alone is of no use.
needed='cuda_tests --list
bench_attention --list
executor_cuda --help'
targets=gpu-programs

self=gpu_record
. tools/device/gpu_record_lib.sh
read_options 'out resume minutes sweep programs limit' "$@"
need_numbers "$minutes" "$sweep" "$limit"
need_files "$resume"
open_record

# ---- what the programs print ----

# What a line of a benchmark says; a shape and a variant come first.
take_attention() { # SHAPE VARIANT ...
    said=$*
    of="\"shape\": \"$(quoted "$1")\", \"variant\": \"$(quoted "$2")\""
    case $3 in
        forward | backward) emit "$of, \"pass\": \"$3\", \"ms\": $(number "$4"), \"tflops\": $(number "$6")" "" ;;
        check)
            if [ "$4" = ok ]; then emit "$of, \"check\": \"ok\"" ""
            else emit "$of, \"check\": \"FAIL\"" "$said"; fi ;;
        error) emit "$of" "${said#* error }" ;;
    esac
}

take_batch() { # executor N measured X ms simulated Y ms ratio Z
    emit "\"batch\": $(number "$2"), \"measured_ms\": $(number "$4"), \"simulated_ms\": $(number "$7"), \
\"ratio\": $(number "${10}")" ""
}

take_fit() { # PASS SAMPLES CONSTANT PER-ROW PER-PAIR MEAN% ABSOLUTE% ...
    emit "\"pass\": \"$1\", \"samples\": $(number "$2"), \"constant\": $(number "$3"), \"per_token\": $(number "$4"), \
\"per_pair\": $(number "$5"), \"mean_absolute_percent\": $(number "${7%\%}")" ""
}

# A result, if a line of what a step prints is one. set -f: words of the line are no patterns of file names.
take_line() { # LINE
    rest=${1#* }
    set -f
    # shellcheck disable=SC2086
    case $1 in
        *' ms '*' TFLOP/s' | *' '*' check ok '* | *' '*' check FAIL '*) take_attention $1 ;;
        [a-z0-9]*' '*' error '*) take_attention $1 ;;
        *' ... ok'*) take_test "${1%% ... ok*}" true "" ;;
        '    FAILED '*) take_test "$(printf '%s' "$1" | sed 's/^ *FAILED //; s/,.*//')" false "${1#    }" ;;
        'ok '*) take_test "$rest" true "" ;;
        'FAIL '*) take_test "${rest%%: *}" false "$rest" ;;
        'skip '*) emit "\"skipped\": \"$(quoted "$rest")\"" "" ;;
        'executor '*' measured '*' simulated '*) take_batch $1 ;;
        [FRBIW]' '*%*%*) take_fit $1 ;;
    esac
    set +f
}

# ---- what runs ----

# A program for a newer driver than the one that is here starts, and sees no device.
sees_none() { timeout 20 "$programs/cuda_tests" --list 2>/dev/null | grep '^cuda: no device'; }

describe_device
if [ "$minutes" != 0 ]; then
    prepare_programs
    if sees_none >"$work/said"; then
        printf 'gpu_record: %s\n' "$(cat "$work/said")" | tee -a "$log"
        [ -z "$known" ]
        exit
    fi
fi

# What each part runs. The first variants are timed beside PyTorch, all of them in the sweep.
bench=$programs/bench_attention
first='mma wgmma mma+deterministic wgmma+deterministic'
variants='mma wgmma mma+deterministic wgmma+deterministic mma+arch=86 mma+cache=16777216 mma+cache=67108864
    wgmma+cache=16777216 wgmma+cache=67108864 mma+processors=66 wgmma+processors=66 mma+processors=264
    wgmma+processors=264'
shapes='causal-4k-hd128 causal-16k-hd128 packed-32k-hd128 causal-16k-hd64 packed-8k-hd128 prefix-8k-over-56k-hd128
    causal-8k-one-key-head packed-8k-one-key-head'
suites='attention. wgmma. state. blocks. executor. outputs. device.'
fused=attention.
model='--layers 8 --hidden 1024 --heads 8 --kv-heads 2 --ffn 2816 --chunk-size 4096'
one_batch='60000,20000,300,4096,1000,7000,2000,1,77,12000'
other_batch='33000,500,41000,900,2500,64,15000,8000,120'
stages=4
size=
if [ -n "$small" ]; then
    first='mma wgmma'
    variants='mma wgmma mma+arch=86'
    stages=2
    shapes='small-packed'
    suites='state.bad_appends executor.one_chunk'
    fused=attention.padded_slices
    model='--type fp32 --layers 2 --hidden 32 --heads 4 --kv-heads 2 --ffn 48 --chunk-size 16'
    one_batch='56,5,16,3,1,0,33'
    other_batch='40,7,90,2'
    size=--small
    WATCHED='state.bad_appends'
    export WATCHED
fi
if [ -n "$capability" ] && [ "$capability" != 90 ]; then # none of it but a refusal to be had there
    first='mma mma+deterministic'
    variants=$(printf '%s' "$variants" | tr -s ' \n' '\n\n' | grep -v wgmma)
fi

# ---- parts 1 and 2: right? ----

run_step 1 "primitives" 20 "$programs/cuda_tests" primitives.
for suite in $suites; do run_step 2 "tests $suite" 120 "$programs/cuda_tests" "$suite"; done
if [ -z "$capability" ] || [ "$capability" = 90 ]; then # what is asked of the one fused path, of the other
    run_step 2 "tests $fused with wgmma" 180 env CHUNKFLOW_TEST_WGMMA=1 "$programs/cuda_tests" "$fused"
fi
if [ -z "$small" ]; then
    run_step 2 "tests of the executor's example" 180 env "EXECUTOR_CUDA=$programs/executor_cuda" \
        "CHUNKFLOW=$programs/chunkflow" sh tests/cuda/executor_check.sh device
fi

# ---- part 3: attention ----

# shellcheck disable=SC2086
for variant in $variants; do run_step 3 "check $variant" 20 "$bench" --check $size --variant "$variant"; done
# What is wrong, or hangs, is not timed: it would take the others' time, and PyTorch's. Where nothing is right, the
# plain path is what PyTorch runs beside.
is_wrong() { grep -F "\"step\": \"check $1\", \"done\": true" "$record" | grep -qvF '"status": 0'; }
asked=
for variant in $first; do is_wrong "$variant" || asked="$asked --variant $variant"; done
# shellcheck disable=SC2086
run_step 3 "speed" 300 env "BENCH_ATTENTION=$bench" sh tools/bench/bench_attention.sh $size \
    ${asked:---variant unfused}

# Shape by shape all variants in turn, the first one again with each shape: what drifts shows there.
sweep_end=$(awk -v now="$(now)" -v minutes="$sweep" 'BEGIN { printf "%d", now + 60 * minutes }')
for shape in $shapes; do
    for variant in $variants; do
        [ "$(now)" -lt "$sweep_end" ] || break
        if is_wrong "$variant"; then continue; fi
        run_step 3 "sweep $shape $variant" 30 "$bench" $size --seconds 0.5 --variant "$variant" "$shape"
    done
done

# ---- parts 4 and 5: the executor ----

# shellcheck disable=SC2086
executor() { # PART NAME BATCHES OPTIONS...
    where=$1
    name=$2
    shift 2
    run_step "$where" "$name" 120 sh tools/bench/bench_executor.sh "$programs" "$out" "$@" $model
}
executor 4 "executor, four stages that share the device" "$one_batch" --stages "$stages" --k 2 --schedule 1f1b
executor 4 "executor, one stage" "$one_batch" --k 1
if [ "$capability" = 90 ]; then
    its_model=$model
    model="$model --type bf16"
    executor 4 "executor, one stage, with wgmma" "$one_batch" --k 1 --attention wgmma
    model=$its_model
else skip_step 4 "executor, one stage, with wgmma" "this device has compute capability ${capability:-unknown}"; fi
executor 5 "one batch predicts another" "$one_batch:$other_batch" --k 2

# ---- part 6: profiles ----

if ! has ncu; then skip_step 6 "profiles" "there is no ncu"
else
    for variant in mma wgmma; do
        if [ "$variant" = wgmma ] && [ "$capability" != 90 ]; then continue; fi
        for pass in forward backward; do
            run_step 6 "profile $pass $variant" 90 ncu --clock-control none --set full \
                --kernel-name "regex:attention_$pass" --launch-skip 1 --launch-count 1 --log-file "$work/profile" \
                "$bench" $size --variant "$variant" --seconds 0 "${shapes%% *}"
            if [ -s "$work/profile" ]; then cat "$work/profile" >>"$out/profile.txt"; fi
            : >"$work/profile"
        done
    done
fi

# ---- part 7: sanitizers ----

if ! has compute-sanitizer; then skip_step 7 "sanitizers" "there is no compute-sanitizer"
else
    for tool in memcheck racecheck; do
        run_step 7 "$tool" 240 env "CUDA_TESTS=$programs/cuda_tests" sh tests/cuda/cuda_device.sh --tool "$tool"
    done
fi

# ---- the summary ----

summarize() {
    awk '
        function value(name,  text) {
            if (!match($0, "\"" name "\": (\"([^\"\\\\]|\\\\.)*\"|[^,}]*)")) return ""
            text = substr($0, RSTART + length(name) + 4, RLENGTH - length(name) - 4)
            gsub(/^"|"$/, "", text)
            gsub(/\\/, "", text)
            return text
        }
        function columns(variant) {
            if (!(variant in known)) { known[variant] = 1; variants[++n_variants] = variant }
        }
        function rows(row) {
            if (!(row in rowed)) { rowed[row] = 1; names[++n_rows] = row }
        }
        NR == 1 { printf "%s, driver %s, commit %s\n", value("device"), value("driver"), value("commit") }
        value("ok") == "true" { passed++ }
        value("ok") == "false" { failed[++n_failed] = value("test") ": " value("error") }
        value("check") != "" {
            columns(value("variant"))
            if (check[value("variant")] != "FAIL") check[value("variant")] = value("check")
        }
        value("tflops") != "" {
            row = sprintf("%-32s %s", value("shape"), value("pass"))
            rows(row)
            columns(value("variant"))
            speed[row, value("variant")] = value("tflops")
            if (value("clock_mhz") != "null") clock[row] = value("clock_mhz")
        }
        value("measured_ms") != "" {
            executor[++n_executor] = sprintf("%-45s %10s ms measured, %10s ms simulated, ratio %s", value("step"),
                value("measured_ms"), value("simulated_ms"), value("ratio"))
        }
        value("per_pair") != "" {
            fit[++n_fit] = sprintf("%-45s %s: %s s + %s s a row + %s s a pair; off by %s %%", value("step"),
                value("pass"), value("constant"), value("per_token"), value("per_pair"),
                value("mean_absolute_percent"))
        }
        value("skipped") != "" { skipped[++n_skipped] = value("step") ": " value("skipped") }
        value("done") == "true" {
            steps++
            seconds += value("seconds")
            if (value("status") != 0) bad[++n_bad] = value("step") ": " value("error")
        }
        END {
            printf "%d steps in %d s, %d tests passed, %d failed\n", steps, seconds, passed, n_failed
            for (i = 1; i <= n_failed; i++) print "    " failed[i]
            for (i = 1; i <= n_bad; i++) print "    step " bad[i]
            printf "\nvariants, and whether they are right\n"
            for (i = 1; i <= n_variants; i++)
                if (variants[i] in check) printf "    %-32s %s\n", variants[i], check[variants[i]]
            printf "\nTFLOP/s, and MHz at the last of them\n"
            for (r = 1; r <= n_rows; r++) {
                printf "    %-42s %5s", names[r], clock[names[r]]
                for (i = 1; i <= n_variants; i++)
                    if ((names[r], variants[i]) in speed) printf "  %s %s", variants[i], speed[names[r], variants[i]]
                printf "\n"
            }
            for (i = 1; i <= n_skipped; i++) print "    left out: " skipped[i]
            printf "\nexecutor\n"
            for (i = 1; i <= n_fit; i++) print "    " fit[i]
            for (i = 1; i <= n_executor; i++) print "    " executor[i]
        }' "$record"
    if [ -n "$left_over" ]; then
        printf '\nThe time of this call ended before some steps. Go on with --resume %s\n' "$record"
    fi
}
summarize >"$out/summary.txt"
printf '\n' && cat "$out/summary.txt"
[ "$failures" -eq 0 ]
