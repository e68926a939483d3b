# cli_harness.sh - what report_check.sh calls; to be sourced. It moves to an empty directory. Other tests of the command
# are transcripts: transcript.sh runs them.
#
# CHUNKFLOW names the program (default build/chunkflow), the first argument a filter on the names of tests.
# CHUNKFLOW_PLAIN names one without sanitizers, for long searches; CHUNKFLOW makes the same searches in fewer settings.

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

# plain COMMAND...: with the program that has no sanitizers
plain() {
    sanitized=$CHUNKFLOW
    CHUNKFLOW=$CHUNKFLOW_PLAIN
    "$@"
    set -- $?
    CHUNKFLOW=$sanitized
    return "$1"
}

# So, but for FULL=1, where only what would take minutes goes without sanitizers.
quick() { # COMMAND...
    if full; then "$@"; else plain "$@"; fi
}

# Runs the program; leaves its exit code in $code and what it printed in the files out and err.
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

# The program, run with ARGUMENTS, leaves with CODE, prints nothing to standard output and one line to standard error
# that matches the extended regular expression PATTERN.
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
