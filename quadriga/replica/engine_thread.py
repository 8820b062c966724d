"""The thread that owns a runner and its loop; other threads send it commands through an inbox.

Forward passes hold this thread, never the event loop, so a replica answers calls while it loads
its weights or computes a long prompt.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

from quadriga.errors import QuadrigaError, ReplicaError, Unavailable
from quadriga.replica.gc_tuning import settle

logger = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0005
"""Every operation of a forward pass gives the interpreter away for a moment; with Python's own
5 ms the event loop could keep it that long each time."""
IDLE_STEP_S = 0.25
"""An idle loop is stepped this often, so that what waits in it can expire."""

Result = TypeVar("Result")


class EngineBroken(ReplicaError):
    """A command failed half-way: what the core holds cannot be relied on any more."""

    default_code = "engine_broken"


class StepLoop(Protocol):
    """What the thread drives: `PrefillLoop` and `DecodeLoop` as a replica runs them."""

    loop: Any

    @property
    def has_work(self) -> bool: ...

    def step(self) -> None: ...

    def publish(self) -> None:
        """Called after every round: make the load visible to other threads."""


Core = TypeVar("Core", bound=StepLoop)


class EngineThread(Generic[Core]):
    """Loads a core, then alternates between its inbox and its steps.

    Args:
        load: Makes the core; called on the thread, may take minutes.
        on_failure: Called on the event loop when loading or a step failed; the thread is over
            then, and so should the replica be.
        nice: Unix niceness of the thread, and of the threads that it starts, above that of the
            process; where the system has no niceness of threads, it is left as it is.

    Attributes:
        core: None until it is loaded.
        error: Why the engine is of no more use; None while it is.
    """

    def __init__(
        self, load: Callable[[], Core], on_failure: Callable[[QuadrigaError], None], nice: int = 0
    ) -> None:
        self._load = load
        self._nice = nice
        self._on_failure = on_failure
        self._inbox: queue.SimpleQueue[Callable[[Core], None] | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._is_stopping = self._is_over = False
        self.error: QuadrigaError | None = None
        self.core: Core | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        return self.core is not None and self.error is None and not self._is_stopping

    def require_core(self) -> Core:
        """The core, for calls that its contract allows from other threads.

        Raises:
            Unavailable: It is not loaded, or over.
        """
        if self.core is None or self.error is not None or self._is_stopping:
            state = "has failed" if self.error is not None else "is starting or stopping"
            raise Unavailable(f"the replica's engine {state}; retry shortly", retry_after_s=1.0)
        return self.core

    async def call(self, command: Callable[[Core], Result]) -> Result:
        """Run `command` on the thread between two steps and return what it returns.

        A caller that is cancelled does not undo the command.

        Raises:
            Unavailable: The engine is not loaded or is over.
            EngineBroken: The command left it in no state to go on: it is over, too.
            QuadrigaError: What the command raised.
        """
        self.require_core()
        future: asyncio.Future[Result] = self._loop.create_future()

        def run(core: Core) -> None:
            try:
                if self._is_over:
                    self.require_core()
                result = command(core)
                core.publish()  # before the caller acts on it
            except QuadrigaError as exc:
                self.post(_set_exception, future, exc)
                if isinstance(exc, EngineBroken):
                    raise
            except Exception as exc:  # the thread must go on; the caller gets the reason
                logger.exception("an engine command failed")
                self.post(_set_exception, future, ReplicaError(f"engine: {exc!r}"))
            else:
                self.post(_set_result, future, result)

        self._inbox.put(run)
        return await future

    def wake(self) -> None:
        """Let an idle thread look again whether there is work."""
        self._inbox.put(_nothing)

    def break_off(self, reason: str) -> None:
        """End the engine, from any thread: something that it needs is gone."""
        error = EngineBroken(reason)

        def fail(core: Core) -> None:
            raise error

        if self.core is not None:
            self._inbox.put(fail)
        elif self.error is None:  # it is loading, and may wait for what is gone
            self._fail(error)

    def stop(self) -> None:
        """Let the thread end after its step; commands still waiting fail."""
        self._is_stopping = True
        self._inbox.put(None)

    async def join(self, timeout_s: float) -> bool:
        """Wait for the end. Returns whether the thread is gone."""
        await asyncio.to_thread(self._thread.join, timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        yield_by(self._nice)
        try:
            core = self._load()
            settle()
            self.core = core
            core.publish()
            while not self._is_stopping:
                self._serve_inbox(core)
                core.publish()
        except QuadrigaError as exc:
            self._fail(exc)
        except Exception as exc:  # the border of the thread: no caller would ever see it
            self._fail(ReplicaError(f"the engine failed: {exc!r}"))
        self.post(self._finish_inbox)

    def _serve_inbox(self, core: Core) -> None:
        """One round: all waiting commands, then a step; idle, wait for the next command."""
        try:
            command = self._inbox.get(block=not core.has_work, timeout=IDLE_STEP_S)
            while command is not None:
                command(core)
                command = self._inbox.get_nowait()
        except queue.Empty:
            pass
        if not self._is_stopping:
            core.step()

    def _fail(self, error: QuadrigaError) -> None:
        logger.error("the engine is over: %s", error, exc_info=error)
        self.error = error
        self.post(self._on_failure, error)

    def _finish_inbox(self) -> None:
        """On the event loop, after the thread: callers that came too late are told so."""
        self._is_over = True
        while not self._inbox.empty():
            command = self._inbox.get()
            if command is not None and self.core is not None:
                with suppress(EngineBroken):  # it ended for another reason before
                    command(self.core)

    def post(self, callback: Callable[..., object], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            logger.info("the event loop is closed; %r is dropped", callback)


def yield_by(nice: int) -> None:
    """Raise the niceness of this thread, and of those that it starts."""
    if sys.platform == "linux" and nice:  # elsewhere niceness belongs to processes
        own = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) + nice)


def _nothing(core: object) -> None:
    """A command that changes nothing."""


def _set_result(future: asyncio.Future[Result], result: Result) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future[Result], exc: BaseException) -> None:
    if not future.done():
        future.set_exception(exc)
