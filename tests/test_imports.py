"""Imports point one way, modules stay small, and importing costs nothing: read from the syntax trees."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "ssdtune"
MODULES = sorted(PACKAGE.rglob("*.py"))

# A module may import from its own part and from those on lower steps, except as listed below.
STEPS = [
    {"__init__", "__main__", "cli", "api"},
    {"train", "export", "demo"},
    {"hardware"},  # measures what the parts below do
    {"swap", "optim", "model", "data"},
    {"store"},
    {"io", "device", "plan", "report"},
    {"config"},
    {"errors", "units", "log", "_native"},
]
SAME_STEP = {
    ("__main__", "cli"), ("__init__", "api"), ("cli", "api"), ("api", "cli"), ("cli", "__init__"),
    ("log", "errors"), ("units", "errors"),
    ("train", "export"),  # the end of a run writes the tuned weights
    ("swap", "optim"), ("swap", "model"),
    ("report", "plan"),  # pictures of schedules
    ("device", "io"),  # where a card's memory is, for drives that reach it
}  # fmt: skip
# Plain numbers: no torch and no files, so that a plan can be made anywhere.
PLAIN = {"plan", "config"}


def part_of(name: str) -> str:
    pieces = name.split(".")
    return pieces[1] if len(pieces) > 1 else "__init__"


def imports(path: Path):
    """Yield (line, module, whether at the top of the file) of every import that runs."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            skipped |= {id(inner) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            for name in node.names:
                yield node.lineno, name.name, node in tree.body
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, (
                f"{path}:{node.lineno}: write the whole name, not a relative import"
            )
            module = node.module or ""
            if module == "ssdtune":
                for name in node.names:
                    known = any(PACKAGE.glob(name.name)) or any(PACKAGE.glob(f"{name.name}.py*"))
                    yield node.lineno, f"ssdtune.{name.name}" if known else "ssdtune", True
            else:
                yield node.lineno, module, node in tree.body


def own_part(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def test_every_part_has_its_step():
    parts = {own_part(path) for path in MODULES}
    listed = set().union(*STEPS)
    assert parts <= listed, f"add to STEPS: {parts - listed}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path):
    step = {part: number for number, parts in enumerate(STEPS) for part in parts}
    own = own_part(path)
    wrong = []
    for line, module, _ in imports(path):
        if not (module == "ssdtune" or module.startswith("ssdtune.")):
            continue
        part = part_of(module)
        if part == "__init__" and own in ("cli", "report", "train", "export", "hardware"):
            continue  # for __version__
        if part == own or step[part] > step[own] or (own, part) in SAME_STEP:
            continue
        wrong.append(f"{path}:{line}: {own} must not import {module}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_plain_parts_need_neither_torch_nor_transformers(path):
    if own_part(path) in PLAIN:
        for line, module, _ in imports(path):
            assert module.split(".")[0] not in ("torch", "transformers", "peft"), f"{path}:{line}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_modules_stay_small_and_say_what_they_are(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 800, "split it: 800 lines are the limit"
    if path.name != "__init__.py":
        assert ast.get_docstring(ast.parse(text)), "a module opens with a docstring"


def test_importing_ssdtune_is_cheap():
    code = "import sys, ssdtune; print(sorted({'torch', 'transformers', 'numpy', 'yaml'} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"PYTHONPATH": str(PACKAGE.parent)},
    )
    assert result.stdout.strip() == "[]"


def test_functions_keep_their_names_next_to_packages_of_the_same_name():
    code = (
        "import ssdtune; from ssdtune.plan import schedule; import ssdtune.export;"
        "assert callable(ssdtune.plan) and callable(ssdtune.export);"
        "assert all(hasattr(ssdtune, name) for name in ssdtune.__all__)"
    )
    subprocess.run(
        [sys.executable, "-c", code],
        timeout=60,
        check=True,
        env={"PYTHONPATH": str(PACKAGE.parent)},
    )


def test_every_module_is_imported_without_cuda_libraries():
    # as on a machine that has none of them; a torch built for CUDA brings its own, which is torch's affair
    code = f"""
import importlib, sys, torch
from pathlib import Path

class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("kvikio", "libkvikio", "cupy", "cuda", "nvidia", "pynvml"):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

def libraries():
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {{line.split()[-1] for line in lines if "/" in line and ".so" in line}}

sys.meta_path.insert(0, Nothing())
before = libraries()
for path in {[str(path.relative_to(PACKAGE.parent)) for path in MODULES if path.name != "__main__.py"]}:
    importlib.import_module(path.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
words = ("libcuda", "libcudart", "libcufile", "libnv", "kvikio")
print([name for name in libraries() - before if any(word in name for word in words)])
"""
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={"PYTHONPATH": str(PACKAGE.parent)},
    )
    assert result.stdout.strip() == "[]", result.stderr
