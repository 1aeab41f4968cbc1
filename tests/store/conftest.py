"""An I/O backend for the tests of the store."""

from collections.abc import Iterator

import pytest

from ssdtune.io.backend import Backend
from ssdtune.io.select import open_backend


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    """Return the backend that is always there, with small requests."""
    opened = open_backend("python", queue_depth=4, request_bytes=16384)
    yield opened
    opened.close()
