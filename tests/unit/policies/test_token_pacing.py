"""Tokens that came together go one by one, and none is held for long."""

from __future__ import annotations

from itertools import pairwise
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.policies.token_pacing import TokenPacer


def released(pacer: TokenPacer, arrivals: list[tuple[float, int]]) -> list[float]:
    """When tokens go that came at these times, each as soon as it may."""
    times: list[float] = []

    def until(now_s: float) -> None:
        while pacer.num_held and pacer.due_s <= now_s:
            at_s = pacer.due_s
            times.extend([at_s] * pacer.take(at_s))

    for now_s, count in arrivals:
        until(now_s)
        pacer.came(count, now_s)
        times += [now_s] * pacer.take(now_s)
    until(float("inf"))
    return times


def gaps(times: list[float]) -> list[float]:
    return [b - a for a, b in pairwise(times)]


def test_a_burst_is_spread_over_the_time_until_the_next() -> None:
    times = released(TokenPacer(gap_s=1.0), [(2.0 * i, 4) for i in range(20)])
    assert len(times) == 80
    assert max(gaps(times[8:-4])) < 0.6, "2 s of four tokens are half a second each"


def test_without_bursts_nothing_is_held() -> None:
    arrivals = [(0.3 * i, 1) for i in range(30)]
    assert released(TokenPacer(1.0), arrivals) == [at_s for at_s, _ in arrivals]


def test_the_first_tokens_go_at_once() -> None:
    pacer = TokenPacer(1.0)
    pacer.came(3, 5.0)
    assert pacer.take(5.0) == 3 and pacer.num_held == 0


@settings(deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), gap_s=st.floats(0.05, 5.0))
def test_each_goes_once_in_order_and_is_not_held_beyond_the_gap_asked_for(
    seed: int, gap_s: float
) -> None:
    random, now_s, arrivals = Random(seed), 0.0, []
    for _ in range(60):
        now_s += random.expovariate(2.0)
        arrivals.append((now_s, random.randint(1, 8)))
    times = released(TokenPacer(gap_s), arrivals)
    came = [at_s for at_s, count in arrivals for _ in range(count)]
    assert len(times) == len(came) and times == sorted(times)
    assert all(went_s >= at_s for went_s, at_s in zip(times, came, strict=True))
    place = 0
    for at_s, count in arrivals:
        held = sum(went_s > at_s for went_s in times[: place + count])
        place += count
        assert all(w - at_s <= held * gap_s + 1e-9 for w in times[:place]), "or a gap for each"
