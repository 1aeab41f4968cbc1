"""The yardstick: plain in-memory training with transformers, peft and `torch.optim.AdamW`.

`train_in_memory` takes the same flat settings as `ssdtune.load_config` (leaf names, such as
`learning_rate` or `lora_r`) and the same rows, in file order. It uses nothing of ssdtune but `stage_seed`,
the published rule for the random state in front of each block, without which dropout could not be compared.
It is written to be read, not to be fast or general: no shuffling, no packing, one process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Trainer, get_scheduler

from ssdtune.train.seeds import stage_seed

Row = Mapping[str, Sequence[int]]

DEFAULTS: dict[str, Any] = {
    "method": "full",
    "dtype": "fp32",
    "adapter": None,
    "attn_implementation": None,
    "trust_remote_code": False,
    "padding_side": "right",  # for ssdtune the tokenizer says it
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": None,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 1,
    "max_steps": None,
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "eval_steps": None,
    "seed": 42,
    "lora_r": 8,
    "lora_alpha": 16,
    "lora_dropout": 0.0,
    "target_modules": "all-linear",
    "use_rslora": False,
    "bias": "none",
    "modules_to_save": None,
}
"""The settings that change numbers, with ssdtune's documented defaults."""


@dataclass
class ReferenceResult:
    """What the in-memory run gave; all lists have one entry for each optimizer step.

    Attributes:
        losses: Cross entropy averaged over the learned tokens of the step, before its update.
        grad_norms: Global norm before clipping.
        lrs: Learning rate that the update used.
        learned_tokens: Tokens whose prediction counted.
        eval_losses: (steps done, token-weighted loss) of each evaluation.
        initial: Trained tensors before the first step, float32.
        state: The same after the last one. Keys are those of `named_parameters` of the model that
            transformers loads (full), or of a saved adapter file (lora).
        clipped: Steps at which clipping struck.
        skipped: Steps without an update, because the gradients were not finite.
    """

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    lrs: list[float] = field(default_factory=list)
    learned_tokens: list[int] = field(default_factory=list)
    eval_losses: list[tuple[int, float]] = field(default_factory=list)
    initial: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)

    clipped: list[int] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)


def round_half_up(master: Tensor) -> Tensor:
    """Round float32 to bfloat16, ties away from zero: the high half of `bits + 0x8000`."""
    high = (master.detach().view(torch.int32) + 0x8000) >> 16
    return high.to(torch.int16).view(torch.bfloat16)


def train_in_memory(
    model_dir: Path,
    rows: Sequence[Any],
    settings: Mapping[str, Any],
    *,
    eval_rows: Sequence[Row] = (),
    is_windows: bool = False,
    compute_dtype: torch.dtype | None = None,
) -> ReferenceResult:
    """Train the checkpoint on the rows, as a user of transformers and peft would.

    Args:
        rows: The rows, used in this order in every epoch; or, if `is_windows`, the list of rows of each step.
        settings: Overrides of `DEFAULTS`; other keys (paths, budgets, I/O) are ignored.
        compute_dtype: float64 measures how much of a float32 run is rounding noise.
    """
    given = DEFAULTS | {key: value for key, value in settings.items() if key in DEFAULTS}
    dtype = torch.bfloat16 if given["dtype"] == "bf16" else torch.float32
    model = _load(model_dir, given, compute_dtype or dtype)
    model.train()
    weights = _MasterWeights(model, model_dir, given)
    optimizer = torch.optim.AdamW(
        _groups(model, weights, given["weight_decay"]),
        lr=given["learning_rate"],
        betas=(given["adam_beta1"], given["adam_beta2"]),
        eps=given["adam_epsilon"],
    )

    batch_size = given["per_device_train_batch_size"]
    if is_windows:
        windows = [_cut(window, batch_size) for window in rows]
        total = len(windows)
    else:
        windows = _cut(_cut(rows, batch_size), given["gradient_accumulation_steps"])
        total = given["max_steps"] or math.ceil(len(windows) * given["num_train_epochs"])
    warmup = given["warmup_steps"]
    scheduler = get_scheduler(
        given["lr_scheduler_type"],
        optimizer,
        num_warmup_steps=int(warmup) if warmup >= 1 else math.ceil(total * warmup),
        num_training_steps=total,
    )
    seeds = _StageSeeds(model, given["seed"])
    result = ReferenceResult(initial=weights.export())
    for step in range(total):
        window = [_collate(rows, given["padding_side"]) for rows in windows[step % len(windows)]]
        learned = sum(_count_learned(batch) for batch in window)
        loss = 0.0
        for micro_batch, batch in enumerate(window):
            seeds.start(step, micro_batch)
            out = model(**batch, use_cache=False, num_items_in_batch=torch.tensor(learned))
            out.loss.backward()
            loss += out.loss.item()
            weights.accumulate()
        limit = given["max_grad_norm"]
        norm = float(nn.utils.clip_grad_norm_(weights.masters.values(), limit or math.inf))
        if limit and norm > limit:
            result.clipped.append(step)
        result.losses.append(loss)
        result.grad_norms.append(norm)
        result.lrs.append(scheduler.get_last_lr()[0])
        result.learned_tokens.append(learned)
        if math.isfinite(norm):
            optimizer.step()
        else:
            result.skipped.append(step)
        scheduler.step()
        weights.publish()
        done = step + 1
        if eval_rows and done % (given["eval_steps"] or len(windows)) == 0:
            result.eval_losses.append((done, _evaluate(model, eval_rows, given)))
    seeds.remove()
    result.state = weights.export()
    return result


