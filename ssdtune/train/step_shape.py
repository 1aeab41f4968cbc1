"""The shape of a step for the generator of schedules, from the model's layout and the memory plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ssdtune.model.layout import ModelLayout, Stage
from ssdtune.plan.generate import Piece, StageShape, StepShape
from ssdtune.plan.residency import ComputeSize, MemoryPlan
from ssdtune.swap.states import Precision
from ssdtune.swap.update import PartPiece


def make_step_shape(
    layout: ModelLayout,
    plan: MemoryPlan,
    pieces: Mapping[str, Sequence[PartPiece]],
    compute: ComputeSize,
    precision: Precision,
) -> StepShape:
    """Return the shape of a step for the generator, from the model's layout and the memory plan.

    Args:
        pieces: What is updated at once, by stage (`ssdtune.swap.update.pieces_of`).
        compute: What block inputs and activations take.
        precision: Which states trained parts have.
    """
    return StepShape(
        num_blocks=layout.num_blocks,
        num_micro_batches=1,
        tied=layout.tied,
        embed_chunks=len(layout.embed_stages),
        head_chunks=len(layout.head_stages),
        stages={
            name: stage_shape(stage, plan, pieces.get(name, ()), precision)
            for name, stage in layout.stages.items()
        },
        block_slots=plan.block_slots,
        gradient_slots=plan.gradient_slots,
        device_gradient_slots=plan.device_gradient_slots,
        input_slots=plan.input_slots,
        swapped=plan.swapped,
        inputs_stay=plan.inputs_stay,
        in_host=plan.in_host,
        chunk_slots=plan.chunk_slots,
        kept=plan.kept,
        partly=plan.partly,
        deferred=plan.deferred,
        speculative=plan.speculative,
        rows_first=plan.rows_first,
        gradients_on_ssd=plan.gradients_on_ssd,
        input_bytes=compute.input_bytes,
        kept_bytes=compute.kept_bytes,
        products_bytes=compute.products_bytes,
    )


def stage_shape(
    stage: Stage, plan: MemoryPlan, pieces: Sequence[PartPiece], precision: Precision
) -> StageShape:
    """Return the sizes of a stage, from the pieces in which it is updated."""
    streamed = [part for part in stage.parts if part.name not in plan.resident]
    straight = sum(part.weight_bytes for part in streamed if part.name in plan.straight)
    return StageShape(
        load_bytes=sum(part.weight_bytes for part in streamed),
        frozen_bytes=sum(part.weight_bytes for part in streamed if not part.trained),
        upload_bytes=sum(part.weight_bytes for part in stage.parts) - straight,
        straight_bytes=straight,
        pieces=tuple(
            Piece(
                numel=(numel := piece.stop - piece.start),
                weight_bytes=numel * piece.part.dtype.itemsize,
                state_bytes=sum(
                    state.nbytes(numel)
                    for name, state in precision.states(piece.part).items()
                    if name != "weights"
                ),
                streamed=piece.streamed,
            )
            for piece in pieces
        ),
    )
