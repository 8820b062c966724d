"""A request as the ingress holds it: everything emitted so far, and who is reading it.

A `Session` is an append-only log. Readers (an SSE response, a gRPC stream, a resumed one) each have
their own cursor and take whatever lies beyond it in one piece; so a slow reader costs nothing but
the tokens themselves, which are bounded by `max_tokens`, and never holds another one up.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from quadriga.errors import Cancelled, InvariantViolation, QuadrigaError
from quadriga.text import Detokenizer, StopMatcher
from quadriga.types import Emission, FinishReason, SequenceState, TokenLogprob
from serve_app.spec import GenerateSpec


@dataclass(slots=True)
class Delta:
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


class Choice:
    """One sequence of a request: its whole state, its text, and where it lives now.

    Attributes:
        state: All that is needed to rebuild the sequence elsewhere.
        pieces: Text that became visible with each output token.
        tail: Text that became visible with the end.
        replica: Who owns it now: took its submission, or sent the newest tokens. None before.
        heirs: Replicas the owner is handing it to; they speak when it is theirs.
        orphaned_s: When the owner was lost while there were heirs, monotonic.
    """

    def __init__(
        self, index: int, state: SequenceState, detokenizer: Detokenizer, stops: StopMatcher
    ) -> None:
        self.index = index
        self.state = state
        self.replica: str | None = None
        self.heirs: set[str] = set()
        self.orphaned_s: float | None = None
        self.pieces: list[str] = []
        self.tail = ""
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] | None = None
        self.finish: FinishReason | None = None
        self.error: QuadrigaError | None = None
        self.accepted_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s = 0.0
        self._detokenizer = detokenizer
        self._stops = stops
        # Emissions of a new owner that overtook the last tokens of the one before.
        self._early: list[tuple[str, Emission]] = []

    @property
    def done(self) -> bool:
        return self.finish is not None or self.error is not None

    @property
    def holders(self) -> set[str]:
        """Replicas that may hold something of it."""
        return self.heirs if self.replica is None else self.heirs | {self.replica}

    def fail(self, error: QuadrigaError) -> None:
        """End in an error, unless it already ended."""
        if not self.done:
            self.error = error

    def accept(self, replica: str, emission: Emission) -> int:
        """Take an emission of `replica`; return how many new tokens it brought.

        Duplicates and emissions of former owners change nothing. A gap that nobody can fill any
        more ends the choice in an `InvariantViolation`. A stop string ends it with `finish` set
        and no word from the replica.
        """
        if self.done or emission.epoch < self.state.epoch:
            return 0
        if emission.first_index > len(self.state.output_ids) and emission.moved_to is None:
            self._note_gap(replica, emission)
            return 0
        num_new = self._apply(replica, emission)
        if num_new and self._early:
            early, self._early = self._early, []
            for sender, late in early:
                num_new += self.accept(sender, late)
        return num_new

    def _note_gap(self, replica: str, emission: Emission) -> None:
        """Keep what overtook an older owner's tokens; within one epoch nothing overtakes."""
        if emission.epoch > self.state.epoch:
            if (replica, emission) not in self._early:
                self._early.append((replica, emission))
            return
        self.error = InvariantViolation(
            f"tokens {len(self.state.output_ids)} to {emission.first_index - 1} of a sequence "
            "never arrived"
        )

    def _apply(self, replica: str, emission: Emission) -> int:
        if emission.moved_to is not None:
            self.heirs.add(emission.moved_to)
            return 0
        if emission.epoch > self.state.epoch:
            self.state.epoch = emission.epoch
            self.replica, self.heirs, self.orphaned_s = replica, set(), None
        if emission.prompt_logprobs is not None:
            self.prompt_logprobs = emission.prompt_logprobs
        num_new = self._append(emission)
        if self.finish is None and emission.error is not None:
            self.error = emission.error
        elif self.finish is None and emission.finish is not None:
            self._finish(emission.finish)
        return num_new

    def _append(self, emission: Emission) -> int:
        known = len(self.state.output_ids)
        skip = known - emission.first_index
        if not emission.token_ids or skip >= len(emission.token_ids):
            return 0
        count = len(emission.token_ids)
        # The token that ended the sequence (end token or stop id) counts but is not shown.
        hidden = count - 1 if emission.finish is FinishReason.STOP else count
        for i in range(skip, count):
            token_id = emission.token_ids[i]
            self.state.output_ids.append(token_id)
            if i < len(emission.exit_layers):
                self.state.exit_layers.append(emission.exit_layers[i])
            if emission.logprobs is not None:
                self.logprobs.append(emission.logprobs[i])
            piece = self._detokenizer.push(token_id) if i < hidden else ""
            shown, met = self._stops.push(piece)
            self.pieces.append(shown)
            if met:
                self.finish = FinishReason.STOP
                return i + 1 - skip
        return count - skip

    def _finish(self, reason: FinishReason) -> None:
        shown, met = self._stops.push(self._detokenizer.flush())
        self.tail = shown if met else shown + self._stops.flush()
        self.finish = FinishReason.STOP if met else reason


@dataclass(slots=True, eq=False)
class Session:
    """A request under way, or over and kept for a resumption.

    Attributes:
        key: (owner, idempotency key) under which it may be resumed, or None.
        ended_s: When the last choice ended, monotonic; None while it runs.
        abandoned_s: Since when nobody reads, monotonic; None while somebody does.
        deadline_timer: Ends the session at its deadline.
    """

    spec: GenerateSpec
    choices: list[Choice]
    created_unix_s: int
    arrived_s: float
    key: tuple[str, str] | None = None
    fingerprint: bytes = b""
    ended_s: float | None = None
    abandoned_s: float | None = None
    readers: set[Reader] = field(default_factory=set)
    error: QuadrigaError | None = None
    deadline_timer: asyncio.TimerHandle | None = None

    @property
    def done(self) -> bool:
        return self.error is not None or all(choice.done for choice in self.choices)

    @property
    def failed(self) -> bool:
        return self.error is not None or any(c.error is not None for c in self.choices)

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

    def reader(self, cursors: list[int] | None = None) -> Reader:
        """Start reading each choice at its token `cursors[i]`; 0 by default."""
        reader = Reader(self, cursors or [0] * len(self.choices))
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


class Reader:
    """One consumer's cursor over a session's choices; close it when done."""

    __slots__ = ("_cursors", "_finished", "_gone", "_started", "news", "session")

    def __init__(self, session: Session, cursors: list[int]) -> None:
        self.session = session
        self.news = asyncio.Event()
        self._cursors = list(cursors)
        self._started = [False] * len(cursors)
        self._finished = [False] * len(cursors)
        self._gone = False

    async def read(self) -> list[Delta]:
        """Return all that is new, at least one piece; empty when everything was read.

        It waits no longer than the request's deadline, at which the session ends in an error.

        Raises:
            QuadrigaError: What the request ended in, after every token before it was read.
            Cancelled: `hang_up` was called.
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

    def _take(self) -> list[Delta]:
        deltas = []
        for i, choice in enumerate(self.session.choices):
            start, stop = self._cursors[i], len(choice.pieces)
            ends = choice.finish is not None and not self._finished[i]
            if start >= stop and not ends:
                continue
            start = min(start, stop)
            text = "".join(choice.pieces[start:stop])
            if ends:
                text += choice.tail
                self._finished[i] = True
            deltas.append(
                Delta(
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
