"""Copies are measured through the device, pinned and not; every pin is undone."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from ssdtune.device.base import Pin
from ssdtune.device.cpu import CpuDevice
from ssdtune.hardware.copies import measure_copies
from tests.adversarial import AdversarialDevice

WAYS = ["h2d", "d2h", "both"]


@dataclass
class Clock:
    """Every look at it takes a second."""

    now: float = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@dataclass
class Pinning(AdversarialDevice):
    """Counts pinned bytes."""

    can_pin: bool = True
    pinned: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.free_bytes = 8 << 20

    def pin(self, memory: memoryview) -> Pin:
        """Pin if it can."""
        if not self.can_pin:
            return Pin()
        self.pinned.append(memory.nbytes)
        return Pin(lambda: self.pinned.remove(memory.nbytes))


@pytest.mark.parametrize("can_pin", [True, False])
def test_each_way_pinned_and_not(can_pin: bool) -> None:
    device = Pinning(can_pin)
    found = measure_copies(device, seconds=1.0, clock=Clock())
    kinds = [True, False] if can_pin else [False]
    assert [(p.pinned, p.direction) for p in found] == [(k, way) for k in kinds for way in WAYS]
    assert all(point.bytes_per_s > 0 and point.device == "adversarial" for point in found)
    assert device.pinned == [] and device.memory().by_purpose == {}


def test_a_failure_leaves_nothing_pinned() -> None:
    device = Pinning()
    device.download = None  # type: ignore[assignment, method-assign]
    with pytest.raises(TypeError):
        measure_copies(device, seconds=1.0, clock=Clock())
    assert device.pinned == []


def test_nothing_is_copied_on_a_cpu() -> None:
    assert measure_copies(CpuDevice(), seconds=1.0) == ()
