"""The tests of tests/command/python_check.sh: tools/python/chunkflow and tools/chunkflow.schema.json.

python_check.py COMMAND DIRECTORY, run in the top directory. COMMAND is the chunkflow command; the files that it writes
to DIRECTORY, and the library's own texts, must fit the schema. Prints "ok NAME" or "FAIL NAME: why" for each test, and
"N passed, N failed" at the end.
"""

import contextlib
import copy
import gc
import gzip
import inspect
import io
import json
import os
import pathlib
import pickle
import shlex
import subprocess
import sys
import threading
import traceback

import jsonschema
import numpy as np

TOP = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(TOP / "tools" / "python"))
import chunkflow
import chunkflow.lengths
import chunkflow.megatron

BUILD = pathlib.Path(os.environ.get("CHUNKFLOW_BUILD", "build")).resolve()
COMMAND, WORK = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2])
SCHEMA = json.loads((TOP / "tools" / "chunkflow.schema.json").read_text())
STRUCTS = (chunkflow.Plan, chunkflow.Metadata, chunkflow.AttentionCall, chunkflow.Schedule, chunkflow.Timeline)
OPTIONS = {"cf_pass_cost": chunkflow.PassCost, "cf_stage_cost": chunkflow.StageCost, "cf_timing": chunkflow.Timing,
           "cf_held_bytes": chunkflow.HeldBytes, "cf_limits": chunkflow.Limits, "cf_pack_desc": chunkflow.PackOptions,
           "cf_schedule_desc": chunkflow.ScheduleOptions, "cf_simulate_desc": chunkflow.SimulateOptions,
           "cf_validate_desc": chunkflow.ValidateOptions, "cf_lower_desc": chunkflow.LowerOptions}


def batches(n):
    """Lengths and options of all kinds, seeded."""
    rng = np.random.default_rng(7)
    for _ in range(n):
        align = int(rng.choice([1, 1, 4, 8]))
        lengths = rng.integers(0, 90, rng.integers(1, 14))
        yield lengths, {"chunk_size": 8 * int(rng.integers(1, 6)), "align": align,
                        "method": str(rng.choice(["best-fit", "next-fit"])),
                        "split": str(rng.choice(["full", "even", "cost"])), "n_ranks": int(rng.integers(1, 4))}


def raised(kind, function, /, *arguments, **options):
    """Returns the exception that a call raises; it must be exactly of this class."""
    try:
        result = function(*arguments, **options)
    except Exception as error:
        assert type(error) is kind, f"wanted {kind.__name__}, got {error!r}"
        return error
    raise AssertionError(f"wanted {kind.__name__}, got {result!r}")


# ---- the module ----


def members_of(struct):
    """Those of its shape stand among them."""
    members = {name for name, _ in chunkflow.ffi.typeof(struct).fields}
    return members | {name for name, _ in chunkflow.ffi.typeof("cf_shape").fields} if "shape" in members else members


def test_members_are_the_declared_ones():
    for cls in STRUCTS:
        declared = dict(chunkflow.ffi.typeof(cls._struct).fields)
        stale = set(cls.__annotations__) - members_of(cls._struct)
        assert not stale, f"{cls._struct} has no {stale}"
        for name, field in declared.items():
            if field.type.kind == "pointer":
                assert (cls._struct, name) in chunkflow._LENGTHS, f"no comment says how long {cls._struct}.{name} is"
    for struct, options in OPTIONS.items():
        stale = set(options.__annotations__) - members_of(struct)
        assert not stale, f"{struct} has no {stale}"


def test_members_have_the_types_that_they_are_said_to_have():
    plan = chunkflow.pack([5, 30, 2], 8, n_ranks=2)
    schedule = plan.schedule(k=1, n_stages=2, limits={"chunks": 3})
    kinds = {"int": int, "float": float, "str": str, "np.ndarray": np.ndarray, "np.ndarray | None": np.ndarray}
    shared = chunkflow.pack([6, 6], 8, shared_prefixes=[(0, 0), (0, 4)], min_shared_prefix=1)
    metadata = shared.metadata(0, weights=[1, 1], wants_loss_rows=True, wants_key_ends=True)
    for made in (shared, metadata, metadata.calls[0], schedule, schedule.simulate()):
        for name, kind in type(made).__annotations__.items():
            assert type(getattr(made, name)) is kinds[kind], f"{made._struct}.{name}: {type(getattr(made, name))}"
            assert name in dir(made) and (kind.startswith("np") or f"{name}=" in repr(made))
    assert plan.method == "best-fit" and schedule.kind == "best" and schedule.placement == "loop"
    assert plan.schedule(k=1, limits={"chunks": chunkflow.lib.CF_NO_LIMIT}).limits.chunks_by_stage is None
    raised(AttributeError, getattr, plan, "n_chunk")
    raised(AttributeError, getattr, plan, "block")


def test_arrays_are_the_library_s_memory():
    plan = chunkflow.pack([900, 14000, 350, 2600], 4096)
    for name in ("chunks", "slices", "chains"):
        array = getattr(plan, name)
        assert array.ctypes.data == int(chunkflow.ffi.cast("uintptr_t", getattr(plan.c, name)))
        assert not array.flags.writeable and array is getattr(plan, name)
        for i in range(len(array)):
            for member in array.dtype.names:
                assert array[member][i] == getattr(getattr(plan.c, name)[i], member)
    schedule = plan.schedule(k=2, n_stages=3)
    timeline = schedule.simulate()
    assert schedule.actions.itemsize == 12 and len(schedule.actions) == schedule.n_actions == len(timeline.start)
    assert all(timeline.end[i] == timeline.c.end[i] for i in range(schedule.n_actions))
    raised(ValueError, plan.chunks.__setitem__, 0, 0)
    assert plan.metadata(0).cu_seqlens_q.flags.writeable


def test_arrays_keep_their_plan_alive_and_nothing_else_does():
    class Counting:
        freed = 0

        def __getattr__(self, name):
            if name != "cf_plan_free":
                return getattr(real, name)

            def free(plan):
                Counting.freed += 1
                real.cf_plan_free(plan)
            return free
    real = chunkflow.lib
    chunkflow.lib = Counting()
    try:
        plan = chunkflow.pack([900, 14000, 350, 2600], 4096)
        wanted = plan.chunks["tokens"].tolist()
        tokens, schedule = plan.chunks["tokens"][1:], plan.schedule(k=1)
        del plan
        gc.collect()
        assert Counting.freed == 0 and tokens.tolist() == wanted[1:]
        assert schedule.simulate().makespan > 0 and schedule.plan.n_chunks == len(wanted)
        del schedule
        gc.collect()
        for _ in range(100):  # overwrites the plan's memory, if that was freed
            chunkflow.pack([900, 14000, 350, 2600], 4096, split="even")
        freed = Counting.freed
        assert tokens.tolist() == wanted[1:]
        del tokens
        assert Counting.freed == freed + 1
    finally:
        chunkflow.lib = real


