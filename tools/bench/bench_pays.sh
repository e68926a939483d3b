#!/bin/sh
# bench_pays.sh - when chunks pay: the best of chunks, by tune, beside what users of each kind have today.
#
#     sh tools/bench/bench_pays.sh >FILE
#
# To be run in the top directory. CHUNKFLOW (default build/chunkflow) names the command. Numbers are estimates.
set -eu

CHUNKFLOW=${CHUNKFLOW:-build/chunkflow}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# seconds MEMBER: prints the seconds of a member; "-" if it does not fit
seconds() { sed -n '/"'"$1"'": {/,/}/s/.*"seconds": \([0-9.]*\).*/\1/p' "$work/json" | grep . || echo -; }

# line USER LIST SEQUENCES OPTIONS...
line() {
    user=$1 from=$2 n=$3
    shift 3
    rm -f "$work/json"
    "$CHUNKFLOW" tune "$work/$from" --batch "$n" --batches 1 --tolerance 0 --json "$work/json" "$@" >"$work/said" 2>&1 ||
        [ -s "$work/json" ] || { cat "$work/said" >&2; exit 1; }
    awk -F ': ' '/"winner":/ { winner = $2 + 0; print "\"chunks\": {" } /"id":/ { here = $2 + 0 == winner }
        here && /"seconds":/ { print; here = 0; print "}" }' "$work/json" >"$work/winner"
    cat "$work/winner" >>"$work/json"
    echo "$user $from $(seconds chunks) $(seconds baseline) $(seconds fsdp_recipe) $*" | awk '
        function by(other) { return other == "-" || $3 == "-" ? "-" : sprintf("%.2f", other / $3) }
        { printf "%-9s %-7s %8.7s %8.7s %8.7s %6s %6s ", $1, $2, $3, $4, $5, by($4), by($5)
          for (i = 6; i <= NF; i++) printf " %s", $i
          print "" }'
}

{ "$CHUNKFLOW" gen lmsys --n 255 --seed 3; echo 256K; } >"$work/chat"
{ "$CHUNKFLOW" gen lognormal --n 253 --median 1K --max 4K --seed 4; printf '32K\n64K\n128K\n'; } >"$work/tail"
"$CHUNKFLOW" gen lognormal --n 128 --median 12K --sigma 1 --max 128K --seed 5 >"$work/agents"
i=0; while [ $i -lt 16 ]; do echo "4K + 8K 16"; i=$((i + 1)); done >"$work/rl"
echo 256K 64 >"$work/256K"
echo 256K 16 >"$work/long"
echo 1M >"$work/1M"

cat <<'END'
When chunks pay, as estimated: seconds of an iteration in the best chunks that `tune` finds, and in what users
have today. Nothing ran on a device. Each line is one call, which searches ZeRO 1 to 3 as well; N are the sequences of
LIST, which is one batch, and settings are tuned to it:

    chunkflow tune LIST --batch N --batches 1 --tolerance 0 OPTIONS

whole     the fastest of whole sequences: any split, context parallelism, recomputation, and checkpoints in host memory
          where nothing else fits; on one GPU `fsdp`, which always has them there, is 0.1 to 0.5 % faster in two lines
fsdp      the recipe that most trainers have: ZeRO 3, no tensor parallelism, no pipeline, full recomputation with
          checkpoints in host memory, the smallest context-parallel size that fits
ratios    whole / chunks and fsdp / chunks; above 1 chunks are faster
"-"       does not fit; only where `whole` has it do only chunks fit

chat      gen lmsys --n 255 --seed 3, and one of 256K
tail      gen lognormal --n 253 --median 1K --max 4K --seed 4, and 32K, 64K and 128K
agents    gen lognormal --n 128 --median 12K --sigma 1 --max 128K --seed 5
rl        16 prompts of 4K with 16 answers of 8K each; whole sequences have each prompt 16 times
256K      64 sequences of 256K; long: 16
1M        one sequence

user      list      chunks    whole     fsdp  whole   fsdp  options
END
seven="--model qwen2.5-7b --gpu h100-80g --gpus"
large="--model qwen2.5-32b --gpu h100-80g --gpus"
experts="--model qwen3-30b-a3b --gpu h100-80g --gpus"
hybrid="--model qwen3.5-35b-a3b --gpu h100-80g --gpus"
# Each of these is words.
# shellcheck disable=SC2086
{
    for setting in "$seven 8" "$seven 64" "$large 64" "$experts 64"; do line rl rl 256 $setting; done
    for list in "chat 256" "tail 256" "agents 128"; do
        for setting in "$seven 8" "$seven 64" "$large 32" "$large 128"; do
            line dense $list $setting
            line dense $list $setting --max-cp 32
        done
        for setting in "$experts 16" "$experts 64"; do
            line experts $list $setting
            line experts $list $setting --max-cp 32
        done
    done
    line one-gpu tail 256 --model qwen2.5-3b --gpu h100-80g --gpus 1 --offload optimizer
    line one-gpu agents 128 --model qwen2.5-3b --gpu h100-80g --gpus 1 --offload optimizer
    line one-gpu agents 128 $seven 1 --offload optimizer
    for list in "chat 256" "tail 256" "agents 128"; do
        for setting in "$hybrid 16" "$hybrid 64"; do line hybrid $list $setting --max-cp 32; done
    done
    line hybrid long 16 --model nemotron-3-nano-30b-a3b --gpu h100-80g --gpus 128 --max-cp 16
    for setting in "$seven 64" "$large 64"; do line uniform 256K 64 $setting --max-cp 32; done
    line million 1M 1 --model qwen3-32b --gpu h100-80g --gpus 8 --offload parameters --reserve 0
}
cat <<'END'

The last line has parameters and optimizer states in host memory, as TRL's run had, which took 1,295 s (pull
requests 6845, 6846).
END
