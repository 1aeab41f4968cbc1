"""Reading byte ranges that start and end anywhere, such as a tensor inside a safetensors file.

Direct I/O moves whole aligned pages: the pages around the range are read into scratch memory, and the range
is returned as a slice of it. There is no unaligned write; the store only writes whole extents.
"""

from __future__ import annotations

from ssdtune.io.backend import ALIGNMENT, Backend, File, Ticket


def envelope(offset: int, num_bytes: int) -> tuple[int, int]:
    """Return start and length, in bytes, of the aligned pages around a range."""
    start = offset // ALIGNMENT * ALIGNMENT
    return start, -(-(offset + num_bytes) // ALIGNMENT) * ALIGNMENT - start


def start_range(
    backend: Backend, file: File, offset: int, num_bytes: int, scratch: memoryview
) -> tuple[Ticket, memoryview]:
    """Start reading any byte range of a file.

    Args:
        offset: Where the range begins in the file, in bytes.
        num_bytes: Length of the range.
        scratch: Aligned, writable memory for the pages around the range (see `envelope`).

    Returns:
        The ticket, and the slice of `scratch` that holds the range once the ticket was waited for. The pages
        may reach past the end of the file; waiting fails only if bytes of the range itself are missing.

    Raises:
        ValueError: The scratch memory is too small.
    """
    start, length = envelope(offset, num_bytes)
    if scratch.nbytes < length:
        raise ValueError(
            f"scratch has {scratch.nbytes} bytes; the pages around the range need {length}"
        )
    skip = offset - start
    ticket = backend.read(
        file, start, scratch[:length], minimum=skip + num_bytes if num_bytes else 0
    )
    return ticket, scratch[skip : skip + num_bytes]


def read_range(
    backend: Backend, file: File, offset: int, num_bytes: int, scratch: memoryview
) -> memoryview:
    """Read any byte range of a file and return it as a slice of `scratch`; see `start_range`."""
    ticket, wanted = start_range(backend, file, offset, num_bytes, scratch)
    ticket.wait()
    return wanted
