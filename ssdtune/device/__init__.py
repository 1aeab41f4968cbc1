"""Where tensors live and blocks are computed. Read `ssdtune.device.base` first."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from ssdtune.errors import BackendUnavailableError, first_line

if TYPE_CHECKING:
    from ssdtune.device.base import Device


logger = logging.getLogger(__name__)


def open_device(name: str = "auto", *, budget_bytes: int | None = None) -> Device:
    """Return the device of this name: `auto` (a CUDA card where there is one), `cpu`, `cuda`, `cuda:1`.

    Args:
        budget_bytes: The most that tensors may take on a card; all that is free by default. No matter on a CPU.

    Raises:
        BackendUnavailableError: A card was asked for by name and is not there, or the card does not work.
    """
    import torch

    kind, colon, index = name.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (colon and not (kind == "cuda" and index.isdigit())):
        raise BackendUnavailableError(f'unknown device "{name}". Use auto, cpu, cuda or cuda:1.')
    with warnings.catch_warnings():  # what torch warns of is told below, once
        warnings.simplefilter("ignore")
        works = kind != "cpu" and torch.cuda.is_available()
        count = torch.cuda.device_count() if works else 0
    if kind == "cpu" or (kind == "auto" and not works):
        from ssdtune.device.cpu import CpuDevice

        if kind == "auto" and _driver().exists():
            logger.warning(
                "this machine has an NVIDIA driver, but torch %s finds no CUDA card: %s. Computing on the CPU; "
                "ssdtune doctor says more.", torch.__version__, _reason(),
            )  # fmt: skip
        return CpuDevice()
    if count == 0:
        raise BackendUnavailableError(
            f"device {name} was asked for, but torch {torch.__version__} finds no CUDA card: {_reason()}. "
            "Install the driver and a CUDA build of torch, check CUDA_VISIBLE_DEVICES, or use --device cpu."
        )
    if int(index or 0) >= count:
        cards = ", ".join(f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(count))
        raise BackendUnavailableError(
            f"there is no device {name}; torch sees {cards}. Name one of these, or check CUDA_VISIBLE_DEVICES."
        )
    from ssdtune.device.cuda import CudaDevice

    return CudaDevice(int(index or 0), budget_bytes)


def _driver() -> Path:
    return Path("/proc/driver/nvidia/version")


def _reason() -> str:
    """Return why torch cannot use CUDA, in its own words."""
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return first_line(error)
    return "the driver shows none"
