#!/bin/sh
# cuda_record.sh - dry runs of tools/device/gpu_record.sh: what it still measures where a path hangs, a package is
# missing, the record cannot be written or the device is slow; that a later call runs what failed or was not reached.
#
#     sh tests/cuda/cuda_record.sh        from the top of the tree; BUILD (default build) has the emulated programs
#
# Scripts stand for the programs, but for the command and the executor. FULL=1: also a second call for what failed,
# and all of it from end to end on the emulated device.

. "$(dirname "$0")/../helpers.sh"

build=${BUILD:-build}
[ -x "$build/cuda/bench_attention" ] || skip_all cuda_record "built without a C++ compiler"
workplace "$build/cuda_record.tmp"
here=$(pwd)
case $build in /*) built=$build ;; *) built=$here/$build ;; esac

# ---- tools of a machine with a device, in $work/bin, and replacements of programs built for it ----

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
program() { # NAME: the script is read
    rm -f "$work/programs/$1"
    { printf '#!/bin/sh\n' && cat; } >"$work/programs/$1" && chmod +x "$work/programs/$1"
}
ln -s "$built/cuda/executor_cuda" "$built/chunkflow" "$work/programs"
echo 'abc123' >"$work/programs/commit"

# FAKE=hang: a program that runs path 3 prints what it begins and never ends. SLOW: seconds that each program takes.
program cuda_tests <<'END'
if [ "$1" = --list ]; then
    for test in primitives.copies primitives.hangs primitives.warps state.bad_appends; do echo $test; done
    exit
fi
[ "$1" != primitives. ] || set -- primitives.copies
sleep "${SLOW:-0}"
for test in "$@"; do
    printf '%s ...' "$test"
    case "${FAKE:-} $test${CHUNKFLOW_TEST_WGMMA:+ wgmma}" in hang*hangs | hang*wgmma) exec sleep 100 ;; esac
    echo ' ok'
done
END
program bench_attention <<'END'
case $1 in --list) exit ;; esac
sleep "${SLOW:-0}"
case "${FAKE:-} $*" in hang*wgmma*) exec sleep 100 ;; esac
check=
while [ $# -gt 0 ]; do
    case $1 in
        --check) check=yes ;;
        --variant)
            speed=300
            case $2 in wgmma*) speed=400 ;; esac
            if [ -n "$check" ]; then echo "small-packed $2 check ok (x)"
            else for pass in forward backward; do echo "small-packed $2 $pass 1.5 ms $speed TFLOP/s"; done; fi ;;
    esac
    shift
done
END
sed 's/speed=400/speed=500/' "$work/programs/bench_attention" >"$work/programs/bench_free"
chmod +x "$work/programs/bench_free"
program train_cuda <<'END'
case $1 in --help) exit ;; esac
sleep "${SLOW:-0}"
case "${FAKE:-} $*" in hang*wgmma*) exec sleep 100 ;; esac
case "$*" in *--check*) echo '  chunked, from float64 on the CPU: 1e-7, limit 1e-5: ok'; exit ;; esac
for step in 1 2 3; do
    echo "step    $step/3  loss 6.$step  lr 3e-05  |gradient| 1.3  7 chunks  1,042 tokens/s  utilisation 40.0 %  memory 40.4 MiB  left 5 s"
done
case "$*" in *--memory-table*) echo '  batch, these together       100.0    101.0' ;; esac
while [ $# -gt 1 ]; do
    [ "$1" != --times ] || for rows in 16 32 64 128; do
        for pass in 'F 1' 'R 0.5' 'B 2'; do echo "${pass% *} $rows $((rows * rows / 2)) ${pass#* }"; done
    done >"$2"
    shift
done
END
find_python
CUDA_EMU_ARCH=90
BATCHES=1
export CUDA_EMU_ARCH BATCHES

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

# valid RECORD: every line is JSON with all required members. Without python3 only the braces are checked.
valid() {
    if [ -z "$PYTHON" ]; then ! grep -qvE '^\{"part": [0-9], .*"device": "A \\"B\\\\C\\" 200", .*\}$' "$1"; return; fi
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

# ended RECORD: lists each finished step once
ended() { grep '"done": true' "$1" | sed 's/.*"step": "\([^"]*\)".*/\1/'; }

twice() { [ -z "$(ended "$1" | sort | uniq -d)" ]; }

# ---- everything is there ----

record --out "$work/first"
expect "a call" 0 '^AUTO may take wgmma  *met  *chunkflow_cuda.cu, line [0-9]* stays'
all=$work/first/record.jsonl
summary=$work/first/summary.txt
holds "every line is whole" valid "$all"
for part in 1 2 3 4 5 6 7 8 9; do
    holds "part $part ended well" grep -q "^{\"part\": $part, .*\"done\": true, .*\"status\": 0," "$all"
