"""The I/O backend of each stream of a run: the model's own files, states, activations.

Bytes that go straight between drives and a card need a backend that takes its memory; all others may be better off with
another. `ssdtune.hardware.ways` chooses by what was measured, `ssdtune.io.select` opens one backend.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Self

from ssdtune.io.backend import Backend
from ssdtune.io.device_bytes import Memory
from ssdtune.io.select import DEVICE_BACKENDS, open_backend


@dataclass(frozen=True)
class StreamNames:
    """Names of backends, as `open_backend` takes them.

    Attributes:
        weights: Of what is read from the model's own files: frozen weights, and trained ones for the first time.
        states: Of trained weights, optimizer states and gradients.
        activations: Of block inputs and activations that wait on SSD.
    """

    weights: str = "auto"
    states: str = "auto"
    activations: str = "auto"

    @classmethod
    def all(cls, name: str) -> Self:
        """Return the same for every stream."""
        return cls(name, name, name)

    def text(self, *, card: bool) -> str:
        """Return one line for people.

        Args:
            card: What can go straight to a card does.
        """
        streams: dict[str, list[str]] = {}
        for stream, name in vars(self).items():
            straight = card and stream != "states" and name in DEVICE_BACKENDS
            known = "the first backend that works" if name == "auto" else name
            how = f"{known} straight to the card" if straight else known
            streams.setdefault(how, []).append(stream)
        if len(streams) == 1:
            return f"I/O: {next(iter(streams))}"
        parts = [f"{how} for {' and '.join(of)}" for how, of in streams.items()]
        return f"I/O: {'; '.join(parts)}"


class Streams:
    """The open backends of a run, one for each name; a context manager that closes them.

    Attributes:
        weights, states, activations: See `StreamNames`.
    """

    def __init__(
        self, names: StreamNames, *, queue_depth: int | None, request_bytes: int | None
    ) -> None:
        opened: dict[str, Backend] = {}
        with ExitStack() as stack:
            for name in dict.fromkeys(vars(names).values()):
                opened[name] = open_backend(
                    name, queue_depth=queue_depth, request_bytes=request_bytes
                )
                stack.callback(opened[name].close)
            self._stack = stack.pop_all()
        self.weights = opened[names.weights]
        self.states = opened[names.states]
        self.activations = opened[names.activations]

    @property
    def register(self) -> Callable[[Memory], Callable[[], None]] | None:
        """What prepares a card's memory for many transfers; None if no stream reaches it."""
        reaching = [b for b in (self.weights, self.activations) if b.takes_device_memory]
        return reaching[0].register if reaching else None

    def close(self) -> None:
        """Wait for all transfers and release everything."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