def _load(model_dir: Path, given: Mapping[str, Any], dtype: torch.dtype) -> nn.Module:
    """Load the model, with a new or an existing adapter if asked."""
    model = AutoModelForCausalLM.from_pretrained(
        model_dir,
        dtype=dtype,
        attn_implementation=given["attn_implementation"],
        trust_remote_code=given["trust_remote_code"],
    )
    if given["method"] == "full":
        return model
    if given["adapter"]:
        return PeftModel.from_pretrained(model, given["adapter"], is_trainable=True)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=given["lora_r"],
        lora_alpha=given["lora_alpha"],
        lora_dropout=given["lora_dropout"],
        target_modules=given["target_modules"],
        use_rslora=given["use_rslora"],
        bias=given["bias"],
        modules_to_save=given["modules_to_save"],
    )
    torch.manual_seed(given["seed"])
    return get_peft_model(model, config)


class _MasterWeights:
    """The float32 tensors that AdamW updates, and their relation to the model's parameters.

    In fp32 they are the parameters themselves. In bf16 they are apart: the model holds their rounding, each
    micro-batch's bf16 gradient is added to a float32 one, and `publish` rounds the updated masters again. The
    two gradients of a tied embedding are added in float32 too; autograd would round their sum to bf16, so the
    head gets a parameter of its own there, a twin that always equals the embedding.
    """

    def __init__(self, model: nn.Module, model_dir: Path, given: Mapping[str, Any]) -> None:
        self._model = model
        self._lora = given["method"] == "lora"
        self._trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.masters = dict(self._trained)
        self._twin: tuple[str, nn.Parameter] | None = None
        if given["dtype"] != "bf16":
            return
        embedding = model.get_input_embeddings().weight
        head = model.get_output_embeddings()
        if embedding.requires_grad and head.weight is embedding:
            name = next(n for n, p in self._trained.items() if p is embedding)
            head.weight = nn.Parameter(embedding.detach().clone())
            self._twin = (name, head.weight)
        # A float32 checkpoint gives the masters all its bits.
        exact = (
            {} if self._lora else dict(_load(model_dir, given, torch.float32).named_parameters())
        )
        for name, parameter in self._trained.items():
            if ".lora_" in name:  # new ones are exact, and compute in bf16 as under autocast
                exact[name] = parameter.detach().clone()
                parameter.data = parameter.data.bfloat16()
        for name, parameter in self._trained.items():
            if parameter.dtype == torch.bfloat16:
                master = exact.get(name, parameter).detach().float().clone()
                self.masters[name] = nn.Parameter(master)
        self.publish()

    def accumulate(self) -> None:
        """Add the gradients of one micro-batch in float32."""
        pairs = list(self._trained.items())
        if self._twin:
            pairs.append(self._twin)
        for name, parameter in pairs:
            master = self.masters[name]
            if master is parameter or parameter.grad is None:
                continue
            gradient = parameter.grad.float()
            master.grad = gradient if master.grad is None else master.grad + gradient
            parameter.grad = None

    def publish(self) -> None:
        """Give the model the updated weights and forget the gradients."""
        for name, parameter in self._trained.items():
            master = self.masters[name]
            master.grad = None
            if master is not parameter:
                parameter.data.copy_(round_half_up(master))
        if self._twin:
            name, parameter = self._twin
            parameter.data.copy_(self._trained[name])

    def export(self) -> dict[str, Tensor]:
        """Return the trained tensors as float32 copies under the names that a loaded result has."""
        tensors: dict[str, Tensor] = {name: master.data for name, master in self.masters.items()}
        if self._lora:
            # peft's own function decides on names, and drops what it does not save
            rounded = {name: parameter.data for name, parameter in self._trained.items()}
            saved = get_peft_model_state_dict(self._model)
            by_place = {value.data_ptr(): name for name, value in rounded.items()}
            tensors = {
                key: tensors[by_place[value.data_ptr()]] if value.data_ptr() in by_place else value
                for key, value in saved.items()
            }
        return {name: tensor.detach().float().clone() for name, tensor in tensors.items()}


