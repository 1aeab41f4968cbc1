"""What a block keeps for its backward pass, put where it can wait: in memory, or in a slot on its way to SSD.

That is what autograd saves (`saved_elsewhere`), or the block's input and what is dear to make again (`Kept`). Weights are
never saved as tensors: their slot has other content by the time of the backward pass, so their place in it is noted, and
looked up in the slot that has them then. The other tensors of a block that goes to SSD are copied, each once, one behind
the other into a slot, and are views of a slot again when they are back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ssdtune.device.base import Device, Event
from ssdtune.model.products import Product

ALIGNMENT = 64
"""Bytes to which tensors in a slot are aligned: as torch aligns its own."""
LEAST_BYTES = 512
"""Smaller tensors stay in memory."""


@dataclass(frozen=True)
class _View:
    """A view of bytes: `offset` in bytes, shape and stride in elements of its dtype."""

    offset: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the tensor in these bytes."""
        flat = memory[self.offset :]
        flat = flat[: flat.numel() // self.dtype.itemsize * self.dtype.itemsize]
        return flat.view(self.dtype).as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class _Weight:
    view: _View


@dataclass(frozen=True)
class _Activation:
    view: _View


@dataclass
class Leaving:
    """Tensors on their way into a slot.

    Attributes:
        host: The slot, bytes in host memory, or where the drives reach it, on the device.
        used: Bytes of it that are taken.
    """

    device: Device
    host: torch.Tensor
    used: int = 0
    _placed: dict[tuple[int, int], tuple[int, torch.UntypedStorage]] = field(default_factory=dict)
    _events: list[Event] = field(default_factory=list)

    def put(self, tensor: torch.Tensor) -> _View | None:
        """Copy what a tensor is a view of, unless that is there; None if it is small, or there is no room."""
        storage = tensor.untyped_storage()
        if storage.nbytes() < LEAST_BYTES:
            return None
        # What was changed in place since is another content. Storages are kept, so that addresses stay theirs.
        key = (storage._cdata, tensor._version)
        if key not in self._placed:
            size = storage.nbytes()
            if self.used + size > self.host.numel():
                return None
            source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            place = self.host[self.used : self.used + size]
            self._events.append(self.device.download(source, place))
            self._placed[key] = (self.used, storage)
            self.used += -(-size // ALIGNMENT) * ALIGNMENT
        offset = self._placed[key][0] + tensor.storage_offset() * tensor.element_size()
        return _View(offset, tensor.dtype, tensor.shape, tensor.stride())

    def wait(self) -> None:
        """Block until all are there, and let them go."""
        for event in self._events:
            event.wait()
        self._placed.clear()


@dataclass
class Kept:
    """What a block needs to be run again without its products: in memory, or as places in a slot.

    Attributes:
        hidden: Its input [B, S, D].
        products: Results in the order in which they were computed.
    """

    hidden: Any
    products: list[Product]

    def leave(self, leaving: Leaving) -> None:
        """Copy all that has room into a slot, to be waited for by the caller."""

        def left(result: Any) -> Any:
            view = leaving.put(result) if isinstance(result, torch.Tensor) else None
            return result if view is None else view

        self._change(left)

    def return_from(self, memory: torch.Tensor) -> None:
        """Take it back from the bytes of a slot, which must stay as they are until backward is over."""
        self._change(lambda result: result.of(memory) if isinstance(result, _View) else result)

    def _change(self, function: Callable[[Any], Any]) -> None:
        self.hidden = function(self.hidden)
        for product in self.products:
            product.change(function)


@contextmanager
def saved_elsewhere(
    weights: torch.Tensor,
    weights_later: Callable[[], torch.Tensor],
    *,
    leaving: Leaving | None = None,
    activations_later: Callable[[], torch.Tensor] | None = None,
    shared: Collection[int] = (),
) -> Iterator[None]:
    """Let autograd save what a block needs for its backward pass elsewhere, while the context lasts.

    Args:
        weights: Bytes of the slot that has the block's weights; `weights_later` returns those of the one that has
            them when backward asks.
        leaving: Where activations go, to be waited for by the caller; None leaves them in memory.
            `activations_later` returns their bytes.
        shared: Storages (`_cdata`) that stay in memory anyway, such as masks.
    """
    base, size = weights.data_ptr(), weights.numel()

    def pack(tensor: torch.Tensor) -> torch.Tensor | _Weight | _Activation:
        offset = tensor.data_ptr() - base
        if 0 <= offset < size:
            return _Weight(_View(offset, tensor.dtype, tensor.shape, tensor.stride()))
        if leaving and tensor.untyped_storage()._cdata not in shared:
            view = leaving.put(tensor)
            if view is not None:
                return _Activation(view)
        return tensor.detach()  # a result would hold the graph that holds it

    def unpack(saved: torch.Tensor | _Weight | _Activation) -> torch.Tensor:
        match saved:
            case _Weight(view):
                return view.of(weights_later())
            case _Activation(view):
                assert activations_later is not None
                return view.of(activations_later())
            case _:
                return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
