"""What passes between a simulated decode replica and its cluster."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from quadriga.core.replica import Reservation
from quadriga.policies.slot_reservation import ADMIT_SHARE, RETURN_SHARE

OnFull = Literal["recompute", "pause", "vllm"]


@dataclass(frozen=True, slots=True)
class MemoryRules:
    """What happens when the KV memory of a decode replica is full.

    Attributes:
        on_full: `recompute`: the victim's KV is dropped and computed again on this replica, while
            the batch stands still. `pause`: it goes to host memory and comes back over the link.
            `vllm`: as vLLM's V1 scheduler does, where marks mean nothing; see
            `quadriga.sim.decode.vllm`.
        high: Share of the memory down to which sequences are preempted once it is full.
        low: Share of the memory up to which they come back.
        admits: Share of the memory up to which new sequences are let in; with `pause` by what they
            are promised, see `quadriga.policies.slot_reservation`, else by what they have.
        caches_prefixes: With `vllm`: what a victim had may still be there when it comes back.
    """

    on_full: OnFull = "recompute"
    high: float = 1.0
    low: float = 0.9
    admits: float = 1.0
    caches_prefixes: bool = False

    @property
    def reservation(self) -> Reservation:
        """As on a cluster: where sequences can be paused, memory is promised as it is used."""
        return "used" if self.on_full == "pause" else "longest"


RECOMPUTE = MemoryRules()
PAUSE = MemoryRules("pause", ADMIT_SHARE, RETURN_SHARE, ADMIT_SHARE)
VLLM = MemoryRules("vllm")
VLLM_CACHED = MemoryRules("vllm", caches_prefixes=True)
MEMORY_RULES = {"recompute": RECOMPUTE, "pause": PAUSE, "vllm": VLLM, "vllm-cached": VLLM_CACHED}


LOWERED_SHARE = 0.5
"""Of the tokens that go on, those that are sure enough to leave at half of their threshold."""


@dataclass(slots=True)
class Sequence:
    """A sequence on a decode replica.

    Attributes:
        index: Of the request, in the run.
        tokens: KV tokens when it last stood still; while it runs, `base` plus the replica's steps.
        final_tokens: KV tokens when its last token is out.
        prompt_tokens: What the client sent.
        promised_tokens: KV tokens that its replica keeps for it where memory is promised as it is
            used; nothing once it has more.
        num_pauses: How often its replica paused it.
        stays_until: KV tokens up to which it keeps its place, after it was paused for long.
        stays: How often one of its tokens runs on behind the first exit, at the moment.
        usual_stays: The same without pressure.
        quality_budget: Share of its tokens that may leave there all the same under pressure.
    """

    index: int
    tokens: int
    final_tokens: int
    prompt_tokens: int
    arrival_s: float
    base: int = 0
    promised_tokens: int = 0
    num_pauses: int = 0
    stays_until: int = 0
    stays: float = 1.0
    usual_stays: float = 1.0
    quality_budget: float = 0.0

    def lowered_stays(self, pressure: float) -> float:
        """How often its tokens go on under a pressure in 0..1: no more are lowered than its budget
        allows, and of those that would go on at most `LOWERED_SHARE`."""
        lowered = min(self.quality_budget, LOWERED_SHARE * self.usual_stays) * pressure
        return self.usual_stays - lowered


@dataclass(slots=True)
class Happened:
    """What one event of a replica brought, for the cluster to note.

    Attributes:
        joined: By index: entered the batch, from outside or after a preemption. A sequence that
            joins, is preempted and returns within one event stands here once, and in `preempted`.
        resumed: Left host memory, and will join.
    """

    finished: list[Sequence] = field(default_factory=list)
    left: list[Sequence] = field(default_factory=list)
    joined: dict[int, Sequence] = field(default_factory=dict)
    preempted: list[Sequence] = field(default_factory=list)
    resumed: list[Sequence] = field(default_factory=list)


@dataclass(slots=True)
class Gaps:
    """Gaps between `weight` tokens and the ones before them: from `first_s` to `last_s`, evenly.

    Attributes:
        at_s: When the last of them ended.
    """

    first_s: float
    last_s: float
    weight: int
    at_s: float
