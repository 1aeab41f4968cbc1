"""The swap manager takes the memory that was planned, and gives it back."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ssdtune.config.schema import LoraSettings
from ssdtune.device.base import Device, Pin
from ssdtune.device.cpu import CpuDevice
from ssdtune.io.buffers import BufferPool
from ssdtune.model.blocks import BlockModel
from ssdtune.model.build import build_model
from ssdtune.model.checkpoint import HfCheckpoint
from ssdtune.model.layout import ModelLayout
from ssdtune.optim.adamw import join_master, split_master
from ssdtune.plan.device_memory import DeviceLimits, slot_bytes
from ssdtune.plan.residency import (
    ComputeSize,
    MemoryLimits,
    MemoryPlan,
    Proportions,
    plan_memory,
)
from ssdtune.swap.activations import saved_elsewhere
from ssdtune.swap.manager import SwapManager
from ssdtune.swap.states import Precision
from ssdtune.swap.update import AdamSettings, OutOfCoreAdam
from ssdtune.train.prepare import part_sizes
from tests.adversarial import AdversarialDevice
from tests.toy import make_checkpoint

INPUT_BYTES = 4096 * 3
COMPUTE = ComputeSize(0, 0, INPUT_BYTES, 2, 0, kept_bytes=1 << 20)
EXACT = Precision()


@pytest.fixture(scope="module", params=["full", "lora"])
def layout(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelLayout:
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), "qwen2", tied=False)
    lora = LoraSettings(r=3) if request.param == "lora" else None
    built = build_model(HfCheckpoint.open(folder), dtype=torch.bfloat16, lora=lora)
    return BlockModel(built, torch.device("cpu")).layout


def make(
    layout: ModelLayout,
    cache_bytes: int | None,
    *,
    block_slots: int = 3,
    precision: Precision = EXACT,
    **options: Any,
) -> tuple[SwapManager, BufferPool]:
    limits = MemoryLimits(
        **({"base_bytes": 0, "budget_bytes": 1 << 40, "chunk_bytes": 8192} | options),
        cache_bytes=cache_bytes,
    )
    plan = plan_memory(
        part_sizes(layout, precision), COMPUTE, limits,
        Proportions(block_slots=block_slots),
    )  # fmt: skip
    return make_with(layout, plan, precision)


def make_with(
    layout: ModelLayout,
    plan: MemoryPlan,
    precision: Precision = EXACT,
    device: Device | None = None,
) -> tuple[SwapManager, BufferPool]:
    pool = BufferPool()
    swap = SwapManager(
        layout, plan, source=None, initial={}, split=split_master, join=join_master,  # type: ignore[arg-type]
        store=SimpleNamespace(check_bytes=4096), device=device or CpuDevice(), pool=pool, compute=COMPUTE, precision=precision,  # type: ignore[arg-type]
    )  # fmt: skip
    return swap, pool


CASES: tuple[dict[str, Any], ...] = (
    {"cache_bytes": 0},
    {"cache_bytes": 0, "clipping": False},
    {"cache_bytes": 0, "block_slots": 5, "activations": "host"},
    {"cache_bytes": 0, "recompute": "never"},
    {"cache_bytes": 1},
    {"cache_bytes": 50_000, "activations": "ssd"},
    {"cache_bytes": 100_000},
    {"cache_bytes": None},
    {"cache_bytes": None, "clipping": False},
    {"cache_bytes": 0, "precision": Precision(masters=False)},
    {"cache_bytes": 0, "precision": Precision(coded_moments=True)},
    {"cache_bytes": 50_000, "precision": Precision(masters=False, coded_moments=True)},
)


@pytest.mark.parametrize("options", CASES, ids=str)
def test_slots_take_what_was_planned(layout: ModelLayout, options: dict[str, Any]) -> None:
    assert_takes_what_was_planned(*make(layout, **options))


@pytest.mark.parametrize("room", range(0, 11))
def test_short_memory_is_used_as_planned(layout: ModelLayout, room: int) -> None:
    """From the fewest slots on, over gradients of some stages, to all that there is."""
    least = make(layout, 0, block_slots=1)[0].plan.host_bytes
    most = make(layout, None)[0].plan.host_bytes
    swap, pool = make(layout, None, budget_bytes=least + (most - least) * room // 10)
    assert_takes_what_was_planned(swap, pool)


def test_weights_that_stay_in_memory_are_pinned_while_they_are_uploaded(
    layout: ModelLayout,
) -> None:
    pinned: set[int] = set()

    class Pinning(CpuDevice):
        def pin(self, memory: memoryview) -> Pin:
            address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
            pinned.add(address)
            return Pin(lambda: pinned.remove(address))

    swap, _ = make_with(layout, make(layout, None)[0].plan, device=Pinning())
    nothing: Any = SimpleNamespace(load=lambda *_: None, load_split=lambda *_: None)
    swap._source, swap.store.version = nothing, lambda unit: None  # type: ignore[method-assign]
    weights = [swap.resident(part).states["weights"] for part in layout.parts]
    assert all(tensor.data_ptr() in pinned for tensor in weights)
    swap.free_slots()
    assert not pinned


def assert_takes_what_was_planned(swap: SwapManager, pool: BufferPool) -> None:
    planned = swap.plan.breakdown
    inputs = planned["block inputs"] if swap.plan.input_slots else 0
    assert pool.allocated_bytes == planned["weight slots"] + planned["gradients"] + inputs
    before = pool.allocated_bytes
    OutOfCoreAdam(swap, AdamSettings(0.9, 0.99, 1e-8, 0.0), pool=pool)
    chunks = pool.allocated_bytes - before
    assert chunks <= planned["optimizer chunks"]
    swap.free_slots()
    pool.trim()
    assert pool.allocated_bytes == chunks


ON_A_CARD: tuple[dict[str, Any], ...] = (
    {"swapped_blocks": 2}, {"block_slots": 1}, {"activations": "host", "recompute": "never"},
    {"activations": "host", "recompute": "always"}, {"inputs_leave": True, "host_blocks": 1, "kept_blocks": 0},
)  # fmt: skip


@pytest.mark.parametrize("options", [*CASES, *ON_A_CARD], ids=str)
@pytest.mark.parametrize("is_short", [False, True])
def test_a_device_gives_what_was_planned(
    layout: ModelLayout, options: dict[str, Any], is_short: bool
) -> None:
    options = {"cache_bytes": None, "precision": EXACT} | options
    precision = options.pop("precision")
    names = {field.name for field in fields(Proportions)}
    wanted = {name: options.pop(name) for name in names & options.keys()}
    proportions = Proportions(**wanted)
    sizes = part_sizes(layout, precision)

    def planned(budget_bytes: int) -> MemoryPlan:
        limits = MemoryLimits(
            base_bytes=0, budget_bytes=1 << 40, chunk_bytes=8192, device=DeviceLimits(budget_bytes),
            **options,
        )  # fmt: skip
        return plan_memory(sizes, COMPUTE, limits, proportions)

    plan = planned(1 << 40)
    if is_short:
        plan = planned(plan.device_bytes - 1)
    device = AdversarialDevice()
    swap, pool = make_with(layout, plan, precision, device)
    in_host = ("weight slots", "gradients", "block inputs")
    assert pool.allocated_bytes == sum(plan.breakdown[purpose] for purpose in in_host)
    planned_slots = {name: size for name, size in slot_bytes(sizes, COMPUTE, plan).items() if size}
    assert device.memory().by_purpose == planned_slots
    assert swap.plan.device_breakdown["weight slots"] == planned_slots["weight slots"]
    swap.free_slots()
    pool.trim()
    assert device.memory().by_purpose == {}


@pytest.mark.parametrize("gradients", ["host", "ssd", "some on ssd", "overlap"])
def test_gradients_do_not_overlap(layout: ModelLayout, gradients: str) -> None:
    """Those of a slot's parts, and those of stages that wait in memory with all others."""
    trained = [name for name, stage in layout.stages.items() if any(p.trained for p in stage.parts)]
    on_ssd = {"ssd": trained, "some on ssd": trained[::2]}.get(gradients, [])
    plan = MemoryPlan(
        frozenset(),
        frozenset() if gradients == "overlap" else frozenset(trained),
        frozenset(on_ssd),
    )
    swap, _ = make_with(layout, plan)
    written: list[tuple[str, torch.Tensor, int]] = []
    # those that pass through a slot first: they may not touch what waits
    order = sorted(trained, key=lambda name: name not in plan.gradients_in_memory)
    for stage in order:
        if stage not in plan.gradients_in_memory:
            written = [entry for entry in written if entry[0] in plan.gradients_in_memory]
        for part in layout.stages[stage].parts:
            if part.trained:
                place, _ = swap.gradient(part, swap.gradient_slot(stage))
                assert place.shape == (part.numel,)
                written.append((stage, place.fill_(len(written)), len(written)))
        assert all(bool((place == number).all()) for _, place, number in written), stage


