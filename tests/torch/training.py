"""Compares chunkflow.torch, .huggingface and .trainer with plain training, in float64: python tests/torch/training.py
[WORDS]

Gradients and losses of chunks must equal those of the unpacked sequences, each run alone through the same module.

- Models: the test's own and Transformers' models, with prompts that are no targets, other means, LoRA and dropout.
- Ranks: one rank, and DistributedDataParallel and FSDP2 on two and three (gloo), with and without chunks to run.
- One sequence on two and four ranks, each with its own rows.
- Ten steps of Transformers' and TRL's trainers.

WORDS choose the tests whose names contain one of them.
"""

import contextlib
import dataclasses
import gc
import inspect
import os
import socket
import sys
import tempfile
import threading
import time
import warnings
import weakref
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
import transformers
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils import checkpoint

import families
from families import CHUNK, Float64, chunked_against_plain, differ, gradients, plain_step, sequences_of, tiny
from judge import check, finish, run

import chunkflow
import chunkflow.torch
from chunkflow.huggingface import Causal, pin_rope
from chunkflow.torch import Step, attention

TOLERANCE = 1e-12
LONG = (150, 7, 33, 64, 1, 97, 12, 0, 61, 5, 130, 2)


# ---- a module of one's own ----


class Small(nn.Module):
    """Two layers of attention with rotated keys and dropout, like a trainer that does not use Transformers."""

    def __init__(self, drop=0.0):
        super().__init__()
        torch.manual_seed(2)
        self.words, self.head = nn.Embedding(97, 16), nn.Linear(16, 97)
        self.layers = nn.ModuleList(nn.ModuleDict({"qkv": nn.Linear(16, 32), "out": nn.Linear(16, 16)})
                                    for _ in range(2))
        self.drop = nn.Dropout(drop)

    def forward(self, x):
        """Runs a pass in the form that chunkflow.torch calls."""
        hidden, own = self.words(x.tokens), []
        turn = x.positions.double()[:, None] / torch.tensor([1.0, 10.0], dtype=torch.float64)
        for i, layer in enumerate(self.layers):
            q, k, v = layer["qkv"](hidden).split([16, 8, 8], 1)
            q, k, v = (y.reshape(len(x.tokens), -1, 4).transpose(0, 1)[None] for y in (q, k, v))
            q, k = (torch.cat([y[..., :2] * turn.cos() - y[..., 2:] * turn.sin(),
                               y[..., :2] * turn.sin() + y[..., 2:] * turn.cos()], -1) for y in (q, k))
            own += [k, v]
            if x.prefix:
                k, v = torch.cat([x.prefix[2 * i], k], 2), torch.cat([x.prefix[2 * i + 1], v], 2)
            if x.cp_group:
                k, v = x.cp_group.rows(k, v)
            rows = attention(q, k, v, x.cu_seqlens_q, x.cu_seqlens_k, x.max_seqlen_q, x.max_seqlen_k,
                             key_ends=x.key_ends)
            hidden = hidden + self.drop(layer["out"](rows[0].transpose(0, 1).reshape(len(x.tokens), 16)))
        return self.head(hidden) if x.keep else None, own


def small_losses(module, s):
    """Returns the cross entropies of a whole sequence's targets, with scaled_dot_product_attention itself."""
    tokens, turn = torch.as_tensor(s), torch.arange(len(s)).double()[:, None] / torch.tensor([1.0, 10.0]).double()
    hidden = module.words(tokens)
    for layer in module.layers:
        q, k, v = (y.reshape(len(s), -1, 4).transpose(0, 1) for y in layer["qkv"](hidden).split([16, 8, 8], 1))
        q, k = (torch.view_as_complex(torch.stack([y[..., :2], y[..., 2:]], -1)) for y in (q, k))
        q, k = (torch.view_as_real(y * torch.polar(torch.ones_like(turn), turn)) for y in (q, k))
        q, k = (torch.cat([y[..., 0], y[..., 1]], -1) for y in (q, k))
        rows = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)
        hidden = hidden + layer["out"](rows[0].transpose(0, 1).reshape(len(s), 16))
    return F.cross_entropy(module.head(hidden[:-1]), tokens[1:], reduction="none")


def small_alone(module, sequences, weights=None, ignored=None):
    """Returns the loss of whole sequences, one at a time, and its gradients."""
    total = 0.0
    wanted = [np.ones(len(s), bool) if ignored is None or ignored[i] is None else ~np.asarray(ignored[i], bool)
              for i, s in enumerate(sequences)]
    n = sum(int(w[1:].sum()) for w in wanted)
    for i, s in enumerate(sequences):
        if len(s) < 2:
            continue
        losses = small_losses(module, s)
        loss = losses[torch.from_numpy(wanted[i][1:])].sum() * (1 / n if weights is None else weights[i])
        loss.backward()
        total += loss.item()
    return total


def test_own_module():
    module = Small().double()
    sequences = [np.random.default_rng(i).integers(0, 97, n) for i, n in enumerate(LONG)]
    wanted_loss = small_alone(module, sequences)
    wanted, worst = gradients(module), 0.0
    for split, align, k, no_tails in [(s, a, k, t) for s in ("full", "even", "cost") for a in (1, 8) for k in (1, 3)
                                      for t in (0, 1)]:
        step = Step(module, module, chunk_size=32, k=k, split=split, align=align, no_tails=no_tails)
        loss = step(sequences)
        worst = max(worst, abs(loss / wanted_loss - 1), differ(gradients(module), wanted))
    check("a module of one's own", worst <= TOLERANCE, f"24 plans, worst {worst:.1e}")

    ignored = [np.arange(n) < n // 2 if i % 3 else None for i, n in enumerate(LONG)]
    wanted_loss = small_alone(module, sequences, ignored=ignored)
    wanted = gradients(module)
    loss = Step(module, module, chunk_size=32)(sequences, ignored=ignored)
    worst = max(abs(loss / wanted_loss - 1), differ(gradients(module), wanted))
    check("prompts that are no targets", worst <= TOLERANCE, f"{worst:.1e}")

    weights = np.random.default_rng(1).random(len(LONG))
    wanted_loss = small_alone(module, sequences, weights)
    wanted = gradients(module)
    loss = Step(module, module, chunk_size=32)(sequences, weights=weights)
    worst = max(abs(loss / wanted_loss - 1), differ(gradients(module), wanted))
    check("weights of sequences", worst <= TOLERANCE, f"{worst:.1e}")

    def squares(logits, x):
        return (logits.square().mean(1) * x.weights).sum()

    step, half, hooked = Step(module, module, chunk_size=32), Small().half(), Small().double()
    hooked.head.bias.register_post_accumulate_grad_hook(lambda p: None)
    model = tiny("llama").float()
    frozen = model.lm_head.half().weight
    frozen.register_post_accumulate_grad_hook(lambda p: None)
    frozen.requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16):
        loss = Step(model, Causal(model), chunk_size=32)([[3, 4, 5]])
    check("a frozen weight in float16 with a hook, under autocast to bfloat16", 4 < loss < 5, f"loss {loss:.2f}")
    for name, call, words in (
            *((f"weights such as {bad}", lambda bad=bad: step([[3, 4, 5], [6, 7]], weights=bad),
               "one number for each of 2 sequences")
              for bad in ([[1, 1, 1], [1, 1]], np.ones((2, 3)), torch.ones(3), 1.0, [1.0])),
            *((f"tokens such as {bad}", lambda bad=bad: step(bad), words)
              for bad, words in (([[5, 1.5]], "sequences[0]: wanted one row of whole numbers"),
                                 ("ab", "sequences: wanted the tokens of each sequence"),
                                 ([[3], [4, -100]], "sequences[1]: wanted numbers of tokens, got -100 at 1"),
                                 (torch.ones(1, 3).long(),
                                  "sequences: got one tensor of shape (1, 3), whose padding"))),
            ("labels as a mask", lambda: step([[3, 4, 5]], [torch.tensor([-100, 4, 5])]), "take labels == -100"),
            ("a mask of targets", lambda: step([[3, 4, 5]], [[0, 1, 1]]), "ignored: wanted True or False"),
            ("padding that labels do not tell", lambda: chunkflow.torch.unpad(
                torch.tensor([[0, 0, 5, 6]]), labels=torch.tensor([[-100, -100, 5, 6]])), "attention_mask: wanted"),
            ("losses that are not summed", lambda: Step(module, module, chunk_size=32, loss=lambda y, x: x.weights)(
                [[3, 4, 5]]), "loss: wanted one number"),
            ("a prefix of True", lambda: Step(module, module, chunk_size=32, min_shared_prefix=True),
             "min_shared_prefix: wanted a whole number, got True"),
            ("weights in float16", lambda: Step(half, half, chunk_size=32)([[3, 4, 5]]), "module: trains in float16"),
            ("frozen weights in float16", lambda: Step(model, lambda x: None, chunk_size=32)([[3, 4, 5]]),
             "module: trains in float16"),
            ("autocast to float16", lambda: torch.autocast("cpu", torch.float16)(step)([[3, 4, 5]]), "use bfloat16"),
            ("a hook on a gradient", lambda: Step(hooked, hooked, chunk_size=32)([[3, 4, 5]]),
             "module: head.bias has a hook")):
        try:
            what = f"taken, {call()}"
        except (TypeError, ValueError) as why:
            what = str(why)
        check(f"refused: {name}", words in what, what)
    loss = Step(module, module, chunk_size=32, loss=squares)(sequences)
    first = gradients(module)
    whole = Step(module, module, chunk_size=256, loss=squares)(sequences)
    worst = max(abs(loss / whole - 1), differ(first, gradients(module)))
    check("a loss of one's own", worst <= TOLERANCE, f"chunks of 32 beside whole sequences, {worst:.1e}")


WRONG = (None, 3, 2.5, "x", [1], ["x"], {"a": 1}, object(), np.zeros(3), [None], [[1]], [{}], (), {}, -1, 1 << 70,
         [object(), 3], [None, (0, "a")], float("nan"))


