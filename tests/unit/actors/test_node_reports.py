"""When nodes are asked what they have free: Ray may take one for full that is not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.exceptions import RayError

from actors.controller import node_reports
from actors.controller.node_reports import NodeReports
from actors.controller.replica_manager import ReplicaHandle, ReplicaManager
from quadriga.clock import ManualClock
from quadriga.core.replica import Role


class Cluster:
    """Notes at which second nodes were asked.

    Attributes:
        failures: What Ray raises next, before it answers.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = ManualClock(1000.0)
        self.nodes = {"a", "b"}
        self.asked: list[float] = []
        self.failures: list[Exception] = []
        monkeypatch.setattr(node_reports, "have_nodes_report", self.have_nodes_report)
        monkeypatch.setattr(node_reports, "living_nodes", self.living_nodes)

    @property
    def second(self) -> float:
        return self.clock.now_s() - 1000.0

    def have_nodes_report(self, timeout_s: float) -> list[str]:
        self.asked.append(self.second)
        if self.failures:
            raise self.failures.pop()
        return sorted(self.nodes)

    def living_nodes(self) -> frozenset[str]:
        return frozenset(self.nodes)

    async def pass_time(self, reports: NodeReports, seconds: int, since_s: float) -> None:
        for _ in range(seconds):
            self.clock.advance(1.0)
            await reports.while_pending(since_s)
            await asyncio.sleep(0)  # what was begun begins
            async with asyncio.timeout(60), reports._reporting:
                pass


async def test_nodes_are_asked_ever_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    cluster.failures = [RayError("the control store is away")]
    reports = NodeReports(cluster.clock)
    await cluster.pass_time(reports, 200, since_s=1000.0)
    assert cluster.asked == [6.0, 11.0, 21.0, 41.0, 81.0, 141.0]


async def test_nodes_are_asked_soon_after_a_node_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reservation that fails is one on a node that has just joined."""
    cluster = Cluster(monkeypatch)
    reports = NodeReports(cluster.clock)
    await cluster.pass_time(reports, 100, since_s=1000.0)
    cluster.asked.clear()
    cluster.nodes.add("c")
    await cluster.pass_time(reports, 20, since_s=1000.0)
    assert cluster.asked == [106.0, 111.0]


async def test_a_replica_that_has_just_begun_to_wait_is_given_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(monkeypatch)
    reports = NodeReports(cluster.clock)
    await cluster.pass_time(reports, 50, since_s=1048.0)
    assert cluster.asked == []
    await cluster.pass_time(reports, 5, since_s=1048.0)
    assert cluster.asked == [53.0]


async def test_a_store_that_does_not_tell_which_nodes_live_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(monkeypatch)
    failures = [RayError("away"), OSError("reset"), RuntimeError("down")]

    def living_nodes() -> frozenset[str]:
        if failures:
            raise failures.pop()
        return frozenset(cluster.nodes)

    monkeypatch.setattr(node_reports, "living_nodes", living_nodes)
    await cluster.pass_time(NodeReports(cluster.clock), 10, since_s=1000.0)
    assert cluster.asked == [9.0]


@pytest.mark.parametrize("is_placed", [False, True])
async def test_the_replica_manager_asks_nodes_for_a_replica_without_a_place(
    is_placed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting: list[float] = []

    async def while_pending(_: Any, since_s: float) -> None:
        waiting.append(since_s)

    monkeypatch.setattr(NodeReports, "while_pending", while_pending)
    monkeypatch.setattr("actors.controller.replica_manager.is_placed", lambda name: is_placed)
    fleet = ReplicaManager("app", ManualClock(1000.0), lambda: None, lambda: 0.0)
    handle: Any = None
    member = ReplicaHandle((Role.DECODE, 0), "d0", 990.0, "same", handle=handle)
    assert await fleet._verdict(member, 8.0) is None
    assert waiting == ([] if is_placed else [990.0])
