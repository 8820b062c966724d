"""Ramps: levels, arrivals and places that rise, the judgement of steps, whole runs."""

from __future__ import annotations

import argparse
import asyncio
import io
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from loadgen import ramp
from loadgen.__main__ import main
from loadgen.checker import AnswerChoice, Outcome, Verdict, Write
from loadgen.comparison.comparable import load_differences
from loadgen.load.arrivals import parse_arrivals
from loadgen.ramps.levels import Ramp, Rise, Step
from loadgen.ramps.report import conclusion, write_ramp_plot
from loadgen.ramps.steps import Goal, RampWatch, StepFigures, capacity_of, figures_of
from loadgen.report.metrics import LoadSlo
from loadgen.report.results import read_results
from loadgen.runner import Record, RunResult
from loadgen.wire.capture import now_s
from quadriga.errors import ConfigError
from tests.fake_service.generation import FakeOptions
from tests.fake_service.server import FakeServer
from tests.unit.loadgen.conftest import Service, make_spec, run_command

GOAL = Goal(LoadSlo(ttft_s=1.0, tpot_s=0.1), share=0.9)


def rate_ramp(low: float, high: float, *, rise: Rise = "even", steps: int = 4) -> Ramp:
    return Ramp("rate", rise, low, high, steps, step_s=50.0, settle_s=10.0)


def test_levels_rise_as_asked() -> None:
    assert rate_ramp(1, 7).levels() == [1.0, 3.0, 5.0, 7.0]
    assert rate_ramp(1, 8, rise="geometric").levels() == pytest.approx([1, 2, 4, 8])
    assert rate_ramp(0.001, 8, rise="linear").levels() == pytest.approx([1, 3, 5, 7], abs=1e-3)
    assert Ramp("concurrency", "even", 1, 4, 3, 1.0, 0.0).levels() == [1.0, 2.0, 4.0]
    assert rate_ramp(5, 5, steps=1).levels() == [5.0]


@pytest.mark.parametrize("rise", ["even", "geometric"])
def test_no_concurrency_is_measured_twice(rise: Rise) -> None:
    ramp = Ramp("concurrency", rise, 1, 4, 8, 1.0, 0.0)
    assert ramp.levels() == [1, 2, 3, 4]
    assert ramp.duration_s == len(ramp.steps()) == 4
    assert ramp.places_s() == (0.0, 1.0, 2.0, 3.0)
    steps = rate_ramp(1, 7).steps()
    assert steps[1] == Step(1, 3.0, from_s=50.0, counted_from_s=60.0, to_s=100.0)
    assert steps[1].counted_s == 40.0


@pytest.mark.parametrize("rise", ["even", "geometric", "linear"])
@pytest.mark.parametrize("process", ["poisson:1", "constant:1", "gamma:1:2"])
def test_arrivals_have_the_rate_of_their_step(rise: Rise, process: str) -> None:
    rising = rate_ramp(20, 60, rise=rise)
    times = rising.times_s(parse_arrivals(process), seed=3)
    assert np.all(np.diff(times) >= 0) and times[0] >= 0 and times[-1] < rising.duration_s
    cv = {"poisson:1": 1.0, "constant:1": 0.0, "gamma:1:2": 2.0}[process]
    for step in rising.steps():
        found = int(np.sum((times >= step.from_s) & (times < step.to_s)))
        expected = step.level * 50.0
        assert abs(found - expected) <= 2 + 4 * cv * np.sqrt(expected)
    assert np.array_equal(times, rising.times_s(parse_arrivals(process), seed=3))


def test_a_linear_ramp_rises_inside_its_steps() -> None:
    times = rate_ramp(1, 100, rise="linear", steps=1).times_s(parse_arrivals("constant:1"), seed=0)
    early, late = np.sum(times < 25), np.sum(times >= 25)
    assert early == pytest.approx(25 * (1 + 50.5) / 2, abs=2)
    assert late == pytest.approx(25 * (50.5 + 100) / 2, abs=2)


