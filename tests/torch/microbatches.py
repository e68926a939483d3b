"""Tests chunkflow.megatron against the interfaces of Megatron-LM and verl: python tests/torch/microbatches.py
[FOLDER...]

INTERFACE restates these interfaces as data, from Megatron-LM's public branches and verl's package. Fake classes with
only these members create the schedulers as the real ones do. A FOLDER is a clone of Megatron-LM: its own classes are
then tested as well, and its planner's figures are printed for comparison. Without one, neither PyTorch nor Megatron is
needed.
"""

import importlib
import pathlib
import random
import sys
import time
import types

import numpy as np

from judge import check, finish, run

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "tools" / "python"))
import chunkflow.megatron
from chunkflow.megatron import Planned, microbatches

# megatron/core/datasets/data_schedule.py: the arguments of BasePackingScheduler, in order; scheduler_map, by name or by
# an enumeration's word; and the other members of the class that plans. verl/utils/dynamic_cp_scheduler.py: its
# arguments.
INTERFACE = {
    "dev d48bd6be (2026-08-21)": {
        "arguments": ("max_seqlen_per_dp_cp_rank", "cp_size", "dp_size", "microbatch_group_size_per_vp_stage"),
        "more": {"max_num_seqs": None, "min_cp_size": 1}, "members": {"is_dynamic_cp": True},
        "scheduler_map": {"dp_balanced": "DpBalancedScheduler", "default_dynamic_cp": "DefaultDynamicCPScheduler"}},
    "main d98e8a64 (2026-08-22)": {
        "arguments": ("max_seqlen_per_dp_cp_rank", "cp_size", "dp_size", "microbatch_group_size_per_vp_stage"),
        "more": {}, "members": {}, "scheduler_map": {"DP_BALANCED": "DpBalancedScheduler"}},
}
VERL = ("max_seqlen_per_dp_cp_rank", "cp_size", "dp_size", "microbatch_group_size_per_vp_stage")  # 0.9.1, by keyword


def module_of(about):
    """Makes a fake data_schedule with the restated members, but no planner."""
    def init(self, *values, **options):
        assert set(options) <= {*about["arguments"], *about["more"]} and len(values) <= len(about["arguments"])
        self.__dict__.update({**about["more"], **about["members"], **dict(zip(about["arguments"], values)), **options})
    module = types.SimpleNamespace(scheduler_map={})
    for key, name in about["scheduler_map"].items():
        cls = type(name, (), {"__init__": init})
        setattr(module, name, cls)
        module.scheduler_map[key] = cls
    return module


def fault(rows, samples, n_ranks, capacity, most=None):
    """Returns the reason why verl or Megatron would refuse these micro-batches or run one twice; or nothing."""
    lengths, seen = dict(samples), []
    for row in rows:
        if len(row) != n_ranks or not all(row):
            return "a rank without a sequence"
        for rank, ids in enumerate(row):
            members = [peer for peer in range(n_ranks) if row[peer] == ids]
            if members != list(range(members[0], members[0] + len(members))) or members[0] % len(members):
                return "ranks that are no block"
            if sum(ids[0] in other for other in row) != len(members):  # Megatron counts its ranks this way
                return "a sequence on ranks that differ"
            if sum(lengths[i] for i in ids) > capacity * len(members) or most and len(ids) > most:
                return "too much for a rank"
            seen += ids if rank == members[0] else []
    return "" if sorted(seen) == sorted(lengths) else "sequences that are lost or run twice"


def dearest(rows, lengths):
    """Returns the time of the last rank relative to the mean; ranks that share a sequence wait for each other."""
    def cost(n):
        return Planned.cost["per_token"] * n + Planned.cost["per_pair"] * n * (n + 1) / 2
    times = [0.0] * len(rows[0])
    for row in rows:
        rank = 0
        while rank < len(row):
            n = row.count(row[rank])
            end = max(times[rank:rank + n]) + sum(cost(lengths[i]) for i in row[rank]) / n
            times[rank:rank + n] = [end] * n
            rank += n
    return max(times) * len(times) / sum(map(cost, lengths))


def batches(longest=None):
    """Five lists of 256 lengths like a chat's, each with one long sequence."""
    for seed in range(5):
        lengths = np.exp(np.random.default_rng(seed).normal(6.3, 1.1, 256)).clip(16, 32768).astype(int).tolist()
        yield lengths if longest is None else [longest, *lengths[1:]]


