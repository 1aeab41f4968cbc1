"""What others did on the cores: from made-up counters of the kernel, and from the real ones."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from ssdtune.hardware.busy import BusyWatch, busy_warning
from ssdtune.hardware.figures import OtherLoad

CORES = sorted(os.sched_getaffinity(0))
FOREIGN = max(CORES) + 1
TICK = os.sysconf("SC_CLK_TCK")


def write_counters(root: Path, *, programs_s: float, stolen_s: float, kernel_s: float = 0) -> None:
    """Give all the load to the first core that this process may use, and much to one that it may not."""
    rows = {core: (0.0, 0.0, 0.0) for core in CORES}
    rows[CORES[0]] = (programs_s, kernel_s, stolen_s)
    rows[FOREIGN] = (programs_s + 1e6, 0, 0)
    lines = [
        f"cpu{core} {user * TICK:.0f} 0 {system * TICK:.0f} 0 0 0 0 {steal * TICK:.0f} 0 0"
        for core, (user, system, steal) in rows.items()
    ]
    (root / "proc").mkdir(exist_ok=True)
    (root / "proc/stat").write_text("\n".join(["cpu 1 2 3 4 5 6 7 8 9 10", *lines, "ctxt 5", ""]))


def test_time_of_others_is_told_from_that_of_the_kernel_and_other_cores(tmp_path: Path) -> None:
    clock = itertools.chain([0.0, 10.0]).__next__
    write_counters(tmp_path, programs_s=1000, stolen_s=100)
    watch = BusyWatch(clock=clock, root=tmp_path)
    write_counters(tmp_path, programs_s=1008, stolen_s=101, kernel_s=50)
    load = watch.load()
    assert load is not None and load.cores == len(CORES)
    assert 0.7 < load.programs_cores <= 0.8  # less what this process used in between
    assert load.stolen_cores == 0.1


def test_our_own_work_is_nobody_elses(tmp_path: Path) -> None:
    write_counters(tmp_path, programs_s=1000, stolen_s=0)
    watch = BusyWatch(clock=itertools.count().__next__, root=tmp_path)
    begin = os.times().user
    while os.times().user - begin < 0.2:
        sum(range(10_000))
    write_counters(tmp_path, programs_s=1000 + os.times().user - begin, stolen_s=0)
    load = watch.load()
    assert load is not None and load.programs_cores <= 0.02


def test_the_real_counters_are_read() -> None:
    load = BusyWatch().load()
    assert load is not None and 0 <= load.programs_cores <= load.cores == len(CORES)


def test_where_the_kernel_does_not_say(tmp_path: Path) -> None:
    assert BusyWatch(root=tmp_path).load() is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/stat").write_text(f"cpu{CORES[0]} 1 2\n")
    assert BusyWatch(root=tmp_path).load() is None


def test_what_is_said() -> None:
    assert busy_warning(None) == ""
    assert busy_warning(OtherLoad(cores=64, programs_cores=1.0, stolen_cores=0.0)) == ""
    busy = busy_warning(OtherLoad(cores=2, programs_cores=1.3, stolen_cores=0.0))
    assert busy.startswith(
        "other programs used 1.3 of 2 cores while this was measured; figures are too low"
    )
    both = busy_warning(OtherLoad(cores=2, programs_cores=1.3, stolen_cores=0.4))
    assert "used 1.3 and other virtual machines on its host took 0.4 of 2 cores" in both
