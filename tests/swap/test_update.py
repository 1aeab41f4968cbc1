"""AdamW in pieces, from drives and back, equals AdamW on whole arrays, bit for bit, and fails without damage."""

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
from ssdtune.plan.residency import ComputeSize, MemoryPlan
from ssdtune.store.store import Store
from ssdtune.swap.manager import SwapManager, unit_specs
from ssdtune.swap.states import Precision
from ssdtune.swap.update import AdamSettings, OutOfCoreAdam
from tests.adversarial import LateBackend

COMPUTE = ComputeSize(0, 0, 4096, 1, 0)
SETTINGS = AdamSettings(beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, threads=1)
SIZES = ((3000, True), (1, False), (5000, True), (64, False))
"""Elements of the tensors and whether they decay: pieces end within them and between them."""
WEIGHTS = "block.0"
"""The slot for weights."""


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

    def adam(self) -> OutOfCoreAdam:
        return OutOfCoreAdam(self.swap, SETTINGS, pool=self.pool)

    @property
    def gradient_slot(self) -> str:
        return self.swap.gradient_slot(self.part.stage)

    def give_gradient(self, gradient: torch.Tensor) -> None:
        """Put a gradient where the next update finds it."""
        host, _ = self.swap.gradient(self.part, self.gradient_slot)
        host.copy_(gradient)
        if self.part.stage in self.swap.plan.gradients_on_ssd:
            self.swap.save_gradient(self.part.stage, self.gradient_slot)
            host.fill_(float("nan"))

    def update(
        self,
        adam: OutOfCoreAdam,
        has_gradient: list[bool],
        gradient: torch.Tensor,
        lr: float = 0.01,
        scale: float = 1.0,
        *,
        weights: str = "read",
        order: str = "ahead",
        speculative: bool = False,
    ) -> None:
        """Update the part as the lanes do.

        Args:
            weights: "read" into their slot with the states, which held other things, or "there" already.
            order: One piece after the other ("serial"), or each read as long as possible before it is computed, and
                written as late as possible ("ahead").
        """
        self.give_gradient(gradient)
        stage, streamed = self.part.stage, not self.swap.is_resident(self.part)
        if streamed and weights == "read":
            self.swap.host_weights(self.part, WEIGHTS).view(torch.uint8).fill_(255)
        waits = stage not in self.swap.plan.gradients_on_ssd
        assert waits or not speculative, "the gradient is where it was brought from the device"
        count, slots = len(adam.pieces[stage]), self.swap.plan.chunk_slots

        def load(number: int) -> None:
            adam.load(
                stage, number, f"chunk.{number % slots}", weight_slot=WEIGHTS,
                with_weights=weights == "read", with_gradient=not waits,
            )  # fmt: skip

        def compute(number: int) -> None:
            adam.update(
                stage, number, f"chunk.{number % slots}" if streamed else "",
                {self.part.name: has_gradient}, weight_slot=WEIGHTS if streamed else "",
                gradient_slot=self.gradient_slot if waits else "", lr=lr, scale=scale,
                speculative=speculative,
            )  # fmt: skip

        def save(number: int) -> None:
            slot = f"chunk.{number % slots}"
            adam.save(stage, number, slot, weight_slot=WEIGHTS, speculative=speculative)

        late = slots - 1 if order == "ahead" else 0
        for turn in range(count + late):
            if streamed and turn < count:
                load(turn)
            if 0 <= turn - late // 2 < count:
                compute(turn - late // 2)
            if streamed and turn >= late:
                save(turn - late)

    def live(self) -> dict[str, torch.Tensor]:
        """Return the states as they are now."""
        if self.swap.is_resident(self.part):
            return {n: s.clone() for n, s in self.swap.resident(self.part).states.items()}
        found = {}
        for name, state in self.swap.precision.states(self.part).items():
            buffer = self.pool.take(state.nbytes(self.part.numel))
            self.store.read(self.part.name, name, buffer.view).wait()
            found[name] = torch.frombuffer(buffer.view, dtype=state.dtype).clone()
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

    def make(
        *,
        resident: bool = False,
        gradients: str = "ssd",
        copies: int = 1,
        chunk_bytes: int = 8192,
        chunk_slots: int = 3,
        precision: Precision | None = None,
    ) -> Rig:
        part = make_part(dtype)
        stages = {name: Stage(name, ()) for name in ("outer", "embed")}
        layout = ModelLayout(stages | {"block.0": Stage("block.0", (part,))}, 1, True)
        deferred = frozenset({part.stage} if gradients != "overlap" else ())
        plan = MemoryPlan(
            frozenset({part.name} if resident else ()), deferred,
            deferred if gradients == "ssd" else frozenset(),
            block_slots=1, gradient_slots=1, chunk_slots=chunk_slots, chunk_bytes=chunk_bytes,
        )  # fmt: skip
        faults, pool = Faulty(), BufferPool()
        backend = LateBackend("python", queue_depth=1, request_bytes=4096)
        backend._inner.close()
        backend._inner = faults
        store = Store.create(
            [str(tmp_path / f"swap{len(opened)}")], unit_specs(layout, plan, COMPUTE, precision),
            copies=copies, run_id=f"run{len(opened)}", backend=backend, check_bytes=4096, output_dir=tmp_path,
        )  # fmt: skip
        opened.append((store, backend))
        swap = SwapManager(
            layout, plan, source=_Source(), initial={}, split=split_master, join=join_master,  # type: ignore[arg-type]
            store=store, device=CpuDevice(), pool=pool, compute=COMPUTE, precision=precision,
        )  # fmt: skip
        swap.load(part.stage, WEIGHTS)
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


@pytest.mark.parametrize("order", ["serial", "ahead"])
@pytest.mark.parametrize("where", ["ssd", "host", "overlap", "resident"])
@pytest.mark.parametrize("chunk_bytes", [4096, 16384, 24576, 1 << 20])
def test_pieces_equal_whole_arrays(
    make_rig: Callable[..., Rig], where: str, chunk_bytes: int, order: str
) -> None:
    """Wherever states, gradients and weights come from, and however far pieces are read ahead."""
    resident = where == "resident"
    rig = make_rig(
        resident=resident, gradients="host" if resident else where, chunk_bytes=chunk_bytes
    )
    adam, yardstick = rig.adam(), Yardstick(rig.part)
    sizes = [piece.stop - piece.start for piece in adam.pieces["block.0"]]
    wanted = {4096: [2048] * 4, 16384: [4096] * 2, 24576: [6144, 2048], 1 << 20: [8192]}
    assert sizes == ([8192] if resident else wanted[chunk_bytes])
    for step, has_gradient in enumerate(HAS_GRADIENT):
        gradient = gradient_of(rig.part, step)
        weights = "there" if step % 2 else "read"
        rig.update(
            adam, has_gradient, gradient, 0.01 * (step + 1), 0.5, weights=weights, order=order
        )
        yardstick.update(has_gradient, gradient, 0.01 * (step + 1), 0.5)
        yardstick.assert_equal(rig.live())
        if not resident:  # what compute goes on with
            updated = rig.swap.host_weights(rig.part, WEIGHTS)
            assert torch.equal(updated, rig.live()["weights"])
        assert adam.steps == {"block.0": yardstick.steps}
        assert not rig.swap.fresh
    assert yardstick.steps == [2, 2, 3, 2]
    if resident:
        rig.swap.flush()
        assert rig.store.version("block.0") == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16], indirect=True)
