"""What became of the streams of a cell: each fault in the column it belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from loadgen.checker.verdict import FaultKind
from tests.reliability.chaos.fault_matrix import Cell
from tests.reliability.load.streams import StreamAnswer

SHOWN_TOKENS = 4
"""Of two answers, from where they differ."""


@dataclass(slots=True)
class CellResult:
    """One cell over all its runs.

    Attributes:
        done: Runs that went as they should: the harm came when it was to come.
        streams: How many were under way.
        waiting: How many of them had no token yet when the blow was struck.
        rebuilt: How many of them were begun anew.
        lost: Ended without all of their tokens.
        duplicated: Got a token twice.
        differing: Said something else than the undisturbed run.
        hung: Did not end in time.
        not_struck: Why no harm was done in a run, or too late.
        not_restored: Why the service was not itself again afterwards.
        recovery_s: Longest silence of each stream that was begun anew.
        faults: The first few in words.
    """

    cell: Cell
    runs: int = 0
    done: int = 0
    streams: int = 0
    waiting: int = 0
    rebuilt: int = 0
    lost: int = 0
    duplicated: int = 0
    differing: int = 0
    hung: int = 0
    not_struck: list[str] = field(default_factory=list)
    not_restored: list[str] = field(default_factory=list)
    recovery_s: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def is_ok(self) -> bool:
        bad = self.lost + self.duplicated + self.differing + self.hung
        return self.runs > 0 and bad == 0 and not self.troubles

    @property
    def troubles(self) -> list[str]:
        """What was wrong with runs rather than with streams."""
        return [f"not struck: {reason}" for reason in self.not_struck] + self.not_restored

    def add(
        self, answers: Sequence[StreamAnswer], reference: Sequence[list[int]], *, injected_s: float
    ) -> None:
        """Judge the streams of one run against those of an undisturbed one."""
        self.runs += 1
        for answer in answers:
            self.streams += 1
            self.waiting += answer.first_token_s > injected_s
            kinds = {fault.kind for fault in answer.verdict.faults}
            if not answer.is_ok:
                self.faults += [str(f) for f in answer.verdict.faults[:2]]
            if FaultKind.TIMEOUT in kinds:
                self.hung += 1
            elif FaultKind.DUPLICATE in kinds:
                self.duplicated += 1
            elif not answer.is_ok:
                self.lost += 1
            elif answer.token_ids != reference[answer.spec.index]:
                self.differing += 1
                self.faults.append(_difference(answer, reference[answer.spec.index]))
            if answer.num_rebuilds:
                self.rebuilt += 1
                self.recovery_s.append(answer.longest_silence_s(injected_s))

    def percentile_s(self, share: float) -> float | None:
        """Of the recovery times; None where nothing was begun anew."""
        return float(np.percentile(self.recovery_s, 100 * share)) if self.recovery_s else None


def _difference(answer: StreamAnswer, wanted: list[int]) -> str:
    got = answer.token_ids
    pairs = zip(got, wanted, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(got), len(wanted)))
    spec = answer.spec
    return (
        f"stream {spec.index} ({'gRPC' if answer.is_grpc else 'HTTP'}, T {spec.temperature:g}, "
        f"{spec.extra}, {answer.num_rebuilds} rebuilds) differs from token {at} of {len(got)} on: "
        f"{got[max(0, at - 1) : at + SHOWN_TOKENS]} is not "
        f"{wanted[max(0, at - 1) : at + SHOWN_TOKENS]}; {answer.request_id}, "
        f"{answer.verdict.extension}"
    )
