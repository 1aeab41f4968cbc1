"""Dynamic loss scaling for fp16, whose numbers end at 6e-8 and at 65504: the same rule as `torch.amp.GradScaler`.

The loss is multiplied by a power of two before its backward pass, so that small gradients are not lost; sums are fp32, and
the optimizer divides by it again within its one pass. A step with a gradient that is not finite is skipped: nothing
changes but the scale, which becomes smaller. So no update may begin before all gradients of the step were looked at.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from ssdtune.errors import FormatError, SsdtuneError

FIRST = 2.0**16
GROWTH, BACKOFF = 2.0, 0.5
GROWTH_STEPS = 2000
"""All four are GradScaler's."""
LEAST = 1.0


@dataclass
class LossScale:
    """The factor, and how it changes.

    Attributes:
        scale: What the loss of the next step is multiplied by.
        good_steps: Steps since it changed, or since one was skipped.
        skipped_steps: Of the whole run.
    """

    scale: float = FIRST
    good_steps: int = 0
    skipped_steps: int = 0

    def note(self, *, finite: bool, where: str = "") -> None:
        """Take account of a step.

        Args:
            finite: All its gradients were; else it was skipped.
            where: Where it first came to a value that was not, for the error.

        Raises:
            SsdtuneError: Gradients are not finite even without scaling.
        """
        if finite:
            self.good_steps += 1
            if self.good_steps == GROWTH_STEPS:
                self.good_steps = 0
                if math.isfinite(self.scale * GROWTH):
                    self.scale *= GROWTH
            return
        self.skipped_steps += 1
        self.good_steps = 0
        if self.scale <= LEAST:
            raise SsdtuneError(
                f"gradients are not finite in fp16 with any loss scale down to {LEAST:g} ({self.skipped_steps} steps "
                f"were skipped{'; in the last one ' if where else ''}{where}): activations or weights are larger than "
                "65504, or the learning_rate is too high. Go on from the last checkpoint with a lower learning_rate, or "
                "train with --dtype fp32 (or bf16)."
            )
        self.scale *= BACKOFF

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LossScale:
        """Return what `to_dict` described.

        Raises:
            FormatError: Something is missing or absurd.
        """
        try:
            found = cls(**values)
            usable = LEAST <= found.scale < math.inf and 0 <= found.good_steps < GROWTH_STEPS
        except TypeError:
            usable = False
        if not usable:
            raise FormatError(
                f"the loss scale of the checkpoint is damaged: {values!r}. Resume from an intact checkpoint."
            )
        return found
