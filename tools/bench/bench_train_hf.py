#!/usr/bin/env python3
"""Runs training steps of Hugging Face's Qwen2 in PyTorch, packed, with variable-length attention, to compare with
train_cuda.

    make shared
    tools/bench/bench_train_hf.py --model qwen2.5-0.5b --lengths FILE [--compile] [--checkpointing] [--liger]

Documents are packed into rows as long as the longest one. Attention is PyTorch's varlen_attn (chunkflow.torch), so
masked pairs cost nothing; with a dense mask the comparison would be unfair. Parameters, gradients and moments are bf16,
for which PyTorch's fused AdamW is fastest; train_cuda keeps fp32 ones. --liger: uses Liger's kernels for norm, rotary
and SwiGLU, if they are installed. Every step prints a line like train_cuda's. Needs a device. --cpu tries it on any
machine with a tiny shape, whose speed means nothing. On a device, it has not yet run to its first step.
"""
import argparse
import pathlib
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F
import transformers

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools" / "python"))
import chunkflow
import chunkflow.huggingface  # registers its attention as "chunkflow"
import chunkflow.torch


def sizes_of(options):
    """Takes the model from the table; --layers and other options change it."""
    found = chunkflow.lib.cf_model_find(options.model.encode())
    if not found:
        sys.exit(f"bench_train_hf: there is no model {options.model}")
    sizes = {name: getattr(found, name) for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "tied")}
    tiny = {"hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 96, "vocab": 256, "layers": 2} if options.cpu else {}
    return {**sizes, **tiny, **({"layers": options.layers} if options.layers else {})}


def make_model(sizes, options):
    if options.liger:
        from liger_kernel.transformers import apply_liger_kernel_to_qwen2
        apply_liger_kernel_to_qwen2()
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen2Config(
        vocab_size=sizes["vocab"], hidden_size=sizes["hidden"], intermediate_size=sizes["ffn"],
        num_hidden_layers=sizes["layers"], num_attention_heads=sizes["heads"], num_key_value_heads=sizes["kv_heads"],
        tie_word_embeddings=bool(sizes["tied"]), rope_theta=1e6, max_position_embeddings=1 << 20),
        dtype=torch.bfloat16).to("cpu" if options.cpu else "cuda")
    model.set_attn_implementation("chunkflow")
    if options.checkpointing:
        model.gradient_checkpointing_enable()
    model.train()
    return model


def packed_loss(model, inputs, targets, weights):
    hidden = model.base_model(use_cache=False, **inputs).last_hidden_state[0]
    losses = F.cross_entropy(model.lm_head(hidden).float(), targets, reduction="none")
    return (losses * weights).sum()


def step(run, batch, model, optimizer):
    """Returns the loss of the batch. Gradients are summed over the rows, then clipped."""
    total = 0.0
    for chunk in range(batch.plan.n_chunks):
        x = batch.inputs(chunk)
        inputs = {"input_ids": x.tokens[None], "position_ids": x.positions[None],
                  "cu_seq_lens_q": x.cu_seqlens_q, "max_length_q": x.max_seqlen_q,
                  "cu_seq_lens_k": x.cu_seqlens_k, "max_length_k": x.max_seqlen_k}
        loss = run(model, inputs, x.targets, x.weights)
        loss.backward()
        total += loss.detach()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(total)


def synchronize(options):
    if not options.cpu:
        torch.cuda.synchronize()


def bytes_used(options):
    """Of the device, as train_cuda reports them."""
    if options.cpu:
        return 0
    free, whole = torch.cuda.mem_get_info()
    return whole - free


def useful_flops(model, sizes, lengths):
    """Counts FLOPs as train_cuda does: six for each token and parameter of a product, twelve for each pair and
    width."""
    n = sum(p.numel() for p in model.parameters()) - (0 if sizes["tied"] else sizes["vocab"] * sizes["hidden"])
    pairs = float(np.sum(lengths * (lengths + 1.0) / 2))
    return 6.0 * n * float(lengths.sum()) + 12.0 * pairs * sizes["hidden"] * sizes["layers"]


def read_lengths(path):
    """LENGTH or LENGTH COUNT a line."""
    rows = [line.split("#")[0].split() for line in pathlib.Path(path).read_text().splitlines()]
    return np.array([int(row[0]) for row in rows if row for _ in range(int(row[1]) if len(row) > 1 else 1)])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-0.5b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--lengths", required=True)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--peak-tflops", type=float, default=989.0)
    for name in ("--compile", "--checkpointing", "--liger", "--cpu"):
        parser.add_argument(name, action="store_true")
    options = parser.parse_args()
    if not options.cpu and (chunkflow.torch.varlen_attn is None or not torch.cuda.is_available()):
        sys.exit("bench_train_hf: no device, or this PyTorch has no varlen_attn: a dense mask would be no rival")
    sizes, lengths = sizes_of(options), read_lengths(options.lengths)
    model = make_model(sizes, options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, betas=(0.9, 0.95),
                                  fused=True)
    run = torch.compile(packed_loss, dynamic=True) if options.compile else packed_loss
    plan, flops = chunkflow.pack(lengths, int(lengths.max())), useful_flops(model, sizes, lengths)
    random = np.random.default_rng(1)
    for number in range(1, options.steps + 1):
        sequences = [random.integers(0, sizes["vocab"], n) for n in lengths]
        batch = chunkflow.torch.Batch(None, plan, sequences, model.device)
        synchronize(options)
        began = time.perf_counter()
        loss = step(run, batch, model, optimizer)
        synchronize(options)
        seconds = time.perf_counter() - began
        print(f"step {number}/{options.steps}  loss {loss:.4f}  {plan.n_chunks} chunks  {lengths.sum() / seconds:.0f} "
              f"tokens/s  utilisation {100 * flops / seconds / options.peak_tflops / 1e12:.1f} %  "
              f"memory {bytes_used(options) / 2**20:.1f} MiB", flush=True)


if __name__ == "__main__":
    main()
