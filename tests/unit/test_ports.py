"""Ports for services that are told theirs: free, and handed out by nobody else."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from quadriga import ports
from quadriga.ports import LOOPBACK, PORTS, free_port, free_ports, is_free

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def test_a_free_port_is_none_that_is_listened_on() -> None:
    port = free_port()
    assert port in PORTS
    assert is_free(port)
    with socket.create_server((LOOPBACK, port)):
        assert not is_free(port)
    assert is_free(port)


def test_ports_that_are_taken_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = set(PORTS) - {PORTS.start + 7, PORTS.start + 20, PORTS.start + 21}
    monkeypatch.setattr(ports, "is_free", lambda port: port not in taken)
    monkeypatch.setattr(ports, "MAX_TRIES", 1_000_000)
    assert free_ports(2) == range(PORTS.start + 20, PORTS.start + 22)
    taken |= {PORTS.start + 20, PORTS.start + 21}
    assert free_port() == PORTS.start + 7
    monkeypatch.setattr(ports, "MAX_TRIES", 3)
    taken.add(PORTS.start + 7)
    with pytest.raises(OSError, match="no 1 free ports in a row from 20000 to 32767 in 3 tries"):
        free_port()


@pytest.mark.skipif(
    not RANGE.exists() or RANGE.read_text().split()[0] != "32768",
    reason="the kernel's range is not Linux' own",
)
def test_the_kernel_hands_none_of_them_out() -> None:
    low, high = map(int, RANGE.read_text().split())
    assert not set(PORTS) & set(range(low, high + 1))
