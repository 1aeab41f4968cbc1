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
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ssdtune.device.allocations import Allocations
from ssdtune.device.base import Capabilities, DeviceMemory, Event, FileUse, Pin
from ssdtune.device.cpu import CpuDevice
from ssdtune.errors import SsdtuneError
from ssdtune.io.backend import Backend, File, Ticket
from ssdtune.io.buffers import Buffer, BufferPool
from ssdtune.io.device_bytes import Memory
from ssdtune.io.select import open_backend
from ssdtune.plan.schedule import Lane, Operation, Schedule
from ssdtune.train.lanes import Span

POISON = 0xFF
"""All bits set are NaN in every float dtype, and no token."""


def use(
    monkeypatch: pytest.MonkeyPatch, order: Callable[[list[Lane]], Lane], *, on_cpu: bool = False
) -> AdversarialDevice:
    """Let the next run use everything of this module; `order` is one of `ORDERS`.

    Args:
        on_cpu: All but the device, so that memory is the host's and compute in place.
    """
    device = AdversarialDevice()
    if not on_cpu:
        use_device(monkeypatch, device)
    monkeypatch.setattr("ssdtune.io.streams.open_backend", LateBackend)
    monkeypatch.setattr("ssdtune.train.run.BufferPool", PoisonedPool)
    monkeypatch.setattr("ssdtune.train.run.Lanes", lambda: OneByOne(order, device))
    return device


def use_device(monkeypatch: pytest.MonkeyPatch, device: AdversarialDevice) -> None:
    """Let the next run use the device."""
    monkeypatch.setattr("ssdtune.train.prepare.open_device", lambda *_, **__: device)


class _Accesses(TorchDispatchMode):
    """Notes when torch operations used which memory last: device memory is used by compute only.

    Attributes:
        tick: Number of operations so far.
        paused: True while the device itself copies.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tick = 0
        self.paused = False
        self._last: dict[int, dict[tuple[int, int], tuple[int, int]]] = {}
        """Of a storage, by address: of a range of its bytes, when it was last used, and last written."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if not self.paused and not function.is_view:
            self.tick += 1
            written = [
                value
                for spec, value in zip(function._schema.arguments, args, strict=False)
                if spec.alias_info is not None and spec.alias_info.is_write
            ]
            self._note((args, kwargs), is_written=False)
            self._note((written, (kwargs or {}).get("out"), result), is_written=True)
        return result

    def _note(self, values: Any, *, is_written: bool) -> None:
        for tensor in pytree.tree_leaves(values):
            if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                self.note(tensor, is_written=is_written)

    def note(self, tensor: torch.Tensor, *, is_written: bool) -> None:
        """Note that a tensor is used now."""
        address, place = _place(tensor)
        ranges = self._last.setdefault(address, {})
        written = self.tick if is_written else ranges.get(place, (0, 0))[1]
        ranges[place] = (self.tick, written)

    def latest(self, tensor: torch.Tensor, *, writes: bool) -> int:
        """Return when any byte of the tensor was last used, or last written."""
        address, (start, stop) = _place(tensor)
        return max(
            (
                ticks[1] if writes else ticks[0]
                for (low, high), ticks in self._last.get(address, {}).items()
                if low < stop and start < high
            ),
            default=0,
        )

    def forget(self, tensor: torch.Tensor) -> None:
        """Forget what was at the address of new memory before."""
        self._last.pop(tensor.untyped_storage().data_ptr(), None)


def _place(tensor: torch.Tensor) -> tuple[int, tuple[int, int]]:
    """Return the address of a tensor's storage and which of its bytes the tensor lies in."""
    start = tensor.storage_offset() * tensor.element_size()
    span = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    stop = start + (span + 1) * tensor.element_size() if tensor.numel() else start
    return tensor.untyped_storage().data_ptr(), (start, stop)


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    (address, (start, stop)), (second, (low, high)) = _place(one), _place(other)
    return address == second and low < stop and start < high


