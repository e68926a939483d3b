#!/bin/sh
# train_paper.sh - the paper's setting, from passes that were timed on one GPU
#
#     sh tools/device/train_paper.sh DIR        prints CSV: setting,batches,chunked_s,whole_s,speedup,paper
#
# DIR has what train_cuda --times wrote: SLICE.chunked.SIZE for each ChunkSize and SLICE.whole, where SLICE is middle
# (layers alone: every stage but the last one) or last (with the head). They are fitted by `chunkflow time --fit`, and
# batches of 256 sequences as of LMSys-Chat-1M, none longer than the context, are simulated for the paper's four stages:
# chunkflow with the best of the ChunkSizes, with the paper's schedule, against 1F1B on whole sequences.
#
# This runs no pipeline and no tensor parallelism. A stage of TP 4 would take about a quarter of these times, plus its
# communication, which is not measured and left out on both sides. CHUNKFLOW names the command,
# BATCHES (default 8) how many are drawn.

set -eu
LC_ALL=C
export LC_ALL
CHUNKFLOW=${CHUNKFLOW:-build/chunkflow}
BATCHES=${BATCHES:-8}
# 7B on 16 GPUs, TP 4 and PP 4: a stage has 7 layers, and ChunkSize x K is constant, as in the paper's table.
stages=4
context=262144
documents=256
slice_chunks='2048:16 4096:8 8192:4 16384:2 32768:1'
longest_in() { awk '$1 > most { most = $1 } END { print most }' "$1"; } # FILE
if [ $# -ne 1 ] || [ ! -d "$1" ]; then
    printf 'usage: train_paper.sh DIR\n' >&2
    exit 2
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

fit() { # NAME FILE...: its costs, as an object on one line
    name=$1
    shift
    cat "$@" >"$work/samples"
    "$CHUNKFLOW" time --fit "$work/samples" --json "$work/fit" >/dev/null
    grep -v '"format"\|"version"' "$work/fit" | tr -d '\n' >"$work/$name"
}

# The last stage is the one with the head.
costs() { # WAY
    printf '{"format": "chunkflow-time", "stages": ['
    stage=1
    while [ "$stage" -lt "$stages" ]; do
        cat "$work/middle.$1"
        printf ', '
        stage=$((stage + 1))
    done
    cat "$work/last.$1"
    printf ']}\n'
}

makespan() { # COSTS FILE OPTIONS...
    costs=$1
    list=$2
    shift 2
    "$CHUNKFLOW" plan --costs "$costs" --stages "$stages" "$@" --summary "$list" >"$work/plan"
    awk '/^makespan/ { print $2; found = 1 } END { exit !found }' "$work/plan"
}

for slice in middle last; do
    fit $slice.chunked "$1/$slice".chunked.*
    fit $slice.whole "$1/$slice".whole
done
for way in chunked whole; do costs $way >"$work/$way.json"; done

: >"$work/seconds"
seed=1
while [ "$seed" -le "$BATCHES" ]; do
    "$CHUNKFLOW" gen lmsys --n "$documents" --seed "$seed" --max "$context" >"$work/lengths"
    for chunk in $slice_chunks; do
        printf 'chunked %s ' "$seed"
        makespan "$work/chunked.json" "$work/lengths" --chunk-size "${chunk%:*}" --k "${chunk#*:}" --schedule paper
    done >>"$work/seconds"
    printf 'whole %s ' "$seed" >>"$work/seconds"
    makespan "$work/whole.json" "$work/lengths" --chunk-size "$(longest_in "$work/lengths")" --max-slices 1 --k 1 \
        --schedule 1f1b >>"$work/seconds"
    seed=$((seed + 1))
done

awk -v batches="$BATCHES" '
    $1 == "whole" { whole += $3 }
    $1 == "chunked" && (!($2 in best) || $3 < best[$2]) { best[$2] = $3 }
    END {
        for (seed in best) chunked += best[seed]
        print "setting,batches,chunked_s,whole_s,speedup,paper"
        printf "7B 256K PP 4 simulated from passes timed on one GPU; tensor parallelism not measured,"
        printf "%d,%.6g,%.6g,%.2f,4.53\n", batches, chunked, whole, whole / chunked
    }' "$work/seconds"
