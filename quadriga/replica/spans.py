"""The stages of sequences that a replica has under way, as spans; nothing while tracing is off."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from quadriga.clock import Clock
from quadriga.core.output import EngineOutput
from quadriga.core.request import SequenceState
from quadriga.observability import tracing
from quadriga.observability.tracing import Attributes

MAX_OPEN = 4096
"""More than a replica ever holds; whatever is never ended must not pile up."""


class SequenceSpans:
    """Open stages of one replica, by sequence; on its event loop.

    Attributes:
        open: Sequence → (stage, traceparent, since when, its state, output tokens it had).
    """

    def __init__(self, replica: str, clock: Clock) -> None:
        self._replica = replica
        self._clock = clock
        self.open: dict[str, tuple[str, str, float, SequenceState, int]] = {}

    def begin(self, stage: str, state: SequenceState) -> None:
        """A stage of a sequence begins here."""
        if state.traceparent is None or len(self.open) >= MAX_OPEN:
            return
        since, num_tokens = self._clock.unix_s(), len(state.output_ids)
        self.open[state.sequence_id] = (stage, state.traceparent, since, state, num_tokens)

    @contextmanager
    def begun(self, stage: str, state: SequenceState) -> Iterator[None]:
        """A stage of a sequence begins here, if what is done inside succeeds."""
        self.begin(stage, state)
        try:
            yield
        except BaseException as exc:
            self.end(state.sequence_id, getattr(exc, "code", "cancelled"))
            raise

    def end(self, sequence_id: str, error: str | None = None, /, **attributes: str | int) -> None:
        """It is over; unknown ones are no error."""
        entry = self.open.pop(sequence_id, None)
        if entry is None:
            return
        stage, traceparent, since, state, num_before = entry
        said: Attributes = {
            "quadriga.replica": self._replica,
            "quadriga.sequence_id": sequence_id,
            "quadriga.tokens": len(state.output_ids) - num_before,
            **attributes,
        }
        tracing.record(stage, traceparent, since, self._clock.unix_s(), said, error)

    def emitted(self, emissions: Sequence[tuple[str, EngineOutput]]) -> None:
        """End what these emissions end; ask `open` first, which is empty while tracing is off."""
        for _, emission in emissions:
            if emission.error is not None:
                self.end(emission.sequence_id, emission.error.code)
            elif emission.finish is not None:
                self.end(emission.sequence_id, **{"quadriga.finish": emission.finish.value})
            elif emission.move == "done":
                self.end(emission.sequence_id, **{"quadriga.moved_to": emission.moved_to or ""})
