"""Why a request was moved, and what other settings would have decided."""

from __future__ import annotations

import gzip
import io
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from loadgen.__main__ import main
from loadgen.why import explained
from quadriga.core.migration import MigrationCause, MigrationReport
from quadriga.errors import ConfigError
from quadriga.policies.ares.depth_pools import DepthPools
from quadriga.policies.ares.explanation import explain
from quadriga.policies.ares.forecast import NUM_COLUMNS, REMAINING, TOKENS
from quadriga.policies.ares.orders import MoveTracker
from quadriga.policies.ares.overload import OverloadPlan
from quadriga.policies.ares.recording import (
    RecentTicks,
    RecordedTick,
    lines_of,
    parse_ticks,
    read_ticks,
    replay,
    with_exact_lengths,
)

RECORDED = Path(__file__).parents[1] / "sim" / "recorded_ticks.jsonl"


@pytest.fixture(scope="module")
def ticks() -> list[RecordedTick]:
    return list(read_ticks(RECORDED))


def test_every_recorded_order_is_explained_by_its_own_tick(ticks: list[RecordedTick]) -> None:
    for tick in ticks:
        for order in tick.orders:
            found = explain(tick, order)
            chosen = found["destinations"][0]
            assert chosen["name"] == order.destination
            assert chosen["gain"] == pytest.approx(order.gain, rel=0.02, abs=1e-3)
            assert found["sequence"]["tokens"] == order.num_tokens
            assert order.source not in [place["name"] for place in found["destinations"]]
            for place in found["destinations"]:
                moved = place["source_work"] - place["source_work_after"]
                assert moved > 0.0
                assert place["work_after"] - place["work"] == pytest.approx(moved)


def test_an_order_is_shown_with_its_alternatives(ticks: list[RecordedTick]) -> None:
    tick = next(tick for tick in ticks if tick.orders)
    order = tick.orders[0]
    found = explain(tick, order)
    move = {
        "sequence_id": order.sequence_id,
        "source": order.source,
        "destination": order.destination,
        "explanation": found,
        "report": {"outcome": "moved", "reason": "", "stall_s": 0.02},
    }
    console = Console(file=io.StringIO(), width=160)
    console.print(explained([move, move | {"report": None, "explanation": {}}]))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "its stream stood for 20 ms" in text and "under way" in text
    full = replace(order, cause=MigrationCause.MEMORY)
    assert explain(tick, full)["full_s"] is None
    source = next(s for s in tick.snapshots if s.info.name == order.source)
    assert source.forecast is not None
    held = np.frombuffer(source.forecast.tokens, dtype="<f4")
    small = replace(source, info=replace(source.info, kv_capacity_tokens=int(held[0]) + 1))
    others = [s for s in tick.snapshots if s is not source]
    soon = explain(replace(tick, snapshots=[*others, small]), full)
    assert 0.0 < soon["full_s"] < 10.0
    assert f"forecast to be full in {soon['full_s']:.0f} s" in soon["text"]
    assert all(place["name"] in text for place in found["destinations"])


def test_what_the_controller_ordered_is_known_with_its_reason(ticks: list[RecordedTick]) -> None:
    """What the scheduler ordered itself is not noted twice."""
    mine = next(tick for tick in ticks if tick.orders).orders[0]
    moves = MoveTracker(max_concurrent=4, backoff_s=1.0)
    moves.ordered(mine, 100.0)
    drain = replace(mine, sequence_id="r1-0", cause=MigrationCause.DRAIN, reason="fewer are wanted")
    refused, moved = (MigrationReport("r1-0", outcome) for outcome in ("refused", "moved"))
    for order, report in ((drain, refused), (drain, moved), (mine, moved)):
        moves.told(order, report, 101.0)
    assert [d.order for d in moves.recent] == [mine, drain]
    (known,) = moves.of_request("r1")
    assert known.report == moved
    console = Console(file=io.StringIO(), width=200)
    shown = {"sequence_id": "r1-0", "source": "a", "destination": "b"}
    shown |= {"explanation": known.explanation, "report": asdict(moved)}
    console.print(explained([shown]))
    assert isinstance(console.file, io.StringIO)
    said = console.file.getvalue()
    assert "its replica ends or shall be empty" in said and ": fewer are wanted" in said