class _Copy:
    """A copy that is made when somebody waits for it, and not before.

    Attributes:
        covers: Operations of compute up to this tick are over when the copy is.
    """

    def __init__(
        self,
        device: AdversarialDevice,
        source: torch.Tensor,
        target: torch.Tensor,
        after: Event | None,
    ) -> None:
        assert after is None or isinstance(after, (_Copy, _Point))
        self.device = device
        self.source = source.detach()
        self.target = target
        self.after = after
        self.covers = device.accesses.tick if after is None else after.covers
        self.is_made = False
        self.seen: torch.Tensor | None = None
        """What compute was given, while the host does not know that the copy is over."""
        self.before: list[_Copy] = []
        """Copies that are over when this one is."""
        if isinstance(after, _Copy):
            self.before = [*after.before, after]
        elif after is not None:
            self.before = list(after.before)

    def wait(self) -> None:
        """Make the copy; the host knows that it is over."""
        with self.device.lock:
            self.make()
            for copy in [*self.before, self]:
                copy.end()
            self.device.known = max(self.device.known, self.covers)

    def make(self) -> None:
        if self.is_made:
            return
        if isinstance(self.after, _Copy):
            self.after.make()
        self.device.copy(self.source, self.target)
        self.is_made = True

    def take_now(self, place: torch.Tensor) -> None:
        """Let the bytes leave a place that is about to be overwritten; the target gets them late all the same."""
        if not self.is_made and _overlap(self.source, place):
            held = torch.empty_like(self.source)
            self.device.copy(self.source, held)
            self.source = held
        if isinstance(self.after, _Copy):
            self.after.take_now(place)

    def end(self) -> None:
        """Check that the source was left alone as long as the copy might have been under way."""
        if self.seen is not None:
            if not torch.equal(self.seen, self.source.view(torch.uint8)):
                self.device.violations.append("host memory was overwritten during an upload")
            self.seen = None
        if self in self.device.running:
            self.device.running.remove(self)


class _Point:
    """A point in compute; see `_Copy` for the attributes."""

    def __init__(self, device: AdversarialDevice) -> None:
        self.device = device
        self.before = list(device.running)
        self.covers = device.accesses.tick

    def wait(self) -> None:
        """Let what is before the point be over."""
        with self.device.lock:
            for copy in self.before:
                copy.end()
            self.device.known = max(self.device.known, self.covers)


