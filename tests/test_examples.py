"""Every example is well-formed, in all three forms, and says the same thing in each."""

import ast
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from ssdtune.cli import arguments
from ssdtune.config.leaves import all_leaves
from ssdtune.config.load import load_config, to_dict

ROOT = Path(__file__).parents[1]
NAMES = ["full_small", "lora_small", "full_70b", "lora_70b"]


def by_yaml(name):
    return load_config(ROOT / "examples" / f"{name}.yaml")


def by_python(name):
    """Return the settings that the script's call, or its `settings`, holds."""
    tree = ast.parse((ROOT / "examples" / f"{name}.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.keywords]
    call = next(node for node in calls if ast.unparse(node.func) in ("ssdtune.finetune", "dict"))
    values = {}
    for item in call.keywords:
        try:
            values[item.arg] = ast.literal_eval(item.value)
        except ValueError:  # a path that is made when the script runs
            values[item.arg] = "some/path"
    return load_config(None, values)


def by_shell(name):
    """Return the settings that the script's flags give."""
    lines = (ROOT / "examples" / f"{name}.sh").read_text().replace("\\\n", " ").splitlines()
    words = [word for line in lines for word in _flags(line)]
    parser, commands = arguments.build_parser()
    return arguments.settings_from(arguments.parse(parser, commands, ["finetune", "m", *words]))


def _flags(line):
    stripped = line.strip()
    if "ssdtune finetune" in stripped and "--train-file" in stripped:
        stripped = stripped[stripped.index("--train-file") :]
    if not stripped.startswith("--"):
        return []
    return [re.sub(r"\$.*", "some/path", word) for word in shlex.split(stripped)]


def comparable(config):
    """Return the settings without paths, which differ between the forms on purpose."""
    values = to_dict(config)
    flat = {leaf.key: (values[leaf.section] if leaf.section else values)[leaf.name]
            for leaf in all_leaves().values() if not leaf.meta["path"]}  # fmt: skip
    return flat


@pytest.mark.parametrize("name", NAMES)
def test_the_three_forms_agree(name):
    assert comparable(by_python(name)) == comparable(by_shell(name))
    of_yaml, of_shell = comparable(by_yaml(name)), comparable(by_shell(name))
    # The YAML files of the large models show some settings more.
    more = {"training.max_grad_norm", "training.num_train_epochs", "training.save_total_limit",
            "training.warmup_steps", "lora.target_modules"}  # fmt: skip
    more = more if name.endswith("70b") else set()
    assert {key: of_yaml[key] for key in of_yaml if key not in more} == {
        key: of_shell[key] for key in of_shell if key not in more
    }


def test_every_example_is_tested():
    found = {path.stem for path in (ROOT / "examples").iterdir() if path.suffix != ".md"}
    assert found - {"demo"} == set(NAMES)


@pytest.mark.parametrize(
    "path",
    [
        *ROOT.glob("examples/*.sh"),
        *ROOT.glob("tools/*.sh"),
        ROOT / "tests/run.sh",
        ROOT / ".ci/run",
    ],
    ids=lambda path: path.name,
)
def test_shell_scripts_parse(path):
    subprocess.run(["bash", "-n", path], check=True, timeout=30)


@pytest.mark.parametrize(
    "script", [*ROOT.glob("examples/*.sh"), ROOT / "tests/run.sh"], ids=lambda p: p.name
)
def test_scripts_do_not_pass_their_own_arguments_on(script: Path) -> None:
    """What is sourced without arguments sees those of the script: `demo.sh MODEL` would install an extra MODEL."""
    for line in script.read_text().splitlines():
        if line.startswith(". ") and "venv.sh" in line:
            assert not line.endswith('venv.sh"'), line
