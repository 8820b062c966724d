"""A whole Quadriga cluster in one process and virtual time, and what clients have of it.

The code that ships runs: the SDK with its resumption, the gRPC server, the ingress with both ways
of recovery, scheduler, controller, prefill and decode replicas with loops, hand-offs and moves.
Not theirs are Ray, threads and wires (`ray_in_virtual_time`, `stand_ins`), and the engine: the next
token is a function of those before it and of the seed, so it is known what every client must get.

One seed gives one run, bit for bit (with PYTHONHASHSEED set).
"""

from __future__ import annotations

import asyncio
import functools
import gc
import hashlib
import logging
import random
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import pytest

from actors.controller.controller import Controller
from actors.rpc.lifecycle import controller_name, create_or_get, scheduler_name
from actors.rpc.ray_rpc import call
from actors.scheduler.scheduler import Scheduler
from quadriga.background import background
from quadriga.config.loader import QuadrigaConfig, load_config
from quadriga.core.replica import Role
from quadriga.core.request import AUTO_MODEL
from quadriga.errors import DeadlineExceeded, Overloaded, QuadrigaError, ReplicaError, Unavailable
from quadriga.replica.gc_tuning import settle
from serve_app.auth.api_keys import ApiKeys
from serve_app.grpc.server import GrpcServer
from serve_app.openai.models import ModelDirectory
from serve_app.request.cluster_client import ClusterClient
from serve_app.request.engine_client import EngineClient
from tests.simulation import growth
from tests.simulation.clients import KEY, SimulatedClient
from tests.simulation.faults import Faults
from tests.simulation.oracles import MAX_REFUSALS, Oracles
from tests.simulation.plans import APP, MODEL, TIMEOUT_S, Asked, Fault, Plan, expected
from tests.simulation.plans import plan as make_plan
from tests.simulation.processes import Process, ProcessEnded, ProcessLoop, Wires
from tests.simulation.ray_in_virtual_time import Actor, VirtualRay
from tests.simulation.stand_ins import VirtualEngineThread, in_virtual_time
from tests.simulation.virtual_time import MAX_S

STARTS_WITHIN_S = 60.0
SETTLED_S = 90.0
"""After the last request nothing is held any more: the longest lease, audit and orphan time."""
LOOK_EVERY_S = 2.0
END_S = 1200.0
DRAIN_S = 60.0
FILLED_S = 1000.0
"""Of an idle cluster: whatever keeps the newest so many, or so long, has them by then."""
LATE_S = 1.0
"""Behind its deadline, until a client must have an error."""
IN_TIME = (DeadlineExceeded, Overloaded, Unavailable, ReplicaError)
"""What a request that was given little time may end in."""


@dataclass
class Result:
    """What became of a run.

    Attributes:
        failures: Promises that were broken.
        history: What happened, a line each.
        digest: Of everything that was sent, in order.
        counts: See `Oracles`.
        virtual_s: Seconds the run took, by its own clock.
    """

    failures: list[str] = field(default_factory=list)
    history: list[str] = field(default_factory=list)
    digest: str = ""
    num_calls: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    virtual_s: float = 0.0


class Ingress:
    """The ingress deployment without Serve; see `serve_app.ingress.Ingress`."""

    def __init__(self, config: dict[str, Any], ingress_id: str) -> None:
        loaded = load_config(config)
        self.engine_client = EngineClient(
            loaded, _models(loaded), ApiKeys.of([KEY]), ClusterClient(APP), ingress_id=ingress_id
        )
        self.grpc = GrpcServer(self.engine_client)
        self._plain = config

    async def begin(self) -> None:
        """As `ensure_cluster`, without blocking; then the background loops."""
        create_or_get(Scheduler, scheduler_name(APP), self._plain)
        create_or_get(Controller, controller_name(APP), APP, self._plain)
        while True:
            try:
                await call(controller_name(APP), "ensure", self._plain, timeout_s=20.0)
                break
            except QuadrigaError:
                await asyncio.sleep(0.5)
        self.engine_client.start()


