#!/bin/sh
# executor_check.sh - the CUDA example: every schedule through the executor, checked against unchunked gradients
#
#     tests/cuda/executor_check.sh          under the emulation: BUILD/cuda/executor_cuda (BUILD: build)
#     tests/cuda/executor_check.sh device   on a device: builds BUILD/executor_cuda with nvcc first, unless
#                                           EXECUTOR_CUDA names one; larger shapes
#
# FULL=1: all repetitions under the emulation; otherwise each option and type at least once.
#
# Run it in the top directory. Prints "ok NAME" or "FAIL NAME: why" for each case and "N passed, N failed" at the end.
# What there is no compiler or device for is skipped.

. "$(dirname "$0")/../helpers.sh"

build=${BUILD:-build}
mode=${1:-emulated}
chunkflow=${CHUNKFLOW:-$build/test/chunkflow}
workplace "$build/executor_check.$mode.tmp"

# run OPTIONS...: as capture; status 124: it hung
run() { capture timeout -k 5 "${LIMIT:-600}" "$program" "$@"; }

# gradients NAME TEXT OPTIONS...: --check finds no difference, and TEXT in the output shows that the intended case
# occurred
gradients() {
    name="gradients: $1"
    said=$2
    shift 2
    # shellcheck disable=SC2086
    run $model --check "$@"
    if [ "$status" -ne 0 ]; then
        fail "$name" "exit status $status: $(cat "$work/out" "$work/err" | grep -v '^stage' | tail -n 2)"
    elif [ "$(grep -c ': ok$' "$work/out")" -lt 2 ] || grep -q 'NOT OK' "$work/out"; then fail "$name" "$(last_line)"
    elif ! grep -q -e "$said" "$work/out"; then fail "$name" "it did not say \"$said\" but: $(head -n 1 "$work/out")"
    else ok "$name"; fi
}

# rings NAME OPTIONS...: with streamed state, blocks in rings of three lengths give the same bits
rings() {
    what=$1
    shift
    gradients "streamed: $what" '' "$@"
    [ "$(grep -c 'a ring of [0-9]* blocks, bit by bit:.*: ok$' "$work/out")" -eq $((3 * ${RANKS:-1})) ] ||
        fail "rings: $what" "$(last_line)"
}

# refuse TEXT OPTIONS...: status 2, one message, nothing printed
refuse() {
    said=$1
    shift
    # shellcheck disable=SC2086
    run $model "$@"
    complained "refused: $*" 2 "executor_cuda: .*$said"
}

# timeline NAME OPTIONS...: the measured timeline passes the command's own check, and can be drawn
skew=
timeline() {
    name="timeline: $1"
    shift
    # shellcheck disable=SC2086
    run $model --check "$@" --timeline "$work/measured.json" --plan "$work/plan.json"
    if [ "$status" -ne 0 ]; then fail "$name" "exit status $status: $(last_line)"
    elif "$chunkflow" check --plan "$work/plan.json" $skew "$work/measured.json" --chart --trace "$work/trace" \
        >"$work/said" 2>&1 && grep -q 'its times hold' "$work/said" && grep -q '^stage 0 |.*F.*|$' "$work/said" &&
        [ "$(grep -c '"ph": "X"' "$work/trace")" -eq "$(grep -c '"start": ' "$work/measured.json")" ]; then ok "$name"
    else fail "$name" "$(tail -n 1 "$work/said")"; fi
}

# learns NAME OPTIONS...: the last loss is lower than the first one
learns() {
    name="training: $1"
    shift
    # shellcheck disable=SC2086
    run $model "$@"
    if [ "$status" -ne 0 ]; then fail "$name" "exit status $status: $(last_line)"
    elif awk '/^step/ { loss = $4; if (n++ == 0) first = loss } END { exit !(n > 1 && loss < 0.97 * first) }' \
        "$work/out"; then ok "$name"
    else fail "$name" "losses: $(awk '/^step/ { printf "%s ", $4 }' "$work/out")"; fi
}

