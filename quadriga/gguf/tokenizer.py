"""Make the tokenizer's files of a Hugging Face checkpoint from a GGUF file's vocabulary.

Two kinds are known: byte-level BPE (`gpt2`), with its merges in the file, and SentencePiece's BPE
(`llama`), whose merges follow from the tokens' scores.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.models import BPE

from quadriga.gguf.header import DAMAGED, SUPPORTED, GgufHeader, Numbers
from quadriga.gguf.pretokenizers import PRE_TOKENIZERS, PreTokenizer

PREFIX = "tokenizer.ggml"
MAX_TOKEN_CHARS = 1024
MAX_MERGES = 1 << 22
MAX_VOCAB_CHARS = 1 << 24
"""Of all tokens together; the largest vocabularies have two million."""
MAX_TEMPLATE_CHARS = 1 << 20
NO_TOKEN = (1 << 32) - 1
"""Stands for a special token that there is not."""
SPACE = "▁"
_SENTENCE_PIECE_IDS = {"unknown": 0, "bos": 1, "eos": 2}
"""What SentencePiece gives these tokens, for files that do not name them."""
END_TOKENS = frozenset(
    {
        "</s>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<end_of_turn>",
        "<EOT>",
        "[EOS]",
        "<｜end▁of▁sentence｜>",
    }
)
"""Control tokens that end an answer in models of all makers; files name one of theirs at most."""


class TokenType(IntEnum):
    """What GGUF says of each token."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The checkpoint's tokenizer as files, and the ids of its special tokens.

    Attributes:
        files: Name to content.
        end_ids: Tokens that end an answer; the file's own end token first.
    """

    files: dict[str, str]
    bos_id: int | None
    end_ids: tuple[int, ...]
    pad_id: int | None


def read_vocabulary(header: GgufHeader, vocab_size: int) -> Vocabulary:
    """Build the tokenizer.

    Args:
        vocab_size: Rows of the embedding; there may be fewer tokens, not more.

    Raises:
        ConfigError: The kind of tokenizer is not known, or its parts do not fit together.
    """
    kind = header.text(f"{PREFIX}.model")
    reader = _MetadataReader(header, vocab_size, _SENTENCE_PIECE_IDS if kind == "llama" else {})
    if kind == "gpt2":
        tokenizer, adds_bos = reader.byte_level()
    elif kind == "llama":
        tokenizer, adds_bos = reader.sentence_piece(), True
    else:
        header.refuse(
            f"{PREFIX}.model is {str(kind)[:40]!r}; the tokenizers gpt2 and llama are known",
            SUPPORTED,
        )
    bos, eos = reader.special("bos"), reader.special("eos")
    reader.add_special_tokens(tokenizer)
    has_bos = header.flag(f"{PREFIX}.add_bos_token", adds_bos)
    has_eos = header.flag(f"{PREFIX}.add_eos_token", False)
    reader.add_template(tokenizer, bos if has_bos else None, eos if has_eos else None)
    pad = reader.special("padding")
    named = {
        "bos_token": bos,
        "eos_token": eos,
        "unk_token": reader.special("unknown"),
        "pad_token": pad,
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(1e30),  # of the model, not of its tokenizer
    } | {name: reader.tokens[token] for name, token in named.items() if token is not None}
    files = {
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": json.dumps(settings, indent=2, ensure_ascii=False),
    }
    template = header.text("tokenizer.chat_template")
    if template:
        if len(template) > MAX_TEMPLATE_CHARS:
            header.refuse(f"its chat template has {len(template)} characters", DAMAGED)
        files["chat_template.jinja"] = template
    return Vocabulary(files, bos, reader.end_tokens(eos), pad)


class _MetadataReader:
    """The vocabulary of one file, checked."""

    def __init__(self, header: GgufHeader, vocab_size: int, usual_ids: dict[str, int]) -> None:
        self._header = header
        self._usual_ids = usual_ids
        self.tokens = self._strings("tokens")
        self.vocab = {token: index for index, token in enumerate(self.tokens)}
        if not 1 <= len(self.tokens) <= vocab_size:
            header.refuse(
                f"{PREFIX}.tokens has {len(self.tokens)} tokens, the embedding {vocab_size} rows",
                DAMAGED,
            )
        if len(self.vocab) < len(self.tokens):
            twice = next(t for i, t in enumerate(self.tokens) if self.vocab[t] != i)
            header.refuse(f"{PREFIX}.tokens has the token {twice[:40]!r} twice", DAMAGED)
        if sum(map(len, self.tokens)) > MAX_VOCAB_CHARS:
            header.refuse(
                f"the tokens have more than {MAX_VOCAB_CHARS} characters together", DAMAGED
            )
        longest = max(self.tokens, key=len)
        if len(longest) > MAX_TOKEN_CHARS:
            header.refuse(
                f"the token {longest[:40]!r}… has {len(longest)} characters, the limit is "
                f"{MAX_TOKEN_CHARS}",
                DAMAGED,
            )
        self._types = self._numbers("token_type", np.int64, TokenType.NORMAL)

    def byte_level(self) -> tuple[Tokenizer, bool]:
        """Byte-level BPE, and whether it puts a BOS token first where the file does not say."""
        cut = self._pre_tokenizer()
        tokenizer = Tokenizer(
            BPE(vocab=self.vocab, merges=self._merges(), ignore_merges=cut.whole_words)
        )
        if cut.composes:
            tokenizer.normalizer = normalizers.NFC()
        splits = [pre_tokenizers.Split(Regex(p), behavior="isolated") for p in cut.patterns]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer, cut.adds_bos

    def sentence_piece(self) -> Tokenizer:
        """SentencePiece's BPE: spaces are letters, and unknown characters are bytes."""
        unknown = self.special("unknown")
        tokenizer = Tokenizer(
            BPE(
                vocab=self.vocab,
                merges=self._merges_of_scores(),
                unk_token=None if unknown is None else self.tokens[unknown],
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        has_prefix = self._header.flag(f"{PREFIX}.add_space_prefix", True)
        prefix = [normalizers.Prepend(SPACE)] if has_prefix else []
        tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
        strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
        return tokenizer

    def special(self, name: str) -> int | None:
        """Id of a special token; None where there is none. Raises: ConfigError: It is no token."""
        key = f"{PREFIX}.{name}_token_id"
        value = self._header.metadata.get(key, self._usual_ids.get(name))
        if value is None or value in (-1, NO_TOKEN):
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            self._header.refuse(f"{key} is not a whole number", DAMAGED)
        if not 0 <= value < len(self.tokens):
            self._header.refuse(f"{key} is {value}, of {len(self.tokens)} tokens", DAMAGED)
        return value

    def end_tokens(self, eos: int | None) -> tuple[int, ...]:
        """Tokens that end an answer: those the file names, and well-known control tokens."""
        named = [eos, self.special("eot"), self.special("eom")]
        known = [i for i in self._of_types(TokenType.CONTROL) if self.tokens[i] in END_TOKENS]
        return tuple(dict.fromkeys(i for i in (*named, *known) if i is not None))

    def add_special_tokens(self, tokenizer: Tokenizer) -> None:
        """Have control tokens and those of the user found whole in a text."""
        special = self._of_types(TokenType.CONTROL, TokenType.UNKNOWN)
        tokenizer.add_special_tokens([self._added(i, special=True) for i in special])
        others = self._of_types(TokenType.USER_DEFINED)
        tokenizer.add_tokens([self._added(i, special=False) for i in others])

    def add_template(self, tokenizer: Tokenizer, bos: int | None, eos: int | None) -> None:
        """Put BOS before every text, and EOS behind it."""
        if bos is None and eos is None:
            return
        ends = {self.tokens[i]: i for i in (bos, eos) if i is not None}
        for token in ends:
            if "$" in token or ":" in token or not token:
                self._header.refuse(f"the special token {token[:40]!r} is not known", SUPPORTED)
        before = [] if bos is None else [self.tokens[bos]]
        behind = [] if eos is None else [self.tokens[eos]]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *behind],
            pair=[*before, "$A", *behind, *before, "$B:1", *behind],
            special_tokens=list(ends.items()),
        )

    def _pre_tokenizer(self) -> PreTokenizer:
        key = f"{PREFIX}.pre"
        name = self._header.text(key)
        if name is None and self._header.text("general.architecture") in ("qwen2", "qwen3"):
            name = "qwen2"  # files made before the field existed
        if name is None or name in ("default", ""):
            self._header.refuse(
                f"{key} is {name!r}: the file does not say how its text is cut",
                "convert the model again with a newer llama.cpp",
            )
        if name not in PRE_TOKENIZERS:
            self._header.refuse(
                f"{key} is {name[:40]!r}; known are {', '.join(sorted(PRE_TOKENIZERS))}", SUPPORTED
            )
        return PRE_TOKENIZERS[name]

    def _merges(self) -> list[tuple[str, str]]:
        """The merges of the file. Raises: ConfigError: One does not make a token of two."""
        merges: list[tuple[str, str]] = []
        lines = self._strings("merges")
        if len(lines) > MAX_MERGES:
            self._header.refuse(f"{PREFIX}.merges has {len(lines)} merges", DAMAGED)
        for line in lines:
            left, space, right = line.partition(" ")
            if not space or any(part not in self.vocab for part in (left, right, left + right)):
                self._header.refuse(
                    f"the merge {line[:40]!r} does not make a token of two tokens", DAMAGED
                )
            merges.append((left, right))
        return merges

    def _merges_of_scores(self) -> list[tuple[str, str]]:
        """Every way to make a token of two, that of the best score first.

        Source: SentencePiece's BPE merges the two neighbours whose union has the best score.
        """
        scores = self._numbers("scores", np.float64, None)
        if not np.isfinite(scores).all():
            self._header.refuse(f"{PREFIX}.scores has values that are no numbers", DAMAGED)
        normal = self._of_types(TokenType.NORMAL)
        if len(normal) > 1 and len({scores[i] for i in normal}) == 1:
            self._header.refuse(
                f"all {PREFIX}.scores are the same, so nothing says how tokens are made",
                "convert the model again from its tokenizer.model",
            )
        parts = {self.tokens[i] for i in normal}
        merges: list[tuple[float, str, str]] = []
        for index in normal:
            token = self.tokens[index]
            for cut in range(1, len(token)):
                left, right = token[:cut], token[cut:]
                if left in parts and right in parts:
                    merges.append((scores[index], left, right))
            if len(merges) > MAX_MERGES:
                self._header.refuse(f"its tokens follow from over {MAX_MERGES} merges", DAMAGED)
        merges.sort(key=lambda m: (-m[0], -len(m[1])))
        return [(left, right) for _, left, right in merges]

    def _strings(self, name: str) -> list[str]:
        values = self._header.metadata.get(f"{PREFIX}.{name}")
        if values is None:
            self._header.refuse(f"the field {PREFIX}.{name} is missing", DAMAGED)
        if not isinstance(values, list):
            self._header.refuse(f"{PREFIX}.{name} is no list of strings", DAMAGED)
        return values

    def _numbers(self, name: str, dtype: type, default: float | None) -> npt.NDArray[Any]:
        """One number for each token."""
        key = f"{PREFIX}.{name}"
        values = self._header.metadata.get(key)
        if values is None and default is not None:
            return np.full(len(self.tokens), default, dtype=dtype)
        if not isinstance(values, Numbers) or len(values.values) != len(self.tokens):
            count = len(values.values) if isinstance(values, Numbers) else "no"
            self._header.refuse(f"{key} has {count} numbers for {len(self.tokens)} tokens", DAMAGED)
        return values.values.astype(dtype)

    def _of_types(self, *types: TokenType) -> Sequence[int]:
        found: list[int] = np.flatnonzero(np.isin(self._types, types)).tolist()
        return found

    def _added(self, index: int, *, special: bool) -> AddedToken:
        return AddedToken(self.tokens[index], normalized=False, special=special)
