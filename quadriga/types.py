"""The records that travel between clients, actors, policies and the engine.

Per-token records are slots dataclasses, never pydantic: validation happens once, at the edges.
Instants that cross a process border are wall-clock seconds (`_unix_s`), but deadlines cross it as
how far off they are (`Dated`); everything else that ends in `_s` is a duration.
"""

from __future__ import annotations

import pickle
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Literal

from quadriga.errors import InvalidRequest, QuadrigaError
from quadriga.exits import FULL_DEPTH, ExitParams

AUTO_MODEL = "quadriga-auto"
"""The model id of those who let us choose."""


class Role(StrEnum):
    """What a replica does for a living."""

    PREFILL = "prefill"
    DECODE = "decode"


class FinishReason(StrEnum):
    """Why a sequence ended, in the words of the OpenAI API."""

    STOP = "stop"
    LENGTH = "length"


def token_digest(token_ids: Sequence[int], before: int = 0) -> int:
    """CRC-32 of token ids, 8 bytes each, little-endian.

    Args:
        before: Of the tokens that precede these.
    """
    return zlib.crc32(struct.pack(f"<{len(token_ids)}q", *token_ids), before)


@dataclass(frozen=True, slots=True)
class DepthClass:
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
class SamplingParams:
    """How the next token is chosen; already validated, every default filled in.

    Attributes:
        max_tokens: Most tokens to generate; 0 only with `num_prompt_logprobs`.
        min_tokens: End tokens and stop ids are banned before this many.
        temperature: 0 is greedy.
        top_k: 0 is off.
        seed: Key of the counter-based random state; the ingress draws one where the client gave
            none, so that a sequence can always be rebuilt.
        num_logprobs: Alternatives to report per token; 0 reports the chosen token alone, None
            reports nothing.
        num_prompt_logprobs: The same for the prompt's own tokens (`echo` with `logprobs`).
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def check(self) -> None:
        """Raises: InvalidRequest: A value is outside what the sampler can do."""
        for name, (low, high) in SAMPLING_BOUNDS.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise InvalidRequest(f"{name}: {value} must be in {low}..{high}", param=name)
        least = max(self.min_tokens, self.num_prompt_logprobs is None)
        if self.max_tokens < least:
            raise InvalidRequest(
                f"max_tokens: {self.max_tokens} must be at least 1 (0 only with "
                f"num_prompt_logprobs) and at least min_tokens ({self.min_tokens})",
                param="max_tokens",
            )


SAMPLING_BOUNDS: dict[str, tuple[float, float]] = {
    "min_tokens": (0, 1 << 30),
    "temperature": (0.0, 1e6),
    "top_p": (0.0, 1.0),
    "top_k": (0, 1 << 30),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, 1e6),
    "presence_penalty": (-1e6, 1e6),
    "frequency_penalty": (-1e6, 1e6),
    "seed": (-(1 << 63), (1 << 63) - 1),
    "num_logprobs": (0, 1000),
    "num_prompt_logprobs": (0, 1000),
}
"""Of `SamplingParams`; those of requests are narrower."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token under the processed distribution, and of its rivals.

    Attributes:
        logprob: Natural logarithm; None for the first prompt token, which has no predecessor.
        top: (token id, logprob) pairs, most probable first.
    """

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


class Dated:
    """Names instants, which travel as distances from now: machines' clocks need not agree.

    What the way takes is not counted.
    """

    __slots__ = ()
    __match_args__: tuple[str, ...]
    INSTANTS: ClassVar[tuple[str, ...]]
    """Fields that are Unix times by the clock of the machine that the object is on; 0 is none."""

    def __reduce__(self) -> tuple[Any, ...]:
        names = self.__match_args__
        said, now_unix_s = [getattr(self, name) for name in names], time.time()
        places = [at for name in self.INSTANTS if said[at := names.index(name)]]
        for at in places:
            said[at] -= now_unix_s
        return _arrived, (type(self), places, said)


def _arrived(kind: Callable[..., Dated], places: list[int], said: list[Any]) -> Dated:
    now_unix_s = time.time()
    for at in places:
        said[at] += now_unix_s
    return kind(*said)


@dataclass(slots=True)
class SequenceState(Dated):
    """All there is to one sequence; its KV cache can be rebuilt from this alone.

    A request with `n` choices or several prompts is several sequences of one request id.

    Attributes:
        sequence_id: Unique in the cluster.
        choice: Index among the request's choices; part of the random key, so that choices differ.
        model: Model id the sequence runs on.
        prompt_ids: Token ids of the prompt; never empty.
        output_ids: Token ids emitted so far; the next emission has index `len(output_ids)`.
        exit_layers: Depth each output token left at, parallel to `output_ids`.
        priority: Lower is served first.
        deadline_unix_s: When the client stops waiting, by the clock of the machine it is on.
        ingress_id: Who holds the client's stream.
        epoch: Raised at every change of owner; an owner with an older epoch must not emit.
        num_moves: Live migrations so far.
        moved_unix_s: When the last one was committed, by the same clock; 0 before the first.
        prediction: Tokens still to come, as last said by a length head.
        predicted_at: Output tokens there were then.
        traceparent: Context of the request's trace; None where it is not traced.
        claim: Who asks with this may take the sequence over from an ingress that is gone; empty
            where nobody may.
    """

    INSTANTS = ("deadline_unix_s", "moved_unix_s")

    sequence_id: str
    request_id: str
    model: str
    prompt_ids: list[int]
    sampling: SamplingParams
    ingress_id: str
    arrival_unix_s: float
    deadline_unix_s: float
    exits: ExitParams = FULL_DEPTH
    choice: int = 0
    priority: int = 0
    epoch: int = 0
    output_ids: list[int] = field(default_factory=list)
    exit_layers: list[int] = field(default_factory=list)
    num_moves: int = 0
    moved_unix_s: float = 0.0
    prediction: LengthPrediction | None = None
    predicted_at: int = 0
    traceparent: str | None = None
    claim: str = ""

    @property
    def num_tokens(self) -> int:
        """Prompt plus output tokens so far."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def max_total_tokens(self) -> int:
        """Most tokens the sequence can grow to; what its KV reservation must cover."""
        return len(self.prompt_ids) + self.sampling.max_tokens


