#!/bin/sh
# deep_check.sh BUILD [PART ...] - what takes too long for every `make test`; `make check-deep` runs all parts:
#
#   clang      clang's static analyser, over the whole header (without the option it looks at no function of a header)
#   gcc        gcc -fanalyzer; takes a quarter of an hour or more
#   valgrind   the quick suites of BUILD/test/unit, which is built without sanitizers, and no leak
#   threads    tests/threads.c under ThreadSanitizer: four threads share a plan
#   trainer    examples/train_cpu.c under it, with OpenMP: Archer tells it what OpenMP orders
#
# A part whose tool is missing is skipped. What is known and no fault is in the function `known`, with the reason.
build=$1
shift
[ $# -gt 0 ] || set -- clang threads trainer valgrind gcc
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
passed=0
failed=0
skipped=0
flags="-std=c99 -D_XOPEN_SOURCE=700 -I. -g"
seconds=${DEEP_SECONDS:-3600} # for each part

# Warnings that were looked at and are no faults, as patterns of grep: one a line, none so far.
known() {
    cat <<'KNOWN'
KNOWN
}

has() { command -v "$1" >/dev/null 2>&1; }

count() { # NAME STATUS: prints what a failed part has written
    if [ "$2" -eq 0 ]; then
        passed=$((passed + 1))
    else
        printf 'FAIL %s\n' "$1"
        tail -n 60 "$work/$1"
        failed=$((failed + 1))
    fi
}

# Without a warning in the library but those that are known; and the analyser came to its end.
analysed() { # NAME STATUS
    known >"$work/known"
    ! grep -E 'chunkflow(_tune)?\.h:[0-9:]+ warning' "$work/$1" | grep -qvf "$work/known" && [ "$2" -eq 0 ]
}

part_clang() {
    timeout "$seconds" clang $flags --analyze -Xclang -analyzer-opt-analyze-headers --analyzer-output text \
        tests/implementation.c >"$work/clang" 2>&1
    analysed clang $?
}

part_gcc() {
    timeout "$seconds" gcc $flags -O0 -fanalyzer -c tests/implementation.c -o "$work/object" >"$work/gcc" 2>&1
    analysed gcc $?
}

quick="base. cost. models. validate. schedule. dot."
part_valgrind() {
    timeout "$seconds" valgrind -q --leak-check=full --error-exitcode=9 "$build/test/unit" $quick >"$work/valgrind" 2>&1
}

part_threads() {
    clang $flags -O1 -fsanitize=thread tests/threads.c -o "$work/program" -lpthread -lm >"$work/threads" 2>&1 &&
        timeout "$seconds" "$work/program" >>"$work/threads" 2>&1
}

# Where Archer is not loaded, what OpenMP orders would be reported as races; that it is, is asked of OpenMP itself.
part_trainer() {
    clang $flags -O1 -fsanitize=thread -fopenmp=libomp examples/train_cpu.c -o "$work/program" -lm \
        >"$work/trainer" 2>&1 &&
        env OMP_TOOL_VERBOSE_INIT=stdout OMP_NUM_THREADS=4 OMP_WAIT_POLICY=passive \
            TSAN_OPTIONS=ignore_noninstrumented_modules=1 \
            timeout "$seconds" "$work/program" --check --layers 2 --hidden 32 --heads 4 --kv-heads 2 --ffn 48 \
            --chunk-size 24 --k 2 --synthetic 100,24,48,7,3,0,1,31,12 >>"$work/trainer" 2>&1 &&
        grep -q 'ompt_start_tool in libarcher.so... Success' "$work/trainer"
}

tool_of() {
    case $1 in clang | threads | trainer) echo clang ;; *) echo "$1" ;; esac
}

for part in "$@"; do
    if ! has "$(tool_of "$part")"; then
        echo "skipped: $part, for want of $(tool_of "$part")"
        skipped=$((skipped + 1))
        continue
    fi
    "part_$part"
    count "$part" $?
done
if [ "$skipped" -gt 0 ]; then
    printf '%s passed, %s failed, %s skipped\n' "$passed" "$failed" "$skipped"
else
    printf '%s passed, %s failed\n' "$passed" "$failed"
fi
[ "$failed" -eq 0 ]
