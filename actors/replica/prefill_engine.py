"""What a prefill replica's engine thread runs: the loop, and what it passes to the event loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from actors.replica.replica import Replica
from quadriga.config.engine_spec import DTYPE_BYTES
from quadriga.control.replica_record import ReplicaLoad
from quadriga.core.kv import KVSpan
from quadriga.errors import Cancelled
from quadriga.interfaces import ModelRunner, PrefillChunk
from quadriga.replica.forecasting import predict_new
from quadriga.scheduling.idle_check import IdleCheck
from quadriga.scheduling.prefill_loop import PrefillLoop, PrefillOutput
from quadriga.scheduling.prefill_queue import PrefillQueue
from quadriga.scheduling.prefixes.cache import find_prefix_cache
from quadriga.scheduling.sequence import NO_ROW, RunningSequence
from quadriga.scheduling.slots import SlotTable
from quadriga.scheduling.transfer.kv_feed import KVFeed, StagingBudget
from quadriga.scheduling.transfer.rebuild import replays_of

if TYPE_CHECKING:
    from quadriga.engine.model_runner import NativeRunner
    from quadriga.scheduling.forecasts import LengthModel


class PrefillEngine:
    """A `PrefillLoop` on the engine thread of a replica; all methods run on that thread.

    Args:
        on_start: Called on the event loop when the first chunk of a sequence with a feed is about
            to be computed: time to find a decode replica.
        on_outputs: Called on the event loop with what a step has brought.
    """

    def __init__(
        self,
        replica: Replica[Any],
        runner: ModelRunner,
        lengths: LengthModel | None,
        resizable: NativeRunner | None = None,
        *,
        on_start: Callable[[RunningSequence], None],
        on_outputs: Callable[[list[PrefillOutput]], None],
    ) -> None:
        spec = replica.spec.engine
        settings = replica.config.prefill
        self.runner = runner
        self.resizable = resizable
        self._is_watched = replica.config.helios.enabled
        self._replica = replica
        self._lengths = lengths
        self._on_start = on_start
        self._on_outputs = on_outputs
        self._staging = StagingBudget()
        value_bytes = DTYPE_BYTES[spec.dtype]
        self._bytes_per_token_layer = spec.checkpoint.kv_bytes_per_token(1, value_bytes)
        # KV of a step's last layers goes to the event loop with the first tokens, in one wake-up.
        self._last_kv: list[tuple[KVFeed, KVSpan, Any]] = []
        slots = SlotTable(
            num_rows=spec.num_rows,
            row_capacity_tokens=spec.row_capacity_tokens,
            kv_capacity_tokens=spec.kv_capacity_tokens,
        )
        self._max_unplaced, self._max_held = settings.max_rows, spec.num_rows
        self.loop = PrefillLoop(
            runner=runner,
            slots=slots,
            queue=PrefillQueue(
                max_sequences=settings.max_queued_sequences,
                max_tokens=settings.max_queued_tokens,
                max_age_s=settings.max_age_s,
            ),
            eos_token_ids=spec.checkpoint.eos_token_ids,
            chunk_tokens=spec.pass_tokens,
            layer_groups=settings.layer_groups,
            clock=replica.clock,
            full_depth=spec.checkpoint.num_layers,
            may_deepen=self._is_watched,
            replays=replays_of(spec),
            max_unplaced=settings.max_rows,
            prefixes=find_prefix_cache(runner, slots, spec, settings.prefix_caching),
            on_start=self._started,
            on_kv=self._computed,
        )

        self._idle_check = IdleCheck(self._check, replica.clock, self.loop.prefixes)

    @property
    def has_work(self) -> bool:
        return self.loop.has_work

    def _check(self) -> bool:
        self.loop.check()
        return False

    def step(self) -> None:
        is_overloaded = self._replica.report_options.is_overloaded
        self.loop.max_unplaced = self._max_held if is_overloaded else self._max_unplaced
        outputs = self.loop.step()
        self._idle_check.step(is_idle=not self.loop.has_work)
        if any(o is None or (o.finish is None and o.error is None) for _, o in outputs):
            if self._replica.report_options.forecast:
                predict_new(self._lengths)
        if self._is_watched:
            for _, output in outputs:
                if output is not None and output.error is None:
                    output.depth = self.runner.num_layers
        if outputs or self._last_kv:
            self._replica.post(self._deliver, self._last_kv, outputs)
            self._last_kv = []

    def _deliver_kv(self) -> None:
        if self._last_kv:
            self._replica.post(self._deliver, self._last_kv, [])
            self._last_kv = []

    def _deliver(
        self, last_kv: list[tuple[KVFeed, KVSpan, Any]], outputs: list[PrefillOutput]
    ) -> None:
        """On the event loop: pass on what a step has brought."""
        for feed, span, kv in last_kv:
            feed.add(span, kv)
        self._on_outputs(outputs)

    def publish(self) -> None:
        loop = self.loop
        self._replica.publish_load(
            ReplicaLoad(
                num_running=loop.num_held,
                num_waiting=loop.num_waiting,
                waiting_tokens=loop.waiting_tokens,
                waiting_by_priority=loop.waiting_by_priority,
                used_tokens=loop.used_tokens,
                reserved_tokens=loop.slots.reserved_tokens,
                tokens_per_s=loop.tokens_per_s,
                step_time_s=loop.step_time_s,
                steps=loop.meter.totals.copy(),
                num_unplaced=loop.num_unplaced,
                ending=loop.ending,
                strict_depth=loop.needs_depth,
                prefixes=None if loop.prefixes is None else loop.prefixes.count(),
            )
        )

    def read_kv(self, sequence: RunningSequence, span: KVSpan) -> Any:
        """Copy computed KV of a sequence that still has its row.

        Raises:
            Cancelled: The row is gone.
        """
        if sequence.row == NO_ROW:
            raise Cancelled(f"{sequence.state.sequence_id} was released")
        return self.runner.read_kv(
            sequence.row, span.first_layer, span.num_layers, span.start, span.stop
        )

    # ResizableCore

    def in_the_way(self, depth: int) -> list[str]:
        """See `ResizableEngine`: every prompt under way, and no other is begun."""
        self.loop.hold()
        return [] if self.loop.is_quiet else list(self.loop.slots.owners)

    def change(self, depth: int, prepared: Any) -> list[str]:
        """See `ResizableEngine`."""
        if not self.loop.is_quiet:
            return list(self.loop.slots.owners)
        assert self.resizable is not None
        if self.loop.prefixes is not None:
            self.loop.prefixes.clear()  # their KV has another number of layers
        try:
            if prepared is None:
                self.resizable.drop_to(depth)
            else:
                self.resizable.take_depth(prepared)
        finally:
            self.loop.resume(self.resizable.kv_capacity_tokens)
        return []

    def give_up(self) -> None:
        """See `ResizableEngine`."""
        self.loop.resume()

    # Called by the loop in a step

    def _started(self, sequence: RunningSequence) -> None:
        if sequence.goes_on:
            sequence.feed = KVFeed(
                self._staging, self.runner.num_layers, self._bytes_per_token_layer
            )
            self._replica.post(self._on_start, sequence)

    def _computed(
        self, sequence: RunningSequence, chunk: PrefillChunk, first_layer: int, num_layers: int
    ) -> None:
        feed = sequence.feed
        if feed is None:
            return
        span = feed.join(KVSpan(first_layer, first_layer + num_layers, chunk.start, chunk.stop))
        if span is None:
            return
        kv = None
        if feed.wants_copies and self._staging.has_room:
            kv = self.runner.read_kv(
                sequence.row, span.first_layer, span.num_layers, span.start, span.stop
            )
            self._staging.take(kv.nbytes)
        if span.stop_layer == self.runner.num_layers:
            self._last_kv.append((feed, span, kv))  # the first token follows in a moment
        else:
            # What is shared comes before the pass, and so do its last layers.
            self._deliver_kv()
            self._replica.post(feed.add, span, kv)
