"""Whoever is told when to come back finds a place then, and nobody else pays much for it."""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quadriga.policies.retry_reservations import (
    CAUTION,
    MAX_RESERVATIONS,
    MIN_WAIT_S,
    REMEMBERED_S,
    RetryReservations,
)

MOST_S = 60.0
PLACES = 12
SERVICE_S = (1.05, 4.2)
MEAN_S = sum(SERVICE_S) / 2
PER_S = PLACES / MEAN_S
STALE_S = 0.15
"""An ending is heard of so much later, at most."""
LATE_S = (0.02, 0.1)


@pytest.fixture
def line() -> RetryReservations:
    return RetryReservations()


def ask(
    line: RetryReservations, visitor: str, free: float, per_s: float = 4.0, **asked: Any
) -> float | None:
    """As a scheduler with one line asks, which tells nobody a time beyond its limit."""
    wait_s = line.ask(visitor, free, per_s, **asked)
    if wait_s is not None and wait_s <= MOST_S:
        line.keep(visitor, asked["now_s"] + wait_s, asked.get("num_places", 1))
    return wait_s and min(wait_s, MOST_S)


def refused(line: RetryReservations, visitor: str, free: float, *, now_s: float) -> float:
    """When to come back."""
    told_s = ask(line, visitor, free, now_s=now_s)
    assert told_s is not None
    return told_s


@dataclass
class Service:
    """`PLACES` places; callers walk in at random times, and come back when told.

    Attributes:
        come_back: Share of the refused who do, from `patient_from_s` on; none does before.
        bias: Rate at which places are thought to come free, by the true one.
        held: First returns: whether they were let in.
        told_s, needed_s: What the first refusal said, and how long it was until they were let in.
        waits_s: Of those let in, until they had a place.
        busy_s: Seconds of use of all places, within `measured`.
    """

    rng: random.Random
    come_back: float
    measured: tuple[float, float]
    late_s: tuple[float, float] = LATE_S
    bias: float = 1.0
    patient_from_s: float = 0.0
    line: RetryReservations = field(default_factory=RetryReservations)
    events: list[tuple[float, int, str, tuple[Any, ...]]] = field(default_factory=list)
    numbers: Any = field(default_factory=itertools.count)
    num_busy: int = 0
    num_heard: int = 0
    waiting: list[float] = field(default_factory=list)
    held: list[bool] = field(default_factory=list)
    told_s: list[float] = field(default_factory=list)
    needed_s: list[float] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)
    busy_s: float = 0.0

    def push(self, at_s: float, kind: str, *args: Any) -> None:
        heapq.heappush(self.events, (at_s, next(self.numbers), kind, args))

    def walk_in(self, begin_s: float, end_s: float, per_s: float) -> None:
        at_s = begin_s + self.rng.expovariate(per_s)
        while at_s < end_s:
            self.push(at_s, "call", f"caller-{next(self.numbers)}", 0, at_s, 0.0)
            at_s += self.rng.expovariate(per_s)

    def run(self) -> None:
        last_s = 0.0
        while self.events:
            now_s, _, kind, args = heapq.heappop(self.events)
            begin_s, end_s = self.measured
            self.busy_s += self.num_busy * max(0.0, min(now_s, end_s) - max(last_s, begin_s))
            last_s = now_s
            if kind == "call":
                self.call(now_s, *args)
            elif kind == "end":
                self.num_busy -= 1
                self.push(now_s + self.rng.uniform(0, STALE_S), "heard")
                if self.waiting:
                    self.begin(now_s, self.waiting.pop(0))
            else:
                self.num_heard -= 1

    def begin(self, now_s: float, since_s: float) -> None:
        self.num_busy += 1
        self.num_heard += 1
        self.waits_s.append(now_s - since_s)
        self.push(now_s + self.rng.uniform(*SERVICE_S), "end")

    def call(self, now_s: float, name: str, attempt: int, first_s: float, told_s: float) -> None:
        free = PLACES - self.num_heard - len(self.waiting)
        rate = PER_S * self.bias * self.rng.uniform(0.9, 1.1)  # it is an estimate
        wait_s = ask(self.line, name, free, rate, now_s=now_s)
        if attempt == 1:
            self.held.append(wait_s is None)
        if wait_s is None:
            if attempt:
                self.told_s.append(told_s)
                self.needed_s.append(now_s - first_s)
            if self.num_busy < PLACES:
                self.begin(now_s, now_s)
            else:
                self.waiting.append(now_s)
        elif attempt or (now_s >= self.patient_from_s and self.rng.random() < self.come_back):
            back_s = now_s + wait_s + self.rng.uniform(*self.late_s)
            self.push(back_s, "call", name, attempt + 1, first_s, told_s or wait_s)

    @property
    def kept(self) -> float:
        return sum(self.held) / len(self.held)

    @property
    def slower(self) -> float:
        """Time needed, by time told."""
        return sum(self.needed_s) / sum(self.told_s)

    @property
    def use(self) -> float:
        begin_s, end_s = self.measured
        return self.busy_s / (PLACES * (end_s - begin_s))


