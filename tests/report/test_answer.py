"""How fast a step is, what holds it up and what would help, in words."""

from __future__ import annotations

from ssdtune.report.answer import gain_line, step_line, time_lines


def test_what_a_step_learns() -> None:
    assert step_line(2, 8, 16384) == (
        "step      16.4k tokens in 16 rows: per_device_train_batch_size 2, gradient_accumulation_steps 8"
    )
    assert "500 tokens in 1 row:" in step_line(1, 1, 500)


def test_what_holds_a_step_up() -> None:
    lanes = {"ssd-read": 3.0, "compute": 9.5, "clip": 0.001}
    time, lane, limit = time_lines(10.0, 2000, lanes, {"ssd": 3.0, "cores": 9.8})
    assert time.startswith("time      10 s per step, 200 tokens/s")
    assert lane == "lanes     compute 9.5 s (95%), ssd-read 3 s (30%); they work at the same time"
    assert limit == "limit     the processor, which computes here: busy 98% of a step"
    assert time_lines(10.0, 2000, lanes, {"ssd": 6.0})[-1] == (
        "limit     nothing alone: the busiest, the drives, works 60% of a step; some of the rest is waiting for each other"
    )
    assert len(time_lines(10.0, 2000, {}, {})) == 2


def test_what_would_help() -> None:
    assert gain_line({"twice the drives": 1.5, "twice the memory": 1.01, "a card": 2.5}) == (
        "faster    tokens/s with a card 2.5 times as many, twice the drives +50%; no more with twice the memory"
    )
    assert (
        gain_line({"twice the drives": 1.0}) == "faster    no more tokens/s with twice the drives"
    )