# Builds the example for this machine's device, with NCCL if it is installed.
build_for_device() {
    nvcc=${NVCC:-nvcc}
    command -v "$nvcc" >/dev/null 2>&1 || skip_all executor "no nvcc"
    arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)
    case $arch in
        90) code="-gencode arch=compute_90a,code=sm_90a" ;;
        *) code="-gencode arch=compute_$arch,code=sm_$arch" ;;
    esac
    printf '#include <nccl.h>\nint main() { return ncclGetVersion(NULL); }\n' >"$work/nccl.cu"
    if "$nvcc" "$work/nccl.cu" -lnccl -o "$work/nccl" >/dev/null 2>&1; then nccl="NCCL=1"; fi
    # shellcheck disable=SC2086
    make -s "$build/executor_cuda" BUILD="$build" CUDA_ARCH="$code" $nccl || {
        fail "build" "nvcc failed"
        finish
    }
}

if [ "$mode" = device ]; then
    command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU || skip_all executor "no device"
    n_devices=$(nvidia-smi -L | grep -c GPU)
    nccl=
    program=${EXECUTOR_CUDA:-$build/executor_cuda}
    if [ -z "${EXECUTOR_CUDA:-}" ]; then build_for_device; fi
    LIMIT=600
    model="--layers 2 --hidden 128 --heads 2 --kv-heads 1 --ffn 352 --chunk-size 128"
    model="$model --synthetic 700,90,128,1,0,300,31,133"
    for type in fp32 fp16 bf16; do
        gradients "$type, small, against the CPU" "check $type" --type $type --reference --k 2
    done
    for schedule in paper gpipe 1f1b interleaved zero-bubble best; do
        for replay in pipeline local; do
            [ $replay = pipeline ] && [ $schedule != paper ] && continue
            gradients "$schedule, $replay replay, 2 stages" "$schedule" --type fp32 --layers 4 --schedule $schedule \
                --replay $replay --stages 2 --k 2
        done
    done
    for replay in pipeline local; do
        rings "$replay replay" --type fp32 --layers 4 --stages 2 --schedule paper --replay $replay --k 1 --stream 100000
    done
    rings "bf16, window" --k 2 --stream 100000 --window 200
    model="--layers 8 --hidden 1024 --heads 8 --kv-heads 2 --ffn 2816 --chunk-size 4096"
    model="$model --synthetic 60000,20000,300,4096,1000,7000,2000,1,77,12000"
    gradients "full size, one stage" "check bf16" --k 2
    gradients "full size, split backwards" 'zero-bubble' --k 1 --stages 4 --schedule zero-bubble
    rings "full size" --stages 2 --k 1 --replay local --stream 50000000
    timeline "full size" --stages 4 --k 2 --schedule 1f1b
    learns "full size" --k 2 --stages 2 --steps 12 --lr 0.001
    if [ "$n_devices" -ge 2 ]; then
        gradients "full size, two devices" "2 stages" --stages 2 --devices 2 --k 2 --schedule 1f1b
        [ -z "$nccl" ] || gradients "full size, NCCL" "2 stages" --ranks 2 --devices 2 --k 2 --schedule 1f1b
        skew="--clock-skew 0.0001"
        timeline "full size, two devices" --stages 2 --devices 2 --k 2 --schedule 1f1b
        [ -z "$nccl" ] || timeline "full size, NCCL" --ranks 2 --devices 2 --k 2 --schedule 1f1b
    else
        echo "skip two devices and NCCL: there is one device"
    fi
    finish
fi

program=$build/cuda/executor_cuda
if [ ! -x "$program" ]; then skip_all executor "built without a C++ compiler"; fi
CUDA_EMU_DEVICES=2
export CUDA_EMU_DEVICES
# fp32, because attention of 16-bit numbers takes five times as long at these sizes.
tiny="--type fp32 --layers 2 --hidden 32 --heads 4 --kv-heads 2 --ffn 48 --chunk-size 16"
model="$tiny --synthetic 56,5,16,3,1,0,33" # chains of 4 and 3 chunks, some of them hybrid

# ---- gradients: types, against the float64 reference, which shares no line with the kernels ----

for type in fp32 fp16 bf16; do
    case $type in *16) full || continue ;; esac # both come below
    gradients "$type, one stage" "check $type.*(2 hybrid), longest chain 4.* 5 replays" --type $type --reference
done
gradients "fp16 with the unfused attention" 'check fp16' --type fp16 --attention unfused --stages 2 --reference
if ! full; then model="$tiny --synthetic 40,5,16"; fi # bf16 takes longest by far
in_full gradients "bf16 with the fused attention, I and W" 'check bf16.* [1-9][0-9]* split backwards' --type bf16 \
    --attention mma --schedule zero-bubble --stages 2 --k 2 --reference
