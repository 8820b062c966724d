"""What goes over a gloo group of two: how the two meet, and frames of one fixed size."""

from __future__ import annotations

import json
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from actors.kv_transfer.transports.channel import CONNECT_TIMEOUT_S, ChannelOffer, parse_frame
from quadriga.errors import KVTransportError

__all__ = [
    "CONNECT_TIMEOUT_S",
    "ChannelOffer",
    "host_store",
    "join_store",
    "make_group",
    "receive_frame",
    "route_to",
    "send_frame",
]

dist: Any = torch.distributed  # its classes are made in C++ and unknown to type checkers

FRAME_BYTES = 1024
LENGTH_BYTES = 4


def host_store(host: str) -> tuple[Any, int]:
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


def join_store(offer: ChannelOffer) -> Any:
    """Reach the meeting point that a peer opened. Raises: RuntimeError when it is not there."""
    timeout = timedelta(seconds=CONNECT_TIMEOUT_S)
    return dist.TCPStore(offer.host, offer.port, is_master=False, timeout=timeout)


def make_group(store: Any, offer: ChannelOffer, *, rank: int, host: str) -> Any:
    """Meet the other side: a private process group of two, on one address."""
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=CONNECT_TIMEOUT_S)
    options._threads = 1
    prefix = dist.PrefixStore(f"{offer.source}/{offer.generation}", store)
    return dist.ProcessGroupGloo(prefix, rank, 2, options)


def route_to(host: str) -> str:
    """The local address from which `host` is reached."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        return str(probe.getsockname()[0])


def send_frame(group: Any, content: dict[str, Any], timeout_s: float, *, to: int) -> None:
    text = json.dumps(content).encode()
    if len(text) > FRAME_BYTES - LENGTH_BYTES:
        raise KVTransportError(f"a frame of {len(text)} bytes exceeds {FRAME_BYTES}")
    frame = torch.zeros(FRAME_BYTES, dtype=torch.uint8)
    data = bytearray(len(text).to_bytes(LENGTH_BYTES, "little") + text)
    frame[: len(data)] = torch.frombuffer(data, dtype=torch.uint8)
    group.send([frame], to, 0).wait(timedelta(seconds=timeout_s))


def receive_frame(group: Any, source: int, timeout_s: float) -> dict[str, Any]:
    frame = torch.empty(FRAME_BYTES, dtype=torch.uint8)
    group.recv([frame], source, 0).wait(timedelta(seconds=timeout_s))
    data = frame.numpy().tobytes()
    length = int.from_bytes(data[:LENGTH_BYTES], "little")
    return parse_frame(data[LENGTH_BYTES : LENGTH_BYTES + length])
