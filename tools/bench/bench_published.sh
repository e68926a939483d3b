#!/bin/sh
# bench_published.sh - estimates beside published throughput of training, in bf16, tokens a second of each GPU.
#
#     tools/bench/bench_published.sh
#
# CHUNKFLOW names the program (default build/chunkflow). Every row is one setting of `chunkflow tune`: sequences of one length,
# one chunk a micro-batch, so nothing is split. Nothing is fitted: GPUs are those of the table, and launches cost 20
# microseconds where PyTorch makes them one by one, 55 where a Grace does that, and 5 where torch.compile or a graph of the
# whole iteration does.
set -eu
CHUNKFLOW=${CHUNKFLOW:-build/chunkflow}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
. "${0%/*}/recipe.sh"

# row NAME PUBLISHED LENGTH BATCH OPTIONS... passes=BYTES before it gives the bytes per token that a trainer reads and
# writes in H100's memory in passes that the estimate does not have.
row() {
    name=$1 published=$2 length=$3 batch=$4 more=${passes:-0}
    passes=0 # some shells keep it
    shift 4
    echo "$length $batch" >"$work/list"
    "$CHUNKFLOW" tune "$work/list" --batch "$batch" --batches 1 --ks 1 --replay local --no-stream --no-cp --limit-bytes 4000G \
        --tsv "$@" 2>/dev/null | awk -F '\t' -v name="$name" -v published="$published" -v tokens=$((length * batch)) \
        -v passes="$more" '
        NR == 1 { for (i = 1; i <= NF; i++) column[$i] = i }
        NR == 2 { gpus = $column["tensor_parallel"] * $column["pipeline_parallel"] * $column["data_parallel"]
                  got = 1 / ($column["mean_s"] * gpus / tokens + passes / 3.35e12)
                  printf "%-62s %9.0f %9.0f %+8.1f %%\n", name, published, got, 100 * (got / published - 1) }'
}

# million NAME SECONDS OPTIONS...
million() {
    name=$1 published=$2
    shift 2
    recipe seconds "$@" | awk -v name="$name" -v published="$published" '{
        printf "%-62s %9.0f %9.0f %+8.1f %%\n", name, 131072 / published, 131072 / $1, 100 * (published / $1 - 1) }'
}

printf '%-62s %9s %9s %10s\n' "setting" published estimated residual
# machine NAME NUMBERS: defines a GPU by its differences from one in the table. If a trainer does something in another
# way than the estimate, the rate is chosen to give the trainer's time. Examples are "traffic of its gate", and NCCL's
# all-to-all: it sends a copy to each expert, while the estimate has one copy for each node, or GPU.
machine() { echo "{\"like\": $2}" >"$work/$1.json"; }
machine a800 '"a100-80g", "nvlink": 200e9'
machine h800 '"h100-80g", "nvlink": 200e9'
machine hbm2e '"h100-80g", "bandwidth": 2.4e12, "flops": 835e12'
machine fp8 '"h100-80g", "flops": 1679e12, "gemm": 0.6, "attention_forward": 0.3, "attention_backward": 0.25,
    "nvlink": 1e15, "network": 1e15'
