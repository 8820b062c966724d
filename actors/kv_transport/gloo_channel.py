"""One gloo channel from one replica to another: a thread and a two-member group on either side."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch

from actors.kv_transport.gloo_frames import (
    CONNECT_TIMEOUT_S,
    ChannelOffer,
    first_line,
    host_store,
    join_store,
    make_group,
    receive_frame,
    route_to,
    send_frame,
    send_verdict,
)
from actors.kv_transport.payload import from_bytes, num_bytes
from quadriga.errors import KVTransportError, QuadrigaError
from quadriga.interfaces import KVSink
from quadriga.types import KVPart

logger = logging.getLogger(__name__)

PING_INTERVAL_S = 5.0
SILENCE_TIMEOUT_S = 4 * PING_INTERVAL_S
MAX_EAGER_BYTES = 1 << 20
"""A part up to this size follows its header at once: asking first would cost more than the bytes
of a part that is refused, as its row was reserved before."""


@dataclass(slots=True)
class Job:
    """One part on its way; `done` resolves when the peer has stored it."""

    part: KVPart
    data: torch.Tensor  # uint8 [num_bytes]
    deadline_s: float
    done: Future[None] = field(default_factory=Future)

    def fail(self, error: QuadrigaError) -> None:
        # Never raised here: a traceback would keep the group, and its sockets, alive.
        with suppress(InvalidStateError):  # the loop may have given it up meanwhile
            self.done.set_exception(error)

    def succeed(self) -> None:
        with suppress(InvalidStateError):
            self.done.set_result(None)


class SendingChannel:
    """Rank 0 of a pair: owns the meeting point, the group and the thread that sends.

    Args:
        invite: Asks the peer to join; called on the channel's thread, raises QuadrigaError.
    """

    def __init__(
        self,
        me: str,
        peer: str,
        generation: int,
        host: str,
        *,
        invite: Callable[[ChannelOffer], None],
    ) -> None:
        self.generation = generation
        self._me = me
        self._peer = peer
        self._host = host
        self._invite = invite
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self._current: Job | None = None
        self._is_open = True
        self._lock = threading.Lock()
        self._thread = threading.Thread(
            target=self._run, name=f"kv-to-{peer}-{generation}", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether a job submitted now will be worked on."""
        return self._is_open

    @property
    def current_transfer(self) -> str | None:
        """The transfer whose part is on the wire."""
        job = self._current
        return job.part.transfer_id if job is not None else None

    def submit(self, job: Job) -> None:
        with self._lock:
            if self._is_open:
                self._jobs.put(job)
                return
        job.fail(KVTransportError(f"the channel to {self._peer} is closed"))

    def drop(self, transfer_id: str) -> None:
        """Fail a transfer's jobs, waiting or on the wire."""
        error = KVTransportError(f"transfer {transfer_id} was aborted", code="aborted")
        current = self._current
        waiting = list(self._jobs.queue)
        for job in [*waiting, current]:
            if job is not None and job.part.transfer_id == transfer_id:
                job.fail(error)

    def abandon(self) -> list[Job]:
        """Close without waiting; returns the jobs that were not begun."""
        jobs = self._shut()
        self._jobs.put(None)
        return [job for job in jobs if not job.done.done()]

    def close(self) -> None:
        """End the thread after the part on the wire; what waits fails."""
        for job in self.abandon():
            job.fail(KVTransportError(f"the channel to {self._peer} was closed"))

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

    def _run(self) -> None:
        reason = self._work()
        for job in self._shut():
            job.fail(reason or KVTransportError(f"the channel to {self._peer} was closed"))

    def _work(self) -> QuadrigaError | None:
        """Connect and send until closed; returns what went wrong."""
        group: Any = None
        try:
            group = self._connect()
            while True:
                try:
                    job = self._jobs.get(timeout=PING_INTERVAL_S)
                except queue.Empty:
                    send_frame(group, {"kind": "ping"}, CONNECT_TIMEOUT_S)
                    continue
                if job is None:
                    send_frame(group, {"kind": "bye"}, CONNECT_TIMEOUT_S)
                    return None
                if job.deadline_s <= time.monotonic():
                    job.fail(KVTransportError("the part's deadline passed", code="timeout"))
                if not job.done.done():
                    self._current = job
                    self._send(group, job)
                    self._current = None
        except QuadrigaError as exc:
            return self._failed(type(exc)(exc.message, code=exc.code))
        except (RuntimeError, OSError, TimeoutError) as exc:
            return self._failed(KVTransportError(f"gloo to {self._peer}: {first_line(exc)}"))

    def _failed(self, error: QuadrigaError) -> QuadrigaError:
        job = self._current
        self._current = None
        if job is not None:
            job.fail(error)
        logger.info("gloo channel %d to %s ended: %s", self.generation, self._peer, error)
        return error

    def _connect(self) -> Any:
        store, port = host_store(self._host)
        offer = ChannelOffer(self._me, self._host, port, self.generation)
        self._invite(offer)
        return make_group(store, offer, rank=0, host=self._host)

    def _send(self, group: Any, job: Job) -> None:
        """Send one part. Raises: RuntimeError from gloo; then the group is of no more use."""
        num_eager = job.data.numel() if job.data.numel() <= MAX_EAGER_BYTES else 0
        header = asdict(job.part) | {
            "kind": "part",
            "left_s": job.deadline_s - time.monotonic(),
            "eager_bytes": num_eager,
        }
        send_frame(group, header, _left(job))
        verdict: dict[str, Any] = {"ok": True}
        if not num_eager:
            verdict = receive_frame(group, 1, _left(job))
        if verdict["ok"]:
            group.send([job.data], 1, 0).wait(timedelta(seconds=_left(job)))
            verdict = receive_frame(group, 1, _left(job))
        if verdict["ok"]:
            job.succeed()
        else:
            job.fail(KVTransportError(verdict["message"], code=verdict["code"]))


