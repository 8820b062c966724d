"""HTTP and SSE parsing of recorded reads."""

from __future__ import annotations

import pytest

from loadgen.wire.http_wire import ParsedBody, parse_response
from loadgen.wire.sse import split_frames

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_chunks_carry_the_time_of_their_read() -> None:
    reads = [(1.0, HEAD + b"3\r\nab"), (2.0, b"c\r\n2\r\nde\r\n"), (3.0, b"0\r\n\r\n")]
    response = parse_response(reads)
    assert response.complete and response.faults == []
    assert response.body.data == b"abcde"
    times = dict(zip(response.body.ends, response.body.times_s, strict=True))
    assert times == {2: 1.0, 3: 2.0, 5: 2.0}


def test_chunk_extensions_and_trailers_are_read() -> None:
    response = parse_response([(1.0, HEAD + b"2;x=1\r\nab\r\n0\r\nT: 1\r\n\r\n")])
    assert response.complete and response.body.data == b"ab"


@pytest.mark.parametrize(
    ("raw", "fault"),
    [
        (b"", "no response"),
        (HEAD[:-2], "inside the headers"),
        (HEAD, "cut off inside the chunked body"),
        (HEAD + b"5\r\nab", "cut off inside the chunked body"),
        (HEAD + b"2\r\nabc\r\n0\r\n\r\n", "Expected LF after chunk data"),
        (HEAD + b"zz\r\n", "Invalid character in chunk size"),
        (HEAD + b"0\r\n", "cut off inside the chunked body"),
        (HEAD + b"0\r\n\r\nHTTP/1.1", "bytes after the end"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab", "content-length"),
        (b"SSH-2.0\r\n\r\n", "Expected HTTP/"),
        (b"HTTP/1.1 200 OK\r\nbroken header\r\nContent-Length: 0\r\n\r\n", "Invalid header token"),
    ],
)
def test_broken_framing_is_reported(raw: bytes, fault: str) -> None:
    faults = parse_response([(1.0, raw)]).faults
    assert len(faults) == 1 and fault in faults[0]


def test_frame_is_there_with_its_last_byte() -> None:
    body = ParsedBody(b"data: a\n\ndata: b\n\n", [8, 9, 18], [1.0, 2.0, 3.0])
    frames, faults = split_frames(body)
    assert faults == []
    assert [(frame.time_s, frame.payload) for frame in frames] == [(2.0, b"a"), (3.0, b"b")]


def test_frames_of_one_read_share_its_time() -> None:
    data = b"data: a\n\ndata: b\n\n"
    frames, _ = split_frames(ParsedBody(data, [len(data)], [7.0]))
    assert [frame.time_s for frame in frames] == [7.0, 7.0]


@pytest.mark.parametrize(
    "bad", [b": ping\n\n", b"event: x\ndata: 1\n\n", b"data:1\n\n", b"\n\n", b"data: 1\r\n\r\n"]
)
def test_anything_but_one_data_line_is_malformed(bad: bytes) -> None:
    data = bad + b"data: ok\n\n"
    frames, faults = split_frames(ParsedBody(data, [len(data)], [0.0]))
    assert len(faults) == 1
    assert frames[-1:] == [] or frames[-1].payload.endswith(b"ok")
