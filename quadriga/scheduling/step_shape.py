"""Measure what a decode step costs by sequences and tokens, once, before the first arrives."""

from __future__ import annotations

from statistics import median

from quadriga.clock import Clock
from quadriga.interfaces import ModelRunner
from quadriga.scheduling.calibration import Dummies
from quadriga.scheduling.forecasts import StepShape

_REPEATS = 5
_SHORT, _LONG = 2, 512  # tokens of context
_LEAST_SHARE = 1e-4  # of a step, that a sequence or a long context is taken to add at least


def assumed_shape(kv_capacity_tokens: int) -> StepShape:
    """For runners that cannot be timed without sequences: a step over half of the KV memory takes
    half as long again as an empty one; the scale is found while serving."""
    return StepShape(base_s=1e-3, per_sequence_s=0.0, per_token_s=1e-3 / kv_capacity_tokens)


def measure_shape(runner: ModelRunner, clock: Clock, *, max_rows: int) -> StepShape:
    """Time full-depth steps: one row, all rows, all rows with long contexts.

    Uses the runner's rows 0..max_rows − 1, which must be free, and leaves them free. What is
    computed is garbage; only the time counts.
    """
    long = min(_LONG, runner.row_capacity_tokens - 1)
    one_s = _step_s(runner, clock, 1, _SHORT)
    all_s = _step_s(runner, clock, max_rows, _SHORT)
    long_s = _step_s(runner, clock, max_rows, long)
    more_tokens = max(1, max_rows * (long - _SHORT))
    per_token_s = max(long_s - all_s, _LEAST_SHARE * all_s) / more_tokens
    per_sequence_s = max(all_s - one_s, _LEAST_SHARE * one_s) / max(1, max_rows - 1)
    per_sequence_s = max(0.0, per_sequence_s - _SHORT * per_token_s)
    return StepShape(max(one_s - per_sequence_s, _LEAST_SHARE), per_sequence_s, per_token_s)


def _step_s(runner: ModelRunner, clock: Clock, count: int, num_tokens: int) -> float:
    rows = list(range(count))
    num_segments = len(runner.segment_ends)
    times = []
    with Dummies(runner, count, num_tokens):
        for _ in range(_REPEATS):
            started_s = clock.now_s()
            if num_segments == 1:
                runner.decode(rows)
            else:
                runner.advance(rows, 0, num_segments)
                runner.emit(rows)
            times.append(clock.now_s() - started_s)
    return median(times)
