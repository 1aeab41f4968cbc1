"""Files that are there whole or not at all."""

import json

import pytest

from ssdtune.errors import StorageError
from ssdtune.store.durable import fsync, remove_dir, replace_dir, write_json_atomic


def test_json_is_replaced_whole(tmp_path):
    path = tmp_path / "ü.json"
    write_json_atomic(path, {"a": [1, None, "ü"]})
    write_json_atomic(path, {"b": 1.5})
    assert json.loads(path.read_text(encoding="utf-8")) == {"b": 1.5}
    assert [p.name for p in tmp_path.iterdir()] == ["ü.json"]


def test_what_is_no_json_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.json"
    write_json_atomic(path, 1)
    for bad in (float("nan"), {1, 2}):
        with pytest.raises((ValueError, TypeError)):
            write_json_atomic(path, bad)
    assert path.read_text() == "1\n"
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_names_that_python_cannot_decode_survive(tmp_path):
    path = tmp_path / "x.json"
    write_json_atomic(path, "caf\udce9")
    assert json.loads(path.read_text(encoding="utf-8", errors="surrogateescape")) == "caf\udce9"


def test_failures_name_the_path(tmp_path):
    with pytest.raises(StorageError, match=r"write of .*/none/x\.json failed.*ENOENT"):
        write_json_atomic(tmp_path / "none" / "x.json", 1)
    with pytest.raises(StorageError, match=r"sync of .*/none failed.*ENOENT"):
        fsync(tmp_path / "none")


def test_a_folder_gets_its_name_with_all_its_content(tmp_path):
    (tmp_path / "tmp" / "sub").mkdir(parents=True)
    (tmp_path / "tmp" / "sub" / "file").write_text("x")
    replace_dir(tmp_path / "tmp", tmp_path / "checkpoint-1")
    assert (tmp_path / "checkpoint-1" / "sub" / "file").read_text() == "x"
    assert not (tmp_path / "tmp").exists()


def test_a_folder_that_is_there_is_not_replaced(tmp_path):
    for name in ("tmp", "checkpoint-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    with pytest.raises(StorageError, match=r"rename of .*/checkpoint-1 failed.*ENOTEMPTY"):
        replace_dir(tmp_path / "tmp", tmp_path / "checkpoint-1")
    assert (tmp_path / "checkpoint-1" / "file").read_text() == "checkpoint-1"
    assert (tmp_path / "tmp" / "file").read_text() == "tmp"


def test_a_folder_is_removed_also_after_an_earlier_attempt_was_killed(tmp_path):
    for name in ("checkpoint-1", ".checkpoint-1.removed"):
        (tmp_path / name / "sub").mkdir(parents=True)
        (tmp_path / name / "sub" / "file").write_text(name)
    remove_dir(tmp_path / "checkpoint-1")
    assert not list(tmp_path.iterdir())
    with pytest.raises(StorageError, match=r"remove of .*/checkpoint-1 failed.*ENOENT"):
        remove_dir(tmp_path / "checkpoint-1")
