"""KV parts over a private gloo process group for each ordered pair of replicas.

The sender is rank 0 and opens the store where the two meet; frames and bytes go over the group. A
wait that times out makes a gloo group unusable, and a pending wait cannot be interrupted: an
abandoned channel ends by its own deadline.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from quadriga.errors import KVTransportError
from quadriga.interfaces import KVSink
from quadriga.kv_transport.channel import (
    CONNECT_TIMEOUT_S,
    ChannelOffer,
    parse_frame,
    seconds_to,
)
from quadriga.kv_transport.pairs import Invite, PairTransport
from quadriga.kv_transport.payload import to_host

dist: Any = torch.distributed  # its classes are made in C++ and unknown to type checkers

FRAME_BYTES = 1024
LENGTH_BYTES = 4
MAX_EAGER_BYTES = 1 << 20


class GlooChannel:
    """One end of a group of two."""

    max_eager_bytes = MAX_EAGER_BYTES

    def __init__(self, group: Any, rank: int) -> None:
        self._group = group
        self._other = 1 - rank

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
        yield torch.empty(num_bytes, dtype=torch.uint8)

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
        store, port = _host_store(host)
        offer = ChannelOffer(self._me, host, port, generation)
        invite(offer)
        return GlooChannel(_make_group(store, offer, rank=0, host=host), rank=0)

    def check(self, offer: ChannelOffer) -> None:
        """Every offer can be joined."""

    def join(self, offer: ChannelOffer) -> GlooChannel:
        group = _make_group(_join_store(offer), offer, rank=1, host=_route_to(offer.host))
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
        invite: Invite,
    ) -> None:
        super().__init__(me, sink, GlooChannels(me, host_for), invite)


def _host_store(host: str) -> tuple[Any, int]:
    """Open a meeting point on one address; returns the store and its port."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        # The store would listen on all interfaces; the socket it is given does not.
        listener.bind((host, 0))
        listener.listen()
        port = int(listener.getsockname()[1])
        store = dist.TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=CONNECT_TIMEOUT_S),
            master_listen_fd=listener.detach(),
        )
    return store, port


def _join_store(offer: ChannelOffer) -> Any:
    """Reach the meeting point that a peer opened. Raises: RuntimeError when it is not there."""
    timeout = timedelta(seconds=CONNECT_TIMEOUT_S)
    return dist.TCPStore(offer.host, offer.port, is_master=False, timeout=timeout)


def _make_group(store: Any, offer: ChannelOffer, *, rank: int, host: str) -> Any:
    """Meet the other side: a private process group of two, on one address."""
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=CONNECT_TIMEOUT_S)
    options._threads = 1
    prefix = dist.PrefixStore(f"{offer.source}/{offer.generation}", store)
    return dist.ProcessGroupGloo(prefix, rank, 2, options)


def _route_to(host: str) -> str:
    """The local address from which `host` is reached."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        return str(probe.getsockname()[0])
