"""The receiving side of a two-phase hand-off, as pure state: leases, parts, commit.

    reserve ──▶ OPEN ──▶ parts, in order; later ones may overwrite earlier positions
                 │  ╲
                 │   ╲──▶ ABORTED    by either side
                 │    ╲─▶ CANCELLED  the sequence is not wanted any more, here or anywhere
                 │     ╲▶ LAPSED     no sign of life for `lease_s`
                 ▼
             COMMITTED               all parts there, checksums equal, every position covered

Each end is final, and is remembered so that a repeated or late call gets the same answer. A row
is given back only when no thread is writing into it any more.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from quadriga.core.kv import KVExtent, KVPart, TransferOffer
from quadriga.core.replica import DepthClass
from quadriga.errors import KVTransportError, MigrationFailed, Overloaded

Value = TypeVar("Value")
Params = ParamSpec("Params")

MAX_REMEMBERED = 4096
"""Ended transfers, and epochs of sequences, that are remembered for late calls."""
MAX_LIVE = 2
"""Running sequences a replica takes over at once: each costs its steps a little."""


class LeaseState(StrEnum):
    """Where a transfer stands at its destination."""

    OPEN = "open"
    COMMITTED = "committed"
    ABORTED = "aborted"
    CANCELLED = "cancelled"
    LAPSED = "lapsed"


OPEN = LeaseState.OPEN


@dataclass(slots=True)
class Lease:
    """A row promised to a sequence on its way.

    Attributes:
        depth: Layers of it that there are here.
        held_tokens: Positions whose KV was in the row from the start.
        heard_s: When the source last gave a sign of life.
        num_storing: Threads writing a part into the row right now.
        checksums: Of the bytes received, by part index.
        epoch_before: The sequence's epoch when it was last here, once this was committed.
    """

    offer: TransferOffer
    row: int
    depth: int
    heard_s: float
    state: LeaseState = LeaseState.OPEN
    num_storing: int = 0
    parts: dict[int, KVPart] = field(default_factory=dict)
    checksums: dict[int, int] = field(default_factory=dict)
    epoch_before: int | None = None
    held_tokens: int = 0


def _locked(
    method: Callable[Concatenate[LeaseTable, Params], Value],
) -> Callable[Concatenate[LeaseTable, Params], Value]:
    """Hold the table's lock during a call."""

    @wraps(method)
    def call(self: LeaseTable, /, *args: Params.args, **kwargs: Params.kwargs) -> Value:
        with self._lock:
            return method(self, *args, **kwargs)

    return call


