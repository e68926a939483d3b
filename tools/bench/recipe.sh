# recipe.sh - sourced by bench_memory.sh and bench_published.sh, which set CHUNKFLOW and work - MIT or public domain

# recipe MEMBER OPTIONS...: prints a member of the FSDP recipe's row for one sequence of 1,048,576 tokens on 8 H100
recipe() {
    member=$1
    shift
    echo 1048576 >"$work/one"
    "$CHUNKFLOW" tune "$work/one" --gpu h100-80g --gpus 8 --batch 1 --batches 1 --chunk-sizes 64K --ks 1 \
        --schedules paper --json "$work/one.json" "$@" >/dev/null 2>&1 || [ -s "$work/one.json" ]
    sed -n '/"fsdp_recipe"/,/}/s/.*"'"$member"'": \([0-9.]*\).*/\1/p' "$work/one.json"
}
