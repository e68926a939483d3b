#!/bin/sh
# train_cuda_check.sh - the trainer of real model shapes: gradients, Hugging Face's files, data, checkpoints
#
#     tests/cuda/train_cuda_check.sh           under the emulation: BUILD/cuda/train_cuda (BUILD: build)
#     tests/cuda/train_cuda_check.sh device    on a device: BUILD/train_cuda, unless TRAIN_CUDA names one; not yet run
#                                              on one
#
# FULL=1: more orders of the device's work, and more calls that fail.
#
# Run it in the top directory. Prints "ok NAME" or "FAIL NAME: why" for each case and "N passed, N failed" at the end.

. "$(dirname "$0")/../helpers.sh"

build=${BUILD:-build}
mode=${1:-emulated}
PYTHON=${PYTHON:-python3}
workplace "$build/train_cuda_check.$mode.tmp"
program=$build/cuda/train_cuda
if [ "$mode" = device ]; then
    command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU || skip_all train_cuda "no device"
    program=${TRAIN_CUDA:-$build/train_cuda}
fi
[ -x "$program" ] || skip_all train_cuda "there is no $program"

# run OPTIONS...: as capture; status 124: it hung
run() { capture timeout -k 5 "${LIMIT:-300}" "$program" "$@"; }

tiny="--layers 2 --hidden 32 --heads 4 --kv-heads 2 --ffn 40 --vocabulary 48 --loss-rows 128"

# gradients NAME OPTIONS...: --check finds no difference, with clipped gradients and an update with large decay
gradients() {
    name="gradients: $1"
    shift
    # shellcheck disable=SC2086
    run $tiny --check --lr 0.5 --warmup 0 --clip 0.1 "$@"
    if [ "$status" -ne 0 ]; then fail "$name" "exit status $status: $(last_line)"
    elif [ "$(grep -c ': ok$' "$work/out")" -ne 5 ]; then fail "$name" "$(last_line)"
    else ok "$name"; fi
}

longest=200
batch=200,20,64
layers=2 # of what is trained at the end, and of what takes longest
steps=12
chunk=64
trees="140,145,150,139,30,70 --with 0,0,0,1,0,5 --shared 0,130,130,133,0,0"
streamed="140,145,150,139 --with 0,0,0,1 --shared 0,130,100,133"
if [ "$mode" = emulated ] && ! full; then # 3 chunks of 48, not 4 of 64, and so on: bf16 takes longest
    longest=110
    batch=70,20
    chunk=48
    trees="102,105,110,100,30,50 --with 0,0,0,1,0,5 --shared 0,98,98,99,0,0"
    streamed="102,105,110,100 --with 0,0,0,1 --shared 0,98,70,99"
    layers=1
    steps=8
fi
gradients "fp32, K 1, a long chain and a hybrid chunk" --type fp32 --chunk-size $chunk \
    --synthetic $longest,20,33,$chunk,1,0
gradients "bf16, K 2" --layers $layers --chunk-size $chunk --k 2 --synthetic $longest,20,33,$chunk,1,0
gradients "slices of logits" --layers $layers --type fp32 --chunk-size 160 --synthetic 170,20,150
gradients "recomputed, untied, K 2" --type fp32 --recompute full --untied --chunk-size $chunk --k 2 \
    --synthetic $longest,20,$chunk
