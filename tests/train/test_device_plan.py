"""The memory of a card is planned, kept to, and refused in words; of this machine and of another."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ssdtune import finetune, plan
from ssdtune.config.load import load_config
from ssdtune.config.schema import Config
from ssdtune.device.base import Event
from ssdtune.errors import CapacityError, ConfigError, DeviceMemoryError, SsdtuneError
from ssdtune.hardware.figures import CopyPoint
from ssdtune.hardware.profile import HardwareProfile
from ssdtune.plan.device_memory import CONTEXT_BYTES, FREE_SHARE, DeviceLimits, device_bytes
from ssdtune.train.prepare import prepare
from ssdtune.train.rehearse import rehearse
from tests.adversarial import ORDERS, AdversarialDevice, use, use_device
from tests.toy import make_checkpoint, make_rows
from tests.train.test_planning import machine

GIB = 1 << 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("device-plan")
    make_checkpoint(folder / "model", "llama", tied=False)
    make_rows(folder / "rows.jsonl", 6)
    return folder


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "model_name_or_path": str(folder / "model"), "train_file": str(folder / "rows.jsonl"),
        "per_device_train_batch_size": 2, "dtype": "bf16", "save_steps": 0,
    } | changes  # fmt: skip


def config(folder: Path, **changes: Any) -> Config:
    return load_config(None, settings(folder, output_dir=str(folder / "out"), **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        *({"activations": "ssd", "recompute": r} for r in ("auto", "cheap", "never")),
        {"activations": "host", "recompute": "always"},
        {"activations": "host", "recompute": "never"},
    ],
    ids=str,
)
def test_a_run_takes_the_slots_that_its_plan_names(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    device = use(monkeypatch, ORDERS["compute first"])
    finetune(**settings(folder, output_dir=str(tmp_path / "out"), max_steps=1, **changes))
    memory = json.loads((tmp_path / "out/plan.json").read_text())["memory"]
    assert memory["device_gradient_slots"] == 2
    planned = memory["device_breakdown"]
    for purpose in ("weight slots", "gradients"):
        assert device.taken[purpose] == planned[purpose]
    assert device.taken.get("block inputs", 0) <= planned["block inputs"]
    assert ("block inputs" in device.taken) == bool(changes)
    waits_in_host = changes.get("activations") == "host"
    assert bool(memory["in_host"]) == waits_in_host
    in_host = (
        "in host memory" in plan(**settings(folder, output_dir=str(tmp_path), **changes)).text()
    )
    assert in_host == waits_in_host
    assert memory["device_bytes"] == sum(planned.values()) <= memory["device_budget_bytes"]
    assert device.memory().by_purpose == {}


def test_a_cpu_has_no_memory_of_its_own(folder: Path) -> None:
    memory = plan(**settings(folder, output_dir=str(folder / "out"), device="cpu")).to_dict()["memory"]  # fmt: skip
    assert memory is not None
    assert memory["device_bytes"] == memory["device_gradient_slots"] == 0


def test_the_budget_is_what_is_free_unless_it_is_given(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = AdversarialDevice()
    device.free_bytes = 2 * GIB
    use_device(monkeypatch, device)
    assert prepare(config(folder)).memory.device_budget_bytes == CONTEXT_BYTES + int(2 * GIB * FREE_SHARE)  # fmt: skip
    prepared = prepare(config(folder, gpu_memory="1GiB"))
    assert prepared.memory.device_budget_bytes == GIB
    text = plan(**settings(folder, output_dir=str(folder / "out"), gpu_memory="1GiB")).text()
    assert "GPU memory: " in text and " planned of 1.00 GiB; slots for the weights of 3" in text


@pytest.mark.parametrize("method", ["full", pytest.param("lora", marks=pytest.mark.slow)])
def test_what_does_not_fit_on_the_card_is_refused_with_what_would(
    folder: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    use_device(monkeypatch, AdversarialDevice())
    least = CONTEXT_BYTES + 137 * (1 << 20)
    with pytest.raises(CapacityError) as refused:
        prepare(config(folder, method=method, gpu_memory=least, per_device_train_batch_size=64))
    text = str(refused.value)
    assert text.startswith("GPU memory: even with one block at a time the run needs ")
    assert f"the budget is {least / (1 << 20):.0f} MiB" in text
    nearest = text.partition("What would fit: ")[2]
    assert "or gpu_memory " in nearest and "host_memory" not in nearest
    size = int(nearest.partition("per_device_train_batch_size ")[2].partition(",")[0])
    assert 1 <= size < 64
    prepare(config(folder, method=method, gpu_memory=least, per_device_train_batch_size=size))
    with pytest.raises(CapacityError, match="GPU memory"):
        prepare(config(folder, method=method, gpu_memory=least, per_device_train_batch_size=size + 1))  # fmt: skip
    needed = nearest.partition("gpu_memory ")[2].partition(" ")[0]
    prepare(config(folder, method=method, gpu_memory=needed, per_device_train_batch_size=64))


def with_card(**more: str | int) -> HardwareProfile:
    """Return a machine whose blocks were measured on a card."""
    copies = tuple(
        CopyPoint(device="cuda:0", pinned=True, direction=way, bytes_per_s=2e10)
        for way in ("h2d", "d2h", "both")
    )
    known = machine()
    return replace(known, copies=copies, machine={**known.machine, **more})


def test_the_card_of_another_machine_is_planned_for(folder: Path) -> None:
    given = settings(folder, output_dir=str(folder / "out"))
    there = with_card(card="NVIDIA GeForce RTX 4090", card_bytes=24 * GIB)
    found = plan(hardware=there, other_machine=True, **given)
    memory = found.to_dict()["memory"]
    assert memory is not None
    assert memory["device_budget_bytes"] == CONTEXT_BYTES + int((24 * GIB - CONTEXT_BYTES) * FREE_SHARE)  # fmt: skip
    assert "computed in bfloat16 on NVIDIA GeForce RTX 4090" in found.text()
    assert "GPU memory: " in found.text() and found.fits
    small = plan(hardware=there, other_machine=True, gpu_memory="600MiB", **given)
    assert not small.fits and small.problems[0].startswith("GPU memory: ")


def test_a_card_of_unknown_size_is_said_to_be(folder: Path) -> None:
    given = settings(folder, output_dir=str(folder / "out"))
    with pytest.raises(ConfigError, match=r"how much memory the card has \(machine.card_bytes\)"):
        plan(hardware=with_card(), other_machine=True, **given)
    found = plan(hardware=with_card(), other_machine=True, gpu_memory="8GiB", **given)
    assert found.fits and " planned of 8.00 GiB" in found.text()


@pytest.mark.usefixtures("short_rehearsals")
def test_a_rehearsal_keeps_no_more_than_the_card_has_room_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_device(monkeypatch, AdversarialDevice())
    prepared = prepare(config(folder))
    assert "backward+kept" in rehearse(prepared, flop_per_s=1e12).seconds
    streamed = replace(prepared.memory, kept=frozenset(), swapped=frozenset(), input_slots=0)
    least = sum(device_bytes(prepared.parts, prepared.compute, streamed).values())
    limits = replace(prepared.limits, device=DeviceLimits(least))
    times = rehearse(replace(prepared, limits=limits), flop_per_s=1e12).seconds
    assert "backward" in times and "backward+kept" not in times


class FullOnce(AdversarialDevice):
    """Has no room when compute gets to a point, once."""

    left = 20

    def record(self) -> Event:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("full")
        return super().record()

    def explain(self, error: BaseException) -> SsdtuneError | None:
        return DeviceMemoryError("the card is full.", 4 * GIB) if str(error) == "full" else None


@pytest.mark.parametrize("saved", [True, False], ids=["from a checkpoint", "from the start"])
def test_a_full_card_is_tried_once_more_if_wanted(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: bool
) -> None:
    changes = {"max_steps": 3, "save_steps": int(saved), "save_total_limit": None}
    use_device(monkeypatch, AdversarialDevice())
    finetune(**settings(folder, output_dir=str(tmp_path / "wanted"), **changes))

    device = FullOnce()
    use_device(monkeypatch, device)
    finetune(
        **settings(folder, output_dir=str(tmp_path / "out"), retry_out_of_memory=True, **changes)
    )
    assert device.left < 0
    name = "model.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "wanted" / name).read_bytes()
    memory = json.loads((tmp_path / "out/plan.json").read_text())["memory"]
    assert memory["device_budget_bytes"] == int(0.8 * 4 * GIB)
    steps = [
        json.loads(line)["step"]
        for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()
    ]
    assert [step for step in steps if step] == [1, 2, 3]


def test_a_full_card_ends_the_run_otherwise(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_device(monkeypatch, FullOnce())
    with pytest.raises(CapacityError, match="the card is full"):
        finetune(**settings(folder, output_dir=str(tmp_path / "out"), max_steps=3))
