"""Tokens and labels by trl's conventions, written out by hand for a real tokenizer."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdtune.config.schema import DataConfig
from ssdtune.data import load_rows, load_tokenizer
from ssdtune.data.dataset import CUT_AWAY, EMPTY, NOTHING_LEARNED
from ssdtune.errors import ConfigError, FormatError

from .conftest import PLAIN_TEMPLATE, train_tokenizer

EOS = 1
CHAT = [
    {"role": "user", "content": "How do I keep bread?"},
    {"role": "assistant", "content": "In a cloth."},
]


def plain(tokenizer, text):
    """Ids of a text without anything that the tokenizer adds."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def one(path, tokenizer, **settings_):
    """Ids and labels of the first row, as lists."""
    rows = load_rows(path, tokenizer, DataConfig(**settings_))
    ids, labels = rows.row(0)
    return ids.tolist(), labels.tolist()


def test_text_row_learns_everything_and_the_end_token(write, tokenizer):
    ids, labels = one(write({"text": "The garden needs water."}), tokenizer)
    assert ids == [*plain(tokenizer, "The garden needs water."), EOS]
    assert labels == ids


def test_end_token_in_the_text_is_not_doubled(write, tokenizer):
    ids, _ = one(write({"text": "The garden</s>"}), tokenizer)
    assert ids == [*plain(tokenizer, "The garden"), EOS]


@pytest.mark.parametrize("text", ["The garden", "<s>The garden", "<s>The garden</s>"])
def test_start_and_end_tokens_are_there_once(write, text):
    both = train_tokenizer(bos=True, adds_eos=True)
    ids, _ = one(write({"text": text}), both)
    assert ids == [0, *plain(both, "The garden"), EOS]


def test_prompt_is_masked_and_completion_learned_with_its_end(write, llama_tokenizer):
    path = write({"prompt": "How do I keep bread?", "completion": " In the dark."})
    ids, labels = one(path, llama_tokenizer)
    prompt = plain(llama_tokenizer, "How do I keep bread?")
    completion = plain(llama_tokenizer, " In the dark.")
    assert ids == [0, *prompt, *completion, EOS]
    assert labels == [-100] * (1 + len(prompt)) + completion + [EOS]


def test_prompt_is_learned_on_request(write, llama_tokenizer):
    path = write({"prompt": "How do I", "completion": " keep bread"})
    ids, labels = one(path, llama_tokenizer, completion_only_loss=False)
    assert labels == ids


def test_tokenizer_that_ends_texts_does_not_mask_the_first_completion_token(write):
    ending = train_tokenizer(bos=True, adds_eos=True)
    ids, labels = one(write({"prompt": "How do I", "completion": " keep bread"}), ending)
    prompt, completion = plain(ending, "How do I"), plain(ending, " keep bread")
    assert ids == [0, *prompt, *completion, EOS]
    assert labels == [-100] * (1 + len(prompt)) + completion + [EOS]


def test_prompt_that_merges_with_its_completion_is_noted(write, tokenizer):
    path = write({"prompt": "The gar", "completion": "den needs water"})
    rows = load_rows(path, tokenizer, DataConfig())
    prompt = plain(tokenizer, "The gar")
    joint = plain(tokenizer, "The garden needs water")
    assert joint[: len(prompt)] != prompt  # else the test tests nothing
    ids, labels = rows.row(0)
    assert ids.tolist() == [*joint, EOS]
    # As trl: as many tokens as the prompt alone has.
    assert labels.tolist() == [-100] * len(prompt) + [*joint, EOS][len(prompt) :]
    assert "1 (line 1)" in rows.report.notes[0]


def test_messages_learn_all_tokens_of_the_template(write, llama_tokenizer):
    ids, labels = one(write({"messages": CHAT}), llama_tokenizer)
    text = "<|im_start|>user\nHow do I keep bread?<|im_end|>\n<|im_start|>assistant\nIn a cloth.<|im_end|>\n"
    assert ids == plain(
        llama_tokenizer, text
    )  # the template alone decides: no start token is added
    assert labels == ids


def test_assistant_only_loss_learns_what_the_template_marks(write, tokenizer):
    ids, labels = one(write({"messages": CHAT + CHAT}), tokenizer, assistant_only_loss=True)
    answer = plain(tokenizer, "In a cloth.<|im_end|>")
    learned = [label for label in labels if label != -100]
    assert learned == answer * 2
    assert all(label in (-100, token) for token, label in zip(ids, labels, strict=True))