in_full gradients "recomputed, bf16" --recompute full --chunk-size 48 --synthetic $batch
in_full gradients "cut by cost" --type fp32 --split cost --chunk-size $chunk --synthetic $longest,20,$chunk
gradients "the state streams" --type fp32 --chunk-size $chunk --stream 24576 --synthetic $longest,20,33,1,0
in_full gradients "the state streams, bf16, K 2" --chunk-size 64 --k 2 --stream 18432 --synthetic $longest,20,33
if [ "$mode" = emulated ]; then
    CUDA_EMU_ARCH=90 CUDA_EMU_WGMMA=1
    export CUDA_EMU_ARCH CUDA_EMU_WGMMA
    gradients "bf16 with wgmma" --attention wgmma --layers 1 --chunk-size 64 --k 2 --synthetic $batch
    unset CUDA_EMU_ARCH CUDA_EMU_WGMMA
    CUDA_EMU_CUDNN=1
    export CUDA_EMU_CUDNN
    gradients "bf16 with cuDNN" --cudnn --layers 1 --chunk-size 64 --synthetic 130,20
    unset CUDA_EMU_CUDNN
fi
# shellcheck disable=SC2086
gradients "trees" --type fp32 --chunk-size $chunk --synthetic $trees
# shellcheck disable=SC2086
gradients "trees, the state streams, outputs, sinks" --outputs gpu --sinks --type fp32 --chunk-size $chunk --stream 24576 \
    --synthetic $streamed
in_full gradients "one document a chunk" --type fp32 --max-slices 1 --chunk-size 0 --synthetic 80,20,64
if [ "$mode" = emulated ]; then
    orders=1
    if full; then orders=8; fi
    for seed in $(seq $orders); do
        CUDA_EMU_SEED=$seed
        export CUDA_EMU_SEED
        gradients "work in random order $seed" --type fp32 --recompute full --chunk-size $chunk --k 2 \
            --synthetic $longest,20,33
    done
    unset CUDA_EMU_SEED
fi

# refuse TEXT OPTIONS...: status 2, one message, nothing printed
refuse() {
    said=$1
    shift
    run "$@"
    complained "refused: $said" 2 "train_cuda: .*$said"
}

refuse "there is no such model" --model qwen9 --synthetic 9
refuse "otherwise than Qwen2.5" --model llama-3-8b --synthetic 9
refuse "fp16 would need its loss scaled" --type fp16 --synthetic 9
refuse "multiple of 128" --loss-rows 130 --synthetic 9
refuse "multiples of 8" --hidden 28 --heads 2 --kv-heads 1 --synthetic 9
refuse "give one of" --synthetic 9 --data x
refuse "give --data FILE" --steps 1
if [ "$mode" = emulated ]; then
    refuse "--cudnn: --type must be bf16" --cudnn --type fp32 --synthetic 9
    refuse "--cudnn: its attention has no --sinks" --cudnn --sinks --synthetic 9
fi
refuse "have none" --sinks --save "$work" --synthetic 9
refuse "drops them again" --outputs gpu --recompute full --synthetic 9
refuse "walks through the state once" --stream 65536 --recompute full --synthetic 9
refuse "headless learns nothing" --headless --check --synthetic 9

# times_of OPTIONS...: prints the passes of the second of two steps, without their seconds
times_of() {
    # shellcheck disable=SC2086
    run $tiny --layers 1 --chunk-size 32 --steps 2 --synthetic 80,20 --times "$work/times" "$@"
    cut -d ' ' -f 1-3 "$work/times" | tr '\n' ','
}

# A chain of 80 tokens in chunks of 32, 32 and 16, and a document of 20.
rest='B 16 1160,R 32 1552,B 32 1552,R 32 528,B 32 528,F 20 210,B 20 210,'
name="times of passes"
said=$(times_of)
if [ "$said" = "F 16 1160,$rest" ] && awk '!($4 > 0) { bad = 1 } END { exit bad }' "$work/times"; then ok "$name"
else fail "$name" "$said"; fi
name="times of passes without the head"
said=$(times_of --headless)
if [ "$said" = "F 32 528,F 32 1552,F 16 1160,$rest" ]; then ok "$name"; else fail "$name" "$said"; fi

# ---- Hugging Face's files, made by independent code ----

