"""The real kvikio without a GPU: a stub of NVIDIA's driver is compiled, and the tests run once more over it.

The stub (stub_libcuda.c) must be in place before a process loads kvikio, so they run in a process of their own.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.mark.gds
@pytest.mark.timeout(400)  # some 150 tests, one of them a whole run
def test_io_and_store_work_over_kvikio_in_compatibility_mode(tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("needs a C compiler for the stub of the driver")
    stub = tmp_path / "libcuda.so.1"
    flags = ["-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
    subprocess.run(
        [compiler, *flags, "-o", stub, HERE / "stub_libcuda.c"], check=True, cwd=tmp_path
    )
    paths = os.environ.get("LD_LIBRARY_PATH")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment["LD_LIBRARY_PATH"] = f"{tmp_path}:{paths}" if paths else str(tmp_path)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-k", "kvikio"]
    command += ["--ignore", __file__, "--basetemp", tmp_path / "tests"]
    command += [HERE, ROOT / "tests" / "store"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    passed = re.search(r"(\d+) passed", result.stdout)
    assert passed is not None, result.stdout
    assert int(passed[1]) > 120, result.stdout  # not because most were skipped
