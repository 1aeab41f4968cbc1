"""What only kvikio does: device buffers, and saying how bytes were moved. What all backends do is in test_backends.py."""

import ctypes
import gc
import importlib
import os
import re
import time

import pytest

from ssdtune.cli import doctor
from ssdtune.device.cpu import CpuDevice
from ssdtune.errors import StorageError
from ssdtune.hardware import ways
from ssdtune.hardware.figures import IoPoint
from ssdtune.hardware.stream import Bench
from ssdtune.io.backend import ALIGNMENT
from ssdtune.io.device_bytes import DeviceBytes
from ssdtune.io.kvikio_backend import MAX_THREADS, KvikioBackend
from ssdtune.io.kvikio_probe import kvikio_problem
from tests.io.conftest import QUEUE_DEPTH, REQUEST_BYTES, file_with, memory
from tests.io.test_backends import cached_bytes

if kvikio_problem():
    pytest.skip(
        f"{kvikio_problem()} tests/io/test_kvikio_stub.py runs these without a GPU.",
        allow_module_level=True,
    )

both = pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
only = pytest.mark.parametrize("backend", ["kvikio"], indirect=True)
pytestmark = only


def counts() -> bool:
    """Whether this kvikio counts what it moves."""
    return hasattr(importlib.import_module("kvikio"), "SummaryMonitor")


class DeviceMemory:
    """Bytes on the device: of the card through torch, of the stub (where no other code can touch them) without."""

    def __init__(self, content: memoryview) -> None:
        self.nbytes = content.nbytes
        self.readonly = False
        self.strides: tuple[int, ...] | None = None
        try:
            self.driver = ctypes.CDLL("libcuda.so.1")
            address = ctypes.c_uint64()
            allocate = self.driver.ssdtune_stub_allocate
        except AttributeError:
            import torch

            self.tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8).cuda()
            self.address = self.tensor.data_ptr()
        else:
            assert allocate(ctypes.byref(address), ctypes.c_size_t(self.nbytes)) == 0
            self.address = address.value
            self._copy(self.address, bytes(content))

    @property
    def __cuda_array_interface__(self):
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.address, self.readonly),
            "strides": self.strides,
            "version": 3,
        }

    def content(self) -> bytes:
        if hasattr(self, "tensor"):
            return bytes(self.tensor.cpu().numpy())
        host = ctypes.create_string_buffer(self.nbytes)
        self._copy(host, self.address)
        return host.raw

    def _copy(self, to, source) -> None:
        to = ctypes.c_uint64(to) if isinstance(to, int) else to
        source = ctypes.c_uint64(source) if isinstance(source, int) else source
        assert self.driver.cuMemcpyAsync(to, source, ctypes.c_size_t(self.nbytes), None) == 0


@both
@pytest.mark.parametrize(
    "size", [ALIGNMENT, 5 * ALIGNMENT, REQUEST_BYTES, 5 * REQUEST_BYTES + ALIGNMENT]
)
def test_device_memory_is_written_and_read(backend, tmp_path, size, direct):
    file = backend.open(tmp_path / "a", writable=True, create=True, direct=direct)
    content = memory(size)
    source, back = DeviceMemory(content), DeviceMemory(memory(size, fill=0))
    ticket = backend.write(file, ALIGNMENT, source)
    ticket.wait()
    assert ticket.done()
    assert (tmp_path / "a").read_bytes()[ALIGNMENT:] == content
    backend.read(file, ALIGNMENT, back).wait()
    assert back.content() == content
    host = memory(size, fill=0)
    backend.read(file, ALIGNMENT, host).wait()
    assert host == content


@both
def test_device_transfers_may_lie_anywhere(backend, tmp_path, direct):
    content = memory(2 * REQUEST_BYTES + 777)
    file = backend.open(tmp_path / "a", writable=True, create=True, direct=direct)
    backend.write(file, 13, DeviceMemory(content)).wait()
    back = DeviceMemory(memory(REQUEST_BYTES + 5, fill=0))
    backend.read(file, 13 + 700, back).wait()
    assert back.content() == content[700 : 700 + REQUEST_BYTES + 5]


