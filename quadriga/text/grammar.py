"""Grammars over a model's tokens: which tokens may come next.

llguidance does the parsing; this module fixes how grammars are compiled (limits, whitespace), keeps
those that were compiled, and ties where an answer stands in its grammar to its tokens alone. So an
answer that goes on in another replica, or is begun anew there, goes on in the same place.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from quadriga.checkpoint.folder import Checkpoint
from quadriga.checkpoint.json_files import find_array
from quadriga.core.grammar import Grammar, check_options, json_options
from quadriga.errors import InvalidRequest

MAX_KEPT = 16
"""Compiled grammars that a process keeps that nobody has; the one used longest ago goes first."""

LEFT = "the answer has left its grammar"
STUCK = "no token of the model can go on with the answer"

UNKNOWN = {
    r"at \d+\(\d+\): failed to compile JSON schema: (.*?)( \d+ \| .*)?$": r"\1",
    r"Unimplemented keys: \[(.*)\]": r"schemas may not hold \1, whatever the value; leave it out",
    r"Unknown format: (.*)": r"format '\1' is not known; leave it out, or say it by a pattern",
    r"oneOf constraints are not supported.*": "oneOf is not known where several of its schemas may "
    "allow the same value; write anyOf",
    r"Resource '(.*?)' is not present.*": r"$ref cannot lead to '\1'; put what it names into $defs",
    r"Expecting object schema.*": "it must be an object; {} allows any JSON",
    "NoExtensionBias": f"{STUCK}; give every rule that names itself an alternative that ends",
    r"lookarounds not supported yet; Word.*": r"\\b and \\B are not known; leave them out",
}
"""What the library says of schemas that ask for what it does not know, and what clients read."""

_PART = re.compile(r"\[\^\]?(?:\\.|[^\]\\])*+|\\.", re.DOTALL)
"""Of an expression: a class of what is not to be, or a letter with its backslash."""

LARGE_VOCABULARY = 8192
"""Masks over fewer tokens are found by one thread, sooner than others are woken."""

Bits = npt.NDArray[np.uint8]
"""Masks: of each byte the lowest bit is the first token's; a set one may follow."""


@lru_cache(maxsize=1)
def _llguidance() -> Any:
    """The library; who asks for no grammar does without."""
    import llguidance

    return llguidance


@lru_cache(maxsize=1)
def _limits() -> Any:
    return _llguidance().LLParserLimits(
        step_lexer_fuel=100_000,  # some 7 ms
        max_lexer_states=20_000,  # some 2 kB each
        verbose_errors=False,
    )


class TokenGrammars:
    """Grammars compiled for one vocabulary. Thread-safe.

    Args:
        tokenizer: The text of a `tokenizer.json`.
        vocab_size: Of the model; tokens that it or the tokenizer lacks are never allowed.
        end_ids: Tokens that end an answer; there is at least one.
    """

    def __init__(self, tokenizer: str, vocab_size: int, end_ids: Sequence[int]) -> None:
        self.vocab_size = vocab_size
        self.end_ids = frozenset(end_ids)
        self._vocabulary = _llguidance().LLTokenizer(
            _without_rows(tokenizer, vocab_size), n_vocab=vocab_size, eos_token=list(end_ids)
        )
        # By kind and text: a `Grammar` as the key would be kept, and with it what holds its own.
        self._recent: OrderedDict[tuple[str, str], GrammarMatcher] = OrderedDict()
        self._compiled: WeakValueDictionary[tuple[str, str], GrammarMatcher] = WeakValueDictionary()
        self._compiling: WeakValueDictionary[tuple[str, str], Lock] = WeakValueDictionary()
        self._lock = Lock()

    def prepare(self, grammar: Grammar) -> GrammarMatcher:
        """Compile a grammar, unless it is; a millisecond to some seconds, without the GIL.

        Returns:
            What is compiled. As long as somebody has it, the grammar is not compiled again.

        Raises:
            InvalidRequest: It is none, or allows no text, or needs more work than there may be.
        """
        made = self._compile(grammar)
        if made.failure:
            raise InvalidRequest(made.failure, code="invalid_grammar")
        return made

    def matcher(self, grammar: Grammar) -> GrammarMatcher:
        """Where an answer without a token stands in a grammar that was prepared."""
        return GrammarMatcher(self._compile(grammar)._core.deep_copy(), self)

    @cached_property
    def ordinary(self) -> bytes:
        """1 for each token with which any text may begin and which ends none, else 0."""
        source = grammar_source(Grammar.regex(r"[\s\S]*"))
        core = _llguidance().LLMatcher(self._vocabulary, source, log_level=0)
        found = ~GrammarMatcher(core, self).banned_after([])
        found[list(self.end_ids)] = False
        return found.tobytes()

    def _compile(self, grammar: Grammar) -> GrammarMatcher:
        key = (grammar.kind, grammar.text)
        with self._lock:
            compiling = self._compiling.setdefault(key, Lock())
        with compiling:  # another thread's may be the same: then this one waits for it
            made = self._compiled.get(key)
            if made is None:
                core = _llguidance().LLMatcher(
                    self._vocabulary, grammar_source(grammar), limits=_limits(), log_level=0
                )
                made = GrammarMatcher(core, self)
            with self._lock:
                self._compiled[key] = self._recent[key] = made
                self._recent.move_to_end(key)
                while len(self._recent) > MAX_KEPT:
                    self._recent.popitem(last=False)
        return made


