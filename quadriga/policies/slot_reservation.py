"""How much KV memory a new sequence is promised where memory is promised as it is used.

A decode replica promises what a sequence has and its part of what all that run there will probably
still need together. Alone, that is the upper quantile of the answers which ended on this replica
lately, or that which its length head names, where that is less. Among others it is less: who is
longer than expected is made up for by who is shorter, and by who ends, so that what n sequences
need beyond what they have grows with the root of n. A newcomer is promised what one more adds to
that: √(n + 1) − √n of its upper quantile. Never more than the sequence may become. A longer answer
grows block by block, and where it cannot, a sequence is paused (`quadriga.scheduling.preemption`),
so a wrong guess costs a pause and never an answer. The upper quantile in full to each would leave
most of a large memory unused while newcomers wait (docs/experiments/ares.md, "Promises below
overload").

One that is predicted to be long is promised no more than others: who needs room for all of it at
once waits until a replica is nearly empty, and everybody behind it waits too
(docs/experiments/ares.md, "What a long prediction is promised"). Under overload the scheduler looks
at forecasts of the memory over time, and nothing is promised beside them
(`quadriga.policies.ares.overload`).

The replica, placement, admission and the simulator all ask here.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque

from quadriga.core.forecast import LengthPrediction

ADMIT_SHARE = 0.9
"""New sequences are let in while promises stay below this share of the memory. The rest is for
sequences that outgrow their promise; see `admitted_tokens`."""
RETURN_SHARE = 0.75
"""Paused sequences come back while promises stay below this share, so that the one that comes back
does not at once push another one out."""
QUANTILE = 0.9
WINDOW = 256
"""Answers that are remembered."""
ASSUMED_TOKENS = 64
ASSUMED_ANSWERS = 16
"""A replica begins as if it had seen so many answers of `ASSUMED_TOKENS`; they are forgotten like
all others, and answers that were seen outweigh them soon."""


class AnswerLengths:
    """Lengths of the answers that ended lately, and two quantiles of them, each at least 1.

    Attributes:
        usual_tokens: Their median.
        upper_tokens: `QUANTILE` of them.
    """

    def __init__(self) -> None:
        self._in_order = deque([ASSUMED_TOKENS] * ASSUMED_ANSWERS)
        self._sorted = [ASSUMED_TOKENS] * ASSUMED_ANSWERS
        self.usual_tokens = self.upper_tokens = ASSUMED_TOKENS

    def ended(self, num_tokens: int) -> None:
        """Note an answer of so many tokens, whatever ended it."""
        if len(self._in_order) == WINDOW:
            del self._sorted[bisect_left(self._sorted, self._in_order.popleft())]
        self._in_order.append(num_tokens)
        insort(self._sorted, num_tokens)
        self.usual_tokens = max(1, self._sorted[len(self._sorted) // 2])
        at = min(len(self._sorted) - 1, math.ceil(QUANTILE * len(self._sorted)))
        self.upper_tokens = max(1, self._sorted[at])


def admitted_tokens(kv_capacity_tokens: int, num_rows: int, max_model_len: int) -> int:
    """Return up to how many promised tokens new sequences are let in.

    Args:
        max_model_len: Most tokens of one row; 0 where it is not known. Where all rows fit at that
            length no sequence can lack memory, and all of it is promised.
    """
    if 0 < num_rows * max_model_len <= kv_capacity_tokens:
        return kv_capacity_tokens
    return int(ADMIT_SHARE * kv_capacity_tokens)


def promised_tokens(
    num_tokens: int,
    max_total_tokens: int,
    *,
    upper_tokens: int,
    num_held: int,
    prediction: LengthPrediction | None = None,
    by_forecast: bool = False,
) -> int:
    """Return the tokens to promise a new sequence, at least one more than it comes with.

    Args:
        num_tokens: What it comes with.
        max_total_tokens: Most it may become.
        upper_tokens: `AnswerLengths.upper_tokens` of the replica.
        num_held: Sequences that the replica holds already.
        prediction: Of its tokens still to come, where that is known; only a shorter one counts.
        by_forecast: Whether there will be room for it, a forecast says; a token ahead is enough.
    """
    ahead = 1.0 if by_forecast else float(upper_tokens)
    if prediction is not None:
        ahead = min(ahead, prediction.upper)
    part = math.sqrt(num_held + 1) - math.sqrt(num_held)
    return min(num_tokens + max(1, math.ceil(part * ahead)), max(max_total_tokens, num_tokens + 1))
