"""Predicted lengths and forecasts of the load."""

from __future__ import annotations

from dataclasses import dataclass

from quadriga.core.relative_time import CompactPickleMixin


@dataclass(frozen=True, slots=True)
class LengthPrediction(CompactPickleMixin):
    """How many more tokens a sequence is expected to generate.

    Attributes:
        mean: Best guess.
        lower, upper: Quantiles around it (10 % and 90 % where nothing else is said).
    """

    mean: float
    lower: float
    upper: float


@dataclass(frozen=True, slots=True)
class LengthOutcome(CompactPickleMixin):
    """What came of a prediction: its sequence ended by itself.

    Attributes:
        remaining_tokens: What it really still generated after the prediction.
    """

    prediction: LengthPrediction
    remaining_tokens: int


@dataclass(frozen=True, slots=True)
class LoadForecast(CompactPickleMixin):
    """What a decode replica expects of its sequences, packed; part of its snapshot.

    Little-endian float32 throughout. The columns of `rows` and the points are those of
    `quadriga.policies.ares.forecast`; one row is 44 bytes, and there are never more rows than the
    replica has slots plus sequences reserved or paused.

    Attributes:
        grid_s: Horizon points, seconds from now; the first is now (0.0). One grid a depth class.
        sequence_ids: [num_rows]; the sequences the replica holds, is promised, or has paused.
        rows: [num_rows, forecast.NUM_COLUMNS].
        running, context: [num_points] each; sequences that still run when each has gained
            `forecast.TOKENS_AHEAD` tokens, and their KV tokens then, each counted by the share of
            the layers that its tokens run. Loads are made of these, and do not depend on how fast
            the replica is.
        load_s: [num_points]; what the sequences add to a step here, at each point of the grid.
        tokens: [num_points]; KV tokens they hold, at each point of the grid.
        base_s: What a step costs without sequences.
        has_predictions: False where no length head is at hand: only the first point means much.
        per_sequence_s, per_token_s: What one more sequence, and one more KV token, add to a step,
            as measured here.
        bytes_per_token: KV of one token; what moving it costs.
        front_share: Of the layers, those up to the first exit in use here: what every token runs. 1
            where no token may leave early.
    """

    grid_s: tuple[float, ...]
    sequence_ids: tuple[str, ...]
    rows: bytes
    running: bytes
    context: bytes
    load_s: bytes
    tokens: bytes
    base_s: float
    has_predictions: bool = True
    per_sequence_s: float = 0.0
    per_token_s: float = 0.0
    bytes_per_token: float = 0.0
    front_share: float = 1.0
