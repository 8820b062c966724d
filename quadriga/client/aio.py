"""The asyncio client."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator, Callable
from typing import Any, ClassVar, Unpack

import grpc

from quadriga.client.base import CANCEL_TIMEOUT_S, BaseClient, Deadline
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
    """A connection to a Quadriga service, for asyncio; an async context manager."""

    _library: ClassVar[Any] = grpc.aio

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; running calls end in `Cancelled`, streams at the server too."""
        for progress in list(self._open):
            if self._is_left(progress):
                self._cancel_soon(progress.request)
        if self._cancelling:
            await asyncio.wait(self._cancelling, timeout=CANCEL_TIMEOUT_S)
        await self._channel.close(None)

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
        deadline = self._deadline(timeout_s)

        async def attempt() -> Any:
            deadline.tell(request)
            return await self._stub.GenerateOnce(
                request, metadata=self._for(request), timeout=deadline.left_s()
            )

        return completion(await self._retried(attempt, deadline, request))

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
        self._open.add(progress)
        try:
            while True:
                attempts += 1
                had = list(progress.received)
                try:
                    deadline.tell(request)
                    call = self._stub.Generate(
                        progress.next_request(),
                        metadata=self._for(request),
                        timeout=deadline.left_s(),
                    )
                    async for message in call:
                        for piece in progress.take(message):
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
        finally:  # unless in an error: then the request may be another's
            if self._is_left(progress) and not isinstance(sys.exception(), QuadrigaError):
                self._cancel_soon(request)

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
        deadline = self._deadline(timeout_s)

        async def attempt() -> Any:
            deadline.tell(request)
            return await self._stub.Embed(
                request, metadata=self._for(request), timeout=deadline.left_s()
            )

        return embeddings(await self._retried(attempt, deadline, request))

    async def models(self) -> list[Model]:
        """The models the service offers. Raises: QuadrigaError."""
        deadline = self._deadline(None)

        async def attempt() -> Any:
            return await self._stub.ListModels(
                pb.ListModelsRequest(), metadata=self._metadata, timeout=deadline.left_s()
            )

        reply = await self._retried(attempt, deadline)
        return [to_model(m) for m in reply.models]

    async def cancel(self, request_id: str) -> bool:
        """End a request by its id; False when the server does not know it."""
        request = pb.CancelRequest(request_id=request_id)
        metadata = [*self._metadata, *affinity(request_id)]
        try:
            reply = await self._stub.Cancel(request, metadata=metadata, timeout=CANCEL_TIMEOUT_S)
        except grpc.RpcError as exc:
            raise from_rpc(exc) from exc
        return bool(reply.found)

    def _cancel_soon(self, request: Any) -> None:
        """Have the server drop a request; in the background, as the caller is on its way out."""

        async def drop() -> None:
            # A client that was closed meanwhile: the server gives the request up by itself.
            with contextlib.suppress(QuadrigaError, grpc.aio.UsageError):
                await self.cancel(request.request_id)

        task = asyncio.get_running_loop().create_task(drop())
        self._cancelling.add(task)
        task.add_done_callback(self._cancelling.discard)

    async def _retried(
        self, attempt: Callable[[], Any], deadline: Deadline, request: Any = None
    ) -> Any:
        attempts = 0
        try:
            while True:
                attempts += 1
                try:
                    return await attempt()
                except grpc.RpcError as exc:
                    await asyncio.sleep(self._pause_s(from_rpc(exc), attempts, deadline))
        except asyncio.CancelledError as exc:
            if request is not None:
                self._cancel_soon(request)
            raise _ended(exc) from None


def _ended(exc: asyncio.CancelledError) -> BaseException:
    """What ended a call: its task was cancelled, or its client closed, which gRPC raises alike."""
    task = asyncio.current_task()
    return exc if task is not None and task.cancelling() else Cancelled("the client was closed")
