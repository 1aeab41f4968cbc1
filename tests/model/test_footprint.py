"""What a block keeps for its backward pass, counted without computing, equals what autograd really saves."""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from ssdtune.config.schema import LoraSettings
from ssdtune.hardware.memory import process_memory
from ssdtune.model.blocks import BlockModel, Call
from ssdtune.model.build import BuiltModel, build_model
from ssdtune.model.checkpoint import HfCheckpoint
from ssdtune.model.footprint import footprint, kept_bytes
from ssdtune.model.products import recorded
from ssdtune.units import GIB
from tests.covering import covering
from tests.toy import VOCAB, make_checkpoint

CPU = torch.device("cpu")
DROPOUT: dict[str, dict[str, float]] = {
    "llama": {"attention_dropout": 0.1},
    "gpt2": {"resid_pdrop": 0.1, "attn_pdrop": 0.1, "embd_pdrop": 0.1},
    "gemma3_text": {"attention_dropout": 0.1},
    "gpt_neox": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "opt": {"dropout": 0.1, "attention_dropout": 0.1},
    "bloom": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "falcon": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "phi3": {"resid_pdrop": 0.1, "attention_dropout": 0.1},
}
"""The architectures that are counted, with what turns dropout on."""


def open_blocks(
    folder: Path,
    arch: str,
    *,
    dtype: torch.dtype = torch.float32,
    lora: LoraSettings | None = None,
    attention: str | None = None,
    **fields: Any,
) -> BlockModel:
    make_checkpoint(folder, arch, **fields)
    built = build_model(
        HfCheckpoint.open(folder), dtype=dtype, lora=lora, attn_implementation=attention
    )
    return BlockModel(built, CPU)


@dataclass(frozen=True)
class Batch:
    """Token ids of a micro-batch, some rows padded on the left."""

    sequences: int
    length: int
    padded: int = 0

    def tensors(self) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, VOCAB, (self.sequences, self.length), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, : self.padded] = 0
        return {"input_ids": ids, "attention_mask": mask}


def block_and_input(
    blocks: BlockModel, batch: Batch | dict[str, torch.Tensor], number: int
) -> tuple[dict[str, torch.Tensor], Call, torch.Tensor]:
    """Return real weights, what a block is called with, and its input."""
    tensors = batch.tensors() if isinstance(batch, Batch) else batch
    weights = {
        spec.name: torch.randn(spec.shape, generator=torch.Generator().manual_seed(1))
        .mul_(0.1)
        .to(part.dtype)
        .requires_grad_(part.trained and part.stage == f"block.{number}")
        for part in blocks.layout.parts
        for spec in part.tensors
    }
    blocks.train(True)
    with torch.no_grad():
        entry = blocks.enter(weights, tensors, False)
    return weights, entry.calls[number], entry.hidden.detach().clone().requires_grad_()


def really_kept(
    blocks: BlockModel, batch: Batch | dict[str, torch.Tensor], number: int | None = None
) -> int:
    """Run a block on real tensors, as the engine does, and add up what autograd saves."""
    number = len(blocks.blocks) - 1 if number is None else number
    weights, call, leaf = block_and_input(blocks, batch, number)
    arguments = [t for t in tree_leaves((call.args, call.kwargs)) if isinstance(t, torch.Tensor)]
    shared = {t.untyped_storage().data_ptr() for t in (*weights.values(), *arguments)}
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.detach())  # alive until the end: no two have one address
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = blocks.run_block(number, weights, call, leaf)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    output.sum().backward()
    return sum(size for place, size in storages.items() if place not in shared)


