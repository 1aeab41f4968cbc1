"""Settings that contradict each other, and files and folders that are not there."""

import pytest

from ssdtune.config.check import require
from ssdtune.config.load import load_config
from ssdtune.errors import ConfigError


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"adapter": "a"}, "set method: lora"),
        ({"method": "lora", "target_modules": []}, "target_modules is empty"),
        ({"completion_only_loss": True, "assistant_only_loss": True}, "set only one"),
        ({"num_train_epochs": 0}, "nothing to train"),
        ({"warmup_steps": 1.5}, "write whole steps"),
        ({"eval_steps": 2}, "eval_file is not"),
        ({"device": "cuda:x"}, 'not "cuda:x"'),
        ({"device": "tpu"}, 'not "tpu"'),
        ({"host_cache": "2GiB", "host_memory": "1GiB"}, "cannot be larger"),
        ({"request_bytes": 5000}, "multiple of 4096"),
        ({"chunk_bytes": 5000}, "multiple of 4096"),
        ({"swap_dirs": ["a", "./a"]}, "same folder twice"),
        ({"swap_dirs": [""]}, "empty name"),
    ],
)
def test_contradictions(values, message):
    with pytest.raises(ConfigError, match=message):
        load_config(None, values)


def files(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n')
    return {
        "model_name_or_path": tmp_path / "model",
        "train_file": tmp_path / "train.jsonl",
        "output_dir": tmp_path / "out",
    }


def test_what_is_there_passes(tmp_path):
    good = files(tmp_path)
    require(load_config(None, good))
    require(load_config(None, good | {"model_name_or_path": "owner/name"}))


def test_everything_missing_is_said_at_once():
    with pytest.raises(ConfigError) as caught:
        require(load_config())
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [
        "no model is named",
        "data.train_file is not set",
        "training.output_dir is not set",
    ]
    require(load_config(), model=False, train_file=False, output_dir=False)


def test_files_and_folders_that_do_not_fit(tmp_path):
    good = files(tmp_path)
    file = tmp_path / "train.jsonl"
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    cases = [
        ({"model_name_or_path": tmp_path / "nothing"}, "nothing does not exist"),
        ({"model_name_or_path": "./nothing"}, "does not exist"),
        ({"model_name_or_path": file}, "train.jsonl is a file"),
        ({"train_file": tmp_path / "nothing"}, "data.train_file: .*nothing does not exist"),
        ({"train_file": tmp_path}, "is a folder; name a jsonl file"),
        ({"eval_file": tmp_path / "nothing"}, "data.eval_file: .*nothing does not exist"),
        ({"output_dir": file}, "train.jsonl is not a folder"),
        ({"output_dir": file / "deeper"}, "train.jsonl is not a folder"),
        ({"output_dir": tmp_path / "dangling"}, "dangling is not a folder"),
        ({"output_dir": f"{tmp_path}/model/../model/"}, "the model's own folder"),
        ({"adapter": tmp_path, "method": "lora"}, "holds no adapter_config.json"),
        ({"resume_from_checkpoint": tmp_path / "nothing"}, "nothing does not exist"),
    ]
    for change, message in cases:
        with pytest.raises(ConfigError, match=message):
            require(load_config(None, good | change))
    require(load_config(None, good | {"resume_from_checkpoint": "last"}))
