"""Ray as Quadriga's actors see it, over processes in virtual time.

Actors, their handles and errors, placement groups and the key-value store. Ray's own exceptions are
raised; calls and answers are pickled, so that nothing is shared by accident.
"""

from __future__ import annotations

import asyncio
import pickle
import random
from collections.abc import Callable
from typing import Any

from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from quadriga.errors import QuadrigaError
from tests.simulation.processes import CURRENT, WORLD, Process, ProcessEnded, Wires, outside

HEAD, NODES = "head", ("node-1", "node-2")
"""Where named actors and ingresses run; where replicas do."""
START_S = (0.2, 1.5)
"""From the wish for a process until it runs."""
REPLICA_COLONS = 3
"""In the name of a replica, and of nobody else."""
NOTICED_S = (0.05, 0.6)
"""From the death of a process until those who wait for it know."""
BROKEN_S = (1.0, 8.0)
"""From the loss of a message until the caller is told, where it is told at all."""
UNCHANGING = frozenset({str, bytes, int, float, bool, type(None)})
Packed = bytes | tuple[Any, ...]


class Actor:
    """What Ray knows of one actor.

    Attributes:
        process: The incarnation that runs, or is being started; None between two and after the end.
        instance: Of the class, once the constructor is through.
        is_over: It will not be started again.
    """

    def __init__(self, name: str, cls: type, args: Any, *, restarts: bool, node: str) -> None:
        self.name, self.cls, self.args = name, cls, args
        self.restarts, self.node = restarts, node
        self.process: Process | None = None
        self.instance: Any = None
        self.is_over = False
        self.waiting: dict[asyncio.Future[Any], None] = {}
        self.started: asyncio.Future[None] | None = None


class Handle:
    """An actor handle; calls are made by the process that runs now."""

    def __init__(self, ray: VirtualRay, actor: Actor) -> None:
        self._ray, self._actor = ray, actor

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        return _Method(self._ray, self._actor, method)

    def __reduce__(self) -> Any:
        raise TypeError("handles do not travel")


class _Method:
    def __init__(self, ray: VirtualRay, actor: Actor, name: str) -> None:
        self._ray, self._actor, self._name = ray, actor, name

    def remote(self, *args: Any) -> asyncio.Future[Any]:
        return self._ray.call(self._actor, self._name, args)


class _Class:
    """`ray.remote(cls)`."""

    def __init__(self, ray: VirtualRay, cls: type) -> None:
        self._ray, self._cls = ray, cls
        self._options: dict[str, Any] = {}

    def options(self, **options: Any) -> _Class:
        self._options = options
        return self

    def remote(self, *args: Any) -> Handle:
        options = self._options
        name = options["name"]
        found = self._ray.actors.get(name)
        if found is not None:
            if not options.get("get_if_exists"):
                raise ValueError(f"the name {name} is taken")
            return Handle(self._ray, found)
        restarts = options.get("max_restarts") == -1
        return self._ray.create(name, self._cls, args, restarts=restarts)


