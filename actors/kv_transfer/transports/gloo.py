"""KV parts over a private gloo process group for each ordered pair of replicas.

The sender is rank 0 and opens the store the two meet at; frames and bytes go over the group. A wait
that times out poisons a gloo group, and a pending wait cannot be interrupted: an abandoned channel
ends by its own deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from actors.kv_transfer.transports.channel import ChannelOffer, seconds_to
from actors.kv_transfer.transports.gloo_frames import (
    host_store,
    join_store,
    make_group,
    receive_frame,
    route_to,
    send_frame,
)
from actors.kv_transfer.transports.pairs import Invite, PairTransport, invite_actor
from actors.kv_transfer.transports.payload import to_host
from quadriga.interfaces import KVSink

MAX_EAGER_BYTES = 1 << 20


class GlooChannel:
    """One end of a group of two."""

    max_eager_bytes = MAX_EAGER_BYTES

    def __init__(self, group: Any, rank: int) -> None:
        self._group = group
        self._other = 1 - rank

    def send_frame(self, content: dict[str, Any], timeout_s: float) -> None:
        send_frame(self._group, content, timeout_s, to=self._other)

    def receive_frame(self, timeout_s: float) -> dict[str, Any]:
        return receive_frame(self._group, self._other, timeout_s)

    def send(self, data: torch.Tensor, deadline_s: float) -> None:
        work = self._group.send([to_host(data)], self._other, 0)
        work.wait(timedelta(seconds=seconds_to(deadline_s, "a part")))

    @contextmanager
    def room(self, num_bytes: int, deadline_s: float) -> Iterator[torch.Tensor]:
        yield torch.empty(num_bytes, dtype=torch.uint8)

    def receive(self, data: torch.Tensor, deadline_s: float) -> None:
        work = self._group.recv([data], self._other, 0)
        work.wait(timedelta(seconds=seconds_to(deadline_s, "a part")))

    def abort(self) -> None:
        """Nothing: a pending wait of gloo ends by its own deadline."""

    def close(self) -> None:
        self._group = None  # its sockets close with it


class GlooRendezvous:
    """A store of our own, and its address."""

    def __init__(self, source: str, host: str, generation: int) -> None:
        self._store, port = host_store(host)
        self.offer = ChannelOffer(source, host, port, generation)

    def meet(self) -> GlooChannel:
        group = make_group(self._store, self.offer, rank=0, host=self.offer.host)
        return GlooChannel(group, rank=0)

    def close(self) -> None:
        self._store = None


class GlooChannels:
    """See `Channels`.

    Args:
        host_for: The local address under which a peer reaches this process.
    """

    name = "gloo"

    def __init__(self, me: str, host_for: Callable[[str], str]) -> None:
        self._me = me
        self._host_for = host_for

    def host(self, peer: str, generation: int) -> GlooRendezvous:
        return GlooRendezvous(self._me, self._host_for(peer), generation)

    def check(self, offer: ChannelOffer) -> None:
        """Whoever asks may come."""

    def join(self, offer: ChannelOffer) -> GlooChannel:
        group = make_group(join_store(offer), offer, rank=1, host=route_to(offer.host))
        return GlooChannel(group, rank=1)

    def check_part(self, num_bytes: int) -> None:
        """Host memory bounds them."""


class GlooTransport(PairTransport):
    """`PairTransport` over gloo.

    Args:
        me: Name of the replica this serves.
        sink: Takes what arrives; None where nothing is received.
        host_for: The local address under which a peer reaches this process.
    """

    def __init__(
        self,
        me: str,
        sink: KVSink | None,
        host_for: Callable[[str], str],
        invite: Invite = invite_actor,
    ) -> None:
        super().__init__(me, sink, GlooChannels(me, host_for), invite)
