"""Bytes of whole runs: interrupted system calls change none, and all space is really there from the start."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from ssdtune.errors import BackendUnavailableError
from ssdtune.train.trainer import Trainer
from tests.equality.harness import Streamed, assert_same_bits, stream
from tests.toy import make_checkpoint, make_rows

SETTINGS = {"max_steps": 5, "activations": "ssd", "request_bytes": 4096}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Streamed]:
    """A model with rows, and what a run in peace makes of them."""
    folder = tmp_path_factory.mktemp("plain")
    model_dir = make_checkpoint(folder / "model", "llama")
    make_rows(folder / "rows.jsonl", 9)
    return folder, stream(model_dir, folder / "rows.jsonl", folder / "wanted", SETTINGS)


@pytest.mark.parametrize("backend", ["io_uring", "libaio", "threads", "python"])
def test_a_storm_of_signals_changes_nothing(
    plain: tuple[Path, Streamed], tmp_path: Path, backend: str
) -> None:
    """A signal every fifth of a millisecond interrupts waits and transfers in the middle."""
    folder, wanted = plain
    count = 0

    def handle(*_: object) -> None:
        nonlocal count
        count += 1

    before = signal.signal(signal.SIGALRM, handle)
    signal.siginterrupt(signal.SIGALRM, True)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
        got = stream(
            folder / "model", folder / "rows.jsonl", tmp_path / "out", SETTINGS | {"backend": backend}
        )  # fmt: skip
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert count > 100
    assert_same_bits(got, wanted)


def test_the_states_have_their_space_before_the_first_step(
    plain: tuple[Path, Streamed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file with holes would fail in the middle of the run, once somebody else fills the drive."""
    sizes: list[tuple[int, int]] = []
    step = Trainer._step

    def stepped(self: Trainer, number: int) -> None:
        status = (tmp_path / "swap" / "ssdtune-states.bin").stat()
        sizes.append((status.st_size, status.st_blocks * 512))
        step(self, number)

    monkeypatch.setattr(Trainer, "_step", stepped)
    folder, _ = plain
    settings = SETTINGS | {"swap_dirs": [str(tmp_path / "swap")], "save_steps": 2}
    stream(folder / "model", folder / "rows.jsonl", tmp_path / "out", settings)
    assert len({size for size, _ in sizes}) == 1
    assert all(
        0 < size <= reserved for size, reserved in sizes
    )  # a file system may add its own blocks
