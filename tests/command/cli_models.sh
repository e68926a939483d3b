#!/bin/sh
# cli_models.sh - tests of `chunkflow memory` and `chunkflow time`.
#
#     tests/command/cli_models.sh [FILTER]
#
# CHUNKFLOW names the program (default build/chunkflow). Prints "ok NAME" or "FAIL NAME: why" for each test and at the
# end how many. What the command says is worked out again with awk, or in Python where there is one. CHUNKFLOW_PLAIN
# names one without sanitizers, for a long simulation and a long list; FULL=1: with.
set -u
CONFIGS=$(cd "$(dirname "$0")/../fuzz/corpus/config" && pwd)
. "$(dirname "$0")/cli_harness.sh"

# ----------------------------------------------------------------------------------------------------------------------
# memory
# ----------------------------------------------------------------------------------------------------------------------

says memory_counts_parameters "7,615,616,512 parameters" memory --model Qwen2.5-7B --chunk-size 4K
says memory_of_sizes "custom: 494,032,768 parameters" memory --layers 24 --hidden 896 --heads 14 --kv-heads 2 \
    --head-dim 64 --ffn 4864 --vocab 151936 --tied --qkv-bias --chunk-size 4K
says memory_overrides_a_model "tensor 2, pipeline 4" memory --model qwen3-32b --layers 6 --tp 2 --pp 4 --chunk-size 4K \
    --stage-layers 1,2,2,1
says memory_compares_with_a_gpu "too little" memory --model qwen2.5-7b --chunk-size 4K --gpu a100-80g

# The terms of each stage add up, and 16 bytes a parameter are spread as ZeRO says.
name=memory_json
if wanted $name; then
    if [ -z "$PYTHON" ]; then skip $name "no python3"
    elif ! run memory --model llama-3-8b --chunk-size 2K --context 64K --k 2 --pp 4 --dp 8 --zero 1 \
            --json report.json; then
        fail $name "$(cat err)"
    else
        python - >why <<'END' && ok $name || fail $name "$(cat why)"
