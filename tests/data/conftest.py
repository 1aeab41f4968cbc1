"""Real byte-level BPE tokenizers, trained here, in the kinds that models have."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "The garden needs water in the morning, before the sun is high.",
    "How do I keep bread fresh? Wrap it in a cloth and keep it in the dark.",
    "Memory is fast and small; a drive is slow and large.",
    "user: question assistant: answer. system: You are short and clear.",
] * 4

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ message['content'] }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN_TEMPLATE = CHAT_TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def train_tokenizer(*, bos=False, adds_eos=False, pad="<pad>", template=CHAT_TEMPLATE):
    """Make a tokenizer; with `bos` and `adds_eos` it puts them around every text itself."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    specials = ["<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"]
    core.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=specials,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    single = ("<s> " if bos else "") + "$A" + (" </s>" if adds_eos else "")
    if bos or adds_eos:
        core.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    names = {"bos_token": "<s>"} if bos else {}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="</s>", pad_token=pad, **names
    )
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    """Qwen's kind: no start token, an end token that only chat templates and we add."""
    return train_tokenizer()


@pytest.fixture(scope="session")
def llama_tokenizer():
    """Llama's kind: the tokenizer puts a start token before every text."""
    return train_tokenizer(bos=True)


@pytest.fixture
def write(tmp_path):
    """Write rows as jsonl and return the path; a string row is written as it is."""

    def write_rows(*rows, name="rows.jsonl"):
        path = tmp_path / name
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    return write_rows
