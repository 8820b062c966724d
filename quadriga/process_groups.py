"""Private process groups of gloo, on one address each: how their members meet."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch.distributed

dist: Any = torch.distributed  # its classes are made in C++ and unknown to type checkers


def host_store(host: str, timeout_s: float) -> tuple[Any, int]:
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
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listener.detach(),
        )
    return store, port


def join_store(host: str, port: int, timeout_s: float) -> Any:
    """Reach a meeting point that another process opened. Raises: RuntimeError: It is not there."""
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))


def make_group(
    store: Any, prefix: str, *, rank: int, size: int, host: str, timeout_s: float
) -> Any:
    """Meet the others: a process group that listens on one address.

    Args:
        prefix: Of its keys in the store.
        timeout_s: For the meeting, and for each of its operations that names no other.
    """
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 1
    return dist.ProcessGroupGloo(dist.PrefixStore(prefix, store), rank, size, options)


def route_to(host: str) -> str:
    """The local address from which `host` is reached."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        return str(probe.getsockname()[0])
