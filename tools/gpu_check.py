"""Check a CUDA card: does training on it give the right numbers, within its memory, and how fast.

    python tools/gpu_check.py --output gpu_check.json

Needs no network: models and rows are made on the spot. Every check runs on its own: one that fails is told and the
rest go on, in a new process if the card was left unusable. Prints a table, and writes all figures as JSON after
each check, so that nothing is lost if the script is stopped. With --device cpu the same runs on a processor, where
checks of the card alone have nothing to do. Exit code 0: nothing failed; 1: something did; 3: there is no such card,
or a package is missing.

"Equal" is against plain training in memory on the same device: transformers, peft, torch's AdamW. Tolerances: fp32
losses 1e-5 and norms 1e-4 relative; bf16 losses 1e-3 and norms 1e-2, for one rounding to bf16 changes an activation by
2^-8 of itself; fp16, with loss scaling, as bf16, for that is what its weights are stored in. Of the weights, the change is compared, all elements together: |ours - reference| / |reference - start| is
at most 0.01 (fp32) or 0.05 (bf16, where honest runs that round elsewhere are 0.01 to 0.05 apart, and runs without fp32
masters 1).
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib
import io
import json
import logging
import math
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# Before torch is imported: cuBLAS gives the same bits every time only with this workspace.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

PACKAGES = ("torch", "transformers", "peft", "accelerate", "safetensors", "numpy", "psutil", "yaml")
LEARNING_RATE = 1e-3
SEED = 42
MIB = 1 << 20
LEAST_S = 5.0
"""No check begins with less time left."""


@dataclass(frozen=True)
class Model:
    """A llama's sizes, and the rows that it is trained on."""

    hidden: int
    inner: int
    blocks: int
    heads: int
    vocabulary: int
    sequence: int
    batch: int


@dataclass(frozen=True)
class Size:
    """How much is checked: `small` is for equality, `large` for speed, `copy_bytes` for bandwidths."""

    small: Model
    steps: int
    large: Model
    large_steps: int
    accumulations: tuple[int, ...]
    copy_bytes: int
    is_quick: bool = False


SIZES = {
    "full": Size(
        Model(256, 688, 4, 4, 2048, 128, 4), 6, Model(1024, 2816, 8, 16, 8192, 1024, 8), 6, (1, 16),
        256 * MIB,
    ),
    "smallest": Size(
        Model(32, 48, 2, 2, 97, 10, 2), 2, Model(32, 48, 2, 2, 97, 10, 2), 3, (1, 2), MIB, True
    ),
}  # fmt: skip


class NotHere(Exception):
    """A check has nothing to do on this machine; the message says why."""


class Failed(Exception):
    """What was found is wrong; `figures` are kept."""

    def __init__(self, message: str, figures: dict[str, Any]) -> None:
        super().__init__(message)
        self.figures = figures


