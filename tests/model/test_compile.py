"""Compiled blocks give what blocks give, are compiled once for each kind, and never fail a run.

Most tests compile without inductor (`aot_eager`: graphs, guards, partition and hooks are the real ones, kernels torch's
own), which takes a tenth of the time; those marked slow make real kernels.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Self

import pytest
import torch

from ssdtune.cli.doctor import examine
from ssdtune.errors import BackendUnavailableError
from ssdtune.model import compile as compiling
from ssdtune.model.blocks import BlockModel
from ssdtune.model.compile import CompiledBlocks
from ssdtune.model.footprint import kept_bytes
from ssdtune.model.toolchain import missing_tool
from tests import adversarial
from tests.equality.harness import ATOL, Streamed, assert_same_bits, stream
from tests.model.test_footprint import Batch, most_kept, open_blocks
from tests.toy import make_checkpoint, make_rows

LENGTHS = (7, 11, 13)
KINDS = {"llama": 1, "gemma3_text": 1, "gpt2": 3}
"""Kinds of blocks: all the same, also where only the mask says who attends to whom; a scale of its own in each."""


@pytest.fixture(autouse=True)
def quick_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "slow" not in request.keywords:
        monkeypatch.setattr(compiling, "BACKEND", "aot_eager")


def run_through(
    blocks: BlockModel, batch: Batch, *, training: bool = True
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Run all blocks forward without gradients, and back one by one; return the last output and all gradients."""
    weights = {
        spec.name: torch.randn(spec.shape, generator=torch.Generator().manual_seed(n))
        .mul_(0.1)
        .to(part.dtype)
        .requires_grad_(part.trained)
        for n, part in enumerate(blocks.layout.parts)
        for spec in part.tensors
    }
    blocks.train(training)
    with torch.no_grad():
        entry = blocks.enter(weights, batch.tensors(), False)
        states = [entry.hidden]
        for number, call in enumerate(entry.calls):
            torch.manual_seed(number)
            states.append(blocks.run_block(number, weights, call, states[-1]))
    gradient = torch.ones_like(states[-1])
    for number in reversed(range(len(entry.calls)) if training else ()):
        leaf = states[number].detach().requires_grad_()
        torch.manual_seed(number)
        output = blocks.run_block(number, weights, entry.calls[number], leaf)
        assert torch.equal(output, states[number + 1]), "run again it gives something else"
        torch.autograd.backward(output, gradient)
        gradient = leaf.grad
    return states[-1], {name: w.grad for name, w in weights.items() if w.grad is not None}


@pytest.mark.parametrize(
    "arch", ["llama", "gpt2", pytest.param("gemma3_text", marks=pytest.mark.slow)]
)
def test_blocks_are_compiled_once_for_each_kind(tmp_path: Path, arch: str) -> None:
    """In training and not; for any length."""
    blocks = open_blocks(tmp_path, arch)
    plain = [run_through(blocks, Batch(2, length, padded=3)) for length in LENGTHS]
    blocks.call_block = compiled = CompiledBlocks(lengths_vary=True)
    for length, (output, gradients) in zip(LENGTHS, plain, strict=True):
        found, slopes = run_through(blocks, Batch(2, length, padded=3))
        torch.testing.assert_close(found, output, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(slopes, gradients, rtol=1e-4, atol=1e-4)
    assert compiled.num_graphs == KINDS[arch]
    run_through(blocks, Batch(2, LENGTHS[0], padded=3), training=False)
    assert compiled.num_graphs == 2 * KINDS[arch]


def test_one_length_is_compiled_for_that(tmp_path: Path) -> None:
    blocks = open_blocks(tmp_path, "llama")
    blocks.call_block = compiled = CompiledBlocks(lengths_vary=False)
    for length in (7, 7, 11):
        run_through(blocks, Batch(2, length))
    assert compiled.num_graphs == 2


def test_what_cannot_be_compiled_is_said_once_and_runs_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocks = open_blocks(tmp_path, "mixtral")
    plain = run_through(blocks, Batch(2, 7))
    blocks.call_block = CompiledBlocks(lengths_vary=True)
    forward = type(blocks.blocks[0]).forward

    def breaking(self: Any, *args: Any, **kwargs: Any) -> Any:
        torch._dynamo.graph_break()
        return forward(self, *args, **kwargs)

    for block in blocks.blocks:
        block.forward = breaking.__get__(block)
    with caplog.at_level(logging.WARNING, "ssdtune"):
        output, gradients = run_through(blocks, Batch(2, 7))
    assert torch.equal(output, plain[0])
    torch.testing.assert_close(gradients, plain[1], rtol=0, atol=0)
    (text,) = [record.getMessage() for record in caplog.records]
    assert text.startswith("MixtralDecoderLayer cannot be compiled: ")
    assert text.endswith("Blocks like it run without torch.compile.")


def test_too_many_variants_are_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "MOST_VARIANTS", 2)
    blocks = open_blocks(tmp_path, "llama")
    blocks.call_block = compiled = CompiledBlocks(lengths_vary=False)
    with caplog.at_level(logging.WARNING, "ssdtune"):
        for length in (7, 8, 9, 10):
            run_through(blocks, Batch(2, length))
    assert compiled.num_graphs == 2
    assert [r.getMessage() for r in caplog.records if r.name.startswith("ssdtune")] == [
        "LlamaDecoderLayer cannot be compiled: 2 variants of blocks and shapes were compiled, and these are more. "
        "Blocks like it run without torch.compile."
    ]


