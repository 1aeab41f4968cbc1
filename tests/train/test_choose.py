"""What a profile decides about a run: its micro-batches, settings left open, its plan; and what it never changes."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ssdtune
from ssdtune.config.load import load_config
from ssdtune.config.schema import Config
from ssdtune.errors import CapacityError, ConfigError
from ssdtune.hardware.figures import AdamPoint, DirectoryProfile
from ssdtune.hardware.known import profile_path
from ssdtune.hardware.machine import machine_id
from ssdtune.hardware.profile import HardwareProfile, save
from ssdtune.report.progress import Progress
from ssdtune.train.choose import (
    LEAST_SWAP_GAIN,
    Chosen,
    choose,
    rates_for,
    tuned,
    within_wear,
)
from ssdtune.train.disk import written_bytes
from ssdtune.train.prepare import Prepared, prepare, with_micro_batches
from ssdtune.train.rows import micro_batch_sizes
from ssdtune.units import MIB
from tests import invented
from tests.toy import make_checkpoint, make_rows

FLAT, FALLING, RISING = ((1, 1e9), (64, 1e9)), ((8, 1e9), (64, 1e6)), ((8, 1e5), (64, 1e9))
"""FLOP per second of a block by tokens of the micro-batch."""


def machine(
    *,
    drives: float = 2e9,
    block: Sequence[tuple[int, float]] = FLAT,
    dtypes: Sequence[str] = ("fp32", "bf16"),
    **changes: Any,
) -> HardwareProfile:
    """Return a profile of this machine with invented figures."""
    points = [(dtype, tokens, flop) for dtype in dtypes for tokens, flop in block]
    figures = {
        "machine_id": machine_id([]),
        "machine": {"cpu": "Zen", "cores": 2, "memory_bytes": 64 << 30},
        "compute_dtypes": tuple(dtypes),
        "blocks": (invented.block(points),),
        **invented.rates(read=drives, write=drives, mixed=drives, memory=1e13, adam=1e12),
    }
    return invented.profile(**figures | changes)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    make_checkpoint(folder / "model", "llama")
    make_rows(folder / "rows.jsonl", 21)
    return folder


@pytest.fixture
def config(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # What is chosen must follow from the invented figures alone.
    monkeypatch.setattr("ssdtune.train.finetune.times_of", lambda *_: None)

    def make(**changes: Any) -> Config:
        settings = {
            "model_name_or_path": str(model / "model"), "train_file": str(model / "rows.jsonl"),
            "output_dir": str(tmp_path / "out"), "dtype": "fp32", "device": "cpu", "host_cache": 0,
            "compute_threads": 1, "verify": False, "save_steps": 0, "max_steps": 3,
        }  # fmt: skip
        return load_config(None, settings | changes)

    return make


def keep(profile: HardwareProfile) -> None:
    """Keep a profile where a run looks for it."""
    profile_path().parent.mkdir(parents=True, exist_ok=True)
    save(profile, profile_path())


def divided(prepared: Prepared) -> tuple[int, int]:
    """Return sequences of a micro-batch and micro-batches of a step."""
    training = prepared.config.training
    return training.per_device_train_batch_size, training.gradient_accumulation_steps


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({}, [1]),
        ({"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}, [3]),
        ({"train_batch_size": 1}, [1]),
        ({"train_batch_size": 6}, [6, 3, 2, 1]),
        ({"train_batch_size": 7}, [7, 1]),
        ({"train_batch_size": 4, "per_device_train_batch_size": 4}, [4]),
        ({"train_batch_size": 4, "gradient_accumulation_steps": 4}, [1]),
        ({"train_batch_size": 12, "max_length": 2048}, [4, 3, 2, 1]),
        ({"train_batch_size": 12, "max_length": 16384}, [1]),
    ],
)
def test_sizes_that_may_be_chosen(config: Any, settings: dict[str, Any], sizes: list[int]) -> None:
    assert micro_batch_sizes(config(**settings)) == sizes


def test_settings_that_contradict_the_batch_are_refused(config: Any) -> None:
    with pytest.raises(ConfigError, match=r"train_batch_size is 8, but .* is 6"):
        config(train_batch_size=8, per_device_train_batch_size=3, gradient_accumulation_steps=2)


def test_a_step_has_the_same_rows_however_it_is_divided(config: Any) -> None:
    prepared = prepare(config(train_batch_size=6, num_train_epochs=2, max_steps=None))
    assert divided(prepared) == (6, 1)
    seen = []
    for size in prepared.sizes:
        other = with_micro_batches(prepared, size)
        assert other is not None and divided(other) == (size, 6 // size)
        assert other.compute.num_micro_batches == 6 // size
        steps = [other.rows.plan.step_batches(step) for step in range(other.rows.total_steps)]
        assert max(len(batch.rows) for step in steps for batch in step) == size
        seen.append([[row for batch in step for row in batch.rows] for step in steps])
    assert all(rows == seen[0] for rows in seen)


def test_short_memory_takes_smaller_micro_batches(config: Any) -> None:
    settings = {"train_batch_size": 8, "train_file": None, "max_length": 1024}
    roomy = prepare(config(**settings, host_memory="64GiB"), with_rows=False)
    assert divided(roomy) == (8, 1)
    smaller = with_micro_batches(roomy, 2)
    assert smaller is not None
    assert smaller.memory.least_bytes < roomy.memory.least_bytes - 40 * MIB
    between = (smaller.memory.least_bytes + roomy.memory.least_bytes) // 2
    tight = prepare(config(**settings, host_memory=between), with_rows=False)
    assert divided(tight)[0] < 8 and tight.memory.host_bytes <= between
    # Though larger ones would be faster, they don't fit.
    chosen = choose(tight, machine(block=RISING)).prepared
    assert divided(chosen)[0] < 8 and chosen.memory.host_bytes <= between
    with pytest.raises(CapacityError, match="even with everything streamed"):
        prepare(config(**settings, host_memory="64MiB"), with_rows=False)


@pytest.mark.parametrize(("block", "size"), [(FALLING, 1), (RISING, 8)])
def test_micro_batches_are_as_large_as_the_machine_is_fast_with(
    config: Any, block: Sequence[tuple[int, float]], size: int
) -> None:
    prepared = prepare(config(train_batch_size=8))
    chosen = choose(prepared, machine(block=block)).prepared
    assert divided(chosen) == (size, 8 // size)
    assert chosen.rows.plan.step_batches(0)[0].input_ids.shape[0] == size
    fixed = prepare(config(per_device_train_batch_size=2, gradient_accumulation_steps=4))
    assert divided(choose(fixed, machine(block=block)).prepared) == (2, 4)


def test_rates_are_those_of_the_micro_batch(config: Any) -> None:
    prepared = prepare(config(train_batch_size=8))
    profile = machine(block=FALLING)
    rates = []
    for size in prepared.sizes:
        other = with_micro_batches(prepared, size)
        assert other is not None
        rates.append(rates_for(other, profile).forward_flop_per_s["fp32"])
    assert rates == sorted(rates) and 1e6 <= rates[0] < rates[-1] <= 1e9


def test_only_what_was_left_open_is_filled_in(config: Any) -> None:
    place = DirectoryProfile(
        path="/a", file_system="ext4", device="/dev/a", free_bytes=1, backend="threads", queue_depth=7,
        request_bytes=2 * MIB, mixed_bytes_per_s=1e9,
    )  # fmt: skip
    slower = replace(place, path="/b", backend="python", queue_depth=1, mixed_bytes_per_s=1e8)
    failed = replace(place, path="/c", queue_depth=0, mixed_bytes_per_s=0.0, problem="full")
    adam = tuple(
        AdamPoint(form=form, threads=threads, parameters_per_s=rate)
        for form, threads, rate in (("numpy", 8, 9e9), ("avx2", 1, 1e9), ("avx2", 3, 2e9))
    )
    profile = machine(directories=(failed, slower, place), adam=adam)
    io = tuned(config(swap_dirs=["/a", "/b"]), profile).io
    assert (io.queue_depth, io.request_bytes) == (7, 2 * MIB)
    assert tuned(config(swap_dirs=["/b"]), profile).io.queue_depth == 1  # its own drive's
    assert io.adam_threads == 3
    given = config(backend="python", queue_depth=2, request_bytes=4096, adam_threads=1)
    assert tuned(given, profile) == given
    assert tuned(config(), None) == config() == tuned(config(), machine(adam=()))
    assert tuned(config(), machine(directories=(failed,), adam=())) == config()


def test_a_run_has_the_rates_of_its_own_directories(config: Any) -> None:
    place = DirectoryProfile(
        path="/a", file_system="ext4", device="/dev/a", free_bytes=1, read_bytes_per_s=4e9,
        write_bytes_per_s=4e9, mixed_bytes_per_s=4e9,
    )  # fmt: skip
    other = replace(place, path="/b", device="/dev/b", read_bytes_per_s=1e9)
    profile = machine(drives=5e9, directories=(place, other))
    for names, rate in ((["/a"], 4e9), (["/b"], 1e9), (["/a", "/b"], 2e9)):
        assert rates_for(prepare(config(swap_dirs=names)), profile).read_bytes_per_s == rate
    with pytest.raises(
        ConfigError, match=r"drives of /proc/x were not measured, only those of /a, /b"
    ):
        rates_for(prepare(config(swap_dirs=["/proc/x"])), profile)


def speedups(prepared: Prepared, profile: HardwareProfile) -> dict[str, float]:
    return {change.name: change.speedup for change in choose(prepared, profile).changes}


def test_what_would_make_it_faster(config: Any) -> None:
    prepared = prepare(config(per_device_train_batch_size=2, gradient_accumulation_steps=2))
    slow_drives, slow_block = (machine(drives=1e6), machine(block=((1, 1e6),)))
    names = {f"twice the {x}" for x in ("drives", "host_memory", "gradient_accumulation_steps")}
    by_drives, by_compute = speedups(prepared, slow_drives), speedups(prepared, slow_block)
    assert set(by_drives) == set(by_compute) == {*names, "computing twice as fast"}
    assert by_drives["twice the drives"] == pytest.approx(2, rel=0.1)
    assert by_drives["twice the gradient_accumulation_steps"] == pytest.approx(2, rel=0.1)
    assert by_compute["computing twice as fast"] == pytest.approx(2, rel=0.02)
    assert all(by_compute[name] == pytest.approx(1, abs=0.02) for name in names)
    text = choose(prepared, slow_drives).text()
    assert "twice the drives" in text.partition("no more")[0]
    assert "twice the host_memory" in text.partition("no more")[2]  # host_cache is 0
    assert "drives" not in choose(prepared, slow_block).text().partition("no more")[0]


def test_plans_beyond_the_wear_budget_come_last(config: Any) -> None:
    free = prepare(config())
    much = written_bytes(free)
    for share, kept in ((1.0, True), (0.9, False)):
        prepared = prepare(config(wear_budget_terabytes=share * 1e-12 * much))
        seconds = within_wear(prepared, lambda plan: 2.0)
        assert (seconds(prepared.memory) < 2.2) is kept
        # Of two plans beyond it, the one that writes less is better; one that keeps it is better than both.
        everything = frozenset(part.name for part in prepared.parts)
        assert seconds(replace(prepared.memory, resident=everything)) <= seconds(prepared.memory)
        chosen = choose(prepared, machine())
        assert chosen.found.step_s < 1e6 and chosen.found.usual_s < 1e6


def test_activations_on_ssd_must_pay_by_what_they_add_to_the_writing(config: Any) -> None:
    charges = []
    for method in ("full", "lora"):
        prepared = prepare(config(method=method, host_cache=None))
        seconds = within_wear(prepared, lambda plan: 1.0)
        assert seconds(prepared.memory) == 1.0  # all of it stays in memory
        blocks = frozenset(f"block.{n}" for n in range(prepared.layout.num_blocks))
        swapping = replace(prepared.memory, kept=frozenset(), swapped=blocks, input_slots=2)
        charges.append(seconds(replace(swapping, resident=frozenset())) - 1)
    full, lora = charges
    assert 0 < full < lora <= LEAST_SWAP_GAIN


def test_states_are_dealt_by_the_rates_of_unequal_drives_that_have_room(config: Any) -> None:
    place = DirectoryProfile(
        path="/a", file_system="ext4", device="/dev/a", free_bytes=1, read_bytes_per_s=6e9,
        write_bytes_per_s=6e9, mixed_bytes_per_s=6e9,
    )  # fmt: skip
    other = replace(place, path="/b", device="/dev/b", read_bytes_per_s=2e9, mixed_bytes_per_s=2e9)
    profile = machine(drives=8e9, directories=(place, other))
    prepared = prepare(config(swap_dirs=["/a", "/b"]))
    for has_room, shares, rate in (
        (lambda run: run.shares == (6e9, 2e9), (6e9, 2e9), 8e9),
        (lambda run: not run.shares, (), 4e9),
        (None, (), 4e9),  # nobody knows of the room
    ):
        found = choose(prepared, profile, has_room=has_room).prepared
        assert found.shares == shares
        assert rates_for(found, profile).read_bytes_per_s == rate


def test_a_plan_for_slow_drives_keeps_what_it_can(config: Any) -> None:
    chosen = choose(prepare(config(host_cache=None)), machine(drives=1e6))
    plan = chosen.prepared.memory
    assert plan == chosen.found.plan and plan.host_bytes <= plan.budget_bytes
    assert plan.resident == {part.name for part in chosen.prepared.parts}
    assert chosen.found.step_s <= chosen.found.usual_s
    assert json.loads(json.dumps(chosen.to_dict()))["plans_tried"] == chosen.found.num_tried


def test_speculates_where_that_pays_and_has_room(config: Any) -> None:
    """With slow drives, gradients that need not be read back are time gained."""
    asked: list[Prepared] = []

    def chosen(*, room: bool | None = True, drives: float = 1e6, **changes: Any) -> Chosen:
        def has_room(prepared: Prepared) -> bool:
            asked.append(prepared)
            assert room is not None
            return room

        given = None if room is None else has_room
        return choose(prepare(config(**changes)), machine(drives=drives), has_room=given)

    deferred, speculating = chosen(clipping="deferred"), chosen()
    plan = speculating.prepared.memory
    assert plan.speculative == plan.deferred == plan.gradients_on_ssd != set()
    assert [prepared.memory for prepared in asked] == [plan]
    bare = {"speculative": frozenset(), "budget_bytes": 0, "breakdown": {}}
    assert replace(plan, **bare) == replace(deferred.prepared.memory, **bare)
    assert speculating.found.proportions.speculative
    assert speculating.forecast.step_s < 0.95 * deferred.forecast.step_s
    assert speculating.found.step_s == pytest.approx(speculating.forecast.step_s, rel=0.02)
    for other in (
        chosen(room=False),
        chosen(room=None),
        chosen(max_grad_norm=0),
        chosen(drives=1e15),
        chosen(host_cache=None),
    ):
        assert not other.prepared.memory.speculative
    assert chosen(clipping="speculative", room=None).prepared.memory.speculative == plan.deferred
    assert not chosen(clipping="speculative", max_grad_norm=0).prepared.memory.speculative


def test_a_run_speculates_by_itself_only_if_its_drives_have_room(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(machine(drives=1e6))
    for room in (True, False):
        out = tmp_path / f"out {room}"
        result, _ = run(config(output_dir=str(out)))
        plan = json.loads((out / "plan.json").read_text())
        assert bool(plan["memory"]["speculative"]) == room
        monkeypatch.setattr("ssdtune.train.finetune.has_room", lambda *_, **more: False)
        monkeypatch.setattr("ssdtune.train.disk.check_space", lambda _: None)
        assert len(result.losses) == 3


class Notes(Progress):
    """Remembers what was said."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def note(self, text: str) -> None:
        self.said.append(text)


