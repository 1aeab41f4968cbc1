"""A folder of safetensors shards with their index, as `save_pretrained` makes it, written as a stream.

Everything goes into a hidden folder inside the output folder first; `commit` makes it durable and moves it
into place, config.json (or adapter_config.json) last: an output folder that has it is complete. `ssdtune.export.weights` says
what goes in.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from ssdtune.errors import CapacityError, ConfigError, StorageError
from ssdtune.model.safetensors_file import SafetensorsFile, SavedTensor
from ssdtune.store.durable import fsync
from ssdtune.units import format_disk

MAX_SHARD_BYTES = 50 * 10**9
"""Where transformers 5 begins a new shard."""

STAGING_NAME = ".export-partial"


class Staging:
    """A hidden folder for files that appear in `output_dir` all together; a context manager.

    `stem` is "model" or "adapter_model": which weights of an earlier export are replaced. Leaving it without `commit` removes what was written. Files that an unfinished export left are replaced.

    Raises:
        ConfigError: The output folder cannot be made.
    """

    def __init__(self, output_dir: Path, stem: str = "model") -> None:
        self.output_dir = output_dir
        self._config_name = "config.json" if stem == "model" else "adapter_config.json"
        self._old = re.compile(
            rf"{stem}(-\d{{5}}-of-\d{{5}})?\.safetensors(\.index\.json)?|{self._config_name}"
        )
        self.path = output_dir / STAGING_NAME
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(self.path, ignore_errors=True)
            self.path.mkdir()
        except OSError as error:
            raise ConfigError(
                f"cannot write to {output_dir}: {error.strerror}. Name a folder that can be written to."
            ) from error

    def require_space(self, num_bytes: int) -> None:
        """Refuse to start where `num_bytes` bytes can't fit.

        Raises:
            CapacityError: The file system has less.
        """
        free = shutil.disk_usage(self.path).free
        if num_bytes > free:
            raise CapacityError(
                f"the export needs {format_disk(num_bytes)} in {self.output_dir}; {format_disk(free)} are free. "
                "Free space there, or name another folder."
            )

    def commit(self) -> None:
        """Sync everything written, remove the weights of an earlier export, and move the files into place."""
        files = sorted(path for path in self.path.rglob("*") if path.is_file())
        files.sort(key=lambda path: path.name == self._config_name)
        try:
            for path in files:
                fsync(path)
            for old in self.output_dir.iterdir():
                if old.is_file() and self._old.fullmatch(old.name):
                    old.unlink()
            for path in files:
                target = self.output_dir / path.relative_to(self.path)
                target.parent.mkdir(parents=True, exist_ok=True)
                path.replace(target)
            fsync(self.output_dir)
        except OSError as error:
            raise StorageError("write", self.output_dir, errno=error.errno or 0) from error

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, *error: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


class ShardWriter:
    """Writes the tensors of a model into shards, in any order; a context manager.

    Args:
        directory: Where the shards go; see `Staging`.
        tensors: All tensors in the order of `save_pretrained`, which decides the sharding.
        num_parameters: For the index.
        stem: "model" or "adapter_model".
    """

    def __init__(
        self,
        directory: Path,
        tensors: Sequence[SavedTensor],
        *,
        num_parameters: int = 0,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        stem: str = "model",
    ) -> None:
        from huggingface_hub import split_state_dict_into_shards_factory

        storage_bytes: dict[int, int] = defaultdict(int)
        for tensor in tensors:
            storage_bytes[tensor.storage] += tensor.num_bytes
        plan = split_state_dict_into_shards_factory(
            {tensor.name: tensor for tensor in tensors},
            get_storage_size=lambda tensor: (
                storage_bytes[tensor.storage] if tensor.storage else tensor.num_bytes
            ),
            get_storage_id=lambda tensor: tensor.storage or None,
            filename_pattern=f"{stem}{{suffix}}.safetensors",
            max_shard_size=max_shard_bytes,
        )
        self.total_bytes: int = plan.metadata["total_size"]
        self._directory = directory
        self._stem = stem
        self._num_parameters = num_parameters
        self._shard_of: dict[str, str] = plan.tensor_to_filename
        by_name = {tensor.name: tensor for tensor in tensors}
        self._contents = {
            shard: [by_name[name] for name in names]
            for shard, names in plan.filename_to_tensors.items()
        }
        self._left = {shard: len(names) for shard, names in self._contents.items()}
        self._open: dict[str, SafetensorsFile] = {}

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor (CPU, dtype and shape as announced), any view will do."""
        self._file_of(name).write(name, tensor)
        self._note(name)

    def write_rows(self, name: str, pieces: Iterable[torch.Tensor]) -> None:
        """Write one tensor that comes some rows at a time, in order."""
        self._file_of(name).write_rows(name, pieces)
        self._note(name)

    def _file_of(self, name: str) -> SafetensorsFile:
        shard = self._shard_of[name]
        if shard not in self._open:
            self._open[shard] = SafetensorsFile(self._directory / shard, self._contents[shard])
        return self._open[shard]

    def _note(self, name: str) -> None:
        """Note that a tensor is written."""
        shard = self._shard_of[name]
        self._left[shard] -= 1
        if self._left[shard] == 0:  # complete: give the descriptor back
            self._open[shard].finish()
            self._open.pop(shard).close()

    def finish(self) -> None:
        """Write the index if there are several shards.

        Raises:
            ValueError: Tensors are missing.
        """
        missing = [shard for shard, left in self._left.items() if left]
        if missing:
            raise ValueError(f"{missing[0]} lacks {self._left[missing[0]]} tensors")
        if len(self._contents) > 1:
            index = {
                "metadata": {
                    "total_parameters": self._num_parameters,
                    "total_size": self.total_bytes,
                },
                "weight_map": self._shard_of,
            }
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            path = self._directory / f"{self._stem}.safetensors.index.json"
            path.write_text(text, encoding="utf-8")

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()
