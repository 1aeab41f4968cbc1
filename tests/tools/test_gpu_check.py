"""The script that checks cards, run on the CPU: what it measures there, what it finds wrong, how it fails."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

TOOL = Path(__file__).parents[2] / "tools/gpu_check.py"


def load() -> ModuleType:
    before = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    spec = importlib.util.spec_from_file_location("gpu_check", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module  # where dataclasses look
    spec.loader.exec_module(module)
    sys.path.remove(str(TOOL.parents[1]))
    if before is None:
        del os.environ["CUBLAS_WORKSPACE_CONFIG"]
    return module


gpu_check: Any = load()


@pytest.fixture(autouse=True)
def as_before() -> Any:
    """Checks make torch deterministic for all that follows."""
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def bench(tmp_path: Path) -> Any:
    return gpu_check.Bench("cpu", tmp_path, gpu_check.SIZES["smallest"], limit_s=100)


def run(tmp_path: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    output = tmp_path / "found.json"
    result = subprocess.run(
        [sys.executable, str(TOOL), "--output", str(output), "--work-dir", str(tmp_path), *arguments],
        capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    return result, json.loads(output.read_text(encoding="utf-8"))


def test_it_runs_to_the_end_on_a_cpu(tmp_path: Path) -> None:
    checks = [
        "device", "equal: full bf16 clipped", "same bits", "copies", "overlap", "kvikio",
        "memory of the card", "drives and rates", "speed",
    ]  # fmt: skip
    result, report = run(tmp_path, "--device", "cpu", "--size", "smallest", "--only", *checks)
    assert result.returncode == 0, result.stdout + result.stderr
    assert list(report["checks"]) == checks
    states = {name: entry["status"] for name, entry in report["checks"].items()}
    cards_only = {"copies", "overlap", "kvikio", "memory of the card"}
    assert {name for name, state in states.items() if state == "not here"} == cards_only
    assert {name for name, state in states.items() if state == "passed"} == {*checks} - cards_only
    assert report["verdict"] == "passed"
    table = result.stdout.splitlines()
    assert [line[:24].strip() for line in table[:-1]] == checks
    assert table[-1].startswith("passed: 5 passed, 0 failed, 4 not here, 0 skipped")

    figures = report["checks"]["equal: full bf16 clipped"]["figures"]
    assert figures["clipped_steps"] == 2
    assert len(figures["losses"]) == len(figures["reference_losses"]) == 2
    bits = report["checks"]["same bits"]["figures"]["results"]
    assert len(set(bits.values())) == 1 and len(bits) == 5
    for tokens in (20, 40):
        found = report["checks"]["speed"]["figures"][f"{tokens} tokens a step"]
        assert found["ratio_to_in_memory"] > 0 and found["forecast_s"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_no_card_is_a_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", [str(TOOL), "--output", str(output)])
    assert gpu_check.main() == 3
    report = json.loads(output.read_text(encoding="utf-8"))
    assert report["verdict"] == "no device"
    assert "finds no CUDA card" in report["reason"]
    assert capsys.readouterr().out == f"no device: {report['reason']}\n"


def test_a_missing_package_is_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "PACKAGES", ("torch", "not_there"))
    assert gpu_check.no_device("cpu") == (
        "cannot be imported: not_there (ModuleNotFoundError: No module named 'not_there')"
    )


def test_another_learning_rate_is_noticed(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    train = bench.train
    monkeypatch.setattr(
        gpu_check.Bench, "train", lambda self, *a, **s: train(*a, **s, learning_rate=1.1e-3)
    )
    with pytest.raises(gpu_check.Failed, match=r"movement_error 0\.\d+ > 0\.01"):
        gpu_check.CHECKS["equal: lora fp32 clipped"](bench)


def test_other_bits_are_noticed(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    train = bench.train

    def one_is_off(self: Any, *arguments: Any, **settings: Any) -> Any:
        if "activations" in settings:
            settings["seed"] = 1
            settings["learning_rate"] = 1.0001e-3
        return train(*arguments, **settings)

    monkeypatch.setattr(gpu_check.Bench, "train", one_is_off)
    with pytest.raises(gpu_check.Failed, match=r"not the same: inputs in host memory$"):
        gpu_check.check_bits(bench)


def test_what_fails_is_told_and_the_rest_goes_on(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def breaks(bench: Any) -> dict[str, Any]:
        print("what a library says", file=sys.stderr)
        raise ZeroDivisionError("by none")

    def is_wrong(bench: Any) -> dict[str, Any]:
        raise gpu_check.Failed("too many", {"count": 3})

    def hangs(bench: Any) -> dict[str, Any]:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            sum(range(1000))
        return {}

    checks: dict[str, Callable[[Any], dict[str, Any]]] = {
        "breaks": breaks, "wrong": is_wrong, "fine": lambda bench: {"count": 4}, "hangs": hangs,
        "late": lambda bench: {},
    }  # fmt: skip
    monkeypatch.setattr(gpu_check, "CHECKS", checks)
    monkeypatch.setattr(gpu_check, "LEAST_S", 0.3)
    bench.limit_s = time.monotonic() - bench.begin + 0.9
    report: dict[str, Any] = {"checks": {}}
    saved: list[str] = []
    works = gpu_check.run_checks(
        bench, list(checks), report, lambda: saved.append(json.dumps(report))
    )
    assert works
    found = {n: (e["status"], e["message"], e["figures"]) for n, e in report["checks"].items()}
    assert found == {
        "breaks": ("failed", "ZeroDivisionError: by none", {}),
        "wrong": ("failed", "too many", {"count": 3}),
        "fine": ("passed", "", {"count": 4}),
        "hangs": ("failed", "TimeoutError: stopped after 1 s", {}),
        "late": ("skipped", "no time left", {}),
    }
    assert report["checks"]["breaks"]["stderr"] == "what a library says\n"
    assert "by none" in report["checks"]["breaks"]["traceback"]
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in table] == [
        [n, e["status"]] for n, e in report["checks"].items()
    ]
    first = json.loads(saved[0])["checks"]
    assert first == {
        "breaks": {"status": "failed", "message": "the script ended within it", "figures": {}}
    }


def test_a_lost_card_ends_this_process_and_the_next_goes_on(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loses_it(bench: Any) -> dict[str, Any]:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(gpu_check, "CHECKS", {"loses": loses_it, "rest": lambda bench: {}})
    monkeypatch.setattr(gpu_check, "_still_works", lambda bench: False)
    report: dict[str, Any] = {"checks": {}}
    assert not gpu_check.run_checks(bench, ["loses", "rest"], report, lambda: None)
    assert list(report["checks"]) == ["loses"]
    assert gpu_check.run_checks(bench, ["loses", "rest"], report, lambda: None)
    assert report["checks"]["loses"]["status"] == "failed"
    assert report["checks"]["rest"]["status"] == "passed"
