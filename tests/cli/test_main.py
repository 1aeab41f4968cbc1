"""The real command: exit codes, what goes to stdout and what to stderr, and what it imports."""

import ctypes
import json
import logging
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from ssdtune import errors
from ssdtune.cli import arguments, commands
from ssdtune.cli.main import main
from ssdtune.config.leaves import all_leaves
from tests.hardware.tiny import TINY
from tests.problems import process

ROOT = Path(__file__).parents[2]


def python(*args):
    return subprocess.run(
        [sys.executable, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@pytest.mark.parametrize("command", ["", *commands.COMMANDS])
def test_help_goes_to_stdout(command, capsys):
    assert main([command, "--help"] if command else ["--help"]) == 0
    out, err = capsys.readouterr()
    assert f"ssdtune {command}".strip() in out
    assert err == ""


def test_every_command_has_a_parser_and_every_setting_a_flag(capsys, monkeypatch):
    _, parsers = arguments.build_parser()
    assert set(parsers) == set(commands.COMMANDS)
    monkeypatch.setenv("COLUMNS", "1000")
    main(["finetune", "--help"])
    text = capsys.readouterr().out
    for leaf in all_leaves().values():
        assert f"  {leaf.flag}" in text
        assert leaf.meta["help"] in text


def test_help_shows_what_a_command_uses(capsys):
    for command, shown, hidden in [
        (
            "eval",
            ["--eval-file", "--device", "--dtype"],
            ["--learning-rate", "--swap-dirs", "--adapter", "io settings"],
        ),
        (
            "data",
            ["--train-file", "--max-length"],
            ["--packing", "--dtype", "--max-steps", "memory settings"],
        ),
    ]:
        main([command, "--help"])
        text = capsys.readouterr().out
        assert [word for word in shown if word not in text] == []
        assert [word for word in hidden if word in text] == []


def test_version():
    result = python("-m", "ssdtune", "--version")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("ssdtune 0.")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "required: COMMAND"),
        (["finetun"], "invalid choice: 'finetun'"),
        (["plan", "--learning_rat", "1"], "unknown flag --learning-rat. Did you mean --learning-r"),
        (["plan", "--zzzzzzz", "1"], 'unknown flag --zzzzzzz. See "ssdtune plan'),
        (["plan", "a", "b"], "unrecognized arguments: b"),
        (["plan", "--learning-rate"], "expected one argument"),
        (["plan", "a", "--set", "x"], '--set wants KEY=VALUE, such as io.queue_depth=64, not "x"'),
        (
            ["plan", "a", "--set", "io.queue_dept=1"],
            'unknown key "queue_dept" in "io". Did you mean',
        ),
        (["plan", "a", "--batch-size", "3"], '"batch_size" is ambiguous'),
        (["plan", "a", "--lr", "x"], '--lr must be a number, not "x"'),
        (
            ["plan", "a", "--lr", "1", "--learning-rate", "1"],
            '"lr" and "learning_rate" are the same',
        ),
        (["plan", "a", "--model-name-or-path", "b"], "the model is named twice"),
        (["plan", "a", "--config", "nothing.yaml"], "no such file"),
        (["plan", "/nothing"], "the model folder /nothing does not exist"),
        (["plan"], "no model is named"),
        (["finetune", "a/b"], "training.output_dir is not set"),
        (["data", "a/b", "--train-file", "/nothing"], "data.train_file: /nothing does not exist"),
        (["eval", "a/b"], "data.eval_file is not set"),
        (["generate", "/nothing", "--prompt", "a", "--max-new-tokens", "0"], "at least 1, not 0"),
    ],
)
def test_wrong_usage_is_exit_code_2_and_one_message(args, message, capsys):
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "Traceback" not in err


