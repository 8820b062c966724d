"""The seams of the system, as Protocols: what the layers above may ask of the layers below.

Arrays that cross the runner's seam are plain lists, so that the loops in `scheduling` need no torch
and run unchanged over the simulator's cost model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from quadriga.core.kv import KVExtent, KVPart
from quadriga.core.request import SampledToken, SequenceState

MAX_DRAFTED = 7
"""Tokens that may be drafted in a row behind its waiting one."""


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """When rows that draft stop, so that nobody need be asked after each token.

    A row runs its newest draft while it has room, the draft is no end, and all its drafts agree
    with a probability of `least` or more. The k-th pass over n such rows is run where the tokens
    that it is expected to give, their probabilities added up, would take longer than
    `needed_s[k][n]` elsewhere.

    Attributes:
        survivals: Per row, the probability that its drafts agree, the one it makes now included.
        rooms: Per row, how many drafts it may run.
        ends: Tokens that are not run.
        edges, chances: How often a draft agrees, by the number of edges that its confidence
            reaches; one more than edges, which ascend.
        token_s: Seconds that a token takes.
        needed_s: [passes, rows + 1].
    """

    survivals: Sequence[float]
    rooms: Sequence[int]
    ends: frozenset[int]
    edges: Sequence[float]
    chances: Sequence[float]
    least: float
    token_s: float
    needed_s: Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class Drafted:
    """What a row drafted in one call.

    Attributes:
        tokens: All but the last were run.
        confidences: With which those behind the first were drafted.
    """

    tokens: list[int]
    confidences: list[float]


LayersDone = Callable[[int, int], None]
"""Called by a runner during prefill with (first_layer, num_layers) whose KV is now complete for
every chunk of the call."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """A run of tokens to be computed in one forward pass.

    Attributes:
        row: KV row of the sequence.
        token_ids: Tokens at positions [start, stop).
        is_last: The prompt ends here: sample the next token.
        depths: Of a sequence that is rebuilt, the layers each token ran when it was first
            computed: deeper KV is made up for as it was then. None for a prompt, which runs all.
    """

    row: int
    token_ids: Sequence[int]
    start: int
    is_last: bool
    depths: Sequence[int] | None = None

    @property
    def stop(self) -> int:
        return self.start + len(self.token_ids)


class Suspended(Protocol):
    """A sequence in host memory, as `ModelRunner.suspend` gives it; nobody changes it."""

    @property
    def extents(self) -> Sequence[KVExtent]:
        """See `ModelRunner.extents`: what its row held."""

    @property
    def rest(self) -> Any:
        """See `ModelRunner.read_rest`."""

    def read(self, first_layer: int, num_layers: int, start: int, stop: int) -> Any:
        """See `ModelRunner.read_kv`."""


class ModelRunner(Protocol):
    """Runs forward passes over KV rows it owns; knows nothing of requests, queues or time.

    One thread calls `attach`, `detach`, `prefill` and `decode`. `read_kv` and `write_kv` may be
    called from other threads for rows that no pass is working on.
    """

    @property
    def num_layers(self) -> int: ...

    @property
    def num_rows(self) -> int: ...

    @property
    def row_capacity_tokens(self) -> int: ...

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens of KV over all rows that fit at the depth that is loaded."""

    def attach(self, row: int, state: SequenceState) -> None:
        """Bind a sequence to a row: sampling parameters, penalty counts, random key."""

    def detach(self, row: int) -> None:
        """Forget the sequence, if there is one; the row's KV becomes garbage."""

    def prefill(
        self, chunks: Sequence[PrefillChunk], on_layers: LayersDone | None = None
    ) -> list[SampledToken | None]:
        """Compute the chunks' KV in every layer; sample where a prompt ends.

        Returns:
            Parallel to `chunks`; None where no prompt ends, which is so for every rebuilt chunk.
        """

    def decode(self, rows: Sequence[int]) -> list[SampledToken]:
        """Run one token of each row and sample its next; parallel to `rows`.

        Each row's input is the last token of its attached state, at that token's position; the
        caller appends the sampled token to the state before the next call.
        """

    @property
    def segment_ends(self) -> tuple[int, ...]:
        """Layers run at each exit, ascending; the last is `num_layers`. Segment s is the layers
        between exits s - 1 and s; a runner without early exits has one segment."""

    def advance(self, rows: Sequence[int], first: int, stop: int) -> list[float]:
        """Run segments [first, stop) of each row's current token; parallel to `rows`.

        A row's token goes through the segments in order, in as many calls as the caller likes and
        beside whichever others; between two of them it waits where it is, at no cost.

        Returns:
            Each token's confidence at the exit behind segment stop - 1.
        """

    def emit(self, rows: Sequence[int]) -> list[SampledToken]:
        """Sample the tokens of rows that leave at the exit of the last `advance`.

        As with `decode`, the caller appends each to its state before the row's next segment 0.
        """

    @property
    def num_filled(self) -> int:
        """Positions × segments whose KV, skipped by early tokens, was filled in so far."""

    def suspend(self, row: int) -> Suspended:
        """Take a sequence out of its row, which is free afterwards, into host memory.

        Returns:
            All that `restore` needs to go on where it was, a token that waits at an exit included.
        """

    def restore(self, row: int, state: SequenceState, suspended: Any) -> None:
        """Put a suspended sequence into a free row; `state` is the one it had."""

    def extents(self, row: int) -> list[KVExtent]:
        """The KV that a row with a sequence holds, ascending, up to `num_layers`.

        Between two steps only. Positions inside an extent do not change as long as the sequence
        keeps its row.
        """

    def read_rest(self, row: int) -> Any:
        """Copy of what a row holds beside its KV, in host memory; None where that is nothing.

        With the KV of the row's extents it is all that `resume` needs.
        """

    def resume(self, row: int, state: SequenceState, rest: Any, depth: int | None = None) -> None:
        """`attach` a sequence that ran in a row elsewhere, a token that waits at an exit included.

        Args:
            rest: What `read_rest` gave there; the KV was written before.
            depth: Layers whose KV was written, an exit; what `rest` says of others is void. None
                for all that it speaks of.

        Raises:
            InvariantViolation: The row is taken, or the other runner's segments are not the same.
        """

    def read_kv(self, row: int, first_layer: int, num_layers: int, start: int, stop: int) -> Any:
        """Copy of KV: [num_layers, 2, num_kv_heads, stop - start, head_dim], contiguous, CPU or
        device as the transport of this runner's device wants it."""

    def write_kv(self, row: int, first_layer: int, start: int, kv: Any) -> None:
        """Store what `read_kv` of a peer returned."""


