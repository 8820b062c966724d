"""How a service on this machine ends: its requests, its actors, Serve, Ray."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

from quadriga.config.loader import QuadrigaConfig
from quadriga.errors import QuadrigaError, ReplicaDied
from serve_app.cli.ray_processes import RayProcesses

POLL_INTERVAL_S = 0.2
STEP_TIMEOUT_S = 20.0
END_TIMEOUT_S = 120.0
"""For all steps after the drain; each has a shorter limit of its own."""
RAY_END_TIMEOUT_S = 5.0
"""Ray's workers end a moment after Ray."""
DRAIN_SLACK_S = 5.0
"""For answers, errors among them, to be written to their clients after the drain's time."""
HURRIED_DRAIN_S = 2.0
HURRIED_END_TIMEOUT_S = 4.0
LINGER_S = 0.5
"""From an ingress's last write until the client has it, by way of Serve's proxy."""
PROXY_PREFIX = "SERVE_PROXY_ACTOR"


class Drain:
    """The time in which open requests may end.

    Attributes:
        num_requests: Open ones; None until the ingresses have answered.
        is_hurried: They were ended before the time was up.
    """

    def __init__(self, limit_s: float) -> None:
        self.num_requests: int | None = None
        self.is_hurried = False
        self._end_s = time.monotonic() + limit_s

    @property
    def left_s(self) -> float:
        """Seconds until requests are ended in an error."""
        return max(0.0, self._end_s - time.monotonic())

    def end_now(self) -> None:
        self.is_hurried = True
        self._end_s = time.monotonic()


