"""What replicas report about themselves."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from quadriga.core.forecast import LoadForecast
from quadriga.core.relative_time import CompactPickleMixin, RelativeTimeMixin

Reservation = Literal["longest", "used"]
"""How a decode replica promises memory: for the longest that a sequence can become, so that nobody
is ever paused; or for what it has, so that more fit and some are paused where memory fills."""


class Role(StrEnum):
    """What a replica does for a living."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"

    def does(self, part: Role) -> bool:
        """Whether it does this part of the work: a mixed replica does both."""
        return self is part or self is Role.MIXED


PARTS = (Role.PREFILL, Role.DECODE)
"""What has to be done for a sequence: its prompt is computed, its answer decoded."""


@dataclass(frozen=True, slots=True)
class DepthClass(CompactPickleMixin):
    """Replicas that hold the same layers of the same model; sequences move freely inside one.

    Attributes:
        model: Model id, as clients name it.
        depth: Number of layers loaded, counted from the embedding.
    """

    model: str
    depth: int

    def __str__(self) -> str:
        return f"{self.model}@{self.depth}"


@dataclass(frozen=True, slots=True)
class ReplicaInfo(CompactPickleMixin):
    """Who a replica is; fixed for the life of its process, but for its depth and what follows.

    Attributes:
        name: Ray actor name inside the application's namespace; unique per incarnation.
        num_slots: Sequences it can hold at once.
        kv_capacity_tokens: Tokens of KV cache it can hold at its depth.
        max_model_len: Most tokens of one sequence; 0 until it is known.
        num_layers: Of the whole model; 0: those that are loaded are all.
        numerics: Names what its KV is made with: the weights and, in a deterministic deployment,
            their form and the code that multiplies them. KV goes only between equal names. Empty
            until the weights are loaded.
        usable_bytes: Of a GPU's memory, for weights and KV together; 0 until it is known.
        chunk_tokens: Prompt tokens that it computes together, at most; 0: it computes none.
    """

    name: str
    role: Role
    depth_class: DepthClass
    node_id: str
    incarnation: str
    num_slots: int
    kv_capacity_tokens: int
    transports: tuple[str, ...] = ()
    reservation: Reservation = "longest"
    max_model_len: int = 0
    num_layers: int = 0
    numerics: str = ""
    usable_bytes: int = 0
    chunk_tokens: int = 0

    @property
    def longest_sequence(self) -> int:
        """Most tokens that a sequence may become there."""
        return min(self.kv_capacity_tokens, self.max_model_len or self.kv_capacity_tokens)

    def has_layers(self, needed: int) -> bool:
        """Whether a sequence that may need so many layers of the model, if it has them, fits."""
        return self.depth_class.depth >= min(needed, self.num_layers or needed)


@dataclass(frozen=True, slots=True)
class RelayMemory:
    """What a relay batch holds, and how much of its work was idle.

    Attributes:
        num_batch_rows: Rows of the dense batch.
        width: Its columns.
        batch_bytes: K/V memory of the dense batch, room to grow included.
        row_bytes: K/V of rows outside it.
        padding_cells: (row, column) pairs of the batch that are padding now.
        attended_cells: (row, column) pairs that decode steps have worked on so far.
        idle_cells: Those of them that were padding.
    """

    num_batch_rows: int
    width: int
    batch_bytes: int
    row_bytes: int
    padding_cells: int
    attended_cells: int
    idle_cells: int

    @property
    def kv_bytes(self) -> int:
        """K/V memory on the device."""
        return self.batch_bytes + self.row_bytes

    @property
    def idle_share(self) -> float:
        """Share of the cells attended to that were padding; 0 before the first step."""
        return self.idle_cells / self.attended_cells if self.attended_cells else 0.0


ResizeOutcome = Literal["resized", "unchanged", "refused", "failed", "blocked"]


