"""The code for cards, on streams that do nothing until they have to (see `tests.device.pretended`)."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Iterator

import pytest
import torch

from ssdtune.device import open_device
from ssdtune.device.base import Device, explained
from ssdtune.errors import BackendUnavailableError, CapacityError, SsdtuneError
from ssdtune.io.buffers import Buffer
from tests.device.pretended import GIB, OUT_OF_MEMORY, OnHost, PretendedCuda


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedCuda]:
    pretended = PretendedCuda()
    pretended.install(monkeypatch)
    with OnHost(pretended):
        yield pretended


@pytest.fixture
def device(cuda: PretendedCuda) -> Device:
    return open_device("cuda:1")


def memory(device: Device, value: int = 0, count: int = 8) -> torch.Tensor:
    found = device.allocate(count)
    assert found is not None
    return found.fill_(value)


def host(value: int, count: int = 8) -> torch.Tensor:
    return torch.full((count,), value, dtype=torch.uint8)


def test_an_upload_waits_for_all_compute_unless_told_what_for(
    cuda: PretendedCuda, device: Device
) -> None:
    done: list[str] = []
    compute = cuda.defaults[1]
    compute.issue(lambda: done.append("last use of the first place"))
    first_is_free = device.record()
    compute.issue(lambda: done.append("another block"))
    first, second = memory(device), memory(device)

    _, early = device.upload(host(1), first, after=first_is_free)
    early.wait()
    assert first.tolist() == [1] * 8
    assert done == ["last use of the first place"], "the upload waited for a block it needn't"

    _, late = device.upload(host(2), second)
    assert second.tolist() == [0] * 8
    late.wait()
    assert done == ["last use of the first place", "another block"]
    assert second.tolist() == [2] * 8


def test_a_download_waits_for_all_compute_unless_told_what_for(
    cuda: PretendedCuda, device: Device
) -> None:
    source, compute = memory(device), cuda.defaults[1]
    compute.issue(lambda: source.fill_(3))
    is_written = device.record()
    compute.issue(lambda: pytest.fail("not needed"))
    target = host(0)
    device.download(source, target, after=is_written).wait()
    assert target.tolist() == [3] * 8

    compute.work.pop()
    compute.issue(lambda: source.fill_(4))
    event = device.download(source, target)
    assert target.tolist() == [3] * 8
    event.wait()
    assert target.tolist() == [4] * 8


def test_compute_waits_for_an_upload_and_the_thread_does_not(
    cuda: PretendedCuda, device: Device
) -> None:
    place, seen = memory(device), []
    _, event = device.upload(host(5), place)
    device.compute_waits(event)
    cuda.defaults[1].issue(lambda: seen.append(int(place[0])))
    end = device.record()
    assert place.tolist() == [0] * 8
    end.wait()
    assert seen == [5]


def test_the_card_says_how_long_its_work_took(cuda: PretendedCuda, device: Device) -> None:
    begin = device.record()
    for _ in range(3):
        cuda.defaults[1].issue(lambda: None)
    assert device.seconds_between(begin, device.record()) == 0.003


def test_copies_each_way_do_not_wait_for_each_other(cuda: PretendedCuda, device: Device) -> None:
    place, source, target = memory(device), memory(device, 7), host(0)
    device.upload(host(1), place)
    device.download(source, target).wait()
    assert target.tolist() == [7] * 8
    assert place.tolist() == [0] * 8


def test_the_source_of_a_download_lives_until_it_was_waited_for(device: Device) -> None:
    source, target = memory(device, 9), host(0)
    event = device.download(source, target)
    del source
    gc.collect()
    assert device.memory().by_purpose == {"buffers": 8}
    event.wait()
    assert target.tolist() == [9] * 8
    gc.collect()
    assert not [t for t in event._keep]  # type: ignore[attr-defined]


def test_every_method_names_its_card_in_any_thread(cuda: PretendedCuda, device: Device) -> None:
    """A new thread's current card is 0; the device is card 1. The stand-in checks the card of every call."""
    failures: list[BaseException] = []

    def work() -> None:
        try:
            with OnHost(cuda):
                place = device.allocate(4096, "a slot")
                assert place is not None
                buffer = Buffer(4096)
                pin = device.pin(buffer.view)
                data = torch.frombuffer(buffer.view, dtype=torch.uint8)
                _, event = device.upload(data.fill_(6), place)
                device.compute_waits(event)
                back = host(0, 4096)
                device.download(place, back, after=device.record()).wait()
                assert back.tolist() == [6] * 4096
                pin.close()
                device.seed(11)
                assert cuda.current == 0, "the thread's own card was changed"
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failures == []
    assert cuda.default_generators[1].initial_seed() == 11
    assert cuda.default_generators[0].initial_seed() != 11
    assert torch.default_generator.initial_seed() == 11


def test_exactly_the_buffer_is_pinned_until_it_is_closed(
    cuda: PretendedCuda, device: Device
) -> None:
    buffer = Buffer(5 * 4096)
    address = torch.frombuffer(buffer.view, dtype=torch.uint8).data_ptr()
    pin = device.pin(buffer.view)
    assert pin.pinned
    assert cuda.pinned == {address: 5 * 4096}
    assert device.memory().pinned_bytes == 5 * 4096
    pin.close()
    pin.close()
    assert not pin.pinned
    assert cuda.pinned == {}
    assert device.memory().pinned_bytes == 0
    assert not device.pin(Buffer(0).view).pinned


