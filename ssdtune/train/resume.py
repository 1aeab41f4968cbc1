"""Going on from a checkpoint: which one, and what a resumed run must share with the run that it was.

What a checkpoint's folder holds is `ssdtune.train.checkpoint`'s.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ssdtune.config.schema import Config
from ssdtune.errors import ConfigError
from ssdtune.train.checkpoint import TrainerState, checkpoint_folders, read_state
from ssdtune.train.output import METRICS, refuse_foreign
from ssdtune.train.prepare import Prepared
from ssdtune.train.rows import config_with

NUMBERS_DEPEND_ON = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate", "lr_scheduler_type",
    "warmup_steps", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "seed",
    "data_seed", "optim", "master_weights",
)  # fmt: skip
"""Settings of training with which a run gives other numbers."""
FINGERPRINTS = {
    "model": "the files of the model are others, or have other times (cp -p keeps these)",
    "adapter": "the adapter that was to be trained on has another adapter_config.json",
    "rows": "the tokenized rows are others (train_file, max_length, tokenizer, what is learned of them)",
}
"""What it means that a hash differs, which tells nobody anything itself."""


@dataclass(frozen=True)
class Resumed:
    """The checkpoint that a run goes on from."""

    folder: Path
    state: TrainerState

    def divided_as_before(self, config: Config) -> Config:
        """Return the settings with the micro-batches that the run was begun with, where they were left to us."""
        size = self.state.identity.get("per_device_train_batch_size")
        if config.training.train_batch_size is None or not isinstance(size, int):
            return config
        return config_with(config, size)

    def check(self, identity: dict[str, Any]) -> None:
        """Refuse to go on with another run than the one that was saved.

        Args:
            identity: Of the run that is to go on; see `identity_of`.

        Raises:
            ConfigError: Something differs; all differences are named.
        """
        saved = self.state.identity
        changed = [
            FINGERPRINTS.get(key) or f"{key} was {saved.get(key)!r}, is {identity.get(key)!r}"
            for key in sorted({*saved, *identity})
            if saved.get(key) != identity.get(key)
        ]
        if changed:
            raise ConfigError(
                f"{self.folder} cannot be resumed by another run: {'; '.join(changed)}. "
                "Resume with the settings in its run's config.yaml, or start anew in another output_dir."
            )


def resumed_from(config: Config, output_dir: Path) -> Resumed | None:
    """Return the checkpoint that the settings name; None for a new run.

    Args:
        output_dir: Absolute.

    Raises:
        ConfigError: There is no such checkpoint, or a new run would replace what is in the folder.
        FormatError: It is damaged.
    """
    if config.training.resume_from_checkpoint:
        folder = _find(output_dir, config.training.resume_from_checkpoint)
        return Resumed(folder, read_state(folder))
    kept = checkpoint_folders(output_dir)
    if kept:
        raise ConfigError(
            f"{output_dir} holds a run with {kept[-1].name}. Go on with --resume-from-checkpoint last, "
            f"name another output_dir, or delete it: rm -r '{output_dir}'"
        )
    if (output_dir / METRICS).exists() and any(output_dir.glob("*.safetensors")):
        raise ConfigError(
            f"{output_dir} holds the result of a finished run. Name another output_dir, or delete it: "
            f"rm -r '{output_dir}'"
        )
    refuse_foreign(output_dir)
    return None


def identity_of(prepared: Prepared) -> dict[str, Any]:
    """Return what must be the same when a run is resumed, as JSON values."""
    config, rows = prepared.config, prepared.training_rows
    text = prepared.built.model.config.get_text_config()
    return {
        "method": config.method,
        "dtype": str(prepared.dtype),
        "lora": asdict(config.lora) if config.method == "lora" else None,
        "adapter": _adapter_settings(config.model.adapter),
        "attn_implementation": text._attn_implementation,
        "model": prepared.checkpoint.fingerprint,
        "rows": rows.train.fingerprint(),
        "total_steps": rows.total_steps,
        **{key: getattr(config.training, key) for key in NUMBERS_DEPEND_ON},
        "shuffle": config.data.shuffle,
        # Which rows share a sequence follows from its length.
        "packed_length": config.data.max_length if config.data.packing else None,
    }


def _adapter_settings(folder: str | None) -> str | None:
    """Return the hash of an adapter's settings: its scale among them, while its weights come from the checkpoint."""
    if folder is None:
        return None
    settings = Path(folder).expanduser() / "adapter_config.json"
    return hashlib.sha256(settings.read_bytes()).hexdigest()


def _find(output_dir: Path, wanted: str) -> Path:
    if wanted == "last":
        folders = checkpoint_folders(output_dir)
        if not folders:
            raise ConfigError(
                f"{output_dir} has no checkpoint to resume from. Start without resume_from_checkpoint."
            )
        return folders[-1]
    folder = Path(wanted).expanduser().absolute()
    if folder not in [f.absolute() for f in checkpoint_folders(folder.parent)]:
        raise ConfigError(f"{folder} is not a checkpoint (a folder checkpoint-N of a run).")
    if folder.parent != output_dir:
        raise ConfigError(
            f"{folder} belongs to the run in {folder.parent}, not to output_dir {output_dir}. Use the same output_dir."
        )
    return folder
