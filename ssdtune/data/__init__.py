"""From a jsonl file to micro-batches: rows, tokens and labels, and which step sees which rows.

`load_rows(path, load_tokenizer(folder), config.data)` and `BatchPlan` are what training needs.
"""

from ssdtune.data.batches import Batch, BatchPlan, Padding, eval_batches, num_learned_tokens
from ssdtune.data.dataset import Report, TokenizedRows, load_rows
from ssdtune.data.tokenize import IGNORED, load_tokenizer

__all__ = [
    "IGNORED",
    "Batch",
    "BatchPlan",
    "Padding",
    "Report",
    "TokenizedRows",
    "eval_batches",
    "load_rows",
    "load_tokenizer",
    "num_learned_tokens",
]