class AdversarialDevice:
    """A `Device` that computes on the CPU, with memory that only copies reach.

    Compute is done at once, copies are late. That a copy is early, before compute that was issued after the event
    it waits for, is seen from when compute used the memory, as long as it runs within `accesses`.

    Attributes:
        violations: What went wrong without changing a number.
        num_copies: Copies that were asked for, to see that the device was used; `num_straight` transfers between drives
            and its memory.
        known: Operations of compute up to this tick are over, as far as whoever asks for copies now can know.
        taken: The most that was allocated for each purpose.
        free_bytes: What it says is free.
    """

    name = "adversarial"
    torch_device = torch.device("cpu")
    own_memory = True
    free_bytes = 1 << 40

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.accesses = _Accesses()
        self.running: list[_Copy] = []
        self.violations: list[str] = []
        self.num_copies = 0
        self.num_straight = 0
        self.known = 0
        self.allocations = Allocations()
        self.taken: dict[str, int] = {}

    def supports(self, dtype: torch.dtype) -> bool:
        """Take all."""
        return True

    def capabilities(self) -> Capabilities:
        """Return the host's."""
        return CpuDevice().capabilities()

    def memory(self) -> DeviceMemory:
        """Return what is free, and what was allocated."""
        held = self.allocations.by_purpose()
        return DeviceMemory(self.free_bytes, self.free_bytes, 0, sum(held.values()), held)

    def allocate(self, num_bytes: int, purpose: str = "buffers") -> torch.Tensor | None:
        """Return poison, which compute that was issued before may still use."""
        memory = torch.full((num_bytes,), POISON, dtype=torch.uint8)
        self.allocations.add(memory, purpose)
        for name, held in self.allocations.by_purpose().items():
            self.taken[name] = max(self.taken.get(name, 0), held)
        self.accesses.forget(memory)
        self.accesses.note(memory, is_written=True)
        return memory

    def file_memory(self, memory: torch.Tensor, use: FileUse) -> memoryview:
        """Check that compute is known to be done with it."""
        with self.lock:
            latest = self.accesses.latest(memory, writes=use == "written")
            if use != "registered" and latest > self.known:
                self.violations.append("a transfer may be early: compute used its memory since")
            self.num_straight += use != "registered"
        return memoryview(memory.view(torch.uint8).numpy())

    def pin(self, memory: memoryview) -> Pin:
        """Do nothing."""
        return Pin()

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy bytes; compute has no part in it."""
        self.accesses.paused = True
        target.view(torch.uint8).copy_(source.view(torch.uint8))
        self.accesses.paused = False

    def upload(
        self, host: torch.Tensor, place: torch.Tensor | None, after: Event | None = None
    ) -> tuple[torch.Tensor, Event]:
        """Poison the place; the bytes come when the event is waited for."""
        assert place is not None
        assert host.nbytes == place.nbytes
        with self.lock:
            copy = _Copy(self, host, place, after)
            if self.accesses.latest(place, writes=False) > max(copy.covers, self.known):
                self.violations.append("an upload may be early: compute used its place since")
            if isinstance(after, _Copy):
                after.take_now(place)
            self._poison(place)
            self.num_copies += 1
        return place, copy

    def download(
        self, source: torch.Tensor, host: torch.Tensor, after: Event | None = None
    ) -> Event:
        """Poison the host memory; the bytes come when the event is waited for."""
        with self.lock:
            copy = _Copy(self, source, host, after)
            if after is None:
                copy.before = list(self.running)  # it comes after the compute that waited for them
            if self.accesses.latest(source, writes=True) > max(copy.covers, self.known):
                self.violations.append("a download may be early: compute wrote its source since")
            self._poison(host)
            self.num_copies += 1
        return copy

    def _poison(self, memory: torch.Tensor) -> None:
        self.accesses.paused = True
        memory.view(torch.uint8).fill_(POISON)
        self.accesses.paused = False

    def compute_waits(self, event: Event) -> None:
        """Make the copy, as compute will see it; the host does not know when."""
        if isinstance(event, _Point):
            return  # it is before all later compute anyway
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

    def seconds_between(self, first: Event, last: Event) -> float | None:
        """Return None: compute is over when it was issued."""
        return None

    def seed(self, value: int) -> None:
        """Seed torch's CPU generator."""
        torch.default_generator.manual_seed(value)

    def explain(self, error: BaseException) -> SsdtuneError | None:
        """Return None."""
        return None


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
    takes_device_memory = True

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

    def register(self, memory: Memory) -> Callable[[], None]:
        """Do nothing."""
        return lambda: None

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
    """Lanes that take turns in one thread, in an order that the schedule allows.

    What an operation knows to be over (`AdversarialDevice.known`) is what those before it in its lane and those
    that it waits for knew at their end; that others ran before it says nothing.
    """

    def __init__(
        self, order: Callable[[list[Lane]], Lane], device: AdversarialDevice | None = None
    ) -> None:
        self._order = order
        self._device = device or AdversarialDevice()

    def run(self, schedule: Schedule, execute: Callable[[Operation], None]) -> list[Span]:
        """Run a schedule to its end."""
        waiting = {lane: schedule.lane(lane)[::-1] for lane in Lane}
        known: dict[int, int] = {}
        known_in = dict.fromkeys(Lane, self._device.known)
        spans = []
        while len(known) < len(schedule.operations):
            ready = [
                lane
                for lane, rest in waiting.items()
                if rest and known.keys() >= set(rest[-1].after)
            ]
            operation = waiting[self._order(ready)].pop()
            lane = operation.lane
            self._device.known = max([known_in[lane], *(known[other] for other in operation.after)])
            with self._device.accesses:
                execute(operation)
            known[operation.index] = known_in[lane] = self._device.known
            spans.append(Span(operation, float(len(spans)), float(len(spans) + 1)))
        self._device.known = max(known_in.values())
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
