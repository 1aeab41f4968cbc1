"""PEFT adapters: saving one as peft does, reading one, and merging one into its base model.

Merging streams: one base parameter at a time is read in fp32, the adapter's update is added in fp32 with
peft's own formula, and the sum is rounded to the parameter's dtype (halves to even, as torch does; there is no
split master here). The base folder is only read.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ssdtune.errors import ConfigError, FormatError
from ssdtune.export.safetensors_writer import MAX_SHARD_BYTES, ShardWriter, Staging
from ssdtune.export.weights import copy_sidecars, export_weights, read_tensor
from ssdtune.model.build import ADAPTER
from ssdtune.model.checkpoint import HfCheckpoint
from ssdtune.model.headers import read_header
from ssdtune.model.keys import KeyMap
from ssdtune.model.safetensors_file import DTYPE_NAMES, SavedTensor
from ssdtune.model.source import WeightSource

_PREFIX = "base_model.model."

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def export_adapter(
    output_dir: Path,
    *,
    peft_model: Any,
    tensors: Mapping[str, torch.Tensor],
    base_model_name_or_path: str,
    checkpoint: HfCheckpoint | None = None,
) -> int:
    """Write an adapter folder that `PeftModel.from_pretrained` loads, and return the bytes of its weights.

    Args:
        peft_model: The PeftModel; its parameters may be on the meta device.
        tensors: The trained tensors by their names in `peft_model`, or in its base model. Where an embedding is a target, peft saves
            its base weights as well: give those too if they shall be there.
        base_model_name_or_path: Written into the settings; peft finds the base model by it.
        checkpoint: Its tokenizer files are copied beside the adapter, if given.

    Raises:
        ValueError: A tensor of the adapter is not among `tensors`, or has another shape.
        ConfigError: The folder can't be written.
    """
    from peft.utils import get_peft_model_state_dict

    config = copy.deepcopy(peft_model.peft_config[ADAPTER])
    tensors = {_PREFIX + name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}
    own = {
        name: parameter
        for name, parameter in peft_model.named_parameters(remove_duplicate=False)
        if _belongs(name)
    }
    for name, parameter in own.items():
        if name not in tensors or tensors[name].shape != parameter.shape or not parameter.numel():
            found = list(tensors[name].shape) if name in tensors else "missing"
            raise ValueError(f'adapter tensor "{name}" {list(parameter.shape)} is {found}')
    state = get_peft_model_state_dict(
        peft_model,
        state_dict=dict(tensors),
        adapter_name=ADAPTER,
        save_embedding_layers=any(".lora_embedding_" in name for name in own),
    )
    announced = [
        SavedTensor(name, tuple(tensor.shape), DTYPE_NAMES[tensor.dtype])
        for name, tensor in state.items()
    ]
    config.base_model_name_or_path = base_model_name_or_path
    config.inference_mode = True
    mapping = None
    if config.task_type is None:
        base = type(peft_model.get_base_model())
        mapping = {"base_model_class": base.__name__, "parent_library": base.__module__}
    with Staging(output_dir, stem="adapter_model") as staging:
        if checkpoint is not None:
            copy_sidecars(checkpoint, staging.path, tokenizer_only=True)
        config.save_pretrained(str(staging.path), auto_mapping_dict=mapping)
        with ShardWriter(
            staging.path, announced, stem="adapter_model", max_shard_bytes=1 << 62
        ) as writer:
            for name, tensor in state.items():
                writer.write(name, tensor)
            writer.finish()
        staging.commit()
    return writer.total_bytes


def read_adapter_config(adapter_dir: Path) -> Any:
    """Return the LoraConfig of an adapter folder.

    Raises:
        ConfigError: The folder holds no LoRA adapter.
        FormatError: Its settings are damaged.
    """
    from peft import LoraConfig, PeftConfig

    path = adapter_dir / CONFIG
    if not path.is_file():
        raise ConfigError(f"{adapter_dir} is no PEFT adapter: it has no {CONFIG}. Check the path.")
    try:
        json.loads(path.read_bytes())
    except ValueError as error:
        raise FormatError(f"{path} is not valid JSON: {error}. Copy the adapter again.") from error
    config = PeftConfig.from_pretrained(str(adapter_dir))
    if type(config) is not LoraConfig:
        raise ConfigError(f"{path}: peft_type is {config.peft_type}; only LORA is supported.")
    return config


def read_adapter(peft_model: Any, adapter_dir: Path) -> dict[str, torch.Tensor]:
    """Return an adapter's tensors by their names in the PeftModel (which isn't changed), in their own dtype.

    Raises:
        FormatError: The file is damaged, or does not hold exactly the adapter's tensors.
    """
    from peft.utils import set_peft_model_state_dict

    path = adapter_dir / WEIGHTS
    if not path.is_file():
        raise FormatError(f"{adapter_dir} has no {WEIGHTS}. Copy the adapter again.")
    extents, _ = read_header(path)
    state = {name: read_tensor(extent) for name, extent in extents.items()}
    names: dict[str, torch.Tensor] = {}

    def take(state_dict: dict[str, torch.Tensor], **_: object) -> Any:
        names.update(state_dict)
        return nn.modules.module._IncompatibleKeys([], [])

    # peft translates the names on the way to load_state_dict; nothing else of it is wanted here.
    peft_model.load_state_dict = take
    try:
        set_peft_model_state_dict(peft_model, state, adapter_name=ADAPTER)
    except (KeyError, RuntimeError) as error:
        raise FormatError(
            f"{path} does not fit its {CONFIG} or the base model: {error}."
        ) from error
    finally:
        del peft_model.load_state_dict
    shapes = {name: tensor.shape for name, tensor in peft_model.state_dict().items()}
    missing = sorted({name for name in shapes if _belongs(name)} - names.keys())
    unknown = sorted(names.keys() - shapes.keys())
    hint = "Name the base model that the adapter was made for."
    if missing or unknown:
        what = f"lacks {missing[0]}" if missing else f"holds {unknown[0]}, which the model has not"
        raise FormatError(
            f"{path} {what} ({len(missing)} missing, {len(unknown)} unknown tensors). {hint}"
        )
    for name, tensor in names.items():
        if tensor.shape != shapes[name]:
            raise FormatError(
                f'{path}: "{name}" has shape {list(tensor.shape)}, and the model with the settings of {CONFIG} '
                f"{list(shapes[name])}. {hint}"
            )
    return names


def merge_adapter(
    output_dir: Path,
    *,
    adapter_dir: Path,
    model: Any,
    checkpoint: HfCheckpoint,
    keymap: KeyMap,
    source: WeightSource,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> int:
    """Write the base model with the adapter merged in, and return the bytes of its weights.

    Args:
        model: The base model that `keymap` was built of, on the meta device; peft wraps it in place.
        source: Reads the base weights.

    Raises:
        ConfigError: Not a LoRA adapter that can be merged, such as DoRA, or one of a tied weight.
        FormatError: The adapter is damaged or belongs to another model.
    """
    from peft import get_peft_model

    config = read_adapter_config(adapter_dir)
    for option in ("use_dora", "use_qalora", "use_bdlora", "trainable_token_indices", "alora_invocation_tokens",
                   "velora_config", "kasa_config", "monteclora_config"):  # fmt: skip
        if getattr(config, option, None):
            raise ConfigError(
                f"{adapter_dir / CONFIG} has {option}; such adapters can't be merged here. Use peft's "
                "merge_and_unload."
            )
    config.inference_mode = True
    config.init_lora_weights = True  # anything else would look at the base weights
    config.base_model_name_or_path = model.name_or_path  # else peft warns that it was renamed
    try:
        peft_model = get_peft_model(model, config)
    except ValueError as error:
        raise ConfigError(f"{adapter_dir} does not fit the base model: {error}") from error
    tensors = read_adapter(peft_model, adapter_dir)
    tensors = {name: tensor.to(torch.float32) for name, tensor in tensors.items()}
    peft_model.load_state_dict(tensors, strict=False, assign=True)
    root = peft_model.base_model.model
    _refuse_tied(root, keymap, adapter_dir)

    def get_tensor(name: str) -> torch.Tensor:
        master = torch.empty(keymap.shapes[name], dtype=torch.float32)
        source.load([name], {name: master})
        return _merged(root, name, master)

    return export_weights(
        output_dir,
        checkpoint=checkpoint,
        keymap=keymap,
        get_tensor=get_tensor,
        half_up=False,
        max_shard_bytes=max_shard_bytes,
    )


def _belongs(name: str) -> bool:
    return f".{ADAPTER}" in name and (".lora_" in name or ".modules_to_save." in name)


def _locate(root: nn.Module, name: str) -> tuple[nn.Module, str, list[Any]]:
    """Return the module that holds a base parameter now, its attribute, and the LoRA layers around it."""
    from peft.tuners.lora import LoraLayer
    from peft.utils import ModulesToSaveWrapper

    *path, leaf = name.split(".")
    module, layers = root, []
    for part in [*path, ""]:
        while isinstance(module, LoraLayer | ModulesToSaveWrapper):
            if isinstance(module, LoraLayer):
                layers.append(module)
                module = module.base_layer
            else:
                module = module.modules_to_save[ADAPTER]
        if part:
            module = getattr(module, part)
    return module, leaf, layers


def _merged(root: nn.Module, name: str, master: torch.Tensor) -> torch.Tensor:
    """Return the merged parameter, float32; `master` is the base parameter and is overwritten."""
    from peft.tuners.lora.layer import ParamWrapper

    module, leaf, layers = _locate(root, name)
    parameter = getattr(module, leaf)
    if parameter.device.type != "meta":  # in modules_to_save, or a trained bias
        master.copy_(parameter)
    for layer in layers:
        if isinstance(layer, ParamWrapper):
            if layer.parameter_name != leaf:
                continue
            # Its delta is made in the dtype and on the device of the parameter.
            setattr(module, leaf, nn.Parameter(master, requires_grad=False))
            delta = layer.get_delta_weight(ADAPTER)
            setattr(module, leaf, parameter)
            master.add_(delta)
        elif leaf == "weight":
            master.add_(layer.get_delta_weight(ADAPTER))
        elif leaf == "bias" and layer.lora_bias.get(ADAPTER):
            master.add_(layer.lora_B[ADAPTER].bias, alpha=layer.scaling[ADAPTER])
    return master


def _refuse_tied(root: nn.Module, keymap: KeyMap, adapter_dir: Path) -> None:
    for alias, name in keymap.aliases.items():
        for tied in (alias, name):
            module, leaf, layers = _locate(root, tied)
            if layers or getattr(module, leaf).device.type != "meta":
                raise ConfigError(
                    f'the adapter in {adapter_dir} trains "{tied}", which the base model shares as "{alias}" and '
                    f'"{name}". Merging would untie them; use the adapter unmerged.'
                )
