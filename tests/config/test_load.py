"""Settings from files, mappings and flags: what is read, what is refused, and with which words."""

import dataclasses
import logging
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssdtune.config.aliases import ALIASES
from ssdtune.config.leaves import Leaf, all_leaves, leaves_by_flat_name
from ssdtune.config.load import load_config, to_dict, to_yaml
from ssdtune.config.schema import SECTIONS, Config
from ssdtune.errors import ConfigError


def write(folder: Path, text: str, name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def problems(source=None, overrides=None, **options) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides, **options)
    assert caught.value.exit_code == 2
    return str(caught.value).splitlines()


def test_defaults_are_those_of_the_schema():
    assert load_config() == Config()


def test_flat_names_are_unique():
    assert len(leaves_by_flat_name()) == len(all_leaves())
    assert not set(leaves_by_flat_name()) & set(SECTIONS)
    assert not set(leaves_by_flat_name()) & set(ALIASES)
    assert all(alias.target in ("", *leaves_by_flat_name()) for alias in ALIASES.values())


def test_a_file_with_all_kinds_of_values(tmp_path):
    path = write(
        tmp_path,
        """
        method: lora
        model: {model_name_or_path: 007, dtype: bf16}
        lora:
          r: 12
          target_modules: [q_proj, v_proj]
        data:
          train_file: 2024-01-01
          packing: yes
          completion_only_loss: false
        training:
          learning_rate: 1e-4
          max_steps: 1e3
          seed: 012
          eval_steps: null
        memory:
          host_memory: 3GiB
        io.queue_depth: 64
        """,
    )
    config = load_config(path)
    assert config.method == "lora"
    assert config.model.model_name_or_path == "007"
    assert config.lora.r == 12
    assert config.lora.target_modules == ["q_proj", "v_proj"]
    assert config.data.train_file == "2024-01-01"
    assert config.data.packing is True
    assert config.data.completion_only_loss is False
    assert config.training.learning_rate == 1e-4
    assert config.training.max_steps == 1000
    assert isinstance(config.training.max_steps, int)
    assert config.training.seed == 12
    assert config.training.eval_steps is None
    assert config.memory.host_memory == 3 << 30
    assert config.io.queue_depth == 64


def test_flags_win_over_the_file_which_wins_over_defaults(tmp_path):
    path = write(tmp_path, "training: {learning_rate: 0.5, seed: 7, max_steps: 3}\n")
    config = load_config(path, {"lr": "0.25", "max_steps": "none"}, flags=True)
    assert config.training.learning_rate == 0.25
    assert config.training.seed == 7
    assert config.training.max_steps is None
    assert config.training.weight_decay == 0.0


def test_none_means_unset_and_zero_and_false_are_values(tmp_path):
    config = load_config(
        {"training": {"learning_rate": None, "max_grad_norm": 0}, "data": {"shuffle": False}}
    )
    assert config.training.learning_rate == 5e-5
    assert config.training.max_grad_norm == 0
    assert config.data.shuffle is False
    assert load_config({"memory": {"host_cache": 0}}).memory.host_cache == 0


@pytest.mark.parametrize(
    "overrides",
    [
        {"lora_r": 4, "method": "lora"},
        {"lora.r": 4, "method": "lora"},
        {"lora": {"r": 4}, "method": "lora"},
        {"lora": {"lora_r": 4}, "method": "lora"},
        {"lora_rank": 4, "method": "lora"},
    ],
)
def test_one_setting_in_all_its_spellings(overrides):
    assert load_config(None, overrides).lora.r == 4


