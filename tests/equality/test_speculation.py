"""Updates made before the norm is known, and again where it was too large, give the bits of those that waited for it."""

from __future__ import annotations

import json
import random
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ssdtune.config.schema import Config
from ssdtune.errors import CapacityError, SsdtuneError
from ssdtune.plan.residency import Proportions
from ssdtune.store.store import Store
from ssdtune.swap.update import OutOfCoreAdam
from ssdtune.train import engine, prepare
from tests.covering import covering
from tests.equality.harness import Streamed, assert_same_bits, stream
from tests.toy import make_checkpoint, make_rows

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("llama", {}),
    "tied": ("gemma3_text", {"gradient_accumulation_steps": 3}),
    "gradients in memory": ("gpt2", {"host_cache": 1}),
    "some in memory": ("qwen2", {"host_cache": 60_000, "chunk_bytes": 8192}),
    "bf16": ("llama", {"dtype": "bf16", "prefetch_depth": 0}),
    "compact": ("qwen2", {"dtype": "bf16", "optim": "adamw_8bit", "master_weights": False}),
    "lora": ("gpt2", {"method": "lora", "lora_dropout": 0.2}),
    "lora with a whole module": (
        "llama", {"method": "lora", "modules_to_save": ["embed_tokens"], "host_cache": 1},
    ),
}  # fmt: skip
NEVER = 1e9
"""A limit that clips nothing."""


def prepared(folder: Path, arch: str, **sizes: Any) -> Path:
    make_checkpoint(folder / "model", arch, **sizes)
    make_rows(folder / "rows.jsonl", 21)
    return folder


def run(folder: Path, name: str, settings: dict[str, Any], **more: Any) -> Streamed:
    given = {"max_steps": 6} | settings | more
    return stream(folder / "model", folder / "rows.jsonl", folder / name, given)


def planned(streamed: Streamed) -> dict[str, Any]:
    plan = json.loads((streamed.output_dir / "plan.json").read_text(encoding="utf-8"))
    step = {way: plan["estimate"][f"step_bytes_{way}"] for way in ("read", "written")}
    return plan["memory"] | step | {"disk": plan["estimate"]["disk_bytes"]}


def middle(folder: Path, settings: dict[str, Any]) -> float:
    """Return a limit that some steps exceed and others do not."""
    norms = run(folder, "unclipped", settings, max_grad_norm=NEVER).series("grad_norm")
    return statistics.median(norms) * 1.001


def assert_was_right_and_wrong(streamed: Streamed) -> None:
    assert all(streamed.series("speculated"))
    clipped = [scale != 1.0 for scale in streamed.series("clip_scale")]
    assert any(clipped) and not all(clipped), clipped


@pytest.mark.parametrize("case", CASES)
def test_speculation_changes_nothing(tmp_path: Path, case: str) -> None:
    arch, settings = CASES[case]
    folder = prepared(tmp_path, arch)
    settings = settings | {"max_grad_norm": middle(folder, settings)}
    deferred = run(folder, "deferred", settings, clipping="deferred")
    speculative = run(folder, "speculative", settings, clipping="speculative")
    assert_was_right_and_wrong(speculative)
    assert not any(deferred.series("speculated"))
    assert_same_bits(speculative, deferred)
    plan = planned(speculative)
    assert plan["speculative"]
    assert ("outer" in plan["deferred"]) == (settings.get("method") != "lora")
    assert bool(plan["resident"]) == (case == "some in memory")
    in_memory = run(folder, "in memory", settings, host_cache="1GiB", clipping="speculative")
    assert not any(in_memory.series("speculated")), "nothing is on SSD, nothing to gain"
    assert_same_bits(in_memory, deferred)


