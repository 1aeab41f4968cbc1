"""The search finds what trying everything finds, keeps to the budget and to what the user fixed, and is never worse."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from ssdtune.config.load import load_config
from ssdtune.errors import CapacityError
from ssdtune.hardware.profile import Rates
from ssdtune.plan.device_memory import DeviceLimits
from ssdtune.plan.residency import MemoryLimits, MemoryPlan, Proportions, plan_memory
from ssdtune.plan.search import LEAST_GAIN, Found, choices, search
from ssdtune.train.forecast import Forecaster
from ssdtune.train.prepare import Prepared, prepare
from ssdtune.units import GIB, MIB

BLOCKS = 3
PLENTY = 64 * GIB
MOST_PLANS = 60
"""Plans that a search is compared with where there are thousands; they are drawn."""

CARD = Rates(
    read_bytes_per_s=6e9, write_bytes_per_s=4e9, mixed_bytes_per_s=5e9, adam_parameters_per_s=2e9,
    adam_with_io_parameters_per_s=2e9, io_with_adam_bytes_per_s=5e9, memory_bytes_per_s=100e9,
    h2d_bytes_per_s=20e9, d2h_bytes_per_s=20e9, both_bytes_per_s=30e9,
    forward_flop_per_s={"bf16": 1e12}, backward_flop_per_s={"bf16": 1e12},
)  # fmt: skip


def computing(flop_per_s: float, **changes: Any) -> Rates:
    both = {"bf16": flop_per_s}
    return replace(CARD, forward_flop_per_s=both, backward_flop_per_s=both, **changes)


MACHINES = {
    "balanced": CARD,
    "drives": replace(CARD, read_bytes_per_s=1e9, write_bytes_per_s=0.6e9),
    "compute": computing(1e11),
    "adam": replace(CARD, adam_parameters_per_s=5e7, adam_with_io_parameters_per_s=5e7),
    "cpu": computing(3e11, adam_parameters_per_s=4e8, h2d_bytes_per_s=None, d2h_bytes_per_s=None),
}


class Timer:
    """Simulates steps as a run's forecast does, and counts them."""

    def __init__(self, prepared: Prepared, rates: Rates) -> None:
        self.forecaster = Forecaster(prepared, rates)
        self.count = 0

    def __call__(self, plan: MemoryPlan) -> float:
        self.count += 1
        return self.forecaster.step_s(plan)