def test_registered_device_memory(backend, tmp_path):
    buffer = DeviceMemory(memory(REQUEST_BYTES))
    undo = backend.register(DeviceBytes.of(buffer))
    file = backend.open(tmp_path / "a", writable=True, create=True)
    backend.write(file, 0, DeviceBytes.of(buffer)[ALIGNMENT:]).wait()
    undo()
    assert (tmp_path / "a").read_bytes() == buffer.content()[ALIGNMENT:]


def test_many_transfers_of_both_kinds_at_once(backend, tmp_path):
    size = 3 * REQUEST_BYTES
    files = [backend.open(tmp_path / str(i), writable=True, create=True) for i in range(3)]
    contents = [memory(size, fill=i + 1) for i in range(3)]
    tickets = [
        backend.write(file, part * size, content if part % 2 else DeviceMemory(content))
        for part in range(4)
        for file, content in zip(files, contents, strict=True)
    ]
    gc.collect()  # buffers that nobody else knows stay alive
    for ticket in reversed(tickets):
        ticket.wait()
    for i, content in enumerate(contents):
        assert (tmp_path / str(i)).read_bytes() == 4 * bytes(content)


@both
def test_the_end_of_the_file_in_device_memory(backend, tmp_path, direct):
    size = REQUEST_BYTES + 5000
    file = backend.open(file_with(tmp_path / "a", memory(size)), direct=direct)
    buffer = DeviceMemory(memory(2 * REQUEST_BYTES, fill=7))
    backend.read(file, 0, buffer, minimum=size).wait()
    assert buffer.content()[:size] == (tmp_path / "a").read_bytes()
    assert buffer.content()[size:] == bytes([7]) * (buffer.nbytes - size)
    with pytest.raises(StorageError, match=f"{size} of {buffer.nbytes} bytes done, end of file"):
        backend.read(file, 0, buffer).wait()


def test_misused_device_buffers_are_refused(backend, tmp_path):
    file = backend.open(tmp_path / "a", writable=True, create=True)
    buffer = DeviceMemory(memory(2 * ALIGNMENT))
    with pytest.raises(ValueError, match="offset is -4096"):
        backend.read(file, -ALIGNMENT, buffer)
    buffer.strides = (2,)
    with pytest.raises(ValueError, match="not contiguous"):
        backend.write(file, 0, buffer)
    buffer.strides = (1,)
    buffer.readonly = True
    with pytest.raises(ValueError, match="read-only"):
        backend.read(file, 0, buffer)
    backend.write(file, 0, buffer).wait()


def test_an_address_that_is_nobodys_is_an_error(backend, tmp_path):
    file = backend.open(file_with(tmp_path / "a", memory(4 * REQUEST_BYTES)))
    buffer = DeviceMemory(memory(4 * REQUEST_BYTES))
    buffer.address = ALIGNMENT
    with pytest.raises(StorageError, match=r"read of .*: 0 of 262144 bytes done") as caught:
        backend.read(file, 0, buffer).wait()
    assert caught.value.errno


def test_writing_device_memory_to_a_file_opened_for_reading(backend, tmp_path):
    file = backend.open(file_with(tmp_path / "a", memory(ALIGNMENT)))
    with pytest.raises(StorageError, match=r"write of .* at offset 0: 0 of 4096 .*EBADF"):
        backend.write(file, 0, DeviceMemory(memory(ALIGNMENT))).wait()


def test_direct_files_leave_no_page_cache(backend, tmp_path):
    size = 8 * REQUEST_BYTES
    path = tmp_path / "a"
    file = backend.open(path, writable=True, create=True)
    for buffer in (memory(size), DeviceMemory(memory(size))):
        backend.write(file, 0, buffer).wait()
        assert cached_bytes(path) == 0
        backend.read(file, 0, buffer).wait()
        assert cached_bytes(path) == 0


def test_buffered_files_take_any_place_also_next_to_direct_ones(backend, tmp_path):
    first = backend.open(tmp_path / "a", writable=True, create=True, direct=False)
    backend.open(tmp_path / "b", writable=True, create=True)
    second = backend.open(tmp_path / "c", writable=True, create=True, direct=False)
    content = memory(3 * REQUEST_BYTES + 1)
    for file in (first, second):
        back = memory(content.nbytes, fill=0)
        backend.write(file, 13, content).wait()
        backend.read(file, 13, back).wait()
        assert back == content


