#!/bin/sh
# train_predictions.sh - how fast the training record's shapes should be, by the models of time and memory
#
#     sh tools/device/train_predictions.sh >tools/device/train_predictions.csv
#     sh tools/device/train_predictions.sh LIST FILE      the batch of one list alone, whose lengths FILE has
#
# CHUNKFLOW names the command (default build/chunkflow). A line for each speed that gpu_record_train.sh measures: its
# step's name, tokens/s, and MiB of the device. The committed file was written before anything had run on a device.
# Exit status: 0, 1 where the command could not say one of the numbers, 2 where LIST is none or FILE has no lengths.

set -eu
LC_ALL=C
export LC_ALL
CHUNKFLOW=${CHUNKFLOW:-build/chunkflow}
gpu=h200
. tools/device/train_shapes.sh
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

fail() { # STATUS MESSAGE
    printf 'train_predictions.sh: %s\n' "$2" >&2
    exit "$1"
}

if [ $# -gt 0 ]; then
    [ $# -eq 2 ] || fail 2 "wanted a list and its file, or nothing"
    case " $(for model in $models; do lists_of "$model"; done | tr '\n' ' ')" in
        *" $1 "*) ;;
        *) fail 2 "there is no list $1" ;;
    esac
    [ "$(longest_in "$2")" -gt 0 ] 2>/dev/null || fail 2 "$2: it has no lengths"
fi

# Seconds that each batch takes beside its passes: the optimizer.
once() { # MODEL
    # shellcheck disable=SC2046
    "$CHUNKFLOW" time $(options_of "$1") --gpu $gpu --chunk-size $chunk_size |
        awk '/^once a step/ { print $4 / 1000 }'
}

predict() { # MODEL LIST FILE WAY RECOMPUTE
    case $4 in
        chunkflow) cut=$(chunks_of "$2" "$5") ;;
        one) cut="--chunk-size $(longest_in "$3") --k 1 --max-slices 1" ;;
        packed) cut="--chunk-size $(longest_in "$3") --k 1" ;;
    esac
    # shellcheck disable=SC2046,SC2086
    "$CHUNKFLOW" plan $(options_of "$1") --gpu $gpu --recompute "$5" --loss chunked $cut --schedule paper \
        --summary "$3" | awk -v name="speed $1 $2 $4 $5" -v once="$once" '
            function plain(text) { gsub(/,/, "", text); return text + 0 }
            /^input/ { tokens = plain($(NF - 1)) }
            /^makespan/ { seconds = $2 }
            /^peak memory/ { mebibytes = 1024 * $3 }
            END {
                if (tokens <= 0 || seconds <= 0 || once <= 0 || mebibytes <= 0) exit 1
                printf "%s,%.0f,%.0f\n", name, tokens / (seconds + once), mebibytes
            }' || fail 1 "speed $1 $2 $4 $5: no prediction"
}

printf 'step,tokens_per_s,mib\n'
for model in $models; do
    once=$(once "$model")
    for list in $(lists_of "$model"); do
        file=$work/$list
        if [ $# -gt 0 ]; then
            [ "$1" = "$list" ] || continue
            file=$2
        else draw_lengths "$CHUNKFLOW" "$list" >"$file"; fi
        for way in $ways; do
            for recompute in $recomputes; do predict "$model" "$list" "$file" "$way" "$recompute"; done
        done
    done
done