import json, sys
r = json.load(open("report.json"))
assert r["format"] == "chunkflow-memory" and r["version"] == 1, "format"
assert r["parameters"] == 8030261248, "parameters"
assert len(r["stages"]) == 4, "stages"
total = 0
for s in r["stages"]:
    terms = [v for k, v in s.items() if k not in ("total", "host", "at_loss")]
    assert len(terms) == 11 and sum(terms) == s["total"], "terms"
    assert s["runtime"] >= 2 << 30, "runtime"
    assert 2 * s["parameters"] == s["gradients"], "gradients"
    assert s["optimizer"] == -(-6 * s["parameters"] // 8), "optimizer"
    total += s["parameters"]
assert total == 2 * 8030261248, "sum of parameters"
END
    fi
fi

# The table in the README: GiB on the fullest GPU, whole sequences and chunks.
name=memory_readme
if wanted $name; then
    row() { # CHUNK-SIZE, or nothing for a chunk of the whole context; OPTIONS...
        size=${1-}
        [ $# -eq 0 ] || shift
        for context in 32K 64K 128K 256K; do
            run memory --model qwen2.5-7b --tp 4 --pp 4 --recompute selective --k 1 --chunk-size "${size:-$context}" \
                --context $context "$@"
            sed -n 's/^peak .* = \([0-9.]*\) GiB.*/| \1 /p' out | tr -d '\n'
        done
    }
    readme=$(dirname "$HEADER")/README.md
    whole=$(row) chunks=$(row 8K) streamed=$(row 8K --stream 64M)
    if grep -qF "\`--context\` $whole|" "$readme" && grep -qF "\`--chunk-size 8K\` $chunks|" "$readme" &&
        grep -qF "\`--chunk-size 8K --stream 64M\` $streamed|" "$readme"; then ok $name
    else fail $name "the command says: $whole; $chunks; $streamed"; fi
fi

# With the state streamed, a long context needs no more of the fullest GPU than a short one: at most 1 % from 32K to
# 256K and 2 % to 1M, kept stage inputs included. Without, it grows by a twentieth and more, or there would be nothing
# to show.
name=memory_stream_is_flat
if wanted $name; then
    total() { # CONTEXT MODEL TP PP OPTIONS...
        run memory --context "$1" --model "$2" --tp "$3" --pp "$4" --chunk-size 8K --recompute selective --local-replay \
            --tsv $5 && awk -F '\t' '$13 + 0 > most { most = $13 } END { printf "%.0f ", most }' out
    }
    why=
    for setup in "qwen2.5-7b 4 1" "qwen2.5-7b 4 4" "qwen2.5-14b 4 4" "qwen2.5-32b 8 4" "qwen2.5-72b 8 8"; do
        sizes=$(total 32K $setup "--stream 64M"; total 256K $setup "--stream 64M"; total 1M $setup "--stream 64M"
                total 32K $setup ""; total 256K $setup "")
        echo "$sizes" | awk '{ exit !(NF == 5 && $1 > 1e10 && $2 <= 1.01 * $1 && $3 <= 1.02 * $1 && $5 > 1.05 * $4) }' ||
            why="$why$setup: $sizes; "
    done
    if [ -z "$why" ]; then ok $name; else fail $name "$why"; fi
fi

# 7B on four GPUs: a row of one layer has 512 bytes of K and V and 1024 of gradients, so 3 MiB are 3 x 682 rows.
says memory_stream_rows "stream            3 blocks of 682 rows of one layer on each GPU" memory --model qwen2.5-7b --tp 4 \
    --chunk-size 8K --context 256K --stream 3M
name=memory_stream_json
if wanted $name; then
    if ! run memory --model qwen2.5-7b --tp 4 --chunk-size 8K --stream 3M --json -; then fail $name "$(cat err)"
    elif grep -q '"state_window": 2046,' out; then ok $name
    else fail $name "$(grep window out)"; fi
fi
says memory_stream_host "in host memory               10.281" memory --model qwen2.5-7b --tp 4 --chunk-size 8K \
    --context 256K --stream 3M
refused memory_stream_row 2 "--stream: 3 rows of one layer's K, V and their gradients have 4,608 bytes here" memory \
    --model qwen2.5-7b --tp 4 --chunk-size 4K --stream 4607

# A list is what takes most of it: of 16 answers to a prompt of four chunks the state is the prompt's, 8K rows for each of
# the 28 layers' 2 x 512 numbers of K and V, two bytes each and their gradients four; a list of one has that sequence's.
name=memory_of_a_list
if wanted $name; then
    echo '32K + 2K 16' >tree
    printf '3K 5\n32K\n' >chain
    at="--model qwen2.5-7b --chunk-size 8K --fragmentation 0 --tsv"
    # shellcheck disable=SC2086
    run memory $at tree && cp out of_tree && run memory $at chain && cp out of_chain && run memory $at --context 32K
    column='NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i } NR == 2 { print $at["state_bytes"], $at["state_gradient_bytes"] }'
    same ${name}_tree "$((32768 * 28 * 1024 * 2)) $((32768 * 28 * 1024 * 4))" "$(awk -F '\t' "$column" of_tree)"
    same ${name}_chain "" "$(diff of_chain out)"
fi
says memory_shares "shared            65,536 rows are computed" memory --model qwen2.5-7b --chunk-size 8K tree
refused memory_list_and_context 2 "--context stands in place of a list" memory --model qwen2.5-7b --chunk-size 4K --context 8K tree
refused memory_without_chunk_size 2 "--chunk-size N is missing" memory --model qwen2.5-7b
refused memory_without_model 2 "--layers is missing" memory --chunk-size 4K
# An organisation, case and what trained variants end in say nothing of a model's sizes; anything else does.
for name in Qwen/Qwen2.5-7B-Instruct org/team/QWEN2.5-7B-Base qwen2.5-7b-chat-hf; do
    says "memory_name_$name" "qwen2.5-7b: 7,615,616,512 parameters" memory --model $name --chunk-size 4K
done
refused memory_name_as_long 2 "there is no 'qwen2.5-73b'; did you mean qwen2.5-72b? " memory --model qwen2.5-73b \
    --chunk-size 4K
refused memory_name_near 2 "there is no 'Qwen2.5-7B-1M'; did you mean qwen2.5-7b? There are: qwen2.5-0.5b, " memory \
    --model Qwen2.5-7B-1M --chunk-size 4K
# A name that begins with what was asked for is nearer than one with fewer letters changed; endings do not count there.
refused memory_name_begins 2 "there is no 'qwen2.5-72'; did you mean qwen2.5-72b? " memory --model qwen2.5-72 --chunk-size 4K
refused memory_name_stripped 2 "there is no 'meta-llama/Llama-3.1-70B-Instruct'; did you mean llama-3-70b? " memory \
    --model meta-llama/Llama-3.1-70B-Instruct --chunk-size 4K
refused memory_name_suffix 2 "there is no '-instruct'. There are: " memory --model=-instruct --chunk-size 4K
for name in $("$CHUNKFLOW" memory --model none --chunk-size 4K 2>&1 | sed 's/.*There are: \(.*\)[.] Any.*/\1/' | tr -d ,); do
    says "memory_named_$name" "$name: " memory --model "$name" --chunk-size 4K
done
refused memory_unknown_model 2 "there is no 'gpt-5'" memory --model gpt-5 --chunk-size 4K
refused memory_tp_not_dividing 2 "--tp: must divide heads and ffn" memory --model qwen2.5-7b --tp 8 \
    --chunk-size 4K
refused memory_tp_nearest 2 "(wanted 4, got 8)" memory --model qwen2.5-7b --tp 8 --chunk-size 4K
refused memory_too_many_stages 2 "--stages: must not be more than layers (wanted 28, got 29)" memory --model qwen2.5-7b \
    --pp 29 --chunk-size 4K
refused memory_stage_layers_sum 2 "must add up to the model's layers (wanted 28, got 27)" memory --model qwen2.5-7b \
    --pp 2 --stage-layers 14,13 --chunk-size 4K
refused memory_stage_layers_text 2 "--stage-layers: got '14,x', wanted whole numbers" memory --model qwen2.5-7b --pp 2 \
    --stage-layers 14,x --chunk-size 4K
refused memory_stage_layers_count 2 "--stage-layers: got 3 numbers, wanted 2" memory --model qwen2.5-7b --pp 2 \
    --stage-layers 14,7,7 --chunk-size 4K
refused memory_overflow_live 2 "does not fit in 64 bits" memory --model qwen2.5-7b --chunk-size 2147483647 \
    --live 2147483647
refused memory_overflow_scores 2 "does not fit in 64 bits" memory --model qwen2.5-7b --chunk-size 2147483647 \
    --context 281474976710656 --unfused-attention --recompute none
refused memory_overflow_state 2 "does not fit in 64 bits" memory --model qwen2.5-72b --chunk-size 2147483647 \
    --context 281474976710656
refused memory_zero_chunk 2 "--chunk-size" memory --model qwen2.5-7b --chunk-size 0
refused memory_negative_chunk 2 "--chunk-size" memory --model qwen2.5-7b --chunk-size -4096
# A GPU of one's own: what the file says comes in place of what the one that it is like has.
echo '{"like": "h100-80g", "flops": 1978.8e12, "memory": 103079215104}' >twice.json
echo '{"like": "b100"}' >none.json
echo '{"flops": -1}' >less.json
says time_gpu_file "GPU               twice.json" time --model qwen2.5-7b --gpu twice.json --chunk-size 8K
says memory_gpu_file "twice.json        96.0 GiB: " memory --model qwen2.5-7b --chunk-size 4K --gpu twice.json
echo '{"like": "h100-80g", "name": "ours", "flop": 1e15}' >slip.json
refused time_gpu_slip 2 "slip.json:1: flop: there is no such member" time --model qwen2.5-7b --gpu slip.json --chunk-size 8K
refused time_gpu_like_none 2 "there is no GPU 'b100'" time --model qwen2.5-7b --gpu none.json --chunk-size 8K
refused time_gpu_wrong 2 "gpu.flops: must be finite and above 0" time --model qwen2.5-7b --gpu less.json --chunk-size 8K
refused memory_unknown_gpu 2 "there is no 'b100'" memory --model qwen2.5-7b --chunk-size 4K --gpu b100

# Peaks that were made with 17 % and 3 GB are fitted by these, and leave nothing.
made() { "$CHUNKFLOW" memory --model qwen2.5-7b --tp 4 --chunk-size "$1" --k "$2" --context "$3" --runtime 3000000000 \
    --fragmentation 17 | sed -n 's/^peak .*: \([0-9,]*\) bytes.*/\1/p' | tr -d ,; }
: >peaks
for setting in "4096 1 4096" "8192 1 65536" "8192 2 65536" "16384 1 131072"; do echo "$setting $(made $setting)" >>peaks; done
says memory_fit "fitted            --runtime 30000000" memory --model qwen2.5-7b --tp 4 --chunk-size 8K --fit peaks
says memory_fit_percent "fragmentation 17, to 4 peaks" memory --model qwen2.5-7b --tp 4 --chunk-size 8K --fit peaks
run memory --model qwen2.5-7b --tp 4 --chunk-size 8K --k 1 --context 64K --fit peaks
if [ "$(grep -c ' 0\.0 *$' out)" = 4 ]; then ok memory_fit_residuals; else fail memory_fit_residuals "$(head -8 out)"; fi
head -n 1 peaks | sed 's/$/ # one: the constant alone/' >peak
says memory_fit_one "fragmentation 10, to 1 peaks" memory --model qwen2.5-7b --tp 4 --chunk-size 8K --fit peak
refused memory_fit_empty 2 "--fit: /dev/null has no line" memory --model qwen2.5-7b --chunk-size 8K --fit /dev/null
for line in "1 2 3" "8K 1 8K 1G 5" "8K 1 8K x" "8K 0 8K 1G" "99999999999 1 8K 1G"; do
    printf '\n%s\n' "$line" >bad.peaks
    refused "memory_fit_$line" 2 "bad.peaks:2: wanted CHUNK_SIZE K CONTEXT BYTES" memory --model qwen2.5-7b \
        --chunk-size 8K --fit bad.peaks
done

# ----------------------------------------------------------------------------------------------------------------------
# config.json
# ----------------------------------------------------------------------------------------------------------------------

qwen='"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_hidden_layers": 28,
      "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": false'
printf '{"model_type": "qwen2", %s}\n' "$qwen" >qwen2.json
says config_qwen2 "7,615,616,512 parameters" memory --config qwen2.json --chunk-size 4K
"$CHUNKFLOW" memory --config - --chunk-size 4K <qwen2.json >stdin.out 2>err
run memory --config qwen2.json --chunk-size 4K
same_files config_standard_input out stdin.out
printf '{"model_type": "llama", %s, "attention_bias": true}\n' "$qwen" >llama.json # one bias more: 28 x 3584
says config_llama_biases "7,615,716,864 parameters" memory --config llama.json --chunk-size 4K
printf '{"model_type": "qwen3", %s, "head_dim": 64}\n' "$qwen" >qwen3.json
says config_head_dim "qwen3: " memory --config qwen3.json --chunk-size 4K
window='"sliding_window": 4096'
printf '{"model_type": "qwen2", %s, %s, "use_sliding_window": false}\n' "$window" "$qwen" >unused.json
says config_window_unused "qwen2: 7,615,616,512 parameters" memory --config unused.json --chunk-size 4K
printf '{"model_type": "mistral", "sliding_window": null, %s}\n' "$qwen" >whole.json
says config_no_window "mistral: " memory --config whole.json --chunk-size 4K
refused config_no_file 2 "cannot open absent.json" memory --config absent.json --chunk-size 4K
refused config_and_model 2 "exclude each other" memory --config qwen2.json --model qwen2.5-7b --chunk-size 4K
echo 9 >nine
# shellcheck disable=SC2086
for command in "memory --chunk-size 4K" "plan --chunk-size 4K nine" "tune --gpu h200 nine"; do
    refused lora_experts 2 "lora-experts needs --lora RANK" $command --model qwen3-30b-a3b --lora-experts
done

# Null is the same as not given; what nobody asks for may be anything; escapes spell the same names and words.
printf '{"\\u006dodel_type": "qwe\\u006e2", %s, "head_dim": null, "attention_bias": null, "num_experts": null,
         "rope_scaling": {"type": "\\ud834\\udd1e \\"x\\"", "factor": [1e300, -0.5, 1E-400, true, null]},
         "torch_dtype": "bfloat16", "label2id": {"caf\\u00e9": 0, "caf": 1}}\n' "$qwen" >rich.json
says config_other_members "qwen2: 7,615,616,512 parameters" memory --config rich.json --chunk-size 4K
printf '{"model_type": "llama", %s, "num_local_experts": 1, "zeros": %s}\n' "$qwen" 1.5"$(printf '%090d' 0)" >digits.json
says config_many_digits "llama: " memory --config digits.json --chunk-size 4K

# Windows are counted: 28 layers (or the last 8) x 4,095 rows x 2,048 bytes a border.
printf '{"model_type": "mistral", %s, %s}\n' "$window" "$qwen" >window.json
says config_window "of that state, 234,823,680 bytes a border" memory --config window.json --chunk-size 4K
printf '{"model_type": "qwen2", %s, %s, "use_sliding_window": true, "max_window_layers": 20}\n' "$window" "$qwen" \
    >some.json
says config_some_windows "of that state, 67,092,480 bytes a border" memory --config some.json --chunk-size 4K

# Published files, less what is not read, are the models of the table, byte by byte.
while read -r file model; do
    "$CHUNKFLOW" memory --config "$CONFIGS/$file" --chunk-size 8K --context 64K 2>&1 | sed 1d >config.out
    run memory --model "$model" --chunk-size 8K --context 64K
    sed 1d out >model.out
    same_files "config_is_$model" model.out config.out
done <<END
qwen3_moe qwen3-30b-a3b
qwen3_5_moe qwen3.5-35b-a3b
qwen3_5 qwen3.5-27b
gpt_oss gpt-oss-120b
deepseek_v3 deepseek-v3
llama4 llama-4-maverick
mixtral mixtral-8x7b
glm4_moe glm-4.5
kimi_k2 kimi-k2
kimi_linear kimi-linear-48b-a3b
nemotron_h nemotron-3-nano-30b-a3b
END
# And so are its times, where groups of experts hold a token to some of the nodes.
at="--gpu h100-80g --dp 64 --ep 64 --chunk-size 4K"
# shellcheck disable=SC2086
{
run time --config "$CONFIGS/deepseek_v3" $at
sed 1d out >config.out
run time --model deepseek-v3 $at
sed 1d out >model.out
}
same_files config_has_groups model.out config.out
# Gemma 3 27B's checkpoint has 27,432,406,640 numbers, of which the encoder of images and its projection have 423,060,336.
says config_gemma3 "gemma3_text: 27,009,346,304 parameters" memory --config "$CONFIGS/gemma3" --chunk-size 8K
# Gemma 3 4B says no more than this; 4,300,079,472 less 419,816,304.
printf '{"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 34, "hidden_size": 2560,
"intermediate_size": 10240, "sliding_window": 1024}}' >small.json
says config_gemma3_default "gemma3_text: 3,880,263,168 parameters" memory --config small.json --chunk-size 8K
says config_gemma3_windows "a border of two chunks (windows" memory --config "$CONFIGS/gemma3" --chunk-size 8K

