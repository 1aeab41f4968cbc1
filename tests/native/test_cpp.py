"""The C++ test programs: built by the compiler that is there, run on real files, in slow runs with sanitizers too."""

import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[2] / "native"
FLAGS = [
    "-std=c++20",
    "-g",
    "-pthread",
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
    "-Wconversion",
    "-Werror",
]

compiler = shutil.which("g++") or shutil.which("c++")
pytestmark = pytest.mark.skipif(compiler is None, reason="no C++ compiler")


def build(folder: Path, program: str, *flags: str) -> Path:
    """Compile one of native/tests with the sources that it tests."""
    target = folder / program
    kernels = {NATIVE / "src" / name for name in ("adam.cpp", "codes.cpp")}
    sources = kernels if program == "adam_test" else {*(NATIVE / "src").glob("*.cpp")} - kernels
    sources = [*sorted(sources), NATIVE / "tests" / f"{program}.cpp"]
    command = [compiler, *FLAGS, *flags, "-I", NATIVE / "include", *sources, "-o", target]
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if "cannot find" in result.stderr and "san" in result.stderr:
        pytest.skip("the compiler has no such sanitizer")
    assert result.returncode == 0, result.stderr
    return target


def run(program: Path, *arguments: str) -> str:
    result = subprocess.run([program, *arguments], capture_output=True, text=True)
    if result.returncode == 77:
        pytest.skip(f"not available here: {result.stderr.strip()}")
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_engines_survive_faults(tmp_path):
    program = build(tmp_path, "engine_test", "-O0")
    for name in ("threads", "libaio", "io_uring"):  # what may be missing comes last
        assert run(program, str(tmp_path), name).splitlines() == [f"{name} ok", "late ok"]


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_engines_are_clean_under_sanitizers(tmp_path, sanitizer):
    flags = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-O1"]
    program = build(tmp_path, "engine_test", *flags)
    assert "late ok" in run(program, str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_kernels_are_clean_under_sanitizers(tmp_path, sanitizer):
    flags = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-O2"]
    assert run(build(tmp_path, "adam_test", *flags)) == "adam ok\n"
