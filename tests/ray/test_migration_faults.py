"""Source or destination dies or stops at a step of a migration or a hand-off: exactly once."""

from __future__ import annotations

import random
import signal
import time
from contextlib import suppress
from typing import Any

import pytest
from ray.exceptions import RayError

from quadriga.core.request import FinishReason
from quadriga.errors import QuadrigaError, ReplicaDied
from tests.ray.apps import App, app_fixture, pids
from tests.ray.ingress import Ingress, Stream
from tests.ray.moves import Mover, set_pace
from tests.ray.stopping import (
    DESTINATION_POINTS,
    SOURCE_POINTS,
    arm,
    go_on,
    has_lost_answer,
    lose_answer,
)
from tests.waiting import wait_until


def hard_ones_first(points: tuple[str, ...]) -> list[Any]:
    """Around the commit it is hardest; to die elsewhere is left to `make test-slow`."""
    early, late = points[:2], points[2:]
    return [*late, *(pytest.param(point, marks=pytest.mark.slow) for point in early)]


PROMPT = list(range(7, 60))
NUM_SHORT = 12
NUM_OUTPUT = 600  # 9 s: nobody stands still for so long
PACE = "steady-15ms"
STOPPED_S = 3.5
KILL, STOP = signal.SIGKILL, signal.SIGSTOP


fragile = app_fixture(
    "fragile",
    **{
        "decode_replicas": 3,
        "scheduler.ares.mode": "off",  # moves are ordered by the tests alone
        "decode.pace": PACE,
        "engine.compile": "wait",
        "transport.deadline_s": 4.0,
        "transport.lease_s": 2.0,
        "lifecycle.heartbeat_interval_s": 2.0,
        "lifecycle.orphan_timeout_s": 300.0,
    },
)
"""Three paced decode replicas, so that a stream lasts longer than what befalls it."""


@pytest.fixture(scope="module")
def expected(fragile: App) -> list[int]:
    set_pace_of_all(fragile, None)
    ingress = fragile.ingress()
    stream = ingress.submit(PROMPT, NUM_OUTPUT)
    ingress.finish(stream)
    return stream.token_ids


def set_pace_of_all(app: App, pace: str | None) -> None:
    """Of all decode replicas but those that start or end."""
    for name in app.replicas("decode"):
        with suppress(QuadrigaError, RayError):
            set_pace(name, pace)


class Case:
    """One stream that decodes, and where it is to move."""

    def __init__(self, app: App) -> None:
        app.until_ready()
        app.until_idle()
        set_pace_of_all(app, PACE)
        self.app = app
        self.ingress: Ingress = app.ingress()
        self.stream: Stream = self.ingress.submit(PROMPT, NUM_OUTPUT)
        self.ingress.until(lambda: len(self.stream.tokens) > 5)
        self.mover = Mover(self.ingress, app.replicas("decode"), random.Random(0))
        self.source = self.stream.replica
        self.destination = next(n for n in self.mover.replicas if n != self.source)
        self.pids = pids(app.name)

    def run(self, victim: str, point: str, signal_number: int) -> None:
        """Give the order; the victim is stopped for a while, or dead for good.

        Then there is nothing left to wait for: who is left goes as fast as it can.
        """
        self._strike(victim, point, signal_number)
        set_pace_of_all(self.app, None)

    def _strike(self, victim: str, point: str, signal_number: int) -> None:
        arm(victim, point, signal_number)
        self.mover.start(self.stream, self.destination)
        pid = self.pids[victim]
        if signal_number == KILL:
            self.ingress.until(lambda: victim not in pids(self.app.name))
            return
        self.ingress.until(lambda: is_stopped(pid))
        started_s = time.monotonic()
        self.ingress.until(lambda: time.monotonic() - started_s > STOPPED_S)
        go_on(pid)

    def end(self, expected: list[int]) -> None:
        """The stream ends well and whole, and nothing is left."""
        self.ingress.finish(self.stream, timeout_s=40.0)
        assert self.stream.error is None
        assert self.stream.finish is FinishReason.LENGTH
        assert self.stream.token_ids == expected
        self.mover.wait()
        self.app.until_ready()
        wait_until(lambda: bool(self.app.replicas("decode")), 20.0)
        self.app.until_idle(10.0)


