"""How fast bytes cross the link between host memory and a card: each way and both, pinned or not.

Goes through `ssdtune.device`, as the engine does. On a CPU, where nothing is copied, there is nothing to measure.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from ssdtune.hardware.compute import best_time, working_set
from ssdtune.hardware.figures import CopyPoint
from ssdtune.hardware.stream import Clock
from ssdtune.io.buffers import Buffer
from ssdtune.units import MIB

if TYPE_CHECKING:
    from ssdtune.device.base import Device

SIZE_BYTES = 256 * MIB


def measure_copies(
    device: Device, *, seconds: float, clock: Clock = time.perf_counter
) -> tuple[CopyPoint, ...]:
    """Measure the copies of a device; none if host memory is used in place."""
    import torch

    size = min(working_set(2 * SIZE_BYTES) // 2, device.memory().free_bytes // 8)
    target, source = device.allocate(size), device.allocate(size)
    if target is None or source is None:
        return ()
    points: list[CopyPoint] = []
    for pinned in (True, False):
        with ExitStack() as stack:
            buffers = [Buffer(size), Buffer(size)]
            up, down = (torch.frombuffer(b.view, dtype=torch.uint8).fill_(1) for b in buffers)
            pins = [device.pin(buffer.view) for buffer in buffers] if pinned else []
            for pin in pins:
                stack.callback(pin.close)
            if not all(pin.pinned for pin in pins):
                continue  # the device has said why

            def run(direction: str, up: torch.Tensor = up, down: torch.Tensor = down) -> None:
                events = []
                if direction != "d2h":
                    events.append(device.upload(up, target)[1])
                if direction != "h2d":
                    events.append(device.download(source, down))
                for event in events:
                    event.wait()

            for direction, num_bytes in (("h2d", size), ("d2h", size), ("both", 2 * size)):
                taken = best_time(lambda d=direction: run(d), seconds / 6, clock)  # type: ignore[misc]
                points.append(
                    CopyPoint(
                        device=device.name,
                        pinned=pinned,
                        direction=direction,
                        bytes_per_s=num_bytes / taken,
                    )
                )
    return tuple(points)