def test_conversational_prompt_is_masked_with_the_generation_prompt(write, tokenizer):
    path = write({"prompt": CHAT[:1], "completion": CHAT[1:]})
    ids, labels = one(path, tokenizer)
    prompt = plain(
        tokenizer, "<|im_start|>user\nHow do I keep bread?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids[: len(prompt)] == prompt
    assert labels == [-100] * len(prompt) + plain(tokenizer, "In a cloth.<|im_end|>\n")
    _, both = one(path, tokenizer, assistant_only_loss=True)
    assert both == labels[:-1] + [-100]  # the line break after the answer isn't the assistant's


def test_real_end_is_learned_where_pad_equals_it(write):
    same = train_tokenizer(pad="</s>")
    ids, labels = one(write({"text": "The garden"}), same)
    assert ids[-1] == labels[-1] == same.pad_token_id == EOS


def test_tokenized_rows_are_taken_as_they_are(write):
    path = write({"input_ids": [5, 6, 7]}, {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]})
    rows = load_rows(path, None, DataConfig())
    assert [rows.row(r)[1].tolist() for r in range(2)] == [[5, 6, 7], [-100, 6, 7]]
    masked = write({"input_ids": [5, 6, 7], "completion_mask": [0, 0, 1]}, name="masked.jsonl")
    assert one(masked, None)[1] == [-100, -100, 7]


def test_alpaca_and_sharegpt_rows_are_mapped_and_noted(write, tokenizer):
    alpaca = write({"instruction": "Say it.", "input": "bread", "output": "Bread."}, name="a.jsonl")
    rows = load_rows(alpaca, tokenizer, DataConfig())
    learned = [label for label in rows.row(0)[1].tolist() if label != -100]
    assert learned == plain(tokenizer, "Bread.<|im_end|>\n")
    assert "Alpaca" in rows.report.notes[0]

    turns = [
        {"from": "human", "value": "How do I keep bread?"},
        {"from": "gpt", "value": "In a cloth."},
    ]
    sharegpt = write({"conversations": turns}, name="s.jsonl")
    assert one(sharegpt, tokenizer) == one(write({"messages": CHAT}), tokenizer)

    bare = train_tokenizer(template=None)
    ids, labels = one(alpaca, bare)
    prompt = plain(bare, "### Instruction:\nSay it.\n\n### Input:\nbread\n\n### Response:\n")
    assert ids[: len(prompt)] == prompt and labels[: len(prompt)] == [-100] * len(prompt)


def test_truncation_and_skips_are_counted_by_reason_and_line(write, tokenizer):
    long = "The garden needs water in the morning."
    path = write(
        {"prompt": "How", "completion": " do I"},
        {"prompt": "", "completion": ""},
        {"prompt": long, "completion": " yes"},
        {"prompt": "How", "completion": " " + long},
        {"prompt": "How", "completion": " do I keep bread"},
    )
    limit = len(plain(tokenizer, long))
    rows = load_rows(path, tokenizer, DataConfig(max_length=limit))
    report = rows.report
    assert (report.rows_read, report.rows_used) == (5, 3)
    assert rows.lines.tolist() == [1, 4, 5]
    assert report.truncated.first_lines == [4] and rows.lengths[1] == limit
    assert {reason: lines.first_lines for reason, lines in report.skipped.items()} == {
        EMPTY: [2],
        CUT_AWAY: [3],
    }
    assert report.num_tokens == len(rows.ids)
    with pytest.raises(FormatError, match=r"rows\.jsonl:2: the row is skipped: empty"):
        load_rows(path, tokenizer, DataConfig(max_length=limit, strict=True))
    alone = write({"text": long}, name="long.jsonl")
    with pytest.raises(
        FormatError, match=r"long\.jsonl:1: the row has .* truncated to max_length, 4"
    ):
        load_rows(alone, tokenizer, DataConfig(max_length=4, strict=True))


