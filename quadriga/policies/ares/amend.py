"""A replica's packed forecast, brought up to what the scheduler knows beyond it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from quadriga.core.forecast import LengthPrediction, LoadForecast
from quadriga.policies.ares.forecast import (
    FIXED,
    MOVABLE,
    NUM_COLUMNS,
    StepCosts,
    forecast_rows,
    load_rows,
    load_sums,
    memory_rows,
    sizes,
    tokens_ahead,
)

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
    rows = forecast_rows(
        tokens=[p.num_tokens for p in new],
        remaining=[p.prediction.mean for p in new],
        lower=[p.prediction.lower for p in new],
        upper=[p.prediction.upper for p in new],
        moves=np.zeros(len(new)),
        since_move_s=np.full(len(new), np.inf),
        movable=np.full(len(new), FIXED),
    )
    tokens, remaining = sizes(rows)
    ahead = tokens_ahead(forecast.grid_s, step_s or forecast.base_s)
    costs = StepCosts(forecast.per_sequence_s, forecast.per_token_s)
    running, context = load_sums(tokens, remaining)
    return replace(
        forecast,
        sequence_ids=(*forecast.sequence_ids, *(p.sequence_id for p in new)),
        rows=forecast.rows + rows.astype(_WIRE, copy=False).tobytes(),
        running=_plus(forecast.running, running),
        context=_plus(forecast.context, context),
        load_s=_plus(forecast.load_s, load_rows(tokens, remaining, costs, ahead)),
        tokens=_plus(forecast.tokens, memory_rows(tokens, remaining, ahead)),
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


def _plus(packed: bytes, rows: NDArray[np.float64]) -> bytes:
    total = np.frombuffer(packed, dtype=_WIRE).astype(np.float64) + rows.sum(axis=0)
    return bytes(total.astype(_WIRE).tobytes())
