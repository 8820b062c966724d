"""The asyncio client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any, ClassVar, Unpack

import grpc

from quadriga.client.base import CANCEL_TIMEOUT_S, BaseClient
from quadriga.client.errors import from_rpc
from quadriga.client.results import Completion, Embeddings, Model, Piece
from quadriga.client.wire import (
    CallOptions,
    EmbedInputs,
    EmbedOptions,
    Prompt,
    StreamProgress,
    affinity,
    completion,
    embeddings,
    make_embed_request,
    make_request,
    to_model,
)
from quadriga.errors import Cancelled, QuadrigaError, Unavailable
from quadriga.protos.quadriga.v1 import quadriga_pb2 as pb


class AsyncClient(BaseClient):
    """A connection to a Quadriga service, for asyncio; an async context manager.

    It may be made anywhere, and belongs to the event loop of its first call.
    """

    _library: ClassVar[Any] = grpc.aio

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; running calls end in `Cancelled`, and at the server."""
        left, self._open = self._open, set()
        for request_id in left:
            self._cancel_soon(request_id)
        if self._cancelling:
            await asyncio.wait(self._cancelling, timeout=CANCEL_TIMEOUT_S)
        if (channel := self._disconnect()) is not None:
            await channel.close(None)

    async def generate(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        request_id: str | None = None,
        timeout_s: float | None = None,
        **options: Unpack[CallOptions],
    ) -> Completion:
        """Generate and return the whole answer.

        Args:
            prompt: Text, token ids, or the `Message`s of a conversation.
            model: Model id; None: `quadriga-auto`, the first model or the one that HELIOS chooses.

        Raises: QuadrigaError; TypeError, ValueError: An argument is of the wrong kind.
        """
        request = make_request(prompt, model, request_id, options)
        return completion(await self._retried("GenerateOnce", request, timeout_s))

    async def stream(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        request_id: str | None = None,
        timeout_s: float | None = None,
        **options: Unpack[CallOptions],
    ) -> AsyncGenerator[Piece, None]:
        """Generate and yield the answer as it comes; takes the arguments of `generate`.

        Leaving the loop early ends the request on the server.

        Raises: QuadrigaError, after every piece that arrived was yielded.
        """
        request = make_request(prompt, model, request_id, options)
        progress = StreamProgress(request)
        deadline = self._deadline(timeout_s)
        attempts = 0
        try:
            while True:
                attempts += 1
                had = list(progress.received)
                try:
                    call = self._attempt("Generate", progress.next_request(), deadline)
                    async for message in call:
                        pieces = progress.take(message)
                        if progress.is_complete:
                            self._open.discard(request.request_id)
                        for piece in pieces:
                            yield piece
                    if not progress.is_complete:
                        raise Unavailable("the stream ended before the answer did")
                    return
                except grpc.RpcError as exc:
                    error: QuadrigaError = from_rpc(exc)
                except asyncio.CancelledError as exc:
                    raise _ended(exc) from None
                except Unavailable as exc:
                    error = exc
                if progress.is_complete:
                    return
                if progress.received != had:
                    attempts = 1
                await asyncio.sleep(self._pause_s(error, attempts, deadline))
        finally:
            self._leave(request.request_id)

    async def embed(
        self,
        inputs: EmbedInputs,
        *,
        model: str | None = None,
        request_id: str | None = None,
        timeout_s: float | None = None,
        **options: Unpack[EmbedOptions],
    ) -> Embeddings:
        """Make a vector of each input, of the whole model's last hidden states.

        Args:
            inputs: A text or several, or token ids or several lists of them.
            model: Model id; the first model where None.

        Raises: QuadrigaError.
        """
        request = make_embed_request(inputs, model, request_id, options)
        return embeddings(await self._retried("Embed", request, timeout_s))

    async def models(self) -> list[Model]:
        """The models the service offers. Raises: QuadrigaError."""
        reply = await self._retried("ListModels", pb.ListModelsRequest())
        return [to_model(m) for m in reply.models]

    async def cancel(self, request_id: str) -> bool:
        """End a request by its id; False when the server does not know it."""
        request = pb.CancelRequest(request_id=request_id)
        metadata = [*self._metadata, *affinity(request_id)]
        try:
            stub = self._connect()
            reply = await stub.Cancel(request, metadata=metadata, timeout=CANCEL_TIMEOUT_S)
        except grpc.RpcError as exc:
            raise from_rpc(exc) from exc
        except asyncio.CancelledError as exc:
            raise _ended(exc) from None
        return bool(reply.found)

    def _leave(self, request_id: str) -> None:
        """Have the server drop a request that its caller has left."""
        if self._is_left(request_id):
            self._cancel_soon(request_id)

    def _cancel_soon(self, request_id: str) -> None:
        """Have the server drop a request; in the background, as the caller is on its way out."""

        async def drop() -> None:
            # Of a client that was closed meanwhile the server gives the request up by itself.
            with contextlib.suppress(QuadrigaError):
                await self.cancel(request_id)

        task = asyncio.get_running_loop().create_task(drop())
        self._cancelling.add(task)
        task.add_done_callback(self._cancelling.discard)

    async def _retried(self, method: str, request: Any, timeout_s: float | None = None) -> Any:
        deadline, attempts = self._deadline(timeout_s), 0
        request_id = getattr(request, "request_id", "")
        try:
            while True:
                attempts += 1
                try:
                    answer = await self._attempt(method, request, deadline)
                    self._open.discard(request_id)
                    return answer
                except grpc.RpcError as exc:
                    await asyncio.sleep(self._pause_s(from_rpc(exc), attempts, deadline))
        except asyncio.CancelledError as exc:
            raise _ended(exc) from None
        finally:
            self._leave(request_id)


def _ended(exc: asyncio.CancelledError) -> BaseException:
    """What ended a call: its task was cancelled, or its client closed, which gRPC raises alike."""
    task = asyncio.current_task()
    return exc if task is not None and task.cancelling() else Cancelled("the client was closed")
