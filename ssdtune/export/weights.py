"""Export of a tuned model: the folder that `save_pretrained` would make, one parameter in memory at a time.

Names, sharding and index are those of transformers; each tensor keeps the dtype that it has in the original
checkpoint. Settings, tokenizer and chat templates are copied byte for byte.
bf16 is the rounding of the fp32 master that training computes with: half up, not half to even, so the export
equals the weights that were used. How parameters become checkpoint tensors is in `ssdtune.model.keys`.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from ssdtune.errors import ConfigError
from ssdtune.export.safetensors_writer import MAX_SHARD_BYTES, ShardWriter, Staging
from ssdtune.model.checkpoint import HfCheckpoint
from ssdtune.model.headers import TensorExtent
from ssdtune.model.keys import KeyMap, SaveRule
from ssdtune.model.safetensors_file import TORCH_DTYPES

_TOKENIZER = re.compile(
    r"token|^vocab|^merges|^special_|\.(jinja|model|tiktoken|spm|vocab|bpe)$", re.IGNORECASE
)
_ROUND_ELEMENTS = 1 << 18
_NAN = 0x7FC0

GetTensor = Callable[[str], torch.Tensor]
"""Gives a parameter by its name in the model: float32 or the exported dtype, on the CPU."""
GetRows = Callable[[str], Iterator[torch.Tensor] | None]
"""Gives a parameter that is written as it is in pieces, some rows at a time, in order; None for those that come whole."""


def export_weights(
    output_dir: Path,
    *,
    checkpoint: HfCheckpoint,
    keymap: KeyMap,
    get_tensor: GetTensor,
    get_rows: GetRows = lambda name: None,
    half_up: bool = True,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> int:
    """Write a model folder that `from_pretrained` loads, and return the bytes of its weights.

    Args:
        output_dir: Other files in it stay; weights of an earlier export are replaced once this one is complete.
        checkpoint: The original, for dtypes, buffers and the files around the weights. It is only read.
        get_tensor: Called once for each parameter, block by block in the model's order. The tensor may be
            reused by the next call.
        get_rows: Called before, to get large parameters in pieces instead.
        half_up: How fp32 becomes bf16; see `round_to`.

    Raises:
        CapacityError: The file system has too little space.
        ConfigError: The output folder is the original, or can't be written; a value does not fit into fp16.
        StorageError: A write failed; nothing of the export is left then.
    """
    if output_dir.exists() and output_dir.samefile(checkpoint.path):
        raise ConfigError(
            f"{output_dir} is the original model's folder, which is never written. Name another output_dir."
        )
    tensors = [output for rule in keymap.save_rules for output in rule.outputs]
    with Staging(output_dir) as staging:
        staging.require_space(sum(tensor.num_bytes for tensor in tensors))
        copy_sidecars(checkpoint, staging.path)
        with (
            ShardWriter(
                staging.path,
                tensors,
                num_parameters=keymap.num_parameters,
                max_shard_bytes=max_shard_bytes,
            ) as writer,
            torch.no_grad(),
        ):
            for rule in keymap.save_rules:
                if not _write_rows(rule, writer, get_rows, half_up):
                    _write(rule, writer, checkpoint, keymap, get_tensor, half_up)
            writer.finish()
        staging.commit()
    return writer.total_bytes


def round_to(
    tensor: torch.Tensor, dtype: torch.dtype, *, half_up: bool = True, name: str = "a tensor"
) -> torch.Tensor:
    """Convert to an exported dtype.

    Args:
        half_up: Round fp32 to bf16 as the split master does, halves up in magnitude; otherwise halves to even.

    Raises:
        ConfigError: A finite value is too large for fp16.

    Memory: the result and a few MiB.
    """
    if tensor.dtype == torch.float32 and dtype == torch.bfloat16 and half_up:
        result = torch.empty(tensor.shape, dtype=dtype)
        values = tensor.detach().contiguous().view(-1).numpy()
        target = result.view(-1).view(torch.int16).numpy().view(np.uint16)
        for start in range(0, values.size, _ROUND_ELEMENTS):
            part = slice(start, start + _ROUND_ELEMENTS)
            target[part] = values[part].view(np.uint32) + np.uint32(0x8000) >> np.uint32(16)
            if (nan := np.isnan(values[part])).any():
                target[part][nan] = _NAN
        return result
    result = tensor.to(dtype)
    if dtype == torch.float16 and not torch.equal(result.isfinite(), tensor.isfinite()):
        raise ConfigError(
            f'"{name}" has values up to {tensor.abs().max():.4g} after training, and fp16, as the original model has it, '
            "ends at 65504. Convert the original to bf16 or fp32, then export a checkpoint of this run."
        )
    return result


def read_tensor(extent: TensorExtent) -> torch.Tensor:
    """Read one small tensor of a checkpoint."""
    with extent.path.open("rb") as file:
        file.seek(extent.offset)
        data = bytearray(file.read(extent.num_bytes))
    dtype = TORCH_DTYPES[extent.dtype]
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.view(extent.shape)


def copy_sidecars(checkpoint: HfCheckpoint, target: Path, *, tokenizer_only: bool = False) -> None:
    """Copy settings, tokenizer, chat templates, licences and code."""
    for relative in checkpoint.sidecar_files():
        if tokenizer_only and not _TOKENIZER.search(relative.name):
            continue
        (target / relative).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(checkpoint.path / relative, target / relative)


def _write_rows(rule: SaveRule, writer: ShardWriter, get_rows: GetRows, half_up: bool) -> bool:
    """Write a tensor that comes in pieces; say whether it does."""
    pieces = get_rows(rule.rule.inputs[0]) if rule.rule.converter is None else None
    if pieces is None:
        return False
    (output,) = rule.outputs
    dtype = TORCH_DTYPES[output.dtype]
    writer.write_rows(
        output.name, (round_to(piece, dtype, half_up=half_up, name=output.name) for piece in pieces)
    )
    return True


def _write(
    rule: SaveRule,
    writer: ShardWriter,
    checkpoint: HfCheckpoint,
    keymap: KeyMap,
    get_tensor: GetTensor,
    half_up: bool,
) -> None:
    """Write the tensors that one rule makes."""
    inputs = []
    for name in rule.rule.inputs:
        if name not in keymap.buffers:
            inputs.append(get_tensor(name))
        elif name in keymap.initial:
            inputs.append(keymap.initial[name])
        else:
            source = keymap.load_rules[name]
            made = source.apply(
                [read_tensor(checkpoint.tensors[tensor]) for tensor in source.inputs],
                keymap.context,
            )
            inputs.append(made[name])
    if rule.places is not None:
        parts = {
            output.name: place.view(inputs[0]) for output, place in zip(rule.outputs, rule.places)
        }
    else:
        parts = rule.rule.apply(inputs, keymap.context)
    for output in rule.outputs:
        dtype = TORCH_DTYPES[output.dtype]
        writer.write(
            output.name, round_to(parts[output.name], dtype, half_up=half_up, name=output.name)
        )
