"""Which I/O backend each stream of a run gets: the one that is named, else what the profile measured to be the fastest.

`ssdtune.hardware.ways` measures and chooses; `ssdtune.io.streams` opens them. Results never depend on it.
"""

from __future__ import annotations

import logging
from pathlib import Path

from ssdtune.config.schema import Config
from ssdtune.errors import ConfigError
from ssdtune.hardware.profile import HardwareProfile
from ssdtune.hardware.ways import stream_names
from ssdtune.io.kvikio_probe import kvikio_problem
from ssdtune.io.select import DEVICE_BACKENDS
from ssdtune.io.streams import StreamNames
from ssdtune.train.disk import swap_directories

logger = logging.getLogger(__name__)


def streams_of(
    config: Config, profile: HardwareProfile | None, model: Path, card: bool, *, here: bool = True
) -> StreamNames:
    """Return the I/O backend of each stream of a run.

    Args:
        profile: Of the machine that runs; None if it was not measured.
        model: Where the model's own files lie.
        card: A card computes.
        here: This machine runs. What worked when it was measured is tried again.
    """
    if config.io.backend != "auto":
        return StreamNames.all(config.io.backend)
    try:
        places = profile.places(swap_directories(config), model) if profile else None
    except ConfigError:  # the drives of some directories were not measured
        places = None
    if places is None or not all(place.backend for place in places):
        return StreamNames()
    names = stream_names(*places, card=card)
    if here and not set(DEVICE_BACKENDS).isdisjoint(vars(names).values()):
        problem = kvikio_problem()
        if problem:
            without = stream_names(*places, card=False)
            logger.warning(
                "kvikio was the fastest way to the card when this machine was measured, and does not work now: %s %s",
                problem, without.text(card=card),
            )  # fmt: skip
            return without
    return names
