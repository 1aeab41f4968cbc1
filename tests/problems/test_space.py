"""Folders and space: full drives, folders that vanish, folders of two runs, odd names, killed runs."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ssdtune import export, finetune, plan
from ssdtune.errors import CapacityError, ConfigError, SsdtuneError, StorageError
from ssdtune.train.trainer import Trainer
from tests.equality.harness import Streamed, assert_same_bits, read_run, stream
from tests.problems.process import run, settings_for
from tests.toy import make_checkpoint, make_rows

SETTINGS = {"max_steps": 4}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Streamed]:
    """A model with rows, and what a run in peace makes of them."""
    folder = tmp_path_factory.mktemp("plain")
    model_dir = make_checkpoint(folder / "model", "llama")
    make_rows(folder / "rows.jsonl", 9)
    return folder, stream(model_dir, folder / "rows.jsonl", folder / "wanted", SETTINGS)


def _after_step(number: int, action: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Do something at a known moment: when a step (counted from 0) has ended."""
    step = Trainer._step

    def stepped(self: Trainer, current: int) -> None:
        step(self, current)
        if current == number:
            action()

    monkeypatch.setattr(Trainer, "_step", stepped)


@pytest.mark.parametrize("moved", [False, True], ids=["deleted", "moved"])
def test_a_swap_folder_that_vanishes_ends_the_run_at_the_next_step(
    plain: tuple[Path, Streamed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved: bool
) -> None:
    swap = tmp_path / "swap"
    steps: list[int] = []

    def vanish() -> None:
        steps.append(1)
        swap.rename(tmp_path / "elsewhere") if moved else shutil.rmtree(swap)

    _after_step(1, vanish, monkeypatch)
    settings = settings_for(plain[0], **SETTINGS, swap_dirs=[str(swap)], save_steps=0)
    with pytest.raises(StorageError) as caught:
        finetune(**settings | {"output_dir": str(tmp_path / "out")})
    assert str(swap) in str(caught.value)
    assert "Put the directory back, or resume" in str(caught.value)
    assert len(read_run(tmp_path / "out").steps) == 2
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_an_output_folder_that_vanishes_is_named(
    plain: tuple[Path, Streamed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    _after_step(1, lambda: shutil.rmtree(out), monkeypatch)
    swap_dirs = [str(tmp_path / "swap")]
    settings = settings_for(plain[0], max_steps=5, save_steps=3, swap_dirs=swap_dirs)
    with pytest.raises(StorageError) as caught:
        finetune(**settings | {"output_dir": str(out)})
    assert str(out) in str(caught.value)


def test_two_runs_never_share_a_folder(
    plain: tuple[Path, Streamed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one run is between two steps, another one starts on its swap folder, then on its output."""
    folder, wanted = plain
    refused: list[str] = []

    def another() -> None:
        for name, place in (("other", "swap"), ("out", "other swap")):
            settings = settings_for(folder, **SETTINGS, swap_dirs=[str(tmp_path / place)])
            with pytest.raises(ConfigError) as caught:
                finetune(**settings | {"output_dir": str(tmp_path / name)})
            refused.append(str(caught.value))

    _after_step(1, lambda: None if refused else another(), monkeypatch)
    got = stream(
        folder / "model", folder / "rows.jsonl", tmp_path / "out",
        SETTINGS | {"swap_dirs": [str(tmp_path / "swap")]},
    )  # fmt: skip
    assert_same_bits(got, wanted)
    assert len(refused) == 2
    for text in refused:
        assert f"process {os.getpid()}" in text, text
    assert not (tmp_path / "other").exists()


def test_killed_and_started_again_and_again_takes_no_more_space(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", "llama", num_hidden_layers=2)
    make_rows(tmp_path / "rows.jsonl", 5)
    settings = settings_for(tmp_path, max_steps=60, save_steps=2, gradient_accumulation_steps=1)
    sizes = set()
    for round_ in range(8):
        resume = "last" if round_ % 4 else None
        if resume is None:
            shutil.rmtree(tmp_path / "out", ignore_errors=True)
        last = 2 * (round_ % 4) + 3  # one step after a save
        code, text = run(_die_in_step, settings | {"resume_from_checkpoint": resume}, last)
        assert code == -signal.SIGKILL, text
        files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
        states = [path for path in files if path.suffix == ".bin"]
        sizes.add(sum(path.stat().st_blocks for path in states) * 512)
        assert len(list((tmp_path / "out").glob("checkpoint-*"))) == 1
    assert len(sizes) == 1


def _die_in_step(settings: dict[str, Any], number: int) -> None:
    step = Trainer._step

    def stepped(self: Trainer, current: int) -> None:
        if current == number:
            os.kill(os.getpid(), signal.SIGKILL)
        step(self, current)

    Trainer._step = stepped  # type: ignore[method-assign]
    finetune(**settings)


@pytest.mark.parametrize(
    "name", ["with space", "ünï-код", "a" * 200, "trailing/", "link"], ids=lambda name: name[:12]
)
def test_odd_names_of_the_output_folder(
    plain: tuple[Path, Streamed], tmp_path: Path, name: str
) -> None:
    folder, wanted = plain
    if name == "link":
        (tmp_path / "real").mkdir()
        (tmp_path / name).symlink_to("real")
    settings = settings_for(folder, **SETTINGS) | {"output_dir": f"{tmp_path}/{name}"}
    finetune(**settings)
    assert_same_bits(read_run(tmp_path / name), wanted)


def test_relative_folders_survive_a_change_of_directory(
    plain: tuple[Path, Streamed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, wanted = plain
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(folder / "model")
    (tmp_path / "rows.jsonl").symlink_to(folder / "rows.jsonl")
    _after_step(0, lambda: os.chdir("elsewhere"), monkeypatch)
    settings = settings_for(tmp_path, **SETTINGS)
    finetune(**settings | {"model_name_or_path": "model", "train_file": "rows.jsonl",
                           "output_dir": "out", "swap_dirs": ["swap"], "save_steps": 2})  # fmt: skip
    assert_same_bits(read_run(tmp_path / "out"), wanted)
    assert not any((tmp_path / "elsewhere").iterdir())


def test_a_file_in_the_place_of_a_folder_is_refused_before_the_model_is_read(
    plain: tuple[Path, Streamed], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("mine")
    for key, value in (
        ("output_dir", str(tmp_path / "file")),
        ("output_dir", str(tmp_path / "file" / "below")),
        ("swap_dirs", [str(tmp_path / "file")]),
    ):
        settings = settings_for(plain[0], **SETTINGS) | {"output_dir": str(tmp_path / "out")}
        with pytest.raises(ConfigError, match=str(tmp_path / "file")):
            finetune(**settings | {key: value})
    assert (tmp_path / "file").read_text() == "mine"
    assert not (tmp_path / "out").exists()


@pytest.mark.root
def test_a_drive_that_is_too_small_is_refused_before_the_first_step(
    plain: tuple[Path, Streamed], tmp_path: Path
) -> None:
    settings = settings_for(plain[0], **SETTINGS, swap_dirs=[str(tmp_path / "swap")])
    _run_with_mount(_on_a_small_drive, tmp_path, settings | {"output_dir": str(tmp_path / "out")})
    assert not (tmp_path / "out").exists()


MAY_NOT_MOUNT = 77


def _run_with_mount(function: Any, *arguments: Any) -> None:
    code, text = run(function, *arguments)
    if code == MAY_NOT_MOUNT:
        pytest.skip("mounting is not allowed here")
    assert code == 0, text


def _mount(place: Path, size: str) -> None:
    """Mount a file system of this size that only this process sees and that ends with it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x00020000) != 0:  # CLONE_NEWNS; root in a container may not
        sys.exit(MAY_NOT_MOUNT)
    private = (1 << 18) | (1 << 14)  # MS_PRIVATE | MS_REC
    assert libc.mount(b"none", b"/", None, private, None) == 0
    place.mkdir()
    assert libc.mount(b"tmpfs", os.fsencode(place), b"tmpfs", 0, f"size={size}".encode()) == 0


def _on_a_small_drive(folder: Path, settings: dict[str, Any]) -> None:
    _mount(folder / "swap", "256k")
    with pytest.raises(CapacityError) as caught:
        finetune(**settings)
    text = str(caught.value)
    assert str(folder / "swap") in text and "needed" in text and "262 kB are free" in text, text
    assert not any((folder / "swap").iterdir())


@pytest.mark.root
def test_a_drive_that_fills_up_later_costs_nothing_that_was_saved(
    plain: tuple[Path, Streamed], tmp_path: Path
) -> None:
    folder, wanted = plain
    settings = settings_for(folder, **SETTINGS, save_steps=1, swap_dirs=[str(tmp_path / "swap")])
    settings["output_dir"] = str(tmp_path / "out")
    _run_with_mount(_fill_and_free, tmp_path, settings, tmp_path / "kept")
    assert_same_bits(read_run(tmp_path / "kept"), wanted)


def _fill_and_free(folder: Path, settings: dict[str, Any], kept: Path) -> None:
    out = folder / "out"
    _mount(out, "300m")
    filler = out / "filler"

    def fill() -> None:
        with filler.open("wb", buffering=0) as file:
            for unit in (1 << 20, 1 << 12, 1):
                with suppress(OSError):
                    while True:
                        os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), unit)

    with pytest.MonkeyPatch.context() as patch:
        _after_step(1, fill, patch)
        with pytest.raises(StorageError) as caught:
            finetune(**settings)
    text = str(caught.value)
    assert str(out) in text and "ENOSPC" in text and "--resume-from-checkpoint last" in text, text
    assert [path.name for path in out.glob("checkpoint-*") if path.suffix != ".partial"] == [
        "checkpoint-1"
    ]
    filler.unlink()
    finetune(**settings | {"resume_from_checkpoint": "last"})
    shutil.copytree(out, kept)


def test_no_threads_are_left(plain: tuple[Path, Streamed], tmp_path: Path) -> None:
    before = {thread.name for thread in threading.enumerate()}
    finetune(**settings_for(plain[0], max_steps=1) | {"output_dir": str(tmp_path / "out")})
    assert {thread.name for thread in threading.enumerate()} == before


def test_a_run_killed_before_it_saved_is_started_again_in_its_folder(
    plain: tuple[Path, Streamed], tmp_path: Path
) -> None:
    folder, wanted = plain
    settings = settings_for(folder, **SETTINGS) | {"output_dir": str(tmp_path / "out")}
    code, text = run(_die_in_step, settings, 2)
    assert code == -signal.SIGKILL, text
    assert (tmp_path / "out" / "swap" / "ssdtune-states.bin").exists()
    finetune(**settings)
    assert_same_bits(read_run(tmp_path / "out"), wanted)
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        p.name for p in wanted.output_dir.iterdir()
    }


def test_what_is_written_is_what_the_plan_said(plain: tuple[Path, Streamed]) -> None:
    """The wear of drives is told beforehand, within a tenth."""
    folder, measured = plain
    estimate = plan(**settings_for(folder, **SETTINGS)).to_dict()["estimate"]
    assert abs(estimate["wear"]["run_bytes"] / measured.moved("written") - 1) < 0.1


def test_weights_that_cannot_be_written_are_not_lost(
    plain: tuple[Path, Streamed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drive is full when all steps are done, and no checkpoint was due."""
    from ssdtune.export.safetensors_writer import Staging

    folder, wanted = plain
    settings = settings_for(folder, **SETTINGS) | {"output_dir": str(tmp_path / "out")}
    settings["host_cache"] = None  # states that stay in memory are saved too

    def full(*_: Any) -> None:
        raise StorageError("write", tmp_path / "out", errno=errno.ENOSPC)

    with monkeypatch.context() as patch:
        patch.setattr(Staging, "commit", full)
        with pytest.raises(SsdtuneError, match=r"ENOSPC.* ssdtune export .*/out/checkpoint-4 OUT"):
            finetune(**settings)
    assert not list((tmp_path / "out").glob("*.safetensors"))
    export(tmp_path / "out" / "checkpoint-4", tmp_path / "elsewhere")
    finetune(**settings | {"resume_from_checkpoint": "last"})
    intact = (wanted.output_dir / "model.safetensors").read_bytes()
    for path in (tmp_path / "out", tmp_path / "elsewhere"):
        assert (path / "model.safetensors").read_bytes() == intact
