"""Plans Megatron's micro-batches: which sequences each rank runs in each micro-batch, and how many ranks share a
sequence.

    from megatron.core.datasets import data_schedule
    import chunkflow.megatron

    chunkflow.megatron.install(data_schedule)      # before the trainer begins

puts a class in the place of DefaultDynamicCPScheduler, in the module, where verl finds it, and in `scheduler_map`. If
the module has no such class, it replaces DpBalancedScheduler, whose sequences are all on cp_size ranks. Everything else
stays the same, also the scheduler's name. Nothing of Megatron is imported here. Releases up to 0.19.2 have neither
class.

Megatron runs whole sequences. A micro-batch has at most max_seqlen_per_dp_cp_rank tokens on a rank. If g ranks share a
sequence, each counts a g-th of it, which Megatron or verl cuts (zigzag). A sequence gets as many ranks as its memory
needs, or more if its cost would make a rank expensive (as `max_cp` of chunkflow.pack). Sequences on the most ranks are
placed first, the most expensive first among these. Each goes to the ranks that cost least so far. Ranks that share a
sequence are a block, and run it before all else, so none waits for another. Every rank has a sequence in every
micro-batch."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import chunkflow

__all__ = ["Planned", "install", "microbatches"]

Boxes = list[list[int]]  # the sequences of a rank, micro-batch by micro-batch


class Planned:
    """A mixin for a scheduler class of Megatron. Costs are those of a model of 7 billion parameters, in tokens without
    attention, on GPUs that hide nine tenths of a transfer. A derived class may set other costs."""

    cost = {"per_token": 1.0, "per_pair": 2.64e-5}
    cp_row_seconds = 0.003

    def get_groups_and_subsamples(self, sample_id_seqlens: Sequence[tuple[int, int]]) -> list[list[list[int]]]:
        """Takes pairs of a sample's number and length. Returns, for each micro-batch and each rank, the numbers of its
        samples."""
        here: Any = self
        dynamic = getattr(here, "is_dynamic_cp", False)
        unit = getattr(here, "min_cp_size", 1) if dynamic else here.cp_size  # ranks that nothing tells apart
        if here.dp_size * here.cp_size % unit:
            raise ValueError(f"min_cp_size: got {unit}, which does not divide {here.dp_size * here.cp_size} ranks")
        ids = [int(sample) for sample, _ in sample_id_seqlens]
        rows = microbatches([int(length) for _, length in sample_id_seqlens], here.dp_size * here.cp_size // unit,
                            here.max_seqlen_per_dp_cp_rank * unit, spread=dynamic, cost=self.cost,
                            cp_row_seconds=self.cp_row_seconds, multiple=here.microbatch_group_size_per_vp_stage or 1,
                            most_sequences=getattr(here, "max_num_seqs", None) or 0)
        return [[[ids[i] for i in box] for box in row for _ in range(unit)] for row in rows]


def install(data_schedule: Any) -> type:
    """Replaces the module's scheduler by a class of Planned, and returns that class."""
    names = "DefaultDynamicCPScheduler", "DpBalancedScheduler"
    base = next((getattr(data_schedule, name) for name in names if hasattr(data_schedule, name)), None)
    if base is None or not hasattr(data_schedule, "scheduler_map"):
        raise ImportError(f"data_schedule: {getattr(data_schedule, '__name__', data_schedule)} has no scheduler_map "
                          f"with {' or '.join(names)}: releases of Megatron up to 0.19.2 plan no micro-batches there; "
                          "its branches main and dev do")
    if issubclass(base, Planned):
        return base
    made = type("ChunkflowScheduler", (Planned, base), {})
    data_schedule.scheduler_map.update({name: made for name, known in data_schedule.scheduler_map.items()
                                        if known is base})
    setattr(data_schedule, base.__name__, made)
    return made


