"""What this machine can do, as measured numbers, and the JSON file that keeps them.

A `HardwareProfile` holds everything; `rates()` is the short form that plans are made with. `ssdtune.hardware.measure`
takes the figures, `ssdtune.hardware.figures` has the parts, `ssdtune.hardware.table` and `ssdtune.hardware.limits`
put them into words. Nothing about results depends on any of it.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ssdtune.errors import ConfigError, FormatError, StorageError
from ssdtune.hardware.figures import (
    AdamPoint,
    BlockPoint,
    BlockProfile,
    Contention,
    CopyPoint,
    DirectoryProfile,
    MemoryPoint,
    OtherLoad,
    TogetherProfile,
    decode,
)
from ssdtune.hardware.striped import (
    StripedRates,
    measured_places,
    source_place,
    striped_rates,
)
from ssdtune.hardware.ways import Paces, paces
from ssdtune.io.mounts import existing_parent
from ssdtune.io.streams import StreamNames
from ssdtune.store.durable import write_json_atomic

SCHEMA_VERSION = 2


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The figures that plans are made with; everything per second.

    Attributes:
        read_bytes_per_s, write_bytes_per_s: Of the directories together that states are dealt over, as long as
            it holds.
        mixed_bytes_per_s: Sum of both directions while as much is read as written.
        adam_parameters_per_s: With the best form and number of threads.
        adam_with_io_parameters_per_s: While mixed I/O runs, which then reaches `io_with_adam_bytes_per_s`.
        memory_bytes_per_s: Copying, each copied byte counted twice.
        copy_bytes_per_s: The same by one thread; 0 if that was not measured.
        h2d_bytes_per_s, d2h_bytes_per_s: Pinned memory to a card and back; None on a CPU.
        both_bytes_per_s: Sum of both directions at once; None on a CPU.
        forward_flop_per_s, backward_flop_per_s: Of a block, by dtype ("fp32", "bf16"), at the largest
            micro-batch that was measured.
        adam_core_share: Share of the cores that AdamW takes at that rate.
        source_read_bytes_per_s: Reading the model's own files; 0 if it is not known where they lie.
        activation_pace: Of the backend for activations, in units of that for the states.
    """

    read_bytes_per_s: float
    write_bytes_per_s: float
    mixed_bytes_per_s: float
    adam_parameters_per_s: float
    adam_with_io_parameters_per_s: float
    io_with_adam_bytes_per_s: float
    memory_bytes_per_s: float
    h2d_bytes_per_s: float | None
    d2h_bytes_per_s: float | None
    both_bytes_per_s: float | None
    forward_flop_per_s: Mapping[str, float]
    backward_flop_per_s: Mapping[str, float]
    adam_core_share: float = 1.0
    source_read_bytes_per_s: float = 0.0
    activation_pace: float = 1.0
    copy_bytes_per_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class HardwareProfile:
    """All figures.

    Attributes:
        machine_id: Hash of what the figures depend on; see `ssdtune.hardware.machine`.
        machine: Processor, cores, memory, cards and versions, for people.
        measured_at: When, in UTC, as ISO 8601.
        effort: "full" or "quick".
        seconds: How long measuring took.
        backends: All I/O backends: "" for those that work, else why not.
        directories: One for each directory that was asked for, in order.
        together: All of them at once; of a single file system its own rates. None if none could be measured.
        contention: AdamW and I/O at once; None if no drive could be measured.
        copies: Empty on a CPU.
        compute_dtypes: What the device multiplies at full speed, of "fp32" and "bf16".
        blocks: One for each shape.
        others: What else the machine did meanwhile; None if that is not known.
    """

    schema_version: int = SCHEMA_VERSION
    machine_id: str
    machine: Mapping[str, str | int]
    measured_at: str
    effort: str
    seconds: float
    backends: Mapping[str, str]
    directories: tuple[DirectoryProfile, ...]
    together: TogetherProfile | None
    memory: tuple[MemoryPoint, ...]
    adam: tuple[AdamPoint, ...]
    contention: Contention | None
    copies: tuple[CopyPoint, ...]
    compute_dtypes: tuple[str, ...]
    blocks: tuple[BlockProfile, ...]
    others: OtherLoad | None = None

    def rates(
        self,
        digest: str | None = None,
        *,
        parameters: int | None = None,
        tokens: float | None = None,
        directories: Sequence[Path] | None = None,
        shares: Sequence[float] = (),
        model: Path | None = None,
        streams: StreamNames | None = None,
    ) -> Rates:
        """Return the short form; 0 for what was not measured.

        Args:
            digest: Take compute rates from this block (`BlockProfile.digest`) if it was measured.
            parameters: Of a block; otherwise take them from the block nearest in size, by default the largest.
            tokens: Of a micro-batch; between measured sizes rates are interpolated. By default the largest.
            directories: Those that a run deals its states over; by default all that were measured.
            shares: Relative share that each of these holds; none for equal ones.
            model: Where the model's own files lie.
            streams: The backends of a run; by default the one that the rates were taken with.

        Raises:
            ConfigError: The drives of some of these directories were not measured.
        """
        io, both = self._striped(directories, shares), self.contention
        places = self.places(directories, model)
        pace = paces(*places, streams) if places and streams else Paces()
        fastest = max(self.adam, key=lambda point: point.parameters_per_s, default=None)
        adam = fastest.parameters_per_s if fastest else 0.0
        cores = self.machine.get("cores")
        # Alone and together were measured at another time than `adam` and `together`: only their ratio is used.
        adam_share = io_share = 1.0
        if both and both.adam_parameters_per_s and both.io_bytes_per_s:
            adam_share = both.adam_with_io_parameters_per_s / both.adam_parameters_per_s
            io_share = both.io_with_adam_bytes_per_s / both.io_bytes_per_s
        compute = self._compute(digest, parameters, tokens)
        return Rates(
            read_bytes_per_s=io.read_bytes_per_s * pace.states,
            write_bytes_per_s=io.write_bytes_per_s * pace.states,
            mixed_bytes_per_s=io.mixed_bytes_per_s * pace.states,
            adam_parameters_per_s=adam,
            adam_with_io_parameters_per_s=adam * min(adam_share, 1.0),
            io_with_adam_bytes_per_s=io.mixed_bytes_per_s * pace.states * min(io_share, 1.0),
            memory_bytes_per_s=max((point.copy_bytes_per_s for point in self.memory), default=0.0),
            h2d_bytes_per_s=self._copy("h2d"),
            d2h_bytes_per_s=self._copy("d2h"),
            both_bytes_per_s=self._copy("both"),
            forward_flop_per_s={dtype: rates[0] for dtype, rates in compute.items()},
            backward_flop_per_s={dtype: rates[1] for dtype, rates in compute.items()},
            adam_core_share=min(1.0, fastest.threads / cores)
            if fastest and isinstance(cores, int) and cores
            else 1.0,
            source_read_bytes_per_s=places[1].read_bytes_per_s * pace.weights
            if places and model
            else 0.0,
            activation_pace=pace.activations / pace.states,
            copy_bytes_per_s=next((p.copy_bytes_per_s for p in self.memory if p.threads == 1), 0.0),
        )

    def _striped(self, directories: Sequence[Path] | None, shares: Sequence[float]) -> StripedRates:
        if directories is None or not self.directories:
            return striped_rates([p for p in self.directories if not p.problem], self.together)
        places = measured_places(self.directories, directories)
        return striped_rates(places, self.together, shares)

    def places(
        self, directories: Sequence[Path] | None, model: Path | None
    ) -> tuple[DirectoryProfile, DirectoryProfile] | None:
        """Return the directory that settings are taken from, and that of the model's own files; None if none was measured.

        Raises:
            ConfigError: The drives of some of these directories were not measured.
        """
        if not self.directories or not directories:
            return None
        used = measured_places(self.directories, directories)
        fastest = max(used, key=lambda place: place.mixed_bytes_per_s)
        return fastest, source_place(self.directories, used, model) if model else fastest

    def _copy(self, direction: str) -> float | None:
        return next(
            (p.bytes_per_s for p in self.copies if p.pinned and p.direction == direction), None
        )

    def _compute(
        self, digest: str | None, parameters: int | None, tokens: float | None
    ) -> dict[str, tuple[float, float]]:
        """Return FLOP per second of forward and backward, by dtype."""
        blocks = [block for block in self.blocks if block.digest == digest] or list(self.blocks)
        size = parameters or max((block.parameters for block in blocks), default=1)
        blocks.sort(key=lambda block: abs(math.log(block.parameters / size)), reverse=True)
        found: dict[str, list[BlockPoint]] = {}
        for block in blocks:  # the nearest comes last and wins, where it was measured in a dtype
            for dtype in {point.dtype for point in block.points}:
                found[dtype] = [point for point in block.points if point.dtype == dtype]
        return {dtype: _at(points, tokens) for dtype, points in found.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> HardwareProfile:
        """Return the profile that `to_dict` described. Keys that later versions added are passed over.

        Raises:
            ValueError: It is of another schema, or a value is missing or absurd; names the key.
        """
        version = values.get("schema_version") if isinstance(values, Mapping) else None
        if version != SCHEMA_VERSION:
            raise ValueError(
                f"schema_version is {version!r}, this version of ssdtune reads {SCHEMA_VERSION}"
            )
        profile = decode(cls, values)
        for name in ("cores", "memory_bytes", "card_bytes"):
            number = profile.machine.get(name, 0)
            if not isinstance(number, int):
                raise ValueError(f"profile.machine.{name} is {number!r}; it must be a whole number")
        for place in profile.directories:
            if not place.path.startswith("/") or "\0" in place.path:
                raise ValueError(
                    f"profile.directories has the path {place.path!r}; it must be absolute"
                )
        return profile

    def text(self) -> str:
        """Return tables and what limits training, for people."""
        from ssdtune.hardware.table import render

        return render(self)


def _at(points: list[BlockPoint], tokens: float | None) -> tuple[float, float]:
    """Return FLOP per second of forward and backward at a size of micro-batch."""
    points = sorted(points, key=lambda point: point.tokens)
    if tokens is None or tokens >= points[-1].tokens:
        return points[-1].forward_flop_per_s, points[-1].backward_flop_per_s
    above = next(i for i, point in enumerate(points) if point.tokens >= tokens)
    low, high = points[max(above - 1, 0)], points[above]
    share = 1.0
    if low is not high and tokens > low.tokens:
        share = math.log(tokens / low.tokens) / math.log(high.tokens / low.tokens)
    return (
        low.forward_flop_per_s + share * (high.forward_flop_per_s - low.forward_flop_per_s),
        low.backward_flop_per_s + share * (high.backward_flop_per_s - low.backward_flop_per_s),
    )


def read_profile(path: Path) -> HardwareProfile:
    """Return the profile in a file, of this machine or another.

    Raises:
        FormatError: The file is missing, damaged, or of a version that this one does not read.
    """
    try:
        return HardwareProfile.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise FormatError(
            f"{path} cannot be read: {os.strerror(error.errno or 0).lower()}. Name a file that ssdtune profile "
            "--output has written"
        ) from error
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise FormatError(
            f"{path} is no hardware profile: {reason}. Correct it, or make it anew on its machine with "
            f"ssdtune profile DIR --force --output {path}"
        ) from error


def save(profile: HardwareProfile, path: Path) -> None:
    """Write a profile; a reader sees the old file or the new one, never a part.

    Raises:
        StorageError: The file can't be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json_atomic(path, profile.to_dict())
    except OSError as error:
        raise StorageError(
            "write", path, errno=error.errno or 0, hint="Name another file with --output."
        ) from error


def check_file(path: Path) -> None:
    """Make sure that a profile can be written to a file, before minutes are spent on measuring.

    Raises:
        ConfigError: It cannot.
    """
    start = f"--output: the figures cannot be kept in {path}"
    if path.is_dir():
        raise ConfigError(f"{start}, which is a folder. Name a file in it.")
    stream = path.is_symlink() and str(path.readlink()).startswith("/proc/")  # /dev/stdout
    if stream or (path.exists() and not path.is_file()):
        raise ConfigError(f"{start}, which is a device or pipe. Name a file; --json prints them.")
    parent = existing_parent(path.parent)
    if not parent.is_dir():
        raise ConfigError(f"{start}: {parent} is a file. Name a file in a folder.")
    try:
        tempfile.TemporaryFile(dir=parent).close()
    except OSError as error:
        reason = os.strerror(error.errno or 0).lower()
        raise ConfigError(f"{start}: {parent}: {reason}. Name a file elsewhere.") from error
