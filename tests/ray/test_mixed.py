"""Mixed replicas: prompts are computed and decoded in one process, and moves go on as before."""

from __future__ import annotations

import os
import random
import signal
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from actors.rpc.lookup import scheduler_name
from quadriga.checkpoint.exits import ExitParams
from quadriga.core.request import FinishReason
from quadriga.core.routing import AdmitRequest
from quadriga.errors import Overloaded, ReplicaDied, Unavailable
from quadriga.llm import LLM
from quadriga.scheduling.transfer.rebuild import num_prefill_tokens
from tests.ray.apps import App, app_fixture, pids
from tests.ray.ingress import Ingress, Stream, call
from tests.ray.moves import HELD_STEP_S, Mover, held, hold, open_books, order
from tests.waiting import wait_until

NUM_OUTPUT = 60
NUM_LONG = 700


SETTINGS: dict[str, Any] = {
    "scheduler.ares.mode": "off",  # moves are ordered by the tests alone
    "decode.max_slots": 8,
    "prefill.chunk_tokens": 64,
    "deterministic": True,
    "engine.compile": "wait",  # the kernels compute a row alike in any batch
    "lifecycle.orphan_timeout_s": 300.0,
}

mixed_app = app_fixture("mixed", mixed_replicas=2, **SETTINGS)
"""Two mixed replicas of a model with exits, to the bit the same in any batch."""


@pytest.fixture
def mixed(mixed_app: App) -> App:
    mixed_app.until_ready()
    mixed_app.until_idle(20.0)
    return mixed_app


def submit(ingress: Ingress, count: int, num_output: int = NUM_OUTPUT) -> list[Stream]:
    """Streams greedy and seeded, with exits and without, of one chunk and of several."""
    rng = random.Random(5)
    streams = []
    for i in range(count):
        sampling: dict[str, Any] = {} if i % 2 else {"temperature": 0.8, "seed": i}
        streams.append(
            ingress.submit(
                [rng.randrange(5, 500) for _ in range(rng.randrange(4, 300))],
                num_output,
                deadline_s=200.0,
                exits=ExitParams(threshold=0.9 if i % 3 else 1.0),
                **sampling,
            )
        )
    return streams


def assert_said_alone(streams: list[Stream]) -> None:
    """What one process says that holds the whole model."""
    llm = LLM("quadriga-s", deterministic=True, **{"engine.compile": "wait"})
    states = [replace(s.state, output_ids=[], exit_layers=[]) for s in streams]
    for state in states:
        llm.loop.submit(state)
    while llm.loop.has_work:
        llm.loop.step()
    assert [s.error for s in streams] == [None] * len(streams)
    assert {s.finish for s in streams} == {FinishReason.LENGTH}
    assert [s.token_ids for s in streams] == [s.output_ids for s in states]


@pytest.mark.timeout(300)
def test_answers_are_those_of_the_engine_alone(mixed: App) -> None:
    """More than there are slots for, so that some wait for a row; nothing is handed over."""
    ingress = mixed.ingress()
    streams = submit(ingress, 24)
    ingress.finish(*streams, timeout_s=200.0)
    assert [s.moved_to for s in streams] == [[]] * 24
    assert {s.replica for s in streams} == set(mixed.replicas("mixed")), "both were used"
    assert_said_alone(streams)
    mixed.until_idle()


@pytest.mark.timeout(300)
def test_sequences_move_between_mixed_replicas(mixed: App) -> None:
    mover = Mover(mixed.ingress(), mixed.replicas("mixed"), random.Random(6))
    with held(mover.replicas):
        streams = submit(mover.ingress, 6, NUM_LONG)
        mover.ingress.until(lambda: all(len(s.tokens) > 2 for s in streams), 120.0)
        for stream in streams:
            (other,) = set(mover.replicas) - {stream.replica}
            report = call(stream.replica, "migrate", order(stream, stream.replica, other))
            assert report.outcome == "moved", report
    mover.ingress.finish(*streams, timeout_s=200.0)
    assert all(len(s.moved_to) == 1 for s in streams)
    assert_said_alone(streams)
    mixed.until_idle()
    assert [open_books(name) for name in mover.replicas] == [(0, 0)] * 2


