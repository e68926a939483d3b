#!/bin/sh
# bench_stream.sh - what a GPU holds as the context grows, with all state on it and with state streamed by layer.
#
#     tools/bench/bench_stream.sh >FILE
#
# To be run in the top directory. CHUNKFLOW (default build/chunkflow) names the command. All numbers are the memory
# model's; nothing is measured.
set -eu

CHUNKFLOW=${CHUNKFLOW:-build/chunkflow}
CHUNK=8K
RING=64M

# Prints the fullest GPU's bytes, and the bytes in host memory of the GPU with most of them.
bytes() { # MODEL TP PP CONTEXT OPTIONS...
    model=$1 tp=$2 pp=$3 context=$4
    shift 4
    "$CHUNKFLOW" memory --model "$model" --tp "$tp" --pp "$pp" --chunk-size $CHUNK --context "$context" --k 1 \
        --recompute selective --local-replay --tsv "$@" |
        awk -F '\t' 'NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i; next }
            $at["total_bytes"] > most { most = $at["total_bytes"] }
            $at["host_bytes"] > host { host = $at["host_bytes"] }
            END { printf "%.0f %.0f\n", most, host }'
}

cat <<END
GiB on the fullest GPU as the context grows, by the memory model (chunkflow memory --tsv, $(git rev-parse --short HEAD))
ChunkSize $CHUNK, K 1, selective recomputation, local replay, no ZeRO, fragmentation 10 %. "stays": all state and all
kept stage inputs on the GPU. "streamed": --stream $RING, a ring of 64 MiB on each GPU; in host memory, for each GPU,
what "host" says. The percentages are against 32K of the same row.

model         tp pp            32K             256K               1M   host, 256K      1M
END
for setup in "qwen2.5-7b 4 1" "qwen2.5-7b 4 4" "qwen2.5-14b 4 4" "qwen2.5-32b 4 4" "qwen2.5-32b 8 4" "qwen2.5-72b 8 4" \
             "qwen2.5-72b 8 8"; do
    for way in stays streamed; do
        line=
        for context in 32K 256K 1M; do
            # Each setup is words.
            # shellcheck disable=SC2086
            if [ $way = stays ]; then line="$line $(bytes $setup $context)"
            else line="$line $(bytes $setup $context --stream $RING)"; fi
        done
        echo "$setup $way $line" | awk '{
            gib = 1024 * 1024 * 1024
            printf "%-12s %3d %2d %-8s %7.2f  %7.2f %+6.1f %%  %7.2f %+6.1f %%  %7.2f %9.2f\n", $1, $2, $3, $4,
                   $5 / gib, $7 / gib, 100 * ($7 / $5 - 1), $9 / gib, 100 * ($9 / $5 - 1), $8 / gib, $10 / gib }'
    done
done
