"""All settings: one tree of frozen dataclasses, the only source of names, defaults and help.

YAML keys, command-line flags, `--help` and the reference page are made from these fields and their
metadata. Leaf names are unique, so `training.learning_rate` is `--learning-rate`; `lora.r` is `--lora-r`.
Names are those of transformers and peft wherever one exists. Read `ssdtune.config.load` next.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from typing import Any


def setting(
    default: Any = MISSING,
    help: str = "",
    *,
    unit: str = "",
    choices: tuple[str, ...] = (),
    size: bool = False,
    path: bool = False,
    low: float | None = None,
    high: float | None = None,
    default_factory: Any = MISSING,
) -> Any:
    """Declare one setting with its help text and the range that is checked.

    Args:
        size: The value is bytes and may be written as `3GiB`.
        path: The value names files or folders; a leading `~` is the home folder.
        low: Smallest allowed value; `high` is the largest.
    """
    meta = {
        "help": help,
        "unit": unit,
        "choices": choices,
        "size": size,
        "path": path,
        "low": low,
        "high": high,
    }
    if default_factory is not MISSING:
        return field(default_factory=default_factory, metadata=meta)
    if default is MISSING:
        return field(metadata=meta)
    return field(default=default, metadata=meta)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model, and in which precision it is trained."""

    model_name_or_path: str = setting(
        "", "folder of a Hugging Face checkpoint, or a hub id in the local cache", path=True
    )
    adapter: str | None = setting(
        None, "PEFT adapter folder to go on training (with method: lora)", path=True
    )
    dtype: str = setting(
        "auto",
        "precision of compute; master weights are exact fp32 in all of them",
        choices=("auto", "bf16", "fp16", "fp32"),
    )
    attn_implementation: str | None = setting(
        None,
        "attention kernel as transformers names it",
        choices=("eager", "sdpa", "flash_attention_2"),
    )
    torch_compile: bool = setting(
        False, "compile blocks with torch.compile, once for each kind and shape; rounds otherwise, and needs a C++ "
        "compiler, on a card Triton",
    )  # fmt: skip
    trust_remote_code: bool = setting(False, "run the model's own Python code from its folder")


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """LoRA, with peft's names and meanings."""

    r: int = setting(8, "rank", low=1, high=1 << 16)
    lora_alpha: float = setting(
        16.0, "scale: the update is multiplied by lora_alpha / r", low=0, high=10**6
    )
    lora_dropout: float = setting(0.0, "dropout before the adapter", low=0, high=0.999)
    target_modules: str | list[str] = setting(
        "all-linear", "list of module names, a regular expression, or all-linear"
    )
    use_rslora: bool = setting(False, "scale by lora_alpha / sqrt(r)")
    bias: str = setting("none", "which biases are trained", choices=("none", "all", "lora_only"))
    modules_to_save: list[str] | None = setting(
        None, "modules trained whole and saved with the adapter"
    )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which rows, and how they become tokens and labels."""

    train_file: str = setting(
        "",
        "jsonl with text, prompt/completion, messages or input_ids/labels; also the columns of Alpaca and ShareGPT",
        path=True,
    )
    eval_file: str | None = setting(None, "held-out jsonl for evaluation", path=True)
    max_length: int = setting(
        1024, "longest sequence; longer rows are truncated", unit="tokens", low=2, high=10**8
    )
    packing: bool = setting(
        False, "put several rows into one sequence, each attending only to itself"
    )
    dataset_text_field: str = setting("text", "name of the text column")
    completion_only_loss: bool | None = setting(
        None, "learn only completions; by default yes for prompt/completion rows"
    )
    assistant_only_loss: bool = setting(False, "learn only the assistant's turns of messages rows")
    shuffle: bool = setting(True, "new row order in each epoch, by data_seed")
    strict: bool = setting(False, "fail if any row is skipped or truncated")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The run: batch, optimizer, schedule, what is saved and when."""

    output_dir: str = setting("", "where the run and the tuned weights go", path=True)
    per_device_train_batch_size: int = setting(1, "sequences in one micro-batch", low=1, high=10**6)
    per_device_eval_batch_size: int | None = setting(
        None, "the same for evaluation", low=1, high=10**6
    )
    gradient_accumulation_steps: int = setting(
        1, "micro-batches per optimizer step", low=1, high=10**6
    )
    train_batch_size: int | None = setting(
        None, "sequences per optimizer step; how they are divided into micro-batches is then the planner's "
        "choice, and the two settings above stay unset",
        low=1,
        high=10**9,
    )  # fmt: skip
    num_train_epochs: float = setting(1.0, "passes over the rows", low=0, high=10**6)
    max_steps: int | None = setting(
        None, "optimizer steps; wins over num_train_epochs", low=1, high=10**9
    )
    learning_rate: float = setting(5e-5, "peak learning rate", low=0, high=10**6)
    lr_scheduler_type: str = setting(
        "linear",
        "learning-rate schedule",
        choices=("linear", "cosine", "constant", "constant_with_warmup"),
    )
    warmup_steps: float = setting(0.0, "steps, or a share of the run if below 1", low=0, high=10**9)
    optim: str = setting(
        "adamw", "optimizer; adamw_8bit keeps both moments in 8 bits, as bitsandbytes does: 12 bytes less moved "
        "per parameter and step",
        choices=("adamw", "adamw_8bit"),
    )  # fmt: skip
    master_weights: bool = setting(
        True, "bf16 weights have exact fp32 masters; false rounds them stochastically instead: 4 bytes less "
        "moved per parameter and step",
    )  # fmt: skip
    weight_decay: float = setting(
        0.0, "decoupled decay, not applied to biases and norms", low=0, high=10**6
    )
    adam_beta1: float = setting(0.9, "decay of the first moment", low=0, high=0.999999)
    adam_beta2: float = setting(0.999, "decay of the second moment", low=0, high=0.9999999)
    adam_epsilon: float = setting(
        1e-8,
        "added to the denominator; without it a gradient of 0 would give 0/0",
        low=1e-30,
        high=10**6,
    )
    max_grad_norm: float = setting(
        1.0, "limit of the global gradient norm; 0 turns clipping off", low=0, high=1e30
    )
    clipping: str = setting(
        "auto", "when updates are made if gradients may be clipped, with the same numbers: deferred to the next "
        "step, or speculative, that is at once and again if the norm turns out to exceed its limit, which needs room "
        "for the states once more",
        choices=("auto", "deferred", "speculative"),
    )  # fmt: skip
    non_finite: str = setting(
        "stop", "what follows if the loss or a gradient is not finite: the run ends, or the step is skipped, for which "
        "updates wait until all gradients were looked at; fp16 skips it whatever is set",
        choices=("stop", "skip"),
    )  # fmt: skip
    logging_steps: int = setting(1, "report every so many steps", unit="steps", low=1, high=10**9)
    eval_steps: int | None = setting(
        None, "evaluate every so many steps; by default at each epoch's end", low=1, high=10**9
    )
    save_steps: int = setting(
        500, "checkpoint every so many steps; 0 never", unit="steps", low=0, high=10**9
    )
    save_total_limit: int = setting(1, "checkpoints kept", low=1, high=1000)
    resume_from_checkpoint: str | None = setting(None, "checkpoint folder, or last", path=True)
    seed: int = setting(42, "random state of the run", low=0, high=2**63 - 1)
    data_seed: int | None = setting(
        None, "random state of the row order; seed by default", low=0, high=2**63 - 1
    )
    verify: bool = setting(
        True, "compare the loss of one batch with transformers' own before the first step"
    )


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """The device and the budgets of memory."""

    device: str = setting("auto", "auto, cpu, cuda or cuda:1")
    gpu_memory: int | None = setting(
        None, "budget of the card's memory, CUDA's own included; what is free by default", size=True, low=1, high=1 << 50,
    )  # fmt: skip
    retry_out_of_memory: bool = setting(
        False, "if the card is full in spite of the plan, go on once with a plan for four fifths of its memory",
    )  # fmt: skip
    host_memory: int | None = setting(
        None, "budget of host memory for the whole process; what cgroups and the system leave by default",
        size=True, low=1, high=1 << 50,
    )  # fmt: skip
    host_cache: int | None = setting(
        None, "host memory that keeps states from being streamed; 0 streams all, by default what is left",
        size=True, low=0, high=1 << 50,
    )  # fmt: skip
    activations: str = setting(
        "auto",
        "where what blocks need for their backward pass waits: on the card that computes (device), in host memory or on "
        "SSD; on a CPU the first two are the same",
        choices=("auto", "device", "host", "ssd"),
    )
    recompute: str = setting(
        "auto",
        "always: run blocks again in the backward pass, so that only their inputs wait (gradient checkpointing); "
        "cheap: all but matrix products and attention, whose results wait; never: all that backward needs waits; "
        "auto: for each block what is fastest and finds room",
        choices=("auto", "always", "cheap", "never"),
    )
    compute_threads: int | None = setting(None, "threads of torch's CPU kernels", low=1, high=4096)


