"""The mixed replica: computes prompts and decodes them in the same rows, on one device.

To admission it is a prefill replica, with a queue; to placement a decode replica, with slots. What
is submitted here stays here: no KV is handed over. Afterwards it is a decode replica's sequence,
and moves, pauses, drains and is adopted as one.
"""

from __future__ import annotations

from typing import ClassVar

from actors.replica.decode import DecodeReplica
from actors.replica.decode_engine import DecodeEngine
from quadriga.checkpoint.exits import ExitCounters
from quadriga.config.engine_spec import EngineSpec
from quadriga.control.replica_record import ReplicaLoad
from quadriga.core.replica import ResizeReport
from quadriga.core.request import SequenceState
from quadriga.policies.rebatching import Rebatcher
from quadriga.replica.forecasting import predict_new
from quadriga.scheduling.colocated import ColocatedLoop
from quadriga.scheduling.decode_loop import DecodeLoop
from quadriga.scheduling.prefill_loop import PrefillLoop, PrefillOutput
from quadriga.scheduling.transfer.rebuild import replays_of


class MixedEngine(DecodeEngine):
    """A `ColocatedLoop` on the engine thread; in turn a chunk of prompts and a step of the batch.

    So no answer waits for more than a chunk between two of its tokens, and prompts are read while
    there is memory for their answers.
    """

    _both: ColocatedLoop

    def _make_loop(
        self, spec: EngineSpec, rebatcher: Rebatcher, counters: ExitCounters
    ) -> DecodeLoop:
        config = self._replica.config
        self._both = ColocatedLoop(
            self.runner,
            spec,
            clock=self._replica.clock,
            chunk_tokens=spec.pass_tokens,
            max_age_s=config.prefill.max_age_s,
            max_queued_sequences=config.prefill.max_queued_sequences,
            max_queued_tokens=config.prefill.max_queued_tokens,
            max_slots=spec.num_rows,
            reservation=config.decode.reservation,
            rebatcher=rebatcher,
            counters=counters,
            is_partial=spec.depth < spec.checkpoint.num_layers,
            prefix_caching=config.prefill.prefix_caching,
            full_depth=spec.checkpoint.num_layers,
            may_deepen=False,  # see `MixedReplica.resize`
            replays=replays_of(spec),
        )
        return self._both.decode

    @property
    def prompts(self) -> PrefillLoop:
        """What is queued, and what is being computed."""
        return self._both.prefill

    def submit(self, state: SequenceState) -> None:
        """Queue a sequence. Raises: Overloaded, Unavailable, as `PrefillLoop.submit`."""
        self._both.submit(state)

    @property
    def has_work(self) -> bool:
        return self._both.has_work

    @property
    def held(self) -> list[SequenceState]:
        return self.prompts.states + self.loop.running

    def let_go(self, sequence_id: str) -> None:
        if not self.prompts.release(sequence_id):
            self.loop.leave(sequence_id)

    def step(self) -> None:
        outputs = self._both.step_prompts()
        if outputs:
            if self._replica.report_options.forecast and any(_goes_on(o) for o in outputs):
                predict_new(self._lengths)
            self._replica.post(self._deliver, outputs)
        super().step()

    def _deliver(self, outputs: list[PrefillOutput]) -> None:
        """On the event loop: pass on the first tokens, and the ends of those that have no other."""
        replica = self._replica
        replica.emit([(s.state.ingress_id, output) for s, output in outputs if output is not None])
        for one in outputs:
            state, num_cached = one[0].state, one[0].num_cached
            replica.spans.end(state.sequence_id, **{"quadriga.cached_tokens": num_cached})
            if _goes_on(one):
                replica.spans.begin("decode", state)

    def _load(self) -> ReplicaLoad:
        load, prompts = super()._load(), self.prompts
        load.num_waiting += prompts.num_waiting
        load.waiting_tokens = prompts.waiting_tokens
        load.waiting_by_priority = prompts.waiting_by_priority
        load.reserved_tokens += prompts.queued_tokens
        load.used_tokens += prompts.used_tokens
        load.prompt_tokens += prompts.used_tokens
        load.computed_per_s = prompts.tokens_per_s
        load.chunk_time_s = prompts.step_time_s
        load.prefixes = None if prompts.prefixes is None else prompts.prefixes.count()
        return load


def _goes_on(one: PrefillOutput) -> bool:
    """Whether a sequence whose prompt was computed decodes now."""
    _, output = one
    return output is None or (output.finish is None and output.error is None)


class MixedReplica(DecodeReplica):
    """Ray actor; see `Replica` for the calls that all roles answer."""

    engine_type: ClassVar[type[DecodeEngine]] = MixedEngine
    BATCHED = DecodeReplica.BATCHED | {"submit"}

    async def submit(self, state: SequenceState) -> None:
        """Queue a sequence, which is computed and decoded here; raises as `PrefillReplica`'s."""
        await self.prepare(state)

        def submit(core: DecodeEngine) -> None:
            assert isinstance(core, MixedEngine)
            core.submit(state)

        await self.enqueue(state, submit)

    async def resize(self, depth: int, deadline_s: float) -> ResizeReport:
        """Always refused: HELIOS, which changes depths, has no mixed replicas."""
        return ResizeReport("refused", "not_resizable: a mixed replica keeps its depth")
