"""AdamW in chunks, from drives and back, equals AdamW on whole arrays, bit for bit, and fails without damage."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from ssdtune.device.cpu import CpuDevice
from ssdtune.errors import SsdtuneError, StorageError
from ssdtune.io.buffers import BufferPool
from ssdtune.io.threads import PythonBackend
from ssdtune.model.layout import ModelLayout, Part, Stage, TensorSpec
from ssdtune.optim.adamw import adamw_, join_master, split_master
from ssdtune.plan.residency import MemoryPlan
from ssdtune.store.store import Store
from ssdtune.swap.manager import SwapManager, state_dtypes, unit_specs
from ssdtune.swap.update import AdamSettings, OutOfCoreAdam
from tests.adversarial import LateBackend

SETTINGS = AdamSettings(beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, threads=1)
SIZES = ((3000, True), (1, False), (5000, True), (64, False))
"""Elements of the tensors and whether they decay: chunks end within them and between them."""


def make_part(dtype: torch.dtype) -> Part:
    tensors, offset = [], 0
    for index, (numel, decay) in enumerate(SIZES):
        tensors.append(TensorSpec(f"tensor.{index}", (numel,), offset, numel, decay))
        offset += -(-numel // 64) * 64
    return Part("block.0", "block.0", dtype, True, tuple(tensors), -(-offset // 2048) * 2048)


class Faulty(PythonBackend):
    """A backend whose system calls fail when a test says so."""

    def __init__(self) -> None:
        self.fail_read: Callable[[int], bool] = lambda offset: False
        self.fail_write: Callable[[int], bool] = lambda offset: False
        super().__init__(
            queue_depth=4,
            request_bytes=4096,
            preadv=self._read_or_fail,
            pwritev=self._write_or_fail,
        )

    def _read_or_fail(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if self.fail_read(offset):
            raise OSError(errno.EIO, "injected")
        return os.preadv(descriptor, buffers, offset)

    def _write_or_fail(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if self.fail_write(offset):
            raise OSError(errno.ENOSPC, "injected")
        return os.pwritev(descriptor, buffers, offset)


@dataclass
class Rig:
    """One part in a store, with all that updates it."""

    part: Part
    store: Store
    swap: SwapManager
    faults: Faulty
    late: LateBackend
    pool: BufferPool

    def adam(self, chunk_bytes: int) -> OutOfCoreAdam:
        return OutOfCoreAdam(
            [self.part], self.swap, SETTINGS, chunk_bytes=chunk_bytes, pool=self.pool
        )

    def live(self) -> dict[str, torch.Tensor]:
        """Return the states as they are now."""
        if self.swap.is_resident(self.part):
            return {n: s.clone() for n, s in self.swap.resident(self.part).states.items()}
        found = {}
        for name, dtype in state_dtypes(self.part).items():
            found[name] = torch.empty(self.part.numel, dtype=dtype)
            buffer = self.pool.take(found[name].nbytes)
            self.store.read(self.part.name, name, buffer.view).wait()
            found[name].view(torch.uint8).copy_(torch.frombuffer(buffer.view, dtype=torch.uint8))
        return found


class _Source:
    """Original weights: the same for both sides."""

    def load(self, names: list[str], into: dict[str, torch.Tensor]) -> None:
        for name in names:
            into[name].copy_(original(name, into[name].numel()))

    def load_split(self, names, high, low, split) -> None:  # type: ignore[no-untyped-def]
        for name in names:
            split(original(name, high[name].numel()), high[name], low[name])


def original(name: str, numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(int(name[-1])))


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["whole", "split"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def make_rig(tmp_path: Path, dtype: torch.dtype) -> Iterator[Callable[..., Rig]]:
    opened: list[tuple[Store, LateBackend]] = []

    def make(*, resident: bool = False, gradients: str = "ssd", copies: int = 1) -> Rig:
        part = make_part(dtype)
        stages = {name: Stage(name, ()) for name in ("outer", "embed")}
        layout = ModelLayout(stages | {"block.0": Stage("block.0", (part,))}, 1, True)
        plan = MemoryPlan(frozenset({part.name} if resident else ()), gradients, 1, 1, 0, 1 << 30)
        faults, pool = Faulty(), BufferPool()
        backend = LateBackend("python", queue_depth=1, request_bytes=4096)
        backend._inner.close()
        backend._inner = faults
        store = Store.create(
            [str(tmp_path / f"swap{len(opened)}")], unit_specs(layout, plan, 4096, 1),
            copies=copies, run_id=f"run{len(opened)}", backend=backend, check_bytes=4096, output_dir=tmp_path,
        )  # fmt: skip
        opened.append((store, backend))
        swap = SwapManager(
            layout, plan, source=_Source(), initial={}, split=split_master, join=join_master,  # type: ignore[arg-type]
            store=store, device=CpuDevice(), pool=pool, input_bytes=4096,
        )  # fmt: skip
        swap.load("block.0", "block.0")
        return Rig(part, store, swap, faults, backend, pool)

    yield make
    for store, backend in opened:
        store.close()
        backend.close()


def gradient_of(part: Part, step: int) -> torch.Tensor:
    return torch.randn(part.numel, generator=torch.Generator().manual_seed(100 + step))


class Yardstick:
    """The same updates on whole arrays in memory, tensor by tensor."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.steps = [0] * len(part.tensors)
        self.states: list[dict[str, torch.Tensor]] = []
        for spec in part.tensors:
            weights = original(spec.name, spec.numel)
            states = {"weights": weights}
            if part.dtype == torch.bfloat16:
                high, low = split_master(weights)
                states = {"weights": high, "low": low}
            for name in ("exp_avg", "exp_avg_sq"):
                states[name] = torch.zeros(spec.numel)
            self.states.append(states)

    def update(self, has_gradient: list[bool], gradient: torch.Tensor, lr: float, scale: float):
        for index, spec in enumerate(self.part.tensors):
            if has_gradient[index]:
                self.steps[index] += 1
                states = self.states[index]
                adamw_(
                    states["weights"], states.get("low"), states["exp_avg"], states["exp_avg_sq"],
                    self.part.view(gradient, spec), step=self.steps[index], lr=lr, beta1=0.9,
                    beta2=0.99, eps=1e-8, weight_decay=0.1 if spec.decay else 0.0, grad_scale=scale,
                )  # fmt: skip

    def assert_equal(self, live: dict[str, torch.Tensor]) -> None:
        for spec, states in zip(self.part.tensors, self.states, strict=True):
            for name, state in states.items():
                assert torch.equal(self.part.view(live[name], spec), state), (spec.name, name)


