"""A run against its drives' life: who says what they are rated for, what is left, and the budget."""

from __future__ import annotations

import json

from ssdtune.plan.wear import DriveLife, Rating, Wear, rate_drives

TB = 10**12


def test_what_the_run_takes() -> None:
    wear = Wear(12 * 10**9, 12 * TB, 60 * TB, Rating(600 * TB), 5000)
    assert wear.share == 0.1
    assert wear.life_steps == 50_000
    assert wear.text() == (
        "12.0 GB written per step, 12.0 TB per epoch, 60.0 TB in this run: 10 % of the 600 TB that the "
        "drives are rated for; it lasts 50.0k such steps"
    )
    assert wear.warning(0.1) is None
    assert "60.0 TB, 10 % of the 600 TB" in (wear.warning(0.05) or "")
    assert json.loads(json.dumps(wear.to_dict())) == {
        "step_bytes": 12 * 10**9, "epoch_bytes": 12 * TB, "run_bytes": 60 * TB, "num_steps": 5000,
        "budget_bytes": None, "rated_bytes": 600 * TB, "rated_is_assumed": False, "rated_is_read": False,
        "used_share": None, "left_bytes": 600 * TB, "life_steps": 50_000, "share": 0.1, "rewritten_bytes": 0,
        "clipped_share": 0.0,
    }  # fmt: skip


def test_what_is_written_twice_is_said() -> None:
    wear = Wear(12, None, 60, Rating(600), 5, rewritten_bytes=10**9, clipped_share=0.1)
    text = ", if 10 % of the steps are clipped, each of which writes 1.00 GB twice;"
    assert text in wear.text()


def test_a_guess_is_called_one_and_a_step_that_writes_nothing_lasts_for_ever() -> None:
    guess = Wear(0, None, 10**9, Rating(600 * TB, is_assumed=True))
    assert guess.text() == (
        "0 B written per step, 1.00 GB in this run: under 0.01 % of the 600 TB that the drives are rated for "
        "(assumed; set io.rated_terabytes_written)"
    )
    assert guess.life_steps is None


def test_what_drives_tell_of_themselves() -> None:
    # 60 TB are a tenth of the life of the first, 20 TB a twentieth of the second's.
    drives = [DriveLife(0.1, 60 * TB), DriveLife(0.05, 20 * TB)]
    assert rate_drives(None, drives, 2) == Rating(1000 * TB, is_read=True, used_share=0.1)
    # What the user says wins, and what is used up is still shown.
    assert rate_drives(300 * TB, drives, 2) == Rating(300 * TB, used_share=0.1)
    # Too little is used, or one of them does not tell: then it is a guess.
    for unknown in (
        DriveLife(0.04, 20 * TB),
        DriveLife(None, 20 * TB),
        DriveLife(0.3),
        DriveLife(),
    ):
        rating = rate_drives(None, [drives[0], unknown], 3)
        assert (rating.rated_bytes, rating.is_assumed, rating.is_read) == (1800 * TB, True, False)
    assert rate_drives(None, [], 1) == Rating(600 * TB, is_assumed=True)


def test_life_that_is_left() -> None:
    rating = Rating(600 * TB, is_read=True, used_share=0.75)
    wear = Wear(10**12, None, 100 * TB, rating)
    assert rating.left_bytes == 150 * TB
    assert wear.text().endswith(
        "16.7 % of the 600 TB that the drives are rated for (by their own counters); 75 % of that is used up, "
        "what is left lasts 150 such steps"
    )
    assert wear.warning(0.5) is None
    over = Wear(10**12, None, 151 * TB, rating)
    assert "151 TB, 25.2 % of the 600 TB" in (over.warning(0.5) or "")
    assert "of which 150 TB are left" in (over.warning(0.5) or "")
    worn_out = Wear(10**12, None, TB, Rating(600 * TB, used_share=1.2))
    assert (worn_out.rating.left_bytes, worn_out.life_steps) == (0, 0)
    assert "of which 0 B are left" in (worn_out.warning() or "")


def test_the_budget_is_refused_with_numbers_and_ways_to_keep_it() -> None:
    def problem(budget_bytes: int | None, steps: int = 100) -> str | None:
        run_bytes = 3 * 10**9 + steps * 10**10
        return Wear(10**10, None, run_bytes, Rating(), steps, budget_bytes).budget_problem()

    assert problem(None) is None
    assert problem(1003 * 10**9) is None
    text = problem(1003 * 10**9 - 1)
    assert text is not None
    assert text.startswith(
        "the run would write 1.00 TB, io.wear_budget_terabytes allows 1.00 TB: 10.0 GB in each step and 3.00 GB "
        "besides. Raise it, or write less: up to 99 of its 100 steps (max_steps) keep it; larger batches "
    )
    assert text.endswith("with activations: host writes only what it saves.")
    for small in (0, 10**9, 12 * 10**9):
        assert "steps (max_steps)" not in (problem(small) or "")
    assert "up to 1 of its 100 steps" in (problem(13 * 10**9) or "")
