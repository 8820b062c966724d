"""What the simulated cluster has instead of a machine: time, threads, an engine, a transport.

`in_virtual_time` puts them in place of the modules' own. Everything else is the code that ships.
"""

from __future__ import annotations

import asyncio
import functools
import os
import pickle
import queue
import random
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar

import torch

from actors.controller import controller as controller_module
from actors.controller import (
    controller_store,
    drain,
    node_reports,
    placement_groups,
    replica_manager,
    watchdogs,
)
from actors.kv_transfer import transport_hub
from actors.metrics import metrics_page, push
from actors.replica import decode, prefill, replica
from actors.rpc import lifecycle, nodes, ray_rpc, signals
from actors.scheduler import scheduler as scheduler_module
from quadriga import background
from quadriga.config import resolve
from quadriga.control import desired, helios_setup
from quadriga.core.kv import KVPart
from quadriga.core.request import SampledToken
from quadriga.errors import InvariantViolation, KVTransportError, QuadrigaError, ReplicaError
from quadriga.kv_transport.counts import TransportCounts
from quadriga.replica import forecasting
from quadriga.replica.engine_thread import IDLE_STEP_S, EngineThread
from quadriga.replica.replica_metrics import ReplicaMetrics
from quadriga.scheduling.calibration import assumed_shape
from quadriga.scheduling.forecasts import StepShape
from quadriga.scheduling.transfer import kv_feed
from serve_app.request import cluster_client, engine_client
from tests.simulation.plans import answer_token
from tests.simulation.processes import CURRENT, PerProcess, Process, ProcessEnded, Wires
from tests.simulation.ray_in_virtual_time import VirtualRay
from tests.simulation.tensor_runner import TensorRunner
from tests.simulation.virtual_time import UNIX_EPOCH_S, in_line

LOAD_S = (0.1, 1.0)


class EngineRunner(TensorRunner):
    """A row that is given other KV than that of its sequence fails at its next step."""

    numerics = "none"

    def __init__(self, spec: Any, ranks: object = None) -> None:
        super().__init__(spec.num_rows, spec.row_capacity_tokens)
        self.spec = spec
        self.num_layers = spec.depth
        self.num_tokens = 0

    def sample(self, row: int, known: Sequence[int]) -> SampledToken:
        sampling = self.attached[row].sampling
        seed = sampling.seed if sampling.temperature else None
        return SampledToken(answer_token(known, seed), self.num_layers)


