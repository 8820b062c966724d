"""The sending end of a channel: a thread that owns the meeting point and its end of the line."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import asdict, dataclass, field

import torch

from actors.kv_transfer.transports.channel import (
    BROKEN,
    CONNECT_TIMEOUT_S,
    MAX_IDLE_S,
    PING_INTERVAL_S,
    Channel,
    ChannelOffer,
    Channels,
    first_line,
    read_verdict,
    seconds_to,
)
from quadriga.core.kv import KVPart
from quadriga.errors import KVTransportError, QuadrigaError

logger = logging.getLogger(__name__)

LATE_S = 0.01
"""A part that fails so shortly before its deadline failed by it: gloo waits whole milliseconds."""


@dataclass(slots=True)
class Job:
    """One part on its way; `done` resolves when the peer has stored it."""

    part: KVPart
    data: torch.Tensor  # uint8 [num_bytes]
    deadline_s: float
    done: Future[None] = field(default_factory=Future)

    def fail(self, error: QuadrigaError) -> None:
        # Never raised here: a traceback would keep the line, and its sockets, alive.
        with suppress(InvalidStateError):  # the loop may have given it up meanwhile
            self.done.set_exception(error)

    def succeed(self) -> None:
        with suppress(InvalidStateError):
            self.done.set_result(None)


class SendingChannel:
    """Owns the meeting point, its end of the line and the thread that sends.

    Args:
        invite: Asks the peer to join; called on the channel's thread, raises QuadrigaError.
    """

    def __init__(
        self,
        peer: str,
        generation: int,
        lines: Channels,
        *,
        invite: Callable[[ChannelOffer], None],
    ) -> None:
        self.generation = generation
        self._peer = peer
        self._lines = lines
        self._invite = invite
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self._current: Job | None = None
        self._line: Channel | None = None
        self._reason: QuadrigaError | None = None
        self._is_open = True
        self._lock = threading.Lock()
        self._thread = threading.Thread(
            target=self._run, name=f"kv-{lines.name}-to-{peer}-{generation}", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether a job submitted now will be worked on."""
        return self._is_open

    @property
    def current_transfer(self) -> str | None:
        """The transfer whose part is on the line."""
        job = self._current
        return job.part.transfer_id if job is not None else None

    def submit(self, job: Job) -> None:
        with self._lock:
            if self._is_open:
                self._jobs.put(job)
                return
        job.fail(self._reason or KVTransportError(f"the channel to {self._peer} is closed"))

    def drop(self, transfer_id: str) -> None:
        """Fail a transfer's jobs, waiting or on the line."""
        error = KVTransportError(f"transfer {transfer_id} was aborted", code="aborted")
        current = self._current
        waiting = list(self._jobs.queue)
        for job in [*waiting, current]:
            if job is not None and job.part.transfer_id == transfer_id:
                job.fail(error)

    def abandon(self) -> list[Job]:
        """Break off without waiting; returns the jobs that were not begun."""
        jobs = self._shut()
        self._jobs.put(None)
        self.abort()
        return [job for job in jobs if not job.done.done()]

    def close(self) -> None:
        """End the thread after the part on the line; what waits fails."""
        jobs = self._shut()
        self._jobs.put(None)
        for job in jobs:
            job.fail(KVTransportError(f"the channel to {self._peer} was closed"))

    def abort(self) -> None:
        """Break off what the thread waits for, where the line can."""
        line = self._line
        if line is not None:
            line.abort()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _shut(self) -> list[Job]:
        with self._lock:
            self._is_open = False
            jobs = []
            while not self._jobs.empty():
                job = self._jobs.get_nowait()
                if job is not None:
                    jobs.append(job)
            return jobs

    def _rest(self) -> bool:
        """Close, as nothing is to be sent; False when something is after all."""
        with self._lock:
            self._is_open = self._is_open and not self._jobs.empty()
            return not self._is_open

    def _run(self) -> None:
        """Connect and send until closed, idle for long, or until something goes wrong."""
        try:
            line = self._line = self._connect()
            used_s = time.monotonic()
            while True:
                try:
                    job = self._jobs.get(timeout=PING_INTERVAL_S)
                except queue.Empty:
                    if time.monotonic() - used_s < MAX_IDLE_S or not self._rest():
                        line.send_frame({"kind": "ping"}, CONNECT_TIMEOUT_S)
                        continue
                    job = None
                used_s = time.monotonic()
                if job is None:
                    line.send_frame({"kind": "bye"}, CONNECT_TIMEOUT_S)
                    return
                if job.deadline_s <= time.monotonic():
                    job.fail(KVTransportError("the part's deadline passed", code="timeout"))
                if not job.done.done():
                    self._current = job
                    self._send(line, job)
                    self._current = None
                    used_s = time.monotonic()
        except QuadrigaError as exc:
            self._failed(type(exc)(exc.message, code=exc.code))
        except BROKEN as exc:
            # It may be that this thread saw the deadline before the event loop did.
            job = self._current
            is_late = job is not None and job.deadline_s - time.monotonic() < LATE_S
            what = f"{self._lines.name} to {self._peer}: {first_line(exc)}"
            self._failed(KVTransportError(what, code="timeout" if is_late else None))
        except BaseException as exc:
            # The border of the thread: what is queued for nobody would run into its deadline.
            logger.exception("the channel to %s failed", self._peer)
            self._failed(KVTransportError(f"{self._lines.name} to {self._peer}: {exc!r}"))
        finally:
            if self._line is not None:
                self._line.close()
                self._line = None

    def _failed(self, error: QuadrigaError) -> None:
        # Closed first: whoever hears of the failure and sends again must find a new channel.
        self._reason = error
        waiting = self._shut()
        job = self._current
        self._current = None
        for failed in [*waiting, job]:
            if failed is not None:
                failed.fail(error)
        logger.info(
            "%s channel %d to %s ended: %s", self._lines.name, self.generation, self._peer, error
        )

    def _connect(self) -> Channel:
        meeting = self._lines.host(self._peer, self.generation)
        try:
            self._invite(meeting.offer)
            return meeting.meet()
        finally:
            meeting.close()

    def _send(self, line: Channel, job: Job) -> None:
        """Send one part. Raises: one of BROKEN; then the line is of no more use."""
        size = job.data.numel()
        num_eager = size if size <= line.max_eager_bytes else 0
        header = asdict(job.part) | {
            "kind": "part",
            "left_s": job.deadline_s - time.monotonic(),
            "eager_bytes": num_eager,
        }
        line.send_frame(header, _left(job))
        refusal = None if num_eager else read_verdict(line.receive_frame(_left(job)))
        if refusal is None:
            line.send(job.data, job.deadline_s)
            refusal = read_verdict(line.receive_frame(_left(job)))
        if refusal is None:
            job.succeed()
        else:
            job.fail(refusal)


def _left(job: Job) -> float:
    return seconds_to(job.deadline_s, f"part {job.part.index} of {job.part.transfer_id}")
