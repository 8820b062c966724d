"""The DREX experiment's arithmetic: what it chooses, what its headline says, what is not timed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from loadgen.__main__ import main
from loadgen.paper.drex.bench import CPU, DrexBench, DrexRow, DrexSetting
from loadgen.paper.drex.closed_loop import ClosedLoopRun
from loadgen.paper.drex.judged import Decisions
from loadgen.paper.drex.quality import Quality, _parted_at, choose
from loadgen.paper.drex.report import headline, plain, print_table, read_rows
from loadgen.report.experiment import publish
from quadriga.clock import ManualClock
from quadriga.errors import ConfigError

HEADLINE = {
    "vs_best_grouped",
    "share_of_ceiling",
    "vs_no_exit_equal_memory",
    "worst_vs_no_exit",
    "p99_itl_ratio",
    "mean_request_time_ratio",
    "involuntary_exits",
    "decisions_right",
    "early_token_share",
    "exact_match_delta_points",
}


def measured(policy: str, tokens_per_s: float, batch: int = 8, **fields: Any) -> DrexRow:
    values: dict[str, Any] = {
        "gap_mean_s": 0.01,
        "gap_p99_s": 0.02,
        "request_s": 1.0,
        "exact_match": 0.9,
        "early_share": 0.0,
        "involuntary_exits": 0,
        "involuntary_stays": 0,
        "peak_bytes": 1000,
    } | fields
    device = values.pop("device", CPU)
    return DrexRow(DrexSetting("m", batch, 0.9, policy, device), batch, tokens_per_s, **values)


def test_the_headline_and_the_rows_on_disk(tmp_path: Path) -> None:
    rows = [
        measured("off", 100.0),
        measured(
            "drex",
            180.0,
            ceiling=2.0,
            decisions=Decisions(200, 196),
            early_share=0.8,
            gap_p99_s=0.03,
            request_s=0.5,
            exact_match=0.895,
        ),
        measured("lazy", 120.0),
        measured("eager", 500.0, exact_match=0.2),
        measured("off", 100.0, batch=4),
        measured("drex", 99.0, batch=4, ceiling=1.1, early_share=0.5),
        measured("lazy", 110.0, batch=4),
        measured("drex", 1.0, device="modelled"),
    ]
    found = headline(rows)
    assert found.keys() >= HEADLINE
    assert found["vs_best_grouped"] == pytest.approx(99 / 110)  # eager's answers do not count
    assert found["share_of_ceiling"] == pytest.approx(0.9)  # a ceiling of 1.1 leaves nothing to win
    assert found["vs_no_exit_equal_memory"] == pytest.approx(1.8)
    assert found["worst_vs_no_exit"] == pytest.approx(0.99)
    assert found["p99_itl_ratio"] == pytest.approx(1.5)
    assert found["decisions_right"] == pytest.approx(0.98)
    assert found["exact_match_delta_points"] == pytest.approx(-0.5)
    shown = [plain(row) for row in rows]
    assert shown[1]["decisions"]["share_right"] == 0.98 and shown[1]["policy"] == "drex"
    (tmp_path / "drex.json").write_text(json.dumps({"rows": shown}))
    assert read_rows(tmp_path / "drex.json") == rows
    assert read_rows(tmp_path / "absent.json") == []
    for damaged in ({"rows": [shown[0] | {"new": 1}]}, {"rows": [{"model": "m"}]}, {}, []):
        (tmp_path / "drex.json").write_text(json.dumps(damaged))
        with pytest.raises(ConfigError, match=r"--keep: the rows of .*drex\.json cannot be read"):
            read_rows(tmp_path / "drex.json")


def test_no_exits_at_equal_bytes_are_run_in_every_round_and_lacking_slots_are_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Twice the bytes would pay for 16 slots; there are 9 rows."""
    spec = SimpleNamespace(checkpoint=SimpleNamespace(id="m"))
    native: Any = SimpleNamespace(num_rows=9, num_layers=4, spec=spec)
    suite: Any = SimpleNamespace(prompts=[None] * 48, right=lambda outputs: [True])
    ran: list[tuple[str, int]] = []

    def run(policy: str, threshold: float, slots: int = 8) -> ClosedLoopRun:
        ran.append((policy, slots))
        held = 200 if policy == "drex" else 100
        return ClosedLoopRun(slots, 1.0, gaps_s=[0.1], request_s=[1.0], peak_bytes=held)

    bench = DrexBench(native, suite, batch=8, max_tokens=9, clock=ManualClock(), say=str)
    monkeypatch.setattr(bench, "_run", run)
    for name in ("_fresh_costs", "_ceiling", "_judge"):
        monkeypatch.setattr(bench, name, lambda *_: None)
    rows = bench.measure(["drex", "off"], [0.9], rounds=2)
    assert ran == [("off", 8), ("drex", 8), ("off", 9)] * 2
    assert [(r.slots, r.wanted_slots, r.tokens_per_s) for r in rows] == [(8, 0, 8.0), (9, 16, 9.0)]
    print_table(rows)
    assert "9 of 16" in capsys.readouterr().out


