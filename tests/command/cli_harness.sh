# cli_harness.sh - what report_check.sh calls; to be sourced. It moves to an empty directory. Other tests of the command
# are transcripts: transcript.sh runs them.
#
# CHUNKFLOW names the program (default build/chunkflow). The first argument filters tests by name. CHUNKFLOW_PLAIN names
# a program without sanitizers, for long searches; CHUNKFLOW then makes the same searches with fewer settings.

. "$(dirname "$0")/../helpers.sh"

CHUNKFLOW=${CHUNKFLOW:-build/chunkflow}
FILTER=${1:-}
CHUNKFLOW_PLAIN=${CHUNKFLOW_PLAIN:-$CHUNKFLOW}
case $CHUNKFLOW in
    /*) ;;
    *) CHUNKFLOW=$PWD/$CHUNKFLOW ;;
esac
case $CHUNKFLOW_PLAIN in
    /*) ;;
    *) CHUNKFLOW_PLAIN=$PWD/$CHUNKFLOW_PLAIN ;;
esac
if ! [ -x "$CHUNKFLOW" ]; then
    fail cli "there is no program $CHUNKFLOW"
    finish
fi
HEADER=$(cd "$(dirname "$0")/../.." && pwd)/chunkflow.h
find_python

workplace "$(mktemp -d)"
cd "$work" || exit 1

# plain COMMAND...: runs a command with the program that has no sanitizers.
plain() {
    sanitized=$CHUNKFLOW
    CHUNKFLOW=$CHUNKFLOW_PLAIN
    "$@"
    set -- $?
    CHUNKFLOW=$sanitized
    return "$1"
}

# quick COMMAND...: runs a command without sanitizers. With FULL=1, only commands that would take minutes run without
# them.
quick() { # COMMAND...
    if full; then "$@"; else plain "$@"; fi
}

# Runs the program. Its exit code is then in $code, and its output in the files out and err.
cf() {
    capture "$CHUNKFLOW" "$@" </dev/null
    code=$status
}

same() { # NAME WANTED GOT
    wanted "$1" || return 0
    if [ "$2" = "$3" ]; then ok "$1"; else fail "$1" "wanted '$2', got '$3'"; fi
}

same_files() { # NAME WANTED-FILE GOT-FILE
    wanted "$1" || return 0
    if ! [ -s "$2" ]; then
        fail "$1" "there is nothing to compare with"
    elif cmp -s "$2" "$3"; then
        ok "$1"
    else
        fail "$1" "$(diff "$2" "$3" | head -n 4 | tr '\n' ' ')"
    fi
}

# Checks that the program, run with ARGUMENTS, exits with CODE and prints nothing to standard output. Standard error
# must be one line that matches the extended regular expression PATTERN.
refuses() { # NAME CODE PATTERN ARGUMENTS...
    wanted "$1" || return 0
    name=$1 want_code=$2 pattern=$3
    shift 3
    run "$@"
    complained "$name" "$want_code" "$pattern" -E
}

# Runs the command; standard output in out, standard error in err.
run() { # ARGUMENTS
    capture "$CHUNKFLOW" "$@"
    return "$status"
}

# It must succeed and print that text.
says() { # NAME TEXT ARGUMENTS
    name=$1 text=$2
    shift 2
    wanted "$name" || return 0
    run "$@"
    if [ "$status" -ne 0 ]; then fail "$name" "exit code $status: $(cat err)"
    elif ! grep -qF -- "$text" out; then fail "$name" "'$text' is not in its output"
    else ok "$name"; fi
}