def test_all_mistakes_in_flags_at_once(capsys):
    assert main(["plan", "a", "--seed", "x", "--max-steps", "0", "--dtype", "int8"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert sorted(line.split()[1] for line in lines) == ["--dtype", "--max-steps", "--seed"]


def parsed(*args):
    parser, parsers = arguments.build_parser()
    return arguments.settings_from(arguments.parse(parser, parsers, list(args)))


def test_flags_become_settings(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("training: {seed: 3, max_steps: 5}\ndata: {packing: true}\n")
    config = parsed(
        "finetune", "some/model", "--config", str(path), "--learning_rate=1e-4", "--no-packing",
        "--set", "io.queue-depth=64", "--set", "data.shuffle=false", "--lora_r", "4", "--lora",
        "--host-memory", "3GiB", "--swap-dirs", "/a,/b", "--max-steps", "none", "--bf16",
    )  # fmt: skip
    assert config.model.model_name_or_path == "some/model"
    assert config.training.learning_rate == 1e-4
    assert config.training.seed == 3
    assert config.training.max_steps is None
    assert config.data.packing is False
    assert config.data.shuffle is False
    assert config.io.queue_depth == 64
    assert (config.method, config.lora.r) == ("lora", 4)
    assert config.memory.host_memory == 3 << 30
    assert config.io.swap_dirs == ["/a", "/b"]
    assert config.model.dtype == "bf16"


def test_underscores_in_values_stay():
    assert parsed("plan", "a_b/c_d", "--output_dir=x_y").training.output_dir == "x_y"
    assert parsed("plan", "a_b/c_d").model.model_name_or_path == "a_b/c_d"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.SsdtuneError("first\nsecond"), 1),
        (errors.ConfigError("first\nsecond"), 2),
        (errors.CapacityError("first\nsecond"), 2),
        (errors.Interrupted("first\nsecond", 15), 143),
    ],
)
def test_our_errors_have_their_exit_code_and_no_traceback(monkeypatch, capsys, error, code):
    def fail(args):
        raise error

    monkeypatch.setitem(commands.COMMANDS, "doctor", fail)
    assert main(["doctor"]) == code
    assert capsys.readouterr().err == "error: first\nerror: second\n"
    for args in (["doctor", "-v"], ["-v", "doctor"]):
        assert main(args) == code
        assert "Traceback" in capsys.readouterr().err


