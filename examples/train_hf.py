#!/usr/bin/env python3
"""Trains a causal language model of Hugging Face chunk by chunk: K and V are carried, and nothing else changes.

    make shared
    examples/train_hf.py FILE...                          # a small Qwen2 on the bytes of these files, one sequence each
    examples/train_hf.py --model Qwen/Qwen2.5-0.5B FILE...
    examples/train_hf.py --check                          # every gradient beside the plain model's, in float64

Needs torch, transformers, cffi and NumPy. Works with models that take their attention from ALL_ATTENTION_FUNCTIONS and
their K and V from a DynamicCache, without sliding windows: Qwen2, Qwen3, Llama, Mistral, GPT-2 ...
"""

import argparse
import pathlib
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F
import transformers

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tools" / "python"))
import chunkflow

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None


def attend(module, query, key, value, mask, scaling=None, sliding_window=None, cu_seq_lens_q=None, cu_seq_lens_k=None,
           max_length_q=None, max_length_k=None, **others):
    """What the model calls for attention: causal and bottom-right in each slice, so the first one sees its prefix."""
    if sliding_window is not None or any(others.get(name) is not None for name in ("softcap", "s_aux")):
        raise NotImplementedError("no sliding windows, soft caps or sinks in attention")
    if others.get("dropout"):
        raise NotImplementedError("no dropout in attention")
    if varlen_attn is not None and query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        rows = (x[0].transpose(0, 1) for x in (query, key, value))
        return varlen_attn(*rows, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, scale=scaling,
                           window_size=(-1, 0), enable_gqa=True)[None], None
    out, q, k = [], cu_seq_lens_q.tolist(), cu_seq_lens_k.tolist()
    for q0, q1, k0, k1 in zip(q, q[1:], k, k[1:]):
        sees = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool, device=query.device).tril(k1 - k0 - (q1 - q0))
        out.append(F.scaled_dot_product_attention(query[:, :, q0:q1], key[:, :, k0:k1], value[:, :, k0:k1],
                                                  attn_mask=sees, scale=scaling, enable_gqa=True))
    return torch.cat(out, 2).transpose(1, 2), None


transformers.AttentionInterface.register("chunkflow", attend)


