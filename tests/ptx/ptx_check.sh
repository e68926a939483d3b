#!/bin/sh
# ptx_check.sh - the compiled kernels on a CPU: the suites of the CUDA tests and the examples' own checks
#
#     tests/ptx/ptx_check.sh [SUITE]      ARCH=80, 86 or 90: only as that device; LIST=1: only prints what it would run
#
# SUITE: primitives (with the interpreter's own tests; all that `make test` runs), wgmma, attention, blocks, state,
# executor, outputs, executor_cuda, train_cuda. Each runs as a device of 8.0 and of 9.0, and on the code of the former as one of
# 8.6. Each value of each mode (tests/ptx/ptx.h) has its turn on both targets, not every combination. FULL=1 has its
# repetitions where fused attention runs in the default modes on either target: elsewhere they would repeat host code.
#
#     coverage   every instruction of the programs has a test, and every value of every mode a run; nothing that
#                PTX_FUSE=1 would fuse is left in the library's entries, so that their bits do not hang on it
#     faults     planted in assembly text (ptx_faults.py): each is seen
#     kernels    planted in kernels, and each of their waits left out (tests/cuda/cuda_faults.py --ptx): each is seen
#     entries    every kernel of the programs ran as some device of its target; waits for the suites that run them
#
# Run it in the top directory, after `make test-ptx` or `make test` has built the programs.

. "$(dirname "$0")/../helpers.sh"

build=${BUILD:-build}/ptx
only=${1:-}
suites="primitives wgmma attention blocks state executor outputs executor_cuda train_cuda coverage faults kernels entries"
case " $suites " in
    *" ${only:-entries} "*) ;;
    *) printf 'ptx_check.sh: no suite "%s", of %s\n' "$only" "$suites" >&2; exit 2 ;;
esac
case ${ARCH:-80} in
    80 | 86 | 90) ;;
    *) printf 'ptx_check.sh: ARCH is "%s", not 80, 86 or 90\n' "$ARCH" >&2; exit 2 ;;
esac
workplace "$build/ptx_check.${only:-all}${LIST:+.list}.tmp"
if [ -d "$build/ran" ] && [ -n "$only" ]; then trap 'rm -rf "$work"; : >"$build/ran/$only.ended"' EXIT; fi

# lists NAME: whether the run is only to be listed
lists() {
    [ "${LIST:-0}" = 1 ] && ok "$1"
}

# run NAME COMMAND...: its last line counts tests, and none failed
run() {
    name=$1
    shift
    if lists "$name"; then return; fi
    capture timeout -k 5 "${limit:-600}" "$@"
    if [ "$status" -eq 0 ] && tail -n 1 "$work/out" | grep -q '^[1-9][0-9]* passed, 0 failed'; then
        ok "$name: $(tail -n 1 "$work/out")"
    else
        grep -E 'FAILED|MISSED|NOT |nothing tries' "$work/out" >>"$work/err"
        fail "$name" "status $status: $(last_line)" "$work/err"
    fi
}

# is_chosen ARCH: and the entries that run as that device are noted
is_chosen() {
    if [ -d "$build/ran" ]; then PTX_RAN=$build/ran/$1; fi
    [ "${ARCH:-$1}" = "$1" ]
}

# on ARCH MODES COMMAND...: runs it so
on() {
    arch=$1 modes=$2
    shift 2
    if ! is_chosen "$arch"; then return; fi
    # shellcheck disable=SC2086
    run "$what as sm_$arch${modes:+, $modes}" env PTX_ARCH="$arch" PTX_RAN="${PTX_RAN:-}" $modes "$@"
}

is_wanted() { # SUITE
    what=$1
    [ -z "$only" ] || [ "$only" = "$1" ]
}

if is_wanted primitives; then
    what="the interpreter"
    on "${ARCH:-90}" "PTX_RAN=" "$build/primitives" ptx. # its own texts are no kernels that ran
    what=primitives
    for arch in 80 86 90; do
        on $arch "" "$build/primitives" primitives.
    done
    for arch in 80 90; do
        on $arch "PTX_LATE=0 PTX_ORDER=reverse PTX_FUSE=1" "$build/primitives" primitives.
        on $arch "PTX_RACE=1 PTX_ORDER=shuffled PTX_COPIES=random PTX_BLOCKS=3" "$build/primitives" primitives.
    done
