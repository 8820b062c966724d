"""The prefill replica: computes prompts, emits first tokens, hands sequences to decode replicas."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Container, Sequence
from typing import Any

from actors.kv_transfer.placement import DecodePlacement
from actors.kv_transfer.sequence_handoff import PrefillHandoff
from actors.replica.prefill_engine import PrefillEngine
from actors.replica.replica import Replica
from quadriga.background import background
from quadriga.config.resolve import ReplicaSpec
from quadriga.core.output import EngineOutput
from quadriga.core.request import SequenceState
from quadriga.engine import load_runner
from quadriga.errors import QuadrigaError
from quadriga.interfaces import KVSink
from quadriga.replica.forecasting import load_lengths
from quadriga.scheduling.prefill_loop import PrefillOutput
from quadriga.scheduling.sequence import RunningSequence
from quadriga.scheduling.transfer.placement_turns import PlacementTurns

logger = logging.getLogger(__name__)


class PrefillReplica(Replica[PrefillEngine]):
    """Ray actor; see `Replica` for the calls that all roles answer.

    Attributes:
        sequences: Those that are queued, computed or being handed on here, by id. The event loop
            alone adds and removes; the engine's thread holds the same records while it works on
            them.
    """

    BATCHED = frozenset({"submit"})

    def __init__(self, name: str, spec: ReplicaSpec, config: dict[str, Any]) -> None:
        self.sequences: dict[str, RunningSequence] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}  # in the order of their start
        super().__init__(name, spec, config)
        turns = PlacementTurns(self.sequences, self.clock.now_s)
        self.placement = DecodePlacement(self.config, self.calls, turns)
        background(self._never_ending(self.placement.keep_view()))

    # RPC

    async def submit(self, state: SequenceState) -> None:
        """Queue a sequence for prefill. Raises: QuadrigaError: See `prepare` and `enqueue`."""
        await self.prepare(state)
        sequence = self.sequences[state.sequence_id] = RunningSequence(state)
        try:
            await self.enqueue(state, lambda core: core.loop.submit(sequence))
        except QuadrigaError:
            self.sequences.pop(state.sequence_id, None)
            raise

    # From the engine thread, on the event loop

    def _start_handoff(self, sequence: RunningSequence) -> None:
        """The first chunk of a sequence is being computed: find its decode replica."""
        feed = sequence.feed
        assert feed is not None, "sequences without a feed are not handed on"
        if self.sequences.get(sequence.state.sequence_id) is not sequence:
            feed.close()
            return
        handoff = PrefillHandoff(self, sequence, feed, self.placement, self.sender)
        task = background(self._hand_off(sequence, handoff))
        sequence.handoff = handoff
        handoff.task = task
        self._tasks[task] = None

        def over(task: asyncio.Task[None]) -> None:
            feed.close()
            sequence.handoff = handoff.task = None
            del self._tasks[task]

        task.add_done_callback(over)

    async def _hand_off(self, sequence: RunningSequence, handoff: PrefillHandoff) -> None:
        """Hand a sequence over; whatever happens, its row is released."""
        sequence_id = sequence.state.sequence_id
        try:
            peer = await handoff.run()
            self.sequences.pop(sequence_id, None)
            self.moved_away(sequence_id, peer)
        except QuadrigaError as exc:
            state = sequence.state
            self._failed(
                sequence, EngineOutput(sequence_id, state.epoch, len(state.output_ids), error=exc)
            )
        finally:
            if sequence.feed is not None:
                sequence.feed.close()
            sequence.is_placed = False  # first: a row that is free counts for no sequence
            if self.engine.is_ready:
                await asyncio.shield(self.engine.call(lambda core: core.loop.release(sequence_id)))

    def _take_outputs(self, outputs: list[PrefillOutput]) -> None:
        """Send out what a step has brought, whatever becomes of the hand-offs."""
        for sequence, output in outputs:
            state = sequence.state
            handoff: PrefillHandoff | None = sequence.handoff
            if output is not None and output.error is not None:
                self._failed(sequence, output)
                continue
            if output is not None:
                self.emit([(state.ingress_id, output)])
            self.spans.end(state.sequence_id, **{"quadriga.cached_tokens": sequence.num_cached})
            if output is not None and output.finish is not None:
                self.sequences.pop(state.sequence_id, None)
                if handoff is not None and handoff.task is not None:
                    handoff.task.cancel()
            elif handoff is not None:
                handoff.prompt_done()

    def _failed(self, sequence: RunningSequence, output: EngineOutput) -> None:
        """A sequence ended here in an error."""
        state = sequence.state
        if self.sequences.pop(state.sequence_id, None) is None:
            return
        task = sequence.handoff.task if sequence.handoff is not None else None
        if task is not None and task is not asyncio.current_task():
            task.cancel()
        self.emit([(state.ingress_id, output)])

    # Replica

    def _make_sink(self) -> KVSink | None:
        return None

    def _load_core(self) -> PrefillEngine:
        from quadriga.engine.model_runner import NativeRunner

        runner = load_runner(self.spec.engine, self.ranks)
        self.loaded(runner.spec, runner.numerics)
        return PrefillEngine(
            self,
            runner,
            load_lengths(runner, self.deepest_spec),
            runner if isinstance(runner, NativeRunner) else None,
            on_start=self._start_handoff,
            on_outputs=self._take_outputs,
        )

    async def _cancel(self, sequence_ids: Sequence[str], ingress_id: str | None) -> None:
        # No other ingress adopts what is here: only where it went it may have been adopted.
        for sequence_id, peer in self.departed.cancel(sequence_ids).items():
            self.cancel_at(peer, sequence_id, ingress_id)
        for sequence_id in sequence_ids:
            sequence = self.sequences.pop(sequence_id, None)
            self.spans.end(sequence_id, "cancelled")
            if sequence is not None and sequence.handoff is not None:
                sequence.handoff.task.cancel()  # it aborts its transfer and releases the row

        def release(core: PrefillEngine) -> None:
            for sequence_id in sequence_ids:
                core.loop.release(sequence_id)

        await self.engine.call(release)

    async def _held(self) -> Collection[SequenceState]:
        return [sequence.state for sequence in self.sequences.values()]

    async def _own(self) -> Container[str]:
        return self.sequences.keys()

    async def _close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
