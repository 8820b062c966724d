"""Answers in the OpenAI formats: whole, and as stream events put together by hand.

A chunk is a short head and the few parts that change; no object is built per token. Completions and
chats keep no state: what a reader has seen is in its `OutputStream`.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from json.encoder import encode_basestring_ascii as quote
from typing import Any

from pydantic_core import to_json

from quadriga.core.request import TokenLogprob
from quadriga.errors import QuadrigaError
from quadriga.text import TextTokenizer
from quadriga.text.tool_parser import CallNews
from serve_app.openai.errors import error_frame
from serve_app.openai.tool_output import (
    call_id,
    read_answer,
    read_news,
    stream_finish,
)
from serve_app.request.request import OutputDelta, OutputStream, Request
from serve_app.request.sequence_request import SequenceRequest

DONE = b"data: [DONE]\n\n"


def usage(request: Request, *, num_read: int | None = None) -> dict[str, Any]:
    """Token counts; at the end with the depth at which each token left.

    Args:
        num_read: Of a stream that goes on, output tokens that its reader has so far: those that
            are held back, to be passed on one by one, are not among them. None: it is the end.
    """
    prompt = request.num_prompt_tokens
    output = request.num_output_tokens if num_read is None else num_read
    counts: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": request.num_cached_tokens},
    }
    if num_read is None:
        course = request.course()
        exits = {str(layers): n for layers, n in sorted(course["exits"].items())}
        counts["quadriga"] = course | {"exits": exits}
    return counts


class AnswerFormat(ABC):
    """How a request's answer is written."""

    @abstractmethod
    def whole(self, request: Request, tokenizer: TextTokenizer) -> dict[str, Any]:
        """The answer of a request that does not stream."""


class StreamFormat(AnswerFormat):
    """How an answer is written that may also come as events."""

    @abstractmethod
    def events(
        self, stream: OutputStream, deltas: Sequence[OutputDelta], tokenizer: TextTokenizer
    ) -> bytes:
        """Everything new as one write."""

    @abstractmethod
    def closing_events(self, request: Request) -> bytes:
        """What follows the last chunk of a stream that ended well."""

    def error_event(self, exc: QuadrigaError) -> bytes:
        """The last event of a stream that broke."""
        return error_frame(exc)


