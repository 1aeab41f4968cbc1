"""Names that users of other tools come with, and what becomes of them here.

An alias is accepted with one note; alias and name together are an error. A few names are refused
because guessing their meaning would be worse. Read `ssdtune.config.load` next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_TRUE = ("true", "yes", "on", "1")
_FALSE = ("false", "no", "off", "0")


@dataclass(frozen=True, slots=True)
class Alias:
    """Another name of a setting.

    Attributes:
        target: Flat name of the setting, or "" where the alias only confirms what is so anyway.
        translate: Turns the alias's value into the setting's; None in return means: leave unset.
            It raises ValueError if there is no such value here.
    """

    target: str
    translate: Callable[[Any], Any] | None = None


def _is(value: Any, words: tuple[str, ...]) -> bool:
    return str(value).lower() in words


def _bf16(value: Any) -> str | None:
    if _is(value, _TRUE):
        return "bf16"
    if _is(value, _FALSE):
        return None
    raise ValueError(f"must be true or false, not {value}")


def _fp16(value: Any) -> str | None:
    if _is(value, _TRUE):
        return "fp16"
    if _is(value, _FALSE):
        return None
    raise ValueError(f"must be true or false, not {value}")


def _recompute(value: Any) -> str | None:
    return "never" if _is(value, _FALSE) else None  # memory decides


def _ratio(value: Any) -> Any:
    try:
        share = float(value)
    except (TypeError, ValueError):
        return value  # the setting's own check speaks
    if share >= 1:
        raise ValueError(f"must be below 1, not {value}; for a number of steps use warmup_steps")
    return share


def _resume(value: Any) -> Any:
    if _is(value, _FALSE):
        return None
    return "last" if _is(value, _TRUE) else value


ALIASES: dict[str, Alias] = {
    "lr": Alias("learning_rate"),
    "epochs": Alias("num_train_epochs"),
    "micro_batch_size": Alias("per_device_train_batch_size"),
    "max_seq_length": Alias("max_length"),
    "cutoff_len": Alias("max_length"),
    "warmup_ratio": Alias("warmup_steps", _ratio),
    "torch_dtype": Alias("dtype"),
    "bf16": Alias("dtype", _bf16),
    "fp16": Alias("dtype", _fp16),
    "clip_grad_norm": Alias("max_grad_norm"),
    "lora_rank": Alias("lora_r"),
    "gradient_checkpointing": Alias("recompute", _recompute),
    "resume": Alias("resume_from_checkpoint", _resume),
    "swap_dir": Alias("swap_dirs"),
    "nvme_path": Alias("swap_dirs"),
}

REFUSED: dict[str, str] = {
    "batch_size": (
        '"batch_size" is ambiguous: use "per_device_train_batch_size" (sequences in one '
        'micro-batch) and "gradient_accumulation_steps" (micro-batches per step)'
    ),
}
