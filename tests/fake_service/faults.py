"""What the fake service can do wrong, each once and on purpose.

A fault takes the documents of a well-formed stream and returns what to write instead: documents,
or raw bytes of a body. So the checker's every rule can be shown to fire.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

Document = dict[str, Any]
Part = Document | bytes
Mutation = Callable[[list[Document]], list[Part]]

DONE = b"data: [DONE]\n\n"
CLOSE = b"\0close"  # not written: cut the connection here, inside a chunk
HANG = b"\0hang"  # not written: say nothing more


def encode(part: Part) -> bytes:
    """Return the SSE frame of a document; raw bytes stay."""
    if isinstance(part, bytes):
        return part
    return b"data: " + json.dumps(part, ensure_ascii=False).encode() + b"\n\n"


def _middle(documents: list[Document]) -> int:
    """Index of a chunk in the middle that brings text."""
    with_text = [i for i, d in enumerate(documents) if d["choices"] and _text(d)]
    return with_text[len(with_text) // 2]


def _last_choice(documents: list[Document]) -> int:
    return max(i for i, d in enumerate(documents) if d["choices"])


def _text(document: Document) -> str:
    choice = document["choices"][0]
    return str(choice.get("text") or choice.get("delta", {}).get("content") or "")


def _edit(
    position: Callable[[list[Document]], int], change: Callable[[Document], None]
) -> Mutation:
    def mutate(documents: list[Document]) -> list[Part]:
        edited = copy.deepcopy(documents)
        change(edited[position(edited)])
        return [*edited, DONE]

    return mutate


def _replace(position: Callable[[list[Document]], int], *parts: Part) -> Mutation:
    def mutate(documents: list[Document]) -> list[Part]:
        at = position(documents)
        return [*documents[:at], *parts, *documents[at + 1 :], DONE]

    return mutate


def _cut(position: Callable[[list[Document]], int], *parts: Part) -> Mutation:
    def mutate(documents: list[Document]) -> list[Part]:
        return [*documents[: position(documents)], *parts]

    return mutate


def _first(documents: list[Document]) -> int:
    return 0


def _last(documents: list[Document]) -> int:
    return len(documents) - 1


def _drop_middle(documents: list[Document]) -> list[Part]:
    at = _middle(documents)
    return [*documents[:at], *documents[at + 1 :], DONE]


def _repeat_middle(documents: list[Document]) -> list[Part]:
    at = _middle(documents)
    return [*documents[: at + 1], documents[at], *documents[at + 1 :], DONE]


def _raw_text(raw: bytes) -> Mutation:
    """Replace the middle chunk's text by raw bytes inside the JSON string."""

    def mutate(documents: list[Document]) -> list[Part]:
        at = _middle(documents)
        document = copy.deepcopy(documents[at])
        _set_text(document, "PLACE")
        return [
            *documents[:at],
            encode(document).replace(b"PLACE", raw),
            *documents[at + 1 :],
            DONE,
        ]

    return mutate


def _set_text(document: Document, text: str) -> None:
    choice = document["choices"][0]
    if "delta" in choice:
        choice["delta"]["content"] = text
    else:
        choice["text"] = text


def _text_after_finish(documents: list[Document]) -> list[Part]:
    at = _last_choice(documents)
    extra = copy.deepcopy(documents[_middle(documents)])
    return [*documents[: at + 1], extra, *documents[at + 1 :], DONE]


def _second_finish(documents: list[Document]) -> list[Part]:
    at = _last_choice(documents)
    return [*documents[: at + 1], documents[at], *documents[at + 1 :], DONE]


def _early_usage(documents: list[Document]) -> list[Part]:
    at = _last_choice(documents)
    return [*documents[:at], documents[-1], *documents[at:-1], DONE]


def _role_first(documents: list[Document]) -> list[Part]:
    first = copy.deepcopy(documents[0])
    first["choices"][0] = {
        "index": 0,
        "delta": {"role": "assistant", "content": ""},
        "finish_reason": None,
    }
    first["usage"] = dict(first["usage"], completion_tokens=0)
    first["usage"]["total_tokens"] = first["usage"]["prompt_tokens"]
    return [first, *documents, DONE]


