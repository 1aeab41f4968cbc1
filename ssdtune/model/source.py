"""Reading parameters straight from the original checkpoint files, as the model wants them in memory.

Tensors lie at any byte of a safetensors file. What is asked for is sorted, neighbours are joined into large
direct reads over a few scratch buffers, and each piece is converted to the destination's dtype while the next
one is read. So memory beyond the destination is the scratch buffers, and neither the page cache nor the
checkpoint's folder is touched. Conversions that do more than move data (few models) also need their inputs in
memory, one parameter at a time. Which tensors make a parameter is decided in `ssdtune.model.keys`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from ssdtune.errors import FormatError, StorageError
from ssdtune.io.backend import ALIGNMENT, Backend, File, Ticket
from ssdtune.io.buffers import BufferPool
from ssdtune.io.device_bytes import Memory
from ssdtune.io.tickets import Tickets
from ssdtune.io.unaligned import start_range
from ssdtune.model.checkpoint import HfCheckpoint
from ssdtune.model.conversion import Rule
from ssdtune.model.headers import TensorExtent
from ssdtune.model.keys import KeyMap
from ssdtune.model.safetensors_file import TORCH_DTYPES
from ssdtune.units import MIB

NUM_BUFFERS = 4
"""Scratch buffers: reads under way plus the one being converted."""

MAX_GAP_BYTES = 64 << 10
"""Tensors this close in a file are read at once, the unused bytes between them too."""

MAX_OPEN_FILES = 8

Split = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
"""Split float32 [N] into the bfloat16 [N] and int16 [N] halves given as second and third argument."""

Sink = Callable[[int, torch.Tensor], None]
"""Takes a piece of a tensor: index of its first element, and the flat elements in the file's dtype."""


@dataclass(frozen=True)
class _Job:
    """A contiguous range of elements of a file, and who takes them."""

    path: Path
    offset: int
    num_bytes: int
    dtype: torch.dtype
    sink: Sink


@dataclass(frozen=True)
class _Window:
    """One read: a byte range of a file, and the jobs' parts in it as (job, first byte in it, length)."""

    path: Path
    offset: int
    num_bytes: int
    parts: list[tuple[_Job, int, int]]


