"""The benchmark of steps: its arithmetic by hand, what it refuses, and a whole cell of a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from bench.bounds import Rates, Step, bounds, drive_seconds, phases
from bench.cells import Cell, comparisons, computing, fastest, measured, step_of
from bench.models import SIZES, make_model, write_rows
from bench.process import Failed, Watched, run, run_json
from bench.table import render

TOOLS = Path(__file__).parents[2] / "tools"

RATES = Rates(
    read_bytes_per_s=1, write_bytes_per_s=1, mixed_bytes_per_s=1, read_cpu_s_per_byte=0, write_cpu_s_per_byte=0,
    memory_bytes_per_s=1e9, adam_parameters_per_s=1e9, cores=2,
)  # fmt: skip
STEP = Step(
    num_blocks=2, block_parameters=100, head_parameters=10, forward_s=1e-8, backward_s=3e-8, trained_parameters=220,
    frozen=False, weight_bytes=2, split=True,
)  # fmt: skip
DEFERRED = replace(STEP, deferred_share=1.0)


def test_bytes_of_the_phases() -> None:
    forward, backward = phases(STEP)
    assert (forward.read_bytes, forward.write_bytes) == (2 * 210, 0)
    # One block is still there, low halves and moments are 10 bytes.
    assert (backward.read_bytes, backward.write_bytes) == (2 * 110 + 10 * 220, 12 * 220)
    forward, backward = phases(DEFERRED)
    assert (forward.read_bytes, forward.write_bytes) == (12 * 220, 12 * 220)
    assert (backward.read_bytes, backward.write_bytes) == (2 * 100, 0)


def test_fp32_moves_28_bytes_less_what_is_used_once() -> None:
    step = replace(STEP, weight_bytes=4, split=False)
    forward, backward = phases(step)
    total = forward + backward
    once = 4 * (2 * 10 + 100)  # embedding, head, last block
    assert total.read_bytes + total.write_bytes == 28 * 220 - once


def test_computing_is_what_was_rehearsed() -> None:
    first = {
        "entry-forward": 1.0, "forward": 10.0, "forward+kept": 20.0, "loss": 100.0, "backward": 1000.0,
        "backward+kept": 500.0, "entry-backward": 7.0, "forward+products": 30.0, "backward+products": 600.0,
    }  # fmt: skip
    assert computing(first, 5, 0) == (51.0, 5107.0)
    assert computing(first, 5, 2) == (1 + 30 + 40, 100 + 3000 + 1000 + 7)
    assert computing(first, 5, 2, 1) == (1 + 20 + 30 + 40, 100 + 2000 + 600 + 1000 + 7)
    only_kept = {name: first[name] for name in first if name not in ("forward", "backward")}
    assert computing(only_kept, 5, 5) == (101.0, 2607.0)
    assert fastest([first, first | {"forward": 9.0, "loss": 101.0}]) == first | {"forward": 9.0}
    forward, backward = phases(STEP)
    assert (forward.compute_s, backward.compute_s) == (STEP.forward_s, STEP.backward_s)


def test_gradients_that_wait_on_drives_count_for_the_mode_only() -> None:
    waiting = replace(DEFERRED, gradient_bytes=880, read_gradient_bytes=880)
    assert bounds(waiting, RATES)["mode_s"] == bounds(DEFERRED, RATES)["mode_s"] + 2 * 880
    assert bounds(waiting, RATES)["ultimate_s"] == bounds(DEFERRED, RATES)["ultimate_s"]


def test_a_redo_updates_beside_backward_and_beside_forward() -> None:
    """A speculative update that was right has the phases of one without clipping, and lets its gradient lie."""
    right = replace(STEP, gradient_bytes=880)
    assert bounds(right, RATES)["mode_s"] == bounds(STEP, RATES)["mode_s"] + 880
    redone = replace(DEFERRED, redone_share=1.0)
    forward, backward = phases(redone)
    assert forward == phases(DEFERRED)[0]
    assert backward.write_bytes == phases(STEP)[1].write_bytes
    assert backward.adam_parameters == 220
    assert bounds(redone, RATES)["ultimate_s"] == bounds(DEFERRED, RATES)["ultimate_s"]


def test_blocks_adam_and_io_share_the_cores() -> None:
    slow = replace(
        RATES, read_bytes_per_s=1e9, write_bytes_per_s=1e9, mixed_bytes_per_s=1e9,
        adam_parameters_per_s=100, write_cpu_s_per_byte=0.01,
    )  # fmt: skip
    found = bounds(replace(STEP, backward_s=5.0), slow)["terms_s"]["backward"]
    assert found["compute"] == 5.0
    assert found["adam"] == 2.2
    assert found["io_cpu"] == pytest.approx(12 * 220 * 0.01 / 2)
    assert found["cores"] == found["compute"] + found["adam"] + found["io_cpu"]


def test_drives_take_the_faster_way() -> None:
    duplex, busy = replace(RATES, mixed_bytes_per_s=2), replace(RATES, mixed_bytes_per_s=0.5)
    assert drive_seconds(10, 4, duplex) == 10
    assert drive_seconds(10, 4, busy) == 14


@given(
    st.floats(0, 1), st.floats(0, 1), st.floats(0, 1e3), st.floats(0.1, 1e4), st.floats(0.1, 1e4)
)
def test_no_mode_is_faster_than_any_schedule(
    deferred: float, streamed: float, forward: float, drives: float, cores: float
) -> None:
    step = replace(
        STEP, deferred_share=deferred, streamed_states=streamed, streamed_weights=streamed, forward_s=forward,
        activation_bytes=50,
    )  # fmt: skip
    rates = replace(
        RATES, read_bytes_per_s=drives, mixed_bytes_per_s=1.5 * drives, adam_parameters_per_s=cores,
    )  # fmt: skip
    found = bounds(step, rates)
    assert found["ultimate_s"] <= found["mode_s"] * (1 + 1e-9)


def test_sizes_are_what_they_are_called() -> None:
    for name in ("0.13B", "0.37B", "1.1B"):
        assert SIZES[name].parameters / 1e9 == pytest.approx(float(name[:-1]), rel=0.035)


def test_transformers_loads_the_checkpoint(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    make_model(tmp_path / "model", SIZES["tiny"])
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(info.values())
    assert sum(p.numel() for p in model.parameters()) == SIZES["tiny"].parameters
    weight = model.model.layers[1].mlp.up_proj.weight
    assert weight.dtype == torch.bfloat16
    assert float(weight.detach().float().std()) == pytest.approx(0.02, rel=0.05)


def test_rows_have_one_length(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 5, 256, 512)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert {len(row[key]) for row in rows for key in ("input_ids", "labels")} == {256}
    assert max(max(row["input_ids"]) for row in rows) < 512


CELL = Cell("tiny", "full", 1, "overlap", "streamed")
PARAMETERS = SIZES["tiny"].parameters


def steps(seconds: list[float]) -> list[dict[str, Any]]:
    read, written = {"moments": 8 * PARAMETERS}, {"moments": 4 * PARAMETERS}
    return [
        {"step_s": s, "lane_s": {"compute": s / 2}, "bytes_read": read, "bytes_written": written}
        for s in seconds
    ]


def test_the_first_two_steps_and_the_last_do_not_count() -> None:
    io = [
        (7, 7),
        (100, 0),
        *[(100 + i * 2 * PARAMETERS, i * PARAMETERS) for i in (1, 2, 3)],
        (10**9, 10**9),
    ]
    result = {"peak_memory_bytes": 90, "planned_memory_bytes": 110, "losses": []}
    found = measured(CELL, steps([9, 9, 1, 2, 4, 9]), Watched("", io, peak_bytes=100), result)
    assert found["step_s"] == 2
    assert found["lane_s"] == {"compute": 1}
    assert found["kernel_read_bytes_per_parameter"] == 2
    assert found["kernel_written_bytes_per_parameter"] == 1
    assert found["own_read_bytes_per_parameter"] == 8
    assert found["peak_memory_bytes"] == 100
    with pytest.raises(Failed, match="more steps are needed"):
        measured(CELL, steps([9, 9, 1, 9]), Watched("", io[:2]), result)


def test_work_follows_the_plan_and_the_bytes() -> None:
    memory = {
        "deferred": ["head", "embed"], "speculative": ["embed"], "kept": ["block.0"], "swapped": [], "partly": [],
    }  # fmt: skip
    times = {
        "entry-forward": 1.0, "forward": 2.0, "forward+kept": 3.0, "loss": 4.0, "backward": 5.0, "backward+kept": 6.0,
        "entry-backward": 7.0,
    }  # fmt: skip
    step = step_of(CELL, steps([1, 1, 1, 1]), memory, times, trained=PARAMETERS, split=True)
    assert step.streamed_states == step.streamed_weights == 0.5
    size = SIZES["tiny"]
    assert step.deferred_share == pytest.approx(size.head_parameters / PARAMETERS, rel=1e-2)
    redo = replace(CELL, mode="redo")
    step = step_of(redo, steps([1, 1, 1, 1]), memory, times, trained=PARAMETERS, split=True)
    assert step.deferred_share == pytest.approx(2 * size.head_parameters / PARAMETERS, rel=1e-2)
    assert step.redone_share == step.deferred_share / 2
    assert (step.forward_s, step.backward_s) == (1 + 2 * 2 + 3, 4 + 2 * 5 + 6 + 7)


def test_errors_and_ratios() -> None:
    found = comparisons(
        {
            "step_s": 2.0, "planned_memory_bytes": 110, "peak_memory_bytes": 100, "in_memory": {"step_s": [9, 1, 1]},
            "plan": {"forecast": {"step_s": 1.5}}, "bound": {"mode_s": 1.6, "ultimate_s": 1.0},
        }
    )  # fmt: skip
    assert found["forecast_error"] == -0.25
    assert found["memory_error"] == pytest.approx(0.1)
    assert (found["to_bound"], found["to_ultimate"], found["to_in_memory"]) == (1.25, 2.0, 2.0)


def test_a_failed_program_is_told_of(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; print('{}'); sys.exit('the reason')"]
    with pytest.raises(Failed, match=r"exit code 1 of.*\n.*the reason"):
        run(command, tmp_path)
    assert run_json(command, tmp_path, codes=(0, 1)) == {}


def bench(*arguments: str, timeout: int = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(TOOLS / "bench_steps.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "OMP_WAIT_POLICY": "passive"},  # other tests run at the same time
    )


def test_a_folder_of_others_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "ssdtune-bench").mkdir()
    (tmp_path / "ssdtune-bench/mine").touch()
    result = bench("--models", "tiny", "--quick", "--work-dir", str(tmp_path))
    assert result.returncode == 1
    assert "was not made by this script" in result.stderr
    assert (tmp_path / "ssdtune-bench/mine").exists()


@pytest.mark.parametrize(
    "flags", [("--steps", "3"), ("--in-memory-steps", "1"), ("--batches", "0")]
)
def test_settings_that_measure_nothing_are_refused(tmp_path: Path, flags: tuple[str, str]) -> None:
    result = bench(*flags, "--work-dir", str(tmp_path))
    assert result.returncode == 2
    assert f"{flags[0]} must be" in result.stderr
    assert list(tmp_path.iterdir()) == []


def one_cell(folder: Path, *flags: str) -> dict[str, Any]:
    result = bench(
        "--quick", "--models", "tiny", "--batches", "1", "--steps", "4", "--work-dir", str(folder), "--json", *flags,
        timeout=380,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr + result.stdout
    assert list(folder.iterdir()) == []
    document = json.loads(result.stdout)
    (record,) = document["cells"]
    assert len(record["all_step_s"]) == 4
    if document["machine"]["file_system"] in ("tmpfs", "overlay"):
        record["kernel_read_bytes_per_parameter"] = None  # the kernel doesn't count there
    assert min(record["to_bound"], record["to_ultimate"], record["forecast_s"]) > 0
    assert record["peak_memory_bytes"] > 100 << 20
    return record


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_cell_of_a_tiny_model(tmp_path: Path) -> None:
    record = one_cell(
        tmp_path, "--methods", "full", "--memories", "roomy", "--modes", "overlap", "--in-memory-steps", "0"
    )  # fmt: skip
    assert record["own_read_bytes_per_parameter"] == record["own_written_bytes_per_parameter"] == 0
    assert record["bound"]["terms_s"]["forward"]["drives"] == 0
    assert record["in_memory_s"] is None
    text = render([record, {"name": "another", "skipped": "too large"}])
    assert text.count("| tiny full 1x256 roomy overlap |") == 3
    assert "another: too large" in text


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "method, low, high", [("full", (10, 10), (25, 25)), ("lora", (2, 0), (8, 8))]
)
def test_a_streamed_cell_beside_training_in_memory(
    tmp_path: Path, method: str, low: tuple[int, int], high: tuple[int, int]
) -> None:
    record = one_cell(
        tmp_path, "--methods", method, "--memories", "streamed", "--modes", "deferred", "--in-memory-steps", "2"
    )  # fmt: skip
    for number, way in enumerate(("read", "written")):
        assert low[number] < record[f"own_{way}_bytes_per_parameter"] < high[number]
        if record["kernel_read_bytes_per_parameter"] is not None:
            assert record[f"kernel_{way}_bytes_per_parameter"] > low[number]
    assert record["in_memory_s"] > 0
    assert record["bound"]["terms_s"]["forward"]["adam"] > 0
