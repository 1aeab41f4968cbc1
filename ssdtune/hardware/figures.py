"""The measured figures as plain data: dataclasses of numbers with units, and how they are read back from JSON.

Nothing is measured here. A rate of 0 means that it was not measured; `problem` then says why. Together they make up
`ssdtune.hardware.profile.HardwareProfile`.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar

T = TypeVar("T")

_LARGEST = (
    ("_bytes_per_s", 1e15), ("_per_s", 1e15), ("_bytes", 1e18), ("_s", 1e9), ("seconds", 1e9), ("threads", 1e6),
    ("queue_depth", 1e6), ("sequences", 1e9), ("sequence", 1e9), ("wear_share", 1e3), ("", 1e25),
)  # fmt: skip
"""Ends of names, and what none of their values can exceed: beyond it somebody has mistyped a figure."""
_AT_LEAST_ONE = frozenset({
    "parameters", "active_parameters", "sequences", "sequence", "threads",
})  # fmt: skip
_ABOVE_ZERO = frozenset({"forward_s", "backward_s"})


@dataclass(frozen=True, kw_only=True)
class DriveFacts:
    """One drive under a directory, as the kernel describes it; None and "" where it does not say.

    Attributes:
        name: Kernel name, such as "nvme0n1".
        rotational: The kernel takes it for a spinning disk; virtual disks often say so wrongly.
        max_request_bytes: The kernel cuts larger requests.
        num_requests: Requests that the kernel queues.
        temperature_c: Degrees Celsius.
        wear_share: Share of the rated endurance that is used up; may exceed 1.
        written_bytes: Written over the drive's life.
        wear_note: Where the last two are missing: why.
        rated_bytes: What its maker lets be written, where a data sheet says so; drives do not tell.
    """

    name: str
    model: str = ""
    size_bytes: int = 0
    rotational: bool | None = None
    scheduler: str = ""
    num_requests: int = 0
    max_request_bytes: int = 0
    write_cache: str = ""
    temperature_c: float | None = None
    wear_share: float | None = None
    written_bytes: int | None = None
    wear_note: str = ""
    rated_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class IoPoint:
    """Rates of one backend with one pair of settings, over a fraction of a second each; bytes per second."""

    backend: str
    request_bytes: int
    queue_depth: int
    read_bytes_per_s: float = 0.0
    write_bytes_per_s: float = 0.0
    mixed_bytes_per_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Way:
    """Rates of one way of bytes, in turns with the others of the same drive; bytes per second.

    Attributes:
        to_card: They come from a card and end there: straight with a backend that takes its memory, else through pinned
            host memory.
    """

    backend: str
    to_card: bool = False
    read_bytes_per_s: float = 0.0
    mixed_bytes_per_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class DirectoryProfile:
    """A directory's drive.

    Attributes:
        path: The directory.
        file_system: Kind, such as "ext4".
        device: What is mounted there, such as "/dev/nvme0n1p2".
        free_bytes: Space that an ordinary user may still take; `total_bytes` is the file system's size.
        reflink: Files can share their blocks; None if that could not be tried.
        direct: Direct I/O works; if not, rates include copies through the page cache.
        drives: The drives underneath; empty where the kernel names none.
        backend, request_bytes, queue_depth: The best settings that were found.
        read_bytes_per_s, write_bytes_per_s: Rates that hold, with these settings; 0 if not measured.
        mixed_bytes_per_s: Sum of both directions while as many bytes are read as written.
        read_burst_bytes_per_s: Reading the same small piece again and again.
        write_burst_bytes_per_s: The fastest quarter of a longer write.
        caches: What of "read" and "write" has a burst that is clearly faster than what holds.
        points: All settings that were tried.
        ways: The backends with the best settings, from which each stream takes its own; none where there is one only, None
            if earlier versions measured.
        file_bytes: Size of the file that was measured on.
        written_bytes: All that measuring has written.
        warnings: What a user should know about this place.
        problem: Why nothing was measured; empty if it was.
    """

    path: str
    file_system: str
    device: str
    free_bytes: int
    total_bytes: int = 0
    reflink: bool | None = None
    direct: bool = False
    drives: tuple[DriveFacts, ...] = ()
    backend: str = ""
    request_bytes: int = 0
    queue_depth: int = 0
    read_bytes_per_s: float = 0.0
    write_bytes_per_s: float = 0.0
    mixed_bytes_per_s: float = 0.0
    read_burst_bytes_per_s: float = 0.0
    write_burst_bytes_per_s: float = 0.0
    caches: tuple[str, ...] = ()
    points: tuple[IoPoint, ...] = ()
    ways: tuple[Way, ...] | None = None
    file_bytes: int = 0
    written_bytes: int = 0
    warnings: tuple[str, ...] = ()
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class TogetherProfile:
    """All measured directories at once, each file system with its own engine; sums in bytes per second."""

    num_file_systems: int
    read_bytes_per_s: float
    write_bytes_per_s: float
    mixed_bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class MemoryPoint:
    """Host memory. Copying counts 2 bytes per byte copied, `a = b + s * c` counts all three arrays."""

    threads: int
    copy_bytes_per_s: float
    triad_bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class AdamPoint:
    """AdamW on masters split into halves, in one form of the kernel (`ssdtune.optim.adamw.forms`)."""

    form: str
    threads: int
    parameters_per_s: float


@dataclass(frozen=True, kw_only=True)
class Contention:
    """AdamW with all cores and mixed I/O, each alone and both at once; medians of alternating rounds."""

    threads: int
    adam_parameters_per_s: float
    adam_with_io_parameters_per_s: float
    io_bytes_per_s: float
    io_with_adam_bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class OtherLoad:
    """What others did on the cores meanwhile, as a mean over the time of measuring.

    Attributes:
        cores: Those that measuring could use.
        programs_cores: Of these, what other programs used.
        stolen_cores: What the host of a virtual machine gave to others although it was wanted here.
    """

    cores: int
    programs_cores: float
    stolen_cores: float


@dataclass(frozen=True, kw_only=True)
class CopyPoint:
    """Copies between host memory and a card; `direction` is "h2d", "d2h" or "both" (the sum)."""

    device: str
    pinned: bool
    direction: str
    bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class BlockPoint:
    """A block on one micro-batch of `tokens` = sequences x sequence tokens.

    Attributes:
        forward_s: Forward pass without gradients, in seconds.
        backward_s: Backward pass alone, without recomputing the forward pass.
        forward_flop: 2 per active parameter and token, and 4 per token, position and attention channel. The
            backward pass is taken as twice that.
    """

    dtype: str
    sequences: int
    sequence: int
    forward_s: float
    backward_s: float
    forward_flop: float

    @property
    def tokens(self) -> int:
        """Tokens of the micro-batch."""
        return self.sequences * self.sequence

    @property
    def forward_flop_per_s(self) -> float:
        """FLOP per second of the forward pass."""
        return self.forward_flop / self.forward_s

    @property
    def backward_flop_per_s(self) -> float:
        """FLOP per second of the backward pass."""
        return 2 * self.forward_flop / self.backward_s


@dataclass(frozen=True, kw_only=True)
class BlockProfile:
    """A decoder block of one shape on one device.

    Attributes:
        shape: For people, such as "llama, hidden 2048".
        digest: Of the model's config.json; the shape's name for shapes that are built in.
        device: "cpu" or "cuda:0".
        parameters: Of the block; of `active_parameters` a token uses (mixtures of experts).
        points: By dtype and tokens; what would have taken too long is missing.
        notes: What was left out, and why.
    """

    shape: str
    digest: str
    device: str
    parameters: int
    active_parameters: int
    hidden_size: int
    points: tuple[BlockPoint, ...] = ()
    notes: tuple[str, ...] = ()


def decode(kind: type[T], values: Any, where: str = "profile") -> T:
    """Build a dataclass from plain data. Keys that later versions added are passed over.

    Raises:
        ValueError: A value is missing, of another type, negative or not finite; names the key.
    """
    decoded: T = _decode(kind, values, where)
    return decoded


def _decode(kind: Any, value: Any, where: str) -> Any:
    if is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise ValueError(f"{where} must be an object, not {value!r}")
        hints = typing.get_type_hints(kind)
        # What may be unknown may be missing: earlier versions did not know of it.
        value = {f.name: None for f in fields(kind) if f.default is None} | dict(value)
        missing = [f.name for f in fields(kind) if f.name not in value]
        if missing:
            raise ValueError(f"{where} has no {', '.join(missing)}")
        made = {
            f.name: _decode(hints[f.name], value[f.name], f"{where}.{f.name}") for f in fields(kind)
        }
        return kind(**made)  # type: ignore[operator]
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{where} must be a list, not {value!r}")
        return tuple(_decode(args[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is types.UnionType:  # T | None, or str | int
        if value is None and type(None) in args:
            return None
        kinds = [arg for arg in args if arg is not type(None)]
        return _decode(kinds[0], value, where) if len(kinds) == 1 else _plain(kinds, value, where)
    if origin is not None:  # Mapping[str, T]
        if not isinstance(value, Mapping):
            raise ValueError(f"{where} must be an object, not {value!r}")
        return {str(key): _decode(args[1], item, f"{where}.{key}") for key, item in value.items()}
    return _plain([kind], value, where)


def _plain(kinds: list[Any], value: Any, where: str) -> Any:
    if bool in kinds and isinstance(value, bool):
        return value
    if str in kinds and isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        _refuse_absurd(value, where)
        if float in kinds:
            return float(value)
        if int in kinds and value == int(value):
            return int(value)
    names = " or ".join(
        {bool: "true or false", str: "text", int: "a whole number"}.get(k, "a number")
        for k in kinds
    )
    raise ValueError(f"{where} must be {names}, not {value!r}")


def _refuse_absurd(value: float, where: str) -> None:
    name = where.rpartition(".")[2]
    # Whole numbers may be too large for math.isfinite.
    if value != value or value in (math.inf, -math.inf) or value < 0:
        raise ValueError(f"{where} is {value}; it must be a finite number, at least 0")
    largest = next(limit for end, limit in _LARGEST if name.endswith(end))
    if value > largest:
        shown = (
            f"{value:g}" if isinstance(value, float) else f"a number of {len(str(value))} digits"
        )
        raise ValueError(f"{where} is {shown}; nothing has more than {largest:g}")
    if name in _AT_LEAST_ONE and value < 1:
        raise ValueError(f"{where} is {value:g}; it must be at least 1")
    if name in _ABOVE_ZERO and value == 0:
        raise ValueError(f"{where} is 0; it must be above 0")
    if name.endswith("_per_s") and 0 < value < 1:
        raise ValueError(
            f"{where} is {value:g}; it must be at least 1, or 0 if it was not measured"
        )
