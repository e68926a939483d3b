#!/bin/sh
# cudnn_check.sh - examples/cudnn_attention.h with the headers and the library that a user has; needs no device
#
#     PYTHON=python3 sh tests/cuda/cudnn_check.sh    from the top; BUILD (default build) takes the program
#
# cuDNN and CUDA's headers are of the environment that `make test-torch` makes, PYTHON's; cudnn-frontend's are PyPI's.

set -u
. "$(dirname "$0")/../helpers.sh"

out=${BUILD:-build}/cudnn
CXX=${CXX:-c++}
nvidia=$("$PYTHON" -c 'import os, nvidia.cudnn as of; print(os.path.dirname(list(of.__path__)[0]))' 2>/dev/null) ||
    skip_all cudnn "there is no cuDNN in $PYTHON's environment"
headers=$out/frontend-1.32.0
if [ ! -e "$headers/include/cudnn_frontend.h" ]; then
    mkdir -p "$out" || exit 1
    "$PYTHON" -m pip install -q --no-deps --target "$headers" nvidia-cudnn-frontend==1.32.0 >"$out/pip.log" 2>&1 ||
        skip_all cudnn "cudnn-frontend cannot be installed: $(tail -n 1 "$out/pip.log")"
fi

name="the adapter compiles without warnings"
if "$CXX" -std=c++17 -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Wno-unused-function -Werror -I. \
        -isystem "$nvidia/cu13/include" -isystem "$nvidia/cudnn/include" -isystem "$headers/include" \
        tests/cuda/cudnn_check.cc -o "$out/cudnn_check" \
        -L"$nvidia/cudnn/lib" -l:libcudnn.so.9 -L"$nvidia/cu13/lib" -l:libcudart.so.13 -l:libnvrtc.so.13 -lm \
        >"$out/compile.log" 2>&1; then ok "$name"
else
    fail "$name" "it does not" "$out/compile.log"
    finish
fi
name="cuDNN's checks take the graphs of devices of 8.0, 9.0, 10.0 and 12.0"
LD_LIBRARY_PATH=$nvidia/cudnn/lib:$nvidia/cu13/lib "$out/cudnn_check" >"$out/graphs" 2>&1
status=$?
if [ $status -eq 0 ] && tail -n 1 "$out/graphs" | grep -q '^[1-9][0-9]* passed, 0 failed'; then
    ok "$name: $(tail -n 1 "$out/graphs")"
else fail "$name" "status $status" "$out/graphs"; fi
finish