def run(config: Config) -> tuple[ssdtune.Result, str]:
    from ssdtune.train.finetune import finetune

    notes = Notes()
    result = finetune(config, progress=notes)
    return result, "\n".join(notes.said)


def test_a_measured_machine_forecasts_corrects_and_compares(config: Any, tmp_path: Path) -> None:
    keep(machine(drives=1e15, block=((1, 1e15),)))
    result, said = run(config(max_steps=6, train_batch_size=4))
    assert "time      " in said and "tokens/s" in said and "faster    " in said
    assert "steps now take" in said  # nothing is as fast as that
    assert "waited for:" in said and "the busiest lane" in said
    assert "steps took" in said and "times that)" in said
    forecast = json.loads((tmp_path / "out/plan.json").read_text())["forecast"]
    assert 0 < forecast["step_s"] < min(result.step_seconds)
    assert forecast["run_s"] == pytest.approx(6 * forecast["step_s"])


def test_no_profile_no_forecast(config: Any, tmp_path: Path) -> None:
    _, said = run(config())
    assert "waited for:" in said and "expected" not in said and "steps took" not in said
    assert json.loads((tmp_path / "out/plan.json").read_text())["forecast"] is None


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"machine_id": "0" * 16}, "is of another machine or version. Measure again"),
        ({"dtypes": ("bf16",)}, "no forecast: the hardware profile has no figures for compute in fp32"),
        ({"together": None}, "no forecast: the hardware profile has no figures for drives"),
        ({"blocks": (), "adam": ()}, "has no figures for compute in fp32, AdamW"),
    ],
    ids=["machine", "dtype", "drives", "nothing"],
)  # fmt: skip
def test_a_profile_that_is_of_no_use_is_only_warned_about(
    config: Any, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], warning: str
) -> None:
    keep(machine(**changes))
    with caplog.at_level(logging.WARNING, "ssdtune"):
        result, said = run(config(train_batch_size=2))
    assert warning in caplog.text
    assert len(result.losses) == 3 and "expected" not in said


