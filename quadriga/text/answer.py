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

    def __init__(
        self, detokenizer: Detokenizer, stop: tuple[str, ...], min_tokens: int = 0
    ) -> None:
        self.is_stopped = False
        self._detokenizer = detokenizer
        self._stops = StopMatcher(stop, min_tokens)

    def read(self, emission: EngineOutput) -> str:
        """Return the text that an emission makes visible: with its last one, all that is left.

        Where a stop string is met, tokens behind it are taken out of the emission.
        """
        shown, text = emission.token_ids, ""
        if emission.finish is FinishReason.STOP:
            shown = shown[:-1]
        for count, token_id in enumerate(shown, 1):
            piece, self.is_stopped = self._stops.push(self._detokenizer.push(token_id))
            text += piece
            if self.is_stopped:
                for column in (emission.token_ids, emission.exit_layers, emission.logprobs or []):
                    del column[count:]
                return text
        if emission.finish is not None:
            piece, self.is_stopped = self._stops.push(self._detokenizer.flush())
            text += piece if self.is_stopped else piece + self._stops.flush()
        return text
