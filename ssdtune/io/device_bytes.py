"""Device memory as something that can be sliced, as memoryview is for host memory; no CUDA needed."""

from __future__ import annotations

import math
from typing import Any, Protocol, runtime_checkable

import numpy as np


@runtime_checkable
class DeviceArray(Protocol):
    """Memory of a CUDA device, such as a CUDA tensor of torch."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


class DeviceBytes:
    """A contiguous range of device memory, which somebody else keeps alive.

    Attributes:
        address: On the device.
    """

    def __init__(self, address: int, nbytes: int, readonly: bool) -> None:
        self.address = address
        self.nbytes = nbytes
        self.readonly = readonly

    @classmethod
    def of(cls, array: DeviceArray) -> DeviceBytes:
        """Return all bytes of an array.

        Raises:
            ValueError: The array is not contiguous.
        """
        interface = array.__cuda_array_interface__
        shape, item_bytes = interface["shape"], np.dtype(interface["typestr"]).itemsize
        packed = [item_bytes * math.prod(shape[i + 1 :]) for i in range(len(shape))]
        if interface.get("strides") not in (None, tuple(packed)):
            raise ValueError("the buffer is not contiguous")
        address, readonly = interface["data"]
        return cls(address, item_bytes * math.prod(shape), readonly)

    def __getitem__(self, part: slice) -> DeviceBytes:
        start, end, _ = part.indices(self.nbytes)
        return DeviceBytes(self.address + start, end - start, self.readonly)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.address, self.readonly),
            "version": 3,
        }


Memory = memoryview | DeviceBytes
"""What a backend that takes device memory reads into and writes from."""
