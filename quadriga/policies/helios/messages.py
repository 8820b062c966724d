"""The events and orders of the HELIOS machine: the whole seam between it and the controller.

Events: a `ControllerTick` every second with the replicas as they are; requests as they start, end
or are lost; tokens as they are served; the outcome of the pending order. Orders: one resize or
switch at a time, answered by `OrderDone` or `OrderFailed`; `Choose` and `Keep` ask for nothing and
give the reason. `Status` describes the machine for the terminal, metrics and the admin port."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from quadriga.catalogue.records import EnergySource
from quadriga.core.replica import DepthClass, Role

Objective = Literal["throughput", "response", "accuracy", "energy"]


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """A replica that the machine may resize, as it is now."""

    role: Role
    depth_class: DepthClass


@dataclass(frozen=True, slots=True)
class ControllerTick:
    """The state of the world, about once a second.

    Attributes:
        replicas: Living replicas by name, those that still start excluded. What a replica really
            holds counts, whatever was ordered: the machine believes this and not its own orders.
        scouts: Names of those that profile and sample; empty where there are none.
        in_flight: Sequences that run on serving decode replicas, and their tokens so far.
        strict: Model → layers that strict requests in flight or waiting may need of it.
        waiting: Prefill replica → layers that strict requests wait for there.
        usable_bytes: What a decode replica has for weights and KV, where replicas say so.
    """

    replicas: Mapping[str, ReplicaReport]
    scouts: frozenset[str] = frozenset()
    in_flight: int = 0
    in_flight_tokens: int = 0
    strict: Mapping[str, int] = field(default_factory=dict)
    waiting: Mapping[str, int] = field(default_factory=dict)
    usable_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class RequestStarted:
    """A request was sent to a decode replica's class because `Routing` said so."""

    replica: str


@dataclass(frozen=True, slots=True)
class RequestLost:
    """A started request was cancelled, failed, or moved to another class."""

    replica: str


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """A request was served whole, all of it in one depth class.

    Attributes:
        exit_tokens: Layers run → output tokens.
        sure_tokens: Layers after which a token could first have left → tokens, of a sample; DREX
            does not use an exit that does not pay. Empty: as `exit_tokens`.
        breaches: Of the tokens at the deepest loaded exit, those below their threshold; not those
            that the request's own `max_depth` held up.
        nll: Sum of −log p of its output tokens, as served; `scored_tokens` of them.
        decode_s: From the first token to the last.
        mean_batch: Sequences in its decode batch, on average over its life.
        joules: Its share of the energy; None where nothing says.
    """

    replica: str
    depth_class: DepthClass
    exit_tokens: Mapping[int, int]
    breaches: float
    nll: float
    scored_tokens: int
    prompt_tokens: int
    ttft_s: float
    decode_s: float
    mean_batch: float = 1.0
    joules: float | None = None
    energy_source: EnergySource | None = None
    sure_tokens: Mapping[int, int] = field(default_factory=dict)

    @property
    def output_tokens(self) -> int:
        return sum(self.exit_tokens.values())


@dataclass(frozen=True, slots=True)
class TokensServed:
    """Tokens of auto requests since the last such report, in the order they were served.

    Attributes:
        breaches: Of them, below the threshold at the deepest loaded exit.
        batch: Sequences in the decode batch.
    """

    depth_class: DepthClass
    tokens: int
    breaches: int
    batch: int = 1


@dataclass(frozen=True, slots=True)
class UnchangedSampled:
    """Finished answers were read again at full depth, teacher-forced, on a scout.

    Attributes:
        exits: Layers run → (tokens that full depth says too, tokens looked at).
        depth: Layers that were loaded where they were served; None: all of them.
    """

    model: str
    exits: Mapping[int, tuple[int, int]]
    depth: int | None = None


@dataclass(frozen=True, slots=True)
class OrderDone:
    """The replica serves its new class.

    Attributes:
        load_s: Seconds that the reading of what was missing took, or the start of a process.
        weight_bytes: What its weights take now.
        max_batch: Sequences it can hold now, at their usual length.
    """

    order_id: int
    load_s: float
    weight_bytes: int | None = None
    max_batch: int | None = None
    is_start: bool = False


@dataclass(frozen=True, slots=True)
class OrderFailed:
    """The replica still serves its old class; held up: requests needed its layers all the time."""

    order_id: int
    error: str
    is_held_up: bool = False


Event = (
    ControllerTick
    | RequestStarted
    | RequestLost
    | RequestFinished
    | TokensServed
    | UnchangedSampled
    | OrderDone
    | OrderFailed
)

# Orders


@dataclass(frozen=True, slots=True)
class ChangeOrder:
    """A change that one replica is asked for.

    Attributes:
        order_id: To be named in the answer.
        depth_class: What the replica shall hold.
        deadline_s: On the machine's clock; without an answer by then it counts as failed.
    """

    order_id: int
    replica: str
    depth_class: DepthClass
    deadline_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Resize(ChangeOrder):
    """Load more layers of the model a replica has, or drop some."""


@dataclass(frozen=True, slots=True)
class Switch(ChangeOrder):
    """Exchange the model: in-flight requests are drained, migrated or prefilled again."""


@dataclass(frozen=True, slots=True)
class Keep:
    """A decision to change nothing, for the log."""

    reason: str


@dataclass(frozen=True, slots=True)
class Choose:
    """From now on this class shall serve; the orders that bring it about follow one by one."""

    depth_class: DepthClass
    reason: str


Output = ChangeOrder | Choose | Keep


@dataclass(frozen=True, slots=True)
class Routing:
    """Where the next auto request goes.

    Attributes:
        serve: Classes that serve now, the chosen one first; another one only while replicas
            change to the chosen one, or none does yet. Empty until a replicas was seen.
        profile: Where the next requests go instead, as long as there are places.
        profile_replica: The decode replica that profiles.
        profile_places: Requests it still wants; each `RequestStarted` there takes one.
    """

    serve: tuple[DepthClass, ...]
    profile: DepthClass | None = None
    profile_replica: str | None = None
    profile_places: int = 0


@dataclass(frozen=True, slots=True)
class ChosenDevice:
    """What one decode replica has.

    Attributes:
        memory_bytes: For weights and KV together; None where nothing limits.
        value_bytes: Of one weight or KV value.
        max_slots: Sequences in a batch, at most.
        starts_anew: Another depth comes in another process.
    """

    memory_bytes: int | None = None
    value_bytes: int = 4
    max_slots: int = 32
    starts_anew: bool = False


class HeliosPhase(StrEnum):
    """What the machine is at."""

    PROFILE = "profile"
    SERVE = "serve"


@dataclass(frozen=True, slots=True)
class ModelDecision:
    """A line of the log: an output, and when."""

    at_s: float
    output: Output


@dataclass(slots=True)
class Counters:
    """What happened so far, for metrics.

    Attributes:
        trips: Times that the breach window, or changed tokens, called for a change.
    """

    resizes: int = 0
    switches: int = 0
    failures: int = 0
    profiles: int = 0
    trips: int = 0


@dataclass(frozen=True, slots=True)
class Status:
    """A snapshot of the machine.

    Attributes:
        served: Requests since the last assessment.
        window_breaches, window_tokens: Of the breach window.
        barred: Class → why it is not chosen until the next assessment.
    """

    phase: HeliosPhase
    target: DepthClass | None
    profiling: DepthClass | None
    order: ChangeOrder | None
    served: int
    window_breaches: float
    window_tokens: int
    barred: dict[str, str]
    counters: Counters
