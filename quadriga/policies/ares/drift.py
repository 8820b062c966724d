"""Do the predictions still hold? Fall back to the present load while they do not.

The length head reports quantiles, so its calibration can be watched: of the sequences that end,
the share whose true remaining length lay inside the predicted range should be the nominal one.
Traffic unlike the training data shows there first.

Source: ours (DESIGN: prediction guard rails).
"""

from __future__ import annotations

from quadriga.core.forecast import LengthPrediction


class DriftMonitor:
    """Watches the share of true lengths inside the predicted range.

    Args:
        nominal: Share that a calibrated head keeps inside its range.
        rate: Weight of one ended sequence in the moving average.
        enter_below: Predictions are distrusted below this share of the nominal one.
        leave_above: They are trusted again above this share of it.
        min_count: Nothing is concluded from fewer ended sequences.
    """

    def __init__(
        self,
        *,
        nominal: float = 0.8,
        rate: float = 0.02,
        enter_below: float = 0.6,
        leave_above: float = 0.8,
        min_count: int = 50,
    ) -> None:
        self._rate, self._min_count = rate, min_count
        self._enter, self._leave = enter_below * nominal, leave_above * nominal
        self.coverage = nominal
        self.mean_error = 0.0
        self.num_ended = 0
        self.is_drifting = False

    def ended(self, prediction: LengthPrediction, remaining_tokens: float) -> None:
        """Note what came of a prediction, once its sequence has ended.

        Args:
            prediction: Taken at any moment of the sequence's life; not one at its very end, which
                is right by itself.
            remaining_tokens: What it really still generated from then.
        """
        inside = prediction.lower <= remaining_tokens <= prediction.upper
        error = abs(prediction.mean - remaining_tokens)
        self.coverage += self._rate * (float(inside) - self.coverage)
        self.mean_error += self._rate * (error - self.mean_error)
        self.num_ended += 1
        if self.num_ended < self._min_count:
            return
        if self.coverage < self._enter:
            self.is_drifting = True
        elif self.coverage > self._leave:
            self.is_drifting = False
