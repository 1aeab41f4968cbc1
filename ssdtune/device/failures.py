"""What the errors of a CUDA card mean, and what to do about them. Plain text from plain figures: no card is asked.

CUDA tells of most failures late, in whatever call comes next, so a message names the failure and not the place.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from ssdtune.device.base import DeviceMemory
from ssdtune.errors import DeviceMemoryError, SsdtuneError, first_line
from ssdtune.units import format_memory, parse_size

_NO_MEMORY = 2
_ASSERTED = 710
_NO_KERNEL = 209
_OPENING = {
    2: "Its memory is taken. End the other programs on it (nvidia-smi lists them), or name another card.",
    35: "The driver is older than this torch needs. Update the driver, or install a torch for an older CUDA.",
    46: "Another program holds it alone. End that (nvidia-smi lists it), set its compute mode to default "
    "(sudo nvidia-smi -c 0), or name another card.",
    _NO_KERNEL: "This torch is not built for cards of its kind. Install one that is: "
    "https://pytorch.org/get-started/locally",
    802: "The system is not ready: start nvidia-fabricmanager.",
    803: "Driver and its libraries differ in version. Reboot, or install both anew.",
    804: "The driver is older than this torch needs. Update the driver, or install a torch for an older CUDA.",
}


def error_code(error: BaseException) -> int | None:
    """Return CUDA's number of an error; 0 if it has none (older torch), None if it isn't an error of a card."""
    code = getattr(error, "error_code", None)
    if isinstance(code, int):
        return code
    text = str(error)
    if isinstance(error, torch.cuda.OutOfMemoryError) or "CUBLAS_STATUS_ALLOC_FAILED" in text:
        return _NO_MEMORY
    names = ("CUDA error", "CUDA driver error", "cuDNN error")
    is_of_card = isinstance(error, (RuntimeError, AssertionError)) and text.startswith(names)
    if is_of_card and "no kernel image" in text:
        return _NO_KERNEL
    return 0 if is_of_card else None


def cannot_open(name: str, error: BaseException) -> str:
    """Return why a card cannot be used and what to do."""
    code = error_code(error) or 0
    remedy = _OPENING.get(code, "Check it with nvidia-smi, name another card, or use --device cpu.")
    return f"{name} cannot be used: {first_line(error)}. {remedy}"


def explain(
    error: BaseException, name: str, figures: Callable[[], DeviceMemory]
) -> SsdtuneError | None:
    """Return the error that a user can act on; None if it isn't an error of a card.

    Args:
        name: Of the card, with its model.
        figures: Asks for the card's memory; may fail with the card.
    """
    code = error_code(error)
    if code is None:
        return None
    if code == _NO_MEMORY:
        try:
            return out_of_memory(name, figures(), _wanted_bytes(error))
        except RuntimeError:  # no figures: it is lost as well
            pass
    cause = f"{name} failed: {first_line(error)}{f' [{code}]' if code else ''}."
    if code == _ASSERTED:
        hint = "An index was out of range in one of its kernels; --device cpu shows where."
    else:
        hint = "This process cannot use the card any more. The driver says more: sudo dmesg | grep -i xid."
    return SsdtuneError(
        f"{cause} {hint} The last checkpoint is whole: run again with --resume-from-checkpoint last."
    )


def out_of_memory(name: str, memory: DeviceMemory, wanted_bytes: int) -> DeviceMemoryError:
    """Return the error that says what took a card's memory.

    Args:
        wanted_bytes: What did not fit; 0 if unknown.
    """
    known = sum(memory.by_purpose.values())
    uses = dict(memory.by_purpose)
    if memory.held_bytes > known:
        uses["activations and workspaces"] = memory.held_bytes - known
    others = memory.total_bytes - memory.free_bytes - memory.held_bytes
    if memory.budget_bytes is None and others > 0:
        uses["other programs, CUDA itself and gaps"] = others
    size = memory.total_bytes if memory.budget_bytes is None else memory.budget_bytes
    limit = "memory" if memory.budget_bytes is None else "budget"
    text = f"{name} has no room"
    if wanted_bytes:
        text += f" for {format_memory(wanted_bytes)} more"
    text += f" in its {limit} of {format_memory(size)}. In use: "
    text += ", ".join(f"{purpose} {format_memory(n)}" for purpose, n in uses.items()) or "nothing"
    needed = memory.held_bytes + wanted_bytes
    text += f". A budget of at least {format_memory(needed)} for tensors is needed here. "
    text += (
        "Lower per_device_train_batch_size (and raise gradient_accumulation_steps) or max_length"
    )
    if memory.budget_bytes is None and others > size // 10:
        text += ", or end the other programs on the card (nvidia-smi lists them)"
    text += ". Or let it be tried once more with a smaller plan: --retry-out-of-memory true."
    return DeviceMemoryError(text, memory.budget_bytes or memory.free_bytes + memory.held_bytes)


def _wanted_bytes(error: BaseException) -> int:
    match = re.search(r"Tried to allocate ([0-9.]+ (?:bytes|[KMGT]iB))", str(error))
    return parse_size(match.group(1).replace("bytes", "B")) if match else 0
