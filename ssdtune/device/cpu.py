"""The CPU as a device: host memory is device memory, so copies are nothing and events are over."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from ssdtune.device.base import Capabilities, DeviceMemory, Event, FileUse, Pin
from ssdtune.errors import SsdtuneError
from ssdtune.io.device_bytes import Memory


class _Done:
    def wait(self) -> None:
        """Return at once."""


_DONE = _Done()


class CpuDevice:
    """Computes with torch's CPU kernels, in the calling thread and on the buffers themselves."""

    name = "cpu"
    torch_device = torch.device("cpu")
    own_memory = False

    def supports(self, dtype: torch.dtype) -> bool:
        """Take bf16 only where the CPU has instructions for it; elsewhere it's many times slower than fp32."""
        if dtype == torch.bfloat16:
            flags = set(_cpu_info("flags", "Features").split())
            return bool(flags & {"amx_bf16", "avx512_bf16", "bf16"})
        return dtype == torch.float32

    def capabilities(self) -> Capabilities:
        """Return the processor's name and the host's memory."""
        return Capabilities(_cpu_info("model name") or "CPU", None, psutil.virtual_memory().total)

    def memory(self) -> DeviceMemory:
        """Return the host's memory; the budget that holds is that of host memory."""
        figures = psutil.virtual_memory()
        return DeviceMemory(figures.total, figures.available, psutil.Process().memory_info().rss)

    def allocate(self, num_bytes: int, purpose: str = "buffers") -> torch.Tensor | None:
        """Return None: host memory is used in place."""
        return None

    def file_memory(self, memory: torch.Tensor, use: FileUse) -> Memory:
        """Return host memory as it is."""
        return memoryview(memory.view(torch.uint8).numpy())

    def pin(self, memory: memoryview) -> Pin:
        """Do nothing."""
        return Pin()

    def upload(
        self, host: torch.Tensor, place: torch.Tensor | None, after: Event | None = None
    ) -> tuple[torch.Tensor, Event]:
        """Do nothing."""
        return host, _DONE

    def download(
        self, source: torch.Tensor, host: torch.Tensor, after: Event | None = None
    ) -> Event:
        """Copy at once."""
        if source.data_ptr() != host.data_ptr():
            host.copy_(source.detach())
        return _DONE

    def compute_waits(self, event: Event) -> None:
        """Wait at once: compute runs in this thread."""
        event.wait()

    def record(self) -> Event:
        """Return an event that is over."""
        return _DONE

    def seconds_between(self, first: Event, last: Event) -> float | None:
        """Return None: compute is over when it was issued."""
        return None

    def seed(self, value: int) -> None:
        """Seed torch's CPU generator."""
        torch.default_generator.manual_seed(value)

    def explain(self, error: BaseException) -> SsdtuneError | None:
        """Return None: a CPU has no errors of its own."""
        return None


def _cpu_info(*names: str) -> str:
    """Return the first line of /proc/cpuinfo that has one of these names, without it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(names):
            return line.partition(":")[2].strip()
    return ""
