"""What the processes of a service hold: memory and file descriptors, over time (Linux)."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
NUM_BLOCKS = 12
"""Samples are averaged in so many blocks before a line is fitted: neighbours are alike, and would
make the line look surer than it is."""
MIN_SAMPLES = 2 * NUM_BLOCKS
SIGMAS = 3.0
MIN_GROWTH_BYTES = 4 << 20
S_PER_H = 3600.0


@dataclass(frozen=True, slots=True)
class Holding:
    """One process at one moment.

    Attributes:
        own_bytes: Resident memory that it does not share with others.
        fds: Open file descriptors by what they are: socket, pipe, eventfd, file …
    """

    own_bytes: int
    fds: Mapping[str, int]

    @property
    def num_fds(self) -> int:
        return sum(self.fds.values())


def holding(pid: int) -> Holding | None:
    """What a process holds; None when it is gone."""
    try:
        _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
        return Holding((resident - shared) * PAGE_BYTES, _fds(pid))
    except OSError:
        return None


def _fds(pid: int) -> Mapping[str, int]:
    kinds = Counter[str]()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            kinds[_kind(os.readlink(f"/proc/{pid}/fd/{name}"))] += 1
    return kinds


def _kind(target: str) -> str:
    """`socket:[5]` → socket, `anon_inode:[eventfd]` → eventfd, `/a/path` → file."""
    kind, _, rest = target.partition(":")
    if target.startswith("/"):
        return "file"
    return rest.strip("[]") if kind == "anon_inode" else kind


@dataclass(slots=True)
class Series:
    """What one process held over time."""

    kind: str
    times_s: list[float] = field(default_factory=list)
    own_bytes: list[int] = field(default_factory=list)
    num_fds: list[int] = field(default_factory=list)

    def add(self, now_s: float, held: Holding) -> None:
        self.times_s.append(now_s)
        self.own_bytes.append(held.own_bytes)
        self.num_fds.append(held.num_fds)

    def memory_slope(self, settling_share: float, settling_s: float) -> Slope | None:
        """The line through its memory, without the time in which it settles.

        Args:
            settling_share: Of its time, at least.
            settling_s: Seconds, at least.
        """
        num_settling = int(settling_share * len(self.times_s))
        while num_settling < len(self.times_s) and (
            self.times_s[num_settling] - self.times_s[0] < settling_s
        ):
            num_settling += 1
        return slope(self.times_s[num_settling:], self.own_bytes[num_settling:])


@dataclass(frozen=True, slots=True)
class Slope:
    """A fitted line.

    Attributes:
        per_h: Bytes per hour.
        error: Standard error of that.
        grown_bytes: Along the line, over the time that was looked at.
    """

    per_h: float
    error: float
    grown_bytes: float

    def is_leak(self, limit_per_h: float) -> bool:
        """Whether the growth is above the limit for sure, and more than an allocator's whim."""
        is_sure = self.per_h - SIGMAS * self.error > limit_per_h
        return is_sure and self.grown_bytes > MIN_GROWTH_BYTES


def slope(times_s: Sequence[float], values: Sequence[float]) -> Slope | None:
    """Fit a line; None for fewer than `MIN_SAMPLES`."""
    if len(times_s) < MIN_SAMPLES:
        return None
    x = np.array([b.mean() for b in np.array_split(np.asarray(times_s, float), NUM_BLOCKS)])
    y = np.array([b.mean() for b in np.array_split(np.asarray(values, float), NUM_BLOCKS)])
    centred = x - x.mean()
    spread = float((centred**2).sum())
    per_s = float((centred * y).sum()) / spread
    residuals = y - y.mean() - per_s * centred
    error = float(np.sqrt((residuals**2).sum() / (NUM_BLOCKS - 2) / spread))
    return Slope(per_s * S_PER_H, error * S_PER_H, per_s * (times_s[-1] - times_s[0]))
