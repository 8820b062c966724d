"""Send a load and record what comes back: open loop at given times, or closed loop.

A load is its users' first requests; `follow` makes a user's next request from the answer to the one
before, so that a conversation and a single request are sent by the same code.
"""

from __future__ import annotations

import asyncio
import resource
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from loadgen.checker import Outcome, Verdict
from loadgen.load.workload import RequestSpec
from loadgen.wire.capture import Call, Capture, LoadClient, now_s

MAX_BACKLOG_BYTES = 256 << 20  # captures kept for judging after the run
MAX_REFUSAL_WAIT_S = 300.0
PAUSE_S = 0.1  # of a closed loop's user that got no answer: a service that refuses is not flooded

Judge = Callable[[Capture, RequestSpec, str], Verdict]
"""(capture, spec, request id) → verdict."""


@dataclass(slots=True)
class Record:
    """One request's whole story.

    Attributes:
        scheduled_s: When it should have been sent; in a closed loop, when its place was free.
        sent_s: When its first attempt was sent.
        attempts: 1, plus one per honoured refusal.
        score: Whether the answer was right; None where nothing scores it.
    """

    spec: RequestSpec
    request_id: str
    scheduled_s: float
    sent_s: float
    ended_s: float
    attempts: int
    num_bytes: int
    verdict: Verdict
    score: bool | None = None

    @property
    def lag_s(self) -> float:
        """How late the generator was."""
        return self.sent_s - self.scheduled_s


Follow = Callable[[Record], Awaitable[RequestSpec | None]]
"""A user's request that has ended and been judged → the next one, sent `think_s` after that end;
None where the user is done."""


class Observer(Protocol):
    """Told of every request while the load runs; must be quick."""

    def began(self, start_s: float) -> None:
        """The load begins; times are on the clock of `now_s`."""
        ...

    def sent(self, spec: RequestSpec, scheduled_s: float) -> None: ...

    def ended(self, record: Record) -> None:
        """Its verdict is there."""
        ...