def is_stopped(pid: int) -> bool:
    with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0] == "T"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("point", hard_ones_first(DESTINATION_POINTS))
def test_the_destination_dies(fragile: App, expected: list[int], point: str) -> None:
    """The source goes on, also where the destination had taken over and could not say so."""
    case = Case(fragile)
    case.run(case.destination, point, KILL)
    case.end(expected)
    assert case.stream.replica == case.source
    assert case.stream.moved_to[1:] == []
    (report,) = case.mover.reports
    assert report.outcome == ("refused" if point == "reserve" else "failed"), report


@pytest.mark.timeout(120)
@pytest.mark.parametrize("point", DESTINATION_POINTS)
def test_the_destination_stops_for_a_while(fragile: App, expected: list[int], point: str) -> None:
    case = Case(fragile)
    case.run(case.destination, point, STOP)
    case.end(expected)
    (report,) = case.mover.reports
    allowed = {
        "reserve": {"refused"},
        "store": {"moved", "failed"},
        "commit": {"moved", "failed", "unknown"},
        "committed": {"moved", "unknown"},
    }
    assert report.outcome in allowed[point], report
    if point == "committed":
        assert case.stream.replica == case.destination


@pytest.mark.timeout(120)
@pytest.mark.parametrize("point", hard_ones_first(SOURCE_POINTS))
def test_the_source_dies(fragile: App, expected: list[int], point: str) -> None:
    """Before the commit the ingress hears of it; afterwards the destination goes on."""
    case = Case(fragile)
    case.run(case.source, point, KILL)
    if point == "acknowledged":
        case.end(expected)
        assert case.stream.replica == case.destination
        return
    case.ingress.finish(case.stream, timeout_s=20.0)
    assert isinstance(case.stream.error, ReplicaDied)
    said = case.stream.token_ids
    assert said == expected[: len(said)]
    fragile.until_ready()
    fragile.until_idle(10.0)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("point", SOURCE_POINTS)
def test_the_source_stops_for_a_while(fragile: App, expected: list[int], point: str) -> None:
    case = Case(fragile)
    case.run(case.source, point, STOP)
    case.end(expected)
    (report,) = case.mover.reports
    allowed = {
        # Ray's look-up of the destination may fail by then, and KV come too late for it.
        "offer": {"moved", "refused", "failed"},
        "send": {"moved", "failed"},
        "committing": {"moved", "failed"},  # a starved destination lets the lease lapse later
        "acknowledged": {"moved"},
    }
    assert report.outcome in allowed[point], report


@pytest.mark.timeout(120)
def test_a_decode_replica_dies_as_it_takes_over_from_prefill(
    fragile: App, expected: list[int]
) -> None:
    """The prefill replica still has the sequence, and hands it to another one."""
    fragile.until_ready()
    fragile.until_idle()
    victim, ingress = fragile.replicas("decode")[0], fragile.ingress()
    arm(victim, "commit", KILL)
    streams = [ingress.submit(PROMPT, NUM_SHORT) for _ in range(6)]
    ingress.until(lambda: victim not in pids(fragile.name))
    ingress.until(lambda: all(s.moved_to[-1:] not in ([], [victim]) for s in streams))
    for stream in streams:
        stream.error = stream.orphaned = None  # it may have been told of a death, not of its end
    ingress.finish(*streams)
    assert [s.error for s in streams] == [None] * len(streams)
    assert [s.token_ids for s in streams] == [expected[:NUM_SHORT]] * len(streams)
    fragile.until_ready()
    fragile.until_idle(10.0)


@pytest.mark.timeout(120)
def test_a_hand_off_whose_acknowledgement_is_lost_is_not_doubled(
    fragile: App, expected: list[int]
) -> None:
    """The commit took effect and the answer never came: it is asked again."""
    fragile.until_ready()
    fragile.until_idle()
    replicas, ingress = fragile.replicas("decode"), fragile.ingress()
    for name in replicas:
        lose_answer(name)
    stream = ingress.submit(PROMPT, NUM_SHORT)
    ingress.finish(stream)
    assert [has_lost_answer(name) for name in replicas].count(True) == 1
    assert stream.error is None
    assert stream.token_ids == expected[:NUM_SHORT]
    fragile.until_idle(10.0)
