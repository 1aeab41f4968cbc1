"""The commands as Python functions: `ssdtune.finetune`, `plan`, `profile`, `doctor` and `export`.

Settings are given as a path of a YAML file, a mapping, a `Config`, or keywords by their flat names
(`learning_rate`, `lora_r`). Keywords win. Everything heavy is imported inside the functions.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ssdtune.cli.doctor import DoctorReport
    from ssdtune.config.load import Source
    from ssdtune.hardware.profile import HardwareProfile


def finetune(
    config: Source = None, /, *, quiet: bool = False, verbose: bool = False, **settings: Any
) -> Any:
    """Fine-tune a model and write the tuned weights, or the adapter, to `output_dir`.

    Args:
        config: Where settings come from; keywords win over it.
        quiet: Show nothing of the run on stderr.
        verbose: Show it as plain lines, without a live bar.
        **settings: Settings by flat name, such as `train_file="train.jsonl", learning_rate=1e-4`.

    Returns:
        What came out: losses, paths, bytes moved; `to_dict()` gives plain data.

    Raises:
        SsdtuneError: See `ssdtune.errors`; `ConfigError` before any work is done.
    """
    from ssdtune.config.load import load_config
    from ssdtune.train.finetune import finetune as run

    return run(load_config(config, settings), quiet=quiet, verbose=verbose)


def plan(
    config: Source = None,
    /,
    *,
    hardware: HardwareProfile | None = None,
    other_machine: bool = False,
    **settings: Any,
) -> Any:
    """Say what a run needs: memory, space, bytes moved and time. Arguments as for `finetune`.

    Args:
        hardware: What `profile` returned; without it, no time is given.
        other_machine: Plan for the machine that `hardware` describes, with its memory, dtypes and drives,
            instead of this one.
    """
    from ssdtune.config.load import load_config
    from ssdtune.train.planning import plan as run

    return run(load_config(config, settings), hardware, other_machine=other_machine)


def profile(
    swap_dirs: Sequence[str | os.PathLike[str]] = (),
    *,
    model: str | None = None,
    quick: bool = False,
    path: str | os.PathLike[str] | None = None,
    force: bool = False,
    **options: Any,
) -> HardwareProfile:
    """Measure this machine: drives, memory bandwidth, Adam, copies to a card, compute.

    Args:
        swap_dirs: Folders on the drives to measure; the current folder by default.
        model: Model folder or config.json whose block is measured; two common shapes by default.
        quick: Shorter and less exact.
        path: File where the figures are kept; those in it are returned if nothing changed. By default
            nothing is kept.
        force: Measure in any case.
        **options: Others of `ssdtune.hardware.measure.measure`, such as `effort` and `progress`.
    """
    from ssdtune.hardware.measure import cached, measure
    from ssdtune.store.directories import resolve_directories

    resolve_directories(swap_dirs or ["."])  # refuses what can be no directory, all at once
    folders = [Path(folder).expanduser().absolute() for folder in swap_dirs or ["."]]
    if path is None:
        return measure(folders, model=model, quick=quick, **options)
    return cached(folders, Path(path), model=model, quick=quick, force=force, **options)


def doctor(swap_dirs: Sequence[str | os.PathLike[str]] = ()) -> DoctorReport:
    """Look at what works on this machine and in the folders where states would be kept."""
    from ssdtune.cli.doctor import examine

    return examine(swap_dirs)


def export(
    checkpoint: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    *,
    merge: bool = False,
    max_shard_size: str | int = "50GB",
) -> Path:
    """Write the weights or the adapter of a checkpoint so that transformers or peft load the folder.

    Args:
        checkpoint: A `checkpoint-N` folder of a run; with `merge` also a folder with a finished adapter.
        output_dir: New or empty folder.
        merge: Merge a LoRA adapter into its base.
        max_shard_size: Largest size of one file.
    """
    from ssdtune.errors import ConfigError
    from ssdtune.train.exporting import export as run
    from ssdtune.units import parse_size

    try:
        max_shard_bytes = parse_size(max_shard_size)
    except ValueError as error:
        raise ConfigError(f"max_shard_size: {error}") from error
    if max_shard_bytes < 1:
        raise ConfigError(f"max_shard_size must be at least 1 byte, not {max_shard_bytes}")
    return run(Path(checkpoint), Path(output_dir), merge=merge, max_shard_bytes=max_shard_bytes)
