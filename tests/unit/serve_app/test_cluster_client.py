"""An ingress's heartbeats, and what it does where no actor answers them."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from quadriga.clock import ManualClock
from quadriga.core.replica import DepthClass, Role
from quadriga.core.routing import Admission, AdmitRequest, ClusterView
from quadriga.errors import ReplicaDied, ReplicaError, Unavailable
from quadriga.policies.liveness import CONTROLLER_SILENCE_S, DEAF_S
from serve_app.ops.tasks import Tasks
from serve_app.request.cluster_client import (
    LOST_S,
    SHOWN_STARTING,
    CancellationBatcher,
    ClusterClient,
    ClusterStateCache,
    starting_text,
)


@pytest.fixture(autouse=True)
def no_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    """To ask Ray which actor this is would start it."""
    monkeypatch.setattr("serve_app.request.cluster_client.own_actor", lambda: "")


class Beats(ClusterClient):
    """Records the calls; each takes a given time of a fake clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)
        super().__init__("app")
        self.heard: list[str] = []
        self.restarted: list[float] = []
        self.ended: list[float] = []
        self.failures: dict[str, Exception] = {}
        self.takes_s = 0.0

    async def _call(self, name: str, method: str, *args: Any, deadline_s: float = 0.0) -> Any:
        self.heard.append(name)
        if name == self._controller:
            self.now_s += self.takes_s
        if name in self.failures:
            raise self.failures[name]

    async def _restart(self, name: str) -> None:
        self.restarted.append(self.now_s)

    def _end(self, reason: str) -> None:
        self.ended.append(self.now_s)


async def test_heartbeats_go_to_controller_scheduler_and_replicas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Beats(monkeypatch)
    cluster.failures = {"app:decode:0": ReplicaDied("dead"), "app:scheduler": ReplicaDied("dead")}
    await cluster.heartbeat("me", ["app:prefill:0", "app:decode:0"])
    assert cluster.heard == ["app:controller", "app:scheduler", "app:prefill:0", "app:decode:0"]


async def test_a_silent_controller_is_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Beats(monkeypatch)
    cluster.failures = {"app:controller": ReplicaError("no answer", code="timeout")}
    cluster.takes_s = 3.0
    for _ in range(8):
        await cluster.heartbeat("me", [])
    assert cluster.restarted == [1000.0 + 21.0], f"more than {CONTROLLER_SILENCE_S} s"
    assert cluster.ended == []


