"""Both ends of a channel: a thread that sends parts to a peer, and one that receives them."""

from __future__ import annotations

import logging
import queue
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from quadriga.core.kv import KVPart
from quadriga.errors import KVTransportError, QuadrigaError
from quadriga.interfaces import KVSink
from quadriga.kv_transport.channel import (
    BROKEN,
    CONNECT_TIMEOUT_S,
    MAX_IDLE_S,
    PING_INTERVAL_S,
    SILENCE_TIMEOUT_S,
    Channel,
    ChannelOffer,
    Channels,
    first_line,
    read_header,
    read_verdict,
    seconds_to,
)
from quadriga.kv_transport.payload import from_bytes, num_bytes, where_digested

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
        # Never raised here: a traceback would keep the channel, and its sockets, alive.
        with suppress(InvalidStateError):  # the loop may have given it up meanwhile
            self.done.set_exception(error)

    def succeed(self) -> None:
        with suppress(InvalidStateError):
            self.done.set_result(None)


class SendingChannel:
    """The sending end: opens the channel, and sends on a thread of its own.

    Args:
        invite: Asks the peer to join; called on the channel's thread, raises QuadrigaError.
    """

    def __init__(
        self,
        peer: str,
        generation: int,
        channels: Channels,
        *,
        invite: Callable[[ChannelOffer], None],
    ) -> None:
        self.generation = generation
        self._peer = peer
        self._channels = channels
        self._invite = invite
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self._current: Job | None = None
        self._channel: Channel | None = None
        self._reason: QuadrigaError | None = None
        self._is_open = True
        self._lock = threading.Lock()
        self._thread = threading.Thread(
            target=self._run, name=f"kv-{channels.name}-to-{peer}-{generation}", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether a job submitted now will be worked on."""
        return self._is_open

    @property
    def current_transfer(self) -> str | None:
        """The transfer whose part is on the channel."""
        job = self._current
        return job.part.transfer_id if job is not None else None

    def submit(self, job: Job) -> None:
        with self._lock:
            if self._is_open:
                self._jobs.put(job)
                return
        job.fail(self._reason or KVTransportError(f"the channel to {self._peer} is closed"))

    def drop(self, transfer_id: str) -> None:
        """Fail a transfer's jobs, waiting or on the channel."""
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
        """Break off what the thread waits for, where the channel can."""
        channel = self._channel
        if channel is not None:
            channel.abort()

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
            channel = self._channel = self._channels.open(self._peer, self.generation, self._invite)
            used_s = time.monotonic()
            while True:
                try:
                    job = self._jobs.get(timeout=PING_INTERVAL_S)
                except queue.Empty:
                    if time.monotonic() - used_s < MAX_IDLE_S or not self._rest():
                        channel.send_frame({"kind": "ping"}, CONNECT_TIMEOUT_S)
                        continue
                    job = None
                used_s = time.monotonic()
                if job is None:
                    channel.send_frame({"kind": "bye"}, CONNECT_TIMEOUT_S)
                    return
                if job.deadline_s <= time.monotonic():
                    job.fail(KVTransportError("the part's deadline passed", code="timeout"))
                if not job.done.done():
                    self._current = job
                    self._send(channel, job)
                    self._current = None
                    used_s = time.monotonic()
        except QuadrigaError as exc:
            self._failed(type(exc)(exc.message, code=exc.code))
        except BROKEN as exc:
            # It may be that this thread saw the deadline before the event loop did.
            job = self._current
            is_late = job is not None and job.deadline_s - time.monotonic() < LATE_S
            what = f"{self._channels.name} to {self._peer}: {first_line(exc)}"
            self._failed(KVTransportError(what, code="timeout" if is_late else None))
        except BaseException as exc:
            # The border of the thread: parts that stay queued would run into their deadlines.
            logger.exception("the channel to %s failed", self._peer)
            self._failed(KVTransportError(f"{self._channels.name} to {self._peer}: {exc!r}"))
        finally:
            if self._channel is not None:
                self._channel.close()
                self._channel = None

    def _failed(self, error: QuadrigaError) -> None:
        # Closed first: a caller that sends again after the failure must find a new channel.
        self._reason = error
        waiting = self._shut()
        job = self._current
        self._current = None
        for failed in [*waiting, job]:
            if failed is not None:
                failed.fail(error)
        logger.info(
            "%s channel %d to %s ended: %s", self._channels.name, self.generation, self._peer, error
        )

    def _send(self, channel: Channel, job: Job) -> None:
        """Send one part. Raises: one of BROKEN; then the channel is of no more use."""
        size = job.data.numel()
        num_eager = size if size <= channel.max_eager_bytes else 0
        header = asdict(job.part) | {
            "kind": "part",
            "left_s": job.deadline_s - time.monotonic(),
            "eager_bytes": num_eager,
        }
        channel.send_frame(header, _left(job))
        refusal = None if num_eager else read_verdict(channel.receive_frame(_left(job)))
        if refusal is None:
            channel.send(job.data, job.deadline_s)
            refusal = read_verdict(channel.receive_frame(_left(job)))
        if refusal is None:
            job.succeed()
        else:
            job.fail(refusal)


def _left(job: Job) -> float:
    return seconds_to(job.deadline_s, f"part {job.part.index} of {job.part.transfer_id}")


class ReceivingChannel:
    """The receiving end: a thread that joins what the sender opened and feeds the sink."""

    def __init__(self, offer: ChannelOffer, channels: Channels, sink: KVSink) -> None:
        self.offer = offer
        self._channels = channels
        self._sink = sink
        self._channel: Channel | None = None
        self._is_closing = False
        self._thread = threading.Thread(
            target=self._run,
            name=f"kv-{channels.name}-from-{offer.source}-{offer.generation}",
            daemon=True,
        )

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """End now where a wait can be broken off, else at the next frame."""
        self._is_closing = True
        self.abort()

    def abort(self) -> None:
        """Break off what the thread waits for, where the channel can."""
        channel = self._channel
        if channel is not None:
            channel.abort()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        offer = self.offer
        try:
            channel = self._channel = self._channels.join(offer)
            while not self._is_closing and self._receive(channel):
                pass
        except (*BROKEN, QuadrigaError) as exc:
            logger.info(
                "%s channel %d from %s ended: %s",
                self._channels.name,
                offer.generation,
                offer.source,
                first_line(exc),
            )
        except Exception:  # the border of the thread; the sender finds its channel closed
            logger.exception("the channel from %s failed", offer.source)
        finally:
            if self._channel is not None:
                self._channel.close()
                self._channel = None

    def _receive(self, channel: Channel) -> bool:
        """Take one frame and what follows it; False when the sender ends the channel."""
        header = channel.receive_frame(SILENCE_TIMEOUT_S)
        if header.get("kind") != "part":
            return header.get("kind") == "ping"
        part, left_s, num_eager = read_header(header)
        deadline_s = time.monotonic() + left_s
        if not 0 <= num_eager <= channel.max_eager_bytes:
            raise RuntimeError(f"part {part.index} announces {num_eager} bytes unasked")
        try:
            self._sink.accept(self.offer.source, part)
            size = num_bytes(part)
            if num_eager and num_eager != size:
                raise RuntimeError(f"part {part.index} brings {num_eager} bytes, not {size}")
            with channel.room(size, deadline_s) as data:
                if not num_eager:
                    send_verdict(channel, None, _rest(deadline_s))
                channel.receive(data, deadline_s)
                num_eager = 0
                error = self._store(part, data)
        except QuadrigaError as exc:
            error = exc
        if num_eager:  # not wanted, and on the channel already
            with channel.room(num_eager, deadline_s) as unwanted:
                channel.receive(unwanted, deadline_s)
        try:
            send_verdict(channel, error, max(1.0, _rest(deadline_s)))
        finally:
            del error  # its traceback has this frame, which has what was received
        return True

    def _store(self, part: KVPart, data: torch.Tensor) -> QuadrigaError | None:
        """Give a part to the sink; what it refuses, whyever, it would refuse over any channel."""
        try:
            kv = where_digested(from_bytes(data, part), part)
            self._sink.store(self.offer.source, part, kv)
        except QuadrigaError as exc:
            return KVTransportError(exc.message, code="refused")
        except Exception as exc:  # the sink belongs to the actor; its failure is the sender's news
            logger.exception("part %d of %s could not be stored", part.index, part.transfer_id)
            why = f"part {part.index} could not be stored: {exc!r}"
            return KVTransportError(why, code="refused")
        return None


def send_verdict(channel: Channel, error: QuadrigaError | None, timeout_s: float) -> None:
    frame: dict[str, Any] = {"ok": error is None}
    if error is not None:
        # JSON makes up to six bytes of any other character, and a frame of gloo has a thousand.
        message = re.sub(r"[^ -~\n]", "?", error.message)[:400]
        frame |= {"message": message, "code": error.code}
    channel.send_frame(frame, timeout_s)


def _rest(deadline_s: float) -> float:
    return max(0.001, deadline_s - time.monotonic())
