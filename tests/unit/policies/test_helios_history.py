"""The performance history: its columns, how it forgets, and how it outlives a process."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest

from quadriga.core.replica import DepthClass
from quadriga.errors import ConfigError
from quadriga.policies.helios.history import (
    FORGETTING,
    MAX_ROWS,
    HistoryRow,
    HistoryTable,
    load_table,
    pack_table,
    save_table,
    unpack_table,
)
from quadriga.policies.helios.messages import RequestFinished, UnchangedSampled
from tests.unit.policies.helios_harness import S6, S24, finished


def filled() -> HistoryTable:
    table = HistoryTable()
    for _ in range(5):
        table.add(finished(S24))
        table.add(finished(S6))
    table.sampled(UnchangedSampled("opt-1.3b", {6: (92, 100), 12: (99, 100)}), 24)
    table.row("opt-1.3b", 6).load_s = 0.7
    return table


def row(table: HistoryTable, depth: int) -> HistoryRow:
    found = table.find("opt-1.3b", depth)
    assert found is not None
    return found


def test_columns_by_hand() -> None:
    """Two requests: 10 and 30 tokens, the first one forgotten by 2 %."""
    table = HistoryTable()
    c = DepthClass("opt-1.3b", 24)
    table.add(RequestFinished("r", c, {6: 8, 24: 2}, 0, 5.0, 10, 40, 0.1, 0.9, 2.0, 20.0, "rapl"))
    table.add(RequestFinished("r", c, {6: 10, 12: 20}, 0, 3.0, 30, 60, 0.3, 5.8, 4.0))
    f = FORGETTING
    found = row(table, 24)
    assert found.coverage(6) == pytest.approx((8 * f + 10) / (10 * f + 30))
    assert found.coverage(12) == pytest.approx((8 * f + 30) / (10 * f + 30))
    assert found.coverage(24) == pytest.approx(1.0)
    assert found.perplexity == pytest.approx(math.exp((5 * f + 3) / (10 * f + 30)))
    assert found.ttft_s == pytest.approx((0.1 * f + 0.3) / (f + 1))
    assert found.tpot_s == pytest.approx((0.9 * f + 5.8) / (9 * f + 29))
    assert found.batch == pytest.approx((2 * f + 4) / (f + 1))
    assert found.tokens_per_s == pytest.approx(found.batch / (found.tpot_s or 0))
    assert found.joules_per_token == pytest.approx(2.0), "of the tokens it is known of"
    assert sum(found.exit_tokens.values()) == pytest.approx(10 * f + 30)
    assert sum(k * n for k, n in found.exit_tokens.items()) == pytest.approx(96 * f + 300)
    assert found.num_requests == 2


def test_breaches_are_what_a_partial_depth_does_not_cover() -> None:
    found = row(filled(), 6)
    assert found.coverage(6) == pytest.approx(0.73)
    assert found.columns()["breach_share"] == pytest.approx(0.27)


def test_an_empty_row_says_nothing() -> None:
    empty = HistoryRow("m", 3)
    values = (
        empty.coverage(3),
        empty.ttft_s,
        empty.tpot_s,
        empty.tokens_per_s,
        empty.perplexity,
        empty.joules_per_token,
    )
    assert values == (None,) * 6
    single = RequestFinished("r", DepthClass("m", 3), {3: 1}, 0, 0.1, 1, 4, 0.1, 0.0)
    empty.add(single)
    assert empty.tpot_s is None, "one token has no time between tokens"
    json.dumps(empty.columns())


def test_a_stream_that_changes_is_seen() -> None:
    table = HistoryTable()
    for _ in range(500):
        table.add(finished(S24))
    for _ in range(50):
        table.add(finished(S24, exit_tokens={24: 1000}))
    assert (row(table, 24).coverage(6) or 0) < 0.73 * 0.4


def test_a_new_profile_replaces_the_old_and_keeps_what_loading_took() -> None:
    table = filled()
    profile = HistoryRow("opt-1.3b", 24)
    profile.add(finished(S24, exit_tokens={24: 100}))
    row(table, 24).load_s = 3.0
    table.install(profile)
    assert row(table, 24).coverage(6) == 0.0
    assert row(table, 24).load_s == 3.0
    assert row(table, 24).num_requests == 6
    same, seen = row(table, 24).unchanged[6]
    assert same / seen == pytest.approx(0.92)
    assert row(table, 6).coverage(6) is None, "it was another stream's"
    assert row(table, 6).tpot_s is not None
    assert row(table, 6).load_s == 0.7


def test_the_table_is_bounded() -> None:
    table = HistoryTable()
    for depth in range(1, MAX_ROWS + 10):
        table.row("m", depth)
        table.row("m", 1)  # used again and again
    assert len(table) == MAX_ROWS
    assert table.find("m", 1) is not None
    assert table.find("m", 2) is None


def test_it_survives_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "history.json"
    assert len(load_table(path)) == 0
    table = filled()
    save_table(path, table)
    assert load_table(path).columns() == table.columns()
    save_table(path, table)
    assert [p.name for p in path.parent.iterdir()] == ["history.json"]


def test_a_save_that_fails_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "history.json"
    save_table(path, filled())
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="disk full"):
        save_table(path, HistoryTable())
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def broken(change: Any) -> bytes:
    data = json.loads(pack_table(filled()))
    change(data)
    return json.dumps(data).encode()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        broken(lambda d: d.update(version=2)),
        broken(lambda d: d.update(rows={})),
        broken(lambda d: d["rows"][0].update(depth="24")),
        broken(lambda d: d["rows"][0].update(depth=0)),
        broken(lambda d: d["rows"][0].update(nll=-1.0)),
        broken(lambda d: d["rows"][0].update(nll=float("nan"))),
        broken(lambda d: d["rows"][0].update(load_s=float("inf"))),
        broken(lambda d: d["rows"][0].update(joules=None)),
        broken(lambda d: d["rows"][0].update(extra=1)),
        broken(lambda d: d["rows"][0].pop("scored")),
        broken(lambda d: d["rows"][0].update(exit_tokens={"six": 1})),
        broken(lambda d: d["rows"][0].update(exit_tokens={"6": -1})),
        broken(lambda d: d["rows"][0].update(unchanged={"6": [1]})),
        broken(lambda d: d["rows"][0].update(energy_source="guess")),
        broken(lambda d: d.update(rows=d["rows"] * 200)),
    ],
)
def test_a_damaged_file_is_set_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, raw: bytes
) -> None:
    with pytest.raises(ConfigError, match="history"):
        unpack_table(raw)
    path = tmp_path / "history.json"
    path.write_bytes(raw)
    with caplog.at_level(logging.WARNING):
        assert len(load_table(path)) == 0
    assert "profiles start anew" in caplog.text
    assert (tmp_path / "history.json.corrupt").read_bytes() == raw
    assert not path.exists()
