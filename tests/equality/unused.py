"""An architecture with parameters that no forward pass touches, registered with transformers for one test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from tests.toy import ARCHITECTURES, VOCAB, make_tokenizer


class UnusedLlamaConfig(LlamaConfig):
    """llama under another name."""

    model_type = "toy_unused_llama"


class UnusedLlama(LlamaForCausalLM):
    """llama with a matrix in each block, and a module outside of them, that are never used."""

    config_class = UnusedLlamaConfig

    def __init__(self, config: UnusedLlamaConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.never_used = nn.Parameter(torch.ones(3, 7))
        self.model.never_called = nn.Linear(5, 3)
        self.post_init()


@contextmanager
def registered_unused_llama(folder: Path) -> Iterator[Path]:
    """Save such a checkpoint and make transformers' auto classes know it inside the context."""
    AutoConfig.register(UnusedLlamaConfig.model_type, UnusedLlamaConfig)
    AutoModelForCausalLM.register(UnusedLlamaConfig, UnusedLlama)
    try:
        fields = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        with torch.random.fork_rng():
            torch.manual_seed(3)
            model = UnusedLlama(UnusedLlamaConfig(**ARCHITECTURES["llama"], **fields))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=0.06)
        model.save_pretrained(folder)
        make_tokenizer(folder)
        yield folder
    finally:
        CONFIG_MAPPING._extra_content.pop(UnusedLlamaConfig.model_type)
        MODEL_FOR_CAUSAL_LM_MAPPING._extra_content.pop(UnusedLlamaConfig)
