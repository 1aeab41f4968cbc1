"""Everything that may be late is as late as can be, and memory that nobody may read holds NaN.

A device with memory of its own, an I/O backend, a buffer pool and lanes that keep every promise of their
interfaces and no more. A training that forgets to wait anywhere gives other numbers here, or none, every time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
import torch

from ssdtune.device.base import DeviceMemory, Event
from ssdtune.device.cpu import CpuDevice
from ssdtune.io.backend import Backend, File, Ticket
from ssdtune.io.buffers import Buffer, BufferPool
from ssdtune.io.select import open_backend
from ssdtune.plan.schedule import Lane, Operation, Schedule
from ssdtune.train.lanes import Span

POISON = 0xFF
"""All bits set are NaN in every float dtype, and no token."""


def use(monkeypatch: pytest.MonkeyPatch, order: Callable[[list[Lane]], Lane]) -> AdversarialDevice:
    """Let the next run use everything of this module; `order` is one of `ORDERS`."""
    device = AdversarialDevice()
    monkeypatch.setattr("ssdtune.train.prepare.open_device", lambda name: device)
    monkeypatch.setattr("ssdtune.train.finetune.open_backend", LateBackend)
    monkeypatch.setattr("ssdtune.train.finetune.BufferPool", PoisonedPool)
    monkeypatch.setattr("ssdtune.train.finetune.Lanes", lambda: OneByOne(order))
    return device


class _Copy:
    """A copy that is made when somebody waits for it, and not before."""

    def __init__(
        self, device: AdversarialDevice, source: torch.Tensor, target: torch.Tensor
    ) -> None:
        self.device = device
        self.source = source
        self.target = target
        self.is_made = False
        self.seen: torch.Tensor | None = None
        """What compute was given, while the host does not know that the copy is over."""
        self.before: list[_Copy] = []
        """Copies that are over when this one is."""

    def wait(self) -> None:
        """Make the copy; the host knows that it is over."""
        with self.device.lock:
            if not self.is_made:
                self.make()
            for copy in [*self.before, self]:
                copy.end()

    def make(self) -> None:
        self.target.view(torch.uint8).copy_(self.source.detach().view(torch.uint8))
        self.is_made = True

    def end(self) -> None:
        """Check that the source was left alone as long as the copy might have been under way."""
        if self.seen is not None:
            if not torch.equal(self.seen, self.source.view(torch.uint8)):
                self.device.violations.append("host memory was overwritten during an upload")
            self.seen = None
        if self in self.device.running:
            self.device.running.remove(self)


class _Point:
    def __init__(self, device: AdversarialDevice) -> None:
        self.device = device
        self.before = list(device.running)

    def wait(self) -> None:
        """Let the copies before the point be over."""
        with self.device.lock:
            for copy in self.before:
                copy.end()


class AdversarialDevice:
    """A `Device` that computes on the CPU, with memory that only copies reach.

    Attributes:
        violations: What went wrong without changing a number.
        num_copies: Copies that were asked for, to see that the device was used.
    """

    name = "adversarial"
    torch_device = torch.device("cpu")

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.running: list[_Copy] = []
        self.violations: list[str] = []
        self.num_copies = 0

    def supports(self, dtype: torch.dtype) -> bool:
        """Take all."""
        return True

    def memory(self) -> DeviceMemory:
        """Return the host's figures."""
        return CpuDevice().memory()

    def allocate(self, num_bytes: int) -> torch.Tensor | None:
        """Return poison."""
        return torch.full((num_bytes,), POISON, dtype=torch.uint8)

    def upload(self, host: torch.Tensor, place: torch.Tensor | None) -> tuple[torch.Tensor, Event]:
        """Poison the place; the bytes come when the event is waited for."""
        assert place is not None
        assert host.nbytes == place.nbytes
        place.fill_(POISON)
        self.num_copies += 1
        return place, _Copy(self, host, place)

    def download(self, source: torch.Tensor, host: torch.Tensor) -> Event:
        """Poison the host memory; the bytes come when the event is waited for."""
        host.view(torch.uint8).fill_(POISON)
        self.num_copies += 1
        copy = _Copy(self, source, host)
        with self.lock:
            copy.before = list(self.running)  # it comes after the compute that waited for them
        return copy

    def compute_waits(self, event: Event) -> None:
        """Make the copy, as compute will see it; the host does not know when."""
        assert isinstance(event, _Copy)
        with self.lock:
            if not event.is_made:
                event.make()
                event.seen = event.source.view(torch.uint8).clone()
                self.running.append(event)

    def record(self) -> Event:
        """Return an event after all that compute has waited for."""
        with self.lock:
            return _Point(self)

    def seed(self, value: int) -> None:
        """Seed torch's CPU generator."""
        torch.default_generator.manual_seed(value)