def test_a_damaged_profile_is_only_warned_about(
    config: Any, caplog: pytest.LogCaptureFixture
) -> None:
    keep(machine())
    profile_path().write_text("{")
    result, _ = run(config())
    assert len(result.losses) == 3 and "is no hardware profile" in caplog.text


def test_the_profile_changes_no_number(config: Any, tmp_path: Path) -> None:
    """Same micro-batches, same numbers: whatever plan was found."""
    one = {"num_train_epochs": 1, "max_steps": None, "host_cache": None}
    explicit, _ = run(
        config(per_device_train_batch_size=1, gradient_accumulation_steps=4, output_dir=str(tmp_path / "a"), **one)
    )  # fmt: skip
    usual, _ = run(config(train_batch_size=4, output_dir=str(tmp_path / "b"), **one))
    keep(machine(block=FALLING, drives=1e7))
    chosen, _ = run(config(train_batch_size=4, output_dir=str(tmp_path / "c"), **one))
    assert chosen.losses == explicit.losses and chosen.grad_norms == explicit.grad_norms
    # All four at once: added up in another order.
    assert usual.losses == pytest.approx(explicit.losses, abs=1e-5) and len(usual.losses) == 6
    told = (tmp_path / "c/config.yaml").read_text()
    assert "per_device_train_batch_size: 1" in told and "gradient_accumulation_steps: 4" in told


def test_a_resumed_run_keeps_its_division(config: Any, tmp_path: Path) -> None:
    explicit = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    whole, _ = run(config(**explicit, output_dir=str(tmp_path / "whole")))
    keep(machine(block=FALLING))
    run(config(train_batch_size=4, save_steps=2))
    keep(machine(block=RISING))
    rest, _ = run(config(train_batch_size=4, save_steps=2, resume_from_checkpoint="last"))
    assert rest.losses == whole.losses[2:]
    with pytest.raises(ConfigError, match=r"gradient_accumulation_steps"):
        run(config(train_batch_size=2, resume_from_checkpoint="last"))