@pytest.mark.parametrize(
    "arch",
    [
        "llama",
        *(
            pytest.param(arch, marks=pytest.mark.slow)
            for arch in ("gemma3_text", "gpt_neox", "phi3")
        ),
    ],
)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_block_keeps_no_more_than_was_counted(
    tmp_path: Path, arch: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "BACKEND", backend)
    blocks = open_blocks(tmp_path, arch, dtype=torch.bfloat16)
    blocks.call_block = CompiledBlocks(lengths_vary=True)
    counted = kept_bytes(blocks, 2, 11, masked=True)
    assert counted is not None
    assert 0 < most_kept(blocks, Batch(2, 11, padded=4)) <= counted


# Whole runs

Case = tuple[Path, dict[str, Any]]


@pytest.fixture(params=["full", "lora"])
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    """A model with dropout, rows of many lengths, and how it is trained."""
    make_checkpoint(tmp_path / "model", "llama", attention_dropout=0.1, num_hidden_layers=2)
    make_rows(tmp_path / "rows.jsonl", 11)
    lora = {"method": "lora", "lora_dropout": 0.2}
    return tmp_path, {"max_steps": 3, **(lora if request.param == "lora" else {})}


def run(case: Case, name: str, **more: Any) -> Streamed:
    folder, settings = case
    given = settings | {"torch_compile": True} | more
    return stream(folder / "model", folder / "rows.jsonl", folder / name, given)


def assert_alike(compiled: Streamed, plain: Streamed) -> None:
    """Assert that two fp32 runs differ by rounding only: masks of dropout are the same."""
    assert compiled.series("loss") == pytest.approx(plain.series("loss"), abs=ATOL)
    assert compiled.series("grad_norm") == pytest.approx(plain.series("grad_norm"), rel=1e-4)
    state = compiled.state()
    for name, tensor in plain.state().items():
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=ATOL)


@pytest.mark.parametrize("case", ["full"], indirect=True)
def test_a_run_differs_by_rounding_only(case: Case) -> None:
    case[1]["max_steps"] = 1
    assert_alike(run(case, "compiled"), run(case, "plain", torch_compile=False))


@pytest.mark.slow
def test_memory_plans_devices_and_resumes_change_nothing(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = run(case, "wanted", save_steps=2)
    bits, losses = wanted.bits(), wanted.series("loss")
    for name, more in {
        "in memory": {"host_cache": "1GiB"},
        "kept": {"recompute": "never"},
        "swapped": {"recompute": "never", "activations": "ssd"},
    }.items():
        assert_same_bits(run(case, name, **more), wanted)
    resumed = run(case, "wanted", resume_from_checkpoint="last")
    assert (resumed.bits(), resumed.series("loss")) == (bits, losses)
    device = adversarial.use(monkeypatch, adversarial.ORDERS["h2d last"])
    device.accesses = _Blind()
    assert run(case, "late", recompute="never", activations="ssd").bits() == bits
    assert device.num_copies and not device.violations


class _Blind(adversarial._Accesses):
    """Does not look at operations; torch.compile would leave blocks as they are if it did."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass


@pytest.mark.slow
@pytest.mark.parametrize("case", ["full"], indirect=True)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_real_kernels(case: Case, dtype: str) -> None:
    compiled = run(case, "compiled", dtype=dtype)
    plain = run(case, "plain", torch_compile=False, dtype=dtype)
    if dtype == "fp32":
        assert_alike(compiled, plain)
    else:  # fused kernels round less often
        assert compiled.series("loss") == pytest.approx(plain.series("loss"), rel=2e-3)
    assert_same_bits(run(case, "kept", dtype=dtype, recompute="never"), compiled)


def test_a_missing_compiler_is_one_error_before_any_work(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(case[0]))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BackendUnavailableError) as caught:
        run(case, "out")
    assert str(caught.value) == (
        "torch_compile cannot be used: no C++ compiler (g++). Install one: sudo apt install g++, or leave "
        "torch_compile out."
    )
    assert not (case[0] / "out").exists()
    (check,) = [check for check in examine().checks if check.name == "torch.compile"]
    assert check.status == "warn" and "no C++ compiler" in check.detail and "g++" in check.remedy


def test_a_compiler_that_fails_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("cc1plus: out of memory\nmore")

    monkeypatch.setattr(compiling, "_backend", fail)
    with pytest.raises(BackendUnavailableError, match=r"a test failed: .*cc1plus: out of memory"):
        compiling.require_compiler(torch.device("cpu"))


def test_what_a_card_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", "nvc")
    assert missing_tool(for_card=True).startswith("no C compiler (nvc as CC says). Install one: ")
    compiler = tmp_path / "nvc"
    compiler.touch(mode=0o755)
    assert "C compiler" not in missing_tool(for_card=True)