def test_wrong_types():
    """Tries many values for each argument: the value is accepted, or the error names the argument."""
    module, sequences = Small().double(), [[3, 4, 5, 6, 7], [8, 9]]
    plan, own = chunkflow.pack([5, 2], 4), {"module": module, "forward": module, "chunk_size": 4}
    rows = torch.zeros(1, 2, 7, 4, dtype=torch.float64)
    cu = torch.tensor([0, 7], dtype=torch.int32)
    model = tiny("llama")

    def of(name):
        """Calls a method of a new batch; for a backward, the batch's first chunk has run."""
        def call(**given):
            batch = chunkflow.torch.Batch(module, plan, sequences)
            if name == "run_backward":
                batch.run_forward(0, True)
            return getattr(batch, name)(**given)
        return name, call, inspect.signature(getattr(chunkflow.torch.Batch, name))

    calls = [("Step", Step, inspect.signature(Step), own, [*chunkflow.PackOptions.__annotations__]),
             ("step", lambda **given: Step(**own)(**given), inspect.signature(Step.__call__), {"sequences": sequences}),
             ("plan", Step(**own).plan, inspect.signature(Step.plan), {"lengths": [5, 2]}),
             ("step.log_probs", Step(**own).log_probs, inspect.signature(Step.log_probs), {"sequences": sequences}),
             ("Batch", chunkflow.torch.Batch, inspect.signature(chunkflow.torch.Batch),
              {"forward": module, "plan": plan, "sequences": sequences}),
             ("unpad", chunkflow.torch.unpad, inspect.signature(chunkflow.torch.unpad),
              {name: torch.ones(2, 3).long() for name in ("input_ids", "attention_mask", "labels")}),
             ("attention", attention, inspect.signature(attention),
              {"query": rows, "key": rows, "value": rows, "cu_q": cu, "cu_k": cu, "max_q": 7, "max_k": 7}),
             ("microbatches", chunkflow.torch.microbatches, inspect.signature(chunkflow.torch.microbatches),
              {"batch": chunkflow.torch.Batch(module, chunkflow.pack([3, 2], 4), [[3, 4, 5], [8, 9]]), "chunks": [0]}),
             ("microbatch_loss", chunkflow.torch.microbatch_loss, inspect.signature(chunkflow.torch.microbatch_loss),
              {"logits": torch.zeros(1, 4, 9), "target": torch.zeros(2, 4)}),
             ("Causal", Causal, inspect.signature(Causal), {"model": model}),
             ("pin_rope", pin_rope, inspect.signature(pin_rope), {"model": model, "length": 9})]
    calls += [(*of(name), {"chunk": 0}) for name in ("inputs", "about", "path", "run_backward")]
    calls += [(*of("run_forward"), {"chunk": 0, "keep": True}), (*of("log_probs"), {"rank": 0}),
              (*of("run"), {"schedule": plan.schedule(k=1)})]
    named = taken = 0
    unnamed = []
    for name, function, signature, good, *more in calls:
        function(**good)
        arguments = [p for p, about in signature.parameters.items() if about.kind != about.VAR_KEYWORD and p != "self"]
        for argument in (*arguments, *(more[0] if more else ())):
            for wrong in WRONG:
                try:
                    function(**{**good, argument: wrong})
                    taken += 1
                except Exception as error:
                    named += 1
                    if argument not in str(error):
                        unnamed.append(f"{name}({argument}={wrong!r:.40}): {type(error).__name__}: {error!s:.80}")
    check("wrong types are named", not unnamed and named > 500, f"{named} named, {taken} taken; {unnamed[:9]}")


def test_module_of_another_model():
    """peft's prompts are in a model around the one that forward runs, which would train without them."""
    import peft

    def said(outer, of):
        try:
            Step(outer, Causal(of), chunk_size=32)
        except ValueError as error:
            return str(error)
        return "taken"

    base = tiny("llama")
    prompts = peft.get_peft_model(base, peft.PromptTuningConfig("CAUSAL_LM", num_virtual_tokens=4))
    what = said(prompts, base)
    check("prompts of peft's, and forward of the model inside", "not in the model that forward runs" in what, what)
    base = tiny("llama")
    adapters = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"]))
    check("adapters, and forward of the model inside", said(adapters, base) == "taken", said(adapters, base))
    check("two models", "not in the model" in said(tiny("llama"), tiny("llama")), said(tiny("llama"), tiny("llama")))


def test_dropout():
    module = Small(drop=0.2).double()
    sequences = [np.random.default_rng(i).integers(0, 97, n) for i, n in enumerate(LONG)]
    made = []
    for k in (1, 8):
        step = Step(module, module, chunk_size=32, k=k, seed=5)
        step(sequences)
        made.append(gradients(module))
    same = all(torch.allclose(made[0][name], made[1][name], rtol=1e-12, atol=1e-15) for name in made[0])
    check("dropout, K 1 beside K 8", same, "a replay drops what its forward dropped")
    resumed = Step(module, module, chunk_size=32, k=1, seed=step.seed)
    step(sequences)
    second = gradients(module)
    resumed(sequences)
    check("dropout of the next step, and resumed with its seed", differ(made[0], second) > 1e-3
          and differ(gradients(module), second) <= TOLERANCE, f"seed {step.seed - 1}")


# ---- attention ----

CU_Q, CU_K = (0, 301, 320, 321, 400), (0, 700, 719, 720, 799)  # a prefix of 399 rows; slices of 301, 19, 1 and 79
ATTENDS = {  # what a call asks for
    "plain": {}, "a scale": {"scale": 0.3}, "heads alike": {"heads": 4}, "narrow values": {"value": 5},
    "wide values": {"value": 11}, "a short window": {"window": 9}, "a window within the prefix": {"window": 350},
    "a window longer than all": {"window": 900}, "a window of one": {"window": 1}, "blocks": {"block": 64},
    "long blocks": {"block": 512}, "a soft cap": {"softcap": 0.7}, "sinks": {"sinks": True},
    "a soft cap, a window and sinks": {"softcap": 2.0, "window": 100, "sinks": True},
    "a soft cap in blocks": {"softcap": 2.0, "block": 37}, "narrow values, sinks, a window": {
        "value": 3, "sinks": True, "window": 77}, "shared rows": {"tree": True},
    "shared rows, a window": {"tree": True, "window": 40}, "shared rows, blocks": {"tree": True, "block": 30},
    "shared rows, a soft cap and sinks": {"tree": True, "softcap": 1.0, "sinks": True},
}


