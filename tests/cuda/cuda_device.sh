#!/bin/sh
# The CUDA tests on a real device: the suite that CI runs under the emulation, full sizes, and compute-sanitizer where
# there is one. Without nvcc or a device it says so and counts as skipped. Not yet run on a device.
#
#     sh tests/cuda/cuda_device.sh [part of a test's name ...]    from the top: sanitizer first, then all tests
#     sh tests/cuda/cuda_device.sh --tool TOOL                      only that tool of compute-sanitizer
#
# CUDA_TESTS names a program that was built before; otherwise make builds it.

set -u
. "$(dirname "$0")/../helpers.sh"

BUILD=${BUILD:-build}
NVCC=${NVCC:-nvcc}
tools="memcheck racecheck initcheck synccheck"
only=
if [ "${1:-}" = --tool ]; then only=$2 tools=$2; fi

nvidia-smi -L 2>/dev/null | grep -q GPU || skip_all cuda_device "there is no device"
tests=${CUDA_TESTS:-}
if [ -z "$tests" ]; then
    command -v "$NVCC" >/dev/null 2>&1 || skip_all cuda_device "there is no nvcc"
    tests=$BUILD/gpu/cuda_tests
    make -s "$tests" BUILD="$BUILD" NVCC="$NVCC" || {
        fail cuda_tests "they do not build"
        finish
    }
fi
workplace "$BUILD/cuda_device.tmp"
# The tests that compute-sanitizer runs: every kind of kernel, with sizes that finish in time.
watched='attention.prefixes attention.empty attention.groups attention.split attention.wgmma wgmma.
    state.appends_without_a_table state.backward_is_the_transpose
    blocks.fused_sums blocks.wgmma blocks.types
    executor.one_chunk executor.places'
if command -v compute-sanitizer >/dev/null 2>&1; then
    for tool in $tools; do
        # shellcheck disable=SC2086
        if compute-sanitizer --tool "$tool" --error-exitcode 9 "$tests" ${WATCHED:-$watched} >"$work/log" 2>&1; then
            ok "compute-sanitizer $tool"
        else
            tail -n 20 "$work/log" >"$work/why"
            fail "compute-sanitizer $tool" "it found something, or did not get through" "$work/why"
            finish
        fi
    done
elif [ -n "$only" ]; then
    skip_all "compute-sanitizer $only" "there is none"
else
    printf 'note: there is no compute-sanitizer\n'
fi
if [ -n "$only" ]; then finish; fi
exec "$tests" "$@"