@pytest.mark.timeout(300)
def test_cancelling_queued_computed_and_running_sequences_frees_everything(mixed: App) -> None:
    ingress, names = mixed.ingress(), mixed.replicas("mixed")
    with held(names):
        streams = submit(ingress, 30, NUM_LONG)
        ingress.until(lambda: any(s.first_token_s is not None for s in streams), 120.0)
        loads = [(s.num_running, s.num_waiting) for s in mixed.snapshots()]
        assert any(running for running, _ in loads) and any(waiting for _, waiting in loads)
        ingress.cancel(*streams)
    mixed.until_idle()


@pytest.mark.timeout(300)
def test_a_deadline_ends_one_that_waits_for_a_row(mixed: App) -> None:
    ingress, names = mixed.ingress(), mixed.replicas("mixed")
    with held(names):
        holders = [ingress.submit([5] * 20, 1_900, deadline_s=250.0) for _ in range(16)]
        ingress.until(lambda: all(s.first_token_s is not None for s in holders), 120.0)
        late = ingress.submit([6] * 20, 4, deadline_s=1.0)
        ingress.finish(late, timeout_s=60.0)
        assert late.error is not None and late.error.code == "deadline_exceeded"
        ingress.cancel(*holders)
    mixed.until_idle()


@pytest.mark.timeout(300)
def test_a_replica_that_dies_is_replaced_and_its_sequences_are_rebuilt(mixed: App) -> None:
    lose_one(mixed, mixed.replicas("mixed"), NUM_LONG)


def lose_one(
    app: App, names: list[str], num_output: int, process: Callable[[str], str] = str
) -> str:
    """Kill a process of a replica: its streams are rebuilt, all say what they say alone, and a
    successor comes. Returns the replica's name."""
    ingress = app.ingress()
    for name in names:
        hold(name, HELD_STEP_S)
    streams = [
        ingress.submit([5 + i] * 40, num_output, deadline_s=250.0, temperature=i % 2, seed=i)
        for i in range(4)
    ]
    ingress.until(lambda: all(len(s.tokens) > 2 for s in streams), 120.0)
    victim = streams[0].replica
    os.kill(pids(app.name)[process(victim)], signal.SIGKILL)
    lost = [s for s in streams if s.replica == victim]
    ingress.until(lambda: all(s.is_over for s in lost), 60.0)
    (survivor,) = set(names) - {victim}
    hold(survivor, 0.0)
    assert {s.error.code for s in lost if s.error is not None} == {"replica_died"}
    again = [rebuild(ingress, stream) for stream in lost]
    going = again + [s for s in streams if s not in lost]
    ingress.finish(*going, timeout_s=200.0)
    assert_said_alone(going)
    wait_until(lambda: victim not in {r["name"] for r in app.status()["replicas"]}, 60.0)
    app.until_ready()
    app.until_idle()
    return victim


def rebuild(ingress: Ingress, lost: Stream) -> Stream:
    """Submit a lost stream of full depth with what it has said, as the service's ingress does."""
    depth = call(scheduler_name(ingress.app), "directory").snapshots[0].info.depth_class.depth
    said = lost.token_ids
    state = replace(
        lost.state,
        sequence_id=uuid.uuid4().hex,
        epoch=1,
        output_ids=said,
        exit_layers=[depth] * len(said),
    )
    request = AdmitRequest(
        state.sequence_id,
        ingress.model,
        num_prefill_tokens(state),
        state.sampling.max_tokens - len(said),
        0,
        state.deadline_unix_s,
        is_rebuild=True,
    )
    replica: list[str] = []

    def is_admitted() -> bool:
        try:
            (admission,) = call(scheduler_name(ingress.app), "admit", [request])
            replica[:] = [admission.prefill_replica]
            call(replica[0], "submit", state)
        except (Overloaded, Unavailable, ReplicaDied):
            return False
        return True

    wait_until(is_admitted, 60.0)
    stream = Stream(state, replica[0], tokens=dict(lost.tokens))
    ingress.streams[state.sequence_id] = stream
    return stream


@pytest.mark.timeout(300)
def test_a_replica_that_drains_hands_its_sequences_over(mixed: App) -> None:
    ingress, names = mixed.ingress(), mixed.replicas("mixed")
    with held(names):
        streams = submit(ingress, 4, NUM_LONG)
        ingress.until(lambda: all(len(s.tokens) > 2 for s in streams), 120.0)
        source = streams[0].replica
        (other,) = set(names) - {source}
        leaving = [s for s in streams if s.replica == source]
        reports = call(source, "hand_over", other)
        assert [r.outcome for r in reports] == ["moved"] * len(leaving)
    ingress.finish(*streams, timeout_s=200.0)
    assert_said_alone(streams)
    mixed.until_idle()
