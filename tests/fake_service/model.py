"""A tokenizer and a deterministic "model" for the fake service: no weights, exact lengths."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

VOCAB_SIZE = 1024
END_ID = 0  # the end token counts, but its text is not shown
END_TEXT = "\0"
_WORDS_FROM = 256  # ids below are single bytes
_WORD = re.compile(rb" w(\d{1,3})(?!\d)")

Answer = Callable[[str], str | None]
"""Prompt text → answer; None lets the fake model babble."""


def token_bytes(token_id: int) -> bytes:
    """Return what a token stands for."""
    return bytes([token_id]) if token_id < _WORDS_FROM else b" w%d" % (token_id - _WORDS_FROM)


def tokenize(text: str) -> list[int]:
    """Return token ids; `detokenize` gives the text back."""
    data = text.encode("utf-8")
    ids: list[int] = []
    position = 0
    while position < len(data):
        match = _WORD.match(data, position)
        if match and int(match[1]) < VOCAB_SIZE - _WORDS_FROM and match[1] == b"%d" % int(match[1]):
            ids.append(_WORDS_FROM + int(match[1]))
            position = match.end()
        else:
            ids.append(data[position])
            position += 1
    return ids


def chat_text(messages: Sequence[Mapping[str, str]]) -> str:
    """Return a conversation in the fake's chat template."""
    return "\n".join(message["content"] for message in messages)


def detokenize(token_ids: Sequence[int]) -> str:
    """Return the text of token ids."""
    return b"".join(map(token_bytes, token_ids)).decode("utf-8", errors="replace")


def babble(prompt_ids: Sequence[int], choice: int, num_tokens: int) -> list[int]:
    """Return the output of the fake model: words, and characters of two and four bytes."""
    state = (sum(prompt_ids) * 2_654_435_761 + choice * 97 + len(prompt_ids)) & 0xFFFFFFFF
    ids: list[int] = []
    while len(ids) < num_tokens:
        state = (state * 1_103_515_245 + 12_345) & 0x7FFFFFFF
        kind = (state >> 16) % 16
        if kind == 0:
            ids += "é".encode()
        elif kind == 1:
            ids += "🙂".encode()
        else:
            ids.append(_WORDS_FROM + (state >> 8) % (VOCAB_SIZE - _WORDS_FROM))
    return ids[:num_tokens]


def stream_text(token_ids: Sequence[int], group: int) -> Iterator[tuple[list[int], str]]:
    """Yield (token ids, text) in writes of `group` tokens; never half a character."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for start in range(0, len(token_ids), group):
        ids = list(token_ids[start : start + group])
        data = b"".join(token_bytes(token) for token in ids if token != END_ID)
        yield ids, decoder.decode(data, final=start + group >= len(token_ids))