fi
for suite in wgmma attention blocks state executor outputs; do
    if is_wanted $suite; then
        for arch in 80 86 90; do
            if [ $suite = wgmma ] && [ $arch != 90 ]; then continue; fi
            case $suite$arch in
                executor* | outputs* | *86) on $arch "FULL=0" "$build/cuda_tests" $suite. ;;
                *) on $arch "" "$build/cuda_tests" $suite. ;;
            esac
        done
    fi
done
for suite in wgmma attention blocks; do
    if is_wanted $suite; then
        for arch in 80 90; do
            if [ $suite = wgmma ] && [ $arch != 90 ]; then continue; fi
            on $arch "FULL=0 PTX_RACE=1 PTX_ORDER=reverse PTX_COPIES=newest" "$build/cuda_tests" $suite.
            on $arch "FULL=0 PTX_LATE=0 PTX_ORDER=shuffled PTX_BLOCKS=8 PTX_FUSE=1" "$build/cuda_tests" $suite.
        done
    fi
done

# checks ARCH MODES AT_LEAST PROGRAM OPTIONS...: --check compares that many results, and each is ok
checks() {
    arch=$1 modes=$2 at_least=$3 program=$4
    shift 4
    if ! is_chosen "$arch"; then return; fi
    name="$program as sm_$arch${modes:+, $modes}: $*"
    if lists "$name"; then return; fi
    # shellcheck disable=SC2086
    capture timeout -k 5 600 env PTX_ARCH="$arch" PTX_RAN="${PTX_RAN:-}" $modes "$build/$program" $model --check "$@"
    if [ "$status" -ne 0 ] || grep -q 'NOT OK' "$work/out"; then fail "$name" "status $status: $(last_line)" "$work/err"
    elif [ "$(grep -c ': ok$' "$work/out")" -lt "$at_least" ]; then fail "$name" "$(last_line)"
    else ok "$name"; fi
}

# learns ARCH PROGRAM TYPE: steps lower the loss, and chunks have the losses of whole sequences, to a thousandth
learns() {
    if ! is_chosen "$1"; then return; fi
    name="steps of $2 as sm_$1, $3"
    if lists "$name"; then return; fi
    : >"$work/losses"
    for size in 24 1024; do
        # shellcheck disable=SC2086
        capture timeout -k 5 600 env PTX_ARCH="$1" PTX_RAN="${PTX_RAN:-}" "$build/$2" $model --lr 0.01 --steps 3 \
            --type "$3" --synthetic 40,20 --chunk-size $size
        sed -n 's/^step .* loss \([0-9.]*\) .*/\1/p' "$work/out" >>"$work/losses"
    done
    if awk '{ loss[NR] = $1 }
            END { for (i = 1; i <= 3; i++) bad += loss[i] - loss[i + 3] > 1e-3 || loss[i + 3] - loss[i] > 1e-3
                  exit NR != 6 || bad || !(loss[3] < 0.99 * loss[1]) }' "$work/losses"
    then ok "$name"
    else fail "$name" "status $status: $(last_line)" "$work/losses"; fi
}

if is_wanted executor_cuda; then
    model="--layers 2 --hidden 64 --heads 2 --kv-heads 1 --ffn 96 --chunk-size 64"
    lengths="--synthetic 200,33,64,1,20"
    for arch in 80 86 90; do
        # shellcheck disable=SC2086
        {
            checks $arch "" 2 executor_cuda $lengths --type fp32 --reference --k 2
            checks $arch "PTX_FUSE=1" 5 executor_cuda $lengths --type fp32 --stages 2 --outputs host --k 1 \
                --stream 40000
            checks $arch "PTX_DEVICES=2" 2 executor_cuda $lengths --type bf16 --stages 2 --devices 2 --schedule 1f1b
            checks $arch "PTX_DEVICES=2 PTX_PEERS=0" 2 executor_cuda $lengths --type fp16 --stages 2 --devices 2 \
                --schedule zero-bubble
        }
    done
    # shellcheck disable=SC2086
    checks 90 "" 2 executor_cuda $lengths --attention wgmma --window 50
    model=${model%--chunk-size 64}
    for arch in 80 90; do
        for type in fp32 bf16 fp16; do learns $arch executor_cuda $type; done
    done
