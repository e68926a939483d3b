#!/bin/sh
# pictures.sh - makes the pictures of README and of the pages anew: `make pictures`
#
#     tools/guide/pictures.sh CHUNKFLOW FOLDER        CHUNKFLOW: the command, FOLDER: where they go
#
# Most are made by the commands that stand on the pages. README's has the paper's example whole, and below it in chunks,
# on one scale of time. Both halves are what `plan --svg` draws; the second is as much narrower as it is shorter.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
case $1 in /*) chunkflow=$1 ;; *) chunkflow=$PWD/$1 ;; esac
mkdir -p "$2"
folder=$(cd "$2" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

for page in "$here"/*.md; do
    grep -e '^    build/chunkflow .* --svg tools/guide/' -e '^    printf ' "$page" |
        sed "s#build/chunkflow#'$chunkflow'#; s#tools/guide/#'$folder'/#g" >commands || continue
    sh -e commands >said
done

printf '1\n1\n2\n4\n' >example

draw() { # NAME WIDTH OPTION...: makes NAME, and prints the makespan
    name=$1
    shift
    "$chunkflow" plan --stages 4 --summary --svg "$name" --svg-width "$@" example |
        sed -n 's/^makespan *\([0-9]*\) .*/\1/p'
}

idle() { # MAKESPAN: 24 units of every stage are work
    echo "$1" | awk '{ printf "%.0f %%", 100 * ($1 - 24) / $1 }'
}

whole=$(draw whole 720 --chunk-size 4 --max-slices 1 --k 1 --schedule 1f1b)
chunks=$(draw chunks 720 --chunk-size 2 --k 2)
# stage names stand left of 56, and the last pass ends 12 before the edge
draw chunks $((68 + 652 * chunks / whole)) --chunk-size 2 --k 2 >/dev/null
for name in whole chunks; do sed 's/^<svg xmlns="[^"]*"/<svg y="@'$name'"/' "$name" >"$name.inner"; done
height() { sed -n '1s/.* height="\([0-9]*\)".*/\1/p' "$1"; }
second=$((28 + $(height whole)))

cat >"$folder/example.svg" <<END
<svg $(sed -n '1s/^<svg \(xmlns="[^"]*"\).*/\1/p' whole) viewBox="0 0 744 $((second + $(height chunks) + 32))" font-size="12"
     font-family="Helvetica, Arial, 'Liberation Sans', sans-serif" fill="#333">
<title>Four sequences of 1, 1, 2 and 4 units on four stages: whole, and in chunks of 2</title>
<rect width="744" height="$((second + $(height chunks) + 32))" rx="6" fill="#fff"/>
<g transform="translate(12 12)">
<text y="12"><tspan font-weight="bold">Whole sequences</tspan>, 1F1B: $whole units of time, stages idle for $(idle $whole)</text>
$(sed 's/@whole/20/' whole.inner)
<text y="$((second + 8))"><tspan font-weight="bold">Chunks of 2 units</tspan>, best: $chunks units of time, stages idle for $(idle $chunks)</text>
$(sed "s/@chunks/$((second + 16))/" chunks.inner)
</g>
</svg>
END