@pytest.mark.parametrize("chunk_bytes", [4096, 24576])
def test_stochastic_rounding_does_not_depend_on_pieces(
    make_rig: Callable[..., Rig], chunk_bytes: int
) -> None:
    rounded = Precision(masters=False)
    rigs = [make_rig(chunk_bytes=size, precision=rounded) for size in (chunk_bytes, 1 << 20)]
    adams = [rig.adam() for rig in rigs]
    assert len(adams[0].pieces["block.0"]) > len(adams[1].pieces["block.0"]) == 1
    for step, has_gradient in enumerate(HAS_GRADIENT):
        before = rigs[0].live()
        for rig, adam in zip(rigs, adams, strict=True):
            rig.update(adam, has_gradient, gradient_of(rig.part, step), 1e-3)
        one, other = (rig.live() for rig in rigs)
        assert set(one) == {"weights", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(state, other[name]) for name, state in one.items())
        assert torch.equal(one["weights"], before["weights"]) == (not any(has_gradient))


def test_steps_continue(make_rig: Callable[..., Rig]) -> None:
    """A resumed run takes the counts over; bias correction then goes on."""
    rig, other = make_rig(), make_rig()
    first, yardstick = rig.adam(), Yardstick(rig.part)
    for step, has_gradient in enumerate(HAS_GRADIENT):
        if step == 2:
            steps, first = first.steps, rig.adam()
            first.steps = steps
        rig.update(first, has_gradient, gradient_of(rig.part, step))
        yardstick.update(has_gradient, gradient_of(rig.part, step), 0.01, 1.0)
    yardstick.assert_equal(rig.live())
    forgetful = other.adam()
    for step, has_gradient in enumerate(HAS_GRADIENT):
        forgetful.steps = {"block.0": [0, 0, 0, 0]}
        other.update(forgetful, has_gradient, gradient_of(rig.part, step))
    with pytest.raises(AssertionError):
        yardstick.assert_equal(other.live())