@dataclass(frozen=True, slots=True)
class ResizeReport:
    """How an order to load more layers, or to drop some, ended.

    Attributes:
        outcome: "resized": it serves the new depth. "unchanged": it had it already. "refused":
            nothing was begun. "failed": the layers could not be loaded. "blocked": sequences that
            need what shall go, or prompts under way, were still there at the deadline. In all but
            the first the old depth serves on.
        reason: A word for machines and a sentence for people; empty for "resized".
        before, depth: Layers loaded before, and now.
        load_s: Seconds the reading took; 0 where layers were dropped.
        load_bytes: Memory of the layers that came (positive) or went (negative).
        weight_bytes: What all layers that are loaded take now.
        kv_capacity_tokens: KV that fits now.
        held_s: How long nothing new was begun for it (prefill).
        took_s: From the order to the end.
    """

    outcome: ResizeOutcome
    reason: str = ""
    before: int = 0
    depth: int = 0
    load_s: float = 0.0
    load_bytes: int = 0
    weight_bytes: int = 0
    kv_capacity_tokens: int = 0
    held_s: float = 0.0
    took_s: float = 0.0


@dataclass(slots=True)
class ReplicaSnapshot(RelativeTimeMixin):
    """A replica's load, reported every second and used by placement and admission.

    Attributes:
        num_waiting: Sequences queued (prefill); reserved but not yet joined, or paused (decode);
            all of these, and those whose prompts are being computed (mixed).
        waiting_tokens: Prompt tokens in the prefill queue.
        waiting_by_priority: (priority, such tokens) pairs of all priorities that have some.
        num_unplaced: Sequences that wait for a decode replica behind their prompts (prefill).
        ending: Those here that end with their first token, and tokens of their prompts (prefill).
        used_tokens: Tokens whose KV is held.
        prompt_tokens, generated_tokens: Of all sequences held (decode).
        reserved_tokens: Tokens promised to the sequences held; see `Reservation`. At a mixed
            replica those of queued prompts count, too: they come before what moves there.
        tokens_per_s: Recent rate: prefilled (prefill) or emitted (decode, mixed).
        step_time_s: Recent time from one token of a sequence to its next, prompts between them
            included (decode, mixed), or seconds per prefill chunk.
        computed_per_s, chunk_time_s: Mixed only: what the two before are at a prefill replica.
        draining: Takes nothing new.
        forecast: Decode only; None until the replica can forecast.
        num_paused: Sequences in host memory; they come back before new ones of their priority.
        least_priority: Who is more important than this may have a place, where paused ones wait or
            of one that runs; None: nobody, for being important.
        upper_tokens: What a newcomer's answer is taken to be where memory is promised as it is
            used; see `quadriga.policies.slot_reservation`.
        usual_tokens: The median of the answers that ended there lately.
        cached_share: Prefill only: of the prompt tokens so far, those that were not computed, as
            their KV was there; None where nothing is shared, or nothing came yet.
        is_scout: It profiles for HELIOS, and takes nothing but what is sent there for that, or for
            its layers; the controller tells the replica, and the scheduler.
        taken_unix_s: When it was sent.
        sent_s, loaded_s: When it was sent, and when the engine counted all this, by the replica's
            own monotonic clock: only to be compared with what the same replica says.
    """

    INSTANTS = ("taken_unix_s",)

    info: ReplicaInfo
    taken_unix_s: float
    num_running: int = 0
    num_waiting: int = 0
    waiting_tokens: int = 0
    used_tokens: int = 0
    reserved_tokens: int = 0
    tokens_per_s: float = 0.0
    step_time_s: float = 0.0
    draining: bool = False
    forecast: LoadForecast | None = None
    num_paused: int = 0
    least_priority: int | None = None
    sent_s: float = 0.0
    loaded_s: float = 0.0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    upper_tokens: int = 1
    cached_share: float | None = None
    is_scout: bool = False
    num_unplaced: int = 0
    computed_per_s: float = 0.0
    chunk_time_s: float = 0.0
    usual_tokens: int = 1
    ending: tuple[int, int] = (0, 0)
    waiting_by_priority: tuple[tuple[int, int], ...] = ()

    @property
    def prefill_tokens_per_s(self) -> float:
        """Recent rate of prompt tokens; of a replica that computes prompts."""
        return self.computed_per_s if self.info.role is Role.MIXED else self.tokens_per_s

    @property
    def prefill_chunk_s(self) -> float:
        """Seconds per chunk of prompts; of a replica that computes prompts."""
        return self.chunk_time_s if self.info.role is Role.MIXED else self.step_time_s
