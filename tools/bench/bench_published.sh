#!/bin/sh
# bench_published.sh - estimates beside published throughput of training, in bf16, tokens a second of each GPU.
#
#     tools/bench/bench_published.sh
#
# CHUNKFLOW names the program (default build/chunkflow). Every row is one setting of `chunkflow tune`: sequences of one length,
# one chunk a micro-batch, so nothing is split. Nothing is fitted: GPUs are those of the table, and launches cost 5
# microseconds, or 20 where the source runs PyTorch without torch.compile.
set -eu
CHUNKFLOW=${CHUNKFLOW:-build/chunkflow}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# row NAME PUBLISHED LENGTH BATCH OPTIONS...
row() {
    name=$1 published=$2 length=$3 batch=$4
    shift 4
    echo "$length $batch" >"$work/list"
    "$CHUNKFLOW" tune "$work/list" --batch "$batch" --batches 1 --ks 1 --replay local --no-stream --no-cp --limit-bytes 4000G \
        --tsv "$@" 2>/dev/null | awk -F '\t' -v name="$name" -v published="$published" -v tokens=$((length * batch)) '
        NR == 1 { for (i = 1; i <= NF; i++) column[$i] = i }
        NR == 2 { gpus = $column["tensor_parallel"] * $column["pipeline_parallel"] * $column["data_parallel"]
                  got = tokens / $column["mean_s"] / gpus
                  printf "%-62s %9.0f %9.0f %+8.1f %%\n", name, published, got, 100 * (got / published - 1) }'
}

printf '%-62s %9s %9s %10s\n' "setting" published estimated residual
echo '{"like": "a100-80g", "nvlink": 200e9}' >"$work/a800.json"
echo '{"like": "h100-80g", "nvlink": 200e9}' >"$work/h800.json"
echo '{"like": "h100-80g", "nvlink": 200e9, "network": 1e15}' >"$work/free.json"
half="--recompute full --recompute-layers"
# shellcheck disable=SC2086
{
row "Llama 2 13B, 64 A100, FSDP, no recomputation [1]" 2162 4096 128 --layers 40 --hidden 5120 --heads 40 --ffn 13824 \
    --vocab 32000 --gpu a100-80g --dp 64 --zero 3 --chunk-sizes 8K --schedules 1f1b --recompute none --launch 0.00002
row "Llama 2 13B, 64 A100, FSDP, every second layer again [1]" 1914 4096 128 --layers 40 --hidden 5120 --heads 40 --ffn 13824 \
    --vocab 32000 --gpu a100-80g --dp 64 --zero 3 --chunk-sizes 8K --schedules 1f1b $half 20 --launch 0.00002
row "Llama 2 70B, 64 A100, FSDP, all layers again [1]" 353 4096 128 --model llama-3-70b --vocab 32000 --gpu a100-80g --dp 64 \
    --zero 3 --chunk-sizes 8K --schedules 1f1b --recompute full --launch 0.00002
row "Llama 3 8B, 64 A100, FSDP, every second layer again [1]" 2904 8192 64 --model llama-3-8b --gpu a100-80g --dp 64 --zero 3 \
    --chunk-sizes 8K --schedules 1f1b $half 16 --launch 0.00002
row "Llama 3 70B, 64 A100, FSDP, all layers again [1]" 331 8192 64 --model llama-3-70b --gpu a100-80g --dp 64 --zero 3 \
    --chunk-sizes 8K --schedules 1f1b --recompute full --launch 0.00002
row "Llama 3.1 8B, 8 H100, FSDP, half of the products again [2]" 5762 8192 16 --model llama-3-8b --gpu h100-80g --dp 8 --zero 3 \
    --chunk-sizes 16K --schedules 1f1b $half 16 --launch 0.00002
row "the same with torch.compile [2]" 6667 8192 16 --model llama-3-8b --gpu h100-80g --dp 8 --zero 3 --chunk-sizes 16K \
    --schedules 1f1b $half 16
row "Llama 3.1 405B, 8,192 H100, TP 8, PP 16, 430 TFLOP/s [3]" 169.5 8192 2048 --model llama-3.1-405b --gpu h100-80g --tp 8 \
    --pp 16 --dp 64 --zero 1 --chunk-sizes 8K --schedules interleaved --virtual 7 --recompute none
row "Llama 3.1 405B, 16,384 H100, TP 8, PP 16, 400 TFLOP/s [3]" 157.7 8192 2048 --model llama-3.1-405b --gpu h100-80g --tp 8 \
    --pp 16 --dp 128 --zero 1 --chunk-sizes 8K --schedules interleaved --virtual 7 --recompute none
row "Qwen2.5-14B, 8 A800, TP 4, selective [5]" 1812 8192 16 --model qwen2.5-14b --gpu "$work/a800.json" --tp 4 --dp 2 --zero 1 \
    --chunk-sizes 8K --schedules 1f1b --recompute selective
row "Qwen3-30B-A3B, 16 A100, PP 2, EP 8, full [5]" 853 8192 16 --model qwen3-30b-a3b --gpu a100-80g --pp 2 --dp 8 --ep 8 --zero 1 \
    --chunk-sizes 8K --schedules 1f1b --recompute full
row "DeepSeek-V3, 2,048 H800, PP 16, EP 64 [4]" 1475 4096 15360 --model deepseek-v3 --gpu "$work/h800.json" --tp 1 --pp 16 \
    --dp 128 --ep 64 --zero 1 --chunk-sizes 4K --schedules zero-bubble --recompute none \
    --stage-layers 4,4,4,4,4,4,4,4,4,4,4,4,4,4,3,2
row "the same, were traffic between nodes free [4]" 1475 4096 15360 --model deepseek-v3 --gpu "$work/free.json" --tp 1 --pp 16 \
    --dp 128 --ep 64 --zero 1 --chunk-sizes 4K --schedules zero-bubble --recompute none \
    --stage-layers 4,4,4,4,4,4,4,4,4,4,4,4,4,4,3,2
}
cat <<'END'

[1] torchtitan, docs/performance.md at 0413364: 64 A100 of 80 GB, FSDP2; whether torch.compile was on is not said there.
[2] torchtitan, docs/performance.md, Table 1: H100 of 96 GB HBM2e (2.4 TB/s) with a power limit of 500 W. The table's h100-80g
    has 3.35 TB/s and 700 W, so its estimates are of a faster GPU.
[3] The Llama 3 Herd of Models, 2024, Table 4: model FLOP/s, here over 6 x parameters + 6 x layers x hidden x 8192 FLOPs a
    token. Virtual stages are not given there: 7 of each stage, one or two layers each.
[4] DeepSeek-V3's model card: 14.8 T tokens in 2.788 M GPU hours, all stages of training. They train in FP8, hide all of the
    experts' traffic behind compute (DualPipe) and send a token to four nodes at most; here it is bf16, nothing of that
    traffic is hidden, and a token's eight copies go where its experts are. How layers are split there is not known here.
[5] ms-swift, Megatron-SWIFT's documentation and examples/megatron at 3602360: 9.04 and 9.6 s for 16 rows of 8,192 tokens.
END
