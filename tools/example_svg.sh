#!/bin/sh
# example_svg.sh - draws the README's picture: the paper's example whole, and below it in chunks, on one scale of time
#
#     tools/example_svg.sh [CHUNKFLOW] >tools/example.svg       CHUNKFLOW: the command; default build/chunkflow
#
# Both halves are what `plan --svg` draws. The second one is as much narrower as it is shorter.
set -eu
chunkflow=${1:-build/chunkflow}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
printf '1\n1\n2\n4\n' >"$work/example"

draw() { # NAME WIDTH OPTION...: makes $work/NAME, and prints the makespan
    name=$1
    shift
    "$chunkflow" plan --stages 4 --summary --svg "$work/$name" --svg-width "$@" "$work/example" |
        sed -n 's/^makespan *\([0-9]*\) .*/\1/p'
}

idle() { # MAKESPAN: 24 units of every stage are work
    echo "$1" | awk '{ printf "%.0f %%", 100 * ($1 - 24) / $1 }'
}

whole=$(draw whole 720 --chunk-size 4 --max-slices 1 --k 1 --schedule 1f1b)
chunks=$(draw chunks 720 --chunk-size 2 --k 2)
# stage names stand left of 56, and the last pass ends 12 before the edge
draw chunks $((68 + 652 * chunks / whole)) --chunk-size 2 --k 2 >/dev/null
for name in whole chunks; do sed 's/^<svg xmlns="[^"]*"/<svg y="@'$name'"/' "$work/$name" >"$work/$name.inner"; done
height() { sed -n '1s/.* height="\([0-9]*\)".*/\1/p' "$work/$1"; }
second=$((28 + $(height whole)))

cat <<END
<svg $(sed -n '1s/^<svg \(xmlns="[^"]*"\).*/\1/p' "$work/whole") viewBox="0 0 744 $((second + $(height chunks) + 32))" font-size="12"
     font-family="Helvetica, Arial, 'Liberation Sans', sans-serif" fill="#333">
<title>Four sequences of 1, 1, 2 and 4 units on four stages: whole, and in chunks of 2</title>
<rect width="744" height="$((second + $(height chunks) + 32))" rx="6" fill="#fff"/>
<g transform="translate(12 12)">
<text y="12"><tspan font-weight="bold">Whole sequences</tspan>, 1F1B: $whole units of time, stages idle for $(idle $whole)</text>
$(sed 's/@whole/20/' "$work/whole.inner")
<text y="$((second + 8))"><tspan font-weight="bold">Chunks of 2 units</tspan>, best: $chunks units of time, stages idle for $(idle $chunks)</text>
$(sed "s/@chunks/$((second + 16))/" "$work/chunks.inner")
</g>
</svg>
END