def test_a_config_can_be_given_and_changed():
    config = load_config({"training": {"seed": 7}})
    assert load_config(config) == config
    changed = load_config(config, {"max_length": 9})
    assert (changed.training.seed, changed.data.max_length) == (7, 9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "training:\n  gradient_accumulation_step: 2\n",
            '2: unknown key "gradient_accumulation_step" in "training". '
            'Did you mean "gradient_accumulation_steps"?',
        ),
        ("trainnig:\n  seed: 2\n", '1: unknown key "trainnig". Did you mean "training"?'),
        ("data:\n  seed: 2\n", '2: unknown key "seed" in "data". It belongs in "training".'),
        ("data:\n  lr: 2\n", '2: unknown key "lr" in "data". It belongs in "training".'),
        ("zzz: 2\n", '1: unknown key "zzz".'),
        ("lora: true\n", '1: "lora" is a section; write keys below it, such as r, or method: lora'),
        ("training:\n  seed: one\n", '2: training.seed must be a whole number, not "one"'),
        ("training:\n  seed: 1.5\n", '2: training.seed must be a whole number, not "1.5"'),
        ("training:\n  seed: [1]\n", "2: training.seed must be a whole number, not ['1']"),
        ("training:\n  seed: {a: 1}\n", "2: training.seed must be a"),
        ("training:\n  seed: -1\n", "2: training.seed must be at least 0, not -1"),
        ("training:\n  adam_beta1: 1\n", "2: training.adam_beta1 must be at most 0.999999, not 1"),
        (
            "training:\n  adam_epsilon: 0\n",
            "2: training.adam_epsilon must be at least 1e-30, not 0",
        ),
        ("training:\n  max_steps: 1e30\n", "2: training.max_steps must be at most 1000000000, not"),
        ("training:\n  learning_rate: .nan\n", "2: training.learning_rate must be a number"),
        ("training:\n  learning_rate: nan\n", "2: training.learning_rate must be a finite number"),
        ("training:\n  learning_rate: 1e999\n", "2: training.learning_rate must be a finite"),
        ("data:\n  packing: 2\n", '2: data.packing must be true or false, not "2"'),
        (
            "model:\n  dtype: int8\n",
            '2: model.dtype must be auto or bf16 or fp16 or fp32, not "int8"',
        ),
        ("memory:\n  host_memory: 3GiX\n", "2: memory.host_memory must be a size such as 3GiB"),
        ("memory:\n  host_memory: -1\n", "2: memory.host_memory must be at least 1, not -1"),
        ("io:\n  swap_dirs: {a: b}\n", "2: io.swap_dirs must be a list"),
        ("io:\n  swap_dirs: [[a]]\n", "2: io.swap_dirs must be a text"),
        ("training:\n  output_dir: [a]\n", "2: training.output_dir must be a text"),
        (
            "training:\n  seed: 1\n\n  seed: 1\n",
            '4: "seed" is given twice (lines 2 and 4); keep one',
        ),
        (
            "training:\n  lr: 1\n  learning_rate: 1\n",
            '3: "lr" and "learning_rate" are the same setting (lines 2 and 3); keep one',
        ),
        ("training:\n  seed: 1\nseed: 1\n", '3: "seed" is given twice'),
        (
            "training:\n  batch_size: 8\n",
            '2: "batch_size" is ambiguous: use "per_device_train_batch_size" (sequences in one '
            'micro-batch) and "gradient_accumulation_steps" (micro-batches per step)',
        ),
        ("fp16: maybe\n", "1: fp16 must be true or false, not maybe"),
        ("warmup_ratio: 3\n", "1: warmup_ratio must be below 1, not 3"),
        ("a: [1\n", "2: this is not YAML: "),
        ("- 1\n", "1: settings are written as `key: value`"),
        ("a: 1\n---\nb: 1\n", "2: this is not YAML: "),
    ],
)
def test_what_is_wrong_is_said_with_file_and_line(tmp_path, text, message):
    path = write(tmp_path, text)
    found = problems(path)
    assert len(found) == 1
    assert found[0].startswith(f"{path}:{message}"), found[0]


def test_all_mistakes_at_once(tmp_path):
    path = write(tmp_path, "training:\n  sed: 1\n  max_steps: 0\nmodel:\n  dtype: x\n")
    found = problems(path, {"queue_depht": 1, "logging_steps": "x"})
    assert [line.partition(" ")[0] for line in found] == [
        f"{path}:2:",
        f"{path}:3:",
        f"{path}:5:",
        "unknown",
        "logging_steps",
    ]


def test_flags_are_named_as_flags():
    assert problems(None, {"learning_rate": "x"}, flags=True) == [
        '--learning-rate must be a number, not "x"'
    ]
    assert problems(None, {"lr": "x"}, flags=True) == ['--lr must be a number, not "x"']


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"a: \xff", b"a: \x00"])
def test_files_that_are_not_text(tmp_path, content):
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    assert str(path) in problems(path)[0]


def test_a_file_that_cannot_be_read(tmp_path):
    assert "no such file" in problems(tmp_path / "nothing.yaml")[0]
    assert "is a directory" in problems(tmp_path)[0]


def test_empty_files_and_sections_change_nothing(tmp_path):
    assert load_config(write(tmp_path, "")) == Config()
    assert load_config(write(tmp_path, "# nothing\ntraining:\nio: {}\n")) == Config()


def test_yaml_cannot_run_code_or_grow(tmp_path):
    path = write(tmp_path, "training:\n  output_dir: !!python/object/apply:os.getcwd []\n")
    assert "must be a text" in problems(path)[0]
    laughs = "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9))
    assert problems(write(tmp_path, f"a0: &a0 [lol]\n{laughs}\n"))


def test_an_alias_gives_one_note(tmp_path, caplog):
    path = write(tmp_path, "training:\n  lr: 0.1\nbf16: true\n")
    with caplog.at_level(logging.INFO, "ssdtune"):
        config = load_config(path)
    assert config.training.learning_rate == 0.1
    assert config.model.dtype == "bf16"
    assert [record.getMessage() for record in caplog.records] == [
        f'note: {path}:2: "lr" is read as "training.learning_rate"',
        f'note: {path}:3: "bf16" is read as "model.dtype"',
    ]


