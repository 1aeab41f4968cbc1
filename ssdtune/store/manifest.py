"""What a checkpoint says about its states: which version of each unit, where it lies, and checksums.

A manifest is JSON that the trainer puts into the checkpoint's folder; the states themselves stay where
they are, in the swap directories. Made and read by `ssdtune.store.store`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from ssdtune.errors import ConfigError, FormatError
from ssdtune.store.layout import StoreLayout, UnitSpec, describe_units

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The states of one checkpoint.

    Attributes:
        run_id: The run that wrote them.
        layout: Fingerprint of the layout, which follows from units, weights and stripe_bytes.
        directories: Where they were when the manifest was made, in order.
        units: For people and messages: name -> [state, nbytes, kind, versioned] of each state.
        versions: Live version of each unit; None where nothing was written yet.
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
    units: dict[str, list[list[Any]]]
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
            "units": dict,
            "versions": dict,
            "checksums": dict,
        }
        for name, wanted in {**types, **lists}.items():
            if not isinstance(value[name], wanted):
                raise FormatError(f"{source}: the manifest has a bad value of {name}. {remedy}")
        manifest = cls(**value)
        for unit, version in manifest.versions.items():
            if version is not None and not (
                isinstance(version, int) and 0 <= version < manifest.copies
            ):
                raise FormatError(f"{source}: unit {unit} has no version {version}. {remedy}")
        return manifest

    def build_layout(self, units: Sequence[UnitSpec], copies: int, source: str) -> StoreLayout:
        """Build the layout again for the units of today.

        Raises:
            ConfigError: The units are others than those of the checkpoint.
            FormatError: The manifest is damaged.
        """
        try:
            layout = StoreLayout.build(units, copies, self.weights, stripe_bytes=self.stripe_bytes)
        except (ValueError, TypeError) as error:
            raise FormatError(f"{source}: {error}. Resume from an intact checkpoint.") from error
        now = describe_units(units)
        if now != self.units:
            raise ConfigError(
                f"{source} was made with other states: {_difference(self.units, now)}. "
                "Resume with the model, method and dtype of the run."
            )
        if layout.fingerprint != self.layout or set(self.versions) != set(now):
            raise FormatError(
                f"{source}: the manifest does not agree with itself (layout {self.layout}, computed "
                f"{layout.fingerprint}). Resume from an intact checkpoint."
            )
        return layout


def _difference(before: dict[str, list[list[Any]]], now: dict[str, list[list[Any]]]) -> str:
    for unit in [*before, *now]:
        if unit not in now:
            return f"unit {unit} is not there any more"
        if unit not in before:
            return f"unit {unit} is new"
        if before[unit] != now[unit]:
            return f"unit {unit} was {before[unit]}, is {now[unit]}"
    return "the order of units changed"
