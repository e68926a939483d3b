#!/bin/sh
# Compiles chunkflow_cuda.cu for real, for each architecture, and reads what ptxas says: no warning, no kernel that
# spills registers or has a stack frame, no more compile time than promised; without the time, the variants of kernels
# that a record measures; in the PTX, products that are fused; and of the kernels with wgmma the machine code, which a
# disassembler from PyPI reads. Needs nvcc, no GPU.
#
#     sh tests/cuda/cuda_compile.sh    from the top; BUILD (default build) takes the objects, NVCC names nvcc
#
# FULL=1: all of that. Otherwise nvcc reads the kernels for sm_90a, which has the most of them, and makes no code of them:
# its warnings, the host's part and what links with it are looked at, and nothing that ptxas would say.

set -u
. "$(dirname "$0")/../helpers.sh"

BUILD=${BUILD:-build}
NVCC=${NVCC:-nvcc}
CC=${CC:-cc}
out=$BUILD/cuda_compile

command -v "$NVCC" >/dev/null 2>&1 || skip_all cuda_compile "there is no nvcc"
mkdir -p "$out" || exit 1

# Lists the kernels of a ptxas -v log that have a stack frame.
with_stack() { # LOG
    awk '/Compiling entry function/ { kernel = $7 " for " $9; n_kernels++ }
        /bytes stack frame/ {
            n_frames++
            if ($1 > 0) print kernel ": " $1 " bytes of stack"
        }
        END { if (n_kernels == 0 || n_frames < n_kernels) print "the log names no kernels" }' "$1"
}

# Prints the processor seconds of all commands so far, from the second line of `times`, such as 1m2.34s 0m5.6s.
cpu_seconds() {
    times >"$out/times"
    seconds=$(awk 'NR == 2 {
            split($1 "m" $2, part, /[ms]+/)
            printf "%d", 60 * (part[1] + part[3]) + part[2] + part[4] + 0.5
        }' "$out/times")
}

# front_end OPTION...: compiles for warnings only, with the complete host code in the object
front_end() {
    name="sm_90a: nvcc's front end has no warnings"
    if "$NVCC" -std=c++17 -Werror all-warnings -Xcompiler -Wall,-Wextra -fdevice-syntax-only \
            -gencode arch=compute_90a,code=sm_90a "$@" -I. -c chunkflow_cuda.cu -o "$object" \
            >"$out/front_end.log" 2>&1; then ok "$name"
    else fail "$name" "it does" "$out/front_end.log"; fi
}

compile() { # NAME SECONDS ARCHITECTURE CODES OPTION...: of compiler time at most; -: as many as it takes
    name_of=$1
    most=$2
    arch=$3
    codes=$4
    shift 4
    log=$out/$name_of.log
    cpu_seconds
    before=$seconds
    if "$NVCC" -std=c++17 -Werror all-warnings -Xcompiler -Wall,-Wextra -Xptxas -v \
            -gencode "arch=$arch,code=$codes" "$@" -I. -c chunkflow_cuda.cu -o "$out/$name_of.o" >"$log" 2>&1; then
        ok "compiles for $name_of without warnings"
    else
        grep -E 'error|warning' "$log" >"$out/why"
        fail "compiles for $name_of without warnings" "it does not" "$out/why"
        return
    fi
    with_stack "$log" >"$out/why"
    name="$name_of: no kernel spills or has a stack frame"
    if [ -s "$out/why" ]; then fail "$name" "some do" "$out/why"; else ok "$name"; fi
    grep -E 'C75[0-9][0-9]' "$log" >"$out/why"
    name="$name_of: no wgmma waits for another one that it does not need"
    if [ -s "$out/why" ]; then fail "$name" "ptxas says so" "$out/why"; else ok "$name"; fi
    cpu_seconds
    seconds=$((seconds - before))
    # The same compilation takes 42 to 56 s on a shared machine, so the least of up to three counts.
    for again in 2 3; do
        if [ "$most" = - ] || [ "$seconds" -le "$most" ]; then break; fi
        printf 'note: %s: %s s of compiler time; once more (%s of 3)\n' "$name_of" "$seconds" "$again"
        cpu_seconds
        before=$seconds
        "$NVCC" -std=c++17 -gencode "arch=$arch,code=$codes" "$@" -I. -c chunkflow_cuda.cu -o "$out/again.o" \
            >"$log.again" 2>&1
        cpu_seconds
        seconds=$((seconds - before))
    done
    if [ "$most" = - ]; then printf 'note: %s: %s s of compiler time\n' "$name_of" "$seconds"
    elif [ "$seconds" -le "$most" ]; then ok "$name_of: $seconds s of compiler time ($most allowed)"
    else fail "$name_of: compiler time" "$seconds s, $most allowed"; fi
}

