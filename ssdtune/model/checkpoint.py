"""A Hugging Face checkpoint folder: its settings, and where each of its tensors lies on the drive.

Everything that can be wrong with the files is found here, from the headers alone and without torch, before
anything else happens. Nothing is ever written to the folder. What the tensors mean for a model is the
business of `ssdtune.model.keys`; `ssdtune.model.source` reads them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssdtune.errors import ConfigError, FormatError
from ssdtune.model.headers import DOWNLOAD_AGAIN, TensorExtent, read_header

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"

FLOAT_DTYPES = ("F32", "BF16", "F16")
"""Dtypes of weights that can be trained, as safetensors names them."""

_COMPARE_BYTES = 8 << 20

_SIDECAR_SUFFIXES = {".json", ".jinja", ".txt", ".model", ".tiktoken", ".spm", ".vocab", ".bpe"}
_NOT_SIDECARS = re.compile(
    r".*\.index\.json|adapter_config\.json|trainer_state\.json|plan\.json|ssdtune-.*|README.*|requirements.*"
)
_LICENSES = re.compile(r"(LICEN[CS]E|NOTICE|USE_POLICY).*", re.IGNORECASE)


@dataclass(frozen=True)
class HfCheckpoint:
    """The checked content of a checkpoint folder; make it with `HfCheckpoint.open`.

    Attributes:
        path: The folder with the safetensors files.
        name_or_path: What the user named: a folder or a hub id.
        config: The content of config.json.
        tensors: All tensors by name.
        index: The content of the shard index, or None for a single file.
        fingerprint: SHA-256 over config.json, the headers, and each file's size and time of change. It tells
            whether the weights may have changed since, without reading them.
    """

    path: Path
    name_or_path: str
    config: dict[str, Any]
    tensors: dict[str, TensorExtent]
    index: dict[str, Any] | None
    fingerprint: str

    @classmethod
    def open(cls, name_or_path: str | Path, *, convert_dir: Path | None = None) -> HfCheckpoint:
        """Open a checkpoint folder, or a hub id that lies in the local cache, and check it.

        Args:
            name_or_path: Folder, or hub id such as "org/name". Nothing is downloaded.
            convert_dir: Where weights that exist only as pickled pytorch_model.bin may be converted to. None
                refuses such folders.

        Raises:
            ConfigError: No such folder, not a checkpoint, quantized or only pickled weights.
            FormatError: A file is damaged or missing.
        """
        path = resolve(name_or_path)
        config, config_bytes = read_config(path)
        refuse_quantized(path / "config.json", config)
        if not (path / SINGLE).exists() and not (path / INDEX).exists():
            path = _convert(path, convert_dir)
        index = None if (path / SINGLE).exists() else _read_index(path)
        shards = [SINGLE] if index is None else sorted(set(index["weight_map"].values()))
        digest = hashlib.sha256(config_bytes)
        tensors: dict[str, TensorExtent] = {}
        for shard in shards:
            found, header = read_header(path / shard)
            stat = (path / shard).stat()
            digest.update(f"\n{shard} {stat.st_size} {stat.st_mtime_ns}\n".encode() + header)
            for name in tensors.keys() & found.keys():
                raise FormatError(
                    f'tensor "{name}" is both in {tensors[name].path} and in {path / shard}. {DOWNLOAD_AGAIN}'
                )
            tensors |= found
        if index is not None:
            _check_index(path, index, tensors)
        _refuse_dtypes(tensors)
        return cls(path, str(name_or_path), config, tensors, index, digest.hexdigest())

    @classmethod
    def open_config(cls, name_or_path: str | Path) -> HfCheckpoint:
        """Open a folder that may have no weights, only a config.json: enough for planning.

        Raises:
            ConfigError: No such folder, no config.json, or a quantized model.
        """
        path = resolve(name_or_path)
        config, config_bytes = read_config(path)
        refuse_quantized(path / "config.json", config)
        digest = hashlib.sha256(config_bytes).hexdigest()
        return cls(path, str(name_or_path), config, {}, None, digest)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(extent.num_bytes for extent in self.tensors.values())

    @property
    def vocab_size(self) -> int | None:
        """Rows of the embedding; see `vocab_size`."""
        return vocab_size(self.config)

    def sidecar_files(self) -> list[Path]:
        """List what belongs to the model besides its weights, relative to `path`.

        Settings, tokenizer, chat templates, licences, and the model's own Python code.
        """
        return sidecar_files(self.path)


def same_bytes(first: TensorExtent, second: TensorExtent) -> bool:
    """Tell whether two tensors are equal in dtype, shape and bytes; reads until the first difference."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    with first.path.open("rb", buffering=0) as file, second.path.open("rb", buffering=0) as other:
        for start in range(0, first.num_bytes, _COMPARE_BYTES):
            size = min(_COMPARE_BYTES, first.num_bytes - start)
            pieces = []
            for handle, extent in ((file, first), (other, second)):
                pieces.append(os.pread(handle.fileno(), size, extent.offset + start))
                os.posix_fadvise(
                    handle.fileno(), extent.offset + start, size, os.POSIX_FADV_DONTNEED
                )
            if pieces[0] != pieces[1]:
                return False
    return True


