"""The way of each stream: measured in turns over real files and backends, also to a card; chosen by what was measured."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ssdtune.errors import BackendUnavailableError
from ssdtune.hardware import ways
from ssdtune.hardware.figures import DirectoryProfile, IoPoint, Way, decode
from ssdtune.hardware.stream import Bench
from ssdtune.hardware.ways import Paces, measure_ways, paces, stream_names
from ssdtune.io.device_bytes import Memory
from ssdtune.io.streams import StreamNames
from ssdtune.io.threads import PythonBackend
from tests.adversarial import AdversarialDevice
from tests.hardware.test_copies import Pinning

CHUNK_BYTES = 1 << 20
BEST = IoPoint(backend="python", request_bytes=1 << 18, queue_depth=2)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    ticks = itertools.count()
    with Bench(
        tmp_path, direct=False, memory_bytes=4 * CHUNK_BYTES, chunk_bytes=CHUNK_BYTES,
        clock=lambda: float(next(ticks)),
    ) as bench:  # fmt: skip
        bench.fill(0, 0, backend="python")
        yield bench


class Reaching(PythonBackend):
    """Takes a card's memory, as far as the device of these tests has any."""

    name = "reaching"
    takes_device_memory = True

    def register(self, memory: Memory) -> Callable[[], None]:
        return lambda: None


