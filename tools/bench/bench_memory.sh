#!/bin/sh
# bench_memory.sh - estimates beside memory of training that others have measured, and what today's models take.
#
#     tools/bench/bench_memory.sh
#
# CHUNKFLOW names the program (default build/chunkflow). Nothing is fitted; losses are as Megatron-LM has them,
# and as TRL has them in its rows of 1M tokens.
set -eu
CHUNKFLOW=${CHUNKFLOW:-build/chunkflow}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
. "${0%/*}/recipe.sh"

# peak OPTIONS...: prints GiB of the fullest stage; fails if the command does
peak() {
    "$CHUNKFLOW" memory --loss parallel --tsv "$@" >"$work/stages" || return 1
    awk -F '\t' '
        NR == 1 { for (i = 1; i <= NF; i++) if ($i == "total_bytes") column = i }
        NR > 1 && $column > most { most = $column }
        END { printf "%.1f", most / 1073741824 }' "$work/stages"
}

# row NAME PUBLISHED OPTIONS...
row() {
    name=$1 published=$2
    shift 2
    got=$(peak "$@")
    awk -v name="$name" -v published="$published" -v got="$got" \
        'BEGIN { printf "%-52s %9s %9s %+8.1f %%\n", name, published, got, 100 * (got / published - 1) }'
}

# alone NAME OPTIONS...: nobody has published a figure
alone() {
    name=$1
    shift
    got=$(peak "$@")
    printf '%-52s %9s %9s %10s\n' "$name" - "$got" "no figure"
}

# million NAME GIB OPTIONS...
million() {
    name=$1 published=$2
    shift 2
    recipe bytes "$@" | awk -v name="$name" -v published="$published" '{ got = $1 / 1073741824
        printf "%-52s %9s %9.1f %+8.1f %%\n", name, published, got, 100 * (got / published - 1) }'
}

cat >"$work/moonlight.json" <<'END'
{"model_type": "deepseek_v3", "num_hidden_layers": 27, "hidden_size": 2048, "num_attention_heads": 16, "vocab_size": 163840,
 "intermediate_size": 11264, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
 "n_routed_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "n_shared_experts": 2,
 "first_k_dense_replace": 1, "tie_word_embeddings": false}
END

printf '%-52s %9s %9s %10s\n' "GiB on the fullest GPU" published estimated residual
row "Qwen2.5-14B, TP 4, DP 2, selective, 8K [1]" 65 --model qwen2.5-14b --tp 4 --ranks 2 --recompute selective --chunk-size 8K
row "Qwen3-14B, TP 4, DP 2, selective, 8K [1]" 52 --model qwen3-14b --tp 4 --ranks 2 --recompute selective --chunk-size 8K
row "Qwen2.5-7B, TP 4, full, 32K [1, 3]" 50 --model qwen2.5-7b --tp 4 --recompute full --chunk-size 32K
row "Qwen2.5-VL-7B, TP 2, full, 2K [1, 2]" 72 --model qwen2.5-7b --tp 2 --recompute full --chunk-size 2K
row "Qwen2.5-Omni-7B, TP 2, full, 4K [1, 2]" 75 --model qwen2.5-7b --tp 2 --recompute full --chunk-size 4K
row "Qwen3-VL-8B, TP 2, full, 2K [1, 2]" 76 --model qwen3-8b --tp 2 --recompute full --chunk-size 2K
row "Qwen2.5-VL-7B, LoRA 8, DP 2, full, 2K [1, 2]" 23 --model qwen2.5-7b --ranks 2 --recompute full --chunk-size 2K --lora 8
row "Qwen3-VL-8B, LoRA 8, TP 2, full, 2K [1, 2]" 15 --model qwen3-8b --tp 2 --recompute full --chunk-size 2K --lora 8
row "Qwen3-30B-A3B, PP 2, EP 8, DP 8, full, 8K [1, 6]" 60 --model qwen3-30b-a3b --pp 2 --ranks 8 --ep 8 --recompute full \
    --chunk-size 8K
row "Qwen3-30B-A3B, EP 16, DP 16, 4K, allocated [7]" 62.2 --model qwen3-30b-a3b --ranks 16 --ep 16 --chunk-size 4K \
    --runtime 1 --fragmentation 0
row "Qwen3-30B-A3B, TP 4, PP 2, EP 4, full, 8K [1]" 76 --model qwen3-30b-a3b --tp 4 --pp 2 --ep 4 --recompute full \
    --chunk-size 8K
row "Moonlight-16B-A3B, PP 2, EP 4, DP 4, full, 8K [1]" 60 --config "$work/moonlight.json" --pp 2 --ranks 4 --ep 4 \
    --recompute full --chunk-size 8K
row "InternVL3.5-30B-A3B, LoRA 8, EP 2, full, 2K [1, 2]" 43 --model qwen3-30b-a3b --ranks 2 --ep 2 --recompute full \
    --chunk-size 2K --lora 8 --lora-experts