def resolve(name_or_path: str | Path) -> Path:
    """Return the folder that a path or hub id means; the hub's local cache is searched, never the network.

    Raises:
        ConfigError: There is none.
    """
    if not str(name_or_path):
        raise ConfigError("no model was named. Set model_name_or_path to a checkpoint folder.")
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        if not os.access(path, os.R_OK | os.X_OK):
            raise ConfigError(f"cannot look into {path}: permission denied. Give read access.")
        return path.resolve()
    if path.exists():
        raise ConfigError(
            f"{path} is a file; model_name_or_path must be a checkpoint folder. "
            f"Its folder is {path.resolve().parent}."
        )
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(name_or_path)):
        raise ConfigError(
            f"there is no folder {path} (looked in {Path.cwd()}). Check model_name_or_path."
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(name_or_path), local_files_only=True)).resolve()
    except (LocalEntryNotFoundError, HFValidationError) as error:
        raise ConfigError(
            f'"{name_or_path}" is neither a folder (looked in {Path.cwd()}) nor a model in the local cache of '
            f'the Hugging Face hub. Download it first: "hf download {name_or_path}".'
        ) from error


def read_config(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return config.json of a checkpoint folder, parsed and as bytes.

    Raises:
        ConfigError: It is missing or names no model type.
        FormatError: It is no JSON.
    """
    file = path / "config.json"
    if not file.exists():
        if (path / "adapter_config.json").exists():
            raise ConfigError(
                f"{path} is a PEFT adapter, not a whole model. Name its base model as model_name_or_path, and "
                "this folder as adapter (with method: lora)."
            )
        raise ConfigError(
            f"{path} has no config.json, so it is not a Hugging Face checkpoint. Name the folder that holds "
            "config.json and the safetensors files."
        )
    config, raw = read_json(file)
    if not isinstance(config.get("model_type"), str):
        raise ConfigError(
            f'{file} names no "model_type". Name the folder of a checkpoint that transformers loads.'
        )
    return config, raw


def vocab_size(config: Mapping[str, Any]) -> int | None:
    """Return the rows of the embedding as a config.json names them; None if it doesn't."""
    sizes = (
        part.get("vocab_size")
        for part in (config, config.get("text_config"))
        if isinstance(part, dict)
    )
    return next((size for size in sizes if isinstance(size, int) and size), None)


def sidecar_files(path: Path) -> list[Path]:
    """List what a checkpoint folder holds besides weights; see `HfCheckpoint.sidecar_files`."""
    files = [
        file.relative_to(path)
        for file in path.iterdir()
        if file.is_file()
        and (file.suffix in _SIDECAR_SUFFIXES or _LICENSES.fullmatch(file.name))
        and not _NOT_SIDECARS.fullmatch(file.name)
    ]
    templates = path / "additional_chat_templates"
    files += [file.relative_to(path) for file in templates.glob("*.jinja")]
    code = (file.relative_to(path) for file in path.rglob("*.py") if file.is_file())
    files += [
        file for file in code if not any(part.startswith((".", "__")) for part in file.parts[:-1])
    ]
    return sorted(files)


def read_json(file: Path) -> tuple[dict[str, Any], bytes]:
    """Return a JSON object of a model folder, parsed and as bytes.

    Raises:
        FormatError: It cannot be read, or is none.
    """
    try:
        raw = file.read_bytes()
        content = json.loads(raw)
    except OSError as error:
        raise FormatError(
            f"cannot read {file}: {error.strerror}. Give read access, or download it again."
        ) from error
    except (ValueError, RecursionError) as error:
        kind = (
            "a Git LFS pointer" if raw.startswith(b"version https://git-lfs") else "not valid JSON"
        )
        raise FormatError(
            f"{file} ({len(raw)} bytes) is {kind}: {error}. {DOWNLOAD_AGAIN}"
        ) from error
    if not isinstance(content, dict):
        raise FormatError(f"{file} is not a JSON object. {DOWNLOAD_AGAIN}")
    return content, raw


def _read_index(path: Path) -> dict[str, Any]:
    file = path / INDEX
    index, _ = read_json(file)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(f'{file} has no "weight_map". {DOWNLOAD_AGAIN}')
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise FormatError(
                f'{file}: tensor "{name}" is said to be in "{shard}", which is no file name of that folder. '
                + DOWNLOAD_AGAIN
            )
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not (path / shard).exists()]
    if missing:
        needed = sum(shard == missing[0] for shard in weight_map.values())
        raise FormatError(
            f"{path / missing[0]} is missing: {file.name} names {len(shards)} files, {len(missing)} of them "
            f"are not there; {needed} tensors are in this one. Download it again."
        )
    return index


