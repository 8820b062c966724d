"""All processes' counters and their last ten minutes, and the copy that outlives the controller."""

from __future__ import annotations

import asyncio
import logging

from actors.controller import controller_store
from actors.rpc.ray_rpc import RAY_FAILED
from quadriga import malloc
from quadriga.background import background
from quadriga.clock import Clock
from quadriga.observability.load_history import INTERVAL_S, LoadHistory
from quadriga.observability.metrics import MetricsHub

logger = logging.getLogger(__name__)

KEEP_EVERY_S = 10.0
KEEP_TIMEOUT_S = 2.0
"""Nobody waits longer for the store; a write that is under way goes on."""


class MetricsPage:
    """What every process pushed last, the dead ones' counters included; on one event loop.

    Attributes:
        hub: The figures.
        history: Speed and latencies of the last ten minutes, sampled by `sample_forever`.
        is_restored: An earlier controller's values are among them, or lost.
    """

    def __init__(self, app: str, clock: Clock) -> None:
        self.hub = MetricsHub()
        self.history = LoadHistory()
        self.is_restored = asyncio.Event()
        self._app = app
        self._clock = clock
        self._kept_s = clock.now_s()
        self._writing = asyncio.Lock()
        self._waiting: asyncio.Task[None] | None = None  # to write, behind another that does
        self._is_over = False
        malloc.share_arenas()  # threads take turns at the dumps

    def push(self, source: str, families: bytes) -> None:
        """Take a process's metrics, as `metrics.Registry.snapshot` packs them."""
        self.hub.push(source, families, now_s=self._clock.now_s())

    async def show(self) -> bytes:
        """The page, in Prometheus' format.

        Its values are stored first, so that no counter falls when this process dies thereafter.
        """
        page = self.hub.exposition(now_s=self._clock.now_s())
        await self.keep()
        return page

    async def sample_forever(self) -> None:
        """Sample the history at every interval's end, once earlier values are restored."""
        await self.is_restored.wait()
        while not self._is_over:
            await asyncio.sleep(INTERVAL_S - self._clock.unix_s() % INTERVAL_S)
            try:
                self.history.sample(
                    self.hub, now_s=self._clock.now_s(), now_unix_s=self._clock.unix_s()
                )
            except Exception:  # a border: this loop is not awaited, and the next sample may succeed
                logger.exception("the load history was not sampled")

    async def restore(self) -> None:
        """Load the values that an earlier controller stored."""
        try:
            dump = await asyncio.to_thread(controller_store.load, self._app, "metrics")
            if dump is not None:
                self.hub.restore(dump, now_s=self._clock.now_s())
            dump = await asyncio.to_thread(controller_store.load, self._app, "load_history")
            if dump is not None:
                self.history.restore(dump)
        except RAY_FAILED as exc:
            logger.warning("earlier counters are lost: %s", exc)
        finally:
            self.is_restored.set()

    @property
    def is_due(self) -> bool:
        """Whether values were last stored a while ago."""
        return self._clock.now_s() - self._kept_s > KEEP_EVERY_S

    async def keep(self) -> None:
        """Store counters and history, as of now, for a successor of this process."""
        self._kept_s = self._clock.now_s()
        if self._waiting is None:
            self._waiting = background(self._write())
        try:
            async with asyncio.timeout(KEEP_TIMEOUT_S):
                await asyncio.shield(self._waiting)
        except TimeoutError:
            logger.warning("the counters are not stored yet: Ray's store does not answer")

    async def _write(self) -> None:
        """Write once the writer before is done: its values are older, and must not come last."""
        async with self._writing:
            self._waiting = None
            if self._is_over:
                return
            save, app = controller_store.save, self._app
            try:
                dump = await asyncio.to_thread(self.hub.dump)
                await asyncio.to_thread(save, app, "metrics", dump)
                await asyncio.to_thread(save, app, "load_history", self.history.dump())
            except RAY_FAILED as exc:
                logger.warning("the counters were not stored: %s", exc)
            malloc.trim()  # of the dump, which grows with the cluster

    async def close(self) -> None:
        """Keep nothing any more; no writer is under way afterwards, unless Ray's store hangs."""
        self._is_over = True
        await self.keep()
