"""Token ids to text, one token at a time, without ever cutting a character."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
SPACE = "\u2581"
"""As SentencePiece's vocabularies write it."""
BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
MAX_PENDING_TOKENS = 16


class Detokenizer(Protocol):
    """Decodes one sequence's output; one object per sequence.

    The pieces, put together with the flush, are the text a whole decode gives.
    """

    def push(self, token_id: int) -> str:
        """Return the text that this token completes; empty while a character is unfinished."""

    def flush(self) -> str:
        """Return the rest; an unfinished character becomes U+FFFD."""


def byte_level_table(tokens: Sequence[str | None], hidden: frozenset[int]) -> list[bytes]:
    """Return the bytes each token of a byte-level vocabulary stands for, by token id.

    Args:
        tokens: Vocabulary entries by id; None where an id is unused.
        hidden: Special tokens, which have no text.
    """
    bytes_of = {char: value for value, char in _byte_characters().items()}
    table = []
    for token_id, token in enumerate(tokens):
        if token is None or token_id in hidden:
            table.append(b"")
            continue
        values = [bytes_of.get(char) for char in token]
        if None in values:
            table.append(token.encode())
        else:
            table.append(bytes(v for v in values if v is not None))
    return table


def sentence_piece_table(tokens: Sequence[str | None], hidden: frozenset[int]) -> list[bytes]:
    """The same of a vocabulary of SentencePiece, which has tokens for single bytes."""
    table = []
    for token_id, token in enumerate(tokens):
        shown = "" if token is None or token_id in hidden else token
        byte = BYTE_TOKEN.fullmatch(shown)
        table.append(bytes.fromhex(byte[1]) if byte else shown.replace(SPACE, " ").encode())
    return table


def _byte_characters() -> dict[int, str]:
    """The printable character that stands for each byte in GPT-2's byte-level alphabet."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    mapping: dict[int, str] = {}
    shifted = 0
    for value in range(256):
        if value in printable:
            mapping[value] = chr(value)
        else:
            mapping[value] = chr(0x100 + shifted)
            shifted += 1
    return mapping


class ByteLevelDetokenizer:
    """For byte-level vocabularies: exact, and constant work per token.

    Args:
        table: What `byte_level_table` returned; shared by all sequences of a model.
        marks: Texts of special tokens that have one.
    """

    __slots__ = ("_decode", "_marks", "_table")

    def __init__(self, table: list[bytes], marks: Mapping[int, str]) -> None:
        self._table = table
        self._marks = marks
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_id: int) -> str:
        if token_id in self._marks:
            return self.flush() + self._marks[token_id]
        return self._decode(self._table[token_id] if token_id < len(self._table) else b"")

    def flush(self) -> str:
        return self._decode(b"", True)


class WindowDetokenizer:
    """For any other tokenizer: decodes a short window twice and returns the difference.

    The window begins one piece before the new one, so that decoders which look at their left
    neighbour (leading spaces) see it. A run that never becomes valid UTF-8 is let go after
    `MAX_PENDING_TOKENS`.

    Args:
        decode: Token ids to text.
        after: Tokens before the first, whose text was shown; a few will do.
    """

    __slots__ = ("_decode", "_ids", "_read", "_start")

    def __init__(self, decode: Callable[[list[int]], str], after: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(after)
        self._start = 0  # first token of the window
        self._read = len(self._ids)  # tokens before this one have been shown

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        return self._advance(final=len(self._ids) - self._read >= MAX_PENDING_TOKENS)

    def flush(self) -> str:
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        shown = self._decode(self._ids[self._start : self._read])
        whole = self._decode(self._ids[self._start :])
        if len(whole) <= len(shown):
            if final:
                del self._ids[self._read :]  # they have no text, whatever follows
            return ""
        if whole.endswith(REPLACEMENT) and not final:
            return ""
        self._start, self._read = self._read, len(self._ids)
        # Drop what no window reaches any more.
        del self._ids[: self._start]
        self._read -= self._start
        self._start = 0
        return whole[len(shown) :]
