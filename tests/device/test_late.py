"""The late device of the tests (`tests.adversarial`) keeps the promises of `Device` and sees who relies on more."""

from __future__ import annotations

import torch

from tests.adversarial import POISON, AdversarialDevice

EARLY_UPLOAD = "an upload may be early: compute used its place since"
EARLY_DOWNLOAD = "a download may be early: compute wrote its source since"


def place_of(device: AdversarialDevice, count: int = 8) -> torch.Tensor:
    memory = device.allocate(count)
    assert memory is not None
    return memory


def host(value: int, count: int = 8) -> torch.Tensor:
    return torch.full((count,), value, dtype=torch.uint8)


def is_poison(memory: torch.Tensor) -> bool:
    return bool((memory == POISON).all())


def test_an_upload_comes_when_it_is_waited_for() -> None:
    device = AdversarialDevice()
    place = place_of(device)
    _, event = device.upload(host(1), place)
    assert is_poison(place)
    device.compute_waits(event)
    assert place.tolist() == [1] * 8


def test_an_upload_after_the_last_use_is_fine() -> None:
    device = AdversarialDevice()
    place, other = place_of(device), place_of(device)
    with device.accesses:
        place.sum()
        is_free = device.record()
        other.sum()
        device.upload(host(1), place, after=is_free)
    assert device.violations == []


def test_an_upload_after_an_older_event_is_seen() -> None:
    for use in ("read", "write"):
        device = AdversarialDevice()
        place = place_of(device, 16)
        first, second = place[:8], place[8:]
        with device.accesses:
            event = device.record()
            if use == "read":
                first.view(torch.int32).add(1)
            else:
                first.mul_(2)
            device.upload(host(1), second, after=event)
            assert device.violations == [], "the other half is not the place"
            device.upload(host(1), first, after=event)
        assert device.violations == [EARLY_UPLOAD]


def test_an_upload_without_an_event_comes_after_all_compute() -> None:
    device = AdversarialDevice()
    place = place_of(device)
    with device.accesses:
        place.sum()
        device.upload(host(1), place)
    assert device.violations == []


def test_whoever_has_waited_for_compute_may_name_an_older_event() -> None:
    device = AdversarialDevice()
    place = place_of(device)
    with device.accesses:
        older = device.record()
        place.sum()
        device.record().wait()
        device.upload(host(1), place, after=older)
    assert device.violations == []


def test_new_memory_may_still_be_in_use() -> None:
    """An allocator gives away what compute still works on; only later compute is ordered behind that."""
    device = AdversarialDevice()
    with device.accesses:
        device.record()
        older = device.record()
        torch.ones(3).add(1)
        device.upload(host(1), place_of(device), after=older)
    assert device.violations == [EARLY_UPLOAD]


def test_a_download_after_the_last_write_is_fine() -> None:
    device = AdversarialDevice()
    source, target = place_of(device), host(0)
    with device.accesses:
        source.fill_(3)
        is_written = device.record()
        source.sum()  # reads don't matter
        event = device.download(source, target, after=is_written)
    assert is_poison(target)
    event.wait()
    assert target.tolist() == [3] * 8
    assert device.violations == []


def test_a_download_after_an_older_event_is_seen() -> None:
    device = AdversarialDevice()
    source = place_of(device)
    with device.accesses:
        older = device.record()
        source.fill_(3)
        device.download(source, host(0), after=older)
    assert device.violations == [EARLY_DOWNLOAD]


def test_a_result_of_compute_is_written_when_it_is_computed() -> None:
    device = AdversarialDevice()
    with device.accesses:
        older = device.record()
        result = torch.ones(2) + 1
        device.download(result, torch.empty(2), after=older)
    assert device.violations == [EARLY_DOWNLOAD]


def test_a_source_that_is_overwritten_before_its_download_is_over_gives_other_bytes() -> None:
    device = AdversarialDevice()
    source, target = place_of(device), host(0)
    with device.accesses:
        source.fill_(3)
        event = device.download(source, target)
        source.fill_(4)
        event.wait()
    assert target.tolist() == [4] * 8


def test_an_upload_into_what_is_downloaded_waits_for_it_by_its_event() -> None:
    device = AdversarialDevice()
    place, target = place_of(device), host(0)
    with device.accesses:
        place.fill_(3)
        down = device.download(place, target)
        _, up = device.upload(host(5), place, after=down)
        device.compute_waits(up)
        assert place.tolist() == [5] * 8
        down.wait()
    assert target.tolist() == [3] * 8
    assert device.violations == []


def test_without_its_event_the_download_gets_poison() -> None:
    device = AdversarialDevice()
    place, target = place_of(device), host(0)
    with device.accesses:
        place.fill_(3)
        down = device.download(place, target)
        device.upload(host(5), place, after=device.record())
        down.wait()
    assert is_poison(target)


def test_host_memory_is_free_once_the_copy_or_what_follows_it_is_over() -> None:
    device = AdversarialDevice()
    place, source = place_of(device), host(1)
    _, event = device.upload(source, place)
    device.compute_waits(event)
    device.record().wait()
    source.fill_(2)
    event.wait()
    assert device.violations == []

    source, place = host(1), place_of(device)
    _, event = device.upload(source, place)
    device.compute_waits(event)
    source.fill_(2)
    event.wait()
    assert device.violations == ["host memory was overwritten during an upload"]