CUDA_EMU_ARCH=90 CUDA_EMU_WGMMA=1
export CUDA_EMU_ARCH CUDA_EMU_WGMMA
gradients "bf16 with wgmma, I and W" 'check bf16.* [1-9][0-9]* split backwards' --type bf16 --attention wgmma \
    --schedule zero-bubble --stages 2 --k 2 --reference
LIMIT=300 in_full rings "bf16 with wgmma" --type bf16 --attention wgmma --stages 2 --k 1 --replay local --stream 3000
unset CUDA_EMU_ARCH CUDA_EMU_WGMMA
model="$tiny --synthetic 56,5,16,3,1,0,33"
in_full gradients "fp32 on 4 stages" '4 stages' --layers 4 --stages 4 --k 2 --reference
in_full gradients "bf16, head size 64, one key head" 'check bf16' --type bf16 --hidden 128 --heads 2 --kv-heads 1 \
    --layers 1 --reference

# ---- gradients: every schedule and replay ----

for schedule in paper gpipe 1f1b interleaved zero-bubble best; do
    for replay in pipeline local; do
        [ $replay = pipeline ] && [ $schedule != paper ] && continue
        if [ $schedule = paper ] && [ $replay = local ] && ! full; then continue; fi
        layers=2
        if [ $schedule = interleaved ]; then layers=4; fi
        gradients "$schedule, $replay replay, 2 stages" "$schedule, 2 stages x [12] ([a-z]*); [1-9][0-9]* replays" \
            --schedule $schedule --replay $replay --layers $layers --stages 2 --k 1
    done
done
in_full gradients "1f1b, 4 stages, K 2" '1f1b, 4 stages' --layers 4 --schedule 1f1b --stages 4 --k 2
in_full gradients "3 stages with 1, 1 and 2 layers" '3 stages' --layers 4 --stages 3 --k 2
in_full gradients "nothing replayed" ' 0 replays' --schedule paper --stages 2 --k 9
in_full gradients "I and W on one stage" '[1-9][0-9]* split backwards' --schedule zero-bubble --k 2
in_full gradients "best with I and W" 'best' --schedule best --split-backward --stages 2 --k 2 --replay local
in_full gradients "two virtual stages on each of 2, 5 layers" '2 stages x 2' --layers 5 --schedule interleaved \
    --stages 2 --virtual 2 --k 2
gradients "two virtual stages on each of 2 in a V" '2 stages x 2 (v)' --layers 5 --schedule best --stages 2 \
    --virtual 2 --placement v --split-backward --k 2
in_full gradients "two virtual stages on one" '1 stages x 2' --layers 3 --schedule interleaved --k 2
gradients "odd sizes" 'chunks of 13' --hidden 24 --heads 3 --kv-heads 1 --ffn 40 --chunk-size 13 --stages 2 --k 2 \
    --reference
gradients "at most 2 chunks kept" 'K 4' --stages 2 --k 4 --limit 2

# ---- gradients: chunks ----

gradients "aligned slices" '[1-9] hybrid' --align 8 --stages 2 --k 2
gradients "no hybrid chunks" '(0 hybrid)' --no-tails --stages 2
in_full gradients "even slices, prompts" 'longest chain 4' --split even --prompt 7 --stages 2 --k 2 --reference
model="$tiny --synthetic 16,9,3,0,1,16,12,5"
in_full gradients "standalone chunks only" 'longest chain 0' --stages 2 --schedule 1f1b --align 4
# best drops some chunks on some stages if there is little room
gradients "standalone chunks replayed" 'longest chain 0.* [1-9][0-9]* replays' --layers 3 --stages 3 --schedule best \
    --replay local --limit 1
model="$tiny --synthetic 131"
in_full gradients "one chain of 9" 'longest chain 9' --stages 2 --k 3 --schedule zero-bubble
model="$tiny --synthetic 56,5,16,3,1,0,33"

# ---- two devices ----

in_full gradients "2 devices" '2 stages' --stages 2 --devices 2 --k 2
in_full gradients "4 stages on 2 devices, interleaved" '4 stages x 2' --layers 8 --stages 4 --devices 2 --k 2 \
    --schedule interleaved

