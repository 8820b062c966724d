"""Orders to move running sequences, given while a test polls its streams."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from actors.rpc.lookup import get_actor
from actors.rpc.ray_rpc import from_ray
from quadriga.config.pacing import PacedDevice, PaceProfile, find_profile
from quadriga.core.migration import MigrationCause, MigrationOrder, MigrationReport
from quadriga.core.replica import DepthClass
from quadriga.errors import QuadrigaError
from quadriga.scheduling.paced_runner import PacedRunner
from tests.ray.ingress import Ingress, Stream, call
from tests.waiting import wait_until

UNPACED = PaceProfile("unpaced", 0.0, 0.0, 0.0, "as fast as it goes")
HELD_STEP_S = 0.1
"""Hundreds of tokens take most of a minute."""


def class_of(replica: str) -> DepthClass:
    found: DepthClass = call(replica, "info").depth_class
    return found


def order(
    stream: Stream, source: str, destination: str, depth_class: DepthClass | None = None
) -> MigrationOrder:
    """An order to move a stream's sequence."""
    return MigrationOrder(
        sequence_id=stream.state.sequence_id,
        depth_class=depth_class or class_of(source),
        source=source,
        destination=destination,
        cause=MigrationCause.BALANCE,
        gain=0.1,
        num_tokens=0,
        remaining_tokens=0.0,
    )


def open_books(replica: str) -> tuple[int, int]:
    """(transfers that come, migrations that go) of a replica."""

    def look(actor: Any) -> tuple[int, int]:
        return actor.receiver.leases.num_open, len(actor.migrations.under_way)

    actor: Any = get_actor(replica)
    found: tuple[int, int] = ray.get(actor.__ray_call__.remote(look), timeout=10)
    return found


def pause(replica: str, sequence_id: str) -> bool:
    """Pause a sequence, and let nobody come back from host memory there.

    Returns:
        False where it does not run there (any more).
    """

    def begin(actor: Any) -> None:
        actor.has_paused = None

        def fill(core: Any) -> None:
            core.loop.preemption._resume_one = lambda: False
            actor.has_paused = core.loop.preemption.pause(sequence_id)

        actor.engine._inbox.put(fill)

    def has_paused() -> bool | None:
        found: bool | None = ray.get(
            actor.__ray_call__.remote(lambda replica: replica.has_paused), timeout=10
        )
        return found

    actor: Any = get_actor(replica)
    ray.get(actor.__ray_call__.remote(begin), timeout=10)
    wait_until(lambda: has_paused() is not None, 20.0)
    return bool(has_paused())


def free_memory(replica: str) -> None:
    """Let the paused come back again."""

    def free(actor: Any) -> None:
        del actor.engine.core.loop.preemption._resume_one

    actor: Any = get_actor(replica)
    ray.get(actor.__ray_call__.remote(free), timeout=10)


def set_pace(replica: str, pace: str | None) -> None:
    """Change the pace of a paced replica; without one it goes as fast as it can."""
    set_device(replica, UNPACED if pace is None else find_profile(pace))


def hold(replica: str, step_s: float) -> None:
    """Have a live replica, paced or not, wait so long before each step; 0: as it is by itself."""

    def change(actor: Any) -> None:
        core = actor.engine.core
        vars(core).pop("step", None)
        if step_s > 0.0:
            step = core.step

            def wait_and_step() -> None:
                time.sleep(step_s)
                step()

            core.step = wait_and_step

    actor: Any = get_actor(replica)
    ray.get(actor.__ray_call__.remote(change), timeout=30)


@contextmanager
def held(replicas: Iterable[str], step_s: float = HELD_STEP_S) -> Iterator[None]:
    """Hold replicas in this block: what they run outlasts what a busy machine does meanwhile."""
    names = list(replicas)
    for name in names:
        hold(name, step_s)
    try:
        yield
    finally:
        for name in names:
            hold(name, 0.0)


def set_device(replica: str, device: PacedDevice) -> None:
    """Change the device that a paced replica steps like."""

    def change(actor: Any) -> None:
        runner = actor.engine.core.runner
        assert isinstance(runner, PacedRunner)
        runner.device = device

    actor: Any = get_actor(replica)
    ray.get(actor.__ray_call__.remote(change), timeout=30)


@dataclass
class Mover:
    """Moves streams at random, several at once.

    Attributes:
        reports: What came of the orders so far.
        errors: What orders to replicas that died ended in.
    """

    ingress: Ingress
    replicas: list[str]
    rng: random.Random
    reports: list[MigrationReport] = field(default_factory=list)
    errors: list[QuadrigaError] = field(default_factory=list)
    _under_way: dict[Any, str] = field(default_factory=dict)  # the call → the source
    _class: DepthClass | None = None

    def start(self, stream: Stream, destination: str) -> None:
        """Give an order and do not wait for its end."""
        source = stream.replica
        if self._class is None:
            self._class = class_of(source)
        made = order(stream, source, destination, self._class)
        self._under_way[get_actor(source).migrate.remote(made)] = source

    def start_some(self, streams: list[Stream], at_once: int) -> None:
        """Keep so many moves under way at every replica that has streams that decode."""
        speaking = [
            s
            for s in streams
            if len(s.tokens) > 1
            and not s.is_over
            and not s.next_owners
            and s.replica in self.replicas
        ]
        self.rng.shuffle(speaking)
        for stream in speaking:
            if list(self._under_way.values()).count(stream.replica) < at_once:
                others = [name for name in self.replicas if name != stream.replica]
                self.start(stream, self.rng.choice(others))

    def collect(self) -> None:
        """Take the reports that are there."""
        if not self._under_way:
            return
        done, _ = ray.wait(list(self._under_way), num_returns=len(self._under_way), timeout=0)
        for ref in done:
            source = self._under_way.pop(ref)
            try:
                self.reports.append(ray.get(ref))
            except (RayTaskError, RayActorError) as exc:
                self.errors.append(from_ray(source, "migrate", exc))

    def wait(self, timeout_s: float = 20.0) -> None:
        """Poll until every order has come to its end."""
        give_up = time.monotonic() + timeout_s
        while self._under_way:
            assert time.monotonic() < give_up, "orders without an end"
            self.ingress.poll()
            self.collect()

    @property
    def outcomes(self) -> Counter[str]:
        return Counter(report.outcome for report in self.reports)

    @property
    def reasons(self) -> Counter[str]:
        return Counter(f"{r.outcome} {r.reason.split(':')[0]}".strip() for r in self.reports)
