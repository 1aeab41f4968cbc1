"""Whether kvikio works here, in which mode, and what its errors mean. Nothing is imported before it is asked for.

`ssdtune.io.kvikio_backend` is the backend; `ssdtune doctor` shows what is found here.
"""

from __future__ import annotations

import errno as errno_names
import importlib
import os
import re
from dataclasses import dataclass
from typing import Any

from ssdtune.errors import first_line
from ssdtune.units import format_memory

INSTALL = 'pip install "ssdtune[gds]" ("ssdtune[gds-cu12]" if torch is built for CUDA 12)'


@dataclass(frozen=True, slots=True)
class KvikioState:
    """What kvikio says of itself. Its settings belong to the process: the last backend that was made set them.

    Attributes:
        mode: How device memory is reached: "gds"; "cufile", cuFile without GDS; or "compatibility", kvikio's own way.
        compat_mode: kvikio's setting: "OFF", "ON" or "AUTO".
        num_threads: Requests in flight at most.
        task_bytes: Size of one request, also of one bounce buffer of pinned host memory for each thread.
        moved_bytes: What went each way since the backend was made, in all of the process: "POSIX" through
            pread and pwrite, "GDS" through cuFile. Empty if this kvikio does not count.
    """

    version: str
    mode: str
    compat_mode: str
    num_threads: int
    task_bytes: int
    moved_bytes: dict[str, int]

    @property
    def how(self) -> str:
        """Say how device memory is reached."""
        return {
            "gds": "GPUDirect Storage: drive and card exchange bytes directly",
            "cufile": "cuFile without GPUDirect Storage: device memory goes through host memory",
            "compatibility": "compatibility mode: device memory goes through host memory",
        }[self.mode]

    def __str__(self) -> str:
        threads = "1 thread" if self.num_threads == 1 else f"{self.num_threads} threads"
        size = format_memory(self.task_bytes)
        return f"kvikio {self.version}, {self.how}; {threads}, requests of {size}"


def kvikio_problem() -> str:
    """Return why kvikio cannot be used, with the remedy; empty if it moves bytes to a file and back."""
    try:
        kvikio: Any = importlib.import_module("kvikio")
        defaults: Any = importlib.import_module("kvikio.defaults")
    except ModuleNotFoundError as error:
        if error.name == "kvikio":
            return f"kvikio is not installed. Install it, 2 to 3 GB: {INSTALL}."
        return f"kvikio cannot be imported ({error}). Install it again: {INSTALL}."
    except Exception as error:
        return f"kvikio cannot be imported ({first_line(error)}). Install it again: {INSTALL}."
    try:
        defaults.get("auto_direct_io_read")
    except KeyError:
        return f"kvikio {kvikio.__version__} is too old. Install 26.2 or newer: {INSTALL}."
    descriptor = os.memfd_create("ssdtune-kvikio", os.MFD_CLOEXEC)
    try:
        content, back = b"kvikio", bytearray(6)
        with kvikio.CuFile(f"/proc/self/fd/{descriptor}", "r+") as file:
            file.pwrite(content).get()
            file.pread(back).get()
    except Exception as error:
        if "libcuda" in str(error):
            return (
                "there is no NVIDIA driver (libcuda.so.1), which kvikio needs even for host memory. "
                "Use another backend where there is no GPU."
            )
        return (
            f"kvikio fails ({_explain_shortly(error)}). Check nvidia-smi, or use another backend."
        )
    finally:
        os.close(descriptor)
    if back != content:
        return "kvikio does not read what it has written. Use another backend."
    return ""


def kvikio_state(counter: Any = None) -> KvikioState:
    """Return what kvikio says of itself; ask only where `kvikio_problem` finds nothing.

    Args:
        counter: A kvikio.SummaryMonitor, for `moved_bytes`.
    """
    kvikio: Any = importlib.import_module("kvikio")
    defaults: Any = importlib.import_module("kvikio.defaults")
    mode = "compatibility"
    if not defaults.is_compat_mode_preferred():
        driver: Any = importlib.import_module("kvikio.cufile_driver")
        mode = "gds" if driver.get("is_gds_available") else "cufile"
    totals = counter.get().by_backend if counter else {}
    return KvikioState(
        version=kvikio.__version__,
        mode=mode,
        compat_mode=defaults.get("compat_mode").name,
        num_threads=defaults.get("num_threads"),
        task_bytes=defaults.get("task_size"),
        moved_bytes={
            name: total["bytes_transferred"]
            for name, total in totals.items()
            if total["bytes_transferred"]
        },
    )


def explain(error: Exception) -> tuple[int, str]:
    """Return the error number in an error of kvikio, 0 for the end of a file, and what a number does not say."""
    if isinstance(error, OSError) and error.errno:
        return error.errno, ""
    text = _explain_shortly(error)
    if text.endswith(": EOF"):
        return 0, ""
    if text == "POSIX error: Operation not permitted":  # kvikio's words for a bad descriptor
        return errno_names.EBADF, ""
    numbers = {os.strerror(number): number for number in errno_names.errorcode}
    number = numbers.get(text.rpartition(": ")[2])
    if number is not None:
        return number, ""
    return errno_names.EIO, f"kvikio says: {text}."


def _explain_shortly(error: Exception) -> str:
    """Return an error of kvikio without the place in its source."""
    return re.sub(r"^.*? at: \S+:\d+: ", "", first_line(error))
