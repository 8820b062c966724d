"""The receiving end of a channel: a thread that joins a line and feeds the sink."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import torch

from actors.kv_transfer.transports.channel import (
    BROKEN,
    SILENCE_TIMEOUT_S,
    Channel,
    ChannelOffer,
    Channels,
    first_line,
    read_header,
)
from actors.kv_transfer.transports.payload import from_bytes, num_bytes, where_digested
from quadriga.core.kv import KVPart
from quadriga.errors import KVTransportError, QuadrigaError
from quadriga.interfaces import KVSink

logger = logging.getLogger(__name__)


class ReceivingChannel:
    """A thread that joins what the sender opened and feeds the sink."""

    def __init__(self, offer: ChannelOffer, lines: Channels, sink: KVSink) -> None:
        self.offer = offer
        self._lines = lines
        self._sink = sink
        self._line: Channel | None = None
        self._is_closing = False
        self._thread = threading.Thread(
            target=self._run,
            name=f"kv-{lines.name}-from-{offer.source}-{offer.generation}",
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
        """Break off what the thread waits for, where the line can."""
        line = self._line
        if line is not None:
            line.abort()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        offer = self.offer
        try:
            line = self._line = self._lines.join(offer)
            while not self._is_closing and self._receive(line):
                pass
        except (*BROKEN, QuadrigaError) as exc:
            logger.info(
                "%s channel %d from %s ended: %s",
                self._lines.name,
                offer.generation,
                offer.source,
                first_line(exc),
            )
        except Exception:  # the border of the thread; the sender finds its line closed
            logger.exception("the channel from %s failed", offer.source)
        finally:
            if self._line is not None:
                self._line.close()
                self._line = None

    def _receive(self, line: Channel) -> bool:
        """Take one frame and what follows it; False when the sender said goodbye."""
        header = line.receive_frame(SILENCE_TIMEOUT_S)
        if header.get("kind") != "part":
            return header.get("kind") == "ping"
        part, left_s, num_eager = read_header(header)
        deadline_s = time.monotonic() + left_s
        if not 0 <= num_eager <= line.max_eager_bytes:
            raise RuntimeError(f"part {part.index} announces {num_eager} bytes unasked")
        try:
            self._sink.accept(self.offer.source, part)
            size = num_bytes(part)
            if num_eager and num_eager != size:
                raise RuntimeError(f"part {part.index} brings {num_eager} bytes, not {size}")
            with line.room(size, deadline_s) as data:
                if not num_eager:
                    send_verdict(line, None, _rest(deadline_s))
                line.receive(data, deadline_s)
                num_eager = 0
                error = self._store(part, data)
        except QuadrigaError as exc:
            error = exc
        if num_eager:  # not wanted, and on the line already
            with line.room(num_eager, deadline_s) as unwanted:
                line.receive(unwanted, deadline_s)
        send_verdict(line, error, max(1.0, _rest(deadline_s)))
        return True

    def _store(self, part: KVPart, data: torch.Tensor) -> QuadrigaError | None:
        try:
            kv = where_digested(from_bytes(data, part), part)
            self._sink.store(self.offer.source, part, kv)
        except QuadrigaError as exc:
            return exc
        except Exception as exc:  # the sink belongs to the actor; its failure is the sender's news
            logger.exception("part %d of %s could not be stored", part.index, part.transfer_id)
            return KVTransportError(f"part {part.index} could not be stored: {exc!r}")
        return None


def send_verdict(line: Channel, error: QuadrigaError | None, timeout_s: float) -> None:
    frame: dict[str, Any] = {"ok": error is None}
    if error is not None:
        frame |= {"message": error.message[:500], "code": error.code}
    line.send_frame(frame, timeout_s)


def _rest(deadline_s: float) -> float:
    return max(0.001, deadline_s - time.monotonic())
