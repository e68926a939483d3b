"""Runs torchtitan's Llama 3 in a pipeline with the command's CSV: python titan.py CHUNKFLOW

torchtitan 0.3.0 builds the model, divides it into stages and makes the schedule (pipeline_llm, with
pipeline_parallel_schedule_csv), on two processes (gloo). Its Trainer is not used, because it needs an accelerator. Nor
is its attention, which has no backward for packed sequences on a CPU: the test supplies its own, as a configuration of
torchtitan's. Gradients are compared with those of the whole model on each sequence alone, in float64.
"""

import logging
import os
import subprocess
import sys
import tempfile
import types
import warnings
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from families import Float64, differ, gradients
import judge
from judge import check, finish

import chunkflow
import chunkflow.torch

try:
    from torchtitan.config import ParallelismConfig
    from torchtitan.distributed.pipeline_parallel import pipeline_llm
    from torchtitan.models.common.attention import VarlenMetadata
    from torchtitan.models.llama3 import llama3_configs
    from torchtitan.protocols.module import Module
except ImportError as missing:
    sys.exit(f"torchtitan is not installed: {missing}")

CHUNK, RANKS = 24, 2
TOLERANCE = 1e-10
LENGTHS = (20, 3, 11, 24, 7, 8, 16, 1, 9, 13, 5, 22)
SCHEDULES = {"1f1b": (1, "1F1B"), "best": (1, "1F1B"), "interleaved": (2, "Interleaved1F1B")}


class Attention(Module):
    """The attention that torchtitan's layers call, on a CPU."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config):
        super().__init__()

    def forward(self, q, k, v, *, attention_masks, scale=None, enable_gqa=False, **others):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if attention_masks is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True).transpose(1, 2)
        m = attention_masks
        return chunkflow.torch.attention(q, k, v, m.cu_seq_q, m.cu_seq_k, m.max_q, m.max_k, scale=scale).transpose(1, 2)


def whole():
    """The smallest of torchtitan's Llamas, the same on every rank."""
    config = llama3_configs["debugmodel"]("flex")
    config.layers = config.layers[:4]
    for layer in config.layers:
        layer.attention.inner_attention = Attention.Config()
    torch.manual_seed(7)
    model = config.build()
    with torch.no_grad():
        model.init_states(buffer_device=torch.device("cpu"))
    return model.double(), config


def sequences():
    return [np.random.default_rng(i).integers(0, 2048, n) for i, n in enumerate(LENGTHS)]


def reference():
    model, _ = whole()
    n_targets, total = sum(n - 1 for n in LENGTHS), 0.0
    for s in sequences():
        tokens = torch.as_tensor(s)[None]
        logits = model(tokens, positions=torch.arange(len(s))[None])
        loss = F.cross_entropy(logits[0, :-1], tokens[0, 1:], reduction="sum") / n_targets
        loss.backward()
        total += loss.item()
    return gradients(model), total


def run(rank, name, folder, mesh):
    virtual, kind = SCHEDULES[name]
    plan = chunkflow.pack(LENGTHS, CHUNK)
    with open(os.path.join(folder, name + ".map")) as file:
        chunks = [int(line.split(",")[1]) for line in file.read().split()[1:]]
    model, config = whole()
    parallelism = ParallelismConfig(
        pipeline_parallel_degree=RANKS, pipeline_parallel_schedule=kind, pipeline_parallel_microbatch_size=1,
        pipeline_parallel_schedule_csv=os.path.join(folder, name + ".csv"))
    schedule, parts, first, last = pipeline_llm(
        model, parallel_dims=types.SimpleNamespace(get_mesh=lambda name: mesh, pp=RANKS),
        training=types.SimpleNamespace(local_batch_size=plan.n_chunks), parallelism=parallelism, compile_config=None,
        ac_config=None, dump_folder="", device=torch.device("cpu"), model_config=config,
        parallelize_fn=lambda part, **others: part,
        loss_fn=lambda logits, target: (chunkflow.torch.microbatch_loss(logits, target), None))
    args, kwargs, targets = chunkflow.torch.microbatches(chunkflow.torch.Batch(None, plan, sequences()), chunks)
    kwargs = [{"positions": x["position_ids"],
               "attention_masks": VarlenMetadata(x["cu_seqlens"], x["cu_seqlens"], CHUNK, CHUNK)} for x in kwargs]
    losses = [] if last else None
    schedule.step(arg_mbs=args if first else None, kwarg_mbs=kwargs, target_mbs=targets if last else None,
                  losses=losses)
    wanted, wanted_loss = reference()
    got = {}
    for part in parts:
        got.update(gradients(part))
    errors = [differ(got, {key: wanted[key] for key in got})]
    return max(errors + ([abs(sum(map(float, losses)) / wanted_loss - 1)] if last else [])), len(got), len(wanted)


def work(rank, store, folder, results):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("pp",))
    for name in SCHEDULES:
        with Float64():
            results.put((name, *run(rank, name, folder, mesh)))
    dist.destroy_process_group()


def test_all(command):
    print(f"torch {torch.__version__}, torchtitan 0.3.0, gloo, {RANKS} processes, float64, tolerance {TOLERANCE}")
    with tempfile.TemporaryDirectory() as folder:
        for lengths, name in ((LENGTHS, "lengths"), ((60, 5), "split")):
            with open(os.path.join(folder, name), "w") as file:
                file.write("\n".join(map(str, lengths)) + "\n")

        def plan(name, lengths):
            return subprocess.run([command, "plan", "--chunk-size", str(CHUNK), "--k", "1", "--stages", str(RANKS),
                                   "--summary", "--schedule", name, "--limit", "none", "--csv", name + ".csv",
                                   "--microbatches", name + ".map", lengths], cwd=folder, capture_output=True,
                                  text=True)
        for name in SCHEDULES:
            made = plan(name, "lengths")
            assert made.returncode == 0, made.stderr
        made = plan("paper", "split")
        check("split sequences", made.returncode == 2 and "keys and values" in made.stderr, made.stderr.strip())
        results = mp.get_context("fork").SimpleQueue()
        mp.start_processes(work, (os.path.join(folder, "store"), folder, results), nprocs=RANKS, start_method="fork")
        found = {}
        while not results.empty():
            name, error, n, n_all = results.get()
            found.setdefault(name, []).append((error, n, n_all))
    for name in SCHEDULES:
        ranks = found.get(name, [])
        worst = max((error for error, _, _ in ranks), default=float("inf"))
        n = sum(n for _, n, _ in ranks)
        check(f"torchtitan, {name}", len(ranks) == RANKS and worst <= TOLERANCE and n == ranks[0][2],
              f"{n} gradients, worst {worst:.1e}")


def main(command):
    judge.run(test_all, command)
    return finish()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
