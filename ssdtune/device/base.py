"""The one interface between ssdtune and whatever computes: a CPU or a CUDA card.

Everything above talks to a `Device`; nothing outside this package asks which one it is. Copies are
asynchronous: `upload` and `download` return an `Event`, and whoever uses the result first calls
`compute_waits(event)` (orders it before later compute) or `event.wait()` (blocks the calling thread).
Read `ssdtune.device.cpu` for the semantics at their simplest, `ssdtune.device.cuda` for streams.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of the device, in bytes."""

    total_bytes: int
    free_bytes: int
    peak_bytes: int


class Event(Protocol):
    """A point in the work of the device."""

    def wait(self) -> None:
        """Block the calling thread until everything before the event is done."""


class Device(Protocol):
    """A place where tensors live and blocks are computed."""

    name: str
    torch_device: torch.device

    def supports(self, dtype: torch.dtype) -> bool:
        """Say whether matrices of this dtype are multiplied at full speed."""

    def memory(self) -> DeviceMemory:
        """Return the device's memory figures."""

    def allocate(self, num_bytes: int) -> torch.Tensor | None:
        """Return device memory (uint8 [N]) for copies of host buffers; None if host memory is used in place."""

    def upload(self, host: torch.Tensor, place: torch.Tensor | None) -> tuple[torch.Tensor, Event]:
        """Start bringing host bytes to the device, after all compute that was issued before.

        Returns:
            Where they can be computed on once the event is over: `place`, or `host` itself.
        """

    def download(self, source: torch.Tensor, host: torch.Tensor) -> Event:
        """Start copying a device tensor to host memory, after the compute issued so far.

        The caller keeps both alive until the event. Nothing is done if they are the same memory.
        """

    def compute_waits(self, event: Event) -> None:
        """Let compute that is issued from now on begin after the event."""

    def record(self) -> Event:
        """Return the event that the compute issued so far is done."""

    def seed(self, value: int) -> None:
        """Seed the generators that dropout draws from."""