class _StageSeeds:
    """Hooks that seed torch's generator in front of each part of a forward pass."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._seed = seed
        self._place: tuple[int, int] | None = None
        blocks = find_blocks(model)
        self._hooks = [
            block.register_forward_pre_hook(lambda *_, stage=index + 1: self._set(stage))
            for index, block in enumerate(blocks)
        ]
        last = len(blocks) + 1
        self._hooks.append(blocks[-1].register_forward_hook(lambda *_: self._set(last)))

    def start(self, step: int, micro_batch: int) -> None:
        """Announce a forward pass; what lies before the blocks is stage 0."""
        self._place = (step, micro_batch)
        self._set(0)

    def remove(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()

    def _set(self, stage: int) -> None:
        if self._place is not None and torch.is_grad_enabled():
            torch.manual_seed(stage_seed(self._seed, *self._place, stage))


def find_blocks(model: nn.Module) -> nn.ModuleList:
    """Return the model's list of decoder blocks."""
    depth = model.config.num_hidden_layers
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == depth]
    return next(m for m in lists if any(True for _ in m[0].parameters()))


def _groups(model: nn.Module, weights: _MasterWeights, decay: float) -> list[dict[str, Any]]:
    """Make AdamW's two groups by the Trainer's rule."""
    decayed = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    groups = []
    for wanted, value in ((True, decay), (False, 0.0)):
        members = [m for n, m in weights.masters.items() if (n in decayed) == wanted]
        if members:
            groups.append({"params": members, "weight_decay": value})
    return groups


def _cut(items: Sequence[Any], size: int) -> list[Any]:
    """Cut a sequence into pieces of a size; the last may be shorter."""
    return [items[start : start + size] for start in range(0, len(items), size)]


def _collate(rows: Sequence[Row], side: str) -> dict[str, Tensor]:
    """Pad rows to the longest one; `input_ids`, `attention_mask` and `labels`, int64 [B, S]."""
    longest = max(len(row["input_ids"]) for row in rows)

    def pad(values: Sequence[int], filler: int) -> list[int]:
        rest = [filler] * (longest - len(values))
        return [*rest, *values] if side == "left" else [*values, *rest]

    return {
        "input_ids": torch.tensor([pad(row["input_ids"], 0) for row in rows]),
        "attention_mask": torch.tensor([pad([1] * len(row["input_ids"]), 0) for row in rows]),
        "labels": torch.tensor([pad(row["labels"], -100) for row in rows]),
    }


def _count_learned(batch: Mapping[str, Tensor]) -> int:
    return int((batch["labels"][:, 1:] != -100).sum())


def _evaluate(model: nn.Module, rows: Sequence[Row], given: Mapping[str, Any]) -> float:
    """Return the token-weighted mean loss over the held-out rows."""
    size = given["per_device_eval_batch_size"] or given["per_device_train_batch_size"]
    model.eval()
    total, tokens = 0.0, 0
    with torch.no_grad():
        for start in range(0, len(rows), size):
            batch = _collate(rows[start : start + size], given["padding_side"])
            out = model(**batch, use_cache=False, num_items_in_batch=torch.tensor(1))
            total += out.loss.item()
            tokens += _count_learned(batch)
    model.train()
    return total / tokens