def microbatches(lengths: Sequence[int], n_ranks: int, capacity: int, *, spread: bool = True, cost: Any = None,
                 cp_row_seconds: float = 0.0, most_sequences: int = 0, multiple: int = 1) -> list[list[list[int]]]:
    """Returns, for each micro-batch and each rank, the numbers of its sequences.

    capacity: maximum tokens of a rank in a micro-batch. spread: whether ranks may share a sequence. cost,
    cp_row_seconds: as in chunkflow.pack. most_sequences: maximum in a micro-batch of a rank (0: any number). multiple:
    the number of micro-batches is a multiple of this."""
    lengths = chunkflow._integers(lengths, "lengths").tolist()
    for name, n, least in (("n_ranks", n_ranks, 1), ("capacity", capacity, 1), ("most_sequences", most_sequences, 0),
                           ("multiple", multiple, 1)):
        chunkflow._whole(n, name, least)
    chunkflow._flag(spread, "spread")
    chunkflow._describe("cf_pass_cost", {} if cost is None else cost, int, "cost")
    chunkflow._describe("cf_pack_desc", {"cp_row_seconds": cp_row_seconds})
    cost = {**Planned.cost, **(cost or {})}
    costs = [cost["per_token"] * n + cost["per_pair"] * n * (n + 1) / 2 for n in lengths]
    widths = _widths(n_ranks, spread)
    wide = _ranks_of(lengths, widths if spread else [1], capacity, cost, cp_row_seconds)
    boxes: dict[tuple[int, int], Any] = {}
    for block, numbers in _place(costs, wide, widths, n_ranks).items():
        boxes[block] = _pack([lengths[i] for i in numbers], numbers, block[0] * capacity, most_sequences)
    _fill_up([[boxes.setdefault((w, rank // w), []) for w in widths] for rank in range(n_ranks)], lengths, multiple)
    rows = _rows(boxes, widths, 0, most_sequences)
    alone = spread or n_ranks == 1 or all(row[0] != row[-1] for row in rows)
    if not alone or len(rows) % multiple:
        raise ValueError(f"{len(lengths)} sequences are too few for {n_ranks} ranks in micro-batches by {multiple}")
    return rows


def _widths(n_ranks: int, spread: bool) -> list[int]:
    """Returns how many ranks may share a sequence: 1, 2, 4 ..., each half of the next one, and all ranks."""
    widths = [1]
    while spread and n_ranks % (2 * widths[-1]) == 0:
        widths.append(2 * widths[-1])
    return widths + [n_ranks] * (widths[-1] < n_ranks)


def _ranks_of(lengths: Sequence[int], widths: list[int], capacity: int, cost: Any, cp_row_seconds: float) -> list[int]:
    """Returns how many ranks each sequence gets: as many as its memory needs, or more because of its cost."""
    wide, most = [], max(w for w in widths if w & (w - 1) == 0)
    for number, n in enumerate(lengths):
        if not 0 < n <= widths[-1] * capacity:
            raise ValueError(f"lengths[{number}]: wanted 1 to {widths[-1]} x {capacity} tokens, got {n} "
                             "(ranks that may share it x capacity)")
        wide.append(next(w for w in widths if n <= w * capacity))
    if most > 1:  # the number of rounds of slices does not matter here
        for chain in chunkflow.pack(lengths, capacity, n_ranks=widths[-1], max_cp=most, cost=cost,
                                    cp_row_seconds=cp_row_seconds).chains:
            wide[chain["sequence"]] = max(wide[chain["sequence"]], int(chain["cp"]))
    return wide


def _place(costs: list[float], wide: list[int], widths: list[int], n_ranks: int) -> dict[tuple[int, int], list[int]]:
    """Returns the sequences of each block of ranks, by the block's width and its place among blocks of that width."""
    loads, placed = [0.0] * n_ranks, {}
    for w in reversed(widths):
        heap = [(loads[first], first // w) for first in range(0, n_ranks, w)]
        heapq.heapify(heap)
        for i in sorted((i for i in range(len(costs)) if wide[i] == w), key=lambda i: -costs[i]):
            load, block = heap[0]
            heapq.heapreplace(heap, (load + costs[i] / w, block))
            placed.setdefault((w, block), []).append(i)
        for load, block in heap:
            loads[block * w:(block + 1) * w] = [load] * w
    return placed


def _pack(lengths: list[int], numbers: list[int], capacity: int, most_sequences: int) -> Boxes:
    plan = chunkflow.pack(lengths, capacity, max_slices=most_sequences)
    return [[numbers[s["sequence"]] for s in plan.slices_of(chunk)] for chunk in range(plan.n_chunks)]


def _fill_up(ranks: list[list[Boxes]], lengths: Sequence[int], multiple: int) -> None:
    """Gives all ranks the same number of boxes, as far as their own sequences allow. A rank with fewer boxes splits one
    of its own. If each of its boxes has only one sequence, it takes the shortest sequence of another rank."""
    wanted = -(-max(sum(map(len, boxes)) for boxes in ranks) // multiple) * multiple
    for boxes in ranks:
        alone = boxes[0]
        for _ in range(wanted - sum(map(len, boxes))):
            box = max(alone, key=len, default=[])
            if len(box) < 2:
                others = [box for other in ranks for box in other[0] if len(box) > 1]
                box = min(others, key=lambda box: lengths[box[-1]], default=[])
            if len(box) < 2:
                return
            alone.append([box.pop()])


def _rows(boxes: dict[tuple[int, int], Any], widths: list[int], block: int, most_sequences: int) -> list[Boxes]:
    """Returns the micro-batches of a block of the last of these widths. If one part of the block has more than another,
    the whole block shares the excess."""
    if len(widths) == 1:
        return [[box] for box in boxes[1, block]]
    width, n = widths[-1], widths[-1] // widths[-2]
    parts = [_rows(boxes, widths[:-1], block * n + i, most_sequences) for i in range(n)]
    least, shared = min(map(len, parts)), list(boxes[width, block])
    for row in (row for part in parts for row in part[least:]):
        numbers = list(dict.fromkeys(i for box in row for i in box))
        step = most_sequences or len(numbers)
        shared += [numbers[i:i + step] for i in range(0, len(numbers), step)]
    return [[box] * width for box in shared] + [[box for row in rows for box in row] for rows in zip(*parts)]
