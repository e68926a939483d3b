#!/bin/sh
# mpi_check.sh - the pipeline of processes: every schedule, failures, timelines - MIT or public domain
#
#     tests/trainer/mpi_check.sh [BUILD]      tests BUILD/pipeline_mpi_f64, with FULL=1 BUILD/pipeline_mpi (float32), and, where
#                                     it is there, BUILD/test/pipeline_mpi_f64 (with sanitizers); default: build
#
# Run it in the top directory. Prints "ok NAME" or "FAIL NAME: why" for each case and "N passed, N failed" at the end.
# Without MPI the programs are not there, and all of it is one skipped test.
#
# FULL=1: every sweep with K 1, 2 and 3; otherwise with K 1, the first one with K 2 as well, and fewer failures.

. "$(dirname "$0")/../helpers.sh"

build=${1:-build}
# All processes are on this machine, perhaps in a container that forbids some ways of moving memory.
OMPI_MCA_btl=self,vader
OMPI_MCA_btl_vader_single_copy_mechanism=none
OMPI_MCA_btl_base_warn_component_unused=0
OMPI_MCA_plm_rsh_agent=
OMPI_ALLOW_RUN_AS_ROOT=1
OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_btl OMPI_MCA_btl_vader_single_copy_mechanism OMPI_MCA_btl_base_warn_component_unused
export OMPI_MCA_plm_rsh_agent OMPI_ALLOW_RUN_AS_ROOT OMPI_ALLOW_RUN_AS_ROOT_CONFIRM
# A waiting process lets others run, even if each has its own processor: of two processes, each waits most of the time.
OMPI_MCA_mpi_yield_when_idle=1
OMPI_MCA_hwloc_base_binding_policy=none
export OMPI_MCA_mpi_yield_when_idle OMPI_MCA_hwloc_base_binding_policy
# MPI itself, and aborted processes, leak memory at the end.
ASAN_OPTIONS=detect_leaks=0:${ASAN_OPTIONS:-}
export ASAN_OPTIONS

if [ ! -x "$build/pipeline_mpi_f64" ] || ! command -v mpirun >/dev/null 2>&1; then
    skip_all pipelines "built without MPI (mpicc, mpirun)"
fi
workplace "$build/mpi_check.tmp"

exact=$build/pipeline_mpi_f64
checked=$exact
if [ -x "$build/test/pipeline_mpi_f64" ]; then checked=$build/test/pipeline_mpi_f64; fi

# run PROCESSES PROGRAM OPTIONS...: as capture; status 124: it hung
run() {
    processes=$1
    shift
    capture timeout -k 5 600 mpirun --quiet --oversubscribe -n "$processes" "$@"
    longest_chain=$(sed -n 's/.*longest chain \([0-9]*\),.*/\1/p' "$work/out")
}

# alone PROGRAM OPTIONS...: as run, but one process without mpirun, which takes less time to start
alone() { capture timeout -k 5 600 "$@"; }

# expect_lines NAME COUNT: the last run was a sweep over COUNT schedules, all successful
expect_lines() {
    if [ "$status" -ne 0 ]; then fail "$1" "exit status $status: $(grep -v '^ok' "$work/out" "$work/err" | tail -n 1)"
    elif [ "$(grep -c '^ok ' "$work/out")" -ne "$2" ] || grep -q -e '^NOT OK' -e '^skipped' "$work/out"; then
        fail "$1" "wanted $2 schedules, all of them ok: $(grep -c '^ok ' "$work/out") were; $(last_line)"
    else ok "$1"; fi
}

tiny="--hidden 16 --heads 4 --kv-heads 2 --ffn 24 --chunk-size 16"

# ---- gradients: every schedule x K 1 .. 3, paper with both replays (6 kinds, two of them also in a V: 9 x 3 runs each)
# ----

n_ks=3
if ! full; then n_ks=2; fi

