"""One replica process as the controller knows it, and what it reports of itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from quadriga.checkpoint.exits import ExitCounters, ExitUse
from quadriga.core.relative_time import CompactPickleMixin
from quadriga.core.replica import DepthClass, RelayMemory, ReplicaInfo, Role
from quadriga.errors import QuadrigaError
from quadriga.scheduling.meters import PrefixTotals, StepTotals

PlaceKey = tuple[Role, int]
"""A place in the desired state: role and ordinal."""


@dataclass(frozen=True, slots=True)
class ParkedSequence:
    """A strict sequence whose token needs layers that its replica has not loaded."""

    sequence_id: str
    num_tokens: int
    max_total_tokens: int


@dataclass(slots=True)
class ReplicaLoad(CompactPickleMixin):
    """A replica's load as its engine thread last published it; see `ReplicaSnapshot`.

    Attributes:
        strict_depth: Layers that the strict sequences here may need; 0 where there are none. At a
            prefill replica: only of those that wait until the layers are loaded.
        exit_uses: Decode only: whether the model's exits are in use, by layers run before them.
        prefixes: Prefill only: what came of looking prompts up; None where nothing is shared.
        parked: Strict sequences that can go no further here; looked at now and then.
    """

    num_running: int = 0
    num_waiting: int = 0
    waiting_tokens: int = 0
    used_tokens: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    reserved_tokens: int = 0
    tokens_per_s: float = 0.0
    step_time_s: float = 0.0
    steps: StepTotals = field(default_factory=StepTotals)
    exits: ExitCounters | None = None
    num_at_exits: tuple[int, ...] = ()
    exit_uses: dict[int, ExitUse] = field(default_factory=dict)
    num_unplaced: int = 0
    computed_per_s: float = 0.0
    chunk_time_s: float = 0.0
    num_paused: int = 0
    paused_bytes: int = 0
    num_pauses: int = 0
    num_resumes: int = 0
    least_priority: int | None = None
    upper_tokens: int = 1
    relay: RelayMemory | None = None
    strict_depth: int = 0
    parked: tuple[ParkedSequence, ...] = ()
    prefixes: PrefixTotals | None = None
    usual_tokens: int = 1
    ending: tuple[int, int] = (0, 0)
    waiting_by_priority: tuple[tuple[int, int], ...] = ()

    @property
    def num_held(self) -> int:
        return self.num_running + self.num_waiting


@dataclass(frozen=True, slots=True)
class ReplicaStatus(CompactPickleMixin):
    """A replica's answer to the controller's heartbeat.

    Attributes:
        leave_s: Seconds until it ends by itself, because it was asked to go; None where not.
        loading: What its engine does before it serves, in words.
    """

    info: ReplicaInfo
    is_ready: bool
    is_draining: bool
    error: QuadrigaError | None
    load: ReplicaLoad
    fingerprint: str
    leave_s: float | None = None
    loading: str = ""


class ReplicaPhase(StrEnum):
    """The phase of a replica process, as the controller sees it."""

    PENDING = "pending"  # no capacity for it yet, as far as known
    STARTING = "starting"
    READY = "ready"
    RETIRING = "retiring"


@dataclass(slots=True)
class ReplicaRecord:
    """One replica process.

    Attributes:
        key: The place that it fills.
        since_s: When it entered its phase.
        fingerprint: Of its specification; None for an adopted one that has not answered yet.
        heard_s: When it last answered; None before the first answer.
        status: Its last answer.
    """

    key: PlaceKey
    name: str
    since_s: float
    fingerprint: str | None
    phase: ReplicaPhase = ReplicaPhase.PENDING
    heard_s: float | None = None
    status: ReplicaStatus | None = None

    @property
    def is_ready(self) -> bool:
        """Whether it serves."""
        return self.phase is ReplicaPhase.READY and self.status is not None

    @property
    def info(self) -> ReplicaInfo:
        """Who it is; it must have answered once."""
        assert self.status is not None
        return self.status.info

    @property
    def depth_class(self) -> DepthClass:
        """What it holds; it must have answered once."""
        return self.info.depth_class

    @property
    def load(self) -> ReplicaLoad:
        """Its load as of the last answer; it must have answered once."""
        assert self.status is not None
        return self.status.load

    def doing(self, now_s: float) -> str:
        """What it does before it serves, in words; empty where it serves, or ends."""
        if self.phase is ReplicaPhase.PENDING:
            return f"waits for room in the cluster, for {now_s - self.since_s:.0f} s"
        if self.phase is ReplicaPhase.STARTING:
            return (self.status and self.status.loading) or "its process starts"
        return ""

    def has_room(self, parked: ParkedSequence) -> bool:
        """Whether it could take a sequence; it must have answered once."""
        info, load = self.info, self.load
        grows = info.reservation == "used"  # it promises what is there, and pauses where it must
        tokens = parked.num_tokens if grows else parked.max_total_tokens
        fits = load.reserved_tokens + tokens <= info.kv_capacity_tokens
        fits &= parked.max_total_tokens <= info.longest_sequence
        return load.num_held < info.num_slots and fits

    @property
    def silent_since_s(self) -> float | None:
        """When it last answered, or was found placed if it was adopted; None where neither is."""
        if self.fingerprint is None and self.phase is ReplicaPhase.STARTING:
            return self.since_s
        return self.heard_s

    def excuse(self, late_s: float) -> None:
        """Do not count seconds in which this process stood still, and may have missed answers."""
        if self.heard_s is not None:
            self.heard_s += late_s
        elif self.fingerprint is None:
            self.since_s += late_s


def place_name(key: PlaceKey) -> str:
    """What the HELIOS machine calls the replica of a place."""
    return f"{key[0].value}:{key[1]}"