# Makes a folder with config.json and weights of a tiny model, laid out as Hugging Face's writer does: in one file, and
# in two with an index.
make_folders() {
    "$PYTHON" - "$work" <<'PY'
import json, os, random, struct, sys
random.seed(3)
h, f, kv, v, layers = 32, 40, 16, 48, 2
shapes = {"model.embed_tokens.weight": [v, h], "model.norm.weight": [h]}
for i in range(layers):
    at = "model.layers.%d." % i
    for name, shape in (("input_layernorm.weight", [h]), ("self_attn.q_proj.weight", [h, h]),
                        ("self_attn.q_proj.bias", [h]), ("self_attn.k_proj.weight", [kv, h]),
                        ("self_attn.k_proj.bias", [kv]), ("self_attn.v_proj.weight", [kv, h]),
                        ("self_attn.v_proj.bias", [kv]), ("self_attn.o_proj.weight", [h, h]),
                        ("post_attention_layernorm.weight", [h]), ("mlp.gate_proj.weight", [f, h]),
                        ("mlp.up_proj.weight", [f, h]), ("mlp.down_proj.weight", [h, f])):
        shapes[at + name] = shape
def count(shape):
    n = 1
    for d in shape: n *= d
    return n
data = {}
for name, shape in shapes.items():
    bits = [random.choice((0, 0x8000)) | random.randrange(110, 127) << 7 | random.randrange(128)
            for _ in range(count(shape))]
    data[name] = struct.pack("<%dH" % len(bits), *bits)
def write(path, names):
    head, at = {"__metadata__": {"format": "pt"}}, 0
    for name in sorted(names):
        head[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [at, at + len(data[name])]}
        at += len(data[name])
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(data[name] for name in sorted(names)))
config = {"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": h,
          "intermediate_size": f, "model_type": "qwen2", "num_attention_heads": 4, "num_hidden_layers": layers,
          "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "tie_word_embeddings": True,
          "torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": v}
for folder in ("whole", "parts", "again", "from_parts", "drawn", "bad"):
    os.makedirs(os.path.join(sys.argv[1], folder))
for folder in ("whole", "parts", "bad"):
    with open(os.path.join(sys.argv[1], folder, "config.json"), "w") as file:
        json.dump(config, file, indent=2)
write(os.path.join(sys.argv[1], "whole", "model.safetensors"), shapes)
names = sorted(shapes)
parts = {"model-00001-of-00002.safetensors": names[:9], "model-00002-of-00002.safetensors": names[9:]}
for name, own in parts.items():
    write(os.path.join(sys.argv[1], "parts", name), own)
with open(os.path.join(sys.argv[1], "parts", "model.safetensors.index.json"), "w") as file:
    json.dump({"metadata": {}, "weight_map": {n: part for part, own in parts.items() for n in own}}, file)
shapes["model.norm.weight"] = [2, 16]
write(os.path.join(sys.argv[1], "bad", "model.safetensors"), shapes)
PY
}

same_files() { # NAME FILE FILE
    if [ "$status" -ne 0 ]; then fail "$1" "exit status $status: $(last_line)"
    elif cmp "$2" "$3" >"$work/said" 2>&1; then ok "$1"
    else fail "$1" "$(head -n 1 "$work/said")"; fi
}

first_loss() { sed -n 's/^step .* loss \([^ ]*\) .*/\1/p' "$work/out" | head -n 1; }

