"""Settings from a YAML file, a mapping, flags or keywords, and back to YAML.

Order: defaults < file < overrides; None means unset. All mistakes are reported at once in one
`ConfigError`, each with its place. Whether the files and folders that the settings name are there is
checked by `ssdtune.config.check`, which reads next.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ssdtune.config.aliases import ALIASES, REFUSED, Alias
from ssdtune.config.check import contradictions
from ssdtune.config.leaves import Leaf, all_leaves, convert, leaves_by_flat_name
from ssdtune.config.schema import SECTIONS, Config
from ssdtune.errors import ConfigError

logger = logging.getLogger(__name__)

Source = str | os.PathLike[str] | Mapping[str, Any] | Config | None


@dataclass(frozen=True, slots=True)
class _Given:
    """One value as it was given. `where` is `run.yaml:14: ` or empty."""

    section: str
    name: str
    value: Any
    where: str
    line: int = 0


def load_config(
    source: Source = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    flags: bool = False,
) -> Config:
    """Return the settings that a source and overrides of it give.

    Args:
        source: Path of a YAML file, a mapping in the same form, a `Config`, or None for the defaults.
        overrides: Values by key (`io.queue_depth`), flat name (`learning_rate`, `lora_r`), alias, or
            nested by section.
        flags: The overrides come from the command line: they are text, and messages name the flags.

    Raises:
        ConfigError: Unknown keys, wrong values, contradictions, an unreadable file; all at once.
    """
    problems: list[str] = []
    values: dict[str, Any] = {}
    if isinstance(source, str | os.PathLike):
        given, problems = _read_yaml(Path(source))
    else:
        tree = to_dict(source) if isinstance(source, Config) else source
        given = _flatten(tree or {}, problems)
    _resolve(given, values, problems, flags=False)
    _resolve(_flatten(overrides or {}, problems), values, problems, flags=flags)
    if not problems:
        config = _build(values)
        problems = contradictions(config)
        _warn_without_effect(config, values)
    if problems:
        raise ConfigError("\n".join(problems))
    return config


def to_dict(config: Config) -> dict[str, Any]:
    """Return the settings as plain nested dictionaries, in the order of the schema."""
    return dataclasses.asdict(config)


def to_yaml(config: Config) -> str:
    """Return the settings as YAML text that `load_config` reads back exactly."""
    return str(yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True, width=100))


def with_absolute_paths(config: Config) -> Config:
    """Return the same settings, true from any current folder; hub ids and `last` stay."""
    values = to_dict(config)
    for leaf in all_leaves().values():
        section = values[leaf.section] if leaf.section else values
        if leaf.meta["path"] and section[leaf.name]:
            section[leaf.name] = _absolute(section[leaf.name], leaf.name)
    return load_config(values)


def _absolute(value: Any, name: str) -> Any:
    if isinstance(value, list):
        return [_absolute(item, name) for item in value]
    is_name = name == "model_name_or_path" and not Path(value).expanduser().exists()
    if is_name or (name == "resume_from_checkpoint" and value == "last"):
        return value
    return str(Path(value).expanduser().absolute())


def _build(values: Mapping[str, Any]) -> Config:
    sections: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    top: dict[str, Any] = {}
    for key, leaf in all_leaves().items():
        if key in values:
            (sections[leaf.section] if leaf.section else top)[leaf.name] = values[key]
    kinds = {item.name: item.default_factory for item in dataclasses.fields(Config)}
    return Config(**top, **{name: kinds[name](**sections[name]) for name in SECTIONS})  # type: ignore


def _warn_without_effect(config: Config, values: Mapping[str, Any]) -> None:
    leaves = all_leaves()
    changed = [k for k, v in values.items() if k.startswith("lora.") and v != leaves[k].default]
    if changed and config.method != "lora":
        logger.warning("%s has no effect with method: %s", ", ".join(changed), config.method)


def _read_yaml(path: Path) -> tuple[list[_Given], list[str]]:
    try:
        root = yaml.compose(path.read_bytes(), Loader=yaml.SafeLoader)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"cannot read the settings file {path}: {reason}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: this is nested too deeply for settings") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else f"{path}"
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{where}: this is not YAML: {reason}") from error
    problems: list[str] = []
    if root is None:
        return [], problems
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}:1: settings are written as `key: value`, one on each line")
    given = []
    for key, node in root.value:
        line = key.start_mark.line + 1
        if key.value in SECTIONS and isinstance(node, yaml.MappingNode):
            for inner, value in node.value:
                at = inner.start_mark.line + 1
                where = f"{path}:{at}: "
                given.append(_Given(key.value, str(inner.value), _plain(value), where, at))
        else:
            section, name = _split(str(key.value))
            given.append(_Given(section, name, _plain(node), f"{path}:{line}: ", line))
    return given, problems


def _plain(node: yaml.Node) -> Any:
    """Return text, None, or a list of these: what a text means is for the setting's type to say.

    So 1e-4 is a number, 012 is twelve and `output_dir: 2024-01-01` a name, unlike in YAML 1.1.
    """
    if isinstance(node, yaml.MappingNode):
        return {"...": "..."}
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item) if isinstance(item, yaml.ScalarNode) else [] for item in node.value]
    return None if node.tag == "tag:yaml.org,2002:null" else node.value


def _split(key: str) -> tuple[str, str]:
    section, dot, name = key.partition(".")
    return (section, name) if dot and section in SECTIONS else ("", key)


def _flatten(tree: Mapping[str, Any], problems: list[str]) -> list[_Given]:
    given = []
    for key, value in tree.items():
        if not isinstance(key, str):
            problems.append(f"keys are texts, not {key!r}")
        elif key in SECTIONS and isinstance(value, Mapping):
            given += [_Given(key, str(name), inner, "") for name, inner in value.items()]
        else:
            given.append(_Given(*_split(key), value, ""))
    return given


def _resolve(
    given: Iterable[_Given], values: dict[str, Any], problems: list[str], *, flags: bool
) -> None:
    """Put the values of one source into `values` by key, and what is wrong into `problems`."""
    seen: dict[str, _Given] = {}
    for item in given:
        alias = ALIASES.get(item.name)
        if item.name in REFUSED:
            problems.append(item.where + REFUSED[item.name])
            continue
        leaf = _find(item, alias)
        if leaf is None and not (alias and not alias.target):
            if item.name in SECTIONS and item.value is None and not item.section:
                continue  # a section that is there but empty
            problems.append(item.where + _unknown(item, alias))
            continue
        try:
            if alias:
                value = alias.translate(item.value) if alias.translate else item.value
                target = leaf.key if leaf else "always so"
                logger.info('note: %s"%s" is read as "%s"', item.where, item.name, target)
                if leaf is None or (value is None and item.value is not None):
                    continue
            else:
                value = item.value
            assert leaf is not None
            if leaf.key in seen:
                problems.append(_twice(seen[leaf.key], item))
                continue
            seen[leaf.key] = item
            values[leaf.key] = convert(leaf, value, from_flag=flags)
        except ValueError as error:
            problems.append(f"{item.where}{_shown(item, leaf, flags=flags)} {error}")


def _find(item: _Given, alias: Alias | None) -> Leaf | None:
    if alias:
        leaf = leaves_by_flat_name().get(alias.target)
        return leaf if leaf and item.section in ("", leaf.section) else None
    if item.section:
        leaf = all_leaves().get(f"{item.section}.{item.name}")
        flat = leaves_by_flat_name().get(item.name)  # lora.lora_r
        return leaf or (flat if flat and flat.section == item.section else None)
    return leaves_by_flat_name().get(item.name)


def _shown(item: _Given, leaf: Leaf | None, *, flags: bool) -> str:
    if flags:
        return "--" + item.name.replace("_", "-")
    if leaf is None or item.name in ALIASES:
        return item.name
    return leaf.key if item.where else leaf.flat


def _twice(first: _Given, second: _Given) -> str:
    lines = f" (lines {first.line} and {second.line})" if first.line else ""
    if first.name == second.name:
        return f'{second.where}"{second.name}" is given twice{lines}; keep one'
    return f'{second.where}"{first.name}" and "{second.name}" are the same setting{lines}; keep one'


def _unknown(item: _Given, alias: Alias | None) -> str:
    flat = leaves_by_flat_name()
    if item.name in SECTIONS and not item.section:
        inside = next(leaf.name for leaf in all_leaves().values() if leaf.section == item.name)
        method = ", or method: lora" if item.name == "lora" else ""
        return f'"{item.name}" is a section; write keys below it, such as {inside}{method}'
    text = f'unknown key "{item.name}"' + (f' in "{item.section}"' if item.section else "")
    home = flat.get(alias.target if alias else item.name)
    if home:
        place = f'It belongs in "{home.section}"' if home.section else "It belongs at the top"
        return f"{text}. {place}."
    near = difflib.get_close_matches(item.name, [*flat, *SECTIONS, *ALIASES], 1, 0.7)
    if item.section:
        own = [leaf.name for leaf in all_leaves().values() if leaf.section == item.section]
        near = difflib.get_close_matches(item.name, own, 1, 0.6) or near
    if near and (leaf := flat.get(near[0])) and item.section not in ("", leaf.section):
        return f'{text}. Did you mean "{near[0]}" in "{leaf.section}"?'
    return f'{text}. Did you mean "{near[0]}"?' if near else f"{text}."
