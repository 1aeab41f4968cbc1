"""The picture of a step: every operation is on it, in its lane and at its time."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from ssdtune.errors import ConfigError, StorageError
from ssdtune.plan.schedule import Kind, Lane, Operation
from ssdtune.report.timeline import Bar, draw, picture_path, save

SVG = "{http://www.w3.org/2000/svg}"


def test_every_operation_is_drawn_in_proportion() -> None:
    load = Operation(0, Lane.SSD_READ, Kind.LOAD, "block.0")
    forward = Operation(1, Lane.COMPUTE, Kind.FORWARD, "block.0", micro_batch=2)
    bars = [Bar.of(load, 0.0, 1.0), Bar.of(forward, 1.0, 4.0)]
    picture = ElementTree.fromstring(draw(bars, "a < b"))
    named = {
        rect.find(f"{SVG}title").text: rect.attrib  # type: ignore[union-attr]
        for rect in picture.iter(f"{SVG}rect")
        if rect.find(f"{SVG}title") is not None
    }
    assert list(named) == [
        "load block.0, 0 ms to 1 s",
        "forward block.0, micro-batch 2, 1 s to 4 s",
    ]
    first, second = named.values()
    assert float(second["width"]) == 3 * float(first["width"])
    assert float(second["x"]) == float(first["x"]) + float(first["width"])
    assert first["y"] != second["y"] and first["fill"] != second["fill"]
    texts = [text.text for text in picture.iter(f"{SVG}text")]
    assert {"a < b", "ssd-read", "compute", "load", "forward"} <= set(texts)


def test_an_empty_step_is_a_picture_too() -> None:
    assert ElementTree.fromstring(draw([], "nothing")).tag == f"{SVG}svg"


def test_a_picture_is_a_page_where_its_name_says_so(tmp_path: Path) -> None:
    picture = draw([], "nothing")
    for name in ("step.svg", "step.html", "step.HTM"):
        save(picture_path(str(tmp_path / name)), picture, "1 < 2")
    assert (tmp_path / "step.svg").read_text() == picture
    for name in ("step.html", "step.HTM"):
        page = (tmp_path / name).read_text()
        assert page.startswith("<!DOCTYPE html>") and picture in page and "1 &lt; 2" in page


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("step.png", r"as \.svg or \.html, not as \.png; .* such as step\.svg"),
        ("step", "not as a file without an ending"),
        ("missing/step.svg", "missing does not exist"),
        ("folder.svg", "is a folder"),
    ],
)
def test_where_no_picture_can_be_written(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "folder.svg").mkdir()
    with pytest.raises(ConfigError, match=message):
        picture_path(str(tmp_path / name))


def test_a_full_drive_is_told() -> None:
    with pytest.raises(StorageError, match="write of /dev/full failed, no space left on device"):
        save(Path("/dev/full"), "<svg/>", "")
