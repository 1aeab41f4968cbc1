"""The settings one by one, and how a given value becomes one of theirs.

A leaf is one field of one section of `ssdtune.config.schema`. It has three names: its key in YAML
(`training.learning_rate`), its flat name (`learning_rate`; `lora_r` for `lora.r`) and its flag
(`--learning-rate`). Nothing here knows files or the command line; read `ssdtune.config.load` next.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import os
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ssdtune.config.schema import Config
from ssdtune.units import format_memory, parse_size

_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True}
_BOOLEANS |= {"false": False, "no": False, "off": False, "0": False}

_SAME_VALUE: dict[str, dict[str, str | None]] = {
    "dtype": {
        "bfloat16": "bf16",
        "torch.bfloat16": "bf16",
        "float16": "fp16",
        "torch.float16": "fp16",
        "float32": "fp32",
        "torch.float32": "fp32",
    },
    "optim": {
        "adamw_torch": "adamw",
        "adamw_torch_fused": "adamw",
        "adamw_bnb_8bit": "adamw_8bit",
        "paged_adamw_8bit": "adamw_8bit",
    },
    "resume_from_checkpoint": {"true": "last", "True": "last", "false": None, "False": None},
}
"""Spellings of values that transformers' users come with."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One setting.

    Attributes:
        section: Name of its section, or "" for `method`.
        name: Name of the field.
        types: The types that its value may have, without None; `list` is a list of strings.
        optional: Whether None is a value.
        meta: What `setting` keeps: help, unit, choices, size, path, low, high.
    """

    section: str
    name: str
    types: tuple[type, ...]
    optional: bool
    default: Any
    meta: Mapping[str, Any]

    @property
    def key(self) -> str:
        """Return the key in YAML, such as `training.learning_rate`."""
        return f"{self.section}.{self.name}" if self.section else self.name

    @property
    def flat(self) -> str:
        """Return the name without section, such as `learning_rate`."""
        return "lora_r" if self.key == "lora.r" else self.name

    @property
    def flag(self) -> str:
        """Return the command-line flag, such as `--learning-rate`."""
        return "--" + self.flat.replace("_", "-")


@functools.cache
def all_leaves() -> Mapping[str, Leaf]:
    """Return every setting by its key, in the order of the schema."""
    found = {}
    for top in dataclasses.fields(Config):
        is_section = top.default_factory is not dataclasses.MISSING
        owner = top.default_factory if is_section else Config
        hints = typing.get_type_hints(owner)
        for item in dataclasses.fields(owner) if is_section else (top,):  # type: ignore[arg-type]
            kinds = _members(hints[item.name])
            leaf = Leaf(
                section=top.name if is_section else "",
                name=item.name,
                types=tuple(kind for kind in kinds if kind is not type(None)),
                optional=type(None) in kinds,
                default=item.default_factory()
                if item.default_factory is not dataclasses.MISSING
                else item.default,
                meta=item.metadata,
            )
            found[leaf.key] = leaf
    return types.MappingProxyType(found)


@functools.cache
def leaves_by_flat_name() -> Mapping[str, Leaf]:
    """Return every setting by its flat name."""
    return types.MappingProxyType({leaf.flat: leaf for leaf in all_leaves().values()})


def describe(leaf: Leaf) -> str:
    """Return the help text of a setting with its choices, unit and default."""
    text = str(leaf.meta["help"])
    if leaf.meta["choices"]:
        text += f"; one of {', '.join(leaf.meta['choices'])}"
    notes = [leaf.meta["unit"]] if leaf.meta["unit"] else []
    if default := format_default(leaf):
        notes.append(f"default: {default}")
    return f"{text} ({', '.join(notes)})" if notes else text


def format_default(leaf: Leaf) -> str:
    """Return the default as people write it in YAML; empty where there is none."""
    default = leaf.default
    if isinstance(default, bool):
        return str(default).lower()
    if default is None or default in ("", []):
        return ""
    if leaf.meta["size"]:
        return re.sub(r"\.0+ | ", "", format_memory(default))
    return f"{default:g}" if isinstance(default, float) else str(default)


def _members(hint: Any) -> tuple[type, ...]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(kind for part in typing.get_args(hint) for kind in _members(part))
    return (typing.get_origin(hint) or hint,)


def convert(leaf: Leaf, value: Any, *, from_flag: bool = False) -> Any:
    """Check a given value and return it in the setting's type; None stands for the default.

    Args:
        from_flag: The value is text from the command line, where `none` means None.

    Raises:
        ValueError: The value does not fit; the message reads well after the setting's name.
    """
    if from_flag and leaf.optional and isinstance(value, str) and value.lower() == "none":
        value = None
    value = _SAME_VALUE.get(leaf.name, {}).get(str(value), value)
    if value is None:
        return list(leaf.default) if isinstance(leaf.default, list) else leaf.default
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if bool in leaf.types:
        return _boolean(value)
    if int in leaf.types:
        return _in_range(leaf, _size(value) if leaf.meta["size"] else _integer(value))
    if float in leaf.types:
        return _in_range(leaf, _number(value))
    if list in leaf.types:
        return _strings(leaf, value)
    return _string(leaf, value)


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _BOOLEANS:
        return _BOOLEANS[value.lower()]
    raise ValueError(f"must be true or false, not {_show(value)}")


def _integer(value: Any) -> int:
    if isinstance(value, str) and re.fullmatch(r"\s*[+-]?[0-9][0-9_]*\s*", value):
        return int(value)
    try:
        number = _number(value)
    except ValueError:
        raise ValueError(f"must be a whole number, not {_show(value)}") from None
    if number != int(number):
        raise ValueError(f"must be a whole number, not {_show(value)}")
    return int(value) if isinstance(value, numbers.Integral) else int(number)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real | str):
        raise ValueError(f"must be a number, not {_show(value)}")
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise ValueError(f"must be a number, not {_show(value)}") from None
    if not math.isfinite(number):
        raise ValueError(f"must be a finite number, not {_show(value)}")
    return number


def _size(value: Any) -> int:
    if isinstance(value, str) and not re.fullmatch(r"\s*[+-]?[0-9.eE+]+\s*", value):
        try:
            return parse_size(value)
        except ValueError:
            raise ValueError(
                f"must be a size such as 3GiB, 500MB or 4096, not {_show(value)}"
            ) from None
    return _integer(value)


def _in_range(leaf: Leaf, number: Any) -> Any:
    low, high = leaf.meta["low"], leaf.meta["high"]
    if low is not None and number < low:
        raise ValueError(f"must be at least {low}, not {number}")
    if high is not None and number > high:
        raise ValueError(f"must be at most {high}, not {number}")
    return number


def _string(leaf: Leaf, value: Any) -> str:
    if isinstance(value, bool | list | tuple | Mapping):
        raise ValueError(f"must be a text, not {_show(value)}")
    text = str(value)
    if "\0" in text:
        raise ValueError("must not contain a zero byte")
    choices = leaf.meta["choices"]
    if choices and text not in choices:
        raise ValueError(f"must be {' or '.join(choices)}, not {_show(value)}")
    # Without a home folder expanduser leaves the text as it is.
    return os.path.expanduser(text) if leaf.meta["path"] else text  # noqa: PTH111


def _strings(leaf: Leaf, value: Any) -> list[str] | str:
    if isinstance(value, str):
        if str in leaf.types and (value == leaf.default or not re.fullmatch(r"[\w.\s,-]*", value)):
            return value  # a regular expression
        value = [part.strip() for part in value.split(",")]
        value = [part for part in value if part]
    if not isinstance(value, list | tuple):
        raise ValueError(f"must be a list, not {_show(value)}")
    return [_string(leaf, item) for item in value]


def _show(value: Any) -> str:
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else text[:76] + ' ..."'