# sweep NAME PROGRAM PROCESSES LONGEST_CHAIN OPTIONS...; with --outputs, paper has only local replay
sweep() {
    name="gradients: $1, $3 processes"
    program=$2
    processes=$3
    wanted=$4
    shift 4
    # shellcheck disable=SC2086
    run "$processes" "$program" $tiny --sweep --k $n_ks --layers $((2 * processes)) "$@"
    case " $* " in
        *" --outputs "*) expect_lines "$name" $((8 * n_ks)) ;;
        *) expect_lines "$name" $((9 * n_ks)) ;;
    esac
    if [ "$longest_chain" != "$wanted" ]; then fail "$name" "the longest chain has $longest_chain chunks"; fi
}

sweep "chains of 7 and 3 chunks, hybrid chunks" "$exact" 2 7 --synthetic 100,5,33,7,16,2
if ! full; then n_ks=1; fi
for n in 2 4; do
    if [ $n = 2 ] && ! full; then continue; fi
    sweep "rendezvous, chains of 2, 5 and 3" "$exact" $n 5 --rendezvous --no-tails --synthetic 20,70,3,41,8
done
# Makes messages exceed MPI's buffers, so that a send ends only when it is received.
OMPI_MCA_btl_vader_eager_limit=256
export OMPI_MCA_btl_vader_eager_limit
sweep "messages that are not buffered" "$exact" 4 7 --synthetic 100,5,33,7,16,2
unset OMPI_MCA_btl_vader_eager_limit
sweep "with sanitizers" "$checked" 2 4 --synthetic 9,60,21 --dropout 0.2
sweep "one chain of 13, dropout, untied, aligned" "$exact" 2 13 --synthetic 205 --dropout 0.3 --untied --align 4
if full; then n=4; else n=2; fi
sweep "standalone chunks only" "$exact" $n 0 --synthetic 16,9,3,0,1,16,12,5
sweep "prompts, slices of equal cost, at most 2 chunks kept" "$exact" 2 5 --prompt 5 --split cost --limit 2 \
    --synthetic 61,40,3,12,9
# If a stage has little room, `best` drops standalone chunks, on some stages only. shellcheck disable=SC2086
run 4 "$exact" $tiny --layers 8 --schedule best --replay local --limit 1 --dropout 0.2 --synthetic 16,9,3,0,1,16,12,5
expect "gradients: standalone chunks replayed" 0 'limit 1e-10: ok'
if [ "$longest_chain" != 0 ] || ! grep -q ' [1-9][0-9]* replays' "$work/out"; then
    fail "gradients: standalone chunks replayed" "no standalone chunk was"
fi

# ---- kinds of layers: stages differ in their layers, and so in their states; the last one has the extra prediction
# module ----

kinds="--window 20 --balance 0.1 --mtp 0.3 --kinds"
# shellcheck disable=SC2086
{
    sweep "kinds of layers" "$exact" $n 5 $kinds delta+experts,latent,window+sinks,full+gate --synthetic 70,41,16,9,66
    if full; then
        sweep "others, streamed" "$exact" 2 5 $kinds kda,chunked+experts,mamba --stream 65536 --untied \
            --synthetic 70,41,16,9,66
    fi
    run 4 "$exact" $tiny --layers 8 --schedule best --replay local --limit 1 $kinds experts --synthetic 16,9,3,12,5,16
    expect "gradients: standalone chunks with experts replayed" 0 'limit 1e-10: ok'
}

# ---- streamed states and kept inputs in host memory: a ring and two slots, as in the memory model ----

ring=16384 # two blocks of 32 rows in float64
for n in 2 4; do
    if [ $n = 2 ] && ! full; then continue; fi
    sweep "streamed from host memory" "$exact" $n 5 --stream $ring --synthetic 70,41,16,9,66
done
# shellcheck disable=SC2086
run 2 "$checked" $tiny --layers 8 --schedule interleaved --virtual 2 --replay local --k 1 --stream $ring --dropout 0.2 \
    --synthetic 100,41,9