def _without_rows(tokenizer: str, vocab_size: int) -> str:
    """A tokenizer less what was added to it, for padding mostly, beyond the model's vocabulary."""
    added, begin, end = find_array(tokenizer, "added_tokens")
    kept = [token for token in added if token["id"] < vocab_size]
    return tokenizer[:begin] + json.dumps(kept) + tokenizer[end:]


class GrammarMatcher:
    """Where one answer stands in its grammar. Not thread-safe.

    Attributes:
        failure: Why no further token can be said, as of the last question; "" while one can. A
            grammar that needs more work for a token than there may be fails in the midst of an
            answer, for good; a token that was not allowed can be taken back.
    """

    def __init__(self, core: Any, grammars: TokenGrammars) -> None:
        self.failure = _reason(core)
        self._core = core
        self._grammars = grammars
        self._tokens: list[int] = []
        self._num_parsed = 0  # of the tokens; ends and what comes after a wrong one are not
        self._bits: Bits | None = None  # what may follow the tokens, once it was asked

    def banned_after(self, token_ids: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Which tokens may not follow these, the answer's so far: bool [vocab]; see `allowed`."""
        bits, _ = allowed([(self, token_ids)])
        size = self._grammars.vocab_size
        banned: npt.NDArray[np.bool_] = np.unpackbits(bits[0], count=size, bitorder="little") == 0
        return banned

    def next_token(self, token_ids: Sequence[int], best: int) -> int | None:
        """The best token that may follow these, the answer's so far, where that needs no mask.

        Args:
            best: Of all tokens; the vocabulary's size where none is.

        Returns:
            `best` where it may follow, or the only one that may; None: ask `allowed`.
        """
        self._follow(token_ids)
        if self.failure or best >= self._grammars.vocab_size or self._core.is_stopped():
            return None
        forced: list[int] = self._core.compute_ff_tokens()
        if forced:
            return forced[0]  # also where the same text could be said in other tokens
        # Of others, which have no text or a part of a letter, the parser thinks as masks do not.
        if self._grammars.ordinary[best] and self._core.validate_tokens([best]):
            return best
        return None

    def accept(self, token_id: int) -> None:
        """One more token of the answer."""
        self._bits = None
        self._tokens.append(token_id)
        if self.failure or token_id in self._grammars.end_ids:
            return
        if self._core.try_consume_tokens([token_id]):
            self._num_parsed += 1
        else:
            self.failure = _reason(self._core) or LEFT

    def rollback(self, count: int) -> None:
        """Forget the last tokens of the answer."""
        self._bits = None
        left = len(self._tokens) - count
        del self._tokens[left:]
        if self._num_parsed > left:
            self._core.rollback(self._num_parsed - left)
            self._num_parsed = left
        self.failure = _reason(self._core) or (LEFT if self._is_lost(left) else "")

    def _is_lost(self, count: int) -> bool:
        """Whether one of the first `count` tokens was not allowed."""
        said = [t for t in self._tokens[:count] if t not in self._grammars.end_ids]
        return len(said) > self._num_parsed

    def _follow(self, token_ids: Sequence[int]) -> None:
        known, count = self._tokens, len(self._tokens)
        if known != token_ids[:count]:
            same = 0
            while same < min(count, len(token_ids)) and known[same] == token_ids[same]:
                same += 1
            self.rollback(count - same)
        for token_id in token_ids[len(self._tokens) :]:
            self.accept(token_id)


def allowed(
    asked: Sequence[tuple[GrammarMatcher, Sequence[int]]], num_threads: int = 1
) -> tuple[Bits, list[str]]:
    """Which tokens may come next in some answers of one model.

    Consecutive questions about an answer may go on, or go back (a draft that was refused): only
    what differs from the question before is parsed.

    Args:
        asked: At least one; matchers with the tokens of their answers so far. One matcher may be
            asked about several beginnings of its answer.
        num_threads: That may look, where the vocabulary is large.

    Returns:
        uint8 [len(asked), bytes], of whole words of 32 bits, and for each why no further token can
        be said, or "". Where none can, all are allowed.
    """
    found, failures = list[Bits](), list[str]()
    together: dict[int, GrammarMatcher] = {}
    for matcher, token_ids in asked:
        if id(matcher) in together:
            _collect(together, num_threads, found, failures)
        matcher._follow(token_ids)
        together[id(matcher)] = matcher
    _collect(together, num_threads, found, failures)
    return np.stack(found), failures


def _collect(
    together: dict[int, GrammarMatcher], num_threads: int, found: list[Bits], failures: list[str]
) -> None:
    """Answer for these matchers, where each of them stands, and forget them."""
    matchers = list(together.values())
    unknown = [m for m in matchers if m._bits is None]
    if unknown:
        _compute(unknown, num_threads)
    for matcher in matchers:
        assert matcher._bits is not None
        found.append(matcher._bits)
        failures.append(matcher.failure)
    together.clear()


def _compute(matchers: Sequence[GrammarMatcher], num_threads: int) -> None:
    """Find what may come next, in parallel where that pays."""
    vocab_size = matchers[0]._grammars.vocab_size
    row_bytes = (vocab_size + 31) // 32 * 4
    bits = np.zeros((len(matchers), row_bytes), dtype=np.uint8)
    address = bits.ctypes.data
    alive = [(i, m) for i, m in enumerate(matchers) if not m.failure]
    if num_threads > 1 and len(alive) > 1 and vocab_size >= LARGE_VOCABULARY:
        cores = [(m._core, i) for i, m in alive]
        _executor(num_threads).unsafe_compute_mask_ptr(cores, address, row_bytes, len(bits))
    else:
        for i, matcher in alive:
            matcher._core.unsafe_compute_mask_ptr(address + i * row_bytes, row_bytes)
    some: list[bool] = np.any(bits, axis=1).tolist()
    for matcher, row, has_any in zip(matchers, bits, some, strict=True):
        if not matcher.failure:
            matcher.failure = _reason(matcher._core) or ("" if has_any else STUCK)
        if matcher.failure:
            row.fill(255)
        matcher._bits = row


@lru_cache(maxsize=2)
def _executor(num_threads: int) -> Any:
    """Threads that sleep until masks are to be found."""
    return _llguidance().LLExecutor(num_threads)


def grammar_source(grammar: Grammar) -> str:
    """A grammar in llguidance's own form; most mistakes show only when that is compiled.

    Raises:
        InvalidRequest: It cannot even be written so.
    """
    text, matcher = grammar.text, _llguidance().LLMatcher
    try:
        if grammar.kind == "json_schema":
            with suppress(ValueError, RecursionError):  # the parser says what is wrong
                check_options(json.loads(text))
            return str(matcher.grammar_from_json_schema(text, defaults=json_options(text)))
        if grammar.kind == "regex":
            return str(matcher.grammar_from_regex(_PART.sub(_ascii_digit, text)))
        if grammar.kind == "lark" or "::=" not in text:
            return str(matcher.grammar_from_lark(text))
        return str(_llguidance().grammar_from("grammar", text))
    except ValueError as exc:
        what = "schema" if grammar.kind == "json_schema" else "grammar"
        raise InvalidRequest(
            f"the {what} cannot be read: {_in_words(str(exc))}", code="invalid_grammar"
        ) from exc


def _ascii_digit(found: re.Match[str]) -> str:
    r"""What stands for `\d`: 0 to 9, as in a schema's patterns, not any script's digits."""
    return "[0-9]" if found[0] == r"\d" else found[0]


def grammars_of(checkpoint: Checkpoint) -> TokenGrammars:
    """The grammars of a checkpoint's vocabulary, made once in a process: that takes a second.

    Raises:
        ConfigError: Its tokenizer cannot be loaded.
        InvalidRequest: No token ends its answers.
    """
    return _grammars(
        checkpoint.path, checkpoint.id, checkpoint.vocab_size, checkpoint.eos_token_ids
    )


@lru_cache(maxsize=8)
def _grammars(
    path: Path, model_id: str, vocab_size: int, end_ids: tuple[int, ...]
) -> TokenGrammars:
    if not end_ids:
        raise InvalidRequest(
            f"{model_id} has no token that ends an answer, so no answer of it can have a form",
            code="invalid_grammar",
        )
    from quadriga.text.tokenizer_file import read_definition

    return TokenGrammars(read_definition(path, model_id), vocab_size, end_ids)


def _reason(core: Any) -> str:
    """Why a matcher of llguidance is of no use, as one line; "" where it is."""
    if not core.is_error():
        return ""
    text = str(core.get_error()).split("<non-verbose/>")[0]
    return _in_words(" ".join(text.split())[:500]) or "the grammar allows no text"


def _in_words(text: str) -> str:
    """An error of the library as clients read it."""
    for pattern, words in UNKNOWN.items():
        text = re.sub(pattern, words, text)
    return text
