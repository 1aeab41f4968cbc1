"""What each command does: settings from the arguments, one call of `ssdtune.api`, printing of the result.

Everything heavy is imported by the called functions. `COMMANDS` maps names to functions that take the
parsed arguments and return the exit code.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable

from ssdtune import api
from ssdtune.cli.arguments import settings_from
from ssdtune.cli.output import print_json, show
from ssdtune.config.check import require
from ssdtune.errors import ConfigError

ANSWER_IS_NO = 3

logger = logging.getLogger(__name__)


def finetune(args: argparse.Namespace) -> int:
    """Fine-tune; print where the result is."""
    config = settings_from(args)
    require(config)
    from ssdtune.train.finetune import finetune as run

    result = run(config, quiet=args.quiet, verbose=args.verbose)
    if args.json:
        print_json(result.to_dict())
    else:
        show(result.text())
    return 0


def plan(args: argparse.Namespace) -> int:
    """Print what a run needs; exit code 3 if it does not fit."""
    from ssdtune.hardware.known import known
    from ssdtune.report import timeline

    config = settings_from(args)
    require(config, train_file=False, output_dir=False)
    picture = timeline.picture_path(args.timeline) if args.timeline else None
    result = api.plan(
        config,
        hardware=known(args.hardware),
        other_machine=args.hardware is not None,
    )
    if picture:
        if result.forecast is None:
            raise ConfigError(
                f"--timeline needs a step to draw, but there is none: {'; '.join(result.problems) or result.no_time}"
            )
        timeline.save(picture, result.forecast.picture(), result.text())
    if args.json:
        print_json(result.to_dict())
    else:
        show(result.text())
    return 0 if result.fits else ANSWER_IS_NO


def profile(args: argparse.Namespace) -> int:
    """Measure this machine, or take what was measured before, and print the figures; or show a data sheet."""
    from ssdtune.cli.profile_command import run
    from ssdtune.hardware import datasheet

    if args.show is not None:
        if args.json:
            print_json(datasheet.named_machine(args.show).to_dict())
        else:
            print(datasheet.sheet_text(args.show), end="")
        return 0

    result = run(args)
    if args.json:
        print_json(result.to_dict())
    else:
        show(result.text())
    return 0


def data(args: argparse.Namespace) -> int:
    """Show how rows become tokens and labels."""
    config = settings_from(args)
    # Rows that are tokenized already need no model.
    require(config, model=bool(config.model.model_name_or_path), output_dir=False)
    if args.rows < 0:
        raise ConfigError(f"--rows must be at least 0, not {args.rows}")
    from ssdtune.cli import data_command

    return data_command.run(config, json_output=args.json, limit=args.rows)


def doctor(args: argparse.Namespace) -> int:
    """Print what works here; exit code 3 if ssdtune does not."""
    report = api.doctor(args.swap_dir)
    if args.json:
        print_json(report.to_dict())
    else:
        show(report.text())
    return 0 if report.usable else ANSWER_IS_NO


def export(args: argparse.Namespace) -> int:
    """Write a checkpoint's weights or adapter; print the folder."""
    folder = api.export(
        args.checkpoint, args.output_dir, merge=args.merge, max_shard_size=args.max_shard_size
    )
    if args.json:
        print_json({"output_dir": str(folder)})
    else:
        show(str(folder))
    return 0


def generate(args: argparse.Namespace) -> int:
    """Print a prompt's continuation."""
    from ssdtune.cli.in_memory import continue_text

    if args.max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens must be at least 1, not {args.max_new_tokens}")
    text = continue_text(args.model, args.prompt, args.max_new_tokens, chat=args.chat)
    if args.json:
        print_json({"prompt": args.prompt, "text": text})
    else:
        show(text)
    return 0


def evaluate(args: argparse.Namespace) -> int:
    """Print a model's mean loss on `eval_file`."""
    from ssdtune.cli.in_memory import mean_loss

    config = settings_from(args)
    require(config, train_file=False, output_dir=False)
    if not config.data.eval_file:
        raise ConfigError("data.eval_file is not set: name a jsonl file (--eval-file)")
    if config.model.adapter:
        raise ConfigError(
            f"eval takes one folder: name the adapter, {config.model.adapter}, as MODEL. Its settings name its base."
        )
    result = mean_loss(config.model.model_name_or_path, config)
    if args.json:
        print_json(result.to_dict())
    else:
        show(result.text())
    return 0


def demo(args: argparse.Namespace) -> int:
    """Run the whole job on a small model."""
    from ssdtune.cli import demo_command

    result = demo_command.run(args)
    if args.json:
        print_json(result.to_dict())
    else:
        show(result.text())
    return 0


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "finetune": finetune,
    "plan": plan,
    "profile": profile,
    "data": data,
    "doctor": doctor,
    "export": export,
    "generate": generate,
    "eval": evaluate,
    "demo": demo,
}
