"""KV parts over a private gloo process group for each ordered pair of replicas.

The sender owns the channel: it opens the store the two meet at, asks the peer to join, and is
rank 0. One thread on either side works a channel, so a slow peer delays nobody else. On the wire
a part is

    header frame → verdict frame → payload bytes → verdict frame

and bytes only follow a header that was accepted; but a small part's bytes follow at once, and its
first verdict is left out. A wait that times out poisons a gloo group, and
a pending wait cannot be interrupted: a channel that failed, or whose transfer was aborted in
mid-part, is abandoned to end by its own deadline, and the next use builds a new one (its
generation counts up). Pings let a receiver that hears nothing conclude that the sender is gone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from actors.calls import call
from actors.kv_transport.gloo_channel import Job, ReceivingChannel, SendingChannel
from actors.kv_transport.gloo_frames import CONNECT_TIMEOUT_S, ChannelOffer
from actors.kv_transport.payload import as_bytes
from quadriga.errors import KVTransportError, QuadrigaError
from quadriga.interfaces import KVSink
from quadriga.types import KVPart

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 2.0


class GlooTransport:
    """Sends to peers over channels of its own and receives over channels they opened.

    Args:
        me: Name of the replica this serves.
        sink: Takes what arrives; None where nothing is received.
        host_for: The local address under which a peer reaches this process.
    """

    name = "gloo"

    def __init__(self, me: str, sink: KVSink | None, host_for: Callable[[str], str]) -> None:
        self._me = me
        self._sink = sink
        self._host_for = host_for
        self._sending: dict[str, SendingChannel] = {}
        self._receiving: dict[str, ReceivingChannel] = {}
        self._generation = 0
        self._is_closed = False

    async def send(self, peer: str, part: KVPart, kv: torch.Tensor, *, deadline_s: float) -> None:
        job = Job(part, as_bytes(kv), time.monotonic() + deadline_s)
        self._channel(peer).submit(job)
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.wrap_future(job.done)
        except TimeoutError as exc:
            self._abandon(peer, part.transfer_id)
            raise KVTransportError(
                f"part {part.index} of {part.transfer_id} did not reach {peer} "
                f"in {deadline_s:.1f} s",
                code="timeout",
            ) from exc
        except asyncio.CancelledError:
            self._abandon(peer, part.transfer_id)
            raise

    async def abort(self, peer: str, transfer_id: str) -> None:
        self._abandon(peer, transfer_id)

    async def close(self) -> None:
        self._is_closed = True
        channels: list[SendingChannel | ReceivingChannel] = [*self._sending.values()]
        channels += self._receiving.values()
        self._sending.clear()
        self._receiving.clear()
        for channel in channels:
            channel.close()
        if channels:
            await asyncio.gather(
                *(asyncio.to_thread(channel.join, CLOSE_TIMEOUT_S) for channel in channels)
            )

    def connect(self, offer: ChannelOffer) -> None:
        """The receiving half: join a channel a peer opened. Returns before the two have met.

        Raises:
            KVTransportError: Code "refused": nothing is expected from this peer, or it has
                opened a newer channel already.
        """
        if self._sink is None or self._is_closed or not self._sink.knows(offer.source):
            raise KVTransportError(f"{self._me} expects nothing of {offer.source}", code="refused")
        older = self._receiving.get(offer.source)
        if older is not None and older.offer.generation >= offer.generation:
            raise KVTransportError(
                f"{offer.source} already opened channel {older.offer.generation}, "
                f"newer than {offer.generation}",
                code="refused",
            )
        if older is not None:
            older.close()
        self._receiving = {s: c for s, c in self._receiving.items() if c.is_alive}
        channel = ReceivingChannel(offer, self._me, self._sink)
        self._receiving[offer.source] = channel
        channel.start()

    def _channel(self, peer: str) -> SendingChannel:
        """The live channel to a peer, made at first use and after a failure."""
        if self._is_closed:
            raise KVTransportError(f"the transport of {self._me} is closed")
        self._sending = {p: c for p, c in self._sending.items() if c.is_alive or p == peer}
        channel = self._sending.get(peer)
        if channel is None or not channel.is_alive:
            channel = self._open_channel(peer)
        return channel

    def _open_channel(self, peer: str) -> SendingChannel:
        self._generation += 1
        loop = asyncio.get_running_loop()

        async def ask(offer: ChannelOffer) -> None:
            try:
                await call(peer, "kv_connect", offer, timeout_s=CONNECT_TIMEOUT_S)
            except KVTransportError:
                raise
            except QuadrigaError as exc:
                raise KVTransportError(f"{peer} cannot be connected: {exc.message}") from exc

        def invite(offer: ChannelOffer) -> None:
            future = asyncio.run_coroutine_threadsafe(ask(offer), loop)
            future.result(CONNECT_TIMEOUT_S + 1.0)

        channel = SendingChannel(
            self._me, peer, self._generation, self._host_for(peer), invite=invite
        )
        self._sending[peer] = channel
        channel.start()
        return channel

    def _abandon(self, peer: str, transfer_id: str) -> None:
        """Drop a transfer's parts; a channel that is in the middle of one is given up."""
        channel = self._sending.get(peer)
        if channel is None:
            return
        channel.drop(transfer_id)
        if channel.current_transfer != transfer_id:
            return
        logger.info("abandon gloo channel %d to %s in mid-part", channel.generation, peer)
        orphans = channel.abandon()
        del self._sending[peer]
        if self._is_closed or not orphans:
            return
        heir = self._open_channel(peer)
        for job in orphans:
            heir.submit(job)


def describe(transport: GlooTransport) -> dict[str, Any]:
    """Channels by direction, for `info` pages and tests."""
    return {
        "sending": {p: c.generation for p, c in transport._sending.items() if c.is_alive},
        "receiving": {s: c.offer.generation for s, c in transport._receiving.items() if c.is_alive},
    }