@dataclass(frozen=True, slots=True)
class Orphan:
    """A running sequence as one finds it whose client came back through another ingress.

    Attributes:
        claim: What it was asked for by; see `SequenceState`.
        replica: Where it runs.
        epoch: Of its owner.
    """

    claim: str
    replica: str
    sequence_id: str
    epoch: int


@dataclass(slots=True)
class SampledToken:
    """What a runner returns for one row of one step.

    Attributes:
        exit_layer: Number of layers that were run for this token.
        prompt_logprobs: Only from a prefill that was asked for them.
    """

    token_id: int
    exit_layer: int
    logprob: TokenLogprob | None = None
    prompt_logprobs: list[TokenLogprob] | None = None


@dataclass(slots=True)
class Emission:
    """One thing a replica tells an ingress about one sequence, delivered at least once.

    Tokens carry their index, so a duplicate delivery is recognised and a gap is an error.

    Attributes:
        first_index: Output index of `token_ids[0]`.
        epoch: The emitter's epoch of the sequence; the ingress ignores older epochs.
        logprobs: Parallel to `token_ids` where the request asked for them.
        finish: Set with the last token, or alone.
        error: The sequence ended in this error on this replica.
        moved_to: The sequence now lives on the replica of this name; later tokens come from there.
        depth: Layers that were loaded where the tokens come from; 0 where that never changes.
        move: Of a live migration, beside `moved_to`. "begun": the emitter goes on until the
            destination takes over. "done": it has, and the emitter has let go. "failed": it never
            will, and the emitter has the sequence. None in a hand-off after prefill, where the
            emitter has nothing to go on with.
    """

    sequence_id: str
    epoch: int
    first_index: int = 0
    token_ids: list[int] = field(default_factory=list)
    exit_layers: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    finish: FinishReason | None = None
    error: QuadrigaError | None = None
    moved_to: str | None = None
    move: Literal["begun", "done", "failed"] | None = None
    depth: int = 0


