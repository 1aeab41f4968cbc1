"""The demo's checkpoint is a real one, made whole or not at all; its rows are fit to learn from."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from ssdtune.config.schema import DataConfig
from ssdtune.data import load_rows, load_tokenizer
from ssdtune.demo import EVAL_FILE, TRAIN_FILE, make_demo_checkpoint
from ssdtune.errors import ConfigError


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_demo_checkpoint(tmp_path_factory.mktemp("demo") / "with space" / "model")


def test_checkpoint_is_sharded_and_loads(checkpoint):
    shards = sorted(checkpoint.glob("model-*-of-*.safetensors"))
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    assert len(shards) > 1 and set(index["weight_map"].values()) == {path.name for path in shards}
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = load_tokenizer(checkpoint)
    assert model.dtype == torch.float32
    assert len(tokenizer) == model.config.vocab_size
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is a cache? ñ ☂"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    text = tokenizer.decode(inputs["input_ids"][0])
    assert text == "<|bos|><|start|>user\nWhat is a cache? ñ ☂<|end|>\n<|start|>assistant\n"
    assert model.generate(**inputs, max_new_tokens=3).shape[1] > inputs["input_ids"].shape[1]
    # Nothing but the checkpoint is left where it was made.
    assert [path.name for path in checkpoint.parent.iterdir()] == ["model"]


def test_whole_checkpoint_is_reused_and_a_damaged_one_made_again(checkpoint):
    shard = checkpoint / "model-00001-of-00003.safetensors"
    before, content = shard.stat(), shard.read_bytes()
    assert make_demo_checkpoint(checkpoint) == checkpoint
    assert shard.stat().st_mtime_ns == before.st_mtime_ns
    shard.write_bytes(b"")
    make_demo_checkpoint(checkpoint)
    assert shard.read_bytes() == content  # the seed alone decides
    shard.unlink()
    make_demo_checkpoint(checkpoint, seed=1)
    assert shard.read_bytes() != content


def test_other_folders_are_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("keep me")
    with pytest.raises(ConfigError, match=r"exists and is no demo checkpoint"):
        make_demo_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match=r"exists and is no demo checkpoint"):
        make_demo_checkpoint(tmp_path / "mine.txt")
    with pytest.raises(ConfigError, match=r"cannot make the demo checkpoint"):
        make_demo_checkpoint(tmp_path / "mine.txt" / "below")
    assert (tmp_path / "mine.txt").read_text() == "keep me"


def test_rows_are_whole_and_no_evaluation_row_is_trained_on(checkpoint):
    tokenizer = load_tokenizer(checkpoint)
    loaded = [
        load_rows(path, tokenizer, DataConfig(max_length=128, strict=True), vocab_size=1024)
        for path in (TRAIN_FILE, EVAL_FILE)
    ]
    assert [len(rows) for rows in loaded] == [256, 32]
    texts = [
        message["content"]
        for path in (TRAIN_FILE, EVAL_FILE)
        for line in path.read_text(encoding="utf-8").splitlines()
        for message in json.loads(line)["messages"]
    ]
    assert len(set(texts)) == len(texts) == 2 * (256 + 32)
    answers = load_rows(EVAL_FILE, tokenizer, DataConfig(assistant_only_loss=True))
    assert 0 < answers.report.num_learned_tokens < loaded[1].report.num_learned_tokens
