"""The parser of the command line, made from the settings.

Every setting is a flag named after its leaf, in the group of its section; aliases of
`ssdtune.config.aliases` work as flags too. Nothing is converted here: texts go to
`ssdtune.config.load`, so that files, flags and keywords are checked by the same code with the same words.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from ssdtune import __version__
from ssdtune.config.aliases import ALIASES, REFUSED
from ssdtune.config.leaves import all_leaves, describe
from ssdtune.config.load import load_config
from ssdtune.config.schema import Config
from ssdtune.errors import ConfigError
from ssdtune.hardware.datasheet import names

_PREFIX = "setting:"
"""Marks the parsed values that are settings."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors look like ours and suggest the nearest flag."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        """Print one line and leave with exit code 2."""
        match = re.search(r"unrecognized arguments: (--[\w-]+)", message)
        if match:
            flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
            near = difflib.get_close_matches(match.group(1), flags, 1, 0.6)
            message = f"unknown flag {match.group(1)}."
            message += f" Did you mean {near[0]}?" if near else f' See "{self.prog} --help".'
        self.exit(2, f"error: {message}\n")


def normalize(argv: Sequence[str]) -> list[str]:
    """Write `--learning_rate=1` as `--learning-rate=1`."""
    result: list[str] = []
    for position, text in enumerate(argv):
        if text == "--":
            return result + list(argv[position:])
        flag, equals, value = text.partition("=")
        if flag.startswith("--"):
            flag = flag.replace("_", "-")
        result.append(flag + equals + value)
    return result


def parse(parser: Parser, commands: dict[str, Parser], argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments; unknown flags are reported by the command's own parser."""
    args, unknown = parser.parse_known_args(normalize(argv))
    if unknown:
        commands[args.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    return args


def build_parser() -> tuple[Parser, dict[str, Parser]]:
    """Return the parser and those of the commands by name."""
    parser = Parser(
        prog="ssdtune",
        description="Fine-tune language models larger than memory by streaming them from NVMe.",
        epilog='"ssdtune COMMAND --help" shows the flags of a command.',
    )
    parser.add_argument("--version", action="version", version=f"ssdtune {__version__}")
    _add_verbosity(parser)
    subparsers = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=Parser
    )
    commands: dict[str, Parser] = {}

    def command(name: str, text: str, usage: str = "") -> Parser:
        sub: Parser = subparsers.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            usage=f"ssdtune {name} {usage} [flags]",
        )
        _add_verbosity(sub, top=False)
        sub.add_argument("--json", action="store_true", help="print one JSON document instead")
        commands[name] = sub
        return sub

    finetune = command(
        "finetune",
        "fine-tune a model and write the tuned weights or adapter",
        "[MODEL] [--config FILE]",
    )
    add_settings(finetune)
    plan = command(
        "plan",
        "say what a run needs and how long it takes; exit code 3: does not fit",
        "[MODEL] [--config FILE]",
    )
    plan.add_argument(
        "--hardware",
        metavar="NAME|FILE",
        help="plan for another machine, with its memory, dtypes, drives and free space: by the name of its data sheet "
        f"({', '.join(names())}), or by a file that ssdtune profile wrote or showed "
        "(default: this machine, at the rates of its profile if ssdtune profile has run)",
    )
    plan.add_argument(
        "--timeline",
        metavar="FILE",
        help="draw the simulated step, lane by lane: a .svg or .html file",
    )
    add_settings(plan)
    data = command("data", "show how rows become tokens and labels", "[MODEL] [--config FILE]")
    data.add_argument("--rows", type=int, default=3, metavar="N", help="rows to show (default: 3)")
    add_settings(
        data,
        shown=("model.model_name_or_path", "model.trust_remote_code", "data"),
        hidden=("data.packing", "data.shuffle"),
    )
    profile = command(
        "profile", "measure drives, memory, Adam and compute, and keep the result", "[DIR ...]"
    )
    profile.add_argument("swap_dir", nargs="*", metavar="DIR", help="folders on drives to measure")
    _add_profile_flags(profile)
    doctor = command(
        "doctor", "say what works on this machine; exit code 3: not usable", "[DIR ...]"
    )
    doctor.add_argument("swap_dir", nargs="*", metavar="DIR", help="swap folders to look at")
    export = command(
        "export",
        "write the weights or adapter of a checkpoint for transformers",
        "CHECKPOINT OUT",
    )
    export.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="checkpoint-N folder of a run; with --merge also a folder with an adapter",
    )
    export.add_argument("output_dir", metavar="OUT", help="new folder to write")
    export.add_argument("--merge", action="store_true", help="merge a LoRA adapter into its base")
    export.add_argument("--max-shard-size", default="50GB", metavar="SIZE", help="(default: 50GB)")
    _add_try_commands(command)
    demo = command(
        "demo", "make a small model, fine-tune it from SSD, export it and try it", "[MODEL]"
    )
    demo.add_argument("--demo-dir", default="demo", metavar="DIR", help="(default: demo)")
    add_settings(demo)
    return parser, commands


