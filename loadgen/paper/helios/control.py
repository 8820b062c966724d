"""HELIOS over one replica: what happens goes into the state machine, its orders are carried out.

What the controller and its ingresses do in the service, in one thread: no scout, so the replica
that serves profiles, too, and when all layers are loaded for that it reads answers of a partial
depth again. A change of layers happens between two steps, with all requests in flight; for a change
of model those in flight are drained first, and no new one is admitted meanwhile.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from loadgen.paper.helios.record import ServedRequest
from loadgen.paper.helios.replica import LocalReplica
from quadriga.clock import Clock
from quadriga.core.replica import Role
from quadriga.errors import ConfigError
from quadriga.policies.helios.machine import Helios
from quadriga.policies.helios.messages import (
    ChangeOrder,
    Choose,
    ControllerTick,
    Event,
    Keep,
    OrderDone,
    OrderFailed,
    ReplicaReport,
    RequestFinished,
    RequestLost,
    RequestStarted,
    Resize,
    TokensServed,
    UnchangedSampled,
)

NAME = "decode:0"
REPORT_TOKENS = 32
"""Tokens between two reports; the service reports with its heartbeats."""
READ_AGAIN = 8
"""Answers of a partial depth, the newest ones, that the whole model reads again."""


class LocalController:
    """Drives one replica.

    Args:
        on_served: Called with requests that ended while layers were let go.

    Attributes:
        log: (seconds, what) of every decision.
    """

    def __init__(
        self,
        machine: Helios,
        replica: LocalReplica,
        clock: Clock,
        on_served: Callable[[list[ServedRequest]], None],
    ) -> None:
        self.log: list[tuple[float, str]] = []
        self.machine = machine
        self._replica = replica
        self._clock = clock
        self._on_served = on_served
        self._order: ChangeOrder | None = None
        self._unread: dict[str, deque[ServedRequest]] = {}
        self._was = replica.breaches, replica.held.total()
        self._tick()

    @property
    def is_open(self) -> bool:
        """Whether new requests are admitted."""
        return self._order is None or isinstance(self._order, Resize)

    def admit(self, request: ServedRequest) -> bool:
        """Admit a request, to profile where a place is free; False: no room now."""
        routing = self.machine.routing
        request.is_profile = routing.profile_replica == NAME and routing.profile_places > 0
        request.is_scored = request.is_scored or request.is_profile
        if not self._replica.admit(request):
            return False
        if request.is_profile:
            self._handle(RequestStarted(NAME))
        return True

    def stepped(self) -> None:
        """A step is over: report now and then, and carry out what was ordered."""
        if self._replica.held.total() - self._was[1] >= REPORT_TOKENS:
            self.report()
        self.obey()

    def report(self) -> None:
        """Tokens since the last report, and how things are."""
        replica = self._replica
        breaches, tokens = replica.breaches, replica.held.total()
        if tokens > self._was[1]:
            self._handle(
                TokensServed(
                    depth_class=replica.depth_class,
                    tokens=tokens - self._was[1],
                    breaches=breaches - self._was[0],
                    batch=max(1, replica.num_running),
                )
            )
        self._was = breaches, tokens
        self._tick()

    def served(self, request: ServedRequest) -> None:
        """A request is done."""
        if len(request.classes) > 1:  # its figures are of no one class
            if request.is_profile:
                self._handle(RequestLost(NAME))
            return
        model = request.classes[0].model
        self._unread.setdefault(model, deque(maxlen=READ_AGAIN)).append(request)
        self._handle(
            RequestFinished(
                replica=NAME,
                depth_class=request.classes[0],
                exit_tokens=dict(Counter(request.exit_layers)),
                breaches=sum(request.breached),
                nll=request.nll,
                scored_tokens=request.num_scored,
                prompt_tokens=len(request.prompt.token_ids),
                ttft_s=request.ttft_s,
                decode_s=request.decode_s,
                mean_batch=max(1.0, request.batch_sum / max(1, request.num_decoded)),
            )
        )

    def obey(self) -> None:
        """Carry out the order under way as far as it can be now; each may bring the next."""
        while (order := self._order) is not None:
            if not isinstance(order, Resize) and self._replica.has_work:
                return  # drained first
            self.report()
            if self._order is not order:
                continue  # the report made it void
            self._order = None
            try:
                if isinstance(order, Resize):
                    load_s, ended = self._replica.resize(order.depth_class.depth)
                    self._was = self._replica.breaches, self._replica.held.total()
                    self._on_served(ended)
                else:
                    load_s = self._replica.switch(order.depth_class)
            except ConfigError as exc:
                self._handle(OrderFailed(order.order_id, exc.message))
                continue
            replica = self._replica
            self._read_again()
            self._handle(
                OrderDone(
                    order.order_id,
                    load_s,
                    replica.weight_bytes,
                    replica.max_batch,
                    is_start=not isinstance(order, Resize),
                )
            )

    def _read_again(self) -> None:
        """Let the whole model read what a part of it said."""
        replica = self._replica
        if not replica.is_whole:
            return
        whole = replica.depth_class
        for request in self._unread.pop(whole.model, ()):
            served = request.classes[0]
            if served == whole or (said := replica.read_again(request)) is None:
                continue
            exits: dict[int, tuple[int, int]] = {}
            for token_id, layers, full in zip(
                request.token_ids, request.exit_layers, said, strict=True
            ):
                same, seen = exits.get(layers, (0, 0))
                exits[layers] = same + (token_id == full), seen + 1
            self._handle(UnchangedSampled(whole.model, exits, served.depth))

    def _tick(self) -> None:
        replica = self._replica
        self._handle(
            ControllerTick(
                replicas={NAME: ReplicaReport(Role.DECODE, replica.depth_class)},
                in_flight=replica.num_running,
                in_flight_tokens=replica.used_tokens,
            )
        )

    def _handle(self, event: Event) -> None:
        now_s = self._clock.now_s()
        for output in self.machine.handle(event, now_s):
            self.log.append((now_s, _said(output)))
            if not isinstance(output, Choose | Keep):
                self._order = output


def _said(output: ChangeOrder | Choose | Keep) -> str:
    kind = type(output).__name__.lower()
    where = "" if isinstance(output, Keep) else f" {output.depth_class}"
    return f"{kind}{where}: {output.reason}"
