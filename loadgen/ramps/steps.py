"""Judge the steps of a ramp: while it runs, to stop it, and afterwards, for the figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from loadgen.checker import Outcome
from loadgen.load.workload import RequestSpec
from loadgen.ramps.levels import Step
from loadgen.report.metrics import MAX_LAG_S, Distribution, LoadSlo, is_good, tpot_s, ttft_s
from loadgen.runner import Record

LAST_FRAME_S = 1.0  # between the last token and the end of an answer, usage frame and closing
MIN_REQUESTS = 30  # percentiles of fewer say little


@dataclass(frozen=True, slots=True)
class Goal:
    """What a step must keep.

    Attributes:
        slo: Both limits are set, so that a request that is late can be told before it ends.
        share: Of the requests that must be good.
    """

    slo: LoadSlo
    share: float

    def latest_s(self, spec: RequestSpec) -> float:
        """Return how long a request can take at most if it is to be good."""
        assert self.slo.ttft_s is not None and self.slo.tpot_s is not None
        return self.slo.ttft_s + self.slo.tpot_s * (spec.max_tokens - 1) + LAST_FRAME_S

    def is_kept(self, num_good: int, num_requests: int) -> bool:
        # The tolerance is for shares such as 0.9 that have no exact float.
        return num_good >= self.share * num_requests - 1e-9


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Figures of one step; all but those per second are of the requests due in its counted stretch.

    Attributes:
        requests: Sent, whatever became of them.
        unfinished: Given up when the ramp was over.
        output_tokens_per_s: Tokens that came in the counted stretch, of requests that passed.
        requests_per_s: Requests that passed and ended in it.
        goodput_rps: Good requests that ended in it, over its length.
        kept: Whether the goal was; None where nothing was sent.
        generator_is_slow: It sent late, so the step says nothing about the service.
    """

    step: Step
    requests: int
    ok: int
    refused: int
    failed: int
    unfinished: int
    output_tokens_per_s: float
    requests_per_s: float
    goodput_rps: float
    good_share: float
    ttft: Distribution
    tpot: Distribution
    kept: bool | None
    generator_is_slow: bool

    @property
    def error_share(self) -> float:
        """Failed, refused and unfinished requests over all."""
        return (self.requests - self.ok) / self.requests if self.requests else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {"kind": "step", **asdict(self), "error_share": self.error_share}


def figures_of(
    step: Step, records: Sequence[Record], *, start_s: float, num_sent: int, goal: Goal
) -> StepFigures:
    """Compute the figures of a step.

    Args:
        records: Of the whole ramp, judged.
        start_s: Of the ramp, on the run's clock.
        num_sent: Requests due in the counted stretch and sent.
    """
    from_s, to_s = start_s + step.counted_from_s, start_s + step.to_s
    due = [record for record in records if from_s <= record.scheduled_s < to_s]
    ok = [record for record in due if record.verdict.outcome is Outcome.OK]
    num_good = sum(is_good(record, goal.slo) for record in due)
    passed = [record for record in records if record.verdict.outcome is Outcome.OK]
    tokens = sum(
        write.num_tokens
        for record in passed
        if record.sent_s < to_s and record.ended_s >= from_s
        for choice in record.verdict.choices
        for write in choice.writes
        if from_s <= write.time_s < to_s
    )
    lag = Distribution.of(record.lag_s for record in due)
    return StepFigures(
        step=step,
        requests=num_sent,
        ok=len(ok),
        refused=sum(record.verdict.outcome is Outcome.REFUSED for record in due),
        failed=sum(record.verdict.outcome is Outcome.FAILED for record in due),
        unfinished=num_sent - len(due),
        output_tokens_per_s=tokens / step.counted_s,
        requests_per_s=sum(from_s <= r.ended_s < to_s for r in passed) / step.counted_s,
        goodput_rps=sum(from_s <= r.ended_s < to_s and is_good(r, goal.slo) for r in passed)
        / step.counted_s,
        good_share=num_good / num_sent if num_sent else 0.0,
        ttft=Distribution.of(v for r in ok if (v := ttft_s(r)) is not None),
        tpot=Distribution.of(v for r in ok if (v := tpot_s(r)) is not None),
        kept=goal.is_kept(num_good, num_sent) if num_sent else None,
        generator_is_slow=lag.p99 is not None and lag.p99 > MAX_LAG_S,
    )