class ChoicesFormat(StreamFormat):
    """Of completions and chats.

    Attributes:
        prompts_in_choices: Whether each choice has its `prompt_token_ids`, or one field all.
    """

    prompts_in_choices: bool
    object_name: str
    chunk_name: str
    id_prefix: str

    def events(
        self, stream: OutputStream, deltas: Sequence[OutputDelta], tokenizer: TextTokenizer
    ) -> bytes:
        """Everything new as one write: an event per sequence."""
        request = stream.request
        head = stream.head = stream.head or self._head(request)
        tail = "}\n\n"
        if request.usage_in_chunks:
            counts = to_json(usage(request, num_read=stream.num_read)).decode()
            tail = f',"usage":{counts}}}\n\n'
        elif request.usage_chunk:
            tail = ',"usage":null}\n\n'
        parts = []
        for delta in deltas:
            shown = self._news(stream, delta, tokenizer)
            reason = delta.finish if request.tools is None else stream_finish(stream, delta)
            sequence = request.sequences[delta.choice]
            finish, ids, end = "null", "", tail
            if reason is not None:
                finish = f'"{reason}","stop_reason":{json.dumps(sequence.stop_reason)}'
            if request.return_token_ids:
                ids = f',"token_ids":{delta.token_ids}'
                is_begun = delta.is_first and not delta.first_index
                if is_begun and (self.prompts_in_choices or not delta.choice):
                    prompt_ids = f',"prompt_token_ids":{sequence.state.prompt_ids}'
                    if self.prompts_in_choices:
                        ids = prompt_ids + ids
                    else:
                        end = prompt_ids + tail
            if request.eta_in_chunks:
                to_go = sequence.eta
                fields = None if to_go is None else to_go.plain()
                ids += f',"eta":{json.dumps(fields, separators=(",", ":"))}'
            parts.append(
                f'{head}{{"index":{delta.choice},{shown},"finish_reason":{finish}{ids}}}]{end}'
            )
        return "".join(parts).encode("ascii")

    def closing_events(self, request: Request) -> bytes:
        """What follows the last chunk of a stream that ended well."""
        if not request.usage_chunk:
            return DONE
        counts = json.dumps(usage(request), separators=(",", ":"))
        return f'{self._head(request)}],"usage":{counts}}}\n\n'.encode("ascii") + DONE

    def whole(self, request: Request, tokenizer: TextTokenizer) -> dict[str, Any]:
        """The answer of a request that does not stream."""
        answer: dict[str, Any] = {
            "id": self.id_prefix + request.request_id,
            "object": self.object_name,
            "created": request.created_unix_s,
            "model": request.shown_model,
            "choices": [
                {"index": sequence.index}
                | self._message(request, sequence, tokenizer)
                | {"stop_reason": sequence.stop_reason}
                for sequence in request.sequences
            ],
            "usage": usage(request),
        }
        if request.return_token_ids:
            for choice, sequence in zip(answer["choices"], request.sequences, strict=True):
                choice["token_ids"] = sequence.state.output_ids
                holder = choice if self.prompts_in_choices else answer
                holder["prompt_token_ids"] = sequence.state.prompt_ids
        return answer

    def _head(self, request: Request) -> str:
        """What all chunks of an answer begin with."""
        return (
            f'data: {{"id":{quote(self.id_prefix + request.request_id)},'
            f'"object":"{self.chunk_name}","created":{request.created_unix_s},'
            f'"model":{quote(request.shown_model)},"choices":['
        )

    @abstractmethod
    def _news(self, stream: OutputStream, delta: OutputDelta, tokenizer: TextTokenizer) -> str:
        """Text and log-probabilities of a chunk, as JSON fields."""

    @abstractmethod
    def _message(
        self, request: Request, sequence: SequenceRequest, tokenizer: TextTokenizer
    ) -> dict[str, Any]:
        """Text, log-probabilities and finish reason of a finished sequence."""


class CompletionFormat(ChoicesFormat):
    """`text_completion`, with the old form of log-probabilities."""

    prompts_in_choices = True
    object_name = "text_completion"
    chunk_name = "text_completion"
    id_prefix = "cmpl-"

    def _news(self, stream: OutputStream, delta: OutputDelta, tokenizer: TextTokenizer) -> str:
        request, state = stream.request, stream.request.sequences[delta.choice].state
        text, echoed = delta.text, None
        if delta.is_first:
            prompt = request.prompt_text(delta.choice) if request.echo else ""
            before = state.output_ids[: delta.first_index]
            offset = len(prompt) + sum(map(tokenizer.num_characters, before))
            stream.text_offsets[delta.choice] = offset
            if not before:
                text, echoed = prompt + text, state.prompt_logprobs
        table = "null"
        if delta.logprobs is not None or echoed is not None:
            start = stream.text_offsets[delta.choice]
            columns, stream.text_offsets[delta.choice] = _completion_logprobs(
                delta.logprobs or (), tokenizer, start, echoed or ()
            )
            table = json.dumps(columns, separators=(",", ":"))
        return f'"text":{quote(text)},"logprobs":{table}'

    def _message(
        self, request: Request, sequence: SequenceRequest, tokenizer: TextTokenizer
    ) -> dict[str, Any]:
        prompt, table = request.prompt_text(sequence.index) if request.echo else "", None
        if request.sampling.num_logprobs is not None:
            rows, echoed = sequence.state.logprobs, sequence.state.prompt_logprobs or ()
            table, _ = _completion_logprobs(rows, tokenizer, len(prompt), echoed)
        return {
            "text": prompt + "".join(sequence.pieces) + sequence.tail,
            "logprobs": table,
            "finish_reason": sequence.finish,
        }


