"""Time of each phase of planning a model from its config.json alone.

    python tools/bench_planning.py [--models 7B 70B 175B] [--pieces 10] [--host-memory 64GiB] [--repeats 3]

Per process: "import" is torch, transformers and a first tiny model. Per model: "build" makes the modules without
weights, "layout" takes them apart and groups the parameters, "prepare" is both and the plan of the memory. Per
candidate of a search: "generate" writes the schedule of a step, "cost" says what its operations take, "simulate"
runs them on a clock. Seconds are CPU time, the best of several repeats, as other programs only ever add to it.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

MODELS = {  # blocks, hidden, heads, key/value heads, feed-forward, vocabulary
    "tiny": (1, 64, 2, 2, 128, 128),
    "7B": (32, 4096, 32, 32, 11008, 32000),
    "70B": (80, 8192, 64, 8, 28672, 128256),
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


def best(repeats: int, function: Callable[[], Any]) -> tuple[float, Any]:
    times = [time.process_time()]
    for _ in range(repeats):
        result = function()
        times.append(time.process_time())
    return min(end - start for start, end in pairwise(times)), result


def phases(folder: Path, host_memory: str, pieces: int, repeats: int) -> str:
    import torch

    from ssdtune.config.load import load_config
    from ssdtune.model.blocks import BlockModel
    from ssdtune.model.build import build_model
    from ssdtune.model.checkpoint import HfCheckpoint
    from ssdtune.plan.generate import StepShape, generate_training_step
    from ssdtune.plan.ledger import Ledger, TrainingShape, work_of
    from ssdtune.plan.simulator import simulate
    from ssdtune.plan.validate import RATEL_4090
    from ssdtune.swap.update import pieces_of
    from ssdtune.train.engine import make_step_shape
    from ssdtune.train.forecast import model_shape
    from ssdtune.train.prepare import prepare

    checkpoint, dtype = HfCheckpoint.open_config(str(folder)), torch.bfloat16
    build_s, _ = best(repeats, lambda: build_model(checkpoint, dtype=dtype))
    built = [build_model(checkpoint, dtype=dtype) for _ in range(repeats)]
    layout_s, _ = best(repeats, lambda: BlockModel(built.pop(), torch.device("cpu")))
    settings = {"model_name_or_path": str(folder), "host_memory": host_memory, "device": "cpu"}
    prepare_s, prepared = best(repeats, lambda: prepare(load_config(settings), with_rows=False))

    plan = prepared.memory
    ledger = Ledger(model_shape(prepared), TrainingShape(tokens=8192, sequence=1024))

    def generated() -> tuple[StepShape, Any]:
        layout, precision = prepared.layout, prepared.precision
        cut = {} if pieces else pieces_of(layout, plan, precision)
        shape = make_step_shape(layout, plan, cut, prepared.compute.input_bytes, precision)
        shape = replace(shape, pending=bool(plan.deferred))
        if pieces:
            shape = replace(shape, stages=ledger.stages(pieces=pieces))
        return shape, generate_training_step(shape)

    def priced() -> list[Any]:
        cost = lru_cache(None)(RATEL_4090.cost)
        return [cost(work) for work in work_of(schedule, shape, ledger)]

    generate_s, (shape, schedule) = best(repeats, generated)
    cost_s, costs = best(repeats, priced)
    simulate_s, _ = best(repeats, lambda: simulate(schedule, costs))
    return (
        f"build {build_s:.2f} s  layout {layout_s:.2f} s  prepare {prepare_s:.2f} s  "
        f"{len(costs)} operations: generate {generate_s:.3f} s  cost {cost_s:.3f} s  simulate {simulate_s:.3f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["7B", "70B", "175B"], choices=list(MODELS))
    parser.add_argument("--pieces", type=int, default=0, help="of an update; default: the engine's")
    parser.add_argument("--host-memory", default="64GiB")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        start = time.process_time()
        phases(write_config(Path(scratch), "tiny"), "2GiB", args.pieces, 1)
        print(f"import  {time.process_time() - start:.2f} s")
        for name in args.models:
            folder = write_config(Path(scratch), name)
            print(f"{name:6s}  {phases(folder, args.host_memory, args.pieces, args.repeats)}")


if __name__ == "__main__":
    main()