# ---- streamed state: blocks of 5 to 40 rows of a prefix of up to 48 ----

if ! full; then model="$tiny --synthetic 56,5,16,3,1,0"; fi # one chain and a hybrid chunk
rings "one stage" --stream 4000 --reference
in_full rings "2 stages, K 2, outputs" --stages 2 --k 2 --outputs gpu --stream 2000
in_full rings "2 stages, pipeline replay" --stages 2 --k 1 --schedule paper --replay pipeline --stream 2000
in_full rings "K 1, blocks longer than a prefix" --k 1 --replay local --stages 2 --stream 1000000
rings "a window, I and W" --schedule zero-bubble --stages 2 --k 1 --replay local --stream 3000 --window 20
in_full rings "each token sees itself" --stages 2 --stream 3000 --window 1
if ! full; then model="$tiny --synthetic 40,5,16,1,0"; fi
in_full rings "two virtual stages on each of 2 in a V, of other layers" --layers 5 --schedule best --stages 2 --virtual 2 \
    --placement v --split-backward --k 2 --replay local --stream 3000
in_full rings "interleaved, aligned slices" --layers 4 --schedule interleaved --stages 2 --align 8 --replay local \
    --stream 5000
rings "fp16, unfused, outputs" --type fp16 --attention unfused --stages 2 --k 1 --outputs host --stream 3000 --reference
LIMIT=300 in_full rings "bf16, fused" --type bf16 --stages 2 --k 1 --replay local --stream 3000 --reference
RANKS=2
rings "2 ranks" --layers 4 --ranks 2 --schedule interleaved --k 2 --outputs gpu --stream 3000
unset RANKS
model="$tiny --synthetic 56,5,16,3,1,0,33"

# ---- trees: sequences that begin alike, compared with each sequence on its own ----

# Cases: a prompt of several chunks with answers in its last chunk and in leaves, one of them nested; small trees within
# a chunk; a deep tree whose branches diverge in the middle of chunks. Each also has sequences outside trees.
star="--synthetic 36,38,40,37,8,50 --with 0,0,0,1,0,5 --shared 0,34,34,35,0,0"
small="--synthetic 9,8,7,5,7,6 --with 0,0,0,3,3,4 --shared 0,6,5,0,4,5"
deep="--synthetic 40,43,45,48,50,6,17,66 --with 0,0,1,2,0,0,5,3 --shared 0,18,24,34,10,0,4,45"
chain=4
if ! full; then
    star="--synthetic 36,38,37,8 --with 0,0,1,0 --shared 0,34,35,0"
    deep="--synthetic 40,43,45,48,6,33 --with 0,0,1,2,0,0 --shared 0,18,24,34,0,10"
    chain=3
fi

model="$tiny $star"
gradients "a prompt's answers" "longest chain $chain" --reference
in_full gradients "a prompt's answers, 2 stages, K 2" '2 stages' --stages 2 --k 2 --schedule 1f1b
in_full gradients "a prompt's answers, aligned" '' --align 4 --stages 2 --replay local
in_full rings "a prompt's answers" --stream 4000 --stages 2
model="$tiny $small"
gradients "small trees" 'longest chain 0'
gradients "small trees, a window" '' --window 7 --stages 2
model="$tiny $deep"
gradients "a deep tree, outputs" ' [1-9][0-9]* replays' --outputs gpu --stages 2 --k 1
in_full gradients "a deep tree, gpipe" 'gpipe' --schedule gpipe --stages 2 --k 2
in_full gradients "a deep tree, a window" '' --window 11 --schedule paper
rings "a deep tree, a window, local replay" --stream 3000 --window 11 --replay local --stages 2 --k 1
in_full gradients "a deep tree, fp16, fused" 'check fp16' --type fp16 --stages 2
model="$tiny $small"
if ! full; then model="$tiny --synthetic 9,8,7 --with 0,0,1 --shared 0,6,7"; fi # blocks take as long, however short
gradients "trees, bf16, fused" 'check bf16' --type bf16
CUDA_EMU_ARCH=90 CUDA_EMU_WGMMA=1
export CUDA_EMU_ARCH CUDA_EMU_WGMMA
gradients "trees, bf16 with wgmma" 'check bf16' --type bf16 --attention wgmma
model="$tiny $star"
LIMIT=300 in_full rings "trees, bf16 with wgmma" --type bf16 --attention wgmma --stream 3000
unset CUDA_EMU_ARCH CUDA_EMU_WGMMA
model="$tiny --synthetic 56,5,16,3,1,0,33"

