"""AdamW on flat tensors in host memory.

The weights are fp32 masters, masters split into two 16-bit halves, or bfloat16 without a master, rounded
stochastically; the moments are fp32 or have 8 bits. The arithmetic is that of `torch.optim.AdamW`. The native kernel and the numpy form below give the same bits, for
any instruction set, number of threads, length and cut into pieces: each element goes through the same IEEE
operations in the same order. Files and pipelines are elsewhere; here are only arrays. For codes of 8 bits go on
with `codes`, for the random bits with `rounding`.

A split master is the exact fp32 number in two arrays: `high`, a bfloat16 that is also the compute weight, and
`low`, an int16: `bits = (high << 16) + low` modulo 2^32. `high` rounds half up (torch rounds ties to even, but
then the rest of a tie does not fit into an int16).
"""

from __future__ import annotations

import math
import os
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ssdtune.optim.codes import decode, encode, num_scales
from ssdtune.optim.rounding import random_bits, round_to_bfloat16, rounding_key
from ssdtune.plan.states import CODE_BLOCK

PIECE = 1 << 16
"""Elements that the numpy form works on at a time, to stay in the processor's cache."""

# The order of the sum of squares: see native/src/adam.cpp, which has the same numbers.
SUM_BLOCK = 1 << 16
SUM_LANES = 16

_LARGEST_BFLOAT16 = torch.finfo(torch.bfloat16).max


@cache
def forms() -> tuple[str, ...]:
    """Return the forms of the kernel that run here, the fastest first.

    They are "avx512", "avx2", "baseline" (what every processor of this kind has) and "numpy".
    """
    native = _native()
    return (*native.simd_levels(), "numpy") if native is not None else ("numpy",)


def adamw_(
    weights: Tensor,
    low: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    grad_scale: float = 1.0,
    exp_avg_scale: Tensor | None = None,
    exp_avg_sq_scale: Tensor | None = None,
    rounding_seed: int | None = None,
    first: int = 0,
    threads: int | None = None,
    form: str | None = None,
) -> None:
    """Update weights and moments in place with AdamW.

    Args:
        weights: float32 [N], the master weights; or bfloat16 [N], their high halves; or, with a `rounding_seed`,
            bfloat16 [N] without a master.
        low: int16 [N], the low halves, if `weights` are high halves; else None.
        exp_avg: First moment, float32 [N], or with scales uint8 [N]: codes of the signed table.
        exp_avg_sq: Second moment, float32 [N], or with scales uint8 [N]: codes of the unsigned table.
        grad: Gradient, float32 [N], accumulated over the whole step.
        step: Optimizer step, counted from 1; used for bias correction and random bits.
        lr: Learning rate of this step, after the schedule.
        grad_scale: The gradient is multiplied by this: the clipping coefficient.
        exp_avg_scale: Scales of the first moment's blocks, float32 [ceil(N / 256)]. Blocks of 256 elements are
            counted from the start of the tensors passed. So that the result does not depend on how a part is cut,
            a piece begins on a multiple of 256 within its tensor and ends on one, or at the tensor's end; tensors
            that lie in one array begin on a multiple of 256 there, and element i has scale i // 256. At the start
            codes and scales are zeros.
        exp_avg_sq_scale: Likewise for the second moment.
        rounding_seed: Weights are rounded stochastically, with random bits from this, `step` and an element's index.
            Arrays that are updated in the same step need different seeds.
        first: Index of the first element in the whole array that these tensors are a piece of.
        threads: Most threads of the native kernel; all cores by default. Does not change the result.
        form: One of `forms()`; the fastest by default. Does not change the result.

    Raises:
        ValueError: The tensors do not fit together, or a new weight is not finite (split: its high half; rounded: it
            may become so), or a block's scale is not. The tensors are updated nevertheless.

    Memory: allocates nothing in the native form; reads and writes all tensors but `grad`, which it reads, once.
    With fp32 moments it reads 16 (fp32), 16 (split) or 14 N bytes (rounded) and writes 12, 12 or 10 N; moments of
    8 bits make it 6 N less each way.
    Sources: Loshchilov and Hutter, Decoupled Weight Decay Regularization (2019), Algorithm 2; for moments of 8 bits
    see `codes`.
    """
    if step < 1:
        raise ValueError(f"step is {step}; the first one is 1")
    size = weights.numel()
    half = low is not None or rounding_seed is not None
    coded = exp_avg_scale is not None
    if low is not None and rounding_seed is not None:
        raise ValueError("weights with low halves are not rounded: leave out low or rounding_seed")
    if coded != (exp_avg_sq_scale is not None):
        raise ValueError("both moments have scales, or none")
    moment = torch.uint8 if coded else torch.float32
    arrays = (
        _array("weights", weights, torch.bfloat16 if half else torch.float32, size),
        None if low is None else _array("low", low, torch.int16, size),
        _array("exp_avg", exp_avg, moment, size),
        _array("exp_avg_sq", exp_avg_sq, moment, size),
        _array("grad", grad, torch.float32, size),
    )
    scales: list[Any] = [
        None if scale is None else _array(name, scale, torch.float32, num_scales(size))
        for name, scale in (
            ("exp_avg_scale", exp_avg_scale),
            ("exp_avg_sq_scale", exp_avg_sq_scale),
        )
    ]
    rounding = None if rounding_seed is None else (*rounding_key(rounding_seed, step), first)
    # Computed in double and rounded to float once.
    scalars = [
        grad_scale,
        1 - lr * weight_decay,
        1 - beta1,
        beta2,
        1 - beta2,
        1 / math.sqrt(1 - beta2**step),
        eps,
        lr / (1 - beta1**step),
    ]
    form = _chosen(form)
    if form == "numpy":
        finite = _numpy_adamw(*arrays, scalars, scales, rounding)
    else:
        finite = _native().adamw(
            *arrays, size, scalars, threads or _num_cores(), form, *scales,
            () if rounding is None else (*rounding[:2], first & 0xFFFFFFFF),
        )  # fmt: skip
    if not finite:
        raise ValueError(
            f"step {step}: a weight {'or moment ' if coded else ''}is not finite after the update (learning rate {lr:g}, "
            f"gradient scale {grad_scale:g})"
        )


