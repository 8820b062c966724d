"""What can befall a node of `deploy.multinode`: its link, its processes, its disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from deploy.multinode import MultiNode

FILL_BYTES = 64 << 10


class NodeFaults:
    """Harms single nodes of a running cluster, and undoes it."""

    def __init__(self, cluster: MultiNode) -> None:
        self.cluster = cluster

    def set_link(self, node: str, *, is_up: bool) -> None:
        """Cut a node off from all others, or join it again."""
        self.cluster.in_bridge("ip", "link", "set", f"to-{node}", "up" if is_up else "down")

    def processes(self, node: str) -> list[int]:
        """Process ids, as seen from this machine, of all that runs in a node's network."""
        (address,) = (n.address for n in self.cluster.nodes if n.name == node)
        flag = f"--node-ip-address={address}".encode()
        mine = {p: _network(p) for p in descendants(self.cluster.pid)}
        networks = {network for p, network in mine.items() if network and flag in _words(p)}
        return [p for p, network in mine.items() if network in networks]

    def start_node(self, node: str) -> None:
        """Start Ray again on a node whose processes have ended. Raises: RuntimeError."""
        self.cluster.start_node(node)

    def fill_disk(self, node: str) -> None:
        """Leave no byte free on a node's own disk. Raises: RuntimeError: It has none."""
        assert self.cluster.disk_bytes, "the nodes have no disks of their own"
        try:
            with self._filler(node).open("wb", buffering=0) as stream:
                for _ in range(2 * self.cluster.disk_bytes // FILL_BYTES):
                    stream.write(bytes(FILL_BYTES))
        except OSError as exc:
            if exc.errno == errno.ENOSPC:
                return
            raise
        self.free_disk(node)
        raise RuntimeError(f"{node} has no disk of its own")

    def free_disk(self, node: str) -> None:
        """Undo `fill_disk`."""
        self._filler(node).unlink(missing_ok=True)

    def _filler(self, node: str) -> Path:
        root = Path(f"/proc/{self.cluster.inner_pid}/root{self.cluster.folder}")
        return root / node / "filler"


def descendants(pid: int) -> list[int]:
    """Ids of a process and all below it."""
    found, waiting = [], [pid]
    while waiting:
        parent = waiting.pop()
        found.append(parent)
        for path in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                waiting += map(int, path.read_text().split())
            except OSError:  # it has just ended
                continue
    return found


def _network(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""


def _words(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
