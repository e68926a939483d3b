"""Runs the command's CSV files in PyTorch's pipelining: python check.py CHUNKFLOW [FILTER]

A small transformer in float64 is divided into stages. A process holds the stages of its rank (2 and 4 processes, gloo),
and _PipelineScheduleRuntime runs the file that `chunkflow plan --csv` wrote. The gradients of every parameter are
compared with those of the whole model on the unpacked sequences, one by one, and the losses with those of each
microbatch's sequences. PyTorch divides gradients by the number of microbatches; a file with transfers has to request
that.

Then come refusals, by the command and by PyTorch, and PyTorch's own dumps.
"""

import csv
import filecmp
import json
import logging
import os
import random
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as pp

import dump
from judge import check, finish, run

WIDTH, HEADS, WORDS, CHUNK = 16, 2, 31, 24
TOLERANCE = 1e-12
SEEDS = (1, 2, 3)
COMPUTE, COMMS = "compute_only", "compute_comms"
VERSION = ".".join(torch.__version__.split(".")[:2])
MINOR = int(VERSION.split(".")[1])
TORCH = "2.15" if MINOR >= 15 else "2.14" if MINOR >= 10 else "2.9"  # the values of the command's --torch
HERE = os.path.dirname(os.path.abspath(__file__))

# Every kind, with the virtual stages of a rank and their placement.
KINDS = {
    "paper": ("--schedule", "paper"),
    "gpipe": ("--schedule", "gpipe"),
    "1f1b": ("--schedule", "1f1b"),
    "interleaved": ("--schedule", "interleaved", "--virtual", "2"),
    "zero-bubble": ("--schedule", "zero-bubble"),
    "zero-bubble, loops": ("--schedule", "zero-bubble", "--virtual", "2"),
    "zero-bubble, V": ("--schedule", "zero-bubble", "--virtual", "2", "--placement", "v"),
    "best": ("--schedule", "best", "--limit", "none"),
    "best, split": ("--schedule", "best", "--limit", "none", "--split-backward"),
    "best, V": ("--schedule", "best", "--limit", "none", "--virtual", "2", "--placement", "v", "--split-backward"),
}

# ---- the model ----

class Block(nn.Module):
    """Attention within each sequence of a row, and a feed-forward layer."""

    def __init__(self):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, sequence):
        n, rows, _ = x.shape
        q, k, v = (t.view(n, rows, HEADS, -1).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        sees = (sequence.unsqueeze(-1) == sequence.unsqueeze(-2)).tril().unsqueeze(1)
        scores = (q @ k.transpose(-1, -2) / (WIDTH / HEADS) ** 0.5).masked_fill(~sees, float("-inf"))
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(n, rows, WIDTH))
        return x + self.down(torch.tanh(self.up(self.norm2(x))))


class Stage(nn.Module):
    """A virtual stage: one block, with the embedding before the first and the head after the last."""

    def __init__(self, index, n_stages):
        super().__init__()
        torch.manual_seed(100 + index)
        self.words = nn.Embedding(WORDS, WIDTH) if index == 0 else None
        self.places = nn.Embedding(CHUNK, WIDTH) if index == 0 else None
        self.block = Block()
        self.head = nn.Linear(WIDTH, WORDS) if index == n_stages - 1 else None
        self.double()

    def forward(self, x, sequence, place):
        if self.words is not None:
            x = self.words(x) + self.places(place)
        x = self.block(x, sequence)
        return self.head(x) if self.head is not None else x


def loss_of(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=-1, reduction="sum")


# ---- the batch ----

def tokens_of(sequence, length):
    return torch.randint(WORDS, (length,), generator=torch.Generator().manual_seed(sequence))


def targets_of(tokens):
    return torch.cat([tokens[1:], torch.full((1,), -1)])


