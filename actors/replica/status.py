"""The load and the state of a replica, as it reports them."""

from __future__ import annotations

from dataclasses import dataclass, field

from quadriga.checkpoint.exits import ExitCounters, ExitUse
from quadriga.core.replica import RelayMemory, ReplicaInfo
from quadriga.errors import QuadrigaError
from quadriga.scheduling.meters import StepTotals


@dataclass(frozen=True, slots=True)
class ParkedSequence:
    """A strict sequence whose token needs layers that its replica has not loaded."""

    sequence_id: str
    num_tokens: int
    max_total_tokens: int


@dataclass(slots=True)
class ReplicaLoad:
    """A replica's load as its engine thread last published it; see `ReplicaSnapshot`.

    Attributes:
        strict_depth: Layers that the strict sequences here may need; 0 where there are none. At a
            prefill replica: only of those that wait until the layers are loaded.
        exit_uses: Decode only: whether the model's exits are in use, by layers run before them.
        parked: Strict sequences that can go no further here; looked at now and then.
    """

    num_running: int = 0
    num_waiting: int = 0
    waiting_tokens: int = 0
    used_tokens: int = 0
    prompt_tokens: int = 0
    reserved_tokens: int = 0
    tokens_per_s: float = 0.0
    step_time_s: float = 0.0
    steps: StepTotals = field(default_factory=StepTotals)
    exits: ExitCounters | None = None
    num_at_exits: tuple[int, ...] = ()
    exit_uses: dict[int, ExitUse] = field(default_factory=dict)
    num_paused: int = 0
    paused_bytes: int = 0
    num_pauses: int = 0
    num_resumes: int = 0
    least_priority: int | None = None
    upper_tokens: int = 1
    relay: RelayMemory | None = None
    strict_depth: int = 0
    parked: tuple[ParkedSequence, ...] = ()

    @property
    def num_held(self) -> int:
        return self.num_running + self.num_waiting


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """Answer to the controller's heartbeat.

    Attributes:
        leave_s: Seconds until it ends by itself, because it was asked to go; None where not.
    """

    info: ReplicaInfo
    is_ready: bool
    is_draining: bool
    error: QuadrigaError | None
    load: ReplicaLoad
    fingerprint: str
    leave_s: float | None = None
