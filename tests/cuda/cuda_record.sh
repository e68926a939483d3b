#!/bin/sh
# cuda_record.sh - tools/device/gpu_record.sh from end to end, on the emulated device: what it records, that it goes on
# where an earlier call ended, and that no failing step stops the next one.
#
#     sh tests/cuda/cuda_record.sh        from the top of the tree; BUILD (default build) has the emulated programs
#
# FULL=1: all steps; otherwise the emulated programs run for four seconds, and all others are scripts that stand for them.

. "$(dirname "$0")/../helpers.sh"

build=${BUILD:-build}
[ -x "$build/cuda/bench_attention" ] || skip_all cuda_record "built without a C++ compiler"
workplace "$build/cuda_record.tmp"
here=$(pwd)
case $build in /*) built=$build ;; *) built=$here/$build ;; esac

# ---- tools that a machine with a device has, in $work/bin, and what stands for programs built for it ----

tool() { # NAME: the script is read
    { printf '#!/bin/sh\n' && cat; } >"$work/bin/$1" && chmod +x "$work/bin/$1"
}
mkdir -p "$work/bin" "$work/programs"
tool nvidia-smi <<'END'
case "$*" in
    *name,driver_version,compute_cap*) echo 'A "B\C" 200, 580.1, 9.0' ;;
    *-lms*) while :; do echo '1980, 3201, 500.5, 40'; sleep 1; done ;;
    -L) echo 'GPU 0: emulated' ;;
    *) echo 'emulated' ;;
esac
END
tool python3 <<'END'
exit 1
END
tool ncu <<'END'
while [ "$1" != --log-file ]; do shift; done
echo 'a profile' >"$2"
shift 2
exec "$@"
END
tool compute-sanitizer <<'END'
while [ "$1" != --error-exitcode ]; do shift; done
shift 2
exec "$@"
END
ln -s "$built/cuda/tests" "$work/programs/cuda_tests"
ln -s "$built/cuda/bench_attention" "$built/cuda/executor_cuda" "$built/test/chunkflow" "$work/programs"
echo 'abc123' >"$work/programs/commit"
find_python
CUDA_EMU_ARCH=90
export CUDA_EMU_ARCH

record() { # OPTIONS...
    capture env "PATH=$here/$work/bin:$PATH" "BUILD=$work/build" timeout 300 \
        sh tools/device/gpu_record.sh --small --programs "$work/programs" "$@"
}
case $work in /*) here= ;; esac

# holds NAME COMMAND...: the command succeeds
holds() {
    name=$1
    shift
    if "$@" >"$work/said" 2>&1; then ok "$name"; else fail "$name" "$(tail -n 1 "$work/said")"; fi
}

# valid RECORD: every line is JSON with all that a line must have. Without python3 only its outside is looked at.
valid() {
    if [ -z "$PYTHON" ]; then ! grep -qvE '^\{"part": [0-7], .*"device": "A \\"B\\\\C\\" 200", .*\}$' "$1"; return; fi
    python - "$1" <<'END'
import json, sys
lines = [json.loads(line) for line in open(sys.argv[1])]
assert lines
for line in lines:
    assert line["commit"] == "abc123" and line["device"] == 'A "B\\C" 200' and line["driver"] == "580.1", line
    assert {"part", "step", "error", "clock_mhz", "memory_mhz", "watts", "celsius", "command"} <= set(line), line
    assert line["clock_mhz"] in (1980, None), line
assert any(line["clock_mhz"] for line in lines)
END
}

# ended RECORD: the steps that are done, each once
ended() { grep '"done": true' "$1" | sed 's/.*"step": "\([^"]*\)".*/\1/'; }

twice() { [ -z "$(ended "$1" | sort | uniq -d)" ]; }

# ---- two calls, the second of which goes on where the first one ended ----