@dataclass(slots=True)
class Live:
    """Counters that move while the load runs, for the progress bar.

    Attributes:
        note: What else is worth saying.
        broken: Connections that failed; what the checker finds is known only after the load.
    """

    num_requests: int = 0
    sent: int = 0
    ended: int = 0
    broken: int = 0
    num_events: int = 0
    note: str = ""

    def on_data(self, data: bytes) -> None:
        self.num_events += data.count(b"data: ") or 1


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a load is driven.

    Attributes:
        concurrency: Users at a time of a closed loop; None follows the arrival times.
        honour_refusals: How often a refused request is sent again after its Retry-After.
        keep_failed: Keep the captures of this many failed requests as reproductions.
        place_opens_s: When the places of a closed loop open, from its start; empty: all at 0.
    """

    concurrency: int | None = None
    honour_refusals: int = 0
    keep_failed: int = 20
    place_opens_s: tuple[float, ...] = ()

    @property
    def places_s(self) -> tuple[float, ...] | None:
        """When each place of the closed loop opens; None for an open loop."""
        if self.concurrency is None:
            return None
        return self.place_opens_s or (0.0,) * self.concurrency


@dataclass(slots=True)
class RunResult:
    """All records of a run, in the order of the specs; times are on the clock of `now_s`.

    Attributes:
        failed_captures: (request index, capture) of failed requests.
        cpu_s: CPU time this process spent while the load ran.
        was_interrupted: Requests not yet ended were given up, and `records` lacks them; or the
            check of the texts was.
        texts_not_verified: Why the check that was asked for could not be made.
    """

    start_s: float
    start_unix_s: float
    end_s: float = 0.0
    cpu_s: float = 0.0
    records: list[Record] = field(default_factory=list)
    failed_captures: list[tuple[int, Capture]] = field(default_factory=list)
    was_interrupted: bool = False
    texts_not_verified: str = ""


async def run_load(
    specs: Iterable[RequestSpec],
    client: LoadClient,
    model: str,
    judge: Judge,
    options: LoadOptions,
    live: Live,
    *,
    follow: Follow | None = None,
    observer: Observer | None = None,
    stop: asyncio.Event | None = None,
    keeps_partial: bool = False,
) -> RunResult:
    """Send every request and return when all have ended.

    Each request ends within the client's own limit, so the run does too. A cancellation gives up
    what is in flight.

    Args:
        specs: First requests of the users; a closed loop takes them as its places get free, and
            may be given more than it will ever take.
        live: Counts on; its `num_requests` is the caller's.
        follow: With it, or with `observer`, a request is judged as soon as it has ended.
        stop: Once set nothing more is sent; what is in flight goes on to its end.
        keeps_partial: A cancellation returns what has ended, for callers that look at
            `was_interrupted`; without it the cancellation goes on to the caller.
    """
    # Every request in flight is a socket: as many as the system lets us.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    run = _LoadRun(client, model, judge, options, live, follow, observer, stop)
    cpu_start_s = time.process_time()
    try:
        if (places_s := options.places_s) is None:
            await run.open_loop(specs)
        else:
            await run.closed_loop(specs, places_s)
    except asyncio.CancelledError:
        if not keeps_partial:
            raise
        run.result.was_interrupted = True
    run.result.end_s = now_s()
    run.result.cpu_s = time.process_time() - cpu_start_s
    run.judge_backlog()
    run.result.records.sort(key=lambda record: record.spec.index)
    return run.result


@dataclass(slots=True)
class _LoadRun:
    """State of one run."""

    client: LoadClient
    model: str
    judge: Judge
    options: LoadOptions
    live: Live
    follow: Follow | None
    observer: Observer | None
    stop: asyncio.Event | None
    result: RunResult = field(default_factory=lambda: RunResult(now_s(), time.time()))
    backlog: deque[tuple[Record, Capture]] = field(default_factory=deque)
    backlog_bytes: int = 0

    async def open_loop(self, specs: Iterable[RequestSpec]) -> None:
        """Let users begin at the specs' times, whatever the service does."""
        ordered = sorted(specs, key=lambda spec: spec.arrival_s)
        start_s = self._begin()
        async with asyncio.TaskGroup() as group:
            for spec in ordered:
                prepared = self._prepare(spec)  # ahead of the time, so that it costs none
                scheduled_s = start_s + spec.arrival_s
                await self._sleep_until(scheduled_s)
                if self._is_stopped():
                    return
                group.create_task(self._user(spec, prepared, scheduled_s))

    async def closed_loop(self, specs: Iterable[RequestSpec], places_s: Sequence[float]) -> None:
        """Keep every open place busy with a user until all have been served."""
        start_s = self._begin()
        queue = iter(specs)

        async def place(opens_s: float) -> None:
            if opens_s > 0:
                await self._sleep_until(start_s + opens_s)
            for spec in queue:
                if self._is_stopped():
                    return
                record = await self._user(spec, self._prepare(spec), now_s())
                if self._judges_at_once and record.verdict.outcome is not Outcome.OK:
                    await self._sleep_until(now_s() + PAUSE_S)

        async with asyncio.TaskGroup() as group:
            for opens_s in places_s:
                group.create_task(place(opens_s))

    def _begin(self) -> float:
        start_s = self.result.start_s = now_s()
        if self.observer is not None:
            self.observer.began(start_s)
        return start_s

    async def _user(
        self, spec: RequestSpec, prepared: tuple[Call, str], scheduled_s: float
    ) -> Record:
        """Send a user's first request, and each next one after the answer before it.

        Returns:
            The last one.
        """
        while True:
            record = await self._one(spec, *prepared, scheduled_s)
            following = await self.follow(record) if self.follow is not None else None
            if following is None:
                return record
            spec, prepared = following, self._prepare(following)
            # What the next request takes to make is part of the thinking.
            scheduled_s = max(record.ended_s + spec.think_s, now_s())
            await self._sleep_until(scheduled_s)
            if self._is_stopped():
                return record

    async def _sleep_until(self, time_s: float) -> None:
        """Sleep until then, or until nothing more is to be sent; yields when it is past."""
        wait_s = max(0.0, time_s - now_s())
        if self.stop is None:
            await asyncio.sleep(wait_s)
        elif not self.stop.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self.stop.wait(), wait_s)

    @property
    def _judges_at_once(self) -> bool:
        return self.follow is not None or self.observer is not None

    def _is_stopped(self) -> bool:
        return self.stop is not None and self.stop.is_set()

    def _prepare(self, spec: RequestSpec) -> tuple[Call, str]:
        request_id = f"load-{uuid.uuid4().hex}"
        return self.client.prepare(spec, self.model, request_id), request_id

    async def _one(
        self, spec: RequestSpec, call: Call, request_id: str, scheduled_s: float
    ) -> Record:
        self.live.sent += 1
        if self.observer is not None:
            self.observer.sent(spec, scheduled_s)
        capture = await call()
        attempts, sent_s = 1, capture.sent_s
        while capture.is_refusal and attempts <= self.options.honour_refusals:
            verdict = self.judge(capture, spec, request_id)
            if verdict.outcome is not Outcome.REFUSED:
                break
            await asyncio.sleep(min(verdict.retry_after_s or 1.0, MAX_REFUSAL_WAIT_S))
            capture = await call()
            attempts += 1
        times_s = scheduled_s, sent_s, capture.ended_s
        record = Record(spec, request_id, *times_s, attempts, capture.num_bytes, Verdict())
        self.result.records.append(record)
        self.live.ended += 1
        self.live.broken += capture.fault is not None
        if self._judges_at_once:
            self._judge(record, capture)
            if self.observer is not None:
                self.observer.ended(record)
            return record
        # Judged after the load, so that judging costs the measurement nothing; when too much piles
        # up, one for every one that ends.
        self.backlog.append((record, capture))
        self.backlog_bytes += record.num_bytes
        if self.backlog_bytes > MAX_BACKLOG_BYTES:
            self._judge_oldest()
        return record

    def judge_backlog(self) -> None:
        """Judge all that was kept for later."""
        while self.backlog:
            self._judge_oldest()

    def _judge_oldest(self) -> None:
        record, capture = self.backlog.popleft()
        self.backlog_bytes -= record.num_bytes
        self._judge(record, capture)

    def _judge(self, record: Record, capture: Capture) -> None:
        record.verdict = self.judge(capture, record.spec, record.request_id)
        kept = self.result.failed_captures
        if record.verdict.outcome is Outcome.FAILED and len(kept) < self.options.keep_failed:
            kept.append((record.spec.index, capture))