expect "streamed from host memory: virtual stages, with sanitizers" 0 'limit 1e-10: ok'
# In host memory: 3 layers' K, V, dK, dV of 8 numbers and, except on the first stage, all inputs except the last
# chunk's. Numbers have 8 bytes.
for length in 112 448; do
    name="streamed from host memory: bytes for $length tokens"
    state=$((length * 3 * 4 * 8 * 8))
    inputs=$(((length - 16) * 16 * 8))
    # shellcheck disable=SC2086
    run 2 "$exact" $tiny --layers 6 --schedule 1f1b --replay local --k 1 --stream $ring --synthetic $length
    expect "$name" 0 'limit 1e-10: ok'
    slots=$((2 * 16 * 16 * 8))
    for line in "stage 0 streams: a ring of $ring bytes, kept inputs in 0, $state in host memory" \
        "stage 1 streams: a ring of $ring bytes, kept inputs in $slots, $((state + inputs)) in host memory"; do
        if ! grep -q "$line" "$work/out"; then fail "$name" "not \"$line\": $(grep streams "$work/out")"; fi
    done
done

# ---- attention's outputs of dropped chunks: replays do not attend, and slots in use match the steps ----

in_full sweep "outputs kept" "$exact" 2 5 --outputs --dropout 0.2 --synthetic 70,41,16,9,66
# shellcheck disable=SC2086
if full; then
    sweep "outputs kept" "$exact" 4 5 --outputs --rendezvous --synthetic 70,41,16,9,66
    sweep "outputs kept in host memory" "$checked" 2 4 --outputs --stream $ring --synthetic 9,60,21
    sweep "outputs kept, kinds of layers" "$exact" 2 5 --outputs $kinds delta+experts,latent,window+sinks,full+gate \
        --synthetic 70,41,16,9,66
fi
# In host memory: 3 layers' K, V, dK, dV; for each of 6 dropped chunks 16 + 4 numbers a row and layer; and inputs.
# shellcheck disable=SC2086
run 2 "$checked" $tiny --layers 6 --schedule 1f1b --k 1 --stream $ring --outputs --synthetic 112
expect "outputs kept in host memory: with sanitizers" 0 'limit 1e-10: ok'
outputs=$((6 * 16 * 3 * (16 + 4) * 8))
state=$((112 * 3 * 4 * 8 * 8))
for line in "stage 0 streams: a ring of $ring bytes, kept inputs in 0, $((state + outputs)) in host memory" \
    "stage 1 streams: .* $((state + outputs + 6 * 16 * 16 * 8)) in host memory"; do
    if grep -q "$line" "$work/out"; then ok "outputs kept in host memory: bytes"
    else fail "outputs kept in host memory: bytes" "not \"$line\": $(grep streams "$work/out")"; fi
done

# ---- sequences that share rows: every schedule that supports trees; the others say so ----

# trees NAME PROGRAM PROCESSES OPTIONS...
trees() {
    name="shared rows: $1, $3 processes"
    program=$2
    processes=$3
    shift 3
    # shellcheck disable=SC2086
    run "$processes" "$program" $tiny --sweep --k $n_ks --layers $((2 * processes)) --share 1 \
        --synthetic 64,58,70,57,61,80,7,45,12,20,14 --with 0,0,0,0,0,2,0,0,0,0,8 \
        --shared 0,50,50,50,50,65,0,37,0,20,6 "$@"
    case " $* " in
        *" --align "*) expect "$name" 0 '488 tokens in 172 rows' ;; # padding counts
        *) expect "$name" 0 '488 tokens in 160 rows' ;;
    esac
    if [ "$(grep -c '^ok ' "$work/out")" -lt $((8 * n_ks)) ] || [ "$longest_chain" -lt 5 ] ||
        grep -v -e '^ok ' -e '^pipeline ' -e '^skipped .*not made for trees' "$work/out" >"$work/other"; then
        fail "$name" "wanted at least $((8 * n_ks)) schedules, all of them ok, and paths of 5 chunks: $(last_line)"
    fi
}
in_full trees "weights add up" "$exact" 2 # as they do below
once=$exact # with sanitizers it takes as long as all others, and trainer_trees has them
if full; then once=$checked; fi
trees "streamed, a token counts once" "$once" 2 --stream 65536 --shared-mean
trees "kinds of layers, streamed" "$exact" 4 --stream 65536 --window 20 \
    --kinds window,chunked+experts,delta,full+sinks+gate,latent,mamba
in_full trees "outputs kept" "$exact" 2 --outputs
if full; then trees "aligned, messages that are not buffered" "$exact" 4 --align 4 --rendezvous; fi

