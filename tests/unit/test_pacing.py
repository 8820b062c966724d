"""Modelled devices."""

from __future__ import annotations

import pytest

from quadriga.config.pacing import ARES_4090D, PROFILES, PaceProfile, find_profile
from quadriga.core.request import SamplingParams, SequenceState
from quadriga.errors import ConfigError
from quadriga.interfaces import PrefillChunk
from quadriga.scheduling.paced_runner import PacedRunner
from tests.fake_runner import FakeRunner


def test_the_ares_profile_gives_the_papers_own_point() -> None:
    """18.23 ms for a batch that fills half of the KV memory (ARES §5.3): 55,800 tokens."""
    assert ARES_4090D.step_s(10, 55_800) == pytest.approx(18.23e-3, rel=0.002)


def test_every_profile_says_where_it_comes_from() -> None:
    for name, profile in PROFILES.items():
        assert profile.name == name
        assert profile.source
        assert profile.step_s(1, 1) < profile.step_s(32, 20_000)


def test_a_slower_device_takes_that_many_times_as_long_for_any_step() -> None:
    slow, fast = find_profile("steady-15ms*5"), find_profile("steady-15ms")
    assert slow.step_s(32, 900) == pytest.approx(5 * fast.step_s(32, 900))


@pytest.mark.parametrize("name", ["warp", "steady-15ms*0", "steady-15ms*", "steady-15ms*fast"])
def test_an_unknown_profile_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="steady-15ms") as refusal:
        find_profile(name)
    assert refusal.value.param == "decode.pace"


class Time:
    """A clock that the runner's work and the sleeps move."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept_s = 0.0

    def sleep(self, seconds: float) -> None:
        self.slept_s += seconds
        self.now_s += seconds


def paced(work_s: float) -> tuple[PacedRunner, Time]:
    time = Time()

    class Working(FakeRunner):
        def decode(self, rows):  # type: ignore[no-untyped-def]
            time.now_s += work_s
            return super().decode(rows)

    profile = PaceProfile("test", 10e-3, 1e-3, 1e-5, "made up")
    runner = PacedRunner(Working(4), profile, now_s=lambda: time.now_s, sleep=time.sleep)
    return runner, time


def attach(runner: PacedRunner, row: int, num_tokens: int) -> SequenceState:
    state = SequenceState(
        f"s{row}", "r", "m", [5] * (num_tokens - 1), SamplingParams(9), "i", 0.0, 1.0
    )
    runner.attach(row, state)
    runner.prefill([PrefillChunk(row, state.prompt_ids, 0, True)])
    state.output_ids.append(9)
    return state


def test_a_step_is_padded_to_its_modelled_time() -> None:
    runner, time = paced(work_s=3e-3)
    state = attach(runner, 0, 100)
    attach(runner, 1, 50)
    tokens = runner.decode([0, 1])
    assert time.slept_s == pytest.approx(10e-3 + 2 * 1e-3 + 150 * 1e-5 - 3e-3)
    runner.detach(1)
    state.output_ids.append(tokens[0].token_id)
    before_s = time.now_s
    runner.decode([0])
    assert time.now_s - before_s == pytest.approx(10e-3 + 1e-3 + 101 * 1e-5)


def test_a_step_that_is_too_slow_is_not_made_slower() -> None:
    runner, time = paced(work_s=50e-3)
    attach(runner, 0, 10)
    runner.decode([0])
    assert time.slept_s == 0
