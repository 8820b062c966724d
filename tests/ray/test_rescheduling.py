"""The scheduler's tick on a live cluster: sequences move to a replica that came later."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.rpc.lookup import ensure_cluster, forget_actor, get_actor, scheduler_name
from quadriga.checkpoint.exits import ExitParams
from quadriga.core.request import FinishReason
from quadriga.errors import QuadrigaError
from quadriga.policies.ares.forecast import REMAINING, rows_of
from quadriga.policies.ares.recording import read_ticks, replay
from quadriga.policies.scaling_need import remaining_work
from tests.ray.apps import App
from tests.ray.ingress import Ingress, call
from tests.ray.moves import HELD_STEP_S, free_memory, hold, order, pause, set_pace
from tests.waiting import wait_until

PACE = "ares-qwen7b-4090d-short"
NUM_SEQUENCES = 6
NUM_OUTPUT = 1_200


@pytest.fixture(scope="module")
def growing(ray_cluster: None, recording: Path) -> Iterator[App]:
    """One decode replica at first; its steps grow with the tokens it holds."""
    app = App.start(
        "growing",
        **{
            "decode_replicas": 1,
            "decode.pace": PACE,
            "engine.max_model_len": 1280,
            "scheduler.ares.mode": "ares",
            "scheduler.ares.interval_s": 0.5,
            "scheduler.ares.record_file": str(recording),
            "lifecycle.orphan_timeout_s": 300.0,
        },
    )
    yield app
    app.stop()


def view(app: App) -> dict[str, Any]:
    """What operators see; empty while there is no scheduler."""
    name = scheduler_name(app.name)
    try:
        found: dict[str, Any] = call(name, "operators_view", timeout_s=10.0)
    except QuadrigaError:
        forget_actor(name)
        return {}
    return found


def outcome(decision: dict[str, Any]) -> str | None:
    """What came of it; None while it is under way."""
    report = decision["report"]
    return None if report is None else report["outcome"]


def moved(app: App) -> int:
    count: int = view(app).get("outcomes", {}).get("moved", 0)
    return count


@pytest.mark.timeout(300)
def test_sequences_move_to_a_replica_that_came_later(growing: App, recording: Path) -> None:
    """And neither a move nor the death of the scheduler that ordered it loses a token."""
    ingress = growing.ingress()
    streams = [
        ingress.submit([5 + i] * 12, NUM_OUTPUT, deadline_s=240.0) for i in range(NUM_SEQUENCES)
    ]
    ingress.until(lambda: all(len(s.tokens) > 2 for s in streams))
    assert {s.replica for s in streams} == set(growing.replicas("decode"))
    growing.config |= {"decode_replicas": 2}
    ensure_cluster(growing.config)  # and go on polling while the other one starts
    ingress.until(lambda: moved(growing) >= 1, 90.0)
    decision = next(d for d in view(growing)["recent"] if outcome(d) == "moved")
    assert decision["cause"] == "balance" and decision["remaining_tokens"] > 0
    ray_kill(scheduler_name(growing.name))
    ingress.until(lambda: bool(view(growing)), 30.0)
    for name in growing.replicas("decode"):  # it has served its purpose
        set_pace(name, None)
    ingress.finish(*streams, timeout_s=200.0)
    assert [s.error for s in streams] == [None] * NUM_SEQUENCES
    assert {s.finish for s in streams} == {FinishReason.LENGTH}
    assert all(len(s.token_ids) == NUM_OUTPUT for s in streams)
    assert len({s.replica for s in streams}) == 2
    for name in growing.replicas("decode"):
        set_pace(name, PACE)
    growing.until_idle()
    wait_until(lambda: growing.metric("quadriga_migrations_ordered_total") >= 1.0, 20.0)
    ticks = list(read_ticks(recording))
    assert sum(len(tick.orders) for tick in ticks) >= 1
    assert replay(ticks) == [], "what was decided live is decided again from the recording"


@pytest.mark.timeout(200)
def test_real_answers_are_predicted_and_placed_by_their_length(growing: App) -> None:
    """Placement by forecast: prompts whose answers differ in length, ended by the model itself."""
    before = growing.replicas("decode")
    growing.ensure(**{"decode_replicas": 2, "scheduler.placement": "ares"})
    ingress = growing.ingress()
    streams = [
        ingress.submit(prompt, 300, ignore_eos=False, deadline_s=120.0)
        for prompt in ([20, 30, 40], [20, 31, 41], [22, 33, 44], [24, 35, 46])
    ]
    ingress.finish(*streams, timeout_s=120.0)
    assert [s.error for s in streams] == [None] * len(streams)
    assert all(s.token_ids for s in streams)
    growing.until_idle()
    decode = [r for r in view(growing)["replicas"] if r["role"] == "decode"]
    assert sorted(r["name"] for r in decode) == sorted(before), "nothing was restarted for it"
    assert all(r["forecast"] and r["has_predictions"] for r in decode)


@pytest.mark.timeout(240)
def test_who_stands_in_host_memory_is_moved_where_there_is_room(growing: App) -> None:
    growing.ensure(decode_replicas=2)
    ingress = growing.ingress()
    give_up_s = time.monotonic() + 90.0
    while True:
        decisions = paused_and_moved(growing, ingress)
        # It may have been on its way before it was paused, or over; and it may move on later.
        if decisions and decisions[0] != ("balance", "moved"):
            break
        assert time.monotonic() < give_up_s, decisions
    assert decisions[:1] == [("memory", "moved")], decisions
    growing.until_idle()


def paused_and_moved(growing: App, ingress: Ingress) -> list[tuple[str, str]]:
    """Pause one of four, wait until it is elsewhere; what the scheduler did with it, and why.

    Nothing where it could not be paused.
    """
    streams = [ingress.submit([7 + i] * 10, 300, deadline_s=100.0) for i in range(4)]
    ingress.until(lambda: all(len(s.tokens) > 2 for s in streams))
    standing = streams[0]
    source = standing.replica
    is_paused = pause(source, standing.state.sequence_id)
    ingress.until(lambda: not is_paused or standing.replica != source, 30.0)
    free_memory(source)
    ingress.finish(*streams, timeout_s=60.0)
    assert [s.error for s in streams] == [None] * len(streams)
    assert all(len(s.token_ids) == 300 for s in streams)

    def mine() -> list[dict[str, Any]]:
        recent = view(growing)["recent"]
        return [d for d in recent if d["sequence_id"] == standing.state.sequence_id]

    wait_until(lambda: all(outcome(d) for d in mine()), 30.0, mine)
    return [(d["cause"], outcome(d) or "") for d in mine()] if is_paused else []


def ray_kill(name: str) -> None:
    """Kill an actor's process; Ray starts it anew."""
    import ray

    ray.kill(get_actor(name), no_restart=False)
    forget_actor(name)