# Families that no model of the table is of: what their checkpoints have by themselves (Qwen1.5-MoE-A2.7B, Gemma 2 9B, Gemma
# 7B, Phi-3-mini, DeepSeek-V2-Lite, Granite 3.1 3B-A800M, GLM-4.7-Flash, SmolLM3-3B, Qwen2.5-VL-7B less its images).
while read -r type parameters layers hidden heads kv ffn vocab members; do
    printf '{"model_type": "%s", "num_hidden_layers": %s, "hidden_size": %s, "num_attention_heads": %s, %s,
"num_key_value_heads": %s, "intermediate_size": %s, "vocab_size": %s}\n' "$type" "$layers" "$hidden" "$heads" "$members" "$kv" "$ffn" \
        "$vocab" >family.json
    says "config_$type" "$type: $parameters parameters" memory --config family.json --chunk-size 4K
done <<'END'
qwen2_moe 14,315,784,192 24 2048 16 16 5632 151936 "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "num_experts": 60, "num_experts_per_tok": 4
gemma2 9,241,705,984 42 3584 16 8 14336 256000 "head_dim": 256, "sliding_window": 4096
gemma 8,537,680,896 28 3072 16 16 24576 256000 "head_dim": 256
phi3 3,821,079,552 32 3072 32 32 8192 32064 "sliding_window": 2047
deepseek_v2 15,706,484,224 27 2048 16 16 10944 102400 "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "kv_lora_rank": 512, "q_lora_rank": null, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6
granitemoe 3,298,793,472 32 1536 24 8 512 49155 "num_local_experts": 40, "num_experts_per_tok": 8, "tie_word_embeddings": true
glm4_moe_lite 29,943,390,976 47 2048 20 20 10240 154880 "moe_intermediate_size": 1536, "first_k_dense_replace": 1, "kv_lora_rank": 512, "q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "n_routed_experts": 64, "n_shared_experts": 1, "num_experts_per_tok": 4
smollm3 3,075,098,624 36 2048 16 4 11008 128256 "tie_word_embeddings": true
qwen2_5_vl_text 7,615,616,512 28 3584 28 4 18944 152064 "use_sliding_window": false
granite 7,615,487,488 28 3584 28 4 18944 152064 "mlp_bias": false
minimax_m2 228,689,320,448 62 3072 48 8 1536 200064 "head_dim": 128, "num_local_experts": 256, "num_experts_per_tok": 8
mimo 7,622,619,136 36 4096 32 8 11008 151680 "head_dim": 128, "attention_bias": true
nemotron_h 1,493,776,768 4 4096 32 8 16384 131072 "head_dim": 128, "layers_block_type": ["mamba", "mlp", "attention", "mlp"], "mamba_num_heads": 128, "n_groups": 8, "ssm_state_size": 128, "mamba_head_dim": 64, "conv_kernel": 4
END
# Half of 28 layers have windows: 14 x 4,095 rows x 4,096 bytes a border.
printf '{"model_type": "gemma2", "head_dim": 256, "sliding_window": 4096, %s}\n' "$qwen" >windows.json
says config_gemma2_windows "of that state, 234,823,680 bytes a border" memory --config windows.json --chunk-size 4K