# Compares every tensor of a folder with an index with another folder, by independent code. The index is as Hugging
# Face's writer prints it, and no file of several tensors is larger than the limit. Tensors, types and shapes are equal.
compare_parts() { # FOLDER WHOLE MOST_BYTES
    "$PYTHON" - "$@" <<'PY'
import json, os, struct, sys
def read(path):
    with open(path, "rb") as file:
        n = struct.unpack("<Q", file.read(8))[0]
        head, data = json.loads(file.read(n)), file.read()
    head.pop("__metadata__")
    return {name: (t["dtype"], t["shape"], data[t["data_offsets"][0]:t["data_offsets"][1]]) for name, t in head.items()}
folder, whole, most = sys.argv[1], read(sys.argv[2]), int(sys.argv[3])
with open(os.path.join(folder, "model.safetensors.index.json")) as file:
    text = file.read()
index = json.loads(text)
assert text == json.dumps(index, indent=2, sort_keys=True) + "\n", "the index's form"
assert index["metadata"]["total_size"] == sum(len(t[2]) for t in whole.values()), "total_size"
names = sorted(set(index["weight_map"].values()))
assert len(names) > 3 and names == ["model-%05d-of-%05d.safetensors" % (i + 1, len(names)) for i in range(len(names))]
assert sorted(os.listdir(folder)) == sorted(names + ["config.json", "model.safetensors.index.json"]), "other files"
found = {}
for name in names:
    part = read(os.path.join(folder, name))
    assert all(index["weight_map"][t] == name for t in part) and not set(part) & set(found)
    assert len(part) == 1 or sum(len(t[2]) for t in part.values()) <= most, "a part is too large"
    found.update(part)
assert found == whole, "other tensors"
PY
}

# index_refused NAME TEXT SED: a folder whose index was edited by SED is refused with TEXT
index_refused() {
    sed "$3" "$work/parts/model.safetensors.index.json" >"$work/hostile/model.safetensors.index.json"
    run --load "$work/hostile" --steps 0
    expect "refused: an index with $1" 2 "$2"
}