@pytest.mark.parametrize("seed", covering(range(4), every=2))
def test_any_settings(tmp_path: Path, seed: int) -> None:
    """Combinations drawn at random, saved at random steps, gone on with in the other way."""
    chance = random.Random(seed)
    folder = prepared(tmp_path, chance.choice(["llama", "gpt2", "gemma3_text", "qwen2", "phi3"]))
    settings: dict[str, Any] = {
        "dtype": chance.choice(["fp32", "bf16"]),
        "optim": chance.choice(["adamw", "adamw_8bit"]),
        "master_weights": chance.choice([True, False]),
        "method": chance.choice(["full", "lora"]),
        "gradient_accumulation_steps": chance.choice([1, 2, 3]),
        "host_cache": chance.choice([0, 1, 20_000, 100_000]),
        "prefetch_depth": chance.choice([0, 1, 3]),
        "chunk_bytes": chance.choice([8192, 65536, 1 << 20]),
        "activations": chance.choice(["auto", "ssd"]),
        "recompute": chance.choice(["auto", "always", "cheap"]),
    }
    settings["max_grad_norm"] = middle(folder, settings)
    deferred = run(folder, "deferred", settings, clipping="deferred")
    saving = {"save_steps": chance.choice([1, 2]), "save_total_limit": chance.choice([1, 4])}
    speculative = run(folder, "speculative", settings | saving, clipping="speculative")
    assert_same_bits(speculative, deferred)
    for checkpoint in sorted(folder.glob("speculative/checkpoint-*"))[-2::-1]:
        saving["clipping"] = chance.choice(["deferred", "speculative"])
        saving["resume_from_checkpoint"] = str(checkpoint)
        assert_same_bits(run(folder, "speculative", settings | saving), deferred)


@pytest.mark.parametrize(
    ("saving", "speculated"),
    [
        ({"save_steps": 4, "save_total_limit": 1}, [True, True]),
        ({"save_steps": 1, "save_total_limit": 3}, [True, False]),
    ],
)
def test_room_in_a_run_that_goes_on(
    tmp_path: Path, saving: dict[str, int], speculated: list[bool]
) -> None:
    """Its files become longer; while it still has more checkpoints than it will keep, there may be no room."""
    folder = prepared(tmp_path, "llama")
    settings = {"max_grad_norm": NEVER}
    saved = run(folder, "run", settings | saving, clipping="deferred")
    more = {"save_steps": 0, "save_total_limit": 1, "clipping": "speculative"}
    checkpoint = str(saved.output_dir / "checkpoint-4")
    again = run(folder, "run", settings | more, resume_from_checkpoint=checkpoint)
    assert_same_bits(again, saved)
    assert again.series("speculated") == [False] * 4 + speculated


def test_bytes_of_steps_that_are_not_clipped(tmp_path: Path) -> None:
    """As without clipping, but for gradients that are written to wait, in case they are needed again."""
    folder = prepared(tmp_path, "llama")
    for cache in (0, 1):
        settings = {"host_cache": cache}
        plain = run(folder, f"plain {cache}", settings, max_grad_norm=0)
        speculative = run(
            folder, f"speculative {cache}", settings, max_grad_norm=NEVER, clipping="speculative"
        )
        assert_same_bits(speculative, plain)
        plan = planned(speculative)
        waiting = plan["disk"]["gradients"]
        assert bool(plan["gradients_on_ssd"]) == (waiting > 0) == (cache == 0)
        wanted, count = set(plan["deferred"]), len(plain.steps)
        assert set(plan["speculative"]) == wanted
        for kind in ("weights", "master", "moments", "activations", "gradients"):
            retained = count * waiting if kind == "gradients" else 0
            if kind != "activations":  # planned for a mean step
                assert speculative.steps[2]["bytes_written"][kind] == plan["written"][kind]
                assert speculative.steps[2]["bytes_read"][kind] <= plan["read"][kind]
            assert speculative.moved("read", kind) == plain.moved("read", kind)
            assert speculative.moved("written", kind) == plain.moved("written", kind) + retained


def test_bytes_of_a_clipped_step(tmp_path: Path) -> None:
    """Its updates are made again in the next step: states are read and written once more."""
    folder = prepared(tmp_path, "llama")
    settings = {"max_grad_norm": 1e-3, "host_cache": 0}
    deferred = run(folder, "deferred", settings, clipping="deferred")
    speculative = run(folder, "speculative", settings, clipping="speculative")
    assert_same_bits(speculative, deferred)
    twice = sum(deferred.moved("written", kind) for kind in ("weights", "master", "moments"))
    imported = planned(speculative)["disk"]["states"] - deferred.moved("written", "moments") // 6
    assert speculative.moved("written") == deferred.moved("written") + twice - imported


