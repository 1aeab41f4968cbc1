"""A model run in pieces gives the loss and gradients of the whole one, to the last bit, or is refused by name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from ssdtune.errors import UnsupportedModelError
from ssdtune.model.blocks import BlockModel
from ssdtune.model.build import BuiltModel, build_model
from ssdtune.model.checkpoint import HfCheckpoint
from ssdtune.model.loss import loss_by_chunks, shifted_labels
from tests.toy import ARCHITECTURES, VOCAB, make_checkpoint

CPU = torch.device("cpu")


def make_batch(*, padded: bool = True) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return inputs and labels of two rows; one padded on the left, one with masked labels."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCAB, (2, 11), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :4] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[1, :3] = -100
    labels[1, 7] = -100
    return {"input_ids": ids, "attention_mask": mask}, labels


class Pieces:
    """Runs one micro-batch in pieces, forward and backward, as the engine does, with all weights at hand."""

    def __init__(self, blocks: BlockModel, weights: dict[str, torch.Tensor]) -> None:
        self.blocks = blocks
        self.leaves = {
            name: weight.detach().clone().requires_grad_() for name, weight in weights.items()
        }

    def of(self, *stages: str) -> dict[str, torch.Tensor]:
        return {
            spec.name: self.leaves[spec.name]
            for stage in stages
            for part in self.blocks.layout.stages[stage].parts
            for spec in part.tensors
        }

    def step(self, batch: dict[str, torch.Tensor], labels: torch.Tensor, items: int) -> float:
        """Return the loss; gradients are left in `leaves`."""
        blocks = self.blocks
        entry = blocks.enter(self.of("outer", "embed"), batch, True)
        inputs = [entry.hidden.detach()]
        for number, call in enumerate(entry.calls):
            with torch.no_grad():
                weights = self.of(f"block.{number}")
                inputs.append(blocks.run_block(number, weights, call, inputs[-1]))
        hidden = inputs.pop()
        gradient = torch.zeros_like(hidden)
        head = self.of("outer", "embed" if blocks.layout.tied else "head")
        loss = loss_by_chunks(
            lambda piece: blocks.logits(head, piece), hidden, labels,
            vocab_size=VOCAB, num_items=items, gradient=gradient,
        )  # fmt: skip
        for number in reversed(range(len(inputs))):
            leaf = inputs[number].requires_grad_()
            call = entry.calls[number]
            blocks.run_block(number, self.of(f"block.{number}"), call, leaf).backward(gradient)
            gradient = leaf.grad
        entry.hidden.backward(gradient)
        embedding, rows = self.leaves[blocks.embedding_name], entry.rows.grad.clone()
        if blocks.padding_row is not None:
            rows[entry.ids == blocks.padding_row] = 0
        if embedding.grad is None:
            embedding.grad = torch.zeros_like(embedding)
        embedding.grad.index_add_(0, entry.ids, rows)
        return loss.item()


def compare_one_step(
    folder: Path, attention: str | None, dtype: torch.dtype = torch.float32
) -> BlockModel:
    whole = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=attention
    ).eval()
    built = build_model(HfCheckpoint.open(folder), dtype=dtype, attn_implementation=attention)
    blocks = BlockModel(built, CPU)
    blocks.train(False)
    batch, labels = make_batch()
    items = int((shifted_labels(labels) != -100).sum())
    out = whole(**batch, labels=labels, use_cache=False, num_items_in_batch=torch.tensor(items))
    out.loss.backward()
    weights = dict(whole.named_parameters())
    fill_buffers(blocks, whole)
    pieces = Pieces(blocks, weights)
    assert pieces.step(batch, labels, items) == out.loss.item()
    for name, weight in weights.items():
        got = pieces.leaves[name].grad
        assert (got is None) == (weight.grad is None), name
        assert got is None or torch.equal(got, weight.grad), name
    return blocks


def fill_buffers(blocks: BlockModel, whole: nn.Module) -> None:
    buffers = dict(whole.named_buffers())
    for name, buffer in blocks.persistent_buffers().items():
        buffer.copy_(buffers[name])


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_pieces_equal_the_whole(tmp_path: Path, arch: str, attention: str) -> None:
    folder = make_checkpoint(tmp_path / arch, arch)
    try:
        compare_one_step(folder, attention)
    except ValueError as error:
        assert "does not support an attention implementation" in str(error)
        pytest.skip(f"transformers has no {attention} for {arch}")


@pytest.mark.parametrize("arch", ["llama", "gpt2", "gemma2"])
def test_the_other_tying(tmp_path: Path, arch: str) -> None:
    folder = make_checkpoint(tmp_path / arch, arch, tied=arch == "llama")
    blocks = compare_one_step(folder, None)
    assert blocks.layout.tied == (arch == "llama")


def test_modules_that_stay_in_fp32(tmp_path: Path) -> None:
    """Deepseek's router has a correction that transformers keeps in fp32 whatever the model's dtype."""
    fields = {
        "hidden_size": 40, "intermediate_size": 84, "moe_intermediate_size": 32,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1,
        "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 12, "kv_lora_rank": 12,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 10,
        "max_position_embeddings": 64,
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ARCHITECTURES, "deepseek_v3", fields)
        folder = make_checkpoint(tmp_path / "model", "deepseek_v3")
    for dtype in (torch.float32, torch.bfloat16):
        blocks = compare_one_step(folder, "eager", dtype)
        stored = {name: buffer.dtype for name, buffer in blocks.persistent_buffers().items()}
        assert set(stored.values()) <= {torch.float32}


# Models that cannot be taken apart


def blocks_of(model_class: type[LlamaForCausalLM], **fields: Any) -> BlockModel:
    config = LlamaConfig(vocab_size=VOCAB, use_cache=False, **(ARCHITECTURES["llama"] | fields))
    model = model_class(config)
    names = frozenset(name for name, _ in model.named_parameters())
    return BlockModel(BuiltModel(model, None, None, names, frozenset()), CPU)  # type: ignore[arg-type]


def run_once(model_class: type[LlamaForCausalLM]) -> None:
    blocks = blocks_of(model_class)
    with blocks.whole():
        weights = {name: p.detach().clone() for name, p in blocks.model.named_parameters()}
    batch, labels = make_batch()
    Pieces(blocks, weights).step(batch, labels, 10)


class _Outer(LlamaForCausalLM):
    """llama whose blocks get one more argument."""

    def extra(self) -> Any:
        raise NotImplementedError

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model.forward, original = self._with_extra, self.model.forward
        self._original = original

    def _with_extra(self, *args: Any, **kwargs: Any) -> Any:
        return self._original(*args, **kwargs, extra=self.extra())


class PassesPlain(_Outer):
    def extra(self) -> Any:
        return (torch.ones(3), 5, None, "text", (1.0, True))


class PassesGradient(_Outer):
    def extra(self) -> Any:
        return self.model.norm.weight * 2


class PassesList(_Outer):
    def extra(self) -> Any:
        return []


class PassesDict(_Outer):
    def extra(self) -> Any:
        return (1, {"seen": 0})


class PassesObject(_Outer):
    def extra(self) -> Any:
        return object()


class RunsTwice(LlamaForCausalLM):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        config.num_hidden_layers *= 2
        self.model.layers = nn.ModuleList([*self.model.layers, *self.model.layers])


class RunsBackwards(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.model.layers[2](torch.zeros(1, 1, 40))
        return super().forward(*args, **kwargs)


class SharesWeights(LlamaForCausalLM):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model.layers[2].mlp.up_proj.weight = self.model.layers[0].mlp.up_proj.weight


class HasTwoLists(LlamaForCausalLM):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model.others = copy.deepcopy(self.model.layers)


class HasNoList(LlamaForCausalLM):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model.layers = nn.ModuleDict({str(i): m for i, m in enumerate(self.model.layers)})


class OtherEmbedding(LlamaForCausalLM):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model.embed_tokens = nn.EmbeddingBag(VOCAB, 40)


REFUSED: dict[type[LlamaForCausalLM], str] = {
    PassesGradient: "llama passes its blocks a second input that needs gradients",
    PassesList: "llama passes its blocks a shared list",
    PassesDict: "llama passes its blocks a shared dict",
    PassesObject: "llama passes its blocks a shared object",
    RunsTwice: "llama shares parameters between its blocks",
    RunsBackwards: "llama does not call its 3 blocks once each, in order",
    SharesWeights: "llama shares parameters between its blocks",
    HasTwoLists: r"llama has no single list of 3 blocks \(found: model.layers, model.others\)",
    HasNoList: r"llama has no single list of 3 blocks \(found: none\)",
    OtherEmbedding: "the input embedding of llama is a EmbeddingBag, not an nn.Embedding",
}


def test_plain_arguments_pass() -> None:
    run_once(PassesPlain)
    run_once(LlamaForCausalLM)


@pytest.mark.parametrize("model_class", REFUSED, ids=lambda model_class: model_class.__name__)
def test_refused(model_class: type[LlamaForCausalLM]) -> None:
    with pytest.raises(UnsupportedModelError, match=REFUSED[model_class]) as refused:
        run_once(model_class)
    assert "\n" not in str(refused.value)


# What a run of pieces leaves behind


def test_nothing_is_kept_after_a_step() -> None:
    """The portals hold no tensor between calls, and no graph beyond the entry's."""
    blocks = blocks_of(LlamaForCausalLM)
    with blocks.whole():
        weights = {name: p.detach().clone() for name, p in blocks.model.named_parameters()}
    names = ("_calls", "_entering", "_rows_of", "_found", "_at_entry")
    batch, labels = make_batch()
    Pieces(blocks, weights).step(batch, labels, 10)
    assert {name: getattr(blocks, name) for name in names} == dict.fromkeys(names)


def test_the_model_is_whole_inside_the_context() -> None:
    blocks = blocks_of(LlamaForCausalLM)
    batch, _ = make_batch()
    with blocks.whole():
        whole = blocks.model(**batch).logits
        assert all(module is real for module, real in zip(blocks.model.model.layers, blocks.blocks))
    reference = copy.deepcopy(blocks)
    with reference.whole():
        assert torch.equal(reference.model(**batch).logits, whole)
