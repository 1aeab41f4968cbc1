"""ssdtune equals itself to the last bit, however bytes move, wherever it stops.

Neither backend, directories, threads, queue depth, request and chunk sizes, caches nor where activations wait
may change a number; nor may a resume, after any step.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ssdtune import finetune
from ssdtune.errors import BackendUnavailableError
from ssdtune.plan import residency
from ssdtune.plan.residency import MemoryPlan
from tests.covering import covering
from tests.equality.harness import STREAMING, TRAINING, Streamed, assert_same_bits, read_run, stream
from tests.toy import make_checkpoint, make_rows

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("gemma3_text", {"max_steps": 4, "max_grad_norm": 5.0}),
    "bf16": ("llama", {"max_steps": 4, "dtype": "bf16", "max_grad_norm": 0}),
    "lora": ("gpt2", {"max_steps": 4, "method": "lora", "lora_dropout": 0.2}),
    "compact": (
        "qwen2",
        {"max_steps": 4, "dtype": "bf16", "optim": "adamw_8bit", "master_weights": False},
    ),
}
"""Tied fp32 with clipping, untied bf16 without, adapters with dropout; bf16 without masters, 8-bit moments."""

VARIANTS: dict[str, dict[str, Any]] = {
    "again": {},
    "backend-python": {"backend": "python"},
    "backend-threads": {"backend": "threads"},
    "backend-libaio": {"backend": "libaio"},
    "backend-io_uring": {"backend": "io_uring"},
    "buffered": {"direct": False},
    "queue-depth": {"queue_depth": 1},
    "requests": {"request_bytes": 4096, "queue_depth": 5},
    "chunks": {"chunk_bytes": 8192},
    "adam-threads": {"adam_threads": 1},
    "no-prefetch": {"prefetch_depth": 0},
    "deep-prefetch": {"prefetch_depth": 3},
    "host-cache": {"host_cache": "1GiB"},
    "some-host-cache": {"host_cache": 200_000},
    "activations-host": {"activations": "host"},
    "activations-ssd": {"activations": "ssd"},
    "verify": {"verify": True},
}


@pytest.fixture(scope="module", params=CASES)
def baseline(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One run of each case: its folder, its settings, its result."""
    folder = tmp_path_factory.mktemp(request.param)
    arch, settings = CASES[request.param]
    model_dir = make_checkpoint(folder / "model", arch)
    make_rows(folder / "rows.jsonl", 21)
    return folder, settings, stream(model_dir, folder / "rows.jsonl", folder / "out", settings)


@pytest.mark.parametrize(
    "baseline, variant", covering(CASES, VARIANTS, every=len(CASES)), indirect=["baseline"]
)
def test_how_bytes_move_changes_nothing(baseline: Any, tmp_path: Path, variant: str) -> None:
    folder, settings, wanted = baseline
    given = settings | VARIANTS[variant]
    try:
        got = stream(folder / "model", folder / "rows.jsonl", tmp_path / "out", given)
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    assert_same_bits(got, wanted)


KEEPING: dict[str, tuple[str, dict[str, float], dict[str, Any]]] = {
    "gpt2": ("gpt2", {"resid_pdrop": 0.2, "attn_pdrop": 0.2, "embd_pdrop": 0.1}, {}),
    "opt": ("opt", {"dropout": 0.2, "attention_dropout": 0.2}, {"max_grad_norm": 0}),
    "gemma3": ("gemma3_text", {"attention_dropout": 0.2}, {"max_grad_norm": 5.0}),
    "bloom": ("bloom", {"hidden_dropout": 0.2, "attention_dropout": 0.2}, {}),
    "experts": ("qwen3_moe", {"attention_dropout": 0.2}, {}),
    "bf16": ("llama", {"attention_dropout": 0.2}, {"dtype": "bf16", "max_grad_norm": 0}),
    "lora": ("phi3", {"resid_pdrop": 0.2}, {"method": "lora", "lora_dropout": 0.2}),
    "lora-bf16": ("gpt_neox", {"hidden_dropout": 0.2}, {"method": "lora", "dtype": "bf16"}),
}
"""Architecture, what it drops out, and how it is trained."""


