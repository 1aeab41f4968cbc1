"""A CUDA card as a device: compute on the current stream, copies each way on a stream of their own."""

from __future__ import annotations

import torch

from ssdtune.device.base import DeviceMemory, Event


class _CudaEvent:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event()
        self.event.record(stream)

    def wait(self) -> None:
        """Block the calling thread until the event has happened."""
        self.event.synchronize()


class CudaDevice:
    """Computes on one card."""

    def __init__(self, index: int = 0) -> None:
        self.torch_device = torch.device("cuda", index)
        self.name = f"cuda:{index}"
        torch.cuda.set_device(self.torch_device)
        self._up = torch.cuda.Stream(self.torch_device)
        self._down = torch.cuda.Stream(self.torch_device)

    def supports(self, dtype: torch.dtype) -> bool:
        """Take bf16 only where the card has it in hardware (Ampere and later)."""
        if dtype == torch.bfloat16:
            return torch.cuda.get_device_capability(self.torch_device) >= (8, 0)
        return dtype in (torch.float32, torch.float16)

    def memory(self) -> DeviceMemory:
        """Return the card's memory figures."""
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return DeviceMemory(total, free, torch.cuda.max_memory_allocated(self.torch_device))

    def allocate(self, num_bytes: int) -> torch.Tensor | None:
        """Allocate device memory."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)

    def upload(self, host: torch.Tensor, place: torch.Tensor | None) -> tuple[torch.Tensor, Event]:
        """Copy on the upload stream once the compute issued so far (the place's last readers) is done."""
        assert place is not None
        self._up.wait_stream(torch.cuda.current_stream(self.torch_device))
        with torch.cuda.stream(self._up):
            place.copy_(host, non_blocking=True)
        return place, _CudaEvent(self._up)

    def download(self, source: torch.Tensor, host: torch.Tensor) -> Event:
        """Copy on the download stream once the compute issued so far is done."""
        self._down.wait_stream(torch.cuda.current_stream(self.torch_device))
        with torch.cuda.stream(self._down):
            host.copy_(source, non_blocking=True)
        source.record_stream(self._down)
        return _CudaEvent(self._down)

    def compute_waits(self, event: Event) -> None:
        """Make the compute stream wait, not the thread."""
        assert isinstance(event, _CudaEvent)
        torch.cuda.current_stream(self.torch_device).wait_event(event.event)

    def record(self) -> Event:
        """Record an event on the compute stream."""
        return _CudaEvent(torch.cuda.current_stream(self.torch_device))

    def seed(self, value: int) -> None:
        """Seed the CPU's and the card's generators."""
        torch.default_generator.manual_seed(value)
        torch.cuda.manual_seed(value)
