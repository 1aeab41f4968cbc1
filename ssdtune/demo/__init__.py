"""What the demo needs: a small but real checkpoint made on the spot, and sentences written for it.

`train.jsonl` and `eval.jsonl` hold chat rows about house, kitchen, garden and computers; no question is in both.
The model starts from random weights, so its loss at the start is the logarithm of its vocabulary.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from ssdtune.errors import ConfigError

TRAIN_FILE = Path(__file__).with_name("train.jsonl")
EVAL_FILE = Path(__file__).with_name("eval.jsonl")

_MARKER = "ssdtune-demo.json"
_BOS, _EOS, _PAD, _START, _END = "<|bos|>", "<|eos|>", "<|pad|>", "<|start|>", "<|end|>"

# The generation markers let assistant_only_loss find the assistant's text.
_CHAT_TEMPLATE = """\
{{ bos_token }}{%- for message in messages -%}
{{ '<|start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{ message['content'] + '<|end|>' }}{%- endgeneration -%}
{%- else -%}{{ message['content'] + '<|end|>' }}
{%- endif -%}{{ '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start|>assistant\\n' }}{%- endif -%}
"""

_SIZES = {
    "tiny": {
        "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 6,
        "num_key_value_heads": 2, "vocab_size": 1024,
    },
    "small": {
        "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 10, "num_attention_heads": 6,
        "num_key_value_heads": 2, "vocab_size": 1024,
    },
}  # fmt: skip


def make_demo_checkpoint(folder: str | Path, *, seed: int = 0, size: str = "tiny") -> Path:
    """Make a Llama checkpoint with random weights, as `save_pretrained` writes it: sharded, with a tokenizer.

    A complete checkpoint of the same size and seed is reused. A new one appears under its name only when it is
    complete, so a run that was stopped leaves no half checkpoint.

    Args:
        folder: Where the checkpoint shall be; its parents are made.
        seed: Random state of the weights.
        size: "tiny" (2.8 million parameters) or "small" (17 million).

    Raises:
        ConfigError: The folder has something else in it, or cannot be written.
        ValueError: There is no such size.
    """
    if size not in _SIZES:
        raise ValueError(f'no demo model of size "{size}"; there are {", ".join(_SIZES)}')
    folder = Path(folder).expanduser().absolute()
    wanted = {"format": 1, "size": size, "seed": seed}
    try:
        if _complete(folder, wanted):
            return folder
        if folder.exists() and not _replaceable(folder):
            raise ConfigError(
                f"{folder} exists and is no demo checkpoint. Name another folder, or move it away."
            )
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"cannot make the demo checkpoint {folder}: {reason}.") from error
    try:
        made = temporary / "checkpoint"
        _write(made, seed, _SIZES[size])
        files = {path.name: path.stat().st_size for path in sorted(made.iterdir())}
        (made / _MARKER).write_text(json.dumps({**wanted, "files": files}, indent=1))
        if folder.exists():
            shutil.rmtree(folder)
        made.replace(folder)
    except OSError:
        if not _complete(folder, wanted):  # else another process made the same at the same time
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _replaceable(folder: Path) -> bool:
    return folder.is_dir() and (not any(folder.iterdir()) or (folder / _MARKER).exists())


def _complete(folder: Path, wanted: dict[str, Any]) -> bool:
    """Say whether the folder holds this very checkpoint, with every file as long as it was written."""
    try:
        marker = json.loads((folder / _MARKER).read_text())
        files = marker.pop("files")
        sizes = {name: (folder / name).stat().st_size for name in files}
    except (OSError, ValueError, KeyError, AttributeError):
        return False
    return bool(marker == wanted and sizes == files)


def _write(folder: Path, seed: int, shape: dict[str, int]) -> None:
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    tokenizer = _train_tokenizer(shape["vocab_size"])
    ids = {
        f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")
    }
    config = LlamaConfig(**shape, **ids, max_position_embeddings=512, tie_word_embeddings=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(_END)]
    model.generation_config = GenerationConfig(**{**ids, "eos_token_id": ends}, max_new_tokens=80)
    model.save_pretrained(folder, max_shard_size="4MB")
    tokenizer.save_pretrained(folder)


def _train_tokenizer(vocab_size: int) -> Any:
    """Train a byte-level BPE on the training rows: no text is unknown to it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    rows = [json.loads(line) for line in TRAIN_FILE.read_text(encoding="utf-8").splitlines()]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_BOS, _EOS, _PAD, _START, _END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    messages = [message for row in rows for message in row["messages"]]
    texts = (f"{message['role']}\n{message['content']}" for message in messages)
    core.train_from_iterator(texts, trainer)
    core.post_processor = processors.TemplateProcessing(
        single=f"{_BOS} $A", special_tokens=[(_BOS, core.token_to_id(_BOS))]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=_BOS,
        eos_token=_EOS,
        pad_token=_PAD,
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer
