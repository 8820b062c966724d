"""The client for programs without asyncio."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator
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
from quadriga.errors import QuadrigaError, Unavailable
from quadriga.protos.quadriga.v1 import quadriga_pb2 as pb


class Client(BaseClient):
    """A connection to a Quadriga service; a context manager, safe to share between threads."""

    _library: ClassVar[Any] = grpc

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; running calls end in `Cancelled`, and at the server."""
        left, self._open = self._open, set()
        for call in [self._cancel(request_id) for request_id in list(left)]:
            with contextlib.suppress(grpc.FutureCancelledError):
                call.exception()
        if (channel := self._disconnect()) is not None:
            channel.close()

    def generate(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        request_id: str | None = None,
        timeout_s: float | None = None,
        **options: Unpack[CallOptions],
    ) -> Completion:
        """Generate and return the whole answer; see `AsyncClient.generate`.

        Raises: QuadrigaError.
        """
        request = make_request(prompt, model, request_id, options)
        return completion(self._retried("GenerateOnce", request, timeout_s))

    def stream(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        request_id: str | None = None,
        timeout_s: float | None = None,
        **options: Unpack[CallOptions],
    ) -> Generator[Piece, None, None]:
        """Generate and yield the answer as it comes; see `AsyncClient.stream`.

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
                    for message in call:
                        pieces = progress.take(message)
                        if progress.is_complete:
                            self._open.discard(request.request_id)
                        yield from pieces
                    if not progress.is_complete:
                        raise Unavailable("the stream ended before the answer did")
                    return
                except grpc.RpcError as exc:
                    error: QuadrigaError = from_rpc(exc)
                except Unavailable as exc:
                    error = exc
                if progress.is_complete:
                    return
                if progress.received != had:
                    attempts = 1
                time.sleep(self._pause_s(error, attempts, deadline))
        finally:
            self._leave(request.request_id)

    def embed(
        self,
        inputs: EmbedInputs,
        *,
        model: str | None = None,
        request_id: str | None = None,
        timeout_s: float | None = None,
        **options: Unpack[EmbedOptions],
    ) -> Embeddings:
        """Make a vector of each input; see `AsyncClient.embed`.

        Raises: QuadrigaError.
        """
        request = make_embed_request(inputs, model, request_id, options)
        return embeddings(self._retried("Embed", request, timeout_s))

    def models(self) -> list[Model]:
        """The models the service offers. Raises: QuadrigaError."""
        reply = self._retried("ListModels", pb.ListModelsRequest())
        return [to_model(m) for m in reply.models]

    def cancel(self, request_id: str) -> bool:
        """End a request by its id; False when the server does not know it."""
        try:
            reply = self._cancel(request_id).result()
        except grpc.RpcError as exc:
            raise from_rpc(exc) from exc
        return bool(reply.found)

    def _cancel(self, request_id: str) -> Any:
        """The call that has the server drop a request, begun."""
        begin = self._connect().Cancel.future
        request, metadata = pb.CancelRequest(request_id=request_id), affinity(request_id)
        with self._until_closed():
            return begin(request, metadata=[*self._metadata, *metadata], timeout=CANCEL_TIMEOUT_S)

    def _leave(self, request_id: str) -> None:
        """Have the server drop a request that its caller has left."""
        if self._is_left(request_id):
            with contextlib.suppress(QuadrigaError):
                self.cancel(request_id)

    def _retried(self, method: str, request: Any, timeout_s: float | None = None) -> Any:
        deadline, attempts = self._deadline(timeout_s), 0
        request_id = getattr(request, "request_id", "")
        try:
            while True:
                attempts += 1
                try:
                    answer = self._attempt(method, request, deadline)
                    self._open.discard(request_id)
                    return answer
                except grpc.RpcError as exc:
                    time.sleep(self._pause_s(from_rpc(exc), attempts, deadline))
        finally:
            self._leave(request_id)