if full; then
    # shellcheck disable=SC2086
    run 2 "$build/pipeline_mpi" $tiny --sweep --k 2 --layers 4 --synthetic 100,5,33,7,16,2
    expect_lines "gradients: float32, 2 processes" 18
    if ! grep -q 'pipeline float32' "$work/out"; then fail "gradients: float32, 2 processes" "that was no float32"; fi
fi

common="$tiny --k 2 --layers 8 --synthetic 100,5,33,7,16,2"
# shellcheck disable=SC2086
full_output "output" "$exact" $common --schedule paper
# shellcheck disable=SC2086
alone "$exact" $common --schedule paper
expect "gradients: one process" 0 'limit 1e-10: ok'
# shellcheck disable=SC2086
run 3 "$exact" $common --schedule 1f1b
expect "gradients: 3 processes with 2, 3 and 3 layers" 0 'limit 1e-10: ok'
# shellcheck disable=SC2086
run 2 "$exact" $common --schedule interleaved --virtual 4 --replay local
expect "gradients: 4 virtual stages on each of 2" 0 'limit 1e-10: ok'
# shellcheck disable=SC2086
run 2 "$exact" $common --schedule best --split-backward --rendezvous --repeat 3
expect "gradients: best with I and W, three times" 0 'limit 1e-10: ok'

# ---- errors that the check itself must find ----

# fault NAME PROGRAM STATUS TEXT OPTIONS...: it ends within seconds, with the message TEXT unless that is empty
fault() {
    name=$1
    program=$2
    wanted=$3
    said=$4
    shift 4
    began=$(date +%s)
    # shellcheck disable=SC2086
    run 4 "$program" $common "$@"
    took=$(($(date +%s) - began))
    if [ $took -gt 15 ]; then fail "$name" "it took $took s"
    elif [ "$(grep -c 'pipeline_mpi: ' "$work/err")" -gt 1 ]; then
        fail "$name" "more than one message: $(cat "$work/err")"
    else expect "$name" "$wanted" "$said"; fi
}
fault "a NaN in one gradient is seen" "$exact" 1 'difference inf.*NOT OK' --schedule 1f1b --fail 0:-1:nan
fault "a backward that was left out is seen" "$exact" 1 'difference [0-9.]*e[+-]0[0-4] .*NOT OK' \
    --schedule zero-bubble --fail 0:-1:skip

# ---- failures: all stages end, with one message ----

in_full fault "fails: first stage, first action" "$exact" 1 'stage 0 failed: F of chunk 0 .*action\[0\]: injected' \
    --fail 0:0
fault "fails: last stage, in the middle" "$checked" 1 "stage 3 failed: .* of chunk .*action\[20\]: injected" --fail 3:20
in_full fault "fails: a stage between, rendezvous" "$exact" 1 "stage 1 failed: .* of chunk .*action\[31\]: injected" \
    --rendezvous --fail 1:31
in_full fault "fails: a stage that replays alone" "$exact" 1 "stage 2 failed: .* of chunk .*action\[25\]: injected" \
    --replay local --fail 2:25
fault "fails: a receive" "$exact" 1 "stage 1 failed: RECV_F of chunk 0 .*action\[0\]: injected" --fail 1:0
in_full fault "fails: the last action" "$exact" 1 "stage 2 failed: .* of chunk .*action\[[0-9]*\]: injected" \
    --schedule gpipe --fail 2:-1
in_full fault "dies by a signal: first stage" "$exact" 137 '' --fail 0:12:kill
fault "dies by a signal: last stage" "$exact" 137 '' --schedule zero-bubble --rendezvous --fail 3:5:kill

# ---- options ----

# refused NAME TEXT: the last run ended with status 2 and one message
refused() { complained "refused: $1" 2 "pipeline_mpi: .*$2"; }

