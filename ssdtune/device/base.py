"""The one interface between ssdtune and whatever computes: a CPU or a CUDA card.

Everything above talks to a `Device`; nothing outside this package asks which one it is. Copies are
asynchronous: `upload` and `download` return an `Event`, and whoever uses the result first calls
`compute_waits(event)` (orders it before later compute) or `event.wait()` (blocks the calling thread).
Compute is one queue and copies each way are one: within a queue everything is in the order in which it was
issued, between queues only events order anything. All methods may be called from any thread.

Bytes between drives and a card's memory without host memory (GPUDirect Storage) are the business of `ssdtune.io`; the
device only says where its memory is (`file_memory`).
Read `ssdtune.device.cpu` for the semantics at their simplest, `ssdtune.device.cuda` for streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import torch

    from ssdtune.errors import SsdtuneError
    from ssdtune.io.device_bytes import Memory


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of the device, in bytes.

    Attributes:
        free_bytes: What neither this nor any other program holds, and the budget allows.
        peak_bytes: The most that tensors of this process took.
        held_bytes: What they take now.
        by_purpose: The part of it that `Device.allocate` handed out.
        budget_bytes: The most that they may take; None for no limit.
        pinned_bytes: Host memory that is pinned for copies.
    """

    total_bytes: int
    free_bytes: int
    peak_bytes: int
    held_bytes: int = 0
    by_purpose: dict[str, int] = field(default_factory=dict)
    budget_bytes: int | None = None
    pinned_bytes: int = 0


FileUse = Literal["read into", "written", "registered"]
"""What file backends do with a device's memory."""


@dataclass(frozen=True)
class Capabilities:
    """What a device is.

    Attributes:
        model: Name of the card or the processor.
        compute_capability: Of a CUDA card, such as (9, 0).
    """

    model: str
    compute_capability: tuple[int, int] | None
    total_bytes: int


class Event(Protocol):
    """A point in the work of the device."""

    def wait(self) -> None:
        """Block the calling thread until everything before the event is done."""


class Pin:
    """Host memory that is pinned, or should have been; `close` before the memory is freed.

    Attributes:
        pinned: False where pinning failed or means nothing; copies are right all the same.
    """

    def __init__(self, undo: Callable[[], None] | None = None) -> None:
        self.pinned = undo is not None
        self._undo = undo

    def close(self) -> None:
        """Unpin the memory, once all copies of the device are over. May be called again."""
        undo, self._undo, self.pinned = self._undo, None, False
        if undo is not None:
            undo()


class Device(Protocol):
    """A place where tensors live and blocks are computed.

    Attributes:
        own_memory: It has memory of its own, to be planned apart from the host's; `allocate` never returns None then.
    """

    name: str
    torch_device: torch.device
    own_memory: bool

    def supports(self, dtype: torch.dtype) -> bool:
        """Say whether matrices of this dtype are multiplied at full speed."""

    def capabilities(self) -> Capabilities:
        """Return what the device is."""

    def memory(self) -> DeviceMemory:
        """Return the device's memory figures."""

    def allocate(self, num_bytes: int, purpose: str = "buffers") -> torch.Tensor | None:
        """Return device memory (uint8 [N]) for copies of host buffers; None if host memory is used in place.

        Compute that was issued before may still use it, for something that is gone: the first upload there comes
        after all compute, or after an event that was recorded since.

        Raises:
            CapacityError: It does not fit; the message says what took the rest.
        """

    def file_memory(self, memory: torch.Tensor, use: FileUse) -> Memory:
        """Return contiguous device memory as what file backends that take it want.

        The device must be done with it: with all use before bytes are read into it, with the last write before it is written
        to a file.

        Args:
            use: What is about to be done with it.
        """

    def pin(self, memory: memoryview) -> Pin:
        """Pin host memory, so that copies are fast and go on beside compute. Exactly these bytes, page-aligned.

        Where it cannot be pinned, one warning says so, and the copies go through pageable memory.
        """

    def upload(
        self, host: torch.Tensor, place: torch.Tensor | None, after: Event | None = None
    ) -> tuple[torch.Tensor, Event]:
        """Start bringing host bytes to the device.

        Args:
            host: Left alone until the event.
            place: Device memory of the same size; None where host memory is used in place.
            after: Begin as soon as this event is over, which the last use of the place comes before. By default
                after all compute that was issued before.

        Returns:
            Where they can be computed on once the event is over: `place`, or `host` itself.
        """

    def download(
        self, source: torch.Tensor, host: torch.Tensor, after: Event | None = None
    ) -> Event:
        """Start copying a device tensor to host memory of the same dtype.

        The caller keeps both alive, and the source unchanged, until the event. Nothing is done if they are the same
        memory.

        Args:
            after: Begin as soon as this event is over, which the last write to the source comes before. By default
                after all compute that was issued before.
        """

    def compute_waits(self, event: Event) -> None:
        """Let compute that is issued from now on begin after the event."""

    def record(self) -> Event:
        """Return the event that the compute issued so far is done."""

    def seconds_between(self, first: Event, last: Event) -> float | None:
        """Wait for two recorded events and return the time between them; None, at once, if the calling thread computes."""

    def seed(self, value: int) -> None:
        """Seed the generators that dropout draws from."""

    def explain(self, error: BaseException) -> SsdtuneError | None:
        """Return what an error that the device raised means and what to do; None if it isn't one of those."""


@contextmanager
def explained(device: Device) -> Iterator[None]:
    """Raise what `device.explain` makes of the device's errors (out of memory, a lost card) in their place."""
    try:
        yield
    except RuntimeError as error:
        meaning = device.explain(error)
        if meaning is None:
            raise
        raise meaning from error
