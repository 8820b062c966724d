"""HTTP client that records: one connection per request, raw bytes with their arrival times.

No HTTP library stands between the socket and the checker: libraries repair, buffer and skip, and
what they hide cannot be judged. A connection per request also makes "closed too early" visible.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, cast
from urllib.parse import urlsplit

from loadgen.load.workload import RequestSpec
from loadgen.wire.capture import Call, Capture, OnData, Transport, now_s
from loadgen.wire.http_wire import Response, ResponseReader, parse_response
from quadriga.errors import ConfigError

MAX_RESPONSE_BYTES = 256 << 20
MAX_REFUSALS, MAX_REFUSAL_WAIT_S = 10, 60.0  # of a call of a helper route


@dataclass(frozen=True, slots=True)
class Address:
    """Where the service listens.

    Attributes:
        prefix: Path in front of `/v1/…`, without a slash at its end.
    """

    host: str
    port: int
    prefix: str
    tls: ssl.SSLContext | None

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def parse_url(url: str, *, ca_file: str | None = None) -> Address:
    """Parse a base URL such as `http://127.0.0.1:8000`.

    Raises:
        ConfigError: It is not an http or https URL, or the CA file is unusable.
    """
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").encode("idna").decode(), parts.port
    except ValueError as exc:
        raise ConfigError(f"--url: {url!r}: {exc}", param="url") from exc
    if parts.scheme not in ("http", "https") or not host or parts.query:
        raise ConfigError(f"--url: {url!r} must look like http://host:port", param="url")
    tls = None
    if parts.scheme == "https":
        try:
            tls = ssl.create_default_context(cafile=ca_file)
        except (OSError, ssl.SSLError) as exc:
            raise ConfigError(f"--ca-file: {ca_file}: {exc}", param="ca-file") from exc
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    return Address(host, port or (443 if tls else 80), prefix, tls)


class HttpClient:
    """Sends requests and returns their captures; never raises for what a service does.

    Args:
        url, ca_file: See `parse_url`.
        on_data: Called with every read, for live counters; must be cheap.

    Raises:
        ConfigError: See `parse_url`.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float,
        api_key: str | None = None,
        ca_file: str | None = None,
        on_data: OnData | None = None,
    ) -> None:
        self.address = parse_url(url, ca_file=ca_file)
        self.timeout_s = timeout_s
        self.on_data = on_data
        self.auth = f"Authorization: Bearer {api_key}\r\n" if api_key else ""

    def prepare(
        self,
        spec: RequestSpec,
        model: str,
        request_id: str,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> Call:
        """Encode a generation request ahead of its send time; with further headers."""
        path = "/v1/chat/completions" if spec.endpoint == "chat" else "/v1/completions"
        body = json.dumps(request_body(spec, model)).encode()
        named = {"x-request-id": request_id, **headers}
        return partial(self.send, self._request("POST", path, body, named))

    async def send(self, request: bytes) -> Capture:
        """Send encoded bytes on a new connection and record the response.

        Cancellation closes the connection at once.
        """
        capture = Capture(Transport.HTTP, sent_s=now_s())
        connection = _Connection(capture, request, self.on_data)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.timeout_s):
                await loop.create_connection(
                    lambda: connection, self.address.host, self.address.port, ssl=self.address.tls
                )
                await connection.finished
        except TimeoutError:
            capture.fault = f"timeout: not complete within {self.timeout_s:g} s"
        except OSError as exc:
            capture.fault = f"cannot connect: {exc}"
        finally:
            connection.close()
            capture.ended_s = now_s()
        return capture

    async def fetch(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Call a helper route, again where it says when; return (status, JSON document or None).

        Raises:
            ConnectionError: No complete HTTP response came.
        """
        data = b"" if body is None else json.dumps(body).encode()
        status, answer = await self._fetch(method, path, data)
        try:
            return status, json.loads(answer)
        except (ValueError, RecursionError):
            return status, None

    async def fetch_text(self, path: str) -> tuple[int, str]:
        """Get a page of text. Raises: ConnectionError: As `fetch`."""
        status, answer = await self._fetch("GET", path, b"")
        return status, answer.decode(errors="replace")

    async def _fetch(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        for refusals_left in reversed(range(MAX_REFUSALS + 1)):
            capture = await self.send(self._request(method, path, body, {}))
            response: Response = parse_response(capture.reads) if capture.reads else Response()
            if capture.fault or not response.complete or response.faults:
                detail = capture.fault or "; ".join(response.faults) or "no response"
                raise ConnectionError(f"{method} {path} on {self.address.host_header}: {detail}")
            after = response.headers.get("retry-after", "")
            if response.status != 429 or not after.isdecimal() or not refusals_left:
                break
            await asyncio.sleep(min(float(after), MAX_REFUSAL_WAIT_S))
        return response.status, response.body.data

    def _request(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        lines = [
            f"{method} {self.address.prefix}{path} HTTP/1.1",
            f"Host: {self.address.host_header}",
            "Connection: close",
            "Accept: application/json, text/event-stream",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        if body:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return ("\r\n".join(lines) + "\r\n" + self.auth + "\r\n").encode("latin-1") + body


def request_body(spec: RequestSpec, model: str) -> dict[str, Any]:
    """Return the OpenAI body of a request; greedy unless the spec has a temperature."""
    body: dict[str, Any] = {"model": model, "max_tokens": spec.max_tokens}
    if spec.endpoint == "chat":
        messages = (*spec.history, ("user", spec.prompt))
        body["messages"] = [{"role": role, "content": content} for role, content in messages]
    else:
        body["prompt"] = spec.prompt
    body["temperature"] = spec.temperature
    if spec.seed is not None and spec.temperature > 0:
        body["seed"] = spec.seed
    if spec.num_choices > 1:
        body["n"] = spec.num_choices
    if spec.ignore_eos:
        body["ignore_eos"] = True
    if spec.stream:
        body["stream"] = True
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    body["return_token_ids"] = True  # an extension: services without it ignore the field
    return body | spec.extra


class _Connection(asyncio.Protocol):
    """Writes the request, appends every read, and notices the end of the response."""

    def __init__(self, capture: Capture, request: bytes, on_data: OnData | None) -> None:
        self.capture = capture
        self.request = request
        self.on_data = on_data
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport | None = None
        self.head = ResponseReader()
        self.num_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes, so no isinstance here.
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        at_s = now_s()
        self.capture.reads.append((at_s, data))
        self.num_bytes += len(data)
        if self.on_data is not None:
            self.on_data(data)
        if not self.head.has_headers:
            self.head.feed(at_s, data)
        if self._may_be_over(data) and parse_response(self.capture.reads).complete:
            self._finish(None)
        if self.num_bytes > MAX_RESPONSE_BYTES:
            self._finish(f"response over {MAX_RESPONSE_BYTES} bytes")

    def _may_be_over(self, data: bytes) -> bool:
        """Cheap test that is true at the true end; the parser decides."""
        headers = self.head.response.headers
        if not self.head.has_headers:
            return False
        if (length := headers.get("content-length", "")).isdecimal():
            return self.num_bytes >= int(length)
        is_chunked = "chunked" in headers.get("transfer-encoding", "")
        return is_chunked and (data.endswith(b"\r\n\r\n") or len(data) < 4)

    def connection_lost(self, exc: Exception | None) -> None:
        # A clean close may be the end or a cut: the parser can tell, from the framing.
        self._finish(f"connection broke: {exc}" if exc is not None else None)

    def _finish(self, fault: str | None) -> None:
        if not self.finished.done():
            self.capture.fault = fault
            self.finished.set_result(None)

    def close(self) -> None:
        """Close the connection without waiting for the peer; abort it when unfinished."""
        is_finished = self.finished.done()
        if not is_finished:
            self.finished.cancel()
        if self.transport is not None:
            if is_finished:
                self.transport.close()
            else:
                self.transport.abort()
