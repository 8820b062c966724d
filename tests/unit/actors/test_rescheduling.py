"""The scheduler's tick around its policy: orders go out with a deadline, whatever comes back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.scheduler.rescheduling import Rescheduling
from quadriga.clock import ManualClock
from quadriga.config.loader import load_config
from quadriga.core.forecast import LengthOutcome, LengthPrediction
from quadriga.core.migration import MigrationOrder, MigrationReport
from quadriga.core.replica import ReplicaSnapshot
from quadriga.core.routing import ReportOptions
from quadriga.errors import ReplicaDied, ReplicaError
from quadriga.observability.metrics import MetricsHub, parse_exposition
from quadriga.policies.ares.recording import Recording, read_ticks, replay
from tests.unit.policies.ares_twin import CLASS
from tests.unit.policies.test_ares_governor import uneven

Send = Callable[[MigrationOrder], Awaitable[MigrationReport]]


def make(send: Send | None, **ares: Any) -> Rescheduling:
    config = load_config({"scheduler": {"ares": {"mode": "ares"} | ares}})
    snapshots = uneven(num_idle=1)
    return Rescheduling(config, ManualClock(), lambda: snapshots, send)


def metrics(made: Rescheduling) -> dict[str, float]:
    hub = MetricsHub()
    made.metrics.gauges(made.governor)
    hub.push("s", made.metrics.registry.snapshot(), now_s=0.0)
    return parse_exposition(hub.exposition(now_s=0.0).decode())


def value(found: dict[str, float], name: str, **labels: str) -> float:
    wanted = [f'{key}="{text}"' for key, text in labels.items()]
    return sum(
        amount
        for series, amount in found.items()
        if series.split("{")[0] == name and all(label in series for label in wanted)
    )


async def test_an_order_goes_to_its_source_and_its_report_into_the_book() -> None:
    sent: list[MigrationOrder] = []

    async def send(order: MigrationOrder) -> MigrationReport:
        sent.append(order)
        return MigrationReport(order.sequence_id, "moved", bytes_sent=10, stall_s=0.03, took_s=0.1)

    made = make(send)
    orders = made.tick()
    assert made.status()["under_way"][0]["source"] == "busy"
    await asyncio.sleep(0)
    assert sent == orders and len(orders) == 1
    status = made.status()
    assert json.loads(json.dumps(status)) == status
    assert status["under_way"] == []
    assert status["outcomes"] == {"moved": 1}
    assert status["recent"][0]["report"]["stall_s"] == 0.03
    assert status["last_tick"]["why"] == {str(CLASS): "1 ordered, by the forecast"}
    found = metrics(made)
    assert value(found, "quadriga_migrations_ordered_total", cause="balance") == 1
    assert value(found, "quadriga_migration_orders_ended_total", outcome="moved") == 1
    assert value(found, "quadriga_migrations_under_way") == 0


@pytest.mark.parametrize(
    ("error", "outcome", "reason"),
    [
        (ReplicaDied("gone"), "failed", "source_died"),
        (ReplicaError("no answer", code="timeout"), "unknown", "timeout"),
    ],
)
async def test_a_source_that_does_not_answer_costs_one_order(
    error: ReplicaError, outcome: str, reason: str
) -> None:
    async def send(order: MigrationOrder) -> MigrationReport:
        raise error

    made = make(send)
    (order,) = made.tick()
    await asyncio.sleep(0)
    (decision,) = made.governor.moves.recent
    assert decision.report is not None
    assert (decision.report.outcome, decision.report.reason.split(":")[0]) == (outcome, reason)
    assert order.sequence_id in made.governor.moves.fixed(0.0)
    assert decision.report.at_fault == order.source
    assert made.governor.moves.under_way == []


async def test_decisions_are_recorded_up_to_a_size_and_decided_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def send(order: MigrationOrder) -> MigrationReport:
        return MigrationReport(order.sequence_id, "finished")

    file = tmp_path / "new" / "ticks.jsonl"
    monkeypatch.setenv("HOME", str(tmp_path))
    made = make(send, record_file="~/new/ticks.jsonl")
    for _ in range(3):
        made.tick()
        await asyncio.sleep(0)
    ticks = list(read_ticks(file))
    assert [len(tick.orders) for tick in ticks] == [1, 1, 1]
    assert replay(ticks) == []
    size = file.stat().st_size
    small = Recording(file, max_bytes=size + 1)
    small.add(ticks[0])
    grown = file.stat().st_size
    small.add(ticks[0])
    assert size < grown == file.stat().st_size


async def test_a_new_size_of_the_recording_counts_at_once(tmp_path: Path) -> None:
    async def send(order: MigrationOrder) -> MigrationReport:
        return MigrationReport(order.sequence_id, "finished")

    ares: dict[str, Any] = {"mode": "ares", "record_file": str(tmp_path / "ticks.jsonl")}
    made = make(send, **ares, record_max_bytes=1)
    for most, num_ticks in ((None, 1), (None, 1), (100_000_000, 2)):
        if most is not None:
            made.configure(load_config({"scheduler": {"ares": ares | {"record_max_bytes": most}}}))
        made.tick()
        await asyncio.sleep(0)
        assert len(list(read_ticks(tmp_path / "ticks.jsonl"))) == num_ticks


async def test_a_recording_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    async def send(order: MigrationOrder) -> MigrationReport:
        return MigrationReport(order.sequence_id, "finished")

    made = make(send, record_file=str(tmp_path / "file" / "below"))
    assert len(made.tick()) == 1


async def test_modes_change_while_it_runs() -> None:
    made = make(None)
    made.governor.tick(uneven(num_idle=1), now_s=0.0, now_unix_s=0.0)
    assert made.status()["last_tick"]["why"]
    assert made.reported(uneven()[0], []) == ReportOptions(forecast=True)
    made.configure(load_config({"scheduler": {"ares": {"mode": "off"}, "placement": "ares"}}))
    assert made.reported(uneven()[0], []) == ReportOptions(forecast=True)
    off = {"ares": {"mode": "off"}, "placement": "least_work"}
    made.configure(load_config({"scheduler": off}))
    assert made.reported(uneven()[0], []) == ReportOptions()
    assert not made.governor.is_on and not made.status()["last_tick"]["why"]
    # How many replicas are wanted is counted from forecasts, whether anything is moved or not.
    scaled = {"enabled": True, "scaling": {"enabled": True}}
    made.configure(load_config({"scheduler": off, "helios": scaled}))
    assert made.reported(uneven()[0], []) == ReportOptions(forecast=True)


async def test_what_came_of_predictions_is_counted() -> None:
    made = make(None)
    said = LengthPrediction(100, 50, 200)
    made.reported(uneven()[0], [LengthOutcome(said, 90), LengthOutcome(said, 400)])
    found = metrics(made)
    assert value(found, "quadriga_length_prediction_error_tokens_sum") == 310
    assert value(found, "quadriga_length_predictions_inside_total", model_name="m") == 1
    assert made.status()["lengths"]["m"]["num_ended"] == 2


async def test_a_tick_that_fails_is_followed_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody awaits the loop: an end of it would be an end of all moves, and of the metrics."""
    monkeypatch.setattr("actors.scheduler.rescheduling.METRICS_EVERY_S", 1e9)
    clock = ManualClock()
    snapshots = uneven(num_idle=1)
    looks: list[float] = []

    def look() -> list[ReplicaSnapshot]:
        looks.append(clock.now_s())
        if len(looks) == 1:
            raise KeyError("a bug")
        return [replace(s, taken_unix_s=clock.unix_s()) for s in snapshots]

    async def pass_time() -> None:
        while True:
            clock.advance(0.01)
            await asyncio.sleep(0)

    ordered = asyncio.Event()

    async def send(order: MigrationOrder) -> MigrationReport:
        ordered.set()
        return MigrationReport(order.sequence_id, "moved")

    config = load_config({"scheduler": {"ares": {"mode": "ares", "interval_s": 0.05}}})
    made = Rescheduling(config, clock, look, send)
    tasks = [asyncio.create_task(made.run()), asyncio.create_task(pass_time())]
    try:
        async with asyncio.timeout(60):
            await ordered.wait()
    finally:
        for task in tasks:
            task.cancel()
    assert len(looks) > 1
