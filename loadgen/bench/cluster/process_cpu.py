"""CPU time of the processes of a service on this machine, by what they do (Linux)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

# What a process's title begins with → its part; the first match counts.
PARTS = (
    ("ray::DecodeReplica", "decode"),
    ("ray::PrefillReplica", "prefill"),
    ("ray::MixedReplica", "mixed"),
    ("ray::ServeReplica", "ingress"),
    ("ray::ProxyActor", "proxy"),
    ("haproxy", "proxy"),
    ("ray::HAProxyManager", "proxy"),
    ("ray::Scheduler", "scheduler"),
    ("ray::Controller", "controller"),
    ("ray::", "ray"),
)
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def service_cpu_s(pid: int) -> dict[str, float]:
    """Return part → CPU seconds so far, over the process `pid` and all its descendants."""
    totals: dict[str, float] = {}
    for part, cpu_s, _ in _members(pid):
        totals[part] = totals.get(part, 0.0) + cpu_s
    return totals


def service_processes(pid: int) -> dict[str, list[int]]:
    """Return part → process ids, over the process `pid` and all its descendants."""
    found: dict[str, list[int]] = {}
    for part, _, member in _members(pid):
        found.setdefault(part, []).append(member)
    return found


def _members(pid: int) -> Iterator[tuple[str, float, int]]:
    """Part, CPU seconds and id of a process and of all its descendants."""
    parents: dict[int, list[int]] = {}
    stats: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and (stat := _stat(entry)) is not None:
            parent, cpu_s = stat
            parents.setdefault(parent, []).append(int(entry.name))
            stats[int(entry.name)] = cpu_s
    waiting = [pid]
    while waiting:
        member = waiting.pop()
        waiting += parents.get(member, [])
        if member in stats:
            yield _part(member), stats[member], member


def _stat(entry: Path) -> tuple[int, float] | None:
    """Return (parent, CPU seconds); None when the process is gone."""
    try:
        # The name stands in parentheses and may hold anything.
        fields = (entry / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[1]), (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def _part(pid: int) -> str:
    try:
        # Ray's processes have their title there, others the path of their program.
        title = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0", 1)[0].decode()
    except (OSError, UnicodeDecodeError):
        title = ""
    if title.startswith("/"):
        title = Path(title).name
    return next((part for prefix, part in PARTS if title.startswith(prefix)), "ray")
