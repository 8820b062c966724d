"""Replicas of two ranks: their answers, moves between them, and what a lost rank takes with it."""

from __future__ import annotations

import os
import random
import signal

import pytest

from quadriga.control.replica_names import rank_name
from tests.ray.apps import App, app_fixture, pids
from tests.ray.ingress import call
from tests.ray.moves import Mover, held, open_books, order
from tests.ray.test_mixed import SETTINGS, assert_said_alone, lose_one, submit
from tests.waiting import wait_until

NUM_OUTPUT = 120


ranked_app = app_fixture(
    "ranked", **{"engine.tensor_parallel": 2, "engine.resources_cpus": 0.05, **SETTINGS}
)
"""A prefill replica and two decode replicas, each of two ranks."""


@pytest.fixture
def ranked(ranked_app: App) -> App:
    ranked_app.until_ready()
    ranked_app.until_idle(20.0)
    return ranked_app


@pytest.mark.timeout(300)
def test_answers_are_those_of_one_rank_wherever_they_move(ranked: App) -> None:
    mover = Mover(ranked.ingress(), ranked.replicas("decode"), random.Random(6))
    names = {rank_name(n, 1) for n in (*mover.replicas, *ranked.replicas("prefill"))}
    processes = pids(ranked.name)
    assert names < set(processes), "each replica has a second process"
    with held(mover.replicas):
        streams = submit(mover.ingress, 6, NUM_OUTPUT)
        mover.ingress.until(lambda: all(len(s.tokens) > 2 for s in streams), 120.0)
        for name in names:  # as a machine that goes down does; the replica ends them
            os.kill(processes[name], signal.SIGTERM)
        for stream in streams:
            (other,) = set(mover.replicas) - {stream.replica}
            report = call(stream.replica, "migrate", order(stream, stream.replica, other))
            assert report.outcome == "moved", report
    mover.ingress.finish(*streams, timeout_s=200.0)
    assert all(len(s.moved_to) == 2 for s in streams), "from prefill, and to the other"
    assert_said_alone(streams)
    ranked.until_idle()
    assert [open_books(name) for name in mover.replicas] == [(0, 0)] * 2


@pytest.mark.timeout(300)
def test_a_rank_that_dies_takes_its_replica_along_and_streams_are_rebuilt(ranked: App) -> None:
    victim = lose_one(
        ranked, ranked.replicas("decode"), NUM_OUTPUT, lambda name: rank_name(name, 1)
    )
    wait_until(lambda: rank_name(victim, 1) not in pids(ranked.name), 30.0)
    assert len([name for name in pids(ranked.name) if name.endswith(":rank1")]) == 3
