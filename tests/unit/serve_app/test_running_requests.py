"""What operators see of requests that run: bounded, of all ingresses, and without their text."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from quadriga.errors import ReplicaDied
from quadriga.observability.running_requests import KEPT_S, MOST_SHOWN, RunningRequests
from serve_app.request.cluster_client import ClusterClient
from tests.crowded_replica import Replica
from tests.unit.serve_app.conftest import MakeStand
from tests.unit.serve_app.test_engine_client import until


async def test_an_ingress_says_only_so_many_of_what_it_has(make_stand: MakeStand) -> None:
    stand = await make_stand(gate=(gate := asyncio.Event()))
    asked = [stand.complete(prompt=f"zebra {k}") for k in range(MOST_SHOWN + 5)]
    answers = asyncio.gather(*asked)
    await until(lambda: len(stand.cluster.decode.held) == len(asked))
    await stand.engine._push_metrics()
    rows, submitted = stand.cluster.running, stand.cluster.submitted[:MOST_SHOWN]
    assert [r["sequence_id"] for r in rows] == [s.sequence_id for s in submitted], "the first"
    assert "zebra" not in json.dumps(rows) and len(json.dumps(rows)) < 400 * MOST_SHOWN
    gate.set()
    await answers
    await stand.engine._push_metrics()
    assert stand.cluster.running == []


def row(name: str, running_s: float, **more: Any) -> dict[str, Any]:
    return {"sequence_id": name, "running_s": running_s, "replica": "d", "status": "running"} | more


def test_of_all_ingresses_those_that_run_longest_are_shown() -> None:
    requests = RunningRequests()
    requests.push("one", [row(f"a{k}", 100.0 - k) for k in range(MOST_SHOWN)], now_s=0.0)
    requests.push("two", [row("b", 98.5), row("c", 1.0)], now_s=1.0)
    shown = requests.longest(now_s=2.0)
    assert [r["sequence_id"] for r in shown[:4]] == ["a0", "a1", "b", "a2"]
    assert len(shown) == MOST_SHOWN
    assert len(requests.longest(now_s=KEPT_S + 0.5)) == 2, "one ingress is gone"
    requests.push("two", [], now_s=KEPT_S + 0.5)
    assert requests.longest(now_s=KEPT_S + 0.5) == [] and list(requests._said) == ["two"]


async def test_replicas_say_what_no_ingress_knows() -> None:
    """Each is asked once; one that is silent, or has let go of a sequence, changes nothing."""
    asked: list[tuple[str, list[str]]] = []
    rows = [row("a", 3.0), row("b", 2.0), row("c", 1.0, replica="silent")]
    rows += [row("m", 1.0, status="moving"), row("w", 1.0, replica=None)]

    class Cluster(ClusterClient):
        def __init__(self) -> None:
            self._scheduler, self._controller = "scheduler", "controller"

        async def _call(self, name: str, method: str, *args: Any, deadline_s: float = 0) -> Any:
            if method == "operators_view":
                return {"requests": rows} if name == "controller" else {}
            asked.append((name, *args))
            if name == "silent":
                raise ReplicaDied("gone")
            return {"a": {"status": "paused", "pauses": 2}}

    view = await Cluster().operators_view()
    assert asked == [("d", ["a", "b"]), ("silent", ["c"])]
    statuses = [r["status"] for r in view["requests"]]
    assert statuses == ["paused", "running", "running", "moving", "running"]
    assert view["requests"][0]["pauses"] == 2


def test_a_replica_says_that_a_sequence_is_paused() -> None:
    loop = (replica := Replica(rows=2)).loop
    replica.take("s", max_tokens=60)
    found = loop.find("s")
    assert found is not None and found.shown["status"] == "running"
    assert loop.preemption.pause("s")
    counts = {"migrations": 0, "pauses": 1, "breaches": 0}
    assert found.shown == {"status": "paused", **counts}