def test_rows_are_those_of_the_slices():
    for lengths, options in batches(60):
        plan = chunkflow.pack(lengths, **options)
        seen = [[] for _ in lengths]
        for chunk in range(plan.n_chunks):
            about, metadata = plan.chunks[chunk], plan.metadata(chunk)
            sequence, position, target = metadata.sequence_ids, metadata.position_ids, metadata.target_positions
            real = np.zeros(about["rows"], bool)
            for s in plan.slices_of(chunk):
                rows = np.arange(s["offset"], s["offset"] + s["length"])
                assert (sequence[rows] == s["sequence"]).all() and not real[rows].any()
                assert (position[rows] == s["begin"] + np.arange(s["length"])).all()
                following = position[rows] + 1
                assert (target[rows] == np.where(following < lengths[s["sequence"]], following, -1)).all()
                real[rows] = True
                seen[s["sequence"]] += position[rows].tolist()
            assert (sequence[~real] == -1).all() and (target[~real] == -1).all()
            assert real.sum() == about["tokens"] == metadata.tokens
            assert metadata.prefix == about["prefix"] and metadata.pairs == about["pairs"]
            steps = np.diff(metadata.cu_seqlens_k) - np.diff(metadata.cu_seqlens_q)
            assert (steps == np.where(np.arange(len(steps)) == 0, about["prefix"], 0)).all()
        assert seen == [list(range(n)) for n in lengths]
        plan.validate(lengths)
        stats = plan.stats()
        assert stats["n_idle"] == plan.n_idle and stats["longest_sequence"] == max(lengths)


def test_capacities_masks_and_weights():
    lengths = [20, 5, 0, 7]
    plan = chunkflow.pack(lengths, 8, align=4)
    capacity = plan.schedule(k=2).capacity(so_far=plan.capacity({"rows": 11}))
    assert capacity["rows"] == 11 and capacity["prefix"] == 16 and capacity["activations"] >= 2
    ignored = [np.arange(20) < 6, None, None, np.array([True] * 3 + [False] * 4, object)]
    weights = chunkflow.loss_weights(lengths, ignored=ignored)
    assert np.allclose(weights[[0, 1, 3]], 1 / (14 + 4 + 4))
    seen = 0.0
    for chunk in range(plan.n_chunks):
        metadata = plan.metadata(chunk, capacity, ignored, weights)
        assert len(metadata.sequence_ids) == 11 and len(metadata.cu_seqlens_q) == capacity["n_seqs"] + 1
        for row in np.flatnonzero(metadata.target_positions >= 0):
            sequence, target = metadata.sequence_ids[row], metadata.target_positions[row]
            assert ignored[sequence] is None or not ignored[sequence][target]
            assert target == metadata.position_ids[row] + 1
        assert ((metadata.loss_weights > 0) == (metadata.target_positions >= 0)).all()
        seen += metadata.loss_weights.sum()
    assert abs(seen - 1) < 1e-12 and plan.metadata(0).loss_weights is None
    assert raised(chunkflow.Error, plan.metadata, 0, {"rows": 3}).field == "capacity.rows"
    assert raised(chunkflow.Error, plan.metadata, 0, weights=[1.0]).field == "weights"
    assert raised(chunkflow.Error, plan.metadata, 0, ignored=[None]).field == "ignored"
    assert raised(chunkflow.Error, plan.metadata, 0, ignored=[[True], None, None, None]).got == 1
    assert raised(chunkflow.Error, chunkflow.loss_weights, lengths, "prompts", prompts=[0]).field == "prompts"
    by_prompt = chunkflow.loss_weights(lengths, "prompts", prompts=[0, 0, 1, 1])
    assert np.allclose(by_prompt[[0, 1, 3]], [0.5 / 23, 0.5 / 23, 0.5 / 6])


def test_old_names_are_refused_with_the_new_ones():
    plan, says = chunkflow.pack([9, 3], 4), lambda *given, **named: str(raised(*given, **named))
    assert "'gang': it is max_cp now" in says(TypeError, chunkflow.pack, [9, 3], 4, n_ranks=2, gang=2)
    assert "'share_least': it is min_shared_prefix now" in says(TypeError, chunkflow.pack, [9, 3], 4, share_least=1)
    assert "'budget': it is max_tries now" in says(TypeError, plan.schedule, k=1, budget=2)
    assert "'once': it is shared_mean now" in says(TypeError, plan.metadata, 0, once=True)
    assert "'n_steps': it is chunks_per_rank now" in says(AttributeError, getattr, plan, "n_steps")
    assert "'schedule_of': it is lockstep_schedule now" in says(AttributeError, getattr, plan, "schedule_of")
    assert "'levels': it is calls now" in says(AttributeError, getattr, plan.metadata(0), "levels")
    assert "it is shared_prefixes_of_tokens now" in says(AttributeError, getattr, chunkflow, "shares_of_tokens")
    for name in chunkflow._RENAMED:
        assert not hasattr(plan, name) and not hasattr(chunkflow, name)


def test_pieces_are_all_that_a_cp_group_has_before_a_chunk():
    plan, shared = chunkflow.pack([150, 7, 33, 12, 5], 16, n_ranks=4, max_cp=4), 0
    for chunk in range(plan.n_chunks):
        pieces, chain = plan.kv_sources_of(chunk), plan.chunks["chain"][chunk]
        if chain < 0 or plan.chains["cp"][chain] == 0:
            assert pieces.size == 0
            continue
        shared += 1
        ends = np.cumsum(pieces["tokens"])
        assert (pieces["begin"] == ends - pieces["tokens"]).all()
        assert sum(pieces["tokens"]) == plan.slices_of(chunk)["begin"][0]
        for member, piece in (("rank", "rank"), ("prefix", "row"), ("tokens", "tokens")):
            assert (plan.chunks[member][pieces["chunk"]] == pieces[piece]).all()
    assert shared >= 8


