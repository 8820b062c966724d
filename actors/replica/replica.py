"""What all replicas have in common: polls, heartbeats, load reports, their end."""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import ray

from actors.metrics import push
from actors.rpc.lifecycle import end_this_actor, scheduler_name
from actors.rpc.nodes import node_memory
from actors.rpc.ray_rpc import RAY_FAILED, call
from actors.rpc.rpc_batcher import BatchedCalls, RpcBatcher
from actors.rpc.signals import on_sigterm
from quadriga.background import background, overslept_s
from quadriga.clock import SystemClock
from quadriga.config.engine_spec import EngineSpec
from quadriga.config.loader import QuadrigaConfig
from quadriga.config.resolve import ReplicaSpec, with_kv_memory
from quadriga.control.replica_names import fingerprint
from quadriga.control.replica_record import ReplicaLoad, ReplicaStatus
from quadriga.core.adapters import find_adapter
from quadriga.core.forecast import LengthOutcome
from quadriga.core.grammar import Grammar
from quadriga.core.kv import KVPart
from quadriga.core.output import EngineOutput, PollReply
from quadriga.core.replica import ReplicaInfo, ReplicaSnapshot, ResizeReport, Role
from quadriga.core.request import SequenceState
from quadriga.core.routing import ReportOptions
from quadriga.errors import (
    Cancelled,
    DeadlineExceeded,
    InvariantViolation,
    QuadrigaError,
    ReplicaDied,
    ReplicaError,
    Unavailable,
)
from quadriga.interfaces import KVSink
from quadriga.observability import tracing
from quadriga.observability.load_progress import LOADING
from quadriga.observability.logs import configure_logging
from quadriga.replica.departed_sequences import DepartedSequences
from quadriga.replica.engine_thread import Core, EngineThread
from quadriga.replica.gc_tuning import collect_rarely
from quadriga.replica.replica_metrics import ReplicaMetrics
from quadriga.replica.resizing import Resizing
from quadriga.replica.spans import SequenceSpans
from quadriga.scheduling.output_dispatcher import OutputDispatcher
from quadriga.scheduling.prefixes.events import TimeShare
from quadriga.text.grammar import grammars_of

if TYPE_CHECKING:
    from quadriga.engine.tensor_parallel.loading import RankStarter
    from quadriga.kv_transport.channel import ChannelOffer
    from quadriga.scheduling.prefixes.cache import PrefixCache

Result = TypeVar("Result")

logger = logging.getLogger(__name__)

REPORT_MIN_GAP_S = 0.05
"""Between two reports when there is news: room became free (placement and admission wait for it),
or a sequence arrived (until it is reported, the scheduler counts it on top of the load)."""
REPORT_MIN_TIMEOUT_S = 1.0
MAX_REMEMBERED = 4096
END_DELAY_S = 0.05
FORGET_FACTOR = 10.0
"""Of `orphan_request_s`: after this long a silent ingress's mailbox is dropped."""
_compiling = ThreadPoolExecutor(2, thread_name_prefix="grammar")
"""Threads of their own: behind slow grammars no KV waits to be stored."""


