"""Send a load and record what comes back: open loop at given times, or closed loop."""

from __future__ import annotations

import asyncio
import resource
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from loadgen.capture import Call, Capture, LoadClient
from loadgen.checker import Outcome, Verdict
from loadgen.workload import RequestSpec

MAX_BACKLOG_BYTES = 256 << 20  # captures kept for judging after the run
MAX_REFUSAL_WAIT_S = 300.0
now_s = time.perf_counter

Judge = Callable[[Capture, RequestSpec, str], Verdict]
"""(capture, spec, request id) → verdict."""


@dataclass(slots=True)
class Record:
    """One request's whole story.

    Attributes:
        scheduled_s: When it should have been sent; in a closed loop, when its place was free.
        sent_s: When its last attempt was sent.
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
        """How late the generator was; meaningless after retries."""
        return self.sent_s - self.scheduled_s if self.attempts == 1 else 0.0


@dataclass(slots=True)
class Live:
    """Counters that move while the load runs, for the progress bar.

    Attributes:
        broken: Connections that failed; what the checker finds is known only after the load.
    """

    num_requests: int = 0
    sent: int = 0
    ended: int = 0
    broken: int = 0
    num_bytes: int = 0
    num_events: int = 0

    def on_data(self, data: bytes) -> None:
        self.num_bytes += len(data)
        self.num_events += data.count(b"data: ") or 1


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a load is driven.

    Attributes:
        concurrency: Requests in flight of a closed loop; None follows the arrival times.
        honour_refusals: How often a refused request is sent again after its Retry-After.
        keep_failed: Keep the captures of this many failed requests as reproductions.
    """

    concurrency: int | None = None
    honour_refusals: int = 0
    keep_failed: int = 20


@dataclass(slots=True)
class RunResult:
    """All records of a run, in the order of the specs; times are on the clock of `now_s`.

    Attributes:
        failed_captures: (request index, capture) of failed requests.
        cpu_s: CPU time this process spent while the load ran.
        was_interrupted: Requests not yet ended were given up; `records` lacks them.
    """

    start_s: float
    start_unix_s: float
    end_s: float = 0.0
    cpu_s: float = 0.0
    records: list[Record] = field(default_factory=list)
    failed_captures: list[tuple[int, Capture]] = field(default_factory=list)
    was_interrupted: bool = False


async def run_load(
    specs: Sequence[RequestSpec],
    client: LoadClient,
    model: str,
    judge: Judge,
    options: RunOptions,
    live: Live,
) -> RunResult:
    """Send every request and return when all have ended.

    Each request ends within the client's own limit, so the run does too. A cancellation gives up
    what is in flight and returns what has ended.
    """
    raise_file_limit()
    live.num_requests = len(specs)
    run = _Run(client, model, judge, options, live)
    cpu_start_s = time.process_time()
    try:
        if options.concurrency is None:
            await run.open_loop(specs)
        else:
            await run.closed_loop(specs, options.concurrency)
    except asyncio.CancelledError:
        run.result.was_interrupted = True
    run.result.end_s = now_s()
    run.result.cpu_s = time.process_time() - cpu_start_s
    run.judge_backlog()
    run.result.records.sort(key=lambda record: record.spec.index)
    return run.result


class _Run:
    """State of one run."""

    def __init__(
        self, client: LoadClient, model: str, judge: Judge, options: RunOptions, live: Live
    ) -> None:
        self.client = client
        self.model = model
        self.judge = judge
        self.options = options
        self.live = live
        self.result = RunResult(start_s=now_s(), start_unix_s=time.time())
        self.backlog: deque[tuple[Record, Capture]] = deque()
        self.backlog_bytes = 0

    async def open_loop(self, specs: Sequence[RequestSpec]) -> None:
        """Send at the specs' times, whatever the service does."""
        start_s = self.result.start_s = now_s()
        async with asyncio.TaskGroup() as group:
            for spec in sorted(specs, key=lambda spec: spec.arrival_s):
                call, request_id = self._prepare(spec)  # ahead of the time, so that it costs none
                scheduled_s = start_s + spec.arrival_s
                if (wait_s := scheduled_s - now_s()) > 0:
                    await asyncio.sleep(wait_s)
                elif len(specs) > 1:
                    await asyncio.sleep(0)  # late or at once: let the sends go out
                group.create_task(self._one(spec, call, request_id, scheduled_s))

    async def closed_loop(self, specs: Sequence[RequestSpec], concurrency: int) -> None:
        """Keep `concurrency` requests in flight until all are sent."""
        self.result.start_s = now_s()
        queue = iter(sorted(specs, key=lambda spec: spec.index))

        async def place() -> None:
            for spec in queue:
                call, request_id = self._prepare(spec)
                await self._one(spec, call, request_id, now_s())

        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(specs))):
                group.create_task(place())

    def _prepare(self, spec: RequestSpec) -> tuple[Call, str]:
        request_id = f"load-{uuid.uuid4().hex}"
        return self.client.prepare(spec, self.model, request_id), request_id

    async def _one(
        self, spec: RequestSpec, call: Call, request_id: str, scheduled_s: float
    ) -> None:
        self.live.sent += 1
        attempts = 0
        while True:
            attempts += 1
            capture = await call()
            record = Record(
                spec,
                request_id,
                scheduled_s,
                capture.sent_s,
                capture.ended_s,
                attempts,
                capture.num_bytes,
                Verdict(),
            )
            if attempts > self.options.honour_refusals:
                break
            record.verdict = self.judge(capture, spec, request_id)
            if record.verdict.outcome is not Outcome.REFUSED:
                break
            await asyncio.sleep(min(record.verdict.retry_after_s or 1.0, MAX_REFUSAL_WAIT_S))
        self.result.records.append(record)
        self.live.ended += 1
        self.live.broken += capture.fault is not None
        # Judged after the load, so that judging costs the measurement nothing; when too much piles
        # up, one for every one that ends.
        self.backlog.append((record, capture))
        self.backlog_bytes += record.num_bytes
        if self.backlog_bytes > MAX_BACKLOG_BYTES:
            self._judge_oldest()

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


def raise_file_limit() -> None:
    """Every request in flight is a socket: allow as many as the system lets us."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