def test_too_long_a_ramp_is_refused() -> None:
    with pytest.raises(ConfigError, match="at most 2,000,000 are possible: lower --rate"):
        rate_ramp(1000, 1e6).times_s(parse_arrivals("poisson:1"), seed=0)


def test_places_open_as_the_level_rises() -> None:
    even = Ramp("concurrency", "even", 1, 5, 3, step_s=2.0, settle_s=0.0)
    assert even.places_s() == (0.0, 2.0, 2.0, 4.0, 4.0)
    linear = Ramp("concurrency", "linear", 1, 5, 2, step_s=2.0, settle_s=0.0)
    assert linear.places_s() == (0.0, 1.0, 2.0, 3.0, 4.0)


def record(
    index: int,
    sent_s: float,
    *,
    ttft_s: float = 0.5,
    tpot_s: float = 0.05,
    outcome: Outcome = Outcome.OK,
) -> Record:
    """A request of 3 tokens."""
    times = [sent_s + ttft_s + token * tpot_s for token in range(3)]
    choice = AnswerChoice(writes=[Write(time_s, 1) for time_s in times], num_tokens=3)
    verdict = Verdict(outcome=outcome, choices=[choice])
    spec = make_spec(index=index, max_tokens=3)
    return Record(spec, "id", sent_s, sent_s, times[-1], 1, 10, verdict)


STEP = Step(0, 2.0, from_s=0.0, counted_from_s=5.0, to_s=15.0)


def test_what_ends_after_the_stretch_is_no_goodput_of_it() -> None:
    """A burst at the end of a step, all of it good and served in the next step."""
    burst = [record(index, 114.9) for index in range(10)]
    found = figures_of(STEP, burst, start_s=100.0, num_sent=10, goal=GOAL)
    assert found.good_share == 1.0
    assert found.kept
    assert (found.goodput_rps, found.requests_per_s) == (0.0, 0.0)


def test_figures_are_of_the_counted_stretch() -> None:
    records = [
        record(0, 104.8),  # due while the level settles; its tokens come afterwards
        record(1, 106.0),
        record(2, 107.0, ttft_s=1.5),
        record(3, 108.0, tpot_s=0.2),
        record(4, 109.0, outcome=Outcome.FAILED),
        record(5, 110.0, outcome=Outcome.REFUSED),
        record(6, 114.8),  # ends in the next step, and is good
        record(7, 115.0),
    ]
    found = figures_of(STEP, records, start_s=100.0, num_sent=7, goal=GOAL)
    assert (found.requests, found.ok, found.failed, found.refused) == (7, 4, 1, 1)
    assert found.unfinished == 1
    assert found.good_share == pytest.approx(2 / 7) and found.goodput_rps == pytest.approx(0.2)
    assert found.output_tokens_per_s == pytest.approx((3 + 9) / 10)
    assert found.requests_per_s == pytest.approx(4 / 10)
    assert found.error_share == pytest.approx(3 / 7)
    assert found.ttft.count == 4 and found.ttft.max == pytest.approx(1.5)
    assert found.kept is False
    json.dumps(found.as_dict())


def test_a_share_is_kept_exactly_at_its_limit() -> None:
    assert GOAL.is_kept(9, 10) and not GOAL.is_kept(8, 10)
    assert Goal(GOAL.slo, 1.0).is_kept(10, 10) and not Goal(GOAL.slo, 1.0).is_kept(9, 10)


def watch_of(*sent: tuple[int, float]) -> RampWatch:
    watch = RampWatch([STEP], GOAL)
    watch.began(100.0)
    for index, at_s in sent:
        watch.sent(make_spec(index=index, max_tokens=3), at_s)
    return watch


