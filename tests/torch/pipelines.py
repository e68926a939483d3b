"""Runs plans in PyTorch's own pipelines, through the step() that takes microbatches: python pipelines.py CHUNKFLOW

chunkflow.torch.microbatches makes arg_mbs, kwarg_mbs and target_mbs of a plan. PyTorch's schedules run them on two
processes (gloo), and so does _PipelineScheduleRuntime with the file of `chunkflow plan --csv`. Gradients are compared
with those of the whole model on each sequence alone, in float64.
"""

import csv
import os
import subprocess
import sys
import tempfile
import warnings

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as pp

from families import differ, gradients
import judge
from judge import check, finish

import chunkflow
import chunkflow.torch

CHUNK, WIDTH, WORDS, RANKS = 24, 16, 31, 2
TOLERANCE = 1e-12
LENGTHS = (20, 3, 11, 24, 7, 8, 16, 1, 9, 13, 5, 22)
OWN = {"GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2, "InterleavedZeroBubble": 2, "ZBVZeroBubble": 2}  # stages a rank


class Stage(nn.Module):
    """A layer of attention; the first also has the embedding, the last also the head."""

    def __init__(self, index, n_stages):
        super().__init__()
        torch.manual_seed(100 + index)
        self.words = nn.Embedding(WORDS, WIDTH) if index == 0 else None
        self.places = nn.Embedding(CHUNK, WIDTH) if index == 0 else None
        self.qkv, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS) if index == n_stages - 1 else None
        self.double()

    def forward(self, x, position_ids, cu_seqlens):
        if self.words is not None:
            x = self.words(x) + self.places(position_ids)
        q, k, v = (y.view(x.shape[1], -1, 8).transpose(0, 1)[None] for y in self.qkv(x[0]).split([16, 8, 8], 1))
        rows = chunkflow.torch.attention(q, k, v, cu_seqlens, cu_seqlens, CHUNK, CHUNK)
        x = x + torch.tanh(self.out(rows.transpose(1, 2).reshape(x.shape)))
        return self.head(x) if self.head is not None else x


def sequences():
    return [np.random.default_rng(i).integers(0, WORDS, n) for i, n in enumerate(LENGTHS)]


def reference(n_stages):
    stages = [Stage(i, n_stages) for i in range(n_stages)]
    n_targets, total = sum(n - 1 for n in LENGTHS), 0.0
    for s in sequences():
        x = torch.as_tensor(s)[None]
        cu = torch.tensor([0, len(s)], dtype=torch.int32)
        for stage in stages:
            x = stage(x, torch.arange(len(s))[None], cu)
        loss = F.cross_entropy(x[0, :-1], torch.as_tensor(s)[1:], reduction="sum") / n_targets
        loss.backward()
        total += loss.item()
    return stages, total


def run(rank, name, path):
    """Returns the errors of this rank's gradients and losses."""
    virtual = 1 if path else OWN[name]
    n_stages = RANKS * virtual
    mine = [rank, n_stages - 1 - rank] if name.startswith("ZBV") else [rank + v * RANKS for v in range(virtual)]
    modules = {v: Stage(v, n_stages) for v in mine}
    stages = [PipelineStage(modules[v], v, n_stages, torch.device("cpu")) for v in mine]
    plan = chunkflow.pack(LENGTHS, CHUNK)
    chunks = range(plan.n_chunks)
    if path:
        made = pp._PipelineScheduleRuntime(stages, plan.n_chunks, loss_fn=chunkflow.torch.microbatch_loss,
                                           scale_grads=False)
        made._load_csv(path + ".csv", format="compute_only")
        with open(path + ".map") as file:
            chunks = [int(row["chunk"]) for row in csv.DictReader(file)]
    else:
        made = pp.get_schedule_class(name)(stages[0] if virtual == 1 else stages, plan.n_chunks,
                                           loss_fn=chunkflow.torch.microbatch_loss, scale_grads=False)
    batch = chunkflow.torch.Batch(None, plan, sequences())
    args, kwargs, targets = chunkflow.torch.microbatches(batch, chunks)
    losses = [] if n_stages - 1 in mine else None
    made.step(arg_mbs=args if 0 in mine else None, kwarg_mbs=kwargs, losses=losses,
              target_mbs=targets if losses is not None else None)
    wanted, wanted_loss = reference(n_stages)
    errors = [differ(gradients(modules[v]), gradients(wanted[v])) for v in mine]
    return max(errors + ([abs(sum(map(float, losses)) / wanted_loss - 1)] if losses else []))


def work(rank, store, folder, results):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=RANKS)
    for name in OWN:
        results.put((f"PyTorch's {name}", run(rank, name, None)))
    for name in ("1f1b", "best"):
        results.put((f"chunkflow's {name}, from CSV", run(rank, name, os.path.join(folder, name))))
    dist.destroy_process_group()


def test_all(command):
    print(f"torch {torch.__version__}, gloo, {RANKS} processes, float64, tolerance {TOLERANCE}")
    split = chunkflow.torch.Batch(None, chunkflow.pack([60, 5], CHUNK), [np.zeros(60, int), np.zeros(5, int)])
    try:
        chunkflow.torch.microbatches(split, range(split.plan.n_chunks))
        said = "it was taken"
    except ValueError as error:
        said = str(error)
    check("split sequences", "keys and values" in said, said)
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "lengths"), "w") as file:
            file.write("\n".join(map(str, LENGTHS)) + "\n")
        for name in ("1f1b", "best"):
            subprocess.run([command, "plan", "--chunk-size", str(CHUNK), "--k", "1", "--stages", str(RANKS),
                            "--summary", "--schedule", name, "--limit", "none", "--csv", name + ".csv",
                            "--microbatches", name + ".map", "lengths"], check=True, capture_output=True, cwd=folder)
        results = mp.get_context("fork").SimpleQueue()
        mp.start_processes(work, (os.path.join(folder, "store"), folder, results), nprocs=RANKS, start_method="fork")
        found = {}
        while not results.empty():
            name, error = results.get()
            found.setdefault(name, []).append(error)
    for name, errors in found.items():
        check(name, len(errors) == RANKS and max(errors) <= TOLERANCE, f"worst {max(errors):.1e}")
    check("all ran", len(found) == len(OWN) + 2, f"{len(found)} schedules")


def main(command):
    judge.run(test_all, command)
    return finish()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
