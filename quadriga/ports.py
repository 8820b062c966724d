"""TCP ports for services that are told theirs, and who reaches those that Ray opens."""

from __future__ import annotations

import os
import random
import secrets
import socket

LOOPBACK = "127.0.0.1"
RAY_ON_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Environment in which a Ray that is started, or joined, has its ports on loopback.

Otherwise Ray opens every interface, under the address by which others reach the machine, and is
lost when that changes. To be set before Ray is imported.
"""
MAX_PORT = 65_535
PORTS = range(20_000, 32_768)
"""Neither Linux nor Ray hands these out to whoever asks for any port: one that is free now is still
free when the service that is told of it comes up."""
MAX_TRIES = 1000


def with_port(host: str, port: int) -> str:
    """Return `host:port` as URLs and gRPC write it: an IPv6 address is in brackets."""
    return f"[{host.strip('[]')}]:{port}" if ":" in host else f"{host}:{port}"


def use_private_ray() -> None:
    """Have this process and all that it starts use a Ray that nobody else can use; for tools.

    Whoever reaches a Ray without a token runs code in it. To be called before Ray is imported.
    """
    os.environ |= RAY_ON_LOOPBACK | {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ["RAY_AUTH_TOKEN"] = os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32)


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
