"""Answers in the OpenAI formats: whole, and as stream events built by hand.

A chunk is put together from a prefix rendered once per choice and the few parts that change; no
object is built per token.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from json.encoder import encode_basestring_ascii as quote
from typing import Any

from quadriga.core.request import TokenLogprob
from quadriga.text import TextTokenizer
from serve_app.request.request import OutputDelta, Request
from serve_app.request.sequence_request import SequenceRequest

DONE = b"data: [DONE]\n\n"


def usage(session: Request, *, final: bool = True) -> dict[str, Any]:
    """Token counts so far; with the depth each token left at when `final`."""
    prompt, output = session.num_prompt_tokens, session.num_output_tokens
    counts: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
    }
    if final:
        exits = Counter(layer for c in session.choices for layer in c.state.exit_layers)
        counts["quadriga"] = {
            "exits": {str(k): exits[k] for k in sorted(exits)},
            "rebuilds": sum(c.num_rebuilds for c in session.choices),
        }
        spans = [span for c in session.choices for span in c.spans]
        if spans:
            counts["quadriga"]["spans"] = [
                {"model": model, "depth": depth, "tokens": tokens} for model, depth, tokens in spans
            ]
    return counts


class Renderer(ABC):
    """Renders one session for one reader.

    Args:
        usage_frame: A last chunk with the usage; `"usage": null` in the others.
        running_usage: The usage so far in every chunk.
        token_ids: The output's token ids in every choice.
    """

    object_name: str
    chunk_name: str
    id_prefix: str

    def __init__(
        self,
        session: Request,
        tokenizer: TextTokenizer,
        *,
        usage_frame: bool = False,
        running_usage: bool = False,
        token_ids: bool = False,
    ) -> None:
        self.session = session
        self.tokenizer = tokenizer
        self._usage_frame = usage_frame
        self._running_usage = running_usage
        self._token_ids = token_ids
        spec = session.spec
        self._head = (
            f'data: {{"id":{quote(self.id_prefix + spec.request_id)},'
            f'"object":"{self.chunk_name}","created":{session.created_unix_s},'
            f'"model":{quote(spec.model)},"choices":['
        )

    def events(self, deltas: Sequence[OutputDelta]) -> bytes:
        """Everything new as one write: an event per choice."""
        tail = self._tail()
        return "".join(f"{self._head}{self._choice(d)}]{tail}" for d in deltas).encode("ascii")

    def closing_events(self) -> bytes:
        """What follows the last chunk of a stream that ended well."""
        if not self._usage_frame:
            return DONE
        counts = json.dumps(usage(self.session), separators=(",", ":"))
        return f'{self._head}],"usage":{counts}}}\n\n'.encode("ascii") + DONE

    def whole(self) -> dict[str, Any]:
        """The answer of a request that does not stream."""
        return {
            "id": self.id_prefix + self.session.spec.request_id,
            "object": self.object_name,
            "created": self.session.created_unix_s,
            "model": self.session.spec.model,
            "choices": [
                self._whole_choice(choice)
                | ({"token_ids": choice.state.output_ids} if self._token_ids else {})
                for choice in self.session.choices
            ],
            "usage": usage(self.session),
        }

    def _tail(self) -> str:
        if self._running_usage:
            counts = json.dumps(usage(self.session, final=False), separators=(",", ":"))
            return f',"usage":{counts}}}\n\n'
        return ',"usage":null}\n\n' if self._usage_frame else "}\n\n"

    def _ids(self, delta: OutputDelta) -> str:
        return f',"token_ids":{delta.token_ids}' if self._token_ids else ""

    @abstractmethod
    def _choice(self, delta: OutputDelta) -> str:
        """A chunk's choice as JSON."""

    @abstractmethod
    def _whole_choice(self, choice: SequenceRequest) -> dict[str, Any]:
        """A finished choice of an answer that is not streamed."""