def rows_of(plan, chunk):
    """Returns words, targets, sequences and positions of a chunk's rows, padded to ChunkSize."""
    words, places = torch.zeros(CHUNK, dtype=torch.long), torch.zeros(CHUNK, dtype=torch.long)
    targets, sequences = torch.full((CHUNK,), -1), torch.full((CHUNK,), -1)
    for piece in plan["chunks"][chunk]["slices"]:
        at = slice(piece["offset"], piece["offset"] + piece["length"])
        words[at] = tokens_of(piece["sequence"], piece["length"])
        targets[at] = targets_of(words[at])
        sequences[at] = piece["sequence"]
        places[at] = torch.arange(piece["length"])
    return words, targets, sequences, places


def reference(plan, n_stages):
    """Returns stages with the gradients of the whole model, and the loss of each sequence."""
    stages = [Stage(i, n_stages) for i in range(n_stages)]
    losses = {}
    for chunk in plan["chunks"]:
        for piece in chunk["slices"]:
            x = tokens_of(piece["sequence"], piece["length"]).unsqueeze(0)
            target = targets_of(x[0]).unsqueeze(0)
            for stage in stages:
                x = stage(x, torch.zeros(1, piece["length"]), torch.arange(piece["length"]).unsqueeze(0))
            loss = loss_of(x, target)
            loss.backward()
            losses[piece["sequence"]] = loss.item()
    return stages, losses


# ---- one rank of one run ----

def relative(got, wanted):
    """Returns the largest difference relative to the largest value; infinite if there is nothing to compare."""
    if got is None or wanted is None or got.shape != wanted.shape or not torch.isfinite(got).all():
        return float("inf")
    most = wanted.abs().max().item()
    return (got - wanted).abs().max().item() / most if most > 0 else (0.0 if not got.abs().max() > 0 else float("inf"))


def errors_of(got, wanted, n):
    return [relative(p.grad * n, q.grad) for p, q in zip(got.parameters(), wanted.parameters(), strict=True)]


def run_case(rank, n_ranks, case):
    with open(case["csv"], newline="") as file:
        rows = list(csv.reader(file))
    with open(case["plan"]) as file:
        plan = json.load(file)
    n = plan["chunks_per_rank"]
    chunks = list(range(n))
    if case["map"]:
        with open(case["map"], newline="") as file:
            chunks = [int(row["chunk"]) for row in csv.DictReader(file)]
    lies_on = {pp._Action.from_str(cell).stage_index: r for r, row in enumerate(rows) for cell in row if cell}
    n_stages = len(lies_on)
    mine = [v for v in range(n_stages) if lies_on[v] == rank]
    modules = {v: Stage(v, n_stages) for v in mine}
    stages = [PipelineStage(modules[v], v, n_stages, torch.device("cpu")) for v in mine]
    runtime = pp._PipelineScheduleRuntime(stages, n, loss_fn=loss_of)
    runtime._load_csv(case["csv"], format=case["format"])
    words, targets, sequences, places = (torch.stack(t) for t in zip(*(rows_of(plan, c) for c in chunks)))
    inputs = (words,) if 0 in mine else ()
    losses = [] if n_stages - 1 in mine else None
    runtime.step(*inputs, target=targets if losses is not None else None, losses=losses, sequence=sequences,
                 place=places)
    wanted, loss_of_sequence = reference(plan, n_stages)
    errors = [e for v in mine for e in errors_of(modules[v], wanted[v], n)]
    for microbatch, loss in enumerate(losses or ()):
        expected = sum(loss_of_sequence[s["sequence"]] for s in plan["chunks"][chunks[microbatch]]["slices"])
        errors.append(abs(loss.item() - expected) / expected)
    return max(errors), len(errors)


def work(rank, n_ranks, store, cases, results):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=n_ranks)
    for index, case in enumerate(cases):
        results.put((index, rank, *run_case(rank, n_ranks, case)))
        dist.barrier()
    dist.destroy_process_group()


# ---- the runs ----

def chunkflow(*arguments):
    return subprocess.run([COMMAND, *arguments], capture_output=True, text=True)


def write_lengths(seed):
    draw = random.Random(seed)
    lengths = [draw.randint(2, CHUNK) for _ in range(draw.randint(9, 16))]
    with open(f"lengths{seed}", "w") as file:
        file.write("\n".join(map(str, lengths)) + "\n")
    return f"lengths{seed}"