def test_a_step_is_concluded_when_all_of_it_has_ended() -> None:
    watch = watch_of((0, 104.0), (1, 106.0))
    watch.ended(record(1, 106.0))
    assert watch.conclude(114.9) == []  # more might be sent
    (figures,) = watch.conclude(115.0)  # the first is none of the step's
    assert figures.kept is True and figures.requests == 1
    assert watch.concluded_s == 115.0 and watch.conclude(116.0) == []


def test_a_step_waits_for_what_can_still_be_good() -> None:
    watch = watch_of((1, 106.0), (2, 114.9))
    watch.ended(record(1, 106.0))
    assert watch.conclude(115.0) == []
    # 1 s, two tokens of 0.1 s and a second for the end: later it cannot be good.
    assert watch.conclude(114.9 + 2.19) == [] and watch.concluded_s == 0.0
    (figures,) = watch.conclude(114.9 + 2.21)
    assert figures.kept is False and figures.unfinished == 1


def test_a_broken_step_is_known_before_its_last_answer() -> None:
    watch = watch_of(*((index, 110.0) for index in range(10)))
    for index in range(2):
        watch.ended(record(index, 110.0, ttft_s=3.0))
    (figures,) = watch.conclude(115.0)
    assert figures.kept is False and figures.unfinished == 8


def figures_with(*kept: bool | None) -> list[StepFigures]:
    found = []
    for number, one in enumerate(kept):
        step = Step(number, float(number + 1), 0.0, 5.0, 15.0)
        num_sent = 0 if one is None else 1
        records = [record(0, 106.0, ttft_s=0.5 if one else 2.0)] if num_sent else []
        found.append(figures_of(step, records, start_s=100.0, num_sent=num_sent, goal=GOAL))
    assert [one.kept for one in found] == [*kept]
    return found


@pytest.mark.parametrize(
    ("kept", "expected", "says"),
    [
        ((True, True, False), (2.0, 3.0), "up to 2 requests/s, and no longer at 3 requests/s"),
        ((True, True), (2.0, None), "up to 2 requests/s, as far as it went"),
        ((False,), (None, 1.0), "1 requests/s is too much already"),
        # What is kept above a broken level was luck.
        ((True, False, True), (1.0, 2.0), "up to 1 requests/s, and no longer at 2 requests/s"),
        ((None, True, False), (2.0, 3.0), "up to 2 requests/s"),
        ((), (None, None), "nothing is known"),
    ],
)
def test_the_capacity_lies_below_the_first_broken_level(
    kept: tuple[bool | None, ...], expected: tuple[float | None, float | None], says: str
) -> None:
    figures = figures_with(*kept)
    capacity = capacity_of(figures)
    assert (capacity.kept, capacity.broken) == expected
    assert says in conclusion(figures, rate_ramp(1, 4), GOAL)


def test_a_ramp_is_drawn(tmp_path: Path) -> None:
    write_ramp_plot(tmp_path, [], rate_ramp(1, 3), GOAL, "nothing")
    assert not list(tmp_path.iterdir())
    write_ramp_plot(tmp_path, figures_with(True, None, False), rate_ramp(1, 3), GOAL, "x")
    assert (tmp_path / "ramp.png").read_bytes().startswith(b"\x89PNG")