class Replica(BatchedCalls, ABC, Generic[Core]):
    """Base of the replica actors; one event loop, one engine thread.

    Args:
        name: Ray actor name; new for every incarnation.
        spec: What to load.
        config: The whole configuration, as a plain dict.

    Attributes:
        reply_spacing_s: Pause after a poll's reply, per sequence in it; see `OutputDispatcher`.
        calls: To other actors.
        is_ending: This process is about to end.
        departed: Sequences that were cancelled or taken over by other replicas.
        report_options: What the scheduler last asked for.
        ranks: Starts the others where several share the model; None where one has it all.
    """

    reply_spacing_s: ClassVar[float] = 0.0

    def __init__(self, name: str, spec: ReplicaSpec, config: dict[str, Any]) -> None:
        collect_rarely()
        # Here, not above: the controller imports this module, and has no torch.
        from actors.kv_transfer.handoff_sender import HandoffSender
        from actors.kv_transfer.transport_hub import TransportHub

        self.name = name
        self.config = QuadrigaConfig.model_validate(config)
        self._node_id: str = ray.get_runtime_context().get_node_id()
        self.spec = spec = on_its_node(spec, self.config, self._node_id)
        self.calls = RpcBatcher(call)
        configure_logging(self.config.logging.format, self.config.logging.level, process=self.name)
        tracing.start(name)
        self._fingerprint = fingerprint(spec, config)
        self.clock = SystemClock()
        self.spans = SequenceSpans(name, self.clock)
        self.incarnation = uuid.uuid4().hex
        self.mail = OutputDispatcher(
            self.incarnation,
            self.clock,
            self.config.ingress.poll_timeout_s,
            spacing_s=self.reply_spacing_s,
        )
        self.metrics = ReplicaMetrics(name, spec.engine.depth_class.model)
        self.load = ReplicaLoad()
        self._has_load = False
        self._loaded_s = 0.0
        self._node_ip: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._peer_nodes: OrderedDict[str, str] = OrderedDict()
        self._load_lock = threading.Lock()  # load, its time and `_accepted` belong together
        self._arrived: list[str] = []  # of the engine's thread: since the last load was published
        self._accepted: list[str] = []
        self.departed = DepartedSequences()
        self._news = asyncio.Event()
        self._is_draining = self._is_scout = False
        self.is_ending = False
        self._leave_by_s: float | None = None
        self.report_options = ReportOptions()
        self._telling = TimeShare(name, self.clock)
        kind, sink = self.config.transport.kind, self._make_sink()
        self.transport = TransportHub(
            kind, name, sink, self._host_for, clock=self.clock, device=spec.engine.device
        )
        self.sender = HandoffSender(name, self.transport, self.calls, self.config.transport)
        decodes = spec.role.does(Role.DECODE)
        self.info_record = ReplicaInfo(
            name=name,
            role=spec.role,
            depth_class=spec.engine.depth_class,
            node_id=self._node_id,
            incarnation=self.incarnation,
            num_slots=spec.engine.num_rows,
            kv_capacity_tokens=spec.engine.kv_capacity_tokens,
            transports=self.transport.names,
            reservation=self.config.decode.reservation if decodes else "longest",
            max_model_len=spec.engine.row_capacity_tokens,
            num_layers=spec.engine.checkpoint.num_layers,
            chunk_tokens=spec.engine.pass_tokens,
        )
        self._resizing = Resizing(self)
        is_nice = spec.role is Role.DECODE and spec.engine.device == "cpu"
        nice = self.config.decode.nice if is_nice else 0
        self.engine: EngineThread[Core] = EngineThread(self._load_core, self._engine_failed, nice)
        self.ranks: RankStarter | None = None
        if spec.engine.tensor_parallel > 1:
            from actors.replica.ranks import RankActors

            self.ranks = RankActors(
                name, spec, self.config.logging, self._node_ip, nice, self.engine.break_off
            )
        self.engine.start()
        on_sigterm(self._asked_to_go)
        for coroutine in (self._report_forever(), self._watch_ingresses()):
            background(self._never_ending(coroutine))

    def loaded(self, engine: EngineSpec, arithmetic: str) -> None:
        """Note what was loaded: on a GPU, the KV capacity is known only then.

        Called on the engine's thread before the core is there, so no capacity was reported yet.

        Args:
            arithmetic: `numerics` of the runner.
        """
        exact = f"{arithmetic} " if self.config.deterministic else ""
        self.spec = replace(self.spec, engine=engine)
        self.info_record = replace(
            self.info_record,
            num_slots=engine.num_rows,
            kv_capacity_tokens=engine.kv_capacity_tokens,
            max_model_len=engine.row_capacity_tokens,
            numerics=exact + engine.checkpoint.fingerprint,
            usable_bytes=engine.usable_bytes or 0,
        )

    def resized(self, engine: EngineSpec) -> None:
        """Another depth is served from now on."""
        self.loaded(engine, self.info_record.numerics.rpartition(" ")[0])
        self.info_record = replace(self.info_record, depth_class=engine.depth_class)
        self._news.set()

    @property
    def deepest_spec(self) -> EngineSpec:
        """The engine as deep as it may become."""
        engine = self.spec.engine
        is_fixed = not self.config.helios.enabled
        return engine if is_fixed else replace(engine, depth=engine.checkpoint.num_layers)

    async def on_engine(self, command: Callable[[Core], Result]) -> Result:
        """Run a command on the engine's thread between two steps. Raises: Unavailable."""
        return await self.engine.call(command)

    # What differs between the roles.

    @abstractmethod
    def _make_sink(self) -> KVSink | None:
        """Where KV from peers goes; None for a replica that receives none."""

    @abstractmethod
    def _load_core(self) -> Core:
        """Load the engine; on the engine's thread."""

    @abstractmethod
    async def _cancel(self, sequence_ids: Sequence[str], ingress_id: str | None) -> None:
        """Free everything these sequences hold here, in whatever state they are, and note it.

        Args:
            ingress_id: Owner of the sequences; those of others go on. None: any owner.
        """

    @abstractmethod
    async def _held(self) -> Collection[SequenceState]:
        """Sequences held here, of all ingresses."""

    @abstractmethod
    async def _own(self) -> Container[str]:
        """Sequences that run, wait or are being handed on here."""

    @abstractmethod
    async def _close(self) -> None:
        """Release what the role owns beside engine and transport."""

    def _take_outcomes(self) -> list[LengthOutcome]:
        """What came of length predictions since the last call."""
        return []

    # RPC: the ingress's side.

    async def poll(self, ingress_id: str, ack: int, timeout_s: float) -> PollReply:
        """Everything pending for an ingress; waits up to `timeout_s` for something.

        Args:
            ack: `last_seq` of the last reply the ingress got from this incarnation; 0 at first.
        """
        reply = await self.mail.poll(ingress_id, ack, timeout_s)
        if self.engine.error is not None and not reply.emissions:
            raise ReplicaDied(f"the engine of {self.name} is over: {self.engine.error.message}")
        if self.mail.is_closed and not reply.emissions:
            raise ReplicaDied(f"{self.name} ends")
        return reply

    async def ingress_heartbeat(self, ingress_id: str) -> None:
        """A sign of life of an ingress that has nothing to poll for."""
        self.mail.hear(ingress_id)

    async def cancel(self, sequence_ids: Sequence[str], ingress_id: str | None = None) -> None:
        """Free everything these sequences hold; unknown ones are no error.

        Args:
            ingress_id: The ingress that cancels; a sequence that another one has adopted goes on.
                None: they end, whichever ingress owns them.
        """
        if self.engine.is_ready:
            await self._cancel(sequence_ids, ingress_id)
        else:
            self.departed.cancel(sequence_ids)

    async def holding(self, sequence_ids: Sequence[str]) -> list[str]:
        """Which of these sequences this replica owns, or is handing on.

        A sequence that was merely promised room does not count. Raises: Unavailable.
        """
        held = await self._own()
        return [sequence_id for sequence_id in sequence_ids if sequence_id in held]

    async def look_at(self, sequence_ids: Sequence[str]) -> dict[str, dict[str, str | int]]:
        """What operators see of those of these sequences that are here. Raises: Unavailable."""
        found = await self.engine.call(lambda core: [core.loop.find(s) for s in sequence_ids])
        return {s.state.sequence_id: s.shown for s in found if s is not None}

    async def kv_events(self, after: int) -> dict[str, Any] | None:
        """See `PrefixCache.events`; None: none are kept. Raises: Unavailable, Overloaded."""
        prefixes: PrefixCache | None = self.engine.require_core().loop.prefixes
        if prefixes is None:
            return None
        found = await self.engine.call(lambda _: self._telling.spend(prefixes.events, after))
        return {"model": self.info_record.depth_class.model} | found

    # RPC: the cluster's side.

    async def info(self) -> ReplicaInfo:
        """Name, role and capacity; answers before the weights are loaded."""
        return self.info_record

    async def snapshot(self) -> ReplicaSnapshot:
        """The load right now. Raises: Unavailable before the weights are loaded."""
        self.engine.require_core()
        return self._snapshot()

    async def heartbeat(self, ingress_age_s: float, is_scout: bool = False) -> ReplicaStatus:
        """The controller's watch; it passes on how long ago it heard of any ingress.

        Args:
            is_scout: See `ReplicaSnapshot`.
        """
        self._is_scout = is_scout
        self.mail.heard_of_any(ingress_age_s)
        return ReplicaStatus(
            self.info_record,
            self.engine.is_ready,
            self._is_draining,
            self.engine.error,
            self.load,
            self._fingerprint,
            None if self._leave_by_s is None else self._leave_by_s - self.clock.now_s(),
            "" if self.engine.is_ready else LOADING.text,
        )

    async def resize(self, depth: int, deadline_s: float) -> ResizeReport:
        """Load more layers of the model while serving, or drop some; see `Resizing.resize`.

        Raises: Unavailable: The weights are not loaded yet, or the engine is over.
        """
        report = await self._resizing.resize(depth, deadline_s)
        logger.info("%s: %d layers wanted: %s", self.name, depth, report)
        self.metrics.resized(report, self.info_record)
        return report

    async def drain(self, deadline_s: float) -> bool:
        """Take nothing new and wait until what is here is done and fetched.

        Returns:
            Whether all was done in time.
        """
        self._is_draining = True
        self._news.set()
        give_up_s = self.clock.now_s() + deadline_s
        while self.load.num_held or self.mail.num_pending:
            if self.clock.now_s() >= give_up_s:
                return False
            if not self.load.num_held:
                self.mail.drop_absent()
            await asyncio.sleep(0.05)
        return True

    async def stop(self) -> None:
        """End this process soon after the answer is out."""
        background(self._end("stopped", delay_s=END_DELAY_S))

    async def kv_connect(self, offer: ChannelOffer) -> None:
        """A peer opens a channel to here. Raises: KVTransportError."""
        self.transport.connect(offer)

    async def kv_deliver(
        self, source: str, part: KVPart, refs: list[Any], deadline_s: float
    ) -> None:
        """A peer sends a part through the object store. Raises: KVTransportError."""
        await self.transport.deliver(source, part, refs, deadline_s)

    # For the roles.

    def moved_away(self, sequence_id: str, peer: str) -> None:
        """Another replica owns a sequence from now on."""
        if not self.departed.move(sequence_id, peer):
            self.cancel_at(peer, sequence_id, None)

    def cancel_at(self, peer: str, sequence_id: str, ingress_id: str | None) -> None:
        """Cancel a sequence that another replica owns: its ingress may not know of the move yet."""
        background(self.calls.tell(peer, "cancel", [sequence_id], ingress_id))

    def arrived(self, sequence_id: str) -> None:
        """Note that a sequence the scheduler sent is here; called on the engine's thread.

        The next published load contains the sequence, and the scheduler hears of both in one
        report: it counts the sequence once at every moment.
        """
        self._arrived.append(sequence_id)

    def require_taking(self) -> None:
        """Raises: Unavailable while draining, ending or not yet loaded."""
        self.engine.require_core()
        if self._is_draining or self.is_ending:
            raise Unavailable(f"{self.name} is draining", code="draining")

    def emit(self, emissions: Sequence[tuple[str, EngineOutput]], *, wakes: bool = True) -> None:
        """Send outputs to their ingresses; on the event loop. See `OutputDispatcher.put`."""
        self.mail.put(emissions, wakes=wakes)
        self.metrics.count(emissions)
        if self.spans.open:
            self.spans.emitted(emissions)

    def publish_load(self, load: ReplicaLoad) -> None:
        """Called on the engine thread after every round."""
        # A sequence that leaves the queue for a row makes room in the queue: admission looks at it.
        has_room = load.num_held < self.load.num_held or load.num_waiting < self.load.num_waiting
        is_news = has_room or bool(self._arrived) or not self._has_load
        with self._load_lock:
            self.load = load
            self._loaded_s = self.clock.now_s()
            self._accepted += self._arrived
        self._arrived.clear()
        self._has_load = True
        if is_news:
            self.post(self._news.set)

    def post(self, callback: Callable[..., object], *args: object) -> None:
        """Run a callback on the event loop, from any thread; dropped once the loop is closed."""
        self.engine.post(callback, *args)

    def remember_peer(self, info: ReplicaInfo) -> None:
        """Note the node of a peer, for the choice of the address it can reach."""
        self._peer_nodes[info.name] = info.node_id
        while len(self._peer_nodes) > MAX_REMEMBERED:
            self._peer_nodes.popitem(last=False)

    def _host_for(self, peer: str) -> str:
        is_local = self._peer_nodes.get(peer) == self._node_id
        return "127.0.0.1" if is_local else self._node_ip

    def _snapshot(self) -> ReplicaSnapshot:
        with self._load_lock:
            load, loaded_s = self.load, self._loaded_s
        return self._snapshot_of(load, loaded_s)

    def _snapshot_of(self, load: ReplicaLoad, loaded_s: float) -> ReplicaSnapshot:
        """The report of a load that was published at `loaded_s`."""
        return ReplicaSnapshot(
            info=self.info_record,
            taken_unix_s=self.clock.unix_s(),
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            waiting_tokens=load.waiting_tokens,
            waiting_by_priority=load.waiting_by_priority,
            used_tokens=load.used_tokens,
            prompt_tokens=load.prompt_tokens,
            generated_tokens=load.generated_tokens,
            reserved_tokens=load.reserved_tokens,
            tokens_per_s=load.tokens_per_s,
            step_time_s=load.step_time_s,
            draining=self._is_draining,
            is_scout=self._is_scout,
            num_paused=load.num_paused,
            num_unplaced=load.num_unplaced,
            ending=load.ending,
            least_priority=load.least_priority,
            upper_tokens=load.upper_tokens,
            usual_tokens=load.usual_tokens,
            computed_per_s=load.computed_per_s,
            chunk_time_s=load.chunk_time_s,
            cached_share=None if load.prefixes is None else load.prefixes.hit_share,
            sent_s=self.clock.now_s(),
            loaded_s=loaded_s,
        )

    async def _report_forever(self) -> None:
        """Report the load to the scheduler: at every interval, and when there is news."""
        interval_s = self.config.scheduler.snapshot_interval_s
        while not self.is_ending:
            if self.engine.is_ready:
                await self._report(max(interval_s, REPORT_MIN_TIMEOUT_S))
            await asyncio.sleep(REPORT_MIN_GAP_S)
            try:
                async with asyncio.timeout(interval_s - REPORT_MIN_GAP_S):
                    await self._news.wait()
            except TimeoutError:
                pass
            self._news.clear()

    async def _report(self, timeout_s: float) -> None:
        with self._load_lock:
            load, loaded_s = self.load, self._loaded_s
            accepted, self._accepted = self._accepted[-MAX_REMEMBERED:], []
        scheduler = scheduler_name(self.config.name)
        try:
            self.report_options = await call(
                scheduler,
                "report",
                self._snapshot_of(load, loaded_s),
                accepted,
                self._take_outcomes(),
                timeout_s=timeout_s,
            )
        except QuadrigaError as exc:
            with self._load_lock:
                self._accepted = accepted + self._accepted
            logger.info("report to %s failed: %s", scheduler, exc)

    async def prepare(self, state: SequenceState) -> None:
        """Make ready for a sequence that is submitted here.

        Raises:
            Unavailable: Draining, or the weights are not loaded yet.
            DeadlineExceeded: It is late already.
            InvalidRequest: The grammar of its answer is none.
            UnknownModel: Its adapter is not loaded here.
        """
        self.require_taking()
        if state.adapter:
            find_adapter(self.spec.engine.adapters, state.adapter)
        if state.deadline_unix_s <= self.clock.unix_s():
            raise DeadlineExceeded("the deadline passed before the request was queued")
        await self.compile_grammar(state.sampling.grammar)
        self.mail.expect(state.ingress_id)

    async def enqueue(self, state: SequenceState, submit: Callable[[Core], None]) -> None:
        """Have the engine queue a sequence that is prepared.

        Raises:
            Overloaded: The queue is full; with the time after which to retry.
        """

        def queue(core: Core) -> None:
            submit(core)
            self.arrived(state.sequence_id)

        with self.spans.begun("prefill", state):
            await self.engine.call(queue)
        if self.departed.is_cancelled(state.sequence_id):
            await self._cancel([state.sequence_id], state.ingress_id)

    async def compile_grammar(self, grammar: Grammar | None) -> None:
        """Have the grammar of an answer ready before the engine needs it, which must not wait.

        It stays compiled as long as this very object is here, which is a sequence's own.

        Raises:
            InvalidRequest: It is none; the ingress has asked that before.
        """
        if grammar is not None:
            checkpoint = self.spec.engine.checkpoint
            made = await asyncio.get_running_loop().run_in_executor(
                _compiling, lambda: grammars_of(checkpoint).prepare(grammar)
            )
            weakref.finalize(grammar, lambda held: None, made).atexit = False

    async def _watch_ingresses(self) -> None:
        """Cancel the sequences of silent ingresses; end this process when all are silent."""
        orphan_s = self.config.lifecycle.orphan_timeout_s
        request_s = self.config.ingress.orphan_request_s
        pause_s = min(1.0, orphan_s / 4, request_s / 4)
        while not self.is_ending:
            self.mail.stood_still(await overslept_s(self.clock, pause_s))
            if self.mail.silence_s > orphan_s:
                await self._end(f"no ingress was heard of for {orphan_s:.0f} s")
                return
            silent = self.mail.silent(longer_than_s=request_s)
            if silent and self.engine.is_ready:
                await self._cancel_abandoned(silent, forget_after_s=FORGET_FACTOR * request_s)
            background(self._push_metrics())

    async def _push_metrics(self) -> None:
        self.metrics.gauges(self.load, self.transport.num_fallbacks)
        self.metrics.sent(self.transport.counts)
        await push.push_metrics(self.config.name, self.metrics.registry)

    async def _cancel_abandoned(self, silent: dict[str, float], *, forget_after_s: float) -> None:
        """Free the sequences of silent ingresses, and leave them an error, should they come back.

        Args:
            silent: Seconds of silence by ingress.
        """
        held: dict[str, list[SequenceState]] = {}
        for state in await self._held():
            held.setdefault(state.ingress_id, []).append(state)
        error = Cancelled("its ingress was silent for too long")
        for ingress_id in silent.keys() & held.keys():
            resumable = held[ingress_id]  # as of now: another ingress may adopt one at any time
            logger.info("cancel %d sequences of the silent ingress %s", len(resumable), ingress_id)
            # Without an index: the engine's newest tokens may come behind it.
            errors = [EngineOutput(o.sequence_id, o.epoch, error=error) for o in resumable]
            self.emit([(ingress_id, output) for output in errors])
            await self.cancel([o.sequence_id for o in resumable], ingress_id)
        for ingress_id in [i for i, age_s in silent.items() if age_s > forget_after_s]:
            self.mail.drop(ingress_id)

    def _asked_to_go(self) -> None:
        """On the event loop, at SIGTERM: the controller hears of it, replaces and retires this."""
        if self._leave_by_s is not None:
            background(self._end("it was asked to go again"))
            return
        allowed_s = self.config.lifecycle.drain_timeout_s
        logger.info("%s was asked to go, and does so within %.0f s", self.name, allowed_s)
        self._leave_by_s = self.clock.now_s() + allowed_s
        background(self._go_at_last(allowed_s))

    async def _go_at_last(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        await self._end("it was asked to go, and was not retired in time")

    def _engine_failed(self, error: QuadrigaError) -> None:
        """On the event loop: the engine is over, so this process is of no more use."""
        self._is_draining = True
        self.mail.close()  # waiting polls are to learn of it now
        app = self.config.name
        background(self.calls.tell(scheduler_name(app), "replica_died", self.name))
        if isinstance(error, InvariantViolation):
            self.metrics.violated()
            background(self._push_metrics())
        background(self._end_after_failure(error))

    async def _end_after_failure(self, error: QuadrigaError) -> None:
        # Long enough for the controller's heartbeat to learn why, and for the last poll.
        await asyncio.sleep(2 * self.config.lifecycle.heartbeat_interval_s)
        await self._end(f"the engine is over: {error}")

    async def _end(self, reason: str, *, delay_s: float = 0.0) -> None:
        if self.is_ending:
            return
        self.is_ending = True
        logger.info("%s ends: %s", self.name, reason)
        self.mail.close()
        await asyncio.sleep(delay_s)
        try:
            async with asyncio.timeout(5.0):
                await self._close()
                await self.transport.close()
                await self._push_metrics()
        except Exception as exc:  # a border: whatever it is, this process ends
            logger.warning("%s did not close cleanly: %r", self.name, exc)
        self.engine.stop()  # not before: what is released is released there
        await self.engine.join(2.0)
        await end_this_actor()

    async def _never_ending(self, coroutine: Any) -> None:
        """Run a background loop; its unexpected end is the end of the process, not a silence."""
        try:
            await coroutine
        except Exception as exc:  # the border of the actor: no caller awaits this task
            logger.exception("a background loop of %s failed", self.name)
            await self._end_after_failure(ReplicaError(f"background loop: {exc!r}"))


def on_its_node(spec: ReplicaSpec, config: QuadrigaConfig, node_id: str) -> ReplicaSpec:
    """The specification with the KV memory that its node has; as it was planned without that."""
    if spec.kv_share is not None:
        try:
            nodes = node_memory()
            # The other ranks may be on any.
            its = nodes.values() if spec.kv_share.ranks > 1 else [nodes[node_id]]
            memory = spec.kv_share.bytes_on(its)
            return replace(spec, engine=with_kv_memory(spec.engine, config, spec.role, memory))
        except (KeyError, QuadrigaError, *RAY_FAILED) as exc:
            logger.warning("KV memory is as planned, not as the node has it: %s", exc)
    return spec
