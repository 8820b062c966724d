"""A whole Quadriga cluster in one process and virtual time, and what clients have of it.

The code that ships runs: the SDK with its resumption, the gRPC server, the ingress with both ways
of recovery, scheduler, controller, prefill and decode replicas with loops, hand-offs and moves.
Not theirs are Ray, threads and wires (`ray_in_virtual_time`, `stand_ins`), and the engine: the next
token is a function of those before it, so it is known what every client must get.

One seed gives one run, bit for bit (with PYTHONHASHSEED set).
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import random
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import grpc

from actors.controller.controller import Controller
from actors.rpc.lifecycle import controller_name, create_or_get, scheduler_name
from actors.rpc.ray_rpc import call
from actors.scheduler.scheduler import Scheduler
from quadriga.background import background
from quadriga.checkpoint.folder import read_checkpoint
from quadriga.client.aio import AsyncClient
from quadriga.client.retries import RetryPolicy
from quadriga.config.loader import QuadrigaConfig, load_config
from quadriga.config.resolve import num_replicas
from quadriga.core.replica import PARTS, Role
from quadriga.errors import QuadrigaError
from quadriga.scheduling.sequence import SequenceStatus
from serve_app.auth.api_keys import ApiKeys
from serve_app.grpc.server import GrpcServer
from serve_app.openai.models import ModelDirectory
from serve_app.request.cluster_client import ClusterClient
from serve_app.request.engine_client import EngineClient
from tests.fake_runner import next_token
from tests.simulation.processes import Process, ProcessEnded, ProcessLoop, Wires
from tests.simulation.ray_in_virtual_time import Actor, VirtualRay
from tests.simulation.stand_ins import VirtualEngineThread, VirtualTransport, in_virtual_time

APP = "sim"
MODEL = "quadriga-s"
KEY = "k"
STARTS_WITHIN_S = 60.0
REQUESTS_WITHIN_S = 5.0
TIMEOUT_S = 240.0
"""Of every request; no fault lasts as long."""
SETTLED_S = 90.0
"""After the last request nothing is held any more: the longest lease, audit and orphan time."""
LOOK_EVERY_S = 2.0
END_S = 1200.0
DRAIN_S = 60.0


@dataclass(frozen=True, slots=True)
class Asked:
    """One request.

    Attributes:
        at_s: When it is sent, from the time on at which the cluster is up.
        leaves_s: When the client goes away again; None: it stays.
    """

    at_s: float
    prompt: tuple[int, ...]
    max_tokens: int
    priority: int = 0
    leaves_s: float | None = None


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong.

    Attributes:
        at_s: From the time on at which the cluster is up.
        seed: Decides whom it strikes, and how long.
    """

    at_s: float
    kind: str
    seed: int

    def __str__(self) -> str:
        return f"{self.at_s:.3f} {self.kind} ({self.seed})"


@dataclass(frozen=True, slots=True)
class Plan:
    """One run: all that is decided before it begins.

    Attributes:
        settings: Of the deployment.
        pace_s: Seconds a step of an engine takes.
    """

    seed: int
    settings: tuple[tuple[str, Any], ...]
    pace_s: float
    num_ingresses: int
    requests: tuple[Asked, ...]
    faults: tuple[Fault, ...]


@dataclass
class Result:
    """What became of a run.

    Attributes:
        failures: Promises that were broken.
        history: What happened, a line each.
        digest: Of everything that was sent, in order.
        virtual_s: Seconds the run took, by its own clock.
    """

    failures: list[str] = field(default_factory=list)
    history: list[str] = field(default_factory=list)
    digest: str = ""
    num_calls: int = 0
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
    return ModelDirectory([shared.find(MODEL)], chooses=False)


class _Context:
    """gRPC's context of one call."""

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return [("authorization", f"Bearer {KEY}")]

    def auth_context(self) -> dict[str, Any]:
        return {}

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


