"""Checks that need more than one setting, or the file system.

`contradictions` runs whenever settings are loaded; `require` is for a command that is about to use them.
Both collect everything that is wrong before they speak. What the files contain is checked by those who
read them.
"""

from __future__ import annotations

import re
from pathlib import Path

from ssdtune.config.schema import Config
from ssdtune.errors import ConfigError

_PAGE = 4096


def contradictions(config: Config) -> list[str]:
    """Return what does not go together in the settings, one sentence each."""
    found = []
    data, training, memory, io = config.data, config.training, config.memory, config.io
    if config.model.adapter and config.method != "lora":
        found.append("model.adapter continues an adapter: set method: lora, or leave it out")
    if config.method == "lora" and not config.lora.target_modules:
        found.append("lora.target_modules is empty: name modules, or write all-linear")
    if data.completion_only_loss and data.assistant_only_loss:
        found.append(
            "data.completion_only_loss is for prompt/completion rows and data.assistant_only_loss "
            "for messages rows: set only one"
        )
    if training.num_train_epochs == 0 and training.max_steps is None:
        found.append("training.num_train_epochs is 0 and max_steps is not set: nothing to train")
    if training.warmup_steps > 1 and training.warmup_steps != int(training.warmup_steps):
        found.append(
            f"training.warmup_steps is {training.warmup_steps}: write whole steps, "
            "or a share of the run below 1"
        )
    total = training.train_batch_size
    given = training.per_device_train_batch_size * training.gradient_accumulation_steps
    if total is not None and given not in (1, total):
        found.append(
            f"training.train_batch_size is {total}, but per_device_train_batch_size times "
            f"gradient_accumulation_steps is {given}: leave these unset, or make them agree"
        )
    if training.eval_steps is not None and not data.eval_file:
        found.append("training.eval_steps is set but data.eval_file is not")
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", memory.device):
        found.append(f'memory.device must be auto, cpu, cuda or cuda:1, not "{memory.device}"')
    if memory.host_cache and memory.host_memory and memory.host_cache > memory.host_memory:
        found.append("memory.host_cache is part of memory.host_memory and cannot be larger")
    for name in ("request_bytes", "chunk_bytes"):
        if (getattr(io, name) or 0) % _PAGE:
            found.append(f"io.{name} must be a multiple of {_PAGE}, not {getattr(io, name)}")
    if len({Path(folder).resolve() for folder in io.swap_dirs}) < len(io.swap_dirs):
        found.append("io.swap_dirs names the same folder twice")
    if "" in io.swap_dirs:
        found.append("io.swap_dirs holds an empty name")
    return found


def require(
    config: Config,
    *,
    model: bool = True,
    train_file: bool = True,
    output_dir: bool = True,
) -> None:
    """Check that what a command needs is set and that named files and folders are there.

    Raises:
        ConfigError: Something is missing; all of it at once.
    """
    found = []
    if model:
        found += _check_model(config)
    if train_file:
        found += _check_file("data.train_file", config.data.train_file, needed=True)
        found += _check_file("data.eval_file", config.data.eval_file, needed=False)
    if output_dir:
        found += _check_output(config)
    if found:
        raise ConfigError("\n".join(found))


def _check_model(config: Config) -> list[str]:
    name = config.model.model_name_or_path
    found = []
    if not name:
        found.append(
            "no model is named: give a checkpoint folder as first argument or as "
            "model.model_name_or_path"
        )
    elif Path(name).is_file():
        found.append(f"{name} is a file; name the folder of the checkpoint (config.json is in it)")
    elif not Path(name).is_dir() and _is_path(name):
        found.append(f"the model folder {name} does not exist")
    adapter = config.model.adapter
    if adapter and not Path(adapter, "adapter_config.json").is_file():
        found.append(f"model.adapter: {adapter} holds no adapter_config.json of peft")
    return found


def _is_path(name: str) -> bool:
    # A hub id is "name" or "owner/name".
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith("/")


def _check_file(key: str, name: str | None, *, needed: bool) -> list[str]:
    flag = "--" + key.partition(".")[2].replace("_", "-")
    if not name:
        return [f"{key} is not set: name a jsonl file ({flag})"] if needed else []
    path = Path(name)
    if path.is_dir():
        return [f"{key}: {name} is a folder; name a jsonl file"]
    return [] if path.exists() else [f"{key}: {name} does not exist"]


def _check_output(config: Config) -> list[str]:
    name = config.training.output_dir
    if not name:
        return ["training.output_dir is not set: name a folder for the results (--output-dir)"]
    path, model = Path(name), config.model.model_name_or_path
    found = []
    blocker = next((p for p in (path, *path.parents) if p.exists() or p.is_symlink()), None)
    if blocker is not None and not blocker.is_dir():
        found.append(f"training.output_dir: {blocker} is not a folder")
    if model and path.resolve() == Path(model).resolve():
        found.append(f"training.output_dir is the model's own folder {name}: name another")
    if model and Path(model).resolve() in [
        Path(folder).resolve() for folder in config.io.swap_dirs
    ]:
        found.append(f"io.swap_dirs names the model's own folder {model}: name another")
    resume = config.training.resume_from_checkpoint
    if resume and resume != "last" and not Path(resume).is_dir():
        found.append(f"training.resume_from_checkpoint: {resume} does not exist")
    return found
