"""The README's demo, shortened: the whole job on real files, twice, in a folder with a space in its name."""

import json

import pytest

from ssdtune.cli import demo_command
from ssdtune.cli.main import main
from ssdtune.config.load import load_config
from ssdtune.demo import EVAL_FILE
from ssdtune.errors import MismatchError, SsdtuneError
from tests.hardware.tiny import TINY

pytestmark = pytest.mark.usefixtures("short_rehearsals")
SHORT = ["--max-steps", "4", "--warmup-steps", "0", "--dtype", "fp32"]


@pytest.mark.timeout(300)  # everything, twice
def test_the_demo_works_and_works_again(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("ssdtune.hardware.measure.QUICK", TINY)
    monkeypatch.setattr(demo_command, "_NEW_TOKENS", 8)
    folder = tmp_path / "de mo"
    for _ in range(2):
        assert main(["demo", "--demo-dir", str(folder), "--json", *SHORT]) == 0
        out, err = capsys.readouterr()
        document = json.loads(out)
        assert document["loss_after"] < document["loss_before"] - 0.5
        assert len(document["answers"]) == 2
        assert "== fine-tuning with all states on SSD" in err
    # What the commands say of the same folders.
    output = str(folder / "output")
    eval_file = str(EVAL_FILE)
    assert main(["eval", output, "--eval-file", eval_file, "--dtype", "fp32", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(document["loss_after"])
    assert main(["generate", output, "--prompt", "Can I", "--max-new-tokens", "3"]) == 0
    assert capsys.readouterr().out
    plan = ["plan", str(folder / "model"), "--output-dir", str(folder / "other")]
    assert main([*plan, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["fits"] is True
    assert document["estimate"]["disk_bytes"]["total"] > 0
    assert main([*plan, "--host-memory", "1MiB"]) == 3
    assert "It does not fit" in capsys.readouterr().out
    assert not (folder / "other").exists()


@pytest.mark.parametrize("content", ["file", "foreign"])
def test_a_folder_of_somebody_else_is_left_alone(tmp_path, capsys, content):
    folder = tmp_path / "demo"
    if content == "file":
        folder.write_text("mine")
    else:
        (folder / "output").mkdir(parents=True)
        (folder / "output" / "thesis.txt").write_text("mine")
    assert main(["demo", "--demo-dir", str(folder)]) == 2
    assert str(folder) in capsys.readouterr().err
    left = folder if content == "file" else folder / "output" / "thesis.txt"
    assert left.read_text() == "mine"


def test_another_loss_than_reported_or_one_that_rose_is_a_failure():
    config = load_config(None, {"dtype": "fp32"})
    demo_command._compare(3.0, 2.0, 2.0001, config)
    with pytest.raises(MismatchError, match=r"reported a loss of 2.01000 .* finds 2.00000"):
        demo_command._compare(3.0, 2.0, 2.01, config)
    with pytest.raises(SsdtuneError, match=r"did not fall: 2\.000 before, 3\.000 after"):
        demo_command._compare(2.0, 3.0, 3.0, config)
