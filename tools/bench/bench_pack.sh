#!/bin/sh
# bench_pack.sh - build and run the packing benchmark, and keep a record.
#
#     tools/bench/bench_pack.sh [--out FILE] [options and FILEs of bench_pack]
#
# To be run in the top directory. CC, CFLAGS and BUILD (default cc, -O2, build) say how and where it is built; the rival
# in Python runs where python3 is found. The record names the date, the machine, the compiler and its flags, and the
# command, and then has all that is printed.
set -eu

CC=${CC:-cc}
CFLAGS=${CFLAGS:--O2}
BUILD=${BUILD:-build}
out=
if [ "${1:-}" = --out ]; then
    out=${2:?--out needs a file}
    shift 2
fi

mkdir -p "$BUILD"
# CFLAGS is a list of words.
# shellcheck disable=SC2086
$CC -std=c99 $CFLAGS -o "$BUILD/bench_pack" tools/bench/bench_pack.c tools/command/cli.c tools/command/cli_files.c \
    tools/command/progress.c tools/command/draw.c

first_line() {
    "$@" 2>/dev/null | head -n 1
}

header() {
    echo "date      $(date -u '+%Y-%m-%d %H:%M UTC')"
    echo "machine   $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo 2>/dev/null | head -n 1)," \
        "$(getconf _NPROCESSORS_ONLN) processors, $(uname -sm)"
    echo "load      $(cut -d ' ' -f 1-3 /proc/loadavg 2>/dev/null || echo unknown) before the run"
    echo "compiler  $(first_line "$CC" --version); $CC -std=c99 $CFLAGS"
    echo "python    $(first_line python3 --version)"
    echo "version   $(sed -n 's/^#define CHUNKFLOW_VERSION "\(.*\)"/\1/p' chunkflow.h)"
    echo "command   tools/bench/bench_pack.sh$1"
}

names=
for argument; do # only the names of files: a record is not about one machine's directories
    names="$names ${argument##*/}"
done

if command -v python3 >/dev/null; then
    set -- --python python3 --work "$BUILD/bench_pack.lengths" "$@"
fi
if [ -n "$out" ]; then
    header "$names" >"$out.tmp"
    cat "$out.tmp"
    "$BUILD/bench_pack" "$@" >"$out.tmp2" || { code=$?; rm -f "$out.tmp" "$out.tmp2"; exit $code; }
    tee -a "$out.tmp" <"$out.tmp2"
    rm -f "$out.tmp2"
    mv "$out.tmp" "$out"
else
    header "$names"
    "$BUILD/bench_pack" "$@"
fi