def sum_of_squares(grad: Tensor, threads: int | None = None, *, form: str | None = None) -> float:
    """Return the sum of squares of a float32 tensor [N], added in double in a fixed order.

    The result does not depend on threads or form; it is inf or nan if the tensor holds such a value.
    """
    size = grad.numel()
    array = _array("grad", grad, torch.float32, size)
    form = _chosen(form)
    if form == "numpy":
        return _numpy_sum_of_squares(array)
    return float(_native().sum_of_squares(array, size, threads or _num_cores(), form))


def split_master(
    master: Tensor, high: Tensor | None = None, low: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Split float32 weights [N] into their bfloat16 high and int16 low halves.

    Args:
        high: Where the high halves go, bfloat16 [N]; a new tensor by default. `low` likewise, int16.

    Raises:
        ValueError: A weight is not finite, or so large that its high half would be infinite.
    """
    size = master.numel()
    bits = _array("master", master, torch.float32, size).view(np.uint32)
    high = torch.empty(size, dtype=torch.bfloat16) if high is None else high
    low = torch.empty(size, dtype=torch.int16) if low is None else low
    high_bits = _array("high", high, torch.bfloat16, size)
    low_bits = _array("low", low, torch.int16, size)
    for start in range(0, size, PIECE):
        piece = slice(start, start + PIECE)
        if not _split(bits[piece], high_bits[piece], low_bits[piece]):
            raise ValueError("a weight is not finite, or too large for bfloat16")
    return high, low


def join_master(high: Tensor, low: Tensor, master: Tensor | None = None) -> Tensor:
    """Join bfloat16 high and int16 low halves [N] to the exact float32 weights.

    Args:
        master: Where they go, float32 [N]; a new tensor by default.
    """
    size = high.numel()
    master = torch.empty(size, dtype=torch.float32) if master is None else master
    bits = _array("master", master, torch.float32, size).view(np.uint32)
    high_bits = _array("high", high, torch.bfloat16, size)
    low_bits = _array("low", low, torch.int16, size)
    for start in range(0, size, PIECE):
        piece = slice(start, start + PIECE)
        bits[piece] = _joined(high_bits[piece], low_bits[piece])
    return master


@cache
def _native() -> Any:
    try:
        from ssdtune import _native as native
    except ImportError:
        return None
    return native


@cache
def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


def _chosen(form: str | None) -> str:
    available = forms()
    if form is None:
        return available[0]
    if form not in available:
        raise ValueError(f'no AdamW kernel "{form}" here; there are {", ".join(available)}')
    return form


def _array(name: str, tensor: Tensor, dtype: torch.dtype, size: int) -> Any:
    """Return the tensor's memory as an array; bfloat16 as uint16."""
    if tensor.dtype != dtype or tensor.dim() != 1 or tensor.numel() != size:
        raise ValueError(
            f"{name} is {tensor.dtype} of shape {list(tensor.shape)}; it must be {dtype} of shape [{size}]"
        )
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous and in host memory")
    tensor = tensor.detach()
    return tensor.view(torch.uint16).numpy() if dtype == torch.bfloat16 else tensor.numpy()


def _joined(high: Any, low: Any) -> Any:
    return (high.astype(np.uint32) << np.uint32(16)) + low.astype(np.uint32)  # wraps: modulo 2^32


def _split(bits: Any, high: Any, low: Any) -> bool:
    """Fill `high` and `low`; False if a high half is not finite."""
    upper = (bits + np.uint32(0x8000)) >> np.uint32(16)
    high[:] = upper.astype(np.uint16)
    low[:] = (bits - (upper << np.uint32(16))).astype(np.int32).astype(np.int16)
    return not bits.size or int((bits & np.uint32(0x7FFFFFFF)).max()) < 0x7F7F8000


def _numpy_adamw(
    weights: Any,
    low: Any,
    exp_avg: Any,
    exp_avg_sq: Any,
    grad: Any,
    scalars: list[float],
    moment_scales: list[Any],
    rounding: tuple[int, int, int] | None,
) -> bool:
    scale, decay, one_minus_beta1, beta2, one_minus_beta2, inverse_root, eps, step_size = (
        np.float32(s) for s in scalars
    )
    finite, coded = True, moment_scales[0] is not None
    with np.errstate(all="ignore"):
        for start in range(0, grad.size, PIECE):
            piece = slice(start, start + PIECE)
            blocks = slice(start // CODE_BLOCK, (start + PIECE) // CODE_BLOCK)
            m, v = exp_avg[piece], exp_avg_sq[piece]
            if coded:
                codes, scales = (m, v), [scale[blocks] for scale in moment_scales]
                m = decode(codes[0], scales[0], signed=True)
                v = decode(codes[1], scales[1], signed=False)
            if rounding is not None:
                old = weights[piece].astype(np.uint32) << np.uint32(16)
            else:
                old = weights[piece] if low is None else _joined(weights[piece], low[piece])
            g = grad[piece] * scale
            decayed = old.view(np.float32) * decay
            m += (g - m) * one_minus_beta1
            v *= beta2
            v += (one_minus_beta2 * g) * g
            new = decayed - (step_size * m) / (np.sqrt(v) * inverse_root + eps)
            if rounding is not None:
                bits = new.view(np.uint32)
                random = random_bits(rounding[:2], rounding[2] + start, new.size)
                weights[piece] = round_to_bfloat16(bits, random)
                finite &= bool((np.abs(new) <= _LARGEST_BFLOAT16).all())
            elif low is None:
                finite &= bool(np.isfinite(new).all())
                weights[piece] = new
            else:
                finite &= _split(new.view(np.uint32), weights[piece], low[piece])
            if coded:
                finite &= encode(m, codes[0], scales[0], signed=True)
                finite &= encode(v, codes[1], scales[1], signed=False)
    return finite


def _numpy_sum_of_squares(grad: Any) -> float:
    total = 0.0
    for start in range(0, grad.size, SUM_BLOCK):
        squares = np.square(grad[start : start + SUM_BLOCK], dtype=np.float64)
        rows = np.zeros(-(-squares.size // SUM_LANES) * SUM_LANES)
        rows[: squares.size] = squares
        # Down the columns numpy adds row by row, which is the order of the native lanes.
        lanes = np.add.reduce(rows.reshape(-1, SUM_LANES), axis=0)
        block = 0.0
        for lane in lanes.tolist():
            block += lane
        total += block
    return total
