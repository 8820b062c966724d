"""KV parts over a private channel for each ordered pair of replicas, whatever it runs over.

The sender owns the channel: it opens it and asks the peer to join. One
thread on either side works a channel, so a slow peer delays no other. A channel that failed, or
whose transfer was aborted in mid-part, is abandoned, and the next use builds a new one (its
generation counts up).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

import torch

from quadriga.core.kv import KVPart
from quadriga.errors import KVTransportError, QuadrigaError
from quadriga.interfaces import KVSink
from quadriga.kv_transport.channel import CONNECT_TIMEOUT_S, ChannelOffer, Channels
from quadriga.kv_transport.channel_ends import Job, ReceivingChannel, SendingChannel
from quadriga.kv_transport.payload import as_bytes, num_bytes

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 2.0

Invite = Callable[[str, ChannelOffer], Awaitable[None]]
"""Hands an offer to a peer, within CONNECT_TIMEOUT_S. Raises: QuadrigaError."""


class PairTransport:
    """Sends to peers over channels of its own and receives over channels they opened.

    Args:
        me: Name of the replica this serves.
        sink: Takes what arrives; None where nothing is received.
        channels: Opens and joins them.
        invite: How a peer learns of a new channel.
    """

    def __init__(self, me: str, sink: KVSink | None, channels: Channels, invite: Invite) -> None:
        self.name = channels.name
        self._me = me
        self._sink = sink
        self._channels = channels
        self._invite = invite
        self._sending: dict[str, SendingChannel] = {}
        self._receiving: dict[str, ReceivingChannel] = {}
        self._generation = 0
        self._is_closed = False

    async def send(self, peer: str, part: KVPart, kv: torch.Tensor, *, deadline_s: float) -> None:
        data = as_bytes(kv)
        if data.numel() != num_bytes(part):
            raise KVTransportError(
                f"part {part.index} of {part.transfer_id} has {data.numel()} bytes; its header "
                f"says {num_bytes(part)}"
            )
        self._channels.check_part(data.numel())
        job = Job(part, data, time.monotonic() + deadline_s)
        self._channel(peer).submit(job)
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.wrap_future(job.done)
            return
        except TimeoutError:
            self._abandon(peer, part.transfer_id)
        except asyncio.CancelledError:
            self._abandon(peer, part.transfer_id)
            raise
        finally:
            del job  # a failure's traceback has this frame, and the job has the failure
        # Out here, as the TimeoutError's frames have the task, whose failure this may become.
        raise KVTransportError(
            f"part {part.index} of {part.transfer_id} did not reach {peer} in {deadline_s:.1f} s",
            code="timeout",
        )

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
        for channel in channels:
            channel.abort()

    def connect(self, offer: ChannelOffer) -> None:
        """The receiving half: join a channel a peer opened. Returns before the two have met.

        Raises:
            KVTransportError: Code "refused": nothing is expected from this peer, or it has
                opened a newer channel already. Code "no_route": it cannot come this way.
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
        self._channels.check(offer)
        if older is not None:
            older.close()
        self._receiving = {s: c for s, c in self._receiving.items() if c.is_alive}
        channel = ReceivingChannel(offer, self._channels, self._sink)
        self._receiving[offer.source] = channel
        channel.start()

    def describe(self) -> dict[str, dict[str, int]]:
        """Generations of the live channels by direction and peer."""
        return {
            "sending": {p: c.generation for p, c in self._sending.items() if c.is_alive},
            "receiving": {s: c.offer.generation for s, c in self._receiving.items() if c.is_alive},
        }

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
                await self._invite(peer, offer)
            except KVTransportError:
                raise
            except QuadrigaError as exc:
                raise KVTransportError(f"{peer} cannot be connected: {exc.message}") from exc

        def invite(offer: ChannelOffer) -> None:
            future = asyncio.run_coroutine_threadsafe(ask(offer), loop)
            try:
                future.result(CONNECT_TIMEOUT_S + 1.0)
            except TimeoutError:
                future.cancel()
                raise TimeoutError(f"{peer} was not asked in time") from None
            finally:
                del future  # as of `send`: the caller's frames have its store

        channel = SendingChannel(peer, self._generation, self._channels, invite=invite)
        try:
            channel.start()
        except RuntimeError as exc:  # there is no thread to be had
            raise KVTransportError(f"no channel to {peer}: {exc}") from exc
        self._sending[peer] = channel
        return channel

    def _abandon(self, peer: str, transfer_id: str) -> None:
        """Drop a transfer's parts; a channel that is in the middle of one is given up."""
        channel = self._sending.get(peer)
        if channel is None:
            return
        channel.drop(transfer_id)
        if channel.current_transfer != transfer_id:
            return
        logger.info("abandon %s channel %d to %s in mid-part", self.name, channel.generation, peer)
        resumable = channel.abandon()
        del self._sending[peer]
        if self._is_closed or not resumable:
            return
        try:
            successor = self._open_channel(peer)
        except KVTransportError as exc:
            for job in resumable:
                job.fail(exc)
            return
        for job in resumable:
            successor.submit(job)