machine eight '"h100-80g", "network": 180e9'
machine flex '"h100-80g", "attention_forward": 0.51, "attention_backward": 0.38'
machine four '"h100-80g", "network": 166e9, "attention_forward": 0.51, "attention_backward": 0.38'
machine k2 '"h100-80g", "network": 180e9'
machine nccl8 '"h100-80g", "nvlink": 373e9'
machine nccl16 '"h100-80g", "network": 12.45e9'
machine nccl8h '"h100-80g", "nvlink": 131e9'
machine nccl8b '"b200", "nvlink": 745e9'
machine nccl64b '"b200", "network": 41.4e9'
machine rack '"gb200", "network": 900e9'
machine mxfp8 '"gb200", "network": 900e9, "flops": 5000e12, "attention_forward": 0.3, "attention_backward": 0.25'
half="--recompute full --recompute-layers"
eager="--launch 0.00002"
grace="--launch 0.000055"
# shellcheck disable=SC2086
{
row "Llama 2 13B, 64 A100, FSDP, no recomputation [1]" 2162 4096 128 --layers 40 --hidden 5120 --heads 40 --ffn 13824 \
    --vocab 32000 --gpu a100-80g --dp 64 --zero 3 --chunk-sizes 8K --schedules 1f1b --recompute none $eager
row "Llama 2 13B, 64 A100, FSDP, every second layer again [1]" 1914 4096 128 --layers 40 --hidden 5120 --heads 40 --ffn 13824 \
    --vocab 32000 --gpu a100-80g --dp 64 --zero 3 --chunk-sizes 8K --schedules 1f1b $half 20 $eager
row "Llama 2 70B, 64 A100, FSDP, all layers again [1]" 353 4096 128 --model llama-3-70b --vocab 32000 --gpu a100-80g --dp 64 \
    --zero 3 --chunk-sizes 8K --schedules 1f1b --recompute full $eager
row "Llama 3 8B, 64 A100, FSDP, every second layer again [1]" 2904 8192 64 --model llama-3-8b --gpu a100-80g --dp 64 --zero 3 \
    --chunk-sizes 8K --schedules 1f1b $half 16 $eager
row "Llama 3 70B, 64 A100, FSDP, all layers again [1]" 331 8192 64 --model llama-3-70b --gpu a100-80g --dp 64 --zero 3 \
    --chunk-sizes 8K --schedules 1f1b --recompute full $eager
row "Llama 3.1 8B, 8 H100, FSDP, half of the products again [2]" 5762 8192 16 --model llama-3-8b --gpu "$work/hbm2e.json" \
    --dp 8 --zero 3 --chunk-sizes 16K --schedules 1f1b $half 16 $eager --unfused
row "the same with torch.compile [2]" 6667 8192 16 --model llama-3-8b --gpu "$work/hbm2e.json" --dp 8 --zero 3 \
    --chunk-sizes 16K --schedules 1f1b $half 16
row "Llama 3.1 405B, 8,192 H100, TP 8, PP 16, 430 TFLOP/s [3]" 169.5 8192 2048 --model llama-3.1-405b --gpu h100-80g --tp 8 \
    --pp 16 --dp 64 --zero 1 --chunk-sizes 8K --schedules interleaved --virtual 7 --recompute none $eager
row "Llama 3.1 405B, 16,384 H100, TP 8, PP 16, 400 TFLOP/s [3]" 157.7 8192 2048 --model llama-3.1-405b --gpu h100-80g --tp 8 \
    --pp 16 --dp 128 --zero 1 --chunk-sizes 8K --schedules interleaved --virtual 7 --recompute none $eager
row "Qwen2.5-14B, 8 A800, TP 4, selective [5]" 1812 8192 16 --model qwen2.5-14b --gpu "$work/a800.json" --tp 4 --dp 2 --zero 1 \
    --chunk-sizes 8K --schedules 1f1b --recompute selective $eager
row "Qwen3-30B-A3B, 16 H800, PP 2, EP 8 [9]" 6325 8192 128 --model qwen3-30b-a3b --gpu "$work/nccl8h.json" --pp 2 --dp 8 --ep 8 \
    --zero 1 --chunk-sizes 8K --schedules 1f1b --recompute none $eager
sixteen="--model qwen3-30b-a3b --dp 16 --ep 16 --zero 1 --chunk-sizes 4K --schedules 1f1b --recompute none"
row "Qwen3-30B-A3B, 16 H100, EP 16, all-to-all [10]" 6355 4096 1024 $sixteen --gpu "$work/nccl16.json" $eager
row "the same with HybridEP [10]" 10607 4096 1024 $sixteen --gpu h100-80g $eager
row "the same with HybridEP beside compute [10]" 13011 4096 1024 $sixteen --gpu h100-80g $eager
fsdp="$eager --schedules 1f1b --zero 3"
away="--offload parameters"
million "Qwen3-0.6B, 1M, 8 H100, FSDP, CP 8, full, checkpoints away [14]" 137 --model qwen3-0.6b
million "Qwen3-8B, the same [14]" 380 --model qwen3-8b
million "Qwen3-30B-A3B, the same, parameters and optimizer away [14]" 483 --model qwen3-30b-a3b $away
million "Qwen3-32B, the same, rows of the MLP in tiles [14]" 1295 --model qwen3-32b $away --reserve 0
row "Qwen3-30B-A3B, 8 H100, EP 8, full [6]" 12040 4096 512 --model qwen3-30b-a3b --gpu h100-80g --dp 8 --ep 8 --chunk-sizes 16K \
    --recompute full $fsdp
row "Nemotron-3-Nano-30B-A3B, 8 H100, EP 8, full [6]" 16789 4096 512 --model nemotron-3-nano-30b-a3b --gpu h100-80g --dp 8 \
    --ep 8 --chunk-sizes 16K --recompute full $fsdp
passes=8.28e6 row "gpt-oss-20b, 8 H100, EP 8 [6, 7]" 13058 4096 256 --model gpt-oss-20b --gpu "$work/flex.json" --dp 8 --ep 8 --chunk-sizes 8K \
    --recompute none $fsdp
passes=12.42e6 row "gpt-oss-120b, 64 H100, EP 64 [6, 7]" 7626 4096 512 --model gpt-oss-120b --gpu "$work/flex.json" --dp 64 --ep 64 \
    --chunk-sizes 8K --recompute none $fsdp
passes=12.42e6 row "the same, with the traffic of its gate [6, 7]" 7626 4096 512 --model gpt-oss-120b --gpu "$work/four.json" --dp 64 --ep 64 \
    --chunk-sizes 8K --recompute none $fsdp
threes=3,3,3,3,3,2,2,2,2,2,2,2,2,2,2,2,2,2,2,2,2,2,2,2,2,2,2,2 fours=4,4,4,4,4,4,4,4,4,4,4,4,4,3,3,3
layers="--model deepseek-v3 --pp 4 --ep 64 --zero 2 --chunk-sizes 4K --schedules interleaved --recompute full $eager"
for gpu in h100-80g "$work/eight.json"; do
    name="DeepSeek-V3, 256 H100, PP 4, EP 64, full [6]" also="DeepSeek-V3, 1,024 H100, PP 4, EP 64, full [6]"
    [ "$gpu" = h100-80g ] || name="256, with the traffic of its gate [6]" also="1,024, with the traffic of its gate [6]"
    row "$name" 1002 4096 512 --gpu "$gpu" --dp 64 --virtual 7 --stage-layers $threes $layers
    row "$also" 865 4096 2048 --gpu "$gpu" --dp 256 --virtual 4 --stage-layers $fours $layers
done
k2=3,3,3,3,3,3,3,3,3,3,3,3,3,2,2,2,2,2,2,2,2,2,2,2
row "Kimi K2, 256 H100, PP 8, EP 32, full [6]" 924 4096 256 --model kimi-k2 --gpu h100-80g --pp 8 --dp 32 --ep 32 --zero 2 \
    --chunk-sizes 4K --schedules interleaved --virtual 3 --stage-layers $k2 --recompute full $eager
row "the same, with the traffic of its gate [6]" 924 4096 256 --model kimi-k2 --gpu "$work/k2.json" --pp 8 --dp 32 --ep 32 \
    --zero 2 --chunk-sizes 4K --schedules interleaved --virtual 3 --stage-layers $k2 --recompute full $eager
row "DeepSeek-V3 and MTP, 1,024 H100, TP 2, PP 8, EP 64 [12]" 1061 4096 16384 --model deepseek-v3 --mtp 1 --gpu h100-80g --tp 2 \
    --pp 8 --dp 64 --ep 64 --zero 1 --chunk-sizes 4K --schedules interleaved --virtual 4 --recompute none $eager
row "Qwen3.6-35B-A3B, 16 H100, PP 2, EP 8, act, pictures [13]" 5885 4096 512 --model qwen3.5-35b-a3b --gpu h100-80g --pp 2 --dp 8 \
    --ep 8 --zero 1 --chunk-sizes 4K --schedules 1f1b --stage-layers 16,24 --recompute act $eager
row "the same, routes balanced [13]" 8035 4096 512 --model qwen3.5-35b-a3b --gpu h100-80g --pp 2 --dp 8 --ep 8 --zero 1 \
    --chunk-sizes 4K --schedules 1f1b --stage-layers 16,24 --recompute act $eager
rack="--gpus-per-node 64 --zero 1"
v3="--model deepseek-v3 --pp 4 --dp 64 --ep 64 --chunk-sizes 4K --schedules interleaved --virtual 4 --recompute none $rack
    --stage-layers $fours"
qwen235="--model qwen3-235b-a22b --pp 8 --dp 32 --ep 32 --chunk-sizes 4K --schedules interleaved --virtual 3 --recompute none $rack"
oss="--model gpt-oss-120b --schedules 1f1b"
row "DeepSeek-V3, 256 GB200, PP 4, EP 64 [8]" 3139 4096 4096 $v3 --gpu "$work/rack.json" $grace
row "Qwen3-235B-A22B, 256 GB200, PP 8, EP 32 [8]" 4916 4096 8192 $qwen235 --gpu "$work/rack.json" $grace
row "gpt-oss-120b, 64 GB200, EP 64, act [7, 8]" 15876 8192 1280 $oss --gpu "$work/rack.json" --dp 64 --ep 64 --chunk-sizes 8K \
    --recompute act $rack $grace
row "the same, four rows of 4,096, 26.04 [7, 8]" 16640 4096 1280 $oss --gpu "$work/rack.json" --dp 64 --ep 64 --chunk-sizes 16K \
    --recompute act $rack $grace
row "gpt-oss-120b, 64 H100, PP 4, EP 8, act, 26.04.01 [7, 8]" 5824 4096 1280 $oss --gpu "$work/nccl8.json" --pp 4 --dp 16 --ep 8 --zero 1 \
    --chunk-sizes 4K --recompute act $eager
row "gpt-oss-120b, 64 B200, EP 64, act [7, 8]" 8213 4096 512 $oss --gpu "$work/nccl64b.json" --dp 64 --ep 64 --zero 1 \
    --chunk-sizes 16K --recompute act $eager
row "gpt-oss-120b, 64 B200, EP 8, act, 26.02.01 [7, 8]" 13722 4096 1280 $oss --gpu "$work/nccl8b.json" --dp 64 --ep 8 --zero 1 \
    --chunk-sizes 16K --recompute act $eager
row "DeepSeek-V3 and MTP, 256 GB200, MXFP8, 26.06 [8, 11]" 4969 4096 4096 $v3 --mtp 1 --gpu "$work/mxfp8.json"
row "Qwen3-235B-A22B, 256 GB200, MXFP8, 26.06 [8, 11]" 7376 4096 8192 $qwen235 --gpu "$work/mxfp8.json"
row "Qwen3-30B-A3B, 8 GB200, EP 8, MXFP8, 26.06 [8, 11]" 40706 4096 512 --model qwen3-30b-a3b --gpu "$work/mxfp8.json" --dp 8 \
    --ep 8 --chunk-sizes 16K --schedules 1f1b --recompute none $rack
row "gpt-oss-120b, 64 GB200, EP 64, MXFP8, 26.06 [7, 8, 11]" 28947 4096 1280 $oss --gpu "$work/mxfp8.json" --dp 64 --ep 64 \
    --chunk-sizes 16K --recompute none $rack
row "the same, its buffers full [11]" 28947 4096 1280 $oss --gpu "$work/mxfp8.json" --dp 64 --ep 64 \
    --chunk-sizes 16K --recompute none $rack --imbalance 50
v3="--model deepseek-v3 --mtp 1 --tp 1 --pp 16 --dp 128 --ep 64 --zero 1 --chunk-sizes 4K --schedules zero-bubble
    --recompute layernorm --stage-layers 4,4,4,4,4,4,4,4,4,4,4,4,4,4,3,2"
row "DeepSeek-V3, 2,048 H800, FP8, PP 16, EP 64, traffic hidden [4]" 1543 4096 15360 $v3 --gpu "$work/fp8.json"
row "the same in bf16, and nothing hidden: as tune has it [4]" 1543 4096 15360 $v3 --gpu "$work/h800.json"
}

