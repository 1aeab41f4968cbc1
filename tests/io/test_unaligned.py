"""Any byte range of a file, through whole aligned pages."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdtune.errors import StorageError
from ssdtune.io.backend import ALIGNMENT
from ssdtune.io.threads import PythonBackend
from ssdtune.io.unaligned import envelope, read_range, start_range
from tests.io.conftest import REQUEST_BYTES, file_with, memory

SIZE = 2 * REQUEST_BYTES + 777


def test_any_range_is_read_exactly(tmp_path):
    content = bytes(memory(SIZE))
    path = file_with(tmp_path / "a", content)
    scratch = memory(SIZE + 2 * ALIGNMENT)
    with PythonBackend(queue_depth=2, request_bytes=REQUEST_BYTES) as backend:
        files = [backend.open(path), backend.open(path, direct=False)]

        @settings(max_examples=40)
        @given(st.integers(0, SIZE), st.integers(0, SIZE), st.sampled_from(files))
        def check(first, second, file):
            start, end = sorted((first, second))
            back = read_range(backend, file, start, end - start, scratch)
            assert bytes(back) == content[start:end]

        check()


def test_several_ranges_under_way(backend, tmp_path):
    content = bytes(memory(SIZE))
    file = backend.open(file_with(tmp_path / "a", content))
    ranges = [(1, 5000), (4095, 2), (70000, 60000), (SIZE - 1, 1), (0, SIZE)]
    started = [
        (start_range(backend, file, offset, n, memory(envelope(offset, n)[1])), offset, n)
        for offset, n in ranges
    ]
    for (ticket, wanted), offset, n in started:
        ticket.wait()
        assert bytes(wanted) == content[offset : offset + n]


def test_missing_bytes_and_small_scratch(backend, tmp_path):
    file = backend.open(file_with(tmp_path / "a", memory(SIZE)))
    with pytest.raises(StorageError, match="end of file"):
        read_range(backend, file, SIZE - 10, 11, memory(2 * ALIGNMENT))
    with pytest.raises(
        ValueError, match="scratch has 4096 bytes; the pages around the range need 8192"
    ):
        read_range(backend, file, 4000, 200, memory(ALIGNMENT))
