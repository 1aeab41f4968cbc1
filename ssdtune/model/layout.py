"""How a model's parameters lie in flat arrays: stages, parts and tensors.

A **stage** is what is computed as one: `outer`, `embed`, `block.N`, `head`. Its parameters are grouped into
**parts**, flat arrays of one dtype that are either trained (a unit of the store, with its states) or frozen
(read from the original files). A matrix of the embedding or the head that is larger than any block by far is divided
into chunks of rows, each a stage of its own: `embed.0`, `embed.1`, …, `head.0`, ….
Letters: N elements of a part, V rows of such a matrix.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from ssdtune.model.build import BuiltModel, base_name

TENSOR_ALIGNMENT = 256
"""Elements to which tensors are aligned within a part: cache lines, SIMD registers, blocks of 8-bit moments."""
PART_ALIGNMENT = 2048
"""Elements to which parts are padded, so that a bf16 part ends on a 4096-byte boundary."""
MOST_WHOLE_ELEMENTS = 1 << 28
"""Of a matrix of the embedding or the head that stays whole, unless a block has more. It depends on the model alone,
as sums over chunks are rounded in another order."""


@dataclass(frozen=True)
class TensorSpec:
    """One parameter's place in its part, or that of some of its rows; `offset` and `numel` in elements.

    Attributes:
        first_row: Where the rows begin in the parameter; None if it is whole.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    numel: int
    decay: bool
    first_row: int | None = None

    @property
    def rows(self) -> range:
        """Which rows of the parameter it holds."""
        first = self.first_row or 0
        return range(first, first + self.shape[0])


@dataclass(frozen=True)
class Part:
    """A flat array [N] of one dtype.

    Attributes:
        name: Unit name in the store.
        dtype: Dtype of the weights that are stored; fp32 is its own master, bf16 is the high half. Trained weights that
            are computed with in fp16 are stored as bf16, which fp16 holds exactly down to 6e-8.
        numel: N, padding included.
    """

    name: str
    stage: str
    dtype: torch.dtype
    trained: bool
    tensors: tuple[TensorSpec, ...]
    numel: int

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights."""
        return self.numel * self.dtype.itemsize

    @property
    def num_parameters(self) -> int:
        """Elements of its tensors, without padding."""
        return sum(spec.numel for spec in self.tensors)

    def view(self, flat: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
        """Return one tensor's view of the part's flat array [N] of any dtype."""
        return flat[spec.offset : spec.offset + spec.numel].view(spec.shape)


@dataclass(frozen=True)
class Stage:
    """What is computed as one, with its parts."""

    name: str
    parts: tuple[Part, ...]

    @property
    def num_parameters(self) -> int:
        """Elements of all its tensors."""
        return sum(part.num_parameters for part in self.parts)


@dataclass(frozen=True)
class ModelLayout:
    """All stages of a model, in the order outer, embed, blocks, head."""

    stages: dict[str, Stage]
    num_blocks: int
    tied: bool

    @property
    def embed_stages(self) -> list[str]:
        """The embedding's stage, or one for each chunk of its rows."""
        return [name for name in self.stages if name.partition(".")[0] == "embed"]

    @property
    def head_stages(self) -> list[str]:
        """The head's stage, or one for each chunk of its rows; those of the embedding if both are tied."""
        return (
            self.embed_stages
            if self.tied
            else [name for name in self.stages if name.partition(".")[0] == "head"]
        )

    @property
    def parts(self) -> list[Part]:
        """All parts, stage by stage."""
        return [part for stage in self.stages.values() for part in stage.parts]

    @property
    def trained_parts(self) -> list[Part]:
        """The parts that are units of the store."""
        return [part for part in self.parts if part.trained]