def attend_densely(query, key, value, sees, scale=None, softcap=None, sinks=None):
    """Computes softmax over all keys of a mask, as in a textbook."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = torch.einsum("bhid,bhjd->bhij", query, key) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    weights = torch.where(sees, scores.exp(), 0.0)
    return weights @ value / (weights.sum(-1) + (0.0 if sinks is None else sinks.exp()[:, None]))[..., None]


def rows_and_keys(window=None, block=None, tree=False):
    """Returns the mask of a case, and the ends of keys for shared rows: a row's sequence ends where others begin."""
    n, m = CU_Q[-1], CU_K[-1]
    sees, more = torch.zeros(n, m, dtype=torch.bool), {}
    if not tree:
        for q0, q1, k0, k1 in zip(CU_Q, CU_Q[1:], CU_K, CU_K[1:]):
            for i in range(q0, q1):
                at = i + k1 - q1
                low = max(k0, 0 if window is None else at - window + 1)
                low = low if block is None else max(low, k0 + (at - k0) // block * block)
                sees[i, low:at + 1] = True
        return sees, more
    prefix, ends = m - n, torch.full((m,), n, dtype=torch.int32)
    ends[100:prefix], ends[prefix + 50:prefix + 200] = 120, 200  # two branches after the trunk
    positions = torch.cat([torch.arange(prefix, prefix + 200), torch.arange(prefix + 50, prefix + 250)])
    at, end = [*range(prefix), *positions.tolist()], ends.tolist()
    for i, own in enumerate(at[prefix:]):
        sees[i] = torch.tensor([j <= prefix + i < prefix + end[j] and own - at[j] < (window or m)
                                and (block is None or own // block == at[j] // block) for j in range(m)])
    return sees, {"key_ends": ends, "positions": positions}


def attend_both(case, road=None):
    """Returns how far rows and gradients of a call are from the textbook's."""
    asked, rng = dict(ATTENDS[case]), torch.Generator().manual_seed(6)
    heads, width, tree = asked.pop("heads", 2), asked.pop("value", 8), asked.pop("tree", False)

    def drawn(*shape):
        return torch.randn(*shape, generator=rng, dtype=torch.float64).requires_grad_()
    query, key, value = drawn(1, 4, CU_Q[-1], 8), drawn(1, heads, CU_K[-1], 8), drawn(1, heads, CU_K[-1], width)
    given = [query, key, value]
    if asked.pop("sinks", False):
        asked["sinks"] = drawn(4)
        given.append(asked["sinks"])
    sees, told = rows_and_keys(asked.get("window"), asked.get("block"), tree)
    wanted = attend_densely(query, key, value, sees, **{x: y for x, y in asked.items() if x not in ("window", "block")})
    slope = torch.randn(wanted.shape, generator=rng, dtype=torch.float64)
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in (CU_Q, CU_K))
    if road is None:
        got = attention(query, key, value, cu_q, cu_k, 301, 700, **asked, **told)
    else:
        slices = list(zip(CU_Q, CU_Q[1:], CU_K, CU_K[1:]))
        got = road(query, key, value, slices, asked.get("scale"), asked.get("window") or 1 << 62, asked.get("block"),
                   told.get("key_ends"), told.get("positions"))
    wanted, got = [wanted, *torch.autograd.grad(wanted, given, slope)], [got, *torch.autograd.grad(got, given, slope)]
    least = 1e-3 * max(float(y.norm()) for y in wanted)  # with a window of one, Q and K have no gradient
    return max(float((x - y).norm()) / max(float(y.norm()), least) for x, y in zip(got, wanted))


def test_attention():
    """Tests the CPU's kernel, the hand-written one, and masks as other devices have them."""
    found, whole = chunkflow.torch, {"heads", "scale", "value", "window", "block", "tree"}
    for case, asked in ATTENDS.items():
        ways = [attend_both(case)]
        if "softcap" not in asked:
            with mock.patch.object(found, "_Flash", lambda scale: found._ByHand(scale, None)):
                ways.append(attend_both(case))
        if set(asked) <= whole:
            ways.append(attend_both(case, found._by_masks))
        check(f"attention, {case}", max(ways) <= TOLERANCE, ", ".join(f"{x:.1e}" for x in ways))
    masks = mock.Mock(side_effect=found._sees_of_rows)
    with mock.patch.object(found, "_sees_of_rows", masks):
        worst = max(attend_both(case) for case in ("plain", "blocks", "sinks", "narrow values"))
    check("no masks without windows", worst <= TOLERANCE and not masks.called, f"{masks.call_count} made")
    rows = torch.randn(1, 2, 30, 8, dtype=torch.float64).transpose(2, 3).contiguous().transpose(2, 3).requires_grad_()
    cu = torch.tensor([0, 30, 30, 30])
    off = torch.autograd.grad(attention(rows, rows, rows, cu, cu, 30, 30).sum(), rows)[0]
    off -= torch.autograd.grad(attend_densely(rows, rows, rows, torch.ones(30, 30).bool().tril()).sum(), rows)[0]
    check("columns apart, a gradient that is one number, empty slices", float(off.abs().max()) <= TOLERANCE,
          f"{float(off.abs().max()):.1e}")
    for q, k, cu_q, cu_k, words in ((30, 29, cu, cu, "wanted 30 rows of K and V, got 29"),
                                    (29, 30, cu, cu, "all rows of cu_q"), (30, 30, [0, 3], [0, 2], "a key for each")):
        x, cu = torch.zeros(1, 2, 30, 8), [torch.as_tensor(c) for c in (cu_q, cu_k)]
        try:
            what = f"taken, {attention(x[:, :, :q], x[:, :, :k], x[:, :, :k], *cu, 9, 9)}"
        except ValueError as why:
            what = str(why)
        check("rows that are not there", words in what, what)
    for dtype, most in ((torch.bfloat16, 2e-2), (torch.float16, 3e-3)):
        q, k = (torch.randn(1, h, n, 16, generator=torch.Generator().manual_seed(1)) for h, n in ((4, 60), (2, 90)))
        cu_q, cu_k = torch.tensor([0, 60]), torch.tensor([0, 90])
        with torch.autocast("cpu", dtype):
            got = attention(q, k.to(dtype), k, cu_q, cu_k, 60, 90)
        wanted = attend_densely(q, k, k, torch.ones(60, 90).bool().tril(30))
        off = float((got.float() - wanted).norm() / wanted.norm())
        check(f"attention under autocast, {dtype}", got.dtype == dtype and off <= most, f"{off:.1e}")


# ---- outputs of attention, kept for replays ----


def test_outputs():
    """Wrong outputs are detected, kept outputs are released, and a replay that differs from its forward is refused."""
    outputs, batch = chunkflow.torch._Outputs, chunkflow.torch.Batch
    with Float64():
        model = tiny("qwen2")
        sequences, forward = sequences_of(model, (90, 5)), Causal(model)
        plain_step(model, sequences)
        wanted = gradients(model)
        for place, name in enumerate(("output", "log-sum")):
            def keep(self, query, *found):
                with torch.no_grad():
                    found[place].mul_(1 + 1e-6)
                self.calls.append((query[:, :, :1].clone(), *found))
            with mock.patch.object(outputs, "keep", keep):
                Step(model, forward, chunk_size=CHUNK)(sequences)
            off = differ(gradients(model), wanted)
            check(f"a control: {name} wrong by 1e-6", 1e-8 < off < 1e-3, f"seen, {off:.1e}")
        for given, least, calls in ((None, 1, 0), (False, 1, 10), (True, 1, 0)):
            with families.Watch() as seen, mock.patch.object(chunkflow.torch, "_LEAST", least):
                Step(model, forward, chunk_size=CHUNK, outputs=given)(sequences)
            off = differ(gradients(model), wanted)
            check(f"outputs={given}", off <= TOLERANCE and (seen.replays, seen.attends) == (5, calls),
                  f"{off:.1e}, {seen.attends} calls in {seen.replays} replays")
        windows = tiny("mistral")
        with families.Watch() as seen, mock.patch.object(chunkflow.torch, "_LEAST", 10):
            Step(windows, Causal(windows), chunk_size=CHUNK)(sequences)
        check("short windows keep nothing", (seen.taken, seen.attends) == (0, 10), f"{seen.attends} calls")

        made, failing = [], Causal(model)
        kept = outputs.keep

        def watched(self, query, *found):
            kept(self, query, *found)
            made.extend(weakref.ref(x) for x in self.calls[-1])

        def fails(inputs):
            if inputs.keep:
                raise KeyboardInterrupt
            return failing(inputs)
        plan = chunkflow.pack([90, 5], CHUNK)
        run = batch(fails, plan, sequences)
        with mock.patch.object(outputs, "keep", watched):
            try:
                run.run(plan.schedule(k=1))
            except KeyboardInterrupt:
                pass
        gc.collect()
        alive = sum(x() is not None for x in made)
        check("a run that is stopped", len(made) >= 30 and alive == 0 and not (run.rows or run.kept or run.outputs),
              f"{alive} of {len(made)} tensors are left")
        run = batch(forward, plan, sequences)
        run.run(plan.schedule(k=1))
        check("a run that ends", not (run.rows or run.kept or run.outputs or run.sums), "nothing is left")

    module, drawn = Small().double(), torch.Generator().manual_seed(3)
    sequences = [np.random.default_rng(i).integers(0, 97, n) for i, n in enumerate(LONG)]
    wanted_loss = small_alone(module, sequences)
    wanted, module.drop = gradients(module), nn.Identity()
    run = Small.forward

    def early(x):
        """Stops after the last layer's K and V if nothing else is needed."""
        calls = []

        def stop(*given, **more):
            calls.append(None)
            runs = x.keep or len(calls) == 1
            return chunkflow.torch.attention(*given, **more) if runs else torch.zeros_like(given[0])
        with mock.patch.dict(globals(), {"attention": stop}):
            return run(module, x)

    def again(x):
        """Computes attention again in its backward."""
        def within(*given, **more):
            return checkpoint.checkpoint(chunkflow.torch.attention, *given, use_reentrant=False, **more)
        with mock.patch.dict(globals(), {"attention": within}):
            return run(module, x)

    def own_random(x):
        """Uses a generator of its own for dropout, which has advanced when a replay uses it."""
        def noisy(query, *given, **more):
            query = query * torch.rand(query.shape[:3] + (1,), generator=drawn).double()
            return chunkflow.torch.attention(query, *given, **more)
        with mock.patch.dict(globals(), {"attention": noisy}):
            return run(module, x)
    for name, forward in (("a forward that ends early", early), ("layers that are checkpointed", again)):
        loss = Step(module, forward, chunk_size=32, outputs=True)(sequences)
        off = max(abs(loss / wanted_loss - 1), differ(gradients(module), wanted))
        check(name, off <= TOLERANCE, f"{off:.1e}")
    for name, forward, words, device, outputs in (
            ("a random generator of one's own", own_random, "other queries than that of its forward", "cpu", True),
            ("the same, attending again", own_random, "hands on other rows than its forward", "cpu", False),
            ("attention that hands out no log-sums", module, "hands out no log-sums", "another", True)):
        with mock.patch.object(chunkflow.torch, "_FLASH", device):
            try:
                what = f"taken, {Step(module, forward, chunk_size=32, outputs=outputs)(sequences)}"
            except ValueError as why:
                what = str(why)
        check(name, words in what, what)
        module.zero_grad()


# ---- models of Transformers ----


def test_models():
    with Float64():
        worst = max(chunked_against_plain(tiny("qwen2"), k=k, split=s) for k in (1, 2) for s in ("full", "even"))
        check("Qwen2, K and splits", worst <= TOLERANCE, f"{worst:.1e}")
        model = tiny("llama")
        sequences = sequences_of(model)
        ignored = [np.arange(len(s)) < 3 for s in sequences]
        loss = Step(model, Causal(model), chunk_size=CHUNK)(sequences, ignored=ignored)
        got = gradients(model)
        wanted = plain_step(model, sequences, ignored)
        worst = max(abs(loss / wanted - 1), differ(got, gradients(model)))
        check("Llama, prompts that are no targets", worst <= TOLERANCE, f"{worst:.1e}")


class Doubled(transformers.LlamaForCausalLM):
    """A user's forward around the family's, with its own embedding."""

    def forward(self, input_ids=None, labels=None, **others):
        return super().forward(inputs_embeds=2 * self.model.embed_tokens(input_ids), labels=labels, **others)


class Penalized(transformers.LlamaForCausalLM):
    """A z-loss in forward."""

    def forward(self, input_ids=None, labels=None, **others):
        output = super().forward(input_ids=input_ids, labels=labels, **others)
        if labels is not None:
            output.loss = output.loss + 1e-3 * output.logits.logsumexp(-1).square().mean()
        return output


class Deaf(transformers.LlamaForCausalLM):
    """A forward that ignores its cache."""

    def forward(self, input_ids=None, labels=None, **others):
        return super().forward(input_ids=input_ids, labels=labels)


def of_class(cls):
    """Returns a tiny model of the test's own class."""
    model = tiny("llama")
    model.__class__ = cls
    return model


def test_own_forwards():
    """Passes that keep nothing also run the model's own forward with its hooks: replays see the same values."""
    def shifted(module, given, named):
        return given, {**named, "input_ids": None, "inputs_embeds": 3 * module.model.embed_tokens(named["input_ids"])}

    with Float64():
        hooked = tiny("llama")
        hooked.register_forward_pre_hook(shifted, with_kwargs=True)
        for name, model in (("a forward of one's own", of_class(Doubled)), ("a hook before forward", hooked)):
            for more in ({"k": 1}, {"k": 1, "outputs": False}, {"k": 99}):
                with families.Watch() as seen:
                    off = chunked_against_plain(model, **more)
                check(f"{name}, {more}", off <= families.TOLERANCE and (seen.replays > 0) == (more["k"] == 1),
                      f"{off:.1e}, {seen.replays} replays")


def test_own_losses():
    """A loss other than the cross entropy is refused with both numbers. The probe leaves no trace."""
    import peft

    def tripled(logits, labels, vocab_size, **others):
        return 3 * nn.functional.cross_entropy(logits[0, :-1].double(), labels[0, 1:])

    def halve(module, given, output):
        if output.loss is not None:
            output.loss = output.loss / 2

    def adapters(**options):
        return peft.get_peft_model(tiny("llama"), peft.LoraConfig(target_modules=["q_proj"], **options))
    adaptive = peft.AdaLoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], total_step=9, tinit=1, tfinal=1)
    with Float64():
        other, hooked = tiny("llama"), tiny("llama")
        other.loss_function = tripled
        hooked.register_forward_hook(halve)
        for name, model, words in (
                ("a loss_function", other, "its own loss of 14 tokens is"),
                ("a z-loss", of_class(Penalized), "own loss"),
                ("a hook on the loss", hooked, "own loss"),
                ("AdaLoRA", peft.get_peft_model(tiny("llama"), adaptive), "own loss"),
                ("aLoRA", adapters(alora_invocation_tokens=[3]), "alora_invocation_tokens"),
                ("a forward that drops the cache", of_class(Deaf), "must hand past_key_values"),
                ("a model without a head", tiny("llama").model, "LlamaModel has no language model's head"),
                ("a classifier", transformers.LlamaForSequenceClassification(tiny("llama").config).double(),
                 "LlamaForSequenceClassification has no language model's head"),
                ("an encoder and a decoder", transformers.T5ForConditionalGeneration(transformers.T5Config(
                    vocab_size=97, d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8)), "an encoder")):
            what = families.refused(lambda: Causal(model))
            check(f"refused: {name}", words in what, what)
        sequences = sequences_of(other)
        loss = Step(other, Causal(other, own_loss=False), chunk_size=CHUNK)(sequences)
        got = gradients(other)
        off = max(abs(loss / plain_step(other, sequences) - 1), differ(got, gradients(other)))
        check("the same with a loss of Step's own", off <= families.TOLERANCE, f"{off:.1e}")

        model = tiny("gpt2", resid_pdrop=0.5)
        sum(p.square().sum() for p in model.parameters()).backward()
        state, modes = torch.get_rng_state(), [m.training for m in model.modules()]
        grads, hooks = [p.grad.clone() for p in model.parameters()], len(model.get_input_embeddings()._forward_hooks)
        Causal(model)
        same = torch.equal(state, torch.get_rng_state()) and modes == [m.training for m in model.modules()]
        same &= all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads))
        check("the probe leaves no trace", same and len(model.get_input_embeddings()._forward_hooks) == hooks,
              "random state, modes, gradients and hooks")


