"""From trained states to a folder that transformers or peft loads: the end of a run, and `ssdtune export`.

`write_result` is shared by both; where the tensors come from is a function. A checkpoint's states are read from
the swap directories of its run, in pieces that its checksums cover; nothing of the checkpoint is changed. How
files are written is in `ssdtune.export`.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from ssdtune.config.load import load_config
from ssdtune.config.schema import Config
from ssdtune.errors import ConfigError, SsdtuneError
from ssdtune.export.adapter import (
    CONFIG,
    export_adapter,
    merge_adapter,
    read_adapter_config,
)
from ssdtune.export.safetensors_writer import MAX_SHARD_BYTES, STAGING_NAME
from ssdtune.export.weights import export_weights
from ssdtune.io.backend import Backend
from ssdtune.io.buffers import BufferPool
from ssdtune.io.select import open_backend
from ssdtune.model.blocks import BlockModel
from ssdtune.model.build import BuiltModel, build_model
from ssdtune.model.checkpoint import HfCheckpoint
from ssdtune.model.layout import Part, TensorSpec
from ssdtune.model.source import WeightSource
from ssdtune.optim.adamw import join_master
from ssdtune.store.manifest import Manifest
from ssdtune.store.store import Store
from ssdtune.swap.manager import read_stored
from ssdtune.train.checkpoint import (
    PREFIX,
    TrainerState,
    checkpoint_folders,
    read_manifest,
    read_state,
)
from ssdtune.train.open_model import build, precision_of
from ssdtune.train.output import SETTINGS

logger = logging.getLogger(__name__)

ReadTensor = Callable[[Part, TensorSpec, bool], torch.Tensor]
"""Gives one trained parameter: fp32, or with True the bf16 half of a split master."""


def write_result(
    output_dir: Path,
    *,
    checkpoint: HfCheckpoint,
    built: BuiltModel,
    blocks: BlockModel,
    read: ReadTensor,
    base_model_name_or_path: str,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write the tuned weights or, of a LoRA run, the adapter.

    Args:
        checkpoint: The original model's files.
        built, blocks: The model of the run.
        read: Called once for each tensor.
        base_model_name_or_path: How an adapter names its base; a folder gets its absolute path.

    Raises:
        SsdtuneError: See `export_weights` and `export_adapter`.
    """
    places: dict[str, list[tuple[Part, TensorSpec]]] = {}
    for part in blocks.layout.trained_parts:
        for spec in part.tensors:
            places.setdefault(spec.name, []).append((part, spec))
    if built.peft is None:
        keymap = built.keymap

        def pieces(name: str) -> Iterator[torch.Tensor]:
            high_only = keymap.dtype_of(name, checkpoint) == torch.bfloat16
            return (read(part, spec, high_only) for part, spec in places[keymap.canonical(name)])

        def get_rows(name: str) -> Iterator[torch.Tensor] | None:
            divided = name not in keymap.buffers and len(places[keymap.canonical(name)]) > 1
            return pieces(name) if divided else None

        export_weights(
            output_dir,
            checkpoint=checkpoint,
            keymap=keymap,
            get_tensor=lambda name: next(pieces(name)),
            get_rows=get_rows,
            max_shard_bytes=max_shard_bytes,
        )
        return
    base = Path(base_model_name_or_path).expanduser()
    with blocks.whole():
        export_adapter(
            output_dir,
            peft_model=built.peft,
            tensors={
                f"base_model.model.{name}": read(part, spec, False)
                for name, [(part, spec)] in places.items()
            },
            base_model_name_or_path=str(
                base.absolute() if base.is_dir() else base_model_name_or_path
            ),
            checkpoint=checkpoint,
        )


