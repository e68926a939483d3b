#!/usr/bin/env python3
"""Attention speed beside PyTorch's, shape by shape, in one run on one device.

    python3 tools/bench/bench_attention.py build/gpu/bench_attention [options and part of a shape's name]

The options are bench_attention's. For each shape, twice in turn: our variants, forward and backward, then PyTorch's
flash backend (FlashAttention-2, through the variable-length operator, with the same packed documents and prefixes) and,
for one document without a prefix, its cuDNN backend. TFLOP/s count visible pairs only, for everyone alike. Every result
is a line of its own as it comes, as bench_attention prints them; a table of the better ones of the two rounds, and the
ratio of our best to their best, come last. Not yet run on a device.
"""
import math
import subprocess
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


ROUNDS = 2
SECONDS = 0.5  # to repeat one pass


def median_ms(work, n_warm=2, least=5, most=20):
    flush = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    times = []
    for i in range(n_warm + most):
        if len(times) >= least and sum(times) > 1e3 * SECONDS:
            break
        flush.fill_(i % 256)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        if i >= n_warm:
            times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def visible_pairs(queries, keys):
    """Causal, aligned bottom-right."""
    return sum(q * (k - q) + q * (q + 1) // 2 for q, k in zip(queries, keys))


def random_inputs(heads, kv_heads, head_size, n_q, n_k):
    def make(rows, n):
        return torch.randn(rows, n, head_size, dtype=torch.bfloat16, device="cuda")

    return make(n_q, heads), make(n_k, kv_heads), make(n_k, kv_heads), make(n_q, heads)


def time_flash(heads, kv_heads, head_size, queries, keys):
    """FlashAttention-2 as PyTorch ships it: (forward ms, backward ms)."""
    q, k, v, dout = random_inputs(heads, kv_heads, head_size, sum(queries), sum(keys))
    cu = [torch.tensor([0] + n).cumsum(0).to(device="cuda", dtype=torch.int32) for n in (queries, keys)]
    most_q, most_k = max(queries), max(keys)
    scale = 1.0 / math.sqrt(head_size)

    def forward():
        return torch.ops.aten._flash_attention_forward(
            q, k, v, cu[0], cu[1], most_q, most_k, 0.0, True, False, scale=scale)

    out, lse, seed, offset, _ = forward()

    def backward():
        return torch.ops.aten._flash_attention_backward(
            dout, q, k, v, out, lse, cu[0], cu[1], most_q, most_k, 0.0, True, seed, offset, scale=scale)

    return median_ms(forward), median_ms(backward)


def time_cudnn(heads, kv_heads, head_size, queries, keys):
    """Dense causal attention of one document: (forward ms, backward ms), or None where it does not apply."""
    if len(queries) != 1 or queries != keys:
        return None
    q, k, v, dout = (x.transpose(0, 1)[None].contiguous().requires_grad_()
                     for x in random_inputs(heads, kv_heads, head_size, queries[0], keys[0]))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        def forward():
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)

        out = forward()

        def backward():
            return torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

        return median_ms(forward), median_ms(backward)


def rival_lines(name, rival, time_rival, flop, numbers):
    """The rival's results as bench_attention prints its own."""
    try:
        times = time_rival(*numbers)
    except RuntimeError as error:
        return [f"{name} {rival} error {str(error).splitlines()[0]}"]
    if times is None:
        return []
    return [f"{name} {rival} {which} {ms:.4f} ms {flop * factor / ms * 1e-9:.1f} TFLOP/s"
            for which, factor, ms in zip(("forward", "backward"), (1.0, 2.5), times)]


def our_lines(binary, options, name):
    """Whatever it says of this very shape; it has an exit status of its own where one of its variants fails."""
    command = [binary, "--seconds", str(SECONDS), *options, name]
    lines = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout.splitlines()
    return [line for line in lines if line.split()[0] == name]


def time_shape(binary, options, listed, best):
    """Prints every result, and keeps the better one of the rounds: best[shape, pass][who] = TFLOP/s."""
    name, heads, kv_heads, head_size, queries, keys = listed.split()
    heads, kv_heads, head_size = int(heads), int(kv_heads), int(head_size)
    queries, keys = ([int(n) for n in text.split(",")] for text in (queries, keys))
    flop = 4.0 * visible_pairs(queries, keys) * heads * head_size
    numbers = (heads, kv_heads, head_size, queries, keys)
    for _ in range(ROUNDS):
        lines = our_lines(binary, options, name)
        for line in lines:
            print(line, flush=True)
        for rival, time_rival in (("flash", time_flash), ("cudnn", time_cudnn)):
            lines += rival_lines(name, rival, time_rival, flop, numbers)
            print("\n".join(line for line in lines if line.split()[1] == rival), flush=True)
        for line in lines:
            if line.endswith(" TFLOP/s"):
                who, which, speed = line.split()[1], line.split()[2], float(line.split()[5])
                row = best.setdefault((name, which), {})
                row[who] = max(speed, row.get(who, 0.0))


def print_table(best):
    print("\nTFLOP/s, the better one of the rounds")
    for (name, which), row in best.items():
        ours = max((speed for who, speed in row.items() if who not in ("flash", "cudnn")), default=0.0)
        theirs = max((speed for who, speed in row.items() if who in ("flash", "cudnn")), default=0.0)
        ratio = f"  ours over theirs {ours / theirs:.2f}" if theirs > 0 else ""
        print(f"{name:34} {which:9}" + "".join(f"  {who} {speed:.1f}" for who, speed in row.items()) + ratio)


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    binary, words = sys.argv[1], sys.argv[2:]
    part = words.pop() if words and not words[-1].startswith("-") and words[-2:-1] != ["--variant"] else ""
    listed = subprocess.run([binary, "--list", *words], capture_output=True, text=True, check=True).stdout.splitlines()
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    best = {}
    for line in listed:
        if part in line.split()[0]:
            time_shape(binary, words, line, best)
    print_table(best)


if __name__ == "__main__":
    main()
