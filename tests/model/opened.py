"""Opens a checkpoint folder the way a run does: files, model on the meta device, names."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ssdtune.io.buffers import BufferPool
from ssdtune.io.select import open_backend
from ssdtune.model.checkpoint import HfCheckpoint
from ssdtune.model.keys import KeyMap
from ssdtune.model.source import WeightSource


class Opened(NamedTuple):
    checkpoint: HfCheckpoint
    model: PreTrainedModel
    keymap: KeyMap
    source: WeightSource
    pool: BufferPool


def meta_model(folder: Path) -> PreTrainedModel:
    with init_empty_weights(include_buffers=False):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))


@contextmanager
def opened(folder: Path, *, scratch_bytes: int = 48 << 10):
    checkpoint = HfCheckpoint.open(folder)
    model = meta_model(folder)
    keymap = KeyMap.build(model, checkpoint)
    backend = open_backend("python", queue_depth=4, request_bytes=4096)
    pool = BufferPool()
    try:
        with WeightSource(checkpoint, keymap, backend, pool, scratch_bytes=scratch_bytes) as source:
            yield Opened(checkpoint, model, keymap, source, pool)
    finally:
        backend.close()
