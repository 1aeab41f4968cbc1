"""Loss after a small real training with each kind of optimizer states, next to torch's AdamW.

    python tools/compare_optimizers.py [--steps 128] [--learning-rate 3e-3] [--threads 2] [--seed 0]

The demo's model (2.8 million parameters, random at the start) learns the demo's rows in memory. All runs have
the same start, rows, learning rates and float32 arithmetic in the model; only the optimizer and what it keeps
differ. `--seed 1` takes the rows in another order: so much do losses differ by chance.
"""

import argparse
import contextlib
import io
import json
import tempfile
import time
from pathlib import Path

import torch

from ssdtune.demo import EVAL_FILE, TRAIN_FILE, make_demo_checkpoint
from ssdtune.optim.adamw import adamw_, join_master, split_master, sum_of_squares
from ssdtune.optim.codes import num_scales
from ssdtune.optim.schedule import clip_coefficient, learning_rate

HYPER = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
WEIGHT_DECAY, MAX_GRAD_NORM, BATCH = 0.01, 1.0, 8


class Ours:
    """Our kernel on each parameter; the model computes with what a run would compute with.

    Args:
        weights: "fp32", "split" (the model sees the high halves) or "rounded".
        coded: Moments of 8 bits.
    """

    def __init__(self, parameters, weights: str, coded: bool) -> None:
        self.parameters, self.weights = parameters, weights
        self.states = []
        for parameter in parameters:
            flat = parameter.detach().reshape(-1)
            tensors, scales = [flat.clone(), None], {}
            if weights == "split":
                tensors = list(split_master(flat))
            elif weights == "rounded":
                tensors[0] = flat.bfloat16()
            dtype = torch.uint8 if coded else torch.float32
            tensors += [torch.zeros(flat.numel(), dtype=dtype) for _ in range(2)]
            if coded:
                names = ("exp_avg_scale", "exp_avg_sq_scale")
                scales = {name: torch.zeros(num_scales(flat.numel())) for name in names}
            self.states.append((tensors, scales))
            flat.copy_(tensors[0])

    def step(self, number: int, lr: float, scale: float) -> None:
        for index, (parameter, (tensors, scales)) in enumerate(zip(self.parameters, self.states)):
            options = {"rounding_seed": index} if self.weights == "rounded" else {}
            decay = WEIGHT_DECAY if parameter.dim() > 1 else 0.0
            adamw_(
                *tensors, parameter.grad.reshape(-1), step=number, lr=lr, weight_decay=decay,
                grad_scale=scale, **HYPER, **scales, **options,
            )  # fmt: skip
            parameter.data.reshape(-1).copy_(tensors[0])

    def finish(self) -> None:
        """Give the model the masters, the best weights there are."""
        for parameter, (tensors, _) in zip(self.parameters, self.states):
            if self.weights == "split":
                parameter.data.reshape(-1).copy_(join_master(*tensors[:2]))


class Torchs:
    """torch.optim.AdamW in float32, or on bfloat16 weights, with moments of that type too, as it does then."""

    def __init__(self, parameters, dtype: torch.dtype) -> None:
        self.parameters = parameters
        self.copies = [torch.nn.Parameter(p.detach().to(dtype).clone()) for p in parameters]
        groups = [
            {"params": [c for c in self.copies if c.dim() > 1], "weight_decay": WEIGHT_DECAY},
            {"params": [c for c in self.copies if c.dim() <= 1], "weight_decay": 0.0},
        ]
        betas = (HYPER["beta1"], HYPER["beta2"])
        self.optimizer = torch.optim.AdamW(groups, lr=1.0, betas=betas, eps=HYPER["eps"])
        self._publish()

    def step(self, number: int, lr: float, scale: float) -> None:
        for parameter, copy in zip(self.parameters, self.copies):
            copy.grad = (parameter.grad * scale).to(copy.dtype)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self._publish()

    def finish(self) -> None:
        pass

    def _publish(self) -> None:
        for parameter, copy in zip(self.parameters, self.copies):
            parameter.data.copy_(copy)


# Name, bytes of states and weights that one step reads and writes on SSD per parameter, optimizer. Read are
# weights (for the forward pass, the backward pass and the update) and the rest of the state once; written is all.
RUNS = [
    ("torch AdamW, fp32", None, lambda p: Torchs(p, torch.float32)),
    ("fp32 weights", 28, lambda p: Ours(p, "fp32", False)),
    ("split master (the default in bf16)", 26, lambda p: Ours(p, "split", False)),
    ("fp32 weights, 8-bit moments", 16, lambda p: Ours(p, "fp32", True)),
    ("split master, 8-bit moments", 14, lambda p: Ours(p, "split", True)),
    ("bf16 stochastically rounded", 22, lambda p: Ours(p, "rounded", False)),
    ("bf16 stochastically rounded, 8-bit moments", 10, lambda p: Ours(p, "rounded", True)),
    ("torch AdamW, all in bf16", None, lambda p: Torchs(p, torch.bfloat16)),
]


def tokenized(tokenizer, path: Path) -> list[list[int]]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    texts = [tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in rows]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def loss_of(model, rows: list[list[int]]) -> torch.Tensor:
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    present = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    labels = ids.masked_fill(present == 0, -100)
    return model(input_ids=ids, attention_mask=present, labels=labels).loss


def train(folder: Path, make, rows, held_out, args) -> tuple[float, float]:
    """Return the mean training loss of the last epoch and the loss on held-out rows."""
    from transformers import AutoModelForCausalLM

    with contextlib.redirect_stderr(io.StringIO()):  # progress bars
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = make(parameters)
    order: list[int] = []
    generator = torch.Generator().manual_seed(args.seed)
    losses = []
    for step in range(args.steps):
        if len(order) < BATCH:
            order = torch.randperm(len(rows), generator=generator).tolist()
        batch, order = order[:BATCH], order[BATCH:]
        loss = loss_of(model, [rows[i] for i in batch])
        loss.backward()
        losses.append(loss.item())
        norm = sum(sum_of_squares(p.grad.reshape(-1)) for p in parameters) ** 0.5
        lr = learning_rate("cosine", step, args.steps, args.learning_rate, args.steps // 10)
        optimizer.step(step + 1, lr, clip_coefficient(norm, MAX_GRAD_NORM))
        model.zero_grad()
    optimizer.finish()
    model.eval()
    with torch.no_grad():
        final = loss_of(model, held_out).item()
    epoch = max(len(rows) // BATCH, 1)
    return sum(losses[-epoch:]) / len(losses[-epoch:]), final


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="of the order of rows")
    parser.add_argument("--only", help="runs whose name contains this")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as scratch:
        with contextlib.redirect_stderr(io.StringIO()):
            folder = make_demo_checkpoint(Path(scratch) / "model")
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        rows, held_out = (tokenized(tokenizer, path) for path in (TRAIN_FILE, EVAL_FILE))
        print(f"{args.steps} steps of {BATCH} rows, learning rate {args.learning_rate:g}\n")
        print("| optimizer | bytes/param | last epoch | held out | seconds |")
        print("|---|---|---|---|---|")
        for name, num_bytes, make in RUNS:
            if args.only and args.only not in name:
                continue
            start = time.perf_counter()
            last, final = train(folder, make, rows, held_out, args)
            seconds = time.perf_counter() - start
            print(
                f"| {name} | {num_bytes or ''} | {last:.4f} | {final:.4f} | {seconds:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
