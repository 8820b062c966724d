"""When the first exit drafts tokens for a batch, which rows go on, and when they are verified.

Rows that must not lose anything can still gain by an exit: the first segment and its head draft
tokens, and one pass through the other segments verifies all drafts of all rows. With

    c_d(n)  a pass of n rows through the first segment and its head,
    c_v(n)  a pass of n positions through the other segments and the last head,
    c_f(n)  a pass of n rows through everything,

a full pass yields n tokens for c_f(n); a draft makes the second part of the work larger and rarer.
Two decisions, both by measured times:

- *Whether to draft at all* for N rows: the throughput of the best number of drafting passes, with
  the shares of rows that go on and of drafts that agree as they were of late, against N / c_f(N).
- *Whether to draft on*: a further pass over the rows whose drafts all agree so far with
  probability s is worth Σ s tokens. At the throughput λ there is, a token is worth 1/λ seconds, so
  it pays where Σ s / λ > c_d(n) + c_v(P + n) − c_v(P), with P positions to be verified anyway. Rows
  that do not pay for themselves stay behind first.

How often a draft agrees is learnt by the confidence with which it was made, for greedy and for
drawn tokens apart.

Source: self-speculative decoding (Zhang et al., "Draft & Verify", ACL 2024; LayerSkip, §3.3) verify
after a fixed number of drafts or below a fixed confidence; the decision by marginal throughput is
ours.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from quadriga.interfaces import MAX_DRAFTED
from quadriga.policies.drex.costs import SegmentCosts
from quadriga.policies.rebatching import Range

_EDGES = (0.2, 0.4, 0.6, 0.8, 0.9, 0.96, 0.99, 0.998)  # of confidence
_PRIORS = (0.1, 0.3, 0.5, 0.7, 0.85, 0.9, 0.96, 0.98, 0.99)  # how often a draft agrees
_PRIOR_WEIGHT = 8.0  # tokens
_RATE = 0.01  # a token, of the moving averages
_GAIN = 1.01  # factor by which drafting must beat full passes
_REFRESH = 32  # passes for which forecasts are kept
_EXPLORE_EVERY = 256  # full passes between two drafts that are made to learn
_LONGEST_OVERHEAD_S = 2e-3  # between two passes; beyond it the replica was idle or disturbed


class DraftAction(Enum):
    """What the rows that draft do next."""

    FULL = "full"  # new tokens run the whole model, nothing is drafted
    DRAFT = "draft"  # new tokens and drafts run the first segment
    VERIFY = "verify"  # all that is drafted runs the other segments


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """A decision.

    Attributes:
        least: Of those that have drafted, rows go on whose drafts agree with this probability.
    """

    action: DraftAction
    least: float = 0.0


@dataclass(frozen=True, slots=True)
class _Forecast:
    """What N rows may yield, in tokens per second."""

    full: float
    drafting: float


class Drafter:
    """The decisions of one decode batch; called on its thread.

    Args:
        costs: Shared with the rebatching policy; its segments are the runner's.
        overhead_s: First guess of what a pass costs beside the runner's own time.
    """

    def __init__(self, costs: SegmentCosts, overhead_s: float = 50e-6) -> None:
        self.costs = costs
        self.overhead_s = overhead_s
        self._agrees = [list(_PRIORS), list(_PRIORS)]
        self._seen = [[_PRIOR_WEIGHT] * len(_PRIORS) for _ in range(2)]
        self._goes_on = 0.8  # share of the drafting rows that draft once more
        self._stands = 0.95  # share of the verified drafts that agree
        self._tokens_each = 0.0
        self._forecasts: dict[int, _Forecast] = {}
        self._draft_s: dict[int, float] = {}
        self._verify_s: dict[int, float] = {}
        self._until_refresh = 0
        self._until_explore = _EXPLORE_EVERY
        self._idle_since_s: float | None = None
        self._pass_from_s = 0.0

    def resized(self, costs: SegmentCosts) -> Drafter:
        """The policy over the costs of other segments, the first of which is the same."""
        other = Drafter(costs, self.overhead_s)
        other._agrees, other._seen = self._agrees, self._seen
        other._goes_on, other._stands = self._goes_on, self._stands
        return other

    def choose(
        self,
        fresh: int,
        pending: int,
        positions: int,
        survivals: Sequence[float],
        num_tokens: int,
        now_s: float,
        budget_s: float = float("inf"),
    ) -> DraftChoice:
        """What the rows do next.

        Args:
            fresh: Rows with a new token.
            pending: Rows that have drafted, or whose token waits at the first exit.
            positions: To be verified for them.
            survivals: Of those of them that may draft on, the probability that all agree so far.
            num_tokens: Context of all rows, together.
            budget_s: Time until the most urgent of them should have its token.
        """
        self._begin(now_s, num_tokens / (fresh + pending))
        forecast = self._forecast(fresh + pending)
        if not pending:
            return DraftChoice(self._first(fresh, forecast, budget_s))
        going = sorted(survivals, reverse=True)
        value_s = 1.0 / max(forecast.full, forecast.drafting)
        least = self._least(fresh, positions, going, value_s)
        while going and going[-1] < least:
            going.pop()
        count = fresh + len(going)
        if not count:
            return DraftChoice(DraftAction.VERIFY)
        more_s = self._drafts_s(count) + self._verified_s(positions + count)
        if more_s > budget_s or (
            (fresh + sum(going)) * value_s <= more_s - self._verified_s(positions)
        ):
            return DraftChoice(DraftAction.VERIFY)
        return DraftChoice(DraftAction.DRAFT, least)

    def _first(self, fresh: int, forecast: _Forecast, budget_s: float) -> DraftAction:
        """Whether rows that all have a new token begin to draft."""
        if self._drafts_s(fresh) + self._verified_s(fresh) > budget_s:
            return DraftAction.FULL
        if forecast.drafting > _GAIN * forecast.full:
            return DraftAction.DRAFT
        self._until_explore -= 1
        if self._until_explore > 0:
            return DraftAction.FULL
        self._until_explore = _EXPLORE_EVERY
        return DraftAction.DRAFT

    def _least(self, fresh: int, positions: int, going: Sequence[float], value_s: float) -> float:
        """The probability below which a row costs more than it brings: half of them are compared
        with all."""
        count = fresh + len(going)
        half = count // 2
        if not half or not going:
            return 0.0
        more_s = self._drafts_s(count) - self._drafts_s(half)
        more_s += self._verified_s(positions + count) - self._verified_s(positions + half)
        return min(max(more_s, 0.0) / (count - half) / value_s, 1.0)

    def judge(self, confidence: float, *, is_drawn: bool) -> tuple[int, float]:
        """What to think of a draft made with a confidence.

        Returns:
            A mark for `verified`, and the probability that the draft agrees.
        """
        mark = bisect_right(_EDGES, confidence) + is_drawn * len(_PRIORS)
        return mark, self._agrees[is_drawn][mark - is_drawn * len(_PRIORS)]

    def verified(self, marks: Sequence[int], num_agreed: int) -> None:
        """Learn from a row's drafts, all of which were run.

        Args:
            marks: Of its drafts, as `judge` gave them.
            num_agreed: The first so many agreed; what follows one that did not says nothing.
        """
        for place, mark in enumerate(marks[: num_agreed + 1]):
            kind, bucket = divmod(mark, len(_PRIORS))
            agreed = float(place < num_agreed)
            self._seen[kind][bucket] += 1.0
            rate = max(_RATE, 1.0 / self._seen[kind][bucket])
            self._agrees[kind][bucket] += rate * (agreed - self._agrees[kind][bucket])
            self._stands += _RATE * (agreed - self._stands)

    def drafted(self, count: int, num_sure: int) -> None:
        """A pass drafted for `count` rows; so many of the drafts are likely to agree."""
        self._goes_on += min(0.2, _RATE * count) * (num_sure / count - self._goes_on)

    def observe(
        self, ran: Range, positions: int, num_tokens: int, seconds: float, filled: int = 0
    ) -> None:
        """A pass over so many positions drafted, or verified."""
        self.costs.observe(
            ran.first, ran.stop, positions, num_tokens, seconds, tests=ran.tests, filled=filled
        )
        self._idle_since_s = self._pass_from_s + seconds

    def _begin(self, now_s: float, tokens_each: float) -> None:
        """Learn what a pass costs beside the runner's time; let old forecasts go."""
        if self._idle_since_s is not None:
            between_s = now_s - self._idle_since_s
            if 0.0 <= between_s < _LONGEST_OVERHEAD_S:
                self.overhead_s += 0.05 * (between_s - self.overhead_s)
            self._idle_since_s = None
        self._pass_from_s = now_s
        self._until_refresh -= 1
        if self._until_refresh < 0:
            self._until_refresh = _REFRESH
            self._tokens_each = tokens_each
            self._forecasts.clear()
            self._draft_s.clear()
            self._verify_s.clear()

    def _forecast(self, rows: int) -> _Forecast:
        found = self._forecasts.get(rows)
        if found is None:
            found = self._forecasts[rows] = self._make_forecast(rows)
        return found

    def _make_forecast(self, rows: int) -> _Forecast:
        """Rows in a steady state: `_goes_on` of them draft once more, `_stands` of drafts agree."""
        num_tokens = rows * self._tokens_each
        full_s = self.costs.forecast_s(0, self.costs.num_segments, rows, num_tokens, tests=False)
        best, drafting_s, tokens, positions, stands = 0.0, 0.0, 0.0, 0.0, 1.0
        running = float(rows)
        for _ in range(MAX_DRAFTED + 1):
            drafting_s += self._drafts_s(max(1, round(running)))
            positions += running
            tokens += running * stands
            best = max(best, tokens / (drafting_s + self._verified_s(round(positions))))
            running *= self._goes_on
            stands *= self._stands
        return _Forecast(rows / (full_s + self.overhead_s), best)

    def _drafts_s(self, count: int) -> float:
        seconds = self._draft_s.get(count)
        if seconds is None:
            costs, tokens = self.costs, count * self._tokens_each
            seconds = costs.forecast_s(0, 1, count, tokens, tests=True) + self.overhead_s
            self._draft_s[count] = seconds
        return seconds

    def _verified_s(self, count: int) -> float:
        if not count:
            return 0.0
        seconds = self._verify_s.get(count)
        if seconds is None:
            costs, tokens = self.costs, count * self._tokens_each
            seconds = costs.forecast_s(1, costs.num_segments, count, tokens, tests=False)
            seconds += self.overhead_s
            self._verify_s[count] = seconds
        return seconds