def write_case(n_ranks, kind, seed, format):
    """Passes come with a mapping; a file with transfers has the plan renumbered."""
    stem = f"{n_ranks}-{kind}-{seed}-{format}".replace(", ", "-")
    case = {"csv": stem + ".csv", "plan": stem + ".json", "map": None, "format": format}
    more = ["--torch", TORCH, "--microbatch-order"]
    if format == COMPUTE:
        case["map"] = stem + ".map"
        more = ["--microbatches", case["map"]]
    result = chunkflow("plan", "--chunk-size", str(CHUNK), "--k", "1", "--stages", str(n_ranks), "--summary",
                       *KINDS[kind], "--csv", case["csv"], "--plan-json", case["plan"], *more, write_lengths(seed))
    if result.returncode != 0:
        sys.exit(f"{stem}: {result.stderr}")
    return case


def run_all(n_ranks, wanted):
    names = [(kind, format) for kind in KINDS for format in (COMPUTE, COMMS) if wanted in f"{kind} {format} {n_ranks}"]
    cases = [write_case(n_ranks, kind, seed, format) for kind, format in names for seed in SEEDS]
    if not cases:
        return
    results = mp.get_context("fork").SimpleQueue()
    began = time.time()
    mp.start_processes(work, (n_ranks, os.path.abspath(f"store{n_ranks}"), cases, results), nprocs=n_ranks,
                       start_method="fork")
    found = {}
    while not results.empty():
        index, _, error, count = results.get()
        most, numbers, ranks = found.get(index, (0.0, 0, 0))
        found[index] = (error if not error <= most else most, numbers + count, ranks + 1)
    for at, (kind, format) in enumerate(names):
        ours = [found.get(at * len(SEEDS) + i, (float("inf"), 0, 0)) for i in range(len(SEEDS))]
        worst = max(error for error, _, _ in ours)
        holds = all(error <= TOLERANCE and ranks == n_ranks for error, _, ranks in ours)
        check(f"{n_ranks} processes, {kind}, {format}", holds,
              f"{len(SEEDS)} batches, {sum(n for _, n, _ in ours)} gradients and losses, worst {worst:.1e}")
    print(f"     {len(cases)} runs on {n_ranks} processes in {time.time() - began:.0f} s")


# ---- what is refused ----

def refused_by_torch(path, format, words, n_ranks, per_rank, n):
    try:
        pp._PipelineScheduleRuntime(dump.stages_of(n_ranks, per_rank), n)._load_csv(path, format=format)
    except Exception as error:  # PyTorch raises many types here
        return words in str(error), str(error).split("\n")[0][:90]
    return False, "it was loaded"


