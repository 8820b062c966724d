"""What comes over a wire and means harm: frames between replicas, answers to our own clients."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest
import torch
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from loadgen.checker import Expectation, judge_http
from loadgen.checker.grpc import judge_grpc
from loadgen.wire.capture import Capture, Transport
from loadgen.wire.http_wire import parse_response
from quadriga.client.wire import StreamProgress, completion
from quadriga.core.kv import KVPart
from quadriga.errors import KVTransportError, QuadrigaError
from quadriga.kv_transport.channel import ChannelOffer, parse_frame, read_header, read_verdict
from quadriga.kv_transport.channel_ends import ReceivingChannel
from quadriga.kv_transport.link import MAX_FRAME_BYTES, Link, Listener, join_link
from quadriga.protos.quadriga.v1 import quadriga_pb2 as pb
from tests.hostile import DEEP, VALUES, broken, garbled, tried

PART = KVPart("t", 0, 0, 1, 0, 2, (1, 2, 1, 2, 4), "float32", 5)
HEADER: dict[str, Any] = asdict(PART) | {"kind": "part", "left_s": 1.0, "eager_bytes": 64}


@tried(150)
@given(data=garbled(HEADER))
def test_frames_are_read_or_refused(data: bytes) -> None:
    with suppress(RuntimeError):
        frame = parse_frame(data)
        with suppress(RuntimeError):
            part, left_s, _ = read_header(frame)
            assert all(type(n) is int and n >= 0 for n in (*part.shape, part.start, part.index))
            assert left_s == left_s
        refusal = read_verdict(frame)
        assert refusal is None or isinstance(refusal, KVTransportError)


@pytest.mark.parametrize("data", [b"", b"[1]", b"null", b'"x"', b"\xff", DEEP[:60_000], b"{"])
def test_what_is_no_frame(data: bytes) -> None:
    with pytest.raises(RuntimeError):
        parse_frame(data)


def test_a_good_header() -> None:
    assert read_header(parse_frame(json.dumps(HEADER).encode())) == (PART, 1.0, 64)
    assert read_verdict({"ok": True}) is None


@dataclass
class Room(AbstractContextManager[torch.Tensor]):
    data: torch.Tensor

    def __enter__(self) -> torch.Tensor:
        return self.data

    def __exit__(self, *_: object) -> None:
        pass


@dataclass
class ScriptedLine:
    """Says what it was told to, then breaks."""

    frames: list[bytes]
    max_eager_bytes: int = 1024
    verdicts: list[dict[str, Any]] = field(default_factory=list)
    is_closed: bool = False

    def send_frame(self, content: dict[str, Any], timeout_s: float) -> None:
        self.verdicts.append(content)

    def receive_frame(self, timeout_s: float) -> dict[str, Any]:
        if not self.frames:
            raise ConnectionResetError("over")
        return parse_frame(self.frames.pop(0))

    def room(self, num_bytes: int, deadline_s: float) -> Room:
        if not 0 <= num_bytes <= 1 << 20:
            raise KVTransportError(f"no room for {num_bytes} bytes", code="too_large")
        return Room(torch.zeros(num_bytes, dtype=torch.uint8))

    def receive(self, data: torch.Tensor, deadline_s: float) -> None:
        if time.monotonic() > deadline_s:
            raise TimeoutError("late")

    def abort(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


@dataclass
class ScriptedLines:
    line: ScriptedLine
    name: str = "scripted"

    def join(self, offer: ChannelOffer) -> ScriptedLine:
        return self.line


@dataclass
class Sink:
    """Takes what fits its one row."""

    stored: int = 0

    def accept(self, source: str, part: KVPart) -> None:
        if part.transfer_id != "t" or len(part.shape) != 5:
            raise KVTransportError("unknown transfer", code="refused")

    def store(self, source: str, part: KVPart, kv: torch.Tensor) -> None:
        assert tuple(kv.shape) == part.shape
        self.stored += 1


@tried(80)
@given(frames=st.lists(garbled(HEADER) | st.just(json.dumps(HEADER).encode()), max_size=4))
def test_a_receiver_outlives_any_sender(frames: list[bytes]) -> None:
    """Its thread ends in order, the line is closed, and only whole parts were stored."""
    line, sink = ScriptedLine(list(frames)), Sink()
    channel = ReceivingChannel(ChannelOffer("peer", "h", 1, 1), ScriptedLines(line), sink)  # type: ignore[arg-type]
    failures: list[Any] = []
    before, threading.excepthook = threading.excepthook, failures.append
    try:
        channel.start()
        channel.join(60)
    finally:
        threading.excepthook = before
    assert not channel.is_alive
    assert line.is_closed
    assert not failures
    assert sink.stored <= len(frames)


HELLOS = [
    b"",
    struct.pack("<I", 2**32 - 1),
    struct.pack("<I", MAX_FRAME_BYTES) + b"[" * MAX_FRAME_BYTES,
    struct.pack("<I", 3) + b"[1]",
    struct.pack("<I", 4) + b"null",
    struct.pack("<I", 14) + b'{"token": null',
    struct.pack("<I", 17) + '{"token": "é€€"}'.encode(),
    struct.pack("<I", 19) + b'{"token": "\\ud800"}',
    struct.pack("<I", 2) + b"{}",
    b"GET / HTTP/1.1\r\n\r\n",
]


def test_strangers_do_not_keep_the_peer_out() -> None:
    """Whatever they say at the door of an NCCL pair; the one with the token still gets in."""
    listener = Listener("127.0.0.1")
    links: list[Link] = []

    def knock() -> None:
        for hello in HELLOS:
            with socket.create_connection(("127.0.0.1", listener.port), timeout=60) as stranger:
                stranger.sendall(hello)
        links.append(join_link("127.0.0.1", listener.port, listener.token, time.monotonic() + 60))

    knocking = threading.Thread(target=knock)
    knocking.start()
    try:
        accepted = listener.accept(time.monotonic() + 60)
        knocking.join(60)
        links[0].send_frame({"hello": 1}, 60.0)
        assert accepted.receive_frame(60.0) == {"hello": 1}
        accepted.close()
    finally:
        knocking.join(60)
        for link in links:
            link.close()
        listener.close()


# What our own clients are answered.

ANSWER = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    b'2d\r\ndata: {"id": "a", "choices": [{"text": "x"}]}\n\n\r\n'
    b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
)
EXPECTED = Expectation("completions", stream=True, max_tokens=4)


@tried(200)
@given(raw=broken(ANSWER), cut=st.integers(0, 200))
def test_answers_over_http(raw: bytes, cut: int) -> None:
    """The checker judges whatever came, in whatever pieces."""
    reads = [(1.0, raw[:cut]), (2.0, raw[cut:])]
    parse_response(reads)
    capture = Capture(Transport.HTTP, sent_s=0.0, reads=reads, ended_s=3.0)
    judge_http(capture, EXPECTED)


@pytest.mark.parametrize("size", [b"-2d", b"0x2d", b"2_d", b"+5", b"", b"f" * 40])
def test_chunks_of_no_size(size: bytes) -> None:
    raw = ANSWER.replace(b"2d\r\n", size + b"\r\n", 1)
    response = parse_response([(0.0, raw)])
    assert response.faults
    assert not response.complete


def message() -> Any:
    return pb.GenerateResponse(
        request_id="r",
        model="m",
        choices=[pb.ChoiceDelta(index=0, token_ids=[1, 2], text="ab")],
        usage=pb.Usage(prompt_tokens=1, completion_tokens=2),
    )


@tried(120)
@given(data=st.data())
def test_answers_over_grpc(data: st.DataObject) -> None:
    """The checker judges them, and the SDK raises an error of its own at most."""
    raw = data.draw(broken(message().SerializeToString()))
    capture = Capture(Transport.GRPC, sent_s=0.0, reads=[(1.0, raw)], ended_s=2.0, status="OK")
    judge_grpc(capture, EXPECTED)
    try:
        told = pb.GenerateResponse.FromString(raw)
    except (DecodeError, UnicodeDecodeError):  # gRPC's business
        return
    progress = StreamProgress(pb.GenerateRequest(prompt="a"))
    with suppress(QuadrigaError):
        for _ in range(2):
            progress.take(told)


@tried(80)
@given(
    choices=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 5), st.integers(0, 3)),
        max_size=5,
    )
)
def test_the_sdk_takes_no_step_back(choices: list[tuple[int, int, int, int]]) -> None:
    """Of every choice each token once and in order, or an error."""
    progress = StreamProgress(pb.GenerateRequest(prompt="a"))
    had = 0
    with suppress(QuadrigaError):
        for index, first, count, finish in choices:
            delta = pb.ChoiceDelta(
                index=index,
                first_token_index=first,
                token_ids=range(count),
                finish_reason=finish if finish < 3 else 0,
            )
            progress.take(pb.GenerateResponse(choices=[delta]))
            assert progress.received[0] >= had
            had = progress.received[0]


def test_a_whole_answer_that_has_not_ended() -> None:
    reply = pb.GenerateOnceResponse(choices=[pb.Choice(index=0, text="a")])
    with pytest.raises(QuadrigaError, match="not ended"):
        completion(reply)


@tried(60)
@given(value=VALUES)
def test_verdicts(value: Any) -> None:
    with suppress(RuntimeError):
        read_verdict({"ok": value, "message": value, "code": value})