class _Stub:
    """The SDK's calls, carried to an ingress of the simulated cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def Generate(self, message: Any, metadata: Any, timeout: float) -> AsyncIterator[Any]:
        from quadriga.protos.quadriga.v1 import quadriga_pb2 as pb

        ingress = self._cluster.ingress_of(dict(metadata)["session_id"])
        if ingress is None:
            raise _broken("no ingress is there")
        process, instance = ingress
        data = message.SerializeToString()
        inbox: asyncio.Queue[bytes | None] = asyncio.Queue()

        async def serve() -> None:
            async with aclosing(instance.grpc.generate(data, _Context())) as messages:
                async for one in messages:
                    inbox.put_nowait(one.SerializeToString())
            inbox.put_nowait(b"end")

        task = process.spawn(serve())
        process.at_death.append(lambda: inbox.put_nowait(None))
        self._cluster.connections.append((inbox, task))
        try:
            async with asyncio.timeout(timeout):
                while True:
                    got = await inbox.get()
                    if got is None:
                        raise _broken("the connection broke")
                    if got == b"end":
                        return
                    await asyncio.sleep(0.001)
                    yield pb.GenerateResponse.FromString(got)
        except TimeoutError as exc:
            raise grpc.aio.AioRpcError(
                grpc.StatusCode.DEADLINE_EXCEEDED, grpc.aio.Metadata(), grpc.aio.Metadata(), "late"
            ) from exc
        finally:
            process.call(task.cancel)

    async def Cancel(self, message: Any, metadata: Any, timeout: float) -> Any:
        from quadriga.protos.quadriga.v1 import quadriga_pb2 as pb

        ingress = self._cluster.ingress_of(dict(metadata)["session_id"])
        if ingress is None:
            raise _broken("no ingress is there")
        process, instance = ingress
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        async def cancel() -> None:
            answer = await instance.grpc.cancel(message.SerializeToString(), _Context())
            if not reply.done():
                reply.set_result(answer)

        process.spawn(cancel())
        try:
            async with asyncio.timeout(timeout):
                return await reply
        except TimeoutError as exc:
            raise _broken("no answer") from exc
        return pb.CancelResponse()


def _broken(why: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), why
    )


class _Client(AsyncClient):
    """The SDK over `_Stub`."""

    def __init__(self, cluster: Cluster) -> None:
        self._stub = _Stub(cluster)
        self._metadata = []
        self._timeout_s = TIMEOUT_S
        self._retry = RetryPolicy(max_attempts=1000, max_pause_s=60.0)
        self._cancelling = set()


class Cluster:
    """One run.

    Attributes:
        connections: Of clients: where the answer comes in, and the task that sends it.
    """

    def __init__(self, plan: Plan, loop: ProcessLoop) -> None:
        self.plan, self.loop = plan, loop
        self.rng = random.Random(plan.seed)
        self.wires = Wires(self.rng, loop.time)
        self.ray = VirtualRay(self.rng, self.wires, self.note)
        self.result = Result()
        self.connections: list[tuple[asyncio.Queue[bytes | None], asyncio.Task[Any]]] = []
        self._newest: dict[int, str] = {}
        self._serving: dict[int, str] = {}
        self._num_ingresses = 0
        self._sha = hashlib.sha256()
        self._config: dict[str, Any] = {}
        self._over = False
        self._began_s = 0.0

    def note(self, what: str) -> None:
        """Write one line of the history."""
        line = f"{self.loop.time() - self._began_s:9.3f} {what}"
        self.result.history.append(line)

    def fail(self, what: str) -> None:
        """A promise was broken."""
        self.note(f"BROKEN: {what}")
        self.result.failures.append(what)

    async def run(self) -> None:
        """Start the cluster, send the requests, let things go wrong, and look at what is left."""
        plan = self.plan
        self._config = load_config(dict(plan.settings)).model_dump(mode="json", exclude={"auth"})
        VirtualEngineThread.pace_s = plan.pace_s
        for place in range(plan.num_ingresses):
            self._begin_serving(place)
        while list(self._rest()):
            if self.loop.time() > STARTS_WITHIN_S:
                self.fail("the cluster did not come up")
                return
            await asyncio.sleep(0.25)
        self._began_s = self.loop.time()
        background(self._watch_owners())
        faults = [background(self._later(f.at_s, lambda f=f: self._strike(f))) for f in plan.faults]
        client = _Client(self)
        asked = [
            background(self._ask(client, number, one)) for number, one in enumerate(plan.requests)
        ]
        await asyncio.wait([*asked, *faults], timeout=END_S)
        for task in [*asked, *faults]:
            if not task.done():
                self.fail("a request, or a fault, never ended")
            elif task.exception() is not None:
                raise task.exception()  # type: ignore[misc]
        await self._settle()
        for why in VirtualEngineThread.broken:
            self.fail(f"a contradiction was found: {why}")
        self._over = True
        self.result.virtual_s = self.loop.time()
        self.result.num_calls = self.ray.num_calls
        self.result.digest = hashlib.sha256(
            "\n".join([*self.result.history, str(self.ray.num_calls)]).encode()
        ).hexdigest()[:16]

    # Serve

    def _start_ingress(self, place: int) -> Actor:
        """Start an ingress; while its place has no newer one, another follows when it dies."""
        self._num_ingresses += 1
        name = f"{APP}:ingress:{self._num_ingresses}"
        self._newest[place] = name
        self.ray.create(name, Ingress, (self._config, name))
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

    async def _ask(self, client: _Client, number: int, asked: Asked) -> None:
        await asyncio.sleep(asked.at_s)
        wanted = expected(asked)
        got: list[int] = []
        began_s = self.loop.time()
        text = f"request {number}"

        async def read() -> None:
            stream = client.stream(
                list(asked.prompt), model=MODEL, request_id=f"r{number}",
                max_tokens=asked.max_tokens, temperature=0.0, ignore_eos=True,
                priority=asked.priority,
            )  # fmt: skip
            async with aclosing(stream) as pieces:
                async for piece in pieces:
                    got.extend(piece.token_ids)

        task = background(read())
        leaves = None if asked.leaves_s is None else asked.leaves_s
        await asyncio.wait([task], timeout=TIMEOUT_S + 10.0 if leaves is None else leaves)
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
        elif error is not None:
            self.fail(f"{text} ended after {len(got)} of {len(wanted)} tokens: {error!r}")
        elif len(got) != len(wanted):
            self.fail(f"{text} ended well with {len(got)} of {len(wanted)} tokens")
        else:
            self.note(f"{text} got its {len(got)} tokens in {took_s:.2f} s")

    # Faults

    def _actors(self, kind: str) -> list[Actor]:
        """Those that run, by what they are."""
        found = [a for a in self.ray.actors.values() if a.process is not None]
        return sorted(
            (a for a in found if f":{kind}" in a.name or kind == "any"), key=lambda a: a.name
        )

    def _strike(self, fault: Fault) -> None:
        rng = random.Random(fault.seed)
        kind, _, role = fault.kind.partition(" ")
        if kind in ("cut", "half-cut"):
            self._cut(rng, one_way=kind == "half-cut")
            return
        if kind == "corrupt":
            until_s = self.loop.time() + rng.uniform(0.5, 3.0)
            VirtualTransport.corrupt_until_s = until_s
            self.note("parts of KV are corrupt for a while")
            return
        if kind == "break":
            self._break(rng)
            return
        if kind == "configure":
            self._configure(rng)
            return
        if kind == "unanswered":
            seconds = rng.uniform(0.2, 4.0)
            self.note(f"no answer of {role} arrives for {seconds:.1f} s")
            self.wires.lose_answers(role, self.loop.time() + seconds)
            return
        if kind == "late":
            seconds, by_s = rng.uniform(0.2, 4.0), rng.choice([0.3, 3.0, 15.0])
            self.note(f"calls of {role} arrive up to {by_s} s late for {seconds:.1f} s")
            self.wires.delay_calls(role, self.loop.time() + seconds, by_s)
            return
        able = self._actors(role)
        if not able:
            self.note(f"{fault.kind}: there is none")
            return
        actor = rng.choice(able)
        process = actor.process
        assert process is not None
        if kind == "kill":
            self.note(f"kill {actor.name}")
            process.die()
        elif kind == "stop":
            seconds = rng.choice([0.5, 2.0, 6.0, 15.0, 30.0])
            self.note(f"{actor.name} stands still for {seconds} s")
            process.stop()
            self.loop.call_later(seconds, process.go_on)
        elif kind == "slow":
            seconds, by_s = rng.uniform(1.0, 10.0), rng.choice([0.05, 0.5, 3.0])
            self.note(f"{actor.name} sends up to {by_s} s late for {seconds:.1f} s")
            self.wires.slow_down(actor.name, self.loop.time() + seconds, by_s)
        elif kind == "lose":
            seconds, share = rng.uniform(0.5, 5.0), rng.choice([0.1, 0.5])
            self.note(f"{share:.0%} of messages from and to {actor.name} lost for {seconds:.1f} s")
            self.wires.lose(actor.name, self.loop.time() + seconds, share)
        elif kind == "skew":
            process.skew_s = rng.uniform(-1.0, 1.0)
            self.note(f"the wall clock of {actor.name} is off by {process.skew_s:.2f} s")
        elif kind == "term":
            self.note(f"SIGTERM to {actor.name}")
            if process.asked_to_go is None:
                process.die()
            else:
                process.call(process.asked_to_go)
        else:
            raise ValueError(fault.kind)

    def _cut(self, rng: random.Random, *, one_way: bool) -> None:
        """Part the cluster in two for a while."""
        names = [a.name for a in self._actors("any")]
        apart = set(rng.sample(names, rng.randint(1, max(1, len(names) // 3))))
        seconds = rng.choice([0.5, 2.0, 5.0, 12.0])
        until_s = self.loop.time() + seconds
        for a in sorted(apart):
            for b in names:
                if b not in apart:
                    self.wires.cut(a, b, until_s)
                    if not one_way:
                        self.wires.cut(b, a, until_s)
        how = "hears, but is not heard" if one_way else "is cut off"
        self.note(f"{', '.join(sorted(apart))} {how} for {seconds} s")

    def _break(self, rng: random.Random) -> None:
        """The connections of some clients break; their ingresses live."""
        alive = [(inbox, task) for inbox, task in self.connections if not task.done()]
        chosen = rng.sample(alive, (len(alive) + 1) // 2)
        self.note(f"{len(chosen)} connections break")
        for inbox, _ in chosen:
            inbox.put_nowait(None)

    def _configure(self, rng: random.Random) -> None:
        """The operator asks for something else: other numbers, or a setting of all replicas."""
        config = dict(self.plan.settings)
        if rng.random() < 0.5:
            config["decode_replicas"] = rng.randint(2, 4)
            config["prefill_replicas"] = rng.randint(1, 3)
            what = f"{config['prefill_replicas']} + {config['decode_replicas']} replicas"
        else:
            config["transport"] = {"lease_s": rng.choice([10.0, 20.0])}
            what = f"leases of {config['transport']['lease_s']} s: every replica anew"
        self.note(f"the configuration asks for {what}")
        self._config = load_config(config).model_dump(mode="json", exclude={"auth"})
        for place in self._newest:
            background(self._upgrade(place))

    # What must hold

    def _replicas(self, role: Role) -> Iterator[tuple[str, Any]]:
        """Those whose process lives and whose engine is loaded."""
        for actor in self._actors(role.value):
            if actor.instance is not None and actor.instance.engine.is_ready:
                yield actor.name, actor.instance

    async def _watch_owners(self) -> None:
        """At no moment two decode replicas run the same sequence under the same epoch."""
        while not self._over:
            await asyncio.sleep(0.05)
            seen: dict[tuple[str, int], str] = {}
            for name, decode in self._replicas(Role.DECODE):
                for running in decode.engine.core.loop.batch.sequences.values():
                    if running.status is not SequenceStatus.RUNNING:
                        continue
                    key = (running.state.sequence_id, running.state.epoch)
                    if key in seen:
                        self.fail(f"{seen[key]} and {name} both run {key}")
                    seen[key] = name

    async def _settle(self) -> None:
        """Nothing is held for requests that are over, and all that is wanted serves, soon."""
        give_up_s = self.loop.time() + SETTLED_S
        while left := list(self._rest()):
            if self.loop.time() > give_up_s:
                for what in left:
                    self.fail(what)
                return
            await asyncio.sleep(LOOK_EVERY_S)

    def _rest(self) -> Iterator[str]:
        """What is not as it is to be in the end."""
        for name, decode in self._replicas(Role.DECODE):
            loop = decode.engine.core.loop
            if loop.slots.owners:
                yield f"{name} keeps rows of {sorted(loop.slots.owners)}"
            if decode.receiver.leases.sequences():
                yield f"{name} keeps leases of {sorted(decode.receiver.leases.sequences())}"
            if decode.migrations.under_way:
                yield f"{name} has moves that do not end"
        for name, prefill in self._replicas(Role.PREFILL):
            if prefill.sequences or prefill._tasks:
                yield f"{name} keeps {sorted(prefill.sequences)}"
            if prefill.engine.core.loop.slots.owners:
                yield f"{name} keeps rows"
        for actor in self._actors("ingress"):
            if actor.instance is None:
                continue
            client = actor.instance.engine_client
            if client._request_manager._live or client._num_open:
                yield f"{actor.name} keeps {sorted(client._request_manager._live)}"
        numbers = {role: sum(1 for _ in self._replicas(role)) for role in PARTS}
        pools = load_config(self._config).pools
        wanted = {
            Role.PREFILL: sum(num_replicas(pool)[Role.PREFILL] for pool in pools),
            Role.DECODE: sum(num_replicas(pool)[Role.DECODE] for pool in pools),
        }
        if numbers != wanted:
            yield f"{numbers} replicas serve, {wanted} are wanted"


def expected(asked: Asked) -> list[int]:
    """What the model answers."""
    tokens = list(asked.prompt)
    for _ in range(asked.max_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(asked.prompt) :]


KINDS = (
    "kill prefill", "kill decode", "kill decode", "kill ingress", "kill scheduler",
    "kill controller", "stop prefill", "stop decode", "stop ingress", "stop scheduler",
    "stop controller", "cut", "half-cut", "slow any", "lose any", "skew any", "corrupt", "break",
    "term decode", "term prefill", "configure",
)  # fmt: skip
METHODS = (
    "admit", "place_now", "submit", "reserve", "commit", "abort", "cancel", "poll", "finished",
    "report", "adopt", "find_resumable", "claimed", "holding", "renew", "migrate", "heartbeat",
    "ingress_heartbeat", "replica_died", "configure", "drain", "hand_over", "directory",
)  # fmt: skip


SHORT = ((1, 3, 6, 12, 24), (0.05, 0.15, 0.4))
LONG = ((1, 5, 20, 60, 120), (0.01, 0.03, 0.1))
"""Tokens of an answer, and seconds a step takes: one of each is chosen."""


def plan(seed: int, *, num_requests: int = 30, num_faults: int = 8) -> Plan:
    """Decide a run."""
    rng = random.Random(f"plan {seed}")
    # Most answers are short on slow engines: as many steps of the protocols in less of the model's.
    lengths, paces = rng.choice([SHORT, SHORT, SHORT, LONG])
    requests = []
    for _ in range(num_requests):
        length = rng.choice([3, 10, 40, 100])
        leaves_s = rng.uniform(0.0, 3.0) if rng.random() < 0.1 else None
        requests.append(
            Asked(
                rng.uniform(0.0, REQUESTS_WITHIN_S),
                _prompt(rng, length),
                rng.choice(lengths),
                rng.choice([0, 0, 0, 5]),
                leaves_s,
            )
        )
    faults = [
        Fault(rng.uniform(0.0, REQUESTS_WITHIN_S + 2.0), _kind(rng), rng.getrandbits(32))
        for _ in range(num_faults)
    ]
    token_bytes = read_checkpoint(MODEL).kv_bytes_per_token(_depth(), 4)
    settings: dict[str, Any] = {
        "name": APP,
        "model": MODEL,
        "prefill_replicas": rng.randint(1, 2),
        "decode_replicas": rng.randint(2, 3),
        "engine": {
            "max_model_len": 256,
            "kv_memory_bytes": token_bytes * rng.choice([512, 1024, 8192]),
        },
    }
    return Plan(
        seed,
        tuple(settings.items()),
        rng.choice(paces),
        rng.randint(1, 2),
        tuple(sorted(requests, key=lambda r: r.at_s)),
        tuple(sorted(faults, key=lambda f: f.at_s)),
    )


def _prompt(rng: random.Random, length: int) -> tuple[int, ...]:
    """Most begin as others do, as far as one of a few beginnings goes: KV is shared."""
    begin = random.Random(rng.randrange(3)).choices(
        range(3, 90), k=rng.choice([0, length // 2, 90])
    )
    rest = [rng.randrange(3, 90) for _ in range(length)]
    return tuple([*begin, *rest][:length])


def _kind(rng: random.Random) -> str:
    """Half of the faults strike one method's messages, the others processes and links."""
    if rng.random() < 0.5:
        return rng.choice(KINDS)
    return f"{rng.choice(['unanswered', 'late'])} {rng.choice(METHODS)}"


@functools.cache
def _depth() -> int:
    return read_checkpoint(MODEL).num_layers


def run(plan: Plan) -> Result:
    """Make one run; what broke is in the result."""
    logging.disable(logging.CRITICAL)
    random.seed(plan.seed)
    loop = ProcessLoop()
    cluster = Cluster(plan, loop)
    try:
        asyncio.set_event_loop(loop)
        with in_virtual_time(loop, cluster.ray, cluster.rng), warnings.catch_warnings():
            # Of calls that reach a process as it dies.
            warnings.filterwarnings("ignore", message="coroutine .* was never awaited")
            loop.run_until_complete(cluster.run())
            for error in loop.failures:
                if not isinstance(error, ProcessEnded):
                    cluster.fail(f"a task failed: {error!r}")
            _take_down(loop)
    finally:
        asyncio.set_event_loop(None)
        loop.close()
        logging.disable(logging.NOTSET)
    return cluster.result


def _take_down(loop: ProcessLoop) -> None:
    """End all tasks; those of dead processes too."""
    loop.is_over = True
    left = asyncio.all_tasks(loop)
    for task in left:
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.wait(left, timeout=5.0))
