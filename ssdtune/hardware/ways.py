"""Which I/O backend is the fastest way for each stream of a run, measured in turns; and to a card, straight or not.

What is read from the model's files is only read, states and activations are read and written at once. With a card, bytes
go straight to its memory with a backend that takes that, or through pinned host memory with one that doesn't.
`measure_ways` takes the figures, `stream_names` chooses by them, `paces` says what the choice is worth.
`ssdtune.io.streams` opens what was chosen.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from ssdtune.errors import BackendUnavailableError
from ssdtune.hardware.figures import DirectoryProfile, IoPoint, Way
from ssdtune.hardware.stream import Bench, Place, PlaceOf, in_host
from ssdtune.io.backend import Backend, File, Ticket
from ssdtune.io.select import DEVICE_BACKENDS
from ssdtune.io.streams import StreamNames

if TYPE_CHECKING:
    import torch

    from ssdtune.device.base import Device

CLEARLY_FASTER = 1.2
"""Another backend than that of the states is taken only if it is so much faster: one and the same differed by as much from run to
run on a virtual drive, where no order of the backends lasted."""
_KINDS = ("read", "mixed")
_ROUNDS = 3


def measure_ways(
    bench: Bench,
    best: IoPoint,
    backends: Sequence[str],
    *,
    seconds: float,
    device: Device | None = None,
) -> tuple[Way, ...]:
    """Measure reading, and both ways at once, with every backend and the best settings, in turns.

    Args:
        best: The backend and the settings that were found best.
        backends: Those that work; of those that take a card's memory, what goes there is measured.
        seconds: For all of it; each figure is taken in any case.
        device: The card that bytes go to; None if there is none.

    Returns:
        One for each; none where there is nothing to choose between.
    """
    ways = [(name, False) for name in backends if name not in DEVICE_BACKENDS]
    straight = [name for name in backends if name in DEVICE_BACKENDS]
    if device is not None and straight:
        ways += [(best.backend, True), *((name, True) for name in straight)]
    rates: dict[tuple[str, bool], dict[str, list[float]]] = {
        way: {kind: [] for kind in _KINDS} for way in ways
    }
    if len(rates) < 2:
        return ()
    each = seconds / (len(rates) * len(_KINDS) * _ROUNDS)
    for number in range(_ROUNDS):
        order = list(rates)
        first = number % len(order)
        for name, to_card in order[first:] + order[:first]:  # another one begins each round
            try:
                with (
                    _places(device if to_card else None) as place_of,
                    bench.stream(name, best.request_bytes, best.queue_depth, place_of) as stream,
                ):
                    for kind in _KINDS:
                        rates[name, to_card][kind].append(stream.run(kind, each).rate)
            except BackendUnavailableError:  # its kernel resources are in use at the moment
                del rates[name, to_card]
    return tuple(
        Way(
            backend=name,
            to_card=to_card,
            **{f"{kind}_bytes_per_s": statistics.median(found[kind]) for kind in _KINDS},
        )
        for (name, to_card), found in rates.items()
    )


def stream_names(place: DirectoryProfile, source: DirectoryProfile, *, card: bool) -> StreamNames:
    """Return the fastest backend of each stream.

    Args:
        place: The directory of the states, as it was measured; `source` that of the model's files.
        card: A card computes.
    """
    return StreamNames(
        weights=_straight(source, "read_bytes_per_s", card) or _reader(source, place.backend),
        states=place.backend,
        activations=_straight(place, "mixed_bytes_per_s", card) or place.backend,
    )


def _straight(place: DirectoryProfile, rate: str, card: bool) -> str:
    """Return the backend that goes straight to the card, if that is faster than through host memory; else nothing."""
    ways = place.ways or ()
    through = [
        getattr(way, rate) for way in ways if way.to_card and way.backend not in DEVICE_BACKENDS
    ]
    straight = [way for way in ways if way.to_card and way.backend in DEVICE_BACKENDS]
    if not (card and straight and through):
        return ""
    fastest = max(straight, key=lambda way: getattr(way, rate))
    return fastest.backend if getattr(fastest, rate) > max(through) else ""


def _reader(place: DirectoryProfile, usual: str) -> str:
    """Return the backend that reads fastest into host memory: the usual one unless it is clearly slower."""
    rates = {way.backend: way.read_bytes_per_s for way in place.ways or () if not way.to_card}
    if not rates.get(usual):
        return usual
    best = max(rates, key=lambda name: rates[name])
    return best if rates[best] > CLEARLY_FASTER * rates[usual] else usual


@dataclass(frozen=True)
class Paces:
    """How fast the streams are, each in units of what was measured of its drive as a whole; 1 if that isn't known."""

    weights: float = 1.0
    states: float = 1.0
    activations: float = 1.0


