"""Figures from hand-made records."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from loadgen.checker import AnswerChoice, FaultKind, Outcome, Verdict, Write
from loadgen.report.metrics import (
    LoadSlo,
    inter_token_gaps_s,
    is_good,
    stalls_s,
    summarise,
    tpot_s,
    ttft_s,
)
from loadgen.report.run_report import print_summary
from loadgen.report.timeline import running_requests
from loadgen.runner import Record, RunResult
from tests.unit.loadgen.conftest import make_spec


def record(
    *writes: tuple[float, int],
    sent_s: float = 10.0,
    ended_s: float = 20.0,
    outcome: Outcome = Outcome.OK,
    scheduled_s: float | None = None,
    **spec: object,
) -> Record:
    choice = AnswerChoice(
        writes=[Write(time_s, num) for time_s, num in writes],
        num_tokens=sum(num for _, num in writes),
    )
    verdict = Verdict(outcome=outcome, choices=[choice], prompt_tokens=7)
    scheduled = sent_s if scheduled_s is None else scheduled_s
    return Record(make_spec(**spec), "id", scheduled, sent_s, ended_s, 1, 100, verdict)


def result(*records: Record) -> RunResult:
    return RunResult(start_s=0.0, start_unix_s=0.0, end_s=100.0, cpu_s=5.0, records=[*records])


def test_latencies_of_one_stream() -> None:
    found = record((11.0, 1), (11.5, 1), (12.5, 2))
    assert ttft_s(found) == 1.0
    assert tpot_s(found) == pytest.approx(1.5 / 3)
    assert inter_token_gaps_s(found) == [0.5, 1.0, 0.0]
    assert stalls_s(found) == [0.5, 1.0]


def test_writes_of_one_read_are_one_arrival() -> None:
    found = record((11.0, 1), (12.0, 1), (12.0, 1), (14.0, 1))
    assert stalls_s(found) == [1.0, 2.0]
    assert inter_token_gaps_s(found) == [1.0, 0.0, 2.0]


def test_tokens_of_the_first_write_arrive_together() -> None:
    found = record((11.0, 3), (12.0, 1))
    assert inter_token_gaps_s(found) == [0.0, 0.0, 1.0]
    assert tpot_s(found) == pytest.approx(1 / 3)


def test_answers_that_are_not_streamed_have_no_token_times() -> None:
    found = record((20.0, 30), stream=False)
    assert ttft_s(found) is None and tpot_s(found) is None
    assert inter_token_gaps_s(found) == [] and stalls_s(found) == []


def test_single_token_has_no_tpot() -> None:
    assert tpot_s(record((11.0, 1))) is None


def test_slowest_choice_counts() -> None:
    found = record((11.0, 1), (12.0, 1))
    found.verdict.choices.append(
        AnswerChoice(writes=[Write(10.5, 1), Write(13.5, 1)], num_tokens=2)
    )
    assert ttft_s(found) == 0.5
    assert tpot_s(found) == 3.0


def test_good_keeps_every_limit_that_is_set() -> None:
    found = record((11.0, 1), (12.0, 1))
    assert is_good(found, LoadSlo(1.0, 1.0))
    assert not is_good(found, LoadSlo(0.9, None))
    assert not is_good(found, LoadSlo(None, 0.9))
    assert is_good(record((11.0, 1)), LoadSlo(1.0, 0.1))
    assert not is_good(record((11.0, 1), outcome=Outcome.FAILED), LoadSlo(1.0, 1.0))
    assert not is_good(record(), LoadSlo(ttft_s=1.0))


def test_summary() -> None:
    failed = record((11.0, 5), outcome=Outcome.FAILED, ended_s=30.0)
    failed.verdict.add(FaultKind.DONE, "none")
    failed.verdict.add(FaultKind.USAGE, "follows")
    refused = record(outcome=Outcome.REFUSED, sent_s=10.0, ended_s=10.1)
    refused.verdict.retry_after_s = 2.0
    good = record((11.0, 1), (11.1, 1), ended_s=12.0, scheduled_s=9.5)
    slow = record((15.0, 1), (15.1, 1))
    summary = summarise(result(failed, refused, good, slow), LoadSlo(ttft_s=2.0))
    assert (summary.requests, summary.ok, summary.refused, summary.failed) == (4, 2, 1, 1)
    assert summary.faults == {"done": 1}
    assert summary.duration_s == 20.0
    assert summary.output_tokens == 4  # of those that passed only
    assert summary.output_tokens_per_s == pytest.approx(0.2)
    assert summary.requests_per_s == pytest.approx(0.1)
    assert summary.goodput_rps == pytest.approx(0.05)
    assert summary.good_share == pytest.approx(0.25)
    assert summary.retry_after.max == 2.0
    assert summary.ttft.count == 2 and summary.ttft.max == 5.0
    assert summary.lag.max == 0.5 and summary.generator_is_slow
    assert summary.generator_cpu_share == pytest.approx(0.05)
    assert summary.tokens_per_write == 1.0


def test_attempts_that_were_refused_are_counted() -> None:
    again, refused = record((11.0, 1)), record(outcome=Outcome.REFUSED)
    again.attempts = refused.attempts = 3
    summary = summarise(result(again, refused), LoadSlo())
    assert (summary.refused, summary.refused_attempts) == (1, 5) and summary.lag.count == 2
    console = Console(file=io.StringIO(), width=100)
    print_summary(console, summary, "run")
    assert isinstance(console.file, io.StringIO)
    assert re.search(r"refused attempts, with retried ones\W+5\b", console.file.getvalue())


def test_tokens_are_counted_by_the_layers_they_ran() -> None:
    """Of requests that passed; a service may not tell, and a request then counts for nothing."""
    silent, failed = record((1.0, 1)), record(outcome=Outcome.FAILED)
    failed.verdict.extension = {"exits": {"2": 50}}
    told = [record((1.0, 1)), record((1.0, 1))]
    told[0].verdict.extension = {"exits": {"10": 3, "2": 1}}
    told[1].verdict.extension = {"exits": {"10": 4}}
    summary = summarise(result(silent, failed, *told), LoadSlo())
    assert list(summary.exits.items()) == [(2, 1), (10, 7)]
    console = Console(record=True, width=120, file=io.StringIO())
    print_summary(console, summary, "run")
    assert "2: 12.5%, 10: 87.5%" in console.export_text()


def test_choices_whose_tokens_nobody_told_apart_are_counted_together() -> None:
    whole = record(stream=False, num_choices=2)
    whole.verdict.choices.append(AnswerChoice())
    whole.verdict.completion_tokens, whole.verdict.counted_by = 80, "usage"
    assert summarise(result(whole), LoadSlo()).output_tokens == 80


def test_nothing_passed_gives_no_figures() -> None:
    summary = summarise(result(record(outcome=Outcome.REFUSED)), LoadSlo())
    assert summary.ttft.p50 is None and summary.goodput_rps is None
    assert summary.output_tokens_per_s == 0.0
    assert summarise(result(), LoadSlo()).requests == 0


def test_scores_are_per_task() -> None:
    records = [record((11.0, 1), task=task) for task in ("sort", "sort", "copy")]
    for one, score in zip(records, (True, False, True), strict=True):
        one.score = score
    records.append(record(outcome=Outcome.FAILED, task="sort"))  # by `--same-as`, after its score
    records[-1].score = True
    assert summarise(result(*records), LoadSlo()).scores == {"copy": (1, 1), "sort": (1, 2)}


def test_requests_of_conversations_are_summed_up_by_turn() -> None:
    records = [
        record((11.0 + turn, 1), session=number, turn=turn, dropped_turns=max(0, turn - 10))
        for number in range(2)
        for turn in range(12)
    ]
    records[1].verdict.outcome = Outcome.FAILED
    summary = summarise(result(*records), LoadSlo(), unsent={"a request before failed": 3})
    assert summary.sessions == 2 and summary.unsent == {"a request before failed": 3}
    assert [(turn.first, turn.last) for turn in summary.turns] == [
        *((turn, turn) for turn in range(9)),
        (9, 11),
    ]
    second, late = summary.turns[1], summary.turns[-1]
    assert (second.requests, second.ok, second.shortened) == (2, 1, 0)
    assert second.ttft.p50 == 2.0 and second.prompt_tokens == 7.0
    assert (late.requests, late.ok, late.shortened) == (6, 6, 2)
    assert summarise(result(record((11.0, 1))), LoadSlo()).turns == []


def test_running_requests_return_to_none() -> None:
    times, running = running_requests([record(), record(sent_s=15.0, ended_s=25.0)])
    assert times.tolist() == [10.0, 15.0, 20.0, 25.0]
    assert running.tolist() == [1, 2, 1, 0]