in_parts() {
    mkdir "$work/many" "$work/hostile"
    cp "$work/whole/model.safetensors" "$work/many" # older weights in the other form
    run --load "$work/whole" --save "$work/many" --steps 0 --part-bytes 4000
    name="weights into parts with an index"
    if [ "$status" -ne 0 ]; then fail "$name" "exit status $status: $(last_line)"
    elif compare_parts "$work/many" "$work/whole/model.safetensors" 4000 2>"$work/err"; then ok "$name"
    else fail "$name" "$(last_line)" "$work/err"; fi
    run --load "$work/many" --save "$work/many" --steps 0
    same_files "and back into one file" "$work/whole/model.safetensors" "$work/many/model.safetensors"
    name="of which the index is gone"
    if [ ! -e "$work/many/model.safetensors.index.json" ]; then ok "$name"; else fail "$name" "it is there"; fi
    cp "$work/parts"/* "$work/hostile"
    index_refused "a part that is missing" "model-00003" 's/00002-of/00003-of/g'
    index_refused "a path out of the folder" "outside of the folder" 's/"model-00002/"..\/parts\/model-00002/'
    index_refused "no name of a file" "wanted the name of a file" 's/: "model-00001[^"]*"/: 7/'
    index_refused "a tensor in another part" "it is not in model-00001" \
        's/"model.norm.weight": "model-00002/"model.norm.weight": "model-00001/'
    index_refused "a tensor that it does not name" "it names 25: one is there twice, or not named" \
        's/, "model.norm.weight": "[^"]*"//'
    index_refused "a tensor twice" "model.norm.weight" \
        's/"weight_map": {/&"model.norm.weight": "model-00001-of-00002.safetensors", /'
    index_refused "no map" "wanted an object with a weight_map" 's/weight_map/map/'
    cp "$work/parts/model-00001-of-00002.safetensors" "$work/hostile/model-00002-of-00002.safetensors"
    index_refused "a part for another one" "it is not in model-00002" 's/nothing//'
}

hf_files() {
    if ! make_folders; then
        skip "Hugging Face's files" "no $PYTHON to make them"
        return
    fi
    run --load "$work/whole" --save "$work/again" --steps 0
    same_files "weights in and out, byte for byte" "$work/whole/model.safetensors" "$work/again/model.safetensors"
    same_files "config.json in and out" "$work/whole/config.json" "$work/again/config.json"
    run --load "$work/parts" --save "$work/from_parts" --steps 0
    same_files "weights from several files" "$work/whole/model.safetensors" "$work/from_parts/model.safetensors"
    run --load "$work/whole" --save "$work/limited" --synthetic 70,30 --chunk-size 48 --steps 1
    expect "no folder to save to" 2 "--save $work/limited: No such file"
    if grep -q '^step' "$work/out"; then fail "no folder to save to" "it has trained in vain"; fi
    mkdir "$work/limited"
    capture sh -c "ulimit -f 8; exec $program --load '$work/whole' --save '$work/limited' --steps 0"
    expect "weights larger than a file may be" 1 "cannot write $work/limited/model.safetensors: File too large"
    name="and nothing of them is left"
    if ls "$work/limited" | grep -q 'model.*safetensors'; then fail "$name" "$(ls "$work/limited" | tr '\n' ' ')"
    else ok "$name"; fi
    in_parts
    run --load "$work/whole" --synthetic 70,30 --chunk-size 48 --steps 1
    loaded=$(first_loss)
    run --load "$work/from_parts" --synthetic 70,30 --chunk-size 64 --steps 1 --recompute full
    name="loss of loaded weights"
    if [ -n "$loaded" ] && [ "$loaded" = "$(first_loss)" ]; then ok "$name"
    else fail "$name" "$loaded and $(first_loss)"; fi
    # shellcheck disable=SC2086
    run $tiny --seed 5 --steps 0 --save "$work/drawn"
    # shellcheck disable=SC2086
    run $tiny --seed 5 --synthetic 70,30 --chunk-size 48 --steps 1
    drawn=$(first_loss)
    run --load "$work/drawn" --seed 5 --loss-rows 128 --synthetic 70,30 --chunk-size 48 --steps 1
    name="weights that were drawn, saved and loaded"
    if [ -n "$drawn" ] && [ "$drawn" = "$(first_loss)" ] && [ "$drawn" != "$loaded" ]; then ok "$name"
    else fail "$name" "$drawn and $(first_loss)"; fi
    run --load "$work/bad" --save "$work/again" --steps 0
    expect "a tensor of another shape" 2 "tensor model.norm.weight: its shape must be \[32\]"
    run --load "$work/whole" --layers 3 --save "$work/again" --steps 0
    expect "a tensor that is missing" 2 "tensor model.layers.2.input_layernorm.weight: it is missing"
    run --load "$work/whole" --layers 1 --save "$work/again" --steps 0
    expect "a tensor that is none of the model's" 2 "tensor model.layers.1.[a-z_.]*: the model has no such tensor"
    run --load "$work/nowhere" --steps 0
    expect "no folder" 2 "config.json"
    sed 's/"silu"/"gelu"/' "$work/whole/config.json" >"$work/bad/config.json"
    run --load "$work/bad" --steps 0
    expect "another activation" 2 "hidden_act: only silu"
}

hf_files

# ---- data ----

make_tokens=$build/test/make_tokens

tokens_refused() { # TEXT OPTIONS...
    said=$1
    shift
    capture "$make_tokens" "$@"
    complained "make_tokens refuses: $said" 2 "$said"
}

# damaged NAME TEXT BYTES AT: a token file with these bytes (octal) at this place is refused with TEXT
damaged() {
    cp "$work/ids.tokens" "$work/bad.tokens"
    # shellcheck disable=SC2059
    printf "$3" | dd of="$work/bad.tokens" bs=1 seek="$4" conv=notrunc 2>/dev/null
    # shellcheck disable=SC2086
    run $tiny --data "$work/bad.tokens" --steps 1
    complained "refused: a token file with $1" 2 "$2"
}

# shellcheck disable=SC2086
full_output "output" "$program" $tiny --synthetic 70,30 --chunk-size 48 --steps 1

data_files() {
    printf '1 2 3 | 4 5 6 7 8 | 9 9\n\n7,8,9,10,11\n40 41 42 | 43 44\n' >"$work/ids.txt"
    capture "$make_tokens" --ids --vocabulary 48 --out "$work/ids.tokens" "$work/ids.txt"
    expect "a token file from ids" 0 "3 documents, 20 tokens, longest 10, with masks"
    gradients "masks" --type fp32 --chunk-size 4 --data "$work/ids.tokens" --batch 3
    # shellcheck disable=SC2086
    run $tiny --data "$work/ids.tokens" --batch 3 --mean sequences --chunk-size 8 --steps 1
    expect "a mean over sequences" 0 "step    1/1  loss"
    damaged "another magic" "it is no token file" X 0
    damaged "another byte order" "another byte order" '\001' 8
    damaged "too many documents" "number of documents" '\377\377\377\377\377\377\377\177' 24
    damaged "one document less" "size does not fit" '\002' 24
    damaged "one token more" "size does not fit" '\025' 32
    damaged "documents out of order" "out of order" '\377' 56
    damaged "another end" "do not begin and end" '\023' 72
    damaged "a strange token" "not in its vocabulary" '\060' 80
    damaged "a strange mask" "neither 0 nor 1" '\002' 160
    head -c 100 "$work/ids.tokens" >"$work/bad.tokens"
    # shellcheck disable=SC2086
    run $tiny --data "$work/bad.tokens" --steps 1
    complained "refused: half a token file" 2 "size does not fit"
    tokens_refused 'txt:1: "9" is no token id below 9' --ids --vocabulary 9 --out "$work/x" "$work/ids.txt"
    tokens_refused "give --out" "$work/ids.txt"
    tokens_refused "no document" --ids --out "$work/x" /dev/null
    full_output "make_tokens: output" "$make_tokens" --ids --vocabulary 48 --out "$work/x" "$work/ids.txt"
    capture sh -c "ulimit -f 1; trap '' XFSZ; exec $make_tokens --out '$work/cut' --max-length 200 README.md"
    expect "a token file that is cut short" 1 "cut: it cannot be written"
    name="and nothing of it is left"
    if [ -e "$work/cut" ]; then fail "$name" "$(ls -l "$work/cut")"; else ok "$name"; fi
    if [ -c /dev/full ]; then
        ln -sf /dev/full "$work/link"
        capture "$make_tokens" --out "$work/link" --max-length 200 README.md
        expect "a token file into a device that is full" 1 "link: it cannot be written"
        name="which is still there"
        if [ -c "$work/link" ]; then ok "$name"; else fail "$name" "it is gone"; fi
    fi
    capture "$make_tokens" --out "$work/text.tokens" --max-length 200 --prompt 3 README.md
    expect "a token file from text" 0 "longest 200, with masks"
    printf '30 2\n9\n70\n' >"$work/lengths"
    # shellcheck disable=SC2086
    run $tiny --lengths "$work/lengths" --batch 4 --chunk-size 32 --steps 1 --peak-tflops 1
    expect "a list of lengths" 0 "utilisation [0-9.]* %"
}

data_files

# ---- checkpoints, memory, failures ----

# Prints the lines of steps without their times.
steps_of() { sed -n 's/\(^step .*\)  [0-9.]* tokens.*/\1/p; /^weights after/p' "$1"; }

checkpoints() {
    n=2
    if full; then n=4; fi
    options="$tiny --data $work/ids.tokens --batch 2 --chunk-size 8 --exact --steps $n"
    # shellcheck disable=SC2086
    run $options
    steps_of "$work/out" >"$work/through"
    # shellcheck disable=SC2086
    run $options --checkpoint "$work/run" --stop-after $((n / 2))
    steps_of "$work/out" | grep '^step' >"$work/twice"
    # shellcheck disable=SC2086
    run $options --checkpoint "$work/run"
    steps_of "$work/out" >>"$work/twice"
    name="a run that was interrupted goes on bit by bit"
    if [ "$(wc -l <"$work/through")" -eq $((n + 1)) ] && cmp -s "$work/through" "$work/twice"; then ok "$name"
    else fail "$name" "it differs" "$work/twice"; fi
    # shellcheck disable=SC2086
    run $options --checkpoint "$work/run" --lr 0.5
    complained "refused: a checkpoint of another run" 2 "its lr is"
    # Holds the lock in another process for as long as this one runs, as another trainer would.
    cp "$work/run" "$work/held"
    # shellcheck disable=SC2086
    (exec 9>"$work/run.chunkflow-lock" && flock 9 && run $options --checkpoint "$work/run" 9>&- &&
        printf '%s\n' "$status" >"$work/status")
    status=$(cat "$work/status")
    complained "refused: a checkpoint that another trainer uses" 2 "another trainer is running with this checkpoint"
    if cmp -s "$work/run" "$work/held" && [ -e "$work/run.chunkflow-lock" ]; then ok "it and its lock stay as they are"
    else fail "it and its lock stay as they are" "$(ls "$work" | grep run)"; fi
}

memory() {
    # shellcheck disable=SC2086
    run $tiny --synthetic 200,30 --chunk-size 64 --steps 1 --memory-table
    name="memory by term: what is predicted is what is taken, to 5 %"
    if [ "$status" -eq 0 ] && awk '/these together/ { n++; if (!($(NF - 1) > 0.1) || !($NF >= $(NF - 1)) ||
            !($NF < 1.05 * $(NF - 1))) bad = 1 } END { exit bad || n != 2 }' "$work/out"; then ok "$name"
    else fail "$name" "$(grep 'these together' "$work/out")"; fi
    CUDA_EMU_MEMORY=39000000
    export CUDA_EMU_MEMORY
    # shellcheck disable=SC2086
    run $tiny --vocabulary 1024 --synthetic 2500 --chunk-size 2048 --steps 1
    expect "out of memory for a batch: what would fit" 1 "train_cuda: .*--chunk-size [0-9]* --k 1 would fit"
    run --hidden 128 --heads 4 --synthetic 9 --steps 1
    expect "out of memory for the model" 1 "the model takes .* MiB, the device has"
    unset CUDA_EMU_MEMORY
}