def test_odd_batches():
    """No targets at all; empty sequences among others; LoRA on the head and on tied embeddings."""
    import peft
    with Float64():
        model = tiny("llama")
        sequences = sequences_of(model, (40, 0, 3, 0))
        worst = max(chunked_against_plain(model, sequences, k) for k in (1, 2))
        check("lengths 40, 0, 3, 0", worst <= TOLERANCE, f"{worst:.1e}")
        step = Step(model, Causal(model), chunk_size=CHUNK)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            loss = step(sequences, ignored=[np.ones(len(s), bool) for s in sequences]) + step([])
        most = max((float(g.abs().max()) for g in gradients(model).values()), default=0.0)
        said = [str(w.message) for w in seen if w.filename == __file__]
        check("all targets ignored, and no sequences", loss == 0.0 and most == 0.0 and len(said) == 2
              and "no token of this batch is a target" in said[0], f"loss {loss}, largest gradient {most}; {said}")
        try:
            what = f"taken, {step([[3, 4], [5, 97, 6]])}"
        except ValueError as why:
            what = str(why)
        check("a token without an embedding", "sequences[1]: the model has embeddings of 97 tokens" in what, what)
        for name, tied, targets in (("the head", False, ["lm_head", "q_proj"]),
                                    ("tied embeddings", True, ["embed_tokens"]),
                                    ("tied embeddings and layers", True, ["embed_tokens", "v_proj"])):
            model = peft.get_peft_model(tiny("llama", tie_word_embeddings=tied), peft.LoraConfig(
                r=2, target_modules=targets, init_lora_weights=False)).double()
            worst = chunked_against_plain(model)
            check(f"LoRA on {name}", worst <= TOLERANCE, f"{worst:.1e}")


def test_neighbours():
    """Qwen3.5, whose convolution sees four rows, in shorter chunks; and a sequence's log-probabilities, which must not
    depend on what follows it in its chunk."""
    with Float64():
        model = tiny("qwen3_5_text")
        forward = Causal(model)
        worst = 0.0
        for chunk in (1, 3, CHUNK):
            step = Step(model, forward, chunk_size=chunk)
            sequences = sequences_of(model, (21, 5, 2, 6))
            loss = step(sequences)
            got = gradients(model)
            wanted = plain_step(model, sequences)
            worst = max(worst, abs(loss / wanted - 1), differ(got, gradients(model)))
        check("Qwen3.5 in chunks of 1, 3 and 16", worst <= TOLERANCE, f"{worst:.1e}")
        step, found = Step(model, forward, chunk_size=CHUNK), []
        for seed in (1, 2):
            others = [np.random.default_rng(seed).integers(3, 97, n) for n in (7, 4)]
            found.append(step.log_probs([sequences[0], sequences[1], *others])[:2])
        same = all(torch.allclose(a, b, rtol=0, atol=1e-14) for a, b in zip(*found))
        check("Qwen3.5, neighbours changed", same, "the same log-probabilities")


def test_threads():
    """Two models, each in its own thread."""
    model, losses = tiny("llama").float(), [[], []]
    long, short = sequences_of(model, (150, 7, 33)), sequences_of(model, (40, 9))
    wanted = [Step(model, Causal(model), chunk_size=CHUNK)(s) for s in (long, short)]
    steps = [Step(m, Causal(m), chunk_size=CHUNK) for m in (model, tiny("llama").float())]
    threads = [threading.Thread(target=lambda i=i, s=s: losses[i].extend(steps[i](s) for _ in range(3)))
               for i, s in enumerate((long, short))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check("two threads", [len(x) for x in losses] == [3, 3] and np.allclose(losses, np.array(wanted)[:, None], 1e-5),
          f"losses {losses} beside {wanted}")


def test_lora():
    import peft
    with Float64():
        model = peft.get_peft_model(tiny("llama"), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "up_proj"],
                                                                   lora_dropout=0.0, init_lora_weights=False)).double()
        worst = chunked_against_plain(model)
        n = sum(p.requires_grad for p in model.parameters())
    check("LoRA", worst <= TOLERANCE and n == 12, f"{n} tensors, {worst:.1e}")


# ---- sequences that share rows ----


def answers(prompts, seed=3, words=97):
    """For each (length of a prompt, lengths of its answers), returns the answers after their prompt; each masks its
    prompt."""
    rng, sequences, ignored, group = np.random.default_rng(seed), [], [], []
    for number, (length, answer_lengths) in enumerate(prompts):
        prompt = rng.integers(3, words, length)
        for n in answer_lengths:
            sequences.append(np.concatenate([prompt, rng.integers(3, words, n)]))
            ignored.append(np.arange(length + n) < length)
            group.append(number)
    return sequences, ignored, np.array(group)


# Prompts longer and shorter than a chunk, one that ends in the middle of a chunk, answers of one token and of several
# chunks.
GROUPS = [(41, (9, 3, 20, 1, 7)), (6, (4, 5)), (16, (2, 33, 2)), (70, (5, 5, 12))]


def log_prob_sum(model, tokens, ignored):
    tokens = torch.as_tensor(tokens)[None]
    logits = model(input_ids=tokens, use_cache=False).logits[0, :-1]
    each = logits.log_softmax(1).gather(1, tokens[0, 1:, None])[:, 0]
    return each[torch.from_numpy(~ignored[1:])].sum()


def advantages_of(group, ignored, seed=4):
    """GRPO: the rewards of a prompt's answers less their mean, divided by their deviation; the loss is a mean over an
    answer's tokens."""
    rewards = np.random.default_rng(seed).random(len(group))
    out = np.zeros(len(group))
    for g in set(group.tolist()):
        of = group == g
        out[of] = (rewards[of] - rewards[of].mean()) / (rewards[of].std() + 1e-4)
    return out / np.array([(~i).sum() for i in ignored]) / len(group)


def shared_rows(step, sequences):
    return int(step.plan(sequences)[0].stats()["rows"])


def compare_grpo(model, sequences, ignored, weights, **options):
    """Returns how far loss and gradients of shared prompts are from those of each answer after its own prompt."""
    step = Step(model, Causal(model), chunk_size=CHUNK, min_shared_prefix=1, **options)
    loss = step(sequences, ignored=ignored, weights=weights)
    got, wanted_loss = gradients(model), 0.0
    for s, i, w in zip(sequences, ignored, weights):
        one = -w * log_prob_sum(model, s, i)
        one.backward()
        wanted_loss += one.item()
    return max(abs(loss - wanted_loss) / np.abs(weights).max(), differ(got, gradients(model)))


def test_trees():
    sequences, ignored, group = answers(GROUPS)
    weights = advantages_of(group, ignored)
    with Float64():
        for kind in ("qwen2", "gemma2", "gpt_oss", "deepseek_v3", "llama4_text"):
            model, worst = tiny(kind), 0.0
            with families.Watch() as seen:
                for k in (1, 2, 99) if kind == "qwen2" else (1,):
                    worst = max(worst, compare_grpo(model, sequences, ignored, weights, k=k))
            check(f"{kind}, answers share their prompts", worst <= TOLERANCE and seen.attends == 0 < seen.taken,
                  f"{worst:.1e}, {seen.taken} outputs taken")
        model = tiny("llama")
        step = Step(model, Causal(model), chunk_size=CHUNK, min_shared_prefix=1)
        rows, wanted = shared_rows(step, sequences), sum(n + sum(a) for n, a in GROUPS)
        check("rows of shared prompts", wanted - 8 <= rows <= wanted, f"{rows} for {sum(map(len, sequences))} tokens")

        ids = [np.where(i, s + 1000 * (at % 2), s) for at, (s, i) in enumerate(zip(sequences, ignored))]  # two images
        apart = chunkflow.shared_prefixes_of_tokens(ids)
        lengths = [len(s) for s in sequences]
        more = int(step.plan(lengths, apart)[0].stats()["rows"])
        try:
            what = f"planned, {step.plan(lengths)}"
        except ValueError as why:
            what = str(why)
        check("lengths of sequences that share", "step.plan(sequences)" in what, what)
        loss = step(sequences, ignored=ignored, weights=weights)
        got = gradients(model)
        other = step(sequences, ignored=ignored, weights=weights, shared_prefixes=apart)
        off = max(abs(loss - other) / np.abs(weights).max(), differ(got, gradients(model)))
        check("shares of one's own", more > rows and off <= TOLERANCE, f"{more} rows, {off:.1e}")

        found = step.log_probs(sequences)
        with torch.no_grad():
            off = max(abs(float(f[torch.from_numpy(~i[1:])].sum() - log_prob_sum(model, s, i)))
                      for f, s, i in zip(found, sequences, ignored))
        check("log-probabilities of shared prompts", off <= 1e-11, f"{off:.1e}")


class Lost:
    """Where sequences diverge, keeps only the first branch's gradient of each state: a deliberate mistake."""

    def __init__(self):
        self.found, self.right = set(), chunkflow.torch.Batch._hand_back

    def take(self, batch, chunk, i, row):
        if isinstance(batch.rows[batch.path(chunk)[-1][0]][i], dict):
            for n, found in zip(batch._joins(chunk), row.grad):
                place = batch._chain_at(chunk, n), n, i
                found *= place not in self.found
                self.found.add(place)
        self.right(batch, chunk, i, row)


def forget_tails(states, rows, layer_idx, state_idx=0, *, conv_kernel_size):
    """Replaces _States.update_conv_state: where sequences share rows, each piece sees zeros before it."""
    if chunkflow.huggingface._running.passes[-1].tree and ("conv", state_idx) in states.now:
        states.now["conv", state_idx] = torch.zeros_like(states.now["conv", state_idx])
    return right_update(states, rows, layer_idx, state_idx, conv_kernel_size=conv_kernel_size)


