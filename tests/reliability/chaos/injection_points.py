"""How a moment is reached: nothing is struck before it is truly there."""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from loadgen.wire.capture import now_s
from tests.reliability.chaos.fault_matrix import IN_TRANSIT, MIGRATION, Cell, Moment, Victim
from tests.reliability.cluster.actor_patches import GO, HELD
from tests.reliability.cluster.agent_client import AgentError
from tests.reliability.cluster.stages import Process, ServiceUnderTest

MIN_TOKENS, MAX_TOKENS = 3, 60
"""Output of a sequence that is to move: it decodes, and will for longer than the move takes."""
REACHED_TIMEOUT_S = 20.0
HOLD_LIMIT_S = 12.0
LOOK_EVERY_S = 0.01
SHALLOW, DEEP = 4, 8
OTHER_MODEL, OTHER_DEPTH = "quadriga-l", 12
RESTORE_TIMEOUT_S = 60.0


class NotReached(Exception):
    """The moment did not come: the cell was not run."""


@dataclass(slots=True)
class InjectionPoint:
    """What is there when it is struck.

    Attributes:
        parts: Replica by its part: source, destination, or the one that changes.
        tasks: Orders under way; how they end is part of the cell.
        held: Where the protocol is held, if it is.
    """

    parts: dict[Victim, str] = field(default_factory=dict)
    tasks: list[asyncio.Task[str]] = field(default_factory=list)
    held: Path | None = None

    def let_go(self) -> None:
        """Let what is held go on."""
        if self.held is not None:
            (self.held / GO).touch()


@asynccontextmanager
async def at_injection_point(
    under_test: ServiceUnderTest,
    cell: Cell,
    rng: random.Random,
    *,
    number: int,
    within_s: float,
) -> AsyncIterator[InjectionPoint]:
    """Wait for the cell's moment; the streams have just been sent.

    Args:
        number: Of the run, where a moment has two sides that are struck in turn.
        within_s: A blow before the first token is struck so soon after the streams were sent.

    Raises:
        NotReached: It did not come.
    """
    injection = InjectionPoint()
    folder = Path(tempfile.mkdtemp(prefix="quadriga-hold-"))
    try:
        if cell.moment is Moment.BEFORE_FIRST_TOKEN:
            await asyncio.sleep(rng.uniform(0.0, within_s))
        elif cell.moment is Moment.MID_STREAM:
            await asyncio.sleep(rng.uniform(0.4, 1.2))
        elif cell.moment in MIGRATION:
            await _begin_migration(under_test, cell, injection, rng, folder, number)
        elif cell.moment is Moment.RESIZE:
            await _begin_resize(under_test, cell, injection, rng, folder)
        else:
            await _begin_switch(under_test, injection)
        yield injection
    except AgentError as exc:
        raise NotReached(str(exc)) from exc
    finally:
        injection.let_go()
        for task in injection.tasks:
            with suppress(AgentError, TimeoutError):
                await asyncio.wait_for(task, HOLD_LIMIT_S)
        if cell.moment is Moment.SWITCH:
            await _restore(under_test, "switch", "decode", 0, None, 0)
        await asyncio.to_thread(shutil.rmtree, folder, True)


async def make_deep(under_test: ServiceUnderTest) -> str:
    """Give all replicas that serve their layers back. Returns what is wrong; empty: nothing."""
    give_up_s = now_s() + RESTORE_TIMEOUT_S
    while True:
        try:
            names = [
                n
                for role in ("prefill", "decode")
                for n in await under_test.agent.call("serving", role)
            ]
            shallow = [
                n for n in names if (await under_test.agent.call("depth_class", n))[1] != DEEP
            ]
            for name in shallow:
                await under_test.agent.call("resize", name, DEEP)
            if not shallow:
                return ""
            trouble = f"still shallow: {shallow}"
        except AgentError as exc:
            trouble = str(exc)
        if now_s() > give_up_s:
            return trouble
        await asyncio.sleep(0.5)


async def candidates(under_test: ServiceUnderTest) -> dict[str, list[str]]:
    """Decode replicas, each with its sequences that could move now."""
    found: dict[str, list[str]] = {}
    for replica in await under_test.agent.call("serving", "decode"):
        running = await under_test.agent.call("running", replica)
        found[replica] = [s for s, n in running if MIN_TOKENS <= n <= MAX_TOKENS]
    return found


