"""When a moving sequence should come to rest, so that it catches the destination's next step.

A token comes every step, at the source's step borders; the next one after the move comes a whole
step after the first border of the destination that the commit reaches. So the gap is one step and
the time from border to border: less than two steps, unless the commit just misses a border. Where
it would, or would come long before one, the source holds its own next step back for a moment, and
the borders lie better the next time.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_HOLD_SHARE = 0.08
"""Of a step: how long the source's step may be held back at once; its other sequences wait too."""
MAX_HOLDS = 8
MARGIN_SHARE = 0.1
"""Of a step: how far ahead of the destination's border, or behind it, is safe."""
MAX_WAIT_SHARE = 0.4
"""Of a step: how long the commit may wait for the border, where a hold can change it."""


@dataclass(frozen=True, slots=True)
class StepPhase:
    """Where a replica is in its steps.

    Attributes:
        left_s: Until the step under way should end.
        step_s: What a step takes; 0 where nothing runs.
    """

    left_s: float
    step_s: float


def hold_s(phase: StepPhase, *, age_s: float, lead_s: float) -> float:
    """Return how long to hold the source's next step back; 0 is to come to rest now.

    Args:
        phase: Of the destination, `age_s` ago.
        lead_s: From rest to the commit's arrival.
    """
    step_s = phase.step_s
    margin_s = MARGIN_SHARE * step_s
    if step_s <= 0.0 or lead_s + 2 * margin_s >= step_s:
        return 0.0  # steps so short that there is nothing to catch
    until_border_s = (phase.left_s - age_s) % step_s
    wait_s = until_border_s - (lead_s + margin_s)
    too_long_s = wait_s - MAX_WAIT_SHARE * step_s if wait_s >= 0.0 else until_border_s + margin_s
    return min(max(0.0, too_long_s), MAX_HOLD_SHARE * step_s)
