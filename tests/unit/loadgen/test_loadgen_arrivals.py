"""Arrival processes: rates, burstiness, seeds, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from loadgen.load.arrivals import parse_arrivals
from quadriga.errors import ConfigError

NUM = 20_000


def gaps(text: str, seed: int = 1) -> np.ndarray:
    times = parse_arrivals(text).times_s(NUM, seed=seed)
    assert times[0] == 0.0 and np.all(np.diff(times) >= 0)
    return np.diff(times)


@pytest.mark.parametrize(("text", "cv"), [("poisson:4", 1.0), ("gamma:4:2.5", 2.5)])
def test_mean_rate_and_burstiness(text: str, cv: float) -> None:
    found = gaps(text)
    assert found.mean() == pytest.approx(0.25, rel=0.05)
    assert found.std() / found.mean() == pytest.approx(cv, rel=0.05)


def test_constant_rate() -> None:
    assert np.allclose(gaps("constant:8"), 0.125)


def test_seed_decides() -> None:
    assert np.array_equal(gaps("poisson:4", seed=3), gaps("poisson:4", seed=3))
    assert not np.array_equal(gaps("poisson:4", seed=3), gaps("poisson:4", seed=4))


def test_at_once_and_closed_are_ready_at_the_start() -> None:
    assert not gaps("at-once").any()
    arrivals = parse_arrivals("closed:16")
    assert arrivals.concurrency == 16
    assert not arrivals.times_s(10, seed=0).any()


def test_trace_times_are_needed_and_taken() -> None:
    arrivals = parse_arrivals("trace")
    times = np.array([0.0, 2.0, 5.0])
    assert arrivals.times_s(2, seed=0, trace_times_s=times).tolist() == [0.0, 2.0]
    with pytest.raises(ConfigError, match="no arrival times of its own"):
        arrivals.times_s(2, seed=0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "poisson",
        "poisson:0",
        "poisson:-1",
        "poisson:nan",
        "poisson:1e9",
        "gamma:1",
        "gamma:1:0",
        "closed:0",
        "closed:1.5",
        "closed:-3",
        "closed:999999",
        "at-once:1",
        "burst:1",
        "constant:x",
    ],
)
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--arrivals"):
        parse_arrivals(text)
