"""Small units, buffers and content for the tests of the store."""

from __future__ import annotations

import random
from pathlib import Path

from ssdtune.io.backend import Backend
from ssdtune.io.buffers import Buffer
from ssdtune.store.layout import StateSpec, UnitSpec
from ssdtune.store.store import Store

PAGE = 4096

ODD_SIZES = (1, PAGE - 1, PAGE, PAGE + 1, 70_001)


def training_unit(name: str, num_elements: int) -> UnitSpec:
    """Return the states of a unit in bf16 training, with a gradient that has no versions."""
    return UnitSpec(
        name,
        (
            StateSpec("weights", 2 * num_elements, "weights"),
            StateSpec("low", 2 * num_elements, "master"),
            StateSpec("exp_avg", 4 * num_elements, "moments"),
            StateSpec("exp_avg_sq", 4 * num_elements, "moments"),
            StateSpec("gradient", 4 * num_elements, "gradients", versioned=False),
        ),
    )


UNITS = (training_unit("embed", 2001), training_unit("block.0", 7777), training_unit("head", 3))


def content(num_bytes: int, seed: object) -> Buffer:
    """Return a page-aligned buffer with bytes that follow from the seed."""
    buffer = Buffer(num_bytes)
    buffer.view[:] = random.Random(str(seed)).randbytes(buffer.nbytes)
    return buffer


def create(path: Path, backend: Backend, **options: object) -> Store:
    """Create a store with two directories under `path`."""
    settings: dict[str, object] = {
        "copies": 2,
        "run_id": "run-1",
        "output_dir": path / "out",
        "check_bytes": PAGE,
        "units": UNITS,
        "directories": [path / "a", path / "b"],
    }
    return Store.create(backend=backend, **(settings | options))  # type: ignore[arg-type]


def write_unit(store: Store, unit: str, seed: object) -> None:
    """Write all versioned states of a unit and commit."""
    buffers = []
    for spec in next(u for u in store.layout.units if u.name == unit).states:
        if spec.versioned:
            buffers.append(content(spec.nbytes, (seed, unit, spec.name)))
            buffers.append(store.write(unit, spec.name, buffers[-1].view))
    for ticket in buffers[1::2]:
        ticket.wait()
    store.commit(unit)


def check_unit(store: Store, unit: str, seed: object) -> None:
    """Assert that the live version of a unit is what `write_unit` wrote with this seed."""
    for spec in next(u for u in store.layout.units if u.name == unit).states:
        if spec.versioned:
            buffer = Buffer(spec.nbytes)
            store.read(unit, spec.name, buffer.view).wait()
            assert buffer.view == content(spec.nbytes, (seed, unit, spec.name)).view
