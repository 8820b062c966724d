"""TCP ports for services that are told theirs."""

from __future__ import annotations

import random
import socket

LOOPBACK = "127.0.0.1"
MAX_PORT = 65_535
PORTS = range(20_000, 32_768)
"""Neither Linux nor Ray hands these out to whoever asks for any port: one that is free now is still
free when the service that is told of it comes up."""
MAX_TRIES = 1000


def with_port(host: str, port: int) -> str:
    """Return `host:port` as URLs and gRPC write it: an IPv6 address is in brackets."""
    return f"[{host.strip('[]')}]:{port}" if ":" in host else f"{host}:{port}"


def free_port() -> int:
    """Return a TCP port of loopback that nobody listens on now. Raises: as `free_ports`."""
    return free_ports(1)[0]


def free_ports(count: int) -> range:
    """Return `count` TCP ports of loopback in a row that nobody listens on now.

    Raises:
        OSError: None were found.
    """
    pick = random.SystemRandom()
    for _ in range(MAX_TRIES):
        first = pick.randrange(PORTS.start, PORTS.stop - count + 1)
        ports = range(first, first + count)
        if all(map(is_free, ports)):
            return ports
    where = f"from {PORTS.start} to {PORTS.stop - 1}"
    raise OSError(f"no {count} free ports in a row {where} in {MAX_TRIES} tries")


def is_free(port: int) -> bool:
    """Whether nobody listens on a TCP port of loopback now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True
