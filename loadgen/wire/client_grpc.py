"""gRPC client that records: serialised messages with their arrival times, decoded later.

The raw channel is used, not the SDK: the SDK retries and resumes, which is right for users and
would hide what is to be measured here.
"""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf.json_format import ParseDict, ParseError

from loadgen.load.workload import RequestSpec
from loadgen.wire.capture import Call, Capture, OnData, Transport, now_s
from quadriga.errors import ConfigError
from quadriga.protos.quadriga.v1 import quadriga_pb2 as pb

SERVICE = "/quadriga.v1.Quadriga"
NUM_CHANNELS = 4
MAX_MESSAGE_BYTES = 64 << 20


class GrpcClient:
    """Sends requests over a few channels; never raises for what a service does.

    Args:
        address: host:port.
        on_data: Called with every message, for live counters.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float,
        api_key: str | None = None,
        tls: bool = False,
        ca_file: str | None = None,
        on_data: OnData | None = None,
    ) -> None:
        self.timeout_s = timeout_s
        self.on_data = on_data
        self.metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        options = [
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        self._channels: list[Any] = [
            grpc.aio.secure_channel(address, _credentials(ca_file), options=options)
            if tls
            else grpc.aio.insecure_channel(address, options=options)
            for _ in range(NUM_CHANNELS)
        ]
        # Raw bytes in and out: messages are encoded ahead and decoded afterwards.
        self._generate = itertools.cycle(
            [channel.unary_stream(f"{SERVICE}/Generate") for channel in self._channels]
        )
        self._generate_once = itertools.cycle(
            [channel.unary_unary(f"{SERVICE}/GenerateOnce") for channel in self._channels]
        )

    def prepare(self, spec: RequestSpec, model: str, request_id: str) -> Call:
        """Encode a generation request ahead of its send time; the service makes its own id."""
        request = encode_request(spec, model).SerializeToString()
        return partial(self._stream if spec.stream else self._once, request)

    async def connect(self) -> None:
        """Connect every channel now instead of at its first call. Raises: TimeoutError."""
        async with asyncio.timeout(self.timeout_s):
            await asyncio.gather(*(channel.channel_ready() for channel in self._channels))

    async def close(self) -> None:
        """Close the channels, cancelling what is in flight."""
        await asyncio.gather(*(channel.close(grace=None) for channel in self._channels))

    async def _stream(self, request: bytes) -> Capture:
        capture = Capture(Transport.GRPC, sent_s=now_s())
        call = next(self._generate)(request, metadata=self.metadata, wait_for_ready=False)
        return await self._record(capture, call, self._read_all(capture, call))

    async def _once(self, request: bytes) -> Capture:
        capture = Capture(Transport.GRPC, sent_s=now_s())
        call = next(self._generate_once)(request, metadata=self.metadata, wait_for_ready=False)
        return await self._record(capture, call, self._read_one(capture, call))

    async def _read_all(self, capture: Capture, call: Any) -> None:
        on_data, append = self.on_data, capture.reads.append
        async for message in call:
            append((now_s(), message))
            if on_data is not None:
                on_data(message)

    async def _read_one(self, capture: Capture, call: Any) -> None:
        message = await call
        capture.reads.append((now_s(), message))

    async def _record(self, capture: Capture, call: Any, reading: Any) -> Capture:
        """Wait for the end within the limit; note status and trailers."""
        try:
            async with asyncio.timeout(self.timeout_s):
                with suppress(grpc.aio.AioRpcError):  # the status is read below
                    await reading
                capture.status = (await call.code()).name
                capture.status_message = await call.details() or ""
                trailers = await call.trailing_metadata() or ()
                capture.trailers = {key: str(value) for key, value in trailers}
        except TimeoutError:
            capture.fault = f"timeout: not complete within {self.timeout_s:g} s"
        finally:
            call.cancel()
            capture.ended_s = now_s()
        return capture


def encode_request(spec: RequestSpec, model: str) -> pb.GenerateRequest:
    """Return the message of a request.

    Raises:
        ConfigError: `extra` has a field that the message has not.
    """
    request = pb.GenerateRequest(
        model=model, max_tokens=spec.max_tokens, temperature=spec.temperature
    )
    if spec.endpoint == "chat":
        for role, content in (*spec.history, ("user", str(spec.prompt))):
            request.chat.messages.add(role=role, content=content)
    elif isinstance(spec.prompt, str):
        request.prompt = spec.prompt
    else:
        request.prompt_token_ids.ids.extend(spec.prompt)
    if spec.ignore_eos:
        request.ignore_eos = True
    if spec.seed is not None and spec.temperature > 0:
        request.seed = spec.seed
    if spec.num_choices > 1:
        request.n = spec.num_choices
    try:
        ParseDict(spec.extra, request)
    except ParseError as exc:
        raise ConfigError(f"--extra: {exc}", param="extra") from exc
    return request


def _credentials(ca_file: str | None) -> grpc.ChannelCredentials:
    try:
        roots = Path(ca_file).read_bytes() if ca_file else None
    except OSError as exc:
        raise ConfigError(f"--ca-file: {exc}", param="ca-file") from exc
    return grpc.ssl_channel_credentials(root_certificates=roots)
