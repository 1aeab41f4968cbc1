"""When operations really ran where the device computes on its own, after the thread that issued them went on.

`ssdtune.train.lanes` notes when its threads were busy. On a card that is right for reads and writes, but of computing it is
the time that issuing took, and what waits for a card seems to work meanwhile. Events on the card tell the truth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ssdtune.device.base import Device, Event
from ssdtune.plan.schedule import Kind
from ssdtune.train.lanes import Span


def real_spans(
    spans: Sequence[Span], events: Mapping[int, tuple[Event, Event]], device: Device
) -> list[Span]:
    """Return spans in which computing is when the device computed, and others begin once what they wait for was computed.

    Args:
        spans: Of a whole schedule; the device had nothing to do when it began.
        events: Recorded before and after operations of the compute lane, by their index.
    """
    if not events:
        return list(spans)
    first, last = min(events), max(events)
    beginning, end = events[first][0], events[last][1]
    if device.seconds_between(beginning, end) is None:
        return list(spans)
    began_s = next(span.start_s for span in spans if span.operation.index == first)

    def when(event: Event) -> float:
        return began_s + (device.seconds_between(beginning, event) or 0.0)

    computed = {index: (when(start), when(stop)) for index, (start, stop) in events.items()}
    found = []
    for span in spans:
        operation, start_s, end_s = span.operation, span.start_s, span.end_s
        if operation.index in computed:
            start_s, end_s = computed[operation.index]
        else:
            # What leaves a block is copied while the block computes.
            point = 0 if operation.kind == Kind.SAVE_INPUT else 1
            waited_s = max(
                (computed[i][point] for i in operation.after if i in computed), default=0.0
            )
            start_s = min(max(start_s, waited_s), end_s)
        found.append(Span(operation, start_s, end_s))
    return found
