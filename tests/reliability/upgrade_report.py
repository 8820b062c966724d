"""What an upgrade under load is held to, and how it is told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.table import Table

from loadgen.report.experiment import table_of
from tests.reliability.load.mixed_load import Silence, Tally

KINDS = ("sigterm", "front", "replace", "scale")
NODE = "node"


@dataclass(slots=True)
class Round:
    """One round: what was done, and how long it was until all was whole again."""

    kind: str
    took_s: float
    trouble: str = ""
    began_s: float = 0.0

    def longest(self, silences: Sequence[Silence], *, is_first: bool) -> float:
        """Seconds of the longest silence while it lasted: before a first token, or after it."""
        ended_s = self.began_s + self.took_s
        return max(
            (
                s.seconds
                for s in silences
                if s.is_first is is_first and s.began_s < ended_s and s.ended_s > self.began_s
            ),
            default=0.0,
        )


@dataclass(slots=True)
class Found:
    """All rounds.

    Attributes:
        farewell: Streams under way at the last SIGTERM.
        exit_s: From it to the end of the process.
        nodes: Requests of the service on several nodes; None where there was none.
        no_nodes: Why not.
    """

    rounds: list[Round] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    farewell: Tally = field(default_factory=Tally)
    exit_s: float | None = None
    nodes: Tally | None = None
    no_nodes: str = ""

    def silences_s(self, kind: str, *, is_first: bool) -> list[float]:
        """The longest of each round of a kind."""
        tally = self.nodes if kind == NODE else self.tally
        silences = tally.silences if tally is not None else []
        return [r.longest(silences, is_first=is_first) for r in self.rounds if r.kind == kind]


def judge(found: Found, *, wanted_rounds: int, wanted_nodes: int = 0) -> list[str]:
    """What did not hold; empty: everything did."""
    failures = [f"{r.kind}: {r.trouble}" for r in found.rounds if r.trouble]
    num_rounds = sum(r.kind != NODE for r in found.rounds)
    if num_rounds < wanted_rounds:
        failures.append(f"{wanted_rounds - num_rounds} rounds were not run")
    num_nodes = len(found.rounds) - num_rounds
    if num_nodes < wanted_nodes and not found.no_nodes:
        failures.append(f"{wanted_nodes - num_nodes} nodes did not leave")
    if not found.tally.is_ok:
        failures += found.tally.faults[:5] or ["requests were refused, or none was sent"]
    if not found.farewell.is_ok:
        failures += [f"at the end: {f}" for f in found.farewell.faults[:3]] or [
            "no stream was under way"
        ]
    if found.nodes is not None and not found.nodes.is_ok:
        failures += [f"nodes: {f}" for f in found.nodes.faults[:3]] or [
            "nodes: refused, or unasked"
        ]
    if found.exit_s is None:
        failures.append("the service did not end after SIGTERM")
    return failures


def figures(found: Found) -> dict[str, Any]:
    """For the last line."""
    tally = found.tally
    return {
        "rounds": dict(Counter(r.kind for r in found.rounds)),
        "round_s": {
            kind: [round(r.took_s, 1) for r in found.rounds if r.kind == kind]
            for kind in (*KINDS, NODE)
        },
        "answers": tally.ok,
        "failed": tally.failed,
        "refused": tally.refused,
        "differing": tally.differing,
        "rebuilt": tally.rebuilt,
        "worst_silence_s": round(tally.worst_silence_s, 2),
        "silence_s": _by_kind(found, is_first=False),
        "first_token_s": _by_kind(found, is_first=True),
        "farewell": {
            "ok": found.farewell.ok,
            "failed": found.farewell.failed,
            "worst_silence_s": round(found.farewell.worst_silence_s, 2),
        },
        "nodes": found.no_nodes
        or (found.nodes and {"ok": found.nodes.ok, "failed": found.nodes.failed}),
        "exit_s": found.exit_s and round(found.exit_s, 1),
    }


def _by_kind(found: Found, *, is_first: bool) -> dict[str, list[float]]:
    return {
        kind: [round(seconds, 2) for seconds in found.silences_s(kind, is_first=is_first)]
        for kind in (*KINDS, NODE)
    }


def table(found: Found) -> Table:
    """A line for each kind of round."""
    times = {k: [r.took_s for r in found.rounds if r.kind == k] for k in (*KINDS, NODE)}
    columns: dict[str, Callable[[str], object]] = {
        "round": lambda kind: kind,
        "times": lambda kind: len(times[kind]),
        "seconds P50": lambda kind: f"{np.median(times[kind]):.1f}",
        "seconds max": lambda kind: f"{max(times[kind]):.1f}",
        "longest silence s": lambda kind: f"{max(found.silences_s(kind, is_first=False)):.2f}",
        "longest wait for a first token s": lambda kind: (
            f"{max(found.silences_s(kind, is_first=True)):.2f}"
        ),
        "trouble": lambda kind: sum(bool(r.trouble) for r in found.rounds if r.kind == kind),
    }
    return table_of([kind for kind in times if times[kind]], columns)