# Kernels that the code for sm_90a leaves out are empty: three shapes of tiles for two types each (see HAS_SMALL). With
# the variants all kernels have code.
check_left_out() {
    name="sm_90a leaves out the tiles that only devices with less memory run"
    for log in sm_90a sm_90a_variants; do
        awk '/Compiling entry function/ { small = /attention_backward_kernelI[^L]*Li(64ELi64|128ELi64ELi64)/ ||
                /attention_dq_kernelI[^L]*Li64ELi64/ }
            small && /Used [0-9]+ registers/ { n += $5 < 32; small = 0 }
            END { print n + 0 }' "$out/$log.log"
    done | tr '\n' ' ' >"$out/n"
    if [ "$(cat "$out/n")" = '6 0 ' ]; then ok "$name"
    else fail "$name" "$(cat "$out/n")kernels are empty, wanted 6, and 0 with the variants"; fi
}

# nvcc and ptxas may fuse a product and a sum in some rows of a tile and not in others. With and without permission,
# nvcc must fuse the same number. It must leave ptxas no sum of a product whose name lacks a rounding mode.
check_products() {
    name="products are fused or kept apart by name"
    for may in true false; do
        "$NVCC" -std=c++17 -w -ptx -arch=compute_90a -fmad=$may -DCHUNKFLOW_CUDA_VARIANTS -I. chunkflow_cuda.cu \
            -o "$out/fmad_$may.ptx" || { fail "$name" "it does not compile"; return; }
    done
    awk 'FNR == 1 { file++ }
        /\.entry/ { entry = $0; sub(/.*\.entry /, "", entry); delete product }
        { gsub(/[,;]/, "") }
        $1 == "fma.rn.f32" { n[entry] += file == 1 ? 1 : -1 }
        $1 ~ /^(add|sub)\.f32$/ && file == 1 && (($3 in product) || ($4 in product)) { left[entry]++ }
        $1 ~ /^[a-z]/ { delete product[$2] }
        $1 == "mul.f32" { product[$2] }
        END {
            for (entry in n) {
                entries++
                if (n[entry]) print entry ": fuses " n[entry]
            }
            for (entry in left) print entry ": leaves " left[entry]
            if (entries < 50) print "few kernels have a sum of products"
        }' "$out/fmad_true.ptx" "$out/fmad_false.ptx" >"$out/why"
    if [ -s "$out/why" ]; then fail "$name" "some are not" "$out/why"; else ok "$name"; fi
}

# Checks of kernels with wgmma that only the machine code allows.
check_overlap() {
    name="exponentials run beside the products of each turn"
    NVCC=$NVCC BUILD=$BUILD python3 -B tools/bench/count_instructions.py --overlap >"$out/overlap" 2>&1
    case $? in
        0) ok "$name" && cat "$out/overlap" ;;
        77 | 127) skip "$name" "there is no nvdisasm, nor can it be installed" ;;
        *) fail "$name" "$(grep -c ' wrong$' "$out/overlap") kernels do not" "$out/overlap" ;;
    esac
}

# Compiled with NCCL for one of the two targets, if its header is there: the target makes no difference to the host's
# code.
nccl=
if printf '#include <nccl.h>\n' | "$NVCC" -E -x cu - >/dev/null 2>&1; then nccl=-DCHUNKFLOW_NCCL
else printf 'note: there is no nccl.h; NCCL is not compiled\n'; fi

# `make` builds the first, the second and the PTX of the fourth target for users. The driver of a later device compiles
# that PTX, as ptxas does here; devices of 8.6 and 8.9 run the code of sm_80. nvcc's -O affects only host code, so one
# optimised compilation is enough for the optimiser's warnings.
object=$out/sm_80.o
with_nccl=$out/sm_90a.o
# shellcheck disable=SC2086
if full; then
    compile sm_80 60 compute_80 sm_80
    compile sm_90a 60 compute_90a sm_90a -O3 $nccl
    compile sm_90a_variants - compute_90a sm_90a -DCHUNKFLOW_CUDA_VARIANTS
    compile sm_100_and_120 60 compute_90 '[sm_100,sm_120,compute_90]' --no-compress
    compile sm_86_and_89 60 compute_80 '[sm_86,sm_89]'
    check_left_out
    check_products
    check_overlap
    name="devices that come later have PTX of compute_90"
    if grep -qa '^\.target sm_90$' "$out/sm_100_and_120.o"; then ok "$name"; else fail "$name" "they have not"; fi
    name="the tests that a device runs link"
    if make -s "$out/gpu/cuda_tests" "BUILD=$out" "NVCC=$NVCC" "CC=$CC" \
            GPU_ARCH='-fdevice-syntax-only -gencode arch=compute_80,code=sm_80' >"$out/tests.log" 2>&1; then ok "$name"
    else fail "$name" "they do not" "$out/tests.log"; fi
