"""Run a schedule: every lane in order on a thread of its own, every operation after those it waits for.

The compute lane runs in the calling thread. What an operation does is the caller's business. The first
failure stops all lanes and is raised here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self

from ssdtune.plan.schedule import Lane, Operation, Schedule


@dataclass(slots=True)
class Span:
    """When an operation really ran, in seconds since the schedule began."""

    operation: Operation
    start_s: float
    end_s: float


class _Run:
    """One run of one schedule."""

    def __init__(self, schedule: Schedule, execute: Callable[[Operation], None]) -> None:
        self.execute = execute
        self.done = [False] * len(schedule.operations)
        self.changed = threading.Condition()
        self.failure: BaseException | None = None
        self.beside = 0
        """Lanes that run in other threads now."""
        self.begin = time.perf_counter()
        self.spans: list[Span] = []

    def run_beside(self, operations: list[Operation]) -> None:
        with self.changed:
            self.beside += 1
        self.run_lane(operations)
        with self.changed:
            self.beside -= 1
            self.changed.notify_all()

    def run_lane(self, operations: list[Operation]) -> None:
        for operation in operations:
            if not self._wait_for(operation):
                return
            start = time.perf_counter() - self.begin
            try:
                self.execute(operation)
            except BaseException as error:
                self.fail(error)
                return
            with self.changed:
                self.spans.append(Span(operation, start, time.perf_counter() - self.begin))
                self.done[operation.index] = True
                self.changed.notify_all()

    def _wait_for(self, operation: Operation) -> bool:
        with self.changed:
            self.changed.wait_for(
                lambda: (
                    self.failure is not None or all(self.done[other] for other in operation.after)
                )
            )
            return self.failure is None

    def fail(self, error: BaseException) -> None:
        with self.changed:
            self.failure = self.failure or error
            self.changed.notify_all()

    def join(self) -> None:
        """Wait until no lane works on any buffer, even if interrupted. A lane that begins later stops at once."""
        while True:
            try:
                with self.changed:
                    self.changed.wait_for(
                        lambda: (
                            not self.beside
                            and (self.failure is not None or len(self.spans) == len(self.done))
                        )
                    )
                return
            except BaseException as error:
                self.fail(error)


class Lanes:
    """The threads that lanes run on; a context manager."""

    def __init__(self) -> None:
        self._others = [lane for lane in Lane if lane != Lane.COMPUTE]
        count = len(self._others)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="ssdtune-lane")
        # All threads are started now: one that an interrupt hits while it starts would never be joined.
        started = threading.Barrier(count + 1)
        for _ in range(count):
            self._threads.submit(started.wait)
        started.wait()

    def run(self, schedule: Schedule, execute: Callable[[Operation], None]) -> list[Span]:
        """Run a schedule to its end and return when each operation ran.

        Raises:
            BaseException: What the first operation to fail raised, once all lanes have stopped.
        """
        run = _Run(schedule, execute)
        try:
            for lane in self._others:
                if operations := schedule.lane(lane):
                    self._threads.submit(run.run_beside, operations)
            run.run_lane(schedule.lane(Lane.COMPUTE))
        except BaseException as error:  # an interrupt
            run.fail(error)
        run.join()
        if run.failure is not None:
            raise run.failure
        return run.spans

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
