"""Everything that is settled before a run touches a drive: model, rows, device, and the plan of its memory.

`ssdtune plan` (`ssdtune.train.planning`) and `ssdtune.train.finetune` go on from here. Bad input is found here, before anything is
written. The model is opened by `ssdtune.train.open_model`, its rows read by `ssdtune.train.rows`; here is how much memory both take.
Which plan is the fastest is `ssdtune.train.choose`'s to say, what goes to drives `ssdtune.train.disk`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from ssdtune.config.schema import Config
from ssdtune.device import open_device
from ssdtune.device.base import Device
from ssdtune.errors import CapacityError, ConfigError
from ssdtune.hardware.compute import num_cores
from ssdtune.hardware.memory import (
    KERNEL_BYTES,
    available_host_memory,
    bound_kernels,
    process_memory,
    return_memory,
    total_host_memory,
)
from ssdtune.io.buffers import aligned_size
from ssdtune.io.select import DEVICE_BACKENDS
from ssdtune.io.streams import StreamNames
from ssdtune.model.blocks import BlockModel
from ssdtune.model.build import BuiltModel, base_name
from ssdtune.model.checkpoint import HfCheckpoint
from ssdtune.model.chunked_loss import chunked_loss_bytes
from ssdtune.model.experts import feed_forward_size, num_chosen
from ssdtune.model.footprint import Footprint, footprint
from ssdtune.model.isolation import refuse_leaking_rows
from ssdtune.model.layout import ModelLayout, Part
from ssdtune.model.loss import loss_bytes
from ssdtune.model.source import stored_as_is
from ssdtune.plan.device_memory import DeviceLimits, device_limits, tensor_bytes
from ssdtune.plan.residency import (
    ComputeSize,
    MemoryLimits,
    MemoryPlan,
    PartSize,
    Proportions,
    plan_memory,
)
from ssdtune.swap.states import Precision
from ssdtune.train.open_model import build, choose_dtype, for_fp16, open_checkpoint, precision_of
from ssdtune.train.rows import (
    Rows,
    config_with,
    longest_sequence,
    micro_batch_sizes,
    num_lengths,
    read_rows,
)
from ssdtune.train.smaller import nearest_settings
from ssdtune.units import MIB, format_count, format_disk, format_memory

logger = logging.getLogger(__name__)

PACKING_BYTES = 12 * MIB
"""What MKL takes to rearrange large fp32 matrices before it multiplies them; measured at 0.13 billion parameters."""
GAPS = 2.3
"""What freed tensors leave between those in use, where their memory stays with the process, in units of what a block takes:
measured 2.2 to 3.2 at 134M (docs/benchmarks.md). What is more goes back (`ssdtune.hardware.memory.KeptMemory`)."""
KEPT_GAPS = {2: 0.45, 4: 0.14}
"""The same of kept activations, by the size of their elements: measured 0.34 to 0.37, and 0.06 in fp32, whose tensors are larger."""
LORA_KEPT_GAPS = 0.55
"""The same with adapters, whose small activations lie between: measured 0.5 to 0.65."""
COMPILING_BYTES = 128 * MIB
"""What torch.compile leaves behind of each kind of block, and takes while it works; the compiler itself is another process."""
SLACK_BYTES = 8192
"""What tensors one behind the other in a slot lose to their alignment."""
KERNELS = {"full": 20, "lora": 40}
"""Products of matrices of different shapes in a step whose rows have one length; oneDNN compiles each."""
LEAST_KERNELS, MOST_KERNELS = 128, 1024
"""Compiled products that stay: enough for all micro-batches of a step, but not for every length there is."""


@dataclass
class Prepared:
    """What a run is made of.

    Attributes:
        parts: Sizes of all parts, for the planner.
        compute: Memory that computing needs for the longest micro-batch.
        limits: What plans have to keep to; `memory` is the plan.
        rows: None of a plan without a train_file.
        max_length: Longest sequence, in tokens.
        sizes: Micro-batches that may be chosen, in sequences; one if the user chose.
        shares: Of each state on each swap directory, relative; none for equal ones.
        streams: The I/O backend of each stream.
    """

    config: Config
    checkpoint: HfCheckpoint
    device: Device
    dtype: torch.dtype
    built: BuiltModel
    blocks: BlockModel
    parts: list[PartSize]
    compute: ComputeSize
    limits: MemoryLimits
    memory: MemoryPlan
    rows: Rows | None
    max_length: int
    sizes: Sequence[int]
    shares: Sequence[float] = ()
    streams: StreamNames = field(default_factory=StreamNames)

    @property
    def precision(self) -> Precision:
        """Which states trained parts have."""
        return precision_of(self.config)

    @property
    def training_rows(self) -> Rows:
        """The rows that a run has; only a plan may have none."""
        assert self.rows is not None, "no train_file"
        return self.rows

    @property
    def layout(self) -> ModelLayout:
        """The model's stages and parts."""
        return self.blocks.layout


