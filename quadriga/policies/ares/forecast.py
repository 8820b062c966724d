"""What a decode replica's sequences will weigh over the horizon.

A replica reports facts: a row of sizes a sequence, and their sums over the horizon. The scheduler
computes loads from them, with one cost of a step for all replicas of a class. Replicas' own step
times are left out of the loads: they differ with the load itself and with whatever else a machine
does, and by them a fast replica, or one that was measured at a bad moment, would look full. What
the scheduler knows beyond a replica's last report (sequences on their way, sequences that must
stay) is added to the packed forecast.

A token that leaves early costs a step the layers that it ran alone. So a sequence weighs in loads
and in work as many tokens as it will generate, times the share of the layers that each is expected
to run (`policies.ares.expected_depth`). In memory it weighs its tokens whole: KV is promised at all
layers, whatever a token runs.

All of it is vector arithmetic: a replica forecasts its own sequences, the simulator those of a
whole cluster, with the same functions.

Source: ARES §5.2 (worker side); differs: load is the predicted part of the step time instead of
tokens, and memory is forecast apart from load, over seconds."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from quadriga.core.forecast import LengthPrediction, LoadForecast
from quadriga.core.replica import ReplicaSnapshot
from quadriga.core.routing import PlaceRequest
from quadriga.errors import ConfigError
from quadriga.policies.ares.settings import NUM_POINTS, TOKENS_AHEAD

logger = logging.getLogger(__name__)

NUM_LOADS = NUM_POINTS + 1
(
    TOKENS,
    REMAINING,
    REMAINING_LOWER,
    REMAINING_UPPER,
    MOVES,
    SINCE_MOVE_S,
    MOVABLE,
    SHARE,
    LEAST_LAYERS,
    MOST_LAYERS,
    MOST_TOKENS,
) = range(11)
"""Columns of a row. SINCE_MOVE_S is infinite for a sequence that never moved; MOVABLE is one of the
next three; SHARE is the part of the replica's layers that a token is expected to run, in 0..1; a
replica needs LEAST_LAYERS for the sequence to go there, and may have no more than MOST_LAYERS; 0 is
no bound; MOST_TOKENS is what the sequence may become, which a row there must hold."""
FIXED, RUNS, PAUSED = 0.0, 1.0, 2.0
"""On its way, or promised: not to be moved; runs here; stands in host memory here."""
NUM_COLUMNS = 11
ROW_BYTES = 4 * NUM_COLUMNS
MAX_ROWS = 65_536
"""More sequences than that no replica holds; a forecast with more is refused."""

_WIRE = np.dtype("<f4")


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What one more sequence, and one more KV token, add to a decode step."""

    per_sequence_s: float
    per_token_s: float


def tokens_ahead(grid_s: ArrayLike, step_s: ArrayLike) -> NDArray[np.float64]:
    """Tokens a sequence gains until each point: [num_points], or [n, num_points] for n steps."""
    steps = np.maximum(np.asarray(step_s, dtype=np.float64), 1e-9)
    return np.asarray(np.asarray(grid_s, dtype=np.float64) / steps[..., None])


def running_rows(
    remaining: NDArray[np.float64], ahead: NDArray[np.float64] = TOKENS_AHEAD
) -> NDArray[np.bool_]:
    """Whether each sequence still runs at each point: t ≤ N̂(r); it runs now, whatever is predicted.

    Args:
        remaining: N̂(r), [num_rows].
        ahead: [num_points] or [num_rows, num_points].

    Returns: [num_rows, num_points].
    """
    runs = np.asarray(ahead <= remaining[:, None])
    runs[:, 0] = True
    return runs


def load_rows(
    tokens: NDArray[np.float64],
    remaining: NDArray[np.float64],
    costs: StepCosts,
    ahead: NDArray[np.float64] = TOKENS_AHEAD,
    share: NDArray[np.float64] | None = None,
) -> NDArray[np.float64]:
    """Seconds each sequence adds to a step while it lasts: of n_r(t) = N(r) + t tokens.

    Args:
        tokens: N(r), [num_rows].
        remaining, ahead: See `running_rows`.
        share: Of the layers that a token of each runs, [num_rows]; None: all.

    Returns: [num_rows, num_points].
    """
    load = costs.per_token_s * (tokens[:, None] + ahead)
    load += costs.per_sequence_s
    load *= running_rows(remaining, ahead)
    if share is not None:
        load *= share[:, None]
    return load