@pytest.mark.timeout(240)
def test_of_fewer_replicas_the_one_with_the_least_work_goes(growing: App) -> None:
    """It has the lower number and more tokens to come, which run a quarter of the layers."""
    growing.ensure(**{"decode_replicas": 2, "scheduler.ares.mode": "off"})
    ingress = growing.ingress()
    first, last = sorted(growing.replicas("decode"))
    for name in (first, last):
        hold(name, HELD_STEP_S)
    shallow = [
        ingress.submit([9 + i] * 10, 1_100, deadline_s=200.0, exits=ExitParams(0.5, "bounded", 2))
        for i in range(2)
    ]
    deep = [ingress.submit([20 + i] * 10, 700, deadline_s=200.0) for i in range(2)]
    ingress.until(lambda: all(len(s.tokens) > 2 for s in (*shallow, *deep)))
    for stream, there in (*((s, first) for s in shallow), *((s, last) for s in deep)):
        if stream.replica != there:
            report = call(stream.replica, "migrate", order(stream, stream.replica, there))
            assert report.outcome == "moved", report

    def left() -> list[tuple[float, float]]:
        """Tokens to come of both, and the same by the layers that they run."""
        loads = call(scheduler_name(growing.name), "loads", timeout_s=10.0)
        known = {s.info.name: s for s in loads if s.forecast is not None}
        tokens = {n: rows_of(s.forecast)[:, REMAINING].sum() for n, s in known.items()}
        return [(tokens[n], remaining_work(known[n])) for n in (first, last)]

    def is_split() -> bool:
        (tokens, work), (fewer, more) = left()
        return tokens > fewer and 0.0 < work < more

    ingress.until(is_split, 30.0)
    growing.config |= {"decode_replicas": 1}
    ensure_cluster(growing.config)
    ingress.until(lambda: growing.replicas("decode") == [last], 90.0)
    hold(last, 0.0)
    set_pace(last, None)
    ingress.finish(*shallow, *deep, timeout_s=150.0)
    assert [s.error for s in (*shallow, *deep)] == [None] * 4
    assert {s.replica for s in (*shallow, *deep)} == {last}
    told = [d["explanation"]["text"] for d in view(growing)["recent"] if d["source"] == first]
    found = re.search(rf"the work left: {first} (\d+), {last} (\d+)$", told[-1])
    assert found is not None and 0 < int(found[1]) < int(found[2]), told
    growing.until_idle()


@pytest.mark.timeout(240)
def test_a_busy_replica_that_goes_hands_over_what_it_runs(growing: App) -> None:
    """No stream ends or loses a token; what moved them is known with its reason."""
    growing.ensure(**{"decode_replicas": 2, "scheduler.ares.mode": "off"})
    ingress = growing.ingress()
    streams = [ingress.submit([9 + i] * 10, 1_000, deadline_s=200.0) for i in range(6)]
    ingress.until(lambda: all(len(s.tokens) > 2 for s in streams))
    ids, here = {s.state.sequence_id for s in streams}, {s.replica for s in streams}
    assert len(here) == 2, "both are busy"
    growing.config |= {"decode_replicas": 1}
    ensure_cluster(growing.config)
    ingress.until(lambda: len({s.replica for s in streams if not s.finish}) == 1, 60.0)
    (left,) = {s.replica for s in streams if not s.finish}
    (gone,) = here - {left}
    set_pace(left, None)
    ingress.finish(*streams, timeout_s=150.0)
    assert [s.error for s in streams] == [None] * len(streams)
    assert all(len(s.token_ids) == 1_000 for s in streams)

    def drained() -> list[dict[str, Any]]:
        recent = view(growing)["recent"]
        mine = [d for d in recent if d["sequence_id"] in ids]
        return [d for d in mine if d["cause"] == "drain" and outcome(d) == "moved"]

    wait_until(lambda: bool(drained()), 20.0, drained)
    assert {(d["source"], d["destination"]) for d in drained()} == {(gone, left)}
    assert all(d["explanation"]["by"] == "controller" for d in drained())
    growing.until_idle()
