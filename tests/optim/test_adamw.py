"""AdamW kernels: the numbers of torch, the same bits in every form, exact halves of the master."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from ssdtune.optim.adamw import adamw_, forms, join_master, split_master, sum_of_squares

HYPER = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
SIZES = [1, 15, 16, 17, 1000, 65536 + 3, 3 * (1 << 18) + 5]


def state(size: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights, moments and a gradient with magnitudes from denormal to large."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> torch.Tensor:
        return torch.randn(size, generator=generator)

    spread = 10.0 ** torch.randint(-24, 3, (size,), generator=generator)
    grad = normal() * spread
    return {
        "weights": normal(),
        "exp_avg": normal() * spread,
        "exp_avg_sq": (normal() * spread).square(),
        "grad": grad,
    }


def updated(tensors, *, split: bool, **options) -> list[torch.Tensor]:
    """Return the master weights and moments after an update of copies."""
    t = {name: tensor.clone() for name, tensor in tensors.items()}
    weights, low = split_master(t["weights"]) if split else (t["weights"], None)
    adamw_(weights, low, t["exp_avg"], t["exp_avg_sq"], t["grad"], step=3, **HYPER, **options)
    return [join_master(weights, low) if split else weights, t["exp_avg"], t["exp_avg_sq"]]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("split", [False, True], ids=["fp32", "split"])
def test_every_form_and_number_of_threads_gives_the_same_bits(size, split):
    tensors = state(size)
    expected = updated(tensors, split=False, form="numpy", grad_scale=0.37)
    for form in forms():
        for threads in (1, 2, 3):
            result = updated(tensors, split=split, form=form, threads=threads, grad_scale=0.37)
            assert all(map(same_bits, result, expected)), (form, threads)


@pytest.mark.parametrize("form", forms())
def test_pieces_at_any_offset_give_the_same_bits(form):
    size = 5000
    tensors = state(size)
    (whole, *_) = updated(tensors, split=True, form="numpy")
    t = {name: tensor.clone() for name, tensor in tensors.items()}
    high, low = split_master(t["weights"])
    cuts = [0, 1, 4, 21, 22, 1000, 1999, 4997, size]
    for start, end in pairwise(cuts):
        pieces = [x[start:end] for x in (high, low, t["exp_avg"], t["exp_avg_sq"], t["grad"])]
        adamw_(*pieces, step=3, form=form, **HYPER)
    assert same_bits(join_master(high, low), whole)


@pytest.mark.parametrize("form", forms())
def test_a_flush_to_zero_of_the_caller_changes_nothing(form):
    tensors = state(5000)
    expected = updated(tensors, split=False, form=form)
    if form == "numpy" or not torch.set_flush_denormal(True):
        pytest.skip("computes in the caller's own mode")
    try:
        result = updated(tensors, split=False, form=form, threads=1)
    finally:
        torch.set_flush_denormal(False)
    assert all(map(same_bits, result, expected))


@pytest.mark.parametrize("split", [False, True], ids=["fp32", "split"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_many_steps_agree_with_torch(split, weight_decay):
    # Rounding differs in single operations (torch divides by the root of the bias correction); it stays below 1e-6
    # of the largest values, while any mistake in the formula is far above.
    size, hyper = 3001, HYPER | {"weight_decay": weight_decay}
    generator = torch.Generator().manual_seed(1)
    master = torch.randn(size, generator=generator)
    parameter = torch.nn.Parameter(master.clone())
    reference = torch.optim.AdamW(
        [parameter], lr=1.0, betas=(0.9, 0.999), eps=1e-8, weight_decay=weight_decay
    )
    exp_avg, exp_avg_sq = torch.zeros(size), torch.zeros(size)
    weights, low = split_master(master) if split else (master, None)
    for step in range(1, 201):
        hyper["lr"] = 1e-2 / step**0.5  # as a schedule changes it
        grad = torch.randn(size, generator=generator) * torch.rand(size, generator=generator) ** 4
        parameter.grad = grad * 0.5
        reference.param_groups[0]["lr"] = hyper["lr"]
        reference.step()
        adamw_(weights, low, exp_avg, exp_avg_sq, grad, step=step, grad_scale=0.5, **hyper)
    result = join_master(weights, low) if split else weights
    theirs = reference.state[parameter]
    torch.testing.assert_close(result, parameter.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(exp_avg, theirs["exp_avg"], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(exp_avg_sq, theirs["exp_avg_sq"], rtol=1e-6, atol=1e-9)
    assert (result - master.float()).abs().max() > 1e-2 or not split


def test_decay_alone_shrinks_the_weights():
    weights = torch.full((100,), 2.0)
    zeros = [torch.zeros(100) for _ in range(3)]
    adamw_(weights, None, *zeros, step=1, **HYPER)
    assert torch.equal(weights, torch.full((100,), 2.0) * np.float32(1 - 1e-3))


@pytest.mark.parametrize("form", forms())
def test_weights_that_are_not_finite_are_reported(form):
    for value, split in [(math.inf, False), (math.nan, False), (math.inf, True), (math.nan, True)]:
        tensors = state(70001)
        tensors["grad"][70000] = value
        with pytest.raises(ValueError, match=r"step 3: a weight is not finite .* rate 0.01"):
            updated(tensors, split=split, form=form)
    # The top half-ulp of the split form: finite as fp32, infinite as a high half.
    top = {name: torch.zeros(40) for name in ("weights", "exp_avg", "exp_avg_sq", "grad")}
    low = torch.zeros(40, dtype=torch.int16)
    high = torch.zeros(40, dtype=torch.bfloat16)
    high[39], low[39] = torch.finfo(torch.bfloat16).max, 0x7FFF
    arguments = (top["exp_avg"], top["exp_avg_sq"], top["grad"])
    hyper = HYPER | {"weight_decay": 0.0}
    adamw_(high, low, *arguments, step=1, form=form, **hyper)  # just below it
    top["exp_avg"][39], top["exp_avg_sq"][39] = -1.0, 0.0
    with pytest.raises(ValueError, match="not finite"):
        adamw_(high, low, *arguments, step=1, form=form, **(hyper | {"lr": 1e23}))


def test_wrong_arguments_are_named():
    t = state(10)
    low = torch.zeros(10, dtype=torch.int16)
    good = [t["weights"], None, t["exp_avg"], t["exp_avg_sq"], t["grad"]]
    for position, bad, message in [
        (0, t["weights"].double(), r"weights is torch.float64 of shape \[10\]"),
        (1, low, r"weights is torch.float32 of shape \[10\]; it must be torch.bfloat16"),
        (2, t["exp_avg"][:9], r"exp_avg is torch.float32 of shape \[9\]; .* of shape \[10\]"),
        (4, torch.zeros(20)[::2], "grad must be contiguous"),
        (4, torch.zeros(10, device="meta"), "grad must be .* in host memory"),
    ]:
        arguments = list(good)
        arguments[position] = bad
        with pytest.raises(ValueError, match=message):
            adamw_(*arguments, step=1, **HYPER)
    with pytest.raises(ValueError, match="step is 0"):
        adamw_(*good, step=0, **HYPER)
    with pytest.raises(ValueError, match='no AdamW kernel "sse9" here; there are'):
        adamw_(*good, step=1, form="sse9", **HYPER)


def test_nothing_to_update():
    empty = torch.empty(0)
    for form in forms():
        adamw_(empty, None, empty, empty, empty, step=1, form=form, **HYPER)
        assert sum_of_squares(empty, form=form) == 0.0


def test_halves_join_to_the_exact_master():
    # All exponents and signs, with the mantissas around every rounding case.
    mantissas = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x17FFF, 0x18000, 0x7F7FFF])
    exponents = torch.arange(255) << 23
    bits = (exponents[:, None] + mantissas).flatten()
    bits = torch.cat([bits, bits - (1 << 31)]).to(torch.int32)
    bits = bits[(bits & 0x7FFFFFFF) < 0x7F7F8000]
    master = bits.view(torch.float32)
    high, low = split_master(master)
    assert same_bits(join_master(high, low), master)
    # Nearest bfloat16; a tie goes away from zero.
    wide = bits.to(torch.int64) & 0xFFFFFFFF
    assert torch.equal(high.view(torch.uint16).to(torch.int64), (wide + 0x8000) >> 16)
    nearest = master.to(torch.bfloat16)
    ties = (wide & 0xFFFF) == 0x8000
    assert torch.equal(high[~ties].view(torch.int16), nearest[~ties].view(torch.int16))
    # A bfloat16 checkpoint has nothing in its low halves.
    again, nothing = split_master(nearest.float())
    assert torch.equal(again.view(torch.int16), nearest.view(torch.int16))
    assert not nothing.any()


@pytest.mark.parametrize("bits", [0x7F7F8000, 0x7F7FFFFF, 0x7F800000, 0x7FFFFFFF, -0x00800000, -1])
def test_what_has_no_finite_halves_is_refused(bits):
    master = torch.zeros(100000)
    master.view(torch.int32)[99999] = bits
    with pytest.raises(ValueError, match="not finite, or too large for bfloat16"):
        split_master(master)


@pytest.mark.parametrize("size", [0, *SIZES])
def test_sum_of_squares_is_the_same_in_every_form(size):
    grad = state(size)["grad"] if size else torch.empty(0)
    expected = sum_of_squares(grad, 1, form="numpy")
    exact = math.fsum((grad.double() ** 2).tolist())
    assert expected == pytest.approx(exact, rel=1e-12)
    for form in forms():
        for threads in (1, 2, 5):
            assert sum_of_squares(grad, threads, form=form) == expected, (form, threads)


@pytest.mark.parametrize("form", forms())
def test_sum_of_squares_shows_what_is_not_finite(form):
    grad = torch.ones(100001)
    grad[100000] = -math.inf
    assert sum_of_squares(grad, form=form) == math.inf
    grad[17] = math.nan
    assert math.isnan(sum_of_squares(grad, form=form))
    assert sum_of_squares(torch.full((4,), 3e38), form=form) == pytest.approx(3.6e77)
