"""Processes die, hang and come back; what must go on goes on, and nothing is doubled or left.

`make chaos QUICK=1` does more to them in CI: it kills and stops replicas, scheduler and controller.
"""

from __future__ import annotations

import os
import signal

import pytest

from actors.controller import controller_store as kept
from actors.rpc.lookup import controller_name, ensure_cluster, scheduler_name
from quadriga.errors import ReplicaDied
from quadriga.observability.metrics import parse_exposition
from quadriga.policies.liveness import MIN_SILENCE_S
from tests.ray.apps import App, is_running, living_groups, pids
from tests.ray.ingress import call
from tests.waiting import wait_until

NUM_LONG = 1_900


def kill(app: App, name: str) -> int:
    pid = pids(app.name)[name]
    os.kill(pid, signal.SIGKILL)
    return pid


def test_death_of_a_decode_replica(app: App) -> None:
    """Its streams end in an error, at once; the others go on; a successor comes."""
    ingress = app.ingress()
    streams = [ingress.submit([5 + i] * 20, NUM_LONG, deadline_s=120.0) for i in range(6)]
    ingress.until(lambda: all(len(s.tokens) > 2 for s in streams))
    victim = streams[0].replica
    doomed = [s for s in streams if s.replica == victim]
    others = [s for s in streams if s.replica != victim]
    assert others, "both replicas must hold streams"
    kill(app, victim)
    # Sooner than anybody's silence would tell.
    ingress.finish(*doomed, timeout_s=MIN_SILENCE_S)
    assert all(isinstance(s.error, ReplicaDied) for s in doomed)
    enough = max(len(s.tokens) for s in others) + 200
    ingress.until(lambda: all(s.is_over or len(s.tokens) >= enough for s in others))
    assert [s.error for s in others] == [None] * len(others)
    assert all(s.token_ids for s in others), "without a gap"
    ingress.cancel(*others)

    app.until_ready()
    assert victim not in app.replicas("decode")
    assert len(app.replicas("decode")) == 2
    assert victim not in living_groups(app.name)
    after = [ingress.submit([5 + i] * 20, 10) for i in range(4)]
    ingress.finish(*after)
    assert [s.error for s in after if s.error] == []
    app.until_idle()


@pytest.mark.parametrize("cause", ["killed", "superseded"])
def test_death_of_the_controller(app: App, cause: str) -> None:
    """The replicas are adopted, none is doubled, streams do not notice.

    One that finds that another one was started ends by itself, and harms nothing that it ran.
    """
    ingress = app.ingress()
    streams = [ingress.submit([5 + i] * 20, 300) for i in range(4)]
    actors = (controller_name(app.name), scheduler_name(app.name))
    before = {name: pid for name, pid in pids(app.name).items() if name not in actors}
    dead = pids(app.name)[controller_name(app.name)]
    if cause == "killed":
        os.kill(dead, signal.SIGKILL)
    else:
        kept.save(app.name, "controller", b"another")
    ingress.finish(*streams)
    assert [s.error for s in streams if s.error] == []
    wait_until(lambda: not is_running(dead), 30.0)
    app.until_ready()
    after = pids(app.name)
    assert after.pop(controller_name(app.name)) != dead
    after.pop(scheduler_name(app.name))
    assert after == before
    status = app.status()
    assert {r["name"] for r in status["replicas"]} == set(before)
    assert status["num_respawns"] == 0
    assert sorted(living_groups(app.name)) == sorted(before)


def cumulative(app: App) -> dict[str, float]:
    """Every counter of the cluster's page."""
    values = parse_exposition(call(controller_name(app.name), "metrics").decode())
    kinds = ("_total", "_bucket", "_count", "_sum")
    return {key: v for key, v in values.items() if key.split("{")[0].endswith(kinds)}


def test_no_counter_falls_when_controller_and_replica_die(app: App) -> None:
    """What a page has shown outlives the controller, even of a source that died with it. What died
    while nobody watched is found missing, and its placement group is removed."""
    ingress = app.ingress()
    streams = [ingress.submit([5 + i] * 20, 50) for i in range(4)]
    ingress.finish(*streams)
    victim = next(s.replica for s in streams)

    def emitted() -> float:
        values = cumulative(app).items()
        return sum(
            v for k, v in values if k.startswith("quadriga_emitted_tokens_total") and victim in k
        )

    wait_until(lambda: emitted() > 0, 30.0)
    before = cumulative(app)
    kill(app, controller_name(app.name))
    kill(app, victim)
    wait_until(lambda: victim not in living_groups(app.name), 60.0)
    app.until_ready()
    assert victim not in app.replicas("decode")
    assert len(app.replicas("decode")) == 2
    after = cumulative(app)
    fallen = {k: (v, after.get(k)) for k, v in before.items() if after.get(k, 0.0) < v}
    assert fallen == {}


def test_scaling_fails_no_request(app: App) -> None:
    """Up to three decode replicas, down to one and back, under load."""
    ingress = app.ingress()
    app.ensure(decode_replicas=3)
    assert len(app.replicas("decode")) == 3
    streams = [ingress.submit([5 + i] * 20, 200) for i in range(9)]
    ingress.until(lambda: all(len(s.tokens) > 2 for s in streams))
    assert len({s.replica for s in streams}) == 3
    kept = app.replicas("decode")
    app.config |= {"decode_replicas": 2}
    ensure_cluster(app.config)
    ingress.finish(*streams)
    assert [s.error for s in streams if s.error] == []
    app.until_ready()
    assert set(app.replicas("decode")) < set(kept)
    assert len(living_groups(app.name)) == 3


def test_whoever_is_asked_to_go_is_replaced_first(app: App) -> None:
    """SIGTERM to a decode replica and to the only prefill replica: streams old and new go on."""
    ingress = app.ingress()
    streams = [ingress.submit([5 + i] * 20, 400) for i in range(6)]
    ingress.until(lambda: all(len(s.tokens) > 2 for s in streams))
    asked = {*app.replicas("prefill"), streams[0].replica}
    num_deaths = app.status()["num_respawns"]
    for name in asked:
        os.kill(pids(app.name)[name], signal.SIGTERM)
    streams += [ingress.submit([5 + i] * 20, 50) for i in range(4)]
    ingress.finish(*streams)
    assert [s.error for s in streams if s.error] == []
    assert sorted(len(s.token_ids) for s in streams) == [50] * 4 + [400] * 6
    wait_until(lambda: not asked & pids(app.name).keys(), 60.0)
    app.until_ready()
    assert (len(app.replicas("prefill")), len(app.replicas("decode"))) == (1, 2)
    assert app.status()["num_respawns"] == num_deaths, "nobody died"
    app.until_idle()


def test_scheduler_and_controller_end_when_asked_and_come_back(app: App) -> None:
    actors = (controller_name(app.name), scheduler_name(app.name))
    before = pids(app.name)
    for name in actors:
        os.kill(before[name], signal.SIGTERM)
    wait_until(lambda: not any(is_running(before[name]) for name in actors), 30.0)
    app.until_ready()
    after = pids(app.name)
    assert {name for name in after if after[name] != before[name]} == set(actors)