# Runs six commands on typical fine-tuning data, and prints the seconds of each here. Ends if one fails.
"$CHUNKFLOW" gen lmsys --n 256 --seed 3 >"$work/chat"
for longest in 131072 262144; do { cat "$work/chat"; echo $longest; } >"$work/$longest"; done
echo "4096 1920" >"$work/4096"

# timed COMMAND...: one more column
timed() {
    began=$(date +%s%N)
    "$CHUNKFLOW" "$@" >"$work/out" 2>&1 || { printf ' %s failed\n' "$1"; cat "$work/out"; exit 1; }
    printf ' %7.2f' "$(awk -v ns=$(($(date +%s%N) - began)) 'BEGIN { print ns / 1e9 }')"
}

# six NAME LONGEST "TUNE..." OPTIONS...
six() {
    name=$1 list=$2 tune=$3
    shift 3
    printf '%-48s' "$name"
    timed memory --context "$list" --local-replay "$@"
    timed time "$@"
    timed plan "$work/$list" "$@"
    timed compare "$work/$list" "$@"
    timed report "$work/$list" "$@" -o "$work/report.html"
    # shellcheck disable=SC2086
    timed tune "$work/$list" --batches 2 $tune
    echo
}
printf '\n%-48s %7s %7s %7s %7s %7s %7s\n' "seconds of" memory time plan compare report tune
six "Qwen3-30B-A3B, 8 H200, 128K" 131072 "--batch 256 --model qwen3-30b-a3b --gpu h200 --gpus 8" --model qwen3-30b-a3b \
    --gpu h200 --ranks 8 --ep 8 --recompute full --chunk-size 8K