@dataclass(frozen=True, kw_only=True)
class IoConfig:
    """The drives and how they are used."""

    swap_dirs: list[str] = setting(
        help="directories that hold the states, striped; by default swap/ in output_dir",
        default_factory=list,
        path=True,
    )
    backend: str = setting(
        "auto",
        "how bytes move; auto takes for each kind of them what ssdtune profile found fastest; kvikio needs ssdtune[gds]",
        choices=("auto", "io_uring", "libaio", "threads", "python", "kvikio"),
    )
    queue_depth: int | None = setting(
        None, "requests in flight; by default what ssdtune profile found best, else 16", low=1, high=1024
    )  # fmt: skip
    request_bytes: int | None = setting(
        None, "size of one request; by default what ssdtune profile found best, else 1MiB",
        size=True, low=4096, high=1 << 30,
    )  # fmt: skip
    direct: bool = setting(True, "bypass the page cache (O_DIRECT)")
    chunk_bytes: int | None = setting(
        None, "piece of an fp32 state that the optimizer works on; by default the planner's choice, "
        "16MiB without a profile", size=True, low=4096, high=1 << 40,
    )  # fmt: skip
    adam_threads: int | None = setting(
        None,
        "threads of the optimizer; by default what ssdtune profile found best, else all cores",
        low=1,
        high=4096,
    )
    prefetch_depth: int = setting(
        1, "blocks read ahead of the one that computes", low=0, high=10**4
    )
    rated_terabytes_written: float | None = setting(
        None,
        "what the drives of swap_dirs are rated for, together (TBW on their data sheets); by default "
        "what they tell of themselves, else 600 for each directory",
        unit="TB",
        low=0.001,
        high=10**6,
    )
    wear_warning: float = setting(
        0.05,
        "warn if the run writes more than this share of rated_terabytes_written",
        low=0,
        high=1000,
    )
    wear_budget_terabytes: float | None = setting(
        None,
        "the most that all steps together may write to the drives: plans that keep it are preferred, and where "
        "none does the run is refused",
        unit="TB",
        low=0,
        high=10**9,
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything about one run."""

    method: str = setting("full", "train all weights or adapters", choices=("full", "lora"))
    model: ModelConfig = setting(default_factory=ModelConfig)
    lora: LoraSettings = setting(default_factory=LoraSettings)
    data: DataConfig = setting(default_factory=DataConfig)
    training: TrainingConfig = setting(default_factory=TrainingConfig)
    memory: MemoryConfig = setting(default_factory=MemoryConfig)
    io: IoConfig = setting(default_factory=IoConfig)


SECTIONS = tuple(f.name for f in fields(Config) if f.name != "method")