# refuse TEXT OPTIONS...
refuse() {
    said=$1
    shift
    # shellcheck disable=SC2086
    alone "$exact" $tiny --synthetic 20,3 --layers 4 "$@"
    refused "$*" "$said"
}
refuse 'unknown option' --nonsense
refuse 'unknown option' 12
refuse '--schedule: wanted one of' --schedule worst
refuse 'want at least 2 processes' --schedule interleaved
refuse 'no target tokens' --synthetic 1,0,1
refuse '--fail: there is no stage 2' --fail 2:0
refuse '--fail: stage 0 has .* actions' --fail 0:9999
refuse '--fail: wanted STAGE:ACTION' --fail 0:2:explode
refuse 'stream must be 0 or at least 16384' --stream 16383
refuse 'are for one schedule' --sweep --timeline x
refuse 'outputs is for --replay local' --outputs --replay pipeline --schedule paper
refuse 'shared-mean wants --share 1 and no --align' --shared-mean
refuse 'shared-mean wants --share 1 and no --align' --shared-mean --share 1 --align 8
# shellcheck disable=SC2086
run 2 "$exact" $common --stages 3
refused "--stages 3 of 2 processes" '--stages 3 wants as many processes.*mpirun -n 3'
# shellcheck disable=SC2086
run 2 "$exact" $common --schedule interleaved --virtual 5
refused "5 virtual stages on 2 processes with 8 layers" 'want at least 10 layers, the model has 8'
# shellcheck disable=SC2086
run 2 "$exact" $common --fail 1:0:skip
refused "leaving out a receive" 'nan and skip are for passes'
run 2 "$exact" --help
expect "help" 0 'usage: mpirun'
if [ "$(grep -c usage "$work/out")" -ne 1 ]; then fail "help" "not printed once"; fi
# shellcheck disable=SC2086
run 2 "$exact" $common --timeline "$work/none/file"
expect "a timeline that cannot be written" 1 'cannot be written'
# shellcheck disable=SC2086
capture timeout -k 5 600 mpirun --oversubscribe -n 2 "$exact" $common --timeline "$work/none/file"
if grep -q 'MPI_ABORT was invoked' "$work/err" "$work/out"; then fail "and nobody aborts" "somebody did"
else expect "and nobody aborts" 1 'cannot be written'; fi

# ---- ranks in lockstep: an all-reduce in every pass ----

if [ -x "$build/test/lockstep_mpi" ]; then
    for processes in 1 2 4; do
        run $processes "$build/test/lockstep_mpi"
        expect "in step, $processes ranks" 0
    done
    run 2 "$build/test/lockstep_mpi" plain
    expect "ranks whose schedules were made alone" 3 'out of step at pass'
else
    skip "in step" "build/test/lockstep_mpi is not there"
fi

# ---- cp groups: one sequence over two and four ranks ----

if [ -x "$build/test/cp_groups_mpi" ]; then
    if full; then groups="1 2 4 8"; else groups="2 4"; fi
    for processes in $groups; do
        run $processes "$build/test/cp_groups_mpi"
        expect "cp groups of $processes" 0
    done
    run 4 "$build/test/cp_groups_mpi" ring
    expect "cp groups of 4, by a ring" 0
    run 2 "$build/test/cp_groups_mpi" faults
    expect "each message that a rank misses is missed" 0
else
    skip "cp groups" "build/test/cp_groups_mpi is not there"
fi

# ---- ranks that are pipelines, and share a sequence ----

groups="--ranks 2 --max-cp 2 $tiny --layers 4 --window 9 --synthetic 151,5,19,70,8"
# shellcheck disable=SC2086
for kinds in full,delta+experts mamba,window+sinks,latent; do
    run 4 "$checked" $groups --kinds $kinds --schedule paper --k 2
    expect "cp groups of 2 in pipelines of 2 stages, $kinds" 0 'ok, it is rounding'
    grep -q 'ranks 2, cp groups of up to 2' "$work/out" || fail "a cp group of pipelines" "there was none"
done
# shellcheck disable=SC2086
{
    if full; then run 4 "$exact" $groups --kinds full,delta --sweep --k 2; else run 4 "$exact" $groups --kinds full,delta; fi
    expect "cp groups in other schedules" 0
    run 2 "$exact" $groups --stream 100000
    expect "cp groups whose states stream" 2 'nothing streams'
    run 3 "$exact" $groups
    expect "pipelines of two sizes" 2 'ranks 2 wants'
}

