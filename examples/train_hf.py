#!/usr/bin/env python3
"""Trains a causal language model of Hugging Face chunk by chunk.

    pip install ./tools/python torch transformers
    examples/train_hf.py FILE...                          # a small Qwen2 on the bytes of these files, one sequence each
    examples/train_hf.py --model Qwen/Qwen2.5-0.5B --lr 1e-5 FILE...
    examples/train_hf.py --share 64 FILE...               # what files have in common is computed once
    torchrun --nproc-per-node 4 examples/train_hf.py --max-cp 4 FILE...     # a long file is spread over up to 4
    processes

chunkflow.huggingface lists the models that it accepts and refuses the others by name. tests/torch compares their
gradients with plain training.
"""

import argparse
import os
import pathlib
import sys
import time

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "tools" / "python"))  # in a clone, after make shared
try:
    import torch
    import transformers

    import chunkflow
    import chunkflow.huggingface
    import chunkflow.torch
except ImportError as missing:
    sys.exit(f"train_hf: {missing}; pip install ./tools/python torch transformers")


def small_model():
    torch.manual_seed(1)
    return transformers.AutoModelForCausalLM.from_config(transformers.Qwen2Config(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1 << 20, tie_word_embeddings=False))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--model")
    for name, default in (("--chunk-size", 2048), ("--k", 1), ("--share", 0), ("--max-cp", 0), ("--steps", 10),
                          ("--lr", 1e-3)):
        parser.add_argument(name, type=type(default), default=default)
    options = parser.parse_args()
    try:
        texts = [pathlib.Path(name).read_bytes() for name in options.files]
    except OSError as why:
        sys.exit(f"train_hf: {why}")
    model, sequences = small_model(), [list(text) for text in texts]
    if options.model:
        model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype="auto")
        tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
        sequences = [tokenizer(text.decode(errors="replace"))["input_ids"] for text in texts]
    rank = int(os.environ.get("LOCAL_RANK", 0))
    model.to(f"cuda:{rank}" if torch.cuda.is_available() else "cpu")
    if "LOCAL_RANK" in os.environ:  # started by torchrun
        torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    step = chunkflow.torch.Step(model, chunkflow.huggingface.Causal(model), chunk_size=options.chunk_size, k=options.k,
                                min_shared_prefix=options.share, max_cp=options.max_cp)
    lengths = [len(s) for s in sequences]
    plan, _ = step.plan(sequences)
    if rank == 0:
        print(f"{len(lengths)} sequences, the longest of {max(lengths)} tokens, in {plan.n_chunks - plan.n_idle} chunks",
              flush=True)
    for number in range(options.steps):
        began = time.perf_counter()
        loss = step(sequences)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {number}: loss {loss:.4f}, {time.perf_counter() - began:.2f} s", flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