@runtime_checkable
class DraftingRunner(ModelRunner, Protocol):
    """A runner that can draft tokens with its first segment and verify them with the others.

    A row whose token waits at the first exit may take the exit's choice for its next token, for the
    time being, and run it: `advance` of segment 0 runs the newest draft of rows that have one. The
    state never has drafted tokens. Every other pass over a row, and every way out of it, drops
    them: the row then is as if it had never drafted.
    """

    def draft(self, rows: Sequence[int], plan: DraftPlan | None = None) -> list[Drafted]:
        """Let rows at the exit of the last `advance`, the first one, draft its choices.

        Args:
            plan: Rows may draft on by it, as if `advance` and `draft` were called again and again;
                a runner need not. None: one token each.

        Returns:
            Parallel to `rows`. The newest token of each is not run yet, and need not be. A row runs
            at most `MAX_DRAFTED`.
        """

    def verify(self, rows: Sequence[int]) -> list[list[SampledToken]]:
        """Run the other segments for the waiting token of each row and all that it has drafted.

        Returns:
            Per row, the whole model's tokens: as many as agree with the draft, and one more. They
            are those that `decode` would give one by one; the caller appends them to the state.
        """

    def drop_drafts(self, rows: Sequence[int]) -> None:
        """Forget what is drafted in these rows; their waiting tokens stay."""


@runtime_checkable
class ResizableRunner(ModelRunner, Protocol):
    """A runner that can load more layers of its model while it serves, and let some go.

    Positions computed before lack K and V in the layers that come. Where a row cannot make up for
    that by itself it *owes* its first positions: until `repay` has run them again, no pass over
    the row may go deeper than `depth_of` says.
    """

    @property
    def full_depth(self) -> int:
        """Layers of the whole model."""

    def take_depth(self, prepared: Any) -> None:
        """Run the layers that `prepare_depth` of the same runner loaded, from the next pass on.

        Raises:
            ConfigError: They do not fit what is loaded now; nothing has changed.
        """

    def check_drop(self, depth: int) -> None:
        """Raises: ConfigError: `drop_to` would."""

    def drop_to(self, depth: int) -> None:
        """Let the layers behind the first `depth` go; no token may wait behind them.

        Raises:
            ConfigError: That is no depth to go down to; nothing has changed.
        """

    def set_depth_of(self, row: int, depth: int) -> None:
        """A sequence was just attached whose KV has only the first `depth` layers, an exit."""

    def depth_of(self, row: int) -> int:
        """Layers that a pass over the row may run now."""

    def repay(self, row: int, max_tokens: int) -> int:
        """Run up to so many of the positions that a row owes; return how many are left."""


@runtime_checkable
class SharingRunner(ModelRunner, Protocol):
    """A runner whose rows may begin with KV that was computed in other rows.

    What is shared is as if the row had computed it: the same bits.
    """

    @property
    def share_tokens(self) -> int:
        """Tokens of a block, the unit in which KV is shared."""

    def keep(self, row: int, start: int, over: object | None = None) -> object:
        """Keep the KV of a row's block that begins at `start`, whatever becomes of the row.

        Args:
            over: A kept block that is let go for it; its memory may be written over.
        """

    def blank(self) -> object | None:
        """Memory for a block, touched, to be written `over`; None where keeping takes none."""

    def share(self, row: int, start: int, kept: object) -> None:
        """Let a row have a kept block at positions from `start` on; it has all before them."""

    def forget(self, kept: object) -> None:
        """Let a kept block go; rows that have it keep it."""


class KVSink(Protocol):
    """Where a transport delivers to; called on the transport's own threads."""

    def knows(self, source: str) -> bool:
        """Whether anything is expected from this replica: others may not connect."""

    def accept(self, source: str, part: KVPart) -> None:
        """Decide on a part by its header, before its bytes are taken.

        Raises: KVTransportError, code "refused".
        """

    def store(self, source: str, part: KVPart, kv: Any) -> None:
        """Write the part's KV into the row it belongs to and note its checksum.

        Raises: KVTransportError, code "refused", when the transfer ended meanwhile.
        """


class KVTransport(Protocol):
    """Moves KV parts from one replica's process to another's. Data plane only: reservation,
    commit and release are calls between the actors, the same for every transport.

    Parts of one transfer that are sent one after the other are stored in that order. A part that
    failed may be sent again under the same index.
    """

    name: str

    async def send(self, peer: str, part: KVPart, kv: Any, *, deadline_s: float) -> None:
        """Deliver one part to `peer`; return once it is stored there.

        Raises: KVTransportError when it did not arrive whole within `deadline_s`; its code is
            "refused" when the peer is well but does not want the part.
        """

    async def abort(self, peer: str, transfer_id: str) -> None:
        """Give up what is under way for a transfer; never raises, never waits for the peer."""

    async def close(self) -> None:
        """Release groups, sockets and threads."""
