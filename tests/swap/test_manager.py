"""The swap manager takes the memory that was planned, and gives it back."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ssdtune.config.schema import LoraSettings
from ssdtune.device.cpu import CpuDevice
from ssdtune.io.buffers import BufferPool
from ssdtune.model.blocks import BlockModel
from ssdtune.model.build import build_model
from ssdtune.model.checkpoint import HfCheckpoint
from ssdtune.model.layout import ModelLayout
from ssdtune.optim.adamw import join_master, split_master
from ssdtune.plan.residency import ComputeSize, plan_memory
from ssdtune.swap.manager import SwapManager
from ssdtune.swap.update import AdamSettings, OutOfCoreAdam
from ssdtune.train.prepare import part_sizes
from tests.toy import make_checkpoint

INPUT_BYTES = 4096 * 3


@pytest.fixture(scope="module", params=["full", "lora"])
def layout(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelLayout:
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), "qwen2", tied=False)
    lora = LoraSettings(r=3) if request.param == "lora" else None
    built = build_model(HfCheckpoint.open(folder), dtype=torch.bfloat16, lora=lora)
    return BlockModel(built, torch.device("cpu")).layout


def make(
    layout: ModelLayout, cache_bytes: int | None, **options: Any
) -> tuple[SwapManager, BufferPool]:
    settings = {"clipping": True, "prefetch_depth": 1, "activations": "auto"} | options
    plan = plan_memory(
        part_sizes(layout), ComputeSize(0, 0, INPUT_BYTES, 2, 0), num_blocks=layout.num_blocks,
        base_bytes=0, budget_bytes=1 << 40, cache_bytes=cache_bytes, chunk_bytes=8192, **settings,
    )  # fmt: skip
    pool = BufferPool()
    swap = SwapManager(
        layout, plan, source=None, initial={}, split=split_master, join=join_master,  # type: ignore[arg-type]
        store=SimpleNamespace(check_bytes=4096), device=CpuDevice(), pool=pool, input_bytes=INPUT_BYTES,  # type: ignore[arg-type]
    )  # fmt: skip
    return swap, pool


CASES: tuple[dict[str, Any], ...] = (
    {"cache_bytes": 0},
    {"cache_bytes": 0, "clipping": False},
    {"cache_bytes": 0, "prefetch_depth": 3, "activations": "host"},
    {"cache_bytes": 50_000, "activations": "ssd"},
    {"cache_bytes": 100_000},
    {"cache_bytes": None},
    {"cache_bytes": None, "clipping": False},
)


@pytest.mark.parametrize("options", CASES, ids=str)
def test_slots_take_what_was_planned(layout: ModelLayout, options: dict[str, Any]) -> None:
    swap, pool = make(layout, **options)
    planned = swap.plan.breakdown
    inputs = planned["block inputs"] if swap.plan.input_slots else 0
    assert pool.allocated_bytes == planned["weight slots"] + planned["gradients"] + inputs
    before = pool.allocated_bytes
    OutOfCoreAdam(
        layout.trained_parts, swap, AdamSettings(0.9, 0.99, 1e-8, 0.0), chunk_bytes=8192, pool=pool
    )
    chunks = pool.allocated_bytes - before
    assert chunks <= planned["optimizer chunks"]
    swap.free_slots()
    pool.trim()
    assert pool.allocated_bytes == chunks


@pytest.mark.parametrize("gradients", ["host", "ssd", "overlap"])
def test_gradients_of_a_slot_do_not_overlap(layout: ModelLayout, gradients: str) -> None:
    clipping, cache = gradients != "overlap", 0 if gradients == "ssd" else None
    swap, _ = make(layout, cache, clipping=clipping)
    assert swap.plan.gradients == gradients
    for stage in layout.stages.values():
        places = [
            swap.gradient(part, swap.gradient_slot(stage.name))[0]
            for part in stage.parts
            if part.trained
        ]
        for number, place in enumerate(places):
            place.fill_(number)
        for number, (place, part) in enumerate(
            zip(places, (p for p in stage.parts if p.trained), strict=True)
        ):
            assert place.shape == (part.numel,)
            assert bool((place == number).all())


def test_weights_of_another_stage_are_not_given_out(layout: ModelLayout, tmp_path: Path) -> None:
    swap, _ = make(layout, 0)
    with pytest.raises(AssertionError, match=r"slot block\.0 holds "):
        swap.weights("block.1", "block.0")
