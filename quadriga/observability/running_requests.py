"""The requests that run longest, of all ingresses: for the live page and `loadgen watch`."""

from __future__ import annotations

from itertools import chain
from operator import itemgetter
from typing import Any

MOST_SHOWN = 20
"""However many run, each ingress says so many of its own: the longest of all are among them."""
KEPT_S = 10.0
"""What an ingress said counts for so long."""


class RunningRequests:
    """What each ingress said last; for the rows see `Request.running`."""

    def __init__(self) -> None:
        self._said: dict[str, tuple[float, list[dict[str, Any]]]] = {}

    def push(self, ingress_id: str, rows: list[dict[str, Any]], *, now_s: float) -> None:
        """Take what an ingress says, and forget those that are silent."""
        self._said[ingress_id] = (now_s, rows)
        self._said = {name: s for name, s in self._said.items() if now_s - s[0] <= KEPT_S}

    def longest(self, *, now_s: float) -> list[dict[str, Any]]:
        """Return the rows of at most `MOST_SHOWN` sequences, the longest running first."""
        recent = sorted((at_s, name) for name, (at_s, _) in self._said.items())
        rows = chain(*(self._said[name][1] for at_s, name in recent if now_s - at_s <= KEPT_S))
        last = {row["sequence_id"]: row for row in rows}  # of one taken over from a dead ingress
        return sorted(last.values(), key=itemgetter("running_s"), reverse=True)[:MOST_SHOWN]
