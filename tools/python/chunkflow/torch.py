"""Trains a PyTorch module chunk by chunk, with the gradients of whole sequences and the memory of K chunks.

The module needs a function that runs one pass:

    def forward(inputs):                    # Inputs, below: the rows of one chunk
        logits, own = ...                   # own: K and V of these rows, layer by layer, in a list
        return logits, own

`inputs.prefix` is such a list for the earlier tokens of the same sequence (empty at its start). `attention` computes
what a layer's rows see. Each tensor of `own` has its rows in the last dimension but one, and the order of the list is
the same in every pass. A recurrent layer hands on a state and no rows: the state after the chunk's rows goes into `own`
as a Border. chunkflow.huggingface has such a function for the models of Transformers.

    step = chunkflow.torch.Step(module, forward, chunk_size=4096, k=1)
    loss = step(sequences)                  # lists, NumPy arrays or tensors of token numbers
    optimizer.step(); optimizer.zero_grad()

A chunk whose activations K drops runs forward twice. Its first pass keeps attention's outputs, and the second does not
compute attention (`outputs`; see Batch).

One call trains the whole batch of an optimizer step, including all micro-batches of what is called gradient
accumulation, because it is planned as a whole. Under torch.distributed every rank gives the same whole batch, which is
checked, and trains its own chunks. Gradients and loss are then those of the batch on every rank. With max_cp=N, an
expensive sequence may be spread over up to N ranks. They run in step, and exchange K and V, or states, in every layer
(`inputs.cp_group`). Step(..., min_shared_prefix=N) computes the common first tokens of sequences once if they are at
least N, as for answers to one prompt. K and V of a chunk's prefix then come from several places, `inputs.key_ends` says
which rows see which keys, and a row where sequences diverge has several targets. The module may be plain or in
DistributedDataParallel, whose gradients are summed once a step, without its hooks. A module sharded by fully_shard
(FSDP2) is gathered once a step, and its weights and gradients are whole until the end of the step. Nothing here has run
on a GPU yet."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Union

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import chunkflow

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None
try:
    from torch.distributed.fsdp import FSDPModule
except ImportError:
    FSDPModule = ()

__all__ = ["Batch", "Border", "CPGroup", "Inputs", "Step", "Targets", "attention", "cross_entropy", "microbatch_loss",
           "microbatches", "unpad"]

Forward = Callable[["Inputs"], "tuple[Tensor | None, list[Tensor | Border]]"]


@dataclass
class Border:
    """What a recurrent layer or convolution hands on instead of rows: its state, or the last rows that it sees, after
    the last row of the chunk's first sequence. The next chunk finds the tensor itself in its prefix. Borders come last
    in the list; a pass that no other pass continues may leave them out. If sequences share rows, `state` has one state
    for each of Inputs.forks, and the prefix has one for each of Inputs.joins, along the first dimension."""

    state: Tensor


class _Gather(torch.autograd.Function):
    """Joins the rows of all ranks, in rank order. In backward, each rank gets the gradients that all ranks found for
    its rows."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Any) -> Tensor:
        ctx.group = group
        rows = own.new_empty(dist.get_world_size(group) * own.shape[0], own.shape[1])
        dist.all_gather_into_tensor(rows, own, group=group)
        return rows

    @staticmethod
    def backward(ctx: Any, found: Tensor) -> tuple[Tensor, None]:
        total = found.to(torch.promote_types(found.dtype, torch.float32))
        own = total.new_empty(found.shape[0] // dist.get_world_size(ctx.group), found.shape[1])
        dist.reduce_scatter_tensor(own, total, group=ctx.group)
        return own.to(found.dtype), None


class _Exchange(torch.autograd.Function):
    """Sends one entry to each rank, and receives one from each. In backward, gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Any) -> Tensor:
        ctx.group = group
        found = torch.empty_like(own, memory_format=torch.contiguous_format)
        dist.all_to_all_single(found, own.contiguous(), group=group)
        return found

    @staticmethod
    def backward(ctx: Any, found: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(found, ctx.group), None


class CPGroup:
    """The ranks that share the sequence of a pass. They run the pass at the same time, each with its own rows."""

    def __init__(self, plan: chunkflow.Plan, chunk: int, group: Any, device: Any):
        """group: the process group of these ranks."""
        chunks, n = plan.chunks, dist.get_world_size(group)
        part = int(chunks["rank"][chunk]) % n
        mates = chunk + (np.arange(n) - part) * plan.chunks_per_rank
        # number of rows of the sequence in each rank's pass
        shared = plan.slices["length"][chunks["first_slice"][mates]]
        held = chunks["prefix"][mates] + shared  # of each rank, with those of this pass
        own = part, int(chunks["prefix"][chunk]), int(shared[part])
        parts = [(int(p["rank"]) % n, int(p["row"]), int(p["tokens"])) for p in plan.kv_sources_of(chunk)] + [own]
        self.group, self.held, self.most, self.calls = group, int(held[part]), int(held.max()), 0
        self.part, self.shared = part, shared.tolist()
        self.order = torch.from_numpy(np.concatenate([rank * self.most + np.arange(row, row + tokens)
                                                      for rank, row, tokens in parts])).to(device)

    def rows(self, *own: Tensor) -> list[Tensor]:
        """Returns K and V of the whole sequence up to the last row of this pass, and then of this rank's other
        sequences. Takes those of this rank's rows so far, each (1, heads, rows, dim). Gradients go back to the ranks
        that have the rows. All ranks must call it equally often."""
        self.calls += 1
        parts = [x[0, :, :self.held].transpose(0, 1) for x in own]
        flat = torch.cat([x.flatten(1) for x in parts], 1)
        flat = _Gather.apply(F.pad(flat, (0, 0, 0, self.most - self.held)), self.group)[self.order]
        whole = flat.split([x[0].numel() for x in parts], 1)
        rows = [x.unflatten(1, part.shape[1:]).transpose(0, 1)[None] for x, part in zip(whole, parts)]
        return [torch.cat([x, mine[:, :, self.held:]], 2) for x, mine in zip(rows, own)]

    def _all_of(self, own: Tensor) -> tuple[Tensor, Tensor]:
        """Returns each rank's tensor along a new first dimension, and a zero. Adding the zero to a result makes a rank
        take part in the backward, where all ranks must meet, even if it needs nothing of the others."""
        self.calls += 1
        found = _Gather.apply(own.reshape(1, -1), self.group)
        return found.unflatten(1, own.shape), found[:0].sum()

    def tails(self, before: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the rows that a convolution sees before this rank's part of the sequence, and the last rows of the
        last rank's part. before: rows before the pass, zeros at the start of the sequence; own: this rank's rows. Rows
        are in the last dimension. All ranks must call it equally often."""
        n = before.shape[-1]
        found, zero = self._all_of(F.pad(own, (n, 0))[..., own.shape[-1]:])
        rows = [before, *(x[..., n - min(n, m):] for x, m in zip(found, self.shared))]
        mine, last = (torch.cat(x, -1) for x in (rows[:self.part + 1], rows))
        return mine[..., mine.shape[-1] - n:] + zero, last[..., last.shape[-1] - n:]

    def scan(self, before: Tensor, effect: Tensor, state: Tensor, apply: Callable[[Tensor, Tensor], Tensor]
             ) -> tuple[Tensor, Tensor]:
        """Returns the state with which this rank's part begins, and the state after the last rank's part. before: the
        state before the pass. A part turns a state s into apply(effect, s) + state, each (1, heads, numbers, numbers).
        A rank applies all parts to its share of the heads. All ranks must call it equally often."""
        self.calls += 1
        n, heads = len(self.shared), state.shape[1]
        begins, effects, states = (F.pad(x[0], (0, 0, 0, 0, 0, -heads % n)).unflatten(0, (n, -1))
                                   for x in (before, effect, state))
        parts = _Exchange.apply(torch.cat([effects.flatten(2), states.flatten(2)], 2), self.group)
        effects, states = (x.unflatten(2, of.shape[2:]) for x, of in zip(
            parts.split([effects[0, 0].numel(), states[0, 0].numel()], 2), (effects, states)))
        passed = [begins[self.part][None]]
        for of, more in zip(effects, states):
            passed.append(apply(of[None], passed[-1]) + more)
        found = torch.stack([torch.cat([x, passed[-1]]) for x in passed[:-1]])
        mine, last = _Exchange.apply(found, self.group).transpose(0, 1).flatten(1, 2)[:, None, :heads]
        return mine, last


class Targets(NamedTuple):
    """The targets of all sequences in a pass, one entry for each. If sequences share a row, the row has several."""

    rows: Tensor  # of the pass: whose logits predict the target
    sequences: Tensor
    # position of the row in its sequence; Step.log_probs has the target's log-probability at this index
    positions: Tensor
    tokens: Tensor
    weights: Tensor  # those of the sequences


@dataclass
class Inputs:
    """The rows of one pass. Tokens, positions, targets and weights have one entry for each row."""

    chunk: int
    keep: bool  # a backward follows. If False, only the rows to hand on are needed, and gradients are off
    tokens: Tensor
    positions: Tensor  # of each token in its sequence
    targets: Tensor  # the token after it
    weights: Tensor  # weight of the row's target in the loss; 0 without a target
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    prefix: list[Tensor]
    # Only if sequences share rows, otherwise None:
    key_ends: Tensor | None = None  # key j, counted from the start of the prefix, is seen by the rows before this one
    # rows, targets and weights of the further targets of rows that have several
    more: tuple[Tensor, Tensor, Tensor] | None = None
    joins: list[int] | None = None  # numbers of rows of the prefix after which rows of this chunk continue
    forks: list[int] | None = None  # numbers of rows of this chunk after which rows of other chunks continue
    chunk_size: int = 0  # most rows of any chunk of the plan
    # Only if ranks share the sequence. `prefix` then has only this rank's rows; CPGroup.rows adds those of the others.
    cp_group: CPGroup | None = None
    batch: Batch | None = None

    def targets_by_sequence(self) -> Targets:
        """Returns every target with its sequence, for a loss that weights each token."""
        if self.batch is None:
            raise ValueError("batch: wanted the Inputs of a Batch's or a Step's pass")
        return self.batch.targets_by_sequence(self.chunk)


# ----------------------------------------------------------------------------------------------------------------------
# Attention of packed rows
# ----------------------------------------------------------------------------------------------------------------------


def attention(query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, *,
              scale: float | None = None, window: int | None = None, softcap: float | None = None,
              sinks: Tensor | None = None, key_ends: Tensor | None = None, positions: Tensor | None = None,
              block: int | None = None) -> Tensor:
    """Causal attention of (1, heads, rows, dim), slice by slice and aligned bottom-right, so that the first slice sees
    its prefix. A row sees the last `window` keys up to its own, or those from the last multiple of `block` on. Scores
    are capped by softcap * tanh(scores / softcap). Sinks are a score for each head that takes part in the softmax and
    has no value. K and V may have fewer heads.

    On a CPU, each slice attends to its prefix and to its own rows in two calls of PyTorch's kernel, joined by their
    log-sums. Only windows shorter than the prefix, and sequences that share rows, use a mask, for 256 rows at a time.
    Shared rows need key_ends of the inputs and, with a window or blocks, positions. Soft caps and, on a GPU, sinks
    compute scores for as many rows at a time. On a GPU, float16 and bfloat16 use PyTorch's varlen_attn. Blocks, shared
    rows, values of another width and other types use a mask of rows by keys for each slice, whose memory grows with the
    prefix."""
    for name, x in (("query", query), ("key", key), ("value", value), ("cu_q", cu_q), ("cu_k", cu_k)):
        _check_tensor(x, name)
    for name, x in (("sinks", sinks), ("key_ends", key_ends), ("positions", positions)):
        if x is not None:
            _check_tensor(x, name)
    for name, n in (("window", window), ("block", block), ("max_q", max_q), ("max_k", max_k)):
        if n is not None:
            chunkflow._whole(n, name, 0)
    for name, n in (("scale", scale), ("softcap", softcap)):
        if not isinstance(n, (int, float, type(None))):
            raise TypeError(f"{name}: wanted a number, got {n!r:.99}")
    scale, softcap = (n if n is None else float(n) for n in (scale, softcap))
    held = None if min(window or _LEAST, block or _LEAST) < _LEAST else _running.outputs
    if varlen_attn is not None and query.is_cuda and query.dtype in (torch.float16, torch.bfloat16) \
            and softcap is None and sinks is None and block is None and key_ends is None \
            and query.shape[-1] == value.shape[-1]:
        _refuse_outputs(held, query)
        rows = (x[0].transpose(0, 1) for x in (query, key, value))
        sees = (-1 if window is None else window - 1, 0)
        return varlen_attn(*rows, cu_q, cu_k, max_q, max_k, scale=scale, window_size=sees,
                           enable_gqa=True).transpose(0, 1)[None]
    if key_ends is not None and positions is None and (window or block):
        raise ValueError("attention: with a window or blocks, rows that sequences share have positions")
    window, kind = window or 1 << 62, query.device.type
    slices = list(zip(*(x.tolist() for x in (cu_q, cu_q[1:], cu_k, cu_k[1:]))))
    _check_rows(query, key, value, slices, key_ends)
    if kind != _FLASH and softcap is None and sinks is None:
        _refuse_outputs(held, query)
        return _by_masks(query, key, value, slices, scale, window, block, key_ends, positions)
    if torch.is_autocast_enabled(kind) and query.dtype != torch.float64:
        query, key, value = (x.to(torch.get_autocast_dtype(kind)) for x in (query, key, value))
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    kernel = _Flash(scale) if kind == _FLASH and softcap is None else _ByHand(scale, softcap)
    if key_ends is not None:
        pieces = _pieces_of_tree(query.shape[2], key_ends, positions, window, block)
    else:
        pieces = _pieces(slices, window, block, kernel.most)
    kept = None if held is None else held.take(query)
    out, sums = _Attention.apply(query, key, value, sinks, list(pieces), kernel, kept)
    if held is not None and kept is None:
        held.keep(query, out, sums)
    return out


_LEAST = 2048  # shortest window or block whose outputs are kept; computing shorter ones again takes little time


_UNLIKE = "the module draws from a random generator of its own, or has changed between the two; draw from torch's " \
          "default generator, or take a k of at least the longest sequence's chunks, which replays nothing"


class _Outputs:
    """Outputs of attention that the forward of a dropped chunk keeps, call by call. The replay takes them in the same
    order."""

    def __init__(self, asked: bool):
        """asked: refuse attention that does not return its log-sums."""
        self.calls: list[tuple[Tensor, Tensor, Tensor]] = []  # a row of Q, the output, its log-sums
        self.asked, self.replayed, self.forward = asked, 0, True  # replayed: calls so far of the replay

    def keep(self, query: Tensor, out: Tensor, sums: Tensor) -> None:
        if self.forward:
            self.calls.append((query[:, :, :1].detach().clone(), out.detach(), sums))

    def take(self, query: Tensor) -> tuple[Tensor, Tensor] | None:
        """Returns output and log-sums for the replay's next call; None if the forward made fewer calls."""
        if self.forward or self.replayed == len(self.calls):
            return None
        first, out, sums = self.calls[self.replayed]
        self.replayed += 1
        same = query.shape[:3] == out.shape[:3] and query.shape[3] == first.shape[3]
        if not same or float((query.detach()[:, :, :1] - first).norm()) > 0.01 * float(first.norm()):
            raise ValueError(f"attention call {self.replayed} of a replay has other queries than that of its forward: "
                             f"{_UNLIKE}")
        return out, sums


class _Running(threading.local):
    """The outputs of the pass that runs in this thread, if it keeps or takes any."""

    outputs: _Outputs | None = None


_running = _Running()


@contextlib.contextmanager
def _holding(outputs: _Outputs | None) -> Iterator[None]:
    before, _running.outputs = _running.outputs, outputs
    try:
        yield
    finally:
        _running.outputs = before


def _refuse_outputs(held: _Outputs | None, query: Tensor) -> None:
    if held is not None and held.asked:
        raise ValueError(f"outputs=True: attention of {query.dtype} on {query.device.type} hands out no log-sums; "
                         "outputs=None keeps outputs where it can")


def _check_tensor(x: Any, name: str) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: wanted a tensor, got {x!r:.99}")


def _check_rows(query: Tensor, key: Tensor, value: Tensor, slices: list[tuple[int, int, int, int]],
                key_ends: Tensor | None) -> None:
    """Refuses rows that do not exist, which a kernel would read without an error."""
    wanted = max(k1 for _, _, _, k1 in slices) if key_ends is None else len(key_ends)
    if min(key.shape[2], value.shape[2]) < wanted:
        raise ValueError(f"attention: wanted {wanted} rows of K and V, got {key.shape[2]} and {value.shape[2]}")
    if query.shape[2] < slices[-1][1] or any(q1 - q0 > k1 - k0 for q0, q1, k0, k1 in slices):
        raise ValueError(f"attention: wanted all rows of cu_q, and a key for each row of a slice; got {query.shape[2]} "
                         f"rows, and slices (q0, q1, k0, k1) of {slices}")


_FLASH = "cpu"  # the device whose kernel hands out log-sums
_ROWS = 256  # rows at a time if masks or scores are computed here

# all keys (False), causal (True), or a function that makes a mask of rows by keys
_Sees = Union[bool, Callable[[], Tensor]]
_Piece = tuple[slice, slice, _Sees]  # of rows and of keys


def _pieces(slices: list[tuple[int, int, int, int]], window: int, block: int | None, most: int) -> Iterator[_Piece]:
    """Cuts slices into pieces with at most this many rows. Each piece first has the keys before its rows, then its
    own."""
    for begin, q1, k0, k1 in slices:
        shift = k1 - q1  # row i of the chunk has key i + shift
        while begin < q1:
            end, low = min(begin + (most if window >= k1 - k0 else _ROWS), q1), k0
            if block is not None:
                low = begin + shift - (begin + shift - k0) % block
                end = min(end, low + block - shift)
            rows, first = slice(begin, end), begin + shift
            if window < k1 - k0:
                low = max(low, first - window + 1)
                yield rows, slice(low, end + shift), functools.partial(_sees_of_rows, end - begin, end + shift - low,
                                                                       window)
            else:
                if low < first:
                    yield rows, slice(low, first), False
                yield rows, slice(first, end + shift), True
            begin = end


def _pieces_of_tree(n: int, key_ends: Tensor, positions: Tensor | None, window: int, block: int | None
                    ) -> Iterator[_Piece]:
    """Cuts n rows that sequences share into pieces; their mask hides keys of other sequences."""
    for begin in range(0, n, _ROWS):
        rows = slice(begin, min(n, begin + _ROWS))
        keys = slice(0, len(key_ends) - n + rows.stop)
        yield rows, keys, functools.partial(_sees_by_ends, rows, keys, n, key_ends, positions, window, block)


def _sees_of_rows(n: int, m: int, window: int, block: int | None = None) -> Tensor:
    """Returns which of n rows see which of m keys. The last n keys are those of the rows."""
    ones = torch.ones(n, m, dtype=torch.bool)
    sees = ones.tril(m - n) if window >= m else ones.tril(m - n).triu(m - n - window + 1)
    if block is not None:
        of = torch.arange(m) // block
        sees &= of == of[m - n:, None]
    return sees


def _sees_by_ends(rows: slice, keys: slice, n: int, key_ends: Tensor, positions: Tensor | None, window: int,
                  block: int | None) -> Tensor:
    """Returns which of these rows, n in all, see which of these keys: first those of the prefix, then those of the
    rows."""
    prefix = len(key_ends) - n
    row, begin = (torch.arange(m, device=key_ends.device) for m in (n, len(key_ends)))
    at = begin if positions is None else torch.cat([begin[:prefix], positions])
    row, own, begin, at = row[rows, None], at[prefix:][rows, None], begin[keys], at[keys]
    sees = (begin - prefix <= row) & (row < key_ends[keys]) & (own - at < window)
    return sees if block is None else sees & (own // block == at // block)


def _by_masks(query: Tensor, key: Tensor, value: Tensor, slices: list[tuple[int, int, int, int]], scale: float | None,
              window: int, block: int | None, key_ends: Tensor | None, positions: Tensor | None) -> Tensor:
    """Computes attention with a mask for each slice, or with one mask for a chunk whose sequences share rows."""
    n, out = query.shape[2], []
    for q0, q1, k0, k1 in slices if key_ends is None else [(0, n, 0, key.shape[2])]:
        mask = None
        if key_ends is not None:
            mask = _sees_by_ends(slice(0, n), slice(0, k1), n, key_ends, positions, window, block)
        elif q1 - q0 < k1 - k0 or min(window, block or window) < k1 - k0:
            mask = _sees_of_rows(q1 - q0, k1 - k0, window, block).to(query.device)
        out.append(F.scaled_dot_product_attention(query[:, :, q0:q1], key[:, :, k0:k1], value[:, :, k0:k1],
                                                  attn_mask=mask, is_causal=mask is None, scale=scale,
                                                  enable_gqa=True))
    return torch.cat(out, 2)


@dataclass
class _Flash:
    """PyTorch's kernel for CPUs, which cannot cap scores."""

    scale: float
    most = 1 << 62  # rows at a time

    @staticmethod
    def _mask(sees: _Sees, query: Tensor) -> dict[str, Any]:
        if isinstance(sees, bool):
            return {"is_causal": sees}
        mask = sees()
        return {"is_causal": False, "attn_mask": query.new_zeros(mask.shape).masked_fill_(~mask, float("-inf"))}

    def forward(self, query: Tensor, key: Tensor, value: Tensor, sees: _Sees) -> tuple[Tensor, Tensor]:
        run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, sums = run(*_as_wide(query, key, value), **self._mask(sees, query), scale=self.scale)
        return out[..., :value.shape[-1]], sums

    def backward(self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor,
                 sees: _Sees) -> list[Tensor]:
        run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        found = run(*_as_wide(grad, query, key, value, out), sums, 0.0, **self._mask(sees, query), scale=self.scale)
        return [x[..., :like.shape[-1]] for x, like in zip(found, (query, key, value))]


def _as_wide(*rows: Tensor) -> list[Tensor]:
    """Pads rows to the widest of them, because the kernel needs Q, K and V of one width."""
    most = max(x.shape[-1] for x in rows)
    return [x if x.shape[-1] == most else F.pad(x, (0, most - x.shape[-1])) for x in rows]


@dataclass
class _ByHand:
    """Computes scores of some rows at a time, on any device and with soft caps."""

    scale: float
    softcap: float | None
    most = _ROWS

    def _scores(self, query: Tensor, key: Tensor, sees: _Sees) -> tuple[Tensor, Tensor]:
        """Returns the scores of (1, heads of K, heads of Q for each, rows, keys), and their derivative through the soft
        cap."""
        n, heads = query.shape[2], key.shape[1]
        scores = (query.unflatten(1, (heads, -1)).flatten(2, 3) @ key.transpose(2, 3)).unflatten(2, (-1, n))
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * self.scale
        slope = torch.ones((), dtype=scores.dtype, device=scores.device)
        if self.softcap is not None:
            bent = torch.tanh(scores / self.softcap)
            scores, slope = bent * self.softcap, 1 - bent.square()
        if sees is not False:
            mask = torch.ones(n, n, dtype=torch.bool).tril() if sees is True else sees()
            scores = scores.masked_fill(~mask.to(scores.device), float("-inf"))
        return scores, slope

    def forward(self, query: Tensor, key: Tensor, value: Tensor, sees: _Sees) -> tuple[Tensor, Tensor]:
        scores, _ = self._scores(query, key, sees)
        out = scores.softmax(-1).to(value.dtype).flatten(2, 3) @ value
        return out.unflatten(2, scores.shape[2:4]).flatten(1, 2), scores.logsumexp(-1).flatten(1, 2)

    def backward(self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor,
                 sees: _Sees) -> list[Tensor]:
        scores, slope = self._scores(query, key, sees)
        heads, shape = (key.shape[1], -1), scores.shape[2:4]
        less = (grad * out).sum(-1, keepdim=True)
        query, grad, less = (x.unflatten(1, heads).flatten(2, 3) for x in (query, grad, less))
        probs = (scores - sums.unflatten(1, heads)[..., None]).exp().flatten(2, 3)
        found = probs * (grad @ value.transpose(2, 3) - less) * slope.expand_as(scores).flatten(2, 3) * self.scale
        probs, found = probs.to(value.dtype), found.to(value.dtype)
        of_query = (found @ key).unflatten(2, shape).flatten(1, 2)
        return [of_query, found.transpose(2, 3) @ query, probs.transpose(2, 3) @ grad]


def _attend(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, pieces: list[_Piece],
            kernel: _Flash | _ByHand) -> tuple[Tensor, Tensor]:
    """Returns attention's output and each row's log-sum-exp, piece by piece."""
    n, heads, real = query.shape[2], query.shape[1], torch.promote_types(query.dtype, torch.float32)
    out = value.new_zeros(1, n, heads, value.shape[-1]).transpose(1, 2)
    sums, filled = value.new_zeros(1, n, heads, dtype=real).transpose(1, 2), 0
    for rows, keys, sees in pieces:
        found, total = kernel.forward(query[:, :, rows], key[:, :, keys], value[:, :, keys], sees)
        if rows.start < filled:  # for these rows, `out` already has the keys before them
            found, total = _join(out[:, :, rows], sums[:, :, rows], found, total)
        out[:, :, rows], sums[:, :, rows], filled = found, total, rows.stop
    if sinks is None:
        return out, sums
    return _join(out, sums, out.new_zeros(()), sinks.to(real).reshape(1, -1, 1))


class _Attention(torch.autograd.Function):
    """Attention with its log-sums, or with those kept from an earlier pass. The backward needs only these two, Q, K and
    V, piece by piece."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, pieces: list[_Piece],
                kernel: _Flash | _ByHand, kept: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        out, sums = _attend(query, key, value, sinks, pieces, kernel) if kept is None else (x.detach() for x in kept)
        ctx.save_for_backward(query, key, value, sinks, out, sums)
        ctx.mark_non_differentiable(sums)
        ctx.pieces, ctx.kernel = pieces, kernel
        return out, sums

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
        query, key, value, sinks, out, sums = ctx.saved_tensors
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        totals = [torch.zeros_like(x, dtype=sums.dtype) for x in (query, key, value)]
        for rows, keys, sees in ctx.pieces:
            found = ctx.kernel.backward(grad[:, :, rows], query[:, :, rows], key[:, :, keys], value[:, :, keys],
                                        out[:, :, rows], sums[:, :, rows], sees)
            for total, at, x in zip(totals, (rows, keys, keys), found):
                total[:, :, at] += x
        of_sinks = None
        if sinks is not None:
            share = (sinks.to(sums.dtype).reshape(1, -1, 1) - sums).exp()
            of_sinks = -(share * (grad * out).sum(-1)).sum((0, 2)).to(sinks.dtype).reshape(sinks.shape)
        return *(total.to(x.dtype) for total, x in zip(totals, (query, key, value))), of_sinks, None, None, None


def _join(out: Tensor, sums: Tensor, other: Tensor, more: Tensor) -> tuple[Tensor, Tensor]:
    """Joins the results of rows for some keys with their results for other keys."""
    total = torch.logaddexp(sums, more)
    both = out * (sums - total).exp()[..., None] + other * (more - total).exp()[..., None]
    return both.to(out.dtype), total


def cross_entropy(logits: Tensor, inputs: Inputs) -> Tensor:
    """The default loss: takes what the pass returned and its inputs, and returns a weighted sum."""
    _check_tensor(logits, "logits")
    if not hasattr(inputs, "targets"):
        raise TypeError(f"inputs: wanted the Inputs of a pass, got {inputs!r:.99}")
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    loss = (F.cross_entropy(logits, inputs.targets, reduction="none") * inputs.weights).sum()
    if inputs.more is not None:
        rows, targets, weights = inputs.more
        loss = loss + (F.cross_entropy(logits[rows], targets, reduction="none") * weights).sum()
    return loss


# ----------------------------------------------------------------------------------------------------------------------
# The passes of a batch
# ----------------------------------------------------------------------------------------------------------------------


def unpad(input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
          ) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the sequences of a padded batch, and for each the tokens that are no targets: `sequences` and `ignored`
    of a step. attention_mask: required; 0 at padding. labels: the tokens themselves, or -100 if a token is no target;
    a prompt has -100 as well, so labels do not show what is padding."""
    _check_tensor(input_ids, "input_ids")
    if attention_mask is None:
        raise ValueError("attention_mask: wanted a tensor of 0 at padding and 1 at tokens, for input_ids and labels do "
                         "not show what is padding")
    ids = input_ids.cpu()
    wanted = ids if labels is None else labels
    for name, x in (("input_ids", ids), ("attention_mask", attention_mask), ("labels", wanted)):
        _check_tensor(x, name)
        if x.ndim != 2 or x.shape != ids.shape:
            raise ValueError(f"{name}: wanted rows of one length for each sequence, got shape {tuple(x.shape)} beside "
                             f"input_ids of {tuple(ids.shape)}")
    sequences, ignored = [], []
    for i, (row, mask, label) in enumerate(zip(ids, attention_mask.cpu() != 0, wanted.cpu())):
        tokens, label = row[mask], label[mask]
        sequences.append(tokens)
        ignored.append(label == -100)
        if (label != tokens)[~ignored[-1]].any():
            raise ValueError(f"labels[{i}]: labels that are not the tokens themselves or -100")
    return sequences, ignored


def _tokens_of(sequences: Sequence[Any], forward: Any, name: str = "sequences") -> list[np.ndarray]:
    """Returns the token numbers of each sequence. forward: may say for how many tokens the model has embeddings."""
    if getattr(sequences, "ndim", 1) == 2:
        raise ValueError(f"{name}: got one tensor of shape {tuple(sequences.shape)}, whose padding would be trained; "
                         "chunkflow.torch.unpad(input_ids, attention_mask, labels) takes it off")
    rows = [chunkflow._integers(s.cpu().numpy() if isinstance(s, Tensor) else s, f"{name}[{i}]")
            for i, s in enumerate(chunkflow._each(sequences, name, "the tokens of each sequence"))]
    n_words = getattr(forward, "n_words", None)
    for i, row in enumerate(rows):
        if row.size and row.min() < 0:
            raise ValueError(f"{name}[{i}]: wanted numbers of tokens, got {row.min()} at {row.argmin()}; what is no "
                             "target (labels of -100) is told by `ignored`")
        if row.size and n_words is not None and row.max() >= n_words:
            raise ValueError(f"{name}[{i}]: the model has embeddings of {n_words} tokens, and {row.max()} at "
                             f"{row.argmax()} has none")
    return rows


def _weights_of(weights: Any, n: int) -> np.ndarray:
    """Returns one number for each of n sequences."""
    given = weights.tolist() if isinstance(weights, (Tensor, np.ndarray)) else weights
    if not isinstance(given, (list, tuple)) or len(given) != n or not all(isinstance(x, (int, float, np.number))
                                                                          for x in given):
        raise ValueError(f"weights: wanted one number for each of {n} sequences; which tokens count is said by "
                         "`ignored`, and what each counts by a loss of your own")
    found = np.array([float(x) for x in given])
    if not np.isfinite(found).all():
        at = int(np.argmin(np.isfinite(found)))
        raise ValueError(f"weights[{at}]: wanted a finite number, got {found[at]}")
    return found


def _on_cpu(ignored: Sequence[Any] | None) -> list[Any] | None:
    """Returns masks that NumPy can read."""
    return ignored if ignored is None else [
        mask.cpu() if isinstance(mask, Tensor) else mask
        for mask in chunkflow._each(ignored, "ignored", "None or a mask for each sequence")]


def _check_options(forward: Any, loss: Any, seed: Any, shared_mean: Any, outputs: Any) -> None:
    """What Batch and Step have in common."""
    if forward is not None:  # a pipeline has its own
        chunkflow._callable(forward, "forward")
    chunkflow._callable(loss, "loss")
    chunkflow._whole(seed, "seed", 0, 2**64 - 1)
    chunkflow._flag(shared_mean, "shared_mean")
    if outputs is not None:
        chunkflow._flag(outputs, "outputs")


def _check_module(module: Any, forward: Any) -> None:
    """Checks that the trained parameters of a module are in the model that forward runs, if forward says which. Prompts
    of peft are in the model around it, which forward does not run."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: wanted a torch.nn.Module, got {module!r:.99}")
    runs = getattr(forward, "outer", None)
    if not isinstance(runs, nn.Module):
        return
    reached = {id(p) for p in runs.parameters()}
    missed = [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in reached]
    if missed:
        raise ValueError(f"module: {len(missed)} of its trained parameters, such as {missed[0]}, are not in the model "
                         "that forward runs: make forward of the same module")


class Batch:
    """The passes of one batch on one stage. Gradients are added to those of the parameters, as backward() does."""

    @chunkflow._renamed
    def __init__(self, forward: Forward, plan: chunkflow.Plan, sequences: Sequence[Any], device: Any = "cpu", *,
                 weights: Any = None, ignored: Sequence[Any] | None = None, shared_mean: bool = False, seed: int = 0,
                 loss: Callable[[Tensor, Inputs], Tensor] = cross_entropy, cp_groups: Mapping[int, Any] | None = None,
                 outputs: bool | None = None):
        """weights: the weight of the targets of each sequence (chunkflow.loss_weights; default: the mean over all
        targets). ignored: for each sequence None, or a mask that is True at tokens that are no targets, such as a
        prompt's. A token that sequences share has the sum of their weights or, with `shared_mean`, the mean. cp_groups:
        if ranks share sequences, the process group of this rank for each number of ranks. outputs: whether the forward
        of a dropped chunk keeps attention's outputs, so that its replay does not compute attention. By default it does
        so for attention that can: on CPUs, and with soft caps or sinks. True refuses other attention by name."""
        sequences = _tokens_of(sequences, forward)
        lengths = np.array([len(s) for s in sequences], np.int64)
        chunkflow._pointer(plan, chunkflow.Plan, "plan")
        if len(sequences) != plan.n_sequences:
            raise ValueError(f"sequences: wanted the plan's {plan.n_sequences}, got {len(sequences)}")
        _check_options(forward, loss, seed, shared_mean, outputs)
        if not isinstance(cp_groups, (Mapping, type(None))):
            raise TypeError(f"cp_groups: wanted process groups by numbers of ranks, got {cp_groups!r:.99}")
        try:
            torch.device(device)
        except (RuntimeError, TypeError, ValueError, OverflowError) as why:
            raise TypeError(f"device: {why}, got {device!r:.99}") from None
        self.cp_groups = cp_groups or {}
        for n in set(plan.chains["cp"].tolist()) - {0, *self.cp_groups}:
            raise ValueError(f"the plan has cp groups of {n} ranks, and cp_groups has no process group for them")
        self.forward, self.plan, self.device, self.seed, self.loss_of = forward, plan, device, seed, loss
        self.ignored, self.shared_mean = _on_cpu(ignored), shared_mean
        self.lengths, self.starts = lengths.tolist(), np.cumsum(lengths) - lengths
        self.tokens = np.concatenate([*sequences, np.zeros(1, np.int64)])  # one more, for padding to read
        mean = chunkflow.loss_weights(lengths, ignored=self.ignored)
        self.has_targets = bool(mean.any())
        self.weights = mean if weights is None else _weights_of(weights, len(lengths))
        self.kept: dict[int, tuple[Tensor, list[Tensor], list[Tensor | Border]]] = {}
        self.keeps_outputs, self.outputs = outputs, {}  # of each dropped chunk, for its replay
        self.loss = torch.zeros((), dtype=torch.float64)
        # For each chain, what its chunks have handed on so far: rows, or a snapshot after a number of rows.
        self.rows: dict[int, list[Tensor | dict[int, Tensor]]] = {}
        self.ends: dict[int, int] = {}  # how many rows that is
        self.sums: dict[tuple[int, int], Tensor | dict[int, Tensor]] = {}  # of each tensor of rows, its gradient

    def inputs(self, chunk: int, keep: bool = True, prefix: Sequence[Tensor] = (),
               capacity: dict[str, int] | None = None) -> Inputs:
        """Returns the inputs of a pass for a chunk; an idle chunk has a row of padding. capacity: see
        cf_metadata_desc."""
        chunk = chunkflow._at(chunk, self.plan.n_chunks, "chunk")
        prefix = chunkflow._each(prefix, "prefix", "the tensors that earlier chunks handed on")
        keep = bool(chunkflow._flag(keep, "keep"))
        if capacity is None and self.plan.chunks["n_slices"][chunk] == 0:
            capacity = {"rows": 1, "n_seqs": 1}
        is_tree = self.plan.order is not None
        about = self.plan.metadata(chunk, capacity=capacity, weights=self.weights, ignored=self.ignored,
                                   shared_mean=self.shared_mean,
                                   wants_key_ends=is_tree)
        first = self.starts[about.sequence_ids]
        rows = (self.tokens[first + about.position_ids], about.position_ids.astype(np.int64),
                self.tokens[first + np.maximum(about.target_positions, 0)], about.loss_weights,
                about.cu_seqlens_q, about.cu_seqlens_k)
        tokens, positions, targets, weights, cu_q, cu_k = (torch.from_numpy(x).to(self.device) for x in rows)
        inputs = Inputs(chunk, keep, tokens, positions, targets, weights, cu_q, cu_k, about.max_seqlen_q,
                        about.max_seqlen_k, list(prefix), chunk_size=self.plan.chunk_size, batch=self)
        chain = int(self.plan.chunks["chain"][chunk])
        if chain >= 0 and self.plan.chains["cp"][chain] > 0:
            inputs.cp_group = CPGroup(self.plan, chunk, self.cp_groups[int(self.plan.chains["cp"][chain])], self.device)
        if is_tree:
            inputs.key_ends = torch.from_numpy(about.key_ends).to(self.device)
            first = int(self.plan.chunks["prefix"][chunk])
            inputs.joins, inputs.forks = self._joins(chunk), [n - first for n in self._depths(chunk)]
        if about.n_extra > 0:
            more = about.extra_rows, self.tokens[self.starts[about.extra_sequences] + about.extra_targets], \
                about.extra_weights
            inputs.more = tuple(torch.from_numpy(x).to(self.device) for x in more)
        return inputs

    def _runs(self, chunk: int) -> Iterator[tuple[int, int, int, int]]:
        """Yields (sequence, begin, end, row) for each sequence of each slice. Its tokens from begin to end - 1 are in
        the rows from `row` on, and each has a next token."""
        first = int(self.plan.chunks["first_slice"][chunk])
        for at, piece in enumerate(self.plan.slices_of(chunk), first):
            begin, length, row = (int(piece[name]) for name in ("begin", "length", "offset"))
            for s in self.plan.sequences_of(at).tolist():
                yield s, begin, min(begin + length, self.lengths[s] - 1), row

    def targets_by_sequence(self, chunk: int) -> Targets:
        """Returns every target of a chunk with its sequence."""
        chunk, found = chunkflow._at(chunk, self.plan.n_chunks, "chunk"), [np.zeros((3, 0), np.int64)]
        for s, begin, end, row in self._runs(chunk):
            at = np.arange(begin, end)
            if self.ignored is not None and self.ignored[s] is not None:
                at = at[~np.asarray(self.ignored[s], np.bool_)[begin + 1:end + 1]]
            found.append(np.stack([at - begin + row, np.full_like(at, s), at]))
        rows, sequences, at = np.concatenate(found, 1)
        made = rows, sequences, at, self.tokens[self.starts[sequences] + at + 1], self.weights[sequences]
        return Targets(*(torch.from_numpy(x).to(self.device) for x in made))

    def about(self, chunk: int) -> tuple[int, int, int, int]:
        """Returns the chain that a chunk belongs to (-1: none), the chunk's place in it, and which of the state's rows
        are the chunk's own."""
        chunk = chunkflow._at(chunk, self.plan.n_chunks, "chunk")
        chain, index = (int(self.plan.chunks[name][chunk]) for name in ("chain", "index"))
        rows = int(self.plan.chunks["state"][chunk])
        if rows == 0:  # also in a leaf of a tree
            return -1, 0, 0, 0
        begin = int(self.plan.chunks["prefix"][chunk]) - self._first(chain)
        return chain, index, begin, begin + rows

    def _first(self, chain: int) -> int:
        """Returns the position in its sequences at which a chain begins: 0, except in trees."""
        return int(self.plan.chunks["prefix"][self.plan.chains["first_chunk"][chain]])

    def path(self, chunk: int) -> list[tuple[int, int]]:
        """Returns the chains whose rows are a chunk's prefix, from the root of its tree down, and how many rows of
        each."""
        chunk = chunkflow._at(chunk, self.plan.n_chunks, "chunk")
        chain, rows, parts = int(self.plan.chunks["chain"][chunk]), int(self.plan.chunks["prefix"][chunk]), []
        while rows > 0:
            first = self._first(chain)
            if rows > first:
                parts.insert(0, (chain, rows - first))
            chain, rows = self.plan.chain_above(chain), min(rows, first)
        return parts

    def _joins(self, chunk: int) -> list[int]:
        """Returns the numbers of rows of a chunk's path after which its slices continue; in a chain only all rows."""
        if self.plan.order is None:
            return [n for _, n in self.path(chunk)]
        begin, end = (int(self.plan.chunks["first_slice"][chunk] + n) for n in (0, self.plan.chunks["n_slices"][chunk]))
        slices = self.plan.slices[begin:end]
        return sorted(set(slices["begin"][slices["up"] < begin].tolist()) - {0})

    @functools.cached_property
    def _joined(self) -> dict[int, list[int]]:
        """Returns all joins on each chain, in rows of its path. In a tree they may be at any row."""
        found: dict[int, set[int]] = {}
        for chunk in range(self.plan.n_chunks):
            for n in self._joins(chunk):
                found.setdefault(self._chain_at(chunk, n), set()).add(n)
        return {chain: sorted(places) for chain, places in found.items()}

    def _chain_at(self, chunk: int, n: int) -> int:
        """Returns the chain that has the last of the first n rows of a chunk's path."""
        for chain, rows in self.path(chunk):
            if n <= rows:
                break
            n -= rows
        return chain

    def _depths(self, chunk: int) -> list[int]:
        """Returns the numbers of rows, from the start of a chunk's path, after which its borders are. In a chain that
        is its last row; in trees, each row that other rows continue."""
        chain, _, begin, end = self.about(chunk)
        first = self._first(chain) if chain >= 0 else 0
        if self.plan.order is None:
            return [first + end]
        return [n for n in self._joined.get(chain, ()) if begin < n - first <= end]

    def _prefix(self, chunk: int, grad: bool) -> list[Tensor]:
        """Returns what comes before a chunk's rows: the rows of all chains above, and the states from which its slices
        continue."""
        path, found = self.path(chunk), []
        for i, places in enumerate(zip(*(self.rows[chain] for chain, _ in path))):
            if isinstance(places[-1], dict):
                states = [self.rows[self._chain_at(chunk, n)][i].get(n) for n in self._joins(chunk)]
                if any(x is None for x in states):
                    raise ValueError(f"chunk {chunk} goes on from one that handed on no state")
                x = states[0] if self.plan.order is None else torch.stack(states)
            else:
                parts = [rows[..., :n, :] for rows, (_, n) in zip(places, path)]
                x = parts[0] if len(parts) == 1 else torch.cat(parts, -2)
            found.append(x.detach().requires_grad_(grad))
        return found

    def _forward(self, chunk: int, keep: bool, grad: bool) -> tuple[Tensor | None, Inputs, list[Tensor | Border]]:
        """Runs the module on a chunk, and hands on K and V of its rows. Returns what the module returned, its inputs,
        and those rows."""
        chain, _, begin, end = self.about(chunk)
        inputs = self.inputs(chunk, keep, self._prefix(chunk, grad))
        with _seeded(self.device, chunkflow.lib.cf_chunk_seed(self.seed, chunk, 0)), torch.set_grad_enabled(grad):
            output, own = self.forward(inputs)  # a replay drops out what F did
        if inputs.cp_group is not None and inputs.cp_group.calls == 0:
            raise ValueError(f"chunk {chunk} is of a cp group, and its forward did not ask CPGroup.rows for the rows "
                             "of the others")
        if chain < 0:
            return output, inputs, []
        own = [x if isinstance(x, Border) else x[..., :end - begin, :] for x in own]  # its tail has other sequences
        if self.ends.get(chain, 0) == begin:
            self._hand_on(chunk, own, end)
        else:
            self._check_replay(chunk, own)
        return output, inputs, own

    def _one_by_one(self, states: Any) -> Any:
        """Returns the states of a border, or their gradients, one for each place of the border."""
        return [states] if self.plan.order is None else states

    def _check_replay(self, chunk: int, own: list[Tensor | Border]) -> None:
        """Refuses a replay that hands on rows or borders that differ from its forward's. Later chunks have used the
        forward's, so their gradients would belong to another function. Kernels that round in another order may send
        single rows to other experts; so in float32, differences below 1 % are allowed."""
        off: Any = 0.0
        total: Any = 0.0
        eps = 0.0
        chain, _, begin, end = self.about(chunk)
        pairs: list[tuple[Tensor, Tensor]] = []
        depths = self._depths(chunk)
        for was, x in zip(self.rows[chain], own):
            pairs += zip([was[n] for n in depths], self._one_by_one(x.state)) if isinstance(x, Border) else \
                [(was[..., begin:end, :], x)]
        for was, x in pairs:
            eps = max(eps, torch.finfo(x.dtype).eps)
            was, x = (y.detach().to(torch.promote_types(y.dtype, torch.float32)) for y in (was, x))
            off, total = off + (x - was).square().sum(), total + was.square().sum()
        if float(off) > (eps if eps < 1e-12 else max(eps, 1e-4)) * float(total):
            raise ValueError(f"the replay of chunk {chunk} hands on other rows than its forward: {_UNLIKE}")

    def _hand_on(self, chunk: int, own: list[Tensor | Border], end: int) -> None:
        chain = int(self.plan.chunks["chain"][chunk])
        held = self.rows.setdefault(chain, [{} if isinstance(x, Border) else x[..., :0, :].detach() for x in own])
        depths = self._depths(chunk)
        for i, x in enumerate(own):
            if isinstance(x, Border):
                held[i].update(zip(depths, self._one_by_one(x.state.detach())))
            else:
                held[i] = torch.cat([held[i], x.detach()], -2)
        self.ends[chain] = end

    def run_forward(self, chunk: int, keep: bool) -> None:
        """Runs F or R. Without keep, only hands on K and V: the loss comes from the pass that is kept."""
        chunk, keep = chunkflow._at(chunk, self.plan.n_chunks, "chunk"), bool(chunkflow._flag(keep, "keep"))
        outputs = self.outputs.pop(chunk, None)
        if outputs is not None:
            outputs.forward = False
        elif not keep and self.keeps_outputs is not False:
            outputs = self.outputs[chunk] = _Outputs(self.keeps_outputs is True)
        with _holding(outputs):
            output, inputs, own = self._forward(chunk, keep, keep)
        if keep:
            with torch.enable_grad():
                loss = self.loss_of(output, inputs)
            if not isinstance(loss, Tensor) or loss.ndim > 0:
                got = tuple(loss.shape) if isinstance(loss, Tensor) else f"{loss!r:.99}"
                raise ValueError("loss: wanted one number, the sum over the pass's targets of x.weights times each "
                                 f"one's loss, got {got}")
            self.loss += loss.detach().to("cpu", torch.float64)
            self.kept[chunk] = loss, inputs.prefix, own

    def run_backward(self, chunk: int) -> None:
        """Runs B: from the loss, and the gradients that later chunks found for this chunk's rows, to weights and
        prefix."""
        chunk = chunkflow._at(chunk, self.plan.n_chunks, "chunk")
        if chunk not in self.kept:
            raise ValueError(f"chunk: {chunk} has no forward that kept its activations")
        chain, index, begin, end = self.about(chunk)
        loss, prefix, own = self.kept.pop(chunk)
        roots, depths = [(loss, None)] if loss.requires_grad else [], self._depths(chunk)
        for i, x in enumerate(own):
            total = self.sums.get((chain, i))
            if total is None:  # no later chunk has found anything
                continue
            pairs = [(y, total.pop(n, None)) for n, y in zip(depths, self._one_by_one(x.state))] \
                if isinstance(x, Border) else [(x, total[..., begin:end, :])]
            roots += [(y, found.to(y.dtype)) for y, found in pairs if y.requires_grad and found is not None]
        for i, row in enumerate(prefix):
            if row.requires_grad:
                row.register_post_accumulate_grad_hook(functools.partial(self._hand_back, chunk, i))
        if roots:
            torch.autograd.backward(*map(list, zip(*roots)))
        if own and index == 0:
            del self.rows[chain], self.ends[chain]
            for i in range(len(own)):
                self.sums.pop((chain, i), None)

    def _hand_back(self, chunk: int, i: int, row: Tensor) -> None:
        """Adds the gradients that a backward found for one tensor of its prefix to the sums so far, and frees them.
        Gradients of a border go to where its states are."""
        at, path = 0, self.path(chunk)
        if isinstance(self.rows[path[-1][0]][i], dict):
            for n, found in zip(self._joins(chunk), self._one_by_one(row.grad)):
                total = self._sum_of(self._chain_at(chunk, n), i)
                total[n] = total[n] + found if n in total else found
            path = []
        for chain, n in path:
            self._sum_of(chain, i)[..., :n, :] += row.grad[..., at:at + n, :]
            at += n
        row.grad = None

    def _sum_of(self, chain: int, i: int) -> Tensor | dict[int, Tensor]:
        """Returns the gradients found so far for one tensor of a chain's rows. There are none before the first backward
        that uses the rows: that of the chain's last chunk, or of a chunk below it."""
        if (chain, i) not in self.sums:
            x = self.rows[chain][i]
            self.sums[chain, i] = {} if isinstance(x, dict) else \
                torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
        return self.sums[chain, i]

    def log_probs(self, rank: int = 0) -> list[Tensor]:
        """Returns the log-probabilities of each sequence's tokens from the second on, without gradients. They are for
        old and reference policies, and for losses that need them first because they are not linear in a sequence's
        weight. Sequences of other ranks have zeros."""
        rank = chunkflow._at(rank, self.plan.n_ranks, "rank")
        plan, tokens = self.plan, torch.from_numpy(self.tokens).to(self.device)
        found = [torch.zeros(max(n - 1, 0), dtype=torch.float64, device=self.device) for n in self.lengths]
        for chunk in range(rank * plan.chunks_per_rank, (rank + 1) * plan.chunks_per_rank):
            logits, _, _ = self._forward(chunk, True, False)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(1)
            for s, begin, end, row in self._runs(chunk):
                next_ones = tokens[self.starts[s] + begin + 1:self.starts[s] + end + 1, None]
                found[s][begin:end] = logits[row:row + len(next_ones)].gather(1, next_ones)[:, 0].double()
            above, chain = set(), int(plan.chunks["chain"][chunk])
            while chain >= 0:  # all other chains are complete: in a tree, parents come first, subtree by subtree
                above.add(chain)
                chain = plan.chain_above(chain)
            self.rows = {g: rows for g, rows in self.rows.items() if g in above}
        self.rows, self.ends = {}, {}
        return found

    def run(self, schedule: chunkflow.Schedule, idle: bool = False, before_last: Callable[[], None] | None = None
            ) -> Tensor:
        """Runs all passes of a schedule of one stage, and returns the loss of its chunks. Idle chunks are left out
        unless requested. before_last is called before the last backward."""
        chunkflow._pointer(schedule, chunkflow.Schedule, "schedule")
        chunkflow._flag(idle, "idle")
        if before_last is not None:
            chunkflow._callable(before_last, "before_last")
        if schedule.n_stages != 1 or schedule.n_virtual != 1:
            raise ValueError(f"schedule: wanted one stage, got {schedule.n_stages} of {schedule.n_virtual}")
        try:
            self._run(schedule, idle, before_last)
        except BaseException:  # frees what passes keep at once, and not with the last reference to the batch
            for held in (self.kept, self.outputs, self.rows, self.ends, self.sums):
                held.clear()
            raise
        return self.loss

    def _run(self, schedule: chunkflow.Schedule, idle: bool, before_last: Callable[[], None] | None) -> None:
        for step in schedule.steps(0, self.seed).steps:
            name, chunk = chunkflow.PASSES[step["action"]["pass"]], int(step["action"]["chunk"])
            if not idle and self.plan.chunks["n_slices"][chunk] == 0:
                continue
            if name in "FR":
                self.run_forward(chunk, bool(step["action"]["keep"]))
            elif name == "B":
                if before_last is not None and step["last_backward"]:
                    before_last()
                self.run_backward(chunk)
            else:
                raise ValueError(f"a pass {name}: autograd runs whole backwards only; plan without split_backward")


def _digest(arrays: Iterable[np.ndarray]) -> int:
    """Returns a hash of arrays and their lengths."""
    made = hashlib.blake2b(digest_size=7)
    for x in arrays:
        made.update(len(x).to_bytes(8, "little") + x.tobytes())
    return int.from_bytes(made.digest(), "little")


@contextlib.contextmanager
def _seeded(device: Any, seed: int) -> Iterator[None]:
    """Draws random numbers with this seed inside; outside, the generators are as before."""
    device = torch.device(device)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


# ----------------------------------------------------------------------------------------------------------------------
# A step, on one rank or several
# ----------------------------------------------------------------------------------------------------------------------


class Step:
    """A callable that adds a batch's gradients to those of a module's parameters, and returns the loss of the batch."""

    @chunkflow._renamed
    def __init__(self, module: nn.Module, forward: Forward, *, chunk_size: int, k: int = 1, seed: int = 0,
                 loss: Callable[[Tensor, Inputs],
                                Tensor] = cross_entropy, group: Any = None, min_shared_prefix: int = 0,
                 shared_mean: bool = False, outputs: bool | None = None, **options: Any):
        """group: the ranks over which chunks are distributed (default: all ranks). min_shared_prefix: computes common
        first tokens of sequences once if there are at least this many (0: never). Equal tokens must mean the same: no
        images, and no routes that were recorded for one of them. shared_mean, outputs: see Batch. The other options are
        those of chunkflow.pack. With lockstep=1, and with max_cp=2 or more, all ranks run the same kinds of passes in
        the same order. A module sharded by fully_shard then gathers and frees its weights in every pass, as it was set
        up to. A pass that keeps nothing may leave out the head, so the head must not be sharded by itself."""
        _check_module(module, chunkflow._callable(forward, "forward"))
        _check_options(forward, loss, seed, shared_mean, outputs)
        for name, n, least in (("chunk_size", chunk_size, 1), ("k", k, 0), ("min_shared_prefix", min_shared_prefix, 0)):
            if isinstance(n, bool):
                raise TypeError(f"{name}: wanted a whole number, got {n}")
            chunkflow._whole(n, name, least)
        for name in {"n_ranks", "shared_prefixes", "no_copies"} & set(options):
            raise TypeError(f"{name}: is found by Step itself, for each batch")
        chunkflow._describe("cf_pack_desc", {"chunk_size": chunk_size, **options})
        self.module, self.forward, self.chunk_size, self.k, self.seed = module, forward, chunk_size, k, seed
        self.loss, self.group, self.options = loss, group, options
        self.min_shared_prefix, self.shared_mean = min_shared_prefix, shared_mean
        self.outputs = outputs
        self.in_step = bool(options.get("lockstep")) or (options.get("max_cp") or 0) > 1
        self.cp_groups: dict[int, Any] = {}
        self.n_ranks, self.rank, self.is_compared = 1, 0, False
        if dist.is_initialized():
            self.n_ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)

    @chunkflow._renamed
    def plan(self, lengths: Sequence[Any], shared_prefixes: Any = None) -> tuple[chunkflow.Plan, chunkflow.Schedule]:
        """Returns the plan of a batch, and this rank's order of its passes. lengths: lengths, or the sequences
        themselves, in which a Step with min_shared_prefix finds common prefixes. If it gets only lengths, it needs
        shared_prefixes (see pack)."""
        given = chunkflow._each(lengths, "lengths", "lengths, or the tokens of each sequence")
        if any(getattr(x, "ndim", int(isinstance(x, (list, tuple)))) > 0 for x in given):
            sequences = _tokens_of(given, self.forward, "lengths")
            return self._plan([len(s) for s in sequences], self._shared(sequences, shared_prefixes))
        if shared_prefixes is None and self.min_shared_prefix > 0:
            raise ValueError("lengths: a Step with min_shared_prefix plans sequences, not their lengths alone: "
                             "step.plan(sequences), or give shared_prefixes")
        return self._plan(given, shared_prefixes)

    def _shared(self, sequences: list[np.ndarray], shared_prefixes: Any) -> Any:
        found = shared_prefixes is None and self.min_shared_prefix > 0
        return chunkflow.shared_prefixes_of_tokens(sequences) if found else shared_prefixes

    def _plan(self, lengths: Sequence[int], shared_prefixes: Any) -> tuple[chunkflow.Plan, chunkflow.Schedule]:
        options = self.options
        if shared_prefixes is not None:
            options = {**options, "shared_prefixes": shared_prefixes, "min_shared_prefix": self.min_shared_prefix,
                       "no_copies": self.shared_mean}
        plan = chunkflow.pack(lengths, self.chunk_size, n_ranks=self.n_ranks, **options)
        if self.in_step:
            return plan, plan.lockstep_schedule(plan.lockstep_plan(options.get("cost")).schedule(k=self.k), self.rank)
        return plan, plan.schedule(k=self.k, rank=self.rank)

    def _summary(self, plan: chunkflow.Plan, sequences: list[np.ndarray], ignored: Sequence[Any] | None, weights: Any
                 ) -> list[int]:
        """Returns numbers that are equal on all ranks if the batches are. They are counts, and hashes of tokens,
        targets, plan and, in the first batch, weights."""
        masks = [None] * len(sequences) if ignored is None else _on_cpu(ignored)
        masks = (np.zeros(len(s), np.bool_) if m is None else chunkflow._mask(m, i).ravel()
                 for i, (s, m) in enumerate(zip(sequences, masks)))
        of_targets = [] if weights is None else [_weights_of(weights, len(sequences))]
        options = np.array([self.shared_mean, self.k if self.in_step else 0])
        columns = (table[name] for table in (plan.slices, plan.chunks) if table is not None
                   for name in table.dtype.names)
        return [len(sequences), sum(map(len, sequences)), _digest(iter(sequences)), _digest((*of_targets, *masks)),
                _digest((options, *columns)), 0 if self.is_compared else self._of_weights()]

    @property
    def _device(self) -> torch.device:
        return next((p.device for p in self.module.parameters() if not p.is_meta), torch.device("cpu"))

    def _shared_parameters(self) -> list[nn.Parameter]:
        """Returns the parameters that are equal on all ranks, without those that DistributedDataParallel is told to
        ignore, and without those on the meta device, which have no numbers."""
        is_ddp = isinstance(self.module, nn.parallel.DistributedDataParallel)
        module = self.module.module if is_ddp else self.module
        own = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        return [p for name, p in module.named_parameters() if name not in own and not p.is_meta]

    def _of_weights(self) -> int:
        """Returns a hash of some numbers of each shared parameter; 0 if ranks have different parts of them."""
        parameters = [p.detach() for p in self._shared_parameters()]
        if any(hasattr(p, "full_tensor") for p in parameters):
            return 0
        some = (p.flatten()[::p.numel() // 4096 + 1].contiguous().view(torch.uint8).cpu().numpy() for p in parameters)
        return _digest(some)

    def _compare_ranks(self, own: list[int]) -> None:
        """Refuses, on all ranks alike, a batch that differs between ranks. own: the summary of this rank's batch, or
        fewer numbers if this rank has already refused it."""
        own = own + [-1] * (6 - len(own))
        mine = torch.tensor(own, dtype=torch.int64, device=self._device)
        found = [torch.empty_like(mine) for _ in range(self.n_ranks)]
        dist.all_gather(found, mine, group=self.group)
        first, *others = (x.tolist() for x in found)
        for rank, other in enumerate(others, 1):
            if -1 in first + other:
                raise ValueError(f"sequences: rank {rank if -1 in other else 0} has refused its batch")
            if first[:3] != other[:3]:
                raise ValueError(f"sequences: rank 0 has {first[0]} of {first[1]} tokens, and rank {rank} others: "
                                 f"{other[0]} of {other[1]} tokens. Every rank gives the whole batch, and runs its own "
                                 "chunks of it: leave the sampler out, or gather what it has dealt out")
            if 0 != first[5] != other[5] != 0:
                raise ValueError(f"module: rank {rank} begins with other weights than rank 0: on every rank load the "
                                 "same ones, or call torch.manual_seed with the same seed before the model is made; "
                                 "DistributedDataParallel copies rank 0's")
            if first[:5] != other[:5]:
                what = "ignored or weights" if first[3] != other[3] else "Step's options"
                raise ValueError(f"{what}: on rank {rank} not what rank 0 has; every rank gives the same")
        self.is_compared = True

    def _check_training(self) -> None:
        """Refuses types and hooks that would make gradients wrong."""
        kind = self._device.type
        cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        # Without autocast, gradients may also pass through frozen weights, in their type.
        types = {cast, *(p.dtype for p in self.module.parameters() if p.requires_grad or cast is None)}
        types |= {m._get_fsdp_state()._mp_policy.param_dtype for m in self._sharded()}
        if torch.float16 in types:
            raise TypeError("module: trains in float16, whose losses must be scaled before each backward, which runs "
                            "inside the step: use bfloat16, as weights or by torch.autocast")
        for name, p in self.module.named_parameters():
            if p.requires_grad and getattr(p, "_post_accumulate_grad_hooks", None) and not hasattr(p, "full_tensor"):
                raise ValueError(f"module: {name} has a hook by register_post_accumulate_grad_hook, which would run "
                                 "after each chunk with a part of the gradient: remove it, and do its work after the "
                                 "step")

    def _sharded(self) -> list[Any]:
        """Returns the modules that fully_shard has sharded, the root first."""
        return [m for m in self.module.modules() if isinstance(m, FSDPModule)]

    def _form_cp_groups(self, plan: chunkflow.Plan) -> None:
        """Makes the process groups that a plan needs and earlier batches did not. All ranks call it at the same
        time."""
        for n in sorted(set(plan.chains["cp"].tolist()) - {0, *self.cp_groups}):
            first = self.rank - self.rank % n
            ranks = dist.get_process_group_ranks(self.group or dist.group.WORLD)[first:first + n]
            self.cp_groups[n] = dist.new_group(ranks, use_local_synchronization=True)

    def _batch(self, sequences: Sequence[Any], ignored: Sequence[Any] | None = None, weights: Any = None,
               shared_prefixes: Any = None, trains: bool = False) -> tuple[chunkflow.Plan, chunkflow.Schedule, Batch]:
        try:
            if trains:
                self._check_training()
            sequences = _tokens_of(sequences, self.forward)
            plan, schedule = self._plan([len(s) for s in sequences], self._shared(sequences, shared_prefixes))
            summary = self._summary(plan, sequences, ignored, weights) if self.n_ranks > 1 else []
        except Exception:
            if self.n_ranks > 1:
                with contextlib.suppress(ValueError):  # the other ranks learn of the error, and do not wait
                    self._compare_ranks([])
            raise
        if self.n_ranks > 1:
            self._compare_ranks(summary)
        self._form_cp_groups(plan)
        return plan, schedule, Batch(self.forward, plan, sequences, self._device, weights=weights, ignored=ignored,
                                     shared_mean=self.shared_mean, seed=self.seed, loss=self.loss,
                                     cp_groups=self.cp_groups, outputs=self.outputs)

    @chunkflow._renamed
    def log_probs(self, sequences: Sequence[Any], shared_prefixes: Any = None) -> list[Tensor]:
        """See Batch.log_probs. Returns all sequences, on every rank."""
        _, _, batch = self._batch(sequences, shared_prefixes=shared_prefixes)
        found = batch.log_probs(self.rank)
        for x in found if self.n_ranks > 1 else []:
            dist.all_reduce(x, group=self.group)
        return found

    @chunkflow._renamed
    def __call__(self, sequences: Sequence[Any], ignored: Sequence[Any] | None = None, weights: Any = None,
                 shared_prefixes: Any = None) -> float:
        """ignored and weights: see Batch. shared_prefixes: see chunkflow.pack; used instead of comparing tokens. The
        seed of dropout grows by one for each batch. Without targets the loss is 0.0, with a warning."""
        if not torch.is_grad_enabled():
            raise RuntimeError("a step under torch.no_grad() or torch.inference_mode() has no gradients; "
                               "step.log_probs(sequences) runs forwards alone")
        plan, schedule, batch = self._batch(sequences, ignored, weights, shared_prefixes, True)
        if not batch.has_targets:
            warnings.warn("no token of this batch is a target: its loss is 0.0, and it adds nothing to gradients",
                          stacklevel=3)
        if plan.n_chunks == 0:
            return 0.0
        device = batch.device
        self.seed += 1
        if sharded := self._sharded():
            loss = self._run_sharded(batch, schedule, sharded)
        elif self.n_ranks > 1:
            loss = self._run_summed(batch, schedule)
        else:
            loss = batch.run(schedule)
        if self.n_ranks > 1:
            loss = loss.to(device)
            dist.all_reduce(loss, group=self.group)
        return float(loss)

    def _run_summed(self, batch: Batch, schedule: chunkflow.Schedule) -> Tensor:
        """Sums gradients once a step. A rank whose chunks are all idle runs nothing, and adds nothing."""
        trained = [p for p in self._shared_parameters() if p.requires_grad]
        before = [p.grad for p in trained]  # already summed, or from something else, so not to be summed again
        for p in trained:
            p.grad = None
        loss = batch.run(schedule)
        for p in trained:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        for work in [dist.all_reduce(p.grad, group=self.group, async_op=True) for p in trained]:
            work.wait()
        for p, grad in zip(trained, before):
            if grad is not None:
                p.grad += grad
        return loss

    def _run_sharded(self, batch: Batch, schedule: chunkflow.Schedule, sharded: list[Any]) -> Tensor:
        """Reduces gradients once, after the last backward. Ranks run different numbers of passes in different orders,
        and not all use every parameter. So without lockstep all weights are gathered before the step, and nothing is
        gathered during it."""
        root = sharded[0]
        with _own_settings(sharded):
            for m in sharded:
                m.set_gradient_divide_factor(1.0)
                if hasattr(m, "set_force_sum_reduction_for_comms"):  # gloo cannot multiply while it sums
                    m.set_force_sum_reduction_for_comms(True)
            if not self.in_step:
                root.set_reshard_after_forward(False)
                root.set_reshard_after_backward(False)
                for m in sharded:
                    m.unshard()
            root.set_requires_gradient_sync(False)
            if hasattr(root, "finalize_backward"):
                root.set_reduce_scatter_unused_params(True)
                root.set_manual_backward_finalization(True)
                loss = batch.run(schedule, idle=True)
                root.set_requires_gradient_sync(True)
                root.finalize_backward()
            else:  # before PyTorch 2.15, where all ranks must use the same parameters
                loss = batch.run(schedule, idle=True, before_last=lambda: root.set_requires_gradient_sync(True))
        return loss


_SETTINGS = ("gradient_divide_factor", "force_sum_reduction_for_comms", "reduce_grads", "all_reduce_grads",
             "post_forward_mesh_info", "reshard_after_backward", "reduce_scatter_unused_params",
             "manual_backward_finalization")


@contextlib.contextmanager
def _own_settings(sharded: list[Any]) -> Iterator[None]:
    """Lets a step change the settings of FSDP2, and then restores the user's, because a plain backward may follow.
    Weights are sharded again. The first module is the root. If a step fails, drops what FSDP2 keeps of it."""
    states = [m._get_fsdp_state() for m in sharded]
    states[0]._lazy_init()  # which changes the root's as well
    holders = [states[0]._state_ctx, *(group for state in states for group in _param_groups(state))]
    before = [(x, {name: getattr(x, name) for name in _SETTINGS if hasattr(x, name)}) for x in holders]
    try:
        yield
    except BaseException:
        if hasattr(sharded[0], "reset_iter_state"):
            sharded[0].reset_iter_state()
        raise
    finally:
        for m in sharded:
            m.reshard()
        for x, settings in before:
            for name, value in settings.items():
                setattr(x, name, value)


def _param_groups(state: Any) -> list[Any]:
    """Returns FSDP2's groups of parameters of one module; older versions have at most one."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


# ----------------------------------------------------------------------------------------------------------------------
# For PyTorch's pipelines
# ----------------------------------------------------------------------------------------------------------------------


def microbatches(batch: Batch, chunks: Sequence[int]) -> tuple[list[Any], list[Any], list[Any]]:
    """Returns arg_mbs, kwarg_mbs and target_mbs for the step() of PyTorch's schedules, for these chunks in this order.
    All have one shape, so that any stage can be built with them. A microbatch is (1, ChunkSize) tokens and, for every
    stage, position_ids and cu_seqlens of constant length, whose last entries repeat. A target has targets and weights
    in one tensor, which microbatch_loss separates. Make the schedule with scale_grads=False. Split sequences are
    refused: they would need K and V of their earlier chunks, and PyTorch hands nothing from one microbatch to
    another."""
    if not isinstance(batch, Batch):
        raise TypeError(f"batch: wanted a Batch, got {batch!r:.99}")
    plan = batch.plan
    if plan.order is not None:
        raise ValueError("batch: its sequences share rows, of which PyTorch's pipelines tell attention nothing")
    if plan.n_chains > 0:
        at = int(plan.chains["first_chunk"][0])
        raise ValueError(f"chunk {at} is part of a sequence that is split, whose keys and values PyTorch's pipelines "
                         f"do not hand on: wanted a chunk_size that holds every sequence, got {plan.chunk_size}")
    capacity = {**plan.capacity(), "rows": plan.chunk_size}
    args, kwargs, targets = [], [], []
    for chunk in chunkflow._each(chunks, "chunks", "numbers of chunks"):
        chunk = chunkflow._at(chunk, plan.n_chunks, "chunks")
        x = batch.inputs(chunk, capacity=capacity)
        args.append((x.tokens[None],))
        kwargs.append({"position_ids": x.positions[None], "cu_seqlens": x.cu_seqlens_q})
        targets.append(torch.stack([x.targets.to(x.weights.dtype), x.weights]))
    return args, kwargs, targets


def microbatch_loss(logits: Tensor, target: Tensor) -> Tensor:
    """The loss_fn of a schedule: cross entropy of (1, ChunkSize, words), for a target of microbatches."""
    _check_tensor(logits, "logits")
    _check_tensor(target, "target")
    losses = F.cross_entropy(logits[0].to(torch.promote_types(logits.dtype, torch.float32)), target[0].long(),
                             reduction="none")
    return (losses * target[1]).sum()
