"""Write docs/machines.md: which models the machines of the data sheets can train, how fast, and what would help.

    python tools/plan_table.py [--machines rtx-4090 ...] [--models 8B ...] [--jobs 2] [--print]

Every figure is `ssdtune plan MODEL --hardware NAME` for a model known by its config.json alone, made here from published
shapes. Nothing is measured, so the table is the same wherever it is made, but for the memory of this process that the
plans count. A plan takes some seconds of CPU; the table some minutes.
"""

import argparse
import json
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

PAGE = ROOT / "docs/machines.md"
MARK = "<!-- made by tools/plan_table.py: do not edit below -->\n"
MACHINES = ("laptop-8gb", "t4", "rtx-3090", "rtx-4090", "rtx-5090", "a100-80gb", "h200")
LLAMA, QWEN = "llama", "qwen2"
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # like: Llama-3.1-8B, Qwen2.5-14B, Qwen2.5-32B, Llama-3.1-70B, Mistral-Large-2407
    name: (
        kind,
        {
            "num_hidden_layers": blocks, "hidden_size": hidden, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "intermediate_size": inner, "vocab_size": vocabulary,
            "max_position_embeddings": 8192, "tie_word_embeddings": False,
        },
    )
    for name, kind, blocks, hidden, heads, kv_heads, inner, vocabulary in (
        ("8B", LLAMA, 32, 4096, 32, 8, 14336, 128256),
        ("14B", QWEN, 48, 5120, 40, 8, 13824, 152064),
        ("32B", QWEN, 64, 5120, 40, 8, 27648, 152064),
        ("70B", LLAMA, 80, 8192, 64, 8, 28672, 128256),
        ("123B", "mistral", 88, 12288, 96, 8, 28672, 32768),
    )
}  # fmt: skip
CLASSES = {LLAMA: "LlamaForCausalLM", QWEN: "Qwen2ForCausalLM", "mistral": "MistralForCausalLM"}
USUAL_MACHINES = ("laptop-8gb", "t4", "rtx-3090", "rtx-4090", "h200")
USUAL_MODELS = ("8B", "14B", "70B", "123B")
METHODS = ("full", "lora")
STEP = ["--max-length", "2048", "--train-batch-size", "32"]
SHOWN = (
    ("8B", "rtx-4090", "full"), ("70B", "rtx-3090", "lora"), ("8B", "laptop-8gb", "lora"),
    ("14B", "t4", "lora"), ("70B", "h200", "full"),
)  # fmt: skip
"""Whose plans are shown whole."""
PUBLISHED = (
    "No step of ours was measured on any of these machines. What can be compared is another system's: the steps published "
    "for an RTX 4090 with twelve drives (see [simulator.md](simulator.md)), simulated with the figures of its data sheet "
    "instead of the constants that were fitted to those steps. Nothing of the data sheet was chosen by this comparison."
)


@dataclass(frozen=True)
class Case:
    """One plan of the table."""

    model: str
    machine: str
    method: str

    @property
    def command(self) -> list[str]:
        """Return the arguments of ssdtune; the model's folder is called like the model."""
        lora = ["--method", "lora"] if self.method == "lora" else []
        return ["plan", self.model, "--hardware", self.machine, *lora, *STEP]


@dataclass(frozen=True)
class Answer:
    """What the plan says, as words and as figures."""

    text: str
    figures: dict[str, Any]


def write_model(folder: Path, name: str) -> None:
    kind, sizes = MODELS[name]
    (folder / name).mkdir()
    settings = {"model_type": kind, "architectures": [CLASSES[kind]], "torch_dtype": "bfloat16", **sizes}  # fmt: skip
    if kind == "mistral":
        settings["sliding_window"] = None
    (folder / name / "config.json").write_text(json.dumps(settings), encoding="utf-8")


def answer(case: Case, folder: Path) -> Answer:
    """Plan as the command does, in the folder of the models so that names in the text are short."""
    import os

    from ssdtune.cli.arguments import build_parser, parse, settings_from
    from ssdtune.hardware.known import known
    from ssdtune.train.planning import plan

    os.chdir(folder)
    config = settings_from(parse(*build_parser(), case.command))
    result = plan(config, known(case.machine), other_machine=True)
    print(f"{case.model} {case.method} on {case.machine}", file=sys.stderr, flush=True)
    return Answer(result.text(), result.to_dict())


def answers(cases: list[Case], jobs: int) -> dict[Case, Answer]:
    with tempfile.TemporaryDirectory() as scratch:
        for name in {case.model for case in cases}:
            write_model(Path(scratch), name)
        folders = [Path(scratch)] * len(cases)
        if jobs == 1:
            return dict(zip(cases, map(answer, cases, folders), strict=True))
        with ProcessPoolExecutor(jobs) as pool:
            return dict(zip(cases, pool.map(answer, cases, folders), strict=True))


