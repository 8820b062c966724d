"""What `paper lossless` says in its last line."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

import pytest

from loadgen.__main__ import main
from loadgen.paper.clocks import ProcessorClock
from loadgen.paper.drex.closed_loop import ClosedLoopRun
from loadgen.paper.lossless import experiment
from loadgen.paper.lossless.experiment import LosslessRow, headline
from loadgen.paper.lossless.lanes import (
    ASKED,
    BOUNDED,
    DRAFTS,
    LOSSLESS,
    OFF,
    SMOOTH,
    gap_p99_s,
    race,
)


def row(
    slots: int, mode: str, speedup: float, *, same: bool = True, gap: float = 1.0
) -> LosslessRow:
    return LosslessRow("m", slots, mode, 100.0, speedup, same, gap, 1.0, 2.0, 0.9)


def test_the_last_line_compares_with_the_better_of_full_depth_and_drafts() -> None:
    rows = [row(slots, "off", 1.0) for slots in (1, 4)]
    rows += [row(1, "lossless", 1.8), row(1, "drafts", 2.0), row(1, "smooth", 1.1, gap=1.3)]
    rows += [row(4, "lossless", 0.97), row(4, "drafts", 0.5), row(4, "smooth", 1.0, gap=1.2)]
    line = headline(rows)
    assert line["speedup"] == {"m": {"1": 1.8, "4": 0.97}}
    assert line["worst_vs_best_mode"] == 0.9
    assert line["p99_gap_paced"] == 1.3


@pytest.mark.parametrize("mode", ["lossless", "asked", "drafts", "smooth"])
def test_one_token_that_differs_is_told_but_of_bounded_exits(mode: str) -> None:
    rows = [row(1, "off", 1.0), row(1, "lossless", 1.0), row(1, "bounded", 1.5, same=False)]
    assert headline(rows)["identical"]
    rows.append(row(1, mode, 1.0, same=False))
    assert not headline(rows)["identical"]


def test_what_was_measured_is_there_though_the_run_is_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        experiment, "_measure", Mock(side_effect=[[row(1, "off", 1.0)], KeyboardInterrupt])
    )
    words = ["--model", "quadriga-s", "--slots", "1", "2", "--out", str(tmp_path)]
    assert main(["paper", "lossless", *words]) == 130
    (kept,) = json.loads((tmp_path / "lossless.partial.json").read_text())["rows"]
    assert LosslessRow(**kept) == row(1, "off", 1.0)


def test_the_p99_gap_lies_between_the_gaps_around_it() -> None:
    assert gap_p99_s(ClosedLoopRun(gaps_s=[1.0, 0.0])) == pytest.approx(0.99)


def test_contestants_do_the_same_prompts_each_in_its_own_way() -> None:
    names, said = (OFF, LOSSLESS, ASKED, DRAFTS, BOUNDED, SMOOTH), list[str]()
    suite, runs = race(
        "quadriga-s",
        names,
        slots=2,
        num_prompts=8,
        max_tokens=40,
        threads=1,
        clock=ProcessorClock(),
        say=said.append,
    )
    assert tuple(runs) == names and len(said) == len(names) and len(suite.prompts) == 8
    for name, run in runs.items():
        assert len(run.outputs) == 8 and all(run.outputs.values())
        assert run.tokens_per_s > 0.0 and run.gaps_s
        if name != BOUNDED:
            assert run.outputs == runs[OFF].outputs
    assert runs[OFF].counters.verified == 0
    for name in (DRAFTS, LOSSLESS, ASKED):
        counters = runs[name].counters
        assert 0 <= counters.accepted <= counters.drafted
    drafts = runs[DRAFTS]  # how long they are follows what passes take
    assert drafts.counters.accepted > 0 and drafts.counters.verified < drafts.tokens
    assert runs[BOUNDED].early_share(8) > runs[OFF].early_share(8) == 0.0