def test_memory_is_unpinned_after_its_copies(cuda: PretendedCuda, device: Device) -> None:
    buffer = Buffer(4096)
    pin = device.pin(buffer.view)
    place = memory(device, count=4096)
    data = torch.frombuffer(buffer.view, dtype=torch.uint8).fill_(8)
    device.upload(data, place)
    pin.close()
    assert place.tolist() == [8] * 4096


def test_what_cannot_be_pinned_is_said_once_and_blamed_on_no_kernel(
    cuda: PretendedCuda, device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.register_error = OUT_OF_MEMORY
    with caplog.at_level(logging.WARNING, "ssdtune"):
        assert not device.pin(Buffer(8192).view).pinned
        assert cuda.last_error == 0
        device.pin(Buffer(4096).view).close()
    (record,) = caplog.records
    text = record.getMessage()
    assert text.startswith("8.00 KiB of host memory could not be pinned: out of memory [2]. 0 B ")
    assert "RLIMIT_MEMLOCK" in text and "half as fast" in text and "host_memory" in text


def test_what_no_card_has_room_for_says_what_took_it(cuda: PretendedCuda, device: Device) -> None:
    slot = device.allocate(3 << 20, "weight slots")
    cuda.failure = torch.cuda.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 6.00 GiB. GPU 1 has a total capacity of 24.00 GiB"
    )
    with pytest.raises(CapacityError) as failed:
        device.allocate(6 * GIB, "gradients")
    assert str(failed.value) == (
        "cuda:1 (Pretended 1) has no room for 6.00 GiB more in its memory of 24.0 GiB. In use: "
        "weight slots 3.00 MiB, activations and workspaces 3.00 GiB. A budget of at least 9.00 GiB for tensors "
        "is needed here. Lower per_device_train_batch_size (and raise gradient_accumulation_steps) or max_length. Or let it be tried once more with a smaller plan: --retry-out-of-memory true."
    )
    assert slot is not None


def test_a_budget_is_kept_by_the_allocator_and_named(cuda: PretendedCuda) -> None:
    device = open_device("cuda:1", budget_bytes=6 * GIB)
    assert cuda.fraction == 0.25
    assert device.memory().free_bytes == 3 * GIB
    error = torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB.")
    text = str(device.explain(error))
    assert "no room for 4.00 GiB more in its budget of 6.00 GiB" in text
    assert "at least 7.00 GiB" in text
    open_device("cuda:1")
    assert cuda.fraction == 1.0  # the next run in this process has no budget


@pytest.mark.parametrize(
    "capability, bf16, fp16",
    [((6, 0), False, True), ((6, 1), False, False), ((7, 0), False, True), ((7, 5), False, True),
     ((8, 0), True, True), ((9, 0), True, True)],
)  # fmt: skip
def test_number_formats_by_kind_of_card(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], bf16: bool, fp16: bool
) -> None:
    pretended = PretendedCuda(capability=capability)
    pretended.install(monkeypatch)
    with OnHost(pretended):
        device = open_device("cuda")
    assert device.supports(torch.bfloat16) == bf16
    assert device.supports(torch.float16) == fp16
    assert device.supports(torch.float32)
    assert not device.supports(torch.float64)
    assert device.capabilities().compute_capability == capability
    assert device.capabilities().model == "Pretended 0"


def test_a_lost_card_says_that_the_checkpoint_is_whole(cuda: PretendedCuda, device: Device) -> None:
    cuda.failure = RuntimeError("CUDA error: unspecified launch failure\nCUDA kernel errors might")
    with pytest.raises(SsdtuneError) as failed:
        device.allocate(8)
    assert not isinstance(failed.value, CapacityError)
    assert str(failed.value) == (
        "cuda:1 (Pretended 1) failed: CUDA error: unspecified launch failure. This process cannot use the card any "
        "more. The driver says more: sudo dmesg | grep -i xid. The last checkpoint is whole: run again with "
        "--resume-from-checkpoint last."
    )
    with pytest.raises(RuntimeError, match="shapes"), explained(device):
        raise RuntimeError("shapes do not match")


def test_a_card_that_others_hold_is_told(
    cuda: PretendedCuda, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.free_bytes = 2 * GIB
    with caplog.at_level(logging.WARNING, "ssdtune"):
        device = open_device("cuda:1")
    assert "cuda:1 (Pretended 1): 22.0 GiB of 24.0 GiB are taken" in caplog.text
    error = torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 512.00 MiB.")
    assert "end the other programs on the card" in str(device.explain(error))


def test_a_card_that_fails_at_once_is_an_error_with_a_remedy(cuda: PretendedCuda) -> None:
    for text, remedy in {
        "CUDA error: no kernel image is available for execution on the device": "not built for cards of its kind",
        "CUDA error: all CUDA-capable devices are busy or unavailable": "Check it with nvidia-smi",
        "CUDA out of memory. Tried to allocate 2.00 MiB.": "End the other programs",
    }.items():
        kind = torch.cuda.OutOfMemoryError if "out of memory" in text else RuntimeError
        cuda.failure = kind(text + "\nmore")
        with pytest.raises(BackendUnavailableError) as failed:
            open_device("cuda:1")
        assert str(failed.value).startswith(f"cuda:1 cannot be used: {text.rstrip('.')}. ")
        assert remedy in str(failed.value)


def test_the_number_of_an_error_decides_where_torch_gives_it(
    cuda: PretendedCuda, device: Device
) -> None:
    error = RuntimeError("CUDA error: device-side assert triggered")
    error.error_code = 710  # type: ignore[attr-defined]
    assert "[710]. An index was out of range" in str(device.explain(error))
    error.error_code = 46  # type: ignore[attr-defined]
    cuda.failure = error
    with pytest.raises(BackendUnavailableError, match="holds it alone"):
        open_device("cuda:1")