def test_kvikio_says_how_it_moved_what(backend, tmp_path):
    state = backend.describe()
    assert (state.num_threads, state.task_bytes) == (QUEUE_DEPTH, REQUEST_BYTES)
    assert state.moved_bytes == {}
    file = backend.open(tmp_path / "a", writable=True, create=True)
    backend.write(file, 0, memory(3 * REQUEST_BYTES)).wait()
    backend.read(file, 0, DeviceMemory(memory(REQUEST_BYTES))).wait()
    state = backend.describe()
    if counts():
        assert sum(state.moved_bytes.values()) == 4 * REQUEST_BYTES
        assert (
            state.moved_bytes["POSIX"] >= 3 * REQUEST_BYTES
        )  # host memory never goes through cuFile
        assert ("GDS" in state.moved_bytes) == (state.mode != "compatibility")
    assert re.fullmatch(r"kvikio [\d.]+, .*; 4 threads, requests of 64.0 KiB", str(state))


def test_the_queue_is_no_deeper_than_threads_make_sense(backend):
    with KvikioBackend(queue_depth=1000, request_bytes=1 << 20) as other:
        assert other.describe().num_threads == MAX_THREADS


def test_doctor_says_what_kvikio_does(backend):
    (check,) = doctor._gds()
    mode = backend.describe().mode
    assert check.name == "GPUDirect Storage"
    assert (check.status == "ok") == (mode == "gds")
    assert mode == "gds" or "through host memory" in check.detail


def test_the_log_of_cufile_is_not_left_around(backend, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = backend.open(tmp_path / "a", writable=True, create=True)
    backend.write(file, 0, DeviceMemory(memory(ALIGNMENT))).wait()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_whole_run_has_the_same_bits(backend, tmp_path):
    from tests.equality.harness import assert_same_bits, stream
    from tests.toy import make_checkpoint, make_rows

    model_dir = make_checkpoint(tmp_path / "model", "llama")
    rows = tmp_path / "rows.jsonl"
    make_rows(rows, 9)
    settings = {"max_steps": 3, "activations": "ssd", "request_bytes": 16384}
    wanted = stream(model_dir, rows, tmp_path / "python", settings | {"backend": "python"})
    before = backend.describe().moved_bytes.get("POSIX", 0)
    got = stream(model_dir, rows, tmp_path / "kvikio", settings | {"backend": "kvikio"})
    assert_same_bits(got, wanted)
    assert not counts() or backend.describe().moved_bytes["POSIX"] - before > 100_000


class Card(CpuDevice):
    """As much of a card as measuring the ways to it needs."""

    own_memory = True

    def allocate(self, num_bytes, purpose="buffers"):
        return DeviceMemory(memory(num_bytes))

    def file_memory(self, memory, use):
        return DeviceBytes.of(memory)

    def upload(self, host, place, after=None):
        return place, self.record()

    def download(self, source, host, after=None):
        return self.record()


def test_the_way_to_a_card_is_measured(backend, tmp_path):
    best = IoPoint(backend="python", request_bytes=REQUEST_BYTES, queue_depth=QUEUE_DEPTH)
    with Bench(
        tmp_path, direct=True, memory_bytes=4 << 20, chunk_bytes=1 << 20, clock=time.perf_counter
    ) as bench:
        bench.fill(0, 0, backend="python")
        found = ways.measure_ways(bench, best, ["python", "kvikio"], seconds=0, device=Card())
        assert [(way.backend, way.to_card) for way in found][1:] == [("python", True), ("kvikio", True)]  # fmt: skip
        assert all(way.read_bytes_per_s > 0 and way.mixed_bytes_per_s > 0 for way in found)
        with (
            ways._places(Card()) as place_of,
            bench.stream("kvikio", REQUEST_BYTES, QUEUE_DEPTH, place_of) as stream,
        ):
            stream.run("read", 0)
            there = os.pread(bench.descriptor, 1 << 20, 0)
            assert stream._places[0]._memory.content() == there