def export(
    checkpoint: Path, output_dir: Path, *, merge: bool = False, max_shard_bytes: int
) -> Path:
    """Write the weights or the adapter of a training checkpoint, or a finished adapter merged into its base.

    Args:
        checkpoint: A `checkpoint-N` folder of a run that is not running now; with `merge` also a folder with
            an adapter.
        output_dir: New or empty folder.
        merge: Write the base model with the adapter in its weights.
        max_shard_bytes: Largest size of one file, where there are several.

    Returns:
        `output_dir`, absolute.

    Raises:
        ConfigError: Not such a folder, the run is alive, or the output folder is in use.
        SsdtuneError: Something is damaged, or there is no space.
    """
    source = checkpoint.expanduser().absolute()
    target = output_dir.expanduser().absolute()
    is_adapter = _check_source(source, merge)
    with _new_folder(target):
        if is_adapter:
            _merge(source, target, _base_of(source), max_shard_bytes)
        else:
            _export_checkpoint(source, target, merge, max_shard_bytes)
    return target


def _check_source(source: Path, merge: bool) -> bool:
    """Say whether it is an adapter (else a checkpoint).

    Raises:
        ConfigError: It is neither.
    """
    if not source.is_dir():
        raise ConfigError(
            f"{source} {'is a file' if source.exists() else 'does not exist'}. Name a checkpoint-N folder."
        )
    if (source / CONFIG).is_file():
        if not merge:
            raise ConfigError(
                f"{source} is an adapter that peft loads as it is. Give --merge to merge it into its base."
            )
        return True
    if source in checkpoint_folders(source.parent):
        return False
    kept = checkpoint_folders(source)
    if kept:
        raise ConfigError(
            f"{source} is the folder of a run. Name one of its checkpoints, such as {kept[-1]}"
        )
    if (source / "config.json").is_file():
        raise ConfigError(
            f"{source} is a model that transformers loads as it is; there is nothing to export."
        )
    raise ConfigError(
        f"{source} is no checkpoint of a run (a folder {PREFIX}N with trainer_state.json), and no adapter."
    )


@contextmanager
def _new_folder(target: Path) -> Iterator[None]:
    """Make sure that nobody's files are in the way; leave nothing behind if the block fails."""
    fresh = not target.exists()
    try:
        others = [] if fresh else [p for p in target.iterdir() if p.name != STAGING_NAME]
    except NotADirectoryError:
        raise ConfigError(f"{target} is a file. Name a new folder.") from None
    except OSError as error:
        raise ConfigError(
            f"cannot look into {target}: {error.strerror}. Name a new folder."
        ) from error
    if others:
        raise ConfigError(f"{target} is not empty. Name a new folder.")
    try:
        yield
    except BaseException:
        if fresh and target.is_dir() and not any(target.iterdir()):
            target.rmdir()
        raise


@dataclass(frozen=True)
class _Saved:
    """A checkpoint and the run it belongs to."""

    folder: Path
    config: Config
    state: TrainerState
    manifest: Manifest

    @property
    def directories(self) -> list[str]:
        """The swap directories; the default one moves with the run's folder."""
        if self.config.io.swap_dirs:
            return self.manifest.directories
        return [str(self.folder.parent / "swap")]


def _read_saved(folder: Path) -> _Saved:
    settings = folder.parent / SETTINGS
    if not settings.is_file():
        raise ConfigError(
            f"{settings} does not exist; it says which model {folder.name} belongs to. Put it back."
        )
    manifest = Manifest.from_dict(read_manifest(folder), str(folder))
    return _Saved(folder, load_config(settings), read_state(folder), manifest)


def _export_checkpoint(folder: Path, target: Path, merge: bool, max_shard_bytes: int) -> None:
    saved = _read_saved(folder)
    config = saved.config
    if merge and config.method != "lora":
        raise ConfigError(
            f"{folder} is of a run with method: {config.method}, which has no adapter to merge. Leave out --merge."
        )
    original = _open_model(config.model.model_name_or_path, folder.parent)
    if original.fingerprint != saved.state.identity.get("model"):
        logger.warning(
            "%s has changed since the run that made %s (its files, or only their times)",
            original.path,
            folder,
        )
    if merge:
        with tempfile.TemporaryDirectory(prefix="ssdtune-adapter-") as adapter:
            _write_checkpoint(saved, original, Path(adapter), max_shard_bytes)
            _merge(Path(adapter), target, original, max_shard_bytes, config=config)
    else:
        _write_checkpoint(saved, original, target, max_shard_bytes)