def step_alone(rows, n):
    """Runs a file of one rank in this process. Returns PyTorch's error, and keeps its log off the screen."""
    logging.disable(logging.ERROR)
    with open("alone.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)
    stage = PipelineStage(Stage(0, 1), 0, 1, torch.device("cpu"))
    runtime = pp._PipelineScheduleRuntime([stage], n, loss_fn=loss_of)
    runtime._load_csv("alone.csv")
    words, places = torch.zeros(n, CHUNK, dtype=torch.long), torch.arange(CHUNK).repeat(n, 1)
    try:
        runtime.step(words, target=words, losses=[], sequence=torch.zeros(n, CHUNK), place=places)
    except RuntimeError as error:
        return str(error)
    finally:
        logging.disable(logging.NOTSET)
    return ""


def check_refusals():
    with open("split", "w") as file:
        file.write(f"{3 * CHUNK}\n5\n7\n")
    split = ["plan", "--chunk-size", str(CHUNK), "--k", "1", "--stages", "2", "--summary", "--csv", "x.csv",
             "--microbatches", "x.map"]
    result = chunkflow(*split, "split")
    check("split sequences are refused", result.returncode == 2 and "keys and values" in result.stderr,
          result.stderr[:150])
    check("they are written when asked for", chunkflow(*split, "--csv-extensions", "split").returncode == 0)
    check("PyTorch has no R", *refused_by_torch("x.csv", COMPUTE, "R", 2, 1, 4))
    whole = write_lengths(1)
    replays = ["plan", "--chunk-size", str(CHUNK), "--k", "1", "--stages", "4", "--summary", "--limit", "1", "--csv",
               "r.csv", "--microbatches", "r.map", whole]
    result = chunkflow(*replays)
    check("replays are refused", result.returncode == 2 and "is a replay" in result.stderr, result.stderr[:150])
    sends = ["plan", "--chunk-size", str(CHUNK), "--k", "1", "--stages", "2", "--schedule", "gpipe", "--summary",
             "--microbatch-order", "--plan-json", "w.json", "--csv", "w.csv", "--torch"]
    others = {"2.9": "no matching wait", "2.14": "without WAIT_REDUCE_GRAD"} if TORCH == "2.15" else {"2.15": ""}
    for version, words in others.items():
        chunkflow(*sends, version, whole)
        with open("w.json") as file:
            n = json.load(file)["chunks_per_rank"]
        check(f"transfers for {version} are refused by {VERSION}", *refused_by_torch("w.csv", COMMS, words, 2, 1, n))
    ordered = step_alone([["0F0", "0B0", "0F1", "0B1"]], 2)
    check("microbatches in the order of the forwards run", ordered == "", ordered[:90])
    unordered = step_alone([["0F1", "0B1", "0F0", "0B0"]], 2)
    check("in another they do not", "Loss for microbatch 1 is not available" in unordered, unordered[:50])


# ---- what PyTorch writes ----

def lengths_for(n):
    with open(f"n{n}", "w") as file:
        file.write(f"{CHUNK} {n}\n")
    chunkflow("plan", "--chunk-size", str(CHUNK), "--k", "1", "--stages", "1", "--summary", "--plan-json", f"n{n}.json",
              f"n{n}")
    return f"n{n}.json"


def check_dumps():
    dump.main("dumps")
    kept = os.path.join(HERE, VERSION)
    for name in sorted(os.listdir("dumps")):
        kind, _, n, what = name[:-4].split("_")
        path = os.path.join("dumps", name)
        more = ["--buffered"] if what == "deferred-recv" else []
        result = chunkflow("check", "--plan", lengths_for(int(n[1:])), path, "--time", *more)
        if kind == "dualpipev":
            check(name, result.returncode == 2 and "OVERLAP_F_B" in result.stderr, "refused by name")
        elif (kind, what) == ("1f1b", "order"):
            ours = result.returncode == 2 and "no chunk for this microbatch" in result.stderr
            theirs = refused_by_torch(path, COMPUTE, "", int(name.split("_p")[1][0]), 1, int(n[1:]))
            check(name, ours and theirs[0], "refused, as by PyTorch itself: " + theirs[1])
        else:
            makespan = [line for line in result.stdout.splitlines() if line.startswith("makespan")]
            check(name, result.returncode == 0 and makespan, (makespan or [result.stderr])[0])
    stored = {name: kept for name in os.listdir(kept)} if os.path.isdir(kept) else {}
    if VERSION == "2.14":  # files that both versions write alike are kept once, with the later one
        later = os.path.join(HERE, "2.15")
        for name in os.listdir(later):
            if name.endswith(("_order.csv", "_mended.csv")): stored.setdefault(name, later)
    differ = [name for name, folder in stored.items()
              if not filecmp.cmp(os.path.join("dumps", name), os.path.join(folder, name), False)]
    check(f"the {len(stored)} stored dumps are what {torch.__version__} writes", not differ, " ".join(differ))


def main(command, wanted=""):
    global COMMAND
    COMMAND = os.path.abspath(command)
    print(f"torch {torch.__version__}, gloo, float64, tolerance {TOLERANCE}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for n_ranks in (2, 4):
            run(run_all, n_ranks, wanted)
        if not wanted:
            dist.init_process_group("gloo", init_method="file://" + os.path.abspath("store1"), rank=0, world_size=1)
            run(check_refusals)
            run(check_dumps)
            dist.destroy_process_group()
        os.chdir(HERE)
    return finish()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
