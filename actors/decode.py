"""The decode replica: takes sequences over from others and runs them to their end."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Container, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from actors.forecasting import Forecasting, load_lengths
from actors.idle_check import IdleCheck, Leaks
from actors.migrations import Migrations
from actors.replica import Replica
from actors.status import Load, ParkedSequence
from actors.tasks import background
from quadriga.batching.calibration import calibrate
from quadriga.batching.decode_loop import DecodeLoop
from quadriga.batching.handoff import LeaseState
from quadriga.batching.paced_runner import PacedRunner
from quadriga.batching.rates import Ewma
from quadriga.batching.rendezvous import StepPhase
from quadriga.batching.slots import SlotTable
from quadriga.engine import load_runner
from quadriga.engine_spec import DTYPE_BYTES, EngineSpec
from quadriga.errors import MigrationFailed
from quadriga.exits import ExitCounters
from quadriga.interfaces import KVSink, ModelRunner
from quadriga.pacing import find_profile
from quadriga.policies.rebatchers import make_rebatcher
from quadriga.resolve import ReplicaSpec
from quadriga.types import (
    Emission,
    LengthOutcome,
    MigrationOrder,
    MigrationReport,
    Orphan,
    RelayMemory,
    ReplicaInfo,
    ReplicaSnapshot,
    ResumePoint,
    SequenceState,
    TransferOffer,
)

LOOK_EVERY_S = 0.5
"""Between two looks at the relay batch's memory."""

if TYPE_CHECKING:
    from quadriga.batching.lengths import LengthModel
    from quadriga.engine.baton.runner import BatonRunner
    from quadriga.engine.runner import NativeRunner
    from quadriga.engine.skipped_kv import SkippedKVStore


