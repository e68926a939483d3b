#!/bin/sh
# Prints the section >>device of chunkflow_cuda.cu, for tests/cuda/test_primitives.cc, which runs what it holds.
#
#     sh tests/cuda/device_section.sh        from the top of the tree

awk '/^\/\* =====/ { getline; on = /^   >>device /; getline; next } on' chunkflow_cuda.cu
