# helpers.sh - what the test scripts share; to be sourced.
#
# A test prints "ok NAME", "FAIL NAME: why" or "skip NAME: why". `finish` prints the counts, in the form that
# tests/run.sh adds up, and ends the script.

LC_ALL=C
export LC_ALL

FILTER=     # a script that takes one sets it
work=.      # where the output of what is tried goes
passed=0
failed=0
skipped=0

# FULL=1 in the environment: every repetition. Otherwise a script leaves out some, and says which.
full() { [ "${FULL:-0}" = 1 ]; }

in_full() { # COMMAND...: only where everything runs
    ! full || "$@"
}

left_out() { # WHAT: the line that says so
    full || printf 'note: FULL=1 adds %s\n' "$1"
}

# PYTHON becomes the interpreter itself, or empty where there is none. What is called python3 may be a script that looks
# for one, and takes ten times as long to start as what it finds.
find_python() { PYTHON=$(python3 -S -c 'import sys; print(sys.executable)' 2>/dev/null) || PYTHON=; }

# Python with its own library alone, which is all that these tests need: looking for other packages is most of its start.
python() { "$PYTHON" -S "$@"; }

wanted() { # NAME
    case $1 in
        *"$FILTER"*) return 0 ;;
        *) return 1 ;;
    esac
}

ok() { # NAME
    printf 'ok %s\n' "$1"
    passed=$((passed + 1))
}

fail() { # NAME WHY [FILE]: the first lines of the file say more
    printf 'FAIL %s: %s\n' "$1" "$2"
    if [ -n "${3:-}" ]; then sed -n '1,20s/^/    /p' "$3"; fi
    failed=$((failed + 1))
}

skip() { # NAME WHY
    printf 'skip %s: %s\n' "$1" "$2"
    skipped=$((skipped + 1))
}

finish() {
    if [ $((passed + failed + skipped)) -eq 0 ]; then fail "$(basename "$0")" "no test is named like '$FILTER'"; fi
    counts="$passed passed, $failed failed"
    if [ "$skipped" -gt 0 ]; then counts="$counts, $skipped skipped"; fi
    printf '%s\n' "$counts"
    [ "$failed" -eq 0 ]
    exit
}

# For what none of the script's tests can do without.
skip_all() { # NAME WHY
    skip "$@"
    finish
}

# Makes an empty directory, which goes when the script ends, and lets $work be it.
workplace() { # DIRECTORY
    work=$1
    rm -rf "$work"
    mkdir -p "$work" || exit 1
    trap 'rm -rf "$work"' EXIT
    trap 'exit 1' HUP INT TERM
}

# Output in $work/out and $work/err, exit status in $status.
capture() { # COMMAND...
    status=0
    "$@" >"$work/out" 2>"$work/err" || status=$?
}

# Waits until COMMAND holds or the process has ended, however slow the machine is: ten minutes are for one that hangs.
await() { # PROCESS COMMAND...
    awaited=$1
    tries=0
    shift
    until "$@" || [ $tries -ge 6000 ] || ! kill -0 "$awaited" 2>/dev/null ||
        grep -q '^[0-9]* (.*) Z' "/proc/$awaited/stat" 2>/dev/null; do
        sleep 0.1 2>/dev/null || sleep 1
        tries=$((tries + 1))
    done
}

last_line() { cat "$work/out" "$work/err" | tail -n 1; }

# What was captured ended with this status and said this somewhere.
expect() { # NAME STATUS TEXT
    if [ "$status" -ne "$2" ]; then
        fail "$1" "exit status $status, wanted $2: $(last_line)"
    elif [ -n "$3" ] && ! cat "$work/out" "$work/err" | grep -q -e "$3"; then
        fail "$1" "it did not say \"$3\" but: $(last_line)"
    else
        ok "$1"
    fi
}

# full_output NAME COMMAND...: what it prints does not get out, and it says so
full_output() {
    full_output_name=$1
    shift
    [ -c /dev/full ] || { skip "$full_output_name" "there is no /dev/full"; return; }
    : >"$work/out"
    status=0
    "$@" >/dev/full 2>"$work/err" || status=$?
    expect "$full_output_name" 1 'standard output cannot be written'
}

# What was captured ended with this status, printed nothing and said one line that grep finds by this pattern.
complained() { # NAME STATUS PATTERN [OPTION OF GREP]
    if [ "$status" -ne "$2" ]; then
        fail "$1" "exit status $status, wanted $2: $(last_line)"
    elif [ -s "$work/out" ]; then
        fail "$1" "it printed: $(head -n 1 "$work/out")"
    elif [ "$(wc -l <"$work/err")" -ne 1 ]; then
        fail "$1" "it said $(wc -l <"$work/err") lines, not one: $(cat "$work/err")"
    elif ! grep -q ${4:-} -e "$3" "$work/err"; then
        fail "$1" "'$(cat "$work/err")' does not match '$3'"
    else
        ok "$1"
    fi
}