@dataclass(frozen=True, slots=True)
class RampCapacity:
    """What a ramp found.

    Attributes:
        kept: The highest level up to which every step kept the goal; None: the first one broke it.
        broken: The lowest level that broke it; None: none did.
    """

    kept: float | None
    broken: float | None


def capacity_of(figures: Sequence[StepFigures]) -> RampCapacity:
    """Return between which levels the goal breaks; steps without requests say nothing."""
    kept: float | None = None
    for one in figures:
        if one.kept is False:
            return RampCapacity(kept, one.step.level)
        if one.kept:
            kept = one.step.level
    return RampCapacity(kept, None)


@dataclass(slots=True)
class _Tally:
    step: Step
    num_sent: int = 0
    num_bad: int = 0
    in_flight: dict[int, tuple[RequestSpec, float]] = field(default_factory=dict)

    def is_concluded(self, now_s: float, goal: Goal) -> bool:
        """Whether it is certain what has become of the step, once all of it was sent."""
        late = sum(now_s - at_s > goal.latest_s(spec) for spec, at_s in self.in_flight.values())
        if late == len(self.in_flight):
            return True
        return not goal.is_kept(self.num_sent - self.num_bad - late, self.num_sent)


class RampWatch:
    """The runner's observer: knows at any time which steps are concluded.

    A request still running that can no longer keep the limits counts as bad at once, so that an
    overloaded service is not loaded further until its slowest answer has come.

    Attributes:
        num_users: How many have begun.
    """

    def __init__(self, steps: Sequence[Step], goal: Goal) -> None:
        self.goal = goal
        self.start_s = 0.0
        self.records: list[Record] = []
        self.num_users = 0
        self._tallies = [_Tally(step) for step in steps]
        self._num_concluded = 0
        self._of_request: dict[int, _Tally] = {}

    def began(self, start_s: float) -> None:
        self.start_s = start_s

    def sent(self, spec: RequestSpec, scheduled_s: float) -> None:
        self.num_users += spec.turn == 0
        tally = self._tally(scheduled_s)
        if tally is not None:
            tally.num_sent += 1
            tally.in_flight[spec.index] = (spec, scheduled_s)
            self._of_request[spec.index] = tally

    def ended(self, record: Record) -> None:
        self.records.append(record)
        tally = self._of_request.pop(record.spec.index, None)
        if tally is not None:
            del tally.in_flight[record.spec.index]
            tally.num_bad += not is_good(record, self.goal.slo)

    def conclude(self, now_s: float) -> list[StepFigures]:
        """Return the figures of the steps that are concluded since the last call, in order."""
        found = []
        while self._num_concluded < len(self._tallies):
            tally = self._tallies[self._num_concluded]
            is_over = now_s >= self.start_s + tally.step.to_s
            if not is_over or not tally.is_concluded(now_s, self.goal):
                break
            self._num_concluded += 1
            found.append(self._figures(tally))
        return found

    @property
    def concluded_s(self) -> float:
        """The end of the last step that is concluded, on the run's clock; 0: none is."""
        concluded = self._tallies[: self._num_concluded]
        return self.start_s + concluded[-1].step.to_s if concluded else 0.0

    def figures(self, until_s: float) -> list[StepFigures]:
        """Return the figures of all steps that were over by then, from what is known now."""
        return [
            self._figures(tally)
            for tally in self._tallies
            if self.start_s + tally.step.to_s <= until_s
        ]

    def _figures(self, tally: _Tally) -> StepFigures:
        return figures_of(
            tally.step, self.records, start_s=self.start_s, num_sent=tally.num_sent, goal=self.goal
        )

    def _tally(self, time_s: float) -> _Tally | None:
        for tally in self._tallies:
            step = tally.step
            if self.start_s + step.counted_from_s <= time_s < self.start_s + step.to_s:
                return tally
        return None