def paces(place: DirectoryProfile, source: DirectoryProfile, streams: StreamNames) -> Paces:
    """Return how fast the streams of a run are with their backends; for the directories see `stream_names`."""
    return Paces(
        _pace(source, streams.weights, "read_bytes_per_s"),
        _pace(place, streams.states, "mixed_bytes_per_s"),
        _pace(place, streams.activations, "mixed_bytes_per_s"),
    )


def _pace(place: DirectoryProfile, backend: str, rate: str) -> float:
    """Return the rate of a backend in units of that of the one that the place was measured with."""
    ways = {(way.backend, way.to_card): getattr(way, rate) for way in place.ways or ()}
    usual = ways.get((place.backend, False))
    found = ways.get((backend, backend in DEVICE_BACKENDS))
    return float(found / usual) if usual and found else 1.0


@contextmanager
def _places(device: Device | None) -> Iterator[PlaceOf]:
    """Give what makes the places of a stream's transfers: in host memory, or on a card."""
    if device is None:
        yield in_host
        return
    undo: list[Callable[[], None]] = []

    def place_of(backend: Backend, view: memoryview) -> Place:
        memory = device.allocate(view.nbytes, "measuring")
        assert memory is not None, "only a device with memory of its own is measured"
        device.record().wait()  # compute is done with what was there
        if backend.takes_device_memory:
            undo.append(backend.register(device.file_memory(memory, "registered")))
            return _Straight(device, memory)
        pin = device.pin(view)
        undo.append(pin.close)
        return _ThroughHost(device, memory, view)

    try:
        yield place_of
    finally:
        for action in undo:
            action()


class _Straight:
    """Memory of a card that the drive reaches."""

    def __init__(self, device: Device, memory: torch.Tensor) -> None:
        self._device = device
        self._memory = memory

    def read(self, backend: Backend, file: File, offset: int) -> Ticket:
        there = self._device.file_memory(self._memory, "read into")
        return backend.read(file, offset, cast(memoryview, there))

    def write(self, backend: Backend, file: File, offset: int) -> Ticket:
        there = self._device.file_memory(self._memory, "written")
        return backend.write(file, offset, cast(memoryview, there))


class _ThroughHost:
    """Memory of a card that is reached through pinned host memory."""

    def __init__(self, device: Device, memory: torch.Tensor, view: memoryview) -> None:
        import torch

        self._device = device
        self._memory = memory
        self._view = view
        self._host = torch.frombuffer(view, dtype=torch.uint8)

    def read(self, backend: Backend, file: File, offset: int) -> Ticket:
        return _ThenUploaded(backend.read(file, offset, self._view), self._upload)

    def write(self, backend: Backend, file: File, offset: int) -> Ticket:
        self._device.download(self._memory, self._host).wait()
        return backend.write(file, offset, self._view)

    def _upload(self) -> None:
        self._device.upload(self._host, self._memory)[1].wait()


class _ThenUploaded:
    """A read after which the bytes go on to the card; the drive has others to do meanwhile."""

    def __init__(self, ticket: Ticket, upload: Callable[[], None]) -> None:
        self._ticket = ticket
        self._upload = upload

    def done(self) -> bool:
        return False

    def wait(self) -> None:
        self._ticket.wait()
        self._upload()