right_update = chunkflow.huggingface._States.update_conv_state


def test_rollouts():
    """Rollouts that diverge at three depths, one only a row after another; one that is the beginning of another; a
    copy; weights of both signs. Recurrent layers: gated delta rules and Mamba-2, each with attention layers, and
    Mamba-2 alone."""
    rng = np.random.default_rng(8)
    prompt, answer, other = rng.integers(3, 97, 37), rng.integers(3, 97, 25), rng.integers(3, 97, 9)
    whole = np.concatenate([prompt, answer])
    deeper = [np.concatenate([whole[:n], rng.integers(3, 97, m)]) for n, m in ((38, 20), (50, 3), (50, 18), (38, 1))]
    sequences = [whole, whole[:50], whole.copy(), np.concatenate([prompt, other]), prompt, whole[:50], *deeper]
    ignored = [np.arange(len(s)) < len(prompt) for s in sequences]
    weights = np.array([0.3, -0.5, -0.3, 0.7, 0.2, -0.1, 0.4, 0.6, -0.2, 0.5])
    with Float64():
        for kind, ks in (("qwen2", (1, 2)), ("qwen3_next", (1, 2)), ("nemotron_h", (2,)), ("mamba2", (1,))):
            model = tiny(kind)
            with families.Watch() as seen:
                worst = max(compare_grpo(model, sequences, ignored, weights, k=k) for k in ks)
            holds = worst <= families.TOLERANCE and seen.attends == 0 and (seen.taken > 0 or kind == "mamba2")
            check(f"rollouts that part, begin one another, or are the same, {kind}", holds,
                  f"{worst:.1e}, {seen.taken} outputs of {seen.replays} replays")
        for name, cls, method, fault in (
                ("gradients of one way on alone", chunkflow.torch.Batch, "_hand_back",
                 lambda *given, lost=Lost(): lost.take(*given)),
                ("convolutions that see no tail", chunkflow.huggingface._States, "update_conv_state", forget_tails)):
            model = tiny("qwen3_next")
            with mock.patch.object(cls, method, fault):
                off = compare_grpo(model, sequences, ignored, weights)
            check(f"a control: {name}", off > 1e-6, f"{off:.1e}")


def test_preferences():
    """DPO: a loss of two sums of log-probabilities, whose derivatives are the sequences' weights."""
    sequences, ignored, _ = answers([(41, (9, 14)), (6, (4, 5)), (16, (2, 33)), (70, (12, 5))])
    reference, beta = torch.linspace(-1, 1, len(sequences) // 2, dtype=torch.float64), 0.1
    with Float64():
        model = tiny("llama")
        step = Step(model, Causal(model), chunk_size=CHUNK, min_shared_prefix=1)
        sums = [float(x[torch.from_numpy(~i[1:])].sum()) for x, i in zip(step.log_probs(sequences), ignored)]
        margins = torch.tensor(sums, dtype=torch.float64).view(-1, 2) @ torch.tensor([1.0, -1.0]).double() - reference
        slopes = beta * torch.sigmoid(-beta * margins) / len(margins)
        step(sequences, ignored=ignored, weights=torch.stack([slopes, -slopes], 1).flatten().numpy())
        got = gradients(model)
        plain = torch.stack([log_prob_sum(model, s, i) for s, i in zip(sequences, ignored)]).view(-1, 2)
        loss = -F.logsigmoid(beta * (plain[:, 0] - plain[:, 1] - reference)).mean()
        loss.backward()
        off = max(abs(float(-F.logsigmoid(beta * margins).mean() / loss) - 1), differ(got, gradients(model)))
    check("pairs of answers to a prompt", off <= TOLERANCE, f"{off:.1e}")


def test_trees_own_module():
    """All tokens are targets, so rows where sequences diverge have several, and some sequences end within others."""
    module = Small().double()
    sequences, _, _ = answers([(41, (9, 3, 20, 1, 7, 0)), (6, (4, 5)), (16, (2, 33, 2)), (70, (5, 5, 12))])
    sequences += [np.concatenate([sequences[2], [5, 6, 7]]), np.concatenate([sequences[2], [8, 9]]), sequences[0]]
    weights = np.random.default_rng(1).normal(size=len(sequences))
    wanted_loss = small_alone(module, sequences, weights)
    wanted, worst = gradients(module), 0.0
    for split, align, k in [(s, a, k) for s in ("full", "even") for a in (1, 4) for k in (1, 2, 99)]:
        step = Step(module, module, chunk_size=16, k=k, split=split, align=align, min_shared_prefix=align)
        loss = step(sequences, weights=weights)
        worst = max(worst, abs(loss / wanted_loss - 1), differ(gradients(module), wanted))
    check("a module of one's own, trees", worst <= TOLERANCE, f"12 plans, worst {worst:.1e}")

    once = Step(module, module, chunk_size=16, min_shared_prefix=1, shared_mean=True)
    once(sequences, weights=np.ones(len(sequences)))
    got = gradients(module)
    for i, s in enumerate(sequences):  # a token that n sequences share counts 1 / n in each
        parts = [1 / sum(len(o) > t and (o[:t + 1] == s[:t + 1]).all() for o in sequences) for t in range(len(s))]
        for t in range(1, len(s)):
            small_alone(module, [s], [parts[t]], [np.arange(len(s)) != t])
    worst = differ(got, gradients(module))
    check("a module of one's own, a token counts once", worst <= TOLERANCE, f"{worst:.1e}")

    ignored = [np.arange(len(s)) < len(s) // 3 if i % 3 else None for i, s in enumerate(sequences)]
    wanted_loss, log_probs = 0.0, [-small_losses(module, s) for s in sequences]
    old = nn.utils.rnn.pad_sequence([x.detach() for x in log_probs], batch_first=True)
    old = old + 0.3 * torch.randn(old.shape, generator=torch.Generator().manual_seed(1)).double()
    signs = torch.tensor(weights)

    def clipped(log_prob, before, sign):
        ratio = (log_prob - before).exp()
        return -torch.min(ratio * sign, ratio.clamp(0.8, 1.2) * sign)

    def of_pass(logits, x):
        at = x.targets_by_sequence()
        log_prob = logits[at.rows].log_softmax(1).gather(1, at.tokens[:, None])[:, 0]
        return (at.weights * clipped(log_prob, old[at.sequences, at.positions], signs[at.sequences])).sum()
    for i, x in enumerate(log_probs):
        counted = torch.ones(len(x), dtype=torch.bool) if ignored[i] is None else torch.from_numpy(~ignored[i][1:])
        loss = clipped(x, old[i, :len(x)], signs[i])[counted].sum() / len(x)
        loss.backward()
        wanted_loss += loss.item()
    clipped_wanted, worst = gradients(module), 0.0
    for least in (0, 1):
        step = Step(module, module, chunk_size=16, min_shared_prefix=least, loss=of_pass)
        loss = step(sequences, ignored=ignored, weights=[1 / len(x) for x in log_probs])
        worst = max(worst, abs(loss / wanted_loss - 1), differ(gradients(module), clipped_wanted))
        worst = max(worst, *(float((a - b.detach()).abs().max()) for a, b in zip(step.log_probs(sequences), log_probs)))
    check("a clipped ratio of each token, with and without trees", worst <= TOLERANCE, f"{worst:.1e}")

    def one_target(logits, x):
        return chunkflow.torch.cross_entropy(logits, dataclasses.replace(x, more=None))

    def siblings(x):
        return module(dataclasses.replace(x, key_ends=None if x.key_ends is None else torch.full_like(
            x.key_ends, len(x.tokens))))
    for name, forward, loss in (("one target where sequences part", module, one_target),
                                ("siblings see each other", siblings, chunkflow.torch.cross_entropy)):
        Step(module, forward, chunk_size=16, min_shared_prefix=1, loss=loss)(sequences, weights=weights)
        off = differ(gradients(module), wanted)
        check(f"a control: {name}", off > 1e-3, f"{off:.1e}")


# ---- several ranks ----


def batches():
    """Returns lengths with work for every rank, and with idle chunks; in trees sequences begin alike."""
    return {"work for all": (40, 7, 13, 1, 29, 0, 5, 16, 16, 14), "idle chunks": (60, 3, 3), "one chunk": (9,),
            "recurrent layers": (60, 3, 3), "trees": (40, 45, 30, 16, 7, 50, 38, 12), "one tree": (40, 45)}


def work(rank, n_ranks, store, results):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=n_ranks)
    for name, lengths in batches().items():
        for way in ("DDP", "FSDP2"):
            with Float64():
                plain, model = (tiny("qwen3_next" if "recurrent" in name else "llama") for _ in range(2))
                sequences = sequences_of(plain, lengths)
                for s in sequences[1:] if "tree" in name else []:
                    s[:len(s) - 6] = sequences[0][:min(len(s) - 6, 31)].tolist() + s[31:len(s) - 6].tolist()
                wanted_loss = plain_step(plain, sequences)
                plain_step(plain, sequences)  # two batches without zero_grad between them
                wanted = gradients(plain)
                if way == "DDP":
                    model = nn.parallel.DistributedDataParallel(model)
                else:
                    for layer in model.model.layers:
                        fully_shard(layer)
                    fully_shard(model)
                step = Step(model, Causal(model), chunk_size=CHUNK, k=1, min_shared_prefix=1 if "tree" in name else 0)
                with families.Watch() as seen:
                    loss = step(sequences)
                    loss = (loss + step(sequences)) / 2
            got = {key.removeprefix("module."): g.full_tensor() if hasattr(g, "full_tensor") else g
                   for key, g in gradients(model).items()}
            error = max(abs(loss / wanted_loss - 1), differ(got, wanted), float(seen.attends))
            results.put((rank, f"{way}, {n_ranks} ranks, {name}", error))
    for dtype, lockstep in NARROW if n_ranks == 2 else ():
        results.put((rank, f"FSDP2, {dtype}, lockstep={lockstep}", plain_after(dtype, lockstep)))
    dist.destroy_process_group()


NARROW = {(torch.float32, 0): 1e-5, (torch.float32, 1): 1e-5, (torch.bfloat16, 0): 3e-2, (torch.bfloat16, 1): 3e-2}


def plain_after(dtype, lockstep):
    """Trains a step with weights of this type under FSDP2, then one that fails, and runs FSDP2's own backward. Returns
    how far the first and the last are from one process's in float32."""
    plain, model = tiny("llama").float(), tiny("llama").float()
    sequences = sequences_of(plain, batches()["idle chunks"])
    for part in [*model.model.layers, model]:
        fully_shard(part, mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32))
    hooked = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hooked.append)
    forward, fails = Causal(model), []

    def stops(inputs):
        if fails:
            raise KeyboardInterrupt
        return forward(inputs)
    step = Step(model, stops, chunk_size=CHUNK, lockstep=lockstep)

    def apart(run, run_plain):
        run()
        got = {key: g.full_tensor() for key, g in gradients(model).items()}
        run_plain()
        return differ(got, gradients(plain))
    off = apart(lambda: step(sequences), lambda: plain_step(plain, sequences))
    off += len(hooked) != len(list(model.parameters()))  # FSDP2 runs a parameter's hooks once a step
    fails.append(True)
    with contextlib.suppress(KeyboardInterrupt):
        step(sequences)
    tokens = torch.from_numpy(sequences[0])[None]
    return max(off, apart(*(lambda m=m: m(input_ids=tokens, labels=tokens).loss.backward() for m in (model, plain))))


