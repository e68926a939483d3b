#!/bin/sh
# Runs each argument as one suite and adds up their last lines ("N passed, N failed" and perhaps ", N skipped").
# A suite that ends without such a line, or with a status that contradicts it, counts as one failure more.
# With STRICT_SKIPS=1 a skipped test counts as failed. The last line printed has the same form.
passed=0
failed=0
skipped=0
log=$(mktemp) || exit 1
trap 'rm -f "$log" "$log.status"' EXIT

for suite in "$@"; do
    printf '== %s\n' "$suite"
    { sh -c "$suite" 2>&1; echo $? >"$log.status"; } | tee "$log"
    status=$(cat "$log.status")
    line=$(tail -n 1 "$log" | grep -E '^[0-9]+ passed, [0-9]+ failed(, [0-9]+ skipped)?$')
    if [ -z "$line" ]; then
        printf 'FAIL %s: ended with status %s and no count\n' "$suite" "$status"
        failed=$((failed + 1))
        continue
    fi
    set_counts=$(printf '%s\n' "$line" | sed 's/[^0-9 ]//g')
    # shellcheck disable=SC2086
    set -- $set_counts -- "$@"
    suite_failed=$2
    passed=$((passed + $1))
    failed=$((failed + $2))
    if [ "$3" != -- ]; then skipped=$((skipped + $3)); fi
    while [ "$1" != -- ]; do shift; done
    shift
    if [ "$status" -ne 0 ] && [ "$suite_failed" -eq 0 ]; then
        printf 'FAIL %s: status %s although nothing failed\n' "$suite" "$status"
        failed=$((failed + 1))
    fi
done

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
