#!/bin/sh
# Speed of attention on a device, beside PyTorch's where python3 has it. Without nvcc or a device it says so. Not yet
# run on a device.
#
#     sh tools/bench/bench_attention.sh [options and part of a shape's name, as bench_attention takes them]
#
# From the top of the tree. BENCH_ATTENTION names a program that was built before; otherwise make builds it.

set -u
BUILD=${BUILD:-build}
NVCC=${NVCC:-nvcc}

command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU ||
    { echo "bench-gpu: no device"; exit 0; }
bench=${BENCH_ATTENTION:-}
if [ -z "$bench" ]; then
    command -v "$NVCC" >/dev/null 2>&1 || { echo "bench-gpu: no nvcc"; exit 0; }
    bench=$BUILD/gpu/bench_attention
    make -s "$bench" BUILD="$BUILD" NVCC="$NVCC" || exit 1
fi
nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,power.limit --format=csv,noheader
if python3 -c 'import torch; assert torch.cuda.is_available()' >/dev/null 2>&1; then
    exec python3 tools/bench/bench_attention.py "$bench" "$@"
fi
echo "bench-gpu: no PyTorch with CUDA; our own numbers alone"
exec "$bench" "$@"
