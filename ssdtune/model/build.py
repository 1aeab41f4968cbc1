"""Build a causal language model without its weights: the module tree on the meta device, buffers for real.

With LoRA the adapters are put in by peft; their first values, which peft draws at random, are kept.
Nothing of the base weights is read here. Read `ssdtune.model.layout` for how parameters become units and
`ssdtune.model.blocks` for how the model is run in pieces.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ssdtune.config.schema import LoraSettings
from ssdtune.errors import ConfigError, SsdtuneError, UnsupportedModelError, first_line
from ssdtune.model.keys import KeyMap

if TYPE_CHECKING:
    from pathlib import Path

    from peft import PeftModel
    from transformers import PreTrainedModel

    from ssdtune.model.checkpoint import HfCheckpoint

ADAPTER = "default"
"""What peft calls an adapter unless it is told otherwise."""
LARGEST_SIZES = {"num_hidden_layers": 10**4, "hidden_size": 10**6, "vocab_size": 10**8}
"""What no model has more of; with mistyped sizes building would take all memory, or never end."""


@dataclass
class BuiltModel:
    """A model without weights.

    Attributes:
        model: The causal language model, parameters on meta; peft's layers inside if there is an adapter.
        peft: The peft wrapper around it, None for full fine-tuning.
        keymap: How the checkpoint's tensors make the parameters of the model without adapters.
        trained: Names (in `model`) of the parameters that are trained.
        initial: First values of the parameters that no checkpoint of the base has (adapters), fp32 on CPU; empty if
            the folder has no weights.
        decay: Names of the parameters that weight decay applies to.
    """

    model: PreTrainedModel
    peft: PeftModel | None
    keymap: KeyMap
    trained: frozenset[str]
    decay: frozenset[str]
    initial: dict[str, torch.Tensor] = field(default_factory=dict)


def base_name(name: str) -> str:
    """Return the name that a parameter of a model with adapters has in the base model."""
    name = name.replace("base_layer.", "").replace("original_module.", "")
    return name.replace(f"modules_to_save.{ADAPTER}.", "")


def build_model(
    checkpoint: HfCheckpoint,
    *,
    dtype: torch.dtype,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    lora: LoraSettings | None = None,
    adapter: Path | None = None,
    adapter_dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> BuiltModel:
    """Build the model of a checkpoint folder.

    Args:
        checkpoint: The opened folder; its tensors, if it has some, are matched with the model's parameters.
        dtype: Compute dtype of the weights (some modules insist on fp32, as transformers lets them).
        lora: Put in new adapters.
        adapter: Folder of an adapter to go on training, instead of new ones.
        adapter_dtype: Compute dtype of the adapters' matrices. In bf16, as under autocast, their products take half the
            time of fp32 ones.
        seed: Seeds peft's first values, as torch.manual_seed before peft.get_peft_model does.

    Raises:
        UnsupportedModelError: Not a decoder that transformers knows as a causal language model.
    """
    from transformers import AutoConfig

    path = checkpoint.path
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        refuse_unsuitable(path / "config.json", config)
        options = {"attn_implementation": attn_implementation} if attn_implementation else {}
        model = empty_model(config, dtype, trust_remote_code=trust_remote_code, **options)
    except SsdtuneError:
        raise
    except Exception as error:  # whatever the code of the model thinks of such a configuration
        if "auto_map" in checkpoint.config and not trust_remote_code:
            raise UnsupportedModelError(
                f"{path}: the model brings its own Python code, which is not run unasked. Read it, and set "
                "trust_remote_code: true if you trust it."
            ) from error
        raise UnsupportedModelError(
            f"{path}: transformers cannot build this as a causal language model: {_shortened(error)}"
        ) from error
    keymap = KeyMap.build(model, checkpoint) if checkpoint.tensors else KeyMap.of_config(model)
    _keep_in_fp32(model, dtype)
    if lora is None and adapter is None:
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        return BuiltModel(model, None, keymap, frozenset(_names(model)), _decayed(model))
    # A plan from a config alone needs no values, and for the largest models they take longer than all the rest.
    draw = bool(checkpoint.tensors)
    return _with_adapter(model, keymap, lora, adapter, adapter_dtype, seed, draw)


def empty_model(config: Any, dtype: torch.dtype, **options: Any) -> PreTrainedModel:
    """Return the causal language model of a configuration, parameters on meta, buffers for real.

    Args:
        config: As transformers reads it; its cache is switched off.
        dtype: Compute dtype of the weights.
        **options: Others of `AutoModelForCausalLM.from_config`.
    """
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    config.use_cache = False
    with init_empty_weights(include_buffers=False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, **options)
    return model


def _shortened(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:300]}..."


def refuse_unsuitable(file: Path, config: Any) -> None:
    """Refuse what cannot be run block by block, by what the configuration says.

    Args:
        file: Where it was read.
        config: As transformers reads it.

    Raises:
        UnsupportedModelError: It is such a model; names the reason.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    name = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{file}: {name} is an encoder-decoder model; ssdtune trains decoders only."
        )
    own_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not own_code:
        raise UnsupportedModelError(
            f"{file}: {name} is no causal language model of transformers (AutoModelForCausalLM); ssdtune trains "
            "decoder-only language models."
        )
    reasons = []
    text = config.get_text_config()
    for key, largest in LARGEST_SIZES.items():
        size = getattr(text, key, None)
        if size is not None and not (isinstance(size, int) and 1 <= size <= largest):
            raise UnsupportedModelError(
                f"{file}: {key} is {size!r}; it must be a whole number from 1 to {largest:.0e}."
            )
    heads, shared = (
        getattr(text, key, None) for key in ("num_attention_heads", "num_key_value_heads")
    )
    if isinstance(heads, int) and isinstance(shared, int) and shared and heads % shared:
        raise UnsupportedModelError(
            f"{file}: num_attention_heads is {heads}, which is no multiple of num_key_value_heads, {shared}."
        )
    # Encoders are built as language models too, but their tokens see those that they should predict.
    if getattr(config, "is_decoder", True) is False and not name.startswith("gpt_"):
        reasons.append("its tokens see later ones (is_decoder is false): it is an encoder")
    if (
        getattr(config, "vision_config", None) is not None
        or getattr(config, "audio_config", None) is not None
    ):
        reasons.append("it has a vision or audio tower")
    if getattr(config, "num_kv_shared_layers", 0):
        reasons.append("its layers share keys and values (num_kv_shared_layers)")
    if getattr(config, "output_router_logits", False):
        reasons.append(
            "its loss needs the router logits of all layers (output_router_logits); set it to false"
        )
    if getattr(config, "layerdrop", 0.0):
        reasons.append("it drops layers at random (layerdrop); set it to 0")
    if reasons:
        raise UnsupportedModelError(
            f"{file}: {name} cannot be trained block by block: {'; '.join(reasons)}."
        )