class Batch:
    """Runs the passes of one batch on one stage. Gradients are added to the model's, as backward() adds them."""

    def __init__(self, model, plan, sequences, seed=0):
        self.model, self.plan, self.seed = model, plan, seed
        self.real = torch.promote_types(model.dtype, torch.float32)  # of the loss and of sums over chunks
        self.lengths = np.array([len(s) for s in sequences])
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.tokens = np.concatenate([*sequences, [0]]).astype(np.int64)  # one more, for padding to read
        self.weights = chunkflow.loss_weights(self.lengths)  # the mean over the batch's targets
        self.kept, self.loss = {}, 0.0
        self.rows, self.sums = {}, {}  # of each group: K and V of its tokens so far, layer by layer; their gradients

    def inputs(self, chunk):
        """What the model is given, and the target of each row with its weight in the loss."""
        about = self.plan.metadata(chunk, weights=self.weights)
        first = self.starts[about.sequence_ids]
        rows = (self.tokens[first + about.position_ids], about.position_ids.astype(np.int64),
                self.tokens[first + np.maximum(about.target_positions, 0)], about.loss_weights,
                about.cu_seqlens_q, about.cu_seqlens_k)
        tokens, position, target, weight, cu_q, cu_k = (torch.from_numpy(x).to(self.model.device) for x in rows)
        return target, weight, {"input_ids": tokens[None], "position_ids": position[None],
                                "cu_seq_lens_q": cu_q, "max_length_q": about.max_seqlen_q,
                                "cu_seq_lens_k": cu_k, "max_length_k": about.max_seqlen_k}

    def about(self, chunk):
        """Group of a chunk (-1: none), its place there, and which of the group's rows are the chunk's own."""
        group, index, begin = (int(self.plan.chunks[name][chunk]) for name in ("group", "index", "prefix"))
        return group, index, begin, begin + int(self.plan.slices_of(chunk)["length"][0])

    def forward(self, chunk, keep):
        """F or R. Without keep it only hands on K and V: the head and the loss belong to the pass that is kept."""
        group, index, begin, end = self.about(chunk)
        held, cache = self.rows.get(group, []), transformers.DynamicCache()
        prefix = [x[:, :, :begin].detach().requires_grad_(keep) for x in held] if index > 0 else []
        for layer in range(len(prefix) // 2):
            cache.update(prefix[2 * layer], prefix[2 * layer + 1], layer)
        target, weight, inputs = self.inputs(chunk)
        with torch.random.fork_rng(), torch.set_grad_enabled(keep):
            torch.manual_seed(chunkflow.lib.cf_chunk_seed(self.seed, chunk, 0))  # a replay drops out what F did
            output = (self.model if keep else self.model.base_model)(past_key_values=cache, use_cache=True, **inputs)
        own = [x[:, :, begin:end] for layer in cache.layers for x in (layer.keys, layer.values)] if group >= 0 else []
        if own and (not held or held[0].shape[2] == begin):  # a replay finds its rows there
            new = [x.detach() for x in own]
            self.rows[group] = [torch.cat(pair, 2) for pair in zip(held, new)] if held else new
        if keep:
            loss = (F.cross_entropy(output.logits[0].to(self.real), target, reduction="none") * weight).sum()
            self.loss += loss.item()
            self.kept[chunk] = loss, prefix, own

    def backward(self, chunk):
        """B: from the loss, and from what later chunks found for this one's K and V, to weights and to the prefix."""
        group, index, begin, end = self.about(chunk)
        loss, prefix, own = self.kept.pop(chunk)
        if own and group not in self.sums:  # the group's first backward, which is that of its last chunk
            self.sums[group] = [torch.zeros_like(x, dtype=self.real) for x in self.rows[group]]
        sums = self.sums.get(group, [])
        given = [total[:, :, begin:end].to(x.dtype) for total, x in zip(sums, own)]
        torch.autograd.backward([loss, *own], [None, *given])
        for row, total in zip(prefix, sums):
            total[:, :, :begin] += row.grad
        if own and index == 0:
            del self.rows[group], self.sums[group]

    def run(self, schedule):
        for action in schedule.stage(0):
            name, chunk = chunkflow.PASSES[action["pass"]], int(action["chunk"])
            if self.plan.chunks["n_slices"][chunk] > 0:  # otherwise it is idle
                self.forward(chunk, bool(action["keep"])) if name in "FR" else self.backward(chunk)
        return self.loss


def small_model():
    torch.manual_seed(1)
    return transformers.AutoModelForCausalLM.from_config(transformers.Qwen2Config(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1 << 20, tie_word_embeddings=False))


def check():
    """Gradients of chunks beside those of whole sequences, each alone through the plain model, all in float64."""
    model = small_model().double()
    for norm in (m for m in model.modules() if type(m).__name__.endswith("RMSNorm")):  # theirs rounds to float32
        norm.forward = lambda x, m=norm: F.rms_norm(x, m.weight.shape, m.weight, m.variance_epsilon)
    lengths = [150, 7, 33, 64, 1, 97, 12, 0, 61, 5, 130, 2]
    sequences = [np.random.default_rng(i).integers(0, 256, n) for i, n in enumerate(lengths)]
    n_targets, wanted_loss = sum(max(n - 1, 0) for n in lengths), 0.0
    model.set_attn_implementation("sdpa")
    for sequence in (torch.as_tensor(s)[None] for s in sequences if len(s) > 1):
        logits = model(input_ids=sequence, use_cache=False).logits[0, :-1]
        loss = F.cross_entropy(logits, sequence[0, 1:], reduction="sum") / n_targets
        loss.backward()
        wanted_loss += loss.item()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.set_attn_implementation("chunkflow")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}; {len(wanted)} tensors, {sum(lengths)} "
          f"tokens, loss {wanted_loss:.6f}\nsplit  align  K  chunks hybrid replays  loss differs  gradients")
    failed = 0
    for split, align, k in ((s, a, k) for s in ("full", "even", "cost") for a in (1, 8) for k in (1, 2)):
        model.zero_grad()
        plan = chunkflow.pack(lengths, 32, split=split, align=align)
        schedule = plan.schedule(k=k)
        loss = abs(Batch(model, plan, sequences).run(schedule) / wanted_loss - 1)
        errors = [float((p.grad - wanted[name]).norm() / wanted[name].norm()) for name, p in model.named_parameters()]
        failed += not (loss <= 1e-12 and all(e <= 1e-12 for e in errors))
        print(f"{split:<6} {align:>5} {k:>2} {plan.n_chunks:>7} {plan.stats()['n_hybrid']:>6} "
              f"{np.sum(schedule.actions['pass'] == chunkflow.lib.CF_R):>7} {loss:>13.1e} {max(errors):>10.1e}")
    print(f"limit 1e-12: {'NOT OK' if failed else 'ok'}")
    return failed


def train(options):
    texts = [pathlib.Path(name).read_bytes() for name in options.files]
    model, sequences = small_model(), [np.frombuffer(text, np.uint8) for text in texts]
    if options.model:
        model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype="auto")
        tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
        sequences = [tokenizer(text.decode(errors="replace"))["input_ids"] for text in texts]
    model.to("cuda" if torch.cuda.is_available() else "cpu").set_attn_implementation("chunkflow")
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    for step in range(options.steps):
        began = time.perf_counter()
        plan = chunkflow.pack([len(s) for s in sequences], options.chunk_size)
        loss = Batch(model, plan, sequences).run(plan.schedule(k=options.k))
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss:.4f}, {plan.n_chunks} chunks, {time.perf_counter() - began:.2f} s", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--model")
    for name, default in (("--chunk-size", 2048), ("--k", 1), ("--steps", 10), ("--lr", 1e-3)):
        parser.add_argument(name, type=type(default), default=default)
    options = parser.parse_args()
    if not options.check and not options.files:
        parser.error("wanted --check, or files to train on")
    return check() if options.check else train(options)  # no result, or how many cases failed


if __name__ == "__main__":
    sys.exit(main())