def _uncounted(documents: list[Document]) -> list[Part]:
    edited = copy.deepcopy(documents)
    for document in edited[:-1]:
        document["usage"] = None
        for choice in document["choices"]:
            choice.pop("token_ids", None)
    return [*edited, DONE]


def _field(name: str, value: Any) -> Callable[[Document], None]:
    def change(document: Document) -> None:
        document[name] = value

    return change


def _choice_field(name: str, value: Any) -> Callable[[Document], None]:
    def change(document: Document) -> None:
        document["choices"][0][name] = value

    return change


def _usage_off(document: Document) -> None:
    document["usage"]["completion_tokens"] += 1
    document["usage"]["total_tokens"] += 1


_ERROR: Document = {
    "error": {"message": "replica died", "type": "server_error", "param": None, "code": "replica"}
}

STREAM_FAULTS: dict[str, Mutation] = {
    "no_done": lambda documents: [*documents],
    "done_twice": lambda documents: [*documents, DONE, DONE],
    "frame_after_done": lambda documents: [*documents, DONE, documents[0]],
    "gap": _drop_middle,
    "duplicate": _repeat_middle,
    "wrong_usage": _edit(_last, _usage_off),
    "usage_does_not_add_up": _edit(_last, lambda d: d["usage"].update(total_tokens=1)),
    "no_usage": lambda documents: [*documents[:-1], DONE],
    "usage_before_finish": _early_usage,
    "uncounted": _uncounted,
    "error_frame": _cut(_middle, _ERROR),
    "frame_after_error": _replace(_middle, _ERROR),
    "half_character": _raw_text(b"\xc3"),
    "lone_surrogate": _raw_text(b"\\ud83d"),
    "early_close": _cut(_middle, CLOSE),
    "clean_early_close": _cut(_middle),
    "hang": _cut(_middle, HANG),
    "bad_json": _replace(_middle, b'data: {"id": \n\n'),
    "not_an_object": _replace(_middle, b"data: [1]\n\n"),
    "nan": _edit(_middle, _field("created", float("nan"))),
    "comment_frame": _replace(_middle, b": ping\n\n"),
    "crlf_frame": _replace(_middle, b"data: {}\r\n\r\n"),
    "two_line_frame": _replace(_middle, b"data: {\ndata: }\n\n"),
    "no_space": _replace(_middle, b"data:{}\n\n"),
    "unfinished_frame": lambda documents: [*documents, b"data: [DONE]\n"],
    "wrong_object": _edit(_middle, _field("object", "completion")),
    "id_changes": _edit(_middle, _field("id", "cmpl-other")),
    "model_changes": _edit(_middle, _field("model", "other")),
    "empty_id": _edit(_first, _field("id", "")),
    "choice_out_of_range": _edit(_middle, _choice_field("index", 7)),
    "choice_is_bool": _edit(_middle, _choice_field("index", False)),
    "choices_missing": _edit(_middle, lambda d: d.pop("choices")),
    "text_missing": _edit(_middle, lambda d: _set_text(d, None)),  # type: ignore[arg-type]
    "wrong_text": _edit(_middle, lambda d: _set_text(d, "x" + _text(d))),
    "bad_token_ids": _edit(_middle, _choice_field("token_ids", ["a"])),
    "text_after_finish": _text_after_finish,
    "second_finish": _second_finish,
    "no_finish": _edit(_last_choice, _choice_field("finish_reason", None)),
    "unknown_finish": _edit(_last_choice, _choice_field("finish_reason", "banana")),
    "stop_despite_ignore_eos": _edit(_last_choice, _choice_field("finish_reason", "stop")),
    "role_only_first": _role_first,
}

# Handled by the server itself: status lines, headers, lengths.
SERVER_FAULTS = (
    "refuse",
    "refuse_without_retry_after",
    "status_500",
    "plain_500",
    "wrong_content_type",
    "wrong_request_id",
    "one_token_less",
    "one_token_more",
    "wrong_prompt_tokens",
    "other_model",
    "reset",
    "truncated_body",
)
FAULTS = (*STREAM_FAULTS, *SERVER_FAULTS)
