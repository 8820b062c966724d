"""The decode replica: takes sequences over from other replicas and runs them to their end."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Container, Sequence
from contextlib import suppress
from typing import Any, ClassVar

from actors.kv_transfer.migration import Migrations
from actors.replica.decode_engine import DecodeEngine
from actors.replica.replica import Replica
from quadriga.background import background, overslept_s
from quadriga.config.engine_spec import EngineSpec
from quadriga.config.resolve import ReplicaSpec
from quadriga.control.replica_record import ReplicaLoad
from quadriga.core.adapters import find_adapter
from quadriga.core.forecast import LengthOutcome
from quadriga.core.grammar import Grammar
from quadriga.core.kv import Accepted, ResumePoint, TransferOffer
from quadriga.core.migration import MigrationOrder, MigrationReport
from quadriga.core.output import EngineOutput
from quadriga.core.replica import ReplicaSnapshot
from quadriga.core.request import ResumableSequence, SequenceState
from quadriga.engine import load_runner
from quadriga.errors import MigrationFailed, Overloaded, QuadrigaError, TakenOver, UnknownModel
from quadriga.interfaces import KVSink, ModelRunner
from quadriga.replica.forecasting import load_lengths
from quadriga.scheduling.transfer.handoff import LeaseState, check_numerics, still_busy
from quadriga.scheduling.transfer.sequence_export import StepPhase

COMPILE_WAIT_S = 1.5
"""A call that reserves waits so long for a grammar: others travel in the same batch."""


class DecodeReplica(Replica[DecodeEngine]):
    """Ray actor; see `Replica` for the calls that all roles answer."""

    engine_type: ClassVar[type[DecodeEngine]] = DecodeEngine
    BATCHED = frozenset({"reserve", "commit", "claimed"})
    reply_spacing_s = 0.0005

    def __init__(self, name: str, spec: ReplicaSpec, config: dict[str, Any]) -> None:
        # First: the engine's thread reads which sequences leave.
        self.migrations = Migrations(self)
        super().__init__(name, spec, config)
        background(self._never_ending(self._sweep()))

    def _make_sink(self) -> KVSink | None:
        from quadriga.replica.handoff_receiver import HandoffReceiver

        self.receiver = HandoffReceiver(
            self.spec.engine.depth_class,
            self,
            self.clock,
            any_depth=bool(self.spec.engine.exit_plan.layers),
        )
        return self.receiver

    def _load_core(self) -> DecodeEngine:
        from quadriga.engine.model_runner import NativeRunner

        loaded = load_runner(self.spec.engine, self.ranks)
        self.loaded(loaded.spec, loaded.numerics)
        runner: ModelRunner = loaded
        native = loaded if isinstance(loaded, NativeRunner) else None
        lengths = load_lengths(loaded, self.deepest_spec)
        relay = None
        if self.spec.engine.runner == "baton":  # its import takes seconds
            from quadriga.engine.baton.runner import BatonRunner

            relay = runner if isinstance(runner, BatonRunner) else None
        if self.config.decode.pace is not None:
            from quadriga.config.pacing import find_profile
            from quadriga.scheduling.paced_runner import PacedRunner

            runner = PacedRunner(runner, find_profile(self.config.decode.pace))
        return self.engine_type(
            self,
            runner,
            receiver=self.receiver,
            leaving=self.leaving,
            resizable=native,
            relay=relay,
            lengths=lengths,
        )

    # RPC: the receiving side of a hand-off

    async def reserve(self, offer: TransferOffer) -> Accepted:
        """Promise a row to a sequence that another replica is to hand over.

        Raises:
            KVCacheExhausted, ContextTooLong: No room now, or ever.
            Unavailable: Draining, or the weights are not loaded yet.
            MigrationFailed: Cancelled, stale, or not for this replica.
            Overloaded: Code "busy": it is on its way from here, its last row is not free yet, or
                its grammar takes long to compile.
            InvalidRequest: The grammar of a running one cannot be compiled here.
        """
        self.require_taking()
        if offer.is_live:
            # It goes on at its source meanwhile; after the commit it would stand still for it.
            await self._compile_before(offer.grammar)
            self.require_taking()
        self._require_wanted(offer.sequence_id)
        check_numerics(offer, self.info_record.numerics)
        if offer.sequence_id in self.leaving():
            # It comes back before this replica knows that it went: the commit's answer was lost.
            raise still_busy(offer.sequence_id)
        held_tokens = await self.receiver.reserve(offer)
        if offer.grammar is not None and not offer.is_live:
            background(self._compile_ahead(offer.grammar))
        return Accepted(self.info_record, held_tokens)

    async def _compile_before(self, grammar: Grammar | None) -> None:
        """Compile the grammar of a sequence that may come; it stays among the newest for a while.

        Raises: Overloaded, code "busy": It takes longer than other calls of the batch can wait.
        """
        if grammar is None:
            return
        try:
            async with asyncio.timeout(COMPILE_WAIT_S):
                await asyncio.shield(background(self.compile_grammar(grammar)))
        except TimeoutError:
            raise Overloaded(
                f"{self.name} still compiles the grammar; ask again in a moment",
                code="busy",
                retry_after_s=COMPILE_WAIT_S,
            ) from None

    async def _compile_ahead(self, grammar: Grammar) -> None:
        """Compile the grammar of a sequence that is on its way here; `join` waits for it.

        It stays compiled as long as the lease has its offer.
        """
        with suppress(QuadrigaError):  # `join` raises it
            await self.compile_grammar(grammar)

    async def renew(self, transfer_id: str) -> bool:
        """Keep a lease alive; False when there is none."""
        return self.receiver.leases.renew(transfer_id, now_s=self.clock.now_s())

    async def commit(
        self,
        transfer_id: str,
        state: SequenceState,
        checksums: Sequence[int],
        resume: ResumePoint | None = None,
    ) -> None:
        """Take the sequence over; may be repeated. Raises: MigrationFailed."""
        if self.departed.is_cancelled(state.sequence_id):
            await self.receiver.abort(transfer_id, LeaseState.CANCELLED)
            raise MigrationFailed(f"{state.sequence_id} was cancelled", code="cancelled")
        try:
            if state.adapter:
                find_adapter(self.spec.engine.adapters, state.adapter)
        except UnknownModel as exc:
            await self.receiver.abort(transfer_id)
            raise MigrationFailed(exc.message, code="unknown_adapter") from exc
        self.mail.expect(state.ingress_id)
        await self.receiver.commit(transfer_id, state, checksums, resume)

    async def abort(self, transfer_id: str) -> LeaseState | None:
        """End a transfer unless it is committed; may be repeated. Returns what it is now."""
        return await self.receiver.abort(transfer_id)

    async def step_phase(self) -> StepPhase:
        """Where this replica is in its steps: when a moving sequence could join best."""
        return self.engine.require_core().phase()

    # RPC: sequences whose ingress is gone

    async def claimed(self, claims: Sequence[str]) -> list[ResumableSequence]:
        """Which of these sequences run here, none of them on its way elsewhere."""

        def find(core: DecodeEngine) -> list[ResumableSequence]:
            return [
                ResumableSequence(
                    state.claim, self.name, state.sequence_id, state.epoch, state.model
                )
                for state in core.loop.running
                if state.claim and state.claim in claims
            ]

        found = await self.engine.call(find)
        return [o for o in found if o.sequence_id not in self.leaving()]

    async def adopt(self, sequence_id: str, ingress_id: str) -> bool:
        """Send a sequence's tokens to another ingress from now on, first all those there are.

        The ingress before gets an error: the request was resumed elsewhere.

        Returns:
            Whether it runs here; one that is on its way elsewhere does not.
        """
        self.mail.expect(ingress_id)

        def adopt(core: DecodeEngine) -> bool:
            state = next((s for s in core.loop.running if s.sequence_id == sequence_id), None)
            if state is None or sequence_id in self.leaving():
                return False
            before, state.ingress_id = state.ingress_id, ingress_id
            num_tokens = len(state.output_ids)
            so_far = EngineOutput(
                sequence_id,
                state.epoch,
                token_ids=list(state.output_ids),
                exit_layers=list(state.exit_layers),
                progress=state.progress(),
                # A request whose model is chosen may have had some of them counted, and not all.
                logprobs=list(state.logprobs) if len(state.logprobs) == num_tokens else None,
                prompt_logprobs=state.prompt_logprobs,
                depth=core.loaded_depth,
            )
            outputs = [(ingress_id, so_far)]
            if before != ingress_id:  # it may be up, and a client may wait there
                error = TakenOver("the request was resumed elsewhere, and goes on there")
                outputs.append((before, EngineOutput(sequence_id, state.epoch, error=error)))
            self.post(self.mail.put, outputs)
            return True

        return await self.engine.call(adopt)

    # RPC: the giving side

    async def hand_over(self, destination: str, reason: str = "") -> list[MigrationReport]:
        """Move everything that runs here to another replica, as far as it goes."""
        return await self.migrations.move_all(destination, reason)

    async def migrate(self, order: MigrationOrder) -> MigrationReport:
        """Hand a running sequence over, live; never raises for an ordinary end.

        An order for a sequence that is on its way already is refused.
        """
        return await self.migrations.migrate(order)

    def resized(self, engine: EngineSpec) -> None:
        super().resized(engine)
        self.receiver.leases.follow(engine.depth_class)

    # RowHost

    async def reserve_row(self, offer: TransferOffer) -> tuple[int, int]:
        def reserve(core: DecodeEngine) -> tuple[int, int]:
            slot = core.loop.reserve(
                offer.sequence_id,
                offer.max_total_tokens,
                offer.num_tokens,
                offer.priority,
                offer.prediction,
                offer.block_keys,
            )
            self.arrived(offer.sequence_id)
            return slot.row, core.loop.fill(offer.sequence_id, slot.row, offer.block_keys)

        return await self.engine.call(reserve)

    async def release_row(self, sequence_id: str) -> None:
        await self.engine.call(lambda core: core.loop.leave(sequence_id))

    async def join(self, state: SequenceState, resume: ResumePoint | None, depth: int) -> None:
        self._require_wanted(state.sequence_id)
        await self.compile_grammar(state.sampling.grammar)
        self.departed.come_back(state.sequence_id)

        def join(core: DecodeEngine) -> None:
            self._require_wanted(state.sequence_id)  # a cancellation may have been faster
            core.loop.join(state, resume, depth)
            if resume is not None and resume.unacknowledged:
                # The source's last outputs come first, and only now that this replica owns it.
                again = [(state.ingress_id, emission) for emission in resume.unacknowledged]
                self.post(self.mail.put, again)

        with self.spans.begun("decode", state):
            await self.engine.call(join)

    def _require_wanted(self, sequence_id: str) -> None:
        """Raises: MigrationFailed: Code "cancelled"."""
        if self.departed.is_cancelled(sequence_id):
            raise MigrationFailed(f"{sequence_id} was cancelled", code="cancelled")

    def write_kv(self, row: int, first_layer: int, start: int, kv: Any) -> None:
        self.engine.require_core().runner.write_kv(row, first_layer, start, kv)

    # Forecasts

    def leaving(self) -> Collection[str]:
        """Sequences on their way to other replicas; from any thread."""
        return self.migrations.under_way

    def _snapshot_of(self, load: ReplicaLoad, loaded_s: float) -> ReplicaSnapshot:
        snapshot = super()._snapshot_of(load, loaded_s)
        forecasting = self.engine.require_core().forecasting
        forecasting.is_wanted = self.report_options.forecast
        forecasting.depth_pool = self.report_options.depth_pool
        snapshot.forecast = forecasting.forecast()
        self.metrics.forecast(snapshot.forecast, self.info_record.kv_capacity_tokens, forecasting)
        return snapshot

    def _take_outcomes(self) -> list[LengthOutcome]:
        return self.engine.require_core().forecasting.take_outcomes()

    # Replica

    async def _cancel(self, sequence_ids: Sequence[str], ingress_id: str | None) -> None:
        def leave(core: DecodeEngine) -> tuple[list[str], dict[str, str]]:
            # On this thread sequences are adopted, joined and let go: the ingress of one cannot
            # change before it has left, and what is noted as cancelled does not run.
            held = {state.sequence_id: state.ingress_id for state in core.held}
            over = [
                sequence_id
                for sequence_id in sequence_ids
                if ingress_id is None or held.get(sequence_id, ingress_id) == ingress_id
            ]
            owners = self.departed.cancel(over)
            # A reserved row belongs to its lease: only what is held is taken out here.
            for sequence_id in held.keys() & set(over):
                core.let_go(sequence_id)
            return over, owners

        over, owners = await self.engine.call(leave)
        for sequence_id, peer in owners.items():
            self.cancel_at(peer, sequence_id, ingress_id)
        for sequence_id in over:
            self.spans.end(sequence_id, "cancelled")
            await self.receiver.cancel(sequence_id)

    async def _held(self) -> Collection[SequenceState]:
        return await self.engine.call(lambda core: core.held)

    async def _own(self) -> Container[str]:
        def ids(core: DecodeEngine) -> set[str]:
            held = {state.sequence_id for state in core.held}
            return held | (set(core.loop.slots.owners) - self.receiver.leases.sequences())

        return await self.engine.call(ids)

    async def _sweep(self) -> None:
        while True:
            late_s = await overslept_s(self.clock, self.config.transport.lease_s / 4)
            if self.engine.is_ready:
                await self.receiver.sweep(stood_still_s=late_s)

    async def _close(self) -> None:
        if self.engine.is_ready:
            await self.receiver.abort_all()
