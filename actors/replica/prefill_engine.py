"""What a prefill replica's engine thread runs: the loop, and what it hands to the event loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from actors.kv_transfer.kv_feed import KVFeed, KVRange, LayerJoiner
from quadriga.config.resolve import DTYPE_BYTES
from quadriga.control.replica_record import ReplicaLoad
from quadriga.core.output import EngineOutput
from quadriga.core.request import FinishReason, SequenceState, TokenLogprob
from quadriga.errors import Cancelled, QuadrigaError
from quadriga.interfaces import ModelRunner, PrefillChunk
from quadriga.scheduling.idle_check import IdleCheck
from quadriga.scheduling.prefill_loop import PrefillEvents, PrefillLoop
from quadriga.scheduling.prefill_queue import PrefillQueue
from quadriga.scheduling.slots import SlotTable

if TYPE_CHECKING:
    from actors.replica.prefill import PrefillReplica
    from quadriga.engine.model_runner import NativeRunner
    from quadriga.scheduling.forecasts import LengthModel


class PrefillEngine(PrefillEvents):
    """The prefill loop in its host's clothing; everything here runs on the engine thread."""

    def __init__(
        self,
        replica: PrefillReplica,
        runner: ModelRunner,
        lengths: LengthModel | None,
        resizable: NativeRunner | None = None,
    ) -> None:
        spec = replica.spec.engine
        settings = replica.config.prefill
        self.runner = runner
        self.resizable = resizable
        self._is_watched = replica.config.helios.enabled
        self._replica = replica
        self._lengths = lengths
        self._has_first_tokens = False
        self._staging = replica.staging
        value_bytes = DTYPE_BYTES[spec.dtype]
        self._bytes_per_token_layer = spec.checkpoint.kv_bytes_per_token(1, value_bytes)
        self._feeds: dict[str, KVFeed] = {}
        self._joiner = LayerJoiner(runner.num_layers, self._bytes_per_token_layer)
        # What a step's prompts are to tell the event loop: one wake-up for all of them.
        self._at_end: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        self.loop = PrefillLoop(
            runner=runner,
            slots=SlotTable(
                num_rows=spec.num_rows,
                row_capacity_tokens=spec.row_capacity_tokens,
                kv_capacity_tokens=spec.kv_capacity_tokens,
            ),
            queue=PrefillQueue(
                max_sequences=settings.max_queued_sequences,
                max_tokens=settings.max_queued_tokens,
                max_age_s=settings.max_age_s,
            ),
            events=self,
            eos_token_ids=spec.checkpoint.eos_token_ids,
            chunk_tokens=settings.chunk_tokens,
            layer_groups=settings.layer_groups,
            clock=replica.clock,
            full_depth=spec.checkpoint.num_layers if self._is_watched else 0,
            max_unplaced=settings.max_rows,
            num_placed=replica.placed.__len__,
        )

        self._idle_check = IdleCheck(self._check, replica.clock)

    @property
    def has_work(self) -> bool:
        return self.loop.has_work

    def _check(self) -> bool:
        self.loop.check()
        return False

    def step(self) -> None:
        self.loop.step()
        self._idle_check.step(is_idle=not self.loop.has_work)
        if self._has_first_tokens:
            self._has_first_tokens = False
            self._predict()
        if self._at_end:
            self._replica.post(_run_all, self._at_end)
            self._at_end = []

    def _predict(self) -> None:
        """Note with the sequences whose prompts are done how long they are expected to go on."""
        if self._lengths is None or not self._replica.report_options.forecast:
            return
        asked = self._lengths.ask()
        if asked is not None:
            states, answer = asked
            for state, said in zip(states, answer(), strict=True):
                state.prediction, state.predicted_at = said, len(state.output_ids)

    def publish(self) -> None:
        loop = self.loop
        self._replica.publish_load(
            ReplicaLoad(
                num_running=loop.num_held,
                num_waiting=loop.num_waiting,
                waiting_tokens=loop.waiting_tokens,
                used_tokens=loop.used_tokens,
                reserved_tokens=loop.slots.reserved_tokens,
                tokens_per_s=loop.tokens_per_s,
                step_time_s=loop.step_time_s,
                steps=replace(loop.meter.totals),
                strict_depth=loop.needs_depth,
            )
        )

    def release(self, sequence_id: str) -> bool:
        """Let go of a sequence; see `PrefillLoop.release`."""
        self._feeds.pop(sequence_id, None)
        self._joiner.forget(sequence_id)
        return self.loop.release(sequence_id)

    def read_kv(self, sequence_id: str, span: KVRange) -> Any:
        """Copy computed KV of a sequence that still has its row.

        Raises:
            Cancelled: The row is gone.
        """
        slot = self.loop.slots.get(sequence_id)
        if slot is None:
            raise Cancelled(f"{sequence_id} was released")
        return self.runner.read_kv(
            slot.row, span.first_layer, span.num_layers, span.start, span.stop
        )

    # ResizableCore

    def in_the_way(self, depth: int) -> list[str]:
        """See `ResizableEngine`: every prompt under way, and no other is begun."""
        self.loop.hold()
        return [] if self.loop.is_quiet else list(self.loop.slots.holders)

    def change(self, depth: int, prepared: Any) -> list[str]:
        """See `ResizableEngine`."""
        if not self.loop.is_quiet:
            return list(self.loop.slots.holders)
        assert self.resizable is not None
        try:
            if prepared is None:
                self.resizable.drop_to(depth)
            else:
                self.resizable.take_depth(prepared)
        finally:
            self.loop.resume(self.resizable.kv_capacity_tokens)
        self._joiner = LayerJoiner(self.runner.num_layers, self._bytes_per_token_layer)
        return []

    def give_up(self) -> None:
        """See `ResizableEngine`."""
        self.loop.resume()

    # PrefillEvents

    def on_start(self, state: SequenceState, row: int) -> None:
        if state.sampling.max_tokens > 1:
            feed = KVFeed(self._staging, self._bytes_per_token_layer)
            self._feeds[state.sequence_id] = feed
            self._replica.post(self._replica.start_handoff, state, feed)

    def on_kv(
        self, state: SequenceState, chunk: PrefillChunk, first_layer: int, num_layers: int
    ) -> None:
        feed = self._feeds.get(state.sequence_id)
        if feed is None:
            return
        complete = KVRange(first_layer, num_layers, chunk.start, chunk.stop)
        span = self._joiner.join(state.sequence_id, complete)
        if span is None:
            return
        kv = None
        if feed.wants_copies and self._staging.has_room:
            kv = self.runner.read_kv(
                chunk.row, span.first_layer, span.num_layers, span.start, span.stop
            )
            self._staging.take(kv.nbytes)
        if span.first_layer + span.num_layers == self.runner.num_layers:
            self._at_end.append((feed.add, (span, kv)))  # the first token follows in a moment
        else:
            self._replica.post(feed.add, span, kv)

    def on_first_token(
        self,
        state: SequenceState,
        logprobs: list[TokenLogprob] | None,
        prompt_logprobs: list[TokenLogprob] | None,
        finish: FinishReason | None,
    ) -> None:
        emission = EngineOutput(
            sequence_id=state.sequence_id,
            epoch=state.epoch,
            token_ids=list(state.output_ids),
            exit_layers=list(state.exit_layers),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish=finish,
            depth=self.runner.num_layers if self._is_watched else 0,
        )
        self._feeds.pop(state.sequence_id, None)
        self._has_first_tokens |= finish is None
        self._at_end.append((self._replica.first_token, (state, emission)))

    def on_rebuilt(self, state: SequenceState) -> None:
        self._feeds.pop(state.sequence_id, None)
        self._at_end.append((self._replica.rebuilt, (state,)))

    def on_error(self, state: SequenceState, error: QuadrigaError) -> None:
        self._feeds.pop(state.sequence_id, None)
        self._replica.post(self._replica.failed, state, error)


def _run_all(callbacks: list[tuple[Callable[..., object], tuple[Any, ...]]]) -> None:
    for callback, args in callbacks:
        callback(*args)
