"""The CPU as a device: host memory is device memory, so copies are nothing and events are over."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from ssdtune.device.base import DeviceMemory, Event


class _Done:
    def wait(self) -> None:
        """Return at once."""


_DONE = _Done()


class CpuDevice:
    """Computes with torch's CPU kernels, in the calling thread and on the buffers themselves."""

    name = "cpu"
    torch_device = torch.device("cpu")

    def supports(self, dtype: torch.dtype) -> bool:
        """Take bf16 only where the CPU has instructions for it; elsewhere it's many times slower than fp32."""
        if dtype == torch.bfloat16:
            flags = _cpu_flags()
            return bool(flags & {"amx_bf16", "avx512_bf16", "bf16"})
        return dtype == torch.float32

    def memory(self) -> DeviceMemory:
        """Return the host's memory; the budget that holds is that of host memory."""
        figures = psutil.virtual_memory()
        return DeviceMemory(figures.total, figures.available, psutil.Process().memory_info().rss)

    def allocate(self, num_bytes: int) -> torch.Tensor | None:
        """Return None: host memory is used in place."""
        return None

    def upload(self, host: torch.Tensor, place: torch.Tensor | None) -> tuple[torch.Tensor, Event]:
        """Do nothing."""
        return host, _DONE

    def download(self, source: torch.Tensor, host: torch.Tensor) -> Event:
        """Copy at once."""
        if source.data_ptr() != host.data_ptr():
            host.copy_(source)
        return _DONE

    def compute_waits(self, event: Event) -> None:
        """Wait at once: compute runs in this thread."""
        event.wait()

    def record(self) -> Event:
        """Return an event that is over."""
        return _DONE

    def seed(self, value: int) -> None:
        """Seed torch's CPU generator."""
        torch.default_generator.manual_seed(value)


def _cpu_flags() -> set[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("flags", "Features")):
            return set(line.split(":", 1)[1].split())
    return set()
