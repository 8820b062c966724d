"""The fastest way that reaches a peer, and the next where it does not; how a transport is made."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import ray
import torch

from actors.kv_transfer.object_store import ObjectStoreTransport
from actors.rpc.ray_rpc import call
from quadriga.clock import Clock
from quadriga.config.engine_spec import Device
from quadriga.core.kv import KVPart
from quadriga.errors import ConfigError, KVTransportError
from quadriga.interfaces import KVSink, KVTransport
from quadriga.kv_transport.channel import (
    CONNECT_TIMEOUT_S,
    NO_ROUTE,
    TOO_LARGE,
    ChannelOffer,
    Channels,
    NcclOffer,
    NixlOffer,
)
from quadriga.kv_transport.counts import TransportCounts
from quadriga.kv_transport.gloo import GlooChannels
from quadriga.kv_transport.pairs import PairTransport

if TYPE_CHECKING:
    from quadriga.kv_transport.nccl_library import NcclLibrary

logger = logging.getLogger(__name__)

Kind = Literal["auto", "nccl", "nixl", "gloo", "object_store"]
EVERYWHERE = ("gloo", "object_store")
"""What every replica receives by."""
NOT_HERE = "not_here"
"""Code of errors: the peer has no such transport, as its `transport.kind` is another."""
RETRY_S = 60.0
"""A peer that a transport did not reach is tried again that way after this long."""
NO_ROUTE_RETRY_S = 3600.0
"""The same where it never reaches that peer."""
SHARE = 0.5
"""Of a part's deadline: what one transport may use up before the next gets the rest."""
HASTY_S = 2.0
"""A transport that had less time for a part, and took longer, is not left out for that."""


async def invite_actor(peer: str, offer: ChannelOffer) -> None:
    """Call the peer's `kv_connect`. Raises: QuadrigaError."""
    await call(peer, "kv_connect", offer, timeout_s=CONNECT_TIMEOUT_S)