def of_kind(lines: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [line for line in lines if line["kind"] == kind]


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_a_ramp_within_the_slo_goes_to_its_end(
    transport: str, service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--tasks", "7", "--max-tokens", "5", "--rate", "30-60", "--steps", "2"]
    words += ["--step-s", "0.4", "--settle-s", "0.1", "--transport", transport, "--slo-ttft-s", "9"]
    words += ["--slo-tpot-s", "9"]
    status, lines = run_command("ramp", service(), tmp_path, *words, "--warmup", "1")
    assert status == 0
    assert lines[0]["kind"] == "ramp" and lines[0]["config"]["rate"] == [30.0, 60.0]
    requests, steps = of_kind(lines, "request"), of_kind(lines, "step")
    assert len(requests) > 7  # the tasks were used again
    assert [request["index"] for request in requests] == list(range(len(requests)))
    assert [(step["step"]["level"], step["kept"]) for step in steps] == [(30, True), (60, True)]
    for step in steps:
        at = step["step"]
        due = [r for r in requests if at["counted_from_s"] <= r["scheduled_s"] < at["to_s"]]
        assert step["requests"] == len(due) == step["ok"] > 0
    (capacity,) = of_kind(lines, "capacity")
    assert capacity == {"kind": "capacity", "unit": "rate", "kept": 60.0, "broken": None}
    out = capsys.readouterr().out
    assert "step 1/2, 30 requests/s" in out and "up to 60 requests/s, as far as it went" in out


def test_a_ramp_stops_where_the_slo_breaks(service: Service, tmp_path: Path) -> None:
    """Every token takes the fake 20 ms, so the limit of 10 ms cannot be kept at any rate."""
    words = ["--tasks", "4", "--max-tokens", "5", "--rate", "20-80", "--steps", "40"]
    words += ["--step-s", "0.5", "--slo-tpot-s", "0.01"]
    status, lines = run_command("ramp", service(step_s=0.02), tmp_path, *words, "--warmup", "1")
    assert status == 0
    (capacity,) = of_kind(lines, "capacity")
    assert (capacity["kept"], capacity["broken"]) == (None, 20.0)
    last_s = max(request["sent_s"] for request in of_kind(lines, "request"))
    assert last_s < 10.0  # of 20 s


def test_a_closed_ramp_opens_its_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its five tasks come again and again, and none meets the cached prefix of one before it."""
    sent: list[Any] = []

    async def run() -> tuple[int, int]:
        async with FakeServer(FakeOptions(step_s=0.002)) as server:
            begun_s = now_s()

            def until_all_are_busy() -> float:
                """No step is over before; else it might be before the last places had a turn."""
                at_s = now_s()
                return begun_s if server.max_in_flight < 3 and at_s < begun_s + 8.0 else at_s

            monkeypatch.setattr(ramp, "now_s", until_all_are_busy)
            words = ["ramp", "--url", server.url, "--tasks", "5", "--max-tokens", "5"]
            words += ["--concurrency", "1-3", "--steps", "2", "--step-s", "0.5", "--no-plots"]
            words += ["--settle-s", "0", "--slo-ttft-s", "9", "--slo-tpot-s", "9"]
            words += ["--output", str(tmp_path / "out"), "--warmup", "2"]
            sent.append(server.bodies)
            return await asyncio.to_thread(main, words), server.max_in_flight

    assert asyncio.run(run()) == (0, 3)
    prompts = [(body["prompt"], body.get("cache_salt")) for body in sent[0] if "max_tokens" in body]
    assert len(set(prompts)) == len(prompts) > 7 > len({prompt for prompt, _ in prompts})
    text = (tmp_path / "out" / "run.jsonl").read_text()
    requests = of_kind([json.loads(line) for line in text.splitlines()], "request")
    first = [r for r in requests if r["sent_s"] < 0.45]  # timers may be a little early
    for before, after in itertools.pairwise(first):
        assert after["sent_s"] >= before["ended_s"]  # one at a time
    assert max(r["sent_s"] for r in requests) < 10.0  # and it ended, though tasks never do
    assert all(r["score"] is not None for r in requests)


def test_a_service_that_refuses_all_is_not_flooded(service: Service, tmp_path: Path) -> None:
    words = ["--tasks", "3", "--concurrency", "2", "--steps", "1", "--step-s", "0.6"]
    words += ["--settle-s", "0", "--warmup", "0"]
    status, lines = run_command("ramp", service(fault="refuse"), tmp_path, *words)
    assert status == 1  # nothing was served
    assert 2 <= len(of_kind(lines, "request")) <= 2 * 12
    (step,) = of_kind(lines, "step")
    assert step["refused"] == step["requests"] and step["kept"] is False


def test_conversations_can_be_ramped(service: Service, tmp_path: Path) -> None:
    words = ["--sessions", "3", "--turns", "2", "--answer-tokens", "4", "--think-s", "0.02"]
    words += ["--rate", "20", "--steps", "1", "--step-s", "0.6", "--settle-s", "0"]
    words += ["--slo-ttft-s", "9", "--slo-tpot-s", "9"]
    status, lines = run_command("ramp", service(), tmp_path, *words, "--warmup", "1")
    assert status == 0
    requests = of_kind(lines, "request")
    assert {request["turn"] for request in requests} == {0, 1}
    assert len({request["session"] for request in requests}) > 3
    assert len({request["index"] for request in requests}) == len(requests)


def test_a_service_that_hangs_is_given_up(service: Service, tmp_path: Path) -> None:
    words = ["--tasks", "3", "--max-tokens", "4", "--rate", "20", "--steps", "2", "--step-s", "0.4"]
    words += ["--slo-ttft-s", "0.1", "--slo-tpot-s", "0.01", "--drain-s", "0.3"]
    status, lines = run_command("ramp", service(fault="hang"), tmp_path, *words, "--warmup", "0")
    assert status == 1
    steps = of_kind(lines, "step")
    assert steps[0]["kept"] is False and steps[0]["unfinished"] == steps[0]["requests"] > 0
    assert of_kind(lines, "summary")[0]["was_interrupted"] is False


def test_an_interrupted_ramp_keeps_what_has_ended(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    ramp.add_arguments(parser)

    async def run() -> tuple[RunResult, list[StepFigures]]:
        enough, prompts = asyncio.Event(), []

        def answer(prompt: str) -> None:
            prompts.append(prompt)
            if len(prompts) == 60:
                enough.set()

        async with FakeServer(FakeOptions(answer=answer)) as server:
            words = ["--url", server.url, "--tasks", "3", "--max-tokens", "3", "--rate", "50"]
            args = parser.parse_args([*words, "--steps", "100", "--step-s", "0.5", "--warmup", "0"])
            how = ramp.read_ramp(args)
            console = Console(file=io.StringIO())
            task = asyncio.create_task(ramp.drive(args, *how, console, tmp_path))
            await asyncio.wait_for(enough.wait(), 20)
            task.cancel()
            return await task

    result, figures = asyncio.run(run())
    assert result.was_interrupted
    assert len(result.records) >= 30 and 1 <= len(figures) < 50
    assert all(one.requests and not one.unfinished for one in figures)
    with pytest.raises(ConfigError, match="was interrupted"):
        raise ConfigError("; ".join(load_differences([read_results(tmp_path)] * 2)))


def test_a_trace_can_be_ramped(service: Service, tmp_path: Path) -> None:
    """Its lengths are used again from the start; its own times are not."""
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n0,5,3\n900,9,4\n")
    words = ["--trace", str(trace), "--rate", "30", "--steps", "1", "--step-s", "0.5"]
    status, lines = run_command("ramp", service(), tmp_path, *words, "--warmup", "1")
    assert status == 0
    lengths = [(r["prompt_tokens"], r["completion_tokens"]) for r in of_kind(lines, "request")]
    assert len(lengths) > 2
    assert lengths == [((5, 3), (9, 4))[index % 2] for index in range(len(lengths))]


def test_failed_responses_are_exit_status_1(service: Service, tmp_path: Path) -> None:
    words = ["--tasks", "3", "--rate", "20", "--steps", "1", "--step-s", "0.4"]
    status, lines = run_command("ramp", service(fault="gap"), tmp_path, *words, "--warmup", "0")
    assert status == 1
    (step,) = of_kind(lines, "step")
    assert step["failed"] == step["requests"] and step["error_share"] == 1.0
