"""Processes of a cluster in one virtual-time event loop: they die, stand still and go on.

Everything a process does, a callback or a step of a task, runs in a context that names it. What a
dead process would do next is left out; what one that stands still would do waits until it goes on,
timers included, as after SIGSTOP and SIGCONT.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, ItemsView, Iterable
from contextvars import Context, ContextVar, copy_context
from typing import Any

from tests.simulation.virtual_time import VirtualHandle, VirtualLoop

CURRENT: ContextVar[Process | None] = ContextVar("process", default=None)
"""Whose code runs; None: the world's own."""


WORLD = Context()
"""A context in which no process runs."""


def outside(action: Callable[..., object], *args: object) -> None:
    """Do something as the world, not as the process that runs."""
    WORLD.copy().run(action, *args)


class ProcessEnded(BaseException):
    """Raised where a process ends itself at once: nothing after it runs."""


class Process:
    """One process.

    Attributes:
        is_dead: It was ended; for good, as another incarnation is another `Process`.
        skew_s: What its wall clock is ahead of the others'.
        drift: What it gains on them a second, from `drifts_from_s` on.
        is_full: It gets no more memory.
        handles, used_s: Its cache of Ray's actor handles, by name, and when each was last used.
        at_death: Called when it dies, by the world.
        asked_to_go: What it does at SIGTERM; None: it dies.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_dead = False
        self.skew_s = self.drift = self.drifts_from_s = 0.0
        self.is_full = False
        self.handles: dict[Any, Any] = {}
        self.used_s: dict[Any, Any] = {}
        self.look_ups: dict[Any, Any] = {}
        self.at_death: list[Callable[[], None]] = []
        self.asked_to_go: Callable[[], None] | None = None
        self._is_still = False
        self._due: list[VirtualHandle] = []
        context = copy_context()
        context.run(CURRENT.set, self)
        self._context = context

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a task of this process."""
        loop = asyncio.get_running_loop()
        return loop.create_task(coroutine, context=self._context.copy())

    def call(self, callback: Callable[[], object]) -> None:
        """Have this process call something soon."""
        asyncio.get_running_loop().call_soon(callback, context=self._context.copy())

    def die(self) -> None:
        """As by SIGKILL; harmless twice."""
        if self.is_dead:
            return
        self.is_dead = True
        self._due.clear()
        for callback in self.at_death:
            outside(callback)

    def stop(self) -> None:
        """As by SIGSTOP."""
        self._is_still = True

    def go_on(self) -> None:
        """As by SIGCONT: what came due meanwhile comes in its order."""
        self._is_still = False
        due, self._due = self._due, []
        loop: Any = asyncio.get_running_loop()
        loop.run_again(due)

    def takes(self, handle: VirtualHandle) -> bool:
        """Whether something due may run now; kept for later where the process stands still."""
        if self._is_still and not self.is_dead:
            self._due.append(handle)
        return not (self._is_still or self.is_dead)


class ProcessLoop(VirtualLoop):
    """A virtual-time loop that knows whose code it runs."""

    owner = CURRENT

    def end(self) -> None:
        """Run all that is due from now on, that of dead processes too: tasks are taken down."""
        self.owner = VirtualLoop.owner

    def run_again(self, handles: Iterable[VirtualHandle]) -> None:
        """What came due while its process stood still is due now."""
        self._due.extend(handles)


class PerProcess(dict[Any, Any]):
    """A module's dictionary of which each process has its own."""

    def __init__(self, attribute: str) -> None:
        super().__init__()
        self._attribute = attribute
        self._of_the_world: dict[Any, Any] = {}

    def _own(self) -> dict[Any, Any]:
        process = CURRENT.get()
        return self._of_the_world if process is None else getattr(process, self._attribute)

    def __contains__(self, key: object) -> bool:
        return key in self._own()

    def __getitem__(self, key: Any) -> Any:
        return self._own()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._own()[key] = value

    def get(self, key: Any, default: Any = None) -> Any:
        return self._own().get(key, default)

    def pop(self, key: Any, default: Any = None) -> Any:
        return self._own().pop(key, default)

    def items(self) -> ItemsView[Any, Any]:
        return self._own().items()


NEVER = (0.0, 0.0)


class Wires:
    """How long messages between processes take, and which are lost.

    Args:
        rng: Decides.
    """

    FASTEST_S, SLOWEST_S = 0.0002, 0.003

    def __init__(self, rng: random.Random, now_s: Callable[[], float]) -> None:
        self._rng = rng
        self._now_s = now_s
        self._cut: dict[tuple[str, str], float] = {}
        self._slow: dict[str, tuple[float, float]] = {}
        self._lossy: dict[str, tuple[float, float]] = {}
        self._arrived: dict[tuple[str, str], float] = {}
        self._unanswered: dict[str, float] = {}
        self._late: dict[str, tuple[float, float]] = {}

    def lose_answers(self, method: str, until_s: float) -> None:
        """Calls of a method arrive until then, and their answers do not."""
        self._unanswered[method] = until_s

    def delay_calls(self, method: str, until_s: float, by_s: float) -> None:
        """Calls of a method that are made until then arrive so much later, after others."""
        self._late[method] = (until_s, by_s)

    def cut(self, source: str, destination: str, until_s: float) -> None:
        """Nothing that `source` sends reaches `destination` until then."""
        self._cut[source, destination] = until_s

    def slow_down(self, name: str, until_s: float, by_s: float) -> None:
        """What `name` sends takes up to so much longer."""
        self._slow[name] = (until_s, by_s)

    def lose(self, name: str, until_s: float, share: float) -> None:
        """So many of the messages to and from `name` are lost."""
        self._lossy[name] = (until_s, share)

    def delay_s(
        self, source: str, destination: str, method: str = "", *, is_answer: bool = False
    ) -> float | None:
        """Seconds until a message sent now arrives; None: it never does.

        Messages of one source to one destination arrive in their order, but for calls that
        `delay_calls` holds back.
        """
        now_s, rng = self._now_s(), self._rng
        if is_answer and now_s < self._unanswered.get(method, 0.0):
            return None
        until_s, by_s = self._late.get(method, NEVER)
        if not is_answer and now_s < until_s:
            return rng.uniform(0.0, by_s)
        if self._lossy:
            for name in (source, destination):
                until_s, share = self._lossy.get(name, NEVER)
                if now_s < until_s and rng.random() < share:
                    return None
        arrives_s = now_s + rng.uniform(self.FASTEST_S, self.SLOWEST_S)
        until_s, by_s = self._slow.get(source, NEVER)
        if now_s < until_s:
            arrives_s += rng.uniform(0.0, by_s)
        way = (source, destination)
        mended_s = self._cut.get(way, 0.0)
        if now_s < mended_s:
            if rng.random() < 0.5:
                return None
            arrives_s = mended_s + rng.uniform(0.0, 1.0)
        arrives_s = max(arrives_s, self._arrived.get(way, 0.0))
        self._arrived[way] = arrives_s
        return arrives_s - now_s
