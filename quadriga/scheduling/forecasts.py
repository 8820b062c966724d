"""Forecasts of a decode replica: how long its answers become, and what it will hold.

The engine's thread writes down what it holds (`hold`); the vectors are made of it elsewhere.

Source: ARES §5.1 and §5.2: forecast on the worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from quadriga.core.forecast import LengthOutcome, LengthPrediction, LoadForecast
from quadriga.core.kv import TransferOffer
from quadriga.core.output import EngineOutput
from quadriga.core.request import FinishReason, SequenceState, layers_of, remaining_of
from quadriga.policies.ares.expected_depth import ExpectedDepth
from quadriga.policies.ares.forecast import FIXED, PAUSED, RUNS, StepCosts, forecast_rows, pack


@dataclass(slots=True)
class SequenceLengths:
    """The sequences of a replica at one moment, as columns.

    Attributes:
        moved_unix_s: Of the last move; 0 where there was none.
        movable: Of FIXED, RUNS, PAUSED.
        share: Of the layers, that a token of each is expected to run.
        least_layers, most_layers: That a replica must have for each to go there; 0: no bound.
        most_tokens: That each may become.
        is_known: Some remaining length is known or predicted, or nothing is held: by it the others
            are estimated.
    """

    sequence_ids: list[str]
    tokens: list[float]
    mean: list[float]
    lower: list[float]
    upper: list[float]
    moves: list[float]
    moved_unix_s: list[float]
    movable: list[float]
    share: list[float] = field(default_factory=list)
    least_layers: list[int] = field(default_factory=list)
    most_layers: list[int] = field(default_factory=list)
    most_tokens: list[int] = field(default_factory=list)
    is_known: bool = True


def hold(
    states: Sequence[SequenceState],
    coming: Iterable[TransferOffer | SequenceState],
    *,
    num_running: int = 0,
    num_paused: int = 0,
    leaving: Collection[str] = (),
    depths: ExpectedDepth | None = None,
    deterministic: bool = False,
) -> SequenceLengths:
    """Write down what a replica holds.

    A sequence of which nothing is predicted is taken to become as long as the others here do, or
    where nothing is predicted of any, to run to its `max_tokens`. One that is still to come will
    be predicted once its prompt is computed.

    Args:
        states: Decoding, then paused, then moving ones.
        coming: Sequences on their way here, or whose prompts are still to be computed here; those
            of `states` are left out.
        num_running, num_paused: So many of `states`.
        leaving: Those on their way elsewhere.
        depths: What is known of the layers that tokens run here; None: they run all, and the
            sequences may go to any depth.
        deterministic: Answers may not depend on the load.
    """
    held = SequenceLengths([], [], [], [], [], [], [], [])
    predictions = [remaining_of(state) for state in states]
    answers = [
        len(state.output_ids) + said.mean
        for state, said in zip(states, predictions, strict=True)
        if said is not None
    ]
    for index, (state, prediction) in enumerate(zip(states, predictions, strict=True)):
        most = float(max(0, state.sampling.max_tokens - len(state.output_ids)))
        said = prediction or _as_others(answers, len(state.output_ids), most)
        held.sequence_ids.append(state.sequence_id)
        held.tokens.append(float(state.num_tokens))
        held.mean.append(said.mean)
        held.lower.append(said.lower)
        held.upper.append(said.upper)
        held.most_tokens.append(state.max_total_tokens)
        held.moves.append(float(state.num_moves))
        held.moved_unix_s.append(state.moved_unix_s)
        if state.sequence_id in leaving or index >= num_running + num_paused:
            held.movable.append(FIXED)
        else:
            held.movable.append(RUNS if index < num_running else PAUSED)
    known = set(held.sequence_ids)
    if depths is not None:
        held.share = [n / depths.depth for n in depths.look(states, held.mean)]
        for state in states:
            bounds = state.exits.depth_bounds(depths.depth, deterministic=deterministic)
            held.least_layers.append(bounds[0])
            held.most_layers.append(bounds[1])
    usual = sum(held.share) / len(held.share) if held.share else 1.0
    is_known = bool(answers)
    for each in coming:
        if each.sequence_id in known:
            continue  # it has just joined
        most = float(each.max_total_tokens - each.num_tokens)
        said = each.prediction or _as_others(answers, 0, most)
        is_known |= each.prediction is not None
        held.sequence_ids.append(each.sequence_id)
        held.tokens.append(float(each.num_tokens))
        held.mean.append(min(said.mean, most))
        held.lower.append(min(said.lower, most))
        held.upper.append(min(said.upper, most))
        held.most_tokens.append(each.max_total_tokens)
        held.moves.append(0.0)
        held.moved_unix_s.append(0.0)
        held.movable.append(FIXED)
        if depths is not None:
            layers = layers_of(each) if isinstance(each, SequenceState) else each.expected_layers
            held.share.append(min(layers / depths.depth or usual, 1.0))
    held.is_known = is_known or not held.sequence_ids
    for column, value in ((held.share, 1.0), (held.least_layers, 0), (held.most_layers, 0)):
        column += [value] * (len(held.sequence_ids) - len(column))
    return held


def _as_others(answers: Sequence[float], produced: int, most: float) -> LengthPrediction:
    """Remaining tokens of a sequence of which nothing is predicted.

    Args:
        answers: Lengths that the answers of others are expected to have.
        produced: Tokens that the sequence has generated.
        most: Tokens that it may still generate.
    """
    if not answers:
        return LengthPrediction(most, 0.0, most)
    usual = max(sum(answers) / len(answers) - produced, 1.0)
    return LengthPrediction(min(usual, most), 0.0, most)


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

    def observe(self, step_s: float, num_sequences: float, num_tokens: float) -> None:
        """Compare a recent step time with the shape's.

        Args:
            num_sequences, num_tokens: Each sequence counted by the share of the layers that its
                tokens run.
        """
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
    front_share: float = 1.0,
) -> LoadForecast:
    """Pack what a replica holds into the forecast of its snapshot.

    Args:
        step_s: A step as lately measured; 0 before the first.
        front_share: See `LoadForecast`.
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
        share=held.share,
        least_layers=held.least_layers,
        most_layers=held.most_layers,
        most_tokens=held.most_tokens,
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
        front_share=front_share,
    )


