"""Why a request was moved, and what other settings would have decided."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from loadgen.__main__ import main
from loadgen.why import explained
from quadriga.policies.ares.explanation import explain
from quadriga.policies.ares.forecast import NUM_COLUMNS, REMAINING, TOKENS
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
        "sequence_id": order.sequence_id, "source": order.source,
        "destination": order.destination, "explanation": found,
        "report": {"outcome": "moved", "reason": "", "stall_s": 0.02},
    }  # fmt: skip
    console = Console(file=io.StringIO(), width=160)
    console.print(explained([move, move | {"report": None, "explanation": {}}]))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "its stream stood for 20 ms" in text and "under way" in text
    assert all(place["name"] in text for place in found["destinations"])


def test_a_higher_threshold_moves_less(
    ticks: list[RecordedTick], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(RECORDED), "--set", "max_moves=0"]) == 0
    num_orders = sum(len(tick.orders) for tick in ticks)
    said = " ".join(capsys.readouterr().out.split())
    assert f"{num_orders} moves were ordered, 0 would be now" in said
    assert main(["replay", str(RECORDED)]) == 0
    assert "0 are decided otherwise" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "theta"], "not NAME=NUMBER"),
        (["--set", "tetha=.1"], "tetha: not a setting"),
        (["--set", "theta=7"], "theta: 7.0 must lie in 0..1"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(RECORDED), *words]) == 2
    assert message in capsys.readouterr().err


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
    assert 1 < num_kept < 20 * len(ticks)
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
