"""The model that a run's settings mean: its checkpoint, what it is computed in, and the module tree without weights.

`ssdtune.train.prepare` opens a run with it, `ssdtune.train.exporting` the model of a run that has ended.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch

from ssdtune.config.schema import Config
from ssdtune.device.base import Device
from ssdtune.device.dtypes import COMPUTE_DTYPES
from ssdtune.errors import ConfigError
from ssdtune.model.build import BuiltModel, build_model
from ssdtune.model.checkpoint import HfCheckpoint, resolve
from ssdtune.swap.states import Precision

logger = logging.getLogger(__name__)


def open_checkpoint(config: Config, *, weights_needed: bool) -> HfCheckpoint:
    """Open the original model's files.

    Args:
        weights_needed: There must be weights, and pickled ones are converted; else a config.json is enough.

    Raises:
        ConfigError: There is no such model, or it cannot be used.
        FormatError: A file is damaged.
    """
    name = config.model.model_name_or_path
    if not weights_needed and not any(resolve(name).glob("*.safetensors*")):
        return HfCheckpoint.open_config(name)
    return HfCheckpoint.open(name, convert_dir=Path(config.training.output_dir) / "converted")


def choose_dtype(name: str, device: Device) -> torch.dtype:
    """Return the compute dtype.

    Raises:
        ConfigError: A card was asked for a dtype that it lacks.
    """
    if name == "auto":
        halves = (torch.bfloat16, torch.float16)
        return next((dtype for dtype in halves if device.supports(dtype)), torch.float32)
    dtype = COMPUTE_DTYPES[name]
    if not device.supports(dtype):
        if device.torch_device.type != "cpu":
            raise ConfigError(f"{device.name} has no {name} in hardware. Use --dtype fp32 or auto.")
        logger.warning(
            "this CPU has no instructions for %s: it is emulated, many times slower. --dtype auto takes fp32.",
            name,
        )
    return dtype


def for_fp16(config: Config) -> Config:
    """Return the settings for computing in fp16.

    A step is skipped if any gradient of it is not finite, so none may be applied before all are known; and the weights
    that a block computes with are made from those in its slot each time, so that graphs would keep them.
    """
    wrong = {
        "training.clipping: speculative updates before all gradients were looked at":
            config.training.clipping == "speculative",
        "memory.recompute: never would keep fp16 copies of all weights": config.memory.recompute == "never",
        "training.master_weights: false rounds to bf16": not config.training.master_weights,
    }  # fmt: skip
    found = [text for text, is_wrong in wrong.items() if is_wrong]
    if found:
        raise ConfigError(
            f"this does not go with computing in fp16: {'; '.join(found)}. Leave it out, or use --dtype fp32."
        )
    return replace(
        config,
        training=replace(config.training, clipping="deferred"),
        memory=replace(
            config.memory, recompute="cheap" if config.memory.recompute == "cheap" else "always"
        ),
    )


def build(config: Config, checkpoint: HfCheckpoint, dtype: torch.dtype) -> BuiltModel:
    """Build the model, with new adapters or the one to go on training if the settings say so.

    Args:
        dtype: What it computes in.

    Raises:
        UnsupportedModelError: It is no decoder that transformers knows.
        ConfigError: The adapter settings do not fit it.
    """
    # Adapters compute in bf16 over fp32 masters if the model does; without masters in fp32.
    in_bf16 = dtype == torch.bfloat16 and config.training.master_weights
    return build_model(
        checkpoint,
        dtype=dtype,
        attn_implementation=config.model.attn_implementation,
        trust_remote_code=config.model.trust_remote_code,
        lora=config.lora if config.method == "lora" else None,
        adapter=Path(config.model.adapter).expanduser() if config.model.adapter else None,
        adapter_dtype=torch.bfloat16 if in_bf16 else torch.float32,
        seed=config.training.seed,
    )


def precision_of(config: Config) -> Precision:
    """Return which states the settings give trained parts."""
    training = config.training
    return Precision(training.master_weights, training.optim == "adamw_8bit")