six "Qwen3-30B-A3B, 64 H200, 128K" 131072 "--batch 256 --model qwen3-30b-a3b --gpu h200 --gpus 64" --model qwen3-30b-a3b \
    --gpu h200 --ranks 64 --ep 8 --recompute act --chunk-size 8K
six "Qwen3.5-35B-A3B, 8 H200, 256K" 262144 "--batch 256 --model qwen3.5-35b-a3b --gpu h200 --gpus 8" --model qwen3.5-35b-a3b \
    --gpu h200 --ranks 8 --ep 8 --recompute full --chunk-size 8K
six "gpt-oss-120b, 64 H200, 128K" 131072 "--batch 256 --model gpt-oss-120b --gpu h200 --gpus 64" --model gpt-oss-120b \
    --gpu h200 --ranks 64 --ep 8 --zero 2 --recompute full --chunk-size 8K
v3="--model deepseek-v3 --gpu $work/h800.json --pp 16 --ranks 128 --ep 64 --recompute full"
v3="$v3 --stage-layers 4,4,4,4,4,4,4,4,4,4,4,4,4,4,3,2"
# shellcheck disable=SC2086
six "DeepSeek-V3, 2,048 H800, tune: every split, 4K" 4096 "--batch 15360 --model deepseek-v3 --gpu $work/h800.json --gpus 2048" \
    $v3 --chunk-size 4K
