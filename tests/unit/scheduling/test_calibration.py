"""Calibration on a machine whose times are known finds those times, and leaves no trace."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from quadriga.clock import ManualClock
from quadriga.core.request import SampledToken, SequenceState
from quadriga.scheduling.calibration import calibrate

BASE_S = (4e-3, 7e-3, 5e-3)
ROW_S = (0.2e-3, 0.5e-3, 0.3e-3)
TOKEN_S = (1e-6, 3e-6, 0.0)
HEAD_S = (1e-3, 0.1e-3)  # a head takes this, and this a row
FILL_S = 0.4e-3  # a position and segment that was skipped


class TimedRunner:
    """Takes exactly the time it is told to; a now and then, thrice as long.

    It insists that rows are attached, and that a row's first pass starts at the front.
    """

    def __init__(self, clock: ManualClock, num_segments: int = 3, capacity: int = 1024) -> None:
        self.kv_capacity_tokens = 1 << 20
        self.segment_ends = tuple(2 * (s + 1) for s in range(num_segments))
        self.row_capacity_tokens = capacity
        self.attached: dict[int, SequenceState] = {}
        self.longest = 0
        self.passes = 0
        self._clock = clock
        self._started: set[int] = set()
        self.num_filled = 0
        self._skipped: dict[int, int] = {}  # row → tokens that left at the first exit

    def attach(self, row: int, state: SequenceState) -> None:
        assert row not in self.attached and state.output_ids and state.prompt_ids
        assert state.num_tokens <= self.row_capacity_tokens
        self.attached[row] = state
        self.longest = max(self.longest, state.num_tokens)
        assert sum(s.num_tokens for s in self.attached.values()) <= self.kv_capacity_tokens

    def detach(self, row: int) -> None:
        del self.attached[row]
        self._started.discard(row)
        self._skipped.pop(row, None)

    def emit(self, rows: Sequence[int]) -> list[SampledToken]:
        for row in rows:
            self._skipped[row] = self._skipped.get(row, 0) + 1
        return [SampledToken(7, self.segment_ends[0]) for _ in rows]

    def advance(self, rows: Sequence[int], first: int, stop: int) -> list[float]:
        assert self.attached.keys() >= set(rows)
        assert first == 0 or self._started >= set(rows), "no hidden state to go on from"
        self._started.update(rows)
        self.passes += 1
        self._clock.advance(self.pass_s(rows, first, stop) * (3 if self.passes % 4 == 0 else 1))
        if stop > 1:
            filled = (stop - max(first, 1)) * sum(self._skipped.pop(row, 0) for row in rows)
            self.num_filled += filled
            self._clock.advance(filled * FILL_S)
        return [0.0] * len(rows)

    def pass_s(self, rows: Sequence[int], first: int, stop: int) -> float:
        tokens = sum(self.attached[row].num_tokens for row in rows)
        layers_s = sum(
            BASE_S[s] + ROW_S[s] * len(rows) + TOKEN_S[s] * tokens for s in range(first, stop)
        )
        return layers_s + HEAD_S[0] + HEAD_S[1] * len(rows)


@pytest.mark.parametrize("max_rows", [1, 2, 13, 32])
def test_finds_the_times_of_a_known_machine(max_rows: int) -> None:
    clock = ManualClock()
    runner = TimedRunner(clock)
    costs = calibrate(runner, clock, max_rows=max_rows)  # type: ignore[arg-type]
    assert costs.num_segments == 3 and costs.max_rows == max_rows
    for count in range(1, max_rows + 1):
        head_s = HEAD_S[0] + HEAD_S[1] * count
        for each in (2, 300):
            tokens = count * each
            for s in range(3):
                bare_s = BASE_S[s] + ROW_S[s] * count + TOKEN_S[s] * tokens
                with_head_s = costs.forecast_s(s, s + 1, count, tokens, tests=s < 2)
                assert with_head_s == pytest.approx(bare_s + head_s, rel=1e-2)
                if s < 2:
                    found = costs.forecast_s(s, s + 1, count, tokens, tests=False)
                    assert found == pytest.approx(bare_s, rel=1e-2)
            whole_s = sum(BASE_S[s] + ROW_S[s] * count + TOKEN_S[s] * tokens for s in range(3))
            found = costs.forecast_s(0, 3, count, tokens, tests=False)
            assert found == pytest.approx(whole_s + head_s, rel=1e-2)
    assert costs.fill_s == pytest.approx(FILL_S, rel=0.3)


def test_leaves_the_rows_free() -> None:
    clock = ManualClock()
    runner = TimedRunner(clock)
    calibrate(runner, clock, max_rows=8)  # type: ignore[arg-type]
    assert not runner.attached
    assert runner.longest == 512


def test_rows_are_freed_when_a_pass_fails() -> None:
    clock = ManualClock()
    runner = TimedRunner(clock)

    def fails(*_: object) -> list[float]:
        raise RuntimeError("out of memory")

    runner.advance = fails  # type: ignore[method-assign, assignment]
    with pytest.raises(RuntimeError, match="out of memory"):
        calibrate(runner, clock, max_rows=8)  # type: ignore[arg-type]
    assert not runner.attached


@pytest.mark.parametrize(("kv_tokens", "longest"), [(1 << 20, 63), (4 * 40, 40)])
def test_rows_are_calibrated_with_what_they_can_hold(kv_tokens: int, longest: int) -> None:
    clock = ManualClock()
    runner = TimedRunner(clock, capacity=64)
    runner.kv_capacity_tokens = kv_tokens
    costs = calibrate(runner, clock, max_rows=4)  # type: ignore[arg-type]
    assert runner.longest == longest
    slope_s = costs.forecast_s(1, 2, 4, 1000, tests=False) - costs.forecast_s(
        1, 2, 4, 0, tests=False
    )
    assert slope_s == pytest.approx(3e-3, rel=1e-2)


def test_a_model_without_exits_costs_nothing_to_calibrate() -> None:
    clock = ManualClock()
    runner = TimedRunner(clock, num_segments=1)
    costs = calibrate(runner, clock, max_rows=8)  # type: ignore[arg-type]
    assert runner.passes == 0 and costs.num_segments == 1