def test_other_errors_show_the_traceback_and_ask_for_the_report(monkeypatch, capsys):
    monkeypatch.setitem(commands.COMMANDS, "doctor", lambda args: 1 // 0)
    assert main(["doctor"]) == 1
    err = capsys.readouterr().err
    assert "ZeroDivisionError" in err
    assert "ssdtune doctor --json" in err


def test_ctrl_c_is_130(monkeypatch, capsys):
    def interrupt(args):
        raise KeyboardInterrupt

    monkeypatch.setitem(commands.COMMANDS, "doctor", interrupt)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "error: interrupted\n"


def test_a_reader_that_went_away_is_no_error():
    code = "import os, sys; os.close(0); r, w = os.pipe(); os.close(r); os.dup2(w, 1);"
    code += "from ssdtune.cli.main import main; sys.exit(main(['doctor']))"
    result = python("-c", code)
    assert (result.returncode, result.stderr) == (0, "")


def test_notes_are_hidden_by_q(capsys):
    main(["plan", "/nothing", "--lr", "1"])
    assert 'note: "lr" is read as' in capsys.readouterr().err
    logger = logging.getLogger("ssdtune")
    before = logger.level, logger.propagate, logger.handlers[:]
    main(["plan", "/nothing", "--lr", "1", "-q"])
    assert "note" not in capsys.readouterr().err
    assert (logger.level, logger.propagate, logger.handlers) == before


@pytest.mark.parametrize(
    "args", [["--help"], ["finetune", "--help"], ["doctor", "--json"], ["plan", "/nothing"]]
)
def test_light_commands_import_nothing_heavy(args):
    code = (
        "import sys; from ssdtune.cli.main import main; main(sys.argv[1:]);"
        "print([m for m in ('torch', 'transformers', 'peft') if m in sys.modules], file=sys.stderr)"
    )
    assert python("-c", code, *args).stderr.splitlines()[-1] == "[]"


def test_data_shows_rows_and_prints_one_json_document(tmp_path, capsys):
    file = tmp_path / "train.jsonl"
    file.write_text('{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}\n')
    assert main(["data", "--train-file", str(file), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema_version"] == 1
    assert main(["data", "--train-file", str(file), "--rows", "-1"]) == 2
    file.write_text("{\n")
    assert main(["data", "--train-file", str(file)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"{file}:1" in err


def test_profile_is_kept_where_it_is_asked_for(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("ssdtune.hardware.measure.QUICK", TINY)
    path = tmp_path / "deep" / "profile.json"
    assert main(["profile", str(tmp_path), "--quick", "--json", "--output", str(path)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads(path.read_text())


def test_doctor_prints_one_json_document(tmp_path):
    result = python("-m", "ssdtune", "doctor", tmp_path, "--json")
    document = json.loads(result.stdout)
    assert document["schema_version"] == 1
    assert result.returncode == (0 if document["usable"] else 3)


def test_errors_of_the_system_name_the_file_and_have_no_traceback(monkeypatch, capsys):
    def fail(args):
        raise OSError(args.swap_dir[0] and int(args.swap_dir[0]), "unused", "/some/file")

    monkeypatch.setitem(commands.COMMANDS, "doctor", fail)
    assert main(["doctor", "28"]) == 1
    assert capsys.readouterr().err == "error: /some/file: no space left on device [ENOSPC]\n"
    assert main(["doctor", "-v", "28"]) == 1
    assert "Traceback" in capsys.readouterr().err
    # a missing file of ours is a bug
    assert main(["doctor", "2"]) == 1
    assert "this is a bug" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [(), ("-q",), ("-v",)])
def test_what_is_said_of_a_run_is_said_once_and_on_stderr(tmp_path, flags):
    from tests.toy import make_checkpoint, make_rows

    make_checkpoint(tmp_path / "model", "llama")
    make_rows(tmp_path / "rows.jsonl", 6)
    args = [
        *flags, "finetune", tmp_path / "model", "--train-file", tmp_path / "rows.jsonl",
        "--output-dir", tmp_path / "out", "--max-steps", 2, "--save-steps", 2, "--lr", "1e-4",
        "--rated-terabytes-written", "0.001", "--wear-warning", "0", "--host-cache", 0, "--compute-threads", 2, "--json",
    ]  # fmt: skip
    if flags:
        stdout = tmp_path / "stdout"
        code, err = process.run(_main_with_stdout, stdout, [*map(str, args)])
        out = stdout.read_text()
    else:  # as users start it; what it imports may say something, too
        result = python("-m", "ssdtune", *args)
        code, out, err = result.returncode, result.stdout, result.stderr
    assert code == 0, err
    document = json.loads(out)
    assert document["steps"] == len(document["losses"]) == 2
    lines = err.splitlines()
    assert len(lines) == len(set(lines))
    warnings = [line for line in lines if "warning:" in line]
    assert len(warnings) == 1 and "this run writes" in warnings[0]
    if flags == ("-q",):
        assert lines == warnings
    else:
        assert sum(line.startswith("step ") for line in lines) == 2
        for text in ("rows used", "drive wear: ", '"lr" is read as', "first batch: loss", "saved "):
            assert sum(text in line for line in lines) == 1, (text, lines)


def _main_with_stdout(path, args):
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), 1)
    return main(args)


@pytest.mark.root
@pytest.mark.parametrize("place", ["output", "swap", "model"])
def test_folders_without_rights_are_named_before_any_work(tmp_path, place):
    """Root without its override of rights is as an ordinary user is."""
    from tests.toy import make_checkpoint, make_rows

    make_checkpoint(tmp_path / "model", "llama")
    make_rows(tmp_path / "rows.jsonl", 6)
    closed = {
        "output": tmp_path / "closed",
        "swap": tmp_path / "closed",
        "model": tmp_path / "model",
    }[place]
    closed.mkdir(exist_ok=True)
    closed.chmod(0 if place == "model" else 0o555)
    output = closed / "out" if place == "output" else tmp_path / "out"
    swap = closed if place == "swap" else tmp_path / "swap"
    code, text = process.run(
        _main_without_override,
        ["finetune", str(tmp_path / "model"), "--train-file", str(tmp_path / "rows.jsonl"),
         "--output-dir", str(output), "--swap-dirs", str(swap), "--max-steps", "1"],
    )  # fmt: skip
    closed.chmod(0o755)
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    assert code == 2, text
    assert len(errors) == 1
    assert str(closed) in errors[0]
    assert "permission denied" in errors[0].lower()
    assert "first batch" not in text
    assert not (tmp_path / "out").exists()


def _main_without_override(args):
    """Run a command as root who may no longer read and write what others may not."""
    head = struct.pack("Ii", 0x20080522, 0)  # version 3, this process
    libc = ctypes.CDLL(None, use_errno=True)
    sets = ctypes.create_string_buffer(24)
    assert libc.capget(head, sets) == 0
    words = list(struct.unpack("6I", sets.raw))
    for number in range(3):  # effective, permitted, inheritable
        words[number] &= ~(1 << 1 | 1 << 2)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    assert libc.capset(head, struct.pack("6I", *words)) == 0
    return main(args)
