"""How long running sequences still go on: when the length head is asked, and what came of it.

What it says is averaged with what it said before, kept with the sequence, and travels with it.

Source: ARES §4 and §5.1 (predicted again every k steps, on the worker); what is known is used
before what is predicted: a sequence ends at its `max_tokens`, and one that ignores the end token
not before. The average is ours.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from typing import Protocol

from quadriga.core.forecast import LengthOutcome, LengthPrediction
from quadriga.core.output import EngineOutput
from quadriga.core.request import FinishReason, SequenceState

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


def remaining_of(state: SequenceState) -> LengthPrediction | None:
    """Tokens a sequence will still generate, by all that is known now; None where nothing is."""
    produced = len(state.output_ids)
    most = float(max(0, state.sampling.max_tokens - produced))
    if state.sampling.ignore_eos and not state.sampling.stop_token_ids:
        return LengthPrediction(most, most, most)
    said = state.prediction
    if said is None:
        return None
    since = produced - state.predicted_at
    least = float(max(0, state.sampling.min_tokens - produced))
    mean, lower, upper = (
        min(max(tokens - since, least), most) for tokens in (said.mean, said.lower, said.upper)
    )
    # Who outlives what was said goes on for a while: the next prediction will tell how long.
    return LengthPrediction(max(mean, min(1.0, most)), lower, max(upper, min(1.0, most)))


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
        for new, old in (
            (said.mean, last.mean), (said.lower, last.lower), (said.upper, last.upper)
        )
    )  # fmt: skip
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

    def stepped(self, num_left: int, num_running: int) -> None:
        """Called after every pass of the engine.

        Args:
            num_left: Tokens that left in it.
            num_running: Sequences that run.
        """
        if self._pending is not None:
            self._settle()
        if not num_left:
            return
        if self._left_to_ask <= 0:
            self._credit += num_left
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