class DecodeCore:
    """The decode loop in its host's clothing; everything but `write_kv` on the engine thread."""

    def __init__(
        self,
        replica: DecodeReplica,
        runner: ModelRunner,
        skipped: SkippedKVStore | None,
        relay: BatonRunner | None,
        lengths: LengthModel | None,
        resizable: NativeRunner | None = None,
    ) -> None:
        spec = replica.spec.engine
        self._is_watched = replica.config.helios.enabled
        self.resizable = resizable
        self._strict_depth = 0
        self._parked: tuple[ParkedSequence, ...] = ()
        self._parked_looked_s = 0.0
        self._skipped = skipped
        self.runner = runner
        self._replica = replica
        counters = ExitCounters()
        costs = calibrate(runner, replica.clock, max_rows=spec.num_rows)
        self.loop = DecodeLoop(
            runner=runner,
            slots=SlotTable(
                num_rows=spec.num_rows,
                row_capacity_tokens=spec.row_capacity_tokens,
                kv_capacity_tokens=spec.kv_capacity_tokens,
                reservation=replica.config.decode.reservation,
            ),
            eos_token_ids=spec.checkpoint.eos_token_ids,
            clock=replica.clock,
            rebatcher=make_rebatcher(
                replica.config.decode.rebatching,
                costs,
                counters,
                # HELIOS judges depths by where tokens could leave: every exit is tested.
                deterministic=replica.config.deterministic or replica.config.helios.enabled,
            ),
            counters=counters,
            criterion=spec.exits.criterion,
            is_partial=spec.depth < spec.checkpoint.num_layers,
            parks_strict=self._is_watched,
        )

        self.forecasting = Forecasting(
            runner,
            lengths,
            spec,
            replica.config,
            replica.clock,
            offers=replica.receiver.offers,
            leaving=replica.leaving,
        )
        self._bytes_per_token = _kv_bytes(spec)
        self._relay = relay
        self._relay_memory: RelayMemory | None = None
        self._looked_s = 0.0
        self._began_s = 0.0
        self._pass_s = Ewma(0.2)
        self._leaks = Leaks()
        self._idle_check = IdleCheck(self._check, replica.clock)

    @property
    def has_work(self) -> bool:
        return self.loop.has_work

    def _check(self) -> bool:
        """Verify the books; a slot must belong to a running sequence or to a transfer."""
        loop = self.loop
        loop.check()
        claimed = self._replica.receiver.sequences()
        claimed.update(state.sequence_id for state in loop.running)
        return self._leaks.check(loop.slots.holders, claimed, now_s=self._replica.clock.now_s())

    def step(self) -> None:
        has_work = self.loop.has_work
        self._began_s = self._replica.clock.now_s()
        emissions = self.loop.step()
        if has_work:
            self._pass_s.add(self._replica.clock.now_s() - self._began_s)
        self._idle_check.step(is_idle=not self.loop.has_work)
        if emissions:
            self._emit(emissions)
        self.forecasting.stepped(self.loop, emissions)

    def _emit(self, emissions: list[tuple[str, Emission]]) -> None:
        if self._is_watched and self.resizable is not None:
            depth = self.resizable.num_layers
            for _, emission in emissions:
                emission.depth = depth
        self._replica.post(self._replica.emit, emissions)

    # ResizableCore

    def in_the_way(self, depth: int) -> list[str]:
        """See `ResizableCore`."""
        assert self.resizable is not None
        return self.loop.depth.blockers(depth) if depth < self.resizable.num_layers else []

    def change(self, depth: int, prepared: Any) -> list[str]:
        """See `ResizableCore`."""
        if prepared is None:
            shrunk = self.loop.depth.drop_to(depth)
            if shrunk.emissions:
                self._emit(shrunk.emissions)
            if shrunk.blocked_by:
                return shrunk.blocked_by
        else:
            self.loop.depth.take(prepared)
        assert self.resizable is not None
        spec = self.resizable.spec
        self._bytes_per_token = _kv_bytes(spec)
        self.forecasting.resized(spec)
        return []

    def give_up(self) -> None:
        """See `ResizableCore`: nothing was held back."""

    def _look_at_strict(self) -> None:
        """Who may need how many layers, now and then."""
        now_s = self._replica.clock.now_s()
        if now_s - self._parked_looked_s < LOOK_EVERY_S:
            return
        self._parked_looked_s = now_s
        full = self._replica.spec.engine.checkpoint.num_layers
        needs = [s.exits.max_depth or full for s in self.loop.running if s.exits.policy == "strict"]
        self._strict_depth = max(needs, default=0)
        self._parked = tuple(
            ParkedSequence(s.sequence_id, s.num_tokens, s.max_total_tokens)
            for s in self.loop.depth.needs_deeper
        )

    def phase(self) -> StepPhase:
        """Where it is in its steps; from any thread."""
        if not self.loop.num_running:
            return StepPhase(0.0, 0.0)
        step_s = self._pass_s.value
        return StepPhase(self._began_s + step_s - self._replica.clock.now_s(), step_s)

    def publish(self) -> None:
        loop = self.loop
        self.forecasting.look(loop)
        if self._is_watched:
            self._look_at_strict()
        self._replica.publish_load(
            Load(
                num_running=loop.num_running,
                num_waiting=loop.num_reserved + loop.num_paused,
                used_tokens=loop.used_tokens,
                reserved_tokens=loop.slots.reserved_tokens,
                tokens_per_s=loop.tokens_per_s,
                step_time_s=loop.step_time_s,
                steps=replace(loop.meter.totals),
                exits=self._exit_counters(),
                num_at_exits=tuple(loop.num_waiting_at_exits),
                num_paused=loop.num_paused,
                paused_bytes=loop.paused_tokens * self._bytes_per_token,
                num_pauses=loop.num_pauses,
                num_resumes=loop.num_resumes,
                least_priority=loop.least_priority,
                relay=self._relay_figures(),
                strict_depth=self._strict_depth,
                parked=self._parked,
            )
        )

    def _relay_figures(self) -> RelayMemory | None:
        """What the relay batch holds; looked at now and then, as it takes a lock and a sum."""
        now_s = self._replica.clock.now_s()
        if self._relay is not None and now_s - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = now_s
            self._relay_memory = self._relay.memory()
        return self._relay_memory

    def _exit_counters(self) -> ExitCounters:
        counters = self.loop.counters.copy()
        if self._skipped is not None:
            counters.filled_tokens = self._skipped.num_filled
            counters.copied_bytes = self._skipped.copied_bytes
        return counters


