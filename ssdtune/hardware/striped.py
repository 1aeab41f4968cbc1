"""What the drives give to a run whose states are dealt over some directories, of which others may be measured too.

Directories on the same drives count once. Every directory gets its share of each state, an equal one or by its rate
(`shares`), so that the file system with most to do sets the pace; and no run gets more than all of them reached at once,
where they may share a link or a controller.
`ssdtune.hardware.drives` measures, `ssdtune.store.layout` deals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ssdtune.errors import ConfigError
from ssdtune.hardware.figures import DirectoryProfile, TogetherProfile
from ssdtune.io.mounts import existing_parent

LEAST_GAIN = 0.05
"""Directories get unequal shares only where all together are faster by that."""


@dataclass(frozen=True)
class StripedRates:
    """Bytes per second of all directories of a run together, as long as it holds; 0 if not measured."""

    read_bytes_per_s: float = 0.0
    write_bytes_per_s: float = 0.0
    mixed_bytes_per_s: float = 0.0


def striped_rates(
    places: Sequence[DirectoryProfile],
    together: TogetherProfile | None,
    weights: Sequence[float] = (),
) -> StripedRates:
    """Return the rates of a run on these directories.

    Args:
        places: The directories of the run, as they were measured; none if only `together` is known.
        together: What all measured directories reached at once.
        weights: Relative share of each directory; none for equal ones.
    """
    if not places and together:
        return StripedRates(
            together.read_bytes_per_s, together.write_bytes_per_s, together.mixed_bytes_per_s
        )
    groups: dict[object, list[int]] = {}
    for number, place in enumerate(places):
        groups.setdefault(_drives(place), []).append(number)
    weights = weights or [1.0] * len(places)

    def rate(name: str) -> float:
        if not groups:
            return 0.0
        # Other shares wait until those of a group are moved.
        pace = min(
            max(getattr(places[n], name) for n in members)
            * sum(weights)
            / sum(weights[n] for n in members)
            for members in groups.values()
        )
        most = getattr(together, name) if together and len(groups) > 1 else pace
        return float(min(pace, most))

    return StripedRates(
        rate("read_bytes_per_s"), rate("write_bytes_per_s"), rate("mixed_bytes_per_s")
    )


def shares(
    places: Sequence[DirectoryProfile], together: TogetherProfile | None
) -> tuple[float, ...]:
    """Return the relative share of each directory with which all have the same to do, by their rates; none for equal ones.

    Directories on the same drives divide what these get.
    """
    on_same = [sum(_drives(other) == _drives(place) for other in places) for place in places]
    weights = tuple(place.mixed_bytes_per_s / n for place, n in zip(places, on_same))
    if not all(weights):
        return ()
    even = striped_rates(places, together).mixed_bytes_per_s
    gained = striped_rates(places, together, weights).mixed_bytes_per_s
    return weights if gained >= even * (1 + LEAST_GAIN) else ()


def source_place(
    known: Sequence[DirectoryProfile], used: Sequence[DirectoryProfile], model: Path
) -> DirectoryProfile:
    """Return where a model's own files are read from: they lie on one file system, whatever the states are dealt over.

    Args:
        known: All directories of a profile, of which one may lie on the file system of the model.
        used: The directories of a run. If nobody knows the model's drive, it is taken for the fastest of them.
    """
    where = _device_number(model)
    near = [p for p in known if not p.problem and _device_number(Path(p.path)) == where]
    candidates = [p for p in used if p in near] or near or list(used)
    return max(candidates, key=lambda place: place.read_bytes_per_s)


def measured_places(
    known: Sequence[DirectoryProfile], wanted: Sequence[Path]
) -> list[DirectoryProfile]:
    """Return for each directory of a run the measured one that has its path, or else lies on its file system.

    Args:
        known: Directories of a profile.
        wanted: Directories of a run; those that do not exist yet stand for their nearest parent.

    Raises:
        ConfigError: The drives of some were not measured.
    """
    measured = [place for place in known if not place.problem]
    by_path = {Path(place.path): place for place in measured}
    by_device = {_device_number(Path(place.path)): place for place in reversed(measured)}
    found = [by_path.get(path) or by_device.get(_device_number(path)) for path in wanted]
    missing = [str(path) for path, place in zip(wanted, found, strict=True) if place is None]
    if missing:
        problems = {place.path: place.problem for place in known if place.problem}
        reasons = "; ".join(f"{path}: {problem}" for path, problem in problems.items())
        raise ConfigError(
            f"the drives of {', '.join(missing)} were not measured, only those of "
            f"{', '.join(place.path for place in measured) or 'no directory'}"
            f"{f' ({reasons})' if reasons else ''}. Measure all directories of the run together: "
            f"ssdtune profile {' '.join(str(path) for path in wanted)}"
        )
    return [place for place in found if place is not None]


def _drives(place: DirectoryProfile) -> object:
    """Return what two directories have in common if they lie on the same drives."""
    names = frozenset(drive.name for drive in place.drives)
    return names or (place.device if place.device.startswith("/") else place.path)


def _device_number(path: Path) -> int:
    return existing_parent(path).stat().st_dev
