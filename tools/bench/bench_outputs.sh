#!/bin/sh
# bench_outputs.sh - what tune finds with and without attention's outputs of dropped chunks, on the same lists.
#
#     tools/bench/bench_outputs.sh [TRACE] >FILE
#
# To be run in the top directory. CHUNKFLOW (default build/chunkflow) names the command. TRACE is a list of a service's
# requests (Mooncake's, for example); a batch of 256 is drawn from it. All numbers are estimates of tune.
set -eu

CHUNKFLOW=${CHUNKFLOW:-build/chunkflow}
FOLDER=$(mktemp -d)
trap 'rm -rf "$FOLDER"' EXIT
. "${0%/*}/fastest.sh"

# Runs both sides of one comparison, and prints one line about them.
line() { # NAME MODEL GPU GPUS BATCH LIST
    without=$(fastest "$6" --model "$2" --gpu "$3" --gpus "$4" --batch "$5" --no-outputs)
    with=$(fastest "$6" --model "$2" --gpu "$3" --gpus "$4" --batch "$5")
    echo "$without $with" | awk -v name="$1" -v on="$2 on $4 $3" '{
        gib = 1024 * 1024 * 1024
        whole = $16 == "-" ? "-" : sprintf("%.2f", $16)
        printf "%-28s %-29s %8.2f %6.1f  %-7s %7d %3d %-7s %8.2f %6.1f  %-7s %7d %3d %-7s %-5s %5.3f  %s\n", on, name,
               $1, $2 / gib, $3, $4, $5, $6, $9, $10 / gib, $11, $12, $13, $14, $15, $1 / $9, whole }'
}

lists() {
    echo 1M >"$FOLDER/1"
    echo 256K 16 >"$FOLDER/16"
    { echo 256K && "$CHUNKFLOW" gen lmsys --n 127 --seed 1; } >"$FOLDER/128"
    "$CHUNKFLOW" gen lmsys --n 256 --seed 2 --max 32K >"$FOLDER/256"
    "$CHUNKFLOW" gen lognormal --n 64 --median 16K --sigma 1 --max 256K --seed 3 >"$FOLDER/64"
    echo 32K 32 >"$FOLDER/32"
}

cat <<END
The fastest settings that tune finds, without attention's outputs of dropped chunks and with them (chunkflow tune
--batches 1 --tolerance 0, $(git rev-parse --short HEAD)). s: estimated seconds of a step. split: tensor, pipeline,
data. S: state streams. ratio: seconds without / with. whole: 1F1B that splits no sequence, "-" where it does not fit.

                                                           | without                                      | with
model                        list                                 s    GiB  split     chunk   K recompute       s    GiB  split     chunk   K recompute outputs ratio  whole
END
lists
for setup in "qwen2.5-7b h100-80g 8" "qwen2.5-32b h100-80g 32" "qwen3-30b-a3b h100-80g 16"; do
    # Each setup is words.
    # shellcheck disable=SC2086
    {
        line "one 1M" $setup 1 "$FOLDER/1"
        line "16 x 256K" $setup 16 "$FOLDER/16"
        line "256K + 127 chats" $setup 128 "$FOLDER/128"
        line "256 chats to 32K" $setup 256 "$FOLDER/256"
        line "64 lognormal around 16K" $setup 64 "$FOLDER/64"
        line "32 x 32K" $setup 32 "$FOLDER/32"
        if [ $# -gt 0 ]; then line "256 of a service" $setup 256 "$1"; fi
    }
done
line "256K + 127 chats" qwen2.5-1.5b h200 1 128 "$FOLDER/128"
line "64 lognormal around 16K" qwen2.5-1.5b h200 1 64 "$FOLDER/64"
if [ $# -gt 0 ]; then line "256 of a service" qwen2.5-1.5b h200 1 256 "$1"; fi