row "Qwen3-Omni-30B-A3B, LoRA 8, EP 2, full, 4K [1, 2]" 50 --model qwen3-30b-a3b --ranks 2 --ep 2 --recompute full \
    --chunk-size 4K --lora 8 --lora-experts
row "GLM-4.5-Air, LoRA 32, TP 4, EP 4, full, 8K [1]" 70 --model glm-4.5-air --tp 4 --ep 4 --recompute full --chunk-size 8K \
    --lora 32
row "the same with MTP [1, 4]" 70 --model glm-4.5-air --mtp 1 --tp 4 --ep 4 --recompute full --chunk-size 8K --lora 32
row "GLM-4.5V, LoRA 8, TP 4, EP 4, full, 2K [1, 2]" 66 --model glm-4.5-air --tp 4 --ep 4 --recompute full --chunk-size 2K \
    --lora 8
row "Qwen3-Next-80B-A3B, LoRA 8, EP 4, DP 8, full, 2K [5]" 60 --model qwen3-next-80b-a3b --ranks 8 --ep 4 --recompute full \
    --chunk-size 2K --lora 8 --lora-experts
row "Qwen3-Next-80B-A3B, LoRA 8, TP 2, EP 4, full, 4K [5]" 56 --model qwen3-next-80b-a3b --tp 2 --ranks 4 --ep 4 \
    --recompute full --chunk-size 4K --lora 8 --lora-experts
million "Qwen3-8B, 1M, FSDP, CP 8, full, checkpoints away [8]" 52.3 --model qwen3-8b
million "Qwen3-30B-A3B, the same, all but layers away [8]" 42.8 --model qwen3-30b-a3b --offload parameters
million "Qwen3-32B, the same, rows of the MLP in tiles [8]" 56.6 --model qwen3-32b --offload parameters --reserve 0
state="--chunk-size 8K --local-replay --gpu h200"
# shellcheck disable=SC2086
{
alone "Qwen3-30B-A3B, 8 H200, EP 8, full, 128K" --model qwen3-30b-a3b --ranks 8 --ep 8 --recompute full --context 128K $state
alone "Qwen3-30B-A3B, 64 H200, EP 8, act, 128K" --model qwen3-30b-a3b --ranks 64 --ep 8 --recompute act --context 128K $state
alone "Qwen3.5-35B-A3B, 8 H200, EP 8, full, 256K" --model qwen3.5-35b-a3b --ranks 8 --ep 8 --recompute full --context 256K $state
alone "gpt-oss-120b, 64 H200, EP 8, ZeRO 2, full, 128K" --model gpt-oss-120b --ranks 64 --ep 8 --zero 2 --recompute full --context 128K $state
alone "DeepSeek-V3, 2,048 GPUs, PP 16, EP 64, full, 4K" --model deepseek-v3 --pp 16 --ranks 128 --ep 64 --recompute full \
    --stage-layers 4,4,4,4,4,4,4,4,4,4,4,4,4,4,3,2 --chunk-size 4K
}
cat <<'END'

[1] ms-swift, examples/megatron at 3602360: what each script says of its GPUs, whole GiB. Megatron-LM with the distributed
    optimizer and packed rows, so that a micro-batch has as many tokens as is said here. Scripts that say 80 are left out: that
    is the card. One of them, Qwen2.5-7B with TP 4 and 8K (46.6 GiB here), stood at -42 %; [3] has that split, four times as
    many tokens, and 50. Imbalance of experts is not known and taken as none.
[2] Frozen encoders of images and sound are not counted here.
[3] examples/megatron/long_text.sh at 15898fe, "4 * 50GB" on A100, taken as GiB like the others: 46.6 GiB if it is not.
[4] The script with and the one without a prediction layer say the same, so one of them was not measured.
[5] examples/megatron/moe/qwen3_next.sh at df256f2 and examples/models/qwen3_next/mcore.sh at 1c125e3.
[6] It came in April 2025 with TP 2, EP 8, no stages (ad90779), and stands beside this command since: 55.5 GiB there where experts
    lie whole on 8 of the 16 GPUs, 45.4 where TP divides them.
[7] Megatron-Bridge, pull request 5123: what PyTorch had allocated at most, 16 H100. Gradients are bf16 there, 6.2 GiB less than
    here, and two micro-batches are under way at once.
[8] TRL, pull requests 6845 and 6846, 8 H100: 56.2, 46.0 and 60.8 GB, taken as 10^9 bytes. One sequence of 1,048,576 tokens; in the
    last two parameters and optimizer states are in host memory. The estimate is the row FSDP recipe of `tune`. It has no tiles
    of the MLP's rows, which 32B was trained with.

Where LoRA goes to all linear layers it also goes to routed experts (--lora-experts): 3.5 GiB of Qwen3-30B-A3B with EP 2. GLM's
adapters lie in attention alone; what those rows miss is not known.
END