record --out "$work/first" --minutes 0.07
expect "the first call" 0 "Go on with --resume $work/first/record.jsonl"
printf '{"part": 1, "step": "half a' >>"$work/first/record.jsonl"
all=$work/second/record.jsonl
if full; then record --out "$work/second" --resume "$work/first/record.jsonl"
else record --out "$work/second" --resume "$work/first/record.jsonl" --minutes 0; fi
expect "the second call" 0 'steps in'
holds "it has all lines of the first" sh -c "! grep '\"done\": true' '$work/first/record.jsonl' | grep -qvxFf '$all'"
holds "it has no half a line" sh -c "! grep -q 'half a' '$all'"
holds "no step ended twice" twice "$all"
holds "tests have their names" grep -qF '"test": "primitives.copies", "ok": true' "$all"
capture "$work/programs/bench_attention" --check --small --variant mma
expect "the benchmark's own check" 0 '^small-packed mma check ok'

# Checks the records that all parts leave, and that a third call has nothing to do.
all_parts() {
    holds "the first one was cut short" sh -c "[ $(ended "$work/first/record.jsonl" | wc -l) -lt $(ended "$all" | wc -l) ]"
    holds "every line is whole" valid "$all"
    for part in 1 2 3 4 5 6 7; do
        holds "part $part ended well" grep -q "^{\"part\": $part, .*\"done\": true, .*\"status\": 0," "$all"
    done
    holds "nothing failed" sh -c "! grep -q '\"done\": true, .*\"status\": [1-9]' '$all'"
    for variant in mma wgmma mma+arch=86; do
        holds "$variant is right" grep -qF "\"variant\": \"$variant\", \"check\": \"ok\"" "$all"
        of="\"variant\": \"$(echo $variant | sed 's/+/[+]/')\""
        for pass in forward backward; do
            holds "$variant $pass has a speed" grep -qE \
                "$of, \"pass\": \"$pass\", \"ms\": 0\.[0-9]*[1-9][0-9]*, \"tflops\": [0-9]" "$all"
        done
    done
    holds "a batch was predicted" grep -qE \
        '"batch": 2, "measured_ms": [0-9.]+, "simulated_ms": [0-9.]+, "ratio": [01]\.[0-9]+,' "$all"
    holds "the costs were fitted" grep -qE '"pass": "B", "samples": [0-9]+, "constant": [0-9.e-]+, ' "$all"
    holds "tests run on the path with wgmma, too" grep -qF \
        '"step": "tests attention.padded_slices with wgmma", "test": "attention.padded_slices", "ok": true' "$all"
    holds "the sanitizer is there" grep -qF '"test": "compute-sanitizer racecheck", "ok": true' "$all"
    summary=$work/second/summary.txt
    holds "the summary says how many" grep -qE '^[0-9]+ steps in [0-9]+ s, 1[0-9] tests passed, 0 failed$' "$summary"
    holds "the summary has a table" grep -qE 'small-packed +forward .*mma [0-9.]+ .*wgmma [0-9.]+ .*86 [0-9.]+$' "$summary"
    holds "at most 8 files" sh -c "[ $(find "$work/second" -type f | wc -l) -le 8 ]"
    cp "$all" "$work/again.jsonl"
    record --out "$work/second" --resume "$all" --minutes 0
    expect "a call of no minutes" 0 'steps in'
    holds "a call of no minutes: nothing new" cmp "$all" "$work/again.jsonl"
    holds "a call of no minutes: the log is there still" grep -q '==== part 7' "$work/second/log.txt"
}
in_full all_parts

# ---- a variant that is wrong takes no time of the others, nor of PyTorch ----

wrong_variants() {
    sed '/"step": "speed"/d; /"step": "check wgmma", "done": true/s/"status": 0/"status": 124/' "$all" >"$work/wrong.jsonl"
    record --out "$work/wrong" --resume "$work/wrong.jsonl"
    expect "a variant that hung" 0 'steps in'
    speed=$(grep '"step": "speed", "done": true' "$work/wrong/record.jsonl")
    holds "a variant that hung is not timed" sh -c \
        "case '$speed' in *wgmma*) exit 1 ;; *'--variant mma'*) ;; *) exit 1 ;; esac"
    sed '/"step": "check mma", "done": true/s/"status": 0/"status": 1/' "$work/wrong.jsonl" >"$work/all_wrong.jsonl"
    record --out "$work/all_wrong" --resume "$work/all_wrong.jsonl"
    holds "where no variant is right there are other numbers" \
        grep -qE '"variant": "unfused", "pass": "forward", "ms": [0-9]' "$work/all_wrong/record.jsonl"
}
in_full wrong_variants

