"""Learning-rate schedule: warm-up, plateau, linear decay that lands in time.

The plateau needs no knowledge of the end, so a later run can go on from the weights before the
decay; only the decay looks at the budget, which may be steps, a deadline or both.
"""

from dataclasses import dataclass

_FLOOR = 0.02  # last multiplier of the learning rate


@dataclass(frozen=True, slots=True)
class Budget:
    """When a run ends; whichever limit comes first.

    Attributes:
        first_step: Step at which the run began.
        steps: Step at which it ends, or None.
        started_s: Wall clock at which it began.
        deadline_s: Wall clock at which it ends, or None.
        decay_share: Share of the run that is decay.
    """

    first_step: int
    steps: int | None
    started_s: float
    deadline_s: float | None
    decay_share: float

    def progress(self, step: int, now_s: float) -> float:
        """Share of the run that is over, at most 1."""
        shares = [0.0]
        if self.steps is not None:
            shares.append((step - self.first_step) / max(1, self.steps - self.first_step))
        if self.deadline_s is not None:
            shares.append((now_s - self.started_s) / max(1e-9, self.deadline_s - self.started_s))
        return min(1.0, max(shares))

    def decaying(self, step: int, now_s: float) -> bool:
        """Whether the learning rate falls by now."""
        return self.progress(step, now_s) > 1.0 - self.decay_share

    def multiplier(self, step: int, now_s: float, *, warmup_steps: int) -> float:
        """Learning rate relative to the plateau's; `step` counts from the model's birth."""
        warmup = min(1.0, (step + 1) / warmup_steps)
        into_decay = (self.progress(step, now_s) - (1.0 - self.decay_share)) / self.decay_share
        return warmup * (1.0 - (1.0 - _FLOOR) * max(0.0, into_decay))


def length_scale(curriculum: tuple[tuple[int, float], ...], tokens_seen: int) -> float:
    """Share of the full length range that the curriculum allows after `tokens_seen`."""
    return [scale for since, scale in curriculum if tokens_seen >= since][-1]


def ramp(weights: tuple[float, float], ramp_tokens: int, tokens_seen: int) -> float:
    """Linear rise of the exits' loss weight."""
    first, last = weights
    return first + (last - first) * min(1.0, tokens_seen / ramp_tokens)