@functools.cache
def _checkpoint_models(model: str) -> ModelDirectory:
    return ModelDirectory.load(load_config({"name": APP, "model": model}))


def _models(config: QuadrigaConfig) -> ModelDirectory:
    """Of this ingress; what is slow to read is shared by all runs."""
    shared = _checkpoint_models(MODEL)
    return ModelDirectory([shared.find(MODEL)], chooses=config.helios.enabled)


class Cluster:
    """One run.

    Attributes:
        wanted, config: What is to be served; plain.
        connections: Of clients: where the answer comes in, and the task that sends it.
    """

    def __init__(
        self, plan: Plan, loop: ProcessLoop, is_wanted: Callable[[str], bool] | None = None
    ) -> None:
        self.plan, self.loop, self._is_wanted = plan, loop, is_wanted
        self.rng = random.Random(plan.seed)
        self.wires = Wires(self.rng, loop.time)
        self.ray = VirtualRay(self.rng, self.wires, self.note)
        self.result = Result()
        self.oracles = Oracles(self)
        self.result.counts = self.oracles.counts
        self.connections: list[tuple[asyncio.Queue[bytes | None], asyncio.Task[Any]]] = []
        self._newest: dict[int, str] = {}
        self._serving: dict[int, str] = {}
        self._num_ingresses = 0
        self.wanted = load_config(plan.settings)
        self.config = self.wanted.model_dump(mode="json", exclude={"auth"})
        self._model = AUTO_MODEL if self.wanted.helios.enabled else MODEL
        self._began_s = 0.0
        self._num_asked = 0

    def note(self, what: str) -> None:
        """Write one line of the history."""
        line = f"{self.loop.time() - self._began_s:9.3f} {what}"
        self.result.history.append(line)

    def fail(self, what: str) -> None:
        """A promise was broken."""
        self.note(f"BROKEN: {what}")
        self.result.failures.append(what)
        if self._is_wanted is not None and self._is_wanted(what):
            self.loop.stop()

    async def run(self) -> None:
        """Start the cluster, send the requests, let things go wrong, and look at what is left."""
        plan = self.plan
        VirtualEngineThread.pace_s = plan.pace_s
        for place in range(plan.num_ingresses):
            self._begin_serving(place)
        while next(self.oracles.rest(), None) is not None:
            if self.loop.time() > STARTS_WITHIN_S:
                self.fail("the cluster did not come up")
                return
            await asyncio.sleep(0.25)
        self._began_s = self.loop.time()
        if plan.counts:
            background(self.oracles.watch_counters())
        await self._serve(plan.faults)
        await self._settle()
        if plan.idle_s:
            await self._idle()
        for why in VirtualEngineThread.broken:
            self.fail(f"a contradiction was found: {why}")
        self.result.virtual_s = self.loop.time()
        self.result.num_calls = self.ray.num_calls
        self.result.digest = hashlib.sha256(
            "\n".join([*self.result.history, str(self.ray.num_calls)]).encode()
        ).hexdigest()[:16]

    async def _serve(self, strikes: Sequence[Fault]) -> None:
        """Send the requests of the plan, and let things go wrong meanwhile."""
        strike = Faults(self).strike
        faults = [background(self._later(f.at_s, lambda f=f: strike(f))) for f in strikes]
        client, requests = SimulatedClient(self), self.plan.requests
        asked = [
            background(self._ask(client, number, one))
            for number, one in enumerate(requests, self._num_asked)
        ]
        self._num_asked += len(requests)
        await asyncio.wait([*asked, *faults], timeout=END_S)
        for task in [*asked, *faults]:
            if not task.done():
                self.fail("a request, or a fault, never ended")
            elif (error := task.exception()) is not None:
                self.fail(f"the simulation failed: {error!r}")
        for request_id, num_refused in client.calls.num_refused.items():
            if num_refused > MAX_REFUSALS:
                self.fail(f"{request_id} was told to come back {num_refused} times")

    async def _idle(self) -> None:
        """Nobody asks for long: nothing grows, and the same requests are answered as before."""
        gc.enable()  # as in a service
        await asyncio.sleep(FILLED_S)
        before, counted = await growth.least(self.loop), await self.oracles.counted()
        await asyncio.sleep(self.plan.idle_s - FILLED_S)
        for what in growth.grown(before, await growth.least(self.loop)):
            self.fail(f"an idle cluster grows: {what}")
        if await self.oracles.counted() != counted:
            self.fail("an idle cluster counts requests")
        self.note(f"nobody has asked for {self.plan.idle_s:.0f} s")
        gc.disable()
        await self._serve(())
        await self._settle()

    # Serve

    def _start_ingress(self, place: int) -> Actor:
        """Start an ingress; while its place has no newer one, another follows when it dies."""
        self._num_ingresses += 1
        name = f"{APP}:ingress:{self._num_ingresses}"
        self._newest[place] = name
        self.ray.create(name, Ingress, (self.config, name))
        actor = self.ray.actors[name]
        assert actor.process is not None

        def again() -> None:
            if self._newest[place] == name:
                self.loop.call_later(1.0, self._begin_serving, place)

        actor.process.at_death.append(again)
        return actor

    def _begin_serving(self, place: int) -> None:
        self._serving[place] = self._start_ingress(place).name

    async def _upgrade(self, place: int) -> None:
        """Exchange the ingress of a place as Serve does: the old one drains beside the new one."""
        old = self.ray.actors.get(self._newest[place])
        if old is not None and old.instance is None and old.process is not None:
            new = self._start_ingress(place)
            old.process.die()
            old = None
        else:
            new = self._start_ingress(place)
        while new.instance is None and not new.is_over:  # noqa: ASYNC110  (it says nothing itself)
            await asyncio.sleep(0.1)
        self._serving[place] = self._newest[place]
        if old is None or old.process is None:
            return
        process, drained_s = old.process, self.loop.time() + DRAIN_S
        client = old.instance.engine_client
        while not process.is_dead and self.loop.time() < drained_s:
            process.call(lambda: client.drain(drained_s - self.loop.time(), refuses_new=False))
            await asyncio.sleep(0.5)
            if not client._num_open and not client._num_answering:
                break
        process.die()

    def ingress_of(self, request_id: str) -> tuple[Process, Ingress] | None:
        """Where the router sends a request: always to the same one, while it is there."""
        able = []
        for place in sorted(self._serving):
            actor = self.ray.actors.get(self._serving[place])
            if actor is not None and actor.instance is not None and actor.process is not None:
                able.append((actor.process, actor.instance))
        if not able:
            return None
        return able[int(hashlib.sha256(request_id.encode()).hexdigest(), 16) % len(able)]

    # Clients

    async def _later(self, at_s: float, what: Callable[[], Any]) -> None:
        await asyncio.sleep(at_s)
        what()

    async def _ask(self, client: SimulatedClient, number: int, asked: Asked) -> None:
        await asyncio.sleep(asked.at_s)
        wanted = expected(asked)
        got: list[int] = []
        began_s = self.loop.time()
        text = f"request {number}"
        sampling: Any = {"temperature": 0.0}
        if asked.seed is not None:
            sampling = {"temperature": 1.0, "seed": asked.seed}

        async def read() -> None:
            stream = client.stream(
                list(asked.prompt),
                model=self._model,
                request_id=f"r{number}",
                max_tokens=asked.max_tokens,
                ignore_eos=True,
                priority=asked.priority,
                timeout_s=asked.timeout_s,
                **sampling,
            )
            async with aclosing(stream) as pieces:
                async for piece in pieces:
                    got.extend(piece.token_ids)

        task = background(read())
        leaves = asked.leaves_s
        await asyncio.wait([task], timeout=asked.timeout_s + LATE_S if leaves is None else leaves)
        took_s = self.loop.time() - began_s
        if not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=30.0)
            if leaves is None:
                self.fail(f"{text} did not end by its deadline")
            else:
                self.note(f"{text} left after {len(got)} tokens")
            if got != list(wanted[: len(got)]):
                self.fail(f"{text} got {got}, not {wanted}")
            return
        error = task.exception()
        if got != list(wanted[: len(got)]):
            self.fail(f"{text} got {got}, not {wanted}")
        elif asked.timeout_s < TIMEOUT_S and isinstance(error, IN_TIME):
            self.note(f"{text} ended after {len(got)} tokens in time: {error!r}")
        elif error is not None:
            self.fail(f"{text} ended after {len(got)} of {len(wanted)} tokens: {error!r}")
        elif len(got) != len(wanted):
            self.fail(f"{text} ended well with {len(got)} of {len(wanted)} tokens")
        else:
            self.note(f"{text} got its {len(got)} tokens in {took_s:.2f} s")

    # What must hold

    def configure(self, config: QuadrigaConfig) -> None:
        """Serve a changed configuration, as `serve deploy` would."""
        self.wanted = config
        self.config = config.model_dump(mode="json", exclude={"auth"})
        for place in self._newest:
            background(self._upgrade(place))

    def actors(self, kind: str) -> list[Actor]:
        """Those that run, by what they are."""
        found = [a for a in self.ray.actors.values() if a.process is not None]
        return sorted(
            (a for a in found if f":{kind}" in a.name or kind == "any"), key=lambda a: a.name
        )

    def replicas(self, role: Role) -> Iterator[tuple[str, Any]]:
        """Those whose process lives and whose engine is loaded."""
        for actor in self.actors(role.value):
            if actor.instance is not None and actor.instance.engine.is_ready:
                yield actor.name, actor.instance

    async def _settle(self) -> None:
        """Nothing is held for requests that are over, and all that is wanted serves, soon."""
        give_up_s = self.loop.time() + SETTLED_S
        while left := list(self.oracles.rest()):
            if self.loop.time() > give_up_s:
                for what in left:
                    self.fail(what)
                return
            await asyncio.sleep(LOOK_EVERY_S)


