"""Safetensors headers: which tensor lies where in a file, checked before a single weight is read.

The header is parsed here rather than by the safetensors library, because a damaged file must be named with
the bytes that were expected and found, and because weights are read at their offsets with direct I/O.
`ssdtune.model.checkpoint` puts the files of a folder together.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssdtune.errors import FormatError

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit for the JSON header."""

DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1,
    "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "C64": 8, "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip
"""Bytes of one element by the format's dtype names; 4- and 6-bit floats have none."""

DOWNLOAD_AGAIN = "Download again."


@dataclass(frozen=True, slots=True)
class TensorExtent:
    """Where one tensor lies: `num_bytes` bytes of `path` from byte `offset` of the file.

    `dtype` is the format's name, such as "BF16".
    """

    name: str
    path: Path
    offset: int
    num_bytes: int
    dtype: str
    shape: tuple[int, ...]


def read_header(path: Path) -> tuple[dict[str, TensorExtent], bytes]:
    """Read and check the header of a safetensors file.

    Returns:
        The tensors by name, in the order of their offsets, and the raw header bytes.

    Raises:
        FormatError: The file is missing, empty, truncated, a Git LFS pointer, or contradicts itself.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            if start.startswith(b"version "):
                _refuse_pointer(path, start + file.read(200), size)
            if len(start) < 8:
                raise FormatError(
                    f"{path} has {size} bytes, less than the 8 that every safetensors file starts with. "
                    + DOWNLOAD_AGAIN
                )
            header_bytes = int.from_bytes(start, "little")
            if header_bytes > MAX_HEADER_BYTES:
                raise FormatError(
                    f"{path} ({size} bytes) is no safetensors file: its first 8 bytes announce a header of "
                    f"{header_bytes} bytes, and {MAX_HEADER_BYTES} is the limit. {DOWNLOAD_AGAIN}"
                )
            if 8 + header_bytes > size:
                raise FormatError(
                    f"{path} is truncated: its header alone needs {8 + header_bytes} bytes, the file has "
                    f"{size}. {DOWNLOAD_AGAIN}"
                )
            raw = file.read(header_bytes)
    except OSError as error:
        raise FormatError(
            f"cannot read {path}: {error.strerror}. Give read access, or download it again."
        ) from error
    tensors, data_bytes = _parse(path, raw)
    expected = 8 + header_bytes + data_bytes
    if size != expected:
        what = "is truncated" if size < expected else "has trailing bytes"
        raise FormatError(
            f"{path} {what}: its header describes {expected} bytes, the file has {size}. {DOWNLOAD_AGAIN}"
        )
    return tensors, raw


def _refuse_pointer(path: Path, text: bytes, size: int) -> None:
    match = re.search(rb"^size (\d+)$", text, re.MULTILINE)
    expected = f"{match[1].decode()} bytes" if match else "weights"
    raise FormatError(
        f"{path} is a Git LFS pointer of {size} bytes, not the file of {expected} that it stands for. "
        'Download again, with "git lfs pull" or "hf download".'
    )


def _parse(path: Path, raw: bytes) -> tuple[dict[str, TensorExtent], int]:
    """Return the tensors in the order of their offsets, and the bytes that they fill."""
    try:
        header = json.loads(raw, object_pairs_hook=_without_duplicates)
        header.pop("__metadata__", None)
        base = 8 + len(raw)
        extents = [_extent(path, base, name, entry) for name, entry in header.items()]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = error if isinstance(error, ValueError) else f"unexpected content ({error!r})"
        raise FormatError(
            f"{path}: the header of {len(raw)} bytes is not valid: {reason}. {DOWNLOAD_AGAIN}"
        ) from error
    extents.sort(key=lambda extent: (extent.offset, extent.num_bytes))
    position, before = base, None
    for extent in extents:
        if extent.offset != position:
            problem = "overlaps" if extent.offset < position else "leaves a gap after"
            raise FormatError(
                f'{path}: tensor "{extent.name}" begins at byte {extent.offset} and {problem} '
                f'"{before or "the header"}", which ends at byte {position}. {DOWNLOAD_AGAIN}'
            )
        position, before = extent.offset + extent.num_bytes, extent.name
    return {extent.name: extent for extent in extents}, position - base


def _extent(path: Path, base: int, name: str, entry: dict[str, Any]) -> TensorExtent:
    dtype, shape = entry["dtype"], entry["shape"]
    begin, end = entry["data_offsets"]
    if not all(isinstance(number, int) and number >= 0 for number in (*shape, begin, end)):
        raise ValueError(f'tensor "{name}" has shape {shape} and offsets {begin} to {end}')
    if dtype in DTYPE_BYTES:
        expected = math.prod(shape) * DTYPE_BYTES[dtype]
        if end - begin != expected:
            raise ValueError(
                f'tensor "{name}" of dtype {dtype} and shape {shape} needs {expected} bytes, '
                f"its offsets give {end - begin}"
            )
    return TensorExtent(name, path, base + begin, end - begin, dtype, tuple(shape))


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f'"{twice}" is there twice')
    return result
