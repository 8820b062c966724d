"""KV parts over a private gloo process group for each ordered pair of replicas.

The sender is rank 0 and opens the store where the two meet; frames and bytes go over the group. A
wait that times out makes a gloo group unusable, and a pending wait cannot be interrupted: an
abandoned channel ends by its own deadline.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from quadriga.errors import KVTransportError
from quadriga.kv_transport.channel import CONNECT_TIMEOUT_S, ChannelOffer, parse_frame, seconds_to
from quadriga.kv_transport.payload import to_host
from quadriga.process_groups import host_store, join_store, make_group, route_to

FRAME_BYTES = 1024
LENGTH_BYTES = 4
MAX_EAGER_BYTES = 1 << 20


class GlooChannel:
    """One end of a group of two."""

    max_eager_bytes = MAX_EAGER_BYTES

    def __init__(self, group: Any, rank: int) -> None:
        self._group = group
        self._other = 1 - rank
        self._room = torch.empty(
            0, dtype=torch.uint8
        )  # grows to the largest part, and is used again

    def send_frame(self, content: dict[str, Any], timeout_s: float) -> None:
        text = json.dumps(content).encode()
        if len(text) > FRAME_BYTES - LENGTH_BYTES:
            raise KVTransportError(f"a frame of {len(text)} bytes exceeds {FRAME_BYTES}")
        frame = torch.zeros(FRAME_BYTES, dtype=torch.uint8)
        data = bytearray(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        frame[: len(data)] = torch.frombuffer(data, dtype=torch.uint8)
        self._group.send([frame], self._other, 0).wait(timedelta(seconds=timeout_s))

    def receive_frame(self, timeout_s: float) -> dict[str, Any]:
        frame = torch.empty(FRAME_BYTES, dtype=torch.uint8)
        self._group.recv([frame], self._other, 0).wait(timedelta(seconds=timeout_s))
        data = frame.numpy().tobytes()
        length = int.from_bytes(data[:LENGTH_BYTES], "little")
        return parse_frame(data[LENGTH_BYTES : LENGTH_BYTES + length])

    def send(self, data: torch.Tensor, deadline_s: float) -> None:
        work = self._group.send([to_host(data)], self._other, 0)
        work.wait(timedelta(seconds=seconds_to(deadline_s, "a part")))

    @contextmanager
    def room(self, num_bytes: int, deadline_s: float) -> Iterator[torch.Tensor]:
        if self._room.numel() < num_bytes:
            self._room = torch.empty(num_bytes, dtype=torch.uint8)
        yield self._room[:num_bytes]

    def receive(self, data: torch.Tensor, deadline_s: float) -> None:
        work = self._group.recv([data], self._other, 0)
        work.wait(timedelta(seconds=seconds_to(deadline_s, "a part")))

    def abort(self) -> None:
        """Nothing: a pending wait of gloo ends by its own deadline."""

    def close(self) -> None:
        self._group = None  # its sockets close with it


class GlooChannels:
    """See `Channels`.

    Args:
        host_for: The local address under which a peer reaches this process.
    """

    name = "gloo"

    def __init__(self, me: str, host_for: Callable[[str], str]) -> None:
        self._me = me
        self._host_for = host_for

    def open(
        self, peer: str, generation: int, invite: Callable[[ChannelOffer], None]
    ) -> GlooChannel:
        host = self._host_for(peer)
        store, port = host_store(host, CONNECT_TIMEOUT_S)
        offer = ChannelOffer(self._me, host, port, generation)
        invite(offer)
        return self._meet(store, offer, rank=0, host=host)

    def check(self, offer: ChannelOffer) -> None:
        """Every offer can be joined."""

    def join(self, offer: ChannelOffer) -> GlooChannel:
        store = join_store(offer.host, offer.port, CONNECT_TIMEOUT_S)
        return self._meet(store, offer, rank=1, host=route_to(offer.host))

    def _meet(self, store: Any, offer: ChannelOffer, *, rank: int, host: str) -> GlooChannel:
        """Meet the other side: a private process group of two, on one address."""
        prefix = f"{offer.source}/{offer.generation}"
        group = make_group(store, prefix, rank=rank, size=2, host=host, timeout_s=CONNECT_TIMEOUT_S)
        return GlooChannel(group, rank)

    def check_part(self, num_bytes: int) -> None:
        """Host memory bounds them."""