def _add_profile_flags(profile: Parser) -> None:
    profile.add_argument(
        "--model", metavar="MODEL", help="folder or config.json whose block is measured too"
    )
    profile.add_argument(
        "--output", metavar="FILE", help="profile file (default: in the user's cache folder)"
    )
    profile.add_argument(
        "--show",
        metavar="NAME",
        help="measure nothing, but print the data sheet of a machine, to be changed and given to plan --hardware: "
        + ", ".join(names()),
    )
    profile.add_argument("--force", action="store_true", help="measure even if nothing changed")
    profile.add_argument("--quick", action="store_true", help="shorter and less exact")
    profile.add_argument(
        "--drive-seconds",
        type=float,
        metavar="S",
        help="time for each drive (default: 25; quick: 1.5)",
    )
    profile.add_argument(
        "--largest-file",
        metavar="SIZE",
        help="most space that is used for measuring (default: 16GiB, and a tenth of what is free)",
    )


def _add_try_commands(command: Any) -> None:
    generate = command(
        "generate",
        "continue a prompt with a model, loaded whole by transformers",
        "MODEL --prompt TEXT",
    )
    generate.add_argument("model", metavar="MODEL", help="checkpoint or adapter folder")
    generate.add_argument("--prompt", required=True, help="text to continue")
    generate.add_argument("--max-new-tokens", type=int, default=64, help="(default: 64)")
    generate.add_argument("--chat", action="store_true", help="put the prompt in the chat template")
    evaluate = command(
        "eval",
        "mean loss of a model on a jsonl, loaded whole by transformers",
        "MODEL --eval-file FILE",
    )
    add_settings(
        evaluate,
        shown=("model", "data", "training.per_device_eval_batch_size", "memory.device"),
        hidden=(
            "model.adapter",
            "model.torch_compile",
            "data.train_file",
            "data.packing",
            "data.shuffle",
        ),
    )


def _add_verbosity(parser: argparse.ArgumentParser, *, top: bool = True) -> None:
    # On a command the flags leave no default, so "ssdtune -v plan" and "ssdtune plan -v" both work.
    default = False if top else argparse.SUPPRESS
    group = parser.add_mutually_exclusive_group()
    for short, name, text in (
        ("-q", "quiet", "hide progress and notes"),
        ("-v", "verbose", "show debug lines, and tracebacks of errors"),
    ):
        group.add_argument(short, f"--{name}", action="store_true", default=default, help=text)


def add_settings(
    parser: argparse.ArgumentParser, *, shown: Sequence[str] = (), hidden: Sequence[str] = ()
) -> None:
    """Add MODEL, `--config`, `--set` and a flag for every setting.

    Args:
        shown: Sections and keys that the command uses, by default all. Others are taken too, since settings are shared
            between commands, but their help is not shown.
        hidden: Keys of shown sections that it does not use.
    """
    parser.add_argument("model", nargs="?", metavar="MODEL", help="same as --model-name-or-path")
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file with settings; flags win over it"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any setting by its YAML key",
    )
    groups: dict[str, Any] = {"": parser}
    for leaf in all_leaves().values():
        if leaf.section not in groups:
            groups[leaf.section] = parser.add_argument_group(f"{leaf.section} settings")
        used = not shown or bool({leaf.section, leaf.key} & set(shown))
        used = used and leaf.key not in hidden
        text = describe(leaf).replace("%", "%%") if used else argparse.SUPPRESS
        _add_flag(groups[leaf.section], leaf.flag, leaf.flat, text, bool in leaf.types)
    for name in [*ALIASES, *REFUSED]:
        _add_flag(
            parser, "--" + name.replace("_", "-"), name, argparse.SUPPRESS,
            boolean=name in ("bf16", "fp16", "gradient_checkpointing"),
        )  # fmt: skip
    parser.add_argument(
        "--lora", dest=_PREFIX + "method", action="store_const", const="lora",
        default=argparse.SUPPRESS, help=argparse.SUPPRESS,
    )  # fmt: skip


def _add_flag(group: Any, flag: str, name: str, text: str, boolean: bool) -> None:
    options: dict[str, Any] = {"dest": _PREFIX + name, "default": argparse.SUPPRESS}
    if boolean:
        options["action"] = argparse.BooleanOptionalAction
    else:
        options["metavar"] = name.rpartition("_")[2].upper()
    group.add_argument(flag, help=text, **options)


def settings_from(args: argparse.Namespace, defaults: dict[str, Any] | None = None) -> Config:
    """Return the settings that the parsed arguments give.

    Args:
        defaults: Values by key that take the place of the schema's defaults.

    Raises:
        ConfigError: Wrong settings, all of them at once.
    """
    overrides: dict[str, Any] = {}
    for text in args.set:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f'--set wants KEY=VALUE, such as io.queue_depth=64, not "{text}"')
        overrides[key.strip().replace("-", "_")] = value
    for name, value in vars(args).items():
        if name.startswith(_PREFIX):
            overrides[name.removeprefix(_PREFIX)] = value
    if args.model is not None:
        if overrides.get("model_name_or_path", args.model) != args.model:
            raise ConfigError("the model is named twice, as MODEL and as --model-name-or-path")
        overrides["model_name_or_path"] = args.model
    source: Any = args.config
    if defaults is not None and source is None:
        source = load_config(defaults)
    return load_config(Path(source) if isinstance(source, str) else source, overrides, flags=True)
