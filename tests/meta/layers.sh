#!/bin/sh
# layers.sh - tests that the files of the tools lean on each other in one direction.
#
#     tests/meta/layers.sh [BUILD]
#
# BUILD (default: build) has the command's objects, in the folders that their sources have in tools/. Files include each
# other's headers (NAME.c and NAME.h are one file here) and call each other's functions: neither goes in a circle, and
# no file includes one of a folder above its own. From below: chunkflow.h, chunkflow_tune.h, command/, report/.
set -u
. "$(dirname "$0")/../helpers.sh"
workplace "$(mktemp -d)"

# Prints "FILE INCLUDED" for each include between the FILES, as paths from here.
includes() { # FILES
    awk -F '"' '/^#include "/ {
        path = FILENAME
        sub(/[^\/]*$/, "", path)
        path = path $2
        while (sub(/[^\/]+\/\.\.\//, "", path)) ;
        print FILENAME, path
    }' "$@"
}

# Reads such lines and prints those that go up.
upward() {
    awk 'function level(path) {
             return path ~ /^tools\/report\// ? 3 : path ~ /^tools\/command\// ? 2 : path ~ /^tools\// ? 1 : 0
         }
         level($2) > level($1) { print $1 " includes " $2 }'
}

# Prints "A B" for each pair of OBJECTS of which A calls what B defines.
calls() { # OBJECTS
    nm -A -g "$@" | awk '
        { file = $1; sub(/:.*/, "", file); sub(/.*\//, "", file); sub(/\.o$/, "", file) }
        $(NF - 1) == "U" { called[file, $NF] = 1; next }
        { defined[$NF] = file }
        END { for (key in called) {
                  split(key, of, SUBSEP)
                  if (of[2] in defined) print of[1], defined[of[2]] } }'
}

# Reads pairs and prints the files that are in a circle, with pairs of a file and itself left out.
circles() {
    awk '$1 != $2' >"$work/pairs"
    tsort "$work/pairs" 2>&1 >/dev/null | sed -n 's/^tsort: *//p' | grep -v ':' | sort -u | xargs
}

nothing() { # NAME GOT
    if [ -z "$2" ]; then ok "$1"; else fail "$1" "$2"; fi
}

# Each check sees what it looks for.
printf '%s\n' 'tools/command/a.c tools/report/r.h' 'tools/report/r.c tools/command/a.h' | upward >"$work/out"
case $(cat "$work/out") in
    'tools/command/a.c includes tools/report/r.h') ok layers/harness/upward ;;
    *) fail layers/harness/upward "$(cat "$work/out")" ;;
esac
case $(printf '%s\n' 'a a' 'a b' 'b c' 'c b' | circles) in
    'b c') ok layers/harness/circles ;;
    *) fail layers/harness/circles "it found no circle in a a, a b, b c, c b" ;;
esac

includes tools/*.h tools/command/*.[ch] tools/report/*.[ch] |
    grep -Ev ' (tools/)?chunkflow(_tune)?\.h$' >"$work/includes"
nothing layers/includes/upward "$(upward <"$work/includes")"
nothing layers/includes/circles "$(sed 's,[^ ]*/,,g; s/\.[ch]//g' "$work/includes" | circles)"
if ! command -v nm >/dev/null 2>&1; then
    skip layers/calls "there is no nm"
elif ! [ -e "${1:-build}/command/cli.o" ]; then
    fail layers/calls "there are no objects in ${1:-build}/command"
else
    nothing layers/calls "$(calls "${1:-build}"/command/*.o "${1:-build}"/report/*.o | circles)"
fi
finish