done
holds "nothing failed" sh -c "! grep -q '\"done\": true, .*\"status\": [1-9]' '$all'"
holds "at most 8 files" sh -c "[ $(find "$work/first" -type f | wc -l) -le 8 ]"
for line in '^losses, chunked and whole: .* met  *0.0000' '^memory 128: over that of the shortest  *met' \
    '^executor unfused, batch 1: simulated over measured  *\(not \)\{0,1\}met' '^replay 96 host  *0.5000 of a forward' \
    'small-packed forward  *mma 300  wgmma 400  mma' '^train whole, wgmma  *1042  *[0-9]' '^7B 256K PP 4 simulated' \
    'forward  *medians: with the order point 400, without it 500$' 'left out: rival: '; do
    holds "the summary: $line" grep -q -e "$line" "$summary"
done
cp "$all" "$work/again.jsonl"
record --out "$work/second" --resume "$all" --minutes 3
expect "a second call" 0 'AUTO may take'
holds "a second call runs nothing again" cmp "$all" "$work/second/record.jsonl"
holds "a second call: the log is one" grep -q '==== part 7' "$work/second/log.txt"

# judged NAME LINE SED: the summary of the record, edited by SED, has this line
judged() {
    sed "$3" "$all" >"$work/edited.jsonl"
    capture awk -v line=7 -v shapes=small-packed -v repeats=state.bad_appends -f tools/device/gpu_record.awk \
        "$work/edited.jsonl"
    expect "$1" 0 "^$2"
}
rule() { judged "AUTO's rule: $1" "AUTO may take wgmma  *$2" "$3"; }
rule "as it is" 'met  *chunkflow_cuda.cu, line 7 stays' ''
rule "slower in one pass" 'not met  *wrong or slower: small-packed backward; change chunkflow_cuda.cu, line 7' \
    '/"wgmma", "pass": "backward"/s/: 400/: 299.9/'
rule "one repeat is wrong" 'not met  *wrong or slower: state.bad_appends;' \
    '/bad_appends wgmma", "done"/s/"status": 0/"status": 1/'
rule "a shape is missing" 'not measured' '/"wgmma", "pass": "forward"/d'
rule "the repeats are missing" 'not measured' '/bad_appends wgmma", "done"/d'
judged "losses that part" 'losses, chunked and whole: .* not met  *3.0769' '/"losses whole", "loss"/s/: 6.3/: 6.5/'
judged "losses of a step less" 'losses, chunked and whole: .* not measured' '/"losses whole", "loss": 6.3/d'
judged "memory that grows" 'memory 128: over that of the shortest  *not met  *1.0198' \
    '/"memory 128", "batch_mib"/s/"measured_mib": 101/"measured_mib": 103/'
judged "memory beyond what was predicted" 'memory 128: measured over predicted  *not met  *1.2' \
    '/"memory 128", "batch_mib"/s/"measured_mib": 101/"measured_mib": 120/'
judged "an executor that is slower" 'executor .*, batch 1: simulated over measured  *not met  *0.000' \
    's/"measured_ms": [^,]*/"measured_ms": 1e9/'

# ---- path 3 hangs, and the disk is full ----

FAKE=hang
export FAKE
mkdir -p "$work/hang/record.jsonl" "$work/hang/log.txt"
record --out "$work/hang" --limit 1
expect "path 3 hangs" 1 'AUTO may take wgmma  *not met  *wrong or slower: check; change chunkflow_cuda.cu, line'
all=$work/hang.jsonl
grep '^{' "$work/out" >"$all"
holds "path 3 hangs: to the last part" grep -q '^{"part": 9, ' "$all"
holds "path 3 hangs: the record is whole" valid "$all"
holds "path 3 hangs: speeds of path 2" grep -q '"variant": "mma", "pass": "backward", "ms": 1.5, "tflops": 300' "$all"
holds "path 3 hangs: training by path 2" grep -q '"step": "train whole, mma", "loss": 6.3' "$all"
holds "path 3 hangs: repeats by path 2" grep -q '"step": "state.bad_appends mma", "done": true, .*"status": 0' "$all"
holds "path 3 hangs: nothing else tries it" sh -c \
    "! grep -vE '\"step\": \"check wgmma' '$all' | grep -q '\"command\": \"[^\"]*wgmma'"
