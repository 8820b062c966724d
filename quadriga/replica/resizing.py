"""A replica's depth changes while it serves: layers are loaded in the background, or let go.

    order ──▶ load, while it serves ──▶ wait for sequences in the way ──▶ change, between two steps
                    │                              │
                    ▼                              ▼
                  failed                        blocked       the old depth serves on

In the way of fewer layers are strict sequences that may need them (decode), and of any change the
prompts under way, whose KV has the same layers from the first token to the last (prefill).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from quadriga.clock import Clock
from quadriga.core.replica import ResizeOutcome, ResizeReport
from quadriga.errors import ConfigError, DeadlineExceeded, QuadrigaError

if TYPE_CHECKING:
    from quadriga.config.engine_spec import EngineSpec
    from quadriga.engine.model_runner import NativeRunner

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.02
MAX_HOLD_S = 5.0
"""Nothing new is begun for the sake of a change for this long at most; then it is tried again."""
ANSWER_SLACK_S = 10.0
"""Over a resize's deadline, for its report to arrive."""

Result = TypeVar("Result")


class ResizableEngine(Protocol):
    """What the change asks of a replica's core; on the engine's thread."""

    resizable: NativeRunner | None

    def in_the_way(self, depth: int) -> list[str]:
        """Sequences that must be gone before; nothing new is begun until `give_up` or `change`."""

    def change(self, depth: int, prepared: Any) -> list[str]:
        """Change the depth, or return the sequences that are in the way; then nothing has changed.

        Args:
            prepared: What `NativeRunner.prepare_depth` gave; None where layers go.

        Raises:
            ConfigError: It cannot be done; nothing has changed.
        """

    def give_up(self) -> None:
        """Give the change up: new sequences may begin again."""


class ResizingHost(Protocol):
    """The replica, as the change needs it; on its event loop."""

    @property
    def clock(self) -> Clock: ...

    async def on_engine(self, command: Callable[[Any], Result]) -> Result:
        """Run a command on the engine's thread between two steps."""

    def resized(self, engine: EngineSpec) -> None:
        """Report another depth from now on."""


class Resizing:
    """The changes of one replica's depth, one at a time."""

    def __init__(self, host: ResizingHost) -> None:
        self._host = host
        self._lock = asyncio.Lock()

    async def resize(self, depth: int, deadline_s: float) -> ResizeReport:
        """Change to `depth` layers within `deadline_s`; every ordinary end is reported.

        Raises:
            Unavailable: The weights are not loaded yet, or the engine is over.
        """
        if self._lock.locked():
            return ResizeReport("refused", "under_way: another change is under way")
        async with self._lock:
            return await _Change(self._host, depth, deadline_s).run()


class _Change:
    """One order on its way."""

    def __init__(self, host: ResizingHost, depth: int, deadline_s: float) -> None:
        self._host = host
        self._depth = depth
        self._began_s = host.clock.now_s()
        self._give_up_s = self._began_s + deadline_s
        self._held_s = 0.0
        self._before = 0
        self._before_bytes = 0

    @property
    def _left_s(self) -> float:
        return self._give_up_s - self._host.clock.now_s()

    async def run(self) -> ResizeReport:
        runner = await self._host.on_engine(lambda core: core.resizable)
        if runner is None:
            return self._report(
                "refused",
                "not_resizable: this engine runs its model as it is; only the native engine "
                "changes its depth while it serves",
            )
        self._before, self._before_bytes = runner.num_layers, weight_bytes(runner)
        if self._depth == self._before:
            return self._report("unchanged", "it holds so many layers", runner)
        if self._depth not in runner.depths:
            depths = ", ".join(map(str, runner.depths))
            why = f"no_such_depth: {self._depth} is none of the model's depths {depths}"
            return self._report("refused", why, runner)
        try:
            if self._depth < self._before:
                return await self._change(runner, None)
            prepared = await asyncio.to_thread(
                runner.prepare_depth, self._depth, timeout_s=max(0.001, self._left_s)
            )
            with prepared:
                return await self._change(runner, prepared)
        except (ConfigError, DeadlineExceeded) as exc:
            logger.warning("%d layers instead of %d: %s", self._depth, self._before, exc)
            return self._report("failed", f"{exc.code}: {exc.message}", runner)

    async def _change(self, runner: NativeRunner, prepared: Any) -> ResizeReport:
        """Wait for those in the way and change. Raises: ConfigError."""
        depth = self._depth
        while True:
            blockers = await self._wait_for_blockers()
            if not blockers:
                blockers = await self._host.on_engine(lambda core: core.change(depth, prepared))
                if not blockers:
                    break
            if self._left_s <= 0:
                await self._host.on_engine(lambda core: core.give_up())
                shown = ", ".join(blockers[:3])
                why = f"in_the_way: {len(blockers)} sequences need the layers, e.g. {shown}"
                return self._report("blocked", why, runner)
        self._host.resized(runner.spec)
        load_s = prepared.load_s if prepared is not None else 0.0
        return self._report("resized", "", runner, load_s)

    async def _wait_for_blockers(self) -> list[str]:
        """Return the sequences still in the way at the deadline, or after too long a wait."""
        depth, clock = self._depth, self._host.clock
        began_s = clock.now_s()
        try:
            while True:
                blockers = await self._host.on_engine(lambda core: core.in_the_way(depth))
                waited_s = clock.now_s() - began_s
                if not blockers or self._left_s <= 0:
                    return list(blockers)
                if waited_s > MAX_HOLD_S:
                    # Serve what came meanwhile for as long, then try again.
                    await self._host.on_engine(lambda core: core.give_up())
                    self._held_s += clock.now_s() - began_s
                    await asyncio.sleep(max(0.0, min(waited_s, self._left_s)))
                    began_s = clock.now_s()
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            self._held_s += clock.now_s() - began_s

    def _report(
        self,
        outcome: ResizeOutcome,
        reason: str,
        runner: NativeRunner | None = None,
        load_s: float = 0.0,
    ) -> ResizeReport:
        now_bytes = weight_bytes(runner) if runner is not None else 0
        return ResizeReport(
            outcome=outcome,
            reason=reason,
            before=self._before,
            depth=runner.num_layers if runner is not None else self._before,
            load_s=load_s,
            load_bytes=now_bytes - self._before_bytes,
            weight_bytes=now_bytes,
            kv_capacity_tokens=runner.kv_capacity_tokens if runner is not None else 0,
            held_s=self._held_s,
            took_s=self._host.clock.now_s() - self._began_s,
        )


def weight_bytes(runner: NativeRunner) -> int:
    """Memory of the layers and the embedding that a runner has loaded."""
    weights = runner.weights
    return weights.embed.nbytes + sum(layer.nbytes for layer in weights.layers)


def failure(error: QuadrigaError) -> ResizeReport:
    """The report of an order that its replica did not answer."""
    return ResizeReport("failed", f"{error.code}: {error.message}")
