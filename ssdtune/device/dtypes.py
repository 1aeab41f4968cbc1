"""What models are computed in, and what settings, profiles and messages call it."""

from __future__ import annotations

import torch

COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a compute dtype."""
    return next(name for name, known in COMPUTE_DTYPES.items() if known == dtype)
