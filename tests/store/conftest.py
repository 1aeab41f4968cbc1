"""I/O backends for the tests of the store."""

from collections.abc import Iterator

import pytest

from ssdtune.io.backend import Backend
from ssdtune.io.kvikio_probe import kvikio_problem
from ssdtune.io.select import open_backend

# kvikio where it works: with an NVIDIA driver, or in the process that tests/io/test_kvikio_stub.py starts.
WORKING = ["python"] if kvikio_problem() else ["python", "kvikio"]


@pytest.fixture(scope="module", params=WORKING)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Return the backend that is always there, then kvikio, with small requests."""
    opened = open_backend(request.param, queue_depth=4, request_bytes=16384)
    yield opened
    opened.close()
