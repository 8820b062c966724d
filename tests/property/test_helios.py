"""Whatever happens, HELIOS keeps its promises: one order, strict depths, no flapping."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quadriga.config.scheduling import HeliosConfig
from quadriga.core.replica import DepthClass, Role
from quadriga.policies.helios.history import HistoryTable
from quadriga.policies.helios.machine import Helios
from quadriga.policies.helios.messages import (
    ChangeOrder,
    Choose,
    ChosenDevice,
    ControllerTick,
    Event,
    OrderDone,
    OrderFailed,
    ReplicaReport,
    RequestLost,
    RequestStarted,
    Resize,
    Switch,
    TokensServed,
    UnchangedSampled,
)
from quadriga.policies.helios.plans import Planner
from tests.unit.policies.helios_harness import LARGE, SMALL, finished

MODELS = {m.id: m for m in (SMALL, LARGE)}
CLASSES = [DepthClass(m.id, d) for m in MODELS.values() for d in m.exit_depths]
LOAD_S = 3.0


class HeliosLife(RuleBasedStateMachine):
    """A replicas with a mind of its own: loads fail, replicas die, requests come as they like."""

    @initialize(
        scout=st.booleans(),
        count=st.integers(1, 3),
        start=st.sampled_from(CLASSES),
        has_prefill=st.booleans(),
        is_known=st.booleans(),
        limit=st.sampled_from([1.0, 0.12, 0.0]),
    )
    def begin(
        self,
        scout: bool,
        count: int,
        start: DepthClass,
        has_prefill: bool,
        is_known: bool,
        limit: float,
    ) -> None:
        self.config = HeliosConfig(
            scout=scout,
            reassess_requests=4,
            profile_requests=2,
            dwell_loads=2.0,
            retry_s=5.0,
            order_timeout_s=50.0,
            max_changed_share=limit,
        )
        table = HistoryTable()
        if is_known:
            for model in MODELS.values():
                table.add(finished(DepthClass(model.id, model.num_layers)))
        self.machine = Helios(
            list(MODELS.values()), self.config, ChosenDevice(value_bytes=2), table
        )
        self.replicas = {f"decode-{i}": ReplicaReport(Role.DECODE, start) for i in range(count)}
        if has_prefill:
            self.replicas["prefill-0"] = ReplicaReport(Role.PREFILL, start)
        self.scouts = frozenset({"scout"}) if scout else frozenset()
        for name in self.scouts:
            self.replicas[name] = ReplicaReport(Role.DECODE, start)
        self.strict: dict[str, int] = {}
        self.waiting: dict[str, int] = {}
        self.now_s = 0.0
        self.order: ChangeOrder | None = None
        self.target_held_s: float | None = None
        self.target: DepthClass | None = None
        self.tick(0.0)

    def tell(self, event: Event) -> None:
        outputs = self.machine.handle(event, self.now_s)
        orders = [o for o in outputs if isinstance(o, Resize | Switch)]
        assert len(orders) <= 1
        for output in outputs:
            assert output.reason
            if isinstance(output, Choose):
                self.chosen(output)
        for order in orders:
            assert self.order is None, "an order while one is under way"
            self.ordered(order)

    def chosen(self, choice: Choose) -> None:
        assert choice.depth_class in CLASSES
        assert choice.depth_class != self.target, "a change to what is chosen already"
        planner = Planner(
            list(MODELS.values()), self.config, ChosenDevice(value_bytes=2), self.machine.table
        )
        plan = planner.plan(choice.depth_class, 1.0)
        assert plan is not None
        assert plan.changed_share <= self.config.max_changed_share + 1e-9
        if self.target_held_s is not None:
            assert self.now_s - self.target_held_s >= self.config.dwell_loads * LOAD_S
        self.target, self.target_held_s = choice.depth_class, None

    def ordered(self, order: ChangeOrder) -> None:
        assert order.depth_class in CLASSES
        member = self.replicas[order.replica]
        assert member.depth_class != order.depth_class, "an order for what is there"
        assert isinstance(order, Resize) == (member.depth_class.model == order.depth_class.model)
        after = self.replicas | {order.replica: ReplicaReport(member.role, order.depth_class)}
        for model, depth in self.strict.items():
            if self.met(self.replicas, model, depth):
                assert self.met(after, model, depth), "strict requests lost their depth"
        self.order = order

    @staticmethod
    def met(replicas: dict[str, ReplicaReport], model: str, depth: int) -> bool:
        return any(
            m.role is Role.DECODE and m.depth_class.model == model and m.depth_class.depth >= depth
            for m in replicas.values()
        )

    @rule(passed_s=st.sampled_from([0.0, 1.0, 7.0, 60.0]))
    def tick(self, passed_s: float) -> None:
        self.now_s += passed_s
        is_late = self.order is not None and self.now_s >= self.order.deadline_s
        if is_late:
            self.order = None  # given up by the machine at this very tick
        waiting = {n: d for n, d in self.waiting.items() if n in self.replicas}
        self.tell(
            ControllerTick(dict(self.replicas), self.scouts, 4, 400, dict(self.strict), waiting)
        )
        if is_late:
            self.follow_target()

    @precondition(lambda self: self.order is not None)
    @rule()
    def order_done(self) -> None:
        order, self.order = self.order, None
        assert order is not None
        self.replicas[order.replica] = ReplicaReport(
            self.replicas[order.replica].role, order.depth_class
        )
        self.now_s += LOAD_S
        if order.depth_class == self.machine.status().target:
            self.target_held_s = self.now_s
        self.tell(OrderDone(order.order_id, LOAD_S, is_start=isinstance(order, Switch)))

    @precondition(lambda self: self.order is not None)
    @rule()
    def order_failed(self) -> None:
        order, self.order = self.order, None
        assert order is not None
        before = dict(self.replicas)
        self.tell(OrderFailed(order.order_id, "no memory"))
        assert self.replicas == before
        held = {m.depth_class for n, m in self.replicas.items() if m.role is Role.DECODE}
        routing = self.machine.routing
        assert set(routing.serve) <= held, "what does not serve is not offered"
        self.follow_target()

    def follow_target(self) -> None:
        """Where a failed order's class was chosen, what served before is."""
        if self.target != self.machine.status().target:
            self.target, self.target_held_s = self.machine.status().target, None

    @rule(stale=st.integers(100, 200))
    def stale_answer(self, stale: int) -> None:
        self.tell(OrderDone(10_000 + stale, 1.0))
        self.tell(OrderFailed(10_000 + stale, "late"))

    @rule(count=st.integers(1, 6), share=st.sampled_from([0.1, 0.5, 1.0, 1.3]))
    def requests(self, count: int, share: float) -> None:
        """Requests where the routing sends them; a share > 1 makes the model much slower."""
        for _ in range(count):
            routing = self.machine.routing
            if routing.profile_places and routing.profile is not None:
                assert routing.profile_replica is not None
                self.tell(RequestStarted(routing.profile_replica))
                served, where = routing.profile, routing.profile_replica
            elif routing.serve:
                served, where = routing.serve[0], "decode-0"
            else:
                return
            request = finished(served, where)
            self.tell(replace(request, decode_s=request.decode_s * share, nll=100.0 * share))

    @rule(tokens=st.integers(0, 200), share=st.floats(0, 1), batch=st.integers(1, 40))
    def tokens(self, tokens: int, share: float, batch: int) -> None:
        for depth_class in self.machine.routing.serve[:1]:
            self.tell(TokensServed(depth_class, tokens, int(share * tokens), batch))

    @rule(at=st.sampled_from(CLASSES), same=st.integers(0, 1000))
    def sampled(self, at: DepthClass, same: int) -> None:
        exits = MODELS[at.model].exits.layers
        read = dict.fromkeys(exits, (same, 1000))
        self.tell(UnchangedSampled(at.model, read, at.depth))

    @rule(model=st.sampled_from(sorted(MODELS)), depth=st.integers(0, 32))
    def strict_needs(self, model: str, depth: int) -> None:
        if depth == 0:
            self.strict.pop(model, None)
        elif depth <= MODELS[model].num_layers:
            self.strict[model] = depth
        self.tick(0.0)

    @rule(depth=st.integers(0, 32))
    def prefill_waits(self, depth: int) -> None:
        """A strict request waits for layers before its prompt is computed, or does not any more."""
        self.waiting = {"prefill-0": depth} if depth else {}
        self.tick(0.0)

    @rule(name=st.sampled_from(["decode-0", "decode-1", "scout"]), at=st.sampled_from(CLASSES))
    def replica_restarts(self, name: str, at: DepthClass) -> None:
        """It dies, its order with it, and comes back as it was deployed."""
        if name not in self.replicas:
            return
        member = self.replicas.pop(name)
        if self.order is not None and self.order.replica == name:
            self.order = None
        self.tick(1.0)
        self.replicas[name] = ReplicaReport(member.role, at)
        self.tick(1.0)

    @precondition(lambda self: self.order is not None)
    @rule()
    def ordered_replica_dies(self) -> None:
        assert self.order is not None
        member = self.replicas.pop(self.order.replica)
        name, self.order = self.order.replica, None
        self.tick(1.0)
        self.replicas[name] = member
        self.tick(1.0)

    @rule(share=st.sampled_from([0.0, 1.0]))
    def all_is_carried_out(self, share: float) -> None:
        """Until there is nothing to be done; then tokens, sure ones or none."""
        for _ in range(10):
            if self.order is None:
                break
            self.order_done()
        self.tokens(200, share, 1)

    @rule()
    def request_lost(self) -> None:
        replica = self.machine.routing.profile_replica
        if replica is not None:
            self.tell(RequestLost(replica))

    @invariant()
    def order_is_known(self) -> None:
        if not hasattr(self, "machine"):
            return
        assert self.machine.status().order == self.order
        assert self.machine.routing.profile_places <= 2


HeliosLife.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestHeliosLife = HeliosLife.TestCase