# After a run that ends for lack of memory, the settings that its message suggests do fit.
what_would_fit() {
    name="what would fit fits"
    CUDA_EMU_MEMORY=34600000
    export CUDA_EMU_MEMORY
    wanted="$tiny --layers 1 --synthetic 600 --steps 1"
    # shellcheck disable=SC2086
    run $wanted --chunk-size 512
    fits=$(sed -n 's/.*; \(--chunk-size [0-9]* --k 1\) would fit: .*/\1/p' "$work/err")
    if [ "$status" -ne 1 ] || [ -z "$fits" ]; then fail "$name" "exit status $status: $(last_line)"
    else
        # shellcheck disable=SC2086
        run $wanted $fits
        expect "$name" 0 "^step    1/1  loss"
    fi
    unset CUDA_EMU_MEMORY
}

# With streamed state, no memory term except that of the tokens themselves grows with the longest document.
flat_memory() {
    name="memory of a state that streams is flat"
    longest=200
    if full; then longest=512; fi
    for n in 128 $longest; do
        # shellcheck disable=SC2086
        run $tiny --layers 1 --chunk-size 64 --stream 18432 --synthetic $n --steps 1 --memory-table
        grep '^  activations \|^  state \|^  workspace of' "$work/out" >"$work/terms.$n"
    done
    if [ "$status" -eq 0 ] && [ "$(wc -l <"$work/terms.$longest")" -eq 4 ] &&
        cmp -s "$work/terms.128" "$work/terms.$longest"; then ok "$name"
    else fail "$name" "it grows" "$work/terms.$longest"; fi
}