holds "a test that hangs has its name" grep -q '"test": "primitives.hangs", "ok": false, "error": "it hung or died' "$all"
holds "tests behind it run" grep -q '"test": "primitives.warps", "ok": true' "$all"
FAKE=
what_failed() {
    printf '{"part": 1, "step": "half a' >>"$all"
    record --out "$work/mended" --resume "$all" --minutes 3
    expect "a second call for what failed" 0 'AUTO may take wgmma  *met '
    holds "a second call for what failed: all lines of the first" sh -c "! grep '}\$' '$all' | grep -qvxFf '$work/mended/record.jsonl'"
    holds "a second call for what failed: no half a line" sh -c "! grep -q 'half a' '$work/mended/record.jsonl'"
    holds "a second call for what failed: nothing else" \
        sh -c "[ $(ended "$work/mended/record.jsonl" | sort | uniq -d | wc -l) -eq $(
            grep '"done": true' "$all" | grep -cv '"status": 0') ]"
}
in_full what_failed

# ---- a slow device ----

SLOW=1
export SLOW
record --out "$work/slow" --minutes 0.12
expect "a slow device" 0 'Not reached or cut short: .*train whole.* Go on with --minutes 3 --resume'
holds "a slow device: what comes first was measured" grep -qF '"step": "check wgmma", "done": true' \
    "$work/slow/record.jsonl"
SLOW=

# ---- from end to end on the emulated device ----

emulated() {
    mkdir "$work/emulated_programs"
    ln -s "$built/cuda/tests" "$work/emulated_programs/cuda_tests"
    ln -s "$built/cuda/bench_attention" "$built/cuda/executor_cuda" "$built/cuda/train_cuda" "$built/chunkflow" \
        "$work/emulated_programs"
    echo abc123 >"$work/emulated_programs/commit"
    capture env "PATH=$here/$work/bin:$PATH" "BUILD=$work/build" timeout 900 sh tools/device/gpu_record.sh --small \
        --programs "$work/emulated_programs" --out "$work/emulated" --minutes 14
    expect "the emulated device" 0 '^losses, chunked and whole: .* met '
    holds "the emulated device: every line is whole" valid "$work/emulated/record.jsonl"
    for line in '^memory 64: measured over predicted  *met' '^replay 96 gpu  *[0-9.]* of a forward' \
        'small-packed backward  *mma [0-9.]*  wgmma [0-9.]*' '^train whole, wgmma  *[0-9]' '^7B 256K PP 4 simulated'; do
        holds "the emulated device: $line" grep -q -e "$line" "$work/emulated/summary.txt"
    done
}
in_full emulated

# ---- programs that do not start are built on the device's machine ----

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

# If none starts there is nothing to record.
for none in bench_attention executor_cuda train_cuda; do
    program $none <<'END'
exit 127
END
done
rm -f "$MAKE_SAID"
record --out "$work/none" --resume "$work/fourth/record.jsonl"
expect "no program starts" 1 "^gpu_record: no program starts here"
holds "no program starts: they were to be built here" grep -qx gpu-programs "$MAKE_SAID"
holds "no program starts: nothing is recorded" cmp "$work/fourth/record.jsonl" "$work/none/record.jsonl"

# ---- all suites that can run on a device are requested ----

sed '1,/^#else/d' tests/cuda/main.cc | grep -o '&suite_[a-z_]*' | sed 's/&suite_//' >"$work/suites"
holds "there are suites of a device" [ "$(wc -l <"$work/suites")" -ge 7 ]
while read -r suite; do
    holds "the record runs suite $suite" grep -qE "^suites='(.* )?$suite[ ']|^repeats='$suite\.|cuda_tests|tests\" $suite\." \
        tools/device/gpu_record.sh
done <"$work/suites"

# ---- each planted fault has its place, and is listed in the record of faults ----

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

# ---- a signal ends the running program, and the next call repeats the step ----

for nothing in bench_attention executor_cuda train_cuda; do
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
    holds "$signal: it says so" grep -q '^gpu_record: ended by a signal in step state.bad_appends mma' "$work/out"
    holds "$signal: and so does its status" [ $status -gt 128 ]
    sleep 1
    holds "$signal: what ran is over" [ ! -e "$CHILD" ]
    holds "$signal: what ended is done" grep -qF '"step": "primitives", "done": true' "$work/signal/record.jsonl"
    holds "$signal: what did not end is not" sh -c \
        "! grep -q '\"step\": \"state.bad_appends mma\", \"done\": true' '$work/signal/record.jsonl'"
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

# ---- comparison with PyTorch, when either of the two fails ----

# A fake PyTorch in which every call fails, with messages of several lines.
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
    # shellcheck disable=SC2086
    capture sh tools/device/gpu_record.sh $wrong
    complained "refused: $wrong" 2 "^gpu_record: "
done
left_out "the emulated device from end to end, and the second call for what failed"
finish
