"""The HELIOS state machine: events in, at most one order under way, each with its reason.

    PROFILE  every candidate serves a few live requests at full depth, one after the other
    SERVE    the chosen one serves, loaded as deep as its tokens need; too many breaches, or too
             many tokens that all of the model would not say: load the rest or switch; after so
             many requests, and so long that loading models took little of it: PROFILE again

It is told what is (`messages`), never looks at a clock, and believes the replicas that a tick shows
over its own orders; so a controller that restarts begins with a new machine, the kept table and
the replicas it finds. A failed load leaves the old layers serving: the order is forgotten, and its
target barred until the next assessment unless some replica has it.

Source: HELIOS Algorithm 1, §3.3; differs: scouts, hysteresis (margin and dwell), costs in seconds,
strict requests, and models that could not win whatever the stream are left out of some assessments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

from quadriga.catalogue.records import CatalogueModel
from quadriga.config.scheduling import HeliosConfig
from quadriga.core.replica import DepthClass, Role
from quadriga.policies.helios.assignment import (
    LATE,
    PendingAction,
    in_order,
    may_change,
    profilers,
    wanted_classes,
)
from quadriga.policies.helios.history import HistoryTable
from quadriga.policies.helios.messages import (
    Choose,
    ChosenDevice,
    ControllerTick,
    Counters,
    Event,
    HeliosPhase,
    Keep,
    ModelDecision,
    OrderDone,
    OrderFailed,
    Output,
    ReplicaReport,
    RequestFinished,
    RequestLost,
    RequestStarted,
    Routing,
    Status,
    Switch,
    TokensServed,
    UnchangedSampled,
)
from quadriga.policies.helios.plans import Planner
from quadriga.policies.helios.profiling import BreachWindow, Profiling
from quadriga.policies.helios.selection import ChoiceReason, Chooser, Situation

MAX_DECISIONS = 256
STRICT_KEPT_S = 30.0
"""Layers that strict requests needed are kept for so long after the last: others follow it."""


class Helios:
    """Chooses model and depth for one stream of requests.

    Args:
        candidates: Of step 1, best first; at least one.
        table: Kept across restarts by the caller. Where it knows every candidate, the choice is
            made from it at once; the next assessment looks again.

    Attributes:
        decisions: The last outputs.
    """

    def __init__(
        self,
        candidates: Sequence[CatalogueModel],
        config: HeliosConfig,
        device: ChosenDevice,
        table: HistoryTable | None = None,
    ) -> None:
        self.table = table if table is not None else HistoryTable()
        self.decisions: deque[ModelDecision] = deque(maxlen=MAX_DECISIONS)
        self.counters = Counters()
        self._config = config
        self._full = {m.id: DepthClass(m.id, m.num_layers) for m in candidates}
        self._depths = {m.id: m.exit_depths for m in candidates}
        planner = Planner(candidates, config, device, self.table)
        self._planner = planner
        self._chooser = Chooser(planner, list(self._full), config)
        self._pending = PendingAction(config.order_timeout_s, config.retry_s)
        self._window = BreachWindow(
            config.breach_window_tokens, config.breach_window_per_sequence, config.breach_share
        )
        self._profiling = Profiling(config.profile_requests)
        self._profiling.queue(c for c in self._full.values() if planner.plan(c, 1.0) is None)
        self._phase = HeliosPhase.PROFILE
        self._tick = ControllerTick({})
        self._target: DepthClass | None = None
        self._before: DepthClass | None = None
        self._reason = ""
        self._changed_s, self._dwell_s = float("-inf"), 0.0
        self._served = 0
        self._ordered_s = self._loading_s = 0.0  # the last order; loads of the last profiles
        self._profile_after_s = float("-inf")
        self._strict: dict[str, tuple[int, float]] = {}  # model → layers that were needed, and when
        self._barred: dict[DepthClass, str] = {}
        self._said: set[str] = set()  # what has been said once, until the next choice

    # What others ask

    @property
    def routing(self) -> Routing:
        """Where the next auto request goes."""
        held = [self._tick.replicas[n].depth_class for n in self._serving()]
        by_count = sorted(set(held), key=lambda c: (c != self._target, -held.count(c), str(c)))
        at = self._profiled_on()
        if at is None:
            return Routing(tuple(by_count))
        return Routing(tuple(by_count), self._profiling.now, at, self._profiling.places)

    def status(self) -> Status:
        """A snapshot for people and metrics."""
        return Status(
            phase=self._phase,
            target=self._target,
            profiling=self._profiling.now,
            order=self._pending.order,
            served=self._served,
            window_breaches=self._window.breaches,
            window_tokens=self._window.size,
            barred={str(c): why for c, why in self._barred.items()},
            counters=replace(self.counters),
        )

    # What happens

    def handle(self, event: Event, now_s: float) -> list[Output]:
        """Take an event in; return what shall be done because of it.

        Args:
            now_s: Any clock that never goes back.
        """
        outputs: list[Output] = []
        match event:
            case ControllerTick():
                self._tick = event
                self._note_strict(event.strict, now_s)
                if event.usable_bytes is not None:
                    self._planner.has_memory(event.usable_bytes)
            case RequestStarted():
                if event.replica == self._profiled_on():
                    self._profiling.started(now_s)
            case RequestLost():
                if event.replica == self._profiled_on():
                    self._profiling.lost()
            case RequestFinished():
                self._request_finished(event, now_s, outputs)
            case TokensServed():
                self._tokens_served(event, now_s, outputs)
            case UnchangedSampled():
                self._unchanged_sampled(event, now_s, outputs)
            case OrderDone():
                self._order_done(event, now_s)
            case OrderFailed():
                self._order_failed(event, now_s, outputs)
        self._profiling.expire(now_s)
        self._check_order(now_s, outputs)
        if self._pending.order is None and self._tick.replicas:
            if self._phase is HeliosPhase.PROFILE:
                self._profile_on(now_s, outputs)
            self._order_next(now_s, outputs)
        self.decisions.extend(ModelDecision(now_s, output) for output in outputs)
        return outputs

    def _note_strict(self, strict: Mapping[str, int], now_s: float) -> None:
        kept = {m: (d, at) for m, (d, at) in self._strict.items() if now_s - at < STRICT_KEPT_S}
        kept |= {m: (d, now_s) for m, d in strict.items() if d >= kept.get(m, (0, 0.0))[0]}
        self._strict = kept

    # Requests and tokens

    def _request_finished(
        self, event: RequestFinished, now_s: float, outputs: list[Output]
    ) -> None:
        if event.replica == self._profiled_on():
            if event.depth_class == self._profiling.now:
                self._profiling.finished(event)
                return
            self._profiling.lost()  # it was sent there, and served elsewhere
        if event.depth_class.model in self._full:
            self.table.add(event)
        self._served += 1
        is_due = self._served >= self._config.reassess_requests and now_s >= self._profile_after_s
        if self._phase is HeliosPhase.SERVE and is_due:
            self._phase = HeliosPhase.PROFILE
            self._barred.clear()
            self._pending.forget_failures()
            first = self._target.model if self._target is not None else ""
            candidates = sorted(self._full.values(), key=lambda c: c.model != first)
            hopeless = self._chooser.hopeless(self._situation(now_s))
            left_out = self._profiling.queue_again(candidates, hopeless)
            outputs += [Keep(hopeless[c.model]) for c in left_out]

    def _tokens_served(self, event: TokensServed, now_s: float, outputs: list[Output]) -> None:
        target = self._target
        if target is None or event.depth_class != target or target.model not in self._full:
            return
        if target == self._full[target.model]:
            return
        self._window.add(event.tokens, event.breaches, event.batch)
        if not self._window.is_tripped:
            return
        broken = (
            f"{self._window.breaches:.0f} of the last {self._window.size} tokens were below "
            f"their threshold at {target}"
        )
        # What the profile said of its confidence does not hold, at any of its exits.
        exits = [DepthClass(target.model, depth) for depth in self._depths[target.model][:-1]]
        self._leave(broken, exits, now_s, outputs)

    def _unchanged_sampled(
        self, event: UnchangedSampled, now_s: float, outputs: list[Output]
    ) -> None:
        if event.model not in self._full:
            return
        self.table.sampled(event, self._full[event.model].depth)
        target = self._target
        if target is None or target != DepthClass(event.model, event.depth or 0):
            return
        broken = self._chooser.broken(self._situation(now_s))
        if broken is not None:
            self._leave(broken, [target], now_s, outputs)

    def _leave(
        self, broken: str, bars: Sequence[DepthClass], now_s: float, outputs: list[Output]
    ) -> None:
        """The class that serves will not do: load the rest of its layers, or switch.

        Args:
            bars: What is not to be chosen before the next assessment if something else is now.
        """
        if self._pending.order is not None:
            return
        situation = self._situation(now_s)
        if situation.is_too_soon:
            ago = f"the last change was only {situation.since_change_s:.3g} s ago"
            reason = f"{broken}; {ago}, there is none before {self._dwell_s:.3g} s"
            self._keep_once("dwell", reason, outputs)
            return
        self.counters.trips += 1
        self._window.clear()
        verdict = self._chooser.after_breaches(situation, broken)
        if verdict.plan is not None:
            self._barred.update(dict.fromkeys(bars, broken))
        self._follow(verdict, now_s, outputs)

    # The order under way

    def _order_done(self, event: OrderDone, now_s: float) -> None:
        order = self._pending.take(event.order_id)
        if order is None:
            return  # given up meanwhile; the next tick shows what the replica holds
        self._pending.succeeded(order)
        row = self.table.row(order.depth_class.model, order.depth_class.depth)
        if event.is_start:
            row.load_s = event.load_s
        elif event.load_s > 0.0:  # layers that are dropped say nothing of loading them
            before = self._tick.replicas.get(order.replica)
            if before is not None and before.depth_class.model == row.model:
                held = before.depth_class.depth
                self._planner.has_read(order.depth_class, held, event.load_s)
        row.weight_bytes = event.weight_bytes
        row.max_batch = event.max_batch
        if order.replica in self._profilers():
            self._loading_s += now_s - self._ordered_s
        if isinstance(order, Switch):
            self.counters.switches += 1
        else:
            self.counters.resizes += 1
        replica = self._tick.replicas.get(order.replica)
        if replica is not None:  # until the next tick shows it
            now = {order.replica: ReplicaReport(replica.role, order.depth_class)}
            self._tick = replace(self._tick, replicas={**self._tick.replicas, **now})
        if order.depth_class == self._target:
            self._changed_s = now_s
            if event.load_s > 0.0:  # measured, where a guess stood
                self._dwell_s = self._config.dwell_loads * event.load_s
            self._window.clear()

    def _order_failed(self, event: OrderFailed, now_s: float, outputs: list[Output]) -> None:
        error, order = event.error, self._pending.take(event.order_id)
        if order is None:
            return
        self.counters.failures += 1
        what = f"{order.replica} could not get {order.depth_class} ({error})"
        is_profile = self._profiling.now == order.depth_class
        if is_profile and order.replica in self._profilers():
            self._profiling.give_up()
            self._barred[order.depth_class] = what
            outputs.append(Keep(f"{what}; {order.depth_class.model} is no candidate this time"))
        elif (
            order.depth_class == self._target
            and self._target not in self._classes()
            and not event.is_held_up
        ):
            self._barred[order.depth_class] = what
            classes = self._classes()
            first = classes[0] if classes else None
            self._target = self._before if self._before in classes else first
            outputs.append(Keep(f"{what}; {self._target} goes on serving"))
        else:
            delay_s = self._pending.back_off(order, now_s, is_held_up=event.is_held_up)
            outputs.append(Keep(f"{what}; it is asked again in {delay_s:.3g} s"))

    def _check_order(self, now_s: float, outputs: list[Output]) -> None:
        order = self._pending.order
        if order is None:
            return
        if order.replica not in self._tick.replicas:
            self._pending.take(order.order_id)
            outputs.append(Keep(f"{order.replica} is gone, and its order with it"))
        elif self._pending.is_late(now_s):
            self._order_failed(OrderFailed(order.order_id, LATE), now_s, outputs)

    # The next one

    def _profile_on(self, now_s: float, outputs: list[Output]) -> None:
        """Go to the next candidate, or choose when all have been seen."""
        row = self._profiling.finish()
        if row is not None:
            self.table.install(row, serving=self._target)
            self.counters.profiles += 1
        if not self._profilers():
            self._keep_once("scouts", "profiles wait for a scout; none is alive", outputs)
        while self._profiling.now is None:
            candidate = self._profiling.next()
            if candidate is None:
                self._phase, self._served = HeliosPhase.SERVE, 0
                pause_s = self._loading_s * (1.0 / self._config.profile_share - 1.0)
                self._profile_after_s, self._loading_s = now_s + pause_s, 0.0
                verdict = self._chooser.after_profile(self._situation(now_s))
                self._follow(verdict, now_s, outputs)
                return
            if candidate in self._barred:
                self._profiling.give_up()

    def _follow(self, verdict: ChoiceReason, now_s: float, outputs: list[Output]) -> None:
        plan = verdict.plan
        if plan is None:
            outputs.append(Keep(verdict.reason))
            return
        self._before, self._target, self._reason = self._target, plan.depth_class, verdict.reason
        self._changed_s, self._dwell_s = now_s, self._config.dwell_loads * plan.load_s
        self._said.clear()
        self._window.clear()
        outputs.append(Choose(plan.depth_class, verdict.reason))

    def _order_next(self, now_s: float, outputs: list[Output]) -> None:
        """Bring the replicas one step nearer to what it shall hold."""
        replicas, strict = self._tick.replicas, self._tick.strict
        aside: dict[str, DepthClass] = {}
        if self._profiling.now is not None:
            aside = dict.fromkeys(self._profilers(), self._profiling.now)
        elif self._target is not None and self._target.model in self._full:
            aside = dict.fromkeys(self._tick.scouts & set(replicas), self._full[self._target.model])
        is_alone = self._profiling.now is not None and not self._config.scout  # it waits for them
        wanted = wanted_classes(
            replicas,
            target=self._target,
            aside=aside,
            passing=() if self._profiling.now is None else aside,
            strict=strict if is_alone else {m: depth for m, (depth, _) in self._strict.items()},
            depths=self._depths,
            waiting=self._tick.waiting,
        )
        for name in in_order(replicas, wanted, first=sorted(aside)):
            then = wanted[name]
            may_ask = self._pending.may_ask(name, then, now_s)
            if may_ask and may_change(name, then, replicas, strict):
                now, self._ordered_s = replicas[name].depth_class, now_s
                outputs.append(self._pending.write(name, now, then, self._why(name, then), now_s))
                return

    def _why(self, name: str, then: DepthClass) -> str:
        if then == self._profiling.now and name in self._profilers():
            return f"{then.model} is profiled at full depth next, on {name}"
        if name in self._tick.scouts:
            return f"{name} samples and escalates at the full depth of {then.model}"
        if then == self._target:
            return self._reason
        return f"strict requests may need {then.depth} layers of {then.model}"

    def _keep_once(self, key: str, reason: str, outputs: list[Output]) -> None:
        if key not in self._said:
            self._said.add(key)
            outputs.append(Keep(reason))

    # Views

    def _situation(self, now_s: float) -> Situation:
        return Situation(
            target=self._target,
            since_change_s=now_s - self._changed_s,
            dwell_s=self._dwell_s,
            barred=self._barred,
            num_replicas=len(self._serving()),
            in_flight=self._tick.in_flight,
            in_flight_tokens=self._tick.in_flight_tokens,
            requests_left=max(0, self._config.reassess_requests - self._served),
        )

    def _profilers(self) -> frozenset[str]:
        return profilers(self._tick.replicas, self._tick.scouts, has_scouts=self._config.scout)

    def _profiled_on(self) -> str | None:
        """The decode replica that profiles, once all that take part hold the candidate."""
        members = {n: self._tick.replicas[n] for n in sorted(self._profilers())}
        if any(m.depth_class != self._profiling.now for m in members.values()):
            return None
        return next((n for n, m in members.items() if m.role is Role.DECODE), None)

    def _serving(self) -> list[str]:
        """Decode replicas that are no scouts."""
        replicas, scouts = self._tick.replicas, self._tick.scouts
        return [n for n in sorted(replicas) if replicas[n].role is Role.DECODE and n not in scouts]

    def _classes(self) -> list[DepthClass]:
        """What serving replicas hold, the most frequent first."""
        held = [self._tick.replicas[n].depth_class for n in self._serving()]
        return sorted(held, key=lambda c: -held.count(c))