def test_replay_tells_what_other_settings_would_order(
    ticks: list[RecordedTick], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(RECORDED), "--set", "max_moves=0"]) == 0
    num_orders = sum(len(tick.orders) for tick in ticks)
    said = " ".join(capsys.readouterr().out.split())
    assert f"{num_orders} moves were ordered, 0 would be now" in said


def test_without_overload_or_depth_pools_a_tick_is_decided_as_if_none_had_been_planned(
    ticks: list[RecordedTick],
) -> None:
    tick = next(tick for tick in ticks if tick.orders)
    (depth_class,) = {s.info.depth_class for s in tick.snapshots}
    names = frozenset(s.info.name for s in tick.snapshots)
    overload = OverloadPlan(frozenset({min(names)}), 10.0)
    pools = DepthPools(frozenset({min(names)}), 0.5, 0.1, 1.0, 0.9, tick.at_s, names)
    plain = {"overload": None, "pools": {}}
    for plan in ({"overload": overload}, {"pools": {depth_class: pools}}):
        planned = replace(tick, **plain | plan)
        [with_plan] = replay([planned]) or [None]
        assert with_plan is not None and with_plan.replayed != tick.orders
        without = {"overload": 0.0, "depth_pools": 0.0}
        assert replay([planned], without) == replay([replace(tick, **plain)], without) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "theta"], "not NAME=NUMBER"),
        (["--set", "tetha=.1"], "tetha: cannot be replayed; what can: cooldown_s"),
        (["--set", "hold_share=.1"], "hold_share: cannot be replayed"),
        (["--set", "overload=1"], "overload: 1 cannot be replayed"),
        (["--set", "depth_pools=1"], "depth_pools: 1 cannot be replayed"),
        (["--set", "theta=7"], "theta: 7.0 must lie in 0..1"),
        (["--save", "copy.jsonl"], "--save: not with FILE"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(RECORDED), *words]) == 2
    assert message in capsys.readouterr().err


def test_a_recording_that_is_no_text_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = tmp_path / "ticks.jsonl.gz"
    packed.write_bytes(gzip.compress(RECORDED.read_bytes()))
    assert main(["replay", str(packed)]) == 2
    assert f"{packed}: no text; unpack" in capsys.readouterr().err


def test_exact_lengths_are_those_that_later_ticks_show(ticks: list[RecordedTick]) -> None:
    exact = with_exact_lengths(ticks)
    last = {name: tokens for tick in ticks for name, tokens, _ in _rows(tick)}
    running = {name for name, *_ in _rows(ticks[-1])}
    assert running and last.keys() - running
    for tick, before in zip(exact, ticks, strict=True):
        for (name, tokens, remaining), (_, _, predicted) in zip(
            _rows(tick), _rows(before), strict=True
        ):
            wanted = predicted if name in running else max(0.0, last[name] - tokens)
            assert remaining == pytest.approx(wanted)
    assert len(replay(exact)) <= len(ticks)


def test_the_newest_ticks_are_kept_up_to_a_size(ticks: list[RecordedTick]) -> None:
    kept = RecentTicks(max_bytes=20_000)
    for _ in range(20):
        for tick in ticks:
            kept.add(tick)
    num_kept = len(kept.all())
    assert num_kept > 1 and len(lines_of(kept.all())) < 20_000, "no less than their text"
    assert kept.all()[-1] is ticks[-1]
    for tick in ticks:
        kept.add(tick)
    assert len(kept.all()) == num_kept, "as many again, after the same ticks"
    again = list(parse_ticks(lines_of(kept.all()).splitlines(), "kept"))
    assert again == kept.all()


def _rows(tick: RecordedTick) -> list[tuple[str, float, float]]:
    found = []
    for snapshot in tick.snapshots:
        if snapshot.forecast is not None:
            rows = np.frombuffer(snapshot.forecast.rows, dtype="<f4").reshape(-1, NUM_COLUMNS)
            found += [
                (name, float(row[TOKENS]), float(row[REMAINING]))
                for name, row in zip(snapshot.forecast.sequence_ids, rows, strict=True)
            ]
    return found


def test_what_is_nested_without_end_is_no_tick() -> None:
    with pytest.raises(ConfigError, match="line 1: not a recorded tick"):
        next(parse_ticks(['{"version": ' + "[" * 200_000], "kept"))