# bad NAME MESSAGE MEMBERS: with these members, and those of $qwen behind them, the file is refused with this message,
# on its first line.
bad() {
    printf '{%s, %s}\n' "$3" "$qwen" | tr '\n' ' ' >"config.$1"
    refused "config_$1" 2 "config.$1:1: $2" memory --config "config.$1" --chunk-size 4K
}
llama='"model_type": "llama"'
bad moe 'the numbers of experts, and of those for each token, are missing' '"model_type": "qwen3_moe"'
bad mixtral 'the numbers of experts' '"model_type": "mixtral", "num_local_experts": 8'
deepseek='"model_type": "deepseek_v3", "n_routed_experts": 8, "num_experts_per_tok": 2'
bad n_group 'n_group, topk_group: wanted groups' "$deepseek, \"n_group\": 3, \"topk_group\": 1"
bad topk_group 'n_group, topk_group: wanted groups' "$deepseek, \"n_group\": 4, \"topk_group\": 5"
bad mlp_only 'mlp_only_layers: cannot be described' '"model_type": "qwen3_moe", "mlp_only_layers": [0]'
bad layer_types 'layer_types: wanted one for each' "$llama, \"layer_types\": [\"full_attention\"]"
bad layer_type "layer_types: there is no 'linear_attention' in a llama" \
    "$llama, \"layer_types\": [$(printf '"linear_attention",%.0s' $(seq 27))\"full_attention\"]"