cat <<'END'

[1] torchtitan, docs/performance.md at 0413364: 64 A100 of 80 GB, FSDP2; whether torch.compile was on is not said there.
[2] torchtitan, docs/performance.md, Table 1: H100 of 96 GB HBM2e (2.4 TB/s) with a power limit of 500 W, whose peak it says
    lies between that of SXM and of NVL; here it is NVL's, 835 TFLOP/s. With SXM's the two are 35 and 41 % too fast. Without
    torch.compile norms, rotation and SwiGLU are separate operations (--unfused): +39 % without that.
[3] The Llama 3 Herd of Models, 2024, Table 4: model FLOP/s, here over 6 x parameters + 6 x layers x hidden x 8192 FLOPs a
    token. Virtual stages are not given there: 7 of each stage, one or two layers each.
[4] DeepSeek-V3's report, 2024: 180 thousand GPU hours a trillion tokens of 4K before training; batches of 15,360; FP8; norms and
    MLA's up-projections made again (the second is not counted); a prediction layer; all-to-all hidden behind compute by
    DualPipe, for which 20 of 132 processors send: so 112/132 of the peak, and no traffic. Products: 0.6 of FP8's peak, as
    DeepGEMM's first README has for this model's shapes (1,093 to 1,297 of 1,979 TFLOP/s grouped, 590 to 1,358 else);
    attention in bf16. Zero-bubble stands for DualPipe; no pass that quantizes is counted. How layers are split is not
    known here.
