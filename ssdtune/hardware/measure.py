"""Take all figures of this machine in turn, within their times; or use those that were kept.

`measure` always measures. `cached` does so only if the machine, its software, the directories or the wanted accuracy
changed, and says which; a model whose block was not measured yet is added to what is there. Nothing is printed here:
the caller is told of the progress.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from ssdtune.device.base import Device
from ssdtune.errors import FormatError, StorageError
from ssdtune.hardware import drives
from ssdtune.hardware.blocks import check_model, digest_of, measure_blocks
from ssdtune.hardware.busy import BusyWatch
from ssdtune.hardware.compute import AdamWork, measure_adam, measure_memory
from ssdtune.hardware.contention import measure_contention
from ssdtune.hardware.copies import measure_copies
from ssdtune.hardware.effort import FULL, QUICK, Effort
from ssdtune.hardware.figures import BlockProfile, Contention, DirectoryProfile, TogetherProfile
from ssdtune.hardware.machine import describe_machine, machine_id
from ssdtune.hardware.memory import keep_freed_memory
from ssdtune.hardware.profile import HardwareProfile, read_profile, save
from ssdtune.hardware.stream import Bench, Clock
from ssdtune.io.mounts import existing_parent
from ssdtune.io.select import DEVICE_BACKENDS, probe_backends

logger = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
"""Told what is being done, and the share of the whole that is done, 0 to 1."""

_IMPORT_SECONDS = 6.0


def measure(
    directories: Sequence[Path],
    *,
    model: str | None = None,
    quick: bool = False,
    effort: Effort | None = None,
    backend: str = "auto",
    device: str = "auto",
    direct: bool = True,
    progress: Progress = lambda text, share: None,
    clock: Clock = time.perf_counter,
) -> HardwareProfile:
    """Measure this machine and the drives under some directories.

    Args:
        directories: Directories on the drives; several on one file system are measured once.
        model: Model folder or config.json whose block is measured; two common shapes by default.
        quick: Take less time, for rougher figures.
        effort: Times and settings, instead of those that `quick` chooses.
        backend: The only I/O backend to measure; "auto" for all that work.
        device: Where blocks are computed, as `ssdtune.device.open_device` takes it.
        direct: Bypass the page cache.
        progress: Told what is being done.

    Raises:
        BackendUnavailableError: The backend or device that was asked for does not work.
        ConfigError: A directory can't be written to, or the model's configuration can't be read.
        UnsupportedModelError: The model can't be taken apart into blocks.
    """
    effort = effort or (QUICK if quick else FULL)
    directories = [Path(directory) for directory in directories]
    if model is not None:
        digest_of(model)  # refuse it before anything is measured
    keep_freed_memory()  # as runs do that have the memory for it
    start, busy = clock(), BusyWatch(clock=clock)
    total = effort.total_s + _IMPORT_SECONDS

    def say(text: str) -> None:
        progress(text, min((clock() - start) / total, 0.99))

    say("starting torch")
    from ssdtune.device import open_device

    opened = open_device(device)
    card = opened if opened.own_memory else None
    probes = {p.name: p.reason for p in probe_backends()}
    names = [name for name, reason in probes.items() if not reason]
    straight: list[str] = []
    if backend != "auto":
        names = [backend]
    elif card is not None:
        reaching = {p.name: p.reason for p in probe_backends(DEVICE_BACKENDS)}
        straight = [name for name, reason in reaching.items() if not reason]
        probes |= reaching
    if model is not None:
        say("looking at the model")
        check_model(model, opened)
    found, together, contention, adam = _with_drives(
        directories, effort, names, direct, say, clock, card=card, straight=straight
    )
    say("memory")
    memory = measure_memory(seconds=effort.memory_s, memory_bytes=effort.memory_bytes, clock=clock)
    say("copies to and from the device")
    copies = measure_copies(opened, seconds=effort.copies_s, clock=clock)
    say("starting transformers")
    blocks = measure_blocks(
        model,
        shapes=effort.shapes,
        tokens=effort.tokens,
        seconds=effort.blocks_s,
        device=opened,
        clock=clock,
        say=say,
    )
    progress("done", 1.0)
    return HardwareProfile(
        machine_id=machine_id(directories),
        machine={**describe_machine(), **_card(opened)},
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        effort=effort.name,
        seconds=clock() - start,
        backends=probes,
        directories=found,
        together=together,
        memory=memory,
        adam=adam,
        contention=contention,
        copies=copies,
        compute_dtypes=_full_speed(opened),
        blocks=blocks,
        others=busy.load(),
    )


def _card(device: Device) -> dict[str, str | int]:
    """Return the card on which blocks were computed, if it was one."""
    found = device.capabilities()
    return {"card": found.model, "card_bytes": found.total_bytes} if device.own_memory else {}


def cached(
    directories: Sequence[Path],
    path: Path,
    *,
    model: str | None = None,
    quick: bool = False,
    effort: Effort | None = None,
    force: bool = False,
    must_keep: bool = False,
    progress: Progress = lambda text, share: None,
    **options: object,
) -> HardwareProfile:
    """Return the profile in a file if it is of this machine, else measure and write it there.

    Args:
        path: The file, such as profile.json in the user's cache folder.
        force: Measure in any case.
        must_keep: The file is what is wanted. Without, one that can't be written is only warned of.
        **options: Others of `measure`.

    Raises: What `measure` raises, and with `must_keep` what `save` does.
    """
    directories = [Path(directory) for directory in directories]
    effort = effort or (QUICK if quick else FULL)
    wanted = digest_of(model, effort.shapes)
    kept, reason = _kept(path, directories, effort)
    if force or kept is None:
        if reason and not force:
            logger.info("Measuring this machine: %s.", reason)
        profile = measure(
            directories, model=model, effort=effort, progress=progress, **options  # type: ignore[arg-type]
        )  # fmt: skip
    elif not set(wanted) <= {block.digest for block in kept.blocks}:
        logger.info("Measuring the block of this model; all else is known from %s.", path)
        blocks = _only_blocks(model, effort, str(options.get("device", "auto")), progress)
        profile = replace(kept, blocks=kept.blocks + blocks)
    else:
        return kept
    try:
        save(profile, path)
    except StorageError as error:  # the figures are good without the file
        if must_keep:
            raise
        logger.warning("%s They will be taken again next time.", error)
    return profile


def _kept(
    path: Path, directories: Sequence[Path], effort: Effort
) -> tuple[HardwareProfile | None, str]:
    """Return the profile in a file if it may be used; else None, and why not."""
    if not path.exists():
        return None, f"there are no figures in {path} yet"
    try:
        kept = read_profile(path)
    except FormatError as error:
        return None, str(error).partition(". Correct")[0].partition(". Name")[0]
    version = kept.machine.get("ssdtune", "unknown")
    if version != describe_machine()["ssdtune"]:
        return None, f"the figures in {path} are of version {version}"
    wanted = [os.fspath(directory) for directory in directories]
    if [directory.path for directory in kept.directories] != wanted:
        return None, f"the figures in {path} are of other directories"
    if kept.machine_id != machine_id(directories):
        return (
            None,
            f"the figures in {path} are of another machine, or its drives or software changed",
        )
    if kept.effort == QUICK.name and effort.name != QUICK.name:
        return None, f"the figures in {path} were taken quickly"
    return kept, ""


def _only_blocks(
    model: str | None, effort: Effort, device: str, progress: Progress
) -> tuple[BlockProfile, ...]:
    from ssdtune.device import open_device

    blocks = measure_blocks(
        model,
        shapes=effort.shapes,
        tokens=effort.tokens,
        seconds=effort.blocks_s,
        device=open_device(device),
        say=lambda text: progress(text, 0.5),
    )
    progress("done", 1.0)
    return blocks


def _with_drives(
    directories: Sequence[Path],
    effort: Effort,
    backends: Sequence[str],
    direct: bool,
    say: drives.Say,
    clock: Clock,
    *,
    card: Device | None,
    straight: Sequence[str],
) -> tuple[tuple[DirectoryProfile, ...], TogetherProfile | None, Contention | None, tuple]:
    """Measure everything that needs the drives, and AdamW, which is measured alone and beside them."""
    devices = [existing_parent(directory).stat().st_dev for directory in directories]
    first = dict(zip(reversed(devices), reversed(directories), strict=True))
    each = min(effort.drive_s, effort.drives_s / max(len(first), 1))
    by_device: dict[int, DirectoryProfile] = {}
    benches: list[tuple[DirectoryProfile, Bench]] = []
    contention = None
    with contextlib.ExitStack() as stack:
        for device in dict.fromkeys(devices):
            opened = drives.open_bench(first[device], effort, direct=direct, clock=clock)
            known, bench = stack.enter_context(opened)
            if bench is not None:
                known = drives.measure_bench(
                    known,
                    bench,
                    effort,
                    seconds=each,
                    backends=backends,
                    card=card,
                    straight=straight,
                    say=say,
                )
                if not known.problem:
                    benches.append((known, bench))
            by_device[device] = known
        say("AdamW")
        work = AdamWork(effort.memory_bytes)
        adam = measure_adam(seconds=effort.adam_s, work=work, clock=clock)
        together = None
        with contextlib.suppress(
            StorageError
        ):  # it worked alone; without it there are those figures
            together = _together(benches, effort, say)
            if benches:
                say("AdamW and drives at once")
                fastest, bench = max(benches, key=lambda pair: pair[0].mixed_bytes_per_s)
                contention = measure_contention(
                    fastest, bench, seconds=effort.contention_s, work=work, clock=clock
                )
    found = tuple(
        replace(by_device[device], path=str(directory))
        for directory, device in zip(directories, devices, strict=True)
    )
    return found, together, contention, adam


def _together(
    benches: Sequence[tuple[DirectoryProfile, Bench]], effort: Effort, say: drives.Say
) -> TogetherProfile | None:
    if not benches:
        return None
    if len(benches) > 1:
        say("all drives at once")
        return drives.measure_together(benches, seconds=effort.together_s)
    only = benches[0][0]
    return TogetherProfile(
        num_file_systems=1,
        read_bytes_per_s=only.read_bytes_per_s,
        write_bytes_per_s=only.write_bytes_per_s,
        mixed_bytes_per_s=only.mixed_bytes_per_s,
    )


def _full_speed(device: Device) -> tuple[str, ...]:
    from ssdtune.device.dtypes import COMPUTE_DTYPES

    return tuple(name for name, dtype in COMPUTE_DTYPES.items() if device.supports(dtype))