class TransportHub:
    """All transports of one replica behind one `KVTransport`, chosen by configuration.

    `auto` is NCCL where this replica has a GPU and CuPy with NCCL, then gloo, then the object
    store. What comes over gloo or the object store is received whatever the kind, and `nccl` and
    `nixl` send by these to a peer that lacks them: in a roll-out that changes the kind, replicas
    of both kinds hand sequences to each other.

    Args:
        kind: To send by: one transport alone, to peers that have it, or `auto`.
        host_for: The local address under which a peer reaches this process.
        device: What the replica's engine runs on.
        nccl: NCCL as tests have it; None: as it is found here.

    Attributes:
        num_fallbacks: How often a peer was moved to the next transport.
        counts: What was sent, and what failed.

    Raises:
        ConfigError: `nccl` or `nixl` was asked for and cannot be had.
    """

    def __init__(
        self,
        kind: Kind,
        me: str,
        sink: KVSink | None,
        host_for: Callable[[str], str],
        *,
        clock: Clock,
        device: Device = "cpu",
        nccl: NcclLibrary | None = None,
    ) -> None:
        self.name: str = kind
        self.num_fallbacks = 0
        self.counts = TransportCounts()
        self._clock = clock
        lines: dict[type[ChannelOffer], Channels] = {}
        library = nccl or _library(kind, device)
        if library is not None:
            from quadriga.kv_transport.nccl import NcclChannels  # for GPUs alone

            lines[NcclOffer] = NcclChannels(me, host_for, library)
        if kind == "nixl":
            lines[NixlOffer] = _nixl(me, host_for, device)
        lines[ChannelOffer] = GlooChannels(me, host_for)
        self._pairs = {o: PairTransport(me, sink, c, invite_actor) for o, c in lines.items()}
        self._store = ObjectStoreTransport(me, sink)
        self._all: list[KVTransport] = [*self._pairs.values(), self._store]
        self._ways = [way for way in self._all if kind not in EVERYWHERE or way.name == kind]
        self._again_s: dict[tuple[str, str], float] = {}  # by way and peer

    @property
    def names(self) -> tuple[str, ...]:
        """The transports a peer may use to reach this replica."""
        return tuple(way.name for way in self._all)

    async def send(self, peer: str, part: KVPart, kv: torch.Tensor, *, deadline_s: float) -> None:
        end_s = self._clock.now_s() + deadline_s
        for way in self._ways[:-1]:
            now_s = self._clock.now_s()
            if now_s < self._again_s.get((way.name, peer), 0.0):
                continue
            is_chosen = way.name == self.name  # no other takes its place, where the peer has it
            share_s = (end_s - now_s) * (1.0 if is_chosen else SHARE)
            try:
                await self._send_by(way, peer, part, kv, share_s)
                return
            except KVTransportError as exc:
                if exc.code in ("refused", "aborted") or (is_chosen and exc.code != NOT_HERE):
                    raise
                is_hasty = exc.code == "timeout" and share_s < HASTY_S
                if exc.code != TOO_LARGE and not is_hasty:
                    self._fall_back(way.name, peer, exc)
        last = self._ways[-1]
        await self._send_by(last, peer, part, kv, end_s - self._clock.now_s())

    async def _send_by(
        self, way: KVTransport, peer: str, part: KVPart, kv: torch.Tensor, deadline_s: float
    ) -> None:
        """Send by one transport, and count it. Raises: KVTransportError."""
        began_s = self._clock.now_s()
        try:
            await way.send(peer, part, kv, deadline_s=deadline_s)
        except KVTransportError as exc:
            self.counts.failed(way.name, exc.code)
            raise
        self.counts.arrived(way.name, kv.nbytes, self._clock.now_s() - began_s)

    def _fall_back(self, way: str, peer: str, reason: KVTransportError) -> None:
        now_s = self._clock.now_s()
        self._again_s = {key: t for key, t in self._again_s.items() if t > now_s}
        pause_s = NO_ROUTE_RETRY_S if reason.code in (NO_ROUTE, NOT_HERE) else RETRY_S
        self._again_s[way, peer] = now_s + pause_s
        self.num_fallbacks += 1
        logger.warning("%s does not reach %s, going on without it: %s", way, peer, reason)

    def connect(self, offer: ChannelOffer) -> None:
        """A peer opens a channel.

        Raises: KVTransportError, code "refused", "no_route" or "not_here".
        """
        pair = self._pairs.get(type(offer))
        if pair is None:
            raise KVTransportError(
                f"this replica receives over {', '.join(self.names)} alone", code=NOT_HERE
            )
        pair.connect(offer)

    async def deliver(
        self, source: str, part: KVPart, refs: list[ray.ObjectRef[Any]], deadline_s: float
    ) -> None:
        """A peer sends a part through the object store. Raises: KVTransportError."""
        await self._store.deliver(source, part, refs, deadline_s)

    async def abort(self, peer: str, transfer_id: str) -> None:
        for way in self._all:
            await way.abort(peer, transfer_id)

    async def close(self) -> None:
        for way in self._all:
            await way.close()

    def channels(self) -> dict[str, dict[str, dict[str, int]]]:
        """Generations of live channels by transport, direction and peer."""
        return {pair.name: pair.describe() for pair in self._pairs.values()}


def _nixl(me: str, host_for: Callable[[str], str], device: Device) -> Channels:
    """NIXL, which was asked for. Raises: ConfigError."""
    from quadriga.kv_transport.nixl import NixlChannels, find_nixl  # for those who have it

    try:
        return NixlChannels(me, host_for, find_nixl(), torch.device(device))
    except KVTransportError as exc:
        raise _missing("nixl", exc) from exc


def _missing(kind: Kind, exc: KVTransportError) -> ConfigError:
    text = f"transport.kind: {kind!r} cannot be had: {exc.message}; or set it to 'auto'"
    return ConfigError(text, param="transport.kind")


def _library(kind: Kind, device: Device) -> NcclLibrary | None:
    """NCCL where it is wanted and can be had. Raises: ConfigError."""
    if kind not in ("auto", "nccl") or (kind == "auto" and device != "cuda"):
        return None
    from quadriga.kv_transport.nccl_library import find_nccl

    try:
        return find_nccl()
    except KVTransportError as exc:
        if kind == "nccl":
            raise _missing("nccl", exc) from exc
        logger.warning("KV goes through host memory, without NCCL: %s", exc.message)
        return None
