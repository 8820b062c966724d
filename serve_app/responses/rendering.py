"""Answers of POST /v1/responses: whole, and as its events."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from quadriga.core.request import FinishReason
from quadriga.errors import QuadrigaError
from quadriga.text import TextTokenizer
from quadriga.text.tool_parser import CallNews
from serve_app.openai.bodies import json_size
from serve_app.openai.rendering import StreamFormat, usage
from serve_app.openai.tool_output import FinishedCall, call_id, read_items, read_news
from serve_app.request.request import OutputDelta, OutputStream, Request
from serve_app.responses.body import ResponsesBody


class ResponsesFormat(StreamFormat):
    """The answer of one request for one reader; it knows which events its reader has had.

    Args:
        body: What was asked, which the answer repeats.
    """

    def __init__(self, body: ResponsesBody) -> None:
        self._asked = _asked(body)
        self._num_events = 0
        self._items: list[dict[str, Any]] = []
        self._is_open = False

    def events(
        self, stream: OutputStream, deltas: Sequence[OutputDelta], tokenizer: TextTokenizer
    ) -> bytes:
        """Everything new as one write."""
        request, out = stream.request, list[bytes]()
        if not self._num_events:
            begun = self._response(request, "in_progress", [])
            out += [
                self._event(f"response.{name}", response=begun)
                for name in ("created", "in_progress")
            ]
        for delta in deltas:
            for piece in read_news(stream, delta).pieces:
                if isinstance(piece, str):
                    out += self._text(request, piece)
                else:
                    out += self._call(request, piece)
            if delta.finish is not None and not self._items:
                out += self._text(request, "")
        return b"".join(out)

    def closing_events(self, request: Request) -> bytes:
        """The end of the last item, and the whole response."""
        closing = self._close(_status(request))
        answer = self._response(request, _status(request), self._items)
        name = f"response.{answer['status']}"
        return b"".join([*closing, self._event(name, response=answer)])

    def error_event(self, exc: QuadrigaError) -> bytes:
        """The last event of a stream that broke."""
        return self._event("error", code=exc.code, message=exc.message, param=exc.param)

    def whole(self, request: Request, tokenizer: TextTokenizer) -> dict[str, Any]:
        """The answer of a request that does not stream."""
        found = read_items(request, request.sequences[0]) or [""]
        items = [
            _message(request, i, item, "completed")
            if isinstance(item, str)
            else _function_call(request, item, "completed")
            for i, item in enumerate(found)
        ]
        items[-1]["status"] = _status(request)
        return self._response(request, _status(request), items)

    def _text(self, request: Request, text: str) -> list[bytes]:
        out = []
        if not self._is_open or self._items[-1]["type"] != "message":
            out += self._close("completed")
            item = _message(request, len(self._items), "", "in_progress")
            part = item["content"].pop()
            out.append(self._open(item))
            item["content"].append(part)
            out.append(self._part("content_part.added", part=part))
        if text:
            self._items[-1]["content"][0]["text"] += text
            out.append(self._part("output_text.delta", delta=text, logprobs=[]))
        return out

    def _call(self, request: Request, call: CallNews) -> list[bytes]:
        out = []
        if call.name is not None:
            out += self._close("completed")
            begun = FinishedCall(call_id(request, 0, call.index), call.name, "")
            out.append(self._open(_function_call(request, begun, "in_progress")))
        item = self._items[-1]
        item["arguments"] += call.arguments
        if call.arguments:
            out.append(self._item_event("function_call_arguments.delta", delta=call.arguments))
        return out

    def _open(self, item: dict[str, Any]) -> bytes:
        self._items.append(item)
        self._is_open = True
        index = len(self._items) - 1
        return self._event("response.output_item.added", output_index=index, item=item)

    def _close(self, status: str) -> list[bytes]:
        if not self._is_open:
            return []
        self._is_open = False
        item, out = self._items[-1], []
        item["status"] = status
        if item["type"] == "message":
            part = item["content"][0]
            out.append(self._part("output_text.done", text=part["text"], logprobs=[]))
            out.append(self._part("content_part.done", part=part))
        else:
            done = {"name": item["name"], "arguments": item["arguments"]}
            out.append(self._item_event("function_call_arguments.done", **done))
        index = len(self._items) - 1
        out.append(self._event("response.output_item.done", output_index=index, item=item))
        return out

    def _part(self, name: str, /, **fields: Any) -> bytes:
        return self._item_event(name, content_index=0, **fields)

    def _item_event(self, name: str, /, **fields: Any) -> bytes:
        """An event about the newest item."""
        index = len(self._items) - 1
        return self._event(
            f"response.{name}", output_index=index, item_id=self._items[-1]["id"], **fields
        )

    def _event(self, name: str, /, **fields: Any) -> bytes:
        data = {"type": name, "sequence_number": self._num_events} | fields
        self._num_events += 1
        return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()

    def _response(
        self, request: Request, status: str, items: list[dict[str, Any]]
    ) -> dict[str, Any]:
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        counts = None
        if status != "in_progress":
            all_counts = usage(request)
            counts = {
                "input_tokens": all_counts["prompt_tokens"],
                "input_tokens_details": all_counts["prompt_tokens_details"],
                "output_tokens": all_counts["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": all_counts["total_tokens"],
                "quadriga": all_counts["quadriga"],
            }
        return {
            "id": f"resp_{request.request_id}",
            "object": "response",
            "created_at": request.created_unix_s,
            "status": status,
            "error": None,
            "incomplete_details": reason,
            "model": request.shown_model,
            "output": items,
            "temperature": request.sampling.temperature,
            "top_p": request.sampling.top_p,
            "usage": counts,
        } | self._asked


def _asked(body: ResponsesBody) -> dict[str, Any]:
    """What an answer repeats of its request. Raises: InvalidRequest: It cannot be repeated."""
    given = body.model_dump(by_alias=True, exclude_none=True)
    for name in ("text", "tools", "tool_choice"):  # any JSON is read of their unknown fields
        json_size(given.get(name), name)
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "store": False,
        "text": given.get("text") or {"format": {"type": "text"}},
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": given.get("tools", []),
        "truncation": "disabled",
    }


def _status(request: Request) -> str:
    is_cut = request.sequences[0].finish is FinishReason.LENGTH
    return "incomplete" if is_cut else "completed"


def _message(request: Request, index: int, text: str, status: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {
        "type": "message",
        "id": f"msg_{request.request_id}_{index}",
        "status": status,
        "role": "assistant",
        "content": [part],
    }


def _function_call(request: Request, call: FinishedCall, status: str) -> dict[str, Any]:
    return {
        "type": "function_call",
        "id": f"fc_{call.id[5:]}",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
        "status": status,
    }