@pytest.mark.parametrize(
    ("alias", "value", "key", "expected"),
    [
        ("lr", 0.5, "training.learning_rate", 0.5),
        ("epochs", 2, "training.num_train_epochs", 2.0),
        ("micro_batch_size", 3, "training.per_device_train_batch_size", 3),
        ("max_seq_length", 77, "data.max_length", 77),
        ("warmup_ratio", 0.1, "training.warmup_steps", 0.1),
        ("torch_dtype", "bfloat16", "model.dtype", "bf16"),
        ("torch_dtype", "torch.float32", "model.dtype", "fp32"),
        ("bf16", False, "model.dtype", "auto"),
        ("fp16", False, "model.dtype", "auto"),
        ("fp16", True, "model.dtype", "fp16"),
        ("torch_dtype", "float16", "model.dtype", "fp16"),
        ("clip_grad_norm", 0.5, "training.max_grad_norm", 0.5),
        ("lora_rank", 3, "lora.r", 3),
        ("optim", "adamw_torch", "training.optim", "adamw"),
        ("gradient_checkpointing", True, "memory.recompute", "auto"),
        ("gradient_checkpointing", False, "memory.recompute", "never"),
        ("swap_dir", "a", "io.swap_dirs", ["a"]),
        ("resume_from_checkpoint", "last", "training.resume_from_checkpoint", "last"),
        ("resume_from_checkpoint", True, "training.resume_from_checkpoint", "last"),
        ("resume", False, "training.resume_from_checkpoint", None),
    ],
)
def test_aliases(alias, value, key, expected):
    config = load_config(None, {alias: value})
    section, name = key.split(".")
    assert getattr(getattr(config, section), name) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("all-linear", "all-linear"),
        ("q_proj", ["q_proj"]),
        ("q_proj,v_proj", ["q_proj", "v_proj"]),
        (r".*\.(q|v)_proj", r".*\.(q|v)_proj"),
        (r"layers\.[0-9]{1,2}\..*", r"layers\.[0-9]{1,2}\..*"),
    ],
)
def test_target_modules(text, expected):
    config = load_config(None, {"target_modules": text, "method": "lora"}, flags=True)
    assert config.lora.target_modules == expected


def test_a_leading_tilde_is_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    config = load_config(None, {"output_dir": "~/out", "swap_dirs": ["~/a", "/b~"]})
    assert config.training.output_dir == "/home/somebody/out"
    assert config.io.swap_dirs == ["/home/somebody/a", "/b~"]


def test_paths_and_numpy_numbers_are_taken():
    numpy = pytest.importorskip("numpy")
    config = load_config(None, {"output_dir": Path("a/b"), "max_steps": numpy.int64(3)})
    assert config.training.output_dir == "a/b"
    assert type(config.training.max_steps) is int


def test_every_number_has_a_range():
    """1e30 steps, or a budget of 1e30 bytes, is a mistake that nothing later would name."""
    for leaf in all_leaves().values():
        if {int, float} & set(leaf.types):
            assert None not in (leaf.meta["low"], leaf.meta["high"]), leaf.key


def test_lora_settings_without_lora_are_pointed_out(caplog):
    load_config({"lora": {"r": 8}})
    assert not caplog.records
    load_config({"lora": {"r": 9}})
    assert "lora.r has no effect with method: full" in caplog.text


def values_of(leaf: Leaf) -> st.SearchStrategy:
    """Values that a setting may have, given by its type, choices and range."""
    low, high = leaf.meta["low"], leaf.meta["high"]
    text = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
    if bool in leaf.types:
        strategy = st.booleans()
    elif int in leaf.types:
        bottom, top = int(low or 0), int(high or 2**62)
        page = 4096 if leaf.name in ("request_bytes", "chunk_bytes") else 1
        strategy = st.integers(-(-bottom // page), top // page).map(lambda n: n * page)
    elif float in leaf.types:
        strategy = st.floats(low, high, allow_nan=False, allow_infinity=False)
    elif list in leaf.types:
        strategy = st.lists(text.filter(bool))
    elif leaf.meta["choices"]:
        strategy = st.sampled_from(leaf.meta["choices"])
    else:
        strategy = text
    if leaf.key == "memory.device":
        strategy = st.sampled_from(["auto", "cpu", "cuda", "cuda:3"])
    return st.none() | strategy if leaf.optional else strategy


CONTRADICTING = (
    "model.adapter", "lora.target_modules", "data.completion_only_loss", "training.eval_steps",
    "training.num_train_epochs", "training.warmup_steps", "training.train_batch_size", "memory.host_cache",
    "io.swap_dirs",
)  # fmt: skip


@given(st.fixed_dictionaries({}, optional={k: values_of(v) for k, v in all_leaves().items()}))
def test_yaml_round_trip_is_exact(tmp_path_factory, values):
    try:
        config = load_config(None, values)
    except ConfigError:  # the few settings that can contradict others
        values = {key: value for key, value in values.items() if key not in CONTRADICTING}
        config = load_config(None, values)
    path = tmp_path_factory.mktemp("round") / "run.yaml"
    path.write_text(to_yaml(config), encoding="utf-8", newline="")
    again = load_config(path)
    assert again == config
    assert to_yaml(again) == to_yaml(config)
    assert load_config(to_dict(config)) == config


def test_round_trip_is_not_vacuous():
    config = load_config(None, {"learning_rate": 1 / 3, "output_dir": "null", "seed": 2**62})
    assert dataclasses.replace(config) == load_config(to_dict(config))
    assert math.isclose(config.training.learning_rate, 1 / 3, rel_tol=0)