class CompletionRenderer(Renderer):
    """`text_completion`, with the old form of log-probabilities."""

    object_name = "text_completion"
    chunk_name = "text_completion"
    id_prefix = "cmpl-"

    def __init__(self, session: Request, tokenizer: TextTokenizer, **options: bool) -> None:
        super().__init__(session, tokenizer, **options)
        self._offsets = [0] * len(session.choices)

    def _choice(self, delta: OutputDelta) -> str:
        choice = self.session.choices[delta.choice]
        text, logprobs = delta.text, delta.logprobs
        if self.session.spec.echo and delta.is_first and delta.first_index == 0:
            text = self._prompt_text(choice) + text
            if choice.prompt_logprobs is not None:
                logprobs = [*choice.prompt_logprobs, *(logprobs or [])]
        parts = "null"
        if logprobs is not None:
            start = self._offsets[delta.choice]
            table, self._offsets[delta.choice] = self._logprobs(logprobs, start)
            parts = json.dumps(table, separators=(",", ":"))
        finish = f'"{delta.finish.value}"' if delta.finish is not None else "null"
        return (
            f'{{"index":{delta.choice},"text":{quote(text)},"logprobs":{parts},'
            f'"finish_reason":{finish}{self._ids(delta)}}}'
        )

    def _whole_choice(self, choice: SequenceRequest) -> dict[str, Any]:
        spec = self.session.spec
        text = "".join(choice.pieces) + choice.tail
        rows = list(choice.logprobs)
        if spec.echo:
            text = self._prompt_text(choice) + text
            rows = [*(choice.prompt_logprobs or []), *rows]
        wants = spec.sampling.num_logprobs is not None
        return {
            "index": choice.index,
            "text": text,
            "logprobs": self._logprobs(rows, 0)[0] if wants else None,
            "finish_reason": choice.finish.value if choice.finish else None,
        }

    def _prompt_text(self, choice: SequenceRequest) -> str:
        spec = self.session.spec
        return spec.prompts[choice.index // spec.n].text

    def _logprobs(self, rows: Sequence[TokenLogprob], offset: int) -> tuple[dict[str, Any], int]:
        name = self.tokenizer.token_text
        tokens, values, tops, offsets = [], [], [], []
        for row in rows:
            text = name(row.token_id)
            tokens.append(text)
            values.append(row.logprob)
            top: dict[str, float] = {}
            for token_id, value in row.top:  # two broken characters may share a text: best first
                top.setdefault(name(token_id), value)
            tops.append(top if row.logprob is not None else None)
            offsets.append(offset)
            offset += len(text)
        table = {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": offsets,
        }
        return table, offset


class ChatRenderer(Renderer):
    """`chat.completion` and its chunks; the role comes with the first text, not before it."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def _choice(self, delta: OutputDelta) -> str:
        role = '"role":"assistant",' if delta.is_first else ""
        finish = f'"{delta.finish.value}"' if delta.finish is not None else "null"
        parts = "null"
        if delta.logprobs is not None:
            parts = json.dumps(self._logprobs(delta.logprobs), separators=(",", ":"))
        return (
            f'{{"index":{delta.choice},"delta":{{{role}"content":{quote(delta.text)}}},'
            f'"logprobs":{parts},"finish_reason":{finish}{self._ids(delta)}}}'
        )

    def _whole_choice(self, choice: SequenceRequest) -> dict[str, Any]:
        wants = self.session.spec.sampling.num_logprobs is not None
        return {
            "index": choice.index,
            "message": {
                "role": "assistant",
                "content": "".join(choice.pieces) + choice.tail,
                "refusal": None,
            },
            "logprobs": self._logprobs(choice.logprobs) if wants else None,
            "finish_reason": choice.finish.value if choice.finish else None,
        }

    def _logprobs(self, rows: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {
            "content": [
                self._token(row.token_id, row.logprob)
                | {"top_logprobs": [self._token(token_id, value) for token_id, value in row.top]}
                for row in rows
            ],
            "refusal": None,
        }

    def _token(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        return {
            "token": self.tokenizer.token_text(token_id),
            "logprob": logprob,
            "bytes": self.tokenizer.token_bytes(token_id),
        }
