"""Tests ranks in lockstep under FSDP2, which gathers a layer's weights in every pass: python tests/torch/lockstep.py

Two and four processes on a CPU (gloo), fully_shard(reshard_after_forward=True), float64. With schedules made for each
rank alone the processes wait for each other until gloo gives up. In lockstep they train, with the gradients and loss of
one process on whole sequences.
"""

import datetime
import os
import pathlib
import sys
import tempfile
import time
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "tools" / "python"))
import chunkflow.torch
from chunkflow.torch import Step, attention

TOLERANCE = 1e-12
SECONDS = {0: 15, 1: 600}  # until gloo gives up; without lockstep ranks must hang
CHUNK = 16
LENGTHS = (70, 12, 5, 33, 16, 9, 14, 1, 20)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, hidden, attend):
        q, k, v = (y.reshape(len(hidden), 4, 4).transpose(0, 1)[None] for y in self.qkv(hidden).chunk(3, 1))
        rows, own = attend(q, k, v)
        return hidden + self.out(rows[0].transpose(0, 1).reshape(len(hidden), 16)), own


class Net(nn.Module):
    """Two layers of attention; every forward also runs the head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.words, self.head = nn.Embedding(97, 16), nn.Linear(16, 97)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, tokens, attends):
        hidden, own = self.words(tokens), []
        for layer, attend in zip(self.layers, attends):
            hidden, mine = layer(hidden, attend)
            own += mine
        return self.head(hidden), own


def attend_to(x, i):
    """Attention of layer i in a pass: rows see the prefix and their own slices."""
    def attend(q, k, v):
        own = [k, v]
        if x.prefix:
            k, v = torch.cat([x.prefix[2 * i], k], 2), torch.cat([x.prefix[2 * i + 1], v], 2)
        return attention(q, k, v, x.cu_seqlens_q, x.cu_seqlens_k, x.max_seqlen_q, x.max_seqlen_k), own
    return attend


def alone(net, sequences):
    """Returns loss and gradients of whole sequences, one at a time."""
    n, total = sum(len(s) - 1 for s in sequences), 0.0
    for s in sequences:
        if len(s) < 2:
            continue
        whole = lambda q, k, v: (F.scaled_dot_product_attention(q, k, v, is_causal=True), [])
        logits, _ = net(s[:-1], [whole] * 2)
        loss = F.cross_entropy(logits, s[1:], reduction="sum") / n
        loss.backward()
        total += loss.item()
    return total


def work(rank, n_ranks, store, lockstep, results):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if not lockstep:  # gloo's message when it gives up is expected
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=n_ranks,
                            timeout=datetime.timedelta(seconds=SECONDS[lockstep]))
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(0, 97, (n,), generator=generator) for n in LENGTHS]
    plain, net = Net(), Net()
    wanted = alone(plain, sequences)
    for layer in net.layers:
        fully_shard(layer, reshard_after_forward=True)
    fully_shard(net, reshard_after_forward=True)
    step = Step(net, lambda x: net(x.tokens, [attend_to(x, i) for i in range(2)]), chunk_size=CHUNK, k=1,
                lockstep=lockstep)
    if lockstep:
        loss = step(sequences)
    else:  # as Step does in lockstep, but with a schedule that ignores the other ranks
        _, schedule, batch = step._batch(sequences)
        net.set_requires_gradient_sync(False)
        batch.run(schedule, idle=True, before_last=lambda: net.set_requires_gradient_sync(True))
        loss = float("nan")
    error = abs(loss / wanted - 1)
    for (_, p), (_, q) in zip(plain.named_parameters(), net.named_parameters()):
        error = max(error, ((q.grad.full_tensor() - p.grad).abs().max() / p.grad.abs().max()).item())
    results.put(error)
    dist.barrier()
    dist.destroy_process_group()


def run(n_ranks, lockstep):
    """Returns the errors that the ranks found, and the seconds taken; fewer errors than ranks if some never ended."""
    begin, found = time.time(), []
    with tempfile.TemporaryDirectory() as folder:
        results = mp.get_context("fork").SimpleQueue()
        store = os.path.join(folder, "store")
        processes = [mp.get_context("fork").Process(target=work, args=(r, n_ranks, store, lockstep, results))
                     for r in range(n_ranks)]
        for p in processes:
            p.start()
        for p in processes:
            p.join(max(0.0, begin + 4 * SECONDS[lockstep] - time.time()))
        ended = [p.exitcode == 0 for p in processes]
        for p in processes:
            p.kill()
        while not results.empty():
            found.append(results.get())
    return found, all(ended), time.time() - begin


def main():
    failed = 0
    for n_ranks in (2, 4):
        found, ended, seconds = run(n_ranks, 1)
        good = ended and len(found) == n_ranks and max(found) <= TOLERANCE
        failed += not good
        print("ok  " if good else "FAIL", f"in step, {n_ranks} ranks: worst "
              f"{max(found, default=float('nan')):.1e}, {seconds:.1f} s", flush=True)
    found, ended, seconds = run(2, 0)
    good = not ended and not found
    failed += not good
    print("ok  " if good else "FAIL", f"a control: ranks alone, {'ended' if ended else 'never ended'}, {seconds:.1f} s")
    print(f"{3 - failed} passed, {failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
