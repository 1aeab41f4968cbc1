"""A machine known only by its profile: its memory, dtypes, directories and space, and what a bad profile says."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from ssdtune.errors import CapacityError, ConfigError
from ssdtune.hardware.figures import CopyPoint, DirectoryProfile
from ssdtune.hardware.profile import HardwareProfile
from ssdtune.store.space import MARGIN_BYTES, Need
from ssdtune.train import elsewhere
from tests import invented


def place(path: str, free_bytes: int, device: str = "", **changes: Any) -> DirectoryProfile:
    return DirectoryProfile(
        path=path, file_system="ext4", device=device or f"/dev/{path[1:]}", free_bytes=free_bytes, **changes
    )  # fmt: skip


def profile(*places: DirectoryProfile, **changes: Any) -> HardwareProfile:
    return invented.profile(directories=places, **changes)


def test_nine_tenths_of_its_memory() -> None:
    assert elsewhere.host_budget(profile()) == int((64 << 30) * 0.9)
    for wrong in ({}, {"memory_bytes": 0}, {"memory_bytes": "much"}):
        with pytest.raises(ConfigError, match=r"machine.memory_bytes is .* or set host_memory"):
            elsewhere.host_budget(profile(machine=wrong))


def test_it_computes_in_what_it_multiplies_at_full_speed(caplog: pytest.LogCaptureFixture) -> None:
    old = profile(compute_dtypes=("fp32",))
    assert elsewhere.compute_dtype(profile(), "auto") == torch.bfloat16
    assert elsewhere.compute_dtype(old, "auto") == torch.float32
    assert elsewhere.compute_dtype(profile(), "fp32") == torch.float32
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "ssdtune"):
        assert elsewhere.compute_dtype(old, "bf16") == torch.bfloat16
    assert "does not compute in bf16 at full speed, only in fp32" in caplog.text


def test_states_lie_in_its_directories() -> None:
    a, b, full = place("/a", 1), place("/b", 1), place("/full", 0, problem="only 0 B are free")
    known = profile(a, b, full)
    assert elsewhere.swap_places(known, ["/b"]) == [b]
    assert elsewhere.swap_places(known, ["/full", "/full"]) == [full]
    for names in ([], ["/elsewhere"], ["/a", "/elsewhere"]):
        assert elsewhere.swap_places(known, names) == [a, b]
    for none in (profile(), profile(full)):
        with pytest.raises(ConfigError, match="no directory with measured drives"):
            elsewhere.swap_places(none, [])


def test_space_is_that_of_its_drives() -> None:
    gb = 10**9
    places = [
        place("/a", 5 * gb + MARGIN_BYTES, "/dev/md0"), place("/b", 5 * gb + MARGIN_BYTES, "/dev/md0"),
        place("/c", gb + MARGIN_BYTES),
    ]  # fmt: skip
    needs = [
        Need(Path("/a/states"), 2 * gb, "states"), Need(Path("/b/states"), 2 * gb, "states"),
        Need(Path("/home/out"), gb, "tuned weights"), Need(Path("/c/states"), gb, "states"),
    ]  # fmt: skip
    elsewhere.check_space(needs, places)
    with pytest.raises(CapacityError) as caught:
        elsewhere.check_space(
            [*needs, Need(Path("/b/x"), 1, "x"), Need(Path("/c/x"), gb, "x")], places
        )
    first, second = str(caught.value).splitlines()
    assert first.startswith(
        "not enough space on /dev/md0 (/a) of the hardware profile: 5.00 GB needed (2.00 GB for states,"
    )
    assert "1 B are missing" in first
    assert second.startswith("not enough space on /dev/c (/c)") and "1.00 GB are missing" in second
    assert "lora" in second


def test_a_card_is_not_asked_for_what_it_lacks() -> None:
    copy = CopyPoint(device="cuda:0", pinned=True, direction="h2d", bytes_per_s=1e10)
    known = profile(copies=(copy,), machine={"card": "T4", "file": "t4.json"}, compute_dtypes=("fp32", "fp16"))  # fmt: skip
    assert elsewhere.compute_dtype(known, "auto") == torch.float16
    with pytest.raises(
        ConfigError, match=r"profile t4.json, T4 computes in fp32 and fp16, not in bf16"
    ):
        elsewhere.compute_dtype(known, "bf16")


def test_which_machine_a_plan_is_for() -> None:
    assert elsewhere.describe(profile()) == (
        "planned for another machine: Zen, 16 cores, 64.0 GiB; measured 2026-12-01T00:00:00+00:00"
    )
    assert "machine: nothing is said of it; " in elsewhere.describe(profile(machine={}))
