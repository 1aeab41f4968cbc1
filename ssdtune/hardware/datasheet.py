"""Machines that nobody has measured: a few plain figures from data sheets, turned into a hardware profile.

With them `ssdtune plan MODEL --hardware NAME` plans for a machine before it is bought. The sheets that come along lie in
`machines/*.toml`; `ssdtune profile --show NAME` prints one, to be copied and changed. A sheet says of each figure whether
a maker states it or it is assumed. What is made of it here is no more exact than that, and plans say so. Nothing is
measured; `docs/machines.md` explains the figures.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from ssdtune.errors import ConfigError, FormatError
from ssdtune.hardware.figures import (
    AdamPoint,
    BlockPoint,
    BlockProfile,
    CopyPoint,
    DirectoryProfile,
    DriveFacts,
    MemoryPoint,
    TogetherProfile,
)
from ssdtune.hardware.profile import HardwareProfile
from ssdtune.units import GIB

EFFORT = "data sheet"
"""What `HardwareProfile.effort` is where nothing was measured."""
SUFFIX = ".toml"
BLOCK_PARAMETERS = 200_000_000
"""A sheet has one rate for blocks of all sizes; this one stands for them."""


@dataclass(frozen=True)
class _Figure:
    """What a figure may be: a number in a range, or a text."""

    least: float = 0.0
    most: float = 0.0
    optional: bool = False
    whole: bool = False
    is_text: bool = False

    def problem(self, value: Any) -> str | None:
        """Return what is wrong with a value; None if nothing is."""
        if self.is_text:
            good = isinstance(value, str) and value.strip()
            return None if good else f"is {value!r}; it must be a text"
        if isinstance(value, bool) or not isinstance(value, int | float):
            return f"is {value!r}; it must be a number"
        if not self.least <= value <= self.most:
            return f"is {value:g}; it must be from {self.least:g} to {self.most:g}"
        if self.whole and value != int(value):
            return f"is {value}; it must be a whole number"
        return None


_TEXT = _Figure(is_text=True)
_RATE = _Figure(0.01, 1e4)
_MEMORY = _Figure(0.5, 1e5)
_TFLOPS = _Figure(0.01, 1e5, optional=True)

FIGURES: Mapping[str, Mapping[str, _Figure]] = {
    "": {"machine": _TEXT},
    "card": {
        "name": _TEXT,
        "memory_gib": _MEMORY,
        "bf16_tflops": _TFLOPS,
        "fp16_tflops": _TFLOPS,
        "fp32_tflops": _TFLOPS,
        "efficiency": _Figure(0.01, 1.0),
        "link_gb_per_s": _RATE,
    },
    "host": {
        "cores": _Figure(1, 1e4, whole=True),
        "memory_gib": _MEMORY,
        "memory_gb_per_s": _RATE,
        "adamw_billions_per_s": _Figure(0.001, 1e4),
    },
    "drives": {
        "name": _TEXT,
        "count": _Figure(1, 1000, whole=True),
        "read_gb_per_s": _RATE,
        "write_gb_per_s": _RATE,
        "link_gb_per_s": _Figure(0.01, 1e4, optional=True),
        "capacity_tb": _Figure(0.01, 1e4),
        "free_tb": _Figure(0, 1e4),
        "rated_tb_written": _Figure(1, 1e7),
    },
}
"""The figures of a sheet, by section. Memory in GiB; rates in 1e9 bytes, FLOP in 1e12 and parameters in 1e9 per second."""


def names() -> list[str]:
    """Return the names of the sheets that come along."""
    files = resources.files("ssdtune.hardware").joinpath("machines").iterdir()
    return sorted(file.name.removesuffix(SUFFIX) for file in files if file.name.endswith(SUFFIX))


def sheet_text(name: str) -> str:
    """Return a sheet that comes along, as it is written.

    Raises:
        ConfigError: There is none of this name; names those that there are.
    """
    if name not in names():
        raise ConfigError(
            f'there is no data sheet of a machine "{name}", only of {", ".join(names())}. Print the nearest one '
            "(ssdtune profile --show NAME), change its figures, and give the file to ssdtune plan --hardware"
        )
    folder = resources.files("ssdtune.hardware").joinpath("machines")
    return folder.joinpath(name + SUFFIX).read_text(encoding="utf-8")


def named_machine(name: str) -> HardwareProfile:
    """Return the machine of a sheet that comes along.

    Raises:
        ConfigError: There is none of this name.
    """
    return profile_of(sheet_text(name), name)


def read_sheet(path: Path) -> HardwareProfile:
    """Return the machine of a sheet in a file.

    Raises:
        FormatError: The file cannot be read, or a figure is missing, unknown or absurd; names all of them.
    """
    try:
        return profile_of(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise FormatError(
            f"{path} cannot be read: {os.strerror(error.errno or 0).lower()}"
        ) from error
    except UnicodeDecodeError as error:
        raise FormatError(f"{path} is no data sheet: it is not text") from error


def profile_of(text: str, source: str) -> HardwareProfile:
    """Return the machine that a sheet describes.

    Args:
        text: TOML with the figures of `FIGURES`.
        source: File or name, for messages.

    Raises:
        FormatError: A figure is missing, unknown or absurd; names all of them.
    """
    try:
        sheet = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise FormatError(f"{source} is no data sheet: {error}") from error
    found = problems(sheet)
    if found:
        raise FormatError(
            f"{source} is no data sheet of a machine: {'; '.join(found)}. Compare it with one that comes along: "
            f"ssdtune profile --show {names()[0]}"
        )
    return _profile(sheet, source)


def problems(sheet: Mapping[str, Any]) -> list[str]:
    """Return all that is wrong with the figures of a sheet."""
    found = [f"{name} is not known" for name in sheet if name not in FIGURES and name != "machine"]
    for section, figures in FIGURES.items():
        values = sheet.get(section) if section else {"machine": sheet.get("machine")}
        if not isinstance(values, Mapping):
            found.append(f"there is no section [{section}]")
            continue
        prefix = f"{section}." if section else ""
        found += [f"{prefix}{name} is not known" for name in values if name not in figures]
        for name, figure in figures.items():
            if values.get(name) is not None:
                problem = figure.problem(values[name])
                found += [f"{prefix}{name} {problem}"] if problem else []
            elif not figure.optional:
                found.append(f"{prefix}{name} is missing")
    if found:
        return found
    if not _dtypes(sheet["card"]):
        return ["card has none of bf16_tflops, fp16_tflops and fp32_tflops"]
    drives = sheet["drives"]
    if drives["free_tb"] > drives["capacity_tb"]:
        return [f"drives.free_tb is {drives['free_tb']:g}, more than drives.capacity_tb"]
    return []


def _dtypes(card: Mapping[str, Any]) -> list[str]:
    return [dtype for dtype in ("fp32", "bf16", "fp16") if card.get(f"{dtype}_tflops")]


def _profile(sheet: Mapping[str, Any], source: str) -> HardwareProfile:
    import ssdtune

    card, host, drives = sheet["card"], sheet["host"], sheet["drives"]
    bandwidth = host["memory_gb_per_s"] * 1e9
    return HardwareProfile(
        machine_id=EFFORT,
        machine={
            "cpu": sheet["machine"],
            "cores": int(host["cores"]),
            "memory_bytes": int(host["memory_gib"] * GIB),
            "card": card["name"],
            "cards": card["name"],
            "card_bytes": int(card["memory_gib"] * GIB),
            "ssdtune": ssdtune.__version__,
            "torch": "not asked",
            "file": source,
        },
        measured_at="never",
        effort=EFFORT,
        seconds=0.0,
        backends={},
        directories=tuple(_directory(drives, n) for n in range(int(drives["count"]))),
        together=_together(drives),
        memory=(
            MemoryPoint(
                threads=int(host["cores"]), copy_bytes_per_s=bandwidth, triad_bytes_per_s=bandwidth
            ),
        ),
        adam=(
            AdamPoint(
                form=EFFORT,
                threads=int(host["cores"]),
                parameters_per_s=host["adamw_billions_per_s"] * 1e9,
            ),
        ),
        contention=None,
        copies=tuple(
            CopyPoint(
                device="cuda:0", pinned=True, direction=way, bytes_per_s=card["link_gb_per_s"] * 1e9
            )
            for way in ("h2d", "d2h")
        ),
        compute_dtypes=tuple(_dtypes(card)),
        blocks=(_block(card),),
    )


def _directory(drives: Mapping[str, Any], number: int) -> DirectoryProfile:
    read, write = drives["read_gb_per_s"] * 1e9, drives["write_gb_per_s"] * 1e9
    facts = DriveFacts(
        name=f"nvme{number}n1",
        model=drives["name"],
        size_bytes=int(drives["capacity_tb"] * 1e12),
        rated_bytes=int(drives["rated_tb_written"] * 1e12),
    )
    return DirectoryProfile(
        path=f"/nvme{number}",
        file_system="ext4",
        device=f"/dev/nvme{number}n1",
        free_bytes=int(drives["free_tb"] * 1e12),
        total_bytes=int(drives["capacity_tb"] * 1e12),
        direct=True,
        drives=(facts,),
        read_bytes_per_s=read,
        write_bytes_per_s=write,
        mixed_bytes_per_s=_mixed(read, write),
    )


def _together(drives: Mapping[str, Any]) -> TogetherProfile:
    """Return what all drives reach at once.

    What they have in common works half beside them, as the simulator has it of a machine with twelve drives
    (`Hardware.ssd_s`, fitted to published steps): 1 / rate² = 1 / (their sum)² + 1 / link².
    """
    link = drives.get("link_gb_per_s", float("inf"))

    def rate(name: str) -> float:
        total = drives["count"] * drives[name]
        return float(total / (1 + (total / link) ** 2) ** 0.5 * 1e9)

    read, write = rate("read_gb_per_s"), rate("write_gb_per_s")
    return TogetherProfile(
        num_file_systems=int(drives["count"]),
        read_bytes_per_s=read,
        write_bytes_per_s=write,
        mixed_bytes_per_s=_mixed(read, write),
    )


def _mixed(read: float, write: float) -> float:
    return 2 / (1 / read + 1 / write)


def _block(card: Mapping[str, Any]) -> BlockProfile:
    points = tuple(
        BlockPoint(
            dtype=dtype,
            sequences=1,
            sequence=2048,
            forward_s=1.0,
            backward_s=2.0,
            forward_flop=card[f"{dtype}_tflops"] * card["efficiency"] * 1e12,
        )
        for dtype in _dtypes(card)
    )
    return BlockProfile(
        shape="any, by the data sheet",
        digest=EFFORT,
        device="cuda:0",
        parameters=BLOCK_PARAMETERS,
        active_parameters=BLOCK_PARAMETERS,
        hidden_size=4096,
        points=points,
    )
