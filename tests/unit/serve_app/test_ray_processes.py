"""What a command changes of the way in which Ray starts its processes."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from serve_app.cli import ray_processes
from serve_app.cli.ray_processes import RayProcesses


def test_a_node_that_reports_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import services

    calls: list[tuple[Any, ...]] = []

    def reports_at_the_third_call(*words: Any) -> str:
        calls.append(words)
        if len(calls) < 3:
            raise RuntimeError("no such node")
        return "the node"

    monkeypatch.setattr(services, "get_node", reports_at_the_third_call)
    with RayProcesses().starting():
        assert services.get_node("gcs", "node") == "the node"
    assert calls == [("gcs", "node")] * 3
    assert services.get_node is reports_at_the_third_call


def test_a_node_that_never_reports_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import services

    def never_reports(*words: Any) -> None:
        raise RuntimeError("no such node")

    monkeypatch.setattr(ray_processes, "NODE_PATIENCE_S", 0.0)
    monkeypatch.setattr(services, "get_node", never_reports)
    with RayProcesses().starting(), pytest.raises(RuntimeError, match="no such node"):
        services.get_node("gcs", "node")


def test_sigterm_is_the_callers_again_after_the_start() -> None:
    heard: list[int] = []
    earlier = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with RayProcesses().starting():
            pass
        signal.raise_signal(signal.SIGTERM)
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, earlier)


def test_no_process_reads_the_logs_for_drivers() -> None:
    from ray._private import parameter

    with RayProcesses().starting():
        assert parameter.RayParams().include_log_monitor is False
    assert parameter.RayParams().include_log_monitor is None  # Ray's own default
