"""A request as the ingress holds it: what was asked, everything generated so far, its readers.

A `Request` is an append-only log. Readers (an SSE response, a gRPC stream, a resumed one) each have
a cursor of their own, an `OutputStream`, and take whatever lies beyond it in one piece; so a slow
reader costs nothing but the tokens themselves, which are bounded by `max_tokens`, and never delays
another one.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from quadriga.checkpoint.exits import FULL_DEPTH, ExitParams
from quadriga.core.request import (
    FinishReason,
    SamplingParams,
    SequenceState,
    TokenLogprob,
    token_digest,
)
from quadriga.errors import Cancelled, DeadlineExceeded, NotFound, QuadrigaError, TakenOver
from quadriga.observability.tracing import StageSpan
from quadriga.policies.token_pacing import TokenPacer
from quadriga.text import StopMatcher, TextTokenizer
from quadriga.text.tool_parser import ToolCalling, ToolParser
from serve_app.request.sequence_request import SequenceRequest

Answer = TypeVar("Answer")
LOGPROBS_AT_ONCE = 256
"""Tokens with log-probabilities, of all choices, in one piece of a stream: some milliseconds."""
KEPT_TOKENS_PER_LOGPROB = 4
"""What a log-probability takes of memory, in tokens: some hundred bytes."""
NUMBERS_PER_KEPT_TOKEN = 8
"""So many numbers of an embedding take as much memory as a token."""


@dataclass(slots=True)
class OutputDelta:
    """What a reader has not seen yet of one sequence.

    Attributes:
        choice: The sequence's index in the request.
        first_index: Output index of `token_ids[0]`.
        text: Complete characters only; may be empty while a character or stop string is open.
        logprobs: Parallel to `token_ids`, where asked for.
        is_first: The reader's first piece of this sequence.
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
    """A validated request with its state, under way, or over and kept for a resumption.

    Validation makes it, `EngineClient.open` begins it. The first group of fields is what was asked
    for; nothing in it is optional or "auto" any more.

    Attributes:
        prompts: Token ids of each prompt.
        prompt_texts: The prompts as text; decoded from the ids where the client sent ids and wants
            echo, else empty for those.
        n: Sequences per prompt; number `k` of prompt `p` has index `p · n + k`.
        sampling: Shared by all sequences; their random keys differ by index.
        stop: Stop strings.
        continues: The answer's text goes on with the prompt's, as a completion does.
        echo: The answer begins with the prompt.
        is_auto: `model` is only the first choice: the cluster may take another.
        ignored_fields: Fields of the request that mean nothing here.
        traceparent: The client's, where traces are written.
        stream: The answer is sent as events.
        usage_chunk: A stream ends with a chunk that has the usage; the others have null.
        usage_in_chunks: Every chunk has the usage so far.
        eta_in_chunks: Every chunk says how long its choice is predicted to go on.
        return_token_ids: Choices have the output's token ids.
        cache_salt: Prompts share computed KV with those of the same.
        tools: How calls are read out of the answer; None where there are none.
        key: (owner, idempotency key) under which it may be resumed, or None.
        fingerprint: Digest of the request's content; another request under its key is refused.
        caller: Name of the API key at whose expense it is.
        began_with: The model of its first token, whichever model goes on.
        arrived_s: When it was opened, monotonic.
        ended_s: When the last sequence ended, monotonic; None while it runs.
        num_kept_tokens: Of prompts and answers, embeddings among them, once it ended.
        abandoned_s: Since when it has no reader, monotonic; None while it has one.
        deadline_timer: Ends the request at its deadline.
        span: Of its trace; None where it is not traced.
    """

    request_id: str
    model: str
    prompts: list[list[int]]
    prompt_texts: list[str]
    n: int
    sampling: SamplingParams
    stop: tuple[str, ...]
    echo: bool
    priority: int
    arrival_unix_s: float
    deadline_unix_s: float
    exits: ExitParams = FULL_DEPTH
    is_auto: bool = False
    ignored_fields: tuple[str, ...] = ()
    traceparent: str | None = None
    stream: bool = False
    usage_chunk: bool = False
    usage_in_chunks: bool = False
    eta_in_chunks: bool = False
    return_token_ids: bool = False
    tools: ToolCalling | None = None
    cache_salt: str = ""
    continues: bool = False

    sequences: list[SequenceRequest] = field(default_factory=list)
    key: tuple[str, str] | None = None
    fingerprint: bytes = b""
    caller: str = ""
    began_with: str = ""
    arrived_s: float = 0.0
    ended_s: float | None = None
    num_kept_tokens: int = 0
    abandoned_s: float | None = None
    readers: dict[OutputStream, None] = field(default_factory=dict)
    error: QuadrigaError | None = None
    deadline_timer: asyncio.TimerHandle | None = None
    span: StageSpan | None = None

    def make_sequences(
        self, tokenizer: TextTokenizer, ingress_id: str, base: str, adapter: str = ""
    ) -> None:
        """Make the sequences of all prompts, with new names.

        Args:
            base: The model that runs them; `model` itself, unless that is an adapter of it.
        """
        marks = None if self.tools is None else self.tools.marks
        for prompt_ids in self.prompts:
            for k in range(self.n):
                state = SequenceState(
                    sequence_id=f"{self.request_id}-{uuid.uuid4().hex[:12]}",
                    request_id=self.request_id,
                    model=base,
                    adapter=adapter,
                    prompt_ids=prompt_ids,
                    sampling=self.sampling,
                    exits=self.exits,
                    ingress_id=ingress_id,
                    arrival_unix_s=self.arrival_unix_s,
                    deadline_unix_s=self.deadline_unix_s,
                    choice=k,
                    priority=self.priority,
                    cache_salt=self.cache_salt,
                )
                stops = StopMatcher(self.stop, self.sampling.min_tokens) if self.stop else None
                text = tokenizer.detokenizer(marks, prompt_ids if self.continues else ())
                sequence = SequenceRequest(len(self.sequences), state, text, stops)
                sequence.is_auto = self.is_auto
                self.sequences.append(sequence)

    @property
    def created_unix_s(self) -> int:
        """The arrival, as answers show it."""
        return int(self.arrival_unix_s)

    @property
    def num_sequences(self) -> int:
        return len(self.prompts) * self.n

    @property
    def done(self) -> bool:
        return self.error is not None or all(sequence.done for sequence in self.sequences)

    @property
    def first_error(self) -> QuadrigaError | None:
        """The request's error, else that of the first sequence that has one."""
        if self.error is not None:
            return self.error
        return next((s.error for s in self.sequences if s.error is not None), None)

    @property
    def is_elsewhere(self) -> bool:
        """Whether another ingress has taken over some of it."""
        return any(isinstance(sequence.error, TakenOver) for sequence in self.sequences)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once however many sequences it has."""
        return sum(map(len, self.prompts))

    @property
    def expected_layers(self) -> float | None:
        """Layers a token that its choices were expected to run, on average; None if unknown."""
        known = [layers for s in self.sequences if (layers := s.state.expected_layers)]
        return sum(known) / len(known) if known else None

    def course(self) -> dict[str, Any]:
        """How the answer came about, as usage says it; without what there is nothing of."""
        sequences = self.sequences
        pools = sorted({s.state.depth_pool for s in sequences if s.state.depth_pool})
        predicted = [
            {
                "choice": s.index,
                "tokens": round(said.mean, 1),
                "lower": round(said.lower, 1),
                "upper": round(said.upper, 1),
            }
            for s in sequences
            if (said := s.state.expected) is not None
        ]
        spans = [
            {"model": model, "depth": depth, "tokens": tokens}
            for s in sequences
            for model, depth, tokens in s.spans
        ]
        layers = self.expected_layers
        some = {
            "depth_pools": pools,
            "expected_layers": layers and round(layers, 2),
            "predicted": predicted,
            "spans": spans,
        }
        return {
            "exits": Counter(layer for s in sequences for layer in s.state.exit_layers),
            "rebuilds": sum(s.num_rebuilds for s in sequences),
            "migrations": sum(s.state.num_moves for s in sequences),
            "pauses": sum(s.state.num_pauses for s in sequences),
            "breaches": sum(s.state.num_breaches for s in sequences),
            "lowered": sum(s.state.num_lowered for s in sequences),
        } | {name: value for name, value in some.items() if value}

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that no sequence of the request has computed."""
        sequences, n = self.sequences, self.n
        return sum(
            min(s.num_cached for s in sequences[i : i + n]) for i in range(0, len(sequences), n)
        )

    @property
    def num_output_tokens(self) -> int:
        return sum(len(sequence.state.output_ids) for sequence in self.sequences)

    @property
    def shown_model(self) -> str:
        """What answers: an adapter by its own name, else the model that began the answer."""
        begun = (s.state for s in self.sequences if s.state.output_ids or s.done)
        if not self.began_with and (state := next(begun, None)) is not None:
            self.began_with = self.model if state.adapter else state.model
        return self.began_with or self.model

    def prompt_text(self, index: int) -> str:
        """The prompt of the sequence with this index, as text."""
        return self.prompt_texts[index // self.n]

    def end(self, now_s: float) -> None:
        """Nothing will be added any more."""
        self.ended_s = now_s
        self.num_kept_tokens = self.num_prompt_tokens + self.num_output_tokens
        self.num_kept_tokens += KEPT_TOKENS_PER_LOGPROB * self.num_logprobs
        numbers = (len(s.embedding or ()) for s in self.sequences)
        self.num_kept_tokens += sum(count // NUMBERS_PER_KEPT_TOKEN for count in numbers)

    @property
    def num_logprobs(self) -> int:
        """Log-probabilities that the answer has, alternatives counted."""
        states = [sequence.state for sequence in self.sequences]
        rows = sum(len(s.logprobs) + len(s.prompt_logprobs or ()) for s in states)
        return rows * (1 + (self.sampling.num_logprobs or 0))

    def wake(self) -> None:
        """Have every reader look for new output."""
        for reader in self.readers:
            reader.news.set()

    def fail(self, error: QuadrigaError) -> None:
        """End every sequence that still runs in `error`."""
        if self.error is None and not self.done:
            self.error = error
        for sequence in self.sequences:
            sequence.fail(error)
        self.wake()

    def reader(
        self, cursors: Sequence[int] = (), digests: Sequence[int] | None = None
    ) -> OutputStream:
        """Start reading each sequence at its token `cursors[i]`; 0 by default.

        Args:
            digests: `token_digest` of the tokens before each cursor, where they may not be there
                yet, or others.
        """
        reader = OutputStream(self, cursors or [0] * len(self.sequences), digests)
        self.readers[reader] = None
        self.abandoned_s = None
        return reader

    def summary(self) -> dict[str, str | int | float | None]:
        """Sizes, times and result of a request that has ended, for log and trace; never its text.

        `result` are the finish reasons, or the code of the error; `replicas` those that sent the
        last tokens; `ttft_s` is that of the first sequence that had a token, None without one.
        """
        sequences, error = self.sequences, self.first_error
        firsts = [s.first_token_s for s in sequences if s.first_token_s is not None]
        finishes = {s.finish.value for s in sequences if s.finish is not None}
        ended_s = self.arrived_s if self.ended_s is None else self.ended_s
        return {
            "request_id": self.request_id,
            "api_key": self.caller,
            "model": self.shown_model,
            "result": error.code if error is not None else "+".join(sorted(finishes)),
            "replicas": " ".join(sorted({s.replica for s in sequences if s.replica is not None})),
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_output_tokens": self.num_output_tokens,
            "num_rebuilds": sum(s.num_rebuilds for s in sequences),
            "took_s": ended_s - self.arrived_s,
            "ttft_s": min(firsts) - self.arrived_s if firsts else None,
        }

    def running(self, sequence: SequenceRequest, now_s: float) -> dict[str, Any]:
        """What operators see of one of its sequences that runs, as plain values; never its text."""
        return {
            "request_id": self.request_id,
            "sequence_id": sequence.state.sequence_id,
            "choice": sequence.index,
            "model": self.shown_model,
            "replica": sequence.replica,
            "status": sequence.status,
            "running_s": now_s - self.arrived_s,
            "tokens": len(sequence.state.output_ids),
            "eta": sequence.eta and sequence.eta.plain(),
            "rebuilds": sequence.num_rebuilds,
            **sequence.state.counts,
        }


class OutputStream:
    """One reader's cursor over the sequences of a request; close it when done.

    Where a request asks for short gaps (`sla_tbt_ms`), tokens that came together are read one by
    one; the last ones, and all before an error, at once.

    Attributes:
        text_offsets: Characters of each sequence before what is read next, which completions name
            in their log-probabilities.
        head: What all its chunks begin with, once there was one.
        tool_parsers: By sequence, where calls are read out of the answer.
        finished: Whether the end of each sequence was read.
    """

    __slots__ = (
        "_cursors",
        "_digests",
        "_gone",
        "_pacers",
        "_started",
        "_to_begin",
        "finished",
        "head",
        "news",
        "request",
        "text_offsets",
        "tool_parsers",
    )

    def __init__(
        self, request: Request, cursors: Sequence[int], digests: Sequence[int] | None = None
    ) -> None:
        self.request = request
        self.news = asyncio.Event()
        self.head = ""
        self.text_offsets = [0] * len(cursors)
        self.tool_parsers: dict[int, ToolParser] = {}
        self._cursors = list(cursors)
        self._digests: list[int | None] = [*digests] if digests else [None] * len(cursors)
        # OpenAI's client counts the choices of a chat as they begin: in order, and with nothing.
        is_counted = request.stream and not request.continues and len(cursors) > 1
        self._to_begin = [*enumerate(cursors)] if is_counted else []
        self._started = [is_counted] * len(cursors)
        self.finished = [False] * len(cursors)
        self._gone = False
        gap_s = request.exits.sla_tbt_s
        self._pacers = [TokenPacer(gap_s) for _ in cursors] if gap_s else []

    @property
    def num_read(self) -> int:
        """Output tokens before the cursors, of all sequences."""
        return sum(self._cursors)

    async def read(self) -> list[OutputDelta]:
        """Return all that is new, at least one piece; empty when everything was read.

        It waits no longer than the request's deadline, at which the request ends in an error.

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
            error = self.request.first_error
            if error is not None:
                raise error
            if all(self.finished):
                return []
            self.news.clear()
            await (self._wait() if self._pacers else self.news.wait())

    async def _wait(self) -> None:
        """Wait until there may be something to read, of tokens held back too."""
        pacers = zip(self._pacers, self.request.sequences, strict=True)
        due_s = min((p.due_s for p, s in pacers if p.num_held and not s.done), default=None)
        if due_s is None:
            await self.news.wait()
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(self.news.wait(), max(0.0, due_s - time.monotonic()))

    def _paced(self, index: int, start: int, stop: int) -> int:
        """The token before which a sequence may be read now, of those from `start` to `stop`."""
        pacer, now_s = self._pacers[index], time.monotonic()
        new = stop - start - pacer.num_held
        if new > 0:
            pacer.came(new, now_s)
        return start + pacer.take(now_s)

    def hang_up(self) -> None:
        """The client is gone: a `read` that waits raises `Cancelled`."""
        self._gone = True
        self.news.set()

    def close(self) -> None:
        self.request.readers.pop(self, None)

    def _verify(self, index: int, sequence: SequenceRequest) -> None:
        """Compare what the reader had of a sequence, once; raises: NotFound."""
        wanted, self._digests[index] = self._digests[index], None
        before = sequence.state.output_ids[: self._cursors[index]]
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
        for i, sequence in enumerate(self.request.sequences):
            start, stop = self._cursors[i], len(sequence.pieces)
            ends = sequence.finish is not None and not self.finished[i]
            if sequence.state.logprobs:
                stop = min(stop, start + max(1, LOGPROBS_AT_ONCE // len(self.finished)))
                ends = ends and stop == len(sequence.pieces)
            if self._pacers and not sequence.done and self.request.error is None:
                stop = self._paced(i, start, stop)
            if start >= stop and not ends:
                continue
            self._verify(i, sequence)
            start = min(start, stop)
            logprobs = sequence.state.logprobs
            text = "".join(sequence.pieces[start:stop])
            if ends:
                text += sequence.tail
                self.finished[i] = True
            deltas.append(
                OutputDelta(
                    choice=i,
                    first_index=start,
                    token_ids=sequence.state.output_ids[start:stop],
                    text=text,
                    logprobs=logprobs[start:stop] if logprobs else None,
                    finish=sequence.finish if ends else None,
                    is_first=not self._started[i],
                )
            )
            self._started[i] = True
            self._cursors[i] = stop
        if deltas and self._to_begin:
            begun = [OutputDelta(i, at, [], "", None, None, True) for i, at in self._to_begin]
            deltas, self._to_begin = begun + deltas, []
        return deltas


async def beside(request: Request, render: Callable[[], Answer]) -> Answer:
    """Write an answer, or a piece of it, by another thread where that may take long."""
    sampling = request.sampling
    is_long = sampling.num_logprobs is not None or sampling.pooling is not None
    return await asyncio.to_thread(render) if is_long else render()


@asynccontextmanager
async def in_time(allowed_s: float) -> AsyncIterator[None]:
    """What is done within takes no longer. Raises: DeadlineExceeded."""
    try:
        async with asyncio.timeout(allowed_s):
            yield
    except TimeoutError:
        raise deadline_exceeded(allowed_s) from None


def deadline_exceeded(allowed_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"the request was not done within its deadline of {allowed_s:g} s", param="deadline_ms"
    )


def resume_claims(request: Request, key: tuple[str, str] | None, fingerprint: bytes) -> list[str]:
    """Return a claim for each sequence of a request: by it another ingress finds it at replicas.

    It is empty where the request has no key. Owner and content are part of it, so that a key alone
    gives no access to another caller's answer.
    """
    count = request.num_sequences
    if key is None:
        return [""] * count
    owner, given = key
    digest = hashlib.sha256()
    for part in (owner.encode(), given.encode(), fingerprint):
        digest.update(len(part).to_bytes(4, "little") + part)
    name = digest.hexdigest()[:32]
    return [f"{name}:{index}" for index in range(count)]


def caller_fingerprint(request: Request, owner: str) -> str:
    """Return a name that is the same when a request's caller sends it again.

    Ids and deadlines are no part of it, as clients may change them when they retry.
    """
    digest = hashlib.blake2b(digest_size=12)
    sampling = request.sampling
    asked = (
        owner,
        request.model,
        request.n,
        request.priority,
        sampling.max_tokens,
        sampling.temperature,
    )
    digest.update(repr(asked).encode())
    for prompt_ids in request.prompts:
        digest.update(len(prompt_ids).to_bytes(4, "little"))
        digest.update(array("q", prompt_ids).tobytes())
    return digest.hexdigest()
