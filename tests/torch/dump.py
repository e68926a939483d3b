"""Writes the CSV of PyTorch's own schedules, one file each: python dump.py FOLDER

A file is named KIND_pP_nN_WHAT.csv: P ranks, N microbatches. WHAT is `order` (passes, as the schedule makes them),
`comms` (as _PipelineScheduleRuntime lowers them) or a variant of `comms`. The files of torch 2.14 and 2.15 in this
folder were made by it; the unit tests read them, time them and write them back.
"""

import csv
import inspect
import os
import sys
from unittest import mock

import torch
from torch.distributed.pipelining import schedules as pp
from torch.distributed.pipelining.stage import PipelineStage

SIZES = ((2, 4), (4, 8))
# Options of this version's runtime besides the default; each gives another file.
VARIANTS = {
    "deferred-recv": {"defer_pp_recv": True},
    "deferred-wait": {"defer_reduce_grad_wait": True},
    "one-send": {"max_outstanding_sends": 1},
}
KINDS = {
    "gpipe": (pp.ScheduleGPipe, 1),
    "1f1b": (pp.Schedule1F1B, 1),
    "interleaved-1f1b": (pp.ScheduleInterleaved1F1B, 2),
    "looped-bfs": (pp.ScheduleLoopedBFS, 2),
    "interleaved-zero-bubble": (pp.ScheduleInterleavedZeroBubble, 2),
    "zbv": (pp.ScheduleZBVZeroBubble, 2),
    "dualpipev": (pp.ScheduleDualPipeV, 2),
}


def stages_of(n_ranks, per_rank):
    """Fake stages that only know their number."""
    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.submod = 0, n_ranks, None
    stage.num_stages = n_ranks * per_rank
    return [stage] * per_rank


def order_of(kind, n_ranks, n):
    schedule, per_rank = KINDS[kind]
    stages = stages_of(n_ranks, per_rank)
    if issubclass(schedule, pp.PipelineScheduleSingle):
        return schedule(stages[0], n)._get_pipeline_order()
    return schedule(stages, n).pipeline_order


def passes_of(kind, order, n_ranks):
    """Returns the order without the lowering's own additions, with 1F1B's last rank corrected: _get_pipeline_order
    numbers its forwards from 1, and _validate_schedule refuses that."""
    last = n_ranks - 1
    passes = {}
    for rank, row in order.items():
        row = [a for a in row if a is None or a.is_compute_op]
        if kind == "1f1b" and rank == last:
            row = [a._replace(microbatch_index=a.microbatch_index - 1) if a and a.computation_type == pp.F else a
                   for a in row]
        passes[rank] = row
    return passes


def lower(kind, n_ranks, n, variant):
    runtime = pp._PipelineScheduleRuntime(stages_of(n_ranks, KINDS[kind][1]), n, **variant)
    runtime._prepare_schedule_with_comms(passes_of(kind, order_of(kind, n_ranks, n), n_ranks))
    return runtime.pipeline_order_with_comms


def write(folder, name, rows):
    with open(os.path.join(folder, name + ".csv"), "w", newline="") as file:
        csv.writer(file).writerows(rows[rank] for rank in sorted(rows))


def main(folder):
    os.makedirs(folder, exist_ok=True)
    source = inspect.getsource(pp._PipelineScheduleRuntime)
    variants = {name: options for name, options in VARIANTS.items() if next(iter(options)) in source}
    for kind in KINDS:
        for n_ranks, n in SIZES:
            name = f"{kind}_p{n_ranks}_n{n}_"
            write(folder, name + "order", order_of(kind, n_ranks, n))
            write(folder, name + "comms", lower(kind, n_ranks, n, {}))
            if kind == "1f1b":
                write(folder, name + "mended", passes_of(kind, order_of(kind, n_ranks, n), n_ranks))
            for variant, options in variants.items() if n_ranks == 2 else ():
                write(folder, name + variant, lower(kind, n_ranks, n, options))
    print(f"torch {torch.__version__}: {len(os.listdir(folder))} files in {folder}")


if __name__ == "__main__":
    main(sys.argv[1])