# Compares chunked and unchunked losses of the same documents: each step's to 1 %, the mean of the last 20 to 0.2 %. In
# fp32, because at this learning rate bf16 rounding grows from step to step until the curves are some percent apart.
curves() { # STEPS
    name="losses of $1 steps, chunked and unchunked"
    printf '%s\n' 40 9 14 25 7 >"$work/curves"
    for way in '--chunk-size 16' '--chunk-size 0 --max-slices 1'; do
        # shellcheck disable=SC2086
        LIMIT=1200 run $tiny --type fp32 --layers 1 --lengths "$work/curves" --batch 2 --steps "$1" --lr 0.003 \
            --warmup 2 $way
        mv "$work/last" "$work/before" 2>/dev/null
        sed -n 's/^step .* loss \([^ ]*\) .*/\1/p' "$work/out" >"$work/last"
    done
    if paste "$work/before" "$work/last" | awk -v steps="$1" '
            { off = $1 > $2 ? $1 - $2 : $2 - $1; if (!(off <= 0.01 * $2)) bad = 1 }
            NR > steps - 20 { a += $1; b += $2 }
            END { off = a > b ? a - b : b - a; exit bad || NR != steps || !(b > 0) || !(off <= 0.002 * b) }'; then
        ok "$name"
    else fail "$name" "they differ" "$work/last"; fi
}

