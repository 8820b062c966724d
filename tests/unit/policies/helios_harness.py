"""HELIOS's own example as catalogue models and requests, and a replicas that carries out orders."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from loadgen.model_costs.published import PUBLISHED
from quadriga.catalogue.records import CatalogueModel
from quadriga.catalogue.sizes import sizes_of
from quadriga.checkpoint.exits import ExitSpec
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
    HeliosPhase,
    Keep,
    OrderDone,
    OrderFailed,
    Output,
    ReplicaReport,
    RequestFinished,
    RequestStarted,
    Resize,
    Switch,
    TokensServed,
)


def model(name: str, exits: tuple[int, ...], **changes: Any) -> CatalogueModel:
    """A published model as a catalogue has it."""
    made = CatalogueModel(
        id=name,
        source=f"/nowhere/{name}",
        architecture=PUBLISHED[name].config["architectures"][0],
        vocab_size=PUBLISHED[name].config["vocab_size"],
        tokenizer="one",
        sizes=sizes_of(PUBLISHED[name].config),
        exits=ExitSpec(exits),
    )
    return replace(made, **changes)


SMALL = model("opt-1.3b", (6, 12))
LARGE = model("opt-6.7b", (9, 17))
S6, S24 = DepthClass("opt-1.3b", 6), DepthClass("opt-1.3b", 24)
L9, L32 = DepthClass("opt-6.7b", 9), DepthClass("opt-6.7b", 32)

# HELIOS Tables 1 (perplexity after evaluation), 4 (exits, per mille) and 5 (TTFT, TPOT).
EXITS = {"opt-1.3b": {6: 730, 12: 47, 24: 223}, "opt-6.7b": {9: 736, 17: 48, 32: 216}}
TIMES_S = {"opt-1.3b": (0.042, 0.010), "opt-6.7b": (0.069, 0.015)}
LN_PERPLEXITY = {"opt-1.3b": 0.3852624, "opt-6.7b": 0.3987761}  # ln 1.47, ln 1.49
JOULES = {"opt-1.3b": 0.50 * 3600, "opt-6.7b": 1.01 * 3600}  # Appendix E.3, a prompt


def finished(depth_class: DepthClass, replica: str = "decode-0", **changes: Any) -> RequestFinished:
    """A request with the paper's figures, 1,000 output tokens; cut at the loaded depth, where
    its times shrink as its layers do."""
    name, depth = depth_class.model, depth_class.depth
    exits: dict[int, int] = {}
    for layers, tokens in EXITS[name].items():
        at = min(layers, depth)
        exits[at] = exits.get(at, 0) + tokens
    breaches = sum(n for layers, n in EXITS[name].items() if layers > depth)
    ttft_s, tpot_s = TIMES_S[name]
    work = sum(k * n for k, n in exits.items()) / sum(k * n for k, n in EXITS[name].items())
    layers = max(EXITS[name])
    made = RequestFinished(
        replica=replica,
        depth_class=depth_class,
        exit_tokens=exits,
        breaches=breaches,
        nll=1000 * LN_PERPLEXITY[name],
        scored_tokens=1000,
        prompt_tokens=100,
        ttft_s=ttft_s * depth / layers,
        decode_s=999 * tpot_s * work,
        joules=JOULES[name] * work,
        energy_source="nvml",
    )
    return replace(made, **changes)


def profiled(table: HistoryTable) -> HistoryTable:
    """After the profile: both models served five requests at full depth."""
    for full in (S24, L32):
        for _ in range(5):
            table.add(finished(full))
    return table


def said(output: Output) -> str:
    """An output in a few letters: what a trace is written in."""
    match output:
        case Resize():
            return f"resize {output.replica} {output.depth_class}"
        case Switch():
            return f"switch {output.replica} {output.depth_class}"
        case Choose():
            return f"choose {output.depth_class}"
        case Keep():
            return "keep"


@dataclass
class Cluster:
    """Replicas that do as they are told, at once when `answer` is called."""

    machine: Helios
    replicas: dict[str, ReplicaReport]
    scouts: frozenset[str] = frozenset()
    strict: dict[str, int] = field(default_factory=dict)
    waiting: dict[str, int] = field(default_factory=dict)
    in_flight: int = 0
    in_flight_tokens: int = 0
    now_s: float = 0.0
    order: ChangeOrder | None = None
    trace: list[str] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)

    def tell(self, event: Event) -> list[Output]:
        """Give the machine an event; remembers its order."""
        outputs = self.machine.handle(event, self.now_s)
        for output in outputs:
            assert output.reason
            if isinstance(output, Resize | Switch):
                assert self.order is None, "one order at a time"
                self.order = output
        self.trace += [said(o) for o in outputs]
        self.outputs += outputs
        return outputs

    def tick(self, passed_s: float = 1.0) -> list[Output]:
        self.now_s += passed_s
        return self.tell(
            ControllerTick(
                dict(self.replicas),
                self.scouts,
                self.in_flight,
                self.in_flight_tokens,
                dict(self.strict),
                dict(self.waiting),
            )
        )

    def done(self, load_s: float = 1.0) -> list[Output]:
        """The order under way is carried out."""
        order = self.take()
        role = self.replicas[order.replica].role
        self.replicas[order.replica] = ReplicaReport(role, order.depth_class)
        self.now_s += load_s
        starts = isinstance(order, Switch)
        return self.tell(OrderDone(order.order_id, load_s, is_start=starts))

    def fail(self, error: str = "no memory") -> list[Output]:
        return self.tell(OrderFailed(self.take().order_id, error))

    def take(self) -> ChangeOrder:
        assert self.order is not None
        order, self.order = self.order, None
        return order

    def profile(self, count: int = 5, **changes: Any) -> None:
        """Serve the requests that the candidate under the eyes wants."""
        for _ in range(count):
            routing = self.machine.routing
            assert routing.profile is not None
            assert routing.profile_replica is not None
            assert routing.profile_places > 0
            self.tell(RequestStarted(routing.profile_replica))
            self.tell(finished(routing.profile, routing.profile_replica, **changes))

    def profile_both(self, **second: Any) -> None:
        """From the first tick on; `second` is what differs in requests of the second model."""
        self.tick()
        self.profile()
        self.done()
        self.profile(**second)

    def breach(self, tokens: int, breaches: int, batch: int = 1) -> list[Output]:
        """Tokens served by the class that was chosen."""
        depth_class = self.machine.status().target
        assert depth_class is not None
        return self.tell(TokensServed(depth_class, tokens, breaches, batch))

    def settle(self) -> None:
        """Carry out orders until there are none."""
        while self.order is not None:
            self.done()


def paper_config(**config: Any) -> HeliosConfig:
    """As in the paper: nothing bounds the tokens that a partial depth changes but breaches."""
    return HeliosConfig(**{"max_changed_share": 1.0} | config)


def decode(depth_class: DepthClass) -> ReplicaReport:
    return ReplicaReport(Role.DECODE, depth_class)


def alone(start: DepthClass = S24, **config: Any) -> Cluster:
    """The paper's setting: one replica, which also profiles."""
    machine = Helios(
        [SMALL, LARGE], paper_config(scout=False, **config), ChosenDevice(value_bytes=2)
    )
    return Cluster(machine, {"decode-0": decode(start)})


def with_scout(num_decode: int = 2, start: DepthClass = S24, **config: Any) -> Cluster:
    """Two replicas that serve, and a scout beside them."""
    machine = Helios([SMALL, LARGE], paper_config(**config), ChosenDevice(value_bytes=2))
    replicas = {f"decode-{i}": decode(start) for i in range(num_decode)}
    return Cluster(machine, replicas | {"scout": decode(start)}, frozenset({"scout"}))


def serve(cluster: Cluster, count: int, depth_class: DepthClass) -> None:
    for _ in range(count):
        cluster.tell(finished(depth_class))


def chosen(cluster: Cluster) -> Cluster:
    """Past the first profile: everything holds what was chosen."""
    cluster.tick()
    while cluster.machine.status().phase is HeliosPhase.PROFILE:
        if cluster.order is not None:
            cluster.done()
        else:
            cluster.profile()
    cluster.settle()
    return cluster