HAS_GRADIENT = (
    [True, True, True, True],
    [True, False, True, False],
    [False, False, False, False],
    [False, True, True, True],
)
"""Step by step; tensors without a gradient are left alone and their steps are not counted."""


@pytest.mark.parametrize("where", ["ssd", "host", "resident"])
@pytest.mark.parametrize("chunk_bytes", [4096, 16384, 24576, 1 << 20])
def test_chunks_equal_whole_arrays(
    make_rig: Callable[..., Rig], where: str, chunk_bytes: int
) -> None:
    rig = make_rig(resident=where == "resident", gradients="ssd" if where == "ssd" else "host")
    adam, yardstick = rig.adam(chunk_bytes), Yardstick(rig.part)
    for step, has_gradient in enumerate(HAS_GRADIENT):
        gradient = gradient_of(rig.part, step)
        host, _ = rig.swap.gradient(rig.part, rig.swap.gradient_slot("block.0"))
        host.copy_(gradient)
        if where == "ssd":
            rig.swap.save_gradient("block.0", "block.0")
            host.fill_(float("nan"))
        adam.update(
            rig.part,
            has_gradient,
            None if where == "ssd" else host,
            lr=0.01 * (step + 1),
            scale=0.5,
        )
        yardstick.update(has_gradient, gradient, 0.01 * (step + 1), 0.5)
        yardstick.assert_equal(rig.live())
        assert adam.steps == {"block.0": yardstick.steps}
    assert yardstick.steps == [2, 2, 3, 2]
    if where == "resident":
        rig.swap.flush()
        assert rig.store.version("block.0") == 0