class Inbox:
    """A queue whose reader waits in virtual time."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._news: asyncio.Future[None] | None = None

    def put(self, item: Any) -> None:
        self._items.append(item)
        if self._news is not None:
            _answer(self._news, None)

    async def wait(self, timeout_s: float) -> None:
        """Until something is put, or for so long."""
        loop = asyncio.get_running_loop()
        self._news = loop.create_future()
        timer = loop.call_later(timeout_s, _answer, self._news, None)
        await self._news
        timer.cancel()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        return self.get_nowait()

    def get_nowait(self) -> Any:
        if not self._items:
            raise queue.Empty
        return self._items.popleft()

    def empty(self) -> bool:
        return not self._items


class VirtualEngineThread(EngineThread[Any]):
    """An engine whose steps take virtual time, as tasks of its process.

    Attributes:
        pace_s: Seconds a step takes.
        rng: Decides how long loading takes.
        broken: Why engines failed; none ought to.
    """

    pace_s = 0.02
    broken: ClassVar[list[str]] = []
    rng = random.Random(0)

    def start(self) -> None:
        self._inbox = Inbox()  # type: ignore[assignment]
        self._task = asyncio.get_running_loop().create_task(self._rounds())

    async def join(self, timeout_s: float) -> bool:
        await asyncio.wait([self._task], timeout=timeout_s)
        return self._task.done()

    async def _rounds(self) -> None:
        inbox: Any = self._inbox
        try:
            core = self._load()
            await asyncio.sleep(self.rng.uniform(*LOAD_S))
            self.core = core
            core.publish()
            process = CURRENT.get()
            while not self._is_stopping:
                if process is not None and process.is_full:
                    raise MemoryError
                if core.has_work:
                    await asyncio.sleep(self.pace_s)
                elif inbox.empty():
                    await inbox.wait(IDLE_STEP_S)
                self._serve_inbox(core)
                core.publish()
        except MemoryError as exc:
            self._fail(ReplicaError(f"the engine failed: {exc!r}"))
        except QuadrigaError as exc:
            self.broken.append(repr(exc))
            self._fail(exc)
        except Exception as exc:
            self.broken.append(repr(exc))
            self._fail(ReplicaError(f"the engine failed: {exc!r}"))
        self.post(self._finish_inbox)


class VirtualTransport:
    """KV over the simulated wires.

    Attributes:
        world: Where the peers are; set by the run.
    """

    ray: VirtualRay
    wires: Wires
    rng: random.Random
    corrupt_until_s = 0.0
    names = ("gloo", "object_store")
    name = "gloo"
    num_fallbacks = 0

    def __init__(self, kind: str, me: str, sink: Any, host_for: Any, **_: Any) -> None:
        self._me, self._sink = me, sink
        self.counts = TransportCounts()

    async def send(self, peer: str, part: KVPart, kv: torch.Tensor, *, deadline_s: float) -> None:
        try:
            async with asyncio.timeout(deadline_s):
                await self._carry(peer, part, kv.clone())
        except TimeoutError as exc:
            raise KVTransportError(f"part {part.index} was not acknowledged") from exc

    async def _carry(self, peer: str, part: KVPart, kv: torch.Tensor) -> None:
        loop = asyncio.get_running_loop()
        delay_s = self.wires.delay_s(self._me, peer)
        if delay_s is None:
            await asyncio.Event().wait()
        answer: Future[None] | asyncio.Future[None] = loop.create_future()
        actor = self.ray.actors.get(peer)
        if actor is None or actor.process is None:
            raise KVTransportError(f"{peer} is gone")
        await asyncio.sleep(delay_s or 0.0)
        process = actor.process
        if process is None:
            raise KVTransportError(f"{peer} is gone")
        if loop.time() < self.corrupt_until_s and self.rng.random() < 0.5:
            kv.view(-1)[0] += 1.0
        me = self._me

        def take() -> None:
            """At the peer."""
            try:
                sink = actor.instance.transport._sink
                sink.accept(me, part)
                sink.store(me, part, kv)
                outcome: Exception | None = None
            except KVTransportError as exc:
                outcome = exc
            except QuadrigaError as exc:  # the peer's engine is over
                outcome = KVTransportError(exc.message)
            back_s = self.wires.delay_s(peer, me)
            if back_s is not None:
                loop.call_later(back_s, _answer, answer, outcome)

        process.call(take)
        await answer

    async def abort(self, peer: str, transfer_id: str) -> None:
        pass

    async def close(self) -> None:
        pass


def _answer(future: asyncio.Future[None], error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


class InlineExecutor:
    """Runs at once, on the thread that asks."""

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(*args))
        except Exception as exc:
            future.set_exception(exc)
        return future


def _exit(status: int) -> None:
    """`os._exit`."""
    process = CURRENT.get()
    assert process is not None
    process.die()
    raise ProcessEnded


def _asks_to_go(callback: Callable[[], None]) -> None:
    process = CURRENT.get()
    assert process is not None
    process.asked_to_go = callback


async def _none(*_: Any, **__: Any) -> None:
    pass


def _nothing(*_: Any, **__: Any) -> None:
    pass


class Store:
    """Ray's internal key-value store."""

    def __init__(self, ray: VirtualRay) -> None:
        self._values = ray.store

    def _internal_kv_put(self, key: bytes, value: bytes, **_: Any) -> None:
        self._values[key] = value

    def _internal_kv_get(self, key: bytes, **_: Any) -> bytes | None:
        return self._values.get(key)

    def _internal_kv_del(self, key: bytes, **_: Any) -> None:
        self._values.pop(key, None)