def _write_checkpoint(
    saved: _Saved, original: HfCheckpoint, target: Path, max_shard_bytes: int
) -> None:
    config = saved.config
    dtype = getattr(torch, str(saved.state.identity["dtype"]).removeprefix("torch."))
    built = build(config, original, dtype)
    blocks = BlockModel(built, torch.device("cpu"))
    _check_units(saved, blocks.layout.trained_parts)
    precision = precision_of(config)
    with ExitStack() as stack:
        io = config.io
        backend = open_backend(
            io.backend, queue_depth=io.queue_depth, request_bytes=io.request_bytes
        )
        stack.callback(backend.close)
        store = stack.enter_context(_open_store(saved, backend))

        def read(part: Part, spec: TensorSpec, high_only: bool) -> torch.Tensor:
            # Whole pieces, so that each is compared with its checksum.
            piece = store.check_bytes
            states = precision.states(part)
            weights = read_stored(store, part, states["weights"], spec, piece)
            if high_only or not precision.is_split(part):
                return weights.view(spec.shape)
            low = read_stored(store, part, states["low"], spec, piece)
            return join_master(weights, low).view(spec.shape)

        write_result(
            target,
            checkpoint=original,
            built=built,
            blocks=blocks,
            read=read,
            base_model_name_or_path=config.model.model_name_or_path,
            max_shard_bytes=max_shard_bytes,
        )


def _open_store(saved: _Saved, backend: Backend) -> Store:
    """Take the swap directories; the run's other checkpoints stay as they are, too."""
    folders = checkpoint_folders(saved.folder.parent)
    try:
        return Store.open(
            saved.directories, saved.manifest.unit_specs(),
            checkpoints={folder: read_manifest(folder) for folder in folders}, live=saved.folder,
            backend=backend, output_dir=saved.folder.parent, direct=saved.config.io.direct,
        )  # fmt: skip
    except ConfigError as error:
        if "is in use" in str(error):
            raise ConfigError(
                f"{saved.folder} belongs to a run that is still alive; its states cannot be read beside it. {error}"
            ) from error
        raise


def _check_units(saved: _Saved, parts: list[Part]) -> None:
    """Make sure that what was saved is what the model of today has."""
    found = {
        unit.name: {state.name: state.nbytes for state in unit.states}
        for unit in saved.manifest.unit_specs()
    }
    for part in parts:
        if found.get(part.name, {}).get("weights") != part.weight_bytes:
            raise ConfigError(
                f"{saved.folder} does not hold {part.name} as the model in {saved.config.model.model_name_or_path} "
                "has it. Put the model of the run back, and use the same versions of transformers and peft."
            )


def _open_model(name: str, run_dir: Path) -> HfCheckpoint:
    try:
        return HfCheckpoint.open(name, convert_dir=run_dir / "converted")
    except SsdtuneError as error:
        raise ConfigError(f"the base model is needed for an export: {error}") from error


def _base_of(adapter: Path) -> HfCheckpoint:
    """Open the base model that an adapter's settings name."""
    name = read_adapter_config(adapter).base_model_name_or_path or ""
    if not name:
        raise ConfigError(
            f"{adapter / CONFIG} names no base model. Write its folder there as base_model_name_or_path."
        )
    return _open_model(name, adapter)


def _merge(
    adapter: Path,
    target: Path,
    base: HfCheckpoint,
    max_shard_bytes: int,
    config: Config | None = None,
) -> None:
    """Write the base model with the adapter merged in, one parameter in memory at a time."""
    settings = config or Config()
    built = build_model(
        base, dtype=torch.float32, trust_remote_code=settings.model.trust_remote_code
    )
    io = settings.io
    pool = BufferPool()
    with ExitStack() as stack:
        backend = open_backend(
            io.backend, queue_depth=io.queue_depth, request_bytes=io.request_bytes
        )
        stack.callback(backend.close)
        source = WeightSource(base, built.keymap, backend, pool, direct=io.direct)
        stack.callback(source.close)
        merge_adapter(
            target, adapter_dir=adapter, model=built.model, checkpoint=base, keymap=built.keymap,
            source=source, max_shard_bytes=max_shard_bytes,
        )  # fmt: skip