def test_steps_continue(make_rig: Callable[..., Rig]) -> None:
    """A resumed run takes the counts over; bias correction then goes on."""
    rig, other = make_rig(), make_rig()
    first, yardstick = rig.adam(8192), Yardstick(rig.part)
    for step, has_gradient in enumerate(HAS_GRADIENT):
        if step == 2:
            steps, first = first.steps, rig.adam(8192)
            first.steps = steps
        first.update(rig.part, has_gradient, gradient_of(rig.part, step), lr=0.01, scale=1.0)
        yardstick.update(has_gradient, gradient_of(rig.part, step), 0.01, 1.0)
    yardstick.assert_equal(rig.live())
    forgetful = other.adam(8192)
    for step, has_gradient in enumerate(HAS_GRADIENT):
        forgetful.steps = {"block.0": [0, 0, 0, 0]}
        forgetful.update(other.part, has_gradient, gradient_of(rig.part, step), lr=0.01, scale=1.0)
    with pytest.raises(AssertionError):
        yardstick.assert_equal(other.live())


@pytest.mark.parametrize("call", range(0, 16, 3))
@pytest.mark.parametrize("kind", ["fail_read", "fail_write"])
def test_a_fault_leaves_a_frozen_version_whole(
    make_rig: Callable[..., Rig], kind: str, call: int
) -> None:
    """Whatever call fails: the checkpoint's states are as they were, and no transfer is left on a buffer."""
    rig = make_rig(copies=2)
    adam = rig.adam(8192)
    adam.update(rig.part, [True] * 4, gradient_of(rig.part, 0), lr=0.01, scale=1.0)
    rig.store.freeze("checkpoint")
    before, version = rig.live(), rig.store.version("block.0")
    calls = iter(range(1000))
    setattr(rig.faults, kind, lambda offset: next(calls) == call)
    with pytest.raises(StorageError) as raised:
        adam.update(rig.part, [True] * 4, gradient_of(rig.part, 1), lr=0.01, scale=1.0)
    assert raised.value.errno == (errno.EIO if kind == "fail_read" else errno.ENOSPC)
    assert not rig.late.unwaited
    assert rig.store.version("block.0") == version
    assert all(torch.equal(state, before[name]) for name, state in rig.live().items())


def test_a_weight_that_is_not_finite_is_named(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(copies=2)
    adam = rig.adam(8192)
    adam.update(rig.part, [True] * 4, gradient_of(rig.part, 0), lr=0.01, scale=1.0)
    rig.store.freeze("checkpoint")
    before = rig.live()
    gradient = gradient_of(rig.part, 1)
    gradient[rig.part.tensors[2].offset + 4000] = float("nan")
    with pytest.raises(SsdtuneError, match=r"tensor\.2: step 2: a weight is not finite"):
        adam.update(rig.part, [True] * 4, gradient, lr=0.01, scale=1.0)
    assert not rig.late.unwaited
    assert all(torch.equal(state, before[name]) for name, state in rig.live().items())


def test_a_gradient_that_is_nowhere_hurts_nobody(make_rig: Callable[..., Rig]) -> None:
    """Where no tensor has a gradient, what lies in the slot is never looked at."""
    rig = make_rig()
    adam = rig.adam(8192)
    adam.update(rig.part, [True] * 4, gradient_of(rig.part, 0), lr=0.01, scale=1.0)
    before = rig.live()
    garbage = torch.full((rig.part.numel,), float("nan"))
    adam.update(rig.part, [False] * 4, garbage, lr=0.01, scale=1.0)
    assert all(
        torch.equal(rig.part.view(state, spec), rig.part.view(before[name], spec))
        for name, state in rig.live().items()
        for spec in rig.part.tensors
    )
    assert adam.steps == {"block.0": [1, 1, 1, 1]}


def test_memory_of_chunks(make_rig: Callable[..., Rig]) -> None:
    """Three chunks of 16 bytes an element, no larger than the part; none where nothing is streamed."""
    rig = make_rig()
    for chunk_bytes, elements in ((8192, 2048), (16384, 4096), (1 << 30, 8192)):
        before = rig.pool.allocated_bytes
        rig.adam(chunk_bytes)
        assert rig.pool.allocated_bytes - before == 3 * 16 * elements
    resident = make_rig(resident=True, gradients="host")
    before = resident.pool.allocated_bytes
    resident.adam(8192)
    assert resident.pool.allocated_bytes == before