def _keep_in_fp32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Give parameters that the model keeps in fp32 that dtype, as from_pretrained does."""
    if dtype == torch.float32:
        return
    patterns = [
        re.escape(key).replace(r"\*", ".*") for key in model._keep_in_fp32_modules_strict or ()
    ]
    if not patterns:
        return
    matcher = re.compile(r"(?:^|\.)(?:" + "|".join(patterns) + r")(?:$|\.)")
    for name, parameter in model.named_parameters():
        if matcher.search(name):
            parameter.data = parameter.data.float()  # meta stays meta


def _names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


def _decayed(model: nn.Module) -> frozenset[str]:
    """Return the parameters that transformers' trainer decays: no biases, no norms."""
    forbidden = [re.compile(p) for p in (
        r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)",
    )]  # fmt: skip
    norms = {prefix for prefix, module in model.named_modules() if isinstance(module, nn.LayerNorm)}
    decayed = set()
    for name in _names(model):
        parent = name.rpartition(".")[0]
        if parent not in norms and not any(pattern.search(name.lower()) for pattern in forbidden):
            decayed.add(name)
    return frozenset(decayed)


def _with_adapter(
    model: PreTrainedModel,
    keymap: KeyMap,
    lora: LoraSettings | None,
    adapter: Path | None,
    adapter_dtype: torch.dtype,
    seed: int,
    draw: bool,
) -> BuiltModel:
    from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model

    if draw or adapter is not None:
        # peft draws its first values on the device of the base weights. Weights of stride 0 on the CPU take no
        # memory and make it draw what it would for a model in memory.
        _replace_parameters(model, lambda p: torch.zeros((), dtype=p.dtype).expand(p.shape))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if adapter is not None:
                settings = PeftConfig.from_pretrained(str(adapter))
                if settings.peft_type != "LORA":
                    raise ConfigError(f"{adapter}: adapter type {settings.peft_type} is not LORA.")
                peft = PeftModel.from_pretrained(model, str(adapter), is_trainable=True)
            else:
                assert lora is not None
                torch.manual_seed(seed)
                settings = LoraConfig(
                    task_type="CAUSAL_LM", r=lora.r, lora_alpha=lora.lora_alpha,
                    lora_dropout=lora.lora_dropout, target_modules=lora.target_modules,
                    use_rslora=lora.use_rslora, bias=lora.bias, modules_to_save=lora.modules_to_save,
                )  # fmt: skip
                peft = get_peft_model(model, settings, low_cpu_mem_usage=not draw)
    except SsdtuneError:
        raise
    except Exception as error:  # whatever peft and the layers think of them, memory included
        raise ConfigError(f"peft refuses these adapter settings: {first_line(error)}") from error
    inner = peft.get_base_model()
    trained, initial = set(), {}
    for name, parameter in inner.named_parameters():
        if parameter.requires_grad:
            trained.add(name)
            if adapter is not None or (draw and _is_new(name)):
                initial[name] = parameter.detach().float().clone()
        if _is_new(name):
            parameter.data = parameter.data.to(adapter_dtype)
    _replace_parameters(inner, lambda p: torch.empty_like(p, device="meta"))
    if not trained:
        raise ConfigError("the adapter settings train nothing; check target_modules.")
    return BuiltModel(inner, peft, keymap, frozenset(trained), _decayed(inner), initial)


def _replace_parameters(model: nn.Module, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Put other tensors in the place of all parameters; tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is not None:
                if id(old) not in made:
                    made[id(old)] = nn.Parameter(
                        make(old.detach()), requires_grad=old.requires_grad
                    )
                module._parameters[name] = made[id(old)]


def _is_new(name: str) -> bool:
    """Say whether peft made the parameter, so that no base checkpoint has it."""
    return ".lora_" in name
