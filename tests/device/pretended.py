"""A stand-in for torch.cuda that keeps the promises of streams and events, on host memory.

A stream does nothing until somebody waits for an event in it; then it does what is before that event, and whatever
that waits for in other streams, and no more. So the code for cards runs line by line where there is none, and
whether it orders what it must, and nothing else, can be seen. What real cards do is checked by tools/gpu_check.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

GIB = 1 << 30
OUT_OF_MEMORY, NOT_PERMITTED = 2, 800


class Stream:
    def __init__(self, device: torch.device | None = None) -> None:
        assert device is not None, "which card?"
        self.device = device
        self.work: list[Callable[[], object]] = []
        self.num_done = 0

    def issue(self, work: Callable[[], object]) -> None:
        """Let the stream do something, later."""
        self.work.append(work)

    def run(self, count: int) -> None:
        """Do the first `count` pieces of work, as far as they are not done yet."""
        while self.num_done < count:
            self.num_done += 1
            self.work[self.num_done - 1]()

    def wait_event(self, event: Event) -> None:
        self.issue(event.happen)

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)

    def synchronize(self) -> None:
        self.run(len(self.work))


class Event:
    def __init__(self, *, blocking: bool = False, enable_timing: bool = False) -> None:
        self.stream: Stream | None = None
        self.count = 0

    def record(self, stream: Stream) -> None:
        self.stream, self.count = stream, len(stream.work)

    def elapsed_time(self, later: Event) -> float:
        """Return milliseconds: one for each piece of work."""
        return later.count - self.count

    def happen(self) -> None:
        assert self.stream is not None, "an event that was never recorded"
        self.stream.run(self.count)

    synchronize = happen


class _Queued(TorchDispatchMode):
    """Copies within it are issued to a stream."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self.stream = stream

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten.copy_.default:
            target, source, *rest = args
            assert rest == [True], "a copy that blocks"
            self.stream.issue(lambda: target.copy_(source))
            return target
        return function(*args, **(kwargs or {}))


class OnHost(TorchFunctionMode):
    """Tensors for a card are made in host memory."""

    def __init__(self, cuda: PretendedCuda) -> None:
        super().__init__()
        self.cuda = cuda

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function in (torch.empty, torch.ones) and "device" in kwargs:
            self.cuda.last_error = 0  # a kernel's check takes it
            if self.cuda.failure is not None:
                raise self.cuda.failure
            assert kwargs["device"].index == self.cuda.current
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


class PretendedCuda:
    """What stands in for `torch.cuda`.

    Attributes:
        failure: What every new tensor raises.
        register_error: What pinning returns.
        pinned: Addresses and sizes of pinned memory.
        last_error: What the runtime keeps for the next kernel.
    """

    def __init__(self, count: int = 2, capability: tuple[int, int] = (9, 0)) -> None:
        self._thread = threading.local()
        self.count = count
        self.capability = capability
        self.failure: BaseException | None = None
        self.register_error = 0
        self.pinned: dict[int, int] = {}
        self.last_error = 0
        self.fraction: float | None = None
        self.free_bytes = 20 * GIB
        self.defaults = [Stream(torch.device("cuda", i)) for i in range(count)]
        self.default_generators = [torch.Generator() for _ in range(count)]

    @property
    def current(self) -> int:
        """The calling thread's card."""
        return getattr(self._thread, "card", 0)

    def set_device(self, device: torch.device) -> None:
        self._thread.card = device.index

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        before = self.current
        self._thread.card = index
        yield
        self._thread.card = before

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        assert stream.device.index == self.current
        with _Queued(stream):
            yield

    def cudart(self) -> Any:
        return SimpleNamespace(
            cudaHostRegister=self._register,
            cudaHostUnregister=self._unregister,
            cudaGetErrorString=lambda error: "out of memory",
        )

    def _register(self, address: int, num_bytes: int, flags: int) -> int:
        assert flags == 1 and self.current == self.count - 1
        if self.register_error:
            self.last_error = self.register_error
            return self.register_error
        self.pinned[address] = num_bytes
        return 0

    def _unregister(self, address: int) -> int:
        del self.pinned[address]
        return 0

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Put it in the place of `torch.cuda`."""
        functions: dict[str, Any] = {
            "Stream": Stream,
            "Event": Event,
            "device": self.device,
            "stream": self.stream,
            "set_device": self.set_device,
            "cudart": self.cudart,
            "is_available": lambda: self.count > 0,
            "is_initialized": lambda: False,
            "device_count": lambda: self.count,
            "get_device_name": lambda index: f"Pretended {index}",
            "get_device_properties": lambda index: SimpleNamespace(
                name=f"Pretended {index}", major=self.capability[0], minor=self.capability[1]
            ),
            "mem_get_info": lambda index: (self.free_bytes, 24 * GIB),
            "memory_allocated": lambda index: 3 * GIB,
            "memory_reserved": lambda index: 4 * GIB,
            "max_memory_allocated": lambda index: 5 * GIB,
            "set_per_process_memory_fraction": self._set_fraction,
            "default_stream": lambda device: self.defaults[device.index],
            "default_generators": self.default_generators,
            "synchronize": _forbidden,
        }
        for name, value in functions.items():
            patch.setattr(torch.cuda, name, value)

    def _set_fraction(self, fraction: float, index: int) -> None:
        self.fraction = fraction


def _forbidden(*_: object) -> None:
    raise AssertionError("waits for the whole card")
