"""Every backend in turn, aligned memory, and files with known content."""

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from ssdtune.io.buffers import Buffer
from ssdtune.io.kvikio_probe import kvikio_problem
from ssdtune.io.native import extension_problem
from ssdtune.io.select import BACKENDS, open_backend

REQUEST_BYTES = 64 << 10
QUEUE_DEPTH = 4


# kvikio where it works: with an NVIDIA driver, or in the process that tests/io/test_kvikio_stub.py starts.
WORKING = BACKENDS if kvikio_problem() else (*BACKENDS, "kvikio")


@pytest.fixture(params=WORKING)
def backend(request):
    if request.param in ("io_uring", "libaio", "threads") and extension_problem():
        pytest.skip(extension_problem())
    if (
        request.param == "kvikio"
    ):  # tests of buffered files are about these, whatever was open before
        import kvikio.defaults

        kvikio.defaults.set({"auto_direct_io_read": False, "auto_direct_io_write": False})
    opened = open_backend(request.param, queue_depth=QUEUE_DEPTH, request_bytes=REQUEST_BYTES)
    yield opened
    opened.close()


def memory(num_bytes: int, fill: int | None = None) -> memoryview:
    """Aligned memory of exactly this size; random content, or one byte repeated."""
    view = Buffer(num_bytes).view[:num_bytes]
    if num_bytes:
        array = np.frombuffer(view, np.uint8)
        array[:] = np.random.default_rng(num_bytes).integers(0, 256, num_bytes, np.uint8)
        if fill is not None:
            array[:] = fill
    return view


def file_with(path: Path, content: memoryview) -> Path:
    path.write_bytes(content)
    return path


def run_python(script: str) -> str:
    """Run a script in a process of its own, for limits and signals; return what it prints."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert result.returncode == 0, result.stderr
    return result.stdout
