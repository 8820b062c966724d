"""Training state on disk: weights, moments, data position, schedule; written atomically."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from quadriga.files import replaced

LATEST = "latest.pt"  # where a run goes on
STABLE = "stable.pt"  # the plateau's end, where a later run with another budget goes on


@dataclass(slots=True)
class Progress:
    """Position of a training run; everything but the tensors.

    Attributes:
        step: Optimiser steps done since the model's birth.
        next_index: Next example of the data stream.
        tokens_seen: Tokens trained on, padding included.
        tokens_before: Those that the schedule counts besides, for weights that were trained before.
        budget: The budget's options; another budget starts a new plateau.
        first_step: Step at which the present budget began.
        started_s: Wall clock at which the present budget began.
        deadline_s: Wall clock at which it ends, or None.
        decaying: Whether the learning rate has begun to fall.
        options: What steps depend on, by the command's options; it stays the same.
    """

    step: int = 0
    next_index: int = 0
    tokens_seen: int = 0
    tokens_before: int = 0
    budget: str = ""
    first_step: int = 0
    started_s: float = 0.0
    deadline_s: float | None = None
    decaying: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def scheduled_tokens(self) -> int:
        """Where curriculum and exits' weight stand."""
        return self.tokens_before + self.tokens_seen


def save_atomically(payload: dict[str, Any], path: Path) -> None:
    """Write a torch file so that a reader sees the old one or the new one, whole."""
    with replaced(path) as stream:
        torch.save(payload, stream)


def load(path: Path) -> dict[str, Any]:
    """Read a torch file onto the CPU."""
    payload: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return payload