def _check_index(path: Path, index: dict[str, Any], tensors: dict[str, TensorExtent]) -> None:
    for name, shard in index["weight_map"].items():
        if name not in tensors or tensors[name].path.name != shard:
            where = f"it is in {tensors[name].path.name}" if name in tensors else "it is in no file"
            raise FormatError(
                f'{path / INDEX} says that tensor "{name}" is in {path / shard}; {where}. {DOWNLOAD_AGAIN}'
            )


def refuse_quantized(file: Path, config: dict[str, Any]) -> None:
    """Refuse a model with quantized weights.

    Args:
        file: Where the configuration was read.

    Raises:
        ConfigError: It is one.
    """
    quantization = config.get("quantization_config") or config.get("compression_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise ConfigError(
            f"{file} has a quantization_config (quant_method: {method}); quantized weights "
            "can't be trained. Take the model's bf16, fp16 or fp32 checkpoint, or dequantize it first."
        )


def _refuse_dtypes(tensors: dict[str, TensorExtent]) -> None:
    for extent in tensors.values():
        if extent.dtype.startswith(("F8", "F4", "F6")):
            raise ConfigError(
                f'tensor "{extent.name}" in {extent.path} has dtype {extent.dtype}, which can\'t be trained. '
                "Take the model's bf16, fp16 or fp32 checkpoint, or dequantize it first."
            )


def _convert(path: Path, convert_dir: Path | None) -> Path:
    """Return a folder with safetensors made from pickled weights, or say what is missing."""
    if not (path / PICKLE).exists() and not (path / PICKLE_INDEX).exists():
        for name in (SINGLE, INDEX, PICKLE, PICKLE_INDEX):
            if (path / name).is_symlink():  # a link that leads to a file would have been found
                raise ConfigError(
                    f"{path / name} is a link to {(path / name).readlink()}, which leads to no file. "
                    "Download the model's files again, or put that file back."
                )
        others = sorted(
            file.name for file in path.iterdir()
            if file.suffix in {".safetensors", ".gguf", ".pth", ".pt", ".h5", ".msgpack"}
        )  # fmt: skip
        found = f" (found {', '.join(others[:3])})" if others else ""
        raise ConfigError(
            f"{path} has no weights: neither {SINGLE} nor {INDEX}{found}. "
            "Download the model's safetensors files."
        )
    if convert_dir is None:
        raise ConfigError(
            f"{path} has its weights only as pickled pytorch_model.bin. Convert them to safetensors first."
        )
    from ssdtune.model.convert_bin import convert_bin

    return convert_bin(path, convert_dir)
