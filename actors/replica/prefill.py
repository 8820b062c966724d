"""The prefill replica: computes prompts, emits first tokens, hands sequences to decode replicas."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Collection, Container, Sequence
from typing import Any

from actors.kv_transfer.kv_feed import KVFeed, StagingBudget
from actors.kv_transfer.prefill_handoff import PlacementQueue, PrefillHandoff
from actors.replica.forecasting import load_lengths
from actors.replica.prefill_engine import PrefillEngine
from actors.replica.replica import MAX_REMEMBERED, Replica
from actors.rpc.lifecycle import scheduler_name
from actors.rpc.ray_rpc import call
from actors.rpc.rpc_batcher import RpcBatcher
from actors.rpc.tasks import background
from quadriga.config.resolve import ReplicaSpec
from quadriga.control.auto_routing import AutoRouter
from quadriga.core.output import EngineOutput
from quadriga.core.replica import Role
from quadriga.core.request import SequenceState
from quadriga.core.routing import ClusterView, PlaceRequest
from quadriga.engine import load_runner
from quadriga.errors import DeadlineExceeded, QuadrigaError
from quadriga.interfaces import KVSink
from quadriga.policies.least_work import LeastWorkWithoutReports
from quadriga.policies.load import candidates

logger = logging.getLogger(__name__)

TELL_TIMEOUT_S = 5.0


class PrefillReplica(Replica[PrefillEngine]):
    """Ray actor; see `Replica` for the calls that both roles answer.

    Attributes:
        placed: Sequences that hold a row here and one at a decode replica. The event loop changes
            it; the engine's thread reads how many they are.
    """

    BATCHED = frozenset({"submit"})

    def __init__(self, name: str, spec: ReplicaSpec, config: dict[str, Any]) -> None:
        from actors.kv_transfer.handoff_sender import HandoffSender

        self.staging = StagingBudget()
        self._handoffs: dict[str, PrefillHandoff] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._states: dict[str, SequenceState] = {}
        self._handed_off: OrderedDict[str, str] = OrderedDict()
        self.placed: set[str] = set()
        super().__init__(name, spec, config)
        self.calls = RpcBatcher(call)
        self.sender = HandoffSender(name, self.transport, self.calls, self.config.transport)
        self.line = PlacementQueue()
        self._view: ClusterView | None = None
        self.is_scheduler_away = False
        self._fallback = LeastWorkWithoutReports()
        background(self._never_ending(self._keep_view()))

    # RPC

    async def submit(self, state: SequenceState) -> None:
        """Queue a sequence for prefill.

        Raises:
            Overloaded: The queue is full; says when to come back.
            Unavailable: Draining, or the weights are not loaded yet.
            DeadlineExceeded: It is late already.
        """
        self.require_taking()
        if state.deadline_unix_s <= self.clock.unix_s():
            raise DeadlineExceeded("the deadline passed before the request was queued")
        self.mail.expect(state.ingress_id)
        self._states[state.sequence_id] = state
        self.spans.begin("prefill", state)

        def queue(core: PrefillEngine) -> None:
            core.loop.submit(state)
            self.arrived(state.sequence_id)

        try:
            await self.engine.call(queue)
        except QuadrigaError as exc:
            self._states.pop(state.sequence_id, None)
            self.spans.end(state.sequence_id, exc.code)
            raise
        if self.is_cancelled(state.sequence_id):
            await self._cancel([state.sequence_id], state.ingress_id)

    # From the engine thread, on the event loop

    def start_handoff(self, state: SequenceState, feed: KVFeed) -> None:
        """The first chunk of a sequence is being computed: find its decode replica."""
        sequence_id = state.sequence_id
        if sequence_id not in self._states:
            feed.close()
            return
        handoff = PrefillHandoff(self, state, feed)
        self._handoffs[sequence_id] = handoff
        task = background(handoff.run())
        self._tasks[sequence_id] = task
        task.add_done_callback(lambda _: self._handoff_over(sequence_id, feed))

    def first_token(self, state: SequenceState, emission: EngineOutput) -> None:
        """A prompt is done: the token goes out at once, whatever becomes of the hand-off."""
        self.emit([(state.ingress_id, emission)])
        self.spans.end(state.sequence_id)
        handoff = self._handoffs.get(state.sequence_id)
        if emission.finish is not None:
            self._states.pop(state.sequence_id, None)
            if handoff is not None:
                self._tasks[state.sequence_id].cancel()
        elif handoff is not None:
            handoff.prompt_done()

    def rebuilt(self, state: SequenceState) -> None:
        """The KV of a lost sequence is there again: nothing to say, only to hand on."""
        self.spans.end(state.sequence_id)
        handoff = self._handoffs.get(state.sequence_id)
        if handoff is not None:
            handoff.prompt_done()

    def failed(self, state: SequenceState, error: QuadrigaError) -> None:
        """A sequence ended here in an error; the engine holds nothing of it any more."""
        if self._states.pop(state.sequence_id, None) is None:
            return
        task = self._tasks.get(state.sequence_id)
        if task is not None and task is not asyncio.current_task():
            task.cancel()
        emission = EngineOutput(state.sequence_id, state.epoch, len(state.output_ids), error=error)
        self.emit([(state.ingress_id, emission)])

    def has_place(self, sequence_id: str) -> None:
        """A decode replica has promised a row to a sequence: another prompt may be begun."""
        self.placed.add(sequence_id)
        if self.load.num_waiting:
            self.engine.wake()

    def handed_off(self, sequence_id: str, peer: str) -> None:
        """The decode replica owns the sequence from here on."""
        self._states.pop(sequence_id, None)
        self._handed_off[sequence_id] = peer
        while len(self._handed_off) > MAX_REMEMBERED:
            self._handed_off.popitem(last=False)

    def place_without_scheduler(self, request: PlaceRequest) -> str | None:
        """Choose by the last loads the scheduler told of; None when none has room."""
        if self._view is None:
            return None
        any_depth = self.config.helios.enabled
        able = candidates(
            self._view.snapshots,
            role=Role.DECODE,
            depth_class=None if any_depth else request.depth_class,
            model=request.depth_class.model,
            exclude=request.exclude,
            now_unix_s=self._view.taken_unix_s,
            max_age_s=self.config.scheduler.snapshot_max_age_s,
        )
        groups = AutoRouter().groups(request, able) if any_depth else [able]
        num_placing = sum(
            s.info.role is Role.PREFILL and s.info.depth_class.model == request.depth_class.model
            for s in self._view.snapshots
        )
        chosen = (
            self._fallback.choose(request, group, num_placing=max(1, num_placing))
            for group in groups
        )
        return next((name for name in chosen if name is not None), None)

    def cancel_at(self, peer: str, sequence_id: str, ingress_id: str | None) -> None:
        """Cancel a sequence that a decode replica owns by now; see `cancel`."""
        background(_tell(peer, "cancel", [sequence_id], ingress_id))

    def report_death(self, peer: str) -> None:
        """Tell the scheduler of a decode replica that is gone."""
        background(_tell(scheduler_name(self.config.name), "replica_died", peer))

    async def _keep_view(self) -> None:
        """Keep the last known loads for the time when there is no scheduler."""
        interval_s = self.config.scheduler.snapshot_interval_s
        scheduler = scheduler_name(self.config.name)
        while True:
            await asyncio.sleep(interval_s)
            try:
                self._view = await call(scheduler, "directory", timeout_s=max(interval_s, 1.0))
                self._fallback.renewed()
                self.is_scheduler_away = False
            except QuadrigaError as exc:
                self.is_scheduler_away = True
                logger.info("no news from %s: %s", scheduler, exc)

    def _handoff_over(self, sequence_id: str, feed: KVFeed) -> None:
        feed.close()
        self._handoffs.pop(sequence_id, None)
        self._tasks.pop(sequence_id, None)

    # Replica

    def _make_sink(self) -> KVSink | None:
        return None

    def _load_core(self) -> PrefillEngine:
        from quadriga.engine.model_runner import NativeRunner

        runner = load_runner(self.spec.engine)
        self.loaded(runner.spec)
        native = runner if isinstance(runner, NativeRunner) else None
        return PrefillEngine(self, runner, load_lengths(runner, self.deepest_spec), native)

    async def _cancel(self, sequence_ids: Sequence[str], ingress_id: str | None) -> None:
        # Nobody adopts what is here: only where they went they may be another ingress's by now.
        self.note_cancelled(sequence_ids)
        for sequence_id in sequence_ids:
            self._states.pop(sequence_id, None)
            self.spans.end(sequence_id, "cancelled")
            task = self._tasks.get(sequence_id)
            if task is not None:
                task.cancel()  # it aborts its transfer and releases the row
            peer = self._handed_off.pop(sequence_id, None)
            if peer is not None:
                # The ingress may not know yet where the sequence went.
                self.cancel_at(peer, sequence_id, ingress_id)

        def release(core: PrefillEngine) -> None:
            for sequence_id in sequence_ids:
                core.release(sequence_id)

        await self.engine.call(release)

    async def _held(self) -> Collection[SequenceState]:
        return self._states.values()

    async def _own(self) -> Container[str]:
        return self._states.keys()

    async def _close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _tell(peer: str, method: str, *args: Any) -> None:
    """Call an actor that may be gone, for news it can do without."""
    try:
        await call(peer, method, *args, timeout_s=TELL_TIMEOUT_S)
    except QuadrigaError as exc:
        logger.info("%s of %s: %s", method, peer, exc)