class LeaseTable:
    """Every transfer a replica is receiving, and what became of the recent ones; thread-safe.

    A lease stays in the table until it is committed, or its row was given back.

    Args:
        depth_class: Of the replica; `follow` changes it.
        any_depth: Sequences of other depths of the model are taken, too: layers that are not here
            are left out. The offer of a running sequence names the depths that it can do with.
        max_live: Running sequences that it receives at once.
    """

    def __init__(
        self, depth_class: DepthClass, *, any_depth: bool = False, max_live: int = MAX_LIVE
    ) -> None:
        self._depth_class = depth_class
        self._any_depth = any_depth
        self._max_live = max_live
        self._lock = threading.RLock()
        self._leases: dict[str, Lease] = {}  # by transfer
        self._ended: OrderedDict[str, LeaseState] = OrderedDict()
        self._epochs: OrderedDict[str, int] = OrderedDict()

    @_locked
    def follow(self, depth_class: DepthClass) -> None:
        """The replica holds another number of layers from now on."""
        self._depth_class = depth_class

    def _check_class(self, offer: TransferOffer) -> None:
        """Raise MigrationFailed unless the sequence can go on in as many layers as there are."""
        offered, mine = offer.depth_class, self._depth_class
        if offered == mine:
            return
        if offered.model != mine.model or not self._any_depth:
            raise MigrationFailed(
                f"transfer {offer.transfer_id} is for {offered}; this replica serves {mine}",
                code="wrong_depth_class",
            )
        most = offer.max_depth or mine.depth
        if offer.is_live and not offer.min_depth <= mine.depth <= most:
            raise MigrationFailed(
                f"sequence {offer.sequence_id} needs {offer.min_depth} layers or more"
                f"{f' and {most} at most' if offer.max_depth else ''} to say what it says at "
                f"{offered}; this replica serves {mine}",
                code="wrong_depth",
            )

    @_locked
    def check_offer(self, offer: TransferOffer) -> list[str]:
        """Decide on an offer before room is looked for.

        Returns:
            Transfers of the same sequence that this one replaces; end them first.

        Raises:
            MigrationFailed: The offer is for another depth class, or for other depths, stale, or
                already over.
            Overloaded: Code "busy": enough running sequences are on their way here.
        """
        self._check_class(offer)
        ended = self._ended.get(offer.transfer_id)
        if ended is not None:
            raise MigrationFailed(f"transfer {offer.transfer_id} is already {ended}", code=ended)
        owned_epoch = self._epochs.get(offer.sequence_id, -1)
        rivals = [
            lease.offer
            for lease in self._open()
            if lease.offer.sequence_id == offer.sequence_id
            and lease.offer.transfer_id != offer.transfer_id
        ]
        newest = max([owned_epoch + 1, *(rival.epoch for rival in rivals)])
        if offer.epoch < newest:
            raise MigrationFailed(
                f"transfer {offer.transfer_id} has epoch {offer.epoch}; sequence "
                f"{offer.sequence_id} is known here at epoch {newest - 1} or later",
                code="stale_epoch",
            )
        self._check_live(offer)
        return [rival.transfer_id for rival in rivals]

    def _check_live(self, offer: TransferOffer) -> None:
        num_live = sum(lease.offer.is_live for lease in self._open())
        if offer.is_live and num_live >= self._max_live:
            raise Overloaded(f"{num_live} running sequences are on their way here", code="busy")

    @_locked
    def check_row(self, sequence_id: str) -> None:
        """Raises: Overloaded: Code "busy": the row of an earlier transfer is not free yet."""
        leases = self._leases.values()
        if any(v.offer.sequence_id == sequence_id and v.state is not OPEN for v in leases):
            raise still_busy(sequence_id)

    @_locked
    def open(self, offer: TransferOffer, row: int, *, now_s: float, held_tokens: int = 0) -> Lease:
        """Enter a lease for a row that is reserved.

        Raises:
            MigrationFailed, Overloaded: As `check_offer`; things may have changed in between.
        """
        self.check_offer(offer)
        depth = min(offer.depth_class.depth, self._depth_class.depth)
        lease = Lease(offer, row, depth, now_s, held_tokens=held_tokens)
        self._leases[offer.transfer_id] = lease
        return lease

    def _open(self) -> list[Lease]:
        return [lease for lease in self._leases.values() if lease.state is OPEN]

    @_locked
    def get(self, transfer_id: str) -> Lease | None:
        """The open lease of this transfer, or None."""
        lease = self._leases.get(transfer_id)
        return lease if lease is not None and lease.state is OPEN else None

    @_locked
    def state(self, transfer_id: str) -> LeaseState | None:
        """What is known of a transfer; None when it never came, or ended long ago."""
        return OPEN if self.get(transfer_id) is not None else self._ended.get(transfer_id)

    @_locked
    def has_source(self, source: str) -> bool:
        """Whether any open lease is for this source: others may not even connect."""
        return any(lease.offer.source == source for lease in self._open())

    @_locked
    def renew(self, transfer_id: str, *, now_s: float) -> bool:
        """Note a sign of life of the source; False when there is no such lease."""
        lease = self.get(transfer_id)
        if lease is not None:
            lease.heard_s = now_s
        return lease is not None

    @_locked
    def check_part(self, source: str, part: KVPart, *, now_s: float) -> Lease:
        """Decide on a part by its header, before its bytes are taken.

        Raises:
            KVTransportError: Code "refused": no open lease for it, another source's lease, or
                layers or positions outside of what was offered.
        """
        lease = self.get(part.transfer_id)
        if lease is None:
            state = self._ended.get(part.transfer_id)
            raise _refused(part, f"the transfer is {state}" if state else "unknown transfer")
        offer = lease.offer
        if offer.source != source:
            raise _refused(part, f"the lease is {offer.source}'s, not {source}'s")
        last_layer = part.first_layer + part.num_layers
        if not (0 <= part.first_layer < last_layer <= offer.depth_class.depth):
            raise _refused(part, f"layers {part.first_layer}..{last_layer} were not offered")
        stop = part.start + part.num_tokens
        if not (0 <= part.start < stop <= offer.max_total_tokens):
            raise _refused(
                part, f"positions {part.start}..{stop} exceed the {offer.max_total_tokens} reserved"
            )
        if part.start < lease.held_tokens:  # other rows may share them
            raise _refused(part, f"{lease.held_tokens} positions were there before")
        if len(part.shape) != 5 or (part.shape[0], part.shape[3]) != (
            part.num_layers,
            part.num_tokens,
        ):
            raise _refused(part, f"shape {part.shape} contradicts its header")
        # Only the newest part may come again: one that was given up and turns up late must not
        # overwrite what was sent after it.
        num_parts = len(lease.parts)
        if part.index not in (num_parts - 1, num_parts) or part.index < 0:
            raise _refused(part, f"{num_parts} parts are there")
        if part.index < num_parts and lease.parts[part.index] != part:
            raise _refused(part, "its index is taken by another part")
        lease.heard_s = now_s
        return lease

    @_locked
    def begin_store(self, source: str, part: KVPart, *, now_s: float) -> Lease:
        """Mark the row as being written; `end_store` must follow. Raises: as `check_part`."""
        lease = self.check_part(source, part, now_s=now_s)
        lease.num_storing += 1
        return lease

    @_locked
    def end_store(self, lease: Lease, part: KVPart, checksum: int | None, *, now_s: float) -> bool:
        """Record what was written; `checksum` is None when the write failed.

        Returns:
            True when the transfer ended meanwhile and its row is to be released now.
        """
        lease.num_storing -= 1
        lease.heard_s = now_s
        if checksum is not None:
            lease.parts[part.index] = part
            lease.checksums[part.index] = checksum
        if lease.num_storing:
            return False
        return lease.state not in (LeaseState.OPEN, LeaseState.COMMITTED)

    @_locked
    def commit(
        self,
        transfer_id: str,
        *,
        epoch: int,
        num_tokens: int,
        checksums: Sequence[int],
        extents: Sequence[KVExtent] = (),
    ) -> Lease | None:
        """Make the sequence this replica's own.

        Args:
            epoch: The state's epoch, which must be the offered one.
            num_tokens: Positions whose KV the sequence needs to go on.
            checksums: Of every part, in order of their indices, as the source computed them.
            extents: What of that was computed at all, per run of layers, as far as they are here;
                empty for everything in all layers offered.

        Returns:
            The lease, or None when it was committed before.

        Raises:
            MigrationFailed: Unknown, ended, stale, incomplete or corrupt, or this replica has
                other layers meanwhile than the sequence can do with; an open lease stays open,
                so that the source may send a part again.
        """
        lease = self.get(transfer_id)
        if lease is None:
            state = self._ended.get(transfer_id)
            if state is LeaseState.COMMITTED:
                return None
            raise MigrationFailed(
                f"transfer {transfer_id} cannot be committed: it is {state or 'unknown'}",
                code=state or "unknown_transfer",
            )
        if epoch != lease.offer.epoch:
            raise MigrationFailed(
                f"transfer {transfer_id} was offered for epoch {lease.offer.epoch}, not {epoch}",
                code="stale_epoch",
            )
        self._check_class(lease.offer)
        _verify_parts(lease, checksums)
        depth = lease.depth if extents else lease.offer.depth_class.depth
        extents = extents or (KVExtent(0, depth, num_tokens),)
        _verify_extents(lease, extents, depth, num_tokens)
        gap = _first_gap(lease.parts.values(), extents, lease.held_tokens)
        if gap is not None:
            raise MigrationFailed(
                f"transfer {transfer_id} lacks layer {gap[0]} from position {gap[1]} on",
                code="incomplete",
            )
        self._end(lease, LeaseState.COMMITTED)
        lease.epoch_before = self._epochs.get(lease.offer.sequence_id)
        _remember(self._epochs, lease.offer.sequence_id, lease.offer.epoch)
        return lease

    @_locked
    def revoke(self, lease: Lease, state: LeaseState = LeaseState.ABORTED) -> None:
        """Take a commit back: the replica could not make the sequence its own after all.

        Its source may offer it again, under the same epoch.

        Args:
            state: What the transfer ended as: ABORTED or CANCELLED.
        """
        sequence_id = lease.offer.sequence_id
        _remember(self._ended, lease.offer.transfer_id, state)
        if lease.epoch_before is None:
            self._epochs.pop(sequence_id, None)
        else:
            self._epochs[sequence_id] = lease.epoch_before

    @_locked
    def abort(self, transfer_id: str, state: LeaseState = LeaseState.ABORTED) -> Lease | None:
        """End a transfer; repeated, or for one that never was, it does no harm.

        Args:
            state: What it ends as: ABORTED or CANCELLED.

        Returns:
            The lease whose row is to be released now; None when there is none, it was committed
            before, or a thread still writes (then `end_store` says so).
        """
        lease = self.get(transfer_id)
        if lease is None:
            if transfer_id not in self._ended:
                _remember(self._ended, transfer_id, state)
            return None
        self._end(lease, state)
        return None if lease.num_storing else lease

    @_locked
    def freed(self, lease: Lease) -> None:
        """The row of an ended transfer was given back."""
        self._leases.pop(lease.offer.transfer_id, None)

    @_locked
    def stood_still(self, seconds: float, *, now_s: float) -> None:
        """Do not count as silence a time in which this process could receive nothing."""
        for lease in self._open():
            lease.heard_s = min(now_s, lease.heard_s + seconds)

    @_locked
    def lapse(self, *, now_s: float) -> list[Lease]:
        """End the leases of silent sources; returns those whose row is to be released now."""
        silent = [v for v in self._open() if now_s - v.heard_s > v.offer.lease_s]
        for lease in silent:
            self._end(lease, LeaseState.LAPSED)
        return [lease for lease in silent if not lease.num_storing]

    @_locked
    def open_transfers(self, sequence_id: str | None = None) -> list[str]:
        """Ids of the open transfers of one sequence; None: of all."""
        offers = [lease.offer for lease in self._open()]
        return [o.transfer_id for o in offers if sequence_id in (None, o.sequence_id)]

    @_locked
    def offers(self) -> list[TransferOffer]:
        """Offers of the open leases."""
        return [lease.offer for lease in self._open()]

    @_locked
    def sequences(self) -> set[str]:
        """Ids of sequences whose row a transfer holds."""
        return {lease.offer.sequence_id for lease in self._leases.values()}

    @property
    @_locked
    def num_open(self) -> int:
        return len(self._open())

    def _end(self, lease: Lease, state: LeaseState) -> None:
        lease.state = state
        if state is LeaseState.COMMITTED:
            del self._leases[lease.offer.transfer_id]
        _remember(self._ended, lease.offer.transfer_id, state)


