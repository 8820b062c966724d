"""What a decode replica's sequences will weigh over the horizon; computed where they run.

One row a sequence, all of it vector arithmetic: a replica forecasts its own sequences, the
simulator those of a whole cluster, with the same function.

Source: ARES §5.2 (worker side); differs: load is the predicted part of the step time instead of
tokens, points are seconds instead of steps, and memory is forecast apart from load.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from quadriga.errors import ConfigError
from quadriga.policies.ares.settings import NUM_POINTS
from quadriga.types import LoadForecast

NUM_LOADS = NUM_POINTS + 1
"""Columns [0, 17): seconds the sequence adds to a step, now and at each point."""
TOKENS = NUM_LOADS
REMAINING = NUM_LOADS + 1
REMAINING_LOWER = NUM_LOADS + 2
REMAINING_UPPER = NUM_LOADS + 3
MOVES = NUM_LOADS + 4
SINCE_MOVE_S = NUM_LOADS + 5
"""Seconds since the last move; infinite for a sequence that never moved."""
MOVABLE = NUM_LOADS + 6
"""One of the next three."""
FIXED, RUNS, PAUSED = 0.0, 1.0, 2.0
"""On its way, or promised: not to be moved; runs here; stands in host memory here."""
NUM_COLUMNS = NUM_LOADS + 7
ROW_BYTES = 4 * NUM_COLUMNS
MAX_ROWS = 65_536
"""More sequences than that no replica holds; a forecast with more is refused."""

_WIRE = np.dtype("<f4")


def tokens_ahead(grid_s: ArrayLike, step_s: ArrayLike) -> NDArray[np.float64]:
    """Tokens a sequence gains until each point: [num_points], or [n, num_points] for n steps."""
    steps = np.maximum(np.asarray(step_s, dtype=np.float64), 1e-9)
    return np.asarray(np.asarray(grid_s, dtype=np.float64) / steps[..., None])


def load_rows(
    tokens: NDArray[np.float64],
    remaining: NDArray[np.float64],
    ahead: NDArray[np.float64],
    *,
    per_sequence_s: float,
    per_token_s: float,
) -> NDArray[np.float64]:
    """Seconds each sequence adds to a step while it lasts: n_r(t) = N(r) + t while t ≤ N̂(r).

    Args:
        tokens: N(r), [num_rows].
        remaining: N̂(r), [num_rows].
        ahead: [num_points] or [num_rows, num_points]; the first point is now.

    Returns: [num_rows, num_points].
    """
    load = per_token_s * (tokens[:, None] + ahead)
    load += per_sequence_s
    load *= ahead <= remaining[:, None]
    load[:, 0] = per_sequence_s + per_token_s * tokens  # it is here now, whatever is predicted
    return load


def memory_rows(
    tokens: NDArray[np.float64], remaining: NDArray[np.float64], ahead: NDArray[np.float64]
) -> NDArray[np.float64]:
    """KV tokens each sequence holds, at most, between each point and the one before it.

    The grid is coarse far ahead; a sequence that ends between two points is counted with its
    last size at the later one, so that no peak falls between them.

    Returns: [num_rows, num_points].
    """
    held = tokens[:, None] + np.minimum(ahead, remaining[:, None])
    before = np.concatenate((np.zeros_like(ahead[..., :1]), ahead[..., :-1]), axis=-1)
    held *= before < remaining[:, None]
    held[:, 0] = tokens
    return held


def forecast_rows(
    *,
    tokens: NDArray[np.float64],
    remaining: NDArray[np.float64],
    lower: NDArray[np.float64],
    upper: NDArray[np.float64],
    ahead: NDArray[np.float64],
    per_sequence_s: float,
    per_token_s: float,
    moves: NDArray[np.float64],
    since_move_s: NDArray[np.float64],
    movable: NDArray[np.float64],
) -> NDArray[np.float32]:
    """Return the rows of a forecast: [num_rows, NUM_COLUMNS]. Arguments as in the columns."""
    rows = np.empty((len(tokens), NUM_COLUMNS), dtype=np.float32)
    rows[:, :NUM_LOADS] = load_rows(
        tokens, remaining, ahead, per_sequence_s=per_sequence_s, per_token_s=per_token_s
    )
    rows[:, TOKENS] = tokens
    rows[:, REMAINING] = remaining
    rows[:, REMAINING_LOWER] = lower
    rows[:, REMAINING_UPPER] = upper
    rows[:, MOVES] = moves
    rows[:, SINCE_MOVE_S] = since_move_s
    rows[:, MOVABLE] = movable
    return rows


def pack(
    rows: NDArray[np.float32],
    sequence_ids: Sequence[str],
    *,
    grid_s: Sequence[float],
    ahead: NDArray[np.float64],
    base_s: float,
    has_predictions: bool = True,
) -> LoadForecast:
    """Pack one replica's rows, with their sums over the horizon, for its snapshot.

    Args:
        rows: Of `forecast_rows`, in the order of `sequence_ids`.
        ahead: As given to `forecast_rows`, [num_points].
    """
    held = memory_rows(
        rows[:, TOKENS].astype(np.float64), rows[:, REMAINING].astype(np.float64), ahead
    )
    return LoadForecast(
        grid_s=tuple(grid_s),
        sequence_ids=tuple(sequence_ids),
        rows=rows.astype(_WIRE, copy=False).tobytes(),
        load_s=rows[:, :NUM_LOADS].sum(axis=0, dtype=np.float64).astype(_WIRE).tobytes(),
        tokens=held.sum(axis=0).astype(_WIRE).tobytes(),
        base_s=base_s,
        has_predictions=has_predictions,
    )


def check_forecast(forecast: LoadForecast) -> None:
    """Look at a forecast from another process before it is believed.

    Raises:
        ConfigError: Sizes that do not fit each other, or the grid of another version.
    """
    num_rows = len(forecast.sequence_ids)
    sums = 4 * NUM_LOADS
    if num_rows > MAX_ROWS:
        raise ConfigError(f"forecast: {num_rows} rows, at most {MAX_ROWS} are taken")
    if len(forecast.grid_s) != NUM_LOADS:
        raise ConfigError(f"forecast: {len(forecast.grid_s)} points where {NUM_LOADS} are meant")
    sizes = len(forecast.rows), len(forecast.load_s), len(forecast.tokens)
    if sizes != (num_rows * ROW_BYTES, sums, sums):
        raise ConfigError(
            f"forecast: {sizes} bytes where {(num_rows * ROW_BYTES, sums, sums)} belong to "
            f"{num_rows} rows"
        )
