"""What a decode replica's sequences will weigh, for its snapshot.

The engine's thread writes down what it holds (`hold`); the vectors are made of it elsewhere.

Source: ARES §5.1 and §5.2: forecast on the worker.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from quadriga.core.forecast import LengthPrediction, LoadForecast
from quadriga.core.kv import TransferOffer
from quadriga.core.request import SequenceState
from quadriga.policies.ares.forecast import (
    FIXED,
    PAUSED,
    RUNS,
    StepCosts,
    forecast_rows,
    pack,
)
from quadriga.scheduling.lengths import remaining_of


@dataclass(slots=True)
class SequenceLengths:
    """The sequences of a replica at one moment, as columns.

    Attributes:
        moved_unix_s: Of the last move; 0 where there was none.
        movable: Of FIXED, RUNS, PAUSED.
        is_known: Every one's remaining length is known or predicted.
    """

    sequence_ids: list[str]
    tokens: list[float]
    mean: list[float]
    lower: list[float]
    upper: list[float]
    moves: list[float]
    moved_unix_s: list[float]
    movable: list[float]
    is_known: bool = True


def hold(
    states: Sequence[SequenceState],
    offers: Iterable[TransferOffer],
    *,
    num_running: int = 0,
    num_paused: int = 0,
    leaving: Collection[str] = (),
) -> SequenceLengths:
    """Write down what a replica holds.

    Where nothing is predicted a sequence is taken to run to its `max_tokens`; one on its way here,
    which will be predicted once its prompt is computed, to become as long as those that run.

    Args:
        states: Running, then those that are paused, then those at rest.
        offers: Sequences on their way here.
        num_running, num_paused: So many of `states`.
        leaving: Those on their way elsewhere.
    """
    held = SequenceLengths([], [], [], [], [], [], [], [])
    answers: list[float] = []
    for index, state in enumerate(states):
        said = remaining_of(state)
        if said is None:
            held.is_known = False
            most = float(state.sampling.max_tokens - len(state.output_ids))
            said = LengthPrediction(most, 0.0, most)
        else:
            answers.append(len(state.output_ids) + said.mean)
        held.sequence_ids.append(state.sequence_id)
        held.tokens.append(float(state.num_tokens))
        held.mean.append(said.mean)
        held.lower.append(said.lower)
        held.upper.append(said.upper)
        held.moves.append(float(state.num_moves))
        held.moved_unix_s.append(state.moved_unix_s)
        if state.sequence_id in leaving or index >= num_running + num_paused:
            held.movable.append(FIXED)
        else:
            held.movable.append(RUNS if index < num_running else PAUSED)
    known = set(held.sequence_ids)
    for offer in offers:
        if offer.sequence_id in known:
            continue  # it has just joined
        most = float(offer.max_total_tokens - offer.num_tokens)
        usual = sum(answers) / len(answers) if answers else most
        said = offer.prediction or LengthPrediction(usual, 0.0, most)
        held.sequence_ids.append(offer.sequence_id)
        held.tokens.append(float(offer.num_tokens))
        held.mean.append(min(said.mean, most))
        held.lower.append(min(said.lower, most))
        held.upper.append(min(said.upper, most))
        held.moves.append(0.0)
        held.moved_unix_s.append(0.0)
        held.movable.append(FIXED)
    return held


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a decode step costs: `base_s + per_sequence_s · b + per_token_s · n`, all scaled by
    what is measured while serving."""

    base_s: float
    per_sequence_s: float
    per_token_s: float

    def seconds(self, num_sequences: float, num_tokens: float) -> float:
        """Of a step over b sequences with n context tokens."""
        return self.base_s + self.per_sequence_s * num_sequences + self.per_token_s * num_tokens

    def scaled(self, factor: float) -> StepShape:
        """The same shape, `factor` times as slow."""
        return StepShape(
            factor * self.base_s, factor * self.per_sequence_s, factor * self.per_token_s
        )


class StepTimes:
    """The shape as calibrated, at the scale of the steps as measured.

    Kernels that are swapped in, a slower clock or a busy host change all parts alike, nearly.
    """

    RATE = 0.2
    LIMIT = 16.0

    def __init__(self, shape: StepShape) -> None:
        self._shape = shape
        self._factor = 1.0

    def observe(self, step_s: float, num_sequences: int, num_tokens: int) -> None:
        """Compare a recent step time with the shape's."""
        if not num_sequences or step_s <= 0.0:
            return
        ratio = step_s / self._shape.seconds(num_sequences, num_tokens)
        ratio = min(max(ratio, 1.0 / self.LIMIT), self.LIMIT)
        self._factor += self.RATE * (ratio - self._factor)

    @property
    def shape(self) -> StepShape:
        return self._shape.scaled(self._factor)


def forecast(
    held: SequenceLengths,
    shape: StepShape,
    *,
    grid_s: tuple[float, ...],
    step_s: float,
    bytes_per_token: float,
    now_unix_s: float,
) -> LoadForecast:
    """Pack what a replica holds into the forecast of its snapshot.

    Args:
        step_s: A step as lately measured; 0 before the first.
    """
    moved_s = np.array(held.moved_unix_s)
    rows = forecast_rows(
        tokens=held.tokens,
        remaining=held.mean,
        lower=held.lower,
        upper=held.upper,
        moves=held.moves,
        since_move_s=np.where(moved_s > 0.0, np.maximum(0.0, now_unix_s - moved_s), np.inf),
        movable=held.movable,
    )
    return pack(
        rows,
        held.sequence_ids,
        grid_s=grid_s,
        step_s=step_s or shape.base_s,
        base_s=shape.base_s,
        costs=StepCosts(shape.per_sequence_s, shape.per_token_s),
        bytes_per_token=bytes_per_token,
        has_predictions=held.is_known,
    )
