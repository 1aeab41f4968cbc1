"""A real card, where there is one. `tools/gpu_check.py` measures it too."""

from __future__ import annotations

import threading

import pytest
import torch

from ssdtune.device import open_device
from ssdtune.device.base import Device
from ssdtune.errors import CapacityError
from ssdtune.io.buffers import Buffer

pytestmark = pytest.mark.gpu
SIZE = 8 << 20


@pytest.fixture(scope="module")
def device() -> Device:
    return open_device("cuda")


def random_buffer() -> tuple[Buffer, torch.Tensor]:
    buffer = Buffer(SIZE)
    return buffer, torch.frombuffer(buffer.view, dtype=torch.uint8).random_(0, 256)


@pytest.mark.parametrize("pinned", [True, False])
def test_bytes_go_there_and_back_from_another_thread(device: Device, pinned: bool) -> None:
    buffer, host = random_buffer()
    pin = device.pin(buffer.view) if pinned else None
    assert pin is None or (pin.pinned and host.is_pinned())
    place, back = device.allocate(SIZE, "a slot"), torch.empty(SIZE, dtype=torch.uint8)
    assert place is not None and device.memory().by_purpose["a slot"] == SIZE
    failures: list[BaseException] = []

    def work(place: torch.Tensor) -> None:
        try:
            _, event = device.upload(host, place)
            device.compute_waits(event)
            place.bitwise_not_()
            device.download(place, back, after=device.record()).wait()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work, args=(place,))
    thread.start()
    thread.join()
    assert failures == []
    assert torch.equal(back, host.bitwise_not())
    if pin:
        pin.close()
        assert not host.is_pinned()
    del place
    assert "a slot" not in device.memory().by_purpose


def test_a_copy_without_an_event_comes_after_long_compute(device: Device) -> None:
    source = device.allocate(SIZE)
    assert source is not None
    source.zero_()
    matrix = torch.randn(4096, 4096, device=device.torch_device)
    for _ in range(32):
        matrix = matrix @ matrix / 64
    source.fill_(7)
    back = torch.empty(SIZE, dtype=torch.uint8)
    device.download(source, back).wait()
    assert back.eq(7).all()


def test_memory_that_cannot_be_pinned_harms_no_kernel(device: Device) -> None:
    buffer, _ = random_buffer()
    pin = device.pin(buffer.view)
    twice = device.pin(buffer.view)  # is refused
    assert not twice.pinned
    assert torch.ones(3, device=device.torch_device).sum().item() == 3
    pin.close()


def test_a_full_card_says_so_and_goes_on(device: Device) -> None:
    with pytest.raises(CapacityError, match="has no room for"):
        device.allocate(2 * device.capabilities().total_bytes, "too much")
    assert torch.ones(3, device=device.torch_device).sum().item() == 3


def test_a_seed_is_the_cards_own(device: Device) -> None:
    device.seed(5)
    first = torch.rand(8, device=device.torch_device)
    device.seed(5)
    assert torch.equal(first, torch.rand(8, device=device.torch_device))