def prepare(
    config: Config,
    *,
    with_rows: bool = True,
    weights_needed: bool = True,
    host_budget_bytes: int | None = None,
    dtype: torch.dtype | None = None,
    other_device: DeviceLimits | None = None,
    streams_for: Callable[[Path, bool], StreamNames] | None = None,
) -> Prepared:
    """Open the model, read the rows, and plan the memory.

    Args:
        with_rows: Read the rows.
        weights_needed: There must be weights, and pickled ones are converted; else a config.json is enough of a model.
        host_budget_bytes: Memory of the machine that is planned for; by default what this one has. Then its card
            is `other_device`, if it has one.
        dtype: Compute dtype on that machine; by default what the settings and this one give.
        streams_for: Chooses the I/O backends, told where the model is and whether a card computes; by default they are those
            of the settings.

    Raises:
        ConfigError: Something about the input is wrong.
        CapacityError: It does not fit into the memory.
    """
    checkpoint = open_checkpoint(config, weights_needed=weights_needed and with_rows)
    device = open_device(config.memory.device, budget_bytes=tensor_bytes(config.memory.gpu_memory))
    dtype = dtype or choose_dtype(config.model.dtype, device)
    if dtype == torch.float16:
        config = for_fp16(config)
    if config.memory.compute_threads:
        # Thousands of threads end the process in the OpenMP library.
        torch.set_num_threads(min(config.memory.compute_threads, num_cores()))
    if config.model.torch_compile and config.memory.recompute == "cheap":
        raise ConfigError(
            "torch_compile does not go with recompute: cheap, for what a compiled block computes cannot be seen. Leave "
            "one of them out."
        )
    compiles = config.model.torch_compile and not host_budget_bytes
    if compiles:
        from ssdtune.model.compile import CompiledBlocks, require_compiler  # loads much

        require_compiler(device.torch_device)
    rows = read_rows(config, checkpoint) if with_rows else None
    built = build(config, checkpoint, dtype)
    blocks = BlockModel(built, device.torch_device)
    if compiles:
        blocks.call_block = CompiledBlocks(lengths_vary=not config.data.packing)
    if config.data.packing:
        refuse_leaking_rows(blocks)
    max_length = longest_sequence(config, rows)
    as_is = partial(_stored_as_is, built=built, checkpoint=checkpoint)
    parts = part_sizes(blocks.layout, precision_of(config), as_is)
    sizes = micro_batch_sizes(config)
    divided = [config_with(config, size) for size in sizes]

    def size_of(other: Config, length: int) -> ComputeSize:
        card = device.own_memory if host_budget_bytes is None else other_device is not None
        return compute_size(largest_step(other, rows), blocks, length, dtype, card=card)

    first = size_of(divided[0], max_length)
    return_memory()  # the process is as small now as it will be, and torch has loaded what counting needs
    card = other_device if host_budget_bytes else _device_limits(config, device)
    streams = StreamNames.all(config.io.backend)
    if streams_for is not None:
        streams = streams_for(checkpoint.path, card is not None)
    limits = MemoryLimits(
        base_bytes=process_memory().rss_bytes + COMPILING_BYTES * compiles,
        budget_bytes=host_budget_bytes or host_budget(config),
        cache_bytes=config.memory.host_cache,
        chunk_bytes=config.io.chunk_bytes,
        clipping=config.training.max_grad_norm > 0
        or dtype == torch.float16
        or config.training.non_finite == "skip",
        activations=config.memory.activations,
        recompute=config.memory.recompute,
        kernel_bytes=0 if device.own_memory else kernel_bytes(config, rows, dtype),
        device=card,
        straight=card is not None and streams.weights in DEVICE_BACKENDS,
        device_io=card is not None and streams.activations in DEVICE_BACKENDS,
    )
    if not host_budget_bytes:
        _warn_of_budgets(config, limits)
    for candidate in divided:
        other = candidate is not divided[0]
        compute = size_of(candidate, max_length) if other else first
        try:
            memory = plan_memory(parts, compute, limits, usual_proportions(candidate))
        except CapacityError as error:
            if candidate is not divided[-1]:
                continue  # smaller micro-batches need less
            nearest = nearest_settings(
                candidate, parts, limits, max_length,
                size_of,
            )  # fmt: skip
            raise CapacityError(f"{error} {nearest.text()}" if nearest else str(error)) from None
        break
    return Prepared(
        candidate, checkpoint, device, dtype, built, blocks, parts, compute, limits, memory,
        rows.divided(candidate) if rows else None, max_length, sizes, streams=streams,
    )  # fmt: skip