class _Late:
    """A transfer that begins when somebody waits for it."""

    def __init__(self, backend: LateBackend, begin: Callable[[], Ticket]) -> None:
        self._backend = backend
        self._begin = begin
        self._ticket: Ticket | None = None
        backend.unwaited.add(self)

    def done(self) -> bool:
        return self._ticket is not None

    def wait(self) -> None:
        if self._ticket is None:
            self._ticket = self._begin()
            self._backend.unwaited.discard(self)
        self._ticket.wait()


class LateBackend:
    """A `Backend` that moves bytes when it is waited for; what is being read holds poison until then."""

    name = "python"

    def __init__(self, name: str, *, queue_depth: int, request_bytes: int) -> None:
        self._inner: Backend = open_backend(
            "python", queue_depth=queue_depth, request_bytes=request_bytes
        )
        self.unwaited: set[_Late] = set()

    def open(self, path: Path, **options: Any) -> File:
        """Open a file."""
        return self._inner.open(path, **options)

    def read(
        self, file: File, offset: int, buffer: memoryview, *, minimum: int | None = None
    ) -> Ticket:
        """Poison the buffer."""
        buffer[:] = bytes([POISON]) * len(buffer)
        return _Late(self, lambda: self._inner.read(file, offset, buffer, minimum=minimum))

    def write(self, file: File, offset: int, buffer: memoryview) -> Ticket:
        """Do nothing yet."""
        return _Late(self, lambda: self._inner.write(file, offset, buffer))

    def sync(self, files: Iterable[File]) -> None:
        """Make durable what was written."""
        self._inner.sync(files)

    def close_file(self, file: File) -> None:
        """Close a file."""
        self._inner.close_file(file)

    def close(self) -> None:
        """Close, if every transfer was waited for."""
        self._inner.close()
        assert not self.unwaited, f"{len(self.unwaited)} transfers were not waited for"


class PoisonedPool(BufferPool):
    """A pool whose buffers hold poison when they are handed out and once they are given back."""

    def take(self, num_bytes: int, purpose: str = "a buffer") -> Buffer:
        """Return a poisoned buffer."""
        return _poisoned(super().take(num_bytes, purpose))

    def give(self, buffer: Buffer) -> None:
        """Poison the buffer."""
        super().give(_poisoned(buffer))


def _poisoned(buffer: Buffer) -> Buffer:
    buffer.view[:] = bytes([POISON]) * len(buffer.view)
    return buffer


def _first(lane: Lane) -> Callable[[list[Lane]], Lane]:
    return lambda ready: lane if lane in ready else ready[0]


def _last(lane: Lane) -> Callable[[list[Lane]], Lane]:
    return lambda ready: next((other for other in reversed(ready) if other != lane), lane)


ORDERS: dict[str, Callable[[list[Lane]], Lane]] = {
    **{f"{lane} first": _first(lane) for lane in Lane},
    **{f"{lane} last": _last(lane) for lane in Lane},
}
"""Which lane goes on when several could: one that always hurries, or one that never does."""


class OneByOne:
    """Lanes that take turns in one thread, in an order that the schedule allows."""

    def __init__(self, order: Callable[[list[Lane]], Lane]) -> None:
        self._order = order

    def run(self, schedule: Schedule, execute: Callable[[Operation], None]) -> list[Span]:
        """Run a schedule to its end."""
        waiting = {lane: schedule.lane(lane)[::-1] for lane in Lane}
        done: set[int] = set()
        spans = []
        while len(done) < len(schedule.operations):
            ready = [
                lane for lane, rest in waiting.items() if rest and done.issuperset(rest[-1].after)
            ]
            operation = waiting[self._order(ready)].pop()
            execute(operation)
            done.add(operation.index)
            spans.append(Span(operation, float(len(spans)), float(len(spans) + 1)))
        return spans

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass
