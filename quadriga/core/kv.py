"""KV caches on their way between replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quadriga.core.forecast import LengthPrediction
from quadriga.core.grammar import Grammar
from quadriga.core.output import EngineOutput
from quadriga.core.relative_time import CompactPickleMixin
from quadriga.core.replica import DepthClass, ReplicaInfo


@dataclass(frozen=True, slots=True)
class TransferOffer(CompactPickleMixin):
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
        numerics: Of the source; see `ReplicaInfo.numerics`.
        block_keys: Of the prompt's blocks, as `PrefixCache` names them: those that the destination
            has need not be sent.
        grammar: Of the answer: the destination compiles it while the KV is on its way.
        expected_layers: See `layers_of`.
    """

    transfer_id: str
    sequence_id: str
    depth_class: DepthClass
    source: str
    epoch: int
    num_tokens: int
    max_total_tokens: int
    lease_s: float
    priority: int = 0
    prediction: LengthPrediction | None = None
    is_live: bool = False
    min_depth: int = 0
    max_depth: int = 0
    numerics: str = ""
    block_keys: tuple[bytes, ...] = ()
    grammar: Grammar | None = None
    expected_layers: float = 0.0


@dataclass(frozen=True, slots=True)
class Accepted(CompactPickleMixin):
    """The destination's answer to an offer.

    Attributes:
        held_tokens: Positions, from the first on, whose KV is in the promised row already.
    """

    peer: ReplicaInfo
    held_tokens: int = 0


@dataclass(frozen=True, slots=True)
class KVSpan:
    """Positions [start, stop) of layers [first_layer, stop_layer)."""

    first_layer: int
    stop_layer: int
    start: int
    stop: int

    @property
    def num_layers(self) -> int:
        return self.stop_layer - self.first_layer

    @property
    def num_cells(self) -> int:
        """(layer, position) pairs."""
        return self.num_layers * (self.stop - self.start)


@dataclass(frozen=True, slots=True)
class KVExtent(CompactPickleMixin):
    """What a row holds of the layers [first_layer, stop_layer): positions [0, num_tokens)."""

    first_layer: int
    stop_layer: int
    num_tokens: int

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.stop_layer)


@dataclass(frozen=True, slots=True)
class KVPart(CompactPickleMixin):
    """Header of one piece of KV cache: layers [first_layer, first_layer + num_layers) at
    positions [start, start + num_tokens) of one sequence.

    Attributes:
        index: Position in the transfer, from 0 without gaps.
        shape: [num_layers, 2, num_kv_heads, num_tokens, head_dim].
        checksum: Of the payload's bytes, as `kv_transport.payload.checksum` takes it.
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


@dataclass(frozen=True, slots=True)
class ResumePoint(CompactPickleMixin):
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
    unacknowledged: tuple[EngineOutput, ...] = ()
    last_kv: tuple[tuple[KVPart, bytes], ...] = ()
