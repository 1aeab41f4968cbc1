"""Training checkpoints: a folder `checkpoint-N` that names what the store keeps for it.

A checkpoint holds no weights itself: its manifest says which places of the swap directories are its own, and
the store never writes there while the folder exists. `trainer_state.json` holds the rest: the step, the
optimizer's step counts, and what the run was made of, so that a resumed run is the same run.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ssdtune.errors import FormatError
from ssdtune.store.durable import REMOVED, remove_dir, replace_dir, write_json_atomic
from ssdtune.store.store import Store
from ssdtune.train.output import PLAN, SETTINGS

FORMAT = 1
PREFIX, PARTIAL = "checkpoint-", ".partial"


@dataclass(frozen=True)
class TrainerState:
    """What a resumed run needs besides the store.

    Attributes:
        step: Optimizer steps done.
        total_steps: Steps of the whole run, on which the learning rate depends.
        adam_steps: For each part the number of updates of each tensor.
        identity: What must be the same after a resume: settings that change numbers, model and rows.
        loss_scale: Of fp16 (`ssdtune.optim.loss_scale`); None elsewhere.
        longest_rows: What some rotary frequencies were made for (`ssdtune.model.rotary`).
    """

    step: int
    total_steps: int
    adam_steps: dict[str, list[int]]
    identity: dict[str, Any]
    loss_scale: dict[str, Any] | None = None
    longest_rows: dict[str, int] = field(default_factory=dict)


def checkpoint_folders(output_dir: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first."""
    found = []
    for folder in output_dir.glob(f"{PREFIX}*"):
        number = folder.name.removeprefix(PREFIX)
        if number.isdigit() and (folder / "trainer_state.json").exists():
            found.append((int(number), folder))
    return [folder for _, folder in sorted(found)]


def remove_remains(output_dir: Path) -> None:
    """Remove what a run left that was killed while it saved or dropped a checkpoint; only for whoever holds the folder."""
    for pattern in (f"{PREFIX}*{PARTIAL}", f".{PREFIX}*{REMOVED}"):
        for folder in output_dir.glob(pattern):
            shutil.rmtree(folder, ignore_errors=True)
    for name in (SETTINGS, PLAN):
        for file in output_dir.glob(f".{name}.*.tmp"):
            file.unlink(missing_ok=True)


def read_state(folder: Path) -> TrainerState:
    """Read `trainer_state.json`.

    Raises:
        FormatError: It is damaged or of another version.
    """
    data = _read(folder / "trainer_state.json")
    if data.pop("format", None) != FORMAT:
        raise FormatError(
            f"{folder} was written by another version of ssdtune; use that one to go on."
        )
    try:
        return TrainerState(**data)
    except TypeError as error:
        raise FormatError(
            f"{folder / 'trainer_state.json'} is damaged: {error}. Resume from an intact checkpoint."
        ) from error


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the store's manifest of a checkpoint."""
    return _read(folder / "manifest.json")


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise ValueError("not an object")
        return data
    except (OSError, ValueError) as error:
        raise FormatError(
            f"{path} cannot be read: {error}. Resume from an intact checkpoint."
        ) from error


def save_checkpoint(output_dir: Path, store: Store, state: TrainerState, *, keep: int) -> Path:
    """Make the store's live states a checkpoint, then drop the oldest ones beyond `keep`.

    Those of later steps were left by a run that was resumed from before them: they go too. Everything must be flushed to
    the store before. A crash at any point leaves a checkpoint whole.
    """
    final = output_dir / f"{PREFIX}{state.step}"
    if final.exists():  # the one that was resumed from is there
        _drop(store, final)
    partial = output_dir / f"{final.name}{PARTIAL}"
    partial.mkdir()
    manifest = store.freeze(final.name, final)
    store.sync()
    write_json_atomic(partial / "manifest.json", manifest)
    write_json_atomic(partial / "trainer_state.json", {"format": FORMAT, **asdict(state)})
    replace_dir(partial, final)
    folders = checkpoint_folders(output_dir)
    count = folders.index(final) + 1
    for folder in [*folders[count:], *folders[:count][:-keep]]:
        _drop(store, folder)
    return final


def _drop(store: Store, folder: Path) -> None:
    remove_dir(folder)
    if folder.name in store.frozen_labels:
        store.release(folder.name)