def test_a_ratio_is_the_median_of_those_of_the_rounds() -> None:
    rows = [
        measured("off", 2.0, rounds={"tokens_per_s": [1.0, 2.0, 9.0]}),
        measured("lazy", 3.0, rounds={"tokens_per_s": [2.0, 3.0, 4.0]}),
        measured("drex", 8.0, rounds={"tokens_per_s": [4.0, 8.0, 9.0]}),
    ]
    found = headline(rows)
    assert found["vs_no_exit_equal_memory"] == 4.0 and found["vs_best_grouped"] == 2.25
    assert found["p99_itl_ratio"] == 1.0, "rows without rounds have medians"


def test_a_batch_that_is_given_is_run_though_it_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Mock(measure=Mock(side_effect=ConfigError("seen")))
    monkeypatch.setattr(DrexBench, "load", load := Mock(return_value=bench))
    assert main(["paper", "drex", "--quick", "--batch", "3"]) == 2
    assert load.call_args.args[1] == 3 and bench.measure.call_args.args[2] == 1, "one round"


def test_what_was_measured_is_there_though_the_run_is_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    row = measured("off", 100.0)
    bench = Mock(measure=Mock(side_effect=[[row], KeyboardInterrupt]))
    monkeypatch.setattr(DrexBench, "load", Mock(return_value=bench))
    words = ["paper", "drex", "--quick", "--batch", "3", "4", "--model", "quadriga-s"]
    assert main([*words, "--out", str(tmp_path)]) == 130
    assert read_rows(tmp_path / "drex.partial.json") == [row]
    publish("drex", {}, [plain(row)], tmp_path)
    assert not (tmp_path / "drex.partial.json").exists() and read_rows(tmp_path / "drex.json")


def test_where_no_decision_was_judged_none_is_said_to_be_right(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [measured("off", 1.0), measured("drex", 1.0, decisions=Decisions())]
    assert headline(rows)["decisions_right"] is None
    assert plain(rows[1])["decisions"]["share_right"] is None
    print_table(rows)
    assert "100.0%" not in capsys.readouterr().out


def quality(mode: str, threshold: float, delta: float, early: float, speed: float = 1.0) -> Quality:
    return Quality(
        "m", mode, threshold, 0.9 + delta, delta, early, 0, {}, 0, 0, {}, speed, 1.0, 0.0, 0.0
    )


def test_the_choice_keeps_the_answers_and_then_leaves_most() -> None:
    rows = [
        quality("", 1.0, 0.0, 0.0),
        quality("copy", 0.9, -0.05, 0.9),
        quality("linear", 0.98, -0.01, 0.8, speed=1.0),
        quality("project", 0.98, -0.008, 0.801, speed=2.0),
        quality("project", 0.995, 0.0, 0.7),
    ]
    found = choose(rows, "m")
    assert found is rows[3], "as many leave, and it is faster"
    assert choose(rows[:2], "m") is None
    assert choose(rows, "other") is None


def test_who_is_to_blame_is_who_said_something_else_first() -> None:
    full = ClosedLoopRun(outputs={0: [1, 2, 3], 1: [4, 5], 2: [6]})
    ours = ClosedLoopRun(
        outputs={0: [1, 9, 3], 1: [4, 5], 2: [7]}, exit_layers={0: [8, 2, 2], 1: [8, 2], 2: [8]}
    )
    assert _parted_at(ours, full) == {2: 1, 8: 1}
