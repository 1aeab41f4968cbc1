"""The picture of a step: every operation is on it, in its lane and at its time."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from ssdtune.plan.schedule import Kind, Lane, Operation
from ssdtune.report.timeline import Bar, draw

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
