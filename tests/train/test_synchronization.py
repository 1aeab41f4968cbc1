"""Whole trainings on a device, drives and lanes that are as late as they may be, bit for bit as on the CPU.

The second half tests the first: with any wait left out, by the schedule (`EDGES`) or in
the code (`WAITS`), a training must fail or give other numbers. All of them are noticed.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
import textwrap
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ssdtune.config.schema import Config
from ssdtune.io.streams import StreamNames
from ssdtune.plan.generate import StepShape, generate_training_step
from ssdtune.plan.residency import Proportions
from ssdtune.plan.schedule import Lane, Schedule
from ssdtune.swap.activations import Leaving
from ssdtune.swap.inputs import InputSlots
from ssdtune.swap.manager import SwapManager
from ssdtune.swap.rows import RowBatch
from ssdtune.swap.update import OutOfCoreAdam
from ssdtune.train.engine import Engine
from ssdtune.train.prepare import usual_proportions
from tests.adversarial import ORDERS, AdversarialDevice, use, use_device
from tests.equality.harness import Streamed, assert_same_bits, stream
from tests.plan.test_generate import BY_EDGE, Edge, edges, name_of, races, without_edge
from tests.toy import make_checkpoint, make_rows

WINDOW: dict[str, Any] = {
    "dtype": "bf16",
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 3,
    "max_steps": 2,
    "warmup_steps": 0,
    "max_grad_norm": 1.0,
    "chunk_bytes": 8192,
    "prefetch_depth": 0,
}
"""Three micro-batches use two input slots again and again; many chunks an optimizer step."""

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "all on ssd": ("untied", {}),
    "two blocks": ("short", {}),
    "two blocks, overlapped": ("short", {"max_grad_norm": 0.0}),
    "speculative, then clipped": ("untied", {"clipping": "speculative"}),
    "speculative": ("short", {"clipping": "speculative", "max_grad_norm": 1e9, "host_cache": 1}),
    "some in memory": ("tied", {"host_cache": 40_000, "activations": "ssd"}),
    "activations kept": ("untied", {"host_cache": 1}),
    "activations kept, overlapped": ("short", {"host_cache": 1, "max_grad_norm": 0.0}),
    "activations swapped": ("untied", {"activations": "ssd", "recompute": "never"}),
    "products swapped": ("untied", {"activations": "ssd", "recompute": "cheap"}),
    "inputs in host memory": ("untied", {"activations": "host"}),
    "activations in host memory": ("untied", {"activations": "host", "recompute": "never"}),
    "products in host memory": ("untied", {"activations": "host", "recompute": "cheap"}),
    "all in memory": (
        "tied",
        {"host_cache": "1GiB", "save_steps": 1, "save_total_limit": 2},
    ),
    "all in memory, nothing saved": ("untied", {"host_cache": "1GiB", "save_steps": 0}),
    "two blocks in memory, nothing saved": ("short", {"host_cache": "1GiB", "save_steps": 0}),
    "lora": ("untied", {"method": "lora", "lora_dropout": 0.1, "prefetch_depth": 3}),
    "lora, embedding trained": (
        "untied",
        # few pieces: the embedding's does not wait for the chunk slot of another
        {
            "method": "lora",
            "modules_to_save": ["embed_tokens"],
            "max_grad_norm": 0.0,
            "chunk_bytes": 1 << 20,
        },
    ),
    "lora, overlapped": (
        "untied",
        {"method": "lora", "host_cache": "1GiB", "max_grad_norm": 0.0},
    ),
    "divided": ("divided", {"host_cache": 1}),
    "divided, overlapped": ("divided", {"max_grad_norm": 0.0}),
    "divided, speculative": (
        "divided",
        {"clipping": "speculative", "max_grad_norm": 1e9, "host_cache": 1},
    ),
    "divided, in memory": ("divided", {"host_cache": "1GiB", "save_steps": 0}),
    "divided, lora": ("divided", {"method": "lora"}),
    "divided, tied": ("divided, tied", {}),
    "divided, tied, overlapped": ("divided, tied", {"max_grad_norm": 0.0}),
}


@pytest.fixture(scope="module", autouse=True)
def low_limit() -> Iterator[None]:
    """Divide what is larger than a block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ssdtune.model.layout.MOST_WHOLE_ELEMENTS", 0)
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_checkpoint(folder / "untied", "llama", tied=False, dtype="bfloat16")
    make_checkpoint(folder / "short", "qwen2", tied=False, num_hidden_layers=2)
    make_checkpoint(folder / "tied", "gemma3_text", tied=True)
    narrow = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2}
    make_checkpoint(folder / "divided", "qwen2", tied=False, dtype="bfloat16", **narrow)
    make_checkpoint(folder / "divided, tied", "qwen2", tied=True, **narrow)
    make_rows(folder / "rows.jsonl", 6)
    return folder


