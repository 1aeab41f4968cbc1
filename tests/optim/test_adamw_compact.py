"""AdamW with less on SSD: moments of 8 bits, bfloat16 weights rounded stochastically, and both."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from ssdtune.optim.adamw import adamw_, forms, join_master, split_master
from ssdtune.optim.codes import CODE_BLOCK, code_values, decode, encode, num_scales
from ssdtune.optim.rounding import random_bits, round_to_bfloat16, rounding_key

HYPER = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
SIZES = [1, 255, 256, 257, 5000, (1 << 18) + (1 << 16) + 3]
NATIVE = [form for form in forms() if form != "numpy"]


def state(size: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights, moments as codes, and a gradient; scales from denormal to large."""
    generator = torch.Generator().manual_seed(seed)

    def power(low: int, high: int, count: int) -> torch.Tensor:
        return 10.0 ** torch.randint(low, high, (count,), generator=generator)

    def codes() -> torch.Tensor:
        return torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)

    return {
        "weights": torch.randn(size, generator=generator),
        "exp_avg": codes(),
        "exp_avg_sq": codes(),
        "grad": torch.randn(size, generator=generator) * power(-24, 3, size),
        "exp_avg_scale": power(-30, 3, num_scales(size)),
        "exp_avg_sq_scale": power(-40, 3, num_scales(size)),
    }


def arguments(tensors, *, weights: str, coded: bool) -> tuple[list, dict]:
    """Return copies as `adamw_` takes them: all tensors before the options, and the scales."""
    t = {name: tensor.clone() for name, tensor in tensors.items()}
    low = None
    if weights == "split":
        t["weights"], low = split_master(t["weights"])
    elif weights == "rounded":
        t["weights"] = t["weights"].bfloat16()
    scales = {name: t[name] for name in ("exp_avg_scale", "exp_avg_sq_scale")}
    if not coded:
        t["exp_avg"] = decoded(t, "exp_avg")
        t["exp_avg_sq"] = decoded(t, "exp_avg_sq")
        scales = {}
    return [t["weights"], low, t["exp_avg"], t["exp_avg_sq"], t["grad"]], scales


def decoded(t, name: str) -> torch.Tensor:
    values = decode(t[name].numpy(), t[f"{name}_scale"].numpy(), signed=name == "exp_avg")
    return torch.from_numpy(values)


def bits(tensors) -> list[torch.Tensor]:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return [t.view(integers[t.element_size()]) for t in tensors if t is not None]


def updated(tensors, *, weights: str, coded: bool, **options) -> list[torch.Tensor]:
    """Return all tensors after an update of copies."""
    arrays, scales = arguments(tensors, weights=weights, coded=coded)
    if weights == "rounded":
        options = {"rounding_seed": 5, "first": (1 << 32) - 300} | options
    adamw_(*arrays, step=3, **HYPER, **scales, **options)
    return bits([*arrays, *scales.values()])


def same(a, b) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


KINDS = [
    (weights, coded)
    for weights in ("fp32", "split", "rounded")
    for coded in (False, True)
    if coded or weights == "rounded"
]


