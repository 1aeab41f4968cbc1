"""Rehearsals: what they measure, how it is scaled, when they are made again; a forecast uses them."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ssdtune.errors import SsdtuneError
from ssdtune.hardware.known import profile_path
from ssdtune.plan.schedule import Keeps, Kind, Lane, Operation
from ssdtune.plan.times import ComputeTimes, key
from ssdtune.train import rehearsed
from ssdtune.train.forecast import Forecaster
from ssdtune.train.prepare import Prepared
from ssdtune.train.rehearse import Rehearsal, rehearse
from tests.train.test_choose import machine
from tests.train.test_forecast import RATES
from tests.train.test_forecast import _prepared as prepared_run

pytestmark = pytest.mark.usefixtures("short_rehearsals")
ALL = [
    "backward",
    "backward+kept",
    "backward+products",
    "entry-backward",
    "entry-forward",
    "forward",
    "forward+kept",
    "forward+products",
    "loss",
]
AGAIN = [name for name in ALL if "+" not in name]
ENDS = [name for name in AGAIN if name not in ("forward", "backward")]


def _prepared(tmp_path: Path, **changes: Any) -> Prepared:
    roomy = {"host_cache": None, "gradient_accumulation_steps": 1}
    return prepared_run(tmp_path, **(roomy | changes))


class Ticks:
    """A clock that goes on by one whenever it is read."""

    def __init__(self) -> None:
        self.read = itertools.count()

    def __call__(self) -> float:
        return float(next(self.read))


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, ALL),
        # with so small a model, what backward needs takes no more than results of products
        ({"method": "lora"}, [name for name in ALL if "products" not in name]),
        ({"dtype": "bf16", "host_cache": 0}, AGAIN),
        ({"recompute": "always"}, AGAIN),
        ({"recompute": "never"}, sorted([*ENDS, "forward+kept", "backward+kept"])),
        ({"recompute": "cheap"}, sorted([*ENDS, "forward+products", "backward+products"])),
        (
            {"gradient_accumulation_steps": 3},
            sorted(name + added for name in ALL for added in ("", "+added")),
        ),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_every_kind_of_computing_of_the_run_is_measured(
    tmp_path: Path, changes: dict[str, Any], names: list[str]
) -> None:
    times = rehearse(_prepared(tmp_path, **changes), flop_per_s=1e9)
    assert sorted(times.seconds) == names
    assert all(seconds > 0 for seconds in times.seconds.values())


def test_a_run_that_is_left_alone_by_it(tmp_path: Path) -> None:
    prepared = _prepared(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    held = prepared.device.memory().held_bytes
    rehearse(prepared, flop_per_s=1e9)
    assert sorted(tmp_path.rglob("*")) == before
    assert prepared.device.memory().held_bytes == held


def test_a_micro_batch_that_takes_too_long_is_cut_and_its_times_are_scaled(tmp_path: Path) -> None:
    whole, cut = (
        rehearse(_prepared(tmp_path), flop_per_s=flop, seconds=1e9, clock=Ticks())
        for flop in (1e30, 1e-30)
    )
    # By this clock all operations take as long, so what differs is the scale.
    assert set(whole.seconds.values()) == {min(whole.seconds.values())}
    assert min(cut.seconds.values()) > min(whole.seconds.values())


def test_the_first_step_counts_only_where_there_is_no_time_for_another(tmp_path: Path) -> None:
    clock, prepared = Ticks(), _prepared(tmp_path)
    with Rehearsal(prepared, flop_per_s=1e9, clock=clock) as rehearsal:
        rehearsal.step()
    first, clock = clock(), Ticks()
    times = rehearse(prepared, flop_per_s=1e9, seconds=first / 3, clock=clock)
    assert sorted(times.seconds) == ALL
    assert clock() < 1.5 * first  # there was only one


def test_what_would_take_too_long_is_given_up_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By a clock that goes on by far more than the time that there is. Nobody waits for it again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    prepared, clock = _prepared(tmp_path), Ticks()
    held = prepared.device.memory().held_bytes
    hasty = partial(rehearse, seconds=1e-3, clock=clock)
    monkeypatch.setattr(rehearsed, "rehearse", hasty)
    assert rehearsed.times_of(prepared, machine()) is None
    assert "counts FLOP instead" in caplog.text
    assert prepared.device.memory().held_bytes == held
    read = clock()
    assert rehearsed.times_of(prepared, machine()) is None
    assert clock() == read + 1


def test_times_are_those_of_the_operation() -> None:
    times = ComputeTimes(
        {
            key(Kind.FORWARD, later=False): 1.0,
            key(Kind.BACKWARD, later=False): 2.0,
            key(Kind.BACKWARD, Keeps.ALL, later=True): 3.0,
        }
    )

    def seconds(kind: Kind, **changes: Any) -> float | None:
        return times.of(Operation(0, Lane.COMPUTE, kind, "block.0", **changes))

    assert seconds(Kind.FORWARD) == 1.0
    assert seconds(Kind.FORWARD, micro_batch=1) == 1.0  # nothing is added in forward
    assert seconds(Kind.BACKWARD) == 2.0
    assert seconds(Kind.BACKWARD, keeps=Keeps.ALL, micro_batch=1) == 3.0
    assert seconds(Kind.BACKWARD, keeps=Keeps.ALL) is None
    assert seconds(Kind.CLIP) is None


@pytest.mark.parametrize(
    ("policy", "suffix"), [("always", ""), ("cheap", "+products"), ("never", "+kept")]
)
def test_a_forecast_takes_the_measured_seconds(tmp_path: Path, policy: str, suffix: str) -> None:
    prepared = _prepared(tmp_path, recompute=policy, max_grad_norm=0)
    blocks = prepared.layout.num_blocks
    times = ComputeTimes(
        {
            "entry-forward": 1.0, f"forward{suffix}": 10.0, "loss": 100.0, f"backward{suffix}": 1000.0,
            "entry-backward": 0.5,
        }
    )  # fmt: skip
    result = Forecaster(prepared, RATES, times).forecast(prepared.memory)
    assert result.lane_s["compute"] == pytest.approx(101.5 + blocks * 1010, rel=1e-3)


def test_rehearsals_are_kept_until_something_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made: list[str] = []

    def record(prepared: Prepared, *, flop_per_s: float) -> ComputeTimes:
        made.append(str(prepared.dtype))
        return ComputeTimes({"forward": 1.0 + len(made)})

    monkeypatch.setattr(rehearsed, "rehearse", record)
    prepared, here = _prepared(tmp_path), machine()
    first = rehearsed.times_of(prepared, here)
    assert rehearsed.times_of(prepared, here) == first and len(made) == 1
    changed = [
        _prepared(tmp_path, dtype="bf16"),
        _prepared(tmp_path, method="lora"),
        _prepared(tmp_path, per_device_train_batch_size=1),
        _prepared(tmp_path, gradient_accumulation_steps=2),
        _prepared(tmp_path, host_cache=0),
    ]
    for count, other in enumerate(changed, 2):
        rehearsed.times_of(other, here)
        assert len(made) == count
    rehearsed.times_of(prepared, replace(here, measured_at="later"))
    assert len(made) == len(changed) + 2
    file = profile_path().with_name("rehearsals.json")
    assert len(json.loads(file.read_text())) == len(made)
    for damage in ("", "[]", '{"a": 1}', "{"):
        file.write_text(damage)
        assert rehearsed.times_of(prepared, here) is not None
    assert len(made) == len(changed) + 6


def test_a_rehearsal_that_fails_costs_the_forecast_nothing_but_its_accuracy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def fail(*_: Any, **__: Any) -> ComputeTimes:
        raise torch.OutOfMemoryError("no memory for this")

    monkeypatch.setattr(rehearsed, "rehearse", fail)
    assert rehearsed.times_of(_prepared(tmp_path), machine()) is None
    assert "no memory for this" in caplog.text
    assert issubclass(SsdtuneError, Exception) and not profile_path().exists()
