"""The engine of a decode replica: its loop, its forecasts, its changes of depth."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

from quadriga.checkpoint.exits import ExitCounters, ExitUse
from quadriga.config.engine_spec import DTYPE_BYTES, EngineSpec
from quadriga.control.replica_record import ParkedSequence, ReplicaLoad
from quadriga.core.output import EngineOutput
from quadriga.core.replica import RelayMemory
from quadriga.core.request import SequenceState
from quadriga.errors import ConfigError
from quadriga.interfaces import ModelRunner
from quadriga.observability.load_progress import LOADING
from quadriga.policies.rebatchers import make_rebatcher
from quadriga.policies.rebatching import Rebatcher
from quadriga.replica.engine_thread import EngineBroken
from quadriga.replica.forecasting import Forecasting
from quadriga.scheduling.calibration import calibrate
from quadriga.scheduling.decode_loop import DecodeLoop
from quadriga.scheduling.idle_check import IdleCheck, Leaks
from quadriga.scheduling.meters import Ewma
from quadriga.scheduling.prefixes.cache import find_prefix_cache
from quadriga.scheduling.slots import SlotTable
from quadriga.scheduling.transfer.sequence_export import StepPhase

if TYPE_CHECKING:
    from actors.replica.replica import Replica
    from quadriga.engine.baton.runner import BatonRunner
    from quadriga.engine.model_runner import NativeRunner
    from quadriga.replica.handoff_receiver import HandoffReceiver
    from quadriga.scheduling.forecasts import LengthModel

LOOK_EVERY_S = 0.5
"""Between two looks at what takes more than a few additions."""


class DecodeEngine:
    """The decode loop of a replica; everything is called on the engine's thread, but for `phase`
    and the runner's `write_kv`.

    Args:
        runner: As the loop uses it, pace included.
        receiver: Transfers that are on their way here.
        leaving: Ids of the sequences on their way elsewhere; from any thread.
        resizable, relay: The runner itself, where it is one of these kinds.
        lengths: None where there are no length heads.
    """

    def __init__(
        self,
        replica: Replica[DecodeEngine],
        runner: ModelRunner,
        *,
        receiver: HandoffReceiver,
        leaving: Callable[[], Collection[str]],
        resizable: NativeRunner | None = None,
        relay: BatonRunner | None = None,
        lengths: LengthModel | None = None,
    ) -> None:
        spec = replica.spec.engine
        self._is_watched = replica.config.helios.enabled
        self.resizable = resizable
        self._strict_depth = 0
        self._parked: tuple[ParkedSequence, ...] = ()
        self.runner = runner
        self._replica = replica
        self._receiver = receiver
        self._lengths = lengths
        LOADING.begin("measures the times of passes")
        counters = ExitCounters()
        rebatcher = make_rebatcher(
            replica.config.decode.rebatching,
            calibrate(runner, replica.clock, max_rows=spec.num_rows),
            counters,
            deterministic=replica.config.deterministic,
            is_surveyed=self._is_watched,  # HELIOS judges depths by where tokens could leave
            clock=replica.clock,
        )
        self.loop = self._make_loop(spec, rebatcher, counters)
        self.forecasting = Forecasting(
            runner,
            lengths,
            spec,
            replica.config,
            replica.clock,
            coming=lambda: [*receiver.leases.offers(), *self.held],
            leaving=leaving,
        )
        self._bytes_per_token = _kv_bytes(spec)
        self._relay = relay
        self._relay_memory: RelayMemory | None = None
        self._looked_s = -LOOK_EVERY_S
        self._exit_uses: dict[int, ExitUse] = {}
        self._began_s = 0.0
        self._pass_s = Ewma(0.2)
        self._leaks = Leaks()
        self._idle_check = IdleCheck(self._check, replica.clock, self.loop.prefixes)

    def _make_loop(
        self, spec: EngineSpec, rebatcher: Rebatcher, counters: ExitCounters
    ) -> DecodeLoop:
        config = self._replica.config
        slots = SlotTable(
            num_rows=spec.num_rows,
            row_capacity_tokens=spec.row_capacity_tokens,
            kv_capacity_tokens=spec.kv_capacity_tokens,
            reservation=config.decode.reservation,
        )
        return DecodeLoop(
            runner=self.runner,
            slots=slots,
            eos_token_ids=spec.checkpoint.eos_token_ids,
            clock=self._replica.clock,
            rebatcher=rebatcher,
            counters=counters,
            criterion=spec.exits.criterion,
            is_partial=spec.depth < spec.checkpoint.num_layers,
            prefixes=find_prefix_cache(self.runner, slots, spec, config.prefill.prefix_caching),
        )

    @property
    def has_work(self) -> bool:
        return self.loop.has_work

    @property
    def held(self) -> list[SequenceState]:
        """States of the sequences that are this replica's, and not merely expected."""
        return self.loop.running

    def let_go(self, sequence_id: str) -> None:
        """Free what one of them holds; an unknown one is no error."""
        self.loop.leave(sequence_id)

    @property
    def loaded_depth(self) -> int:
        """Layers that are loaded; 0 where that never changes."""
        return self.resizable.num_layers if self._is_watched and self.resizable is not None else 0

    def _check(self) -> bool:
        """Verify the table; a slot must belong to a sequence there or to a transfer."""
        loop = self.loop
        loop.check()
        claimed = self._receiver.leases.sequences() | self._receiver.joining
        claimed.update(state.sequence_id for state in self.held)
        return self._leaks.check(loop.slots.owners, claimed, now_s=self._replica.clock.now_s())

    def step(self) -> None:
        has_work = self.loop.has_work
        self.loop.is_overloaded = self._replica.report_options.is_overloaded
        self._began_s = self._replica.clock.now_s()
        emissions = self.loop.step()
        if has_work:
            self._pass_s.add(self._replica.clock.now_s() - self._began_s)
        self._idle_check.step(is_idle=not self.has_work)
        if emissions:
            self._emit(emissions)
        self.forecasting.stepped(self.loop, emissions)

    def _emit(self, emissions: list[tuple[str, EngineOutput]]) -> None:
        depth = self.loaded_depth
        if depth:
            for _, emission in emissions:
                emission.depth = depth
        self._replica.post(self._replica.emit, emissions)

    # ResizableCore

    def in_the_way(self, depth: int) -> list[str]:
        """See `ResizableEngine`."""
        assert self.resizable is not None
        return self.loop.depth.blockers(depth) if depth < self.resizable.num_layers else []

    def change(self, depth: int, prepared: Any) -> list[str]:
        """See `ResizableEngine`. Raises: EngineBroken: It failed when tokens had been taken."""
        if prepared is None:
            try:
                shrunk = self.loop.drop_to(depth)
            except ConfigError:  # nothing has changed
                raise
            except Exception as exc:
                raise EngineBroken(f"layers could not be dropped: {exc!r}") from exc
            if shrunk.emissions:
                self._emit(shrunk.emissions)
            if shrunk.blocked_by:
                return shrunk.blocked_by
        else:
            self.loop.take_depth(prepared)
        assert self.resizable is not None
        spec = self.resizable.spec
        self._bytes_per_token = _kv_bytes(spec)
        self.forecasting.resized(spec)
        return []

    def give_up(self) -> None:
        """See `ResizableEngine`: nothing was held back."""

    def _look(self) -> None:
        """Note what takes more than a few additions, now and then."""
        loop, now_s = self.loop, self._replica.clock.now_s()
        if now_s - self._looked_s < LOOK_EVERY_S:
            return
        if loop.num_running:  # an idle look must not put the next one off
            self._looked_s = now_s
        spec = self._replica.spec.engine
        if spec.runner == "native":  # the relay batch has no exits
            self._look_at_exits(spec.checkpoint.exits.layers)
        if self._relay is not None:
            self._relay_memory = self._relay.memory()
        full = spec.checkpoint.num_layers
        strict = [s for s in loop.running if s.exits.is_strict]
        self._strict_depth = max((s.exits.max_depth or full for s in strict), default=0)
        self._parked = tuple(
            ParkedSequence(s.sequence_id, s.num_tokens, s.max_total_tokens)
            for s in loop.depth.needs_deeper
        )

    def _look_at_exits(self, layers: Iterable[int]) -> None:
        """Note which exits are in use; what ran last is remembered while nothing runs."""
        before = {k: use for k, use in self._exit_uses.items() if use not in ("not_loaded", "off")}
        self._exit_uses = {
            layer: before.get(layer, use) if use == "idle" else use
            for layer, use in self.loop.exit_uses(layers).items()
        }

    def phase(self) -> StepPhase:
        """Where it is in its steps; from any thread."""
        if not self.loop.num_running:
            return StepPhase(0.0, 0.0)
        step_s = self._pass_s.value
        return StepPhase(self._began_s + step_s - self._replica.clock.now_s(), step_s)

    def publish(self) -> None:
        self.forecasting.look(self.loop)
        self._look()
        self._replica.publish_load(self._load())

    def _load(self) -> ReplicaLoad:
        loop, suspended = self.loop, self.loop.suspended
        return ReplicaLoad(
            num_running=loop.num_running,
            num_waiting=loop.num_reserved + len(suspended),
            used_tokens=loop.used_tokens,
            prompt_tokens=loop.prompt_tokens,
            generated_tokens=loop.generated_tokens,
            reserved_tokens=loop.slots.reserved_tokens,
            tokens_per_s=loop.tokens_per_s,
            step_time_s=loop.step_time_s,
            steps=loop.meter.totals.copy(),
            exits=self._exit_counters(),
            num_at_exits=tuple(loop.num_waiting_at_exits),
            exit_uses=self._exit_uses,
            num_paused=loop.num_paused,
            paused_bytes=sum(s.num_tokens for s in suspended) * self._bytes_per_token,
            num_pauses=loop.preemption.num_pauses,
            num_resumes=loop.preemption.num_resumes,
            least_priority=loop.preemption.least_priority,
            upper_tokens=loop.answers.upper_tokens,
            usual_tokens=loop.answers.usual_tokens,
            relay=self._relay_memory,
            strict_depth=self._strict_depth,
            parked=self._parked,
        )

    def _exit_counters(self) -> ExitCounters:
        counters = self.loop.counters.copy()
        if self.resizable is not None and self.resizable.skipped is not None:
            counters.filled_tokens = self.resizable.skipped.num_filled
            counters.copied_bytes = self.resizable.skipped.copied_bytes
        return counters


def _kv_bytes(spec: EngineSpec) -> int:
    return spec.checkpoint.kv_bytes_per_token(spec.depth, DTYPE_BYTES[spec.dtype])
