"""What NVIDIA's driver says of itself and its cards, asked directly: works without torch, and where torch is broken.

Creates no context on a card, so it takes none of its memory. `ssdtune.cli.doctor` puts it into words.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_COMPUTE_MODE, _MAJOR, _MINOR = 20, 75, 76
"""CU_DEVICE_ATTRIBUTE_*."""
_MODES = {0: "", 2: "prohibited", 3: "exclusive"}


@dataclass(frozen=True)
class Card:
    """One card, in the order in which CUDA_VISIBLE_DEVICES shows them.

    Attributes:
        used_bytes: Taken by all programs and the driver; None where NVML does not say.
        mode: "" if several programs may use it at once, else "exclusive" or "prohibited".
    """

    name: str
    total_bytes: int
    used_bytes: int | None
    capability: tuple[int, int]
    mode: str


@dataclass(frozen=True)
class Driver:
    """The driver.

    Attributes:
        supports: The newest CUDA that it supports, such as (12, 8).
        error: CUDA's number of what went wrong; 0 if nothing did.
    """

    supports: tuple[int, int]
    cards: tuple[Card, ...]
    error: int = 0


def look(load: Callable[[str], Any] = ctypes.CDLL) -> Driver | None:
    """Ask the driver; None if there is none.

    Args:
        load: Opens a shared library.
    """
    try:
        cuda = load("libcuda.so.1")
    except OSError:
        return None
    version, count = ctypes.c_int(0), ctypes.c_int(0)
    cuda.cuDriverGetVersion(ctypes.byref(version))
    supported = (version.value // 1000, version.value % 1000 // 10)
    error = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
    if error:
        return Driver(supported, (), error)
    used = _used_memory(load)
    return Driver(supported, tuple(_card(cuda, i, used) for i in range(count.value)))


def _card(cuda: Any, index: int, used: Callable[[bytes], int | None]) -> Card:
    device, name, size = ctypes.c_int(0), ctypes.create_string_buffer(256), ctypes.c_size_t(0)
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceGetName(name, 256, device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device)

    def attribute(number: int) -> int:
        value = ctypes.c_int(0)
        cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device)
        return value.value

    place = ctypes.create_string_buffer(32)
    cuda.cuDeviceGetPCIBusId(place, 32, device)
    return Card(
        name.value.decode(errors="replace"),
        size.value,
        used(place.value),
        (attribute(_MAJOR), attribute(_MINOR)),
        _MODES.get(attribute(_COMPUTE_MODE), ""),
    )


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def _used_memory(load: Callable[[str], Any]) -> Callable[[bytes], int | None]:
    """Return a function from a card's place on the PCI bus to its memory in use."""
    try:
        nvml = load("libnvidia-ml.so.1")
    except OSError:
        return lambda place: None
    if nvml.nvmlInit_v2():
        return lambda place: None

    def used(place: bytes) -> int | None:
        handle, memory = ctypes.c_void_p(), _Memory()
        if nvml.nvmlDeviceGetHandleByPciBusId_v2(place, ctypes.byref(handle)):
            return None
        return None if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) else memory.used

    return used
