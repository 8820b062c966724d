"""Processor time of an engine's passes, so that a busy machine does not spoil the figures."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from quadriga.interfaces import ModelRunner
from quadriga.scheduling.calibration import Dummies


def decode_step_s(runner: ModelRunner, batch: int, context: int, repeats: int) -> float:
    """Median processor seconds of one decode step of `batch` rows with `context` tokens each."""
    with Dummies(runner, batch, context) as dummies:
        return _median_s(dummies.decode, repeats)


def prefill_s(runner: ModelRunner, num_tokens: int, repeats: int) -> float:
    """Median processor seconds of one prompt's prefill."""
    with Dummies(runner, 1, num_tokens + 1) as dummies:
        return _median_s(dummies.prefill, repeats)


def _median_s(work: Callable[[], object], repeats: int) -> float:
    times = []
    for repeat in range(-2, repeats):
        started_s = time.thread_time()
        work()
        if repeat >= 0:
            times.append(time.thread_time() - started_s)
    return statistics.median(times)
