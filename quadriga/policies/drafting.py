"""When the first exit drafts tokens for a batch, which rows go on, and when they are verified.

Rows that must not lose anything can still gain by an exit: the first segment and its head draft
tokens, and one pass through the other segments verifies all drafts of all rows. Two decisions:

- *Whether to draft at all*: by what a token took of late, with drafts and without, for about so
  many rows. Measured, as far as it can be: a segment that runs again and again finds its weights in
  a cache. Before that it is forecast, by costs and by how often drafts agree, and the forecast
  weighs as much as four rounds. The worse kind of rounds is tried again as soon as what it is
  expected to lose was saved up, a small share of the time; so no more than that share is ever lost.
- *Whether to draft on*. With c_d(n) for n rows through the first segment and its head, and c_v(n)
  for n positions through the others, a further pass over rows whose drafts all agree so far with
  probability s is worth Σ s tokens. A token is worth the v seconds that it takes at best. So it
  pays where v · Σ s > c_d(n) + c_v(P + n) − c_v(P), with P positions to be verified anyway, or
  where several such passes do together: c_v may have steps. Rows that do not pay for themselves
  stay behind.

How often a draft agrees is learnt by the confidence with which it was made, for greedy and for
drawn tokens apart.

Source: self-speculative decoding (Zhang et al., "Draft & Verify", ACL 2024; LayerSkip, §3.3) verify
after a fixed number of drafts or below a fixed confidence; the decision by marginal throughput is
ours.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import inf, log2

from quadriga.interfaces import MAX_DRAFTED, DraftPlan
from quadriga.policies.drex.costs import SegmentCosts
from quadriga.policies.rebatching import Range

_EDGES = (0.2, 0.4, 0.6, 0.8, 0.9, 0.96, 0.99, 0.998)  # of confidence
_PRIORS = (0.1, 0.3, 0.5, 0.7, 0.85, 0.9, 0.96, 0.98, 0.99)  # how often a draft agrees
_PRIOR_CHANCE = 0.85
_PRIOR_WEIGHT = 8.0  # tokens
_RATE = 0.01  # a token, of the moving averages
_SPARED_RATE = 0.05  # a round, of what a plan spares
_TRIALS = 4  # rounds of each kind, before one that was disturbed is told from others
_DISTURBED = 3.0  # a round that takes so many times the mean, or more, counts as so many times it
_FORECAST_ROUNDS = 4  # that a forecast weighs as much as
_EXPLORE_SHARE = 0.005  # of the time, that rounds of the worse kind may lose
_HELD_ROUNDS = 16  # full passes over the same rows, for which one decision stands
_REFRESH = 32  # passes for which forecasts are kept
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
        times: Full passes over the same rows that need no further decision, this one included.
    """

    action: DraftAction
    least: float = 0.0
    times: int = 1


@dataclass(slots=True)
class _RoundKind:
    """What a token takes in rounds of one kind.

    Attributes:
        tokens, seconds: That a round gives and takes: a forecast, into which measured rounds are
            mixed.
        rounds: So many were.
    """

    tokens: float = 1.0
    seconds: float = 0.0
    rounds: int = 0

    def add(self, tokens: int, seconds: float) -> None:
        """A round took so long. One that was disturbed counts as one that was a little."""
        if self.rounds >= _TRIALS:
            seconds = min(seconds, _DISTURBED * self.seconds)
        self.rounds += 1
        rate = max(0.05, 1.0 / (_FORECAST_ROUNDS + self.rounds))
        self.seconds += rate * (seconds - self.seconds)
        self.tokens += rate * (tokens - self.tokens)

    @property
    def token_s(self) -> float:
        """What a token takes: all seconds over all tokens, as rounds with few take longer each."""
        return self.seconds / self.tokens