fi
if is_wanted train_cuda; then
    model="--layers 2 --hidden 32 --heads 4 --kv-heads 2 --ffn 40 --vocabulary 48 --loss-rows 128"
    model="$model --lr 0.5 --warmup 0 --clip 0.1 --chunk-size 48"
    for arch in 80 86 90; do
        checks $arch "" 5 train_cuda --type fp32 --synthetic 110,20,33,48,1,0
        checks $arch "PTX_FUSE=1" 5 train_cuda --k 2 --synthetic 110,20,33,48,1,0
        checks $arch "PTX_FUSE=1" 5 train_cuda --sinks --type fp32 --stream 24576 --synthetic 110,20,33,1,0
        checks $arch "" 5 train_cuda --type fp32 --recompute full --untied --k 2 --synthetic 110,20,48
        checks $arch "" 5 train_cuda --type fp32 --outputs host --sinks --synthetic 102,105,110,100,30,50 --with 0,0,0,1,0,5 \
            --shared 0,98,98,99,0,0
        checks $arch "" 5 train_cuda --type fp32 --outputs gpu --stream 24576 --synthetic 102,105,110,100 \
            --with 0,0,0,1 --shared 0,98,70,99
    done
    checks 90 "" 5 train_cuda --attention wgmma --outputs gpu --sinks --synthetic 70,20
    model=${model%--lr 0.5*}
    for arch in 80 90; do
        learns $arch train_cuda fp32
        learns $arch train_cuda bf16
    done
fi
write_texts() {
    for program in primitives cuda_tests executor_cuda train_cuda; do
        mkdir -p "$work/texts/$program" || exit 1
        PTX_DUMP=$work/texts/$program "$build/$program" --help >/dev/null 2>&1
    done
}
if is_wanted coverage && ! lists coverage; then
    write_texts
    run "every instruction of the programs has a test" env PTX_PROGRAMS="$work/texts" "$build/primitives" ptx.
    run "no fusible product in chunkflow_cuda.cu's entries" env PTX_PROGRAMS="$work/texts" "$build/primitives" \
        ptx.fusible_products
    LIST=1 ARCH='' sh "$0" >"$work/runs"
    before=$failed
    for arch in 80 90; do
        for mode in LATE=0 COPIES=newest COPIES=random ORDER=reverse ORDER=shuffled BLOCKS=3 BLOCKS=8 FUSE=1 RACE=1 \
            DEVICES=2 PEERS=0; do
            if ! grep -q "sm_$arch,.*PTX_$mode" "$work/runs"; then fail "PTX_$mode as sm_$arch" "no run has it"; fi
        done
    done
    if [ "$failed" -eq "$before" ]; then ok "every value of every mode has a run"; fi
fi
planted() { # SUITE SCRIPT [OPTION]
    if ! is_wanted "$1" || [ "${ARCH:-90}" != 90 ]; then return; fi
    find_python
    if [ -z "$PYTHON" ]; then skip "$1" "no python3"; fi
    shift
    if [ -n "$PYTHON" ]; then limit=1500 run "$*" "$PYTHON" -B "$@"; fi
}
planted faults tests/ptx/ptx_faults.py
planted kernels tests/cuda/cuda_faults.py --ptx

# Kernels that a device of 8.0 does not run: tests of what only 9.0 has, and those that the path with wgmma launches.
ONLY_90='wgmma|stored_matrices|pieces_kernel|hopper|attention_combine_kernel.*Li256E|_(join|round_dq)_kernel.*Li1E'

# The suites run at once, and this one is started last.
have_ended() {
    for suite in primitives wgmma attention blocks state executor outputs executor_cuda train_cuda; do
        [ -e "$build/ran/$suite.ended" ] || return 1
    done
}
if [ "$only" = entries ] && [ ! -d "$build/ran" ]; then skip entries "it is part of a whole make test-ptx"
elif [ "$only" = entries ] && [ -z "${ARCH:-}" ]; then
    await $$ have_ended
    write_texts
    for target in 80 90a; do
        cat "$build/ran/${target%a}" "$build/ran/86" | sort -u >"$work/ran"
        cat "$work"/texts/*/*.sm_$target.ptx | sed -n 's/.*\.entry \([^(]*\)(.*/\1/p' | sort -u >"$work/entries"
        if [ $target = 80 ]; then
            grep -vE "$ONLY_90" "$work/entries" >"$work/out"
            mv "$work/out" "$work/entries"
        fi
        comm -13 "$work/ran" "$work/entries" >"$work/err"
        name="each of $(wc -l <"$work/entries") kernels ran as compiled for sm_$target"
        if [ -s "$work/entries" ] && [ ! -s "$work/err" ]; then ok "$name"
        else fail "$name" "not these:" "$work/err"; fi
    done
fi
if [ $((passed + failed + skipped)) -eq 0 ] && [ -n "${ARCH:-}" ]; then
    printf 'note: %s has nothing to run as sm_%s\n0 passed, 0 failed\n' "$only" "$ARCH"
    exit 0
fi
finish