def test_steps_are_arrays():
    plan = chunkflow.pack([150, 7, 33, 12, 5], 16)
    schedule = plan.schedule(n_stages=2, k=2)
    for order, transfers in ((schedule, 0), (schedule.lower(), 1)):
        for stage in range(2):
            made = order.steps(stage, seed=3)
            steps, paths = made.steps, made.paths
            actions = order.stage(stage)
            assert (steps["action"] == actions).all() and (steps["position"] == np.arange(made.n)).all()
            assert made.transfers == transfers and ((steps["input"] >= 0).any() == bool(transfers))
            assert steps["slot"].max() + 1 == made.n_slots and paths["state"].max() + 1 == made.n_states
            assert made.peak_tokens == order.simulate().peak_tokens[stage]
            assert steps["last_backward"].sum() == 1 and (paths["up"] == -1).all()
            assert (steps["seed"] == [chunkflow.lib.cf_chunk_seed(3, int(a["chunk"]), int(a["stage"]))
                                      for a in actions]).all()
            grouped = plan.chunks["chain"][actions["chunk"]] >= 0
            assert ((steps["path"] >= 0) == (grouped & (actions["pass"] < chunkflow.PASSES.index("W")))).all()
            kept = paths["chain"][steps["path"][steps["path"] >= 0]]
            assert (kept == plan.chunks["chain"][actions["chunk"][steps["path"] >= 0]]).all()
    assert raised(chunkflow.Error, schedule.steps, 2).field == "stage"


def test_schedules_are_those_of_the_paper():
    plan = chunkflow.pack([1, 1, 2, 4], 2)
    for k, kind, replay, makespan in ((1, "paper", "pipeline", 50), (2, "best", "local", 42), (1, "best", "local", 44)):
        timeline = plan.schedule(kind=kind, n_stages=4, k=k, replay=replay).simulate()
        assert timeline.makespan == makespan and timeline.bound == max(timeline.bounds.values()) <= makespan
    names = [chunkflow.PASSES[a["pass"]] + str(a["chunk"]) for a in plan.schedule(k=1).stage(0)]
    assert names == ["F0", "F1", "B1", "R0", "B0", "F2", "B2", "F3", "B3"], names
    names = [chunkflow.PASSES[a["pass"]] for a in plan.schedule(kind="gpipe", k=1, forwards_first=1).stage(0)]
    assert names == ["F"] * plan.chunks_per_rank + ["R", "B"] * plan.chunks_per_rank
    report = plan.schedule(n_stages=4, k=2).report
    assert report["best_fixed"] == "paper" and report["gap"] == 0 and report["makespan"] == 42
    report = plan.schedule(kind="gpipe", k=2).report
    assert report["best_fixed"] == "gpipe" and report["n_tried"] == 0
    assert report["makespan"] == plan.schedule(kind="gpipe", k=2).simulate().makespan


def test_options_reach_the_library():
    plan = chunkflow.pack([8, 8], 8)
    costs = [{"forward": {"constant": 1}, "backward": {"per_token": 0.5}},
             {"forward": [2, 0, 0], "backward": (3, 0, 0)}]
    schedule = plan.schedule(n_stages=2, kind="gpipe", k=1, timing={"stages": costs, "latency": 0.25},
                             limits={"chunks_by_stage": [2, 1]})
    timeline = schedule.simulate(timing={"stages": costs, "latency": 0.25}, no_bounds=True)
    assert schedule.limits.chunks_by_stage.tolist() == [2, 1] and timeline.bounds == {}
    assert timeline.busy == 2 * (1 + 4 + 2 + 3) and timeline.start[schedule.first[1]] == 1.25
    cost = {"constant": 3.0, "per_token": 1.0, "per_pair": 0.01}
    lengths = [1000, 10, 333]
    with_cost = chunkflow.pack(lengths, 128, split="cost", cost=cost)
    assert with_cost.slices.tolist() != chunkflow.pack(lengths, 128, split="full").slices.tolist()
    lowered = chunkflow.pack([40, 9], 8).schedule(n_stages=2, k=1).lower(timing={"latency": 1})
    lowered.validate()
    assert lowered.lowered == 1 and {"SEND_F", "RECV_F"} <= {chunkflow.PASSES[p] for p in lowered.actions["pass"]}
    assert raised(chunkflow.Error, lowered.validate, limits={"chunks": 1}).code == "CF_ERROR_SCHEDULE"
    assert raised(chunkflow.Error, lowered.lower).code == "CF_ERROR_ARGUMENT"


def test_lengths_of_every_kind():
    wanted = chunkflow.pack([5, 9, 0], 4).slices.tolist()
    rows = np.array([[5, 1], [9, 1], [0, 1]], np.int32)
    for lengths in ((5, 9, 0), np.array([5, 9, 0], np.uint8), rows[:, 0], np.array([5, 9, 0], ">i8"),
                    np.array([5, 9, 0], np.uint64)):
        assert chunkflow.pack(lengths, 4).slices.tolist() == wanted
    assert chunkflow.pack([], 4).n_chunks == 0 and chunkflow.pack([], 4).chunks.shape == (0,)
    for bad in ([1.0], [[1]], [True], ["1"], [None], 3, [2**70]):
        raised(TypeError, chunkflow.pack, bad, 4)
    raised(OverflowError, chunkflow.pack, np.array([2**63], np.uint64), 4)


def test_errors_carry_the_record():
    error = raised(chunkflow.Error, chunkflow.pack, [3, -7], 4)
    assert (error.code, error.field, error.item, error.wanted, error.got) == ("CF_ERROR_ARGUMENT", "lengths", 1, 0, -7)
    assert str(error) == error.text == "lengths[1]: is negative (wanted 0, got -7)"
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is chunkflow.Error and vars(again) == vars(error)
    error = raised(chunkflow.Error, chunkflow.pack, [3], 0)
    assert (error.code, error.field) == ("CF_ERROR_ARGUMENT", "chunk_size")
    plan = chunkflow.pack([9, 3], 4)
    for chunk in (-1, plan.n_chunks, 2**40):
        error = raised(chunkflow.Error, plan.metadata, chunk)
        assert (error.code, error.field) == ("CF_ERROR_ARGUMENT", "chunk")
        raised(IndexError, plan.slices_of, chunk)
        raised(IndexError, plan.kv_sources_of, chunk)
    error = raised(chunkflow.Error, plan.validate, [9, 4])
    assert error.code == "CF_ERROR_PLAN" and error.field
    for n_limits in (1, 3):
        error = raised(chunkflow.Error, plan.schedule, k=1, n_stages=2,
                       limits={"chunks_by_stage": [4] * n_limits})
        assert (error.code, error.field) == ("CF_ERROR_ARGUMENT", "limits.chunks_by_stage")
        assert (error.wanted, error.got) == (2, n_limits)
    for wrong in ({"n_stages": -3}, {"n_stages": 2, "n_virtual": -1}):
        error = raised(chunkflow.Error, plan.schedule, limits={"chunks_by_stage": [4, 4]}, **wrong)
        assert (error.field, error.wanted) == ("shape." + list(wrong)[-1], 1) and error.got == list(wrong.values())[-1]
    error = raised(chunkflow.Error, plan.schedule, n_stages=-1, n_virtual=-2, timing={"stages": [{}] * 3})
    assert (error.field, error.got) == ("shape.n_stages", -1)  # their product is none of a length
    error = raised(chunkflow.Error, plan.schedule, kind="interleaved", n_stages=2, timing={"stages": [{}] * 2})
    # interleaved has two virtual stages on each stage by default
    assert (error.field, error.wanted) == ("timing.stages", 4)
    error = raised(chunkflow.Error, plan.schedule().simulate, limits={"bytes_by_stage": [1, 1]})
    assert error.field == "limits.bytes_by_stage"
    assert raised(chunkflow.Error, plan.schedule, kind="best", rank=5).field == "shape.rank"