WAYS: dict[str, tuple[set[int] | None, set[int], set[int], dict[str, Any]]] = {
    "always run again": (None, set(), set(), {"recompute": "always"}),
    "all kept": (None, set(), set(), {"recompute": "never"}),
    "products kept": (None, set(), set(), {"recompute": "cheap"}),
    "the last kept": ({2}, set(), set(), {}),
    "one between kept": ({1}, set(), set(), {"activations": "ssd"}),
    "all swapped": (None, set(), set(), {"recompute": "never", "activations": "ssd"}),
    "mixed": ({1, 2}, {0}, {0, 1}, {"activations": "ssd"}),
    "other masks": ({0}, set(), set(), {"seed": 1}),
}
"""Which blocks keep their activations (None: as planned), which let them wait on SSD, which of both keep only results of
products, and settings."""


class Keeping:
    """Runs of one case, with what is kept put into the plan.

    No weights stay in memory, and there are fewer slots than blocks: in backward they lie elsewhere than in forward.
    """

    def __init__(self, folder: Path, case: str) -> None:
        arch, dropout, settings = KEEPING[case]
        self.folder = folder
        self.settings = {"max_steps": 4, "host_cache": 1, "prefetch_depth": 0} | settings
        make_checkpoint(folder / "model", arch, **dropout)
        make_rows(folder / "rows.jsonl", 11)
        config = json.loads((folder / "model/config.json").read_text(encoding="utf-8"))
        count = config.get("num_hidden_layers") or config["n_layer"]
        self.blocks = {f"block.{i}" for i in range(count)}
        self.again = self.run(folder / "again", "always run again")

    def run(self, out: Path, way: str) -> Streamed:
        from ssdtune.train import prepare

        numbers, *others, more = WAYS[way]
        kept, swapped, partly = (
            frozenset(f"block.{i}" for i in some) for some in (numbers or (), *others)
        )

        def plan_memory(*arguments: Any) -> MemoryPlan:
            plan = residency.plan_memory(*arguments)
            if numbers is None:
                return plan
            return replace(plan, kept=kept, swapped=swapped, partly=partly)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prepare, "plan_memory", plan_memory)
            rows = self.folder / "rows.jsonl"
            result = stream(self.folder / "model", rows, out, self.settings | more)
        planned = json.loads((out / "plan.json").read_text(encoding="utf-8"))["memory"]
        assert set(planned["kept"]) == (
            self.blocks if way in ("all kept", "products kept") else kept
        )
        assert set(planned["swapped"]) == (self.blocks if way == "all swapped" else swapped)
        assert set(planned["partly"]) == (self.blocks if way == "products kept" else partly)
        assert not planned["resident"]
        assert planned["block_slots"] < len(self.blocks)
        assert bool(planned["input_slots"]) == ("ssd" in more.values())
        return result


