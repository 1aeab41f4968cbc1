"""Prediction against measurement: the words and figures, and when a correction is said."""

from __future__ import annotations

import json
import math

import pytest

from ssdtune.report.accuracy import LEAST_STEPS, QUIET_STEPS, Drift, compare


def test_lanes_are_compared_by_the_median_of_all_but_the_first_step() -> None:
    result = compare(
        3.9,
        {"ssd-read": 1.6, "compute": 2.0, "h2d": 0.0},
        [30.0, 4.0, 4.1, 60.0],
        [
            {"ssd-read": 29.0, "compute": 1.0, "h2d": 0.0},
            {"ssd-read": 2.0, "compute": 2.0, "h2d": 0.0},
            {"ssd-read": 2.1, "compute": 2.0, "h2d": 0.0},
            {"ssd-read": 50.0, "compute": 2.0, "h2d": 0.0},
        ],
    )
    assert result is not None
    assert (result.step.measured_s, result.lanes["ssd-read"].measured_s) == (4.1, 2.1)
    assert result.num_steps == 3
    assert result.text() == (
        "steps took 4.1 s, 3.9 s expected (5% more); ssd-read was busy 2.1 s, 1.6 s expected; "
        "compute was busy 2 s, 2 s expected"
    )
    values = json.loads(json.dumps(result.to_dict()))
    assert values["lane_s"]["ssd-read"]["ratio"] == pytest.approx(2.1 / 1.6)
    assert values["lane_s"]["h2d"] == {"expected_s": 0.0, "measured_s": 0.0, "ratio": None}


def test_lanes_that_only_one_side_knows_are_compared_with_nothing() -> None:
    result = compare(2.0, {"a": 1.0}, [2.0, 2.0], [{"b": 1.5}, {"b": 1.5}])
    assert result is not None
    assert result.text() == (
        "steps took 2 s, 2 s expected; a was busy 0 ms, 1 s expected; b was busy 1.5 s, 0 ms expected"
    )


def test_a_single_step_counts_and_is_named() -> None:
    result = compare(2.0, {"a": 1.0}, [1.0], [{"a": 1.0}])
    assert result is not None and result.first_step_only and result.num_steps == 1
    assert "(50% less)" in result.text()
    assert "only the first step ran" in result.text()


def test_nothing_is_compared_without_steps() -> None:
    assert compare(2.0, {}, [], []) is None
    with pytest.raises(ValueError, match="2 steps but 1 times of lanes"):
        compare(2.0, {}, [1.0, 1.0], [{}])


def feed(drift: Drift, seconds: list[float], first: int = 1) -> list[tuple[int, str]]:
    said = [(step, drift.add(step, time)) for step, time in enumerate(seconds, first)]
    return [(step, text) for step, text in said if text is not None]


def test_steps_as_predicted_are_not_worth_a_word() -> None:
    assert feed(Drift(10.0, 100), [99.0, *[11.4, 8.6, 10.0] * 30]) == []


def test_outliers_and_the_first_step_change_nothing() -> None:
    seconds = [10.0] * 60
    seconds[0] = 100.0
    for step in (3, 10, 11, 12, 30, 31, 59):
        seconds[step] = 500.0
    assert feed(Drift(10.0, 100), seconds) == []


def test_a_correction_says_the_new_figure_and_the_rest_of_the_run() -> None:
    drift = Drift(10.0, 104)
    ((step, text),) = feed(drift, [10.0] * 1 + [12.0] * 40)
    assert step == 1 + LEAST_STEPS
    assert text == (
        "steps now take 12 s, 10 s expected (20% more); the other 100 take about 20 min 00 s"
    )
    assert drift.step_s == 12.0
    assert drift.remaining_s(101) == 36.0 and drift.remaining_s(104) == drift.remaining_s(200) == 0


def test_corrections_are_compared_with_what_was_last_said_and_wait_their_turn() -> None:
    drift = Drift(10.0, 1000)
    said = feed(drift, [10.0] + [12.0] * 3 + [20.0] * 60)
    assert [step for step, _ in said] == [4, 4 + QUIET_STEPS]
    assert said[1][1].startswith(
        "steps now take 20 s, 12 s before and 10 s expected (2 times that);"
    )
    assert feed(drift, [10.0] * 7, first=65)[0][1] == (
        "steps now take 10 s, 20 s before and 10 s expected; the other 932 take about 2 h 35 min"
    )


def test_faster_steps_and_the_last_one_and_broken_clocks() -> None:
    drift = Drift(10.0, 5)
    assert feed(drift, [10.0, math.nan, math.inf, 5.0, 5.0]) == []
    assert drift.add(5, 5.0) == "steps now take 5 s, 10 s expected (50% less)"
    for wrong in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="finite time above 0"):
            Drift(wrong, 5)
