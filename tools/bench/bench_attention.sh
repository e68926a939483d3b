#!/bin/sh
# Speed of attention on a device, beside PyTorch's where python3 has it. Without nvcc or a device it says so. Not yet run
# on a device.
#
#     sh tools/bench/bench_attention.sh [part of a shape's name]      from the top of the tree

set -u
BUILD=${BUILD:-build}
NVCC=${NVCC:-nvcc}

command -v "$NVCC" >/dev/null 2>&1 || { echo "bench-gpu: no nvcc"; exit 0; }
command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU || { echo "bench-gpu: no device"; exit 0; }
arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)
case $arch in
    90) code="arch=compute_90a,code=sm_90a" ;;
    *) code="arch=compute_$arch,code=sm_$arch" ;;
esac
mkdir -p "$BUILD" || exit 1
"$NVCC" -O3 -std=c++17 -gencode "$code" -I. chunkflow_cuda.cu tools/bench/bench_attention.cu -lcublas \
    -o "$BUILD/bench_attention" || exit 1
nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,power.limit --format=csv,noheader
if python3 -c 'import torch; assert torch.cuda.is_available()' >/dev/null 2>&1; then
    exec python3 tools/bench/bench_attention.py "$BUILD/bench_attention" "$@"
fi
echo "bench-gpu: no PyTorch with CUDA; our own numbers alone"
exec "$BUILD/bench_attention" "$@"
