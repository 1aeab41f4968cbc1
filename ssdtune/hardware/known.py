"""Which machine is planned for: the one that was measured here, or one by its name or file.

Reading only; `ssdtune.hardware.measure` measures, `ssdtune.hardware.datasheet` has machines that nobody measured.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path

from ssdtune.errors import FormatError
from ssdtune.hardware.datasheet import SUFFIX, named_machine, read_sheet
from ssdtune.hardware.machine import machine_id
from ssdtune.hardware.profile import HardwareProfile, read_profile

logger = logging.getLogger(__name__)


def profile_path() -> Path:
    """Return where the figures of this machine are kept: in the user's cache folder."""
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ssdtune/profile.json"
    )


def known(name: str | None = None) -> HardwareProfile | None:
    """Return the machine of a file or a name, or else the profile kept of this one; None if there is none of it.

    Args:
        name: A profile, or a data sheet whose name ends in `.toml`; or the name of a data sheet that comes along.

    Raises:
        ConfigError: There is neither a file nor a data sheet of this name.
        FormatError: The file that was named cannot be read.
    """
    if name is not None:
        return _named(name)
    if not profile_path().exists():
        return None
    try:
        kept = read_profile(profile_path())
    except FormatError as error:
        logger.warning("%s", error)
        return None
    if kept.machine_id != machine_id([Path(directory.path) for directory in kept.directories]):
        logger.warning(
            "%s is of another machine or version. Measure again: ssdtune profile", profile_path()
        )
        return None
    return kept


def _named(name: str) -> HardwareProfile:
    path = Path(name).expanduser()
    if path.suffix == SUFFIX:
        return read_sheet(path)
    if not path.is_file() and path.name == name and not path.suffix:
        return named_machine(name)
    profile = read_profile(path)
    return replace(profile, machine={**profile.machine, "file": str(path)})