def load_sums(
    tokens: NDArray[np.float64], remaining: NDArray[np.float64], share: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What loads are made of: sequences that run at each point, and their KV tokens then, each
    counted by the share of the layers that its tokens run.

    Returns: twice [num_rows, num_points].
    """
    runs = running_rows(remaining) * share[:, None]
    return runs, (tokens[:, None] + TOKENS_AHEAD) * runs


def memory_rows(
    tokens: NDArray[np.float64], remaining: NDArray[np.float64], ahead: NDArray[np.float64]
) -> NDArray[np.float64]:
    """KV tokens each sequence holds, at most, between each point and the one before it.

    The grid is coarse far ahead; a sequence that ends between two points is counted with its
    last size at the later one, so that no peak falls between them.

    Returns: [num_rows, num_points].
    """
    held = np.minimum(ahead, remaining[:, None])
    held += tokens[:, None]
    held[:, 1:] *= ahead[..., :-1] < remaining[:, None]
    held[:, 0] = tokens
    return held


def forecast_rows(
    *,
    tokens: ArrayLike,
    remaining: ArrayLike,
    lower: ArrayLike,
    upper: ArrayLike,
    moves: ArrayLike,
    since_move_s: ArrayLike,
    movable: ArrayLike,
    share: ArrayLike = 1.0,
    least_layers: ArrayLike = 0.0,
    most_layers: ArrayLike = 0.0,
    most_tokens: ArrayLike = 0.0,
) -> NDArray[np.float32]:
    """Return the rows of a forecast: [num_rows, NUM_COLUMNS]. Arguments as in the columns."""
    columns = (
        tokens,
        remaining,
        lower,
        upper,
        moves,
        since_move_s,
        movable,
        share,
        least_layers,
        most_layers,
        most_tokens,
    )
    rows = np.empty((np.size(tokens), NUM_COLUMNS), dtype=np.float32)
    for index, column in enumerate(columns):
        rows[:, index] = column
    return rows


def sizes(rows: NDArray[np.float32]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Tokens and remaining tokens of rows as packed, in single precision: twice [num_rows]."""
    return rows[:, TOKENS].astype(np.float64), rows[:, REMAINING].astype(np.float64)


def shares(rows: NDArray[np.float32]) -> NDArray[np.float64]:
    """The share of the layers that a token of each row runs, as packed: [num_rows]."""
    return rows[:, SHARE].astype(np.float64)


def mean_share(forecast: LoadForecast) -> float:
    """What a token of the sequences there runs of the layers, on average; 1 without any."""
    if not forecast.sequence_ids:
        return 1.0
    return float(rows_of(forecast)[:, SHARE].mean())


def pack(
    rows: NDArray[np.float32],
    sequence_ids: Sequence[str],
    *,
    grid_s: Sequence[float],
    step_s: float,
    base_s: float,
    costs: StepCosts,
    bytes_per_token: float = 0.0,
    has_predictions: bool = True,
    front_share: float = 1.0,
) -> LoadForecast:
    """Pack one replica's rows, with their sums over the horizon, for its snapshot.

    Args:
        rows: Of `forecast_rows`, in the order of `sequence_ids`.
        step_s: A step of this replica, as lately measured.
        base_s, costs: A step without sequences, and what they add, as measured here.
    """
    tokens, remaining = sizes(rows)
    ahead, share = tokens_ahead(grid_s, step_s), shares(rows)
    running, context = load_sums(tokens, remaining, share)
    return LoadForecast(
        grid_s=tuple(grid_s),
        sequence_ids=tuple(sequence_ids),
        rows=rows.astype(_WIRE, copy=False).tobytes(),
        running=_summed(running),
        context=_summed(context),
        load_s=_summed(load_rows(tokens, remaining, costs, ahead, share)),
        tokens=_summed(memory_rows(tokens, remaining, ahead)),
        base_s=base_s,
        has_predictions=has_predictions,
        per_sequence_s=costs.per_sequence_s,
        per_token_s=costs.per_token_s,
        bytes_per_token=bytes_per_token,
        front_share=front_share,
    )


def packed_anew(forecast: LoadForecast, rows: NDArray[np.float32], step_s: float) -> LoadForecast:
    """The same sequences with other rows, which something is known of: see `pack`."""
    return pack(
        rows,
        forecast.sequence_ids,
        grid_s=forecast.grid_s,
        step_s=step_s or forecast.base_s,
        base_s=forecast.base_s,
        costs=StepCosts(forecast.per_sequence_s, forecast.per_token_s),
        bytes_per_token=forecast.bytes_per_token,
        front_share=forecast.front_share,
    )


def numbers(packed: bytes) -> NDArray[np.float32]:
    """The numbers of a field of a forecast."""
    return np.frombuffer(packed, dtype=_WIRE)


def rows_of(forecast: LoadForecast) -> NDArray[np.float32]:
    """The rows as packed: [num_rows, NUM_COLUMNS]."""
    return numbers(forecast.rows).reshape(-1, NUM_COLUMNS)


def with_usual_lengths(
    forecasts: Sequence[LoadForecast], step_s: Sequence[float]
) -> list[LoadForecast]:
    """Where one replica knows no length at all, take its sequences to last as long as the others'.

    A replica estimates sequences that are not predicted yet by those it has; one that holds only
    such has nothing to go by, and would make them run to their limits. No more is moved because of
    the guess: the lower quantile stays 0 and the upper one the limit.

    Args:
        step_s: A step of each replica; 0 where none was measured.
    """
    blind = [i for i, f in enumerate(forecasts) if not f.has_predictions]
    known = [rows_of(f)[:, REMAINING] for f in forecasts if f.has_predictions]
    lasts = np.concatenate(known) if known else np.empty(0)
    found = list(forecasts)
    if not len(lasts):
        return found
    for i in blind:
        rows = rows_of(forecasts[i]).copy()
        rows[:, REMAINING] = np.minimum(rows[:, REMAINING], lasts.mean())
        found[i] = packed_anew(forecasts[i], rows, step_s[i])
    return found


def _summed(values: NDArray[np.float64]) -> bytes:
    return bytes(values.sum(axis=0).astype(_WIRE).tobytes())


def check_forecast(forecast: LoadForecast) -> None:
    """Look at a forecast from another process before it is believed.

    Raises:
        ConfigError: Sizes that do not fit each other, or the grid of another version.
    """
    num_rows = len(forecast.sequence_ids)
    if num_rows > MAX_ROWS:
        raise ConfigError(f"forecast: {num_rows} rows, at most {MAX_ROWS} are taken")
    if len(forecast.grid_s) != NUM_LOADS:
        raise ConfigError(f"forecast: {len(forecast.grid_s)} points where {NUM_LOADS} are meant")
    sums = (forecast.running, forecast.context, forecast.load_s, forecast.tokens)
    found = (len(forecast.rows), *(len(s) for s in sums))
    wanted = (num_rows * ROW_BYTES, *(4 * NUM_LOADS for _ in sums))
    if found != wanted:
        raise ConfigError(f"forecast: {found} bytes where {wanted} belong to {num_rows} rows")
    if not 0.0 < forecast.front_share <= 1.0:
        raise ConfigError(f"forecast: front_share {forecast.front_share} must lie in 0..1")


def checked(snapshot: ReplicaSnapshot, told: set[str]) -> ReplicaSnapshot:
    """A snapshot from another process, without a malformed forecast; the log says so once of each
    replica, of which `told` keeps the names."""
    try:
        if snapshot.forecast is not None:
            check_forecast(snapshot.forecast)
    except ConfigError as exc:  # a replica of another version, perhaps: the others' stay
        if snapshot.info.name not in told:
            told.add(snapshot.info.name)
            logger.warning("forecasts of %s are left out: %s", snapshot.info.name, exc)
        return snapshot.changed(forecast=None)
    return snapshot


@dataclass(frozen=True, slots=True)
class Promised:
    """A sequence sent to a replica that has not reported it yet.

    Attributes:
        share: Of the layers there, that its tokens are expected to run, were there so many; 0: as
            many as those of the sequences there do.
    """

    sequence_id: str
    num_tokens: int
    prediction: LengthPrediction
    share: float = 0.0


def promised_to(
    replica: ReplicaSnapshot, request: PlaceRequest, length: LengthPrediction
) -> Promised:
    """A sequence that is sent to a replica, by all that is known of it."""
    share = request.expected_layers / replica.info.depth_class.depth
    return Promised(request.sequence_id, request.num_tokens, length, share)


def with_promised(
    forecast: LoadForecast, promised: Sequence[Promised], step_s: float
) -> LoadForecast:
    """Add sequences on their way, which cannot be moved, to rows and sums."""
    known = set(forecast.sequence_ids)
    new = [p for p in promised if p.sequence_id not in known]
    if not new:
        return forecast
    usual = mean_share(forecast)
    rows = forecast_rows(
        tokens=[p.num_tokens for p in new],
        remaining=[p.prediction.mean for p in new],
        lower=[p.prediction.lower for p in new],
        upper=[p.prediction.upper for p in new],
        moves=np.zeros(len(new)),
        since_move_s=np.full(len(new), np.inf),
        movable=np.full(len(new), FIXED),
        share=[min(p.share or usual, 1.0) for p in new],
    )
    (tokens, remaining), share = sizes(rows), shares(rows)
    ahead = tokens_ahead(forecast.grid_s, step_s or forecast.base_s)
    costs = StepCosts(forecast.per_sequence_s, forecast.per_token_s)
    running, context = load_sums(tokens, remaining, share)
    return forecast.changed(
        sequence_ids=(*forecast.sequence_ids, *(p.sequence_id for p in new)),
        rows=forecast.rows + rows.astype(_WIRE, copy=False).tobytes(),
        running=_plus(forecast.running, running),
        context=_plus(forecast.context, context),
        load_s=_plus(forecast.load_s, load_rows(tokens, remaining, costs, ahead, share)),
        tokens=_plus(forecast.tokens, memory_rows(tokens, remaining, ahead)),
    )


def with_fixed(forecast: LoadForecast, sequence_ids: Collection[str]) -> LoadForecast:
    """Mark sequences as not to be moved."""
    fixed = [i for i, s in enumerate(forecast.sequence_ids) if s in sequence_ids]
    if not fixed:
        return forecast
    rows = rows_of(forecast).copy()
    rows[fixed, MOVABLE] = FIXED
    return forecast.changed(rows=rows.tobytes())


def seconds_to_full(forecast: LoadForecast, capacity_tokens: int) -> float:
    """Seconds until the forecast exceeds the KV memory; infinite where it never does."""
    tokens = numbers(forecast.tokens).astype(np.float64)
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
    total = numbers(packed).astype(np.float64) + rows.sum(axis=0)
    return bytes(total.astype(_WIRE).tobytes())