# ---- programs that fail in every way ----

program() { # NAME: the script is read
    rm -f "$work/programs/$1"
    { printf '#!/bin/sh\n' && cat; } >"$work/programs/$1" && chmod +x "$work/programs/$1"
}
program cuda_tests <<'END'
case $1 in
    --list) ;;
    primitives.)
        printf 'primitives.copies ... \n    f.cc:3: 1 == 2\n    FAILED primitives.copies, 1 of 2 checks\n'
        exit 1
        ;;
    state.*) trap '' TERM; sleep 100 & wait; sleep 100 ;;
    *) exit 3 ;;
esac
END
program bench_attention <<'END'
case "$*" in
    --list) ;;
    *--check*) echo 'small mma check FAIL out nan'; exit 1 ;;
    *) echo 'small mma forward nan ms inf TFLOP/s'; echo 'small wgmma error a "quoted" \ text'; kill -SEGV $$ ;;
esac
END
program executor_cuda <<'END'
[ "$1" = --help ] || { printf 'tab\there, \001 and "quotes" \\ and no end of line' >&2; exit 1; }
END
record --out "$work/third" --limit 1
expect "failing programs" 1 'steps in'
all=$work/third/record.jsonl
holds "failing programs: every line is whole" valid "$all"
for part in 1 2 3 4 5 6 7; do
    holds "failing programs: part $part was tried" grep -qE \
        "^\{\"part\": $part, .*\"done\": true, .*\"status\": [1-9]" "$all"
done
holds "a test that failed" grep -qF \
    '"test": "primitives.copies", "ok": false, "error": "FAILED primitives.copies' "$all"
holds "a step that hung" grep -qE \
    '"step": "tests state.bad_appends", "done": true, .*"error": "stopped after [1-9]' "$all"
holds "a number that is none" grep -qF '"pass": "forward", "ms": null, "tflops": null' "$all"
holds "a variant that cannot run" grep -qF '"variant": "wgmma", "error": "a \"quoted\" \\ text"' "$all"
holds "a variant that is wrong is not swept" sh -c "! grep -q '\"step\": \"sweep' '$all'"
holds "what has no end of line" grep -qF 'tab here,   and \"quotes\" \\ and no end of line' "$all"
holds "the summary has the failures" grep -q '^    primitives.copies: FAILED' "$work/third/summary.txt"

# ---- programs that do not start are built where they are needed ----

tool make <<'END'
printf '%s\n' "$@" >"$MAKE_SAID"
END
program cuda_tests <<'END'
exit 127
END
MAKE_SAID=$work/make.said
export MAKE_SAID
record --out "$work/fourth" --limit 1 --minutes 0.2
expect "programs that do not start" 1 'they still do not'
holds "they are built for this device" sh -c "grep -qx gpu-programs '$MAKE_SAID' && grep -q code=sm_90a '$MAKE_SAID'"
rm "$MAKE_SAID"
record --out "$work/fourth" --resume "$work/fourth/record.jsonl" --limit 1 --minutes 0.2
holds "and once more by the next call, which may be on another one" grep -qx gpu-programs "$MAKE_SAID"

# Where none starts there is nothing to be recorded, by either of the two.
for none in bench_attention executor_cuda train_cuda; do
    program $none <<'END'