def test_weights_of_another_stage_are_not_given_out(layout: ModelLayout, tmp_path: Path) -> None:
    swap, _ = make(layout, 0)
    with pytest.raises(AssertionError, match=r"slot block\.0 holds "):
        swap.weights("block.1", "block.0")


def test_a_graph_finds_its_weights_in_another_slot(layout: ModelLayout) -> None:
    """A block that keeps its activations saves where its weights lie in a slot, not what is there now."""
    swap, _ = make(layout, 0)
    stage, first, second = "block.1", "block.0", "block.2"
    random = torch.Generator().manual_seed(0)
    weights = {
        part.name: torch.randn(part.numel, generator=random).to(part.dtype)
        for part in layout.stages[stage].parts
    }

    def put(slot: str) -> None:
        for part in layout.stages[stage].parts:
            swap.host_weights(part, slot).copy_(weights[part.name])
        swap.upload(stage, slot)

    def gradients(*, moves: bool) -> list[torch.Tensor]:
        put(first)
        place = first
        with saved_elsewhere(swap.memory(first), lambda: swap.memory(place)):
            hidden = torch.ones(3, 1, requires_grad=True)
            leaves = [
                weight.detach().requires_grad_()
                for weight in swap.weights(stage, first).values()
                if weight.ndim == 2
            ]
            total = torch.zeros(())
            for leaf in leaves:  # whole, transposed, and a view with steps
                total = total + (hidden.to(leaf.dtype).expand(3, leaf.shape[1]) @ leaf.t()).sum()
                total = total + (leaf.t()[1:, ::2] * leaf.t()[1:, ::2]).float().sum()
        if moves:
            put(second)
            place = second
            for part in layout.stages[stage].parts:
                swap.host_weights(part, first).view(torch.uint8).fill_(255)
        total.backward()
        return [hidden.grad, *(leaf.grad for leaf in leaves)]

    wanted = gradients(moves=False)
    assert len(wanted) > 5
    assert all(bool(torch.isfinite(one).all()) and bool(one.any()) for one in wanted)
    got = gradients(moves=True)
    assert all(torch.equal(one, other) for one, other in zip(wanted, got, strict=True))
