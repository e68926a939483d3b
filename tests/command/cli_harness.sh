# cli_harness.sh - what the tests of the chunkflow command share; to be sourced. It moves to an empty directory.
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

# The same with a fixed text.
refused() { # NAME CODE TEXT ARGUMENTS...
    wanted "$1" || return 0
    name=$1 want_code=$2 pattern=$3
    shift 3
    run "$@"
    complained "$name" "$want_code" "$pattern" -F
}

# The command succeeds and says nothing on standard error. It runs in any case: tests that are wanted may look at what
# it leaves.
succeeds() { # NAME ARGUMENTS...
    name=$1
    shift
    cf "$@"
    wanted "$name" || return 0
    if [ "$code" != 0 ]; then
        fail "$name" "exit code $code; $(head -n 1 err)"
    elif [ -s err ]; then
        fail "$name" "standard error: $(head -n 1 err)"
    else
        ok "$name"
    fi
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

# A number from the summary that the last run printed: the word after LABEL and its blanks, commas removed.
summary() { # LABEL [WORD]
    sed -n "s/^$1  *//p" out | awk -v word="${2:-1}" '{ gsub(",", "", $word); print $word; exit }'
}

between() { # NAME VALUE LOW HIGH
    wanted "$1" || return 0
    if awk -v x="$2" -v low="$3" -v high="$4" 'BEGIN { exit !(x != "" && x >= low && x <= high) }'; then
        ok "$1"
    else
        fail "$1" "$2 is not in $3 .. $4"
    fi
}
