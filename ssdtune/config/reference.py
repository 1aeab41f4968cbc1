"""The reference page of all settings, made from the schema.

`python -m ssdtune.config.reference` prints it; docs/configuration.md is its output, and a test compares
the two.
"""

from __future__ import annotations

import sys

from ssdtune.config.aliases import ALIASES, REFUSED
from ssdtune.config.leaves import Leaf, all_leaves, format_default, leaves_by_flat_name
from ssdtune.config.schema import SECTIONS, Config

_HEAD = """\
# Settings

Made by `python -m ssdtune.config.reference > docs/configuration.md`; edit `ssdtune/config/schema.py`.

Every setting can be given in a YAML file under its section (`--config run.yaml`), as a flag
(`--learning-rate 1e-4`; `_` and `-` are both accepted), by its key (`--set training.learning_rate=1e-4`), and as a
keyword in Python (`ssdtune.finetune(learning_rate=1e-4)`). Flags and keywords win over the file, the file over the
defaults. Empty or `null` means unset; 0 and false are values. Sizes are written as `3GiB`, `500MB` or `4096`.
Unknown keys are errors. `method` stands at the top of the file, outside of all sections.
"""


def reference() -> str:
    """Return the page as Markdown."""
    lines = [_HEAD]
    sections: dict[str, str] = {"": "", **dict.fromkeys(SECTIONS, "")}
    for name in SECTIONS:
        sections[name] = _docstring(name)
    for name, text in sections.items():
        if name:
            lines += [f"## {name}", "", text, ""]
        lines += ["| key | flag | default | meaning |", "|---|---|---|---|"]
        lines += [_row(leaf) for leaf in all_leaves().values() if leaf.section == name]
        lines.append("")
    lines += ["## Names of other tools", ""]
    lines += [
        "These are accepted with a note; giving one together with the name itself is an error.",
        "",
    ]
    lines += ["| you write | it is read as |", "|---|---|"]
    for alias, target in ALIASES.items():
        leaf = leaves_by_flat_name().get(target.target)
        lines.append(f"| `{alias}` | {f'`{leaf.key}`' if leaf else 'what is done anyway'} |")
    lines += ["", *(f"Refused: {text}." for text in REFUSED.values())]
    return "\n".join(lines) + "\n"


def _docstring(section: str) -> str:
    kind = Config.__dataclass_fields__[section].default_factory
    return str(kind.__doc__).strip()


def _row(leaf: Leaf) -> str:
    flag = leaf.flag
    if bool in leaf.types:
        flag += f", --no-{flag.removeprefix('--')}"
    meaning = leaf.meta["help"]
    if leaf.meta["choices"]:
        meaning += f"; one of {', '.join(f'`{choice}`' for choice in leaf.meta['choices'])}"
    if leaf.meta["unit"]:
        meaning += f" ({leaf.meta['unit']})"
    default = format_default(leaf)
    return f"| `{leaf.name}` | `{flag}` | {f'`{default}`' if default else ''} | {meaning} |"


if __name__ == "__main__":
    sys.stdout.write(reference())
