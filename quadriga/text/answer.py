"""One answer's text, as its tokens come."""

from __future__ import annotations

from quadriga.core.output import EngineOutput
from quadriga.core.request import FinishReason
from quadriga.text.detokenizer import Detokenizer
from quadriga.text.stops import StopMatcher


class AnswerText:
    """Whole characters, up to the first stop string; what ends an answer has no text.

    Attributes:
        is_stopped: A stop string was met; read nothing more.
    """

    def __init__(self, detokenizer: Detokenizer, stop: tuple[str, ...]) -> None:
        self.is_stopped = False
        self._detokenizer = detokenizer
        self._stops = StopMatcher(stop)

    def read(self, emission: EngineOutput) -> str:
        """Return the text that an emission makes visible: with its last one, all that is left."""
        shown = emission.token_ids
        if emission.finish is FinishReason.STOP:
            shown = shown[:-1]
        pieces = [self._detokenizer.push(token_id) for token_id in shown]
        if emission.finish is not None:
            pieces.append(self._detokenizer.flush())
        text, self.is_stopped = self._stops.push("".join(pieces))
        if emission.finish is not None and not self.is_stopped:
            text += self._stops.flush()
        return text
