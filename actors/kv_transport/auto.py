"""Gloo first, the object store for peers whom gloo does not reach; and how a transport is made."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Literal

import ray
import torch

from actors.kv_transport.gloo import GlooTransport
from actors.kv_transport.gloo_frames import ChannelOffer
from actors.kv_transport.object_store import ObjectStoreTransport
from quadriga.errors import KVTransportError
from quadriga.interfaces import KVSink
from quadriga.types import KVPart

logger = logging.getLogger(__name__)

Kind = Literal["auto", "gloo", "object_store"]

GLOO_RETRY_S = 60.0
GLOO_SHARE = 0.5
"""Of a part's deadline: what gloo may use up before the object store gets the rest."""


class TransportHub:
    """All transports of one replica behind one `KVTransport`, chosen by configuration.

    Attributes:
        num_fallbacks: How often a peer was moved from gloo to the object store.
    """

    def __init__(
        self, kind: Kind, me: str, sink: KVSink | None, host_for: Callable[[str], str]
    ) -> None:
        self.name: str = kind
        self.num_fallbacks = 0
        self._gloo = GlooTransport(me, sink, host_for) if kind != "object_store" else None
        self._store = ObjectStoreTransport(me, sink) if kind != "gloo" else None
        self._gloo_again_s: dict[str, float] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The transports a peer may use to reach this replica."""
        return tuple(t.name for t in (self._gloo, self._store) if t is not None)

    async def send(self, peer: str, part: KVPart, kv: torch.Tensor, *, deadline_s: float) -> None:
        started_s = time.monotonic()
        if self._store is None:
            assert self._gloo is not None
            await self._gloo.send(peer, part, kv, deadline_s=deadline_s)
            return
        if self._gloo is not None and started_s >= self._gloo_again_s.get(peer, 0.0):
            try:
                await self._gloo.send(peer, part, kv, deadline_s=deadline_s * GLOO_SHARE)
                return
            except KVTransportError as exc:
                if exc.code in ("refused", "aborted"):
                    raise
                self._fall_back(peer, exc)
        left_s = deadline_s - (time.monotonic() - started_s)
        await self._store.send(peer, part, kv, deadline_s=left_s)

    def _fall_back(self, peer: str, reason: KVTransportError) -> None:
        now_s = time.monotonic()
        self._gloo_again_s = {p: t for p, t in self._gloo_again_s.items() if t > now_s}
        self._gloo_again_s[peer] = now_s + GLOO_RETRY_S
        self.num_fallbacks += 1
        logger.warning("gloo does not reach %s, using the object store: %s", peer, reason)

    def connect(self, offer: ChannelOffer) -> None:
        """A peer opens a gloo channel. Raises: KVTransportError, code "refused"."""
        if self._gloo is None:
            raise KVTransportError("this replica does not receive over gloo", code="refused")
        self._gloo.connect(offer)

    async def deliver(
        self, source: str, part: KVPart, refs: list[ray.ObjectRef[Any]], deadline_s: float
    ) -> None:
        """A peer sends a part through the object store. Raises: KVTransportError."""
        if self._store is None:
            raise KVTransportError(
                "this replica does not receive over the object store", code="refused"
            )
        await self._store.deliver(source, part, refs, deadline_s)

    async def abort(self, peer: str, transfer_id: str) -> None:
        for transport in (self._gloo, self._store):
            if transport is not None:
                await transport.abort(peer, transfer_id)

    async def close(self) -> None:
        for transport in (self._gloo, self._store):
            if transport is not None:
                await transport.close()