# ---- a device that runs its work in another order ----

# orders NAME OPTIONS...: the results are the same under every policy of the emulation with FULL=1, else under $some
some=random-1
orders() {
    what=$1
    shift
    for policy in immediate lazy newest-first "stream-late 1" "stream-late 3" "stream-late 6" "random 1" "random 2"; do
        [ "$(echo $policy | tr ' ' -)" = $some ] || full || continue
        CUDA_EMU_POLICY=${policy% *}
        CUDA_EMU_CHOICE=${policy#* }
        export CUDA_EMU_POLICY CUDA_EMU_CHOICE
        gradients "$what, $policy" '' "$@"
    done
    unset CUDA_EMU_POLICY CUDA_EMU_CHOICE
}
orders "2 devices" --layers 4 --stages 2 --devices 2 --k 2 --replay local --schedule interleaved
in_full orders "streamed" --layers 4 --stages 2 --devices 2 --k 1 --stream 3000 --replay local --schedule interleaved
model="$tiny $star"
in_full orders "trees" --stages 2 --devices 2 --k 1
some=stream-late-3
orders "streamed trees" --stages 2 --devices 2 --k 1 --stream 3000 --outputs gpu
model="$tiny --synthetic 56,5,16,3,1,0,33"
CUDA_EMU_BACKWARDS=1
export CUDA_EMU_BACKWARDS
gradients "blocks and warps in descending order" '' --stages 2 --k 2
unset CUDA_EMU_BACKWARDS

# ---- training and timelines ----

steps=4
if full; then steps=6; fi
learns "loss falls, 2 stages" --stages 2 --k 2 --steps $steps --lr 0.01
in_full learns "loss falls, fp16, one stage" --type fp16 --attention unfused --steps 6 --lr 0.01
model="$tiny"
learns "text, a batch of other chunks each time" --stages 2 --schedule zero-bubble --steps 4 --batch 1 --lr 0.01 \
    --max-length 60 examples/hello.c
model="$tiny --synthetic 56,5,16,3,1,0,33"
in_full timeline "paper, one stage" --k 2
timeline "1f1b on 2 devices" --stages 2 --devices 2 --schedule 1f1b --k 2
in_full timeline "zero-bubble, local replay" --stages 2 --schedule zero-bubble --replay local --k 2
in_full timeline "interleaved on 2 devices" --layers 4 --stages 2 --devices 2 --schedule interleaved --k 1

# ---- memory: activations follow K x chunk size, not the longest sequence; only its state grows ----

# mebibytes OPTIONS...: prints the MiB of activations and of state that one training step reports
mebibytes() {
    # shellcheck disable=SC2086
    run $tiny --chunk-size 32 --steps 1 "$@"
    sed -n 's/^stage 0 .*boundaries \([0-9.]*\) (.*state \([0-9.]*\), its.*/\1 \2/p' "$work/out"
}
longest=256
if full; then longest=512; fi
short=$(mebibytes --k 1 --synthetic 128)
long=$(mebibytes --k 1 --synthetic $longest)
kept=$(mebibytes --k 4 --synthetic $longest)
if echo "$short $long $kept" | awk -v longest=$longest '{ exit !(NF == 6 && $1 > 0 && $3 == $1 && $4 > 0.75 * longest / 128 * $2 && $5 > 3 * $1) }'; then
    ok "memory: 128 and $longest tokens with K 1, and K 4"
else
    fail "memory: 128 and $longest tokens with K 1, and K 4" "activations and state of each in MiB: $short, $long, $kept"
fi

# on_device OPTIONS...: prints each stage's MiB of everything except metadata, with streamed state
on_device() {
    # shellcheck disable=SC2086
    run $tiny --chunk-size 32 --steps 1 --stages 2 --replay local --k 1 --stream 24000 "$@"
    sed -n '/^stage/{s/.*boundaries/boundaries/;s/, metadata.*//;p;}' "$work/out"
}
short=$(on_device --synthetic 128)
long=$(on_device --synthetic $longest)
if [ -n "$short" ] && [ "$short" = "$long" ]; then ok "memory: 128 and $longest tokens with a state that streams"
else fail "memory: 128 and $longest tokens with a state that streams" "in MiB: $short, $long"; fi

# ---- one process a stage: sends that wait for their receivers, and sends that do not ----

for sends in rendezvous buffered; do
    CUDA_EMU_NCCL=$sends
    export CUDA_EMU_NCCL
    in_full gradients "2 ranks, $sends" '2 stages' --ranks 2 --devices 2 --k 2
    in_full gradients "3 ranks, split backwards, $sends" '3 stages' --layers 3 --ranks 3 --schedule zero-bubble
    if [ $sends = rendezvous ] && ! full; then continue; fi # the one that rings sends with
    gradients "2 ranks, 2 virtual stages each, $sends" '2 stages x 2' --layers 4 --ranks 2 --k 2 \
        --schedule interleaved --replay local
done
unset CUDA_EMU_NCCL
for policy in lazy newest-first "random 3"; do
    case $policy in lazy | newest-first) full || continue ;; esac
    CUDA_EMU_POLICY=${policy% *}
    CUDA_EMU_CHOICE=${policy#* }
    export CUDA_EMU_POLICY CUDA_EMU_CHOICE
    gradients "2 ranks, $policy" '2 stages' --ranks 2 --schedule 1f1b --k 2
done
unset CUDA_EMU_POLICY CUDA_EMU_CHOICE
in_full learns "loss falls, 2 ranks" --ranks 2 --k 2 --steps 6 --lr 0.01
timeline "2 ranks" --ranks 2 --k 2 --schedule 1f1b

# ---- failures ----

# fails NAME TEXT OPTIONS...: one call or one kernel fails; the program ends and reports it
fails() {
    name="fails: $1"
    said=$2
    shift 2
    # shellcheck disable=SC2086
    run $model --check --stages 2 --k 2 "$@"
    expect "$name" 1 "executor_cuda: .*$said"
}
for call in 1 4 40 210 400 700 1100; do # 200 is a cudaSetDevice before a look that works without it
    case $call in 4 | 40 | 400 | 700) full || continue ;; esac
    CUDA_EMU_FAIL_CALL=$call
    export CUDA_EMU_FAIL_CALL
    fails "call $call" '[cC][uU][dDbB][aAlL]'
