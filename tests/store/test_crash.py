"""A run killed at any point of a step leaves every saved checkpoint intact."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.store.helpers import UNITS, check_unit, create, write_unit
from tests.store.test_store import reopen

RUN = """
import sys
from pathlib import Path
from ssdtune.io.select import open_backend
from ssdtune.store.durable import replace_dir, write_json_atomic
from tests.store.helpers import UNITS, content, create, write_unit

path, point = Path(sys.argv[1]), sys.argv[2]
store = create(path, open_backend("python", queue_depth=2, request_bytes=16384))
store.checksum_writes(True)

def reached(name):
    if name == point:
        print("ready", flush=True)
        sys.stdin.read()

def save(step):
    folder = path / "out" / f"checkpoint-{step}"
    (path / "out" / "tmp").mkdir(parents=True)
    manifest = store.freeze(folder.name, folder)
    reached(f"frozen {step}")
    store.sync()
    write_json_atomic(path / "out" / "tmp" / "states.json", manifest)
    reached(f"manifest {step}")
    replace_dir(path / "out" / "tmp", folder)

for unit in UNITS:
    write_unit(store, unit.name, 1)
save(1)
for unit in UNITS:
    for spec in unit.states[:4]:
        store.write(unit.name, spec.name, content(spec.nbytes, (2, unit.name, spec.name)).view).wait()
        reached(f"written {unit.name} {spec.name}")
    store.commit(unit.name)
    reached(f"committed {unit.name}")
save(2)
reached("saved 2")
"""

POINTS = {
    "written embed weights": 1,
    "written block.0 exp_avg_sq": 1,
    "committed block.0": 1,
    "committed head": 1,
    "frozen 2": 1,
    "manifest 2": 1,
    "saved 2": 2,
}


@pytest.mark.parametrize("point", POINTS)
def test_killed_and_resumed(tmp_path, backend, point):
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, str(tmp_path), point],
        env=os.environ | {"PYTHONPATH": ":".join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    manifests = {
        folder.name: json.loads((folder / "states.json").read_text())
        for folder in sorted((tmp_path / "out").glob("checkpoint-*"))
    }
    last = POINTS[point]
    assert max(manifests) == f"checkpoint-{last}"
    with reopen(tmp_path, backend, manifests, f"checkpoint-{last}", copies=3) as store:
        for unit in UNITS:
            check_unit(store, unit.name, last)
            write_unit(store, unit.name, 3)
    # Going on from there has not touched it either.
    with reopen(tmp_path, backend, manifests, f"checkpoint-{last}") as store:
        for unit in UNITS:
            check_unit(store, unit.name, last)
    assert create(tmp_path / "other", backend).version("head") is None
