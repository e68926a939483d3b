#!/bin/sh
# python_check.sh - the Python module and the JSON Schema - MIT or public domain
#
#     tests/command/python_check.sh [BUILD]     tests BUILD/libchunkflow.so and what CHUNKFLOW writes (default BUILD/chunkflow)
#
# Run it in the top directory. Takes the first of PYTHON, python3 and the system's python3 that has cffi, NumPy and
# jsonschema (Debian: python3-cffi python3-numpy python3-jsonschema); without one, all of it is one skipped test.

. "$(dirname "$0")/../helpers.sh"

build=${1:-build}
for python in "${PYTHON:-python3}" python3 /usr/bin/python3; do
    if "$python" -c 'import cffi, jsonschema, numpy' >/dev/null 2>&1; then
        workplace "$(mktemp -d)"
        CHUNKFLOW_BUILD=$build "$python" -B tests/command/python_check.py "${CHUNKFLOW:-$build/chunkflow}" "$work"
        exit
    fi
done
skip_all python "there is no Python with cffi, NumPy and jsonschema"
