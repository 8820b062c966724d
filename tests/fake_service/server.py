"""A fake OpenAI service on a raw socket: well-formed by default, wrong in one way when asked.

For the checker's tests. It writes its bytes itself, so that it can also write wrong ones.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from tests.fake_service.faults import (
    CLOSE,
    DONE,
    FAULTS,
    HANG,
    STREAM_FAULTS,
    Document,
    Part,
    encode,
)
from tests.fake_service.generation import FakeGeneration, FakeOptions
from tests.fake_service.model import END_ID, chat_text, detokenize, tokenize

MODEL = "fake"
RETRY_AFTER_S = 1


@dataclass(slots=True)
class _FakeRequest:
    method: str
    path: str
    headers: dict[str, str]
    body: Any


class FakeServer:
    """`async with FakeServer(options) as server:` listens on `server.url` until the block ends."""

    def __init__(self, options: FakeOptions | None = None) -> None:
        options = options or FakeOptions()
        if options.fault is not None and options.fault not in FAULTS:
            raise ValueError(f"fault {options.fault!r} is none of {', '.join(FAULTS)}")
        self.options = options
        self.num_requests = 0
        self.max_in_flight = 0
        self.in_flight = 0
        self.bodies: list[Document] = []
        self._server: asyncio.Server | None = None
        self._streams: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> FakeServer:
        await self.start(0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._streams):
            task.cancel()
        await asyncio.gather(*self._streams, return_exceptions=True)

    async def start(self, port: int) -> None:
        """Listen on loopback; port 0 takes a free one."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port, limit=1 << 24)

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._streams.add(task)
        try:
            await self._answer(await _read_request(reader), writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client went away
        except asyncio.CancelledError:
            pass  # the fake is closing
        finally:
            self._streams.discard(task)
            writer.close()

    async def _answer(self, request: _FakeRequest, writer: asyncio.StreamWriter) -> None:
        match request.path:
            case "/health":
                self._respond(writer, request, 200, {})
            case "/v1/models":
                card: Document = {"id": MODEL, "object": "model", "owned_by": "quadriga"}
                card |= {"root": MODEL, "max_model_len": self.options.max_model_len}
                self._respond(writer, request, 200, {"object": "list", "data": [card]})
            case "/tokenize":
                body = request.body
                text = chat_text(body["messages"]) if "messages" in body else body["prompt"]
                self._respond(writer, request, 200, {"tokens": tokenize(text)})
            case "/detokenize":
                ids = [token for token in request.body["tokens"] if token != END_ID]
                self._respond(writer, request, 200, {"prompt": detokenize(ids)})
            case "/v1/completions" | "/v1/chat/completions":
                self.in_flight += 1
                self.max_in_flight = max(self.max_in_flight, self.in_flight)
                try:
                    await self._generate(request, writer)
                finally:
                    self.in_flight -= 1
            case _:
                self._respond(writer, request, 404, _error("unknown route", "not_found"))

    async def _generate(self, request: _FakeRequest, writer: asyncio.StreamWriter) -> None:
        self.num_requests += 1
        self.bodies.append(request.body)
        fault = self.options.fault
        refused = self.num_requests <= self.options.refuse_first
        if refused or fault in ("refuse", "refuse_without_retry_after"):
            after = {} if fault == "refuse_without_retry_after" else {"retry-after": RETRY_AFTER_S}
            self._respond(writer, request, 429, _error("busy", "overloaded"), after)
        elif fault == "status_500":
            self._respond(writer, request, 500, _error("broken", "internal_error"))
        elif fault == "plain_500":
            self._respond(writer, request, 500, "Internal Server Error")
        elif fault == "reset":
            writer.transport.abort()
        else:
            generation = FakeGeneration(request.body, request.path, self.options)
            if request.body.get("stream"):
                await self._stream(request, writer, generation)
            else:
                self._respond(writer, request, 200, generation.single())

    async def _stream(
        self, request: _FakeRequest, writer: asyncio.StreamWriter, generation: FakeGeneration
    ) -> None:
        documents = generation.documents()
        fault, step_s = self.options.fault, self.options.step_s
        parts: list[Part] = [*documents, DONE]
        if fault in STREAM_FAULTS:
            parts = STREAM_FAULTS[fault](documents)
        kind = "text/plain" if fault == "wrong_content_type" else "text/event-stream"
        head = self._head(request, 200, {"content-type": kind, "transfer-encoding": "chunked"})
        writer.write(head)
        for part in parts:
            if part == CLOSE:
                writer.write(b"100\r\ncut")
                return
            if part == HANG:
                await writer.drain()
                await asyncio.Event().wait()
            data = encode(part)
            writer.write(b"%x\r\n%b\r\n" % (len(data), data))
            if step_s:
                await asyncio.sleep(step_s)
        if fault != "truncated_body":
            writer.write(b"0\r\n\r\n")

    def _respond(
        self,
        writer: asyncio.StreamWriter,
        request: _FakeRequest,
        status: int,
        body: Any,
        headers: dict[str, Any] | None = None,
    ) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        kind = "text/plain" if self.options.fault == "wrong_content_type" else "application/json"
        lines = {"content-type": kind, "content-length": len(data), **(headers or {})}
        is_cut = self.options.fault == "truncated_body" and request.path.startswith("/v1/c")
        writer.write(self._head(request, status, lines) + (data[:-1] if is_cut else data))

    def _head(self, request: _FakeRequest, status: int, headers: dict[str, Any]) -> bytes:
        request_id = request.headers.get("x-request-id", "made-here")
        if self.options.fault == "wrong_request_id":
            request_id = "someone-elses"
        lines = {"x-request-id": request_id, "connection": "close", **headers}
        text = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        return f"HTTP/1.1 {status} X\r\n{text}\r\n".encode()


async def _read_request(reader: asyncio.StreamReader) -> _FakeRequest:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, path, _ = head[0].split(" ")
    pairs = (line.partition(":") for line in head[1:] if line)
    headers = {name.lower(): value.strip() for name, _, value in pairs}
    length = int(headers.get("content-length", 0))
    body = json.loads(await reader.readexactly(length)) if length else None
    return _FakeRequest(method, path, headers, body)


def _error(message: str, code: str) -> Document:
    return {"error": {"message": message, "type": "fake", "param": None, "code": code}}