class DecodeReplica(Replica[DecodeCore]):
    """Ray actor; see `Replica` for the calls that both roles answer."""

    BATCHED = frozenset({"reserve", "commit", "claimed"})
    reply_spacing_s = 0.0005

    def __init__(self, name: str, spec: ReplicaSpec, config: dict[str, Any]) -> None:
        self.migrations = Migrations(self)  # the engine's thread asks it who is leaving
        super().__init__(name, spec, config)
        background(self._never_ending(self._sweep()))

    def _make_sink(self) -> KVSink | None:
        from actors.handoff_receiver import HandoffReceiver

        kind = self.config.transport.kind
        transports = ("gloo", "object_store") if kind == "auto" else (kind,)
        self.receiver = HandoffReceiver(
            self.spec.engine.depth_class,
            self,
            self.clock,
            transports,
            any_depth=bool(self.spec.engine.exit_plan.layers),
        )
        return self.receiver

    def _load_core(self) -> DecodeCore:
        from quadriga.engine.runner import NativeRunner

        loaded = load_runner(self.spec.engine)
        self.loaded(loaded.spec)
        runner: ModelRunner = loaded
        native = loaded if isinstance(loaded, NativeRunner) else None
        skipped = native.skipped if native is not None else None
        lengths = load_lengths(loaded, self.deepest_spec)
        relay = None
        if self.spec.engine.runner == "baton":  # its import takes seconds
            from quadriga.engine.baton.runner import BatonRunner

            relay = runner if isinstance(runner, BatonRunner) else None
        if self.config.decode.pace is not None:
            runner = PacedRunner(runner, find_profile(self.config.decode.pace))
        return DecodeCore(self, runner, skipped, relay, lengths, native)

    # RPC: the receiving side of a hand-off

    async def reserve(self, offer: TransferOffer) -> ReplicaInfo:
        """Promise a row to a sequence that another replica wants to hand over.

        Raises:
            KVCacheExhausted, ContextTooLong: No room now, or ever.
            Unavailable: Draining, or the weights are not loaded yet.
            MigrationFailed: Cancelled, stale, or not for this replica.
        """
        self.require_taking()
        if self.is_cancelled(offer.sequence_id):
            raise MigrationFailed(f"{offer.sequence_id} was cancelled", code="cancelled")
        await self.receiver.reserve(offer)
        self.accepted(offer.sequence_id)
        return self.info_record

    async def renew(self, transfer_id: str) -> bool:
        """Keep a lease alive; False when there is none."""
        return self.receiver.renew(transfer_id)

    async def commit(
        self,
        transfer_id: str,
        state: SequenceState,
        checksums: Sequence[int],
        resume: ResumePoint | None = None,
    ) -> None:
        """Take the sequence over; may be repeated. Raises: MigrationFailed."""
        if self.is_cancelled(state.sequence_id):
            await self.receiver.abort(transfer_id, LeaseState.CANCELLED)
            raise MigrationFailed(f"{state.sequence_id} was cancelled", code="cancelled")
        self.mail.expect(state.ingress_id)
        await self.receiver.commit(transfer_id, state, checksums, resume)

    async def abort(self, transfer_id: str) -> LeaseState | None:
        """End a transfer unless it is committed; may be repeated. Returns what it is now."""
        return await self.receiver.abort(transfer_id)

    async def step_phase(self) -> StepPhase:
        """Where this replica is in its steps: when a moving sequence could join best."""
        return self.engine.require_core().phase()

    # RPC: sequences whose ingress is gone

    async def claimed(self, claims: Sequence[str]) -> list[Orphan]:
        """Which of these sequences run here, none of them on its way elsewhere."""

        def find(core: DecodeCore) -> list[Orphan]:
            return [
                Orphan(state.claim, self.name, state.sequence_id, state.epoch)
                for state in core.loop.running
                if state.claim and state.claim in claims
            ]

        found = await self.engine.call(find)
        return [o for o in found if o.sequence_id not in self.leaving()]

    async def adopt(self, sequence_id: str, ingress_id: str) -> bool:
        """Tell another ingress of a sequence from now on, and first all that it has said so far.

        Returns:
            Whether it runs here; one that is on its way elsewhere does not.
        """
        self.mail.expect(ingress_id)

        def adopt(core: DecodeCore) -> bool:
            state = next((s for s in core.loop.running if s.sequence_id == sequence_id), None)
            if state is None or sequence_id in self.leaving():
                return False
            state.ingress_id = ingress_id
            said = Emission(
                sequence_id,
                state.epoch,
                token_ids=list(state.output_ids),
                exit_layers=list(state.exit_layers),
            )
            self.post(self.mail.put, [(ingress_id, said)])
            return True

        return await self.engine.call(adopt)

    # RPC: the giving side

    async def hand_over(self, destination: str) -> list[MigrationReport]:
        """Move everything that runs here to another replica, as far as it goes."""
        return await self.migrations.move_all(destination)

    async def migrate(self, order: MigrationOrder) -> MigrationReport:
        """Hand a running sequence over, live; never raises for an ordinary end.

        An order for a sequence that is on its way already is refused.
        """
        return await self.migrations.migrate(order)

    def resized(self, engine: EngineSpec) -> None:
        super().resized(engine)
        self.receiver.follow(engine.depth_class)

    # RowHost

    async def reserve_row(
        self, sequence_id: str, max_total_tokens: int, num_tokens: int, priority: int
    ) -> int:
        slot = await self.engine.call(
            lambda core: core.loop.reserve(sequence_id, max_total_tokens, num_tokens, priority)
        )
        return slot.row

    async def release_row(self, sequence_id: str) -> None:
        await self.engine.call(lambda core: core.loop.leave(sequence_id))

    async def join(self, state: SequenceState, resume: ResumePoint | None, depth: int) -> None:
        if self.is_cancelled(state.sequence_id):
            raise MigrationFailed(f"{state.sequence_id} was cancelled", code="cancelled")
        self.migrations.came_back(state.sequence_id)

        def join(core: DecodeCore) -> None:
            core.loop.join(state, resume, depth)
            if resume is not None and resume.unacknowledged:
                # What the source said last comes first, and only now that this replica owns it.
                again = [(state.ingress_id, emission) for emission in resume.unacknowledged]
                self.post(self.mail.put, again)

        self.spans.begin("decode", state)
        await self.engine.call(join)

    def write_kv(self, row: int, first_layer: int, start: int, kv: Any) -> None:
        self.engine.require_core().runner.write_kv(row, first_layer, start, kv)

    # Forecasts

    def leaving(self) -> Collection[str]:
        """Sequences on their way to other replicas; from any thread."""
        return self.migrations.under_way

    def _snapshot(self) -> ReplicaSnapshot:
        snapshot = super()._snapshot()
        forecasting = self.engine.require_core().forecasting
        forecasting.is_wanted = self.wishes.forecast
        snapshot.forecast = forecasting.forecast()
        if snapshot.forecast is not None:
            capacity = self.info_record.kv_capacity_tokens
            self.metrics.forecast(snapshot.forecast, capacity, forecasting)
        return snapshot

    def _take_outcomes(self) -> list[LengthOutcome]:
        return self.engine.require_core().forecasting.take_outcomes()

    # Replica

    async def _cancel(self, sequence_ids: Sequence[str]) -> None:
        self.migrations.forward(sequence_ids)
        for sequence_id in sequence_ids:
            self.spans.end(sequence_id, "cancelled")
            await self.receiver.cancel(sequence_id)

        def leave(core: DecodeCore) -> None:
            # A reserved row belongs to its lease: only running sequences are taken out here.
            running = {state.sequence_id for state in core.loop.running}
            for sequence_id in running.intersection(sequence_ids):
                core.loop.leave(sequence_id)

        await self.engine.call(leave)

    async def _held_for(self, ingress_ids: set[str]) -> list[SequenceState]:
        running = await self.engine.call(lambda core: core.loop.running)
        return [state for state in running if state.ingress_id in ingress_ids]

    async def _own(self) -> Container[str]:
        def ids(core: DecodeCore) -> set[str]:
            running = {state.sequence_id for state in core.loop.running}
            return running | (set(core.loop.slots.holders) - self.receiver.sequences())

        return await self.engine.call(ids)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self.config.transport.lease_s / 4)
            if self.engine.is_ready:
                await self.receiver.sweep()

    async def _close(self) -> None:
        if self.engine.is_ready:
            await self.receiver.abort_all()


def _kv_bytes(spec: EngineSpec) -> int:
    return spec.checkpoint.kv_bytes_per_token(spec.depth, DTYPE_BYTES[spec.dtype])
