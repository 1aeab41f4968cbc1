"""Trying a model the ordinary way: loaded whole by transformers (and peft), nothing of ssdtune in it.

That makes it the independent judge of what a run exported. It needs the memory that the model takes; for
larger ones use any inference program. Fine-tuning itself is in `ssdtune.train.finetune`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssdtune.config.schema import Config
from ssdtune.errors import CapacityError, ConfigError, FormatError, SsdtuneError, first_line
from ssdtune.hardware.memory import available_host_memory
from ssdtune.model.checkpoint import HfCheckpoint, resolve
from ssdtune.model.headers import read_header
from ssdtune.units import format_memory


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Mean loss over all learned tokens of a file, in nats per token."""

    model: str
    eval_file: str
    num_rows: int
    num_learned_tokens: int
    loss: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return dataclasses.asdict(self)

    def text(self) -> str:
        """Return one line for people."""
        return (
            f"loss {self.loss:.4f} over {self.num_learned_tokens} learned tokens "
            f"of {self.num_rows} rows ({self.eval_file})"
        )


def check_folder(folder: str) -> HfCheckpoint:
    """Look at a model's or adapter's files, from their headers alone, and return the (base) model's.

    Raises:
        ConfigError: There is no such model, or it is a training checkpoint.
        FormatError: A file is damaged.
    """
    path = resolve(folder)
    if (path / "trainer_state.json").is_file():
        raise ConfigError(
            f"{path} is a checkpoint of a run: it names the run's states and holds no weights. Write them to a "
            f"folder first: ssdtune export {shlex.quote(str(path))} OUT"
        )
    settings = path / "adapter_config.json"
    if not settings.is_file():
        return HfCheckpoint.open(folder)
    try:
        base = json.loads(settings.read_bytes()).get("base_model_name_or_path") or ""
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise FormatError(f"{settings} cannot be read: {error}. Copy the adapter again.") from error
    weights = path / "adapter_model.safetensors"
    if weights.is_file():
        read_header(weights)
    try:
        return HfCheckpoint.open(base)
    except SsdtuneError as error:
        raise ConfigError(
            f"the adapter {path} needs its base model, base_model_name_or_path in {settings.name}: {error}"
        ) from error


def load_model(
    folder: str,
    *,
    dtype: str = "auto",
    device_name: str = "auto",
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """Load a checkpoint or an adapter folder with transformers or peft; never downloads.

    Args:
        dtype: "bf16", "fp16", "fp32", or "auto" for bf16 on a card that has it, and fp32 elsewhere.
        device_name: As in the settings.
        attn_implementation: By default what transformers takes.

    Raises:
        ConfigError: The folder cannot be loaded.
        CapacityError: The model does not fit in memory.
    """
    import torch
    import transformers

    from ssdtune.device import open_device
    from ssdtune.device.dtypes import COMPUTE_DTYPES

    checkpoint = check_folder(folder)
    device = open_device(device_name)
    if dtype == "auto":
        dtype = "bf16" if device.own_memory and device.supports(torch.bfloat16) else "fp32"
    _check_memory(checkpoint, COMPUTE_DTYPES[dtype].itemsize)
    loader: Any = transformers.AutoModelForCausalLM
    if Path(folder, "adapter_config.json").is_file():
        import peft

        loader = peft.AutoPeftModelForCausalLM
    transformers.utils.logging.disable_progress_bar()
    try:
        model = loader.from_pretrained(
            folder,
            dtype=COMPUTE_DTYPES[dtype],
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            **({"attn_implementation": attn_implementation} if attn_implementation else {}),
        )
    except Exception as error:  # each model fails in its own way
        raise ConfigError(
            f"transformers cannot load {folder}: {first_line(error)}. Name a checkpoint or adapter folder."
        ) from error
    return model.to(device.torch_device).eval()


def _check_memory(checkpoint: HfCheckpoint, element_bytes: int) -> None:
    """Refuse what would end this process, and perhaps others, for want of memory."""
    needed = sum(math.prod(extent.shape) for extent in checkpoint.tensors.values()) * element_bytes
    free = available_host_memory().bytes
    if needed > free:
        raise CapacityError(
            f"{checkpoint.name_or_path} takes {format_memory(needed)} of memory, {format_memory(free)} are free, and this "
            "command loads it whole. Use a machine with more memory, or an inference program that quantizes or offloads."
        )


def mean_loss(folder: str, config: Config) -> EvalResult:
    """Return the loss of a model on `eval_file`, each learned token weighing the same."""
    import torch

    from ssdtune.data.batches import Padding, eval_batches
    from ssdtune.data.dataset import load_rows
    from ssdtune.data.tokenize import load_tokenizer

    checkpoint = check_folder(folder)
    tokenizer = load_tokenizer(
        folder, trust_remote_code=config.model.trust_remote_code, missing_ok=True
    )
    file = config.data.eval_file or ""
    rows = load_rows(file, tokenizer, config.data, vocab_size=checkpoint.vocab_size)
    model = load_model(
        folder,
        dtype=config.model.dtype,
        device_name=config.memory.device,
        attn_implementation=config.model.attn_implementation,
        trust_remote_code=config.model.trust_remote_code,
    )
    size = config.training.per_device_eval_batch_size or config.training.per_device_train_batch_size
    total, count = 0.0, 0
    with torch.inference_mode():
        for batch in eval_batches(rows, batch_size=size, padding=Padding.of(tokenizer)):
            ids, mask, labels = (
                torch.from_numpy(array).to(model.device)
                for array in (batch.input_ids, batch.attention_mask, batch.labels)
            )
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1).float(),
                labels[:, 1:].flatten(),
                ignore_index=-100,
                reduction="sum",
            )
            total += float(loss)
            count += batch.num_learned_tokens
    return EvalResult(folder, file, len(rows), count, total / max(count, 1))


def continue_text(folder: str, prompt: str, max_new_tokens: int, *, chat: bool = False) -> str:
    """Return what the model writes after a prompt, choosing the likeliest token each time.

    Args:
        chat: Put the prompt into the tokenizer's chat template as the user's turn.

    Raises:
        ConfigError: No such model, no tokenizer, or no chat template.
    """
    import torch

    from ssdtune.data.tokenize import load_tokenizer

    check_folder(folder)
    tokenizer = load_tokenizer(folder)
    if chat:
        if not tokenizer.chat_template:
            raise ConfigError(f"the tokenizer of {folder} has no chat template: leave out --chat")
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    if not inputs["input_ids"].shape[1]:
        raise ConfigError("the prompt is empty: give at least one token")
    model = load_model(folder)
    inputs = {
        name: value.to(model.device)
        for name, value in inputs.items()
        if name in ("input_ids", "attention_mask")
    }
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    with torch.inference_mode():
        output = model.generate(
            **inputs, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=pad
        )
    new = output[0, inputs["input_ids"].shape[1] :]
    return str(tokenizer.decode(new, skip_special_tokens=True))
