"""The profile that was kept of this machine, if there is one: where it is, and whether it still holds.

Reading only; `ssdtune.hardware.measure` measures.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from ssdtune.errors import FormatError
from ssdtune.hardware.machine import machine_id
from ssdtune.hardware.profile import HardwareProfile, read_profile

logger = logging.getLogger(__name__)


def profile_path() -> Path:
    """Return where the figures of this machine are kept: in the user's cache folder."""
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ssdtune/profile.json"
    )


def known(file: str | None = None) -> HardwareProfile | None:
    """Return the profile in a file, or else the one kept of this machine; None if there is none of it.

    Raises:
        FormatError: The file that was named cannot be read.
    """
    if file:
        return read_profile(Path(file).expanduser())
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
