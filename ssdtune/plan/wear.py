"""What a run takes of its drives' life: bytes written against what the drives are rated for.

Plain numbers: `ssdtune.plan.budget` counts the bytes, `ssdtune.train.disk` asks the drives what they tell of themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ssdtune.units import format_count, format_disk

CONSUMER_RATED_BYTES = 600 * 10**12
"""Bytes that consumer drives of 1 TB are usually rated for; the data sheet calls it TBW."""
LEAST_USED_SHARE = 0.05
"""Drives count their used life in whole percents; from less no rating can be told."""


@dataclass(frozen=True)
class DriveLife:
    """What a drive tells of itself; None where it doesn't.

    Attributes:
        used_share: Share of the rated life that is used up; may exceed 1.
        written_bytes: Written in its life.
        stated_bytes: What its maker lets be written.
    """

    used_share: float | None = None
    written_bytes: int | None = None
    stated_bytes: int | None = None

    @property
    def rated_bytes(self) -> int | None:
        """What the drive is rated for: as stated, or by what it tells; None if that cannot be said."""
        if self.stated_bytes is not None:
            return self.stated_bytes
        if self.written_bytes is None or (self.used_share or 0.0) < LEAST_USED_SHARE:
            return None
        return round(self.written_bytes / self.used_share) or None  # type: ignore[operator]


@dataclass(frozen=True)
class Rating:
    """What the drives of a run are rated for, together.

    Attributes:
        is_assumed: Nobody said so; it is a guess.
        is_read: It follows from what the drives tell of themselves.
        used_share: Share of the rated life that the most worn drive has behind it; None if unknown.
    """

    rated_bytes: int = CONSUMER_RATED_BYTES
    is_assumed: bool = False
    is_read: bool = False
    used_share: float | None = None

    @property
    def left_bytes(self) -> int:
        """What may still be written within the rating."""
        return round(self.rated_bytes * max(0.0, 1.0 - (self.used_share or 0.0)))

    def text(self) -> str:
        """Return what the drives are rated for, and who says so."""
        text = f"the {format_disk(self.rated_bytes)} that the drives are rated for"
        if self.is_read:
            text += " (by their own counters)"
        if self.is_assumed:
            text += " (assumed; set io.rated_terabytes_written)"
        return text


def rate_drives(
    given_bytes: int | None, drives: Sequence[DriveLife], num_directories: int
) -> Rating:
    """Return the rating of a run's drives.

    Args:
        given_bytes: What the user says; wins over everything.
        drives: The drives under the directories, as far as known.
        num_directories: Swap directories; without better knowledge each is taken for a consumer drive.
    """
    shares = [drive.used_share for drive in drives if drive.used_share is not None]
    used = max(shares, default=None)
    if given_bytes is not None:
        return Rating(given_bytes, used_share=used)
    read = [drive.rated_bytes for drive in drives]
    known = [size for size in read if size is not None]
    if known and len(known) == len(read):
        stated = all(drive.stated_bytes is not None for drive in drives)
        return Rating(sum(known), is_read=not stated, used_share=used)
    return Rating(CONSUMER_RATED_BYTES * num_directories, is_assumed=True, used_share=used)


@dataclass(frozen=True)
class Wear:
    """What a run writes, against what the drives are rated for.

    Attributes:
        step_bytes, epoch_bytes, run_bytes: Bytes written, on all drives together; None if unknown.
        num_steps: Steps of the run.
        budget_bytes: The most that the user lets the run write; None for no limit.
        rewritten_bytes: What a step writes twice if it is clipped after speculating. All figures above take
            `clipped_share` of the steps for such.
    """

    step_bytes: int
    epoch_bytes: int | None
    run_bytes: int
    rating: Rating = Rating()
    num_steps: int = 1
    budget_bytes: int | None = None
    rewritten_bytes: int = 0
    clipped_share: float = 0.0

    @property
    def share(self) -> float:
        """Share of the drives' rated life that the run takes."""
        return self.run_bytes / self.rating.rated_bytes

    @property
    def life_steps(self) -> int | None:
        """Steps after which the rated life is used up; None if a step writes nothing."""
        return self.rating.left_bytes // self.step_bytes if self.step_bytes else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        rating = self.rating
        return {
            **{name: value for name, value in asdict(self).items() if name != "rating"},
            "rated_bytes": rating.rated_bytes,
            "rated_is_assumed": rating.is_assumed,
            "rated_is_read": rating.is_read,
            "used_share": rating.used_share,
            "left_bytes": rating.left_bytes,
            "life_steps": self.life_steps,
            "share": self.share,
        }

    def text(self) -> str:
        """Return one line for people."""
        epoch = "" if self.epoch_bytes is None else f"{format_disk(self.epoch_bytes)} per epoch, "
        text = (
            f"{format_disk(self.step_bytes)} written per step, {epoch}"
            f"{format_disk(self.run_bytes)} in this run: {percent(self.share)} of {self.rating.text()}"
        )
        if self.rewritten_bytes:
            text += (
                f", if {percent(self.clipped_share)} of the steps are clipped, each of which writes "
                f"{format_disk(self.rewritten_bytes)} twice"
            )
        used = self.rating.used_share
        if used is not None:
            text += f"; {percent(used)} of that is used up"
        if self.life_steps is None:
            return text
        lasts = f"lasts {format_count(self.life_steps)} such steps"
        return f"{text}, what is left {lasts}" if used is not None else f"{text}; it {lasts}"

    def warning(self, limit: float = 0.05) -> str | None:
        """Return a warning if the run takes more than this share of the drives' life, else None."""
        beyond = self.run_bytes > self.rating.left_bytes
        if self.share <= limit and not beyond:
            return None
        left = ""
        if beyond and self.rating.used_share is not None:
            left = f", of which {format_disk(self.rating.left_bytes)} are left"
        return (
            f"this run writes {format_disk(self.run_bytes)}, {percent(self.share)} of {self.rating.text()}{left}. "
            f"{_REMEDIES}."
        )

    def budget_problem(self) -> str | None:
        """Return why the run breaks the wear budget, with what would keep it; None if it does not."""
        if self.budget_bytes is None or self.run_bytes <= self.budget_bytes:
            return None
        once = self.run_bytes - self.step_bytes * self.num_steps
        steps = (self.budget_bytes - once) // self.step_bytes if self.step_bytes else 0
        fewer = (
            f"up to {steps} of its {self.num_steps} steps (max_steps) keep it; "
            if steps > 0
            else ""
        )
        return (
            f"the run would write {format_disk(self.run_bytes)}, io.wear_budget_terabytes allows "
            f"{format_disk(self.budget_bytes)}: {format_disk(self.step_bytes)} in each step and "
            f"{format_disk(once)} besides. Raise it, or write less: {fewer}{_REMEDIES[0].lower()}{_REMEDIES[1:]}."
        )


_REMEDIES = (
    "Larger batches (gradient_accumulation_steps) write less per token, more host_memory less per step; "
    "method: lora with activations: host writes only what it saves"
)


def percent(share: float) -> str:
    """Format a share, such as `12.3 %`."""
    return f"{share * 100:.3g} %" if share >= 1e-4 or share == 0 else "under 0.01 %"
