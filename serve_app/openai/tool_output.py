"""Calls of functions in answers: what is new of them for one reader, and all of a finished one."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quadriga.core.request import FinishReason
from quadriga.text.tool_parser import ToolNews, ToolParser

if TYPE_CHECKING:
    from serve_app.request.request import OutputDelta, OutputStream, Request
    from serve_app.request.sequence_request import SequenceRequest


@dataclass(slots=True)
class FinishedCall:
    """A whole call.

    Attributes:
        id: By which the conversation names it.
        arguments: JSON, as the model wrote it.
    """

    id: str
    name: str
    arguments: str


def read_news(stream: OutputStream, delta: OutputDelta) -> ToolNews:
    """What a piece of output brings its reader: text, and calls where the request has tools."""
    request, choice = stream.request, delta.choice
    if request.tools is None:
        return ToolNews([delta.text] if delta.text else [], delta.text)
    if not delta.text and delta.finish is None:
        return ToolNews()  # perhaps what is before it has not been sent again yet
    parser = stream.tool_parsers.get(choice)
    if parser is None:
        parser = stream.tool_parsers[choice] = request.tools.parser()
        # A reader that takes an answer up again has seen what comes before.
        parser.push("".join(request.sequences[choice].pieces[: delta.first_index]))
    news = parser.push(delta.text)
    if delta.finish is not None:
        for piece in parser.flush().pieces:
            news.add(piece)
    return news


def read_answer(
    request: Request, sequence: SequenceRequest
) -> tuple[str, list[FinishedCall], FinishReason | None]:
    """The text and the calls of a finished sequence, and why it ended, as clients see it."""
    items, parser = _read(request, sequence)
    calls = [item for item in items if isinstance(item, FinishedCall)]
    text = "".join([item for item in items if isinstance(item, str)])
    return text, calls, _shown_finish(sequence.finish, parser)


def read_items(request: Request, sequence: SequenceRequest) -> list[str | FinishedCall]:
    """Texts and calls of a finished sequence, in order."""
    return _read(request, sequence)[0]


def _read(
    request: Request, sequence: SequenceRequest
) -> tuple[list[str | FinishedCall], ToolParser | None]:
    """Texts and calls of a finished sequence, and what has read them, where it may call."""
    text = "".join(sequence.pieces) + sequence.tail
    if request.tools is None:
        return [text], None
    parser = request.tools.parser()
    items: list[str | FinishedCall] = []
    for piece in parser.push(text).pieces + parser.flush().pieces:
        last = items[-1] if items else None
        if isinstance(piece, str):
            if isinstance(last, str):
                items.pop()
            items.append(last + piece if isinstance(last, str) else piece)
        elif piece.name is not None:
            name = call_id(request, sequence.index, piece.index)
            items.append(FinishedCall(name, piece.name, piece.arguments))
        elif isinstance(last, FinishedCall):
            last.arguments += piece.arguments
    return items, parser


def stream_finish(stream: OutputStream, delta: OutputDelta) -> FinishReason | None:
    """Why a sequence ended, as its reader sees it; None while it goes on."""
    return _shown_finish(delta.finish, stream.tool_parsers.get(delta.choice))


def _shown_finish(finish: FinishReason | None, parser: ToolParser | None) -> FinishReason | None:
    """An answer that stopped ends in `tool_calls` where it calls, and no call of it is cut."""
    calls = parser is not None and parser.num_calls and not parser.is_cut
    return FinishReason.TOOL_CALLS if finish is FinishReason.STOP and calls else finish


def call_id(request: Request, choice: int, index: int) -> str:
    """The id of a call: the same for every reader of the answer."""
    name = f"{request.request_id}:{choice}:{index}"
    return f"call_{hashlib.sha256(name.encode()).hexdigest()[:24]}"
