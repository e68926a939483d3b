#!/bin/sh
# bench_reach.sh - models with recurrent layers: chunks without and with cp groups, beside whole sequences with context
# parallelism - MIT or public domain
#
#     tools/bench/bench_reach.sh [TRACE] >FILE
#
# To be run in the top directory. CHUNKFLOW (default build/chunkflow) names the command. TRACE is a list of a service's
# requests; a batch of 256 is drawn from it. All numbers are estimates of tune, scans and corrections included.
set -eu

CHUNKFLOW=${CHUNKFLOW:-build/chunkflow}
FOLDER=$(mktemp -d)
trap 'rm -rf "$FOLDER"' EXIT
. "${0%/*}/fastest.sh"

line() { # NAME MODEL GPU GPUS BATCH LIST
    alone=$(fastest "$6" --model "$2" --gpu "$3" --gpus "$4" --batch "$5")
    groups=$(fastest "$6" --model "$2" --gpu "$3" --gpus "$4" --batch "$5" --max-cp 16)
    echo "$alone $groups" | awk -v name="$1" -v on="$2 on $4 $3" '
        function over(a, b) { return a == "-" || b == "-" ? "-" : sprintf("%.3f", a / b) }
        function seconds(of) { return of == "-" ? "-" : sprintf("%.2f", of) }
        { printf "%-32s %-24s %8s %8s %8s  %6s %6s  %-8s %7s %s\n", on, name, seconds($8), seconds($1), seconds($9),
                 over($16, $1), over($16, $9), $11, $12, $14 }'
}

{ echo 256K && "$CHUNKFLOW" gen lmsys --n 127 --seed 1; } >"$FOLDER/chats"
"$CHUNKFLOW" gen lognormal --n 64 --median 16K --sigma 1 --max 256K --seed 3 >"$FOLDER/tail"
echo 256K 16 >"$FOLDER/long"

cat <<END
s: estimated seconds of a step, of whole sequences with context parallelism, of chunks, and of chunks in cp groups of up
to 16 ranks. over: seconds of whole sequences over those of chunks, without groups and with them. split: tensor,
pipeline, data. S: state streams. "-": nothing fits.

model                            list                        whole   chunks   groups    over groups  split      chunk recompute
END
for on in "qwen3.5-35b-a3b h100-80g 16" "qwen3.5-35b-a3b h100-80g 32" "qwen3.5-27b h100-80g 8" \
    "qwen3.5-27b h100-80g 16" "qwen3.5-27b h100-80g 32" "qwen3.5-35b-a3b h200 8" "qwen3.5-27b h200 8"; do
    # Each is words.
    # shellcheck disable=SC2086
    {
        line "256K + 127 chats" $on 128 "$FOLDER/chats"
        line "64 lognormal around 16K" $on 64 "$FOLDER/tail"
        [ -z "${1:-}" ] || line "256 of a service" $on 256 "$1"
    }
done
line "16 x 256K" nemotron-3-nano-30b-a3b h100-80g 128 16 "$FOLDER/long"
line "16 x 256K" qwen2.5-7b h100-80g 64 16 "$FOLDER/long"
line "16 x 256K" qwen2.5-72b h100-80g 256 16 "$FOLDER/long"
