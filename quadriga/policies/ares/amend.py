"""A replica's packed forecast, brought up to what the scheduler knows beyond it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from quadriga.policies.ares.forecast import (
    FIXED,
    MOVABLE,
    NUM_COLUMNS,
    NUM_LOADS,
    forecast_rows,
    memory_rows,
    tokens_ahead,
)
from quadriga.types import LengthPrediction, LoadForecast

_WIRE = np.dtype("<f4")


@dataclass(frozen=True, slots=True)
class Promised:
    """A sequence sent to a replica that has not reported it yet."""

    sequence_id: str
    num_tokens: int
    prediction: LengthPrediction


def with_promised(
    forecast: LoadForecast, promised: Sequence[Promised], step_s: float
) -> LoadForecast:
    """Add sequences on their way, which cannot be moved, to rows and sums."""
    known = set(forecast.sequence_ids)
    new = [p for p in promised if p.sequence_id not in known]
    if not new:
        return forecast
    zeros = np.zeros(len(new))
    tokens = np.array([float(p.num_tokens) for p in new])
    mean = np.array([p.prediction.mean for p in new])
    ahead = tokens_ahead(np.array(forecast.grid_s), np.array(step_s or forecast.base_s))
    rows = forecast_rows(
        tokens=tokens,
        remaining=mean,
        lower=np.array([p.prediction.lower for p in new]),
        upper=np.array([p.prediction.upper for p in new]),
        ahead=ahead,
        per_sequence_s=forecast.per_sequence_s,
        per_token_s=forecast.per_token_s,
        moves=zeros,
        since_move_s=np.full(len(new), np.inf),
        movable=np.full(len(new), FIXED),
    )
    return replace(
        forecast,
        sequence_ids=(*forecast.sequence_ids, *(p.sequence_id for p in new)),
        rows=forecast.rows + rows.astype(_WIRE, copy=False).tobytes(),
        load_s=_plus(forecast.load_s, rows[:, :NUM_LOADS].sum(axis=0, dtype=np.float64)),
        tokens=_plus(forecast.tokens, memory_rows(tokens, mean, ahead).sum(axis=0)),
    )


def with_fixed(forecast: LoadForecast, sequence_ids: Collection[str]) -> LoadForecast:
    """Mark sequences as not to be moved."""
    fixed = [i for i, s in enumerate(forecast.sequence_ids) if s in sequence_ids]
    if not fixed:
        return forecast
    rows = np.frombuffer(forecast.rows, dtype=_WIRE).reshape(-1, NUM_COLUMNS).copy()
    rows[fixed, MOVABLE] = FIXED
    return replace(forecast, rows=rows.tobytes())


def seconds_to_full(forecast: LoadForecast, capacity_tokens: int) -> float:
    """Seconds until the forecast exceeds the KV memory; infinite where it never does."""
    tokens = np.frombuffer(forecast.tokens, dtype=_WIRE).astype(np.float64)
    over = np.flatnonzero(tokens > capacity_tokens)
    if not len(over):
        return float("inf")
    first = int(over[0])
    if first == 0:
        return 0.0
    before, after = tokens[first - 1], tokens[first]
    share = (capacity_tokens - before) / (after - before)
    start_s, end_s = forecast.grid_s[first - 1], forecast.grid_s[first]
    return float(start_s + share * (end_s - start_s))


def _plus(packed: bytes, more: NDArray[np.float64]) -> bytes:
    total = np.frombuffer(packed, dtype=_WIRE).astype(np.float64) + more
    return total.astype(_WIRE).tobytes()
