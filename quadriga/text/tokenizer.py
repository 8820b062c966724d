"""A checkpoint's tokenizer and chat template, loaded without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from inspect import signature
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from quadriga.checkpoint.json_files import read_object
from quadriga.errors import ConfigError, InvalidRequest
from quadriga.text.detokenizer import (
    BYTE_TOKEN,
    SPACE,
    ByteLevelDetokenizer,
    Detokenizer,
    WindowDetokenizer,
    byte_level_table,
    sentence_piece_table,
)
from quadriga.text.tool_formats import ToolFormat, tool_format

MAX_VOCAB = 1 << 22  # tables of tokens are as long as the greatest id says
PIECE_CHARS = 8192
"""Of a text whose tokens are only counted, so much is encoded at a time."""
CUT_SHARE = 32
"""No token is longer than a piece divided by this."""
WRONG_VALUES = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What expressions of a template raise beside its own errors."""
CONTEXT_TOKENS = 4
"""Of a prompt, for a decoder that looks to the left."""


class TextTokenizer:
    """Encodes prompts and chats, and makes one detokeniser per sequence.

    Thread-safe: the backend encodes without the GIL, so long prompts go to a thread.

    Args:
        backend: A fast tokenizer of `transformers` (for its chat template and special tokens).
    """

    def __init__(self, backend: Any, model_id: str) -> None:
        self.model_id = model_id
        self._fast = backend
        self._core = backend.backend_tokenizer
        self._core.no_truncation()
        self._core.no_padding()
        vocab = self._core.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        if not 0 < self.vocab_size <= MAX_VOCAB:
            raise ConfigError(
                f"model: the token ids of {model_id} go up to {self.vocab_size - 1}, of "
                f"{MAX_VOCAB - 1} at most; its tokenizer is damaged, fetch it again",
                param="model",
            )
        tokens: list[str | None] = [self._core.id_to_token(i) for i in range(self.vocab_size)]
        self._tokens = tokens  # as they are decoded: added ones may be normalised
        added = self._core.get_added_tokens_decoder()
        self._special = {token.content: i for i, token in added.items() if token.special}
        self._hidden = frozenset(self._special.values())
        self._table = byte_level_table(tokens, self._hidden) if self._is_byte_level() else None
        self._bytes = self._table
        if SPACE in repr(self._core.decoder):
            self._bytes = sentence_piece_table(tokens, self._hidden)
        has_bytes = "ByteFallback" in repr(self._core.decoder)
        named = ((i, BYTE_TOKEN.fullmatch(t or "")) for i, t in enumerate(tokens) if has_bytes)
        self._byte_of = {i: int(name[1], 16) for i, name in named if name}

    @property
    def has_chat_template(self) -> bool:
        return bool(self._fast.chat_template)

    def definition(self) -> str:
        """The tokenizer as the text of a `tokenizer.json`."""
        return str(self._core.to_str())

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`.

        Raises: InvalidRequest when the text is not Unicode (a lone surrogate).
        """
        try:
            return list(self._core.encode(text, add_special_tokens=add_special_tokens).ids)
        except (UnicodeEncodeError, TypeError) as exc:
            raise InvalidRequest(
                "the text holds a lone surrogate, which no encoding can carry", param="prompt"
            ) from exc

    def prompt_ids(self, prompt: str | Sequence[int] | Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a prompt: of text, of a conversation, or as they are.

        Raises: InvalidRequest: As `encode` and `render_chat`.
        """
        if isinstance(prompt, str):
            return self.encode(prompt)
        messages = [m for m in prompt if isinstance(m, Mapping)]
        if messages and len(messages) == len(prompt):
            return self.encode(self.render_chat(messages), add_special_tokens=False)
        return list[Any](prompt)

    def exceeds(self, text: str, limit: int, *, piece_chars: int = PIECE_CHARS) -> bool:
        """Whether a text certainly has more tokens than `limit`, for little more than their price.

        It is encoded piece by piece, as far as need be. A cut may make more tokens of what it cuts,
        as many as the longest token has characters; so many are taken off. False may also mean:
        not by much.
        """
        num_tokens = 0
        for start in range(0, len(text), piece_chars):
            num_tokens += len(self.encode(text[start : start + piece_chars]))
            if num_tokens > limit:
                return True
            num_tokens -= piece_chars // CUT_SHARE
        return False

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if self._byte_of.keys().isdisjoint(token_ids):
            return str(self._core.decode(list(token_ids), skip_special_tokens=skip_special_tokens))
        # One byte that is broken would break all others in a row for the library's decoder.
        hidden = self._hidden if skip_special_tokens else ()
        shown = [i for i in token_ids if i < self.vocab_size and i not in hidden]
        parts: list[str] = []
        for is_bytes, ids in groupby(shown, self._byte_of.__contains__):
            if is_bytes:
                parts.append(bytes(map(self._byte_of.__getitem__, ids)).decode("utf-8", "replace"))
            else:
                parts += filter(None, map(self._tokens.__getitem__, ids))
        return str(self._core.decoder.decode(parts))

    def token_text(self, token_id: int) -> str:
        """One token as readable text: the form in which log-probabilities name it."""
        known = self._known_bytes(token_id)
        if known:
            return known.decode("utf-8", "replace")
        return self.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> list[int]:
        """The token's bytes, as `chat.completions` reports them beside its text."""
        return list(self._known_bytes(token_id) or self.token_text(token_id).encode())

    def num_characters(self, token_id: int) -> int:
        """Characters of an answer's text that begin in this token."""
        data = b"" if token_id in self._hidden else self.token_bytes(token_id)
        return sum(value & 0xC0 != 0x80 for value in data)

    def _known_bytes(self, token_id: int) -> bytes:
        known = self._bytes
        return known[token_id] if known is not None and 0 <= token_id < len(known) else b""

    def detokenizer(
        self, marks: Mapping[int, str] | None = None, after: Sequence[int] = ()
    ) -> Detokenizer:
        """Make one for a sequence; special tokens have no text, but for `marks`.

        Args:
            after: Tokens whose text the answer goes on with; empty for an answer by itself.
        """
        if self._table is not None:
            return ByteLevelDetokenizer(self._table, marks or {})
        hidden = self._hidden.difference(marks or ())

        def decode(token_ids: Sequence[int]) -> str:
            shown = [token_id for token_id in token_ids if token_id not in hidden]
            return self.decode(shown, skip_special_tokens=False)

        # A decoder that begins a text anew takes its first space: the context is what has a text.
        context = (token_id for token_id in reversed(after) if token_id not in hidden)
        return WindowDetokenizer(decode, [*islice(context, CONTEXT_TOKENS)][::-1])

    def special_ids(self, texts: Sequence[str]) -> dict[str, int]:
        """Those of some texts that are special tokens, with their ids."""
        return {text: i for text, i in self._special.items() if text in texts}

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """How the model writes calls of functions; None where that is not known here."""
        from jinja2.exceptions import TemplateError

        def render(messages: Sequence[Mapping[str, Any]]) -> str:
            function = {"name": "look", "description": "", "parameters": {"type": "object"}}
            told = [{"type": "function", "function": function}]
            shown = self._fast.apply_chat_template(list(messages), tools=told, tokenize=False)
            return str(shown)

        try:
            return tool_format(str(self._fast.chat_template or ""), render)
        except (TemplateError, *WRONG_VALUES):
            return None

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text of a conversation, ready for the assistant's next turn.

        Args:
            messages: In OpenAI's form; those of tools and with calls as well.
            tools: In OpenAI's form.
            variables: Others that the template reads, such as `enable_thinking`.

        Raises:
            InvalidRequest: The model has no chat template, or the template refuses the messages; a
                variable is not the client's to set, as the template itself.
        """
        from jinja2.exceptions import TemplateError

        if not self.has_chat_template:
            raise InvalidRequest(
                f"model {self.model_id!r} has no chat template; give it a prompt, of text or token "
                "ids (/v1/completions)",
                param="messages",
            )
        form, variables = self.tool_format, variables or {}
        own = signature(self._fast.apply_chat_template).parameters if variables else ()
        for name in {"messages", *own} & variables.keys():
            raise InvalidRequest(
                f"chat_template_kwargs.{name}: may not be set; name variables of the template, "
                "such as enable_thinking",
                param=f"chat_template_kwargs.{name}",
            )
        try:
            text = self._fast.apply_chat_template(
                form.messages(messages, tools) if form else [dict(m) for m in messages],
                # Templates ask whether tools are none: an empty list would count as some.
                tools=[dict(t) for t in tools] or None if not form or form.in_template else None,
                tokenize=False,
                add_generation_prompt=True,
                **variables,
            )
        except (TemplateError, *WRONG_VALUES) as exc:
            given = "chat_template_kwargs or the messages" if variables else "the messages"
            raise InvalidRequest(
                f"the chat template of {self.model_id!r} refuses {given}: {exc}", param="messages"
            ) from exc
        return str(text)

    def _is_byte_level(self) -> bool:
        return type(self._core.decoder).__name__ == "ByteLevel"


def _rules_of(path: Path, remedy: str) -> Any:
    """Who knows how text is cut before a `vocab.json` is asked, which does not say it.

    Raises: ConfigError: That is not known here.
    """
    from transformers import GPT2Tokenizer, Qwen2Tokenizer

    settings = path / "tokenizer_config.json"
    named = read_object(settings).get("tokenizer_class") if settings.is_file() else None
    name = str(named or "GPT2Tokenizer").removesuffix("Fast")
    if name == "Qwen2Tokenizer":
        return Qwen2Tokenizer
    if name in ("GPT2Tokenizer", "CodeGenTokenizer"):
        return GPT2Tokenizer
    raise ConfigError(
        f"model: {path} has no tokenizer.json, and how a {name} cuts text is not known; {remedy}",
        param="model",
    )


def load_tokenizer(path: Path, model_id: str) -> TextTokenizer:
    """Load the tokenizer of a checkpoint directory.

    Raises:
        ConfigError: There is none that can be loaded without torch, with the remedy.
    """
    # `AutoTokenizer` would import torch; these two classes do not.
    from transformers import PreTrainedTokenizerFast

    remedy = (
        "make a tokenizer.json once with "
        "transformers.AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
    )
    try:
        if (path / "tokenizer.json").is_file():
            backend: Any = PreTrainedTokenizerFast.from_pretrained(path)
        elif (path / "vocab.json").is_file() and (path / "merges.txt").is_file():
            backend = _rules_of(path, remedy).from_pretrained(path)
        else:
            raise ConfigError(f"model: {path} has no tokenizer.json; {remedy}", param="model")
    except ConfigError:
        raise
    except Exception as exc:  # the library has no better one for what it cannot read
        raise ConfigError(
            f"model: the tokenizer in {path} cannot be loaded ({exc}); {remedy}", param="model"
        ) from exc
    return TextTokenizer(backend, model_id)