def test_mistakes_are_named():
    plan = chunkflow.pack([9, 3], 4)
    assert "chunksize" in str(raised(TypeError, chunkflow.pack, [1], 4, chunksize=3))
    assert "best-fit" in str(raised(ValueError, chunkflow.pack, [1], 4, method="bestfit"))
    raised(TypeError, chunkflow.pack, [1], 4, allocator={})
    raised(TypeError, plan.schedule, timing={"all": {"backwards": {}}})
    raised(TypeError, plan.schedule, limits={"chunks_by_stage": [1.5]})
    assert "wanted a Timeline, got int" in str(raised(TypeError, plan.schedule().json, 3))


WRONG = (None, 3, 2.5, "x", b"x", [1], ["x"], {"a": 1}, {"forward": 3}, object(), np.zeros(3), [None], [[1]], [{}], (),
         {}, -1, 1 << 70, [object(), 3], [{"forward": [1]}], [None, (0, "a")], float("nan"))


def calls():
    """Lists every public function: name, function, good arguments, and the names of its options."""
    plan, ranks = chunkflow.pack([9, 3], 4), chunkflow.pack([9, 3], 4, n_ranks=2, lockstep=1)
    cp = chunkflow.pack([4096, 30], 512, n_ranks=2, max_cp=2)
    shared, schedule = chunkflow.pack([5, 6], 8, shared_prefixes=[[0, 0], [0, 3]], min_shared_prefix=1), plan.schedule()
    columns = ranks.lockstep_plan().schedule(k=1)
    parts = [ranks.lockstep_schedule(columns, rank) for rank in range(2)]
    options = {"pack": chunkflow.PackOptions, "Plan.schedule": chunkflow.ScheduleOptions,
               "Schedule.simulate": chunkflow.SimulateOptions, "Schedule.lower": chunkflow.LowerOptions,
               "Schedule.validate": chunkflow.ValidateOptions}
    good = {"pack": {"lengths": [5, 6], "chunk_size": 8}, "loss_weights": {"lengths": [5, 6]},
            "shared_prefixes_of_tokens": {"sequences": [[1, 2], [1, 3]]}, "Plan.sequences_of": {"slice": 0},
            "Plan.chain_above": {"chain": 0}, "Plan.row_of": {"sequence": 0, "position": 0},
            "Plan.kv_sources_of": {"chunk": 0}, "Plan.slices_of": {"chunk": 0}, "Plan.metadata": {"chunk": 0},
            "Plan.capacity": {}, "Plan.stats": {}, "Plan.schedule": {}, "Plan.lockstep_plan": {},
            "Plan.lockstep_schedule": {"columns": columns, "rank": 0}, "Plan.lockstep_validate": {"schedules": parts},
            "Plan.validate": {"lengths": [9, 3]}, "Plan.json": {}, "Schedule.stage": {"stage": 0},
            "Schedule.simulate": {}, "Schedule.lower": {}, "Schedule.steps": {}, "Schedule.capacity": {},
            "Schedule.validate": {}, "Schedule.json": {}}
    for name, given in good.items():
        owner = {"Plan": ranks if "lockstep" in name else plan, "Schedule": schedule}.get(name.split(".")[0], chunkflow)
        function = getattr(owner, name.split(".")[-1])
        taken = [p for p, about in inspect.signature(function).parameters.items() if about.kind != about.VAR_KEYWORD]
        yield name, function, given, [*taken, *getattr(options.get(name), "__annotations__", ())]
    yield "microbatches", chunkflow.megatron.microbatches, {"lengths": [5, 6, 7], "n_ranks": 2, "capacity": 9}, \
        list(inspect.signature(chunkflow.megatron.microbatches).parameters)
    yield "lengths_of", lambda **o: list(chunkflow.lengths.lengths_of(**o)), {"paths": []}, ["paths", "fields"]
    yield "Plan.metadata of a tree", shared.metadata, {"chunk": 0}, ["chunk", "ignored", "weights"]
    yield "Plan.kv_sources_of a cp group", cp.kv_sources_of, {"chunk": 0}, ["chunk"]
    yield ("limits", lambda **o: plan.schedule(limits=o), {"per_token": {"activations": 1}},
           list(chunkflow.Limits.__annotations__))
    yield "timing", lambda **o: plan.schedule(timing=o), {}, list(chunkflow.Timing.__annotations__)


def test_wrong_types_are_named():
    """For every argument, any value is either accepted or raises an error that names the argument."""
    named = taken = 0
    seen = set()
    for name, function, good, arguments in calls():
        function(**good)
        seen.add(name)
        for argument in arguments:
            for wrong in WRONG:
                try:
                    function(**{**good, argument: wrong})
                    taken += 1
                except chunkflow.lengths.Refused:
                    pass
                except (TypeError, ValueError, OverflowError, IndexError, chunkflow.Error) as error:
                    other = getattr(error, "code", "") in ("CF_ERROR_PLAN", "CF_ERROR_INFEASIBLE") or \
                        "are too few for" in str(error)
                    assert argument in str(error) or other, f"{name}, {argument}={wrong!r:.60}: {error!r}"
                    named += 1
    public = {f"{c.__name__}.{name}" for c in (chunkflow.Plan, chunkflow.Schedule) for name, f in vars(c).items()
              if inspect.isfunction(f) and not name.startswith("_")}
    public |= {name for name in chunkflow.__all__ if inspect.isfunction(getattr(chunkflow, name))}
    assert public <= seen, public - seen
    assert named > 1000 and taken > 100, (named, taken)