exit 127
END
done
for which in gpu_record gpu_record_train; do
    rm -f "$MAKE_SAID"
    capture env "PATH=$(cd "$work/bin" && pwd):$PATH" "BUILD=$work/build" timeout 300 \
        sh tools/device/$which.sh --small --programs "$work/programs" --out "$work/none" \
        --resume "$work/fourth/record.jsonl"
    expect "$which: no program starts" 1 "^$which: no program starts here"
    holds "$which: they were to be built here" grep -qx gpu-programs "$MAKE_SAID"
    holds "$which: nothing is recorded" cmp "$work/fourth/record.jsonl" "$work/none/record.jsonl"
done

# ---- all suites of a device are asked for ----

sed '1,/^#else/d' tests/cuda/main.cc | grep -o '&suite_[a-z_]*' | sed 's/&suite_//' >"$work/suites"
holds "there are suites of a device" [ "$(wc -l <"$work/suites")" -ge 7 ]
while read -r suite; do
    holds "the record runs suite $suite" \
        grep -qE "^suites='(.* )?$suite\.|run_step .*cuda_tests\" $suite\." tools/device/gpu_record.sh
done <"$work/suites"

# ---- each planted fault has its place, and stands in the record of them ----

if [ -n "$PYTHON" ]; then
    holds "planted faults have their places, and are recorded" "$PYTHON" -B - <<'END'
import sys
sys.path.insert(0, "tests/cuda")
import cuda_faults
cuda_faults.plant()
record = open("tools/bench/results/cuda-faults.txt").read()
missing = [fault[0] for fault in cuda_faults.FAULTS if not ("\n" + fault[0] + " ") in record]
sys.exit("not in the record: " + ", ".join(missing) if missing else 0)
END
    holds "what is planted in compiled code is recorded, and nothing else" "$PYTHON" -B - <<'END'
import re, sys
sys.path[:0] = ["tests/cuda", "tests/ptx"]
import cuda_faults, ptx_faults
wanted = {name: name not in cuda_faults.UNSEEN for _, name, _ in cuda_faults.plant_for_nvcc()[1]}
wanted.update({name: True for name, *_ in ptx_faults.EDITS})
wanted.update({name: is_seen for name, *_, is_seen in ptx_faults.CONSTRAINTS})
record = open("tools/bench/results/ptx-faults.txt").read()
lines = re.findall(r"^(\S.*?) +(caught by|seen:|MISSED by|changes nothing in the PTX)", record, re.M)
found = {name: verdict in ("caught by", "seen:") for name, verdict in lines}
wrong = [name for name in {**wanted, **found} if wanted.get(name) != found.get(name)]
sys.exit("not as in the record: " + ", ".join(wrong) if wrong or set(cuda_faults.UNSEEN) - set(wanted) else 0)
END
fi

# ---- a signal ends what runs, and the step is left for the next call ----

for nothing in bench_attention executor_cuda; do
    program $nothing <<'END'
exit 0
END
done
program cuda_tests <<'END'
case $1 in
    --list) ;;
    primitives.) echo 'primitives.copies ... ok' ;;
    *)
        sh -c 'trap "" TERM; while :; do echo here >"$CHILD"; sleep 0.2; done' &
        wait
        ;;
esac
END
CHILD=$work/child
export CHILD
for signal in TERM HUP INT; do # as whoever runs the tests may have them ignored, and a shell in the background INT
    rm -f "$CHILD"
    env --default-signal=TERM,HUP,INT "PATH=$(cd "$work/bin" && pwd):$PATH" "BUILD=$work/build" \
        sh tools/device/gpu_record.sh --small --programs "$work/programs" --out "$work/signal" >"$work/out" 2>&1 &
    caller=$!
    await $caller [ -s "$CHILD" ]
    kill -$signal $caller
    status=0
    wait $caller || status=$?
    rm -f "$CHILD"
    holds "$signal: it says so" grep -q '^gpu_record: ended by a signal in step tests' "$work/out"
    holds "$signal: and so does its status" [ $status -gt 128 ]
    sleep 1
    holds "$signal: what ran is over" [ ! -e "$CHILD" ]
    holds "$signal: what ended is done" grep -qF '"step": "primitives", "done": true' "$work/signal/record.jsonl"
    holds "$signal: what did not end is not" sh -c \
        "! grep -q '\"step\": \"tests state.bad_appends\", \"done\": true' '$work/signal/record.jsonl'"
    holds "$signal: every line is whole" valid "$work/signal/record.jsonl"
