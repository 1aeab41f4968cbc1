"""Measure whether a fine-tune of a 1.1B-parameter llama stays inside its memory budget, and how right plans are.

    python tools/memory_check.py --work-dir /mnt/nvme/check            # all cases
    python tools/memory_check.py --work-dir . --case lora --json
    python tools/memory_check.py --work-dir . --modes                  # planned against measured, every mode, 0.13B
    python tools/memory_check.py --work-dir . --modes --quick          # the same on a small model, two minutes

Makes a checkpoint of TinyLlama's shape with random weights, one tensor at a time (some 2.2 or 4.4 GB), and runs
`ssdtune finetune` on it in a process of its own, with the budget given as `--host-memory`. Reports the peak of

* the resident set: VmHWM of every process of the run, and the sampled sum of their Pss;
* the page cache that holds the run's own files (model, swap, output): sampled with `mincore`;
* the two together at one moment, which is what must stay under the budget.

With `--cgroup`, where one may be made, the run also lives in a cgroup with the budget as its hard limit: then
the kernel itself is the judge. Its peak may touch the limit, for page cache that nobody needs stays until then. Bytes read and written come from `/proc/PID/io`.

`--modes` prints a table instead: what was planned and what was taken, in every mode, with little, some and all of the memory
that it can use (`bench/memory_modes.py`); exit code 3 if a run took 2 % more than was planned.

Exit code: 0 within budget, 1 the run failed, 3 over budget. Everything made is removed again unless `--keep`.
It measures one machine and asserts nothing about time; `docs/testing.md` says how its figures are used.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from bench.memory_modes import MODES, cells, line, render
from bench.memory_modes import measure as measure_modes
from bench.models import SIZES
from safetensors.torch import save_file
from transformers import LlamaConfig

MOST_BEYOND = 0.02
"""Share of the plan that a run may take more."""
GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Case:
    """One run to measure."""

    name: str
    flags: tuple[str, ...]
    budget: int
    checkpoint_dtype: torch.dtype


CASES = {
    case.name: case
    for case in (
        Case("full-fp32", ("--dtype", "fp32"), 3 * GIB, torch.float32),
        Case("full-bf16", ("--dtype", "bf16"), 3 * GIB, torch.bfloat16),
        Case("lora", ("--dtype", "fp32", "--method", "lora"), 2 * GIB, torch.bfloat16),
    )
}


def main() -> int:
    """Run the cases that the command line names."""
    arguments = _parse()
    if arguments.modes:
        return _modes(arguments)
    reports = []
    for name in arguments.case or CASES:
        case = CASES[name]
        folder = Path(tempfile.mkdtemp(prefix="ssdtune-memory-", dir=arguments.work_dir))
        try:
            reports.append(measure(case, folder, arguments))
        finally:
            if not arguments.keep:
                shutil.rmtree(folder)
        if not arguments.json:
            print(_describe(reports[-1]), flush=True)
    if arguments.json:
        print(json.dumps({"schema_version": 1, "runs": reports}, indent=2))
    if any(report["exit_code"] for report in reports):
        return 1
    return 0 if all(report["within_budget"] for report in reports) else 3


def _modes(arguments: argparse.Namespace) -> int:
    size, dtypes, rows = "0.13B", ["bf16", "fp32"], [1, 8]
    if arguments.quick:
        size, dtypes, rows = "small", ["bf16", "fp32"], [2]
    folder = arguments.work_dir.absolute() / "ssdtune-memory-modes"
    folder.mkdir(parents=True, exist_ok=True)
    records: list[dict[str, Any]] = []
    chosen = cells(arguments.dtypes or dtypes, arguments.rows or rows, arguments.only)
    try:
        for record in measure_modes(chosen, folder, arguments.size or size, 2):
            records.append(record)
            print(f"{len(records)} of {len(chosen)}: {line(record)}", file=sys.stderr, flush=True)
    finally:
        if not arguments.keep:
            shutil.rmtree(folder)
    print(
        json.dumps({"schema_version": 1, "runs": records}, indent=2)
        if arguments.json
        else render(records)
    )
    return 3 if min(record["error"] for record in records) < -MOST_BEYOND else 0


def measure(case: Case, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one case and return its figures, in bytes and seconds."""
    model_dir = folder / "model"
    make_model(model_dir, case.checkpoint_dtype, arguments.layers)
    _make_rows(folder / "rows.jsonl", arguments.steps, arguments.tokens)
    drop_cache(model_dir)
    command = [
        sys.executable, "-m", "ssdtune", "finetune", str(model_dir),
        "--train-file", str(folder / "rows.jsonl"),
        "--output-dir", str(folder / "out"),
        "--max-steps", str(arguments.steps),
        "--save-steps", "0",
        "--host-memory", str(arguments.budget or case.budget),
        "--device", "cpu",
        *case.flags,
        *arguments.extra,
    ]  # fmt: skip
    budget = arguments.budget or case.budget
    group = Cgroup.make(budget) if arguments.cgroup else None
    log = folder / "log.txt"
    start = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, preexec_fn=group and group.enter
        )
        watch = Watch(process.pid, folder)
        try:
            exit_code = process.wait()
        except BaseException:
            process.send_signal(signal.SIGTERM)
            process.wait()
            raise
        finally:
            watch.stop()
    seconds = time.monotonic() - start
    report: dict[str, Any] = {
        "case": case.name,
        "parameters": _num_parameters(arguments.layers),
        "tokens_per_step": arguments.tokens,
        "steps": arguments.steps,
        "budget_bytes": budget,
        "exit_code": exit_code,
        "run_s": round(seconds, 2),
        **watch.report(),
    }
    if group:
        report["cgroup"] = group.close()
    steps = _steps(folder / "out" / "metrics.jsonl")
    report["step_s"] = [round(step["step_s"], 3) for step in steps]
    report["losses"] = [step["loss"] for step in steps]
    if steps:
        report["metrics_bytes_read_per_step"] = sum(steps[-1]["bytes_read"].values())
        report["metrics_bytes_written_per_step"] = sum(steps[-1]["bytes_written"].values())
    peak = max(report["peak_resident_bytes"], report["peak_resident_and_cache_bytes"])
    report["within_budget"] = peak <= budget
    if exit_code:
        report["log_tail"] = log.read_text(errors="replace")[-4000:]
    return report


