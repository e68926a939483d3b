#!/bin/sh
# Runs each argument as one suite and adds up their last lines ("N passed, N failed" and perhaps ", N skipped").
# JOBS suites run at once (default 4, for two processors: some wait for what they started now and then); what they print
# comes in the order of the arguments, and behind each the seconds that it took.
# A suite that ends without such a line, or with a status that contradicts it, counts as one failure more.
# With STRICT_SKIPS=1 a skipped test counts as failed. The last line printed has the same form; those before it repeat
# what failed, and in which suite.
passed=0
failed=0
skipped=0
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT

# A worker takes the next suite that no other worker has taken, until there is none.
worker() {
    n=0
    for suite in "$@"; do
        n=$((n + 1))
        mkdir "$work/$n" 2>/dev/null || continue
        sh -c 'begin=$(date +%s); sh -c "$1" >"$2/log" 2>&1 </dev/null; echo $? >"$2/status.part"; times >"$2/times"
               echo $(($(date +%s) - begin)) >"$2/wall"' - "$suite" "$work/$n"
        mv "$work/$n/status.part" "$work/$n/status"
    done
}

jobs=${JOBS:-4}
while [ "$jobs" -gt 0 ]; do
    worker "$@" &
    jobs=$((jobs - 1))
done

# spent TIMES: seconds of user and system time, from what `times` says of a shell's children ("1m2.50s 0m0.25s")
spent() {
    awk 'NR == 2 { split($1 "m" $2, t, "m"); printf "%.1f\n", 60 * t[1] + t[2] + 60 * t[3] + t[4] }' "$1"
}

# count LOG: the three numbers of its last line, or nothing; make has one more to say where something failed
count() {
    sed '/^make.*: \*\*\* /d' "$1" | tail -n 1 |
        grep -E '^[0-9]+ passed, [0-9]+ failed(, [0-9]+ skipped)?$' | sed 's/[^0-9 ]//g'
}

# Keeps for the end what failed in a suite; without more arguments, what its log says of that.
again() { # SUITE [WHAT]
    if [ $# -gt 1 ]; then printf '%s\n' "$2"
    elif [ "${STRICT_SKIPS:-0}" = 1 ]; then grep -E '^ *FAIL(ED)? |^skip |\.\.\. skipped' "$work/$n/log"
    else grep -E '^ *FAIL(ED)? ' "$work/$n/log"; fi | awk -v suite="$1" '{ sub(/^ */, ""); print "failed: " suite ": " $0 }' \
        >>"$work/again"
}

: >"$work/again"
n=0
for suite in "$@"; do
    n=$((n + 1))
    while [ ! -e "$work/$n/status" ]; do sleep 0.2 2>/dev/null || sleep 1; done
    status=$(cat "$work/$n/status")
    printf '== %s\n' "$suite"
    cat "$work/$n/log"
    printf -- '-- %s: %s s by the clock, %s s of processor time\n' "$suite" "$(cat "$work/$n/wall")" \
        "$(spent "$work/$n/times")"
    counts=$(count "$work/$n/log")
    if [ -z "$counts" ]; then
        printf 'FAIL %s: ended with status %s and no count\n' "$suite" "$status"
        again "$suite"
        again "$suite" "ended with status $status and no count"
        failed=$((failed + 1))
        continue
    fi
    suite_failed=$(echo $counts | cut -d ' ' -f 2)
    suite_skipped=$(echo $counts | cut -s -d ' ' -f 3)
    passed=$((passed + $(echo $counts | cut -d ' ' -f 1)))
    failed=$((failed + suite_failed))
    skipped=$((skipped + ${suite_skipped:-0}))
    again "$suite"
    if [ "$status" -ne 0 ] && [ "$suite_failed" -eq 0 ]; then
        printf 'FAIL %s: status %s although nothing failed\n' "$suite" "$status"
        again "$suite" "status $status although nothing failed"
        failed=$((failed + 1))
    fi
done
wait
cut -c 1-300 "$work/again"

if [ "${STRICT_SKIPS:-0}" = 1 ] && [ "$skipped" -gt 0 ]; then
    printf 'FAIL: %s skipped, and skipping is not allowed here\n' "$skipped"
    failed=$((failed + skipped))
    skipped=0
fi
if [ "$skipped" -gt 0 ]; then
    printf '%s passed, %s failed, %s skipped\n' "$passed" "$failed" "$skipped"
else
    printf '%s passed, %s failed\n' "$passed" "$failed"
fi
[ "$failed" -eq 0 ]