def in_virtual_time(
    put: Callable[[Any, str, Any], None],
    loop: asyncio.AbstractEventLoop,
    ray: VirtualRay,
    rng: random.Random,
    *,
    pushes: bool,
    counts_all: bool,
) -> None:
    """Have the modules of the cluster run on `loop` and `ray`.

    Args:
        put: `MonkeyPatch.setattr`.
        pushes: Metrics go to the controller; else none are pushed, which takes a third less time.
        counts_all: Replicas count their load, and the last ten minutes are sampled.
    """

    def unix_s() -> float:
        process = CURRENT.get()
        now_s = loop.time()
        if process is None:
            return UNIX_EPOCH_S + now_s
        ahead_s = process.skew_s + process.drift * (now_s - process.drifts_from_s)
        return UNIX_EPOCH_S + now_s + ahead_s

    def draining_nodes() -> dict[str, float]:
        return {node: UNIX_EPOCH_S + at_s for node, at_s in ray.leaving.items()}

    def unique() -> uuid.UUID:
        return uuid.UUID(int=rng.getrandbits(128), version=4)

    VirtualEngineThread.rng = VirtualTransport.rng = rng
    VirtualEngineThread.broken.clear()
    VirtualTransport.ray, VirtualTransport.wires = ray, ray.wires
    VirtualTransport.corrupt_until_s = 0.0
    put(InvariantViolation, "__init__", _noted(InvariantViolation.__init__))
    put(time, "monotonic", loop.time)
    put(time, "perf_counter", loop.time)
    put(time, "time", unix_s)
    put(time, "time_ns", lambda: int(unix_s() * 1e9))
    put(uuid, "uuid4", unique)
    put(asyncio, "to_thread", in_line)
    put(os, "_exit", _exit)
    for module in (ray_rpc, lifecycle, nodes, replica, watchdogs, placement_groups, node_reports):
        put(module, "ray", ray)
    for module in (lifecycle, placement_groups):
        put(module, "actor_class", ray.remote)
    for module in (replica, desired, replica_manager):
        put(module, "fingerprint", _fingerprint)
    for module, name in FILES_OF:
        put(module, name, _READ[name])
    put(ray_rpc, "_handles", PerProcess("handles"))
    put(ray_rpc, "_used_s", PerProcess("used_s"))
    put(ray_rpc, "_look_ups", PerProcess("look_ups"))
    put(ray_rpc, "_looking", InlineExecutor())
    put(ray_rpc, "_attempts", {})
    put(background, "_running", set())  # tasks that never end go with the run
    put(placement_groups, "placement_group", ray.placement_group)
    put(placement_groups, "PlacementGroupSchedulingStrategy", lambda *_: None)
    put(placement_groups, "has_compiler", lambda: True)
    put(controller_store, "internal_kv", Store(ray))
    put(drain.LeavingNodes.__init__, "__defaults__", (draining_nodes,))
    put(node_reports.NodeReports, "while_pending", _none)
    if not counts_all:
        put(metrics_page.MetricsPage, "sample_forever", _none)
        for name in ("gauges", "forecast", "sent"):
            put(ReplicaMetrics, name, _nothing)
    if not pushes:
        put(metrics_page.MetricsPage, "keep", _none)
        put(push, "push_metrics", _none)
        put(engine_client.EngineClient, "_push_metrics", _none)
    put(cluster_client, "own_actor", _own_name)
    for module in (replica, controller_module, scheduler_module):
        put(module, "configure_logging", _nothing)
    put(replica.tracing, "start", _nothing)
    put(replica.tracing, "flush", _nothing)
    put(replica, "on_sigterm", _asks_to_go)
    for module in (controller_module, scheduler_module):
        put(module, "die_on_sigterm", _nothing)
    put(signals, "on_sigterm", _asks_to_go)
    put(replica, "EngineThread", VirtualEngineThread)
    put(transport_hub, "TransportHub", VirtualTransport)
    for module in (prefill, decode):
        put(module, "load_runner", EngineRunner)
        put(module, "load_lengths", _nothing)
    put(forecasting, "measure_shape", lambda runner, *_, **__: _shape(runner))
    put(kv_feed, "MIN_PART_BYTES", 4096)


FILES_OF = (
    (resolve, "read_checkpoint"),
    (helios_setup, "read_checkpoint"),
    (helios_setup, "read_catalogue"),
    (helios_setup, "inspect"),
    (helios_setup, "tokenizer_fingerprint"),
)
"""What reads the files of models, which are the same in all runs."""
_READ = {name: functools.cache(getattr(module, name)) for module, name in FILES_OF}
_FINGERPRINTS: dict[bytes, str] = {}
_PRODUCTS_FINGERPRINT = replica.fingerprint


def _fingerprint(spec: Any, config: dict[str, Any]) -> str:
    """As the product's, which takes a twentieth of a run to compute the same few."""
    key = pickle.dumps((spec, config))
    found = _FINGERPRINTS.get(key)
    if found is None:
        found = _FINGERPRINTS[key] = _PRODUCTS_FINGERPRINT(spec, config)
    return found


def _noted(original: Callable[..., None]) -> Callable[..., None]:
    """A contradiction is a fault of the product, whoever recovers from it."""

    def init(self: InvariantViolation, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        VirtualEngineThread.broken.append(repr(self))

    return init


def _shape(runner: EngineRunner) -> StepShape:
    return assumed_shape(runner.spec.kv_capacity_tokens)


def _own_name() -> str:
    process = CURRENT.get()
    assert process is not None
    return process.name


__all__ = ["EngineRunner", "Process", "VirtualEngineThread", "VirtualTransport", "in_virtual_time"]
