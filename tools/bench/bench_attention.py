#!/usr/bin/env python3
"""Attention speed beside PyTorch's, shape by shape, in one run on one device.

    python3 tools/bench/bench_attention.py build/bench_attention [part of a shape's name]

For each shape of bench_attention: our forward and backward, then PyTorch's flash backend (FlashAttention-2, through the
variable-length operator, with the same packed documents and prefixes) and, for one document without a prefix, its cuDNN
backend. TFLOP/s count visible pairs only, for everyone alike. Ratio: ours over theirs. Not yet run on a device.
"""
import math
import subprocess
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


def median_ms(work, n_warm=3, n_runs=20):
    flush = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    times = []
    for i in range(n_warm + n_runs):
        flush.fill_(i)
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


def time_ours(binary, name):
    """{"forward": ms, "backward": ms} of the default path."""
    times = {}
    for line in subprocess.run([binary, name], capture_output=True, text=True, check=True).stdout.splitlines():
        shape, path, which, ms = line.split()[:4]
        if shape == name and not path.endswith("-deterministic"):
            times[which] = float(ms)
    return times


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    binary, part = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
    shapes = subprocess.run([binary, "--list"], capture_output=True, text=True, check=True).stdout.splitlines()
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    print(f"{'shape':32} {'pass':9} {'ours':>7} {'flash':>7} {'ratio':>6} {'cudnn':>7} {'ratio':>6}   TFLOP/s")
    for line in shapes:
        name, heads, kv_heads, head_size, queries, keys = line.split()
        if part not in name:
            continue
        heads, kv_heads, head_size = int(heads), int(kv_heads), int(head_size)
        queries, keys = ([int(n) for n in text.split(",")] for text in (queries, keys))
        flop = 4.0 * visible_pairs(queries, keys) * heads * head_size
        ours = time_ours(binary, name)
        rivals = []
        for rival in (time_flash, time_cudnn):
            try:
                rivals.append(rival(heads, kv_heads, head_size, queries, keys))
            except RuntimeError as error:
                print(f"  {rival.__name__}: {str(error).splitlines()[0]}")
                rivals.append(None)
        for i, which in enumerate(("forward", "backward")):
            work = flop * (1.0 if which == "forward" else 2.5) * 1e-9
            cells = [f"{work / ours[which]:7.1f}"]
            for rival in rivals:
                cells.append(f"{work / rival[i]:7.1f} {rival[i] / ours[which]:6.2f}" if rival else f"{'-':>7} {'-':>6}")
            print(f"{name:32} {which:9} {' '.join(cells)}")


if __name__ == "__main__":
    main()
