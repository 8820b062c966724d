"""Decode replicas without processes: engines, loops, lease tables, and sequences that move."""

from __future__ import annotations

import itertools
import pickle
from dataclasses import replace
from typing import Protocol

from quadriga.checkpoint.exits import ExitCounters
from quadriga.clock import SystemClock
from quadriga.config.engine_spec import EngineSpec
from quadriga.core.kv import KVExtent, KVPart, ResumePoint, TransferOffer
from quadriga.core.request import SequenceState
from quadriga.engine.baton.runner import BatonRunner
from quadriga.engine.model_runner import NativeRunner
from quadriga.policies.drex import DrexRebatcher, SegmentCosts
from quadriga.scheduling.decode_loop import DecodeLoop
from quadriga.scheduling.transfer.handoff import LeaseTable
from quadriga.scheduling.transfer.sequence_export import PreCopy, SequenceReading, SequenceRemainder
from tests.equivalence.models import begin
from tests.sequences import make_decode_loop, make_slots

AnyRunner = NativeRunner | BatonRunner
_names = itertools.count()


class Member:
    """One replica.

    Args:
        runner: Loaded as `spec` says; None for a native one.
        is_crowded: Memory is promised as it is used, and soon full.
    """

    def __init__(
        self,
        spec: EngineSpec,
        *,
        rebatches: bool,
        runner: AnyRunner | None = None,
        is_crowded: bool = False,
    ) -> None:
        self.spec = spec
        self.runner = runner or NativeRunner.load(spec)
        counters = ExitCounters()
        costs = SegmentCosts(len(self.runner.segment_ends), spec.num_rows)
        self.loop = make_decode_loop(
            self.runner,
            make_slots(
                spec.num_rows,
                spec.row_capacity_tokens,
                spec.kv_capacity_tokens,
                reservation="used" if is_crowded else "longest",
            ),
            SystemClock(),
            rebatcher=DrexRebatcher(costs, counters=counters, deterministic=True)
            if rebatches
            else None,
            counters=counters,
            criterion=spec.exits.criterion,
        )
        self.table = LeaseTable(spec.depth_class, max_live=99)

    def begin(self, state: SequenceState) -> None:
        """Prefill and join."""
        begin(self.loop, state, self.runner)

    @property
    def is_at_base_line(self) -> bool:
        loop = self.loop
        return (loop.slots.num_held, loop.slots.reserved_tokens, self.table.num_open) == (0, 0, 0)


class Side(Protocol):
    """What a sequence leaves, or comes to: a `Member`, or the like."""

    @property
    def loop(self) -> DecodeLoop: ...

    @property
    def runner(self) -> AnyRunner: ...

    @property
    def table(self) -> LeaseTable: ...


class Move:
    """One migration, piece by piece, its parts and its commit through a real lease table.

    Args:
        deterministic: Answers must not depend on load.

    Raises:
        MigrationFailed: The destination does not take it.
    """

    def __init__(
        self,
        source: Side,
        destination: Side,
        sequence_id: str,
        *,
        max_cells: int = 1,
        deterministic: bool = False,
    ) -> None:
        self.source, self.destination = source, destination
        self.sequence_id = sequence_id
        self.resume: ResumePoint | None = None
        self._max_cells = max_cells
        self._checksums: list[int] = []
        held = source.loop.export.held(sequence_id)
        assert held is not None
        state, depth = held
        self.transfer_id = f"t{next(_names)}"
        self._epoch = state.epoch + 1
        least, most = state.exits.depth_bounds(depth, deterministic=deterministic)
        self._offer = TransferOffer(
            self.transfer_id,
            sequence_id,
            replace(destination.runner.spec.depth_class, depth=depth),
            "source",
            self._epoch,
            state.num_tokens,
            state.max_total_tokens,
            5.0,
            is_live=True,
            min_depth=least,
            max_depth=most,
        )
        destination.table.check_offer(self._offer)
        slot = destination.loop.reserve(sequence_id, state.max_total_tokens, state.num_tokens)
        self._row = slot.row
        self.lease = destination.table.open(self._offer, self._row, now_s=0.0)
        self._books = PreCopy(min(depth, destination.runner.num_layers))

    def piece(self) -> bool | None:
        """Send one piece; True when the sequence may rest, None when it is over."""
        reading = self.source.loop.export.read(self.sequence_id, self._books, self._max_cells)
        if reading is None:
            return None
        self._send(reading)
        return not reading.parts

    def freeze(self) -> SequenceRemainder | None:
        """Let it rest, as soon as little enough is missing; None when it is over."""
        found = self.source.loop.export.begin_cutover(self.sequence_id, self._books)
        while isinstance(found, SequenceReading):
            self._send(found)
            found = self.source.loop.export.begin_cutover(self.sequence_id, self._books)
        return found

    def finish(self, rest: SequenceRemainder) -> SequenceState:
        """Send the rest and commit; returns the state that runs from here on."""
        self._send(rest.reading)
        owned = replace(rest.state, epoch=self._epoch)
        state, self.resume = pickle.loads(pickle.dumps((owned, rest.resume), 5))
        assert isinstance(state, SequenceState)
        assert isinstance(self.resume, ResumePoint)
        self.commit(state, self.resume.extents)
        self.destination.loop.join(state, self.resume, self._offer.depth_class.depth)
        assert self.source.loop.leave(self.sequence_id) is not None
        return state

    def commit(self, state: SequenceState, extents: tuple[KVExtent, ...]) -> None:
        lease = self.destination.table.commit(
            self.transfer_id,
            epoch=state.epoch,
            num_tokens=state.num_tokens - 1,
            checksums=self._checksums,
            extents=extents,
        )
        assert lease is self.lease

    def abort(self) -> None:
        if self.destination.table.abort(self.transfer_id) is not None:
            self.destination.loop.leave(self.sequence_id)

    def _send(self, reading: SequenceReading) -> None:
        table, runner = self.destination.table, self.destination.runner
        for span, kv in reading.parts:
            part = KVPart(
                self.transfer_id,
                len(self._checksums),
                span.first_layer,
                span.stop_layer - span.first_layer,
                span.start,
                span.stop - span.start,
                tuple(kv.shape),
                "float32",
                7 + len(self._checksums),
            )
            lease = table.begin_store("source", part, now_s=0.0)
            runner.write_kv(lease.row, span.first_layer, span.start, kv)
            table.end_store(lease, part, part.checksum, now_s=0.0)
            self._checksums.append(part.checksum)


def move(
    source: Side, destination: Side, sequence_id: str, *, deterministic: bool = False
) -> tuple[SequenceState, Move]:
    """A whole migration between two steps. Raises: MigrationFailed: As `Move`."""
    transfer = Move(source, destination, sequence_id, deterministic=deterministic)
    while transfer.piece() is False:
        pass
    rest = transfer.freeze()
    assert rest is not None
    return transfer.finish(rest), transfer