bad active 'kinds.active[0]: is out of range' '"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 9'
bad text 'text_config: wanted an object' "$llama, \"text_config\": 1"
for key in num_experts num_local_experts n_routed_experts moe_intermediate_size num_experts_per_tok; do
    bad $key 'a mixture of experts, which no llama is' "$llama, \"$key\": 8"
    bad ${key}_text "$key: wanted a whole number" "$llama, \"$key\": \"8\""
done
bad window_text 'sliding_window: wanted a whole number' "$llama, \"sliding_window\": \"4096\""
bad unknown_type "model_type: 'gemma4' is unknown; wanted qwen2" '"model_type": "gemma4"'
bad long_type "model_type: '0000" "\"model_type\": \"$(printf '%0200d' 0)\""
hybrid='"model_type": "nemotron_h", "hybrid_override_pattern":'
bad pattern_short 'wanted one kind of layer for each' "$hybrid \"ME\""
bad pattern_letter 'layer 3 is of no kind that is known' "$hybrid \"MMMX$(printf '%024d' 0 | tr 0 M)\""
bad latent_experts 'routed_expert_hidden_size, moe_latent_size: experts whose rows' "$hybrid \"ME\", \"moe_latent_size\": 1024"
bad other_layers 'index_topk, num_kv_shared_layers' "$deepseek, \"index_topk\": 2048"
bad expert_step 'moe_layer_freq: experts in some layers' "$deepseek, \"moe_layer_freq\": 2"
bad no_type 'model_type is missing' '"kind": "llama"'
bad type_number 'model_type: wanted a string' '"model_type": 2'
bad type_null 'model_type: wanted a string' '"model_type": null'
bad flag_number 'attention_bias: wanted true or false' "$llama, \"attention_bias\": 1"
bad flag_text 'mlp_bias: wanted true or false' "$llama, \"mlp_bias\": \"true\""
for value in 2.5 2e0 '"128"' '[128]' '{}' true 9223372036854775808; do
    bad "head_dim_$value" 'head_dim: wanted a whole number' "$llama, \"head_dim\": $value"