def test_nothing_to_learn_anywhere_is_an_error(write):
    # Only the first token of line 2 is unmasked, and nothing comes before it to predict it from.
    path = write(
        {"input_ids": [3, 4], "labels": [-100, -100]}, {"input_ids": [3, 4], "labels": [3, -100]}
    )
    with pytest.raises(
        ConfigError, match=rf"none of the 2 rows .*{NOTHING_LEARNED}: 2 \(lines 1, 2\)"
    ):
        load_rows(path, None, DataConfig())


def test_ids_beyond_the_embedding_name_token_and_line(write, tokenizer):
    size = tokenizer.convert_tokens_to_ids("Ġgarden")
    path = write({"text": "bread"}, {"text": "The garden"})
    with pytest.raises(
        FormatError, match=rf'rows\.jsonl:2: token "Ġgarden" has id {size}.* {size} rows'
    ):
        load_rows(path, tokenizer, DataConfig(), vocab_size=size)
    # A model that is larger than its tokenizer, or a tokenizer whose spare tokens nobody uses, is fine.
    load_rows(path, tokenizer, DataConfig(), vocab_size=size + 1)
    shifted = write({"input_ids": [1, 2], "labels": [1, 9]}, name="labels.jsonl")
    with pytest.raises(FormatError, match="id 9"):
        load_rows(shifted, None, DataConfig(), vocab_size=9)


def test_labels_that_are_shifted_already_are_noted(write):
    path = write({"input_ids": [5, 6, 7, 8], "labels": [6, 7, 8, -100]})
    assert "shifted" in load_rows(path, None, DataConfig()).report.notes[0]


def test_settings_that_do_not_suit_the_rows_are_refused(write, tokenizer):
    text, chat = write({"text": "bread"}, name="t.jsonl"), write({"messages": CHAT}, name="m.jsonl")
    cases = [
        (text, tokenizer, {"completion_only_loss": True}, "have no completions"),
        (chat, tokenizer, {"completion_only_loss": True}, "Set assistant_only_loss"),
        (text, tokenizer, {"assistant_only_loss": True}, "no assistant's turns"),
        (chat, train_tokenizer(template=None), {}, "no chat template.*chat_template.jinja"),
        (
            chat,
            train_tokenizer(template=PLAIN_TEMPLATE),
            {"assistant_only_loss": True},
            "generation",
        ),
        (text, None, {}, "need a tokenizer"),
    ]
    for path, tok, options, message in cases:
        with pytest.raises(ConfigError, match=message):
            load_rows(path, tok, DataConfig(**options))


def test_row_that_the_template_refuses_is_named(write):
    refusing = train_tokenizer(template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(
        FormatError, match=r"rows\.jsonl:1: the chat template refuses.*roles must alternate"
    ):
        load_rows(write({"messages": CHAT}), refusing, DataConfig())


def test_folder_without_tokenizer_is_named(tmp_path, tokenizer):
    with pytest.raises(ConfigError, match=r"has no tokenizer \(no tokenizer\.json"):
        load_tokenizer(tmp_path)
    assert load_tokenizer(tmp_path, missing_ok=True) is None
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot load the tokenizer of"):
        load_tokenizer(tmp_path)
    tokenizer.save_pretrained(tmp_path / "good")
    again = load_tokenizer(tmp_path / "good")
    assert again("The garden")["input_ids"] == tokenizer("The garden")["input_ids"]
    assert again.chat_template == tokenizer.chat_template


@settings(max_examples=50, deadline=None)
@given(prompt=st.text(max_size=20), completion=st.text(max_size=20))
def test_any_prompt_row_keeps_its_rules(tokenizer, tmp_path_factory, prompt, completion):
    from ssdtune.data.rows import PROMPT, Row
    from ssdtune.data.tokenize import RowTokenizer

    row = Row(1, PROMPT, {"prompt": prompt, "completion": completion})
    tokens = RowTokenizer(tokenizer).tokenize(tmp_path_factory.getbasetemp(), row)
    if not prompt and not completion:
        assert tokens.ids == []
        return
    assert len(tokens.ids) == len(tokens.labels) and tokens.ids[-1] == EOS
    assert all(
        label in (-100, token) for token, label in zip(tokens.ids, tokens.labels, strict=True)
    )
    if tokens.prompt_splits:
        masked = tokens.labels.count(-100)
        assert tokenizer.decode(tokens.ids[:masked], skip_special_tokens=False) == prompt
