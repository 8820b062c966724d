"""What is written down of each request and of each contestant's run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from loadgen.load.task_suite import TaskPrompt
from quadriga.catalogue.records import EnergySource
from quadriga.core.replica import DepthClass

SCORED_EVERY = 4
"""One request in so many is scored, as in the service."""


@dataclass(slots=True)
class ServedRequest:
    """A prompt and what was served for it.

    Attributes:
        is_scored: The log-probabilities of its tokens are wanted.
        is_profile: It was sent to profile a candidate.
        classes: What the replica held while it ran, each once.
        exit_layers: Layers run for each token; the first token's are prefill's.
        breached: Per token, how surely it was below its threshold at the deepest loaded exit: 0
            or 1 alone in a batch, in a larger one the share of those that left with it.
        nll: Sum of −log p of `num_scored` tokens.
        batch_sum: Sequences in the batch, summed over its tokens.
    """

    index: int
    prompt: TaskPrompt
    arrived_s: float
    is_scored: bool = False
    is_profile: bool = False
    classes: list[DepthClass] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    exit_layers: list[int] = field(default_factory=list)
    breached: list[float] = field(default_factory=list)
    nll: float = 0.0
    num_scored: int = 0
    batch_sum: int = 0
    first_s: float = 0.0
    last_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.arrived_s

    @property
    def decode_s(self) -> float:
        return self.last_s - self.first_s

    @property
    def num_decoded(self) -> int:
        """Tokens after the first."""
        return len(self.token_ids) - 1


@dataclass(slots=True)
class Shadow:
    """Tokens after the first ones that full depth read again, apart by how they left.

    Attributes:
        sure, sure_same: Left early above their threshold; of these, full depth says the same.
        breached, breached_same: Left the deepest loaded exit below it.
    """

    sure: int = 0
    sure_same: int = 0
    breached: int = 0
    breached_same: int = 0

    @property
    def sure_share(self) -> float | None:
        return self.sure_same / self.sure if self.sure else None

    @property
    def breached_share(self) -> float | None:
        return self.breached_same / self.breached if self.breached else None

    def add(self, request: ServedRequest, said: Sequence[int], num_layers: int) -> None:
        """Compare a request's tokens with what full depth says in their places."""
        rows = zip(request.token_ids, request.exit_layers, request.breached, said, strict=True)
        for token_id, layers, breached, full in list(rows)[1:]:
            if layers >= num_layers:
                continue
            if breached > 0.5:
                self.breached += 1
                self.breached_same += token_id == full
            else:
                self.sure += 1
                self.sure_same += token_id == full


@dataclass(slots=True)
class HeldMemory:
    """What was held over time.

    Attributes:
        weight_byte_s, kv_byte_s: Bytes times the seconds they were held.
    """

    weight_byte_s: float = 0.0
    kv_byte_s: float = 0.0
    seconds: float = 0.0
    peak_weight_bytes: int = 0
    peak_kv_bytes: int = 0

    def add(self, weights: int, kv: int, seconds: float) -> None:
        """Note what is held, since the look before."""
        self.weight_byte_s += weights * seconds
        self.kv_byte_s += kv * seconds
        self.seconds += seconds
        self.peak_weight_bytes = max(self.peak_weight_bytes, weights)
        self.peak_kv_bytes = max(self.peak_kv_bytes, kv)

    @property
    def mean_weight_bytes(self) -> float:
        return self.weight_byte_s / self.seconds if self.seconds else float(self.peak_weight_bytes)

    @property
    def mean_kv_bytes(self) -> float:
        return self.kv_byte_s / self.seconds if self.seconds else float(self.peak_kv_bytes)


@dataclass(slots=True)
class StreamRun:
    """One contestant over the stream.

    Attributes:
        right: Per request, whether the task's checker accepts the answer.
        decoded: (model, layers run) → tokens after the first ones.
        held: Class → tokens decoded while it was loaded.
        peak_running: Most sequences in the batch.
        log: (seconds, what) of every decision.
    """

    requests: list[ServedRequest]
    right: list[bool]
    seconds: float
    joules: float
    energy_source: EnergySource
    decoded: Counter[tuple[str, int]]
    held: Counter[DepthClass]
    breaches: int
    peak_running: int
    memory: HeldMemory
    switches: int = 0
    resizes: int = 0
    trips: int = 0
    profiles: int = 0
    log: list[tuple[float, str]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Output tokens, the first ones included."""
        return sum(len(q.token_ids) for q in self.requests)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def tpot_s(self) -> float:
        """Mean time between two tokens of a request, over all of them."""
        seconds = sum(q.decode_s for q in self.requests)
        return seconds / max(1, sum(q.num_decoded for q in self.requests))