def test_ranks():
    for n_ranks in (2, 3):
        with tempfile.TemporaryDirectory() as folder:
            results = mp.get_context("fork").SimpleQueue()
            mp.start_processes(work, (n_ranks, os.path.join(folder, "store"), results), nprocs=n_ranks,
                               start_method="fork")
            found = {}
            while not results.empty():
                _, name, error = results.get()
                found.setdefault(name, []).append(error)
        narrow = {f"FSDP2, {dtype}, lockstep={lockstep}": most for (dtype, lockstep), most in NARROW.items()}
        for name, errors in found.items():
            check(name, len(errors) == n_ranks and max(errors) <= narrow.get(name, TOLERANCE),
                  f"worst {max(errors):.1e}")
        check(f"{n_ranks} ranks", len(found) == 2 * len(batches()) + (n_ranks == 2) * len(narrow), f"{len(found)} runs")


class Routed(nn.Module):
    """A layer of attention, and experts chosen by token number."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.words, self.head = nn.Embedding(97, 16), nn.Linear(16, 97)
        self.layer = nn.ModuleDict({"qkv": nn.Linear(16, 48), "experts": nn.ModuleList(nn.Linear(16, 16)
                                                                                       for _ in range(3))})

    def run(self, tokens, attend):
        hidden = self.words(tokens)
        q, k, v = (y.reshape(len(tokens), 4, 4).transpose(0, 1)[None] for y in self.layer["qkv"](hidden).chunk(3, 1))
        hidden = hidden + attend(q, k, v)[0].transpose(0, 1).reshape(len(tokens), 16)
        found = torch.zeros_like(hidden)
        for i, expert in enumerate(self.layer["experts"]):
            at = torch.nonzero(tokens % 3 == i)[:, 0]
            if len(at):
                found = found.index_add(0, at, expert(hidden[at]))
        return self.head(hidden + found), [k, v]

    def forward(self, x):
        own = []

        def attend(q, k, v):
            own[:] = [k, v]
            k, v = (torch.cat([old, new], 2) for old, new in zip(x.prefix, own)) if x.prefix else own
            return attention(q, k, v, x.cu_seqlens_q, x.cu_seqlens_k, x.max_seqlen_q, x.max_seqlen_k)
        return self.run(x.tokens, attend)


def routed_alone(module, sequences):
    n, total = sum(len(s) - 1 for s in sequences), 0.0
    for s in sequences:
        logits, _ = module.run(torch.from_numpy(s[:-1]), lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, is_causal=True))
        loss = F.cross_entropy(logits, torch.from_numpy(s[1:]), reduction="sum") / n
        loss.backward()
        total += loss.item()
    return total


# Two ranks, one of which has almost nothing, no targets, or tokens for only one expert.
UNEVEN = {"one short sequence": ((200, 2), None), "300 and 3": ((300, 3), None), "no targets": ((40, 40), 1),
          "a single sequence": ((90,), None)}


def share_experts(rank, n_ranks, store, results):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=n_ranks)
    for name, (lengths, masked) in UNEVEN.items():
        for way in ("DDP", "FSDP2", "FSDP2 of each expert", "FSDP2 in step"):
            plain, model = Routed().double(), Routed().double()
            sequences = [np.random.default_rng(i).integers(0, 32, n) * 3 + (i == 0) * np.arange(n) % 3
                         for i, n in enumerate(lengths)]
            ignored = [np.ones(n, bool) if i == masked else None for i, n in enumerate(lengths)]
            wanted_loss = routed_alone(plain, [s for i, s in enumerate(sequences) if i != masked])
            for part in [*model.layer["experts"]] if "each" in way else []:
                fully_shard(part)
            if way != "DDP":
                fully_shard(model.layer["qkv"])
                fully_shard(model)
            step = Step(model, model, chunk_size=CHUNK, k=1, lockstep=int("step" in way))
            loss = (step(sequences, ignored) + step(sequences, ignored)) / 2
            got = {key: (g.full_tensor() if hasattr(g, "full_tensor") else g) / 2
                   for key, g in gradients(model).items()}
            error = max(abs(loss / wanted_loss - 1), differ(got, gradients(plain)))
            results.put((rank, f"{way}, experts, {name}", error))
    step = Step(model, model, chunk_size=CHUNK)
    for name, mine, words in (
            ("a sampler's shards", {"sequences": [[3, 4, 5]][:rank] + [[6, 7]]}, "leave the sampler out"),
            ("other tokens", {"sequences": [[3 + rank, 4]]}, "and rank 1 others"),
            ("other masks", {"ignored": [[rank == 1, False, False]]}, "ignored or weights: on rank 1"),
            ("other weights", {"weights": [rank]}, "ignored or weights: on rank 1"),
            ("another chunk_size", {}, "Step's options: on rank 1"),
            ("a batch that rank 1 refuses", {"sequences": [[3, 4, 5 - 9 * rank]]},
             "got -4 at 2" if rank else "rank 1 has refused its batch")):
        step.chunk_size = 2 + rank if "chunk_size" in name else CHUNK
        try:
            what = f"taken, {step(**{'sequences': [[3, 4, 5]], **mine})}"
        except ValueError as why:
            what = str(why)
        results.put((rank, f"ranks with {name}", 0.0 if words in what else 1.0))
    nn.init.constant_(plain.head.bias, rank)
    half = fully_shard(Routed(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))
    for name, module, words in (("other weights to begin with", plain, "rank 1 begins with other weights"),
                                ("a policy of float16", half, "module: trains in float16")):
        try:
            what = f"taken, {Step(module, module, chunk_size=CHUNK)([[3, 4, 5]])}"
        except (TypeError, ValueError) as why:
            what = str(why)
        results.put((rank, f"ranks with {name}", 0.0 if words in what else 1.0))
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(plain, ["head.bias"])
    model = nn.parallel.DistributedDataParallel(plain)
    plain.unused = nn.Parameter(torch.empty(3, device="meta"))
    plain.zero_grad()
    Step(model, plain, chunk_size=CHUNK)([[3, 4, 5]])  # rank 1 has no chunk
    error = float(plain.head.weight.grad.abs().sum() == 0 or (plain.head.bias.grad is None) != (rank == 1))
    results.put((rank, "ranks with a bias that DDP ignores, and an unused parameter on meta", error))
    dist.destroy_process_group()


def test_unused():
    with tempfile.TemporaryDirectory() as folder:
        results = mp.get_context("fork").SimpleQueue()
        mp.start_processes(share_experts, (2, os.path.join(folder, "store"), results), nprocs=2, start_method="fork")
        found = {}
        while not results.empty():
            _, name, error = results.get()
            found.setdefault(name, []).append(error)
    for name, errors in found.items():
        check(name, len(errors) == 2 and max(errors) <= TOLERANCE, f"worst {max(errors):.1e}")
    check("experts on two ranks", len(found) == 4 * len(UNEVEN) + 9, f"{len(found)} runs")


# ---- one sequence on several ranks ----

GANG = (150, 7, 33, 12, 5)
OWN, DEAF = "a module of one's own", "a control: rows of one rank alone"
GANGS = {  # a model, and how it is trained
    "qwen2": {"k": 1}, "qwen2, FSDP2": {"k": 1}, "qwen3_next": {"k": 1}, "qwen3_next, 6 heads": {"k": 2},
    "mamba2": {"k": 1},  # those above also run on four ranks
    "qwen2, in step by name": {"k": 1, "lockstep": 1}, "qwen3_next, FSDP2, K 2": {"k": 2}, "nemotron_h": {"k": 2},
    "kimi_linear": {"k": 1}, "lfm2, parts shorter than a convolution's tail": {"k": 1, "chunk_size": 2},
    "qwen2, slices in eights": {"k": 1, "align": 8}, "gemma3_text": {"k": 1}, "deepseek_v3": {"k": 2},
    "a control: gradients stay where they are found": {"k": 1},
    "a control: rows of other ranks in another order": {"k": 1},
    "a control: parts begin from zeros": {"k": 1}, "a control: parts see no convolution's tail": {"k": 1},
}
LEFT_OUT = {"a control: parts begin from zeros": "scan", "a control: parts see no convolution's tail": "tails"}


Gather = chunkflow.torch._Gather


class Stay(Gather):
    """Returns no gradient to other ranks: a rank's rows get only what it found itself."""

    @staticmethod
    def backward(ctx, found):
        return found.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


class Turned(Gather):
    """Takes each rank's rows for the next one's."""

    @staticmethod
    def forward(ctx, own, group):
        return Gather.forward(ctx, own, group).roll(own.shape[0], 0)


def nothing_before(method):
    """Replaces CPGroup.scan or .tails: no share gets the results of earlier ones."""
    right = getattr(chunkflow.torch.CPGroup, method)

    def left_out(group, *given):
        mine, last = right(group, *given)
        return 0 * mine, last
    return mock.patch.object(chunkflow.torch.CPGroup, method, left_out)