@pytest.mark.parametrize(("weights", "coded"), KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_every_form_and_number_of_threads_gives_the_same_bits(size, weights, coded):
    tensors = state(size)
    kind = {"weights": weights, "coded": coded}
    expected = updated(tensors, **kind, form="numpy", grad_scale=0.37)
    for form in NATIVE:
        for threads in (1, 3):
            result = updated(tensors, **kind, form=form, threads=threads, grad_scale=0.37)
            assert same(result, expected), (form, threads)


@pytest.mark.parametrize("form", forms())
@pytest.mark.parametrize(("weights", "coded"), KINDS)
def test_pieces_give_the_same_bits(form, weights, coded):
    size = 5000
    arrays, scales = arguments(state(size), weights=weights, coded=coded)
    whole, whole_scales = arguments(state(size), weights=weights, coded=coded)
    options = HYPER | {"step": 3, "form": form}
    if weights == "rounded":
        options["rounding_seed"] = 7
    adamw_(*whole, **whole_scales, **options)
    # Moments of 8 bits are cut between blocks, others anywhere.
    cuts = [0, 256, 1024, 1280, 4864, size] if coded else [0, 1, 4, 21, 1000, 4997, size]
    for start, stop in pairwise(cuts):
        cut = slice(start, stop)
        blocks = slice(start // CODE_BLOCK, num_scales(stop))
        adamw_(
            *(None if array is None else array[cut] for array in arrays),
            **{name: scale[blocks] for name, scale in scales.items()},
            first=start,
            **options,
        )
    assert same(bits([*arrays, *scales.values()]), bits([*whole, *whole_scales.values()]))


# Codes


def paper_table(signed: bool) -> np.ndarray:
    """The table as the papers describe it: means of even divisions of [0.1, 1], times powers of ten."""
    numbers = [0.0, 1.0]
    for decade in range(7):
        edges = np.linspace(0.1, 1, (1 if signed else 2) * 2**decade + 1)
        means = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)
        numbers += [*means, *(-means if signed else ())]
    return np.sort(numbers)


@pytest.mark.parametrize("signed", [False, True])
def test_codes_are_those_of_dynamic_tree_quantization(signed):
    values = code_values(signed)
    assert values.dtype == np.float32 and len(values) == 256
    np.testing.assert_allclose(values, paper_table(signed), rtol=5e-7, atol=0)


def magnitudes() -> np.ndarray:
    """Numbers from 0 to 1: all over the decades, and close to where one code ends and the next begins."""
    tables = [paper_table(signed)[paper_table(signed) >= 0] for signed in (False, True)]
    edges = np.concatenate([(table[:-1] + table[1:]) / 2 for table in tables]).astype(np.float32)
    close = [np.nextafter(edges, np.float32(end)) for end in (0, 1)]
    spread = np.geomspace(1e-12, 1, 20001)
    ends = [0, 1, 1e-45, 1e-38, np.nextafter(np.float32(1), np.float32(0))]
    return np.concatenate([*tables, edges, *close, spread, ends]).astype(np.float32)


@pytest.mark.parametrize("signed", [False, True])
def test_each_number_gets_the_nearest_code(signed):
    values = magnitudes()
    if signed:
        values = np.concatenate([values, -values[values < 1]])
    # Each in a block of its own with a 1, so that the scale is 1.
    blocks = np.zeros((values.size, CODE_BLOCK), np.float32)
    blocks[:, 0], blocks[:, 1] = 1, values
    codes, scales = np.zeros(blocks.size, np.uint8), np.zeros(values.size, np.float32)
    assert encode(blocks.reshape(-1), codes, scales, signed=signed)
    assert (scales == 1).all() and (codes[::CODE_BLOCK] == 255).all()
    found = code_values(signed)[codes[1::CODE_BLOCK]].astype(np.float64)
    table = paper_table(signed)
    after = np.searchsorted(table, values).clip(1, 255)
    nearest = np.minimum(abs(table[after] - values), abs(table[after - 1] - values))
    error = abs(found - values)
    if not signed:  # but never zero for what is not
        assert ((found > 0) == (values > 0)).all()
        error[values < table[1] / 2], nearest[values < table[1] / 2] = 0, 0
    # Where two are equally near, rounding decides. The table is exact to the last bits of a float.
    assert (error <= nearest * (1 + 1e-4) + 5e-7 * abs(values)).all()


@pytest.mark.parametrize("form", NATIVE)
def test_native_codes_are_those_of_numpy(form):
    # Without momentum the new first moment is the gradient, and the second one is its square.
    values = np.concatenate([magnitudes(), -magnitudes()])
    grad = np.random.default_rng(0).permutation(values)
    expected = {}
    for tried in ("numpy", form):
        tensors = state(grad.size)
        tensors["grad"] = torch.from_numpy(grad)
        for name in ("exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale"):
            tensors[name].zero_()
        arrays, scales = arguments(tensors, weights="fp32", coded=True)
        hyper = HYPER | {"beta1": 0.0, "beta2": 0.0}
        adamw_(*arrays, step=1, form=tried, **hyper, **scales)
        expected[tried] = bits([*arrays, *scales.values()])
    assert same(expected[form], expected["numpy"])
    result = decode(arrays[2].numpy(), scales["exp_avg_scale"].numpy(), signed=True)
    assert abs(result - grad).max() < 0.01


@pytest.mark.parametrize("form", forms())
def test_an_update_is_that_of_the_decoded_moments(form):
    # The weights see the moments before they are rounded to codes, as with bitsandbytes.
    tensors = state(3000)
    exact = updated(tensors, weights="fp32", coded=False, form=form)
    coded = updated(tensors, weights="fp32", coded=True, form=form)
    assert torch.equal(coded[0], exact[0])
    new = {name: coded[i] for i, name in ((1, "exp_avg"), (2, "exp_avg_sq"))}
    new |= {"exp_avg_scale": coded[4].view(torch.float32)}
    new |= {"exp_avg_sq_scale": coded[5].view(torch.float32)}
    for i, name in ((1, "exp_avg"), (2, "exp_avg_sq")):
        moment = exact[i].view(torch.float32)
        blocks = torch.nn.functional.pad(moment, (0, -3000 % CODE_BLOCK)).view(-1, CODE_BLOCK)
        largest = blocks.abs().amax(dim=1)
        normal = largest >= torch.finfo(torch.float32).tiny
        assert torch.equal(new[f"{name}_scale"], torch.where(normal, largest, 0.0))
        largest = largest.repeat_interleave(CODE_BLOCK)[:3000]
        # Half a step of the last decade of a signed table, the coarsest.
        assert ((decoded(new, name) - moment).abs() <= 0.00704 * largest).all()


@pytest.mark.parametrize("form", forms())
def test_a_second_moment_never_becomes_zero_while_there_is_a_first(form):
    # One gradient a million times the others' would drive their second moments below the smallest code.
    size = CODE_BLOCK
    weights, codes = torch.zeros(size), [torch.zeros(size, dtype=torch.uint8) for _ in range(2)]
    scales = {name: torch.zeros(1) for name in ("exp_avg_scale", "exp_avg_sq_scale")}
    grad = torch.full((size,), 1e-3)
    for step in range(1, 40):
        grad[0] = 1e3 if step == 10 else 1e-3
        grad[1:] = 1e-3 if step <= 10 else 0.0
        adamw_(weights, None, *codes, grad, step=step, form=form, **HYPER, **scales)
        assert weights.abs().max() <= 1.5 * HYPER["lr"] * step


def test_zeros_are_the_start_of_both_moments():
    for signed in (False, True):
        codes, scales = np.zeros(300, np.uint8), np.zeros(2, np.float32)
        assert not decode(codes, scales, signed=signed).any()
    nothing = np.zeros(300, np.float32)
    codes, scales = np.full(300, 9, np.uint8), np.ones(2, np.float32)
    assert encode(nothing, codes, scales, signed=True)
    assert (codes == 127).all() and not scales.any()
    # A block below the smallest normal number counts as zeros.
    nothing[5] = 1e-39
    assert encode(nothing, codes, scales, signed=False)
    assert not codes.any() and not scales.any()


# Stochastic rounding


def test_rounding_is_unbiased():
    key = rounding_key(seed=1, step=2)
    random = random_bits(key, 0, 1 << 20)
    # Sixteen fair bits, and every value of them about as often as any other.
    for bit in range(16):
        share = ((random >> bit) & 1).mean()
        assert abs(share - 0.5) < 5 * 0.5 / math.sqrt(random.size)
    counts = np.bincount(random, minlength=1 << 16)
    chi_square = ((counts - 16.0) ** 2 / 16).sum()
    assert abs(chi_square - 65535) < 6 * math.sqrt(2 * 65535)
    for fraction in (0.003, 0.25, 0.5, 0.9, 0.999):
        low = np.float32(1.0).view(np.uint32)
        number = low + np.uint32(round(fraction * 65536))
        rounded = round_to_bfloat16(np.full(random.size, number), random)
        up = rounded != low >> 16
        assert (rounded[up] == (low >> 16) + 1).all()
        spread = math.sqrt(fraction * (1 - fraction) / random.size)
        assert abs(up.mean() - fraction) < 5 * spread
    exact = np.full(1000, low)
    assert (round_to_bfloat16(exact, random[:1000]) == low >> 16).all()


def test_random_bits_of_neighbours_steps_and_seeds_are_independent():
    size = 1 << 18
    base = random_bits(rounding_key(3, 10), 0, size).astype(np.float64)
    others = {
        "next element": random_bits(rounding_key(3, 10), 1, size),
        "next block": random_bits(rounding_key(3, 10), 256, size),
        "next step": random_bits(rounding_key(3, 11), 0, size),
        "next seed": random_bits(rounding_key(4, 10), 0, size),
        "seed and step exchanged": random_bits(rounding_key(10, 3), 0, size),
    }
    for name, other in others.items():
        assert abs(np.corrcoef(base, other)[0, 1]) < 5 / math.sqrt(size), name
    # One element's bits over many steps.
    steps = [random_bits(rounding_key(3, step), 12345, 2) for step in range(4000)]
    assert len({int(step[0]) for step in steps}) > 3800  # 3880 if all is chance
    over_time = np.array(steps, np.float64) / 65536
    assert abs(over_time.mean(axis=0) - 0.5).max() < 5 * math.sqrt(1 / 12 / 4000)
    assert abs(np.corrcoef(over_time.T)[0, 1]) < 5 / math.sqrt(4000)
    # The index counts modulo 2^32.
    wrapped = random_bits((1, 2), (1 << 32) - 2, 4)
    assert (wrapped[2:] == random_bits((1, 2), 0, 2)).all()


@pytest.mark.parametrize("form", forms())
@pytest.mark.parametrize("coded", [False, True])
def test_updates_below_half_a_unit_add_up(form, coded):
    # bfloat16 has steps of 1/128 at 1; updates of lr = 1e-4 would all be lost if rounded to the nearest.
    size, lr, num_steps = 4096, 1e-4, 100
    weights = torch.ones(size, dtype=torch.bfloat16)
    dtype = torch.uint8 if coded else torch.float32
    moments = [torch.zeros(size, dtype=dtype) for _ in range(2)]
    scales = {}
    if coded:
        scales = {name: torch.zeros(16) for name in ("exp_avg_scale", "exp_avg_sq_scale")}
    hyper = HYPER | {"lr": lr, "weight_decay": 0.0}
    for step in range(1, num_steps + 1):
        grad = torch.full((size,), 0.01)
        adamw_(weights, None, *moments, grad, step=step, rounding_seed=9, form=form, **hyper, **scales)  # fmt: skip
    # Each step of a constant gradient is lr; rounding scatters by at most half a unit below 1 (1/256) per root.
    moved = 1 - weights.float().mean().item()
    scatter = math.sqrt(num_steps * lr / 128 / size)
    tolerance = 5 * scatter + (0.02 if coded else 1e-4) * num_steps * lr
    assert abs(moved - num_steps * lr) < tolerance
    assert weights.unique().numel() > 2


@pytest.mark.parametrize("form", forms())
def test_rounding_depends_on_seed_step_and_place_alone(form):
    def rounded(seed: int, step: int, first: int) -> torch.Tensor:
        arrays, _ = arguments(state(2000), weights="rounded", coded=False)
        adamw_(*arrays, step=step, rounding_seed=seed, first=first, form=form, **HYPER)
        return arrays[0].view(torch.int16)

    once = rounded(1, 5, 0)
    assert torch.equal(once, rounded(1, 5, 0))
    assert not torch.equal(once, rounded(2, 5, 0))
    assert not torch.equal(once, rounded(1, 5, 64))
    # Only the neighbours on either side of the exact result occur.
    exact = updated(state(2000), weights="fp32", coded=False, form=form)
    start = state(2000)["weights"].bfloat16().float()
    tensors = state(2000) | {"weights": start}
    exact = updated(tensors, weights="fp32", coded=False, form=form)[0].view(torch.float32)
    arrays, _ = arguments(state(2000), weights="rounded", coded=False)
    adamw_(*arrays, step=3, rounding_seed=1, form=form, **HYPER)
    distance = (arrays[0].float() - exact).abs()
    assert (distance <= exact.abs() / 128).all()


# What must not pass


@pytest.mark.parametrize("form", forms())
@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize(("weights", "coded"), KINDS)
def test_gradients_that_are_not_finite_are_reported(form, weights, coded, value):
    tensors = state(1000)
    tensors["grad"][990] = value
    with pytest.raises(ValueError, match=r"step 3: a weight .*is not finite .* rate 0.01"):
        updated(tensors, weights=weights, coded=coded, form=form)


@pytest.mark.parametrize("form", forms())
def test_a_scale_that_is_not_finite_is_reported(form):
    # The square overflows: the exact kernel goes on with one element that never moves again, here it is a block.
    tensors = state(1000)
    tensors["grad"][5] = 3e38
    with pytest.raises(ValueError, match="a weight or moment is not finite"):
        updated(tensors, weights="fp32", coded=True, form=form)


@pytest.mark.parametrize("form", forms())
def test_a_weight_that_chance_may_make_infinite_is_reported(form):
    zeros = [torch.zeros(40) for _ in range(3)]
    weights = torch.zeros(40, dtype=torch.bfloat16)
    weights[39] = torch.finfo(torch.bfloat16).max
    hyper = HYPER | {"weight_decay": 0.0}
    adamw_(weights, None, *zeros, step=1, rounding_seed=1, form=form, **hyper)
    zeros[0][39] = -1.0
    with pytest.raises(ValueError, match="not finite"):
        adamw_(weights, None, *zeros, step=1, rounding_seed=1, form=form, **(hyper | {"lr": 1e26}))


def test_wrong_arguments_are_named():
    (weights, _, exp_avg, exp_avg_sq, grad), scales = arguments(
        state(600), weights="rounded", coded=True
    )
    low = torch.zeros(600, dtype=torch.int16)
    good = [weights, None, exp_avg, exp_avg_sq, grad]
    for change, options, message in [
        ({}, scales, "weights is torch.bfloat16 .* must be torch.float32"),
        ({1: low}, scales | {"rounding_seed": 1}, "leave out low or rounding_seed"),
        ({0: weights.float()}, {"rounding_seed": 1} | scales, "must be torch.bfloat16"),
        ({}, {"rounding_seed": 1}, "exp_avg is torch.uint8 .* must be torch.float32"),
        ({2: exp_avg.float()}, scales | {"rounding_seed": 1}, "must be torch.uint8"),
        (
            {},
            {"rounding_seed": 1, "exp_avg_scale": scales["exp_avg_scale"]},
            "both moments have scales, or none",
        ),
        (
            {},
            scales | {"rounding_seed": 1, "exp_avg_sq_scale": torch.zeros(2)},
            r"exp_avg_sq_scale is .* of shape \[2\]; it must be torch.float32 of shape \[3\]",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            adamw_(*(change.get(i, t) for i, t in enumerate(good)), step=1, **options, **HYPER)


@pytest.mark.parametrize("form", forms())
def test_nothing_to_update(form):
    empty, codes = torch.empty(0), torch.empty(0, dtype=torch.uint8)
    scales = {"exp_avg_scale": empty, "exp_avg_sq_scale": empty}
    adamw_(empty, None, codes, codes, empty, step=1, form=form, **scales, **HYPER)
    half = torch.empty(0, dtype=torch.bfloat16)
    adamw_(half, None, empty, empty, empty, step=1, form=form, rounding_seed=1, **HYPER)


@pytest.mark.parametrize(("weights", "coded"), KINDS)
def test_a_regression_converges_as_with_the_exact_optimizer(weights, coded):
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(512, 700, generator=generator)
    targets = inputs @ torch.randn(700, generator=generator)

    def final_loss(weights: str, coded: bool) -> float:
        tensors = state(700)
        for name in tensors:
            tensors[name].zero_()
        arrays, scales = arguments(tensors, weights=weights, coded=coded)
        options = {"rounding_seed": 1} if weights == "rounded" else {}
        for step in range(1, 301):
            master, low = arrays[0], arrays[1]
            current = master.float() if low is None else join_master(master, low)
            residual = inputs @ current - targets
            arrays[4].copy_(inputs.T @ residual / 512)
            lr = 0.05 * (1 - step / 301)
            adamw_(*arrays, step=step, **(HYPER | {"lr": lr, "weight_decay": 0.0}), **options, **scales)  # fmt: skip
        return float(residual.square().mean())

    start = float(targets.square().mean())
    exact = final_loss("fp32", False)
    assert exact < 1e-3 * start
    # Weights of bfloat16 are off by up to 1/256 of themselves, and so is the prediction, relatively.
    assert final_loss(weights, coded) < 1e-3 * start + 2 * exact
