#!/bin/sh
# The CUDA tests on a real device: the suite that CI runs under the emulation, full sizes, and compute-sanitizer where
# there is one. Without nvcc or a device it says so and counts as skipped. Not yet run on a device.
#
#     sh tests/cuda_device.sh [part of a test's name ...]      from the top of the tree

set -u
. "$(dirname "$0")/helpers.sh"

BUILD=${BUILD:-build}
NVCC=${NVCC:-nvcc}
out=$BUILD/cuda_device

command -v "$NVCC" >/dev/null 2>&1 || skip_all cuda_device "there is no nvcc"
command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU || skip_all cuda_device "there is no device"
arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)
case $arch in
    90) code="arch=compute_90a,code=sm_90a" ;;
    *) code="arch=compute_$arch,code=sm_$arch" ;;
esac
mkdir -p "$out" || exit 1
printf 'cuda: %s, built for %s\n' "$(nvidia-smi -L | head -n 1 | sed 's/ (UUID.*//')" "$code"
sh tests/device_section.sh >"$out/device_section.h" || exit 1
"$NVCC" -O3 -std=c++17 -Xcompiler -O2 -gencode "$code" -I. -I"$out" -x cu chunkflow_cuda.cu tests/cuda/main.cc \
    tests/cuda/test_primitives.cc tests/cuda/device.cc tests/cuda/reference.cc tests/cuda/test_attention.cc \
    tests/cuda/test_wgmma.cc tests/cuda/test_state.cc \
    tests/cuda/test_executor.cc tests/cuda/test_device.cu -lcublas -o "$out/cuda_tests" || {
    fail cuda_tests "they do not build"
    finish
}
# What compute-sanitizer runs: every kind of kernel, with sizes that it gets through.
watched='attention.prefixes attention.empty attention.groups attention.split wgmma. state.clears_rows
    state.offload_and_prefetch state.appends_without_a_table state.backward_is_the_transpose
    executor.one_chunk executor.places'
if command -v compute-sanitizer >/dev/null 2>&1; then
    for tool in memcheck racecheck initcheck synccheck; do
        if compute-sanitizer --tool "$tool" --error-exitcode 9 "$out/cuda_tests" $watched >"$out/$tool.log" 2>&1; then
            ok "compute-sanitizer $tool"
        else
            tail -n 20 "$out/$tool.log" >"$out/why"
            fail "compute-sanitizer $tool" "it found something" "$out/why"
            finish
        fi
    done
else
    printf 'note: there is no compute-sanitizer\n'
fi
exec "$out/cuda_tests" "$@"
