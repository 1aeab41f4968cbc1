"""How fast operations are that use the same resources at the same time.

An operation uses all of its resources at one pace, as a pipeline of small chunks does, so alone it takes as long as
its largest figure. Where a resource is short, everybody that uses it runs at the same fraction of their own pace
(max-min fair sharing); what others leave unused is taken up.

The blocks of a model cost the same, so only few sets of operations ever run side by side. Operations of equal cost are
of one **kind**, a number, and the paces of each set of kinds are computed once. Read `ssdtune.plan.simulator` next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

EPSILON = 1e-12
"""Shares of an operation and of a resource, and seconds, below this count as nothing."""
IDLE = -1
"""Stands for the kind of a lane that runs nothing."""


class Sharing:
    """The paces of a schedule's operations.

    Args:
        costs: Seconds for which each operation occupies each resource if it runs alone.

    Attributes:
        kinds: Of each operation.
        takes_time: Of each kind: whether it lasts longer than nothing.
        known: What `paces` has returned, by what it was asked; for callers that cannot afford the call.

    Raises:
        ValueError: A number of seconds is negative, infinite or none.
    """

    def __init__(self, costs: Sequence[Mapping[str, float]]) -> None:
        self.kinds: list[int] = []
        self._seconds: list[tuple[tuple[str, float], ...]] = []  # of each kind
        kind_of: dict[tuple[tuple[str, float], ...], int] = {}
        kind_of_object: dict[int, int] = {}  # operations that are alike mostly have the same cost
        for index, cost in enumerate(costs):
            kind = kind_of_object.get(id(cost))
            if kind is None:
                key = tuple(cost.items())
                kind = kind_of_object[id(cost)] = kind_of.setdefault(key, len(kind_of))
                if kind == len(self._seconds):
                    if not all(0 <= seconds < float("inf") for _, seconds in key):
                        raise ValueError(f"operation {index} takes {dict(key)} seconds")
                    self._seconds.append(key)
            self.kinds.append(kind)
        self._alone_s = [max((s for _, s in key), default=0.0) for key in self._seconds]
        self._demands = [
            {name: s / alone for name, s in key if s > 0} if alone > EPSILON else {}
            for key, alone in zip(self._seconds, self._alone_s)
        ]
        self.takes_time = [bool(demand) for demand in self._demands]
        self.known: dict[tuple[int, ...], list[tuple[int, float]]] = {}

    def occupied_s(self) -> dict[str, float]:
        """Return the seconds for which all operations together occupy each resource."""
        counts = Counter(self.kinds)
        result: dict[str, float] = {}
        for kind, key in enumerate(self._seconds):
            for name, seconds in key:
                result[name] = result.get(name, 0.0) + counts[kind] * seconds
        return result

    def paces(self, running: tuple[int, ...]) -> list[tuple[int, float]]:
        """Return the busy lanes, each with the share of its operation that gets done in a second.

        Args:
            running: Kind of what each lane runs, `IDLE` for none. Kinds that take no time do not run.
        """
        paces = self.known.get(running)
        if paces is None:
            lanes = [lane for lane, kind in enumerate(running) if kind != IDLE]
            speeds = fair_speeds([self._demands[running[lane]] for lane in lanes])
            paces = [(lane, s / self._alone_s[running[lane]]) for lane, s in zip(lanes, speeds)]
            self.known[running] = paces
        return paces


def fair_speeds(demands: Sequence[Mapping[str, float]]) -> list[float]:
    """Return how fast each user is, compared with running alone.

    All speed up together, each relative to its pace alone, until a resource is used up. Its users stay at
    that speed, the others go on.

    Args:
        demands: The share of each resource that each user takes if it runs alone; 1 of at least one.
    """
    speeds = [1.0] * len(demands)
    room: dict[str, float] = {}
    level = 0.0
    speeding = list(range(len(demands)))
    while speeding:
        use: dict[str, float] = {}
        for user in speeding:
            for name, share in demands[user].items():
                use[name] = use.get(name, 0.0) + share
        limits = {name: room.get(name, 1.0) / all_ for name, all_ in use.items() if all_ > EPSILON}
        tightest = min(limits, key=limits.__getitem__)
        level = max(level, limits[tightest])  # rounding must not let it fall
        others = []
        for user in speeding:
            if tightest not in demands[user]:
                others.append(user)
                continue
            speeds[user] = level
            for name, share in demands[user].items():
                room[name] = room.get(name, 1.0) - level * share
        speeding = others
    return speeds