def overloaded(
    seed: int,
    come_back: float,
    seconds: float,
    *,
    late_s: tuple[float, float] = LATE_S,
    bias: float = 1.0,
) -> Service:
    """Half of the capacity for a while, then about five times as much for `seconds`."""
    measured = (22.0, 20.0 + max(seconds, 10.0))
    service = Service(random.Random(seed), come_back, measured, late_s, bias)
    service.walk_in(0.0, 20.0, 0.5 * PER_S)
    service.walk_in(20.0, 20.0 + seconds, 20.0)
    service.run()
    return service


@pytest.mark.parametrize("late_s", [LATE_S, (0.0, 1.0)], ids=["in time", "whole seconds"])
def test_after_a_burst_nearly_everybody_is_let_in_when_told(late_s: tuple[float, float]) -> None:
    runs = [overloaded(seed, 1.0, 3.0, late_s=late_s) for seed in range(5)]
    assert sum(len(run.held) for run in runs) > 150
    assert sum(run.kept for run in runs) / 5 >= 0.85
    assert sum(run.slower for run in runs) / 5 <= 1.2
    assert sum(run.use for run in runs) / 5 >= 0.75


def test_most_are_let_in_where_places_come_free_a_fifth_later_than_expected() -> None:
    runs = [overloaded(seed, 1.0, 3.0, bias=1.2) for seed in range(5)]
    assert sum(run.kept for run in runs) / 5 >= 0.8
    assert sum(run.slower for run in runs) / 5 <= 1.15


def test_a_long_line_holds_on_average() -> None:
    """Ten seconds at five times the capacity, and everybody insists."""
    for seed in range(3):
        run = overloaded(seed, 1.0, 10.0)
        assert len(run.held) > 100
        assert run.kept >= 0.75
        assert run.slower <= 1.15
        assert run.use >= 0.9
        assert sorted(run.waits_s)[int(0.99 * len(run.waits_s))] <= 1.0


def test_where_nobody_comes_back_no_place_stays_empty() -> None:
    bare = [overloaded(seed, 0.0, 40.0).use for seed in range(3)]
    assert min(bare) >= 0.9


@pytest.mark.parametrize("come_back", [0.1, 0.5])
def test_where_some_come_back_both_hold(come_back: float) -> None:
    for seed in range(3):
        run = overloaded(seed, come_back, 40.0)
        assert len(run.held) > 30
        assert run.kept >= 0.65
        assert run.use >= 0.85


def test_who_gave_up_a_while_ago_says_little_about_who_is_refused_now() -> None:
    kept, slower = 0.0, 0.0
    for seed in range(5):
        service = Service(random.Random(seed), 1.0, (0.0, 1.0), patient_from_s=40.0)
        service.walk_in(0.0, 10.0, 0.5 * PER_S)
        service.walk_in(10.0, 30.0, 2.0 * PER_S)
        service.walk_in(30.0, 45.0, 0.5 * PER_S)
        service.walk_in(45.0, 48.0, 20.0)
        service.run()
        kept += service.kept / 5
        slower += service.slower / 5
    assert kept >= 0.8
    assert slower <= 1.2


def test_everybody_is_told_another_time(line: RetryReservations) -> None:
    told = [refused(line, f"v{i}", 0.0, now_s=10.0) for i in range(5)]
    assert all(b - a > 0.2 for a, b in itertools.pairwise(told))
    # The third place is there even if it comes as late as chance may have it.
    expected = told[2] * 4.0
    assert expected - CAUTION * expected**0.5 == pytest.approx(3.0)


def test_a_place_is_kept_for_who_is_due(line: RetryReservations) -> None:
    told_s = refused(line, "first", 0.0, now_s=0.0)
    assert ask(line, "other", 1.0, now_s=told_s) is not None, "one place, and it is promised"
    assert ask(line, "first", 1.0, now_s=told_s) is None
    assert len(line) == 1, "the other's"


def test_what_is_left_over_is_for_walk_ins(line: RetryReservations) -> None:
    told_s = refused(line, "first", 0.0, now_s=0.0)
    assert ask(line, "other", 2.0, now_s=told_s) is None
    assert ask(line, "other", 1.0, now_s=0.0) is None, "another comes free until then"


