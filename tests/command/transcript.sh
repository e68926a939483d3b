#!/bin/sh
# transcript.sh - runs a transcript of the chunkflow command and compares what comes out with what stands there.
#
#     tests/command/transcript.sh FILE [FILTER]        UPDATE=1: writes what comes out into FILE where it differs
#
# CHUNKFLOW names the program (default build/chunkflow); with FILTER only sections run whose name contains it, behind
# what stands before the first. In FILE
#
#     == name                              begins a section; "== name, where COMMAND": left out where COMMAND fails
#     Text at the left margin says why.
#       $ chunkflow pack --chunk-size 8    a command, for the shell; "  > " continues it on further lines
#       chunks            7: ...           what it prints: "..." is any text, on a line of its own any lines,
#       fill              {90..100} %      and {LOW..HIGH} is any number from LOW to HIGH
#       2! chunkflow pack: ...             standard error, and the exit code where it is not 0: "2!" alone says nothing
#
# All commands of a file run in one shell and one empty directory, without standard input, and leave names in capitals to
# the runner; what a section needs stands in it or before the first one. Prints FAIL with the difference for each command
# that differs, "ok" for each section where none does, and at the end how many commands there were.
set -u
HERE=$(cd "$(dirname "$0")" && pwd)
. "$HERE/../helpers.sh"

FILTER=${2:-}
case $1 in /*) TRANSCRIPT=$1 ;; *) TRANSCRIPT=$PWD/$1 ;; esac
CHUNKFLOW=${CHUNKFLOW:-build/chunkflow}
CHUNKFLOW_PLAIN=${CHUNKFLOW_PLAIN:-$CHUNKFLOW} # without sanitizers, for what takes long
case $CHUNKFLOW in /*) ;; *) CHUNKFLOW=$PWD/$CHUNKFLOW ;; esac
case $CHUNKFLOW_PLAIN in /*) ;; *) CHUNKFLOW_PLAIN=$PWD/$CHUNKFLOW_PLAIN ;; esac
TOP=$(cd "$HERE/../.." && pwd)
[ -x "$CHUNKFLOW" ] || { fail transcript "there is no program $CHUNKFLOW"; finish; }
find_python

# ---- what transcripts call ----

# Says on standard error with which code the command ended, where it is not 0.
chunkflow() {
    "$CHUNKFLOW" "$@" || { set -- $?; echo "[$1]" >&2; return "$1"; }
}

# Runs the command with the program that has no sanitizers; `quick` does so unless FULL=1.
plain() {
    SANITIZED=$CHUNKFLOW
    CHUNKFLOW=$CHUNKFLOW_PLAIN
    "$@"
    set -- $?
    CHUNKFLOW=$SANITIZED
    return "$1"
}
quick() { if full; then "$@"; else plain "$@"; fi; }

# From here to the end of the section the program without sanitizers, unless FULL=1.
quickly() { full || CHUNKFLOW=$CHUNKFLOW_PLAIN; }

# Passes on the lines that begin with one of these words.
rows() { # LABEL...
    for label; do
        set -- "$@" -e "^$label"
        shift
    done
    grep "$@"
}

# Prints one word of the first line that begins with LABEL, without its commas: the first word behind it, or another.
number() { # LABEL [WORD]
    sed -n "s/^$1  *//p" | awk -v word="${2:-1}" '{ gsub(",", "", $word); print $word; exit }'
}

# Prints the fields of these columns of a table with tabs, "-" for an empty one.
columns() { # NAME...
    awk -F '\t' -v names="$*" 'NR == 1 { n = split(names, name, " "); for (i = 1; i <= NF; i++) at[$i] = i; next }
        { for (i = 1; i <= n; i++) {
              field = !(name[i] in at) ? "no column" : $at[name[i]] == "" ? "-" : $at[name[i]]
              printf "%s%s", field, i < n ? " " : "\n" } }'
}

# ---- the runner's own ----

section() { # NAME: of the commands that follow
    CHUNKFLOW=$TESTED
}

# Ends the output of the command that begins on that line.
ended() { # LINE STATUS
    printf '\n' >>"$LOG"
    while IFS= read -r TOLD || [ -n "$TOLD" ]; do printf '\002%s\n' "$TOLD"; done <"$ERR" >>"$LOG"
    printf '\001%s %s\n' "$1" "$2" >>"$LOG"
}

TESTED=$CHUNKFLOW
PLACE=$(mktemp -d)
LOG=$PLACE/log ERR=$PLACE/err
: >"$LOG"
workplace "$PLACE/work"
trap 'rm -rf "$PLACE"' EXIT # and the work in it
awk -v task=write -v filter="$FILTER" -f "$HERE/transcript.awk" "$TRANSCRIPT" >"$PLACE/script" || exit 1
(cd "$work" && . "$PLACE/script") 2>"$PLACE/broken" # a shell ends where what it reads has a syntax error
sed 's/^/FAIL /' "$PLACE/broken"
awk -v task=compare -v filter="$FILTER" -v update="${UPDATE:+$PLACE/updated}" -f "$HERE/transcript.awk" \
    "$LOG" "$TRANSCRIPT" >"$PLACE/verdict"
VERDICT=$?
cat "$PLACE/verdict"
[ -z "${UPDATE:-}" ] || cp "$PLACE/updated" "$TRANSCRIPT"
exit $VERDICT
