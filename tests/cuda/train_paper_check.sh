#!/bin/sh
# train_paper_check.sh - the paper's setting by passes that are made up here, and the rival of the device's record
#
#     tests/cuda/train_paper_check.sh          CHUNKFLOW names the command (default BUILD/test/chunkflow)
#     tests/cuda/train_paper_check.sh rival    only the rival, which trains a tiny shape on the CPU with PYTHON's
#                                              PyTorch
#
# Run it in the top directory. Prints "ok NAME" or "FAIL NAME: why" for each case and "N passed, N failed" at the end.

. "$(dirname "$0")/../helpers.sh"

build=${BUILD:-build}
workplace "$build/train_paper_check.tmp"
CHUNKFLOW=${CHUNKFLOW:-$build/test/chunkflow}
export CHUNKFLOW

rival=tools/bench/bench_train_hf.py
if [ "${1:-}" = rival ]; then
    printf '200\n31\n7\n90\n' >"$work/lengths"
    capture env "CHUNKFLOW_BUILD=$build" OMP_NUM_THREADS=1 "$PYTHON" -B $rival --cpu --lengths "$work/lengths" --steps 2
    expect "the rival on the CPU" 0 "^step 2/2  loss [0-9.]*  2 chunks  [0-9]* tokens/s"
    finish
fi

# samples CONSTANT PER_TOKEN PER_PAIR BACKWARD: prints forwards that take exactly these times, and backwards that take
# BACKWARD times as long
samples() {
    awk -v c="$1" -v t="$2" -v p="$3" -v times="$4" 'BEGIN {
        n = split("512 1024 2048 4096", rows, " ")
        for (i = 1; i <= n; i++) for (prefix = 0; prefix < 20000; prefix += 6000) {
            pairs = rows[i] * prefix + rows[i] * (rows[i] + 1) / 2
            seconds = c + t * rows[i] + p * pairs
            printf "F %d %d %.15g\nR %d %d %.15g\nB %d %d %.15g\n", rows[i], pairs, seconds, rows[i], pairs, seconds,
                rows[i], pairs, times * seconds
        } }'
}

# Fits of such passes give the paper's setting the same result as the same numbers as options of plan, if all stages are
# alike. With a head that doubles its cost, the last stage delays the others.
paper() {
    name="the paper's setting"
    mkdir -p "$work/times"
    for slice in middle last; do
        samples 0.001 1e-6 1e-11 2 >"$work/times/$slice.chunked.2048"
        samples 0.002 1e-6 1e-11 3 >"$work/times/$slice.whole"
    done
    if ! BATCHES=1 sh tools/device/train_paper.sh "$work/times" >"$work/paper.csv" 2>"$work/err"; then
        fail "$name" "it fails" "$work/err"
        return
    fi
    "$CHUNKFLOW" gen lmsys --n 256 --max 262144 >"$work/lengths"
    whole=$("$CHUNKFLOW" plan --stages 4 --schedule 1f1b --k 1 --max-slices 1 --chunk-size 262144 \
        --cost 0.002,1e-6,1e-11 --backward-cost 0.006,3e-6,3e-11 --summary "$work/lengths" |
        awk '/^makespan/ { print $2 }')
    best=$(for chunk in '2048 --k 16' '4096 --k 8' '8192 --k 4' '16384 --k 2' '32768 --k 1'; do
        # shellcheck disable=SC2086
        "$CHUNKFLOW" plan --stages 4 --schedule paper --chunk-size $chunk --cost 0.001,1e-6,1e-11 --backward-cost \
            0.002,2e-6,2e-11 --summary "$work/lengths" | awk '/^makespan/ { print $2 }'
    done | sort -g | head -n 1)
    if awk -F, -v whole="$whole" -v best="$best" 'NR == 2 { found = $3 > 0.9999 * best && $3 < 1.0001 * best &&
            $4 > 0.9999 * whole && $4 < 1.0001 * whole && $6 == 4.53 } END { exit !(found && NR == 2) }' \
        "$work/paper.csv"; then ok "$name"
    else fail "$name" "not $best and $whole" "$work/paper.csv"; fi
    name="the paper's setting with a head"
    before=$(awk -F, 'NR == 2 { print $4 }' "$work/paper.csv")
    samples 0.004 2e-6 2e-11 3 >"$work/times/last.whole"
    BATCHES=1 sh tools/device/train_paper.sh "$work/times" >"$work/paper.csv" 2>"$work/err"
    if awk -F, -v before="$before" 'NR == 2 { ok = $4 > 1.8 * before && $4 < 2.05 * before } END { exit !ok }' \
        "$work/paper.csv"; then ok "$name"; else fail "$name" "whole: $before before" "$work/paper.csv"; fi
    rm "$work/times/middle.whole"
    capture sh tools/device/train_paper.sh "$work/times"
    if [ "$status" -ne 0 ] && [ ! -s "$work/out" ]; then ok "the paper's setting without its passes"
    else fail "the paper's setting without its passes" "status $status" "$work/out"; fi
}

# Checks only that the rival is valid Python. `make test-torch`, which has its packages, runs it.
rival_parses() {
    if python -c "compile(open('$rival').read(), '$rival', 'exec')" 2>"$work/err"; then ok "the rival parses"
    else fail "the rival parses" "it does not" "$work/err"; fi
}

find_python
if [ -z "$PYTHON" ]; then skip "the rival" "there is no Python"; else rival_parses; fi

if [ -x "$CHUNKFLOW" ]; then
    paper
else skip "the paper's setting" "there is no $CHUNKFLOW"; fi
finish