def with_micro_batches(prepared: Prepared, size: int) -> Prepared | None:
    """Return a run whose steps are divided otherwise; None if that does not fit."""
    config = config_with(prepared.config, size)
    card = prepared.limits.device is not None
    step = largest_step(config, prepared.rows)
    compute = compute_size(step, prepared.blocks, prepared.max_length, prepared.dtype, card=card)
    try:
        memory = plan_memory(prepared.parts, compute, prepared.limits, usual_proportions(config))
    except CapacityError:
        return None
    rows = prepared.rows.divided(config) if prepared.rows else None
    return replace(prepared, config=config, compute=compute, memory=memory, rows=rows)


def largest_step(config: Config, rows: Rows | None) -> Config:
    """Return settings with the sizes of the largest step and evaluation that there are: rows may be fewer than asked for."""
    if rows is None:
        return config
    training, count = config.training, rows.plan.num_sequences
    size = min(training.per_device_train_batch_size, count)
    training = replace(
        training,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=min(training.gradient_accumulation_steps, -(-count // size)),
        per_device_eval_batch_size=max((len(b.input_ids) for b in rows.evaluation), default=None),
    )
    return replace(config, training=training)


def usual_proportions(config: Config) -> Proportions:
    """Return the proportions of memory that are taken without any measured rates."""
    return Proportions(
        block_slots=config.io.prefetch_depth + 2,
        speculative=config.training.clipping == "speculative",
    )


def host_budget(config: Config) -> int:
    """Return the host memory that the whole process may take, in bytes."""
    if config.memory.host_memory is not None:
        return config.memory.host_memory
    # A tenth of what is free is left to others.
    return int(available_host_memory().bytes * 0.9) + process_memory().rss_bytes


def kernel_bytes(config: Config, rows: Rows | None, dtype: torch.dtype) -> int:
    """Return what products of matrices take that are compiled for all lengths of rows, on a CPU in bf16, and bound it.

    Those of one length without adapters are in what is reserved for any run.
    """
    if dtype != torch.bfloat16:
        return 0
    each, lengths = KERNELS[config.method], num_lengths(config, rows)
    at_once = each * min(lengths, config.training.gradient_accumulation_steps)
    kept = bound_kernels(min(max(at_once, LEAST_KERNELS), MOST_KERNELS))
    return KERNEL_BYTES * max(min(each * lengths, kept) - KERNELS["full"], 0)


def check_memory(prepared: Prepared) -> None:
    """Refuse a run that would take more memory than this machine has, because `host_memory` was set too high.

    Raises:
        CapacityError: It does, with both figures.
    """
    most, planned = total_host_memory(), prepared.memory.host_bytes
    if most is not None and planned > most.total_bytes:
        raise CapacityError(
            f"host memory: {format_memory(planned)} are planned of the {format_memory(prepared.limits.budget_bytes)} that "
            f"host_memory allows, but there are only {format_memory(most.total_bytes)} ({most.source}). Lower "
            "host_memory, or leave it out to use what is free."
        )


def _warn_of_budgets(config: Config, limits: MemoryLimits) -> None:
    """Tell of budgets that do no harm, but cannot be what was meant."""
    memory, most = config.memory, total_host_memory()
    if most and memory.host_memory and memory.host_memory > most.total_bytes:
        logger.warning(
            "host_memory is %s, more than the %s there are (%s): it limits nothing",
            format_memory(memory.host_memory), format_memory(most.total_bytes), most.source,
        )  # fmt: skip
    if memory.host_cache and not memory.host_memory and memory.host_cache > limits.budget_bytes:
        logger.warning(
            "host_cache is %s, more than the %s that the whole run may take: as much stays in memory as fits",
            format_memory(memory.host_cache), format_memory(limits.budget_bytes),
        )  # fmt: skip
    if memory.compute_threads and memory.compute_threads > num_cores():
        logger.warning(
            "compute_threads is %d, more than the processors there are: %d are taken",
            memory.compute_threads, num_cores(),
        )  # fmt: skip
    if memory.gpu_memory and limits.device is None:
        logger.warning("gpu_memory means nothing here: this run computes on the CPU")


def _device_limits(config: Config, device: Device) -> DeviceLimits | None:
    if not device.own_memory:
        return None
    return device_limits(device.memory().free_bytes, config.memory.gpu_memory, device.name)


def part_sizes(
    layout: ModelLayout,
    precision: Precision,
    as_is: Callable[[Part], bool] = lambda part: False,
) -> list[PartSize]:
    """Return the sizes of all parts, for the planner.

    Args:
        as_is: Says of a frozen part whether the model's files have its bytes as they are computed with.
    """
    return [
        PartSize(
            part.name, part.stage, part.weight_bytes, part.numel, part.trained,
            split=part.trained and precision.is_split(part), coded=precision.coded_moments,
            stored_as_is=not part.trained and as_is(part),
            row_numel=_row_numel(part, layout),
        )
        for part in layout.parts
    ]  # fmt: skip


def _row_numel(part: Part, layout: ModelLayout) -> int:
    """Return the elements of a row of a chunk of the embedding; 0 of other parts."""
    chunks, (spec, *_) = layout.embed_stages, part.tensors
    return spec.numel // spec.shape[0] if len(chunks) > 1 and part.stage in chunks else 0


def _stored_as_is(part: Part, *, built: BuiltModel, checkpoint: HfCheckpoint) -> bool:
    names = [base_name(spec.name) for spec in part.tensors]
    return stored_as_is(checkpoint, built.keymap, names, part.dtype)


def compute_size(
    config: Config, blocks: BlockModel, length: int, dtype: torch.dtype, *, card: bool = False
) -> ComputeSize:
    """Return the memory that computing needs for the longest micro-batch.

    Args:
        card: A card computes.
    """
    training, text = config.training, blocks.model.config.get_text_config()
    sequences = training.per_device_train_batch_size
    largest = found = _footprint(config, blocks, sequences, length, dtype)
    if (training.per_device_eval_batch_size or 1) > sequences:
        sequences = training.per_device_eval_batch_size or 1
        largest = _footprint(config, blocks, sequences, length, dtype)
    tokens = sequences * length
    input_bytes = aligned_size(tokens * text.hidden_size * dtype.itemsize)
    layout = blocks.layout
    head = layout.stages[layout.head_stages[0]].parts  # the largest, if there are several
    trained = [spec.numel for part in head if part.trained for spec in part.tensors]
    head_gradient = max(trained, default=0) * dtype.itemsize
    on_card = tokens * text.hidden_size if card else 0
    if len(layout.head_stages) == 1:
        losses = loss_bytes(tokens, text.vocab_size, dtype.itemsize, on_card)
    else:  # the gradients that go down are summed up in fp32
        losses = chunked_loss_bytes(tokens, len(head[0].tensors[0].rows), dtype.itemsize, on_card)
        more = 4 * tokens * text.hidden_size - input_bytes
        losses += training.gradient_accumulation_steps * max(0, more)
    if dtype == torch.float16:  # trained weights are converted
        head_gradient *= 2
    scratch = 0
    if dtype == torch.float32:
        scratch = min(PACKING_BYTES, max(part.weight_bytes for part in blocks.layout.parts))
    head_bytes = losses + head_gradient + input_bytes + scratch  # and the gradient that goes down
    block_bytes = largest.block_bytes + scratch + _gradients_at_once(config, blocks)
    kept_gaps = LORA_KEPT_GAPS if config.method == "lora" else KEPT_GAPS[dtype.itemsize]
    return ComputeSize(
        block_bytes=block_bytes,
        head_bytes=head_bytes,
        input_bytes=input_bytes,
        num_micro_batches=training.gradient_accumulation_steps,
        entry_bytes=largest.entry_bytes,
        kept_bytes=aligned_size(found.kept_bytes + SLACK_BYTES),
        # what a compiled block computes cannot be seen, so it keeps all or nothing
        products_bytes=0
        if config.model.torch_compile
        else aligned_size(found.products_bytes + SLACK_BYTES),
        # What only the head needs lies unused while blocks compute.
        gap_bytes=int(GAPS * largest.block_bytes) + max(0, head_bytes - block_bytes),
        kept_gap_bytes=int(kept_gaps * found.kept_bytes),
    )


def _gradients_at_once(config: Config, blocks: BlockModel) -> int:
    """Return the bytes of a block's gradients where they come together at its end, not one by one."""
    if not config.model.torch_compile:
        return 0
    return max(
        sum(part.weight_bytes for part in stage.parts if part.trained)
        for name, stage in blocks.layout.stages.items()
        if name.startswith("block.")
    )


def _footprint(
    config: Config, blocks: BlockModel, sequences: int, length: int, dtype: torch.dtype
) -> Footprint:
    """Count what a micro-batch takes, or where it can't be counted, estimate it.

    The estimate: a block's backward pass keeps, per token, some 16 hidden vectors (norms in and out, queries, keys,
    values, attention, residuals, and the fp32 copies that norms make) and 5 feed-forward ones, and makes a gradient
    of one weight at a time. Its input and products are 6 hidden vectors, 2 feed-forward ones, and one for each expert.
    """
    parts = [part for part in blocks.layout.parts if part.stage.startswith("block.")]
    converted: dict[str, int] = {}
    if dtype == torch.float16:  # trained weights are, for each block
        for part in parts:
            if part.trained and part.dtype != torch.float32:
                converted[part.stage] = converted.get(part.stage, 0) + part.weight_bytes
    more = max(converted.values(), default=0)
    masked = sequences > 1 or config.data.packing
    if found := footprint(blocks, sequences, length, masked=masked):
        return replace(
            found, kept_bytes=found.kept_bytes + more, block_bytes=found.block_bytes + more
        )
    text = blocks.model.config.get_text_config()
    hidden, item, tokens = text.hidden_size, dtype.itemsize, sequences * length
    scores = sequences * length * length * 4
    if getattr(text, "_attn_implementation", None) == "eager":
        scores *= 4 * getattr(text, "num_attention_heads", 1)
    largest = max(spec.numel for part in parts for spec in part.tensors)
    inner = feed_forward_size(text)
    saved = tokens * (16 * hidden + 5 * inner) * item + scores + more
    return Footprint(
        kept_bytes=saved,
        products_bytes=tokens * ((6 + num_chosen(text)) * hidden + 2 * inner) * item + scores,
        block_bytes=saved + 2 * largest * item,
        entry_bytes=scores + 2 * tokens * hidden * item,
    )


def summary_lines(
    prepared: Prepared, swap_bytes: int, directories: Sequence[Path], processor: str = ""
) -> list[str]:
    """Return what is about to happen, a few lines for people.

    Args:
        processor: What computes on another machine that has no card; by default the device of this one.
    """
    layout, plan = prepared.layout, prepared.memory
    total = sum(part.num_parameters for part in layout.parts)
    trained = sum(part.num_parameters for part in layout.trained_parts)
    streamed = [part.name for part in prepared.parts if part.name not in plan.resident]
    kept = len(prepared.parts) - len(streamed)
    card = prepared.limits.device
    return [
        f"{prepared.checkpoint.name_or_path}: {prepared.built.model.config.model_type}, "
        f"{format_count(total)} parameters in {layout.num_blocks} blocks, {format_count(trained)} trained, "
        f"computed in {str(prepared.dtype).removeprefix('torch.')} on "
        f"{card.name if card else processor or prepared.device.name}",
        f"host memory: {format_memory(plan.host_bytes)} planned of {format_memory(plan.budget_bytes)}; "
        f"{len(streamed)} of {len(streamed) + kept} parts streamed, {_gradients_text(plan)}, "
        f"{_activations_text(plan, layout.num_blocks)}",
        *([_device_text(plan)] if card else []),
        prepared.streams.text(card=card is not None),
        f"swap space: {format_disk(swap_bytes)} in {', '.join(_places(prepared, directories))}",
    ]


def _places(prepared: Prepared, directories: Sequence[Path]) -> list[str]:
    if not prepared.shares:
        return [str(directory) for directory in directories]
    total = sum(prepared.shares)
    return [
        f"{folder} ({share / total:.0%})" for folder, share in zip(directories, prepared.shares)
    ]


def _device_text(plan: MemoryPlan) -> str:
    return (
        f"GPU memory: {format_memory(plan.device_bytes)} planned of "
        f"{format_memory(plan.device_budget_bytes)}; slots for the weights of {plan.block_slots} and the gradients of "
        f"{plan.device_gradient_slots} blocks"
    )


def _gradients_text(plan: MemoryPlan) -> str:
    if not plan.deferred:
        return "updates overlap backward"
    waiting, stored = len(plan.gradients_in_memory), len(plan.gradients_on_ssd)
    where = f"gradients of {stored} stages wait on SSD" if waiting else "gradients wait on SSD"
    where = where if stored else "gradients wait in memory"
    if plan.speculative:
        return f"{where} in case updates have to be made again because of clipping"
    return where


def _activations_text(plan: MemoryPlan, num_blocks: int) -> str:
    parts = []
    for blocks, keep in (
        (plan.kept, "keep {}"),
        (plan.swapped & plan.in_host, "let {} wait in host memory"),
        (plan.swapped - plan.in_host, "let {} wait on SSD"),
    ):
        for some, what in (
            (blocks - plan.partly, "activations"),
            (blocks & plan.partly, "results of matrix products and attention"),
        ):
            if some:
                parts.append(f"{len(some)} of {num_blocks} blocks {keep.format(what)}")
    if len(plan.kept) + len(plan.swapped) < num_blocks:
        parts.append(f"block inputs {_inputs_text(plan, num_blocks)}")
    return ", ".join(parts)


def _inputs_text(plan: MemoryPlan, num_blocks: int) -> str:
    if plan.inputs_stay or not plan.input_slots:
        return "on the card" if plan.device_budget_bytes else "in memory"
    stored, waiting = plan.stored_inputs(num_blocks), len(plan.in_host - plan.swapped)
    if stored and waiting:
        return f"of {waiting} blocks in host memory, of {stored} on SSD"
    return "on SSD" if stored else "in host memory"