done
unset CUDA_EMU_FAIL_CALL
for kernel in 1 50 700; do
    case $kernel in 1 | 700) full || continue ;; esac
    CUDA_EMU_FAIL_KERNEL=$kernel
    export CUDA_EMU_FAIL_KERNEL
    fails "kernel $kernel" 'of chunk [0-9]* on .*stage [01]' --blocking
done
CUDA_EMU_FAIL_KERNEL=300
fails "kernel 300 of both ranks" 'rank [01]: .*of chunk' --ranks 2
unset CUDA_EMU_FAIL_KERNEL

# ---- options ----

refuse 'unknown option' --nonsense
refuse '--schedule: wanted one of' --schedule worst
refuse '--devices 3: there are 2' --devices 3
refuse 'want as many layers' --stages 5
refuse '--reference is for --check' --reference
refuse '--reference knows no --window' --check --reference --window 9
refuse '--stream must be 0 or at least 768' --stream 767
refuse 'no target tokens' --synthetic 1,0,1
refuse 'give --synthetic or files' examples/hello.c
refuse 'want a number for each' --with 0,0 --shared 0,1
refuse 'document 1 has no 8 tokens in common' --synthetic 9,7 --with 0,0 --shared 0,8
refuse 'document 1 has no 2 tokens in common' --synthetic 9,7 --with 0,1 --shared 0,2
refuse 'head_size' --heads 8
refuse 'heads must divide hidden' --heads 5
refuse 'path' --attention mma
refuse '--ranks 2 wants as many stages' --ranks 2 --stages 3
run --help
expect "help" 0 '^usage: executor_cuda'
# shellcheck disable=SC2086
run $model --check --timeline "$work/none/file"
expect "a timeline that cannot be written" 1 'No such file'
# shellcheck disable=SC2086
full_output "output" "$program" $model --check
left_out "each schedule with both replays, bf16 and fp16 on one stage, more shapes, orders, ranks and failing calls"
finish