@dataclass(slots=True)
class RequestOutput:
    """What was generated for one prompt; in a stream, what is new of it.

    Attributes:
        index: Place of the prompt in the call.
        text: Without the token or the string that stopped it.
        token_ids: Every token generated, the stopping one included.
        exit_layers: Layers run for each of them.
        finish_reason: None while it goes on.
        logprobs: Of each token, where `num_logprobs` asked for them.
        prompt_logprobs: Of the prompt's tokens, where `num_prompt_logprobs` asked for them.
        ttft_s: Seconds from the call of `generate` to the first token.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    exit_layers: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] | None = None
    ttft_s: float = 0.0

    def add(self, emission: Emission, text: str) -> None:
        """Take in what the loops said next."""
        self.text += text
        self.token_ids += emission.token_ids
        self.exit_layers += emission.exit_layers
        self.finish_reason = emission.finish
        if emission.logprobs is not None:
            self.logprobs += emission.logprobs
        if emission.prompt_logprobs is not None:
            self.prompt_logprobs = emission.prompt_logprobs


@dataclass(slots=True)
class PollReply:
    """Answer of one poll: everything pending for an ingress, kept until acknowledged.

    Attributes:
        incarnation: Identity of the replica's process; a change voids all acknowledgements.
        last_seq: Acknowledge this number with the next poll to drop these emissions.
    """

    incarnation: str
    last_seq: int
    emissions: list[Emission]

    def __reduce__(self) -> tuple[Callable[[str, int, bytes], PollReply], tuple[str, int, bytes]]:
        """Travel as one block of bytes: a few microseconds an emission less than field by field."""
        rows = [
            (
                e.sequence_id,
                e.epoch,
                e.first_index,
                e.token_ids,
                e.exit_layers,
                e.logprobs,
                e.prompt_logprobs,
                e.finish,
                e.error,
                e.moved_to,
                e.move,
                e.depth,
            )
            for e in self.emissions
        ]
        return _unpack_poll_reply, (self.incarnation, self.last_seq, pickle.dumps(rows, 5))


def _unpack_poll_reply(incarnation: str, last_seq: int, rows: bytes) -> PollReply:
    return PollReply(incarnation, last_seq, [Emission(*row) for row in pickle.loads(rows)])


Reservation = Literal["longest", "used"]
"""How a decode replica promises memory: for the longest that a sequence can become, so that nobody
is ever paused; or for what it has, so that more fit and some are paused where memory fills."""


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """Who a replica is; fixed for the life of its process, but for its depth and what follows.

    Attributes:
        name: Ray actor name inside the application's namespace; unique per incarnation.
        num_slots: Sequences it can hold at once.
        kv_capacity_tokens: Tokens of KV cache it can hold at its depth.
        max_model_len: Most tokens of one sequence; 0 until it is known.
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


@dataclass(frozen=True, slots=True)
class LengthPrediction:
    """How many more tokens a sequence is expected to generate.

    Attributes:
        mean: Best guess.
        lower, upper: Quantiles around it (10 % and 90 % where nothing else is said).
    """

    mean: float
    lower: float
    upper: float


@dataclass(frozen=True, slots=True)
class LengthOutcome:
    """What came of a prediction: its sequence ended by itself.

    Attributes:
        remaining_tokens: What it really still generated after the prediction.
    """

    prediction: LengthPrediction
    remaining_tokens: int