def test_wrong_types_by_hand():
    plan = chunkflow.pack([9, 3], 4)
    for words, kind, call in (
            ("chunk: wanted a whole number, got 'a'", TypeError, lambda: plan.metadata("a")),
            ("weights: wanted one row of numbers, got shape ()", TypeError, lambda: plan.metadata(0, weights=5)),
            ("ignored: wanted None or a mask for each of 2 sequences, got 5", TypeError,
             lambda: plan.metadata(0, ignored=5)),
            ("ignored: wanted True or False for each token of sequence 1, True where it is no target", TypeError,
             lambda: plan.metadata(0, ignored=[None, [0, 1, 1]])),
            ("shared_prefixes: wanted for each of 2 sequences a pair", TypeError,
             lambda: chunkflow.pack([5, 5], 4, shared_prefixes=[None, (0, "a")])),
            ("stage: got 7, wanted 0 .. 0", IndexError, lambda: plan.schedule().stage(7)),
            ("sequence: got 99, wanted 0 .. 1", IndexError, lambda: plan.row_of(99, 0)),
            ("position: there is no token 9 of sequence 0", IndexError, lambda: plan.row_of(0, 9)),
            (f"align: wanted {-2**63} .. {2**63 - 1}, got {2**70}", OverflowError,
             lambda: chunkflow.pack([5, 5], 4, align=2**70)),
            ("method: wanted 0 .. ", OverflowError, lambda: chunkflow.pack([5, 5], 4, method=2**70)),
            ("capacity: cf_capacity has no member 'row'", TypeError, lambda: plan.metadata(0, capacity={"row": 1}))):
        assert words in str(raised(kind, call)), str(raised(kind, call))


def test_pickled_plans():
    plan = chunkflow.pack([900, 14000, 350], 4096, shared_prefixes=[[0, 0], [0, 7], [1, 3]], n_ranks=2,
                          cost={"per_pair": 1.0})
    assert pickle.loads(pickle.dumps(plan)).json() == plan.json()
    raised(TypeError, pickle.dumps, chunkflow.pack([9, 3], 4, n_ranks=2, lockstep=1).lockstep_plan())


def test_threads():
    lengths = np.random.default_rng(3).integers(1, 4000, 500)
    wanted, wrong = chunkflow.pack(lengths, 1024).json(), []

    def work():
        for _ in range(10):
            if chunkflow.pack(lengths, 1024).json() != wanted:
                wrong.append("another plan")
            try:
                chunkflow.pack([-1], 4)
                wrong.append("no error")
            except chunkflow.Error:
                pass
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong


# ---- JSON ----


def validator(part=None):
    """A validator of any document, or of one kind."""
    return jsonschema.Draft202012Validator({**SCHEMA, "$ref": f"#/$defs/{part}"} if part else SCHEMA)


def written(name, *arguments):
    """What the command writes to a file, as a document."""
    path = WORK / name
    subprocess.run([COMMAND, *arguments, path, WORK / "lengths"], check=True, stdout=subprocess.DEVNULL)
    return json.loads(path.read_text())


def documents():
    """Returns one file of each kind that the command writes, by name."""
    (WORK / "lengths").write_text("9\n3\n21\n1\n0\n5\n14 3\n")
    packing = ("--chunk-size", "8", "--align", "4")
    plan = ("plan", *packing, "--k", "1", "--stages", "2", "--ranks", "2")
    return {"plan": written("plan", "pack", *packing, "--json"),
            "metadata": written("metadata", "pack", *packing, "--ranks", "3", "--metadata", "--json"),
            "timeline": written("timeline", *plan, "--token-bytes", "1,1,1,1", "--json"),
            "lowered": written("lowered", *plan, "--lower", "--json"),
            "stream": written("stream", *plan, "--model", "qwen2.5-0.5b", "--gpu", "h100-80g", "--stream", "1M", "--json"),
            "zero-bubble": written("zero-bubble", *plan, "--schedule", "zero-bubble", "--virtual", "2", "--json"),
            "schedules": written("schedules", *plan, "--all-ranks", "--json")}


def test_the_schema_is_one():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_what_is_written_is_valid():
    for name, document in documents().items():
        validator().validate(document)
        part = "plan" if name in ("plan", "metadata") else "schedules" if name == "schedules" else "schedule"
        validator(part).validate(document)
        for other in {"plan", "schedule", "schedules"} - {part}:
            assert not validator(other).is_valid(document), f"{name} is no {other}"
        assert validator("timeline").is_valid(document) == ("makespan" in document), name


def reports():
    """Returns what compare, report, memory, time and tune write, by kind. These include costs of each sort, a row that
    cannot be made, a measured schedule, and a rank without a time."""
    (WORK / "lengths").write_text("9\n3\n21\n1\n0\n5\n14 3\n")
    (WORK / "samples").write_text("F 8192 33558528 .21\nF 8192 100667392 .25\nF 512 131328 .014\n")
    model = ("--model", "qwen2.5-0.5b", "--gpu", "h100-80g")
    packing, page = ("--chunk-size", "8", "--stages", "2"), ("-o", "/dev/null")
    costs = ("--k", "2", "--cost", "1e-3,1e-7,0")
    measured = written("measured.json", "plan", *packing, *costs, "--json") and ("--measured", str(WORK / "measured.json"))
    bytes_short = ("--k", "1", "--token-bytes", "4,0,0,0", "--limit-bytes", "30", "--json")

    def alone(name, *arguments):
        subprocess.run([COMMAND, *arguments, "--json", WORK / name], check=True, stdout=subprocess.DEVNULL)
        return json.loads((WORK / name).read_text())

    return {"comparison": [written("c1", "compare", *packing, "--json"),
                           written("c2", "compare", *packing, *model, "--replay", "both", "--json"),
                           written("c3", "compare", *packing, *bytes_short)],
            "report": [written("r1", "report", *packing, *page, "--json"),
                       written("r2", "report", *packing, *model, "--ranks", "2", *page, "--json"),
                       written("r3", "report", *packing, *costs, *measured, *page, "--json")],
            "memory": [alone("m", "memory", "--model", "qwen2.5-0.5b", "--pp", "2", "--chunk-size", "8", "--stream", "1M")],
            "times": [alone("t", "time", *model, "--pp", "2", "--chunk-size", "8")],
            "fit": [alone("f", "time", "--fit", str(WORK / "samples"))],
            "tuning": [written("u", "tune", *model, "--chunk-sizes", "8", "--ks", "1", "--batch", "4", "--batches", "1", "--json")]}


