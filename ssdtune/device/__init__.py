"""Where tensors live and blocks are computed. Read `ssdtune.device.base` first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ssdtune.errors import BackendUnavailableError

if TYPE_CHECKING:
    from ssdtune.device.base import Device


def open_device(name: str = "auto") -> Device:
    """Return the device of this name: `auto` (a CUDA card where there is one), `cpu`, `cuda`, `cuda:1`.

    Raises:
        BackendUnavailableError: A card was asked for by name and is not there.
    """
    import torch

    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        from ssdtune.device.cpu import CpuDevice

        return CpuDevice()
    kind, _, index = name.partition(":")
    if kind not in ("auto", "cuda") or (index and not index.isdigit()):
        raise BackendUnavailableError(f'unknown device "{name}". Use auto, cpu, cuda or cuda:1.')
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(index or 0) >= count:
        raise BackendUnavailableError(
            f"device {name} was asked for, but torch {torch.__version__} sees {count} CUDA cards. "
            "Install a CUDA build of torch and the driver, or use --device cpu."
        )
    from ssdtune.device.cuda import CudaDevice

    return CudaDevice(int(index or 0))
