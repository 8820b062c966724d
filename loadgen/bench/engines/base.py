"""What every engine under test provides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from loadgen.bench.engines.workloads import Workload


@dataclass(frozen=True, slots=True)
class GeneratedTokens:
    """One run of a workload.

    Attributes:
        seconds: From time 0 to the last token.
        ttft_s: Time of each request's first token since time 0.
        token_ids: The tokens generated for each request, in the workload's order.
        cpu_s: Processor time of the engine's process meanwhile; filled in by the worker.
    """

    seconds: float
    ttft_s: list[float]
    token_ids: list[list[int]]
    cpu_s: float = 0.0


class Peer(Protocol):
    """An engine, constructed with (checkpoint folder, threads, form of the weights).

    The form is one of `engine.weights`; `auto` is float32 for whoever knows no other.
    """

    name: str

    def prepare(self, workloads: list[Workload]) -> None:
        """Load, convert and compile whatever the workloads need; outside the clock."""

    def generate(self, workload: Workload) -> GeneratedTokens:
        """Greedy tokens for every request, `max_tokens` each, end tokens ignored."""