done
for value in 0 -0 -128 -9223372036854775808; do
    bad "head_dim_$value" 'head_dim: wanted a whole number above 0' "$llama, \"head_dim\": $value"
done
bad head_dim_huge 'model.head_dim: is too large' "$llama, \"head_dim\": 9223372036854775807"
bad huge_unread 'rope_theta: wanted a whole number' "$llama, \"rope_theta\": 99999999999999999999"
bad huge_real 'eps: wanted a finite number' "$llama, \"rope\": {\"eps\": -1e999}"
bad huge_element 'an element: wanted a finite number' "$llama, \"eos\": [1, [2, 1.0e309]]"
bad twice 'hidden_size: given twice' "$llama, \"hidden_size\": 4096"
bad twice_escaped 'hidden_size: given twice' "$llama, \"hidden_si\\u007ae\": 4096"
bad twice_unread 'b: given twice' "$llama, \"a\": [{\"b\": 1}, {\"b\": 2, \"c\": {\"b\": 3}, \"\\u0062\": 4}]"
bad deep 'the values are nested too deeply' "$llama, \"a\": $(printf '%017d' 0 | tr 0 '[')"
bad name_nan 'head_dim: wanted a whole number' "$llama, \"head_dim\": NaN"
bad half_character 'a string has half a character' "$llama, \"a\": \"\\ud834\""
bad zero_character 'a string has a zero character' "$llama, \"a\": \"\\u0000\""
bad short_escape 'wanted four hexadecimal digits' "$llama, \"a\": \"\\u12\""
bad comma 'wanted the name of a member' "$llama, "

printf '{"model_type": "llama", "hidden_size": 4096}\n' >short.json
refused config_missing 2 "short.json:1: num_hidden_layers is missing" memory --config short.json --chunk-size 4K
printf '{"model_type": "llama",\n "num_hidden_layers": 2.5}\n' >half.json
refused config_not_whole 2 "half.json:2: num_hidden_layers: wanted a whole number" memory --config half.json \
    --chunk-size 4K
for key in hidden_size intermediate_size num_attention_heads num_hidden_layers vocab_size; do
    printf '{"model_type": "llama", %s}\n' "$qwen" | sed "s/\"$key\": [0-9]*/\"$key\": null/" >null.json
    refused config_null_$key 2 "$key: wanted a whole number" memory --config null.json --chunk-size 4K
done
printf '{"model_type": "llama", %s}\n' "$qwen" | sed 's/"hidden_size": 3584/"hidden_size": 3585/' >odd.json
refused config_odd 2 "head_dim is missing" memory --config odd.json --chunk-size 4K
printf '[]\n' >array.json
refused config_no_object 2 "array.json:1: wanted an object" memory --config array.json --chunk-size 4K
: >empty.json
refused config_empty 2 "empty.json:1: wanted a JSON value" memory --config empty.json --chunk-size 4K
printf '{"model_type": "llama", %s}\nx\n' "$qwen" >more.json
refused config_more 2 "there is more behind the JSON value" memory --config more.json --chunk-size 4K
awk 'BEGIN { for (i = 0; i < 1100000; i++) printf "%s", "                " }' >large.json
refused config_large 2 "large.json has more than 16,777,216 bytes" memory --config large.json --chunk-size 4K

# ----------------------------------------------------------------------------------------------------------------------
# time
# ----------------------------------------------------------------------------------------------------------------------

says time_prints_stages "once a step" time --model qwen2.5-7b --gpu h100-80g --tp 4 --pp 4 --chunk-size 8K \
    --context 256K

# B = I + W, R = F, on every stage.
name=time_json
if wanted $name; then
    if [ -z "$PYTHON" ]; then skip $name "no python3"
    elif ! run time --model qwen3-14b --gpu h200 --tp 8 --pp 5 --chunk-size 4K --json time.json; then
        fail $name "$(cat err)"
    else
        python - >why <<'END' && ok $name || fail $name "$(cat why)"
import json
r = json.load(open("time.json"))
assert r["format"] == "chunkflow-time" and len(r["stages"]) == 5, "format"
for s in r["stages"]:
    assert s["F"] == s["R"], "R is F"
    for term in ("constant", "per_token", "per_pair"):
        assert abs(s["I"][term] + s["W"][term] - s["B"][term]) <= 1e-12 * s["B"][term], "B is I + W"
    assert s["F"]["per_token"] > 0 and s["F"]["per_pair"] > 0, "positive"
END
    fi
fi