def check_numerics(offer: TransferOffer, numerics: str) -> None:
    """Refuse KV that a replica would have computed otherwise.

    Args:
        numerics: Of the replica; see `ReplicaInfo.numerics`.

    Raises:
        MigrationFailed: Code "wrong_numerics".
    """
    if numerics not in ("", offer.numerics):
        raise MigrationFailed(
            f"the KV of {offer.sequence_id} was computed with {offer.numerics or 'unnamed code'}; "
            f"this replica computes with {numerics}",
            code="wrong_numerics",
        )


def still_busy(sequence_id: str) -> Overloaded:
    """The error for an offer that comes before the row of an earlier try is free."""
    return Overloaded(
        f"the row of an earlier transfer of {sequence_id} is not free yet", code="busy"
    )


def _refused(part: KVPart, reason: str) -> KVTransportError:
    return KVTransportError(
        f"part {part.index} of transfer {part.transfer_id} was refused: {reason}", code="refused"
    )


def _remember(memory: OrderedDict[str, Value], key: str, value: Value) -> None:
    memory[key] = value
    memory.move_to_end(key)
    while len(memory) > MAX_REMEMBERED:
        memory.popitem(last=False)


def _verify_parts(lease: Lease, checksums: Sequence[int]) -> None:
    """Raise MigrationFailed unless exactly these parts are there, unharmed."""
    transfer_id = lease.offer.transfer_id
    if lease.num_storing:
        raise MigrationFailed(f"transfer {transfer_id} is still being written", code="incomplete")
    missing = [i for i in range(len(checksums)) if i not in lease.checksums]
    if missing or len(lease.checksums) != len(checksums):
        raise MigrationFailed(
            f"transfer {transfer_id} has {len(lease.checksums)} of {len(checksums)} parts; "
            f"missing: {missing[:8]}",
            code="incomplete",
        )
    corrupt = [i for i, wanted in enumerate(checksums) if lease.checksums[i] != wanted]
    if corrupt:
        raise MigrationFailed(
            f"transfer {transfer_id} is corrupt: checksums of parts {corrupt[:8]} differ",
            code="corrupt",
        )


