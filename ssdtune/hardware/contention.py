"""How much AdamW and the drives slow each other down when both work, as they do in a step.

They share the memory's bandwidth, and where requests cost much processor time also the cores. Each is measured
alone and both at once, in alternating rounds, so that a machine that is busy otherwise spoils all three alike.
"""

from __future__ import annotations

import statistics
import threading
from dataclasses import dataclass, field

from ssdtune.hardware.compute import AdamWork, num_cores
from ssdtune.hardware.figures import Contention, DirectoryProfile
from ssdtune.hardware.stream import Bench, Clock, Moved, Stream

ROUNDS = 3


def measure_contention(
    profile: DirectoryProfile, bench: Bench, *, seconds: float, work: AdamWork, clock: Clock
) -> Contention:
    """Measure AdamW with all cores and mixed I/O with a directory's best settings.

    Raises:
        StorageError: The drive failed.
    """
    each = seconds / (3 * ROUNDS)
    threads = num_cores()
    adam_alone, adam_both, io_alone, io_both = [], [], [], []
    with bench.stream(profile.backend, profile.request_bytes, profile.queue_depth) as stream:
        for _ in range(ROUNDS):
            io_alone.append(stream.run("mixed", each).rate)
            adam_alone.append(_adam_rate(work, threads, each, clock))
            background = _Background(stream)
            try:
                adam_both.append(_adam_rate(work, threads, each, clock))
            finally:
                background.end()
            io_both.append(background.moved().rate)
    return Contention(
        threads=threads,
        adam_parameters_per_s=statistics.median(adam_alone),
        adam_with_io_parameters_per_s=statistics.median(adam_both),
        io_bytes_per_s=statistics.median(io_alone),
        io_with_adam_bytes_per_s=statistics.median(io_both),
    )


def _adam_rate(work: AdamWork, threads: int, seconds: float, clock: Clock) -> float:
    start, updates = clock(), 0
    while True:
        work.update(threads)
        updates += 1
        taken = clock() - start
        if taken >= seconds:
            return updates * work.size / max(taken, 1e-9)


@dataclass
class _Background:
    """Mixed I/O on a thread of its own until `end`."""

    stream: Stream
    _stop: threading.Event = field(default_factory=threading.Event)
    _result: list[Moved | BaseException] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result.append(self.stream.run("mixed", float("inf"), stop=self._stop.is_set))
        except BaseException as error:
            self._result.append(error)

    def end(self) -> None:
        self._stop.set()
        self._thread.join()

    def moved(self) -> Moved:
        result = self._result[0]
        if isinstance(result, BaseException):
            raise result
        return result