async def _begin_migration(
    under_test: ServiceUnderTest,
    cell: Cell,
    injection: InjectionPoint,
    rng: random.Random,
    folder: Path,
    number: int,
) -> None:
    give_up_s = now_s() + REACHED_TIMEOUT_S
    while True:
        here = await candidates(under_test)
        if len(here) > 1 and any(here.values()):
            break
        if now_s() > give_up_s:
            raise NotReached("no sequence decodes that could move")
        await asyncio.sleep(LOOK_EVERY_S)
    source = max(here, key=lambda name: len(here[name]))
    destination = rng.choice([name for name in here if name != source])
    injection.parts |= {Victim.SOURCE: source, Victim.DESTINATION: destination}
    if cell.fault in IN_TRANSIT:
        return  # the transport is harmed first, then things move
    points = {Moment.RESERVE: "reserve", Moment.COPY: "copy"}
    point = points.get(cell.moment, ("commit", "committed")[number % 2])
    at = source if point == "copy" else destination
    await under_test.agent.call("do", at, "hold", point, str(folder), HOLD_LIMIT_S)
    injection.held = folder
    while True:
        move = under_test.agent.call("migrate", rng.choice(here[source]), source, destination)
        injection.tasks.append(asyncio.create_task(move))
        try:
            await _until_held(injection, folder)
            return
        except NotReached as exc:  # of a sequence that the scheduler moves already: another one
            here = await candidates(under_test)
            if "under_way" not in str(exc) or not here.get(source) or now_s() > give_up_s:
                raise


async def _begin_resize(
    under_test: ServiceUnderTest,
    cell: Cell,
    injection: InjectionPoint,
    rng: random.Random,
    folder: Path,
) -> None:
    is_prefill = cell.victim is Victim.PREFILL and not cell.is_struck_first
    role = "prefill" if is_prefill else "decode"
    await asyncio.sleep(rng.uniform(0.3, 0.8))
    is_busy = role == "decode" and not cell.is_struck_first
    serving = await under_test.agent.call("serving", role)
    replica = await _busy(under_test, rng) if is_busy else rng.choice(serving)
    injection.parts[Victim(role)] = replica
    await under_test.agent.call("do", replica, "hold", "change", str(folder), HOLD_LIMIT_S)
    injection.held = folder
    injection.tasks.append(asyncio.create_task(under_test.agent.call("resize", replica, SHALLOW)))
    await _until_held(injection, folder)


async def _begin_switch(under_test: ServiceUnderTest, injection: InjectionPoint) -> None:
    """A place of decode is given to the other model; its new process is loading when struck."""
    old = next(n for n in await under_test.agent.call("serving", "decode") if ":decode:0:" in n)
    injection.parts[Victim.DECODE] = old
    await under_test.agent.call("switch", "decode", 0, OTHER_MODEL, OTHER_DEPTH)
    give_up_s = now_s() + REACHED_TIMEOUT_S
    while now_s() < give_up_s:
        status = await under_test.agent.call("status")
        here = [r for r in status["replicas"] if ":decode:0:" in r["name"] and r["name"] != old]
        if here:
            return
        await asyncio.sleep(LOOK_EVERY_S)
    raise NotReached("no process of the other model was started")


async def _restore(under_test: ServiceUnderTest, verb: str, *args: object) -> None:
    """Give an order that must not be lost; the controller may be away for a while."""
    give_up_s = now_s() + RESTORE_TIMEOUT_S
    while True:
        try:
            await under_test.agent.call(verb, *args)
            return
        except AgentError:
            if now_s() > give_up_s:
                raise
        await asyncio.sleep(0.5)


async def _until_held(injection: InjectionPoint, folder: Path) -> None:
    give_up_s = now_s() + REACHED_TIMEOUT_S
    while not (folder / HELD).exists():
        if injection.tasks[-1].done():
            raise NotReached(f"it ended before: {injection.tasks[-1].result()}")
        if now_s() > give_up_s:
            raise NotReached("the protocol did not come to the step")
        await asyncio.sleep(LOOK_EVERY_S)


async def _busy(under_test: ServiceUnderTest, rng: random.Random) -> str:
    """A decode replica that has streams. Raises: OrderFailed: None has any."""
    give_up_s = now_s() + REACHED_TIMEOUT_S
    while now_s() < give_up_s:
        names = await under_test.agent.call("serving", "decode")
        busy: list[str] = []
        for name in names:
            with suppress(AgentError):  # of an earlier cell it may die only now
                busy += [name] if await under_test.agent.call("running", name) else []
        if busy:
            return rng.choice(busy)
        await asyncio.sleep(LOOK_EVERY_S)
    raise AgentError("no decode replica has a stream")


async def victim(
    under_test: ServiceUnderTest, cell: Cell, injection: InjectionPoint, rng: random.Random
) -> Process:
    """The processes that the fault hits. Raises: OrderFailed."""
    part = cell.victim
    if part is Victim.NODE:
        part = Victim.SOURCE if cell.moment in MIGRATION else Victim.DECODE
    if part in injection.parts:
        return await under_test.process(injection.parts[part])
    kind = "decode" if part in (Victim.SOURCE, Victim.DESTINATION) else part.value
    if kind == "decode" and cell.moment is Moment.MID_STREAM:
        return await under_test.process(await _busy(under_test, rng))
    if kind in ("prefill", "decode"):
        return await under_test.process(rng.choice(await under_test.agent.call("serving", kind)))
    head = under_test.nodes.cluster.nodes[0].address if under_test.nodes is not None else None
    return rng.choice([p for p in await under_test.processes(kind) if p.node != head])
