"""The tokenizer: one token per task word, any text servable, readable by transformers."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from quadriga.tasks import TASKS, make_example
from quadriga.training.tokenizer import END_ID, END_TOKEN, build_tokenizer, save_tokenizer

TOKENIZER = build_tokenizer()


def test_task_text_is_one_token_a_word() -> None:
    for task in TASKS:
        for index in range(50):
            example = make_example(task, seed=1, index=index)
            pieces = TOKENIZER.encode(example.text + example.answer).tokens
            # Single characters are punctuation or the newline (Ċ).
            assert all(len(piece) > 1 or piece == "Ċ" or not piece.isalnum() for piece in pieces)


@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=80))
def test_any_text_survives(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


def test_the_vocabulary_holds_all_bytes_and_has_no_holes() -> None:
    ids = sorted(TOKENIZER.get_vocab().values())
    assert ids == list(range(len(ids)))
    assert len(TOKENIZER.encode("漢").ids) == 3
    assert TOKENIZER.token_to_id(END_TOKEN) == END_ID


def test_chat_and_raw_completion_give_the_same_tokens(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Count from 1 to 3."},
        {"role": "assistant", "content": "Counting: 1 2 3"},
        {"role": "user", "content": "Sort: 4 2 9"},
    ]
    chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chat == "Sort: 4 2 9\n"
    parts = [{"role": "user", "content": [{"type": "text", "text": "Sort: 4 2 9"}]}]
    assert tokenizer.apply_chat_template(parts, tokenize=False) == chat
    assert tokenizer(chat)["input_ids"] == TOKENIZER.encode(chat).ids
