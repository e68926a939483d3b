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
unset COLUMNS
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

# Prints to standard error the code with which the command ended, if it is not 0.
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

# Until the end of the section, runs the program without sanitizers, unless FULL=1.
quickly() { full || CHUNKFLOW=$CHUNKFLOW_PLAIN; }

# Prints the lines that begin with one of these words.
rows() { # LABEL...
    for label; do
        set -- "$@" -e "^$label"
        shift
    done
    grep "$@"
}

# Prints one word of the first line that begins with LABEL, without commas: the first word after LABEL, or another one.
number() { # LABEL [WORD]
    sed -n "s/^$1  *//p" | awk -v word="${2:-1}" '{ gsub(",", "", $word); print $word; exit }'
}

# Prints these columns of a table with tabs, with "-" for an empty field.
columns() { # NAME...
    awk -F '\t' -v names="$*" 'NR == 1 { n = split(names, name, " "); for (i = 1; i <= NF; i++) at[$i] = i; next }
        { for (i = 1; i <= n; i++) {
              field = !(name[i] in at) ? "no column" : $at[name[i]] == "" ? "-" : $at[name[i]]
              printf "%s%s", field, i < n ? " " : "\n" } }'
}

# Prints the lines of the table whose head begins with these two words, without the head. A row that is printed in
# several parts, or goes on in the next line, becomes one line again. Reports a line longer than COLUMNS.
table() { # WORD WORD
    awk -v head="$*" -v most="${COLUMNS:-80}" '
        function words(line) { gsub(/ +/, " ", line); return line }
        function key(line) { sub(/^ +/, "", line); sub(/  .*/, "", line); return line }
        function rest(line) { sub(/^ +/, "", line); return substr(line, index(line "  ", "  ")) }
        function more(line) { match(line, /^ */); return RLENGTH > end ? substr(line, RLENGTH) : "" }
        function add(line, at) { if (length(line) > most) print "too long: " line; return at }
        NF == 0 { part = 0; next }
        line == "" && $1 " " $2 == head {
            line = words($0)
            name = key($0)
            match($0, /^ *[^ ]+( [^ ]+)*/)
            end = RLENGTH
        }
        words($0) == line { part = 1; base = add($0, n); next }
        part == 0 && n > base && key($0) == name { part = 2; at = add($0, base); next }
        part == 1 && more($0) != "" { row[add($0, n)] = row[n] more($0); next }
        part == 1 { row[add($0, ++n)] = $0; next }
        part == 2 {
            if (more($0) != "") { row[add($0, at)] = row[at] more($0); next }
            do at++; while (at < n && key(row[at]) != key($0))
            row[add($0, at)] = row[at] rest($0)
            next
        }
        { part = 3 }
        END { for (i = 1; i <= n; i++) print row[i] }'
}

# Prints how many lines such a table of a command has at 40 and at 80 columns, if both have the same content: the same
# lines or, if several columns name the row, the same words.
narrow() { # lines|words WORD WORD COMMAND...
    how=$1
    head="$2 $3"
    shift 3
    for most in 40 80; do
        (COLUMNS=$most && export COLUMNS && chunkflow "$@" | table $head | awk '{ $1 = $1; print }') >narrow.$most
    done
    awk 'END { print NR }' narrow.80
    [ $how = lines ] || for most in 40 80; do
        tr ' ' '\n' <narrow.$most | sort -u >words
        mv words narrow.$most
    done
    diff narrow.40 narrow.80
}

# ---- the runner's own ----

section() { # NAME: of the commands that follow
    CHUNKFLOW=$TESTED
}

# Ends the command's output, which begins at that line.
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