@pytest.fixture(scope="module")
def wanted(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Streamed]:
    """What each case gives on the CPU device with real lanes."""
    folder = tmp_path_factory.mktemp("wanted")
    return {name: _train(models, folder / str(i), name) for i, name in enumerate(CASES)}


@pytest.fixture(scope="module")
def shapes(
    models: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, bool], StepShape]:
    """The shape of a step in each case, on a device and on the CPU."""
    found: dict[tuple[str, bool], StepShape] = {}
    folder = tmp_path_factory.mktemp("shapes")

    def generate(shape: StepShape) -> Schedule:
        found[name, on_cpu] = shape
        raise _ShapeFound

    for number, (on_cpu, name) in enumerate(product((False, True), CASES)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ssdtune.train.engine.generate_training_step", generate)
            if not on_cpu:
                use_device(patch, AdversarialDevice())
            with pytest.raises(_ShapeFound):
                _train(models, folder / str(number), name)
    return found


class _ShapeFound(Exception):
    pass


def _train(models: Path, output_dir: Path, case: str, **more: Any) -> Streamed:
    model, settings = CASES[case]
    return stream(models / model, models / "rows.jsonl", output_dir, WINDOW | settings | more)


def _assert_late_is_soon_enough(
    models: Path,
    wanted: dict[str, Streamed],
    output_dir: Path,
    case: str,
    order: str,
    *,
    on_cpu: bool = False,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        device = use(patch, ORDERS[order], on_cpu=on_cpu)
        assert_same_bits(_train(models, output_dir, case), wanted[case])
    assert device.violations == []
    assert on_cpu or device.num_copies > 10


PAIRS = [
    (list(CASES)[number % len(CASES)], list(ORDERS)[number % len(ORDERS)])
    for number in range(max(len(CASES), len(ORDERS)))
]
"""Every order and every case."""
ALL_PAIRS = [(case, order) for case in CASES for order in ORDERS if (case, order) not in PAIRS]


@pytest.mark.parametrize(
    "case, order", PAIRS + [pytest.param(*pair, marks=pytest.mark.slow) for pair in ALL_PAIRS]
)
def test_late_is_soon_enough(
    models: Path, wanted: dict[str, Streamed], tmp_path: Path, case: str, order: str
) -> None:
    _assert_late_is_soon_enough(models, wanted, tmp_path / "out", case, order)


def test_resumed_late(
    models: Path, wanted: dict[str, Streamed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _assert_resumes(models, wanted, tmp_path / "out", monkeypatch)


def _assert_resumes(
    models: Path,
    wanted: dict[str, Streamed],
    output_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Resident parts are read back from a checkpoint."""
    use(monkeypatch, ORDERS["compute last"])
    _train(models, output_dir, "all in memory")
    resumed = {"resume_from_checkpoint": str(output_dir / "checkpoint-1")}
    assert_same_bits(
        _train(models, output_dir, "all in memory", **resumed), wanted["all in memory"]
    )


def test_what_waited_in_host_memory_may_wait_on_ssd_after_a_resume(
    models: Path, wanted: dict[str, Streamed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, ORDERS["d2h last"])
    case, saves = "inputs in host memory", {"save_steps": 1, "save_total_limit": 2}
    assert _train(models, tmp_path, case, **saves).moved("written", "activations") == 0
    saves |= {"resume_from_checkpoint": str(tmp_path / "checkpoint-1"), "activations": "ssd"}
    resumed = _train(models, tmp_path, case, **saves)
    assert_same_bits(resumed, wanted[case])
    assert resumed.moved("written", "activations", since=1) > 0


@pytest.mark.parametrize("is_straight", [False, True])
def test_some_wait_in_host_memory_and_some_on_ssd(
    models: Path,
    wanted: dict[str, Streamed],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_straight: bool,
) -> None:
    def proportions(config: Config) -> Proportions:
        some = {"kept_blocks": 0, "inputs_leave": True, "host_blocks": 1}
        return dataclasses.replace(usual_proportions(config), **some)

    monkeypatch.setattr("ssdtune.train.prepare.usual_proportions", proportions)
    more: dict[str, Any] = {}
    if is_straight:
        monkeypatch.setattr("ssdtune.train.prepare.DEVICE_BACKENDS", {"python"})
        more = {"backend": "python", "direct": False}
    device = use(monkeypatch, ORDERS["h2d first"])
    case = "activations kept"
    found = _train(models, tmp_path, case, **more)
    assert_same_bits(found, wanted[case])
    assert device.violations == []
    memory = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))["memory"]
    assert len(memory["in_host"]) == 1 and not memory["kept"]
    assert found.moved("written", "activations") > 0


# Leaving waits out

WAITS: dict[str, tuple[type, str, str, str]] = {
    "weights are read": (
        SwapManager, "load",
        'tickets.add(self.store.read(part.name, "weights", as_bytes(weights)))',
        'self.store.read(part.name, "weights", as_bytes(weights))',
    ),
    "weights are uploaded": (SwapManager, "upload", "event.wait()", "pass"),
    "imported weights are written": (
        SwapManager, "_import",
        "tickets.add(self.store.write(part.name, name, as_bytes(state)))",
        "self.store.write(part.name, name, as_bytes(state))",
    ),
    "resident states are written": (
        SwapManager, "flush",
        "tickets.add(self.store.write(part.name, name, as_bytes(state)))",
        "self.store.write(part.name, name, as_bytes(state))",
    ),
    "resident states are read": (
        SwapManager, "resident",
        "tickets.add(self.store.read(part.name, name, as_bytes(state)))",
        "self.store.read(part.name, name, as_bytes(state))",
    ),
    "gradients are written": (
        SwapManager, "save_gradient",
        'tickets.add(self.store.write(part.name, "gradient", as_bytes(gradient)))',
        'self.store.write(part.name, "gradient", as_bytes(gradient))',
    ),
    "gradients are downloaded": (
        Engine, "_collect",
        "self.device.download(on_device, host, state.computed[stage]).wait()",
        "self.device.download(on_device, host, state.computed[stage])",
    ),
    "inputs are downloaded": (
        InputSlots, "save",
        "self._downloads.pop(slot).wait()", "self._downloads.pop(slot)",
    ),
    "inputs are written": (
        InputSlots, "save",
        '"inputs", memory).wait()', '"inputs", memory)',
    ),
    "inputs are read": (
        InputSlots, "load",
        '"inputs", memory).wait()', '"inputs", memory)',
    ),
    "inputs are uploaded before compute": (
        InputSlots, "take", "self._device.compute_waits(event)", "pass",
    ),
    "inputs on the device were used": (
        InputSlots, "mark_used",
        "self._used[slot] = event", "self._used.setdefault(slot, event)",
    ),
    "activations are downloaded": (Leaving, "wait", "event.wait()", "pass"),
    "inputs have left the slot": (
        InputSlots, "load", "self._wait_for_upload(slot)", "pass",
    ),
    "inputs have come to host memory": (
        InputSlots, "save",
        "self._downloads.pop(slot).wait()", "self._downloads.pop(slot)",
    ),
    "inputs have come back from host memory": (
        InputSlots, "load", "used)[1].wait()", "used)",
    ),
    "inputs from host memory were used on the device": (
        InputSlots, "mark_used",
        "self._used[slot] = event", "self._used.setdefault(slot, event)",
    ),
    "activations have come to host memory": (Leaving, "wait", "event.wait()", "pass"),
    "states are read": (
        OutOfCoreAdam, "load",
        "tickets.add(store.read(piece.part.name, name, as_bytes(view), offset=offset))",
        "store.read(piece.part.name, name, as_bytes(view), offset=offset)",
    ),
    "rows are read": (
        RowBatch, "read",
        "tickets.add(store.read(unit, state.name, view, offset=offset))",
        "store.read(unit, state.name, view, offset=offset)",
    ),
    "states are written": (
        OutOfCoreAdam, "save",
        "tickets.add(\n                store.write(", "id(\n                store.write(",
    ),
}  # fmt: skip
"""Waits in the code: what is waited for; where, and the code without the wait.

The wait before a block input leaves for the last upload of a slot isn't here: on any device it is over by then, as downloads
come after compute.
"""


@pytest.mark.parametrize("wait", WAITS)
def test_a_wait_left_out_in_the_code_is_noticed(
    models: Path,
    wanted: dict[str, Streamed],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wait: str,
) -> None:
    _leave_out(monkeypatch, *WAITS[wait])
    with pytest.raises(Exception) as noticed:
        if wait.startswith("resident"):
            _assert_resumes(models, wanted, tmp_path / "out", monkeypatch)
        else:
            case, order = "all on ssd", "ssd-read first"
            if "host memory" in wait:
                case, order = f"{wait.partition(' ')[0]} in host memory", "h2d first"
            elif wait.startswith("activations"):
                case, order = "activations swapped", "ssd-write first"
            if wait.startswith("rows"):
                case = "divided"
            _assert_late_is_soon_enough(models, wanted, tmp_path / "out", case, order)
    assert not isinstance(noticed.value, (NameError, TypeError, AttributeError, SyntaxError))


def _leave_out(
    monkeypatch: pytest.MonkeyPatch, owner: type, method: str, code: str, without: str
) -> None:
    """Replace code of a method."""
    source = textwrap.dedent(inspect.getsource(getattr(owner, method)))
    assert source.count(code) == 1, f"{owner.__name__}.{method} has changed; bring WAITS up to date"
    functions: dict[str, Any] = {}
    changed = "from __future__ import annotations\n" + source.replace(code, without)
    exec(changed, vars(sys.modules[owner.__module__]), functions)
    monkeypatch.setattr(owner, method, functions[method])


LANES = {
    name_of(op): op.lane
    for shapes_with_edge in BY_EDGE.values()
    for op in generate_training_step(shapes_with_edge[0]).operations
}


ELSEWHERE = {("update", "save-gradient")}
"""Waits that other waits imply in all cases here: only the tests of the schedule see it when one is missing."""


def _edges() -> list[Any]:
    """Return all kinds of waits; those between lanes of which others came first are slow."""
    seen: set[tuple[Lane, Lane]] = set()
    found = []
    for edge in BY_EDGE:
        if edge in ELSEWHERE:
            continue
        lanes = (LANES[edge[0]], LANES[edge[1]])
        marks = pytest.mark.slow if lanes in seen else ()
        found.append(pytest.param(edge, marks=marks, id=f"{edge[1]}-waits-for-{edge[0]}"))
        seen.add(lanes)
    return found


@pytest.mark.parametrize("edge", _edges())
def test_a_wait_left_out_in_the_schedule_is_noticed(
    models: Path,
    wanted: dict[str, Streamed],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shapes: dict[tuple[str, bool], StepShape],
    edge: Edge,
) -> None:
    def generate(shape: StepShape) -> Schedule:
        return without_edge(generate_training_step(shape), edge)

    def begins_with_updates(shape: StepShape) -> StepShape:
        return dataclasses.replace(shape, pending=bool(shape.deferred))

    later = {case: begins_with_updates(shape) for case, shape in shapes.items()}
    racing = [
        case
        for case, shape in later.items()
        if edge in edges(generate_training_step(shape)) and races(generate(shape), shape)
    ]
    monkeypatch.setattr("ssdtune.train.engine.generate_training_step", generate)
    # whoever should wait hurries, or what should be waited for is late
    orders = (f"{LANES[edge[1]]} first", f"{LANES[edge[0]]} last")
    for number, ((case, on_cpu), order) in enumerate(product(racing, orders)):
        folder = tmp_path / str(number)
        try:
            _assert_late_is_soon_enough(models, wanted, folder, case, order, on_cpu=on_cpu)
        except Exception as error:
            assert not isinstance(error, (NameError, TypeError, AttributeError, SyntaxError))
            return
    pytest.fail("not noticed")


# Drives that reach the device's memory

REACHED: dict[str, tuple[str, str]] = {
    "frozen weights": ("lora", "ssd-read first"),
    "frozen weights, another order": ("lora", "compute last"),
    "rows of matrices": ("divided, lora", "ssd-read first"),
    "block inputs": ("all on ssd", "ssd-read first"),
    "activations": ("activations swapped", "ssd-write first"),
}
"""What goes straight between drives and device: case, and order of the lanes."""


def _assert_reached_in_time(
    models: Path,
    wanted: dict[str, Streamed],
    output_dir: Path,
    what: str,
    streams: StreamNames | None = None,
) -> None:
    case, order = REACHED[what]
    with pytest.MonkeyPatch.context() as patch:
        if streams is not None:
            patch.setattr("ssdtune.train.finetune.streams_of", lambda *_: streams)
        device = use(patch, ORDERS[order])
        patch.setattr("ssdtune.train.prepare.DEVICE_BACKENDS", {"python"})
        # the memory of this device is aligned to nothing
        found = _train(models, output_dir, case, backend="python", direct=False)
        assert_same_bits(found, wanted[case])
    assert device.violations == []
    assert device.num_straight > 10


@pytest.mark.parametrize("what", REACHED)
def test_bytes_that_go_straight_are_soon_enough(
    models: Path, wanted: dict[str, Streamed], tmp_path: Path, what: str
) -> None:
    _assert_reached_in_time(models, wanted, tmp_path / "out", what)


@pytest.mark.parametrize(
    ("what", "streams"),
    [
        ("frozen weights", StreamNames("python", "threads", "threads")),
        ("activations", StreamNames("threads", "threads", "python")),
    ],
)
def test_only_some_streams_go_straight(
    models: Path, wanted: dict[str, Streamed], tmp_path: Path, what: str, streams: StreamNames
) -> None:
    _assert_reached_in_time(models, wanted, tmp_path / "out", what, streams)
    plan = json.loads((tmp_path / "out/plan.json").read_text())["memory"]
    assert bool(plan["straight"]) == (what == "frozen weights") != plan["device_io"]


STRAIGHT_WAITS: dict[str, tuple[type, str, str, str]] = {
    "frozen weights": (SwapManager, "_read_straight", "used.wait()", "pass"),
    "block inputs": (InputSlots, "load", "used.wait()", "pass"),
    "activations": (InputSlots, "save", "self._downloads.pop(slot).wait()", "self._downloads.pop(slot)"),
}  # fmt: skip
"""By what goes straight: where it is waited for, and the code without the wait."""


@pytest.mark.parametrize("what", STRAIGHT_WAITS)
def test_a_wait_left_out_before_bytes_go_straight_is_noticed(
    models: Path,
    wanted: dict[str, Streamed],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    _leave_out(monkeypatch, *STRAIGHT_WAITS[what])
    with pytest.raises(Exception) as noticed:
        _assert_reached_in_time(models, wanted, tmp_path / "out", what)
    assert not isinstance(noticed.value, (NameError, TypeError, AttributeError, SyntaxError))