def test_what_reports_is_valid_and_says_what_is_estimated():
    kinds = reports()
    for part, documents in kinds.items():
        for document in documents:
            validator().validate(document)
            validator(part).validate(document)
            for other in kinds:
                assert other == part or not validator(other).is_valid(document), f"{part} is no {other}"
            for name in document:  # every member is described, and every required one is there
                broken = {**document, name: [[{"nobody": "knows"}]]}
                assert part == "tuning" or not validator(part).is_valid(broken), (part, name)
            assert part == "tuning" or not validator(part).is_valid({**document, "more": 1}), part
            if "rows" in document or "schedules" in document:
                assert document["estimated"] == (document["unit"] != "token times")
    assert any("error" in row for row in kinds["comparison"][2]["rows"])
    assert kinds["report"][2]["measured"] >= 0


def test_what_the_library_writes_is_valid_and_what_is_there():
    for i, (lengths, options) in enumerate(batches(12)):
        plan = chunkflow.pack(lengths, **options)
        document = json.loads(plan.json(metadata=i % 2 == 0))
        validator("plan").validate(document)
        for about, chunk in zip(plan.chunks, document["chunks"]):
            assert all(about[name] == chunk[name] for name in set(about.dtype.names) & set(chunk)) and "pairs" in chunk
        metadata = [chunk["metadata"] for chunk in document["chunks"] if "metadata" in chunk]
        assert len(metadata) == (plan.n_chunks if i % 2 == 0 else 0)
        for chunk, said in enumerate(metadata):
            of_library = plan.metadata(chunk)
            assert said == {name: np.asarray(getattr(of_library, name)).tolist() for name in said}
        schedule = plan.schedule(k=1 + i % 3, n_stages=1 + i % 2, rank=plan.n_ranks - 1)
        for timeline in (None, schedule.simulate()):
            document = json.loads(schedule.json(timeline))
            validator("schedule").validate(document)
            assert validator("timeline").is_valid(document) == (timeline is not None)
            assert [len(row) for row in document["actions"]] == np.diff(schedule.first).tolist()
            flat = [action for row in document["actions"] for action in row]
            assert [chunkflow.PASSES[p] for p in schedule.actions["pass"]] == [action["pass"] for action in flat]
            if timeline is not None:
                assert [action["end"] for action in flat] == timeline.end.tolist()


def test_all_ranks_are_in_one_file():
    made = documents()["schedules"]
    lengths = [9, 3, 21, 1, 0, 5, 14, 14, 14]
    plan = chunkflow.pack(lengths, 8, align=4, n_ranks=2)
    alone = [plan.schedule(k=1, n_stages=2, rank=rank) for rank in range(2)]
    assert made["n_ranks"] == 2 and made["schedules"] == [json.loads(s.json(s.simulate())) for s in alone]
    for name, arguments in (("plan.json", ["--plan-json"]), ("all.json", ["--all-ranks", "--json"])):
        written(name, "plan", "--chunk-size", "8", "--k", "1", "--ranks", "2", *arguments)
    checked = subprocess.run([COMMAND, "check", "--plan", WORK / "plan.json", WORK / "all.json"], capture_output=True,
                             text=True)
    assert checked.returncode == 0 and checked.stdout.count("sound schedule") == 2, checked
    swapped = json.loads((WORK / "all.json").read_text())
    swapped["schedules"].reverse()
    (WORK / "all.json").write_text(json.dumps(swapped))
    checked = subprocess.run([COMMAND, "check", "--plan", WORK / "plan.json", WORK / "all.json"], capture_output=True,
                             text=True)
    assert checked.returncode == 1 and "one schedule for each rank, in order" in checked.stderr, checked


BROKEN = [  # document, the way to a member, what it becomes; DROP: it goes
    ("plan", ["format"], "chunkflow-plans"), ("plan", ["format"], "chunkflow-schedule"), ("plan", ["format"], "DROP"),
    ("plan", ["version"], 2), ("plan", ["chunks", 0, "up"], "DROP"), ("plan", ["chunks", 0, "slices", 0, "n"], 1),
    ("plan", ["chunk_size"], 0), ("plan", ["chunk_size"], 8.5), ("plan", ["chunk_size"], "8"),
    ("plan", ["chunk_size"], 2**31), ("plan", ["method"], "worst-fit"), ("plan", ["n_ranks"], 0),
    ("plan", ["n_tokens"], -1), ("plan", ["fill"], 1.5), ("plan", ["chains"], {}), ("plan", ["chunks"], "DROP"),
    ("plan", ["extra"], 1), ("plan", ["chains", 0, "n_chunks"], 1), ("plan", ["chains", 0, "tokens"], "DROP"),
    ("plan", ["chunks", 0, "chain"], -2), ("plan", ["chunks", 0, "prefix"], None), ("plan", ["chunks", 0, "more"], 0),
    ("plan", ["chunks", 0, "slices", 0, "length"], 0), ("plan", ["chunks", 0, "slices", 0, "offset"], "DROP"),
    ("metadata", ["chunks", 0, "metadata", "cu_seqlens_q"], [1, 8]),
    ("metadata", ["chunks", 0, "metadata", "cu_seqlens_k"], []),
    ("metadata", ["chunks", 0, "metadata", "target_positions"], "DROP"),
    ("metadata", ["chunks", 0, "metadata", "target_positions", 0], 0),
    ("metadata", ["chunks", 0, "metadata", "sequence_ids", 0], -2),
    ("metadata", ["chunks", 0, "metadata", "position_ids", 0], -1),
    ("metadata", ["chunks", 0, "metadata", "max_seqlen_q"], 1.5),
    ("timeline", ["kind"], "worst"), ("timeline", ["version"], 2), ("timeline", ["placement"], "DROP"),
    ("timeline", ["placement"], "any"), ("timeline", ["lowered"], 2), ("timeline", ["lowered"], True),
    ("timeline", ["limits", 0], -1), ("timeline", ["makespan"], "DROP"), ("timeline", ["busy"], "DROP"),
    ("timeline", ["peak_live"], "DROP"), ("timeline", ["bubble_busy"], 1.5), ("timeline", ["bounds", "memory"], "low"),
    ("stream", ["stream_waits"], -1), ("stream", ["stream_seconds"], "DROP"),
    ("timeline", ["actions", 0], {}), ("timeline", ["actions", 0, 0, "start"], "DROP"),
    ("timeline", ["actions", 0, 0, "start"], -1), ("timeline", ["actions", 0, 0, "keep"], "DROP"),
    ("timeline", ["actions", 0, 0, "keep"], 1), ("timeline", ["actions", 0, 0, "pass"], "G"),
    ("timeline", ["actions", 0, 0, "pass"], "B"), ("timeline", ["actions", 0, 0, "pass"], "SEND_F"),
    ("timeline", ["actions", 0, 0, "chunk"], -1), ("timeline", ["actions", 0, 0, "live"], 0.5),
    ("lowered", ["lowered"], 0), ("schedules", ["schedules"], []), ("schedules", ["n_ranks"], "DROP"),
    ("schedules", ["schedules", 1, "kind"], "DROP"), ("schedules", ["schedules", 1, "actions", 0, 0, "chunk"], "0")]