class LocalStop:
    """Ends a service once.

    The steps run in a thread, because a step hangs for a minute where Ray is gone, and cannot be
    interrupted. The caller looks after it.

    Args:
        drains: Whether there may be requests: Serve was up.
    """

    def __init__(
        self,
        config: QuadrigaConfig,
        processes: RayProcesses,
        progress: Callable[[str], None],
        *,
        drains: bool,
    ) -> None:
        self._config = config
        self._processes = processes
        self._progress = progress
        self._drains = drains
        self._is_hurried = threading.Event()
        self._is_drained = threading.Event()
        self._is_ending_ray = threading.Event()
        self._is_ended = threading.Event()

    def run(self, report: Callable[[Drain], None], is_hurried: Callable[[], bool]) -> bool:
        """As `LocalService.stop`."""
        import ray

        if not ray.is_initialized():
            return self._processes.kill()
        steps = threading.Thread(target=self._end_in_order, args=(report,), daemon=True)
        give_up_s = time.monotonic() + self._config.lifecycle.drain_timeout_s + END_TIMEOUT_S
        if not self._lost_process():
            steps.start()
        while steps.is_alive() and not self._lost_process() and time.monotonic() < give_up_s:
            steps.join(POLL_INTERVAL_S)
            if is_hurried() and not self._is_hurried.is_set():
                self._is_hurried.set()
                # Once the requests have ended, there is nothing left to wait for.
                left_s = 0.0 if self._is_drained.is_set() else HURRIED_END_TIMEOUT_S
                give_up_s = time.monotonic() + left_s
        if self._is_ended.is_set():
            self._processes.await_end(RAY_END_TIMEOUT_S)
            return True
        if lost := self._lost_process():
            self._progress(f"Ray's {lost} is gone, and the service with it")
        elif not self._is_hurried.is_set():
            self._progress("the service did not end in time and is killed")
        self._processes.kill()
        return False

    def _lost_process(self) -> str:
        return "" if self._is_ending_ray.is_set() else self._processes.ended()

    def _end_in_order(self, report: Callable[[Drain], None]) -> None:
        """All steps, or those that are still due before the rest is killed."""
        import ray

        asyncio.run(self._end_on_loop(report))
        if self._is_drained.is_set():
            self._is_ending_ray.set()
            ray.shutdown(wait_for_processes=True)
            self._is_ended.set()

    async def _end_on_loop(self, report: Callable[[Drain], None]) -> None:
        """All that goes before Ray's end; Serve shuts its handles down in the loop they are of."""
        if self._drains:
            await self._drain(report)
        if self._is_hurried.is_set():
            await asyncio.sleep(LINGER_S)
            return
        self._is_drained.set()
        await asyncio.to_thread(self._end_actors)
        await self._end_serve()

    async def _drain(self, report: Callable[[Drain], None]) -> None:
        """Have the ingresses take nothing new, and wait until they have answered what they have.

        They do it, and not Serve: its proxy answers 404 as soon as Serve stops an application.
        """
        drain = Drain(self._config.lifecycle.drain_timeout_s)
        report(drain)
        try:
            await self._drained(drain, report)
        except TimeoutError:
            self._progress("running requests were not ended in time")
        except Exception as exc:  # Serve has no common base for what fails here
            self._progress(f"running requests were not ended in order: {exc}")

    async def _drained(self, drain: Drain, report: Callable[[Drain], None]) -> None:
        """Raises: TimeoutError, and what Serve raises."""
        from ray import serve

        from serve_app.app import INGRESS

        ingresses = serve.get_deployment_handle(INGRESS, self._config.name)
        give_up_s = time.monotonic() + drain.left_s + DRAIN_SLACK_S
        while True:
            if self._is_hurried.is_set() and drain.left_s > 0:
                drain.end_now()
                give_up_s = time.monotonic() + HURRIED_DRAIN_S
            answers = await ingresses.broadcast("drain", drain.left_s).results_async(
                timeout_s=max(POLL_INTERVAL_S, give_up_s - time.monotonic()),
                return_exceptions=True,  # an ingress that died has no requests any more
            )
            drain.num_requests = sum(count for count in answers if isinstance(count, int))
            report(drain)
            if drain.num_requests == 0:
                return
            if time.monotonic() > give_up_s:
                raise TimeoutError
            await asyncio.sleep(POLL_INTERVAL_S)

    def _end_actors(self) -> None:
        """End replicas, scheduler and controller."""
        import ray

        from actors.rpc.lifecycle import controller_name
        from actors.rpc.lookup import NAMESPACE, get_actor

        name = controller_name(self._config.name)
        give_up_s = time.monotonic() + STEP_TIMEOUT_S
        try:
            controller: Any = get_actor(name)
            ray.get(controller.stop.remote(), timeout=STEP_TIMEOUT_S)
            while time.monotonic() < give_up_s:
                ray.get_actor(name, namespace=NAMESPACE)
                time.sleep(POLL_INTERVAL_S)
        except (ReplicaDied, ValueError):
            pass  # there is no controller any more, so there are no actors
        except (QuadrigaError, ray.exceptions.RayError, RuntimeError) as exc:
            self._progress(f"the actors did not stop in order: {exc}")

    async def _end_serve(self) -> None:
        from ray import serve

        try:
            await asyncio.to_thread(_end_proxies)
            await serve.shutdown_async()  # type: ignore[no-untyped-call]
        except Exception as exc:  # Serve has no common base for what fails here
            self._progress(f"Serve did not stop in order: {exc}")


def _end_proxies() -> None:
    """End Serve's proxies: a client finds a closed port, not a proxy without routes."""
    import ray

    from actors.rpc.lifecycle import SERVE_NAMESPACE

    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] != SERVE_NAMESPACE or not actor["name"].startswith(PROXY_PREFIX):
            continue
        try:
            proxy: Any = ray.get_actor(actor["name"], namespace=SERVE_NAMESPACE)
            ray.get(proxy.shutdown.remote(), timeout=STEP_TIMEOUT_S)  # of HAProxy's own process
            ray.kill(proxy, no_restart=True)
        except (ray.exceptions.RayError, ValueError):
            continue  # Serve ends it all the same
