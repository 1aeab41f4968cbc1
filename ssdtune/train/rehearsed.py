"""Rehearsals that were made: their times are kept beside the machine's profile, and made again when anything changed.

`times_of` is what planning calls. A file that can't be read or written costs a rehearsal, never a run.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ssdtune.device.dtypes import dtype_name
from ssdtune.errors import SsdtuneError, StorageError
from ssdtune.hardware.known import profile_path
from ssdtune.hardware.memory import keep_freed_memory, map_large_blocks, return_memory
from ssdtune.hardware.profile import HardwareProfile
from ssdtune.plan.times import ComputeTimes
from ssdtune.store.durable import write_json_atomic
from ssdtune.train.prepare import Prepared
from ssdtune.train.rehearse import TooLong, micro_batch_shape, rehearse

logger = logging.getLogger(__name__)

MOST_KEPT = 200
"""Rehearsals in the file; the oldest make room."""
_NONE = ComputeTimes({})


def times_of(prepared: Prepared, profile: HardwareProfile) -> ComputeTimes | None:
    """Return how long computing takes in a run on this machine, whose profile it is: rehearsed before, or now.

    Returns:
        None if the rehearsal failed or would take too long; a warning says why, the second only once.
    """
    name = _identity(prepared, profile)
    kept = _read()
    if name in kept:
        return ComputeTimes(kept[name]) if kept[name] else None
    forward = profile.rates().forward_flop_per_s.get(dtype_name(prepared.dtype))
    if not forward:
        return None
    map_large_blocks()
    logger.info("rehearsing a step of a few blocks to see how long computing takes, once")
    if prepared.memory.keeps_freed_memory:
        keep_freed_memory()  # as the run does: it makes computing faster
    try:
        times = rehearse(prepared, flop_per_s=forward)
    except TooLong as error:
        logger.warning("no rehearsal, the forecast counts FLOP instead: %s", error)
        times = _NONE  # kept, so that nobody waits for it again
    except (SsdtuneError, RuntimeError, MemoryError) as error:
        logger.warning("no rehearsal, the forecast counts FLOP instead: %s", error)
        return None
    finally:
        map_large_blocks()
        return_memory()
    _write({**kept, name: dict(times.seconds)})
    return times if times.seconds else None


def _identity(prepared: Prepared, profile: HardwareProfile) -> str:
    config = prepared.config
    settings = {
        "machine": profile.machine_id,
        "measured": profile.measured_at,
        "model": prepared.checkpoint.config,
        "adapter": asdict(config.lora) if config.method == "lora" else config.model.adapter,
        "attention": config.model.attn_implementation,
        "compiled": config.model.torch_compile,
        "device": prepared.device.name,
        "dtype": str(prepared.dtype),
        "threads": torch.get_num_threads(),
        "micro_batch": micro_batch_shape(prepared),
        "accumulates": prepared.compute.num_micro_batches > 1,
        "recompute": config.memory.recompute,
        "keeps_freed_memory": prepared.memory.keeps_freed_memory,
        "keeps": prepared.compute.kept_bytes > 0 and config.memory.host_cache != 0,
        "keeps_partly": prepared.compute.saves_partly,
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[
        :24
    ]


def _file() -> Path:
    return profile_path().with_name("rehearsals.json")


def _read() -> dict[str, Mapping[str, float]]:
    try:
        kept = json.loads(_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(kept, dict):
        return {}
    return {name: times for name, times in kept.items() if _are_times(times)}


def _are_times(times: Any) -> bool:
    return isinstance(times, dict) and all(
        isinstance(seconds, float) and seconds > 0 for seconds in times.values()
    )


def _write(kept: Mapping[str, Mapping[str, float]]) -> None:
    try:
        _file().parent.mkdir(parents=True, exist_ok=True)
        write_json_atomic(_file(), dict(list(kept.items())[-MOST_KEPT:]))
    except (OSError, StorageError) as error:
        logger.debug("%s is not kept: %s", _file(), error)
