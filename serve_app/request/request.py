"""A request as the ingress holds it: everything emitted so far, and who is reading it.

A `Request` is an append-only log. Readers (an SSE response, a gRPC stream, a resumed one) each have
their own cursor and take whatever lies beyond it in one piece; so a slow reader costs nothing but
the tokens themselves, which are bounded by `max_tokens`, and never holds another one up.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from quadriga.core.request import FinishReason, TokenLogprob, token_digest
from quadriga.errors import Cancelled, NotFound, QuadrigaError, TakenOver
from quadriga.observability.tracing import Span
from serve_app.request.sequence_request import SequenceRequest
from serve_app.request.spec import GenerateSpec


@dataclass(slots=True)
class OutputDelta:
    """What a reader has not seen yet of one choice.

    Attributes:
        first_index: Output index of `token_ids[0]`.
        text: Complete characters only; may be empty while a character or stop string is open.
        logprobs: Parallel to `token_ids`, where asked for.
        is_first: The reader's first piece of this choice.
    """

    choice: int
    first_index: int
    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprob] | None
    finish: FinishReason | None
    is_first: bool


@dataclass(slots=True, eq=False)
class Request:
    """A request under way, or over and kept for a resumption.

    Attributes:
        key: (owner, idempotency key) under which it may be resumed, or None.
        ended_s: When the last choice ended, monotonic; None while it runs.
        num_kept_tokens: Of prompts and answers, once it ended.
        abandoned_s: Since when nobody reads, monotonic; None while somebody does.
        deadline_timer: Ends the session at its deadline.
        span: Of its trace; None where it is not traced.
    """

    spec: GenerateSpec
    choices: list[SequenceRequest]
    created_unix_s: int
    arrived_s: float
    key: tuple[str, str] | None = None
    fingerprint: bytes = b""
    ended_s: float | None = None
    num_kept_tokens: int = 0
    abandoned_s: float | None = None
    readers: set[OutputStream] = field(default_factory=set)
    error: QuadrigaError | None = None
    deadline_timer: asyncio.TimerHandle | None = None
    span: Span | None = None

    @property
    def done(self) -> bool:
        return self.error is not None or all(choice.done for choice in self.choices)

    @property
    def failed(self) -> bool:
        return self.error is not None or any(c.error is not None for c in self.choices)

    @property
    def is_elsewhere(self) -> bool:
        """Whether another ingress has taken over some of it."""
        return any(isinstance(choice.error, TakenOver) for choice in self.choices)

    def end(self, now_s: float) -> None:
        """Nothing will be added any more."""
        self.ended_s = now_s
        self.num_kept_tokens = self.num_prompt_tokens + self.num_output_tokens

    def wake(self) -> None:
        for reader in self.readers:
            reader.news.set()

    def fail(self, error: QuadrigaError) -> None:
        """End every choice that still runs in `error`."""
        if self.error is None and not self.done:
            self.error = error
        for choice in self.choices:
            choice.fail(error)
        self.wake()

    def reader(
        self, cursors: list[int] | None = None, digests: list[int] | None = None
    ) -> OutputStream:
        """Start reading each choice at its token `cursors[i]`; 0 by default.

        Args:
            digests: `token_digest` of the tokens before each cursor, where they may not be there
                yet, or others.
        """
        reader = OutputStream(self, cursors or [0] * len(self.choices), digests)
        self.readers.add(reader)
        self.abandoned_s = None
        return reader

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once however many choices it has."""
        return sum(len(prompt.token_ids) for prompt in self.spec.prompts)

    @property
    def num_output_tokens(self) -> int:
        return sum(len(choice.state.output_ids) for choice in self.choices)


class OutputStream:
    """One consumer's cursor over a session's choices; close it when done."""

    __slots__ = ("_cursors", "_digests", "_finished", "_gone", "_started", "news", "session")

    def __init__(
        self, session: Request, cursors: list[int], digests: list[int] | None = None
    ) -> None:
        self.session = session
        self.news = asyncio.Event()
        self._cursors = list(cursors)
        self._digests: list[int | None] = [*digests] if digests else [None] * len(cursors)
        self._started = [False] * len(cursors)
        self._finished = [False] * len(cursors)
        self._gone = False

    async def read(self) -> list[OutputDelta]:
        """Return all that is new, at least one piece; empty when everything was read.

        It waits no longer than the request's deadline, at which the session ends in an error.

        Raises:
            QuadrigaError: What the request ended in, after every token before it was read.
            Cancelled: `hang_up` was called.
            NotFound: The tokens before a cursor are others than the reader had.
        """
        while True:
            if self._gone:
                raise Cancelled("the client went away")
            deltas = self._take()
            if deltas:
                return deltas
            error = self._error()
            if error is not None:
                raise error
            if all(self._finished):
                return []
            self.news.clear()
            await self.news.wait()

    def hang_up(self) -> None:
        """The client is gone: whoever waits in `read` gets `Cancelled`."""
        self._gone = True
        self.news.set()

    def close(self) -> None:
        self.session.readers.discard(self)

    def _error(self) -> QuadrigaError | None:
        if self.session.error is not None:
            return self.session.error
        return next((c.error for c in self.session.choices if c.error is not None), None)

    def _verify(self, index: int, choice: SequenceRequest) -> None:
        """Compare what the reader had of a choice, once; raises: NotFound."""
        wanted, self._digests[index] = self._digests[index], None
        before = choice.state.output_ids[: self._cursors[index]]
        if wanted is None:
            return
        if len(before) < self._cursors[index] or token_digest(before) != wanted:
            raise NotFound(
                "whoever held the request is gone, and begun anew it has another answer (only "
                "deterministic deployments say the same twice); begin it anew",
                param="resume_digest",
                code="answer_changed",
            )

    def _take(self) -> list[OutputDelta]:
        deltas = []
        for i, choice in enumerate(self.session.choices):
            start, stop = self._cursors[i], len(choice.pieces)
            ends = choice.finish is not None and not self._finished[i]
            if start >= stop and not ends:
                continue
            self._verify(i, choice)
            start = min(start, stop)
            text = "".join(choice.pieces[start:stop])
            if ends:
                text += choice.tail
                self._finished[i] = True
            deltas.append(
                OutputDelta(
                    choice=i,
                    first_index=start,
                    token_ids=choice.state.output_ids[start:stop],
                    text=text,
                    logprobs=choice.logprobs[start:stop] if choice.logprobs else None,
                    finish=choice.finish if ends else None,
                    is_first=not self._started[i],
                )
            )
            self._started[i] = True
            self._cursors[i] = stop
        return deltas
