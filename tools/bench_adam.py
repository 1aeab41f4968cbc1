"""Time of the AdamW kernels per parameter, by form and threads, next to torch's fused AdamW.

    python tools/bench_adam.py [--numel 16777216] [--repeats 7]

The best of several repeats counts, since other programs only ever add time.
"""

import argparse
import time

import torch

from ssdtune.optim.adamw import adamw_, forms, split_master, sum_of_squares

STEP = {"step": 3, "lr": 1e-4, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}


def best_ns(function, numel: int, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times) / numel * 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, default=1 << 24)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    n = args.numel
    weights, grad, exp_avg = (torch.randn(n) for _ in range(3))
    exp_avg_sq = torch.rand(n)
    high, low = split_master(weights)
    parameter = torch.nn.Parameter(torch.randn(n))
    parameter.grad = grad
    optimizer = torch.optim.AdamW([parameter], lr=1e-4, fused=True)
    print(f"{n} parameters, ns per parameter (GB/s at 28 bytes)")
    for threads in args.threads:
        torch.set_num_threads(threads)
        rows = [("torch fused", optimizer.step)]
        for form in forms():
            if form == "numpy" and threads > 1:
                continue
            kw = {**STEP, "threads": threads, "form": form}
            rows += [
                (
                    f"{form} fp32",
                    lambda kw=kw: adamw_(weights, None, exp_avg, exp_avg_sq, grad, **kw),
                ),
                (f"{form} split", lambda kw=kw: adamw_(high, low, exp_avg, exp_avg_sq, grad, **kw)),
                (
                    f"{form} sum of squares",
                    lambda form=form, threads=threads: sum_of_squares(grad, threads, form=form),
                ),
            ]
        for name, function in rows:
            ns = best_ns(function, n, args.repeats)
            rate = "" if "sum" in name else f"  ({28 / ns:.1f} GB/s)"
            print(f"{threads} threads  {name:28s} {ns:7.3f} ns{rate}")


if __name__ == "__main__":
    main()
