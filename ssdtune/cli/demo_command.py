"""The demo: the whole job on a small model, each step with the function that its command uses.

It makes a checkpoint unless one is named, measures the machine, plans, fine-tunes with every state on SSD,
and lets transformers judge the result: the exported model must load, have the loss that the run reported,
and generate. It fails if the loss did not fall. Everything it writes is in one folder, and a second run
replaces what the first one left there.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssdtune import api
from ssdtune.cli.arguments import settings_from
from ssdtune.cli.in_memory import continue_text, mean_loss
from ssdtune.config.check import require
from ssdtune.config.schema import Config
from ssdtune.errors import ConfigError, MismatchError, SsdtuneError
from ssdtune.hardware.memory import available_host_memory
from ssdtune.units import format_memory

logger = logging.getLogger(__name__)

_MARKER = ".ssdtune-demo"
_PROMPTS = ("How do I keep bread fresh for longer?", "How can I see how much disk space is left?")
_NEW_TOKENS = 64
_SMALL_MODEL = {"learning_rate": 3e-3, "num_train_epochs": 6}
_NAMED_MODEL = {"learning_rate": 1e-5, "num_train_epochs": 1}


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What the demo showed.

    Attributes:
        loss_before, loss_after: Loss on the held-out rows, by transformers; None if the model does not
            fit in memory.
        answers: Prompts and what the tuned model makes of them.
    """

    model: str
    output_dir: str
    loss_before: float | None
    loss_after: float | None
    answers: tuple[tuple[str, str], ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        answers = [{"prompt": prompt, "text": text} for prompt, text in self.answers]
        return {**dataclasses.asdict(self), "answers": answers}

    def text(self) -> str:
        """Return the outcome for people."""
        lines = []
        if self.loss_before is not None and self.loss_after is not None:
            lines.append(
                f"loss on held-out rows, by transformers: {self.loss_before:.3f} before, "
                f"{self.loss_after:.3f} after"
            )
        for prompt, text in self.answers:
            lines += ["", f"> {prompt}", text.strip() or "(nothing)"]
        return "\n".join([*lines, "", f"The tuned model is in {self.output_dir}"]).strip()


def run(args: argparse.Namespace) -> DemoResult:
    """Run the demo.

    Raises:
        ConfigError: The demo folder is somebody else's.
        SsdtuneError: A step failed, or the loss did not fall.
        MismatchError: transformers finds another loss than the run reported.
    """
    folder = Path(args.demo_dir).expanduser()
    _claim(folder)
    config = _settings(args, folder)
    model = config.model.model_name_or_path
    require(config)

    _say("measuring this machine")
    states = Path(config.io.swap_dirs[0]) if config.io.swap_dirs else folder
    hardware = api.profile([states], quick=True)
    logger.info("%s", hardware.text())
    _say("planning")
    plan = api.plan(config, hardware=hardware)
    logger.info("%s", plan.text())
    if not plan.fits:
        raise SsdtuneError(f"the run does not fit on this machine: {'; '.join(plan.problems)}")

    judge = _fits_in_memory(model)
    before = mean_loss(model, config).loss if judge else None
    _say("fine-tuning with all states on SSD")
    outcome = api.finetune(config, quiet=args.quiet, verbose=args.verbose).to_dict()
    output_dir = config.training.output_dir
    if before is None:
        return DemoResult(model, output_dir, None, None, ())

    _say("loading the result with transformers")
    after = mean_loss(output_dir, config).loss
    evaluations = outcome["evaluations"]
    _compare(before, after, evaluations[-1][1] if evaluations else None, config)
    answers = tuple((prompt, _answer(output_dir, prompt)) for prompt in _PROMPTS)
    return DemoResult(model, output_dir, before, after, answers)


def _claim(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--demo-dir: {folder} is not a folder")
    try:
        # The examples make the model of the demo, too.
        foreign = folder.is_dir() and {path.name for path in folder.iterdir()} - {"model"}
        if foreign and not (folder / _MARKER).exists():
            raise ConfigError(
                f"{folder} exists and was not made by the demo. Name another folder: --demo-dir DIR"
            )
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _MARKER).write_text("made by ssdtune demo; the next demo replaces output/\n")
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"--demo-dir: cannot write to {folder}: {reason}") from error


def _settings(args: argparse.Namespace, folder: Path) -> Config:
    from ssdtune.demo import EVAL_FILE, TRAIN_FILE, make_demo_checkpoint

    named = settings_from(args).model.model_name_or_path
    if not named:
        _say(f"making a small model in {folder / 'model'}")
        args.model = str(make_demo_checkpoint(folder / "model"))
    output_dir = folder / "output"
    defaults = {
        "data": {"train_file": TRAIN_FILE, "eval_file": EVAL_FILE, "max_length": 256},
        "training": {
            "output_dir": output_dir,
            "per_device_train_batch_size": 8,
            "warmup_steps": 0.1,
            "lr_scheduler_type": "cosine",
            "logging_steps": 16,
            **(_NAMED_MODEL if named else _SMALL_MODEL),
        },
        "memory": {"host_cache": 0},
    }
    config = settings_from(args, defaults)
    resuming = config.training.resume_from_checkpoint
    if Path(config.training.output_dir) == output_dir and not resuming:
        shutil.rmtree(output_dir, ignore_errors=True)
    return config


def _fits_in_memory(model: str) -> bool:
    """Say whether transformers can load the model next to us; a hub id has no files here to count."""
    needed = 2 * sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))
    free = available_host_memory().bytes
    if needed > free:
        _say(
            f"transformers would need {format_memory(needed)} to judge the result, "
            f"{format_memory(free)} are free: left out"
        )
    return needed <= free


def _compare(before: float, after: float, reported: float | None, config: Config) -> None:
    # The judge computes in fp32; "auto" may have trained in bf16.
    tolerance = 1e-3 if config.model.dtype == "fp32" else 2e-2
    if reported is not None and abs(after - reported) > tolerance:
        raise MismatchError(
            f"the run reported a loss of {reported:.5f} on {config.data.eval_file}, transformers "
            f"finds {after:.5f} with what was exported to {config.training.output_dir}. "
            "Please report this."
        )
    if not after < before:
        raise SsdtuneError(
            f"the loss on held-out rows did not fall: {before:.3f} before, {after:.3f} after. Train "
            "longer (--num-train-epochs) or change --learning-rate."
        )


def _answer(folder: str, prompt: str) -> str:
    try:
        return continue_text(folder, prompt, _NEW_TOKENS, chat=True)
    except ConfigError:  # a model without chat template
        return continue_text(folder, prompt, _NEW_TOKENS)


def _say(text: str) -> None:
    logger.info("== %s", text)
