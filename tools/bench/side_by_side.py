"""One run of `ssdtune finetune` with its rates measured between its steps.

    python tools/bench/side_by_side.py PROFILE SETTINGS_AS_JSON [COMMAND OF tools/bench/in_memory.py ...]

Prints one JSON document: seconds of the steps, the forecast made of the means of what was measured beside them, and what
a step in memory took in turns with them.
Called by tools/check_forecast.py, which explains why.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ssdtune.config.load import load_config
from ssdtune.hardware.compute import AdamWork
from ssdtune.hardware.drives import KINDS, open_bench
from ssdtune.hardware.effort import FULL
from ssdtune.hardware.memory import map_large_blocks, prefer_huge_pages
from ssdtune.hardware.profile import HardwareProfile, read_profile
from ssdtune.report.progress import Progress

FIRST, LAST = 2, 1
"""Steps at both ends that don't count: the first takes over the weights, the first update finds no moments, the last flushes."""
DRIVE_S = 0.3
REHEARSED = 0.3
"""Of a step, is spent rehearsing after it: the machine changes within seconds, and a step lasts longer than one rehearsal."""
SIZE = 1 << 30


class InMemory:
    """The same training in memory, in a process of its own that makes a step when it is asked."""

    def __init__(self, command: Sequence[str]) -> None:
        self.process = subprocess.Popen(
            [*command, "--on-request"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.seconds: list[float] = []
        self.skipped = ""
        self._take()
        self.seconds.clear()  # the first step loads kernels

    def step(self) -> None:
        if not self.skipped:
            assert self.process.stdin
            print(file=self.process.stdin, flush=True)
            self._take()

    def _take(self) -> None:
        assert self.process.stdout
        line = self.process.stdout.readline()
        try:
            self.seconds.append(float(line))
        except ValueError:
            self.skipped = line.strip() or "it failed"

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


class Meter(Progress):
    """Measures after each step that counts."""

    def __init__(
        self, profile: HardwareProfile, rehearsal: Any, threads: int, in_memory: InMemory | None
    ) -> None:
        super().__init__()
        self.in_memory = in_memory
        self.profile = profile
        self.rehearsal = rehearsal
        self.threads = threads
        self.steps: list[dict[str, Any]] = []
        self.rates: dict[str, list[float]] = {kind: [] for kind in (*KINDS, "adam")}
        self.adam = AdamWork()
        place = profile.directories[0]
        self.setting = (place.backend, place.request_bytes, place.queue_depth)
        self.stack = ExitStack()
        _, self.bench = self.stack.enter_context(
            open_bench(Path(place.path), FULL, direct=True, clock=time.perf_counter)
        )
        assert self.bench is not None
        self.bench.fill(SIZE, float("inf"))

    def show_step(self, metrics: Mapping[str, Any]) -> None:
        if metrics["step"] <= FIRST or metrics["step"] > self.total_steps - LAST:
            return
        self.steps.append(dict(metrics))
        if self.in_memory:
            self.in_memory.step()
        start = time.perf_counter()
        while True:
            self.rehearsal.step()
            if time.perf_counter() - start > REHEARSED * metrics["step_s"]:
                break
        assert self.bench is not None
        for kind in KINDS:
            with self.bench.stream(*self.setting) as stream:
                self.rates[kind].append(stream.run(kind, DRIVE_S, sync=True).rate)
        start = time.perf_counter()
        self.adam.update(self.threads)
        self.rates["adam"].append(self.adam.size / (time.perf_counter() - start))

    def measured(self) -> HardwareProfile:
        """Return the profile with the mean rates; seconds are what add up, so means are harmonic."""
        mean = {name: statistics.harmonic_mean(found) for name, found in self.rates.items()}
        rates = {f"{kind}_bytes_per_s": mean[kind] for kind in KINDS}
        together = self.profile.together and dataclasses.replace(self.profile.together, **rates)
        places = tuple(dataclasses.replace(d, **rates) for d in self.profile.directories)
        fastest = max(self.profile.adam, key=lambda point: point.parameters_per_s)
        adam = (dataclasses.replace(fastest, parameters_per_s=mean["adam"], threads=self.threads),)
        return dataclasses.replace(self.profile, together=together, directories=places, adam=adam)


def main() -> int:
    prefer_huge_pages()
    map_large_blocks()
    profile, settings = read_profile(Path(sys.argv[1])), json.loads(sys.argv[2])

    from ssdtune.train.choose import choose, rates_for, tuned
    from ssdtune.train.finetune import finetune
    from ssdtune.train.forecast import Forecaster
    from ssdtune.train.prepare import prepare
    from ssdtune.train.rehearse import Rehearsal
    from ssdtune.train.rehearsed import times_of

    config = load_config(None, settings)
    # Rehearsals are kept, so the run chooses the same plan.
    chosen = choose(prepare(tuned(config, profile)), profile, times_of=times_of)
    prepared = chosen.prepared
    flop = profile.rates().forward_flop_per_s["bf16" if prepared.dtype.itemsize == 2 else "fp32"]
    threads = max(profile.adam, key=lambda point: point.parameters_per_s).threads
    with Rehearsal(prepared, flop_per_s=flop) as rehearsal:
        rehearsal.step()
        rehearsal.forget()
        in_memory = InMemory(sys.argv[3:]) if sys.argv[3:] else None
        meter = Meter(profile, rehearsal, threads, in_memory)
        with meter.stack:
            if in_memory:
                meter.stack.callback(in_memory.close)
            result = finetune(config, progress=meter)
        times = rehearsal.times
    beside = meter.measured()
    forecast = Forecaster(prepared, rates_for(prepared, beside), times).forecast(prepared.memory)
    step_s = statistics.median(step["step_s"] for step in meter.steps)
    lanes = {
        lane: statistics.median(step["lane_s"][lane] for step in meter.steps)
        for lane in meter.steps[0]["lane_s"]
    }
    found = {
        "step_s": step_s,
        "all_step_s": [step["step_s"] for step in meter.steps],
        "lane_s": lanes,
        "forecast_s": forecast.step_s,
        "forecast_lane_s": forecast.lane_s,
        "forecast_before_s": chosen.forecast.step_s,
        "error": forecast.step_s / step_s - 1,
        "error_before": chosen.forecast.step_s / step_s - 1,
        "in_memory_s": in_memory.seconds if in_memory else [],
        "in_memory_skipped": in_memory.skipped if in_memory else "not asked for",
        "rates": meter.rates,
        "times": dict(times.seconds),
        "plan": prepared.memory.to_dict(),
        "peak_memory_bytes": result.peak_memory_bytes,
    }
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