# --- the checkpoint -------------------------------------------------------------------------------


def _config(layers: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        vocab_size=32000,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


def _shapes(layers: int) -> Iterator[dict[str, tuple[int, ...]]]:
    """Yield the tensors of each shard: embedding, each block, norm and head."""
    config = _config(layers)
    hidden, wide = config.hidden_size, config.intermediate_size
    keys = hidden // config.num_attention_heads * config.num_key_value_heads
    yield {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for number in range(layers):
        block = {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (wide, hidden),
            "mlp.up_proj": (wide, hidden),
            "mlp.down_proj": (hidden, wide),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        yield {f"model.layers.{number}.{name}.weight": shape for name, shape in block.items()}
    yield {"model.norm.weight": (hidden,), "lm_head.weight": (config.vocab_size, hidden)}


def _num_parameters(layers: int) -> int:
    return sum(torch.Size(shape).numel() for shard in _shapes(layers) for shape in shard.values())


def make_model(folder: Path, dtype: torch.dtype, layers: int) -> None:
    """Write a random checkpoint of TinyLlama's shape, a block to a shard, holding one shard at a time."""
    folder.mkdir(parents=True)
    config = _config(layers)
    config.dtype = dtype
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    shards = list(_shapes(layers))
    index: dict[str, str] = {}
    total = 0
    for number, shapes in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {}
        for name, shape in shapes.items():
            if len(shape) == 1:
                tensors[name] = torch.ones(shape, dtype=dtype)
            else:
                tensors[name] = torch.empty(shape, dtype=dtype).normal_(
                    0, 0.02, generator=generator
                )
            index[name] = file
            total += tensors[name].nbytes
        save_file(tensors, folder / file, metadata={"format": "pt"})
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
    (folder / "model.safetensors.index.json").write_text(text + "\n", encoding="utf-8")


def _make_rows(path: Path, steps: int, tokens: int) -> None:
    generator = torch.Generator().manual_seed(1)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(steps):
            ids = torch.randint(3, 32000, (tokens,), generator=generator).tolist()
            file.write(json.dumps({"input_ids": ids, "labels": ids}) + "\n")


# --- measuring ------------------------------------------------------------------------------------


class Watch:
    """Samples memory of a process, its children and the page cache of a folder until it is stopped."""

    def __init__(self, pid: int, folder: Path, *, interval_s: float = 0.1) -> None:
        self._pid = pid
        self._folder = folder
        self._interval_s = interval_s
        self._peaks: dict[str, int] = {}
        self._io: dict[int, dict[str, int]] = {}
        self._samples = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the sampling."""
        self._stop.set()
        self._thread.join()

    def report(self) -> dict[str, Any]:
        """Return the peaks, in bytes."""
        return {
            "peak_resident_bytes": self._peaks.get("hwm", 0),
            "peak_pss_bytes": self._peaks.get("pss", 0),
            "peak_cache_bytes": self._peaks.get("cache", 0),
            "peak_resident_and_cache_bytes": self._peaks.get("both", 0),
            "io_read_bytes": sum(io.get("read_bytes", 0) for io in self._io.values()),
            "io_written_bytes": sum(io.get("write_bytes", 0) for io in self._io.values()),
            "samples": self._samples,
        }

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            pids = _family(self._pid)
            pss = sum(_field(pid, "smaps_rollup", "Pss") for pid in pids)
            # of the Pss, pages of mapped files are page cache and would be counted twice
            mapped = sum(_field(pid, "smaps_rollup", "Pss_File") for pid in pids)
            resident = sum(_field(pid, "status", "VmHWM") for pid in pids)
            cache = cached_bytes(self._folder)
            for name, value in (
                ("hwm", resident),
                ("pss", pss),
                ("cache", cache),
                ("both", pss + max(0, cache - mapped)),
            ):
                self._peaks[name] = max(self._peaks.get(name, 0), value)
            for pid in pids:
                if counts := _io_counts(pid):
                    self._io[pid] = counts
            self._samples += 1


def _family(pid: int) -> list[int]:
    """Return a process and all its descendants that are alive."""
    found = [pid]
    for member in found:
        for task in Path(f"/proc/{member}/task").glob("*/children"):
            try:
                found += [int(child) for child in task.read_text().split()]
            except OSError:
                continue
    return found


def _field(pid: int, file: str, name: str) -> int:
    """Return a field of a /proc file in bytes, 0 if the process has ended."""
    try:
        for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return 0


def _io_counts(pid: int) -> dict[str, int]:
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return {}
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]


def cached_bytes(folder: Path) -> int:
    """Return how much of the folder's files is in the page cache, whoever brought it there."""
    return sum(_cached_of(path) for path in folder.rglob("*") if path.is_file())


def _cached_of(path: Path) -> int:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        size = os.fstat(file).st_size
        if size == 0:
            return 0
        # mapping a file reads nothing; mincore says which pages are there already
        address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            return 0
        pages = -(-size // mmap.PAGESIZE)
        present = ctypes.create_string_buffer(pages)
        failed = _libc.mincore(address, size, present)
        _libc.munmap(address, size)
        if failed:
            return 0
        # only the lowest bit of each byte is defined
        flags = torch.frombuffer(present, dtype=torch.uint8)
        return int(flags.bitwise_and_(1).count_nonzero()) * mmap.PAGESIZE
    finally:
        os.close(file)


def drop_cache(folder: Path) -> None:
    """Write the folder's files out and drop them from the page cache, so that none is counted as the run's."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


class Cgroup:
    """A cgroup with a hard limit, for one run; version 2 or the memory controller of version 1."""

    ROOT = Path("/sys/fs/cgroup")
    # limit, peak, events
    FILES = {
        2: ("memory.max", "memory.peak", "memory.events"),
        1: ("memory.limit_in_bytes", "memory.max_usage_in_bytes", "memory.oom_control"),
    }

    def __init__(self, path: Path, version: int) -> None:
        self._path = path
        self._version = version

    @classmethod
    def make(cls, limit: int) -> Cgroup | None:
        """Make one, or return None where that is not allowed; the run is then only sampled."""
        version = 2 if (cls.ROOT / "cgroup.controllers").exists() else 1
        parent = cls.ROOT if version == 2 else cls.ROOT / "memory"
        group = cls(parent / f"ssdtune-memory-{os.getpid()}-{time.monotonic_ns()}", version)
        try:
            group._path.mkdir()
            group._file(0).write_text(str(limit))
        except OSError as error:
            if group._path.exists():
                group._path.rmdir()
            print(f"no cgroup ({error}); sampling only", file=sys.stderr)
            return None
        return group

    def enter(self) -> None:
        """Move the calling process in; runs between fork and exec."""
        (self._path / "cgroup.procs").write_text("0")

    def close(self) -> dict[str, int]:
        """Read what the kernel counted (page cache included) and remove the group."""
        events = self._file(2).read_text().split()
        peak = self._file(1)
        figures = {
            "peak_bytes": int(peak.read_text()) if peak.exists() else -1,
            "oom_kills": int(events[events.index("oom_kill") + 1]) if "oom_kill" in events else -1,
        }
        self._path.rmdir()
        return figures

    def _file(self, which: int) -> Path:
        return self._path / self.FILES[self._version][which]


# --- output ---------------------------------------------------------------------------------------


def _steps(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line["event"] == "step"]


def _describe(report: dict[str, Any]) -> str:
    def gib(name: str) -> str:
        return f"{report[name] / GIB:.2f} GiB"

    verdict = "within budget" if report["within_budget"] else "OVER BUDGET"
    if report["exit_code"]:
        verdict = f"FAILED with exit code {report['exit_code']}\n{report['log_tail']}"
    group = report.get("cgroup")
    lines = [
        f"{report['case']}: {report['parameters'] / 1e9:.2f}e9 parameters, "
        f"{report['tokens_per_step']} tokens a step, budget {gib('budget_bytes')}: {verdict}",
        f"  resident at most {gib('peak_resident_bytes')} (Pss {gib('peak_pss_bytes')}), page cache of "
        f"its files {gib('peak_cache_bytes')}, together {gib('peak_resident_and_cache_bytes')} "
        f"({report['samples']} samples)",
        f"  read {report['io_read_bytes'] / 1e9:.1f} GB, wrote {report['io_written_bytes'] / 1e9:.1f} GB "
        f"in {report['run_s']:.0f} s; steps took {report['step_s']} s",
    ]
    if group:
        lines.append(
            f"  in a cgroup with this limit: peak {group['peak_bytes'] / GIB:.2f} GiB with all page cache, "
            f"{group['oom_kills']} kills"
        )
    return "\n".join(lines)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--work-dir", type=Path, default=Path(), help="where 5 to 30 GB may be used"
    )
    parser.add_argument("--case", action="append", choices=list(CASES), help="by default all")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps")
    parser.add_argument("--tokens", type=int, default=128, help="tokens in a step (one sequence)")
    parser.add_argument("--layers", type=int, default=22, help="blocks; fewer for a quick trial")
    parser.add_argument("--budget", type=int, help="bytes, instead of each case's own budget")
    parser.add_argument("--modes", action="store_true", help="a table of all modes instead")
    parser.add_argument("--quick", action="store_true", help="--modes with a small model")
    parser.add_argument("--only", nargs="+", metavar="MODE", help=f"of --modes: {'; '.join(MODES)}")
    parser.add_argument("--size", choices=SIZES, help="model of --modes")
    parser.add_argument("--dtypes", nargs="+", choices=("bf16", "fp32"), help="of --modes")
    parser.add_argument("--rows", nargs="+", type=int, help="of a micro-batch, with --modes")
    parser.add_argument("--cgroup", action="store_true", help="also limit the run by a cgroup")
    parser.add_argument("--keep", action="store_true", help="leave the files")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("extra", nargs="*", help="further flags of ssdtune finetune, after --")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
