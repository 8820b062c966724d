"""What a soak does to the service while it serves: moves, pauses, resizes and kills at random."""

from __future__ import annotations

import asyncio
import math
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Mapping

from tests.reliability.cluster.agent_client import AgentError
from tests.reliability.cluster.control import REPLICAS, ClusterControl
from tests.reliability.load.mixed_load import MixedLoad

WEIGHTS = {"migrate": 16.0, "resize": 1.5, "kill": 1.0}
MOVES = {"migrate": 1.0}
VICTIMS = ("decode", "prefill", "scheduler", "controller")
READY_TIMEOUT_S = 120.0
AFTER_KILL_S = 8.0
"""Nothing is harmed for a while after a death: failures faster than service are not promised."""
REBUILD_S = 15.0
RESIZE_KEEPS_S = 0.5
FAIR_TRIES = 3


class RandomFaults:
    """Harms one thing after the other, until it is cancelled; then call `settle`.

    Of each kind of replica the first is never killed, so that one process of each lives through
    the whole run and shows its memory.

    Args:
        every_s: Mean pause.
        note: Called with the name of what was done.
        weights: How often each kind of harm is done; first each in turn, until it succeeds.

    Attributes:
        done: How often each succeeded.
        failures: What should not have happened.
    """

    def __init__(
        self,
        control: ClusterControl,
        load: MixedLoad,
        rng: random.Random,
        *,
        every_s: float,
        note: Callable[[str], None] = lambda what: None,
        weights: Mapping[str, float] = WEIGHTS,
    ) -> None:
        self._control = control
        self._load = load
        self._rng = rng
        self._every_s = every_s
        self._note = note
        self._weights = weights
        self._full: dict[str, int] = {}  # layers of replicas that may lack some now
        self._spared: set[int] = set()
        self.done: Counter[str] = Counter()
        self.tried: Counter[str] = Counter()
        self.failures: list[str] = []

    async def run(self) -> None:
        """Harm, for ever."""
        self._spared = {min(self._control.pids(kind)) for kind in REPLICAS}
        while True:
            await asyncio.sleep(self._rng.expovariate(1.0 / self._every_s))
            todo = [w for w in self._weights if not self.done[w] and self.tried[w] <= FAIR_TRIES]
            what = (todo or self._rng.choices([*self._weights], [*self._weights.values()]))[0]
            self.tried[what] += 1
            try:
                await self._restore()
                if await getattr(self, f"_{what}")():
                    self.done[what] += 1
                    self._note(what)
            except (AgentError, TimeoutError):
                pass  # whom it was about died meanwhile; the next is another's

    async def settle(self) -> None:
        """Wait until all desired replicas are ready, and give them their layers back."""
        trouble = await self._control.until_ready(READY_TIMEOUT_S)
        if trouble:
            self.failures.append(f"the service is not whole again: {trouble}")
        try:
            await self._restore()
        except AgentError as exc:
            self.failures.append(f"{', '.join(self._full)} did not get layers back: {exc}")

    def never_done(self) -> list[str]:
        """What was tried several times, and never succeeded."""
        tried = (what for what, count in self.tried.items() if count > FAIR_TRIES)
        return [what for what in tried if not self.done[what]]

    async def _migrate(self) -> bool:
        replicas = await self._control.replicas("decode")
        agent = self._control.agent
        classes = {name: await agent.call("depth_class", name) for name in replicas}
        for source in self._rng.sample(replicas, len(replicas)):
            others = [n for n in replicas if n != source and classes[n] == classes[source]]
            running = [name for name, _ in await agent.call("running", source)] if others else []
            if running:
                destination = self._rng.choice(others)
                said = await agent.call("migrate", self._rng.choice(running), source, destination)
                outcome = said.split()[0]
                self.done[f"move {outcome}"] += 1
                return bool(outcome == "moved")
        return False

    async def _pause(self) -> bool:
        """Have a decode replica take a sequence to host memory, and back when it has room."""
        agent = self._control.agent
        for replica in await self._control.replicas("decode"):
            if running := await agent.call("running", replica):
                return bool(await agent.call("pause", replica, self._rng.choice(running)[0]))
        return False

    async def _resize(self) -> bool:
        """Take layers from a decode replica, and give them back: now, or before the next harm."""
        replicas = await self._control.replicas("decode")
        if not replicas:
            return False
        replica = self._rng.choice(replicas)
        full = self._full[replica] = await self._depth(replica)
        self._load.excuse(math.inf)
        await self._control.agent.call("resize", replica, max(1, full // 2))
        dropped = await self._depth(replica)
        await asyncio.sleep(self._rng.uniform(0.0, RESIZE_KEEPS_S))
        await self._restore()
        return dropped != full

    async def _restore(self) -> None:
        """Give replicas that live the layers back that they lack. Raises: AgentError."""
        if not self._full:
            return
        status = await self._control.agent.call("status")
        for replica, full in list(self._full.items()):
            if any(one["name"] == replica for one in status["replicas"]):
                said = await self._control.agent.call("resize", replica, full)
                if await self._depth(replica) != full:
                    self.failures.append(f"{replica} did not get its layers back: {said}")
                    continue
            del self._full[replica]  # a successor has all layers
        self._load.excuse_until_now()

    async def _depth(self, replica: str) -> int:
        _, depth = await self._control.agent.call("depth_class", replica)
        return int(depth)

    async def _kill(self) -> bool:
        kind = self._rng.choice(VICTIMS)
        pids = [pid for pid in self._control.pids(kind) if pid not in self._spared]
        if not pids:
            return False
        os.kill(self._rng.choice(pids), signal.SIGKILL)
        self.done[f"kill {kind}"] += 1
        await asyncio.sleep(AFTER_KILL_S)
        trouble = await self._control.until_ready(READY_TIMEOUT_S, may_change=True)
        if trouble:
            self.failures.append(f"no successor of a {kind} that was killed: {trouble}")
        await asyncio.sleep(self._rng.uniform(0.0, REBUILD_S))
        return True