# For scripts: what the JSON has, a line for each stage and pass, and for each stage.
name=models_tsv
if wanted $name; then
    shape="--model qwen3-14b --tp 8 --pp 5 --chunk-size 4K --context 64K"
    # shellcheck disable=SC2086
    if [ -z "$PYTHON" ]; then skip $name "no python3"
    elif ! run time $shape --gpu h200 --json time.json --tsv; then fail $name "$(cat err)"
    elif ! mv out time.tsv || ! run memory $shape --k 3 --virtual 2 --json memory.json --tsv; then fail $name "$(cat err)"
    elif mv out memory.tsv && python - >why 2>&1 <<'END'
import csv, json
def table(name): return list(csv.DictReader(open(name), delimiter="\t", strict=True))
stages, rows = json.load(open("time.json"))["stages"], table("time.tsv")
assert [(int(r["stage"]), r["pass"]) for r in rows] == [(s, p) for s in range(5) for p in "FRBIW"]
for r in rows:
    c = stages[int(r["stage"])][r["pass"]]
    assert [float(r[k]) for k in ("constant_s", "s_per_row", "s_per_pair")] == list(c.values()), r
    for name, prefix in (("first_chunk_s", 0), ("last_chunk_s", 61440)):
        pairs = 4096 * prefix + 4096 * 4097 // 2
        want = c["constant"] + 4096 * c["per_token"] + pairs * c["per_pair"]
        assert abs(float(r[name]) - want) <= 1e-12 * want, (r, want)
stages, rows = json.load(open("memory.json"))["stages"], table("memory.tsv")
assert len(rows) == len(stages) == 5
for s, r in enumerate(rows):
    names = {k + "_bytes" if k != "at_loss" else k: v for k, v in stages[s].items()}
    assert {k: int(v) for k, v in r.items()} == dict(names, stage=s), (r, names)
END
    then ok $name; else fail $name "$(cat why)"; fi
fi

# Samples made of known terms, to six digits, give these terms back.
awk 'BEGIN {
    for (t = 512; t <= 16384; t *= 2)
        for (p = 0; p <= 131072; p += 32768) {
            pairs = t * p + t * (t + 1) / 2 # past 2^31, where some awks end with %d
            printf "F %d %.0f %.9g\n", t, pairs, 0.001 + 2e-6 * t + 3e-11 * pairs
            printf "B %d %.0f %.9g # twice\n\n", t, pairs, 0.002 + 4e-6 * t + 6e-11 * pairs
        }
}' >samples.txt
name=time_fit
if wanted $name; then
    if ! run time --fit samples.txt; then fail $name "$(cat err)"
    elif [ "$(awk '/^[FB] / { print $1, $2, $3, $4, $5 }' out)" = "F 30 0.001 2e-06 3e-11
B 30 0.002 4e-06 6e-11" ]; then ok $name
    else fail $name "$(cat out)"; fi
fi
name=time_fit_tsv
if wanted $name; then
    run time --fit samples.txt --tsv
    same $name "pass F B; 30 30; ok ok" "pass $(awk -F '\t' 'NR > 1 { print $1 }' out | xargs); $(
        awk -F '\t' 'NR > 1 { print $2 }' out | xargs); $(awk -F '\t' '
        function near(x, want) { return x > want * (1 - 1e-4) && x < want * (1 + 1e-4) }
        NR > 1 { f = $1 == "F" ? 1 : 2; print near($3, 0.001 * f) && near($4, 2e-6 * f) && near($5, 3e-11 * f) &&
            $9 * $9 < 1e-6 ? "ok" : $0 }' out | xargs)"
fi
name=time_fit_from_standard_input
if wanted $name; then
    run time --fit samples.txt && cp out from_file && "$CHUNKFLOW" time --fit - <samples.txt >out &&
        cmp -s out from_file &&
        ok $name || fail $name "it differs from the file"
fi
printf 'F 1 1 1\nF 2 2\n' >short.txt
refused time_fit_short_line 2 "short.txt:2: wanted PASS ROWS PAIRS SECONDS" time --fit short.txt
printf 'F 1 1 1\nX 2 2 2\n' >pass.txt
refused time_fit_unknown_pass 2 "pass.txt:2:" time --fit pass.txt
printf 'F 1 1 1\nF 2 2 nan\n' >nan.txt
refused time_fit_nan 2 "nan.txt:2:" time --fit nan.txt
printf 'F 1 1 1\nF 2 3 1\n\nF 3 6 0\n' >zero.txt
refused time_fit_zero_seconds 2 "zero.txt:4: samples.seconds" time --fit zero.txt
printf 'F 5 5 1\nF 5 6 2\nF 5 7 3\n' >alike.txt
refused time_fit_one_size 2 "alike.txt: F: samples.rows" time --fit alike.txt
printf 'F 1 1 1\nF 2 3 1\nF 3 6 1\nB 1 1 1\n' >few.txt
refused time_fit_too_few 2 "few.txt: B: samples" time --fit few.txt
: >empty.txt
refused time_fit_empty 2 "empty.txt: n: too few samples" time --fit empty.txt
refused time_fit_no_file 2 "absent.txt" time --fit absent.txt
refused time_without_gpu 2 "--gpu NAME or --fit FILE is missing" time --model qwen2.5-7b --chunk-size 4K
refused time_without_chunk_size 2 "--chunk-size N is missing" time --model qwen2.5-7b --gpu h200

# ----------------------------------------------------------------------------------------------------------------------
# The paper's numbers
# ----------------------------------------------------------------------------------------------------------------------

# Every line of the table: the residual is what measured and model give, and at most 10 %.
name=reproduce_peaks
if wanted $name; then
    if ! run reproduce peaks; then fail $name "$(cat err)"
    else
        awk '$5 ~ /^[+-].*%$/ {
                 n++
                 residual = 100 * ($4 / $3 - 1)
                 if (residual - $5 > 0.06 || $5 - residual > 0.06) { print "wrong residual: " $0; bad = 1 }
                 if (residual > 10 || residual < -10) { print "past 10 %: " $0; bad = 1 }
             }
             END { if (n != 7) { print n " lines"; bad = 1 } exit bad }' out >why && ok $name || fail $name "$(cat why)"
    fi