def test_who_comes_when_told_may_wait_for_the_next_place(line: RetryReservations) -> None:
    told_s = refused(line, "first", 0.0, now_s=0.0)
    assert ask(line, "first", 0.0, now_s=told_s) is None
    told_s = refused(line, "second", -3.0, now_s=10.0)
    again_s = refused(line, "second", -1.0, now_s=10.0 + told_s)
    assert again_s < told_s


def test_where_nobody_can_wait_a_place_must_be_free(line: RetryReservations) -> None:
    told_s = refused(line, "first", 0.0, now_s=0.0)
    again_s = ask(line, "first", 0.0, now_s=told_s, least_free=1.0)
    assert again_s is not None
    assert ask(line, "first", 1.0, now_s=told_s + again_s) is None


def test_who_came_in_vain_takes_nobody_elses_place(line: RetryReservations) -> None:
    told = [refused(line, f"v{i}", 0.0, now_s=0.0) for i in range(4)]
    again_s = refused(line, "v0", -2.0, now_s=told[0])
    assert told[0] + again_s > told[3], "places come free too late for all of them"


def test_who_came_in_vain_comes_next_where_that_harms_nobody(line: RetryReservations) -> None:
    first_s = refused(line, "first", -5.0, now_s=0.0)
    later_s = refused(line, "later", -20.0, now_s=0.0)
    again_s = refused(line, "first", -0.5, now_s=first_s)
    assert first_s + again_s < later_s


def test_who_comes_early_has_no_right_to_a_place_yet(line: RetryReservations) -> None:
    told_s = refused(line, "first", 0.0, now_s=0.0)
    assert ask(line, "first", 0.0, now_s=0.5 * told_s) is not None
    assert ask(line, "first", 0.0, now_s=told_s) is None, "still there"


def test_who_does_not_come_is_waited_for_a_moment(line: RetryReservations) -> None:
    told_s = refused(line, "first", 0.0, now_s=0.0)
    assert ask(line, "other", 1.0, now_s=told_s + 0.1) is not None
    assert ask(line, "another", 1.0, now_s=2 * told_s + 0.2) is not None, "the other's place"
    assert ask(line, "a third", 1.0, now_s=told_s + 4.0) is None
    assert ask(line, "first", 0.0, now_s=told_s + 4.5) is None, "late, and still known"
    assert ask(line, "other", 0.0, now_s=told_s + 4.0 + REMEMBERED_S) is not None


def test_who_never_comes_back_is_less_and_less_waited_for(line: RetryReservations) -> None:
    for i in range(100):
        ask(line, f"v{i}", 0.0, now_s=0.25 * i)
    assert line.return_share < 0.15
    assert ask(line, "other", 1.0, now_s=25.0) is None
    for i in range(50):
        told_s = refused(line, f"w{i}", 0.0, now_s=100.0 + 10 * i)
        ask(line, f"w{i}", 1.0, now_s=100.0 + 10 * i + told_s)
    assert line.return_share > 0.7


def test_nobody_is_told_more_than_the_limit_and_the_line_is_bounded(
    line: RetryReservations,
) -> None:
    for i in range(1000):
        told_s = refused(line, f"v{i}", 0.0, now_s=0.0)
        assert MIN_WAIT_S <= told_s <= MOST_S
    assert len(line) <= MOST_S * 4.0
    for i in range(MAX_RESERVATIONS + 10):
        ask(line, f"w{i}", 0.0, 1e6, now_s=0.0)
    assert len(line) == MAX_RESERVATIONS
    assert ask(line, "later", 1.0, now_s=MOST_S + REMEMBERED_S + 3.0) is None
    assert len(line) == 0


def test_callers_without_a_fingerprint_get_no_reservation(line: RetryReservations) -> None:
    told_s = refused(line, "", 0.0, now_s=0.0)
    assert len(line) == 0
    assert ask(line, "", 1.0, now_s=told_s) is None


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b", "c", ""]),
            st.floats(-20, 20),
            st.floats(1e-3, 1e3),
            st.floats(0, 5),
        ),
        max_size=60,
    )
)
def test_the_line_and_its_index_agree(calls: list[tuple[str, float, float, float]]) -> None:
    line = RetryReservations()
    now_s = 0.0
    for visitor, free, per_s, pause_s in calls:
        now_s += pause_s
        places = 1 + len(line) % 3
        told_s = ask(line, visitor, free, per_s, now_s=now_s, num_places=places)
        assert told_s is None or MIN_WAIT_S <= told_s <= MOST_S
        if told_s is None:
            assert free >= 0.0
        known = sorted((t, v) for v, times in line._by_visitor.items() for t in times)
        assert known == line._line
        assert all(line._by_visitor.values())
        assert 0.0 < line.return_share <= 1.0
