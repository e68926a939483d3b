#!/bin/sh
# record.sh - make the recorded tables anew: every number that README and results/ quote from a benchmark.
#
#     sh tools/bench/record.sh [--lengths FILE] [--out DIR] [NAME...]
#
# To be run in the top directory, through `make bench-record`, which builds the programs. NAME: pack, schedule,
# baseline, tune or fit; all of them by default, which takes some ten minutes of processor time. FILE: a list of
# lengths, one a line (the recorded tables have the Mooncake conversation trace); without it the batches that need one
# are left out. Each table replaces DIR/NAME.txt (default tools/bench/results) and begins with its date,
# machine, compiler and command; only the name of FILE is recorded. README quotes `pack` (milliseconds and distance from
# the bound); its charts and its table of GiB are tested by tests/command/cli_pipeline.transcript and
# tests/command/cli_models.transcript.
set -eu

CC=${CC:-cc}
CFLAGS=${CFLAGS:--O2}
BUILD=${BUILD:-build}
out=tools/bench/results
lengths=
while [ $# -gt 0 ]; do
    case $1 in
        --lengths) lengths=$2; shift 2 ;;
        --out) out=$2; shift 2 ;;
        *) break ;;
    esac
done
[ $# -gt 0 ] || set -- pack schedule baseline tune ranks fit

header() {
    echo "date      $(date -u '+%Y-%m-%d %H:%M UTC')"
    echo "machine   $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo 2>/dev/null | head -n 1)," \
        "$(getconf _NPROCESSORS_ONLN) processors, $(uname -sm)"
    echo "load      $(cut -d ' ' -f 1-3 /proc/loadavg 2>/dev/null || echo unknown) before the run"
    echo "compiler  $("$CC" --version 2>/dev/null | head -n 1); -std=c99 $CFLAGS"
    echo "version   $(sed -n 's/^#define CHUNKFLOW_VERSION "\(.*\)"/\1/p' chunkflow.h)"
    echo "command   $1"
    echo
}

# record NAME PROGRAM ARGUMENT...: an exit status of 1 is the program's judgement, and part of the record.
record() {
    file=$out/$1.txt
    shift
    { header "$(echo "$*" | sed "s|[^ =,]*/\([^/ ]*\)|\1|g")"; "$@" || [ $? -eq 1 ]; } >"$file.part"
    mv "$file.part" "$file"
    echo "$file"
}

for name; do
    case $name in
        pack) CC="$CC" CFLAGS="$CFLAGS" BUILD="$BUILD" sh tools/bench/bench_pack.sh \
            --out "$out/pack.txt" ${lengths:+"$lengths"} ;;
        schedule) record schedule "$BUILD/bench_schedule" speed best suite virtual "limits${lengths:+=$lengths}" \
            "replay${lengths:+=$lengths}" ;;
        baseline) record baseline "$BUILD/bench_baseline" ${lengths:+"$lengths"} ;;
        tune) record tune "$BUILD/bench_tune" ${lengths:+"$lengths"} ;;
        ranks) record ranks "$BUILD/bench_ranks" ${lengths:+"$lengths"} ;;
        fit) record fit "$BUILD/bench_fit" ;;
        *) echo "record.sh: there is no '$name'" >&2; exit 2 ;;
    esac
done