def share_sequence(rank, n_ranks, store, results):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=n_ranks)
    share_own_module(rank, n_ranks, results)
    for name, options in list(GANGS.items())[:99 if n_ranks == 2 else 5]:
        chunkflow.torch._Gather = Stay if "stay" in name else Turned if "order" in name else Gather
        with Float64(), contextlib.ExitStack() as stack:
            kind = "qwen3_next" if name in LEFT_OUT else "qwen2" if "control" in name else name.split(",")[0]
            shape = {"linear_num_value_heads": 6} if "6 heads" in name else {}  # no multiple of 4 ranks
            plain, model = tiny(kind, **shape), tiny(kind, **shape)
            sequences = sequences_of(plain, GANG)
            wanted_loss = plain_step(plain, sequences)
            for layer in [*model.model.layers, model] if "FSDP2" in name else []:
                fully_shard(layer)
            step = Step(model, Causal(model), **{"chunk_size": CHUNK, "max_cp": n_ranks, **options})
            if name in LEFT_OUT:
                stack.enter_context(nothing_before(LEFT_OUT[name]))
            with families.Watch() as seen:
                loss = step(sequences)
            probs = torch.cat(step.log_probs(sequences)).sum() if name == "qwen2" else -loss * sum(n - 1 for n in GANG)
        got = {key: g.full_tensor() if hasattr(g, "full_tensor") else g for key, g in gradients(model).items()}
        error = float(np.max([abs(loss / wanted_loss - 1), differ(got, gradients(plain)),
                              abs(float(probs) / -wanted_loss / sum(n - 1 for n in GANG) - 1),
                              float(seen.attends > 0 or seen.taken == 0 < seen.calls)]))
        results.put((name, error, set(step.cp_groups)))
    dist.destroy_process_group()


def share_own_module(rank, n_ranks, results):
    module = Small().double()
    sequences = [np.random.default_rng(i).integers(0, 97, n) for i, n in enumerate(GANG)]
    wanted_loss = small_alone(module, sequences)
    wanted = gradients(module)
    step = Step(module, module, chunk_size=CHUNK, max_cp=n_ranks)
    error = np.max([abs(step(sequences) / wanted_loss - 1), differ(gradients(module), wanted)])
    results.put((OWN, float(error), set(step.cp_groups)))
    try:
        Step(module, lambda x: module(dataclasses.replace(x, cp_group=None)), chunk_size=CHUNK,
             max_cp=n_ranks)(sequences)
        error = 0.0
    except (ValueError, RuntimeError) as why:  # attention lacks keys, except on the first rank
        error = float(rank > 0 or "did not ask CPGroup.rows" in str(why))
    results.put((DEAF, error, set(step.cp_groups)))