fi

# (8K,4) is the best of the three, and (2K,16) the worst, as in the paper.
name=reproduce_trade_off
if wanted $name; then
    if ! run reproduce trade-off; then fail $name "$(cat err)"
    else
        awk '$1 == "2,048" { a = $5; pa = $3 } $1 == "8,192" { b = $5; pb = $3 } $1 == "32,768" { c = $5; pc = $3 }
             END { if (!(pa > pc && pc > pb && pb > 0)) { print "the paper has another order"; exit 1 }
                   if (!(a > c && c > b && b > 0)) { print a, b, c; exit 1 }
                   if (a / b / (pa / pb) > 1.1 || a / b / (pa / pb) < 0.9) { print "ratio of 2K", a / b; exit 1 }
                   if (c / b / (pc / pb) > 1.1 || c / b / (pc / pb) < 0.9) { print "ratio of 32K", c / b; exit 1 } }' out >why &&
            grep -q '^assumptions' out && ok $name || fail $name "$(cat why)"
    fi
fi

# A stage works 24 units of the example and 24 of the equal lengths; the makespans are known.
name=reproduce_example
if wanted $name; then
    if ! run reproduce example; then fail $name "$(cat err)"
    else
        awk 'function off(value, wanted) { return value - wanted > 0.006 || wanted - value > 0.006 }
             BEGIN { split("42 56 60 50 42", order); split("42 52 60 44 42", best) }
             NF > 4 && $(NF - 1) ~ /^[+-]/ {
                 n++
                 if (off($(NF - 2), 100 * (1 - 24 / order[n])) || off($NF, 100 * (1 - 24 / best[n])) ||
                     off($(NF - 1), $(NF - 2) - $(NF - 3))) { print; bad = 1 }
             }
             END { if (n != 5) { print n " lines"; bad = 1 } exit bad }' out >why && ok $name || fail $name "$(cat why)"
    fi
fi

# The shares are those of the lengths that gen draws.
name=reproduce_lengths
if wanted $name; then
    if ! quick run gen lmsys --n 1000000 --seed 1; then fail $name "$(cat err)"
    else
        mv out drawn
        run reproduce lengths
        awk 'NR == FNR { if ($1 > longest) longest = $1
                         for (i = 1; i <= 5; i++) below[i] += $1 < split_at(i); next }
             function split_at(i) { return i == 1 ? 1024 : i == 2 ? 4096 : i == 3 ? 8192 : i == 4 ? 32768 : 131072 }
             $1 == "below" {
                 n++
                 share = below[n] / 1e4
                 if ($4 - share > 0.0006 || share - $4 > 0.0006 || $4 - $3 - $5 > 0.0011 || $5 + $3 - $4 > 0.0011) { print; bad = 1 }
             }
             $1 == "longest" { gsub(/,/, "", $3); if ($3 != longest) { print; bad = 1 } }
             END { if (n != 5) { print n " lines"; bad = 1 } exit bad }' drawn out >why && ok $name || fail $name "$(cat why)"
    fi
fi

# Chunks win everywhere, more so the longer a launch takes; best is the schedule of the paper or a faster one.
name=reproduce_speedup
if wanted $name; then
    if ! quick run reproduce speedup --batches 1; then fail $name "$(cat err)"
    else
        awk '$1 ~ /^qwen/ {
                 n++
                 for (i = 7; i <= 12; i++) if (!($i > 1)) { print "slower: " $0; bad = 1 }
                 for (i = 8; i <= 12; i++) if (i != 10 && !($i >= $(i - 1))) { print "falls: " $0; bad = 1 }
                 for (i = 7; i <= 9; i++) if (!($(i + 3) >= $i)) { print "best is worse: " $0; bad = 1 }
             }
             END { if (n != 5) { print n " lines"; bad = 1 } exit bad }' out >why && ok $name || fail $name "$(cat why)"
    fi
fi
if run reproduce nosuch; then fail reproduce_unknown "was taken"
elif grep -q "got 'nosuch', wanted example, peaks" err; then ok reproduce_unknown; else fail reproduce_unknown "$(cat err)"; fi

finish
