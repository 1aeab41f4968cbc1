"""What kernels and containers withhold: the run goes on another way with the same bits, or says why not."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import pytest

import ssdtune
from ssdtune.io.native import extension_problem
from ssdtune.optim.adamw import forms
from tests.equality.harness import Streamed, assert_same_bits, read_run, stream
from tests.io.test_select import DENY
from tests.problems.process import command, run, settings_for
from tests.toy import make_checkpoint, make_rows

native = pytest.mark.skipif(bool(extension_problem()), reason=extension_problem())
SETTINGS = {"max_steps": 3, "activations": "ssd"}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Streamed]:
    """A model with rows, and what a run in peace makes of them."""
    folder = tmp_path_factory.mktemp("plain")
    model_dir = make_checkpoint(folder / "model", "llama")
    make_rows(folder / "rows.jsonl", 9)
    return folder, stream(model_dir, folder / "rows.jsonl", folder / "wanted", SETTINGS)


def _finetune_denied(settings: dict[str, Any], number: int, calls: tuple[str, ...]) -> int:
    names: dict[str, Any] = {}
    exec(textwrap.dedent(DENY), names)
    names["deny"](number, *(names[call] for call in calls))
    return command(settings)


@native
@pytest.mark.parametrize(
    "number, calls, chosen, remedy",
    [
        (errno.EPERM, ("SETUP",), "libaio", "seccomp"),
        (errno.ENOMEM, ("SETUP",), "libaio", "ulimit -l unlimited"),
        (errno.EAGAIN, ("SETUP", "AIO_SETUP"), "threads", "fs.aio-max-nr"),
    ],
    ids=["forbidden", "no-locked-memory", "all-aio-in-use"],
)
def test_a_refused_backend_gives_way(
    plain: tuple[Path, Streamed], tmp_path: Path, number: int, calls: tuple[str, ...], chosen: str, remedy: str
) -> None:  # fmt: skip
    folder, wanted = plain
    settings = settings_for(folder, **SETTINGS) | {"output_dir": str(tmp_path / "out")}
    code, text = run(_finetune_denied, settings, number, calls)
    assert code == 0, text
    said = [line for line in text.splitlines() if "using I/O backend" in line]
    assert len(said) == 1 and f"using I/O backend {chosen}" in said[0]
    assert remedy in said[0]
    assert_same_bits(read_run(tmp_path / "out"), wanted)


@native
def test_a_refused_backend_that_was_asked_for_is_an_error(
    plain: tuple[Path, Streamed], tmp_path: Path
) -> None:
    settings = settings_for(plain[0], **SETTINGS, backend="io_uring")
    settings["output_dir"] = str(tmp_path / "out")
    code, text = run(_finetune_denied, settings, errno.EPERM, ("SETUP",))
    assert code == 2
    (line,) = [line for line in text.splitlines() if line.startswith("error:")]
    assert "io_uring is not available" in line and "seccomp" in line
    assert not (tmp_path / "out").exists()


def _finetune_limited(settings: dict[str, Any], kind: int, limit: int) -> int:
    resource.setrlimit(kind, (limit, limit))
    return command(settings)


@pytest.mark.parametrize(
    "kind, limit",
    [(resource.RLIMIT_MEMLOCK, 0), (resource.RLIMIT_NOFILE, 64)],
    ids=["no-locked-memory", "64-files"],
)
def test_tight_limits_change_nothing(
    plain: tuple[Path, Streamed], tmp_path: Path, kind: int, limit: int
) -> None:
    folder, wanted = plain
    swap_dirs = [str(tmp_path / f"drive{number}") for number in range(3)]
    settings = settings_for(folder, **SETTINGS, swap_dirs=swap_dirs)
    settings["output_dir"] = str(tmp_path / "out")
    code, text = run(_finetune_limited, settings, kind, limit)
    assert code == 0, text
    assert_same_bits(read_run(tmp_path / "out"), wanted)


def test_a_memory_file_system_works_and_is_named(
    plain: tuple[Path, Streamed], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if not Path("/dev/shm").is_mount():
        pytest.skip("/dev/shm is no mount")
    folder, wanted = plain
    with tempfile.TemporaryDirectory(dir="/dev/shm") as swap_dir:
        given = SETTINGS | {"swap_dirs": [swap_dir]}
        got = stream(folder / "model", folder / "rows.jsonl", tmp_path / "out", given)
        assert not any(Path(swap_dir).iterdir())
    assert_same_bits(got, wanted)
    warnings = [r.getMessage() for r in caplog.records if "tmpfs" in r.getMessage()]
    assert len(warnings) == 1 and swap_dir in warnings[0]


def _finetune_without_direct_io(settings: dict[str, Any]) -> int:
    """Fine-tune where every `openat` with O_DIRECT fails with EINVAL, as on file systems that have none."""
    steps = [
        (0x20, 0, 0, 0),  # load the number of the call
        (0x15, 0, 3, {"x86_64": 257}.get(platform.machine(), 56)),  # not openat: allow
        (0x20, 0, 0, 16 + 2 * 8),  # load its flags
        (0x45, 0, 1, os.O_DIRECT),  # bit not set: allow
        (0x06, 0, 0, 0x00050000 | errno.EINVAL),
        (0x06, 0, 0, 0x7FFF0000),
    ]
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    program = ctypes.create_string_buffer(code)
    head = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(program))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
    assert libc.prctl(22, 2, head) == 0
    return command(settings)


def test_a_file_system_without_direct_io_is_used_through_the_page_cache(
    plain: tuple[Path, Streamed], tmp_path: Path
) -> None:
    folder, wanted = plain
    settings = settings_for(folder, **SETTINGS) | {"output_dir": str(tmp_path / "out")}
    code, text = run(_finetune_without_direct_io, settings)
    assert code == 0, text
    (line,) = [line for line in text.splitlines() if "O_DIRECT" in line]
    assert str(folder) in line or str(tmp_path) in line
    assert_same_bits(read_run(tmp_path / "out"), wanted)


def _finetune_without_extension(settings: dict[str, Any]) -> int:
    sys.modules["ssdtune._native"] = None  # type: ignore[assignment]
    vars(ssdtune).pop("_native", None)
    assert forms() == ("numpy",)
    return command(settings)


def test_without_the_native_extension_the_bits_are_the_same(
    plain: tuple[Path, Streamed], tmp_path: Path
) -> None:
    folder, wanted = plain
    settings = settings_for(folder, **SETTINGS) | {"output_dir": str(tmp_path / "out")}
    code, text = run(_finetune_without_extension, settings)
    assert code == 0, text
    assert sum("native extension is missing" in line for line in text.splitlines()) == 1, text
    assert_same_bits(read_run(tmp_path / "out"), wanted)