class ChatFormat(ChoicesFormat):
    """`chat.completion` and its chunks; the role of an only choice comes with its first text."""

    prompts_in_choices = False
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def events(
        self, stream: OutputStream, deltas: Sequence[OutputDelta], tokenizer: TextTokenizer
    ) -> bytes:
        """As one write; OpenAI's client ends the last call by an end, unless that begins it too."""
        if stream.request.tools is not None:
            deltas = [part for delta in deltas for part in _end_apart(delta)]
        return super().events(stream, deltas, tokenizer)

    def _news(self, stream: OutputStream, delta: OutputDelta, tokenizer: TextTokenizer) -> str:
        role = '"role":"assistant",' if delta.is_first else ""
        table = "null"
        if delta.logprobs is not None:
            table = json.dumps(_chat_logprobs(delta.logprobs, tokenizer), separators=(",", ":"))
        content = quote(delta.text)
        if stream.request.tools is not None:
            content = _content_and_calls(stream, delta)
        return f'"delta":{{{role}"content":{content}}},"logprobs":{table}'

    def _message(
        self, request: Request, sequence: SequenceRequest, tokenizer: TextTokenizer
    ) -> dict[str, Any]:
        wants = request.sampling.num_logprobs is not None
        text, calls, finish = read_answer(request, sequence)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message["content"] = text or None
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in calls
            ]
        return {
            "message": message,
            "logprobs": _chat_logprobs(sequence.state.logprobs, tokenizer) if wants else None,
            "finish_reason": finish,
        }


def _end_apart(delta: OutputDelta) -> list[OutputDelta]:
    """News without the end, and the end behind them, if they bring both."""
    if delta.finish is None or not delta.text:
        return [delta]
    at = delta.first_index + len(delta.token_ids)
    end = replace(delta, first_index=at, token_ids=[], text="", logprobs=None, is_first=False)
    return [replace(delta, finish=None), end]


def _content_and_calls(stream: OutputStream, delta: OutputDelta) -> str:
    """What a chunk brings of an answer that may call: its text, and behind it news of calls."""
    news = read_news(stream, delta)
    if not news.calls:
        return quote(news.text)
    shown = [_call_delta(stream.request, delta.choice, call) for call in news.calls]
    calls = json.dumps(shown, separators=(",", ":"))
    return f'{quote(news.text) if news.text else "null"},"tool_calls":{calls}'


def _call_delta(request: Request, choice: int, call: CallNews) -> dict[str, Any]:
    """News of a call, as a chunk has them: id and name come with the first."""
    function = {"arguments": call.arguments}
    if call.name is None:
        return {"index": call.index, "function": function}
    return {
        "index": call.index,
        "id": call_id(request, choice, call.index),
        "type": "function",
        "function": {"name": call.name} | function,
    }


def _completion_logprobs(
    rows: Sequence[TokenLogprob],
    tokenizer: TextTokenizer,
    begin: int,
    echoed: Sequence[TokenLogprob] = (),
) -> tuple[dict[str, Any], int]:
    """Columns of a completion's log-probabilities, and the text offset after them.

    The text of `rows` begins at `begin`, however many characters the tokens of the prompt have.
    """
    name = tokenizer.token_text
    tokens, values, tops, offsets = [], [], [], []
    offset = 0
    for i, row in enumerate([*echoed, *rows]):
        offset = begin if i == len(echoed) else offset
        text = name(row.token_id)
        tokens.append(text)
        values.append(row.logprob)
        top: dict[str, float | None] = {}
        # The token's own too, as OpenAI has it. Two broken characters may share a text: best first.
        for token_id, value in (*row.top, (row.token_id, row.logprob)):
            top.setdefault(name(token_id), value)
        tops.append(top if row.logprob is not None else None)
        offsets.append(offset)
        offset += tokenizer.num_characters(row.token_id)
    table = {
        "tokens": tokens,
        "token_logprobs": values,
        "top_logprobs": tops,
        "text_offset": offsets,
    }
    return table, offset if rows else begin


def _chat_logprobs(rows: Sequence[TokenLogprob], tokenizer: TextTokenizer) -> dict[str, Any]:
    def entry(token_id: int, logprob: float | None) -> dict[str, Any]:
        text, data = tokenizer.token_text(token_id), tokenizer.token_bytes(token_id)
        return {"token": text, "logprob": logprob, "bytes": data}

    return {
        "content": [
            entry(row.token_id, row.logprob)
            | {"top_logprobs": [entry(token_id, value) for token_id, value in row.top]}
            for row in rows
        ],
        "refusal": None,
    }


COMPLETION = CompletionFormat()
CHAT = ChatFormat()