@pytest.fixture
def reaching(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let there be a backend that reaches cards."""
    from ssdtune.hardware import stream

    real = stream.open_backend

    def opened(name: str, **sizes: Any) -> Any:
        return Reaching(**sizes) if name == "reaching" else real(name, **sizes)

    monkeypatch.setattr(stream, "open_backend", opened)
    monkeypatch.setattr(ways, "DEVICE_BACKENDS", ("reaching",))


def test_every_backend_has_its_turn(bench: Bench) -> None:
    found = measure_ways(bench, BEST, ["threads", "python"], seconds=0)
    assert [(way.backend, way.to_card) for way in found] == [("threads", False), ("python", False)]
    assert all(way.read_bytes_per_s > 0 and way.mixed_bytes_per_s > 0 for way in found)


def test_of_one_backend_nothing_is_measured(bench: Bench) -> None:
    before = bench.written_bytes
    assert measure_ways(bench, BEST, ["python"], seconds=1e9) == ()
    assert measure_ways(bench, BEST, ["python", "kvikio"], seconds=1e9) == ()  # there is no card
    assert bench.written_bytes == before


def test_a_backend_that_stops_working_is_left_out(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, tries = Bench.stream, itertools.count()

    def stream(self: Bench, name: str, *args: Any) -> Any:
        if name == "threads" and next(tries):
            raise BackendUnavailableError("its kernel resources are gone")
        return real(self, name, *args)

    monkeypatch.setattr(Bench, "stream", stream)
    (left,) = measure_ways(bench, BEST, ["threads", "python"], seconds=0)
    assert left.backend == "python"


@pytest.mark.usefixtures("reaching")
def test_to_a_card_straight_and_through_pinned_memory(bench: Bench) -> None:
    device = Pinning()
    found = measure_ways(bench, BEST, ["python", "reaching"], seconds=0, device=device)
    assert [(way.backend, way.to_card) for way in found] == [
        ("python", False), ("python", True), ("reaching", True),
    ]  # fmt: skip
    assert all(way.read_bytes_per_s > 0 and way.mixed_bytes_per_s > 0 for way in found)
    assert device.num_straight > 0 and device.num_copies > 0 and device.violations == []
    assert device.pinned == [] and device.memory().by_purpose == {}


@pytest.mark.usefixtures("reaching")
@pytest.mark.parametrize("backend", ["python", "reaching"])
def test_the_bytes_arrive_on_the_card_and_come_from_there(bench: Bench, backend: str) -> None:
    device = AdversarialDevice()
    content = np.random.default_rng(1).bytes(CHUNK_BYTES)
    with (
        ways._places(device) as place_of,
        bench.stream(backend, BEST.request_bytes, BEST.queue_depth, place_of) as stream,
    ):
        stream.run("read", 0)
        for number, place in enumerate(stream._places):
            there = os.pread(bench.descriptor, CHUNK_BYTES, number * CHUNK_BYTES)
            assert bytes(place._memory.numpy()) == there
        for place in stream._places:
            place._memory.numpy()[:] = np.frombuffer(content, np.uint8)
        stream.run("write", 0)
        assert os.pread(bench.descriptor, CHUNK_BYTES, 0) == content
    assert device.violations == []


def place(**changes: Any) -> DirectoryProfile:
    made = DirectoryProfile(
        path="/a", file_system="ext4", device="/dev/a", free_bytes=1, backend="io_uring", queue_depth=4,
        request_bytes=1 << 20, read_bytes_per_s=6e9, mixed_bytes_per_s=4e9,
    )  # fmt: skip
    return replace(made, **changes)


def way(backend: str, read: float, mixed: float, *, to_card: bool = False) -> Way:
    return Way(backend=backend, to_card=to_card, read_bytes_per_s=read, mixed_bytes_per_s=mixed)


HOST = (way("io_uring", 5, 4), way("libaio", 5.4, 4.2), way("threads", 4, 4))
CARD = (way("io_uring", 4.5, 3.5, to_card=True), way("kvikio", 7.5, 3.4, to_card=True))


@pytest.mark.parametrize(
    ("measured", "card", "wanted"),
    [
        (None, False, ("io_uring", "io_uring", "io_uring")),
        ((), True, ("io_uring", "io_uring", "io_uring")),
        (HOST, False, ("io_uring", "io_uring", "io_uring")),  # no more than noise
        ((*HOST, way("python", 6.5, 3)), False, ("python", "io_uring", "io_uring")),
        ((*HOST, *CARD), True, ("kvikio", "io_uring", "io_uring")),
        ((*HOST, *CARD), False, ("io_uring", "io_uring", "io_uring")),
        ((*HOST, CARD[0], way("kvikio", 4, 5, to_card=True)), True, ("io_uring", "io_uring", "kvikio")),
        ((*HOST, way("kvikio", 9, 9, to_card=True)), True, ("io_uring", "io_uring", "io_uring")),
    ],
    ids=["old", "alone", "noise", "reads", "straight", "no card", "activations", "nothing to compare"],
)  # fmt: skip
def test_each_stream_has_its_fastest_way(
    measured: tuple[Way, ...] | None, card: bool, wanted: tuple[str, str, str]
) -> None:
    here = place(ways=measured)
    assert stream_names(here, here, card=card) == StreamNames(*wanted)


def test_weights_go_the_way_of_the_drive_of_the_model() -> None:
    other = place(path="/b", backend="threads", ways=(way("threads", 1, 1), way("io_uring", 9, 9)))
    reads = place(ways=(way("io_uring", 1, 1), way("threads", 9, 1)))
    assert stream_names(place(ways=HOST), reads, card=False).weights == "threads"
    assert stream_names(reads, other, card=False).weights == "io_uring"


def test_paces_are_in_units_of_the_backend_that_rates_were_taken_with() -> None:
    here = place(ways=(*HOST, *CARD))
    assert paces(here, here, StreamNames.all("io_uring")) == Paces()
    assert paces(here, here, StreamNames.all("auto")) == Paces()  # nobody knows which
    assert paces(here, here, StreamNames("kvikio", "threads", "kvikio")) == Paces(1.5, 1.0, 0.85)
    assert paces(here, place(ways=None), StreamNames.all("libaio")) == Paces(1.0, 1.05, 1.05)


def test_profiles_of_earlier_versions_have_no_ways() -> None:
    values = vars(place())
    del values["ways"]
    assert decode(DirectoryProfile, values).ways is None
