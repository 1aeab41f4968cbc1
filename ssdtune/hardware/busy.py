"""What else the machine did while it was measured: the cores that other programs used, or other virtual machines.

Read from the kernel's counters at the begin and the end; nothing is slowed down or refused because of it. Who else
uses a drive cannot be seen this way.
"""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

from ssdtune.hardware.figures import OtherLoad
from ssdtune.hardware.stream import Clock

_NOTICED = 0.05
"""Share of the cores above which it is said; an idle system's own services take less."""


class BusyWatch:
    """Adds up from its making on.

    Args:
        root: Directory that stands for `/`.
    """

    def __init__(self, *, clock: Clock = time.perf_counter, root: Path = Path("/")) -> None:
        self._clock, self._file = clock, root / "proc/stat"
        self._begin_s, self._begin = clock(), self._counters()

    def load(self) -> OtherLoad | None:
        """Return the mean load by others until now; None where the kernel does not say."""
        seconds, end = self._clock() - self._begin_s, self._counters()
        if self._begin is None or end is None or seconds <= 0:
            return None
        programs, stolen = (
            max(after - before, 0.0) / seconds
            for before, after in zip(self._begin, end, strict=True)
        )
        cores = len(os.sched_getaffinity(0))
        return OtherLoad(
            cores=cores,
            programs_cores=round(min(programs, cores), 2),
            stolen_cores=round(min(stolen, cores), 2),
        )

    def _counters(self) -> tuple[float, float] | None:
        """Return seconds of other programs on the cores that this process may use, and those stolen from them.

        Only time in programs is counted: what the kernel does includes the work for our own transfers.
        """
        cores = os.sched_getaffinity(0)
        programs = stolen = 0
        try:
            for line in self._file.read_text().splitlines():
                name, *ticks = line.split()
                if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cores:
                    programs += int(ticks[0]) + int(ticks[1])  # user, nice
                    stolen += int(ticks[7])
        except (OSError, ValueError, IndexError):
            return None
        tick = os.sysconf("SC_CLK_TCK")
        usages = (
            resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        )
        return programs / tick - sum(usage.ru_utime for usage in usages), stolen / tick


def busy_warning(load: OtherLoad | None) -> str:
    """Return what to say of a load that spoils figures; empty if there was none."""
    if load is None or load.programs_cores + load.stolen_cores < _NOTICED * load.cores:
        return ""
    facts = [
        text
        for cores, text in (
            (load.programs_cores, f"other programs used {load.programs_cores:.1f}"),
            (load.stolen_cores, f"other virtual machines on its host took {load.stolen_cores:.1f}"),
        )
        if cores >= 0.05
    ]
    return (
        f"{' and '.join(facts)} of {load.cores} cores while this was measured; figures are too low. End them and "
        "measure again: ssdtune profile --force"
    )
