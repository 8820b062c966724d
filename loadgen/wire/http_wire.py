"""Parse a recorded HTTP/1.1 response, keeping the time at which every byte arrived.

Strict: a response that is cut short, or framed wrongly, is reported, never repaired.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_HEAD_BYTES = 64 * 1024
_HEAD_END = b"\r\n\r\n"
_CHUNK_SIZE = re.compile(rb"[0-9a-fA-F]{1,15}")


@dataclass(slots=True)
class ParsedBody:
    """Bytes with arrival times.

    Attributes:
        ends: Offset after each piece, ascending.
        times_s: When that piece had arrived; parallel to `ends`.
    """

    data: bytes
    ends: list[int]
    times_s: list[float]

    def time_at(self, offset: int) -> float:
        """When the byte before `offset` had arrived."""
        return self.times_s[min(bisect_left(self.ends, offset), len(self.ends) - 1)]


@dataclass(slots=True)
class Response:
    """A parsed response; `faults` says what was wrong with its framing."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: ParsedBody = field(default_factory=lambda: ParsedBody(b"", [], []))
    complete: bool = False
    faults: list[str] = field(default_factory=list)


def head_length(data: bytes) -> int | None:
    """Length of status line and headers with their empty line; None while incomplete."""
    end = data.find(_HEAD_END)
    return None if end < 0 else end + len(_HEAD_END)


def parse_head(head: bytes) -> Response:
    """Parse status line and headers; header names in lower case."""
    response = Response()
    lines = head.decode("latin-1").split("\r\n")
    parts = lines[0].split(" ", 2)
    if len(parts) < 2 or not parts[0].startswith("HTTP/1.") or not parts[1].isdecimal():
        response.faults.append(f"status line {lines[0]!r:.120}")
        return response
    response.status = int(parts[1])
    for line in lines[1:]:
        if not line:
            continue
        name, colon, value = line.partition(":")
        if not colon:
            response.faults.append(f"header line {line!r:.120}")
        response.headers[name.strip().lower()] = value.strip()
    return response


def is_over(response: Response, raw: bytes, head_bytes: int) -> bool:
    """Whether `raw`, a response with this head so far, is a complete one."""
    headers = response.headers
    if "chunked" in headers.get("transfer-encoding", ""):
        return _dechunk(raw, head_bytes)[1]
    if (length := headers.get("content-length", "")).isdecimal():
        return len(raw) - head_bytes >= int(length)
    return False


def parse_response(reads: Sequence[tuple[float, bytes]]) -> Response:
    """Parse everything that was read from one connection that carried one response."""
    raw = b"".join([data for _, data in reads])
    head_bytes = head_length(raw)
    if head_bytes is None:
        return Response(faults=["no response" if not raw else "cut off inside the headers"])
    response = parse_head(raw[:head_bytes])
    ends, times, total = [], [], 0
    for time_s, data in reads:
        total += len(data)
        ends.append(total)
        times.append(time_s)
    raw_times = ParsedBody(b"", ends, times)
    if "chunked" in response.headers.get("transfer-encoding", ""):
        spans, response.complete, faults = _dechunk(raw, head_bytes)
        response.faults += faults
    else:
        spans = [(head_bytes, len(raw))] if len(raw) > head_bytes else []
        length = response.headers.get("content-length")
        have = len(raw) - head_bytes
        # Without a length the close of the connection is the end.
        response.complete = length is None or have == int(length if length.isdecimal() else -1)
        if not response.complete:
            response.faults.append(f"{have} bytes of body where content-length says {length}")
    response.body = _gather(raw, spans, raw_times)
    return response


def _dechunk(raw: bytes, position: int) -> tuple[list[tuple[int, int]], bool, list[str]]:
    """Return (spans of payload, complete, faults) of a chunked body that starts at `position`."""
    spans: list[tuple[int, int]] = []
    while True:
        line_end = raw.find(b"\r\n", position)
        if line_end < 0:
            return spans, False, ["cut off between two chunks"]
        size_text = raw[position:line_end].split(b";", 1)[0].strip()
        if _CHUNK_SIZE.fullmatch(size_text) is None:
            return spans, False, [f"chunk size {size_text!r:.60}"]
        size = int(size_text, 16)
        start = line_end + 2
        if size == 0:
            return _after_last_chunk(raw, start, spans)
        end = start + size
        if raw[end : end + 2] != b"\r\n":
            spans.append((start, min(end, len(raw))))
            what = "cut off inside a chunk" if end + 2 > len(raw) else "chunk longer than its size"
            return spans, False, [what]
        spans.append((start, end))
        position = end + 2


def _after_last_chunk(
    raw: bytes, start: int, spans: list[tuple[int, int]]
) -> tuple[list[tuple[int, int]], bool, list[str]]:
    if raw[start : start + 2] == b"\r\n":
        end: int | None = start + 2
    else:  # trailers
        found = raw.find(_HEAD_END, start)
        end = found + len(_HEAD_END) if found >= 0 else None
    if end is None:
        return spans, False, ["cut off after the last chunk"]
    faults = [] if end == len(raw) else [f"{len(raw) - end} bytes after the end of the response"]
    return spans, True, faults


def _gather(raw: bytes, spans: list[tuple[int, int]], raw_times: ParsedBody) -> ParsedBody:
    """Join the payload spans; a span's bytes carry the times of the reads they came in."""
    pieces: list[bytes] = []
    ends: list[int] = []
    times: list[float] = []
    total = 0
    read = 0
    for start, end in spans:
        pieces.append(raw[start:end])
        while start < end:
            while raw_times.ends[read] <= start:
                read += 1
            stop = min(end, raw_times.ends[read])
            total += stop - start
            ends.append(total)
            times.append(raw_times.times_s[read])
            start = stop
    return ParsedBody(b"".join(pieces), ends, times)
