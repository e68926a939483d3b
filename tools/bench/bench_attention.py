#!/usr/bin/env python3
"""Compares the speed of attention with PyTorch's, shape by shape, in one run on one device.

    python3 tools/bench/bench_attention.py build/gpu/bench_attention [options and part of a shape's name]

The options are those of bench_attention. Each shape is timed in two rounds. A round times our variants, forward and
backward, then PyTorch's flash backend (FlashAttention-2, through the variable-length operator, with the same packed
documents and prefixes). For one document without a prefix, it also times the cuDNN backend. TFLOP/s count only visible
pairs for all of them. Every result is printed on its own line at once, as bench_attention does. At the end comes a
table of the better of the two rounds, with the ratio of our best to their best.
"""
import math
import subprocess
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


ROUNDS = 2
SECONDS = 0.5  # to repeat one pass
MOST = 120     # for our variants of one shape


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
    """Times FlashAttention-2 as PyTorch ships it. Returns (forward ms, backward ms)."""
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
    """Times dense causal attention of one document. Returns (forward ms, backward ms), or None for other shapes."""
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
    """Prints the rival's results in the form of bench_attention."""
    try:
        times = time_rival(*numbers)
    except Exception as error:  # after any error of a backend, the others must still be timed
        return [f"{name} {rival} error {' '.join(f'{type(error).__name__}: {error}'.split())}"]
    if times is None:
        return []
    return [f"{name} {rival} {which} {ms:.4f} ms {flop * factor / ms * 1e-9:.1f} TFLOP/s"
            for which, factor, ms in zip(("forward", "backward"), (1.0, 2.5), times)]


def is_result(words):
    """Reads a line: a speed, as "shape variant pass ms ms TFLOP/s TFLOP/s", or the text of a check or an error."""
    if words[-1] != "TFLOP/s":
        return len(words) >= 4 and words[2] in ("check", "error")
    try:
        return len(words) == 7 and all(math.isfinite(float(words[i])) for i in (3, 5))
    except ValueError:
        return False


def our_lines(binary, options, name):
    """Returns what bench_attention prints for exactly this shape, and a line if its run failed as a whole. If only a
    variant fails, it has an exit status of its own."""
    command = [binary, "--seconds", str(SECONDS), *options, name]
    wrong = []
    try:
        run = subprocess.run(command, stdout=subprocess.PIPE, check=False, timeout=MOST)
        said = run.stdout
        if run.returncode < 0:
            wrong.append(f"ended by signal {-run.returncode}")
    except subprocess.TimeoutExpired as error:
        said = error.stdout or b""
        wrong.append(f"stopped after {MOST} s")
    except OSError as error:
        said = b""
        wrong.append(str(error))
    lines = [line for line in said.decode(errors="replace").splitlines() if line.split()[:1] == [name]]
    results = [line for line in lines if is_result(line.split())]
    wrong += [f"cannot be read: {line!r}" for line in lines if line not in results]
    if not results and not wrong:
        wrong.append("said nothing of this shape")
    return results + [f"{name} ours error {why}" for why in wrong]


def time_shape(binary, options, listed, best):
    """Prints every result, and keeps the better of the two rounds: best[shape, pass][who] = TFLOP/s."""
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
            of_rival = rival_lines(name, rival, time_rival, flop, numbers)
            lines += of_rival
            for line in of_rival:
                print(line, flush=True)
        for line in lines:
            _, who, which, *rest = line.split()
            if which in ("forward", "backward"):
                speed = float(rest[2])
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
    is_value = words[-2:-1] in (["--variant"], ["--seconds"])
    part = words.pop() if words and not words[-1].startswith("-") and not is_value else ""
    listed = subprocess.run([binary, "--list", *words], capture_output=True, text=True, check=True).stdout.splitlines()
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    best = {}
    for line in listed:
        if part in line.split()[0]:
            time_shape(binary, words, line, best)
    print_table(best)


if __name__ == "__main__":
    main()