def test_a_run_that_clips_too_often_stops_speculating(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def usual(config: Config) -> Proportions:
        return replace(Proportions(), speculative=True)

    monkeypatch.setattr(prepare, "usual_proportions", usual)
    folder = prepared(tmp_path, "llama")
    always = run(folder, "always", {"max_grad_norm": 1e-3})
    assert always.series("speculated") == [True, False, False, False, False, False]
    never = run(folder, "never", {"max_grad_norm": NEVER})
    assert never.series("speculated") == [True] * 6
    norms = never.series("grad_norm")
    assert sorted(norms)[-2] == norms[2], (
        "the case has changed: the third step's should be among the largest"
    )
    settings = {"max_grad_norm": norms[2] * 0.999}
    some = run(folder, "some", settings)
    assert some.series("speculated") == [True, True, True, False, False, False]
    assert_same_bits(some, run(folder, "deferred", settings, clipping="deferred"))


def test_an_update_may_fail_that_was_not_the_right_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unclipped gradients may be too large for fp32; the clipped ones that count are not."""
    folder = prepared(tmp_path, "llama")
    settings = {"max_grad_norm": 1e-3, "clipping": "speculative"}
    wanted = run(folder, "wanted", settings)
    update = OutOfCoreAdam.update

    def failing(self: OutOfCoreAdam, *args: Any, **more: Any) -> None:
        update(self, *args, **more)
        if more["speculative"]:
            raise SsdtuneError("a weight is not finite")

    monkeypatch.setattr(OutOfCoreAdam, "update", failing)
    assert_same_bits(run(folder, "clipped", settings), wanted)
    with pytest.raises(SsdtuneError, match="a weight is not finite"):
        run(folder, "not clipped", settings | {"max_grad_norm": NEVER})


def test_a_gradient_that_is_not_finite_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last gradient of the third step is not finite: what was updated before it does not count."""
    folder = prepared(tmp_path, "llama")
    settings = {"max_grad_norm": NEVER, "clipping": "speculative", "save_steps": 2, "max_steps": 4}
    wanted = run(folder, "wanted", settings)
    commits: list[int] = []
    saved: list[str] = []
    collect, commit, write = engine.Engine._collect, Store.commit, OutOfCoreAdam.save

    def collected(self: engine.Engine, stage: str, slot: str) -> None:
        collect(self, stage, slot)
        if self._state.step == 2 and stage == "outer":
            monkeypatch.setattr(engine, "sum_of_squares", lambda _: float("nan"))
            collect(self, stage, slot)

    def committed(self: Store, unit: str, **more: Any) -> None:
        commits.append(len(saved))
        commit(self, unit, **more)

    def save(self: OutOfCoreAdam, stage: str, *args: Any, **more: Any) -> None:
        saved.append(stage)
        write(self, stage, *args, **more)

    monkeypatch.setattr(engine.Engine, "_collect", collected)
    monkeypatch.setattr(Store, "commit", committed)
    monkeypatch.setattr(OutOfCoreAdam, "save", save)
    with pytest.raises(
        SsdtuneError, match=r"step 3: the gradient of model.norm.weight is not finite"
    ):
        run(folder, "failed", settings)
    assert len(saved) > commits[-1], "nothing was updated before"
    monkeypatch.undo()
    assert_same_bits(run(folder, "failed", settings | {"resume_from_checkpoint": "last"}), wanted)


def test_room_is_asked_for_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = prepared(tmp_path, "llama")
    settings = {"save_steps": 1, "save_total_limit": 2}
    disks = {}
    for clipping in ("deferred", "speculative"):
        result = run(folder, clipping, settings, clipping=clipping)
        disks[clipping] = planned(result)["disk"]
    states = disks["deferred"]["states"]
    assert disks["speculative"]["speculation"] == states
    assert disks["speculative"]["swap"] == disks["deferred"]["swap"] + states

    class Full:
        """A file system with room for a run that does not speculate."""

        f_frsize = f_bsize = 4096
        f_bavail = f_bfree = (disks["deferred"]["total"] + states // 2) // 4096
        f_blocks = 1 << 30
        f_flag = 0
        f_files = f_ffree = f_favail = 1 << 20

    monkeypatch.setattr("os.statvfs", lambda _: Full)
    assert not (folder / "small").exists()
    with pytest.raises(
        CapacityError, match=r"are for speculative updates; training\.clipping: def"
    ):
        run(folder, "small", settings, clipping="speculative")
    assert not (folder / "small" / "metrics.jsonl").exists()