def test_the_old_version_lives_until_the_last_piece_is_written(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig(copies=2)
    adam = rig.adam()
    rig.update(adam, [True] * 4, gradient_of(rig.part, 0))
    rig.store.freeze("checkpoint")
    before, version = rig.live(), rig.store.version("block.0")
    rig.give_gradient(gradient_of(rig.part, 1))
    last = len(adam.pieces["block.0"]) - 1
    for number in range(last + 1):
        assert rig.store.version("block.0") == version
        assert all(torch.equal(state, before[name]) for name, state in rig.live().items())
        slots = {"slot": "chunk.0", "weight_slot": WEIGHTS}
        adam.load("block.0", number, **slots, with_weights=True, with_gradient=True)
        adam.update(
            "block.0", number, has_gradient={"block.0": [True] * 4}, gradient_slot="", lr=0.01,
            scale=1.0, **slots,
        )  # fmt: skip
        adam.save("block.0", number, **slots)
    assert last == 3
    assert rig.store.version("block.0") != version
    yardstick = Yardstick(rig.part)
    for step in range(2):
        yardstick.update([True] * 4, gradient_of(rig.part, step), 0.01, 1.0)
    yardstick.assert_equal(rig.live())


@pytest.mark.parametrize("kept", [[True, False, True, False], [False, True, False, True]])
def test_a_speculative_update_counts_or_leaves_no_trace(
    make_rig: Callable[..., Rig], kept: list[bool]
) -> None:
    """From the first step on, whose moments are nowhere; with checkpoints in between."""
    rig = make_rig(copies=3, gradients="host")
    adam, yardstick = rig.adam(), Yardstick(rig.part)
    for step, (has_gradient, keep) in enumerate(zip(HAS_GRADIENT, kept, strict=True)):
        assert adam.can_speculate()
        gradient = gradient_of(rig.part, step)
        version, steps = rig.store.version("block.0"), list(adam.steps["block.0"])
        rig.update(adam, has_gradient, gradient, 0.01, 1.0, speculative=True)
        if step:
            yardstick.assert_equal(rig.live())
        assert rig.store.version("block.0") == version
        if keep:
            adam.keep_speculated()
            yardstick.update(has_gradient, gradient, 0.01, 1.0)
        else:
            adam.drop_speculated()
            assert adam.steps["block.0"] == steps
            assert bool(rig.swap.fresh) == (step == 0)
            if step:
                yardstick.assert_equal(rig.live())
            rig.update(adam, has_gradient, gradient, 0.01, 0.5)
            yardstick.update(has_gradient, gradient, 0.01, 0.5)
        yardstick.assert_equal(rig.live())
        assert adam.steps == {"block.0": yardstick.steps}
        if step % 2 == 0:
            rig.store.freeze(f"checkpoint-{step}")
            if step:
                rig.store.release("checkpoint-0")


@pytest.mark.parametrize("call", range(0, 16, 3))
@pytest.mark.parametrize("kind", ["fail_read", "fail_write"])
def test_a_fault_leaves_a_frozen_version_whole(
    make_rig: Callable[..., Rig], kind: str, call: int
) -> None:
    """Whatever call fails: the checkpoint's states are as they were, and no transfer is left on a buffer."""
    rig = make_rig(copies=2)
    adam = rig.adam()
    rig.update(adam, [True] * 4, gradient_of(rig.part, 0))
    rig.store.freeze("checkpoint")
    before, version = rig.live(), rig.store.version("block.0")
    gradient = gradient_of(rig.part, 1)
    calls = iter(range(1000))
    rig.give_gradient(gradient)
    rig.give_gradient = lambda _: None  # type: ignore[method-assign]  # only the update fails
    setattr(rig.faults, kind, lambda offset: next(calls) == call)
    with pytest.raises(StorageError) as raised:
        rig.update(adam, [True] * 4, gradient)
    assert raised.value.errno == (errno.EIO if kind == "fail_read" else errno.ENOSPC)
    assert not rig.late.unwaited
    assert rig.store.version("block.0") == version
    assert all(torch.equal(state, before[name]) for name, state in rig.live().items())


def test_a_weight_that_is_not_finite_is_named(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(copies=2)
    adam = rig.adam()
    rig.update(adam, [True] * 4, gradient_of(rig.part, 0))
    rig.store.freeze("checkpoint")
    before = rig.live()
    gradient = gradient_of(rig.part, 1)
    gradient[rig.part.tensors[2].offset + 4000] = float("nan")
    with pytest.raises(SsdtuneError, match=r"tensor\.2: step 2: a weight is not finite"):
        rig.update(adam, [True] * 4, gradient)
    assert not rig.late.unwaited
    assert all(torch.equal(state, before[name]) for name, state in rig.live().items())


def test_a_gradient_that_is_nowhere_hurts_nobody(make_rig: Callable[..., Rig]) -> None:
    """Where no tensor has a gradient, what lies in the slot is never looked at."""
    rig = make_rig()
    adam = rig.adam()
    rig.update(adam, [True] * 4, gradient_of(rig.part, 0))
    before = rig.live()
    garbage = torch.full((rig.part.numel,), float("nan"))
    rig.update(adam, [False] * 4, garbage)
    assert all(
        torch.equal(rig.part.view(state, spec), rig.part.view(before[name], spec))
        for name, state in rig.live().items()
        for spec in rig.part.tensors
    )
    assert adam.steps == {"block.0": [1, 1, 1, 1]}


@pytest.mark.parametrize("gradients", ["ssd", "host"])
def test_memory_of_pieces(make_rig: Callable[..., Rig], gradients: str, dtype: torch.dtype) -> None:
    """Slots for pieces no larger than the part, with a gradient only if it comes from SSD; none if all is resident."""
    each = 8 + 2 * (dtype == torch.bfloat16) + 4 * (gradients == "ssd")
    for chunk_bytes, numel, slots in ((8192, 2048, 3), (16384, 4096, 2), (1 << 30, 8192, 5)):
        rig = make_rig(gradients=gradients, chunk_bytes=chunk_bytes, chunk_slots=slots)
        before = rig.pool.allocated_bytes
        rig.adam()
        assert rig.pool.allocated_bytes - before == slots * each * numel
    resident = make_rig(resident=True, gradients="host")
    before = resident.pool.allocated_bytes
    resident.adam()
    assert resident.pool.allocated_bytes == before
