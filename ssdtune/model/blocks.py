"""Run a Hugging Face decoder in pieces, with no code for any architecture: the portal trick.

Each block is replaced by a **portal** that records what it is called with. Running the model's own forward
with the portals in place gives everything that the model prepares for its blocks (masks, rotary tables,
positions, per-layer arguments) exactly as it would for itself. The blocks then run one at a time from those
records. To finish, the model's forward runs once more and the last portal lets the final hidden state in, so
that the model's own norm, head and logit scaling follow. The input embedding is replaced too: it gets only the
rows that a batch uses, and nothing when the model is run for its head.

All weights are passed in by the caller as tensors; modules stay on meta.
Shape letters: B sequences, S positions, D hidden size, V vocabulary, U distinct tokens of a micro-batch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from ssdtune.errors import UnsupportedModelError
from ssdtune.model.build import BuiltModel
from ssdtune.model.layout import ModelLayout, build_layout, innermost

Tensors = Mapping[str, torch.Tensor]

logger = logging.getLogger(__name__)


@dataclass
class Call:
    """What one block is called with, without its hidden state."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass
class Entry:
    """What the model does before its first block, for one micro-batch.

    Attributes:
        hidden: Input of the first block [B, S, D]; carries the graph to `rows` and to the outer weights.
        calls: One per block.
        ids: Distinct token ids [U].
        rows: Their rows of the embedding matrix [U, D], a leaf.
    """

    hidden: torch.Tensor
    calls: list[Call]
    ids: torch.Tensor
    rows: torch.Tensor


class _LastBlockReached(Exception):
    pass


class _TupleExpected(Exception):
    """The model takes the first item of what a block returns, so its blocks return tuples."""


class _Stand(nn.Module):
    """Stands for a module and answers for its attributes, but owns none of its parameters."""

    def __init__(self, original: nn.Module, owner: BlockModel) -> None:
        super().__init__()
        self.__dict__["original"] = original
        self.__dict__["owner"] = owner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["original"], name)


class _Portal(_Stand):
    def __init__(self, original: nn.Module, owner: BlockModel, number: int) -> None:
        super().__init__(original, owner)
        self.number = number

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.owner._pass_portal(self.number, args, kwargs)


class _EmbeddingPortal(_Stand):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.owner._embed(self.original, ids)


