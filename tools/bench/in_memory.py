"""Train a model the ordinary way, all in memory: transformers, torch's fused AdamW, peft for LoRA.

    python tools/bench/in_memory.py MODEL ROWS --method full --batch 8 --steps 3 --dtype bf16 --max-grad-norm 1.0

Full fine-tuning keeps fp32 weights; with bf16, blocks compute under autocast, which is what "bf16" means in common trainers.
LoRA keeps the base in bf16 (or fp32) and its adapters in fp32. Where activations would not fit, blocks are recomputed
("gradient_checkpointing"). Prints one JSON document: the seconds of each step, or why it was not run.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any


def needed_bytes(model: Any, method: str, tokens: int, *, checkpointing: bool) -> int:
    """Return about the bytes that training takes: states, and 4 bytes for each value that backward needs."""
    config = model.config
    parameters = sum(p.numel() for p in model.parameters())
    states = parameters * (4 if method == "lora" else 16)
    inner = 12 * config.hidden_size + 4 * config.intermediate_size
    layers = config.num_hidden_layers
    values = layers * config.hidden_size + inner if checkpointing else layers * inner
    return states + 4 * tokens * (values + 4 * config.vocab_size)


def available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("rows", type=Path)
    parser.add_argument("--method", choices=("full", "lora"), required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), required=True)
    parser.add_argument("--max-grad-norm", type=float, required=True)
    parser.add_argument(
        "--on-request",
        action="store_true",
        help="a step for each line on stdin, its seconds on stdout",
    )
    args = parser.parse_args()
    found = train(args)
    if not args.on_request or "skipped" in found:
        print(json.dumps(found), flush=True)
    return 0


def is_requested(seconds: float) -> bool:
    """Tell what the last step took, and wait for a line on stdin that asks for the next; False at its end."""
    print(seconds, flush=True)
    return bool(sys.stdin.readline())


def train(args: argparse.Namespace) -> dict[str, Any]:
    # If the estimate is wrong and memory runs out, this process is the one to go.
    Path("/proc/self/oom_score_adj").write_text("1000")
    import torch
    import transformers

    base = torch.bfloat16 if args.dtype == "bf16" and args.method == "lora" else torch.float32
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.from_pretrained(args.model)
        )
    rows = [json.loads(line)["input_ids"] for line in args.rows.read_text().splitlines()]
    batches = [rows[i * args.batch : (i + 1) * args.batch] for i in range(args.steps)]
    tokens, free = sum(map(len, batches[0])), available_bytes()
    checkpointing = needed_bytes(empty, args.method, tokens, checkpointing=False) > 0.9 * free
    needed = needed_bytes(empty, args.method, tokens, checkpointing=checkpointing)
    if needed > 0.95 * free:
        return {
            "skipped": f"needs about {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} are free"
        }
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=base)
    model.config.use_cache = False
    if args.method == "lora":
        import peft

        settings = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
        model = peft.get_peft_model(model, settings)
    if checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable()
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=5e-5, weight_decay=0.0, fused=True)
    seconds, losses = [], []
    for batch in batches:
        ids = torch.tensor(batch)
        begin = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=args.dtype == "bf16"):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        if args.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(trained, args.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - begin)
        losses.append(float(loss))
        if args.on_request and not is_requested(seconds[-1]):
            break
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "step_s": seconds, "losses": losses, "peak_memory_bytes": peak, "gradient_checkpointing": checkpointing,
    }  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
