"""The timeline of a run: smoothing, and what did not end well."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from loadgen.checker import Outcome
from loadgen.report import plots, timeline
from loadgen.runner import Record
from tests.unit.loadgen.test_loadgen_metrics import record, result


def test_a_level_line_stays_level_up_to_its_ends() -> None:
    assert timeline.smoothed(np.full(50, 7.0), 6.0) == pytest.approx(np.full(50, 7.0))


def test_smoothing_spreads_a_peak_and_loses_nothing() -> None:
    peak = np.zeros(200)
    peak[100] = 60.0
    found = timeline.smoothed(peak, 5.0)
    assert found.sum() == pytest.approx(60.0)
    assert found[100] == found.max() < 6.0
    assert found[95] == pytest.approx(found[105])


def test_smoothing_takes_series_shorter_than_its_reach_and_none_at_all() -> None:
    assert timeline.smoothed(np.array([1.0, 3.0]), 10.0) == pytest.approx([2.0, 2.0], abs=0.1)
    assert timeline.smoothed(np.array([]), 3.0).tolist() == []
    assert timeline.smoothed(np.array([1.0, 3.0]), 0.0).tolist() == [1.0, 3.0]


def rough_run() -> list[Record]:
    """Served, failed, refused for good, and refused before it was served."""
    good = [record((10.0 + k, 40), sent_s=9.0 + k, ended_s=12.0 + k) for k in range(30)]
    failed = [record(ended_s=21.0, outcome=Outcome.FAILED) for _ in range(3)]
    refused = [record(sent_s=15.0 + k, ended_s=15.1 + k, outcome=Outcome.REFUSED) for k in range(4)]
    again = replace(record((32.0, 10), scheduled_s=25.0, sent_s=31.0, ended_s=33.0), attempts=3)
    return [*good, *failed, *refused, again]


def test_refusals_that_were_tried_again_count_as_refusals_too() -> None:
    found = timeline.endings(rough_run(), 5.0)
    assert {outcome: len(times) for outcome, times in found.items()} == {
        Outcome.OK: 31,
        Outcome.REFUSED: 6,
        Outcome.FAILED: 3,
    }
    assert found[Outcome.REFUSED] == pytest.approx([10.1, 11.1, 12.1, 13.1, 20.0, 20.0])


def drawn(*records: Record) -> Figure:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(3, 1)
    timeline.draw_timeline(axes, result(*records))
    pyplot.close(figure)
    return figure


def test_failures_and_refusals_are_drawn_and_counted() -> None:
    running, tokens, ended = drawn(*rough_run()).axes
    said = [text.get_text() for text in ended.get_legend().get_texts()]
    assert said == ["31 passed every check", "6 refused", "3 failed"]
    assert [t.get_text() for t in running.get_legend().get_texts()] == ["6 refused", "3 failed"]
    assert {line.get_marker() for line in running.lines} == {"None", "v", "x"}
    bars = [patch for patch in ended.patches if patch.get_height() > 0]
    heights = sum(patch.get_height() * patch.get_width() for patch in bars)
    assert heights == pytest.approx(31 + 6 + 3)
    assert len(tokens.lines) == 2, "as counted, and smoothed"


def test_a_run_in_which_all_went_well_has_no_marks() -> None:
    running, _, ended = drawn(record((11.0, 5))).axes
    assert running.get_legend() is None
    assert [t.get_text() for t in ended.get_legend().get_texts()] == ["1 passed every check"]


def test_an_empty_run_and_one_of_failures_alone_can_be_drawn() -> None:
    assert len(drawn().axes) == 3
    assert len(drawn(record(ended_s=10.0, outcome=Outcome.FAILED)).axes) == 3


@pytest.mark.parametrize("records", [rough_run(), []])
def test_both_pictures_are_written_without_warnings(records: list[Record], tmp_path: Path) -> None:
    plots.write_plots(tmp_path, result(*records), "a run")
    assert {path.name for path in tmp_path.iterdir()} == {"latency.png", "timeline.png"}
