"""What the ingress and the replicas ask the scheduler, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from quadriga.core.forecast import LengthPrediction
from quadriga.core.relative_time import CompactPickleMixin, RelativeTimeMixin
from quadriga.core.replica import DepthClass, ReplicaSnapshot, Role


@dataclass(frozen=True, slots=True)
class ReportOptions(CompactPickleMixin):
    """What the scheduler asks of a replica, in answer to its report.

    Attributes:
        forecast: Predict lengths and forecast loads: the scheduler looks at them.
        is_overloaded: Sequences wait for decode replicas by their lengths: of a prefill replica as
            many as it has rows for, so that short ones are still computed. A decode replica keeps
            room for all that is predicted of those it takes.
        depth_pool: For which sequences a decode replica is, "shallow" or "deep"; empty: for all.
    """

    forecast: bool = False
    is_overloaded: bool = False
    depth_pool: str = ""


@dataclass(frozen=True, slots=True)
class AdmitRequest(RelativeTimeMixin):
    """What the scheduler must know to let a sequence in.

    Attributes:
        needs_depth: Layers that a strict sequence may need, of those its model has; 0: any will do.
        is_rebuild: It was let in before, and lost the replica that had it.
        prefix_marks: Names of the prompt's beginnings; see `quadriga.scheduling.prefixes.affinity`.
        visitor: Who asks and for what, in one word that is the same when a refused caller comes
            back; empty: nobody would know it again.
    """

    INSTANTS = ("deadline_unix_s",)

    sequence_id: str
    model: str
    num_prompt_tokens: int
    max_tokens: int
    priority: int
    deadline_unix_s: float
    needs_depth: int = 0
    is_rebuild: bool = False
    visitor: str = ""
    prefix_marks: tuple[tuple[int, bytes], ...] = ()

    def decodes_at(self, role: Role) -> bool:
        """Whether it needs a place to decode; one that ends with its first token does not, but for
        the row at a mixed replica."""
        return self.max_tokens > 1 or role is Role.MIXED


@dataclass(frozen=True, slots=True)
class Admission(CompactPickleMixin):
    """Where an admitted sequence goes first.

    Attributes:
        depth_class: Of that replica; its model is the one that was chosen.
        profile: The decode replica whose profile the sequence is part of.
        is_scored: The log-probabilities of its tokens are wanted.
    """

    prefill_replica: str
    depth_class: DepthClass
    profile: str | None = None
    is_scored: bool = False


@dataclass(frozen=True, slots=True)
class AutoReport:
    """What an ingress tells the controller of a sequence whose model was chosen for it.

    Attributes:
        replica: Decode replica that profiles with it ("started", "lost"), or that said its last
            token ("finished").
        depth_class: Of all its tokens; None where they came from several.
        exit_tokens: Layers run → output tokens.
        sure_tokens: Layers after which a token could first have left → those tokens, as far as that
            is known.
        nll: Sum of −log p over `scored_tokens` of its output tokens.
        decode_s: From the first token to the last.
        prompt_ids, output_ids, exit_layers: Of a greedy one, now and then: to be read again.
    """

    kind: Literal["started", "finished", "lost"]
    replica: str
    depth_class: DepthClass | None = None
    exit_tokens: dict[int, int] = field(default_factory=dict)
    sure_tokens: dict[int, int] = field(default_factory=dict)
    nll: float = 0.0
    scored_tokens: int = 0
    prompt_tokens: int = 0
    ttft_s: float = 0.0
    decode_s: float = 0.0
    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()
    exit_layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PlaceRequest(CompactPickleMixin):
    """A prefill replica asks where a sequence shall decode.

    Attributes:
        exclude: Replicas that already refused or failed this sequence.
        prediction: Tokens still to come, by the length head after prefill.
        waited_s: How long it has looked for a replica already.
        source: The prefill replica.
        started_s: When it left that replica's queue, by that replica's own monotonic clock.
        is_prompt_done: Its length is predicted by now, where it can be.
        by_forecast: A forecast says whether there will be room; so the scheduler, under overload.
        leaves_early: Its tokens may leave at exits before the last.
        numerics: Of the source; only a replica of the same name takes its KV. Empty: any does.
        expected_layers: See `layers_of`.
    """

    sequence_id: str
    depth_class: DepthClass
    num_tokens: int
    max_total_tokens: int
    exclude: tuple[str, ...] = ()
    prediction: LengthPrediction | None = None
    priority: int = 0
    waited_s: float = 0.0
    source: str = ""
    started_s: float = 0.0
    is_prompt_done: bool = True
    by_forecast: bool = False
    leaves_early: bool = True
    numerics: str = ""
    expected_layers: float = 0.0


@dataclass(slots=True)
class ClusterView(RelativeTimeMixin):
    """What the scheduler knows of the cluster, for ingresses to fall back on."""

    INSTANTS = ("taken_unix_s",)

    taken_unix_s: float
    snapshots: list[ReplicaSnapshot]
