"""Parse a recorded HTTP/1.1 response, keeping the time at which every byte arrived.

Strict: a response that is cut short, or framed wrongly, is reported, never repaired.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import httptools


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


@dataclass(slots=True)
class Response:
    """A parsed response; `faults` says what was wrong with its framing."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: ParsedBody = field(default_factory=lambda: ParsedBody(b"", [], []))
    complete: bool = False
    faults: list[str] = field(default_factory=list)


class ResponseReader:
    """Reads one response from the pieces in which it arrives.

    Attributes:
        has_headers: The status and all headers are there.
    """

    def __init__(self) -> None:
        self.response = Response()
        self.has_headers = False
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        self._has_begun = False
        self._time_s = 0.0

    def feed(self, time_s: float, data: bytes) -> None:
        """Take what has arrived; after a fault nothing is read any more."""
        self._time_s = time_s
        if self.response.faults:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as exc:
            if not self.response.faults:
                after = "bytes after the end of the response: " if self.response.complete else ""
                self.response.faults.append(f"{after}{exc}")

    def close(self) -> Response:
        """Return the response: nothing more will come."""
        response, headers = self.response, self.response.headers
        response.body.data = b"".join(self._pieces)
        if response.complete or response.faults:
            return response
        if not self.has_headers:
            what = "cut off inside the headers" if self._has_begun else "no response"
            response.faults.append(what)
        elif (length := headers.get("content-length")) is not None:
            what = f"{self._num_bytes} bytes of body where content-length says {length}"
            response.faults.append(what)
        elif "chunked" in headers.get("transfer-encoding", ""):
            response.faults.append("cut off inside the chunked body")
        else:  # without a length the close of the connection is the end
            response.complete = True
        return response

    # What the parser calls

    def on_message_begin(self) -> None:
        if self._has_begun:
            self.response.faults.append("bytes after the end of the response")
        self._has_begun = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.has_headers:  # later ones are trailers
            text = value.decode("latin-1").strip()
            self.response.headers[name.decode("latin-1").lower()] = text

    def on_headers_complete(self) -> None:
        if not self.response.complete:
            self.response.status = self._parser.get_status_code()
            self.has_headers = True

    def on_body(self, data: bytes) -> None:
        self._pieces.append(data)
        self._num_bytes += len(data)
        self.response.body.ends.append(self._num_bytes)
        self.response.body.times_s.append(self._time_s)

    def on_message_complete(self) -> None:
        self.response.complete = True


def parse_response(reads: Iterable[tuple[float, bytes]]) -> Response:
    """Parse everything that was read from one connection that carried one response."""
    reader = ResponseReader()
    for time_s, data in reads:
        reader.feed(time_s, data)
    return reader.close()
