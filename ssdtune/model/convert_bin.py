"""Conversion of pickled weights (pytorch_model.bin) to safetensors, so that they can be read in place.

The files are unpickled by torch's weights_only loader, which builds tensors and nothing else: code in a file is
refused, never run. Shards are converted one after the other, tensor by tensor, from a memory-mapped file. The
result is a complete checkpoint folder that is made once and found again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import zipfile
from pathlib import Path
from typing import Any

import torch

from ssdtune.errors import CapacityError, ConfigError, FormatError, first_line
from ssdtune.model.checkpoint import INDEX, PICKLE, PICKLE_INDEX, SINGLE, sidecar_files
from ssdtune.model.headers import DOWNLOAD_AGAIN
from ssdtune.model.safetensors_file import DTYPE_NAMES, SafetensorsFile, SavedTensor
from ssdtune.units import format_disk

logger = logging.getLogger(__name__)


def convert_bin(folder: Path, convert_dir: Path) -> Path:
    """Convert the pickled weights of a checkpoint folder, which is only read.

    Args:
        convert_dir: A new folder inside it is made for the result, named by the files' names, sizes and times.

    Returns:
        The folder with the converted checkpoint.

    Raises:
        FormatError: A file is damaged, missing, or holds more than tensors.
        CapacityError: There is not enough space.
        ConfigError: The folder can't be written.
    """
    shards = _shards(folder)
    target = convert_dir / f"converted-{_identity(folder, shards)}"
    if (target / "config.json").exists():
        return target
    size = sum((folder / shard).stat().st_size for shard in shards)
    logger.warning(
        "%s has only pickled weights (%s): converting them to safetensors in %s, once.",
        folder, format_disk(size), target,
    )  # fmt: skip
    partial = convert_dir / f"{target.name}.partial"
    try:
        convert_dir.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
    except OSError as error:
        raise ConfigError(f"cannot write to {convert_dir}: {error.strerror}.") from error
    try:
        free = shutil.disk_usage(partial).free
        if free < size:
            raise CapacityError(
                f"converting {folder} to safetensors needs {format_disk(size)} in {convert_dir}; "
                f"{format_disk(free)} are free. Free space there."
            )
        _convert_all(folder, shards, partial)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _shards(folder: Path) -> list[str]:
    if (folder / PICKLE).exists():
        return [PICKLE]
    path = folder / PICKLE_INDEX
    try:
        shards = sorted(set(json.loads(path.read_bytes())["weight_map"].values()))
        names_ok = all(Path(shard).name == shard for shard in shards)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{path} is not a valid index: {error}. {DOWNLOAD_AGAIN}") from error
    if not names_ok:
        raise FormatError(f"{path} names files outside of its folder. {DOWNLOAD_AGAIN}")
    for shard in shards:
        if not (folder / shard).exists():
            raise FormatError(
                f"{folder / shard} is missing; {path.name} names it. Download it again."
            )
    return shards


def _identity(folder: Path, shards: list[str]) -> str:
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for shard in shards:
        stat = (folder / shard).stat()
        digest.update(f"{folder}/{shard} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def _convert_all(folder: Path, shards: list[str], target: Path) -> None:
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = SINGLE
        if len(shards) > 1:
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = _load(folder / shard)
        announced = [
            SavedTensor(key, tuple(tensor.shape), DTYPE_NAMES[tensor.dtype])
            for key, tensor in tensors.items()
        ]
        with SafetensorsFile(target / name, announced) as file:
            for key in list(tensors):
                file.write(key, tensors.pop(key))
            file.finish()
        weight_map |= {tensor.name: name for tensor in announced}
    if len(shards) > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (target / INDEX).write_text(json.dumps(index), encoding="utf-8")
    for relative in sidecar_files(folder):
        (target / relative).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / relative, target / relative)


def _load(path: Path) -> dict[str, torch.Tensor]:
    """Load one file without running code from it."""
    mapped = zipfile.is_zipfile(path)
    if not mapped:
        _refuse_pointer(path)
        logger.warning(
            "%s is in torch's old format and is loaded whole (%s of memory).",
            path, format_disk(path.stat().st_size),
        )  # fmt: skip
    try:
        content: Any = torch.load(  # noqa: TID251 - weights_only
            path, map_location="cpu", weights_only=True, mmap=mapped
        )
    except Exception as error:  # any kind, by what the damage is
        raise FormatError(
            f"{path} ({path.stat().st_size} bytes) holds no plain tensors, or is damaged; nothing in it was run "
            f"({first_line(error)}). Take the model's safetensors files, or download again."
        ) from error
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        content = content["state_dict"]
    valid = isinstance(content, dict) and all(
        isinstance(key, str) and isinstance(value, torch.Tensor) and value.dtype in DTYPE_NAMES
        for key, value in content.items()
    )
    if not valid or not content:
        raise FormatError(
            f"{path} is no dictionary of named tensors. Take the model's safetensors files."
        )
    return dict(content)


def _refuse_pointer(path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(24)
    if start.startswith(b"version https://git-lfs") or not start:
        what = "a Git LFS pointer" if start else "empty"
        raise FormatError(f"{path} is {what} ({path.stat().st_size} bytes). {DOWNLOAD_AGAIN}")