def run(plan: Plan, is_wanted: Callable[[str], bool] | None = None) -> Result:
    """Make one run; what broke is in the result, an error of the simulation itself included.

    Args:
        is_wanted: Of a failure: it ends the run.
    """
    _warm_up()
    result = _run(plan, is_wanted)
    gc.collect()
    return result


@functools.cache
def _warm_up() -> None:
    """Fill the product's caches: a process's first run would draw other numbers than the next."""
    _run(make_plan(0, num_requests=2, num_faults=0), None)
    settle()


def _run(plan: Plan, is_wanted: Callable[[str], bool] | None) -> Result:
    logging.disable(logging.CRITICAL)
    gc.disable()  # a run is small: all of it goes at its end
    random.seed(plan.seed)
    loop = ProcessLoop(MAX_S + plan.idle_s)
    cluster = Cluster(plan, loop, is_wanted)
    try:
        asyncio.set_event_loop(loop)
        with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patched:
            put = patched.setattr
            in_virtual_time(
                put,
                loop,
                cluster.ray,
                cluster.rng,
                pushes=plan.counts,
                counts_all=plan.idle_s > 0,
            )
            for hook in cluster.oracles.hooks():
                put(*hook)
            # Of calls that reach a process as it dies.
            warnings.filterwarnings("ignore", message="coroutine .* was never awaited")
            try:
                loop.run_until_complete(cluster.run())
                for error in loop.failures:
                    if not isinstance(error, ProcessEnded):
                        cluster.fail(f"a task failed: {error!r} in {_where(error)}")
            finally:
                _take_down(loop)
    except Exception as exc:  # one run that breaks must not end a campaign of thousands
        cluster.fail(f"the run broke: {exc!r} in {_where(exc)}")
    finally:
        asyncio.set_event_loop(None)
        loop.close()
        logging.disable(logging.NOTSET)
        gc.enable()
    return cluster.result


def _where(error: BaseException) -> str:
    """The functions that an error came through."""
    return ", ".join(frame.name for frame in traceback.extract_tb(error.__traceback__))


def _take_down(loop: ProcessLoop) -> None:
    """End all tasks; those of dead processes too."""
    loop.end()
    left = asyncio.all_tasks(loop)
    for task in left:
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.wait(left, timeout=5.0))
