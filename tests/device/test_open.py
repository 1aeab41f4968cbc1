"""Which device a name opens, what is wrong with names, and where CUDA is spoken."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ssdtune.device import open_device
from ssdtune.device.cpu import CpuDevice
from ssdtune.errors import BackendUnavailableError
from tests.device.pretended import OnHost, PretendedCuda

PACKAGE = Path(__file__).parents[2] / "ssdtune"

needs_no_card = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")


@needs_no_card
def test_auto_is_the_cpu_where_there_is_no_card() -> None:
    assert isinstance(open_device(), CpuDevice)


def test_auto_is_the_first_card_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = PretendedCuda(count=2)
    cuda.install(monkeypatch)
    with OnHost(cuda):
        assert open_device("auto").name == "cuda:0"
        assert open_device("cuda").name == "cuda:0"
        assert open_device("cuda:1").name == "cuda:1"
        assert open_device("cpu").name == "cpu"


@needs_no_card
@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda:3"])
def test_a_card_that_is_not_there(name: str) -> None:
    with pytest.raises(BackendUnavailableError) as failed:
        open_device(name)
    text = str(failed.value)
    assert text.startswith(f"device {name} was asked for, but torch {torch.__version__} finds no")
    assert "--device cpu" in text and "CUDA_VISIBLE_DEVICES" in text
    assert failed.value.exit_code == 2


def test_a_card_with_too_high_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    PretendedCuda(count=2).install(monkeypatch)
    with pytest.raises(BackendUnavailableError) as failed:
        open_device("cuda:2")
    assert str(failed.value) == (
        "there is no device cuda:2; torch sees cuda:0 Pretended 0, cuda:1 Pretended 1. "
        "Name one of these, or check CUDA_VISIBLE_DEVICES."
    )


@pytest.mark.parametrize("name", ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:0", "auto:1"])
def test_names_that_mean_nothing(name: str) -> None:
    with pytest.raises(BackendUnavailableError, match="unknown device"):
        open_device(name)


def _settings_after_opening(environment: dict[str, str]) -> str:
    code = (
        "import torch; from ssdtune.device.cuda import _prefer_expandable_segments; "
        "_prefer_expandable_segments(); print(torch._C._accelerator_getAllocatorSettings())"
    )
    kept = {key: value for key, value in os.environ.items() if "ALLOC_CONF" not in key}
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, "PYTHONPATH": str(PACKAGE.parent), **environment},
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return result.stdout.strip()


@pytest.mark.skipif(
    not hasattr(torch._C, "_accelerator_getAllocatorSettings"), reason="torch before 2.9"
)
def test_the_allocator_grows_its_segments_unless_the_user_has_said_something() -> None:
    assert _settings_after_opening({}) == "expandable_segments:True"
    said = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}
    assert "expandable" not in _settings_after_opening(said)


def test_cuda_is_spoken_in_the_device_layer_only() -> None:
    """No `torch.cuda`, `.cuda()` or `cudart` elsewhere in the package: nothing there asks which device it is."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        inside = path.relative_to(PACKAGE)
        if inside.parts[0] == "device":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                (
                    isinstance(node, ast.Attribute)
                    and node.attr in ("cuda", "cudart", "is_cuda", "pin_memory")
                )
                or (isinstance(node, ast.keyword) and node.arg == "pin_memory")
                or (
                    isinstance(node, (ast.Import, ast.ImportFrom))
                    and "torch.cuda"
                    in ast.unparse(node).replace("from torch import cuda", "torch.cuda")
                )
            ):
                found.append(f"{inside}:{node.lineno}: {ast.unparse(node)}")
    assert not found, "\n".join(found)