[5] ms-swift, Megatron-SWIFT's documentation at 3602360: 9.04 s for 16 rows of 8,192 tokens, on A800.
[6] NeMo AutoModel, docs/performance-summary.md at 01926a5 and examples/benchmark/configs: H100, bf16, PyTorch, FSDP2, DeepEP.
    Its gate for benchmarks gives a row's k copies to k experts in a row, so that one node or two GPUs get them all;
    "traffic of its gate" has that many copies between nodes in place of those of free choices. Virtual stages are those that
    its layers_per_stage makes (7, 4 and 3), not those of its table. 1,024 GPUs run four pipelines of eight micro-batches one
    after the other, of which one is estimated, with a step each; they lose 14 % to 256 by congestion, or whatever it is:
    no number here knows how large a network is.
[7] gpt-oss in these trainers is limited by software. Its biases and its clamp are passes of their own, in float, and experts have
    kernels of their own: estimates count that. AutoModel's rotation, four copies that transpose, and what scales by the sink
    are also such passes (gpt_oss/layers.py and flex_attention.py at 2c236e0): 345 KB a token and layer beyond the estimate's,
    counted in its rows. Its FlexAttention reaches 0.85 of FlashAttention-3 forward and 0.76 backward on H100 (its authors,
    GTC 2025).
[8] Megatron-Bridge, docs/performance-summary-archive.md at 067f987 and its recipes: random balanced routes; 25.11 and bf16 where
    nothing else is said. Of what the recipes make again mla_up_proj (DeepSeek-V3) is not counted, about 3 % of the time. The
    recipe of B200 in 25.11 has EP 64 where its table has 8; 26.02, which says 64 in both, has 8,047. GB200: 64 GPUs of a
    rack have NVLink, and a Grace launches them: PyTorch takes 37.1 microseconds for a linear layer there and 13.5 on a Xeon
    (TransformerEngine, issue 2053), so 55 here for 20. Graphs hold attention and router of Qwen3-235B, so 55 is too many for
    it: with 20 it is +5 %, and the three others +22, +39 and +54.
[9] Pai-Megatron-Patch, issue 643: 10.36 s for 128 rows of 8,192 tokens, copies beyond an expert's share dropped; all-to-all
    (run_mcore_qwen3.sh), as in [5].