@dataclass(frozen=True, slots=True)
class LoadForecast:
    """What a decode replica expects of its sequences, packed; part of its snapshot.

    Little-endian float32 throughout. The columns of `rows` and the points are those of
    `quadriga.policies.ares.forecast`; one row is 28 bytes, and there are never more rows than the
    replica has slots plus sequences reserved or paused.

    Attributes:
        grid_s: Horizon points, seconds from now; the first is now (0.0). One grid a depth class.
        sequence_ids: [num_rows]; the sequences the replica holds, is promised, or has paused.
        rows: [num_rows, forecast.NUM_COLUMNS].
        running, context: [num_points] each; sequences that still run when each has gained
            `forecast.TOKENS_AHEAD` tokens, and their KV tokens then. Loads are made of these, and
            do not depend on how fast the replica is.
        load_s: [num_points]; what the sequences add to a step here, at each point of the grid.
        tokens: [num_points]; KV tokens they hold, at each point of the grid.
        base_s: What a step costs without sequences.
        has_predictions: False where no length head is at hand: only the first point means much.
        per_sequence_s, per_token_s: What one more sequence, and one more KV token, add to a step,
            as measured here.
        bytes_per_token: KV of one token; what moving it costs.
    """

    grid_s: tuple[float, ...]
    sequence_ids: tuple[str, ...]
    rows: bytes
    running: bytes
    context: bytes
    load_s: bytes
    tokens: bytes
    base_s: float
    has_predictions: bool = True
    per_sequence_s: float = 0.0
    per_token_s: float = 0.0
    bytes_per_token: float = 0.0


class MigrationCause(StrEnum):
    """Why the scheduler moves a running sequence."""

    BALANCE = "balance"
    MEMORY = "memory"
    DRAIN = "drain"
    ESCALATE = "escalate"  # a strict sequence needs layers that its replica has not loaded


@dataclass(frozen=True, slots=True)
class MigrationOrder:
    """The scheduler asks a source replica to hand a running sequence over, live.

    Attributes:
        gain: Share of the class's weighted variance that the move removes.
        num_tokens: KV tokens to move, as last reported.
        remaining_tokens: Predicted tokens still to come; 0 where nothing was predicted.
    """

    sequence_id: str
    depth_class: DepthClass
    source: str
    destination: str
    cause: MigrationCause
    gain: float
    num_tokens: int
    remaining_tokens: float


MigrationOutcome = Literal["moved", "finished", "refused", "failed", "unknown"]


@dataclass(frozen=True, slots=True)
class MigrationReport:
    """How a live migration ended.

    Attributes:
        outcome: "moved": the destination owns the sequence. "finished": it ended, or was
            cancelled, before it could move. "refused": nothing was begun. "failed": it was begun,
            and the sequence goes on at the source. "unknown": the destination fell silent in the
            middle of the commit, and nobody can say whether it owns the sequence.
        reason: A word for machines and a sentence for people: "no_room: …"; empty for "moved".
        rounds: Rounds of copying, the last one, with the sequence at rest, included.
        bytes_sent: KV and what goes with it.
        stall_s: How long the sequence was at rest at the source.
        took_s: From the order to the end.
    """

    sequence_id: str
    outcome: MigrationOutcome
    reason: str = ""
    rounds: int = 0
    bytes_sent: int = 0
    stall_s: float = 0.0
    took_s: float = 0.0


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
class ReplicaSnapshot(Dated):
    """A replica's load, reported every second and used by placement and admission.

    Attributes:
        num_waiting: Sequences queued (prefill); reserved but not yet joined, or paused (decode).
        waiting_tokens: Prompt tokens in the prefill queue.
        used_tokens: Tokens whose KV is held.
        prompt_tokens: Prompt tokens of all sequences held (decode).
        reserved_tokens: Tokens promised to the sequences held; see `Reservation`.
        tokens_per_s: Recent rate: prefilled (prefill) or emitted (decode).
        step_time_s: EWMA of the decode step, or seconds per prefill chunk.
        draining: Takes nothing new.
        forecast: Decode only; None until the replica can forecast.
        num_paused: Sequences in host memory; they come back before new ones of their priority.
        least_priority: Of the running sequences, where one may be paused for a more important
            newcomer; else None.
        upper_tokens: What a newcomer's answer is taken to be where memory is promised as it is
            used; see `quadriga.policies.promises`.
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
    upper_tokens: int = 1


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the scheduler asks of a replica, in answer to its report.

    Attributes:
        forecast: Predict lengths and forecast loads: somebody looks at them.
        place_predicted: Ask for places when prompts are computed and lengths can be predicted, not
            while they are computed.
    """

    forecast: bool = False
    place_predicted: bool = False


