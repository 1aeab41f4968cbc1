"""A machine that isn't this one, as its profile describes it: what a plan takes from there instead of asking the system.

So a plan can be made for a machine before it is bought: its memory, what it computes in, and its drives' free space.
The profile may be made of a data sheet (`ssdtune.hardware.datasheet`); then nothing was measured, and plans say so.
The rates are `HardwareProfile.rates`; the plan itself is `ssdtune.train.planning`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from ssdtune.device.dtypes import COMPUTE_DTYPES
from ssdtune.errors import CapacityError, ConfigError
from ssdtune.hardware import datasheet
from ssdtune.hardware.figures import DirectoryProfile
from ssdtune.hardware.profile import HardwareProfile
from ssdtune.plan import device_memory
from ssdtune.store.space import MARGIN_BYTES, Need
from ssdtune.units import format_disk, format_memory, format_rate

logger = logging.getLogger(__name__)

MEMORY_SHARE = 0.9
"""Share of its memory that a run may take; the rest is for the system and others."""


def host_budget(profile: HardwareProfile) -> int:
    """Return the host memory that a run may take there, in bytes.

    Raises:
        ConfigError: The profile does not say how much memory there is.
    """
    memory_bytes = profile.machine.get("memory_bytes")
    if not isinstance(memory_bytes, int) or memory_bytes <= 0:
        raise ConfigError(
            f"{name_of(profile)} does not say how much memory the machine has: machine.memory_bytes is "
            f"{memory_bytes!r}. Correct it, or set host_memory."
        )
    return int(memory_bytes * MEMORY_SHARE)


def device_limits(
    profile: HardwareProfile, wanted: int | None
) -> device_memory.DeviceLimits | None:
    """Return the budget of the card that was measured there; None if its CPU was.

    Args:
        wanted: `memory.gpu_memory`; None for all of the card that CUDA leaves.

    Raises:
        ConfigError: The profile does not say how much memory the card has.
    """
    if not profile.copies:
        return None
    card_bytes = profile.machine.get("card_bytes") or wanted
    if not isinstance(card_bytes, int) or card_bytes <= 0:
        raise ConfigError(
            f"{name_of(profile)} does not say how much memory the card has (machine.card_bytes). Make it anew, or "
            "set gpu_memory."
        )
    free_bytes = card_bytes - device_memory.CONTEXT_BYTES
    name = str(profile.machine.get("card") or "the card of that machine")
    return device_memory.device_limits(free_bytes, wanted, name)


def compute_dtype(profile: HardwareProfile, wanted: str) -> torch.dtype:
    """Return the dtype that a run computes in there.

    Args:
        wanted: `model.dtype`; "auto" takes bf16 where the machine multiplies it at full speed, else fp16.

    Raises:
        ConfigError: The card there lacks it.
    """
    if wanted == "auto":
        wanted = next((n for n in ("bf16", "fp16") if n in profile.compute_dtypes), "fp32")
        return COMPUTE_DTYPES[wanted]
    if wanted not in profile.compute_dtypes:
        known = " and ".join(profile.compute_dtypes) or "nothing that was measured"
        if profile.copies:
            raise ConfigError(
                f"by {name_of(profile)}, {profile.machine.get('card') or 'the card there'} computes in {known}, not in "
                f"{wanted}. Use --dtype auto or one of these."
            )
        logger.warning(
            "the machine of %s does not compute in %s at full speed, only in %s.",
            name_of(profile), wanted, known,
        )  # fmt: skip
    return COMPUTE_DTYPES[wanted]


def swap_places(profile: HardwareProfile, wanted: Sequence[str]) -> list[DirectoryProfile]:
    """Return the directories that would hold the states there.

    Args:
        wanted: `io.swap_dirs`; taken if the profile knows all of them. Names of this machine mean nothing there:
            then all measured directories are used.

    Raises:
        ConfigError: The profile has no directories.
    """
    by_path = {Path(place.path): place for place in profile.directories}
    paths = [Path(name).expanduser() for name in wanted]
    if paths and all(path in by_path for path in paths):
        return [by_path[path] for path in dict.fromkeys(paths)]
    measured = [place for place in by_path.values() if not place.problem]
    if not measured:
        raise ConfigError(
            f"{name_of(profile)} has no directory with measured drives. Make it anew: ssdtune profile DIR "
            "--output FILE"
        )
    return measured


def check_space(needs: Sequence[Need], places: Sequence[DirectoryProfile]) -> None:
    """Refuse a run that does not fit on the drives of the profile, as they were when it was made.

    Args:
        needs: What the run will write; what lies in none of the places is taken to lie in the first.

    Raises:
        CapacityError: Some file systems are too small; all of them are named, with numbers.
    """
    by_device: dict[str, list[Need]] = {place.device: [] for place in places}
    for need in needs:
        inside = [place for place in places if need.path.is_relative_to(place.path)]
        by_device[(inside or list(places))[0].device].append(need)
    problems = []
    for device, items in by_device.items():
        place = next(place for place in places if place.device == device)
        needed = sum(need.nbytes for need in items)
        missing = needed + MARGIN_BYTES - place.free_bytes
        if missing > 0:
            what = ", ".join(f"{format_disk(need.nbytes)} for {need.purpose}" for need in items)
            problems.append(
                f"not enough space on {device} ({place.path}) of the hardware profile: {format_disk(needed)} "
                f"needed ({what}), {format_disk(place.free_bytes)} were free when it was made, "
                f"{format_disk(MARGIN_BYTES)} must stay free. {format_disk(missing)} are missing"
            )
    if problems:
        raise CapacityError(
            "\n".join(problems)
            + ". More or larger drives would do, a lower save_total_limit, or method: lora."
        )


def describe(profile: HardwareProfile) -> str:
    """Return one line that says which machine a plan is for."""
    machine = profile.machine
    memory, card_bytes = machine.get("memory_bytes"), machine.get("card_bytes")
    card = str(machine.get("cards") or machine.get("card") or "")
    facts = [
        str(machine.get("cpu", "")),
        f"{machine['cores']} cores" if machine.get("cores") else "",
        format_memory(memory) if isinstance(memory, int) else "",
        f"{card} with {format_memory(card_bytes)}"
        if card and isinstance(card_bytes, int)
        else card,
        _drives(profile) if is_sheet(profile) else "",
    ]
    named = ", ".join(fact for fact in facts if fact) or "nothing is said of it"
    source = f"measured {profile.measured_at}"
    if is_sheet(profile):
        source = f"by its data sheet ({machine.get('file')}), nothing was measured"
    return f"planned for another machine: {named}; {source}"


def _drives(profile: HardwareProfile) -> str:
    first, number = profile.directories[0], len(profile.directories)
    rates = f"{format_rate(first.read_bytes_per_s)} read, {format_rate(first.write_bytes_per_s)} written"
    return f"{number} drive{'s' * (number != 1)} of {format_disk(first.total_bytes)} ({rates})"


def is_sheet(profile: HardwareProfile) -> bool:
    """Say whether nothing was measured."""
    return profile.effort == datasheet.EFFORT


def name_of(profile: HardwareProfile) -> str:
    """Return what messages call a profile: by its file, if it came from one."""
    file = profile.machine.get("file")
    what = "data sheet" if is_sheet(profile) else "hardware profile"
    return f"the {what} {file}" if file else f"the {what}"