def row(case: Case, found: Answer) -> str:
    from ssdtune.report.answer import RESOURCES
    from ssdtune.units import format_count, format_disk, format_memory, format_time

    figures = found.figures
    forecast, memory, estimate = figures["forecast"], figures["memory"], figures["estimate"]
    if not forecast:
        return (
            f"| {case.model} | {case.method} | no: {reason(figures['problems'][0])} | | | | | | | |"
        )
    wear, step = estimate["wear"], figures["step"]
    life = wear["life_steps"]
    lasts = f"{format_count(life * step['tokens'])} tokens" if life else "not worn"
    cells = [
        case.model, case.method, "yes" if figures["fits"] else f"no: {reason(figures['problems'][0])}",
        f"{forecast['tokens_per_s']:.3g}", format_time(forecast["step_s"]), RESOURCES[forecast["binding"]],
        format_disk(estimate["disk_bytes"]["total"]), f"{format_disk(wear['step_bytes'])}: {lasts}",
        format_memory(sum(memory["breakdown"].values())), format_memory(memory["device_bytes"]),
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def reason(problem: str) -> str:
    """Shorten why something does not fit to its figures."""
    nearest = problem.partition("What would fit: ")[2].rstrip(".")
    if nearest:
        return f"{problem.partition(':')[0]} too small. Would fit: {nearest}"
    if problem.startswith("not enough space"):
        return f"space: {problem.rpartition('. ')[2] if 'missing' not in problem else problem.partition('must stay free. ')[2]}"
    return problem.partition(". ")[0]


HEAD = (
    "| model | method | fits | tokens/s | step | works most | SSD space | written per step: drives last | host memory | GPU memory |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def published() -> list[str]:
    """Say how far steps that others measured on an RTX 4090 are from its data sheet's figures."""
    from dataclasses import replace

    from ssdtune.hardware.datasheet import named_machine
    from ssdtune.plan.validate import RATEL_4090, Constants, anchor_rows, predict, predict_all

    rates = named_machine("rtx-4090").rates()
    assert rates.h2d_bytes_per_s is not None and rates.d2h_bytes_per_s is not None
    # Their drives, memory and number of drives; by the rules of the sheets instead of what was fitted.
    machine = replace(
        RATEL_4090, flop_per_s=rates.forward_flop_per_s["fp16"], h2d_bytes_per_s=rates.h2d_bytes_per_s,
        d2h_bytes_per_s=rates.d2h_bytes_per_s, adam_elements_per_s=RATEL_4090.dram_bytes_per_s / 2 / 28,
        request_s=0.0,
    )  # fmt: skip
    constants = Constants(hardware=machine)
    rows = predict_all(constants, use=("fit", "held-out"))
    errors = sorted(p.error for p in rows)
    lines = [
        f"All {len(rows)} published steps of that system: {errors[0]:+.0%} to {errors[-1]:+.0%}, "
        f"{sum(errors) / len(errors):+.0%} in the mean, {sum(map(abs, errors)) / len(errors):.0%} without sign; "
        f"{sum(abs(error) <= 0.15 for error in errors)} are within 15 %.",
        "", "| row | published | by the data sheet | | with fitted constants |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for row in anchor_rows():
        sheet, fitted = predict(row, constants), predict(row)
        lines.append(
            f"| {row.label} | {sheet.published_s:.1f} s | {sheet.predicted_s:.1f} s | {sheet.error:+.0%} | {fitted.error:+.0%} |"
        )
    return lines


def page(found: dict[Case, Answer]) -> str:
    from ssdtune.hardware.known import known
    from ssdtune.train.elsewhere import describe

    lines = ["## What fits, and how fast", ""]
    for machine in dict.fromkeys(case.machine for case in found):
        profile = known(machine)
        assert profile is not None
        what = describe(profile).removeprefix("planned for another machine: ").partition(";")[0]
        lines += [f"### {machine}", "", f"{what}.", "", HEAD]
        lines += [row(case, result) for case, result in found.items() if case.machine == machine]
        lines.append("")
    lines += ["## Five plans whole", ""]
    for case, result in found.items():
        if (case.model, case.machine, case.method) in SHOWN:
            lines += [f"    $ ssdtune {' '.join(case.command)}", ""]
            lines += [f"    {line}" for line in result.text.splitlines()] + [""]
    lines += ["## How far off are data sheets?", "", PUBLISHED, "", *published(), ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--machines", nargs="+", default=list(USUAL_MACHINES), choices=list(MACHINES)
    )
    parser.add_argument("--models", nargs="+", default=list(USUAL_MODELS), choices=list(MODELS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--print", action="store_true", help="print it instead of writing the page")
    parser.add_argument("--whole", action="store_true", help="print the plans whole")
    args = parser.parse_args()
    cases = [
        Case(model, machine, method)
        for machine in args.machines for model in args.models for method in args.methods
    ]  # fmt: skip
    found = answers(cases, args.jobs)
    if args.whole:
        for case, result in found.items():
            print(f"$ ssdtune {' '.join(case.command)}\n{result.text}\n")
    elif args.print:
        print(page(found))
    else:
        before = PAGE.read_text(encoding="utf-8").partition(MARK)[0]
        PAGE.write_text(before + MARK + "\n" + page(found), encoding="utf-8")


if __name__ == "__main__":
    main()