class ReceivingChannel:
    """Rank 1 of a pair: a thread that joins what the sender opened and feeds the sink."""

    def __init__(self, offer: ChannelOffer, me: str, sink: KVSink) -> None:
        self.offer = offer
        self._me = me
        self._sink = sink
        self._is_closing = False
        self._thread = threading.Thread(
            target=self._run, name=f"kv-from-{offer.source}-{offer.generation}", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """End at the next frame: a pending wait cannot be broken off from this side."""
        self._is_closing = True

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        offer = self.offer
        try:
            group = make_group(join_store(offer), offer, rank=1, host=route_to(offer.host))
            while not self._is_closing and self._receive(group):
                pass
        except (RuntimeError, OSError, TimeoutError) as exc:
            reason = first_line(exc)
            logger.info("gloo channel %d from %s ended: %s", offer.generation, offer.source, reason)

    def _receive(self, group: Any) -> bool:
        """Take one frame and what follows it; False when the sender said goodbye."""
        header = receive_frame(group, 0, SILENCE_TIMEOUT_S)
        kind = header.pop("kind")
        if kind != "part":
            return bool(kind == "ping")
        left_s = header.pop("left_s")
        num_eager = header.pop("eager_bytes")
        deadline_s = time.monotonic() + left_s
        part = KVPart(**header | {"shape": tuple(header["shape"])})
        if not 0 <= num_eager <= MAX_EAGER_BYTES:
            raise RuntimeError(f"part {part.index} announces {num_eager} bytes unasked")
        try:
            self._sink.accept(self.offer.source, part)
            data = torch.empty(num_bytes(part), dtype=torch.uint8)
        except QuadrigaError as exc:
            if num_eager:  # they are on the wire already
                unwanted = torch.empty(num_eager, dtype=torch.uint8)
                group.recv([unwanted], 0, 0).wait(timedelta(seconds=left_s))
            send_verdict(group, exc, left_s)
            return True
        if not num_eager:
            send_verdict(group, None, left_s)
        elif num_eager != data.numel():
            raise RuntimeError(f"part {part.index} brings {num_eager} bytes, not {data.numel()}")
        left_s = max(0.001, deadline_s - time.monotonic())
        group.recv([data], 0, 0).wait(timedelta(seconds=left_s))
        error: QuadrigaError | None = None
        try:
            self._sink.store(self.offer.source, part, from_bytes(data, part))
        except QuadrigaError as exc:
            error = exc
        except Exception as exc:  # the sink belongs to the actor; its failure is the sender's news
            logger.exception("part %d of %s could not be stored", part.index, part.transfer_id)
            error = KVTransportError(f"part {part.index} could not be stored: {exc!r}")
        send_verdict(group, error, max(1.0, deadline_s - time.monotonic()))
        return True


def _left(job: Job) -> float:
    left_s = job.deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError(f"part {job.part.index} of {job.part.transfer_id} is late")
    return left_s