done

program cuda_tests <<'END'
echo 'cuda: no device (cudaErrorInsufficientDriver)'
END
rm "$MAKE_SAID"
record --out "$work/fifth"
expect "a device that programs do not see" 1 'gpu_record: cuda: no device (cudaErrorInsufficientDriver)'
holds "a device that programs do not see: they are built for it" grep -qx gpu-programs "$MAKE_SAID"
tool nvidia-smi <<'END'
exit 9
END
record --out "$work/fifth"
expect "no device" 0 'gpu_record: cuda: no device'
holds "no device: no result" sh -c "! [ -s '$work/fifth/record.jsonl' ]"

# ---- beside PyTorch, whatever either of them does ----

# A PyTorch of which every call fails, in words of several lines.
compare() {
    mkdir -p "$work/torch/torch/nn/attention"
    cat >"$work/torch/torch/__init__.py" <<'END'
class _Cuda:
    get_device_name = staticmethod(lambda: "none")
class _Cudnn:
    version = staticmethod(lambda: 0)
class _Backends:
    cudnn = _Cudnn
cuda, backends, bfloat16, __version__ = _Cuda, _Backends, None, "0"
def randn(*_, **__):
    raise KeyError("two\nlines")
END
    echo 'SDPBackend = sdpa_kernel = None' >"$work/torch/torch/nn/attention/__init__.py"
    : >"$work/torch/torch/nn/functional.py"
    : >"$work/torch/torch/nn/__init__.py"
    program bench_attention <<'END'
case $1 in
    --list) printf '%s 2 1 64 8 8\n' hangs mumbles dies silent ;;
    *)
        while [ $# -gt 1 ]; do shift; done
        case $1 in
            hangs) echo 'hangs mma forward 1.0 ms 2.0 TFLOP/s'; exec sleep 100 ;;
            mumbles)
                printf '\n\nmumbles\n'
                printf 'mumbles mma %s TFLOP/s\n' 'forward x ms 2.0' 'backward 1.0 ms 2.0'
                ;;
            dies) kill -SEGV $$ ;;
        esac
        ;;
esac
END
    sed 's/^MOST = 120 /MOST = 2 /' tools/bench/bench_attention.py >"$work/bench_attention.py"
    capture env "PYTHONPATH=$work/torch" "$PYTHON" "$work/bench_attention.py" "$work/programs/bench_attention"
    expect "beside PyTorch: it ends well" 0 '^hangs ours error stopped after 2 s$'
    for line in 'hangs mma forward 1.0 ms 2.0 TFLOP/s' "mumbles ours error cannot be read: 'mumbles'" \
        "mumbles ours error cannot be read: 'mumbles mma forward x ms 2.0 TFLOP/s'" \
        'mumbles mma backward 1.0 ms 2.0 TFLOP/s' 'dies ours error ended by signal 11' \
        'silent ours error said nothing of this shape' "silent flash error KeyError: 'two\\nlines'"; do
        holds "beside PyTorch: $line" grep -qxF "$line" "$work/out"
    done
    holds "beside PyTorch: no empty line before the table" sh -c \
        "[ \"\$(sed '/^TFLOP/,\$d' '$work/out' | grep -c '^\$')\" -eq 1 ]"
}
if [ -n "$PYTHON" ]; then compare; fi

# ---- options ----

for wrong in "--nonsense" "--minutes" "--minutes many" "--resume $work/nowhere" "--" "minutes" "--limits 3"; do
    for which in gpu_record gpu_record_train; do
        # shellcheck disable=SC2086
        capture sh tools/device/$which.sh $wrong
        complained "refused by $which: $wrong" 2 "^$which: "
    done
done
left_out "the steps of all parts on the emulated device, and variants that are wrong"
finish
