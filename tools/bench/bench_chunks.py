#!/usr/bin/env python3
"""Times a training step of a small Qwen2 on a CPU, with chunks and with whole sequences, in seconds of CPU and bytes.

    make shared
    tools/bench/bench_chunks.py [--rounds N] [--lengths 12288,4096]

Each batch is one sequence of the first length and short ones. Every way runs in its own process, with one thread and
fp32. The ways take turns, and the table has medians of the rounds. Bytes are the most that the process held during the
step, less what it held with the model alone; the C library returns large blocks at once. Whole sequences run one at a
time, because padding and packing would only cost more. The low-memory recipe checkpoints every layer and computes the
loss 1,024 rows at a time.
"""
import argparse
import os
import pathlib
import re
import resource
import statistics
import subprocess
import sys

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools" / "python"))
import chunkflow.huggingface
import chunkflow.torch

ROWS = 1024  # rows of logits at a time in the low-memory recipe
WAYS = {
    "one at a time": None,
    "checkpointing, chunked cross entropy": None,
    "chunks of 1,024, outputs off": {"chunk_size": 1024, "outputs": False},
    "chunks of 1,024": {"chunk_size": 1024},
    "chunks of 512, outputs off": {"chunk_size": 512, "outputs": False},
    "chunks of 512": {"chunk_size": 512},
}


def batch_of(longest):
    random = np.random.default_rng(1)
    return [random.integers(0, 2048, n) for n in (longest, *random.integers(50, 400, 20 if longest > 8192 else 30))]


def make_model():
    torch.manual_seed(1)
    return transformers.AutoModelForCausalLM.from_config(transformers.Qwen2Config(
        vocab_size=2048, hidden_size=256, intermediate_size=768, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=1 << 20), dtype=torch.float32).train()


def loss_of_rows(head, hidden, targets):
    return F.cross_entropy(head(hidden), targets, reduction="sum")


def whole_step(model, sequences, low_memory):
    n = sum(len(s) - 1 for s in sequences)
    for s in sequences:
        tokens = torch.from_numpy(s)
        if low_memory:
            hidden = model.base_model(tokens[None], use_cache=False).last_hidden_state[0, :-1]
            parts = zip(hidden.split(ROWS), tokens[1:].split(ROWS))
            loss = sum(checkpoint(loss_of_rows, model.lm_head, h, t, use_reentrant=False) for h, t in parts)
        else:
            logits = model(tokens[None], use_cache=False).logits[0, :-1]
            loss = F.cross_entropy(logits, tokens[1:], reduction="sum")
        (loss / n).backward()


def memory(name):
    """MiB by this line of the kernel's."""
    return int(re.search(name + r":\s+(\d+)", pathlib.Path("/proc/self/status").read_text())[1]) / 1024


def measure(way, longest):
    """Returns the seconds and bytes of one step, after a short step that warms up."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    model = make_model()
    if WAYS[way] is not None:
        step = chunkflow.torch.Step(model, chunkflow.huggingface.Causal(model), k=1, **WAYS[way])
    else:
        if "checkpointing" in way:
            model.gradient_checkpointing_enable()

        def step(sequences):
            whole_step(model, sequences, "checkpointing" in way)
    step(batch_of(longest)[1:3])
    model.zero_grad(set_to_none=True)
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    held, began = memory("VmRSS"), resource.getrusage(resource.RUSAGE_SELF)
    step(batch_of(longest))
    ended = resource.getrusage(resource.RUSAGE_SELF)
    print(ended.ru_utime - began.ru_utime, memory("VmHWM") - held)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lengths", default="12288,4096")
    parser.add_argument("--ways", default="")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        return measure(options.measure[0], int(options.measure[1]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "262144"}
    for longest in map(int, options.lengths.split(",")):
        found = {way: [] for way in WAYS if options.ways in way}
        for _ in range(options.rounds):
            for way, runs in found.items():
                made = subprocess.run([sys.executable, __file__, "--measure", way, str(longest)], check=True,
                                      env=environment, capture_output=True, text=True).stdout.split()
                runs.append([float(x) for x in made])
        medians = {way: [statistics.median(x) for x in zip(*runs)] for way, runs in found.items()}
        whole = next(iter(medians.values()))
        print(f"one sequence of {longest:,} and {len(batch_of(longest)) - 1} short ones, {options.rounds} rounds")
        for way, (seconds, mib) in medians.items():
            print(f"  {way:<38} {seconds:7.2f} s  {seconds / whole[0]:5.2f}  {mib:7.0f} MiB  {mib / whole[1]:5.2f}",
                  flush=True)


if __name__ == "__main__":
    main()
