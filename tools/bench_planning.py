"""How long `ssdtune plan` takes for models from 1B to 175B, from their config.json alone.

    python tools/bench_planning.py [--models 1B 13B 70B 100B 175B] [--accumulation 1]

Per model: "command" is the whole of `ssdtune plan MODEL --hardware FILE`, wall clock and CPU seconds, the imports of torch
and transformers included; "choose" the CPU seconds of the search and of what another machine or batch would bring; then
how many plans were tried, and how many seconds of training are simulated in a CPU second. The machine that is
planned for is made up: 24 cores, 128 GiB, a card of 24 GiB, four drives. CPU seconds hardly depend on what else runs.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

MODELS = {  # blocks, hidden, heads, key/value heads, feed-forward, vocabulary
    "1B": (22, 2048, 32, 4, 5632, 32000),
    "13B": (40, 5120, 40, 40, 13824, 32000),
    "70B": (80, 8192, 64, 8, 28672, 128256),
    "100B": (100, 9216, 72, 8, 32256, 128256),
    "175B": (96, 12288, 96, 96, 32768, 50272),
}


def write_config(folder: Path, name: str) -> Path:
    blocks, hidden, heads, kv_heads, inner, vocabulary = MODELS[name]
    folder = folder / name
    folder.mkdir()
    settings = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": blocks,
        "hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "intermediate_size": inner, "vocab_size": vocabulary,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def write_machine(path: Path) -> Path:
    from ssdtune.hardware import figures
    from ssdtune.hardware.profile import HardwareProfile, save
    from ssdtune.units import GIB

    io = {"read_bytes_per_s": 26e9, "write_bytes_per_s": 13.6e9, "mixed_bytes_per_s": 18e9}
    place = figures.DirectoryProfile(
        path="/nvme", file_system="ext4", device="/dev/md0", free_bytes=10**14, direct=True, backend="io_uring",
        request_bytes=1 << 20, queue_depth=16, **io,
    )  # fmt: skip
    point = figures.BlockPoint(
        dtype="bf16", sequences=1, sequence=2048, forward_s=1.0, backward_s=2.0, forward_flop=123e12
    )
    block = figures.BlockProfile(
        shape="x", digest="x", device="cuda", parameters=2 * 10**8, active_parameters=2 * 10**8, hidden_size=4096,
        points=(point,),
    )  # fmt: skip
    save(
        HardwareProfile(
            machine_id="made up", measured_at="2026-12-01T00:00:00+00:00", effort="full", seconds=1.0, backends={},
            machine={"cpu": "made up", "cores": 24, "memory_bytes": 128 * GIB, "card_bytes": 24 * GIB},
            directories=(place,), together=figures.TogetherProfile(num_file_systems=1, **io),
            memory=(figures.MemoryPoint(threads=24, copy_bytes_per_s=287e9, triad_bytes_per_s=287e9),),
            adam=(figures.AdamPoint(form="avx2", threads=24, parameters_per_s=3.9e9),), contention=None,
            copies=tuple(
                figures.CopyPoint(device="cuda", pinned=True, direction=way, bytes_per_s=21e9)
                for way in ("h2d", "d2h", "both")
            ),
            compute_dtypes=("bf16",), blocks=(block,),
        ),
        path,
    )  # fmt: skip
    return path


def command(folder: Path, machine: Path, accumulation: int) -> str:
    """Run the command and say what it took."""
    options = ["--max-length", "2048", "--gradient-accumulation-steps", str(accumulation)]
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "ssdtune", "plan", folder, "--hardware", machine, *options],
        cwd=ROOT, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    after, wall_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - start
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return f"command {wall_s:.1f} s ({cpu_s:.1f} s of CPU)"


def search(folder: Path, machine: Path, accumulation: int) -> str:
    """Plan in this process and say what the search took."""
    from ssdtune.config.load import load_config
    from ssdtune.hardware.known import known
    from ssdtune.train.choose import choose, rates_for
    from ssdtune.train.forecast import Forecaster
    from ssdtune.train.prepare import prepare

    settings = {
        "model_name_or_path": str(folder), "max_length": 2048, "host_memory": "115GiB", "device": "cpu",
        "dtype": "bf16", "gradient_accumulation_steps": accumulation,
    }  # fmt: skip
    profile = known(str(machine))
    assert profile is not None
    prepared = prepare(load_config(None, settings), with_rows=False)
    start = time.process_time()
    chosen = choose(prepared, profile)
    choose_s = time.process_time() - start
    forecaster = Forecaster(prepared, rates_for(prepared, profile))
    forecaster.step_s(prepared.memory)
    start = time.process_time()
    step_s = forecaster.step_s(prepared.memory)
    rate = step_s / (time.process_time() - start)
    return f"choose {choose_s:.2f} s, {chosen.found.num_tried} plans, {rate:.0f} simulated seconds in one"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of a step")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        machine = write_machine(Path(scratch, "machine.json"))
        for name in args.models:
            folder = write_config(Path(scratch), name)
            figures = [f(folder, machine, args.accumulation) for f in (command, search)]
            print(f"{name:5s} {'  '.join(figures)}", flush=True)


if __name__ == "__main__":
    main()
