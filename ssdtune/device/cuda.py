"""A CUDA card as a device: compute on its default stream, copies each way on a stream of their own.

The current card and stream are a thread's own in CUDA, so every method names the card and the stream that it
means. Nothing ever waits for the whole card. What errors mean is in `ssdtune.device.failures`.
"""

from __future__ import annotations

import logging
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from ssdtune.device import failures
from ssdtune.device.allocations import Allocations
from ssdtune.device.base import Capabilities, DeviceMemory, Event, FileUse, Pin, explained
from ssdtune.errors import BackendUnavailableError, SsdtuneError
from ssdtune.io.device_bytes import DeviceBytes, Memory
from ssdtune.units import format_memory

logger = logging.getLogger(__name__)

_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every card."""


class _CudaEvent:
    """A point in a stream.

    Args:
        keep: Tensors that live until the event was waited for.
    """

    def __init__(self, stream: torch.cuda.Stream, keep: tuple[torch.Tensor, ...] = ()) -> None:
        self._keep = keep
        # blocking: the thread sleeps; it would spin otherwise, on a core that AdamW could use
        self.event = torch.cuda.Event(enable_timing=True, blocking=True)
        self.event.record(stream)

    def wait(self) -> None:
        """Block the calling thread until the event has happened."""
        self.event.synchronize()
        self._keep = ()


class CudaDevice:
    """Computes on one card.

    Args:
        budget_bytes: The most that tensors may take, None for all that is free. The card's own bookkeeping (about
            half a GiB for each program) comes on top.

    Raises:
        BackendUnavailableError: The card does not work, or is in use by others.
    """

    own_memory = True

    def __init__(self, index: int = 0, budget_bytes: int | None = None) -> None:
        self.torch_device = torch.device("cuda", index)
        self.name = f"cuda:{index}"
        self._index = index
        self._budget_bytes = budget_bytes
        self._allocations = Allocations()
        self._pinned_bytes = 0
        self._has_warned = False
        self._lock = threading.Lock()
        _prefer_expandable_segments()
        try:
            torch.cuda.set_device(self.torch_device)  # compute runs in this thread
            torch.ones(1, device=self.torch_device).item()  # a kernel shows whether the card works
            torch.cuda.empty_cache()  # what a run before in this process left
            properties = torch.cuda.get_device_properties(index)
            free, total = torch.cuda.mem_get_info(index)
        except (RuntimeError, AssertionError) as error:
            raise BackendUnavailableError(failures.cannot_open(self.name, error)) from error
        self._capabilities = Capabilities(
            properties.name, (properties.major, properties.minor), total
        )
        # Always, for a run before in this process may have had a budget.
        fraction = 1.0 if budget_bytes is None else min(1.0, budget_bytes / total)
        torch.cuda.set_per_process_memory_fraction(fraction, index)
        if budget_bytes is None and free < total // 2:
            logger.warning(
                "%s (%s): %s of %s are taken by other programs; nvidia-smi lists them.%s",
                self.name, properties.name, format_memory(total - free), format_memory(total),
                " --device names another card." if torch.cuda.device_count() > 1 else "",
            )  # fmt: skip
        self._compute = torch.cuda.default_stream(self.torch_device)
        self._up = torch.cuda.Stream(self.torch_device)
        self._down = torch.cuda.Stream(self.torch_device)

    @contextmanager
    def _on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        with torch.cuda.device(self._index), torch.cuda.stream(stream):
            yield

    def supports(self, dtype: torch.dtype) -> bool:
        """Take bf16 from Ampere on (8.0), fp16 from Volta on (7.0) and on the P100 (6.0).

        Other Pascal cards have fp16 at a 64th of the speed of fp32, older ones not at all.
        """
        capability = self._capabilities.compute_capability or (0, 0)
        if dtype == torch.bfloat16:
            return capability >= (8, 0)
        if dtype == torch.float16:
            return capability >= (7, 0) or capability == (6, 0)
        return dtype == torch.float32

    def capabilities(self) -> Capabilities:
        """Return the card's name, compute capability and memory."""
        return self._capabilities

    def memory(self) -> DeviceMemory:
        """Return the card's memory figures."""
        free, total = torch.cuda.mem_get_info(self._index)
        held = torch.cuda.memory_allocated(self._index)
        free += (
            torch.cuda.memory_reserved(self._index) - held
        )  # torch keeps it for the next tensors
        if self._budget_bytes is not None:
            free = max(0, min(free, self._budget_bytes - held))
        return DeviceMemory(
            total, free, torch.cuda.max_memory_allocated(self._index), held,
            self._allocations.by_purpose(), self._budget_bytes, self._pinned_bytes,
        )  # fmt: skip

    def allocate(self, num_bytes: int, purpose: str = "buffers") -> torch.Tensor | None:
        """Allocate device memory for the compute stream."""
        with explained(self), self._on(self._compute):
            tensor = torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)
        self._allocations.add(tensor, purpose)
        return tensor

    def file_memory(self, memory: torch.Tensor, use: FileUse) -> Memory:
        """Return where the memory is on the card."""
        return DeviceBytes.of(memory.view(torch.uint8))

    def pin(self, memory: memoryview) -> Pin:
        """Register the memory with the driver, which locks its pages."""
        if not memory.nbytes:
            return Pin()
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        runtime: Any = torch.cuda.cudart()
        with torch.cuda.device(self._index):
            error = runtime.cudaHostRegister(address, memory.nbytes, _PORTABLE)
            if int(error):
                self._take_error()
                self._warn_unpinned(memory.nbytes, int(error), runtime.cudaGetErrorString(error))
                return Pin()
        self._count_pinned(memory.nbytes)

        def undo() -> None:
            with torch.cuda.device(self._index):
                with suppress(RuntimeError):  # of a lost card, which copies nothing any more
                    self._up.synchronize()
                    self._down.synchronize()
                if int(runtime.cudaHostUnregister(address)):
                    self._take_error()
            self._count_pinned(-memory.nbytes)  # `memory`, and so its pages, lived until here

        return Pin(undo)

    def _count_pinned(self, num_bytes: int) -> None:
        with self._lock:
            self._pinned_bytes += num_bytes

    def _take_error(self) -> None:
        """Clear the error of a failed call of the runtime; the thread's next kernel would be blamed for it."""
        with suppress(RuntimeError):
            torch.ones(1, device=self.torch_device)

    def _warn_unpinned(self, num_bytes: int, code: int, reason: str) -> None:
        with self._lock:
            has_warned, self._has_warned = self._has_warned, True
        if has_warned:
            return
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        shown = "unlimited" if limit == resource.RLIM_INFINITY else format_memory(limit)
        logger.warning(
            "%s of host memory could not be pinned: %s [%d]. %s are pinned, the limit of locked memory "
            "(RLIMIT_MEMLOCK) is %s. Copies of the rest go through pageable memory, about half as fast and not "
            'beside other copies. Raise the limit ("ulimit -l unlimited", or --ulimit memlock=-1 of the container), '
            "or lower host_memory.",
            format_memory(num_bytes), reason, code, format_memory(self._pinned_bytes), shown,
        )  # fmt: skip

    def upload(
        self, host: torch.Tensor, place: torch.Tensor | None, after: Event | None = None
    ) -> tuple[torch.Tensor, Event]:
        """Copy on the upload stream."""
        assert place is not None
        return place, self._copy(self._up, host, place, after)

    def download(
        self, source: torch.Tensor, host: torch.Tensor, after: Event | None = None
    ) -> Event:
        """Copy on the download stream. The event keeps the source alive until it was waited for."""
        return self._copy(self._down, source.detach(), host, after, keep=(source,))

    def _copy(
        self,
        stream: torch.cuda.Stream,
        source: torch.Tensor,
        target: torch.Tensor,
        after: Event | None,
        keep: tuple[torch.Tensor, ...] = (),
    ) -> Event:
        with self._on(stream):
            if after is None:
                stream.wait_stream(self._compute)
            else:
                stream.wait_event(_of_card(after))
            target.copy_(source, non_blocking=True)
            return _CudaEvent(stream, keep)

    def compute_waits(self, event: Event) -> None:
        """Make the compute stream wait, not the thread."""
        self._compute.wait_event(_of_card(event))

    def record(self) -> Event:
        """Record an event on the compute stream."""
        return _CudaEvent(self._compute)

    def seconds_between(self, first: Event, last: Event) -> float | None:
        """Ask the card."""
        last.wait()
        return _of_card(first).elapsed_time(_of_card(last)) / 1000

    def seed(self, value: int) -> None:
        """Seed the CPU's and the card's generators."""
        torch.default_generator.manual_seed(value)
        torch.cuda.default_generators[self._index].manual_seed(value)

    def explain(self, error: BaseException) -> SsdtuneError | None:
        """Return what an error of the card means."""
        return failures.explain(error, f"{self.name} ({self._capabilities.model})", self.memory)


def _of_card(event: Event) -> torch.cuda.Event:
    assert isinstance(event, _CudaEvent)
    return event.event


def _prefer_expandable_segments() -> None:
    """Let torch's allocator grow its segments, so that sizes that vary leave no gaps, unless it was told otherwise.

    It has to be said before the first tensor is on a card.
    """
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    if torch.cuda.is_initialized() or any(os.environ.get(name) for name in names):
        return
    wanted = "expandable_segments:True"
    tell = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if tell is None:  # torch before 2.9
        tell = torch.cuda.memory._set_allocator_settings
    tell(wanted)