def test_cp_groups():
    began = time.time()
    for n_ranks in (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            results = mp.get_context("fork").SimpleQueue()
            mp.start_processes(share_sequence, (n_ranks, os.path.join(folder, "store"), results), nprocs=n_ranks,
                               start_method="fork")
            found = {name: [] for name in (*list(GANGS)[:99 if n_ranks == 2 else 5], OWN, DEAF)}
            while not results.empty():
                name, error, cp_groups = results.get()
                found[name].append(error if n_ranks in cp_groups else float("nan"))
        for name, errors in found.items():
            worst = float(np.max(errors, initial=0.0))  # keeps NaN
            holds = worst > 1e-3 if "control" in name else \
                worst <= (families.TOLERANCE if "qwen3_next" in name else TOLERANCE)
            holds &= name != DEAF or min(errors) == 1
            check(f"a cp group of {n_ranks}, {name}", len(errors) == n_ranks and holds, f"worst {worst:.1e}")
    with Float64():
        plan = chunkflow.pack(GANG, CHUNK, n_ranks=2, max_cp=2)
        try:
            chunkflow.torch.Batch(None, plan, sequences_of(tiny("qwen2"), GANG))
            what = "it was taken"
        except ValueError as why:
            what = str(why)
    check("a cp group without its process group", "has cp groups of 2 ranks" in what, what)
    kernel = chunkflow.huggingface._Kernel({"mix": lambda x, initial_state=None: x}, "mix", "initial_state")
    what = families.refused(lambda: kernel.effect_of((torch.zeros(1, 2, 3),), {}))
    check("a kernel of which it is not known what rows do to a state", "by mix where ranks share a sequence" in what,
          what)
    print(f"cp groups: {time.time() - began:.1f} s")


# ---- trainers ----


def trained(make, **options):
    """Returns losses and weights after ten steps."""
    with Float64(), tempfile.TemporaryDirectory() as folder:
        model = tiny("llama")
        trainer = make(model, folder, **options)
        losses = []
        trainer.remove_callback(transformers.PrinterCallback)
        step = trainer.training_step
        trainer.training_step = lambda *a, **o: losses.append(step(*a, **o)) or losses[-1]
        trainer.train()
        return [float(x) for x in losses], {name: p.detach().clone() for name, p in model.named_parameters()}


def data(prompts):
    rows = []
    for i in range(80):
        tokens = np.random.default_rng(i).integers(3, 97, 3 + i % 37).tolist()
        rows.append({"input_ids": tokens, "labels": [-100 if prompts and at < 2 else t for at, t in enumerate(tokens)]})
    return rows


def pad(rows):
    most = max(len(r["input_ids"]) for r in rows)
    return {name: torch.tensor([r.get(name, [1] * len(r["input_ids"])) + [fill] * (most - len(r["input_ids"]))
                                for r in rows])
            for name, fill in (("input_ids", 0), ("labels", -100), ("attention_mask", 0))}


def options_of(folder):
    return {"output_dir": folder, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 10,
            "learning_rate": 1e-2, "logging_steps": 1, "report_to": [], "save_strategy": "no", "use_cpu": True,
            "disable_tqdm": True, "optim": "sgd", "max_grad_norm": 0.0, "gradient_checkpointing": False}


def summed(losses, n=2):
    return [sum(losses[i:i + n]) for i in range(0, len(losses), n)]


def compare_trainers(name, plain, ours, tolerance=1e-10):
    (wanted, weights), (got, made) = plain, ours
    worst = max(abs(a / b - 1) for a, b in zip(summed(got), summed(wanted)))
    apart = max(float((made[key] - w).norm() / w.norm()) for key, w in weights.items())
    check(name, len(summed(got)) == 10 and max(worst, apart) <= tolerance,
          f"ten steps, losses {worst:.1e}, weights {apart:.1e}")


def test_trainer():
    from chunkflow.trainer import Trainer

    for prompts in (False, True):
        def make(model, folder, cls=transformers.Trainer, **more):
            return cls(model=model, args=transformers.TrainingArguments(**options_of(folder)),
                       train_dataset=data(prompts), data_collator=pad, **more)
        ours = trained(make, cls=Trainer, chunk_size=CHUNK)
        compare_trainers(f"Trainer{', prompts' if prompts else ''}", trained(make), ours)


def test_evaluation():
    """Its loss comes from chunks. Wrong outputs of a collator are refused, and so are noise and wrapped models."""
    from chunkflow.trainer import Trainer, _rows

    seen = {}

    def evaluated(cls, **more):
        with Float64(), tempfile.TemporaryDirectory() as folder:
            model, rows = tiny("gemma3_text"), seen.setdefault(cls, [])
            model.get_input_embeddings().register_forward_hook(lambda _, given, made: rows.append(given[0].shape[1]))
            args = transformers.TrainingArguments(**options_of(folder), per_device_eval_batch_size=5)
            trainer = cls(model=model, args=args, eval_dataset=data(True)[:23], data_collator=pad, **more)
            trainer.remove_callback(transformers.PrinterCallback)
            return trainer.evaluate()["eval_loss"]
    off = abs(evaluated(Trainer, chunk_size=CHUNK) / evaluated(transformers.Trainer) - 1)
    check("evaluation by chunks", off <= TOLERANCE and max(seen[Trainer]) <= CHUNK < max(seen[transformers.Trainer]),
          f"{off:.1e}, at most {max(seen[Trainer])} rows at once")

    batch = pad(data(True)[:3])
    left = {name: x.flip(1) for name, x in batch.items()}
    rows = [(s.tolist(), s.masked_fill(i, -100).tolist()) for s, i in zip(*chunkflow.torch.unpad(**left))]
    wanted = [(r["input_ids"][::-1], r["labels"][::-1]) for r in data(True)[:3]]
    check("padding taken off, on the left too", rows == wanted, f"{len(rows)} rows")
    for name, change, words in (("on the left", left, "pad on the right"),
                                ("with labels", {"labels": batch["labels"].clamp(min=0)}, "labels of padding"),
                                ("no labels", {"labels": None}, "without labels")):
        what = families.refused(lambda: _rows({k: x for k, x in {**batch, **change}.items() if x is not None}))
        check(f"a micro-batch, {name}", words in what, what)
    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(**options_of(folder), neftune_noise_alpha=5.0)
        what = families.refused(lambda: Trainer(model=tiny("llama"), args=args, chunk_size=CHUNK))
    check("noise of NEFTune", "neftune_noise_alpha" in what, what)
    drops = tiny("gpt2", attn_pdrop=0.1)
    what = families.refused(lambda: Step(drops, Causal(drops), chunk_size=CHUNK)(list(batch["input_ids"])))
    check("dropout in attention", what.startswith("gpt2") and "attn_pdrop" in what, what)
    takes = Causal(torch.compile(tiny("llama")), check=False).takes
    check("a model that torch.compile has wrapped", "past_key_values" in takes, ", ".join(takes))


def test_accumulation():
    """Twelve micro-batches an epoch in steps of 5, 5 and 2; then again with a stop in the second epoch and a resume."""
    from chunkflow.trainer import Trainer

    with Float64():
        losses, weights = {}, {}
        for name, cls, more in (("plain", transformers.Trainer, {}), ("ours", Trainer, {"chunk_size": CHUNK}),
                                ("resumed", Trainer, {"chunk_size": CHUNK})):
            with tempfile.TemporaryDirectory() as folder:
                options = {**options_of(folder), "per_device_train_batch_size": 2, "gradient_accumulation_steps": 5,
                           "max_steps": 6, "save_strategy": "steps", "save_steps": 4, "logging_strategy": "steps"}

                def run(steps, resume=None):
                    model = tiny("llama")
                    trainer = cls(model=model, args=transformers.TrainingArguments(**options), data_collator=pad,
                                  train_dataset=data(True)[:23], **more)
                    trainer.remove_callback(transformers.PrinterCallback)
                    if steps < 6:  # simulates an interruption
                        trainer.add_callback(StopAt(steps))
                    trainer.train(resume_from_checkpoint=resume)
                    found = [x["loss"] for x in trainer.state.log_history if "loss" in x]
                    return found, [p.detach().clone() for p in model.parameters()]
                if name == "resumed":
                    run(4)
                    losses[name], weights[name] = run(6, os.path.join(folder, "checkpoint-4"))
                else:
                    losses[name], weights[name] = run(6)
    for name, beside in (("ours", "plain"), ("resumed", "ours")):
        off = max(float((p - q).norm() / q.norm()) for p, q in zip(weights[name], weights[beside]))
        same = np.allclose(losses[name], losses[beside], rtol=1e-4, atol=0)  # logged with four digits
        check(f"accumulation of 5, 5 and 2, {name} beside {beside}", off <= (0 if name == "resumed" else 1e-10) and same
              and len(losses[name]) == 6, f"weights {off:.1e}, losses {losses[name]}")


def test_divisors():
    """The loss is divided as the plain trainer divides it, in training and evaluation: for GPT-2 by all labels, and for
    models without num_items_in_batch by each micro-batch's targets."""
    from chunkflow.trainer import Trainer

    def run(cls, kind, accepts, **more):
        with Float64(), tempfile.TemporaryDirectory() as folder:
            model, losses = tiny(kind), []
            model.accepts_loss_kwargs = accepts
            args = transformers.TrainingArguments(**{**options_of(folder), "max_steps": 3, "num_train_epochs": 1})
            trainer = cls(model=model, args=args, train_dataset=data(False)[:20], eval_dataset=data(True)[:9],
                          data_collator=pad, **more)
            trainer.remove_callback(transformers.PrinterCallback)
            losses.append(trainer.evaluate()["eval_loss"])
            trainer.train()
            losses += [x["loss"] for x in trainer.state.log_history if "loss" in x]
            none = trainer.evaluate([{"input_ids": [5, 6, 7], "labels": [-100] * 3}])["eval_loss"]
            trainer.data_collator = lambda rows: {k: v for k, v in pad(rows).items() if k != "labels"}
            blind = trainer.evaluate(data(False)[:3])
            return losses, torch.cat([p.detach().flatten() for p in model.parameters()]), none, "eval_loss" in blind
    for kind, accepts in (("gpt2", True), ("llama", False)):
        plain, ours = run(transformers.Trainer, kind, accepts), run(Trainer, kind, accepts, chunk_size=CHUNK)
        off = float((ours[1] - plain[1]).norm() / plain[1].norm())
        same = np.allclose(ours[0], plain[0], rtol=1e-4, atol=0) and abs(ours[0][0] / plain[0][0] - 1) <= 1e-10
        check(f"divided as the plain trainer divides, {kind}", off <= 1e-10 and same and len(ours[0]) == 4,
              f"weights {off:.1e}, losses {ours[0]} and {plain[0]}")
        check(f"evaluation without targets, {kind}", np.isnan(ours[2]) and np.isnan(plain[2]), f"{ours[2]}, {plain[2]}")
        check(f"evaluation without labels, {kind}", not ours[3] and not plain[3], "no loss")


def test_refused_options():
    """Bad options and data are refused by name when the trainer is made."""
    from chunkflow.trainer import Chunked, Trainer, _rows

    class Doubling(transformers.Trainer):
        def compute_loss(self, *given, **named):
            return 2 * super().compute_loss(*given, **named)

    class Below(Chunked, Doubling):
        pass

    class Above(Trainer):
        def compute_loss(self, *given, **named):
            return 2 * super().compute_loss(*given, **named)

    def made(cls=Trainer, chunk_size=CHUNK, **more):
        with tempfile.TemporaryDirectory() as folder:
            args = transformers.TrainingArguments(**options_of(folder))
            try:
                cls(model=tiny("llama"), args=args, train_dataset=data(False), data_collator=pad,
                    chunk_size=chunk_size, **more)
            except (NotImplementedError, TypeError, ValueError) as why:
                return str(why)
            return "taken"
    for name, options, words in (
            ("compute_loss below", {"cls": Below}, "compute_loss of Doubling"),
            ("compute_loss above", {"cls": Above}, "compute_loss of Above"),
            ("compute_loss_func", {"compute_loss_func": lambda *given: 0}, "with this option of the trainer"),
            ("chunks of 0", {"chunk_size": 0}, "chunk_size: got 0, wanted 1"),
            ("chunks of None", {"chunk_size": None}, "chunk_size: wanted a whole number, got None"),
            ("chunks of True", {"chunk_size": True}, "chunk_size: wanted a whole number, got True"),
            ("k of None", {"k": None}, "k: wanted a whole number, got None"),
            ("k of True", {"k": True}, "k: wanted a whole number, got True"),
            ("chunk_size twice", {"chunk_options": {"chunk_size": 7}}, "chunk_size has a place of its own"),
            ("an option of pack's that is none", {"chunk_options": {"bogus": 1}}, "bogus")):
        what = made(**options)
        check(f"refused where the trainer is made: {name}", words in what, what)
    batch = pad(data(True)[:3])
    what = families.refused(lambda: _rows({**batch, "position_ids": batch["input_ids"]}))
    check("position_ids in the data", what.startswith("this data cannot") and "position_ids" in what, what)

    module = Small().double()
    step = Step(module, module, chunk_size=32)
    for name, call, words in (
            ("no gradients", lambda: torch.no_grad()(step)([[3, 4, 5]]), "step.log_probs(sequences)"),
            ("a weight of nan", lambda: step([[3, 4], [5, 6]], weights=[1, float("nan")]),
             "weights[1]: wanted a finite number, got nan")):
        try:
            what = f"taken, {call()}"
        except (RuntimeError, ValueError) as why:
            what = str(why)
        check(f"refused: {name}", words in what, what)


class StopAt(transformers.TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **more):
        control.should_training_stop = state.global_step >= self.step


def train_as_rank(rank, n_ranks, port, folder, results):
    """A Trainer on each of two ranks: the sampler distributes the batch, and the plan takes all of it."""
    from chunkflow.trainer import Trainer
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(n_ranks), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")

    def make(model, folder, cls, **more):
        options = {**options_of(folder), "per_device_train_batch_size": 2, "ddp_backend": "gloo"}
        return cls(model=model, args=transformers.TrainingArguments(**options), train_dataset=data(True),
                   data_collator=pad, **more)
    for cls, more in ((transformers.Trainer, {}), (Trainer, {"chunk_size": CHUNK})):
        losses, weights = trained(lambda model, folder: make(model, folder, cls, **more))
        torch.save((losses, weights), os.path.join(folder, f"{cls.__module__}-{rank}"))
    results.put(rank)


def test_trainer_ranks():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        results = mp.get_context("fork").SimpleQueue()
        mp.start_processes(train_as_rank, (2, port, folder, results), nprocs=2, start_method="fork")
        plain, ours = ([torch.load(os.path.join(folder, f"{name}-{rank}")) for rank in range(2)]
                       for name in ("transformers.trainer", "chunkflow.trainer"))
    mean = [sum(x) / 2 for x in zip(*(losses for losses, _ in plain))]
    for rank in range(2):
        compare_trainers(f"Trainer, rank {rank} of 2", (mean, plain[rank][1]), ours[rank])


def test_trl():
    import datasets
    import trl
    from chunkflow.trainer import Chunked

    class SFTTrainer(Chunked, trl.SFTTrainer):
        pass

    datasets.disable_progress_bars()
    words = transformers.PreTrainedTokenizerFast(tokenizer_object=word_level())
    words.pad_token = words.eos_token = "w0"
    rows = [{"prompt": "w3 w4 ", "completion": " ".join(f"w{t}" for t in r["input_ids"])} for r in data(False)]

    seen = []

    def make(model, folder, cls=trl.SFTTrainer, **more):
        trainer = cls(model=model, args=trl.SFTConfig(**options_of(folder), loss_type="nll"),
                      train_dataset=datasets.Dataset.from_list(rows), processing_class=words, **more)
        seen[:] = trainer.train_dataset.to_list()
        return trainer

    def plain(model, folder):
        return transformers.Trainer(model=model, args=transformers.TrainingArguments(**options_of(folder)),
                                    train_dataset=seen, data_collator=pad)
    ours = trained(make, cls=SFTTrainer, chunk_size=CHUNK)
    compare_trainers("TRL's SFTTrainer, prompts, beside Trainer", trained(plain), ours)
    compare_trainers("the same beside its own, whose backward is in float32", trained(make), ours, 1e-4)


def test_trl_defaults():
    """SFTConfig's defaults, for a dense model and a mixture. Options that it enables by itself are disabled with a
    warning, truncation causes a warning, and options that the user set are refused before training begins."""
    import datasets
    import peft
    import trl
    from chunkflow.trainer import Chunked

    class SFTTrainer(Chunked, trl.SFTTrainer):
        pass

    datasets.disable_progress_bars()
    words = transformers.PreTrainedTokenizerFast(tokenizer_object=word_level())
    words.pad_token = words.eos_token = "w0"
    rng = np.random.default_rng(1)
    rows = [{"text": " ".join(f"w{t}" for t in rng.integers(3, 97, n))} for n in (1500, 20, 5, 1100, 9)]

    def made(model, **options):
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            args = trl.SFTConfig(folder, use_cpu=True, report_to=[], **options)
            trainer = SFTTrainer(model=model, args=args, train_dataset=datasets.Dataset.from_list(rows),
                                 processing_class=words, chunk_size=256)
            trainer.remove_callback(transformers.PrinterCallback)
            trainer.remove_callback(transformers.ProgressCallback)
            return trainer, trainer.train().training_loss, " ".join(str(w.message) for w in seen)

    for kind in ("llama", "qwen3_moe"):
        model = tiny(kind, max_position_embeddings=2048).float()
        start = [p.detach().clone() for p in model.parameters()]
        trainer, loss, said = made(model)
        moved = sum(not torch.equal(p, q) for p, q in zip(start, model.parameters()))
        holds = 4 < loss < 5 and moved == len(start) and "gradient checkpointing is off" in said
        holds &= "2 of 5 sequences have max_length=1024" in said and ("balance loss is off" in said) == ("moe" in kind)
        check(f"SFTConfig() as it is, {kind}", holds, f"loss {loss:.2f}, {moved} of {len(start)} tensors; {said}")
        lengths = []
        whole, _, said = made(tiny(kind, max_position_embeddings=2048).float(), max_length=None, max_steps=1)
        lengths = [len(x) for x in whole.train_dataset["input_ids"]]
        check(f"max_length=None, {kind}", max(lengths) > 1499 and "max_length" not in said, f"{lengths}")
    prompts = peft.get_peft_model(tiny("llama").float(), peft.PromptTuningConfig("CAUSAL_LM", num_virtual_tokens=4))
    for name, model, options, words_ in (
            ("a router's loss that is asked for", tiny("qwen3_moe").float(), {"router_aux_loss_coef": 0.01},
             "router_aux_loss_coef=0.0"),
            ("the same in the model's config", tiny("qwen3_moe", output_router_logits=True).float(), {},
             "output_router_logits=False"),
            ("prompt tuning", prompts, {}, "PROMPT_TUNING puts virtual tokens")):
        what = families.refused(lambda: made(model, **options))
        check(name, words_ in what, what)


def word_level():
    from tokenizers import Tokenizer, models, pre_tokenizers
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(97)}, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def main(words=""):
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}; float64, tolerance {TOLERANCE}")
    for name, test in list(globals().items()):
        if name.startswith("test_") and words in name:
            run(test)
    return finish()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
