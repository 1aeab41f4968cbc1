"""Each stream of a run has its own I/O backend: named, or the fastest by the profile; told, forecast, and without effect on bits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ssdtune import finetune, plan
from ssdtune.config.load import load_config
from ssdtune.config.schema import Config
from ssdtune.hardware.figures import DirectoryProfile, Way
from ssdtune.hardware.machine import machine_id
from ssdtune.hardware.profile import HardwareProfile
from ssdtune.io import streams as io_streams
from ssdtune.io.streams import StreamNames, Streams
from ssdtune.train.choose import rates_for
from ssdtune.train.prepare import prepare
from ssdtune.train.streams import streams_of
from tests.toy import make_checkpoint, make_rows
from tests.train.test_choose import keep, machine

Settings = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("streams")
    make_checkpoint(folder / "model", "llama")
    make_rows(folder / "rows.jsonl", 9)
    return folder


@pytest.fixture
def settings(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("ssdtune.train.finetune.times_of", lambda *_: None)
    monkeypatch.setattr("ssdtune.train.planning.times_of", lambda *_: None)

    def make(**changes: Any) -> dict[str, Any]:
        return {
            "model_name_or_path": str(model / "model"), "train_file": str(model / "rows.jsonl"),
            "output_dir": str(tmp_path / "out"), "dtype": "fp32", "device": "cpu", "method": "lora",
            "activations": "ssd", "host_cache": 0, "compute_threads": 1, "verify": False, "save_steps": 0,
            "max_steps": 2,
        } | changes  # fmt: skip

    return make


def measured(folder: Path) -> HardwareProfile:
    """Return a machine whose drive reads fastest with threads, and whose card is reached fastest by kvikio."""
    place = DirectoryProfile(
        path=str(folder), file_system="ext4", device="/dev/a", free_bytes=1 << 40, backend="python",
        queue_depth=2, request_bytes=1 << 18, read_bytes_per_s=1e9, write_bytes_per_s=1e9, mixed_bytes_per_s=1e9,
        ways=(
            Way(backend="python", read_bytes_per_s=1e9, mixed_bytes_per_s=1e9),
            Way(backend="threads", read_bytes_per_s=2e9, mixed_bytes_per_s=5e8),
            Way(backend="python", to_card=True, read_bytes_per_s=1e9, mixed_bytes_per_s=1e9),
            Way(backend="kvikio", to_card=True, read_bytes_per_s=3e9, mixed_bytes_per_s=2e9),
        ),
    )  # fmt: skip
    return machine(directories=(place,), machine_id=machine_id([folder]))


def config(settings: dict[str, Any]) -> Config:
    return load_config(None, settings)


def test_a_name_counts_for_every_stream_and_the_profile_where_there_is_none(
    settings: Settings, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    profile, model = measured(tmp_path), tmp_path
    own, forced = config(settings()), config(settings(backend="libaio"))
    assert streams_of(forced, profile, model, True) == StreamNames.all("libaio")
    assert streams_of(own, None, model, False) == StreamNames.all("auto")
    assert streams_of(own, profile, model, False) == StreamNames("threads", "python", "python")
    elsewhere = replace(profile, directories=(replace(profile.directories[0], path="/proc"),))
    assert streams_of(own, elsewhere, model, False) == StreamNames.all("auto")
    straight = StreamNames("kvikio", "python", "kvikio")
    assert streams_of(own, profile, model, True, here=False) == straight
    monkeypatch.setattr("ssdtune.train.streams.kvikio_problem", lambda: "")
    assert streams_of(own, profile, model, True) == straight
    monkeypatch.setattr("ssdtune.train.streams.kvikio_problem", lambda: "The driver is gone.")
    with caplog.at_level(logging.WARNING, "ssdtune"):
        found = streams_of(own, profile, model, True)
    assert found == StreamNames("threads", "python", "python")
    assert (
        "does not work now: The driver is gone. I/O: threads for weights; python for" in caplog.text
    )


def test_one_line_says_which_backend_moves_what() -> None:
    assert StreamNames.all("auto").text(card=False) == "I/O: the first backend that works"
    assert StreamNames.all("kvikio").text(card=False) == "I/O: kvikio"
    names = StreamNames("kvikio", "io_uring", "kvikio")
    assert names.text(card=True) == (
        "I/O: kvikio straight to the card for weights and activations; io_uring for states"
    )


def test_plans_and_runs_take_the_fastest_and_keep_the_bits(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    real = io_streams.open_backend

    def noted(name: str, **sizes: Any) -> Any:
        opened.append(name)
        return real(name, **sizes)

    monkeypatch.setattr(io_streams, "open_backend", noted)
    wanted = finetune(**settings(backend="python", output_dir=str(tmp_path / "python")))
    assert opened == ["python"]
    profile = measured(tmp_path)
    told = plan(hardware=profile, **settings())
    assert "I/O: threads for weights; python for states and activations" in told.text()
    assert told.to_dict()["backends"] == {
        "weights": "threads", "states": "python", "activations": "python",
    }  # fmt: skip
    keep(profile)
    found = finetune(**settings())
    assert opened == ["python", "threads", "python"]
    assert found.losses == wanted.losses and found.grad_norms == wanted.grad_norms


def test_forecasts_have_the_rates_of_each_stream(settings: Settings, tmp_path: Path) -> None:
    profile = measured(tmp_path)
    prepared = prepare(config(settings()))

    def rates(*names: str) -> tuple[float, float, float]:
        found = rates_for(replace(prepared, streams=StreamNames(*names)), profile)
        return found.source_read_bytes_per_s, found.mixed_bytes_per_s, found.activation_pace

    assert rates("python", "python", "python") == (1e9, 1e9, 1.0)
    assert rates("threads", "python", "python") == (2e9, 1e9, 1.0)
    assert rates("threads", "threads", "python") == (2e9, 5e8, 2.0)
    assert rates("kvikio", "python", "kvikio") == (3e9, 1e9, 2.0)


def test_backends_are_opened_once_and_closed_again() -> None:
    with Streams(StreamNames("python", "threads", "python"), queue_depth=2, request_bytes=4096) as opened:  # fmt: skip
        assert opened.weights is opened.activations is not opened.states
        assert opened.register is None
        assert (opened.weights.name, opened.states.name) == ("python", "threads")