if [ "$mode" = emulated ]; then
    flat_memory
    what_would_fit
fi
if full; then curves 200; else curves 10; fi

checkpoints
if [ "$mode" = emulated ]; then memory; fi

# A failed call ends the program with a message, and without a crash. Only one kind cannot be reported: the call that
# restores the caller's device at the end of a function. None of these is drawn.
failing_calls() {
    calls="5 90 260 400"
    if full; then calls=$(seq 2 23 500); fi
    for n in $calls; do
        CUDA_EMU_FAIL_CALL=$n
        export CUDA_EMU_FAIL_CALL
        # shellcheck disable=SC2086
        run $tiny --layers 1 --synthetic 40,9 --chunk-size 32 --steps 1
        expect "call $n fails" 1 "^train_cuda: "
    done
    unset CUDA_EMU_FAIL_CALL
}

if [ "$mode" = emulated ]; then failing_calls; fi

# ---- a real compiler ----

NVCC=${NVCC:-nvcc}
real_compile() { # ARCHITECTURE CODE
    name="nvcc compiles it for $2"
    if ! "$NVCC" -std=c++17 -Werror all-warnings -Xcompiler -Wall,-Wextra -Xptxas=-v -gencode "arch=$1,code=$2" -I. \
        -c examples/train_cuda.cu -o "$work/train_cuda.o" >"$work/said" 2>&1; then
        fail "$name" "it does not" "$work/said"
    elif grep -q '[1-9][0-9]* bytes spill' "$work/said"; then fail "$name" "a kernel spills" "$work/said"
    else ok "$name"; fi
}

if full; then # the short run has the kernels of chunkflow_cuda.cu read, by cuda_compile.sh
    if ! command -v "$NVCC" >/dev/null 2>&1; then skip "nvcc compiles it" "there is no $NVCC"
    else
        real_compile compute_80 sm_80
        real_compile compute_90a sm_90a
    fi
fi

# The loss falls on data that can be learnt. shellcheck disable=SC2086
run $tiny --layers $layers --data "$work/ids.tokens" --batch 3 --chunk-size 8 --steps $steps --warmup 2 --lr 0.02
if [ "$status" -eq 0 ] && awk -v steps=$steps '/^step/ { for (i = 1; i < NF; i++) if ($i == "loss") loss = $(i + 1)
        if (n++ == 0) first = loss } END { exit !(n == steps && loss < 0.8 * first) }' "$work/out"; then ok "training"
else fail "training" "$(last_line)"; fi
left_out "200 steps of both losses, more orders of the device's work, more calls that \
fail, code for each architecture"
finish