@dataclass(frozen=True, slots=True)
class AdmitRequest(Dated):
    """What the scheduler must know to let a sequence in.

    Attributes:
        needs_depth: Layers that a strict sequence may need, where depths differ; 0: any will do.
        is_rebuild: It was let in before, and lost the replica that had it.
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


@dataclass(frozen=True, slots=True)
class Admission:
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
        nll: Sum of −log p over `scored_tokens` of its output tokens.
        decode_s: From the first token to the last.
        prompt_ids, output_ids, exit_layers: Of a greedy one, now and then: to be read again.
    """

    kind: Literal["started", "finished", "lost"]
    replica: str
    depth_class: DepthClass | None = None
    exit_tokens: dict[int, int] = field(default_factory=dict)
    nll: float = 0.0
    scored_tokens: int = 0
    prompt_tokens: int = 0
    ttft_s: float = 0.0
    decode_s: float = 0.0
    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()
    exit_layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PlaceRequest:
    """A prefill replica asks where a sequence shall decode.

    Attributes:
        exclude: Replicas that already refused or failed this sequence.
        prediction: Tokens still to come, by the length head after prefill.
        waited_s: How long it has looked for a replica already.
        source: The prefill replica.
        started_s: When it left that replica's queue, by that replica's own monotonic clock.
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


@dataclass(slots=True)
class ClusterView(Dated):
    """What the scheduler knows of the cluster, for ingresses to fall back on."""

    INSTANTS = ("taken_unix_s",)

    taken_unix_s: float
    snapshots: list[ReplicaSnapshot]


@dataclass(frozen=True, slots=True)
class TransferOffer:
    """The source asks the destination to take a sequence: step one of the hand-off.

    Attributes:
        transfer_id: Unique; names the lease.
        epoch: The sequence's epoch after the hand-off.
        num_tokens: Tokens whose KV will be sent.
        max_total_tokens: The longest it can become.
        lease_s: The reservation lapses when nothing is heard for this long.
        priority: Of the sequence; who is less important may be paused for it.
        prediction: Tokens still to come, where that is known already.
        is_live: The sequence is decoding at its source, and goes on until the commit; or it is
            paused there.
        min_depth, max_depth: Layers that a live sequence needs where it goes, and that there may
            be at most; 0 is no bound.
    """

    transfer_id: str
    sequence_id: str
    depth_class: DepthClass
    source: str
    epoch: int
    num_tokens: int
    max_total_tokens: int
    transport: str
    lease_s: float
    priority: int = 0
    prediction: LengthPrediction | None = None
    is_live: bool = False
    min_depth: int = 0
    max_depth: int = 0


@dataclass(frozen=True, slots=True)
class KVExtent:
    """What a row holds of the layers [first_layer, stop_layer): positions [0, num_tokens)."""

    first_layer: int
    stop_layer: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where a running sequence stood when it was moved; goes with the commit.

    Attributes:
        extents: The KV it has, layer ranges ascending and without gaps. What they leave out was
            never computed, and is not needed to go on.
        waited_at: The exit its token waits at; None where its next token is to begin.
        rest: What a runner keeps of a row beside its KV; see `ModelRunner.read_rest`.
        unacknowledged: What its ingress may not have heard yet; the destination says it again, so
            that the source may die.
        last_kv: The last parts of its KV, where they are so small that a call carries them.
    """

    extents: tuple[KVExtent, ...]
    waited_at: int | None
    rest: Any = None
    unacknowledged: tuple[Emission, ...] = ()
    last_kv: tuple[tuple[KVPart, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class KVPart:
    """Header of one piece of KV cache: layers [first_layer, first_layer + num_layers) at
    positions [start, start + num_tokens) of one sequence.

    Attributes:
        index: Position in the transfer, from 0 without gaps.
        shape: [num_layers, 2, num_kv_heads, num_tokens, head_dim].
        checksum: Of the payload's bytes, as `actors.kv_transport.payload.checksum` takes it.
    """

    transfer_id: str
    index: int
    first_layer: int
    num_layers: int
    start: int
    num_tokens: int
    shape: tuple[int, ...]
    dtype: str
    checksum: int