@pytest.fixture(scope="module", params=KEEPING)
def keeping(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Keeping:
    return Keeping(tmp_path_factory.mktemp("keeping"), request.param)


@pytest.mark.parametrize(
    "keeping, way", covering(KEEPING, list(WAYS)[1:], every=3), indirect=["keeping"]
)
def test_what_blocks_keep_changes_nothing(keeping: Keeping, tmp_path: Path, way: str) -> None:
    """Blocks that are run again, that keep what backward needs, and both in one step, with dropout."""
    got = keeping.run(tmp_path / "out", way)
    if way == "other masks":
        message = "no dropout: masks could not differ"
        assert got.series("loss") != keeping.again.series("loss"), message
    else:
        assert_same_bits(got, keeping.again)
    assert (got.moved("written", "activations") > 0) == ("activations" in WAYS[way][3])


@pytest.mark.parametrize(
    "baseline, num_dirs", covering(CASES, [1, 3], every=2), indirect=["baseline"]
)
def test_striping_changes_nothing(baseline: Any, tmp_path: Path, num_dirs: int) -> None:
    folder, settings, wanted = baseline
    dirs = [str(tmp_path / f"drive {index}") for index in range(num_dirs)]
    given = settings | {"swap_dirs": dirs, "activations": "ssd"}
    assert_same_bits(
        stream(folder / "model", folder / "rows.jsonl", tmp_path / "out", given), wanted
    )


@pytest.mark.parametrize("masters", [True, False])
def test_moments_of_8_bits_in_several_pieces(tmp_path: Path, masters: bool) -> None:
    """Scales and random bits belong to elements, not to pieces: parts of more than one, in memory and streamed."""
    sizes = {"hidden_size": 160, "intermediate_size": 640, "num_hidden_layers": 2}
    model_dir = make_checkpoint(tmp_path / "model", "llama", **sizes)
    make_rows(tmp_path / "rows.jsonl", 9)
    settings = {"max_steps": 3, "dtype": "bf16", "optim": "adamw_8bit", "master_weights": masters}
    variants = ({}, {"chunk_bytes": 1 << 20}, {"chunk_bytes": 4096}, {"host_cache": "1GiB"})
    wanted, *others = [
        stream(model_dir, tmp_path / "rows.jsonl", tmp_path / str(number), settings | variant)
        for number, variant in enumerate(variants)
    ]
    for got in others:
        assert_same_bits(got, wanted)
    exact = settings | {"optim": "adamw", "master_weights": True}
    other = stream(model_dir, tmp_path / "rows.jsonl", tmp_path / "exact", exact)
    assert other.bits() != wanted.bits()
    assert wanted.moved("written", "moments") < 0.3 * other.moved("written", "moments")
    assert (wanted.moved("written", "master") > 0) == masters


def test_caches_save_reads(baseline: Any, tmp_path: Path) -> None:
    """The switch that the other cases rely on does something: without cache more is read."""
    folder, settings, wanted = baseline
    given = settings | {"host_cache": "1GiB"}
    cached = stream(folder / "model", folder / "rows.jsonl", tmp_path / "out", given)
    assert cached.moved("read", since=1) < wanted.moved("read", since=1)


CHUNKS = {5: 8192, 4: 49152, 3: 32768, 2: 32768, 1: 32768}
"""The size of pieces when a run is taken up again after a step; the latest comes first."""


@pytest.mark.parametrize("case, after", covering(CASES, [(5, 4, 3, 2, 1), (4, 1)], every=2))
def test_resume_after_any_step(tmp_path: Path, case: str, after: tuple[int, ...]) -> None:
    """A run that keeps every checkpoint is taken up again from them."""
    arch, settings = CASES[case]
    model_dir = make_checkpoint(tmp_path / "model", arch)
    make_rows(tmp_path / "rows.jsonl", 13)  # four steps an epoch: a resume crosses its border
    make_rows(tmp_path / "eval.jsonl", 3, seed=1)
    settings = settings | {
        "max_steps": 6,
        "shuffle": True,
        "eval_file": str(tmp_path / "eval.jsonl"),
        "eval_steps": 2,
    }
    plain = stream(model_dir, tmp_path / "rows.jsonl", tmp_path / "plain", settings)
    wanted = _facts(plain)

    settings |= {"save_steps": 1, "save_total_limit": 6, "chunk_bytes": 32768}
    saved = stream(model_dir, tmp_path / "rows.jsonl", tmp_path / "saved", settings)
    assert _facts(saved) == wanted, "saving changed the run"
    for step in after:
        given = settings | {
            "resume_from_checkpoint": str(tmp_path / f"saved/checkpoint-{step}"),
            "chunk_bytes": CHUNKS[step],
        }
        resumed = stream(model_dir, tmp_path / "rows.jsonl", tmp_path / "saved", given)
        assert _facts(resumed) == wanted, f"resumed after step {step}"


def test_resume_last_of_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    model_dir = make_checkpoint(tmp_path / "model", "llama")
    make_rows(tmp_path / "rows.jsonl", 9)
    settings = {"max_steps": 3, "save_steps": 2}
    first = stream(model_dir, tmp_path / "rows.jsonl", tmp_path / "out", settings)
    wanted = _facts(first)
    given = TRAINING | STREAMING | settings | {"resume_from_checkpoint": "last"}
    finetune(
        **given,
        model_name_or_path=str(model_dir),
        train_file=str(tmp_path / "rows.jsonl"),
        output_dir=str(tmp_path / "out"),
    )
    assert _facts(read_run(tmp_path / "out")) == wanted


def _facts(run: Streamed) -> dict[str, Any]:
    """Return everything that must be the same, detached from the folder, which is used again."""
    keys = ("loss", "grad_norm", "learning_rate", "learned_tokens", "rows")
    facts: dict[str, Any] = {key: run.series(key) for key in keys}
    facts["evals"] = [(line["step"], line["eval_loss"]) for line in run.evals]
    facts["tensors"] = run.bits()
    return facts