def build_layout(
    built: BuiltModel, blocks_path: str, num_blocks: int, *, divided: bool = True
) -> ModelLayout:
    """Assign every parameter to a stage and part.

    Args:
        built: The model.
        blocks_path: Dotted path of the list of blocks in the model.
        num_blocks: Its length.
        divided: Large matrices outside the blocks are divided.
    """
    model = built.model
    embedding = innermost(model.get_input_embeddings())
    output = model.get_output_embeddings()
    head = None if output is None else innermost(output)
    tied = getattr(head, "weight", None) is embedding.weight
    head_members = set() if tied or output is None else {id(p) for p in output.parameters()}
    groups: dict[str, list[tuple[str, nn.Parameter]]] = {"outer": [], "embed": []}
    groups |= {f"block.{i}": [] for i in range(num_blocks)}
    if not tied:
        groups["head"] = []
    seen: set[int] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        # What modules_to_save has copied is not used under that name; a tied head uses it under its own.
        if ".original_module." in name or id(parameter) in seen:
            continue
        seen.add(id(parameter))
        if name.startswith(blocks_path + "."):
            number = name[len(blocks_path) + 1 :].split(".", 1)[0]
            stage = f"block.{number}"
        elif parameter is embedding.weight:
            stage = "embed"
        elif id(parameter) in head_members:
            stage = "head"
        else:
            # Adapters of the embedding too: their graph lives until the end of the step, as this stage does.
            stage = "outer"
        groups[stage].append((name, parameter))
    blocks = [groups[f"block.{i}"] for i in range(num_blocks)]
    most = max(MOST_WHOLE_ELEMENTS, *(sum(p.numel() for _, p in block) for block in blocks))
    plain = {
        "embed": isinstance(model.get_input_embeddings(), nn.Embedding)
        and (not tied or isinstance(output, nn.Linear)),
        "head": isinstance(output, nn.Linear),
    }
    stages: dict[str, Stage] = {}
    for name, members in groups.items():
        chunks = _chunks(members, most) if divided and plain.get(name) else 1
        if chunks == 1 or not all(_has_rows(built, member) for member, _ in members):
            stages[name] = Stage(name, _parts(built, name, members))
            continue
        num_rows = members[0][1].shape[0]
        size = -(-num_rows // chunks)
        for first in range(0, num_rows, size):
            chunk, rows = f"{name}.{first // size}", range(first, min(first + size, num_rows))
            stages[chunk] = Stage(chunk, _parts(built, chunk, members, rows))
    return ModelLayout(stages, num_blocks, tied)


def _has_rows(built: BuiltModel, name: str) -> bool:
    """Say whether ranges of a parameter's rows can be read from the checkpoint."""
    rule = built.keymap.load_rules.get(built.keymap.aliases.get(base_name(name), base_name(name)))
    return rule is None or rule.converter is None


def _chunks(members: list[tuple[str, nn.Parameter]], most: int) -> int:
    """Return into how many chunks of rows a matrix is divided: two of them take no more than `most` elements."""
    if not members or max(parameter.numel() for _, parameter in members) <= most:
        return 1
    rows = members[0][1].shape[0]
    if any(parameter.shape[0] != rows for _, parameter in members):
        return 1
    per_row = sum(parameter.numel() for _, parameter in members) // rows
    return -(-rows // max(1, most // 2 // per_row))


def innermost(module: nn.Module) -> nn.Module:
    """Return the module that does the work inside peft's wrappers."""
    if hasattr(module, "modules_to_save"):
        return next(iter(module.modules_to_save.values()))
    return getattr(module, "base_layer", module)


def _parts(
    built: BuiltModel,
    stage: str,
    members: list[tuple[str, nn.Parameter]],
    rows: range | None = None,
) -> tuple[Part, ...]:
    groups: dict[tuple[bool, torch.dtype], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in members:
        trained, dtype = name in built.trained, parameter.dtype
        if trained and dtype == torch.float16:
            dtype = torch.bfloat16
        groups.setdefault((trained, dtype), []).append((name, parameter))
    parts = []
    for (trained, dtype), tensors in groups.items():
        offset, specs = 0, []
        for name, parameter in tensors:
            shape = tuple(parameter.shape)
            if rows is not None:
                shape = (len(rows), *shape[1:])
            numel = math.prod(shape)
            first = None if rows is None else rows.start
            specs.append(TensorSpec(name, shape, offset, numel, name in built.decay, first))
            offset += -(-numel // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT
        numel = -(-offset // PART_ALIGNMENT) * PART_ALIGNMENT
        name = stage if len(groups) == 1 else f"{stage}.{str(dtype).removeprefix('torch.')}"
        name = name if trained else f"{name}.frozen"
        parts.append(Part(name, stage, dtype, trained, tuple(specs), numel))
    return tuple(parts)
