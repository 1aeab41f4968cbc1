"""Time of the AdamW kernels per parameter, by form and threads, next to torch's fused AdamW.

    python tools/bench_adam.py [--numel 16777216] [--repeats 7]

The best of several repeats counts, since other programs only ever add time.
"""

import argparse
import time
from functools import partial

import torch

from ssdtune.optim.adamw import adamw_, forms, split_master, sum_of_squares
from ssdtune.optim.codes import num_scales

STEP = {"step": 3, "lr": 1e-4, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}


def best_ns(functions, numel: int, repeats: int) -> list[float]:
    times = [[] for _ in functions]
    for _ in range(repeats):
        for function, found in zip(functions, times):
            start = time.perf_counter()
            function()
            found.append(time.perf_counter() - start)
    return [min(found) / numel * 1e9 for found in times]


def make_variants(numel: int) -> list[tuple]:
    """Return name, tensors before the gradient, options and bytes per parameter of each kind of update."""
    master = torch.randn(numel)
    high, low = split_master(master)
    weights = [
        ("fp32", (master, None), {}, 8),
        ("split", (high, low), {}, 8),
        ("rounded", (master.bfloat16(), None), {"rounding_seed": 1}, 4),
    ]
    exp_avg, exp_avg_sq = torch.randn(numel), torch.rand(numel)
    codes = [torch.randint(0, 256, (numel,), dtype=torch.uint8) for _ in range(2)]
    scales = {name: torch.rand(num_scales(numel)) for name in ("exp_avg_scale", "exp_avg_sq_scale")}
    moments = [("", (exp_avg, exp_avg_sq), {}, 16), (", 8 bits", tuple(codes), scales, 4)]
    return [
        (name + bits, (*tensors, *more), options | extra, 4 + weight_bytes + moment_bytes)
        for bits, more, extra, moment_bytes in moments
        for name, tensors, options, weight_bytes in weights
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, default=1 << 24)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--forms", nargs="+", help="only these forms of the kernel")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    n = args.numel
    grad = torch.randn(n)
    variants = make_variants(n)
    parameter = torch.nn.Parameter(torch.randn(n))
    parameter.grad = grad
    optimizer = torch.optim.AdamW([parameter], lr=1e-4, fused=True)
    print(f"{n} parameters, ns per parameter (GB/s at the bytes that are read and written)")
    for threads in args.threads:
        torch.set_num_threads(threads)
        rows = [("torch fused", optimizer.step, 28)]
        for form in args.forms or forms():
            if form == "numpy" and threads > 1:
                continue
            kw = {**STEP, "threads": threads, "form": form}
            for name, tensors, options, num_bytes in variants:
                update = partial(adamw_, *tensors, grad, **options, **kw)
                rows.append((f"{form} {name}", update, num_bytes))
            square = partial(sum_of_squares, grad, threads, form=form)
            rows.append((f"{form} sum of squares", square, 4))
        # Each takes its turn, so that a neighbour's load falls on all of them.
        times = best_ns([function for _, function, _ in rows], n, args.repeats)
        for (name, _, num_bytes), ns in zip(rows, times):
            print(f"{threads} threads  {name:28s} {ns:7.3f} ns  ({num_bytes / ns:.1f} GB/s)")


if __name__ == "__main__":
    main()