else
    object=$out/front_end.o
    with_nccl=$object
    front_end $nccl
fi
if [ -n "$nccl" ]; then
    if nm -u "$with_nccl" 2>/dev/null | grep -q ' ncclSend$'; then ok "compiles with CHUNKFLOW_NCCL"
    else fail "compiles with CHUNKFLOW_NCCL" "it calls no ncclSend"; fi
fi

# The object exports only the declared functions (nvcc gives names without linkage a unique prefix). Its host code works
# in a C program without a device.
others=$(nm -g --defined-only "$object" 2>/dev/null | awk '$2 ~ /[TDBR]/ && $3 !~ /^cf_|_GLOBAL__N_/ { print $3 }')
if [ -z "$others" ]; then ok "exports only cf_ names"; else fail "exports only cf_ names" "$others"; fi

cat >"$out/use.c" <<'END'
#define CHUNKFLOW_IMPLEMENTATION
#include "chunkflow.h"
#define CHUNKFLOW_CUDA_HEADER_ONLY
#include "chunkflow_cuda.cu"
int main(void) {
    int32_t cu[2] = {0, 100};
    cf_attention_desc desc;
    cf_error error;
    size_t bytes = 0;
    memset(&desc, 0, sizeof desc);
    desc.n_heads = 8;
    desc.head_size = 128;
    desc.n_slices = 1;
    desc.cu_seqlens_q = desc.cu_seqlens_k = cu;
    desc.arch = 90;
    if (cf_attention_size(&desc, &bytes, &error) != CF_OK || bytes == 0) return 1;
    desc.arch = 0; /* the current device's: found, or reported as missing */
    if (cf_attention_size(&desc, &bytes, &error) != CF_OK && error.code != CF_ERROR_DEVICE) return 2;
    if (strcmp(cf_attention_path_name((cf_attention_path)9), "?") != 0) return 3; /* C++ would not allow this number */
    return 0;
}
END
# Replaces NCCL by empty functions that are never called.
nm -u "$object" | sed -n 's/^ *U \(nccl[A-Za-z]*\)$/void \1(void); void \1(void) {}/p' >"$out/no_nccl.c"
if "$CC" -std=c99 -Wall -Wextra -Werror -I. -c "$out/use.c" -o "$out/use.o" &&
    "$CC" -c "$out/no_nccl.c" -o "$out/no_nccl.o" &&
    "$NVCC" "$out/use.o" "$object" "$out/no_nccl.o" -lcublas -o "$out/use" >"$out/use.log" 2>&1; then
    "$out/use"
    status=$?
    if [ $status -eq 0 ]; then ok "links with C, and describes problems without a device"
    else fail "describes problems without a device" "status $status"; fi
else
    fail "links with C" "it does not" "$out/use.log"
fi

# Builds the example as a trainer's author would, and checks its message on a machine that cannot run it.
if ! full; then : # executor_check.sh has it compiled for the emulation
elif "$NVCC" -O1 -std=c++17 -Werror all-warnings -Xcompiler -Wall,-Wextra -gencode arch=compute_80,code=sm_80 -I. \
        -c examples/executor_cuda.cu -o "$out/example.o" >"$out/example.log" 2>&1 &&
    "$NVCC" "$out/example.o" "$object" "$out/no_nccl.o" -lcublas -o "$out/executor_cuda" >>"$out/example.log" 2>&1; then
    CUDA_VISIBLE_DEVICES= "$out/executor_cuda" --synthetic 9 >"$out/example.out" 2>&1
    status=$?
    if [ "$status" -eq 1 ] && grep -q '^executor_cuda: cudaGetDeviceCount' "$out/example.out"; then
        ok "the example compiles, and says where there is no device"
    else
        fail "the example without a device" "status $status: $(tail -n 1 "$out/example.out")"
    fi
else
    fail "the example compiles" "it does not" "$out/example.log"
fi
left_out "code for each architecture, what ptxas says of registers, stack, wgmma and time, the PTX, device tests and the \
example"
finish
