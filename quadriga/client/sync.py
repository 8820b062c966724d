"""The client for programs without asyncio."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Generator
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
        """Close the connection; running calls end in `Cancelled`, streams at the server too."""
        left = [progress for progress in list(self._open) if self._is_left(progress)]
        for call in [self._cancel(progress.request.request_id) for progress in left]:
            with contextlib.suppress(grpc.FutureCancelledError):
                call.exception()
        self._channel.close()

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
        deadline = self._deadline(timeout_s)

        def attempt() -> Any:
            deadline.tell(request)
            return self._stub.GenerateOnce(
                request, metadata=self._for(request), timeout=deadline.left_s()
            )

        return completion(self._retried(attempt, deadline))

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
                    for message in call:
                        yield from progress.take(message)
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
        finally:  # unless in an error: then the request may be another's
            if self._is_left(progress) and not isinstance(sys.exception(), QuadrigaError):
                with contextlib.suppress(QuadrigaError, ValueError):  # ValueError: channel closed
                    self.cancel(request.request_id)

    def embed(
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

        def attempt() -> Any:
            deadline.tell(request)
            return self._stub.Embed(request, metadata=self._for(request), timeout=deadline.left_s())

        return embeddings(self._retried(attempt, deadline))

    def models(self) -> list[Model]:
        """The models the service offers. Raises: QuadrigaError."""
        deadline = self._deadline(None)

        def attempt() -> Any:
            return self._stub.ListModels(
                pb.ListModelsRequest(), metadata=self._metadata, timeout=deadline.left_s()
            )

        return [to_model(m) for m in self._retried(attempt, deadline).models]

    def cancel(self, request_id: str) -> bool:
        """End a request by its id; False when the server does not know it."""
        try:
            reply = self._cancel(request_id).result()
        except grpc.RpcError as exc:
            raise from_rpc(exc) from exc
        return bool(reply.found)

    def _cancel(self, request_id: str) -> Any:
        """The call that has the server drop a request, begun."""
        return self._stub.Cancel.future(
            pb.CancelRequest(request_id=request_id),
            metadata=[*self._metadata, *affinity(request_id)],
            timeout=CANCEL_TIMEOUT_S,
        )

    def _retried(self, attempt: Callable[[], Any], deadline: Deadline) -> Any:
        attempts = 0
        while True:
            attempts += 1
            try:
                return attempt()
            except grpc.RpcError as exc:
                time.sleep(self._pause_s(from_rpc(exc), attempts, deadline))