class WeightSource:
    """Fills tensors with the model's parameters from the checkpoint. Thread-safe; calls block.

    Args:
        backend: Moves the bytes; the caller closes it after this source.
        pool: Gives the scratch buffers, of `scratch_bytes` in all, until `close`.
        direct: Bypass the page cache where the file system can.

    Attributes:
        bytes_read: Bytes read so far.
    """

    def __init__(
        self,
        checkpoint: HfCheckpoint,
        keymap: KeyMap,
        backend: Backend,
        pool: BufferPool,
        *,
        scratch_bytes: int = 32 * MIB,
        direct: bool = True,
    ) -> None:
        self.checkpoint = checkpoint
        self.keymap = keymap
        self.bytes_read = 0
        self._backend = backend
        self._pool = pool
        self._direct = direct
        size = max(scratch_bytes // NUM_BUFFERS // ALIGNMENT, 3) * ALIGNMENT
        self._buffers = [
            pool.take(size, "a scratch buffer for weights") for _ in range(NUM_BUFFERS)
        ]
        self._window_bytes = size - 2 * ALIGNMENT
        self._files: dict[Path, File] = {}
        self._lock = threading.Lock()

    def load(self, names: Iterable[str], into: Mapping[str, torch.Tensor]) -> None:
        """Fill tensors with parameters or persistent buffers.

        Args:
            names: Names in the model; tied parameters may go by any of theirs.
            into: For each name, a contiguous CPU tensor of the parameter's shape, owned by the caller; the
                values are converted to its dtype.

        Raises:
            StorageError: A read failed.
            ValueError: Unknown name, or a destination that doesn't fit.
        """
        wanted: dict[str, torch.Tensor] = {}
        copies: list[
            tuple[torch.Tensor, torch.Tensor]
        ] = []  # tied names that are asked for together
        with self._lock, torch.no_grad():
            for name in names:
                self._check(name, into[name], None)
                key = self.keymap.canonical(name)
                if key in self.keymap.initial:
                    into[name].copy_(self.keymap.initial[key])
                elif key in wanted:
                    copies.append((into[name], wanted[key]))
                else:
                    wanted[key] = into[name]
            jobs: list[_Job] = []
            others: dict[str, Rule] = {}
            for key, tensor in wanted.items():
                rule = self.keymap.load_rules[key]
                pieces = _pieces(rule, tensor)
                for name, piece in zip(rule.inputs, pieces):
                    jobs.append(self._job(name, _copy_into(piece.view(-1))))
                if not pieces:
                    others.setdefault(rule.key, rule)
            self._stream(jobs)
            for rule in others.values():
                self._convert(rule, wanted)
            for tensor, original in copies:
                tensor.copy_(original)

    def load_straight(
        self,
        names: Iterable[str],
        into: Mapping[str, torch.Tensor],
        memory_of: Callable[[torch.Tensor], Memory],
        first_rows: Mapping[str, int],
    ) -> None:
        """Fill tensors in device memory, without a byte passing through host memory of this process.

        Args:
            names: Names in the model that `stored_as_is` was true of.
            into: For each name, a contiguous tensor of the parameter's shape, in the dtype of the files.
            memory_of: Returns what the backend takes of a tensor's memory.
            first_rows: Of those of which only some rows are wanted; see `load_range`.

        Raises:
            StorageError: A read failed.
        """
        with self._lock, Tickets() as tickets:
            for name in names:
                rule = self.keymap.load_rules[self.keymap.canonical(name)]
                for key, piece in zip(rule.inputs, _pieces(rule, into[name])):
                    extent: TensorExtent = self.checkpoint.tensors[key]
                    target, offset = piece.view(-1), extent.offset
                    if name in first_rows:
                        offset += first_rows[name] * (extent.num_bytes // extent.shape[0])
                    file, memory = self._open(extent.path, deque()), memory_of(target)
                    # Backends that don't take device memory are never given any.
                    tickets.add(self._backend.read(file, offset, cast(memoryview, memory)))
                    self.bytes_read += target.nbytes

    def load_split(
        self,
        names: Iterable[str],
        high: Mapping[str, torch.Tensor],
        low: Mapping[str, torch.Tensor],
        split: Split,
    ) -> None:
        """Fill the two halves of master weights; see `load`.

        Args:
            high: For each name, a contiguous bfloat16 CPU tensor of the parameter's shape.
            low: The same, int16.
            split: Makes the halves of a float32 piece, or raises ValueError.

        Raises:
            FormatError: A weight is not finite, or too large for bfloat16.
        """
        whole = []
        jobs: list[_Job] = []
        for name in names:
            self._check(name, high[name], torch.bfloat16)
            self._check(name, low[name], torch.int16)
            rule = self.keymap.load_rules[self.keymap.canonical(name)]
            pairs = list(zip(_pieces(rule, high[name]), _pieces(rule, low[name])))
            for tensor, pair in zip(rule.inputs, pairs):
                jobs.append(self._job(tensor, self._split_into(pair, split, tensor)))
            if not pairs:
                whole.append(name)
        with self._lock, torch.no_grad():
            self._stream(jobs)
        for name in whole:
            master = torch.empty(high[name].shape, dtype=torch.float32)
            self.load([name], {name: master})
            inputs = self.keymap.load_rules[self.keymap.canonical(name)].inputs
            sink = self._split_into((high[name], low[name]), split, inputs[0])
            with torch.no_grad():
                sink(0, master.view(-1))

    def load_range(
        self,
        name: str,
        first_row: int,
        into: torch.Tensor,
        low: tuple[torch.Tensor, Split] | None = None,
    ) -> None:
        """Fill `into` [R, ...] with R rows of a parameter [V, ...] that the checkpoint holds as it is.

        Args:
            low: Where the lower halves of the master weights go, int16, and what makes the halves; see `load_split`.
        """
        rule, whole = self.keymap.load_rules[self.keymap.canonical(name)], self.keymap.shapes[name]
        fits = 0 <= first_row <= whole[0] - len(into) and into.shape[1:] == whole[1:]
        if rule.converter is not None or not fits or not into.is_contiguous():
            raise ValueError(
                f'"{name}" {list(whole)}: no rows from {first_row} on go into {list(into.shape)} unchanged'
            )
        extent = self.checkpoint.tensors[rule.inputs[0]]
        row_bytes = extent.num_bytes // whole[0]
        sink = _copy_into(into.view(-1))
        if low is not None:
            sink = self._split_into((into, low[0]), low[1], extent.name)
        job = _Job(
            extent.path, extent.offset + first_row * row_bytes, len(into) * row_bytes,
            TORCH_DTYPES[extent.dtype], sink,
        )  # fmt: skip
        with self._lock, torch.no_grad():
            self._stream([job])

    def close(self) -> None:
        """Close the files and give the scratch buffers back."""
        with self._lock:
            for file in self._files.values():
                self._backend.close_file(file)
            self._files.clear()
            for buffer in self._buffers:
                self._pool.give(buffer)
            self._buffers.clear()

    def __enter__(self) -> WeightSource:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check(self, name: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> None:
        self.keymap.canonical(name)
        expected = self.keymap.shapes[name]
        fits = tuple(tensor.shape) == expected and tensor.is_contiguous()
        if not fits or tensor.device.type != "cpu" or (dtype and tensor.dtype != dtype):
            raise ValueError(
                f'"{name}" needs a contiguous CPU tensor of shape {list(expected)}'
                f"{f' and {dtype}' if dtype else ''}; this one is {tensor.dtype} {list(tensor.shape)}"
            )

    def _split_into(
        self, halves: tuple[torch.Tensor, torch.Tensor], split: Split, name: str
    ) -> Sink:
        """Return what takes a tensor of the files apart into the two halves of a parameter, or of a part of it."""
        high, low = (half.view(-1) for half in halves)

        def sink(start: int, piece: torch.Tensor) -> None:
            part = slice(start, start + piece.numel())
            try:
                split(piece.to(torch.float32), high[part], low[part])
            except ValueError as error:
                raise FormatError(
                    f'{self.checkpoint.tensors[name].path}: {error}, in tensor "{name}". The file is damaged, or was saved '
                    "from a run that had diverged; use an intact copy of the model."
                ) from error

        return sink

    def _job(self, name: str, sink: Sink) -> _Job:
        extent: TensorExtent = self.checkpoint.tensors[name]
        return _Job(extent.path, extent.offset, extent.num_bytes, TORCH_DTYPES[extent.dtype], sink)

    def _convert(self, rule: Rule, wanted: Mapping[str, torch.Tensor]) -> None:
        """Run a conversion on whole inputs, in the destination's dtype as transformers does."""
        dtype = next(
            tensor.dtype for key, tensor in wanted.items() if self.keymap.load_rules[key] == rule
        )
        inputs = [
            torch.empty(self.checkpoint.tensors[name].shape, dtype=dtype) for name in rule.inputs
        ]
        self._stream(
            [
                self._job(name, _copy_into(tensor.view(-1)))
                for name, tensor in zip(rule.inputs, inputs)
            ]
        )
        for key, made in rule.apply(inputs, self.keymap.context).items():
            if key in wanted:
                wanted[key].copy_(made)

    def _stream(self, jobs: Sequence[_Job]) -> None:
        """Read all jobs, several windows in flight, and hand the pieces over in file order."""
        free = deque(self._buffers)
        pending: deque[tuple[_Window, Ticket, memoryview, int]] = deque()
        try:
            for window in _windows(jobs, self._window_bytes):
                if not free:
                    free.append(self._buffers[self._finish(pending)])
                file = self._open(window.path, pending)
                buffer = free.popleft()
                ticket, view = start_range(
                    self._backend, file, window.offset, window.num_bytes, buffer.view
                )
                pending.append((window, ticket, view, self._buffers.index(buffer)))
            while pending:
                self._finish(pending)
        finally:
            for (
                _,
                ticket,
                _,
                _,
            ) in pending:  # after a failure: nobody may write to the buffers any more
                try:
                    ticket.wait()
                except StorageError:
                    continue

    def _finish(self, pending: deque[tuple[_Window, Ticket, memoryview, int]]) -> int:
        """Wait for the oldest read, hand its pieces over, and return the index of its buffer."""
        window, ticket, view, index = pending.popleft()
        ticket.wait()
        self.bytes_read += window.num_bytes
        for job, start, num_bytes in window.parts:
            at = job.offset + start
            raw = view[at - window.offset : at - window.offset + num_bytes]
            if at % job.dtype.itemsize:  # no aligned address for this dtype: move the bytes
                piece = torch.frombuffer(raw, dtype=torch.uint8).clone().view(job.dtype)
            else:
                piece = torch.frombuffer(raw, dtype=job.dtype)
            job.sink(start // job.dtype.itemsize, piece)
        return index

    def _open(self, path: Path, pending: deque[tuple[_Window, Ticket, memoryview, int]]) -> File:
        """Return the open file; at most a few are kept open, the least recently used goes first."""
        if path in self._files:
            self._files[path] = self._files.pop(path)
            return self._files[path]
        if len(self._files) >= MAX_OPEN_FILES:
            oldest = next(iter(self._files))
            for window, ticket, _, _ in pending:
                if window.path == oldest:
                    ticket.wait()
            self._backend.close_file(self._files.pop(oldest))
        self._files[path] = self._backend.open(path, direct=self._direct)
        return self._files[path]


def stored_as_is(
    checkpoint: HfCheckpoint, keymap: KeyMap, names: Iterable[str], dtype: torch.dtype
) -> bool:
    """Say whether the bytes of parameters are in the files just as they are computed with; taken for true without files."""
    if not checkpoint.tensors:
        return True
    for name in names:
        rule = keymap.load_rules.get(keymap.canonical(name))
        if rule is None or not _pieces(rule, torch.empty(keymap.shapes[name], device="meta")):
            return False
        if any(TORCH_DTYPES[checkpoint.tensors[key].dtype] != dtype for key in rule.inputs):
            return False
    return True


def _pieces(rule: Rule, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the piece of a parameter that each tensor of the files fills as it is; none if there are others."""
    pieces = [place.view(tensor) for place in rule.places or ()]
    return pieces if all(piece.is_contiguous() for piece in pieces) else []


def _copy_into(flat: torch.Tensor) -> Sink:
    def sink(start: int, piece: torch.Tensor) -> None:
        flat[start : start + piece.numel()].copy_(piece)

    return sink


def _windows(jobs: Sequence[_Job], limit: int) -> Iterator[_Window]:
    """Cut and join jobs into reads of at most `limit` bytes, in file order."""
    parts: list[tuple[_Job, int, int]] = []
    path, start, end = Path(), 0, 0
    for job in sorted(jobs, key=lambda job: (str(job.path), job.offset)):
        done = 0
        while done < job.num_bytes:
            at = job.offset + done
            if parts and (job.path != path or not 0 <= at - end <= MAX_GAP_BYTES):
                yield _Window(path, start, end - start, parts)
                parts = []
            if not parts:
                path, start, end = job.path, at, at
            room = start + limit - at
            size = min(job.num_bytes - done, room // job.dtype.itemsize * job.dtype.itemsize)
            if size <= 0:
                yield _Window(path, start, end - start, parts)
                parts = []
                continue
            parts.append((job, done, size))
            done += size
            end = at + size
    if parts:
        yield _Window(path, start, end - start, parts)