# ---- timelines: the measured one has the format of the simulated one, and its order is possible ----

# timeline NAME PROCESSES OPTIONS...
timeline() {
    name="timeline: $1"
    processes=$2
    shift 2
    # shellcheck disable=SC2086
    run "$processes" "$exact" $common --timeline "$work/measured.json" --simulated "$work/simulated.json" \
        --plan "$work/plan.json" "$@"
    if [ "$status" -ne 0 ]; then fail "$name" "exit status $status: $(last_line)"
    elif ! "$build/chunkflow" check --plan "$work/plan.json" "$work/measured.json" --clock-skew 1e-3 >"$work/said" 2>&1
    then fail "$name" "check --plan: $(tail -n 1 "$work/said")"
    elif python "$work/timeline.py" "$work/measured.json" "$work/simulated.json" >"$work/said" 2>&1; then ok "$name"
    else fail "$name" "$(tail -n 1 "$work/said")"; fi
}

cat >"$work/timeline.py" <<'PYTHON'
import json
import sys

measured, simulated = (json.load(open(path)) for path in sys.argv[1:])
times = ("makespan", "busy", "replayed", "bubble_useful", "bubble_busy", "bounds", "peak_bytes")
assert list(measured) == list(simulated), "other members"
assert measured["format"] == "chunkflow-schedule" and measured["lowered"] == 0
for member in measured:
    if member not in times and member != "actions":
        assert measured[member] == simulated[member], member


def plan(schedule):
    keys = ("pass", "chunk", "stage", "keep", "live")
    return [[{k: a.get(k) for k in keys} for a in row] for row in schedule["actions"]]


assert plan(measured) == plan(simulated), "other actions, or other chunks live"
n_virtual = measured["stages"] * measured["virtual_stages"]
local = measured["replay"] == "local"
for schedule in measured, simulated:
    rows, end, busy, replayed = schedule["actions"], {}, 0, 0
    for a in (a for row in rows for a in row):
        assert a["end"] >= a["start"] >= 0
        end[a["pass"], a["chunk"], a["stage"]] = a["end"]
        busy += a["end"] - a["start"]
        replayed += (a["end"] - a["start"]) * (a["pass"] == "R")
    for row in rows:
        for before, after in zip(row, row[1:]):
            assert after["start"] >= before["end"], "a stage did two things at once"
    n_waits = 0
    for a in (a for row in rows for a in row):
        chunk, stage, below, above = a["chunk"], a["stage"], a["stage"] - 1, a["stage"] + 1
        wanted = []
        if a["pass"] == "F" or (a["pass"] == "R" and not local):
            wanted = [(a["pass"], chunk, below)] if below >= 0 else []
        elif a["pass"] in "BI":
            wanted = [(p, chunk, above) for p in "BI" if (p, chunk, above) in end]
            assert len(wanted) == (above < n_virtual)
        for what in wanted:
            n_waits += 1
            assert end[what] <= a["start"], "%s began before %s had ended" % (a, what)
    assert n_waits > 0 or measured["stages"] == 1
    last, slots = max(end.values()), len(rows) * schedule["makespan"]
    assert min(a["start"] for row in rows for a in row) == 0, "the first action does not start at 0"
    assert abs(last - schedule["makespan"]) <= 1e-9 * last
    assert abs(busy - schedule["busy"]) <= 1e-9 * busy and abs(replayed - schedule["replayed"]) <= 1e-9 * busy
    assert abs(1 - busy / slots - schedule["bubble_busy"]) < 1e-9
    assert abs(1 - (busy - replayed) / slots - schedule["bubble_useful"]) < 1e-9
assert 0 < measured["bubble_busy"] < 1 and all(0 < b for b in measured["peak_bytes"])
PYTHON
find_python
if [ -n "$PYTHON" ]; then
    in_full timeline "paper on 4" 4
    timeline "zero-bubble with local replay on 2" 2 --schedule zero-bubble --replay local
    in_full timeline "interleaved on 4" 4 --schedule interleaved
else
    skip timelines "there is no python3"
fi

left_out "K 2 and 3 in most sweeps, seven sweeps, float32, five failures and two timelines"
finish
