"""Writing one safetensors file tensor by tensor, in any order, without holding it in memory.

The bytes are those that the safetensors library writes for the same tensors. The page cache is emptied while
writing, so that a large file does not count as memory. `ssdtune.model.headers` reads; sharding, index and
renaming are in `ssdtune.export.safetensors_writer`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from ssdtune.errors import StorageError
from ssdtune.model.headers import DTYPE_BYTES
from ssdtune.units import MIB

METADATA = {"format": "pt"}
"""What transformers and peft put into the header."""

TORCH_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""torch's dtypes by safetensors' names."""

DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

_ORDER = ("BOOL", "U8", "I8", "I16", "F16", "BF16", "I32", "F32", "F64", "I64")
"""The library orders tensors by descending dtype (in this order), then by name."""

_PIECE_BYTES = 16 * MIB
_FLUSH_BYTES = 64 * MIB


@dataclass(frozen=True)
class SavedTensor:
    """A tensor to be written: name, shape, and dtype as safetensors names it.

    Tensors of the same `storage` (not 0) are parts of one parameter, which transformers keeps in one file.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    storage: int = field(default=0, compare=False)

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class SafetensorsFile:
    """A safetensors file being written. Use it as a context manager; leaving it closes the file.

    Args:
        path: The file; it must not exist yet.
        tensors: All that it will hold.
    """

    def __init__(self, path: Path, tensors: Iterable[SavedTensor]) -> None:
        self.path = path
        self.tensors = {tensor.name: tensor for tensor in tensors}
        header: dict[str, object] = {"__metadata__": METADATA}
        self._offsets: dict[str, int] = {}
        position = 0
        for tensor in sorted(
            self.tensors.values(),
            key=lambda tensor: (-_ORDER.index(tensor.dtype), tensor.name.encode()),
        ):
            end = position + tensor.num_bytes
            header[tensor.name] = {
                "dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [position, end],
            }  # fmt: skip
            self._offsets[tensor.name] = position
            position = end
        raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        raw += b" " * (-len(raw) % 8)
        self._base = 8 + len(raw)
        self._missing = set(self._offsets)
        self._unflushed = 0
        self._file = -1
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            os.truncate(self._file, self._base + position)
        except OSError as error:
            self.close()
            raise StorageError("open", path, errno=error.errno or 0) from error
        self._write(len(raw).to_bytes(8, "little") + raw, 0)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor; its dtype and shape are those announced, each name comes once.

        Raises:
            ValueError: It isn't as announced.
            StorageError: The write failed.
        """
        expected = self.tensors[name]
        found = SavedTensor(name, tuple(tensor.shape), DTYPE_NAMES.get(tensor.dtype, "?"))
        if found != expected or name not in self._missing:
            raise ValueError(f"expected {expected} once, got {found}")
        if tensor.numel():
            flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
            self._write(memoryview(flat.numpy()), self._base + self._offsets[name])
        self._missing.remove(name)

    def write_rows(self, name: str, pieces: Iterable[torch.Tensor]) -> None:
        """Write one tensor, some rows at a time, in order; else as `write`."""
        expected, done = self.tensors[name], 0
        for piece in pieces:
            found = SavedTensor(name, tuple(piece.shape), DTYPE_NAMES.get(piece.dtype, "?"))
            rows = replace(found, shape=(expected.shape[0], *found.shape[1:]))
            end = done + found.num_bytes
            if rows != expected or name not in self._missing or end > expected.num_bytes:
                raise ValueError(f"expected rows of {expected} once, got {found}")
            flat = piece.detach().contiguous().view(-1).view(torch.uint8)
            self._write(memoryview(flat.numpy()), self._base + self._offsets[name] + done)
            done = end
        if done != expected.num_bytes:
            raise ValueError(f"expected {expected}, got {done} bytes")
        self._missing.remove(name)

    def finish(self) -> None:
        """Make the file durable.

        Raises:
            ValueError: Tensors are missing.
        """
        if self._missing:
            raise ValueError(f"{self.path.name} lacks {sorted(self._missing)[:3]}")
        self._flush()

    def close(self) -> None:
        """Close the file, complete or not."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _write(self, data: bytes | memoryview, offset: int) -> None:
        done = 0
        while done < len(data):
            try:
                count = os.pwrite(self._file, data[done : done + _PIECE_BYTES], offset + done)
            except OSError as error:
                raise StorageError(
                    "write", self.path, errno=error.errno or 0,
                    offset=offset, wanted=len(data), done=done,
                ) from error  # fmt: skip
            done += count
            self._unflushed += count
            if self._unflushed >= _FLUSH_BYTES:
                self._flush()

    def _flush(self) -> None:
        try:
            os.fsync(self._file)
        except OSError as error:
            raise StorageError("sync", self.path, errno=error.errno or 0) from error
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)
        self._unflushed = 0
