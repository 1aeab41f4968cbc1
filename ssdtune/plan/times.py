"""Seconds that computing takes, by kind of operation: measured on a machine, used by the ledger instead of FLOP.

`ssdtune.train.rehearse` measures them; `ssdtune.plan.ledger` prices schedules with them. Plain numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ssdtune.plan.schedule import Keeps, Kind, Operation

COMPUTING = (
    Kind.GATHER_ROWS, Kind.ENTRY_FORWARD, Kind.FORWARD, Kind.SCORE, Kind.LOSS, Kind.BACKWARD,
    Kind.ENTRY_BACKWARD, Kind.ROWS_BACKWARD,
)  # fmt: skip


@dataclass(frozen=True)
class ComputeTimes:
    """Seconds of one operation on one micro-batch, with the machine to itself.

    Attributes:
        seconds: By `key`: kind of operation, what the block keeps, and whether a gradient is
            added to that of an earlier micro-batch.
    """

    seconds: Mapping[str, float]

    def of(self, operation: Operation) -> float | None:
        """Return the seconds of an operation; None if it isn't computing, or such a one was not measured."""
        if operation.kind not in COMPUTING:
            return None
        first = key(operation.kind, operation.keeps, later=False)
        later = key(operation.kind, operation.keeps, later=True)
        return self.seconds.get(
            later if operation.micro_batch > 0 else first, self.seconds.get(first)
        )


_SUFFIXES = {Keeps.INPUT: "", Keeps.PRODUCTS: "+products", Keeps.ALL: "+kept"}


def key(kind: Kind, keeps: Keeps = Keeps.INPUT, *, later: bool) -> str:
    """Return the name under which the seconds of such operations are kept."""
    return kind.value + _SUFFIXES[keeps] + ("+added" if later else "")