class VirtualRay:
    """One cluster.

    Args:
        rng: Decides how long things take.
        note: Is told what happens to processes.

    Attributes:
        actors: Those that live or will, by name.
        store: The key-value store.
        groups: States of placement groups by name.
        leaving: Nodes that will go, and when.
    """

    def __init__(self, rng: random.Random, wires: Wires, note: Callable[[str], None]) -> None:
        self._rng, self.wires, self._note = rng, wires, note
        self.actors: dict[str, Actor] = {}
        self.store: dict[bytes, bytes] = {}
        self.groups: dict[str, str] = {}
        self.leaving: dict[str, float] = {}
        self.num_calls = 0
        self.util = self

    # Processes

    def create(self, name: str, cls: type, args: Any, *, restarts: bool = False) -> Handle:
        """Start an actor; returns before it runs."""
        staying = [node for node in NODES if node not in self.leaving]
        node = self._rng.choice(staying) if name.count(":") == REPLICA_COLONS else HEAD
        actor = Actor(name, cls, pickle.dumps(args), restarts=restarts, node=node)
        self.actors[name] = actor
        outside(self._start, actor)
        return Handle(self, actor)

    def _start(self, actor: Actor) -> None:
        loop = asyncio.get_running_loop()
        process = actor.process = Process(actor.name)
        actor.instance = None
        actor.started = loop.create_future()
        process.at_death.append(lambda: self._died(actor, process))
        loop.call_later(
            self._rng.uniform(*START_S), outside, lambda: self._construct(actor, process)
        )

    def _construct(self, actor: Actor, process: Process) -> None:
        async def construct() -> None:
            made = actor.cls(*pickle.loads(actor.args))
            begin = getattr(made, "begin", None)
            if begin is not None:
                await begin()
            actor.instance = made
            if actor.started is not None and not actor.started.done():
                actor.started.set_result(None)

        if not process.is_dead:
            self.groups[actor.name] = "CREATED"
            process.spawn(construct())

    def _died(self, actor: Actor, process: Process) -> None:
        if actor.process is not process:
            return
        self._note(f"{actor.name} died")
        actor.process, actor.instance = None, None
        waiting, actor.waiting = actor.waiting, {}
        if not actor.restarts:
            actor.is_over = True
        loop = asyncio.get_running_loop()
        noticed_s = self._rng.uniform(*NOTICED_S)
        error: Exception = self.gone(actor)

        def notice() -> None:
            for future in waiting:
                _fail(future, error)
            if actor.is_over:
                if self.actors.get(actor.name) is actor:
                    del self.actors[actor.name]
            elif actor.process is None:
                self._start(actor)

        loop.call_later(noticed_s, outside, notice)

    def gone(self, actor: Actor) -> Exception:
        if actor.is_over:
            return ActorDiedError()
        return ActorUnavailableError(f"{actor.name} is being restarted", b"\0" * 16)

    def end(self, actor: Actor, *, for_good: bool) -> None:
        """Kill an actor's process."""
        actor.is_over = actor.is_over or for_good
        actor.restarts = actor.restarts and not for_good
        if actor.process is not None:
            actor.process.die()
        elif for_good and self.actors.get(actor.name) is actor:
            del self.actors[actor.name]

    def take_node(self, node: str) -> None:
        """A node goes, with all that runs there; another one comes under its name."""
        del self.leaving[node]
        for actor in list(self.actors.values()):
            if actor.node == node:
                self.end(actor, for_good=True)

    # Calls

    def call(self, actor: Actor, method: str, args: Any) -> asyncio.Future[Any]:
        """Make a call in the name of the process that runs."""
        caller = CURRENT.get()
        source = "world" if caller is None else caller.name
        data, what = _packed(args), args[0] if method == "call_many" else method
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.num_calls += 1
        outside(self._send, source, actor, method, what, data, future)
        return future

    def _send(
        self,
        source: str,
        actor: Actor,
        method: str,
        what: str,
        data: Packed,
        future: asyncio.Future[Any],
    ) -> None:
        loop = asyncio.get_running_loop()
        if actor.process is None:
            error = self.gone(actor)
            loop.call_later(0.001, _fail, future, error)
            return
        delay_s = self.wires.delay_s(source, actor.name, what)
        if delay_s is None:
            self._lost(actor, future)
            return
        actor.waiting[future] = None
        loop.call_later(delay_s, self._arrive, source, actor, method, what, data, future)

    def _lost(self, actor: Actor, future: asyncio.Future[Any]) -> None:
        """A message was lost: the caller is told late, or waits as long as it likes."""
        if self._rng.random() < 0.5:
            error = ActorUnavailableError(f"{actor.name} is not reachable", b"\0" * 16)
            asyncio.get_running_loop().call_later(
                self._rng.uniform(*BROKEN_S), _fail, future, error
            )

    def _arrive(
        self,
        source: str,
        actor: Actor,
        method: str,
        what: str,
        data: Packed,
        future: asyncio.Future[Any],
    ) -> None:
        process = actor.process
        if process is None:
            return  # whoever waits is told by `_died`

        async def carry_out() -> Any:
            if actor.instance is None and actor.started is not None:
                await actor.started
            return await getattr(actor.instance, method)(*_unpacked(data))

        task = process.spawn(carry_out())

        def answered(task: asyncio.Task[Any]) -> None:
            actor.waiting.pop(future, None)
            if task.cancelled():
                return
            error = task.exception()
            outcome = None if error is not None else _packed((task.result(),))
            delay_s = self.wires.delay_s(actor.name, source, what, is_answer=True)
            if delay_s is None:
                self._lost(actor, future)
                return
            loop = asyncio.get_running_loop()
            if error is not None:
                assert isinstance(error, Exception), error
                if not isinstance(error, QuadrigaError):
                    self._note(f"{method} of {actor.name} raised {error!r}")
                loop.call_later(delay_s, _fail, future, RayTaskError(method, "", error))
            else:
                loop.call_later(delay_s, _succeed, future, outcome)

        task.add_done_callback(answered, context=WORLD)

    # What `ray` has

    def remote(self, *args: Any, **options: Any) -> Any:
        if args:
            return _Class(self, args[0])
        return lambda function: function

    def get_actor(self, name: str, namespace: str | None = None) -> Handle:
        actor = self.actors.get(name)
        if actor is None:
            raise ValueError(f"there is no actor {name}")
        return Handle(self, actor)

    def kill(self, handle: Handle, *, no_restart: bool = True) -> None:
        outside(lambda: self.end(handle._actor, for_good=no_restart))
        process = CURRENT.get()
        if process is not None and process.is_dead:
            raise ProcessEnded

    def get_runtime_context(self) -> Any:
        process = CURRENT.get()
        assert process is not None
        actor = self.actors[process.name]
        return _RuntimeContext(Handle(self, actor), actor)

    def get_node_ip_address(self) -> str:
        return "10.0.0.1"

    def get_current_placement_group(self) -> Any:
        process = CURRENT.get()
        assert process is not None
        return process.name if process.name in self.groups else None

    def get_placement_group(self, name: str) -> str:
        if self.groups.get(name, "REMOVED") == "REMOVED":
            raise ValueError(f"Failed to look up placement group with name: {name}")
        return name

    def remove_placement_group(self, name: str) -> None:
        if name in self.groups:
            self.groups[name] = "REMOVED"
        actor = self.actors.get(name)
        if actor is not None:
            outside(lambda: self.end(actor, for_good=True))

    def placement_group_table(self, name: str | None = None) -> dict[str, Any]:
        found = {n: {"name": n, "state": s} for n, s in self.groups.items()}
        return found if name is None else found[name]

    def placement_group(self, bundles: Any, *, name: str, **_: Any) -> str:
        self.groups[name] = "PENDING"
        return name

    def list_named_actors(self, *, all_namespaces: bool) -> list[dict[str, str]]:
        return [{"name": name, "namespace": "quadriga"} for name in self.actors]

    def nodes(self) -> list[dict[str, Any]]:
        resources = {"CPU": 64.0, "memory": 1 << 36}
        return [{"NodeID": n, "Alive": True, "Resources": resources} for n in (HEAD, *NODES)]

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 64.0}


class _RuntimeContext:
    def __init__(self, handle: Handle, actor: Actor) -> None:
        self.current_actor = handle
        self._actor = actor

    def get_node_id(self) -> str:
        return self._actor.node

    def get_actor_name(self) -> str:
        return self._actor.name

    def get_actor_id(self) -> None:
        """As outside of an actor: calls stay with Ray, as there are no sockets here."""


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    """As of a reference: nobody has to look at it, least of all a caller that is dead."""
    if not future.done():
        future.set_exception(error)
        future.exception()


def _succeed(future: asyncio.Future[Any], data: Packed) -> None:
    if not future.done():
        future.set_result(_unpacked(data)[0])


def _packed(values: tuple[Any, ...]) -> Packed:
    """As values travel: pickled, unless nobody can change them."""
    return values if UNCHANGING.issuperset(map(type, values)) else pickle.dumps(values, 5)


def _unpacked(data: Packed) -> tuple[Any, ...]:
    values: tuple[Any, ...] = data if type(data) is tuple else pickle.loads(data)
    return values
