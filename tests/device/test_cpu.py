"""The CPU as a device: nothing is copied that is there already, and every event is over."""

from __future__ import annotations

import psutil
import torch

from ssdtune.device.cpu import CpuDevice


def test_host_memory_is_used_in_place() -> None:
    device = CpuDevice()
    assert device.allocate(4096, "a slot") is None
    host = torch.arange(8, dtype=torch.uint8)
    there, event = device.upload(host, None, after=device.record())
    assert there is host
    event.wait()
    device.compute_waits(event)


def test_a_download_copies_at_once_and_keeps_no_graph() -> None:
    device, source, host = CpuDevice(), torch.ones(4, requires_grad=True), torch.zeros(4)
    device.download(source * 2, host, after=device.record())
    assert host.tolist() == [2.0] * 4
    assert not host.requires_grad
    device.download(host, host).wait()


def test_figures() -> None:
    device = CpuDevice()
    figures = device.memory()
    assert 0 < figures.free_bytes < figures.total_bytes == psutil.virtual_memory().total
    assert figures.by_purpose == {} and figures.pinned_bytes == 0
    assert device.capabilities().compute_capability is None
    assert device.capabilities().model
    assert device.supports(torch.float32) and not device.supports(torch.float16)


def test_pins_nothing_and_explains_nothing() -> None:
    device = CpuDevice()
    pin = device.pin(memoryview(bytearray(4096)))
    assert not pin.pinned
    pin.close()
    assert device.explain(RuntimeError("CUDA error: it cannot be")) is None


def test_a_seed_is_that_of_torch() -> None:
    device = CpuDevice()
    device.seed(3)
    first = torch.rand(4)
    torch.manual_seed(3)
    assert torch.equal(first, torch.rand(4))