class BlockModel:
    """A built model that runs in pieces.

    Args:
        built: The model; its blocks and input embedding are replaced by portals.
        device: Where its buffers go.

    Attributes:
        layout: How its parameters are grouped.
        blocks: The real blocks, parameters on meta.
        padding_row: Token whose embedding never gets a gradient (nn.Embedding's padding_idx), or None.
        call_block: Runs a block with weights, positional and named arguments; `ssdtune.model.compile` has another.

    Raises:
        UnsupportedModelError: The model cannot be taken apart; the message says why.
    """

    def __init__(self, built: BuiltModel, device: torch.device) -> None:
        self.built = built
        self.model = built.model
        self.device = device
        path, blocks = _find_blocks(built.model)
        self.blocks = list(blocks)
        self._local = [_local_names(path, number, block) for number, block in enumerate(blocks)]
        _refuse_shared(self.blocks, built.model)
        embedding = innermost(built.model.get_input_embeddings())
        if not isinstance(embedding, nn.Embedding):
            raise UnsupportedModelError(
                f"the input embedding of {self._kind} is a {type(embedding).__name__}, not an nn.Embedding."
            )
        self.layout: ModelLayout = build_layout(built, path, len(blocks))
        self.embedding_name = _path_of(built.model, embedding) + ".weight"
        head = built.model.get_output_embeddings()
        self._tied_name = (
            _path_of(built.model, innermost(head)) + ".weight" if self.layout.tied else ""
        )
        self.padding_row = embedding.padding_idx
        for module in built.model.modules():
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[key] = buffer.to(device)
        self._list = blocks
        self._embedding, self._portal = embedding, _EmbeddingPortal(embedding, self)
        self._open_portals()
        self._outer_names = {
            name for name, _ in built.model.named_parameters(remove_duplicate=False)
        }
        self.call_block: Callable[..., Any] = partial(functional_call, tie_weights=False)
        self._returns_tuple = False
        self._calls: list[Call] | None = None
        self._entering: torch.Tensor | None = None
        self._at_entry: Callable[[], None] | None = None
        self._rows_of: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._found: tuple[torch.Tensor, torch.Tensor] | None = None
        if len(self.layout.head_stages) > 1 and not self._makes_some_logits():
            with self.whole():
                self.layout = build_layout(built, path, len(blocks), divided=False)

    @property
    def _kind(self) -> str:
        return str(self.model.config.model_type)

    def persistent_buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers that are stored in checkpoints, by name; the caller fills them in place."""
        with self.whole():
            return {
                ".".join(part for part in (path, key) if part): buffer
                for path, module in self.model.named_modules()
                for key, buffer in module._buffers.items()
                if buffer is not None and key not in module._non_persistent_buffers_set
            }

    def train(self, training: bool) -> None:
        """Switch dropout on or off."""
        for module in (self.model, self._embedding, *self.blocks):
            module.train(training)

    def enter(
        self,
        tensors: Tensors,
        batch: Mapping[str, torch.Tensor],
        trained: bool,
        at_start: Callable[[], None] = lambda: None,
        gathered: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> Entry:
        """Run what comes before the first block.

        Args:
            tensors: Weights of the stages `outer` and, unless its rows are `gathered`, `embed`; leaves that require
                gradients get them later through `Entry.hidden`.
            batch: What the model's forward takes: input_ids [B, S], attention_mask or position_ids.
            trained: The rows of the embedding matrix require gradients.
            at_start: Called right before the model's forward, which may have to run twice (seeds dropout).
            gathered: The batch's distinct tokens [U], in order, and their rows [U, D].
        """
        self._calls = []
        self._rows_of = self._source_of_rows(tensors, gathered)
        self._trained_rows = trained
        at_start()
        try:
            self._run_outer(tensors, dict(batch))
        except _LastBlockReached:
            pass
        except _TupleExpected:
            self._returns_tuple = True
            return self.enter(tensors, batch, trained, at_start, gathered)
        calls, found, hidden = self._calls, self._found, self._entering
        self._calls = self._rows_of = self._found = self._entering = None
        if len(calls) != len(self.blocks) or found is None or hidden is None:
            raise UnsupportedModelError(
                f"{self._kind} does not call its {len(self.blocks)} blocks once each, in order; "
                "it cannot be trained block by block."
            )
        return Entry(hidden, calls, *found)

    def _source_of_rows(
        self, tensors: Tensors, gathered: tuple[torch.Tensor, torch.Tensor] | None
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        if gathered is None:
            table = tensors[self.embedding_name].detach()
            return lambda distinct: table.index_select(0, distinct)
        tokens, rows = gathered

        def all_of_them(distinct: torch.Tensor) -> torch.Tensor:
            if not torch.equal(distinct, tokens):
                raise UnsupportedModelError(
                    f"{self._kind} looks up other tokens than it is given; its embedding is too large for that."
                )
            return rows

        return all_of_them

    def stand_ins(
        self, fill: float = 0.0, dtype: torch.dtype | None = None
    ) -> dict[str, torch.Tensor]:
        """Return weights of the stages `outer` and `embed` that take no memory, all elements the same.

        Args:
            dtype: Of all of them; by default each has its own.
        """
        whole, found = self._embedding.weight.shape, {}
        for stage in ("outer", self.layout.embed_stages[0]):
            for part in self.layout.stages[stage].parts:
                blank = torch.full((), fill, dtype=dtype or part.dtype, device=self.device)
                for spec in part.tensors:
                    found[spec.name] = blank.expand(spec.shape if spec.first_row is None else whole)
        return found

    def _makes_some_logits(self) -> bool:
        """Say whether the model makes the logits of some rows of its head as it makes them among all."""
        outer = self.stand_ins(0.5)
        parts = self.layout.stages[self.layout.head_stages[0]].parts
        ids = torch.zeros(1, 1, dtype=torch.long, device=self.device)

        def waves(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
            numbers = torch.arange(math.prod(shape), device=self.device, dtype=torch.float32)
            return numbers.sin().view(*shape).to(dtype)

        def logits(first: int) -> torch.Tensor:
            head = {
                spec.name: waves((6, *spec.shape[1:]), part.dtype)[first:]
                for part in parts
                for spec in part.tensors
            }
            hidden = waves(entry.hidden.shape, entry.hidden.dtype)
            return self.logits(outer | head, hidden).float()

        try:
            with torch.no_grad():
                batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
                entry = self.enter(outer, batch, False)
                return torch.allclose(logits(0)[..., 3:], logits(3), rtol=0.05, atol=0.01)
        except Exception as error:  # whatever the code of the model thinks of that
            logger.debug("the head of %s is not divided: %s", self._kind, error)
            self._calls = self._rows_of = self._found = self._entering = None
            return False

    def run_block(
        self, number: int, tensors: Tensors, call: Call, hidden: torch.Tensor
    ) -> torch.Tensor:
        """Run block `number` on hidden states [B, S, D] and return the next ones."""
        block = self.blocks[number]
        weights = {local: tensors[name] for name, local in self._local[number].items()}
        result = self.call_block(block, weights, (hidden, *call.args), call.kwargs)
        if isinstance(result, tuple):
            self._returns_tuple = True
            return result[0]
        return result

    def logits(
        self, tensors: Tensors, hidden: torch.Tensor, at_entry: Callable[[], None] | None = None
    ) -> torch.Tensor:
        """Run what comes after the last block.

        Args:
            tensors: Weights of `outer` and of the head's stage, which may have some rows only.
            hidden: [B, S, D]; S is no more than the model's positions.
            at_entry: Called where the last block would end; what runs before is thrown away.

        Returns:
            Logits [B, S, V] as the model scales them, of the rows given.
        """
        self._entering, self._at_entry = hidden, at_entry
        ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
        try:
            result = self._run_outer(
                tensors, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            )
        finally:
            self._entering = self._at_entry = None
        return result.logits

    def _run_outer(self, tensors: Tensors, batch: dict[str, torch.Tensor]) -> Any:
        weights = {name: tensor for name, tensor in tensors.items() if name in self._outer_names}
        if self._tied_name and self.embedding_name in tensors:
            weights[self._tied_name] = tensors[self.embedding_name]
        return functional_call(
            self.model, weights, (), {**batch, "use_cache": False}, tie_weights=False
        )

    def _pass_portal(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden, args, kwargs = _take_hidden(args, kwargs)
        last = number == len(self.blocks) - 1
        if self._calls is None:
            if last and self._at_entry is not None:
                self._at_entry()
            hidden = self._entering if last else hidden
            return (hidden,) if self._returns_tuple else hidden
        if number != len(self._calls):
            self._calls.clear()
            raise _LastBlockReached
        if number == 0:
            self._entering, self._first_shape = hidden, hidden.shape
        elif not self._returns_tuple and hidden.shape != self._first_shape:
            raise _TupleExpected
        self._check_arguments(args, kwargs)
        args, kwargs = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
        self._calls.append(Call(args, kwargs))
        if last:
            raise _LastBlockReached
        return (hidden,) if self._returns_tuple else hidden

    def _check_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for value in _values((*args, *kwargs.values())):
            if isinstance(value, torch.Tensor):
                if value.requires_grad:
                    raise UnsupportedModelError(
                        f"{self._kind} passes its blocks a second input that needs gradients; "
                        "it cannot be trained block by block."
                    )
            elif not isinstance(
                value, (int, float, str, bool, type(None), torch.dtype, torch.device)
            ):
                raise UnsupportedModelError(
                    f"{self._kind} passes its blocks a shared {type(value).__name__}; "
                    "it cannot be trained block by block."
                )

    def _embed(self, original: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        if self._rows_of is None:
            width = original.weight.shape[1]
            zero = torch.zeros((), dtype=original.weight.dtype, device=ids.device)
            return zero.expand(*ids.shape, width)
        distinct, positions = torch.unique(ids, return_inverse=True)
        rows = self._rows_of(distinct).requires_grad_(self._trained_rows)
        self._found = (distinct, rows)
        padding, original.padding_idx = original.padding_idx, None
        try:
            return functional_call(original, {"weight": rows}, (positions,), tie_weights=False)
        finally:
            original.padding_idx = padding

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Put the real blocks and embedding back into the model while the context lasts."""
        for number, block in enumerate(self.blocks):
            self._list[number] = block
        _replace(self.model, self._portal, self._embedding)
        try:
            yield
        finally:
            self._open_portals()

    def _open_portals(self) -> None:
        for number, block in enumerate(self.blocks):
            self._list[number] = _Portal(block, self, number)
        _replace(self.model, self._embedding, self._portal)