Answer = Callable[[], list[LengthPrediction]]
"""Returns the predictions; on a device, waits for it."""
NEW_SHARE = 0.4
"""Of an answer in what is believed from then on. One state tells where a sequence is only by parts,
and each state other parts: answers err each in its own way, and together less."""
MAX_OUTCOMES = 1024
"""Ended predictions kept for the next report."""


class LengthModel(Protocol):
    """The length heads behind a runner."""

    def ask(self) -> tuple[list[SequenceState], Answer] | None:
        """Predict for the sequences whose tokens left in the last pass; None without a head."""


def believed(state: SequenceState, said: LengthPrediction, num_output: int) -> LengthPrediction:
    """What is believed after an answer: its mean with the last belief, counted down.

    Args:
        said: Of the moment when there were `num_output` output tokens.
    """
    last = state.prediction
    if last is None:
        return said
    since = num_output - state.predicted_at
    mean, lower, upper = (
        NEW_SHARE * new + (1.0 - NEW_SHARE) * max(0.0, old - since)
        for new, old in ((said.mean, last.mean), (said.lower, last.lower), (said.upper, last.upper))
    )
    return LengthPrediction(mean, lower, upper)


class Asking:
    """Decides when the length head is asked, and notes what it says with the sequences.

    All sequences whose tokens leave in one pass are asked about together. An answer is looked at
    after the next pass, when a device has long had it ready.

    Args:
        every_tokens: Tokens a sequence generates between two questions, on average.

    Attributes:
        num_predictions: Since the start.
        seconds: Time of the engine's thread they took.
    """

    def __init__(self, model: LengthModel, every_tokens: int) -> None:
        self.num_predictions = 0
        self.seconds = 0.0
        self._model = model
        self._every = every_tokens
        self._credit = 0
        self._left_to_ask = 0
        self._pending: tuple[list[SequenceState], list[int], Answer] | None = None

    def stepped(self, num_tokens: int, num_left: int, num_running: int) -> None:
        """Called after every pass of the engine.

        Args:
            num_tokens: That left in it, several of a sequence whose drafts agreed.
            num_left: Sequences of which some left.
            num_running: Sequences that run.
        """
        if self._pending is not None:
            self._settle()
        if not num_left:
            return
        if self._left_to_ask <= 0:
            self._credit += num_tokens
            if self._credit < self._every * num_running:
                return
            # With early exits a pass is some of the sequences: ask until it was all of them.
            self._credit = 0
            self._left_to_ask = num_running
        self._left_to_ask -= num_left
        started_s = time.perf_counter()
        asked = self._model.ask()
        if asked is not None:
            states, answer = asked
            self._pending = states, [len(s.output_ids) for s in states], answer
        self.seconds += time.perf_counter() - started_s

    def _settle(self) -> None:
        assert self._pending is not None
        started_s = time.perf_counter()
        (states, counts, answer), self._pending = self._pending, None
        for state, count, said in zip(states, counts, answer(), strict=True):
            state.prediction, state.predicted_at = believed(state, said, count), count
        self.num_predictions += len(states)
        self.seconds += time.perf_counter() - started_s


class Outcomes:
    """What came of the first prediction of each sequence that ended here by itself.

    A sequence that was cut off, moved away or cancelled says nothing about its prediction.
    """

    def __init__(self) -> None:
        self._first: dict[str, tuple[LengthPrediction, int]] = {}
        self._ended: list[LengthOutcome] = []

    def look(self, states: Collection[SequenceState]) -> None:
        """Note what newcomers are predicted, and forget who is not here any more."""
        before, self._first = self._first, {}
        for state in states:
            known = before.get(state.sequence_id)
            if known is None and state.prediction is not None and not state.sampling.ignore_eos:
                known = state.prediction, state.predicted_at
            if known is not None:
                self._first[state.sequence_id] = known

    def emitted(self, emissions: Iterable[tuple[str, EngineOutput]]) -> None:
        """Look at who ended."""
        for _, emission in emissions:
            if emission.finish is None and emission.error is None:
                continue
            first = self._first.pop(emission.sequence_id, None)
            if first is not None and emission.finish is FinishReason.STOP:
                said, at = first
                total = emission.first_index + len(emission.token_ids)
                if len(self._ended) < MAX_OUTCOMES:
                    self._ended.append(LengthOutcome(said, total - at))

    def take(self) -> list[LengthOutcome]:
        """Those since the last call."""
        ended, self._ended = self._ended, []
        return ended