def test_what_is_broken_is_not_valid():
    made = documents()
    made["timeline"]["bounds"].setdefault("memory", 0.0)
    for name, way, value in BROKEN:
        broken = copy.deepcopy(made[name])
        holder = broken
        for step in way[:-1]:
            holder = holder[step]
        if value == "DROP":
            del holder[way[-1]]
        else:
            assert not isinstance(holder, list) or type(value) is not type(holder[way[-1]]) or holder[way[-1]] != value
            holder[way[-1]] = value
        assert validator().is_valid(made[name]) and not validator().is_valid(broken), f"{name}: {way} = {value!r}"


# ---- from tune to a trainer's files ----


def schedules_of_tune(drawn, tuned, limit):
    """Returns what the library's search gives: its plan of a batch, and its winner's schedules of all ranks."""
    lib, ffi, error = chunkflow.lib, chunkflow.ffi, chunkflow.ffi.new("cf_error *")

    def call(function, *arguments):
        assert function(*arguments, error) == 0, ffi.string(error.text)

    desc = ffi.new("cf_tune_desc *", {
        "model": lib.cf_model_find(b"qwen2.5-7b"), "gpu": lib.cf_gpu_find(b"h100-80g"), "n_chunk_sizes": 2, "n_ks": 2,
        "parallel": {"tp": 2, "pp": 4, "dp": 2, "zero": 1, "recompute": lib.CF_RECOMPUTE_SELECTIVE},
        "limit_bytes": limit, "batch": 32, "n_batches": 2, "seed": 1, "memory": {"fragmentation": 5}, "split_backward": 1})
    lists = ffi.new("int64_t[]", [8192, 16384]), ffi.new("int64_t[]", [2, 4])
    desc.chunk_sizes, desc.ks = lists
    numbers, tuning, plan = ffi.new("int64_t[]", tuned), ffi.new("cf_tuning **"), ffi.new("cf_plan **")
    call(lib.cf_tune, numbers, len(tuned), desc, tuning)
    assert tuning[0].winner >= 0
    winner = tuning[0].candidates[tuning[0].winner]
    split = tuning[0].splits[winner.split]
    pack = ffi.new("cf_pack_desc *", {"chunk_size": winner.chunk_size, "n_ranks": split.dp})
    call(lib.cf_pack, ffi.new("int64_t[]", drawn), len(drawn), pack, plan)
    stages, timing = ffi.new("cf_stage_cost[]", split.pp), ffi.new("cf_timing *")
    cost = ffi.new("cf_cost_desc *", {"model": desc.model, "gpu": desc.gpu, "parallel": split,
                                      "chunk_size": winner.chunk_size, "stream": winner.state_window > 0,
                                      "outputs": winner.outputs, "offload": winner.offload})
    call(lib.cf_cost_estimate, cost, stages, split.pp, timing, ffi.NULL)
    simulation = ffi.new("cf_simulate_desc *", {"timing": timing})
    texts = []
    for rank in range(split.dp):
        schedule, timeline = ffi.new("cf_schedule **"), ffi.new("cf_timeline **")
        call(lib.cf_tune_schedule, desc, tuning[0], tuning[0].winner, plan[0], rank, schedule)
        call(lib.cf_simulate, plan[0], schedule[0], simulation, timeline)
        texts.append(chunkflow._json(lib.cf_write_schedule_json, schedule[0], timeline[0]))
    return chunkflow._json(lib.cf_write_plan_json, plan[0], ffi.NULL), texts, winner.state_window


def test_tune_leads_to_the_files_of_a_trainer():
    """The commands that tune prints, run unchanged, must write what the library's own search gives, byte for byte."""
    rng = np.random.default_rng(11)
    tuned = [int(n) for n in np.minimum(rng.lognormal(7.5, 1.5, 150).astype(int) + 1, 120000)]
    (WORK / "tuned").write_text("".join(f"{n}\n" for n in tuned))
    options = ("--model qwen2.5-7b --gpu h100-80g --tp 2 --pp 4 --dp 2 --recompute selective --chunk-sizes 8K,16K"
               " --ks 2,4 --batch 32 --batches 2 --fragmentation 5 --split-backward").split()
    drawn, seen = WORK / "drawn", []
    for limit in (0, 23 << 30, 24 << 30, 200 << 30):
        more = ["--limit-bytes", str(limit)] if limit else []
        text = subprocess.run([COMMAND, "tune", WORK / "tuned", *options, *more, "--batch-lengths", drawn], check=True,
                              capture_output=True, text=True).stdout
        printed = [line for line in text.splitlines() if line.startswith("  chunkflow plan ")]
        assert len(printed) == 1, text
        subprocess.run([COMMAND, *shlex.split(printed[0])[1:]], check=True, capture_output=True, cwd=WORK)
        batch = [int(line) for line in drawn.read_text().split()]
        assert len(batch) == 32
        plan, schedules, window = schedules_of_tune(batch, tuned, limit)
        assert (WORK / "plan.json").read_text() == plan, limit
        head = '{\n  "format": "chunkflow-schedules", "version": 3, "n_ranks": 2,\n  "schedules": [\n'
        assert (WORK / "schedules.json").read_text() == head + ",\n".join(schedules) + "]}\n", limit
        seen.append(("schedules had to be held down to fit" in text, window > 0))
    held, stream = zip(*seen)
    # whatever the winners were, both values of both options were seen
    assert set(held) == set(stream) == {False, True}, seen


# ---- lengths of a data set; tests/torch/lengths.py has those that need a tokenizer ----


def test_lengths_of_token_ids():
    numbers = [int(n) for n in np.random.default_rng(3).integers(0, 40, 600)]
    path = WORK / "ids.jsonl"
    path.write_text("".join(f'{{"input_ids": {list(range(n))}}}\n\n' for n in numbers))
    made = subprocess.run([sys.executable, "-B", "-m", "chunkflow.lengths", path], capture_output=True, text=True,
                          cwd=TOP / "tools" / "python", env={**os.environ, "CHUNKFLOW_BUILD": str(BUILD)})
    assert made.returncode == 0 and not made.stderr, made.stderr
    assert made.stdout.splitlines() == [f"{n} # {path}:{2 * i + 1}" for i, n in enumerate(numbers)]
    listed = subprocess.run([COMMAND, "lengths", "--unit", "tokens", "-"], input=made.stdout, capture_output=True,
                            text=True, check=True).stdout
    assert [int(n) for n in listed.split()] == numbers