@dataclass(slots=True)
class _Regime:
    """Both kinds of rounds, for about so many rows; and of which kind the last was."""

    full: _RoundKind = field(default_factory=_RoundKind)
    drafting: _RoundKind = field(default_factory=_RoundKind)
    drafted_last: bool | None = None

    def pays(self) -> bool:
        """Whether drafts are faster."""
        return self.drafting.token_s < self.full.token_s

    def loss_s(self) -> float:
        """What a round of the worse kind is expected to lose."""
        worse, better = self.full, self.drafting
        if not self.pays():
            worse, better = better, worse
        return worse.tokens * (worse.token_s - better.token_s)

    @property
    def token_s(self) -> float:
        """What a token takes at best."""
        return min(self.full.token_s, self.drafting.token_s)


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
        self._chance = _PRIOR_CHANCE  # that a draft agrees, whatever its confidence
        self._regimes: dict[int, _Regime] = {}
        self._savings_s = 0.0  # that rounds of the worse kind may lose
        self._round_s = 0.0  # of the round under way
        self._is_trial = False  # it drafts, though that is thought to be slower
        self._is_cut = False  # it was ended before its drafts were as long as they are worth
        self._tokens_each = 0.0
        self._first_s: dict[int, float] = {}
        self._verify_s: dict[int, float] = {}
        self._needed: dict[tuple[int, int, int], list[list[float]]] = {}
        self._until_refresh = 0
        self._idle_since_s: float | None = None
        self._pass_from_s = 0.0

    def resized(self, costs: SegmentCosts) -> Drafter:
        """The policy over the costs of other segments, the first of which is the same."""
        other = Drafter(costs, self.overhead_s)
        other._agrees, other._seen, other._chance = self._agrees, self._seen, self._chance
        return other

    def choose(
        self,
        fresh: int,
        pending: int,
        positions: int,
        survivals: Sequence[float],
        num_tokens: int,
        now_s: float,
        budget_s: float = inf,
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
        regime = self._regime(fresh + pending)
        if not pending:
            least_s = 2 * self._drafts_s(fresh) + self._verified_s(2 * fresh)
            explores = self._explores(regime)
            drafts = regime.pays() is not explores
            is_tight = budget_s < inf and self._savings_s < 0.0  # rounds were cut short of late
            self._is_trial = drafts and explores
            if drafts and least_s <= budget_s and not is_tight:
                return DraftChoice(DraftAction.DRAFT)
            return DraftChoice(DraftAction.FULL, times=1 if explores else _HELD_ROUNDS)
        value_s = regime.token_s
        going = sorted(survivals, reverse=True)
        least = 0.0
        if not self._is_trial:
            least = self._least(fresh, positions, len(going), value_s)
        while going and going[-1] < least:
            going.pop()
        count = fresh + len(going)
        if not count:
            return DraftChoice(DraftAction.VERIFY)
        pass_s, then_s = self._drafts_s(count), self._verified_s(positions + count)
        learns = self._is_trial and positions == pending  # by one draft at least
        expected_s = (fresh + sum(going)) * value_s
        if not learns and expected_s <= self._needed_s(count, positions):
            return DraftChoice(DraftAction.VERIFY)
        if pass_s + then_s > budget_s:
            self._is_cut = True
            return DraftChoice(DraftAction.VERIFY)
        return DraftChoice(DraftAction.DRAFT, least)

    def plan(
        self,
        survivals: Sequence[float],
        rooms: Sequence[int],
        ends: frozenset[int],
        positions: int,
        budget_s: float = inf,
    ) -> DraftPlan:
        """When greedy rows that draft alone stop, as `choose` would say after each token.

        Args:
            survivals: Per row, the probability that all it has drafted agrees.
            rooms: Per row, drafts that it may run.
            ends: Tokens that are not run.
            positions: To be verified for them.
            budget_s: See `choose`.
        """
        count, passes = len(survivals), max(rooms)
        if budget_s < inf:
            most, passes = passes, 0
            while passes < most and self._fits(passes + 1, count, positions, budget_s):
                passes += 1
        key = count, positions, passes
        needed_s = self._needed.get(key)
        if needed_s is None:
            needed_s = self._needed[key] = [
                [0.0, *[self._needed_s(n, positions + done * count) for n in range(1, count + 1)]]
                for done in range(passes)
            ]
        value_s, least = self._regime(count).token_s, 0.0
        if not self._is_trial:
            least = self._least(0, positions, count, value_s)
        elif passes and positions == count:
            needed_s = [[0.0] * (count + 1), *needed_s[1:]]  # it learns, by one draft at least
        return DraftPlan(
            survivals=survivals,
            rooms=[min(room, passes) for room in rooms],
            ends=ends,
            edges=_EDGES,
            chances=self._agrees[False],
            least=least,
            token_s=value_s,
            needed_s=needed_s,
        )

    def _fits(self, passes: int, count: int, positions: int, budget_s: float) -> bool:
        """Whether so many passes and then all others are over in time."""
        then_s = self._verified_s(positions + passes * count)
        return passes * self._drafts_s(count) + then_s <= budget_s

    def _needed_s(self, count: int, positions: int) -> float:
        """Seconds that the tokens expected of a further pass over `count` rows must be worth: then
        it pays, or as many such passes together do as it takes before drafts are too long."""
        least_s, worth, tokens = inf, 0.0, 1.0
        pass_s, before_s = self._drafts_s(count), self._verified_s(positions)
        for drafted in range(1, MAX_DRAFTED + 1):
            worth += tokens
            then_s = self._verified_s(positions + drafted * count) - before_s
            least_s = min(least_s, (drafted * pass_s + then_s) / worth)
            tokens *= self._chance
            if positions + drafted * count >= count * (1 + MAX_DRAFTED):
                break
        return least_s

    def _least(self, fresh: int, positions: int, going: int, value_s: float) -> float:
        """The probability below which a row costs more than it brings: what half of the rows cost
        more than the other half."""
        count = fresh + going
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
        bucket = bisect_right(_EDGES, confidence)
        chance = self._agrees[is_drawn][bucket]
        self._chance += _RATE * (chance - self._chance)
        return bucket + is_drawn * len(_PRIORS), chance

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

    def observe(
        self, ran: Range, positions: int, num_tokens: int, seconds: float, filled: int = 0
    ) -> None:
        """A pass over so many positions drafted, or verified."""
        self.costs.observe(
            ran.first, ran.stop, positions, num_tokens, seconds, tests=ran.tests, filled=filled
        )
        self.spent(seconds)

    def drafted_on(self, counts: Sequence[int], seconds: float) -> None:
        """Passes over so many rows each followed by a plan, and took so long together."""
        if not counts:
            return
        self._round_s += seconds
        if self._idle_since_s is not None:
            self._idle_since_s += seconds
        spared_s = (sum(map(self._pass_s, counts)) - seconds) / len(counts)
        self.costs.spared_s += _SPARED_RATE * (spared_s - self.costs.spared_s)

    def spent(self, seconds: float) -> None:
        """A pass of a round took so long."""
        self._round_s += seconds + self.overhead_s
        self._idle_since_s = self._pass_from_s + seconds

    def ended(self, rows: int, tokens: int, *, drafted: bool, times: int = 1) -> None:
        """A round over so many rows gave so many tokens.

        One that was cut short teaches nothing but what it lost.

        Args:
            times: So many such rounds it stands for.
        """
        regime = self._regime(rows)
        regime.drafted_last = drafted
        kind, other = regime.full, regime.drafting
        if drafted:
            kind, other = other, kind
        lost_s = self._round_s - tokens * other.token_s
        if not self._is_cut:
            kind.add(tokens, self._round_s)
            lost_s = tokens * (kind.token_s - other.token_s)
        self._savings_s += times * _EXPLORE_SHARE * self._round_s - max(0.0, lost_s)
        self._round_s, self._is_cut = 0.0, False
        if times > 1:
            self._idle_since_s = None  # the next pass is not the next decision

    def pays(self, rows: int) -> bool:
        """Whether drafts are faster than full passes for so many rows, as far as it is known."""
        return self._regime(rows).pays()

    def _explores(self, regime: _Regime) -> bool:
        """Whether the next round is of the worse kind: never two in a row, or of two kinds that
        seem alike one would never be tried."""
        was_better = regime.drafted_last is regime.pays()
        return was_better and self._savings_s > max(0.0, regime.loss_s())

    def _regime(self, rows: int) -> _Regime:
        """What is known of about so many rows: two steps each time they double."""
        regime = self._regimes.setdefault(round(2.0 * log2(rows)), _Regime())
        if not regime.full.rounds:
            regime.full.tokens, regime.full.seconds = rows, self._full_s(rows)
        if not regime.drafting.rounds:
            drafting = regime.drafting
            drafting.tokens, drafting.seconds = self._drafting_s(rows)
        return regime

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
            self._first_s.clear()
            self._verify_s.clear()
            self._needed.clear()

    def _full_s(self, rows: int) -> float:
        """What a full pass takes, by forecast."""
        costs, tokens = self.costs, rows * self._tokens_each
        seconds = costs.forecast_s(0, costs.num_segments, rows, tokens, tests=False)
        return seconds + self.overhead_s

    def _drafting_s(self, rows: int) -> tuple[float, float]:
        """Tokens and seconds of a round that drafts for the best number of passes, by forecast."""
        first_s, pass_s = self._pass_s(rows), self._drafts_s(rows)
        each, chance, best = 1.0, 1.0, (0.0, inf)
        for drafted in range(1, MAX_DRAFTED + 1):
            chance *= self._chance
            each += chance
            seconds = first_s + drafted * pass_s + self._verified_s(rows * (drafted + 1))
            if not best[0] or seconds * best[0] < best[1] * rows * each:
                best = rows * each, seconds
        return best

    def _pass_s(self, count: int) -> float:
        """What a pass through the first segment and its head takes."""
        seconds = self._first_s.get(count)
        if seconds is None:
            costs, tokens = self.costs, count * self._tokens_each
            seconds = costs.forecast_s(0, 1, count, tokens, tests=True) + self.overhead_s
            self._first_s[count] = seconds
        return seconds

    def _drafts_s(self, count: int) -> float:
        """What such a pass takes by a plan."""
        pass_s = self._pass_s(count)
        return max(0.1 * pass_s, pass_s - self.costs.spared_s)

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