def check_interface(name, module, dynamic):
    made = chunkflow.megatron.install(module)
    again = chunkflow.megatron.install(module)
    check(f"{name}: scheduler_map", again is made and list(module.scheduler_map.values()).count(made) == 1,
          made.__mro__[2].__name__)
    draw, wrong = random.Random(1), {}
    for _ in range(400):
        dp, cp, capacity = draw.choice((1, 2, 3, 4, 6, 8)), draw.choice((1, 2, 4)), draw.choice((64, 100, 128))
        more = {"max_num_seqs": draw.choice((None, 3)), "min_cp_size": draw.choice((1, cp))} if dynamic else {}
        of_stage = draw.choice((None, None, 2, 4))
        scheduler = made(capacity, cp, dp, of_stage, **more)
        whole = capacity * cp * (dp if dynamic else 1)
        samples = [(i, draw.randint(1, draw.choice((capacity // 4, capacity, whole))))
                   for i in range(draw.randint(1, 60))]
        try:
            rows = scheduler.get_groups_and_subsamples(samples)
            what = fault(rows, samples, dp * cp, capacity, more.get("max_num_seqs"))
            what = what or "by stages" * bool(len(rows) % (of_stage or 1))
        except ValueError as why:  # as in Megatron: too few to give each rank one
            what = "too few" if "too few" in str(why) and (of_stage or not dynamic) else str(why)
        wrong[what] = wrong.get(what, 0) + 1
    check(f"{name}: 400 batches", {*wrong} <= {"", "too few"} and wrong[""] > 250, f"{wrong}")


def check_release():
    """A release of Megatron-LM without such a scheduler is refused with a sentence."""
    for missing in ("scheduler_map", "DpBalancedScheduler"):
        module = module_of(next(about for about in INTERFACE.values() if not about["members"]))
        delattr(module, missing)
        try:
            said = f"took it: {chunkflow.megatron.install(module)}"
        except ImportError as why:
            said = str(why)
        check(f"no {missing}", "its branches main and dev do" in said, said)


def check_verl(module):
    scheduler = module.DefaultDynamicCPScheduler(**dict(zip(VERL, (100, 2, 4, None))))
    samples = list(enumerate((800, 3, 90, 100, 101, 7, 7, 250)))
    rows = scheduler.get_groups_and_subsamples(samples)
    check("verl 0.9.1", not fault(rows, samples, 8, 100), f"{len(rows)} micro-batches")
    for what, lengths in (("wanted 1 to 8 x 100 tokens, got 801", [801]), ("got 0", [4, 0])):
        try:
            scheduler.get_groups_and_subsamples(list(enumerate(lengths)))
            said = "it was taken"
        except ValueError as why:
            said = str(why)
        check(f"verl 0.9.1, {lengths}", what in said, said)


def check_balance(theirs=None):
    worst = slowest = 0.0
    for n_ranks in (8, 16, 32, 64):
        for longest in (None, 131072, 262144):
            for capacity in (8192, 32768):
                found, beside = [], []
                for lengths in batches(longest and min(longest, n_ranks * capacity)):
                    began = time.process_time()
                    rows = microbatches(lengths, n_ranks, capacity, cp_row_seconds=Planned.cp_row_seconds)
                    slowest = max(slowest, time.process_time() - began)
                    found.append(dearest(rows, lengths))
                    if theirs:
                        planner = theirs(capacity, 1, n_ranks, None)
                        beside.append(dearest(planner.get_groups_and_subsamples(list(enumerate(lengths))), lengths))
                worst = max(worst, *found)
                if theirs:
                    print(f"     {n_ranks} ranks, {longest or 'chat'}, {capacity}: {np.median(found):.3f}, Megatron's "
                          f"{np.median(beside):.3f}")
    check("the dearest rank / mean", worst <= 1.02, f"at most {worst:.3f}; planned in {1e3 * slowest:.0f} ms at most")


def check_faults():
    samples = [(0, 150), (1, 40), (2, 60), (3, 90)]
    good = [[[0], [0], [1], [2]], [[3]] * 4]
    for what, rows in (("", good), ("a rank without a sequence", [[[0], [0], [1, 2], []], good[1]]),
                       ("ranks that are no block", [[[1], [0], [0], [2]], good[1]]),
                       ("a sequence on ranks that differ", [[[0], [0], [1], [1, 2]], good[1]]),
                       ("too much for a rank", [[[0], [1], [2], [3]]]),
                       ("sequences that are lost or run twice", [*good, good[1]]),
                       ("sequences that are lost or run twice", good[:1])):
        check("a control", fault(rows, samples, 4, 100) == what, what or "a sound one")


def main(*folders):
    for name, about in INTERFACE.items():
        module = module_of(about)
        run(check_interface, name, module, bool(about["members"]))
        if about["members"]:
            run(check_verl, module)
    for folder in folders:
        for known in [m for m in sys.modules if m.split(".")[0] == "megatron"]:
            del sys.modules[known]
        sys.path.insert(0, folder)
        module = importlib.import_module("megatron.core.datasets.data_schedule")
        theirs = getattr(module, "DefaultDynamicCPScheduler", None)
        run(check_interface, folder, module, theirs is not None)
        if theirs:
            run(check_verl, module)
            run(check_balance, theirs)
        sys.path.remove(folder)
    for test in (check_release, check_balance, check_faults):
        run(test)
    return finish()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