class Model:
    """A model with its plans."""

    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared

    def timer(self, name: str = "balanced") -> Timer:
        return Timer(self.prepared, MACHINES[name])

    def plan(self, limits: MemoryLimits, proportions: Proportions | None = None) -> MemoryPlan:
        return plan_memory(self.prepared.parts, self.prepared.compute, limits, proportions)

    def search(self, limits: MemoryLimits, timer: Timer | None = None, **options: Any) -> Found:
        prepared = self.prepared
        return search(prepared.parts, prepared.compute, limits, timer or self.timer(), **options)

    def limits(self, share: float, **changes: Any) -> MemoryLimits:
        """Return a memory between the least that does (0) and all that can be used (1)."""
        bounds = replace(MemoryLimits(base_bytes=0, budget_bytes=PLENTY), **changes)
        smallest = Proportions(block_slots=1, chunk_slots=2, chunk_bytes=4 * MIB)
        least = self.plan(replace(bounds, cache_bytes=0), smallest).least_bytes
        most = self.plan(bounds).least_bytes
        return replace(bounds, budget_bytes=int(least + share * (most - least)))

    def everything(
        self, limits: MemoryLimits, most: int | None = None, **fixed: Any
    ) -> Iterator[MemoryPlan]:
        """Return the different plans of all combinations of proportions, or so many of them."""
        options, seen = choices(self.prepared.parts, limits), set()
        options |= {name: [value] for name, value in fixed.items()}
        combinations = list(itertools.product(*options.values()))
        random.Random(0).shuffle(combinations)
        if most:  # many combinations give the same plan
            combinations = combinations[: 20 * most]
        for values in combinations:
            try:
                plan = self.plan(limits, Proportions(**dict(zip(options, values, strict=True))))
            except CapacityError:
                continue
            if plan not in seen:
                seen.add(plan)
                yield plan
            if len(seen) == most:
                return


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """12 million parameters a block, in steps of two micro-batches of 1024 tokens."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": BLOCKS,
        "hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 2816,
        "vocab_size": 4096,
    }))  # fmt: skip
    settings = {
        "model_name_or_path": str(folder), "dtype": "bf16", "device": "cpu", "max_length": 512,
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "host_memory": "64GiB",
    }  # fmt: skip
    return Model(prepare(load_config(None, settings), with_rows=False))


@pytest.mark.parametrize("clipping", [True, False], ids=["clipping", "no clipping"])
@pytest.mark.parametrize(
    ("name", "share"), list(zip(MACHINES, (0.5, 0.1, 0.3, 0.4, 0.2), strict=True))
)
def test_nothing_is_faster_than_what_was_found(
    model: Model, name: str, share: float, clipping: bool
) -> None:
    # Whatever blocks keep, with slots as usual; of all other combinations, of which there are thousands, some.
    limits = model.limits(share, clipping=clipping, chunk_bytes=16 * MIB)
    plans = set(model.everything(limits, MOST_PLANS))
    if clipping:
        plans |= set(model.everything(limits, input_slots=2, block_slots=3, chunk_slots=4))
    best = min(map(model.timer(name), plans))
    assert model.search(limits, model.timer(name)).step_s <= 1.01 * best


@pytest.mark.parametrize("name", ["drives", "compute"])
def test_pieces_of_every_size_are_tried(model: Model, name: str) -> None:
    limits = model.limits(0.3)
    best = min(map(model.timer(name), model.everything(limits, MOST_PLANS)))
    assert model.search(limits, model.timer(name)).step_s <= 1.01 * best


@pytest.mark.parametrize("clipping", [True, False], ids=["clipping", "no clipping"])
@pytest.mark.parametrize("share", [0.0, 0.3])
@pytest.mark.parametrize("name", ["balanced", "compute"])
def test_keeps_to_the_budget_and_is_never_worse_than_usual(
    model: Model, name: str, share: float, clipping: bool
) -> None:
    limits = model.limits(share, clipping=clipping)
    timer, same = model.timer(name), model.timer(name)
    result = model.search(limits, timer)
    assert result.plan.host_bytes <= limits.budget_bytes == result.plan.budget_bytes
    assert result.step_s <= result.usual_s == same(model.plan(limits))
    assert result.step_s == same(result.plan)
    assert result.plan == model.plan(limits, result.proportions)
    assert result.num_tried == timer.count  # no plan twice
    assert result == model.search(limits, same)


def test_where_the_usual_plan_is_best_it_stays(model: Model) -> None:
    result = model.search(model.limits(3), model.timer("adam"))
    assert result.proportions == Proportions()
    assert result.step_s == result.usual_s > result.step_s * (1 - LEAST_GAIN)


def test_no_more_steps_are_simulated_than_asked_for(model: Model) -> None:
    for most in (1, 2, 5):
        timer = model.timer()
        result = model.search(model.limits(0.3), timer, most_steps=most)
        assert timer.count == result.num_tried == most
        assert result.step_s <= result.usual_s


@pytest.mark.parametrize("share", [0.1, 1.0])
def test_what_the_user_fixed_stays(model: Model, share: float) -> None:
    def plan(name: str = "balanced", **changes: Any) -> MemoryPlan:
        return model.search(model.limits(share, **changes), model.timer(name)).plan

    blocks = {f"block.{i}" for i in range(BLOCKS)}
    assert plan(chunk_bytes=8 * MIB).chunk_bytes == 8 * MIB
    assert not plan("compute", recompute="always").kept
    never = plan(recompute="never")
    assert never.kept == blocks and never.input_slots == 0
    assert plan(activations="host").input_slots == 0
    cheap = plan(recompute="cheap")
    assert cheap.kept == cheap.partly == blocks and cheap.input_slots == 0
    on_ssd = plan("compute", activations="ssd")
    assert on_ssd.input_slots > 0 and not on_ssd.kept
    streamed = plan(cache_bytes=0)
    assert not streamed.resident and not streamed.kept and not streamed.gradients_in_memory
    cached = plan(cache_bytes=100 * MIB)
    assert cached.breakdown["resident states"] <= 100 * MIB
    assert plan(clipping=True).deferred == {part.stage for part in model.prepared.parts}


def test_memory_goes_where_it_is_worth_most(model: Model) -> None:
    """Where computing binds, not all goes to states; where drives bind, all of them stay if they can."""
    computes = model.search(model.limits(0.6, clipping=False), model.timer("compute"))
    assert computes.step_s < computes.usual_s
    moves = model.search(model.limits(1.1, clipping=False), model.timer("drives"))
    assert moves.plan.resident == {part.name for part in model.prepared.parts}


def test_a_card_lets_inputs_wait_in_host_memory_where_that_is_as_fast(model: Model) -> None:
    away = MemoryLimits(0, PLENTY, activations="host", recompute="always", device=DeviceLimits(PLENTY))  # fmt: skip
    card = DeviceLimits(model.plan(away).device_bytes)
    limits = MemoryLimits(0, PLENTY, device=card)
    plan = model.search(limits, model.timer("drives")).plan
    assert plan.stored_inputs(BLOCKS) == 0 and len(plan.in_host) == BLOCKS - len(plan.kept) > 0
    short = replace(limits, budget_bytes=model.plan(replace(limits, cache_bytes=0)).host_bytes)
    assert model.search(short).plan.host_bytes <= short.budget_bytes


def test_too_little_memory_is_refused(model: Model) -> None:
    least = model.limits(0.0)
    # Smaller pieces, where they are left open.
    assert model.search(least).plan.host_bytes == least.budget_bytes
    with pytest.raises(CapacityError, match="even with everything streamed the run needs"):
        model.search(replace(least, budget_bytes=least.budget_bytes - 1))