def test_lengths_refuse_by_line():
    good, path = '{"input_ids": [1]}\n', WORK / "bad.jsonl"
    for line, fields, words in (
            ("{bad", None, "no JSON of one document"), ('{"a":' * 100000, None, "no JSON of one document"),
            ("\\xff", None, "no JSON of one document"), ("[1]", None, "wanted an object with fields, got list"),
            ('{"a": 1}', None, "has none of input_ids, messages, prompt + completion, text"),
            ('{"text": "a"}', None, "--tokenizer FOLDER"), ('{"input_ids": [1, "a"]}', None, "wanted messages or token"),
            ('{"ids": true}', ("ids",), "ids is bool"), ('{"ids": [1]}', ("other",), "other is NoneType")):
        path.write_text(good + line + "\n" if fields is None else line + "\n")
        error = raised(chunkflow.lengths.Refused, list, chunkflow.lengths.lengths_of([str(path)], fields=fields))
        assert str(error).startswith(f"{path}:{2 if fields is None else 1}: ") and words in str(error), error
    path.write_text(good + "{")
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        assert chunkflow.lengths.main([str(path)]) == 2
    assert not out.getvalue()
    path = WORK / "cut.jsonl.gz"
    path.write_bytes(gzip.compress(good.encode() * 99)[:-12])
    for name in (path, WORK / "nosuch.jsonl", WORK):
        error = raised(chunkflow.lengths.Refused, list, chunkflow.lengths.lengths_of([str(name)]))
        assert str(error).startswith(f"cannot read {name}: "), error


# ---- sequences that share what they begin with ----


def forests(n):
    """Draws, with a seed, options and token ids of sequences, some of which begin like an earlier one."""
    rng = np.random.default_rng(32)
    for _ in range(n):
        sequences = []
        for i in range(int(rng.integers(1, 12))):
            tokens = rng.integers(0, 10**9, rng.integers(0, 60))
            if i and rng.random() < 0.8:
                other = sequences[int(rng.integers(0, i))]
                tokens = np.concatenate([other[:int(rng.integers(0, other.size + 1))], tokens])
            sequences.append(tokens)
        align = int(rng.choice([1, 1, 4]))
        yield sequences, {"chunk_size": 8 * int(rng.integers(1, 9)), "align": align,
                          "min_shared_prefix": int(rng.integers(1, 6)), "n_ranks": int(rng.integers(1, 3))}


def keys_of(plan, chunk, metadata, row):
    """Returns (state or -1, row there) for all keys that a row sees, according to the calls of attention."""
    first, levels = plan.chains["first_chunk"], metadata.calls
    prefix = plan.chunks["prefix"][chunk]
    for i in range(metadata.n_seqs):
        q, k = metadata.cu_seqlens_q[i:i + 2], metadata.cu_seqlens_k[i:i + 2]
        if q[0] <= row < q[1]:
            for key in range(k[0], k[1] - (q[1] - 1 - row)):
                key += prefix if levels else 0
                yield (-1, key - prefix) if key >= prefix else (plan.chunks["chain"][chunk], key)
    for level in levels:
        for i in range(level.n_seqs):
            if level.cu_seqlens_q[i] <= row < level.cu_seqlens_q[i + 1]:
                for key in range(level.cu_seqlens_k[i], level.cu_seqlens_k[i + 1]):
                    yield level.chain, key + level.first


def test_sequences_share_what_they_begin_with():
    for sequences, options in forests(60):
        lengths = [tokens.size for tokens in sequences]
        shares = chunkflow.shared_prefixes_of_tokens(sequences)
        for i, (other, n) in enumerate(shares):
            assert (sequences[i][:n] == sequences[other][:n]).all()
        plan = chunkflow.pack(lengths, shared_prefixes=shares, **options)
        plan.validate(lengths)
        validator().validate(json.loads(plan.json(metadata=True)))
        token_of, rows, weights = {}, 0, np.arange(1.0, 1 + len(lengths))
        for s in range(plan.n_slices):
            rows += plan.slices["length"][s]
            assert plan.slices["sequence"][s] in plan.sequences_of(s)
        assert plan.stats()["rows"] == rows <= sum(lengths)
        for i, tokens in enumerate(sequences):
            for p, token in enumerate(tokens):
                assert token_of.setdefault(plan.row_of(i, p), (p, token)) == (p, token)
        assert len(token_of) == rows
        for chunk in range(plan.n_chunks):
            metadata = plan.metadata(chunk, weights=weights, wants_loss_rows=True, wants_key_ends=True)
            total = metadata.loss_weights.sum()
            if metadata.n_extra:
                total += metadata.extra_weights.sum()
                assert (np.diff(metadata.extra_rows) >= 0).all()
            wanted = sum(weights[i] for i, n in enumerate(lengths) for p in range(n - 1)
                         if plan.row_of(i, p)[0] == chunk)
            assert abs(total - wanted) < 1e-9, (total, wanted)
            for row in np.flatnonzero(metadata.sequence_ids >= 0):
                assert len(set(keys_of(plan, chunk, metadata, row))) == metadata.position_ids[row] + 1
    assert raised(chunkflow.Error, chunkflow.pack, [5, 5], 4,
                  shared_prefixes=[(0, 0), (0, 6)]).field == "shared_prefixes.tokens"
    assert raised(chunkflow.Error, chunkflow.pack, [500, 500], 4,
                  shared_prefixes=[(1, 300), (0, 300)]).field == "shared_prefixes"
    assert chunkflow.pack([5, 5], 4).order is None and chunkflow.shared_prefixes_of_tokens([]).shape == (0, 2)
    for sequence, position in ((0, 5), (2, 0), (-1, 0), (0, -1)):
        raised(IndexError, chunkflow.pack([5, 5], 4).row_of, sequence, position)


# ---- all of them ----


def main():
    failed = 0
    tests = [(name[5:].replace("_", " "), test) for name, test in globals().items() if name.startswith("test_")]
    for name, test in tests:
        try:
            test()
            print(f"ok python: {name}")
        except Exception as error:
            failed += 1
            print(f"FAIL python: {name}: {error!r}")
            traceback.print_exc(file=sys.stdout)
    print(f"{len(tests) - failed} passed, {failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
