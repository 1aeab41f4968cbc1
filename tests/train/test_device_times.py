"""Spans on a device that computes later than it is told to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ssdtune.device.cpu import CpuDevice
from ssdtune.plan.schedule import Kind, Lane, Schedule
from ssdtune.train.device_times import real_spans
from ssdtune.train.lanes import Span


@dataclass
class At:
    """An event at a time of the card's own clock."""

    seconds: float

    def wait(self) -> None:
        pass


class Card(CpuDevice):
    def seconds_between(self, first: Any, last: Any) -> float | None:
        return float(last.seconds - first.seconds)


def test_spans_are_when_the_card_computed_and_what_waited_for_it_began_after() -> None:
    schedule = Schedule()
    load = schedule.add(Lane.SSD_READ, Kind.LOAD, "block.0")
    first = schedule.add(Lane.COMPUTE, Kind.FORWARD, "block.0", after=(load,))
    second = schedule.add(Lane.COMPUTE, Kind.BACKWARD, "block.0", after=(first,))
    collect = schedule.add(Lane.D2H, Kind.COLLECT_GRADIENT, "block.0", after=(second,))
    early = schedule.add(Lane.SSD_WRITE, Kind.SAVE_GRADIENT, "block.0", after=(first,))
    leaves = schedule.add(Lane.D2H, Kind.SAVE_INPUT, "block.0", after=(first,))
    issued = {load: (0.0, 5.0), first: (5.0, 5.1), second: (5.1, 5.2), collect: (5.2, 9.5), early: (5.1, 6.0), leaves: (5.1, 6.0)}  # fmt: skip
    spans = [Span(schedule.operations[index], *times) for index, times in issued.items()]
    events: Any = {first: (At(100.0), At(101.5)), second: (At(101.5), At(103.5))}

    found = {span.operation.index: span for span in real_spans(spans, events, Card())}
    assert {index: (span.start_s, span.end_s) for index, span in found.items()} == {
        load: (0.0, 5.0), first: (5.0, 6.5), second: (6.5, 8.5), collect: (8.5, 9.5), early: (6.0, 6.0), leaves: (5.1, 6.0),
    }  # fmt: skip
    assert real_spans(spans, events, CpuDevice()) == spans
    assert real_spans(spans, {}, Card()) == spans
