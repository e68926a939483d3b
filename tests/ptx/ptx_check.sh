#!/bin/sh
# ptx_check.sh - the compiled kernels on a CPU: the suites of the CUDA tests and the examples' own checks
#
#     tests/ptx/ptx_check.sh [SUITE]      ARCH=80, 86 or 90: only as that device
#
# SUITE: primitives (with the interpreter's own tests; all that `make test` runs), wgmma, attention, blocks, state,
# executor, executor_cuda, train_cuda. Each runs as a device of 8.0 and of 9.0, and on the code of the former as one of
# 8.6. Each value of each mode (tests/ptx/ptx.h) has its turn on both targets, not every combination.
#
# Run it in the top directory, after `make test-ptx` or `make test` has built the programs.

. "$(dirname "$0")/../helpers.sh"

build=${BUILD:-build}/ptx
only=${1:-}
workplace "$build/ptx_check.tmp"

# run NAME COMMAND...: its last line counts tests, and none failed
run() {
    name=$1
    shift
    capture timeout -k 5 600 "$@"
    if [ "$status" -eq 0 ] && tail -n 1 "$work/out" | grep -q '^[1-9][0-9]* passed, 0 failed'; then
        ok "$name: $(tail -n 1 "$work/out")"
    else
        fail "$name" "status $status: $(last_line)" "$work/err"
    fi
}

# on ARCH MODES COMMAND...: runs it so
on() {
    arch=$1 modes=$2
    shift 2
    if [ -n "${ARCH:-}" ] && [ "$ARCH" != "$arch" ]; then return; fi
    # shellcheck disable=SC2086
    run "$what as sm_$arch${modes:+, $modes}" env PTX_ARCH="$arch" $modes "$@"
}

is_wanted() { # SUITE
    what=$1
    [ -z "$only" ] || [ "$only" = "$1" ]
}

if is_wanted primitives; then
    for arch in 80 90; do
        on $arch "" "$build/primitives"
        on $arch "PTX_LATE=0 PTX_ORDER=reverse PTX_FUSE=1" "$build/primitives" primitives.
        on $arch "PTX_RACE=1 PTX_ORDER=shuffled PTX_COPIES=newest PTX_BLOCKS=3" "$build/primitives" primitives.
    done
fi
for suite in wgmma attention blocks state executor; do
    if is_wanted $suite; then
        for arch in 80 86 90; do
            if [ $suite = wgmma ] && [ $arch != 90 ]; then continue; fi
            on $arch "" "$build/cuda_tests" $suite.
        done
    fi
done
for suite in wgmma attention blocks; do
    if is_wanted $suite; then
        for arch in 80 90; do
            if [ $suite = wgmma ] && [ $arch != 90 ]; then continue; fi
            on $arch "PTX_RACE=1 PTX_ORDER=reverse PTX_COPIES=newest" "$build/cuda_tests" $suite.
            on $arch "PTX_LATE=0 PTX_ORDER=shuffled PTX_BLOCKS=8 PTX_FUSE=1" "$build/cuda_tests" $suite.
        done
    fi
done
finish