def dear_really(blocks: BlockModel, batch: Batch, number: int) -> int:
    """Run a block on real tensors, and add up its input and the results of its products."""
    weights, call, leaf = block_and_input(blocks, batch, number)
    with recorded(leaf.shape[-1]) as products:
        blocks.run_block(number, weights, call, leaf)
    results = [x for product in products for x in product.results if isinstance(x, torch.Tensor)]
    storages = [tensor.untyped_storage() for tensor in (leaf, *results)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


PLAIN = Batch(sequences=2, length=11)
PADDED = Batch(sequences=2, length=11, padded=4)


def most_kept(blocks: BlockModel, batch: Batch) -> int:
    return max(really_kept(blocks, batch, number) for number in range(len(blocks.blocks)))


KINDS = ["fp32 full", "fp32 lora dropout", "bf16 lora", "bf16 full dropout"]


@pytest.mark.parametrize("arch, kind", covering(DROPOUT, KINDS, every=2))
def test_the_count_is_exact(tmp_path: Path, arch: str, kind: str) -> None:
    dtype = torch.bfloat16 if "bf16" in kind else torch.float32
    adapters, dropout = "lora" in kind, "dropout" in kind
    lora = LoraSettings(r=3, lora_dropout=0.2 if dropout else 0.0) if adapters else None
    fields = DROPOUT[arch] if dropout else {}
    blocks = open_blocks(tmp_path / "model", arch, dtype=dtype, lora=lora, **fields)
    counted = footprint(blocks, PLAIN.sequences, PLAIN.length)
    assert counted.kept_bytes == most_kept(blocks, PLAIN)
    assert counted.products_bytes == max(
        dear_really(blocks, PLAIN, number) for number in range(len(blocks.blocks))
    )
    masked = kept_bytes(blocks, PADDED.sequences, PADDED.length, masked=True)
    assert masked == most_kept(blocks, PADDED)


@pytest.mark.parametrize("arch", DROPOUT)
def test_another_kernel(tmp_path: Path, arch: str) -> None:
    blocks = open_blocks(tmp_path / "model", arch, attention="eager")
    counted = kept_bytes(blocks, PADDED.sequences, PADDED.length, masked=True)
    assert counted == most_kept(blocks, PADDED)


@pytest.mark.parametrize("batch", [Batch(1, 5), Batch(3, 5), Batch(3, 24), Batch(4, 24, padded=9)])
def test_other_sizes(tmp_path: Path, batch: Batch) -> None:
    blocks = open_blocks(tmp_path / "model", "gemma3_text")
    counted = kept_bytes(blocks, batch.sequences, batch.length, masked=bool(batch.padded))
    assert counted == most_kept(blocks, batch)


def test_packed_rows_keep_what_padded_ones_do(tmp_path: Path) -> None:
    blocks = open_blocks(tmp_path / "model", "llama")
    packed = torch.cat((torch.arange(5), torch.arange(6)))[None]
    ids = torch.zeros_like(packed)
    counted = kept_bytes(blocks, 1, 11, masked=True)
    assert counted == really_kept(blocks, {"input_ids": ids, "position_ids": packed})
    assert counted > kept_bytes(blocks, 1, 11)


def test_the_block_that_keeps_most_counts(tmp_path: Path) -> None:
    """Blocks of sliding attention are given a mask, those of full attention none; wherever they are."""
    kinds = ["sliding_attention", "full_attention"]
    for number, order in enumerate((kinds * 2, kinds[::-1] * 2)):
        blocks = open_blocks(tmp_path / f"model {number}", "gemma3_text", layer_types=order)
        each = [really_kept(blocks, PLAIN, i) for i in range(4)]
        assert min(each) < max(each)
        assert kept_bytes(blocks, PLAIN.sequences, PLAIN.length) == max(each)


def test_experts_cannot_be_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """And nobody is bothered with that."""
    blocks = open_blocks(tmp_path / "model", "mixtral")
    level = logging.getLogger("torch._subclasses.fake_tensor").level
    capfd.readouterr()
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert kept_bytes(blocks, PLAIN.sequences, PLAIN.length) is None
    assert logging.getLogger("torch._subclasses.fake_tensor").level == level
    assert not caplog.records
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("arch", ["llama", "mixtral"])
def test_nothing_is_left_behind(tmp_path: Path, arch: str) -> None:
    """No fake tensor outlives the count, and nothing real was allocated for it.

    torch.compile keeps some for good if it ran before.
    """
    blocks = open_blocks(tmp_path / "model", arch)
    kept_bytes(blocks, PLAIN.sequences, PLAIN.length)  # what torch makes once
    before = tensors()
    known = {id(tensor) for tensor in before}
    kept_bytes(blocks, PLAIN.sequences, PLAIN.length)
    after = tensors()
    assert len(after) <= len(before)
    assert not [t for t in after if issubclass(type(t), FakeTensor) and id(t) not in known]
    # and the model still runs
    assert really_kept(blocks, PLAIN) > 0


def tensors() -> list[torch.Tensor]:
    gc.collect()
    return [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]


def test_no_huge_mask_is_made(tmp_path: Path) -> None:
    blocks = open_blocks(tmp_path / "model", "llama")
    before = process_memory().rss_bytes
    assert kept_bytes(blocks, 2, 32768, masked=True) is None
    assert kept_bytes(blocks, 2, 32768) > kept_bytes(blocks, 1, 32768) > 0
    assert process_memory().rss_bytes - before < GIB


def test_a_huge_block_is_counted_without_memory(tmp_path: Path) -> None:
    """A block of 2 billion parameters and a micro-batch of 16 thousand tokens: a real one takes 40 GB."""
    fields = {"hidden_size": 12288, "intermediate_size": 49152, "num_attention_heads": 96}
    config = LlamaConfig(
        vocab_size=VOCAB, num_hidden_layers=2, num_key_value_heads=96, **fields, use_cache=False
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers are real
    names = frozenset(name for name, _ in model.named_parameters())
    blocks = BlockModel(BuiltModel(model, None, None, names, frozenset()), CPU)  # type: ignore[arg-type]
    before = process_memory().rss_bytes
    counted = kept_bytes(blocks, 8, 2048)
    assert process_memory().rss_bytes - before < 2 * GIB
    hidden = 8 * 2048 * 12288 * 2
    assert 16 * hidden < counted < 40 * hidden