@dataclass
class Bench:
    """What the checks share."""

    device_name: str
    folder: Path
    size: Size
    limit_s: float
    begin: float = field(default_factory=time.monotonic)
    profile: Any = None
    number: int = 0

    @property
    def is_card(self) -> bool:
        return self.device_name != "cpu"

    def model(self, name: str, shape: Model) -> Path:
        """Return a checkpoint with random fp32 weights; made once."""
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        folder = self.folder / f"model-{name}"
        if not folder.exists():
            config = LlamaConfig(
                hidden_size=shape.hidden, intermediate_size=shape.inner, num_hidden_layers=shape.blocks,
                num_attention_heads=shape.heads, num_key_value_heads=max(1, shape.heads // 2),
                vocab_size=shape.vocabulary, max_position_embeddings=shape.sequence,
                tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, pad_token_id=0,
            )  # fmt: skip
            torch.manual_seed(SEED)
            LlamaForCausalLM(config).save_pretrained(folder)
        return folder

    def rows(self, name: str, shape: Model, count: int, *, ragged: bool) -> Path:
        """Write rows of random tokens, with masked beginnings; of several lengths if `ragged`."""
        path = self.folder / f"rows-{name}.jsonl"
        if not path.exists():
            chance = random.Random(SEED)
            with path.open("w", encoding="utf-8") as file:
                for number in range(count):
                    length = (
                        chance.randint(shape.sequence // 2, shape.sequence)
                        if ragged
                        else shape.sequence
                    )
                    ids = [chance.randrange(3, shape.vocabulary) for _ in range(length)]
                    masked = 1 + (length // 4 if number % 3 == 0 else 0)
                    row = {"input_ids": ids, "labels": [-100] * masked + ids[masked:]}
                    file.write(json.dumps(row) + "\n")
        return path

    def large_rows(self) -> Path:
        """Return rows for all steps, for a step ends with the rows."""
        size = self.size
        count = size.large.batch * max(size.accumulations) * size.large_steps
        return self.rows("large", size.large, count, ragged=False)

    @contextmanager
    def output(self) -> Iterator[Path]:
        """Give a new output folder; it goes with the check."""
        self.number += 1
        folder = self.folder / f"out-{os.getpid()}-{self.number}"
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def train(self, model: Path, rows: Path, output: Path, **settings: Any) -> Any:
        """Fine-tune with ssdtune, streaming everything unless told otherwise."""
        import ssdtune

        given: dict[str, Any] = {
            "model_name_or_path": str(model), "train_file": str(rows), "output_dir": str(output),
            "device": self.device_name, "shuffle": False, "verify": False, "save_steps": 0, "seed": SEED,
            "learning_rate": LEARNING_RATE, "lr_scheduler_type": "constant", "host_cache": 0,
        }  # fmt: skip
        return ssdtune.finetune(**{**given, **settings})

    def open_device(self) -> Any:
        from ssdtune.device import open_device

        return open_device(self.device_name)

    def need_card(self) -> None:
        if not self.is_card:
            raise NotHere("this is about cards")


# Training in memory, to compare with


@dataclass
class Reference:
    """What in-memory training gave; `state` and `start` are fp32 tensors by the names of a result's files."""

    losses: list[float]
    norms: list[float]
    state: dict[str, Any]
    start: dict[str, Any]
    step_s: list[float]
    peak_bytes: int


def in_memory(
    bench: Bench, model_dir: Path, rows_path: Path, shape: Model, *, method: str, dtype: str,
    max_grad_norm: float, steps: int, accumulation: int, autocast: bool = False,
) -> Reference:  # fmt: skip
    """Train as transformers and peft would.

    Weights are fp32; with bf16 the model holds their rounding and each micro-batch's bf16 gradient is added in fp32, as
    ssdtune does it; with fp16 it computes with the same rounding, and steps that overflow are skipped. With `autocast` it is done the usual way instead, which is what speed is compared with.
    """
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    where = torch.device(bench.device_name)
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype, torch.float32)
    halves = dtype != "fp32" and not autocast
    model: Any = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=half if halves else torch.float32
    )
    exact: dict[str, Any] = {}
    if method == "lora":
        torch.manual_seed(SEED)
        config = peft.LoraConfig(
            task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules="all-linear"
        )
        model = peft.get_peft_model(model, config)
    elif halves:
        full = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        exact = {name: p.detach().to(where) for name, p in full.named_parameters()}
    model.to(where).train()
    if (
        method == "lora" and halves and dtype == "bf16"
    ):  # adapters compute in bf16, as under autocast
        for name, p in model.named_parameters():
            if p.requires_grad:
                exact[name] = p.detach().clone()
                p.data = p.data.bfloat16()
    if bench.is_card:
        torch.cuda.reset_peak_memory_stats(where)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    masters = {
        name: p if p.dtype == torch.float32 else torch.nn.Parameter(exact.get(name, p).float())
        for name, p in trained.items()
    }

    def publish() -> None:
        for name, p in trained.items():
            if masters[name] is not p:
                bits = masters[name].detach().view(torch.int32) + 0x8000  # rounds half up
                p.data.copy_((bits >> 16).to(torch.int16).view(torch.bfloat16).to(p.dtype))

    def export() -> dict[str, Any]:
        if method == "lora":
            places = {p.data_ptr(): masters[name] for name, p in trained.items()}
            return {
                k: places.get(v.data_ptr(), v).detach().float().cpu().clone()
                for k, v in peft.get_peft_model_state_dict(model).items()
            }
        return {n: m.detach().float().cpu().clone() for n, m in masters.items()}

    publish()
    start = export()
    optimizer = torch.optim.AdamW(
        masters.values(), lr=LEARNING_RATE, weight_decay=0.0, fused=autocast
    )
    rows = [json.loads(line) for line in rows_path.read_text(encoding="utf-8").splitlines()]
    result = Reference([], [], {}, start, [], 0)
    place, scale = 0, 2.0**16 if dtype == "fp16" else 1.0
    for _ in range(steps):
        began = time.perf_counter()
        window = []
        for _ in range(accumulation):
            window.append([rows[(place + i) % len(rows)] for i in range(shape.batch)])
            place += shape.batch
        learned = sum(label != -100 for batch in window for row in batch for label in row["labels"])
        losses = []
        for batch in window:
            inputs = {name: values.to(where) for name, values in _padded(batch).items()}
            with torch.autocast(where.type, torch.bfloat16, enabled=autocast and dtype == "bf16"):
                loss = model(
                    **inputs,
                    use_cache=False,
                    num_items_in_batch=torch.tensor(learned, device=where),
                ).loss
            (loss * scale).backward()
            losses.append(loss.detach())
            for name, p in trained.items():
                master = masters[name]
                if master is not p and p.grad is not None:
                    gradient = p.grad.float()
                    master.grad = gradient if master.grad is None else master.grad + gradient
                    p.grad = None
        if scale != 1.0:
            for master in masters.values():
                if master.grad is not None:
                    master.grad /= scale
        limit = max_grad_norm or math.inf
        norm = torch.nn.utils.clip_grad_norm_(list(masters.values()), limit)
        if math.isfinite(norm):
            optimizer.step()
        else:
            scale /= 2
        publish()
        optimizer.zero_grad(set_to_none=True)
        result.losses.append(sum(loss.item() for loss in losses))  # waits for the card
        result.norms.append(float(norm))
        result.step_s.append(time.perf_counter() - began)
    result.state = export()
    if bench.is_card:
        result.peak_bytes = torch.cuda.max_memory_allocated(where)
    return result


def _padded(batch: list[dict[str, list[int]]]) -> dict[str, Any]:
    import torch

    longest = max(len(row["input_ids"]) for row in batch)

    def pad(values: list[int], filler: int) -> list[int]:
        return values + [filler] * (longest - len(values))

    return {
        "input_ids": torch.tensor([pad(row["input_ids"], 0) for row in batch]),
        "attention_mask": torch.tensor([pad([1] * len(row["input_ids"]), 0) for row in batch]),
        "labels": torch.tensor([pad(row["labels"], -100) for row in batch]),
    }


def _result_state(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {
        name: tensor.float()
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def _hash(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _relative(ours: list[float], reference: list[float]) -> float:
    if len(ours) != len(reference):
        raise Failed(
            f"{len(ours)} steps, not {len(reference)}", {"ours": ours, "theirs": reference}
        )
    return max(abs(a - b) / abs(b) for a, b in zip(ours, reference, strict=True))


# The checks: each returns figures, or raises Failed, NotHere or whatever happens


def check_device(bench: Bench) -> dict[str, Any]:
    """Device and versions."""
    import torch

    device = bench.open_device()
    found = device.capabilities()
    versions = {
        name: getattr(importlib.import_module(name), "__version__", "?") for name in PACKAGES
    }
    return {
        "name": device.name, "model": found.model, "compute_capability": found.compute_capability,
        "total_bytes": found.total_bytes, "free_bytes": device.memory().free_bytes,
        "bf16": device.supports(torch.bfloat16), "fp16": device.supports(torch.float16),
        "cuda": torch.version.cuda, "cards": torch.cuda.device_count(),
        "cores": os.cpu_count(), "versions": versions,
    }  # fmt: skip


CASES: dict[str, dict[str, Any]] = {
    "full fp32 clipped": {"method": "full", "dtype": "fp32", "max_grad_norm": 0.5},
    "full fp32": {"method": "full", "dtype": "fp32", "max_grad_norm": 0.0},
    "full bf16 clipped": {"method": "full", "dtype": "bf16", "max_grad_norm": 0.5},
    "full bf16": {"method": "full", "dtype": "bf16", "max_grad_norm": 0.0},
    "lora fp32 clipped": {"method": "lora", "dtype": "fp32", "max_grad_norm": 0.1},
    "lora bf16": {"method": "lora", "dtype": "bf16", "max_grad_norm": 0.0},
    "full fp16 clipped": {"method": "full", "dtype": "fp16", "max_grad_norm": 0.5},
    "lora fp16": {"method": "lora", "dtype": "fp16", "max_grad_norm": 0.0},
}
LIMITS = {"fp32": (1e-5, 1e-4, 0.01), "bf16": (1e-3, 1e-2, 0.05), "fp16": (1e-3, 1e-2, 0.05)}


def equality(case: str) -> Callable[[Bench], dict[str, Any]]:
    """Return the check of one case."""

    def check(bench: Bench) -> dict[str, Any]:
        settings, shape, steps = CASES[case], bench.size.small, bench.size.steps
        model = bench.model("small", shape)
        rows = bench.rows("small", shape, 2 * shape.batch * steps, ragged=True)
        reference = in_memory(bench, model, rows, shape, steps=steps, accumulation=2, **settings)
        with bench.output() as output:
            ours = bench.train(
                model, rows, output, **settings, max_steps=steps, per_device_train_batch_size=shape.batch,
                gradient_accumulation_steps=2, **({"lora_r": 8} if settings["method"] == "lora" else {}),
            )  # fmt: skip
            state = _result_state(output)
        if set(state) != set(reference.state):
            odd = sorted(set(state) ^ set(reference.state))
            raise Failed(f"tensors differ: {odd[:4]}", {"tensors": odd})
        off = sum((state[n] - t).double().square().sum() for n, t in reference.state.items())
        moved = sum(
            (reference.start[n] - t).double().square().sum() for n, t in reference.state.items()
        )
        figures = {
            "loss_error": _relative(ours.losses, reference.losses),
            "norm_error": _relative(ours.grad_norms, reference.norms),
            "movement_error": float((off / moved).sqrt()),
            "losses": ours.losses, "reference_losses": reference.losses,
            "grad_norms": ours.grad_norms, "clipped_steps": sum(
                norm > settings["max_grad_norm"] > 0 for norm in reference.norms
            ),
        }  # fmt: skip
        names = ("loss_error", "norm_error", "movement_error")
        limits = dict(zip(names, LIMITS[settings["dtype"]], strict=True))
        wrong = [
            f"{n} {figures[n]:.2g} > {limit:g}"
            for n, limit in limits.items()
            if not figures[n] <= limit
        ]
        if wrong:
            raise Failed(", ".join(wrong), figures)
        if settings["max_grad_norm"] and not figures["clipped_steps"]:
            raise Failed("no step was clipped, so this shows nothing", figures)
        return figures

    return check


def check_bits(bench: Bench) -> dict[str, Any]:
    """The same bits, whatever the memory plan and the I/O backend."""
    from ssdtune.errors import BackendUnavailableError

    shape, steps = bench.size.small, bench.size.steps
    model = bench.model("small", shape)
    rows = bench.rows("small", shape, 2 * shape.batch * steps, ragged=True)
    dtype = "bf16" if bench.is_card and _has_bf16(bench) else "fp32"
    variants: dict[str, dict[str, Any]] = {
        "all streamed": {},
        "the same again": {},
        "all in memory": {"host_cache": "8GiB"},
        "inputs on the card": {"activations": "device"},
        "inputs in host memory": {"activations": "host"},
        "inputs on ssd": {"activations": "ssd"},
        "recomputed": {"recompute": "always"},
        "activations kept": {"recompute": "never"},
        "products kept": {"recompute": "cheap"},
        "products in host memory": {"recompute": "cheap", "activations": "host"},
        "products on ssd": {"recompute": "cheap", "activations": "ssd"},
        "read far ahead": {"prefetch_depth": 3},
        "little memory of the card": {"gpu_memory": "750MiB", "prefetch_depth": 0},
        "small chunks": {"chunk_bytes": 65536, "request_bytes": 65536},
        **{
            f"backend {name}": {"backend": name}
            for name in ("io_uring", "libaio", "threads", "python", "kvikio")
        },
    }
    if bench.size.is_quick:
        few = (
            "all streamed",
            "the same again",
            "all in memory",
            "inputs in host memory",
            "backend python",
        )
        variants = {name: variants[name] for name in few}
    results: dict[str, str] = {}
    for name, settings in variants.items():
        with bench.output() as output:
            try:
                ours = bench.train(
                    model, rows, output, **settings, dtype=dtype, max_grad_norm=0.5, max_steps=steps,
                    per_device_train_batch_size=shape.batch, gradient_accumulation_steps=2,
                )  # fmt: skip
                results[name] = f"{_hash(output)} {ours.losses[-1].hex()}"
            except BackendUnavailableError as error:
                results[name] = f"not here: {error}"
            except Exception as error:
                results[name] = f"failed: {type(error).__name__}: {error}"
    wanted = results["all streamed"]
    wrong = [n for n, text in results.items() if text != wanted and not text.startswith("not here")]
    figures = {"dtype": dtype, "results": results}
    if wrong or wanted.startswith(("not here", "failed")):
        raise Failed(f"not the same: {', '.join(wrong) or wanted}", figures)
    return figures


def check_copies(bench: Bench) -> dict[str, Any]:
    """Bandwidth between host memory, pinned and pageable, and the card."""
    bench.need_card()
    import torch

    from ssdtune.io.buffers import Buffer

    device = bench.open_device()
    size = bench.size.copy_bytes
    place = device.allocate(size, "copies")
    figures: dict[str, Any] = {"size_bytes": size}
    for kind in ("pinned", "pageable"):
        buffer = Buffer(size)
        host = torch.frombuffer(buffer.view, dtype=torch.uint8).random_(0, 256)
        pin = device.pin(buffer.view) if kind == "pinned" else None
        if pin is not None and not pin.pinned:
            figures["pinned"] = "memory could not be pinned"
            continue
        expected = host.clone()

        def up(host: Any = host) -> None:
            device.upload(host, place)[1].wait()

        def down(host: Any = host) -> None:
            device.download(place, host).wait()

        try:
            figures[f"{kind}_h2d_bytes_per_s"] = size / _best(up)
            host.zero_()
            figures[f"{kind}_d2h_bytes_per_s"] = size / _best(down)
            if not torch.equal(host, expected):
                raise Failed(f"{kind}: other bytes came back", figures)
        finally:
            if pin is not None:
                pin.close()
    if "pinned" in figures:
        raise Failed(figures["pinned"], figures)
    return figures


def _best(work: Callable[[], object], times: int = 5) -> float:
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return min(taken)


def check_overlap(bench: Bench) -> dict[str, Any]:
    """A copy runs beside compute if it waits for an older event, and after it if not: by events of both streams."""
    bench.need_card()
    import torch

    from ssdtune.io.buffers import Buffer

    device = bench.open_device()
    size = bench.size.copy_bytes
    buffer, place = Buffer(size), device.allocate(size, "copies")
    host, pin = torch.frombuffer(buffer.view, dtype=torch.uint8), device.pin(buffer.view)
    compute, streams = device._compute, {"upload": device._up, "download": device._down}
    matrix = torch.randn(4096, 4096, device=device.torch_device)
    figures: dict[str, Any] = {"pinned": pin.pinned}

    def mark(stream: Any) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def run(direction: str, *, early: bool, products: int) -> tuple[float, float, float]:
        """Return when compute ended, and when the copy began and ended, in seconds from the beginning."""
        compute.synchronize()
        begin, older = mark(compute), device.record()
        for _ in range(products):
            matrix @ matrix
        end = mark(compute)
        stream = streams[direction]
        stream.wait_event(begin if early else end)
        before = mark(stream)
        after = older if early else None
        if direction == "upload":
            device.upload(host, place, after=after)[1].wait()
        else:
            device.download(place, host, after=after).wait()
        finished = mark(stream)
        finished.synchronize()
        end.synchronize()
        return tuple(begin.elapsed_time(event) / 1e3 for event in (end, before, finished))  # type: ignore[return-value]

    try:
        run("upload", early=False, products=8)  # warm-up
        _, before, finished = run("upload", early=False, products=1)
        end, _, _ = run("upload", early=False, products=16)
        products = max(4, math.ceil(3 * (finished - before) / (end / 16)))  # three times the copy
        wrong = []
        for direction in streams:
            end, _, finished = run(direction, early=True, products=products)
            alone = run(direction, early=False, products=1)
            copy_s = alone[2] - alone[1]
            hidden = max(0.0, min(1.0, (end + copy_s - max(end, finished)) / copy_s))
            late_end, _, late_finished = run(direction, early=False, products=products)
            figures[direction] = {
                "copy_s": copy_s, "compute_s": end, "copy_ended_s": finished, "hidden_share": hidden,
                "without_event_ended_s": late_finished, "compute_then_s": late_end,
            }  # fmt: skip
            if finished > end or hidden < 0.9:
                wrong.append(f"{direction}s do not run beside compute ({hidden:.0%} hidden)")
            if late_finished < late_end:
                wrong.append(f"the {direction} without an event did not wait for compute")
    finally:
        pin.close()
    if wrong:
        raise Failed("; ".join(wrong), figures)
    return figures


def check_memory(bench: Bench) -> dict[str, Any]:
    """The most card memory that training takes, beside the plan, which is also given as the budget."""
    bench.need_card()
    import torch

    import ssdtune
    from ssdtune.plan.device_memory import CONTEXT_BYTES

    where = torch.device(bench.device_name)
    shape = bench.size.large
    model = bench.model("large", shape)
    rows = bench.large_rows()
    settings: dict[str, Any] = {
        "dtype": _best_dtype(bench), "max_steps": 2, "per_device_train_batch_size": shape.batch,
        "max_length": shape.sequence,
    }  # fmt: skip
    variants: dict[str, dict[str, Any]] = {
        "streamed": {"host_cache": 0},
        "inputs on ssd": {"host_cache": 0, "activations": "ssd"},
        "activations kept": {"host_cache": None, "recompute": "never"},
        "products kept": {"host_cache": None, "recompute": "cheap"},
        "activations in host memory": {
            "host_cache": 0,
            "activations": "host",
            "recompute": "never",
        },
        "activations on ssd": {"host_cache": 0, "activations": "ssd", "recompute": "never"},
    }
    if settings["dtype"] == "fp16":  # runs blocks again
        variants = {
            n: changes for n, changes in variants.items() if changes.get("recompute") != "never"
        }
    figures: dict[str, Any] = {}
    wrong = []
    for name, changes in variants.items():
        given = {**settings, **changes}
        with bench.output() as output:
            plan = ssdtune.plan(
                model_name_or_path=str(model), train_file=str(rows), output_dir=str(output),
                device=bench.device_name, **given,
            )  # fmt: skip
            memory = plan.to_dict()["memory"] or {}
            planned = memory["device_bytes"]
            gc.collect()
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated(where)
            torch.cuda.reset_peak_memory_stats(where)
            try:
                bench.train(model, rows, output, **given, gpu_memory=planned)
            except Exception as error:
                wrong.append(f"{name}: {type(error).__name__}: {error}")
                continue
        gc.collect()
        found = {
            "peak_bytes": torch.cuda.max_memory_allocated(where) - before,
            "reserved_bytes": torch.cuda.max_memory_reserved(where),
            "planned_bytes": planned - CONTEXT_BYTES,
            "left_bytes": torch.cuda.memory_allocated(where) - before,
            "breakdown": memory["device_breakdown"],
        }
        found["peak_share_of_plan"] = found["peak_bytes"] / found["planned_bytes"]
        figures[name] = found
        if found["peak_bytes"] > found["planned_bytes"]:
            wrong.append(f"{name}: more than planned")
        if found["left_bytes"] > MIB:
            wrong.append(f"{name}: memory of the card was not given back after the run")
    free, total = torch.cuda.mem_get_info(where)
    figures["context_bytes"] = total - free - torch.cuda.memory_reserved(where)
    if wrong:
        raise Failed("; ".join(wrong), figures)
    return figures


def check_drives(bench: Bench) -> dict[str, Any]:
    """Rates of drive, memory, AdamW, link and compute, and of the ways to the card: ssdtune's quick profile."""
    import dataclasses

    import ssdtune
    from ssdtune.hardware.effort import QUICK

    options: dict[str, Any] = {"device": bench.device_name, "quick": True}
    if bench.size.is_quick:
        options["effort"] = dataclasses.replace(
            QUICK, drive_s=0.05, drives_s=0.1, memory_s=0, adam_s=0, contention_s=0, copies_s=0, blocks_s=0,
            largest_file_bytes=16 * MIB, memory_bytes=4 * MIB, chunk_bytes=2 * MIB, queue_depths=(4,), tokens=(8,),
        )  # fmt: skip
    else:
        options["effort"] = dataclasses.replace(
            QUICK, drive_s=6, drives_s=6, blocks_s=4, tokens=(128, 2048)
        )
    bench.profile = ssdtune.profile(
        [bench.folder], model=str(bench.model("large", bench.size.large)), **options
    )
    ways = {
        f"{way.backend}{' to the card' * way.to_card}": {
            "read_bytes_per_s": way.read_bytes_per_s,
            "mixed_bytes_per_s": way.mixed_bytes_per_s,
        }
        for way in bench.profile.directories[0].ways or ()
    }
    return dataclasses.asdict(bench.profile.rates()) | ways


def check_kvikio(bench: Bench) -> dict[str, Any]:
    """Which way kvikio goes between drive and card, whether the bytes are right, and how fast."""
    bench.need_card()
    import torch

    from ssdtune.io.kvikio_probe import kvikio_problem, kvikio_state
    from ssdtune.io.select import open_backend

    if problem := kvikio_problem():
        raise NotHere(problem)
    device = bench.open_device()
    size = bench.size.copy_bytes
    sent, back = device.allocate(size, "kvikio"), device.allocate(size, "kvikio")
    sent.random_(0, 256)
    torch.cuda.current_stream(device.torch_device).synchronize()
    backend: Any = open_backend("kvikio", queue_depth=16, request_bytes=4 * MIB)
    path = bench.folder / "kvikio.bin"
    figures: dict[str, Any] = {"size_bytes": size}
    try:
        file = backend.open(path, writable=True, create=True)
        try:
            figures["write_bytes_per_s"] = size / _best(
                lambda: backend.write(file, 0, sent).wait(), 3
            )
            backend.sync([file])
            figures["read_bytes_per_s"] = size / _best(
                lambda: backend.read(file, 0, back).wait(), 3
            )
            figures["direct"] = file.direct
        finally:
            backend.close_file(file)
        figures["state"] = str(kvikio_state())
        figures["mode"] = kvikio_state().mode
    finally:
        backend.close()
        path.unlink(missing_ok=True)
    if not torch.equal(sent, back):
        raise Failed("other bytes came back", figures)
    return figures


def _has_bf16(bench: Bench) -> bool:
    import torch

    return bool(bench.open_device().supports(torch.bfloat16))


def _best_dtype(bench: Bench) -> str:
    import torch

    device = bench.open_device()
    halves = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return next((name for name, dtype in halves.items() if device.supports(dtype)), "fp32")


def check_speed(bench: Bench) -> dict[str, Any]:
    """Steps of a larger model against training in memory on the same device, the drives' bound and the forecast."""
    import torch

    import ssdtune

    shape, steps, dtype = bench.size.large, bench.size.large_steps, _best_dtype(bench)
    model = bench.model("large", shape)
    most = max(bench.size.accumulations)
    rows = bench.large_rows()
    figures: dict[str, Any] = {"dtype": dtype}
    torch.use_deterministic_algorithms(False)
    for accumulation in bench.size.accumulations:
        tokens = shape.batch * accumulation * shape.sequence
        settings: dict[str, Any] = {
            "dtype": dtype, "max_grad_norm": 1.0, "max_steps": steps, "max_length": shape.sequence,
            "per_device_train_batch_size": shape.batch, "gradient_accumulation_steps": accumulation,
        }  # fmt: skip
        found: dict[str, Any] = {"tokens": tokens}
        figures[f"{tokens} tokens a step"] = found
        with bench.output() as output:
            if bench.profile is not None:
                plan = ssdtune.plan(
                    hardware=bench.profile, model_name_or_path=str(model), train_file=str(rows),
                    output_dir=str(output), device=bench.device_name, host_cache=0, shuffle=False, save_steps=0,
                    **settings,
                )  # fmt: skip
                if plan.forecast:
                    found |= {"forecast_s": plan.forecast.step_s, "binding": plan.forecast.binding}
            ours = bench.train(model, rows, output, **settings)
            lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        later = [line for line in map(json.loads, lines) if line["event"] == "step"][1:]
        found["step_s"] = statistics.median(ours.step_seconds[1:])
        found["stall_share"] = statistics.median(line["stall_share"] for line in later)
        moved = [
            sum(line[key].values())
            for line in later[-1:]
            for key in ("bytes_read", "bytes_written")
        ]
        if bench.profile is not None and bench.profile.rates().mixed_bytes_per_s:
            found["drives_bound_s"] = sum(moved) / bench.profile.rates().mixed_bytes_per_s
            found["drives_busy_share"] = found["drives_bound_s"] / found["step_s"]
        if "forecast_s" in found:
            found["forecast_error"] = found["forecast_s"] / found["step_s"] - 1
        usual = in_memory(
            bench, model, rows, shape, method="full", dtype=dtype, max_grad_norm=1.0, steps=min(steps, 4),
            accumulation=accumulation, autocast=True,
        )  # fmt: skip
        found["in_memory_step_s"] = statistics.median(usual.step_s[1:])
        found["ratio_to_in_memory"] = found["in_memory_step_s"] / found["step_s"]
        if usual.peak_bytes:
            found["in_memory_peak_bytes"] = usual.peak_bytes
    figures["largest_tokens"] = shape.batch * most * shape.sequence
    return figures


def check_compiled(bench: Bench) -> dict[str, Any]:
    """The same training with torch.compile: losses, whether all blocks were compiled, and how fast."""
    from ssdtune.errors import BackendUnavailableError
    from ssdtune.model import compile as compiling

    shape, steps, dtype = bench.size.large, bench.size.large_steps, _best_dtype(bench)
    rows, model = bench.large_rows(), bench.model("large", shape)
    found: dict[str, Any] = {}
    told = io.StringIO()
    notes = logging.StreamHandler(told)
    logger, backend = logging.getLogger(compiling.__name__), compiling.BACKEND
    logger.addHandler(notes)
    if bench.size.is_quick:
        compiling.BACKEND = "aot_eager"  # kernels take longer to make than all other checks
    try:
        for compiled in (False, True):
            with bench.output() as output:
                found[f"compiled {compiled}"] = bench.train(
                    model, rows, output, dtype=dtype, max_steps=steps, max_length=shape.sequence,
                    per_device_train_batch_size=shape.batch, torch_compile=compiled, host_cache=None,
                )  # fmt: skip
    except BackendUnavailableError as error:
        raise NotHere(str(error)) from error
    finally:
        compiling.BACKEND = backend
        logger.removeHandler(notes)
    plain, compiled_run = found.values()
    figures = {
        "dtype": dtype, "loss_error": _relative(compiled_run.losses, plain.losses),
        "step_s": statistics.median(plain.step_seconds[1:]),
        "compiled_step_s": statistics.median(compiled_run.step_seconds[1:]),
        "first_step_s": compiled_run.step_seconds[0], "told": told.getvalue().splitlines(),
    }  # fmt: skip
    figures["gain"] = figures["step_s"] / figures["compiled_step_s"]
    if "cannot be compiled" in told.getvalue():
        raise Failed("not all blocks were compiled", figures)
    if not figures["loss_error"] <= LIMITS[dtype][0]:
        raise Failed(f"loss_error {figures['loss_error']:.2g} > {LIMITS[dtype][0]:g}", figures)
    return figures


CHECKS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "device": check_device,
    **{f"equal: {case}": equality(case) for case in CASES},
    "same bits": check_bits,
    "copies": check_copies,
    "overlap": check_overlap,
    "kvikio": check_kvikio,
    "memory of the card": check_memory,
    "drives and rates": check_drives,
    "speed": check_speed,
    "compiled": check_compiled,
}


# Running them


def run_checks(
    bench: Bench, names: list[str], report: dict[str, Any], save: Callable[[], None]
) -> bool:
    """Run what has not run yet; return whether the device can still be used."""
    for name in names:
        if name in report["checks"]:
            continue
        left = bench.limit_s - (time.monotonic() - bench.begin)
        began = time.monotonic()
        entry: dict[str, Any] = {"status": "skipped", "message": "no time left", "figures": {}}
        report["checks"][name] = entry
        if left > LEAST_S:
            entry.update(status="failed", message="the script ended within it")
            save()
            with redirect_stderr(io.StringIO()) as told, _deterministic(entry), _time_limit(left):
                _run(CHECKS[name], bench, entry)
            if entry["status"] == "failed":
                entry["stderr"] = told.getvalue()[-4000:]
        entry["seconds"] = round(time.monotonic() - began, 2)
        print(row(name, entry), flush=True)
        save()
        if entry["status"] == "failed" and not _still_works(bench):
            return False
    return True


def _run(check: Callable[[Bench], dict[str, Any]], bench: Bench, entry: dict[str, Any]) -> None:
    try:
        entry.update(status="passed", message="", figures=check(bench))
    except NotHere as reason:
        entry.update(status="not here", message=str(reason))
    except Failed as failure:
        entry.update(status="failed", message=str(failure), figures=failure.figures)
    except Exception as error:
        entry.update(
            status="failed",
            message=f"{type(error).__name__}: {error}",
            traceback=traceback.format_exc(),
        )


@contextmanager
def _deterministic(entry: dict[str, Any]) -> Iterator[None]:
    """Let torch use kernels that give the same bits every time, and keep what it says about those that do not."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    texts = {str(w.message).splitlines()[0] for w in caught if "determinis" in str(w.message)}
    if texts:
        entry["not_deterministic"] = sorted(texts)


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"stopped after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _still_works(bench: Bench) -> bool:
    if not bench.is_card:
        return True
    import torch

    try:
        return torch.ones(1, device=bench.device_name).item() == 1
    except RuntimeError:
        return False


def row(name: str, entry: dict[str, Any]) -> str:
    """Return a check's line of the table."""
    told = entry["message"] or _short(entry["figures"])
    return f"{name:<24} {entry['status']:<9} {entry.get('seconds', 0):7.1f} s  {told}"


def _short(figures: dict[str, Any]) -> str:
    from ssdtune.units import format_memory, format_rate

    words = []
    for key, value in figures.items():
        if isinstance(value, dict):
            numbers = {
                k: v for k, v in value.items() if isinstance(v, (int, float)) and k != "tokens"
            }
            if numbers:
                words.append(f"{key}: {_short(numbers)};")
        elif isinstance(value, bool) or not isinstance(value, (int, float, str)):
            continue
        elif key.endswith("bytes_per_s") and isinstance(value, (int, float)):
            words.append(f"{key.removesuffix('_bytes_per_s')} {format_rate(value)}")
        elif key.endswith("bytes") and isinstance(value, (int, float)):
            words.append(f"{key.removesuffix('_bytes')} {format_memory(value)}")
        elif isinstance(value, float):
            words.append(f"{key} {value:.3g}")
        else:
            words.append(f"{key} {value}")
    return " ".join(words).rstrip(";")


def missing_packages() -> list[str]:
    """Return what cannot be imported, and why."""
    missing = []
    for name in PACKAGES:
        try:
            importlib.import_module(name)
        except Exception as error:
            missing.append(f"{name} ({type(error).__name__}: {error})")
    return missing


def no_device(name: str) -> str:
    """Return why the device cannot be used; empty if it can."""
    if missing := missing_packages():
        return "cannot be imported: " + ", ".join(missing)
    from ssdtune.device import open_device
    from ssdtune.errors import SsdtuneError

    try:
        open_device(name)
    except SsdtuneError as error:
        return str(error)
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1 or cpu")
    parser.add_argument(
        "--output", type=Path, default=Path("gpu_check.json"), help="where the figures go"
    )
    parser.add_argument(
        "--work-dir", type=Path, help="folder on the drive to use; some GB for a while"
    )
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--limit", type=float, default=450, help="seconds for everything")
    parser.add_argument(
        "--only", nargs="+", choices=CHECKS, metavar="CHECK", help=f"of: {', '.join(CHECKS)}"
    )
    parser.add_argument(
        "--go-on", action="store_true", help="keep what the output file has, run the rest"
    )
    args = parser.parse_args()
    began = time.monotonic()
    report: dict[str, Any] = {
        "schema_version": 1,
        "device": args.device,
        "size": args.size,
        "checks": {},
    }
    if args.go_on and args.output.exists():
        report = json.loads(args.output.read_text(encoding="utf-8"))

    def save() -> None:
        report["seconds"] = round(report.get("earlier_s", 0) + time.monotonic() - began, 2)
        args.output.write_text(json.dumps(report, indent=2, default=str) + "\n", encoding="utf-8")

    if reason := no_device(args.device):
        report |= {"verdict": "no device", "reason": reason}
        save()
        print(f"no device: {reason}")
        return 3
    folder = Path(tempfile.mkdtemp(prefix="gpu-check-", dir=args.work_dir))
    try:
        bench = Bench(
            args.device, folder, SIZES[args.size], args.limit - report.get("earlier_s", 0)
        )
        works = run_checks(bench, args.only or list(CHECKS), report, save)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if not works:
        print("the card cannot be used any more; the rest runs in a new process", flush=True)
        report["earlier_s"] = report["seconds"]
        save()
        arguments = [argument for argument in sys.argv if argument != "--go-on"]
        os.execv(sys.executable, [sys.executable, *arguments, "--go-on"])
    states = [entry["status"] for entry in report["checks"].values()]
    failed = [name for name, entry in report["checks"].items() if entry["status"] == "failed"]
    counts = ", ".join(
        f"{states.count(s)} {s}" for s in ("passed", "failed", "not here", "skipped")
    )
    report |= {"verdict": "failed" if failed else "passed", "reason": counts}
    save()
    print(f"{report['verdict']}: {counts}, {report['seconds']:.0f} s; figures in {args.output}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
