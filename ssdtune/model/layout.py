"""How a model's parameters lie in flat arrays: stages, parts and tensors.

A **stage** is what is computed as one: `outer`, `embed`, `block.N`, `head`. Its parameters are grouped into
**parts**, flat arrays of one dtype that are either trained (a unit of the store, with its states) or frozen
(read from the original files). Letter: N elements of a part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ssdtune.model.build import BuiltModel

if TYPE_CHECKING:
    from torch import nn

TENSOR_ALIGNMENT = 256
"""Elements to which tensors are aligned within a part: cache lines, SIMD registers, blocks of 8-bit moments."""
PART_ALIGNMENT = 2048
"""Elements to which parts are padded, so that a bf16 part ends on a 4096-byte boundary."""


@dataclass(frozen=True)
class TensorSpec:
    """One parameter's place in its part; `offset` and `numel` in elements."""

    name: str
    shape: tuple[int, ...]
    offset: int
    numel: int
    decay: bool


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

    def view(self, flat: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
        """Return one tensor's view of the part's flat array [N] of any dtype."""
        return flat[spec.offset : spec.offset + spec.numel].view(spec.shape)


@dataclass(frozen=True)
class Stage:
    """What is computed as one, with its parts."""

    name: str
    parts: tuple[Part, ...]

    @property
    def trained(self) -> bool:
        """Say whether anything of the stage is trained."""
        return any(part.trained for part in self.parts)


@dataclass(frozen=True)
class ModelLayout:
    """All stages of a model, in the order outer, embed, blocks, head."""

    stages: dict[str, Stage]
    num_blocks: int
    tied: bool

    @property
    def parts(self) -> list[Part]:
        """All parts, stage by stage."""
        return [part for stage in self.stages.values() for part in stage.parts]

    @property
    def trained_parts(self) -> list[Part]:
        """The parts that are units of the store."""
        return [part for part in self.parts if part.trained]


def build_layout(built: BuiltModel, blocks_path: str, num_blocks: int) -> ModelLayout:
    """Assign every parameter to a stage and part.

    Args:
        built: The model.
        blocks_path: Dotted path of the list of blocks in the model.
        num_blocks: Its length.
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
    for name, parameter in model.named_parameters():
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
        if ".original_module." not in name:  # replaced by a trained copy, never used
            groups[stage].append((name, parameter))
    stages = {name: Stage(name, _parts(built, name, members)) for name, members in groups.items()}
    return ModelLayout(stages, num_blocks, tied)


def innermost(module: nn.Module) -> nn.Module:
    """Return the module that does the work inside peft's wrappers."""
    if hasattr(module, "modules_to_save"):
        return next(iter(module.modules_to_save.values()))
    return getattr(module, "base_layer", module)


def _parts(
    built: BuiltModel, stage: str, members: list[tuple[str, nn.Parameter]]
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
            specs.append(
                TensorSpec(
                    name, tuple(parameter.shape), offset, parameter.numel(), name in built.decay
                )
            )
            offset += -(-parameter.numel() // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT
        numel = -(-offset // PART_ALIGNMENT) * PART_ALIGNMENT
        name = stage if len(groups) == 1 else f"{stage}.{str(dtype).removeprefix('torch.')}"
        name = name if trained else f"{name}.frozen"
        parts.append(Part(name, stage, dtype, trained, tuple(specs), numel))
    return tuple(parts)
