"""What kernels and containers withhold: the run goes on another way with the same bits, or says why not."""

from __future__ import annotations

import errno
import resource
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import pytest

from ssdtune.io.native import extension_problem
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