[10] Megatron-Bridge, skills/nemo-mbridge-perf-expert-parallel-overlap and -moe-dispatcher-selection at 067f987: 41.25, 24.71 and
    20.15 s for 1,024 rows of 4,096 tokens, bf16, balanced. The estimate hides no traffic and fuses what HybridEP fuses.
[11] MXFP8: twice the peak of bf16 in products, and attention in bf16; no pass that quantizes is counted. 26.06 has graphs of
    the whole iteration and hides traffic of experts beside compute; the estimate hides none. For these graphs buffers of
    experts have 1.5 times the rows that come (moe_expert_rank_capacity_factor of all four recipes). Kernels that go through
    all of them do half as much again: gpt-oss +1 %, DeepSeek-V3 -10, Qwen3-235B -5, Qwen3-30B -4. 26.06.01 has 18,304 for
    gpt-oss: there the backward of its fused experts is ten times slower (cudnn-frontend issue 256), which bf16 does not use.
[12] Megatron-Bridge, examples/model_verification_cards/deepseek-v3 at 067f987, steps 41 to 50 of 61.756 s, forced balance.
[13] The same, qwen3.6-35b-a3b, whose text model is Qwen3.5's: 22.271 s for 512 rows of 4,096 tokens, real text with pictures,
    whose encoder is not estimated, and routes that nobody balances. The second has 185.15 TFLOP/s where this has 135.61.
[14] TRL, pull requests 6845, 6846 and 7003: one sequence of 1,048,576 tokens, SFT with context parallelism of 8 in a ring, chunked
    loss, full recomputation with checkpoints in host memory; 8B took 364 s in another run. The estimate is the row FSDP recipe
    of `tune`. Tiles of the MLP's rows are not modelled.

Nothing is fitted. Of a trainer like Megatron-LM dense models are within 8 %; PyTorch on A100 is 15 to 24 % slower than its
estimate. With experts and the traffic that they had 21 settings of eight models are within 25 %, DeepSeek-V3 in FP8 on 2,048
H800 (+13 %) among them. Outside are
    +30  DeepSeek-V3 on 1,024 H100 in AutoModel: its 256 are at +13, and Megatron-LM's 1,024, with as large a network and another
         split, at -11. Its table says 8 virtual stages where the configuration that came with it makes 4
    +26  Qwen3.6-35B-A3B with pictures: [13]
    +32, +34  gpt-oss-120b in bf16, four rows of 4,096, on GB200 (26.04) and B200. Not explained. On the same GB200 MXFP8
         without graphs had 438.5 TFLOP/s for 423.6 in bf16 (Megatron-Bridge, pull request 3561): twice the rate of products
         gains 3.5 %, so products are not what takes the time there. Megatron-LM's dispatch sorts rows twice more in each
         direction, worth 2 %
    +26  the same in MXFP8, between +26 and +1: [11]
No figure, for the setting is not known: Qwen3-30B-A3B on 16 A800 in ms-swift, 9.6 s for 16 rows of 8,192 tokens. It came in April
2025 with a command of TP 2, EP 8 and no stages (ad90779), and stands unchanged beside one of PP 2 since; how the two nodes are
connected, which TP 2 and EP 8 send all rows of experts across, is not said. Estimates: 3.6 s (PP 2), 2.7 (TP 2, EP 16). And
Qwen3-30B-A3B on 32 H200 in NeMo-RL (issue 966), 13 s for 512 rows of up to 4K and 35 s for 512 packed to 32K: how many tokens
these have is not said. No figure was found for Qwen3-30B-A3B on H200 otherwise, nor for Qwen3.5-35B-A3B in 256K; in 128K 32 H100
have 77 to 173 TFLOP/s by split (verl_megatron_practice, qwen3_5_megatron.csv), by a count of FLOPs that is not given.
`chunkflow reproduce speedup` has the ChunkFlow paper's ratios beside ours, and `reproduce peaks` its memory.
END
