"""Serve a stream on one replica, with so many clients that each wait for their answer.

Everything counts, as one processor's time: prefill, decoding, reading layers, profiles, decisions.
What is only looked at (memory, progress) does not. Contestants take turns of a fraction of a
second, so that whatever else the machine does hits all of them alike; the clock of one stands still
in the others' turns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from loadgen.load.task_suite import TaskSuite
from loadgen.paper.clocks import TurnClock
from loadgen.paper.helios.control import LocalController
from loadgen.paper.helios.record import SCORED_EVERY, HeldMemory, ServedRequest, StreamRun
from loadgen.paper.helios.replica import LocalReplica, ReplicaLimits, TimedModel
from quadriga.catalogue.energy import EnergyMeter
from quadriga.core.replica import DepthClass
from quadriga.errors import InvariantViolation
from quadriga.policies.helios.machine import Helios

TURN_S = 0.25
COUNTED = ("switches", "resizes", "trips", "profiles")
_LOOK_EVERY = 16  # steps between two looks at the memory held


class Contestant:
    """A replica, its clients and their queue, and the requests that are done.

    Args:
        machine: Chooses what the replica holds; None leaves it as it is.
    """

    def __init__(
        self,
        suite: TaskSuite,
        replica: LocalReplica,
        clock: TurnClock,
        *,
        clients: int,
        machine: Helios | None = None,
    ) -> None:
        self.done: list[ServedRequest] = []
        self._suite = suite
        self._memory = HeldMemory()
        self._to_come = deque(enumerate(suite.prompts))
        self._queue: deque[ServedRequest] = deque()
        self._replica = replica
        self._clock = clock
        self._clients = clients
        self._machine = machine
        self._num_steps = 0
        self._looked_s = clock.now_s()
        self._meter = EnergyMeter("cpu", clock.now_s)
        self._joules = 0.0
        self._control = (
            LocalController(machine, replica, clock, self._ended) if machine is not None else None
        )

    @property
    def is_over(self) -> bool:
        return not (self._to_come or self._queue or self._replica.has_work)

    def turn(self, seconds: float) -> None:
        """Serve for so long, or until all is served."""
        before = self._meter.read().joules
        with self._clock.turn():
            end_s = self._clock.now_s() + seconds
            while not self.is_over and self._clock.now_s() < end_s:
                self._advance()
            self._look()
        self._joules += self._meter.read().joules - before

    def result(self) -> StreamRun:
        """What came of it; all is served. Raises: InvariantViolation: The books are wrong."""
        replica = self._replica
        replica.check()
        requests = sorted(self.done, key=lambda r: r.index)
        counters = self._machine.counters if self._machine is not None else None
        return StreamRun(
            requests=requests,
            right=self._suite.right({r.index: r.token_ids for r in requests}),
            seconds=self._clock.now_s(),
            joules=self._joules,
            energy_source=self._meter.read().source,
            decoded=replica.decoded.copy(),
            held=replica.held.copy(),
            breaches=replica.breaches,
            peak_running=replica.peak_running,
            memory=self._memory,
            **{name: getattr(counters, name, 0) for name in COUNTED},
            log=self._control.log if self._control is not None else [],
        )

    def _advance(self) -> None:
        """Carry out what was ordered, admit what may begin, and run a step."""
        replica, control = self._replica, self._control
        if control is not None:
            control.obey()
        self._submit()
        if control is None or control.is_open:
            self._admit()
        if self._num_steps % _LOOK_EVERY == 0:
            self._look()
        if replica.has_work:
            self._num_steps += 1
            self._ended(replica.step())
            if control is not None:
                control.stepped()

    def _submit(self) -> None:
        """Clients without a request send one."""
        now_s = self._clock.now_s()
        while self._to_come and self._replica.num_running + len(self._queue) < self._clients:
            index, prompt = self._to_come.popleft()
            self._queue.append(ServedRequest(index, prompt, now_s, index % SCORED_EVERY == 0))

    def _admit(self) -> None:
        replica, control = self._replica, self._control
        while self._queue:
            request = self._queue[0]
            if not (control or replica).admit(request):
                if not replica.num_running:
                    raise InvariantViolation(f"request {request.index} fits in no empty replica")
                return
            self._queue.popleft()
            if replica.is_over(request):
                self._ended([request])
            if control is not None and not control.is_open:
                return

    def _ended(self, requests: list[ServedRequest]) -> None:
        self.done += requests
        if self._control is not None:
            for request in requests:
                self._control.served(request)

    def _look(self) -> None:
        now_s, replica = self._clock.now_s(), self._replica
        with self._clock.stopped():
            self._memory.add(replica.weight_bytes, replica.kv_bytes, now_s - self._looked_s)
        self._looked_s = now_s


def serve_in_turns(
    services: Sequence[Contestant], *, turn_s: float = TURN_S, on_done: Callable[[int], None]
) -> None:
    """Let every service serve all of its stream.

    Args:
        on_done: Told after every turn how many requests are done, of all.
    """
    while any(not s.is_over for s in services):
        for service in services:
            if not service.is_over:
                service.turn(turn_s)
                on_done(sum(len(s.done) for s in services))


def open_replica(
    models: Sequence[TimedModel],
    first: DepthClass,
    limits: ReplicaLimits,
    clock: TurnClock,
    threads: int,
) -> LocalReplica:
    """Load a replica, outside the clock."""
    with clock.stopped():
        return LocalReplica(models, first, limits, clock, threads)
