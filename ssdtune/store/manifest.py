"""What a checkpoint says about its states: which version of each unit, where it lies, and checksums.

A manifest is JSON that the trainer puts into the checkpoint's folder; the states themselves stay where
they are, in the swap directories. Made and read by `ssdtune.store.store`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from ssdtune.errors import ConfigError, FormatError
from ssdtune.io.backend import ALIGNMENT
from ssdtune.store.checksums import Checksums
from ssdtune.store.layout import (
    StateSpec,
    StoreLayout,
    UnitSpec,
    describe_units,
    versioned_units,
)

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The states of one checkpoint.

    Attributes:
        run_id: The run that wrote them.
        layout: Fingerprint of the layout, which follows from units, weights and stripe_bytes.
        directories: Where they were when the manifest was made, in order.
        units: All units, as `layout.describe_units` gives them.
        versions: Live version of each unit with versioned states; None where nothing was written yet.
        checksums: Unit -> state -> 8 hex digits for each piece of `check_bytes`.
    """

    format: int
    run_id: str
    layout: str
    copies: int
    weights: list[float]
    stripe_bytes: int
    check_bytes: int
    directories: list[str]
    units: list[list[Any]]
    versions: dict[str, int | None]
    checksums: dict[str, dict[str, str]]

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, value: Any, source: str) -> Manifest:
        """Check and take over JSON values.

        Args:
            source: Where they are from, for messages.

        Raises:
            FormatError: They are no manifest, or one of another format.
        """
        remedy = "Resume from an intact checkpoint."
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            found = value.get("format") if isinstance(value, dict) else type(value).__name__
            raise FormatError(f"{source}: the manifest has format {found}, not {FORMAT}. {remedy}")
        names = {item.name for item in fields(cls)}
        if set(value) != names:
            odd = ", ".join(sorted(set(value) ^ names))
            raise FormatError(
                f"{source}: the manifest lacks keys or has unknown ones: {odd}. {remedy}"
            )
        types = {
            "run_id": str,
            "layout": str,
            "copies": int,
            "stripe_bytes": int,
            "check_bytes": int,
        }
        lists = {
            "weights": list,
            "directories": list,
            "units": list,
            "versions": dict,
            "checksums": dict,
        }
        for name, wanted in {**types, **lists}.items():
            if not isinstance(value[name], wanted):
                raise FormatError(f"{source}: the manifest has a bad value of {name}. {remedy}")
        manifest = cls(**value)
        if manifest.check_bytes <= 0 or manifest.check_bytes % ALIGNMENT:
            raise FormatError(f"{source}: the manifest has a bad value of check_bytes. {remedy}")
        for unit, version in manifest.versions.items():
            if version is not None and not (
                isinstance(version, int) and 0 <= version < manifest.copies
            ):
                raise FormatError(f"{source}: unit {unit} has no version {version}. {remedy}")
        return manifest

    def unit_specs(self) -> list[UnitSpec]:
        """Return the units that it was made with.

        Raises:
            FormatError: They are damaged.
        """
        try:
            return [
                UnitSpec(name, tuple(StateSpec(*state) for state in states))
                for name, states in self.units
            ]
        except (TypeError, ValueError) as error:
            raise FormatError(
                f"the manifest of run {self.run_id} has damaged units ({error}). Use an intact checkpoint."
            ) from error

    def build_layout(self, units: Sequence[UnitSpec], copies: int, source: str) -> StoreLayout:
        """Build the layout again for the units of today, whose states without versions may be others.

        Raises:
            ConfigError: The versioned states are others than those of the checkpoint.
            FormatError: The manifest is damaged.
        """
        try:
            layout = StoreLayout.build(units, copies, self.weights, stripe_bytes=self.stripe_bytes)
        except (ValueError, TypeError) as error:
            raise FormatError(f"{source}: {error}. Resume from an intact checkpoint.") from error
        kept = versioned_units(units)
        before, now = describe_units(versioned_units(self.unit_specs())), describe_units(kept)
        if now != before:
            raise ConfigError(
                f"{source} was made with other states: {_difference(before, now)}. "
                "Resume with the model, method and dtype of the run."
            )
        if layout.fingerprint != self.layout or set(self.versions) != {u.name for u in kept}:
            raise FormatError(
                f"{source}: the manifest does not agree with itself (layout {self.layout}, computed "
                f"{layout.fingerprint}). Resume from an intact checkpoint."
            )
        return layout

    def load_checksums(self, layout: StoreLayout, source: str) -> Checksums:
        """Return the checksums of the versions, not yet verified.

        Raises:
            FormatError: They are damaged.
        """
        checksums = Checksums(self.check_bytes)
        for unit, texts in self.checksums.items():
            for state, text in texts.items():
                try:
                    extent_bytes = layout.state(unit, state).extent_bytes
                    checksums.load((unit, state, self.versions[unit] or 0), extent_bytes, text)
                except (ValueError, TypeError, OverflowError) as error:
                    raise FormatError(
                        f"{source}: the manifest has damaged checksums of unit {unit}, {state} ({error}). "
                        "Resume from an intact checkpoint."
                    ) from error
        return checksums


def _difference(before: Sequence[Sequence[Any]], now: Sequence[Sequence[Any]]) -> str:
    old, new = (dict((unit[0], unit[1]) for unit in units) for units in (before, now))
    for unit in [*old, *new]:
        if unit not in new:
            return f"unit {unit} is not there any more"
        if unit not in old:
            return f"unit {unit} is new"
        if old[unit] != new[unit]:
            return f"unit {unit} was {old[unit]}, is {new[unit]}"
    return "the order of units changed"