def _verify_extents(lease: Lease, extents: Sequence[KVExtent], depth: int, num_tokens: int) -> None:
    """Raise MigrationFailed unless these are the layers, each filled no further than the first."""
    begins = [extent.first_layer for extent in extents]
    ends = [extent.stop_layer for extent in extents]
    tokens = [extent.num_tokens for extent in extents]
    is_sane = (
        begins == [0, *ends[:-1]]
        and ends[-1] == depth
        and all(begin < end for begin, end in zip(begins, ends, strict=True))
        and tokens == sorted(tokens, reverse=True)
        and tokens[-1] >= 0
        # The newest token has KV only where it was run already and waits at an exit.
        and num_tokens <= tokens[0] <= num_tokens + 1
    )
    if not is_sane:
        raise MigrationFailed(
            f"transfer {lease.offer.transfer_id} of {num_tokens} tokens claims KV that {depth} "
            f"layers cannot have: {list(extents)}",
            code="incoherent",
        )


def _first_gap(
    parts: Iterable[KVPart], extents: Sequence[KVExtent], held_tokens: int
) -> tuple[int, int] | None:
    """(layer, position) of the first KV that was not there and that no part brought, or None."""
    needed = [e.num_tokens for e in extents for _ in range(e.first_layer, e.stop_layer)]
    spans: list[list[tuple[int, int]]] = [[] for _ in needed]
    for part in parts:
        for layer in range(part.first_layer, part.first_layer + part.num_layers):
            spans[layer].append((part.start, part.start + part.num_tokens))
    for layer, pieces in enumerate(spans):
        covered = held_tokens
        for start, stop in sorted(pieces):
            if start > covered:
                break
            covered = max(covered, stop)
        if covered < needed[layer]:
            return layer, covered
    return None
