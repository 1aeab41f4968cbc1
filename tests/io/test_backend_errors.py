"""Every failure of a transfer is one error with path, offset, wanted and done bytes; misuse is a ValueError."""

import errno
import subprocess

import numpy as np
import pytest

from ssdtune.errors import StorageError
from ssdtune.io.backend import ALIGNMENT
from tests.io.conftest import REQUEST_BYTES, file_with, memory, run_python

both = pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])


@both
def test_end_of_file_is_an_error_with_figures(backend, tmp_path, direct):
    size = 2 * REQUEST_BYTES + 100  # ends inside a page
    path = file_with(tmp_path / "short.bin", memory(size))
    file = backend.open(path, direct=direct)
    buffer = memory(4 * REQUEST_BYTES, fill=7)
    ticket = backend.read(file, 0, buffer)
    for _ in range(2):  # every wait raises it
        with pytest.raises(StorageError) as caught:
            ticket.wait()
    error = caught.value
    assert (error.errno, error.offset, error.wanted, error.done) == (0, 0, buffer.nbytes, size)
    assert str(error) == (
        f"read of {path} failed at offset 0: {size} of {buffer.nbytes} bytes done, end of file."
    )
    assert bytes(buffer[:size]) == path.read_bytes()


@both
def test_minimum_allows_the_file_to_end(backend, tmp_path, direct):
    size = REQUEST_BYTES + 5000
    path = file_with(tmp_path / "a", memory(size))
    file = backend.open(path, direct=direct)
    buffer = memory(2 * REQUEST_BYTES, fill=7)
    backend.read(file, 0, buffer, minimum=size).wait()
    assert bytes(buffer[:size]) == path.read_bytes()
    with pytest.raises(StorageError, match="end of file"):
        backend.read(file, 0, buffer, minimum=size + 1).wait()
    with pytest.raises(StorageError, match="end of file"):
        backend.read(file, 8 * REQUEST_BYTES, buffer, minimum=1).wait()
    backend.read(file, 8 * REQUEST_BYTES, buffer, minimum=0).wait()
    with pytest.raises(ValueError, match="minimum is 131073"):
        backend.read(file, 0, buffer, minimum=buffer.nbytes + 1)


def test_direct_transfers_must_be_aligned(backend, tmp_path):
    file = backend.open(tmp_path / "a", writable=True, create=True)
    buffer = memory(2 * ALIGNMENT)
    with pytest.raises(ValueError, match="offset 512 is no multiple of 4096"):
        backend.write(file, 512, buffer)
    with pytest.raises(ValueError, match="length 8191 is no multiple of 4096"):
        backend.write(file, 0, buffer[1:])
    with pytest.raises(ValueError, match=r"address \d+ is no multiple of 4096"):
        backend.read(file, 0, buffer[512 : 512 + ALIGNMENT])
    with pytest.raises(ValueError, match="offset is -4096"):
        backend.read(file, -ALIGNMENT, buffer)
    assert (tmp_path / "a").stat().st_size == 0


def test_misused_buffers_are_refused(backend, tmp_path):
    file = backend.open(tmp_path / "a", writable=True, create=True, direct=False)
    with pytest.raises(ValueError, match="read-only"):
        backend.read(file, 0, memoryview(b"constant"))
    with pytest.raises(ValueError, match="not contiguous"):
        backend.write(file, 0, memory(100)[::2])
    backend.write(file, 0, memoryview(b"constant")).wait()
    numbers = np.zeros((2, 1), np.float32)
    backend.read(file, 0, memoryview(numbers)).wait()
    assert numbers.tobytes() == b"constant"


def test_open_errors_name_the_file(backend, tmp_path):
    path = tmp_path / "none"
    with pytest.raises(StorageError) as caught:
        backend.open(path)
    assert caught.value.errno == errno.ENOENT
    assert str(caught.value) == f"open of {path} failed, no such file or directory [ENOENT]."
    with pytest.raises(StorageError, match="EISDIR"):
        backend.open(tmp_path, writable=True)


def test_closed_files_stay_closed(backend, tmp_path):
    file = backend.open(tmp_path / "a", writable=True, create=True)
    backend.close_file(file)
    other = backend.open(tmp_path / "b", writable=True, create=True)  # takes over the descriptor
    for use in (
        lambda: backend.write(file, 0, memory(ALIGNMENT)),
        lambda: backend.read(file, 0, memory(ALIGNMENT)),
        lambda: backend.sync([file]),
        lambda: backend.close_file(file),
    ):
        with pytest.raises(StorageError, match="EBADF") as caught:
            use()
        assert caught.value.filename == str(tmp_path / "a")
    backend.close_file(other)
    assert (tmp_path / "b").stat().st_size == 0


def test_writing_to_a_file_opened_for_reading(backend, tmp_path):
    path = file_with(tmp_path / "a", memory(ALIGNMENT))
    file = backend.open(path)
    with pytest.raises(StorageError, match=r"write of .* at offset 0: 0 of 4096 .*EBADF"):
        backend.write(file, 0, memory(ALIGNMENT)).wait()
    assert not file.writable


def test_a_limit_of_file_size_ends_the_write_with_its_figures(backend, tmp_path):
    limit, size = 4 * REQUEST_BYTES, 10 * REQUEST_BYTES
    script = f"""
        import resource
        from pathlib import Path
        from ssdtune.errors import StorageError
        from ssdtune.io.select import open_backend
        from tests.io.conftest import memory

        resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
        with open_backend({backend.name!r}, queue_depth=4, request_bytes={REQUEST_BYTES}) as backend:
            file = backend.open(Path({str(tmp_path / "a")!r}), writable=True, create=True)
            try:
                backend.write(file, 0, memory({size})).wait()
            except StorageError as error:
                print(error.errno, error.done, error.wanted)
        """
    assert run_python(script).split() == [str(errno.EFBIG), str(limit), str(size)]


@pytest.mark.root
def test_a_full_drive_ends_the_write_with_its_figures(backend, tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={8 * REQUEST_BYTES}", "none", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting is not permitted")
    try:
        file = backend.open(folder / "a", writable=True, create=True)
        ticket = backend.write(file, 0, memory(20 * REQUEST_BYTES))
        with pytest.raises(
            StorageError, match=r"no space left on device \[ENOSPC\]. Free"
        ) as caught:
            ticket.wait()
        assert caught.value.done <= 8 * REQUEST_BYTES  # less if later requests took the room first
        assert caught.value.wanted == 20 * REQUEST_BYTES
        backend.close_file(file)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