@pytest.mark.parametrize("lost", [ReplicaError("no answer", code="timeout"), MemoryError()])
async def test_an_ingress_without_any_answer_ends_itself_and_restarts_no_actor(
    lost: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without memory it sends, but takes no answer; it had the controller restarted for that."""
    cluster = Beats(monkeypatch)
    cluster.failures = dict.fromkeys(("app:controller", "app:scheduler", "d"), lost)
    cluster.takes_s = 3.0
    for _ in range(5):
        await cluster.heartbeat("me", ["d"])
    assert cluster.ended == []
    await cluster.heartbeat("me", ["d"])
    assert cluster.ended == [1000.0 + 18.0], f"more than {DEAF_S} s"
    assert cluster.restarted == []
    del cluster.failures["d"]
    await cluster.heartbeat("me", ["d"])
    await cluster.heartbeat("me", ["d"])
    assert len(cluster.ended) == 1


async def test_an_ingress_that_stood_still_restarts_no_actor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Beats(monkeypatch)
    lost = ReplicaError("no answer", code="timeout")
    cluster.failures = {"app:controller": lost, "app:scheduler": lost}
    cluster.takes_s = 500.0
    await cluster.heartbeat("me", [])
    assert cluster.restarted == cluster.ended == []
    cluster.failures, cluster.takes_s = {}, 0.0
    await cluster.heartbeat("me", [])
    assert cluster.restarted == []


async def test_nothing_is_sent_to_a_replica_just_found_to_be_gone() -> None:
    """The scheduler names it until it hears of the death itself."""
    clock = ManualClock()

    class Scheduler(ClusterClient):
        async def admit(self, requests: Sequence[AdmitRequest]) -> list[Admission]:
            return [Admission("app:prefill:0", DepthClass("m", 2)) for _ in requests]

    state = ClusterStateCache(Scheduler("app"), clock, max_age_s=10.0)
    request: Any = SimpleNamespace()
    state.forget("app:prefill:0")
    with pytest.raises(Unavailable, match="app:prefill:0 is gone"):
        await state.admit([request])
    clock.advance(LOST_S)  # a replica that only stood still may have come back
    assert (await state.admit([request]))[0].prefill_replica == "app:prefill:0"


async def test_who_asks_whether_it_is_ready_learns_what_replicas_do_until_they_serve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ["app:prefill:0:x", *(f"app:decode:{n}:x" for n in range(SHOWN_STARTING + 2))]
    replicas = [
        {"name": n, "role": n.split(":")[1], "phase": "starting", "doing": "reads"} for n in names
    ]
    replicas[0]["phase"] = "ready"
    call = AsyncMock(side_effect=[ClusterView(0.0, []), {"replicas": replicas}])
    monkeypatch.setattr("actors.rpc.ray_rpc.call", call)
    state = ClusterStateCache(ClusterClient("app"), ManualClock(), max_age_s=10.0)
    await state.refresh()
    with pytest.raises(Unavailable) as caught:
        state.check_ready()
    assert caught.value.message == "no prefill replica is ready", "others do not make it so"
    replicas[0]["phase"] = "starting"
    call.side_effect = [ClusterView(0.0, []), {"replicas": replicas}]
    await state.refresh()
    with pytest.raises(Unavailable, match=r"no prefill replica is ready: prefill 0: reads$"):
        state.check_ready()
    said = "; ".join(f"decode {n}: reads" for n in range(SHOWN_STARTING))
    assert starting_text({"replicas": replicas}, Role.DECODE) == f"{said}; 2 more"


async def test_a_cancellation_that_did_not_arrive_is_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("actors.rpc.rpc_batcher.TELL_TIMEOUT_S", 0.0)
    call = AsyncMock(side_effect=[ReplicaDied("the link broke", code="unreachable"), None])
    monkeypatch.setattr("actors.rpc.ray_rpc.call", call)
    await ClusterClient("app").cancel("app:decode:0", ["s"], "me")
    assert [c.args for c in call.await_args_list] == [("app:decode:0", "cancel", ["s"], "me")] * 2


async def test_reports_that_have_not_left_yet_are_waited_for_or_end_in_silence() -> None:
    told: list[str] = []

    async def cancel(replica: str, ids: list[str], owner: str) -> None:
        await asyncio.sleep(0.001)
        told.extend(ids)

    tasks = Tasks()
    batcher = CancellationBatcher(SimpleNamespace(cancel=cancel), tasks, "me")  # type: ignore[arg-type]
    batcher.cancel("app:decode:0", "first")
    await batcher.report_ended_sequences()
    await batcher.flush()
    assert told == ["first"]
    batcher.cancel("app:decode:0", "second")
    await batcher.report_ended_sequences()
    await tasks.close()
    gc.collect()  # a call that was made and never awaited would be told of here
    assert told == ["first"]


async def test_replicas_say_what_no_ingress_knows_of_a_request() -> None:
    """Each is asked once; one that is silent, or has let go of a sequence, changes nothing."""
    asked: list[tuple[str, list[str]]] = []
    rows: list[dict[str, Any]]
    rows = [{"sequence_id": s, "replica": "d", "status": "running"} for s in "abcmw"]
    rows[2]["replica"], rows[3]["status"] = "silent", "moving"
    rows[4] |= {"replica": None}

    class Cluster(ClusterClient):
        async def _call(self, name: str, method: str, *args: Any, deadline_s: float = 0) -> Any:
            if method == "operators_view":
                return {"requests": rows} if name == "app:controller" else {}
            asked.append((name, *args))
            if name == "silent":
                raise ReplicaDied("gone")
            return {"a": {"status": "paused", "pauses": 2}}

    shown = (await Cluster("app").operators_view())["requests"]
    assert asked == [("d", ["a", "b", "m"]), ("silent", ["c"])]
    assert [r["status"] for r in shown] == ["paused", "running", "running", "moving", "running"]
    assert shown[0]["pauses"] == 2
