"""Bandwidth of a drive by backend, request size and queue depth.

    python tools/bench_io.py FOLDER [--size 1GiB] [--backends io_uring threads] [--queue-depths 1 4 16]

Writes one file in FOLDER, reads it back, removes it. The first write of each file allocates its blocks and is not
counted. The best of several rounds counts, since other programs only ever add time.
"""

import argparse
import os
import time
from pathlib import Path

from ssdtune.errors import BackendUnavailableError
from ssdtune.io.buffers import Buffer
from ssdtune.io.select import BACKENDS, DEVICE_BACKENDS, open_backend
from ssdtune.units import format_memory, parse_size

TRANSFER_BYTES = 16 << 20
UNDER_WAY = 4


def move(backend, file, size: int, buffers: list[Buffer], kinds: str) -> float:
    """Move the file's bytes in transfers, several under way; return GB/s."""
    start = time.perf_counter()
    tickets = []
    for i, offset in enumerate(range(0, size, TRANSFER_BYTES)):
        if len(tickets) == UNDER_WAY:
            tickets.pop(0).wait()
        view = buffers[i % UNDER_WAY].view
        operation = backend.read if kinds[i % len(kinds)] == "r" else backend.write
        tickets.append(operation(file, offset, view))
    for ticket in tickets:
        ticket.wait()
    return size / (time.perf_counter() - start) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", type=parse_size, default=1 << 30)
    parser.add_argument(
        "--backends", nargs="+", default=BACKENDS, choices=(*BACKENDS, *DEVICE_BACKENDS)
    )
    parser.add_argument(
        "--request-bytes", nargs="+", type=parse_size, default=[256 << 10, 1 << 20, 4 << 20]
    )
    parser.add_argument("--queue-depths", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--buffered", action="store_true", help="through the page cache")
    args = parser.parse_args()
    size = args.size // TRANSFER_BYTES * TRANSFER_BYTES
    buffers = [Buffer(TRANSFER_BYTES) for _ in range(UNDER_WAY)]
    for buffer in buffers:
        buffer.view[:] = os.urandom(TRANSFER_BYTES)
    path = args.folder / f"bench-{os.getpid()}.bin"
    print(
        f"{path}: {format_memory(size)} in transfers of {format_memory(TRANSFER_BYTES)}, {UNDER_WAY} under way; GB/s"
    )
    print("backend    request     depth  direct   read  write  mixed")
    try:
        with open_backend("auto", queue_depth=16, request_bytes=1 << 20) as backend:
            file = backend.open(path, writable=True, create=True)
            move(backend, file, size, buffers, "w")
            backend.sync([file])
        for name in args.backends:
            for request_bytes in args.request_bytes:
                for depth in args.queue_depths:
                    try:
                        backend = open_backend(name, queue_depth=depth, request_bytes=request_bytes)
                    except BackendUnavailableError as error:
                        print(error)
                        continue
                    with backend:
                        file = backend.open(path, writable=True, direct=not args.buffered)
                        rates = [
                            max(
                                move(backend, file, size, buffers, kinds)
                                for _ in range(args.rounds)
                            )
                            for kinds in ("r", "w", "rw")
                        ]
                    print(
                        f"{name:10s} {format_memory(request_bytes):>9s} {depth:7d}  {file.direct!s:6s}"
                        + "".join(f"{rate:7.2f}" for rate in rates),
                        flush=True,
                    )
    finally:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