def _take_hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.Tensor, tuple[Any, ...], dict[str, Any]]:
    if args:
        return args[0], args[1:], kwargs
    return kwargs["hidden_states"], (), {k: v for k, v in kwargs.items() if k != "hidden_states"}


def _values(arguments: tuple[Any, ...]) -> Iterator[Any]:
    """Yield what tuples hold; a list or dict stays one value, as blocks could pass things on through it."""
    for value in arguments:
        if type(value) is tuple:
            yield from _values(value)
        else:
            yield value


def _find_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Return path and list of the decoder's blocks: the outermost ModuleList of num_hidden_layers modules."""
    count = model.config.get_text_config().num_hidden_layers
    found = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    outermost = [
        (path, module)
        for path, module in found
        if not any(path.startswith(other + ".") for other, _ in found)
    ]
    if len(outermost) != 1:
        names = ", ".join(path for path, _ in outermost) or "none"
        raise UnsupportedModelError(
            f"{model.config.model_type} has no single list of {count} blocks (found: {names}); "
            "it cannot be trained block by block."
        )
    return outermost[0]


def _local_names(path: str, number: int, block: nn.Module) -> dict[str, str]:
    # what modules_to_save replaced is never used, and is in no unit (see layout)
    return {
        f"{path}.{number}.{local}": local
        for local, _ in block.named_parameters()
        if ".original_module." not in local
    }


def _refuse_shared(blocks: list[nn.Module], model: nn.Module) -> None:
    seen: set[int] = set()
    for block in blocks:
        members = {id(parameter) for parameter in block.parameters()}
        if members & seen:
            raise UnsupportedModelError(
                f"{model.config.model_type} shares parameters between its blocks; "
                "it cannot be trained block by block."
            )
        seen |= members


def _path_of(model: nn.Module, wanted: nn.Module) -> str:
    return next(path for path, module in model.named_modules() if module is wanted)


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    path = _path_of(model, old)
    parent, _, name = path.rpartition(".")
    holder = model.get_submodule(parent)
    holder._modules[name] = new
