"""The judges of soak, overload and upgrade: each thing that can be wrong makes a failure."""

from __future__ import annotations

import argparse
import asyncio
import errno
import importlib
import json
import math
import os
import random
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, MagicMock, Mock, patch

import numpy as np
import pytest
from rich.console import Console

from loadgen.__main__ import main
from loadgen.bench.cluster.service import ServiceUnderLoad
from loadgen.checker import Outcome, Verdict
from loadgen.checker.judge import Judgement
from loadgen.checker.verdict import AnswerChoice, FaultKind, Write
from loadgen.comparison.pairs import paired_ratio
from loadgen.report.metrics import Distribution, LoadSummary
from loadgen.runner import Record
from loadgen.target import Target
from loadgen.wire.capture import Capture, Transport, now_s
from quadriga.errors import ConfigError
from tests.fake_service.server import MODEL, FakeOptions, FakeServer
from tests.reliability import all_on, soak
from tests.reliability import overload_report as overload
from tests.reliability import upgrade_report as upgrade
from tests.reliability.cluster.agent_client import AgentError
from tests.reliability.cluster.baseline import ResourceBaseline, trouble_with
from tests.reliability.cluster.process_resources import (
    ProcessResources,
    Series,
    process_resources,
    slope,
)
from tests.reliability.load.mixed_load import Silence, SlowHttpClient, Tally, silences_of
from tests.reliability.load.random_faults import WEIGHTS, RandomFaults
from tests.reliability.load.streams import StreamAnswer, make_streams
from tests.reliability.overload import Overload
from tests.reliability.overload_report import Found, Phase, Returns, recovered_after_s
from tests.reliability.rescheduling_turns import ratios_of
from tests.reliability.upgrade import tell
from tests.unit.loadgen.conftest import make_spec
from tests.waiting import until

MIB = 1 << 20
TIMES = [0.5 * i for i in range(240)]


@pytest.mark.parametrize(
    ("per_h", "noise", "is_leak"),
    [(0, 1.0, False), (10, 0.0, False), (200, 0.1, True), (600, 1.0, True), (-600, 1.0, False)],
)
def test_slopes(per_h: float, noise: float, is_leak: bool) -> None:
    rng = random.Random(0)
    values = [100 * MIB + t / 3600 * per_h * MIB + rng.gauss(0, noise) * MIB for t in TIMES]
    fitted = slope(TIMES, values)
    assert fitted is not None
    assert fitted.per_h / MIB == pytest.approx(per_h, abs=3 * fitted.error / MIB + 1e-6)
    assert fitted.is_leak(20.0 * MIB) is is_leak


def test_a_slope_that_may_be_chance_is_no_leak() -> None:
    rng = random.Random(1)
    values = [100 * MIB + 60 * MIB * (rng.random() < 0.5) for _ in TIMES]
    fitted = slope(TIMES, values)
    assert fitted is not None
    assert not fitted.is_leak(20.0 * MIB)
    assert slope(TIMES[:10], values[:10]) is None


def test_a_new_process_may_fill_up_first() -> None:
    """Seven minutes old, it grew for four of them and stands still since."""
    young, old = Series("prefill"), Series("prefill")
    for t in range(0, 430, 5):
        young.add(float(t), ProcessResources((200 + min(t, 240) // 6) * MIB, {}))
    for t in range(0, 3600, 5):
        old.add(float(t), ProcessResources((200 + t // 30) * MIB, {}))
    settled = young.memory_slope(0.5, 300.0)
    assert settled is not None and not settled.is_leak(20.0 * MIB)
    grows = old.memory_slope(0.5, 300.0)
    assert grows is not None and grows.is_leak(20.0 * MIB)
    assert young.memory_slope(0.5, 500.0) is None


def test_replicas_that_live_through_show_leaks_and_later_ones_touch_their_memory_first() -> None:
    args = argparse.Namespace(minutes=20.0, max_slope=20.0)
    run = soak.Soak(args, ServiceUnderLoad("", None, None, None), Console(quiet=True))
    for pid, kind in enumerate(("decode", "decode", "scheduler")):
        run._series[pid] = Series(
            kind, [5.0 * i for i in range(240)], [i * MIB for i in range(240)]
        )
    run._judge_memory(ResourceBaseline(by_pid={0: ("decode", ProcessResources(MIB, {}))}))
    assert [text.split(" grows")[0] for text in run._troubles] == ["decode 0", "scheduler 2"]


async def test_each_harm_is_done_once_before_chance_decides() -> None:
    faults = RandomFaults(MagicMock(), MagicMock(), random.Random(0), every_s=1e-6, weights=WEIGHTS)
    faults._control.pids.return_value = {1: ""}  # type: ignore[attr-defined]
    done: list[str] = []

    async def harm(what: str) -> bool:
        done.append(what)
        assert len(done) < 6, "enough"
        return len(done) > 2

    harms = {f"_{what}": partial(harm, what) for what in WEIGHTS}
    with patch.multiple(faults, **harms), pytest.raises(AssertionError, match="enough"):
        await faults.run()
    assert done[:5] == ["migrate"] * 3 + ["resize", "kill"] and not faults.never_done()


async def test_a_replica_gets_its_layers_back_though_an_order_failed() -> None:
    """In the end, or before the next harm; what it has meanwhile is not taken for all it had."""
    depths = [8]

    async def call(verb: str, replica: str = "", depth: int = 0) -> Any:
        if verb == "status":
            return {"replicas": [{"name": "decode-0", "role": "decode", "phase": "ready"}]}
        if verb == "depth_class":
            return "a model", depths[-1]
        depths.append(depth)
        if len(depths) in (2, 4):
            raise AgentError("resize: no answer")
        return "resized"

    control = MagicMock(agent=MagicMock(call=call), until_ready=AsyncMock(return_value=""))
    control.replicas, control.pids.return_value = AsyncMock(return_value=["decode-0"]), {1: ""}
    load, rng = MagicMock(), random.Random(0)
    faults = RandomFaults(control, load, rng, every_s=1e-6, weights={"resize": 1.0})
    for done in (0, 1):
        with pytest.raises(AgentError):
            await faults._resize()
        assert load.excuse_until_now.call_count == done
        if not done:
            await faults.settle()
    harming = asyncio.create_task(faults.run())
    await until(lambda: faults.done["resize"])
    harming.cancel()
    assert depths[:7] == [8, 4, 8, 4, 8, 4, 8] and faults.failures == []


async def test_memory_that_nobody_sampled_is_no_memory_that_is_well() -> None:
    args = argparse.Namespace(minutes=1.0, max_slope=20.0)
    run = soak.Soak(args, ServiceUnderLoad("", None, None, None), Console(quiet=True))
    control = MagicMock(pids=MagicMock(side_effect=OSError("no such file")))
    sampling = asyncio.create_task(run._sample(control))
    await asyncio.wait([sampling])
    await run._end("sampling", sampling)
    run._judge_memory(ResourceBaseline())
    ended = "the sampling ended by itself: OSError('no such file')"
    assert run._troubles == [ended, "no process's memory was judged"]


def test_what_a_process_holds() -> None:
    read_end, write_end = os.pipe()
    mine = process_resources(os.getpid())
    os.close(read_end)
    os.close(write_end)
    assert mine is not None
    assert mine.own_bytes > MIB
    assert mine.fds["pipe"] >= 2 and mine.num_fds >= 3
    assert process_resources(2**22 + 1) is None


def base() -> ResourceBaseline:
    return ResourceBaseline(
        num_actors=9,
        processes=Counter(decode=2),
        by_pid={
            1: ("decode", ProcessResources(100 * MIB, {"socket": 40})),
            2: ("decode", ProcessResources(120 * MIB, {"socket": 42})),
        },
        is_ready=True,
    )


def changed(**fields: Any) -> ResourceBaseline:
    return replace(base(), **fields)


def test_as_before_is_no_trouble() -> None:
    assert trouble_with(base(), base()) == []
    other = {7: ("decode", ProcessResources(121 * MIB, {"socket": 44}))}
    assert trouble_with(base(), changed(by_pid={1: base().by_pid[1]} | other)) == []


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (changed(is_ready=False), "not all replicas"),
        (changed(held={"quadriga_kv_used_tokens": 3.0}), "still held"),
        (changed(open_transfers=1), "leases"),
        (changed(num_actors=10), "actors"),
        (changed(processes=Counter(decode=3)), "processes"),
        (
            changed(by_pid={1: ("decode", ProcessResources(100 * MIB, {"socket": 46, "pipe": 2}))}),
            "48 files open, decodes had 42 (pipe +2, socket +4)",
        ),
        (changed(by_pid={1: ("decode", ProcessResources(200 * MIB, {"socket": 40}))}), "MiB"),
    ],
)
def test_each_thing_left_behind_is_named(after: ResourceBaseline, said: str) -> None:
    (trouble,) = trouble_with(base(), after)
    assert said in trouble


def answer(*faults: FaultKind, tokens: list[int] | None = None) -> StreamAnswer:
    verdict = Verdict(choices=[AnswerChoice(token_ids=tokens or [1, 2])])
    verdict.choices[0].writes = [Write(1.0, 1), Write(1.5, 1)]
    for kind in faults:
        verdict.add(kind, "…")
    spec = make_streams(1, max_tokens=2, seed=0)[0]
    return StreamAnswer(spec, False, Capture(Transport.HTTP, sent_s=0.9), verdict)


def test_tallies() -> None:
    tally = Tally()
    assert not tally.is_ok, "nothing was asked"
    tally.note(answer(), [1, 2])
    tally.note(answer(tokens=[9, 9]), None)
    assert tally.is_ok
    assert tally.worst_silence_s == 0.5
    refused = answer()
    refused.verdict.outcome = Outcome.REFUSED
    for bad in (refused, answer(FaultKind.GAP), answer(tokens=[1, 3])):
        broken = Tally()
        broken.note(answer(), [1, 2])
        broken.note(bad, [1, 2])
        assert not broken.is_ok


def test_a_stream_tells_its_wait_and_its_longest_pause() -> None:
    given = answer()
    given.verdict.choices[0].writes = [Write(t, 1) for t in (1.4, 1.5, 1.9, 2.0)]
    wait, pause = silences_of(given)
    assert (wait.seconds, wait.is_first) == (pytest.approx(0.5), True)
    assert (pause.began_s, pause.ended_s, pause.is_first) == (1.5, 1.9, False)
    given.verdict.choices[0].writes = []
    assert silences_of(given) == []


def test_a_slow_reader_gets_everything() -> None:
    async def read() -> Verdict:
        async with FakeServer(FakeOptions()) as server:
            client = SlowHttpClient(server.url, timeout_s=20.0)
            spec = make_spec()
            capture = await client.prepare(spec, MODEL, "request-1")()
            assert len(capture.reads) > 3
            return Judgement(Target(MODEL, 4096))(capture, spec, "request-1")

    assert asyncio.run(read()).outcome is Outcome.OK


# Overload


def record(index: int, outcome: Outcome, *, ttft_s: float = 0.05, tpot_s: float = 0.02) -> Record:
    sent_s = 0.1 * index
    verdict = Verdict(outcome=outcome, retry_after_s=1.0 if outcome is Outcome.REFUSED else None)
    if outcome is Outcome.OK:
        first_s = sent_s + ttft_s
        writes = [Write(first_s, 1), Write(first_s + tpot_s, 1)]
        verdict.choices = [AnswerChoice(token_ids=[1, 2], writes=writes, num_tokens=2)]
    if outcome is Outcome.FAILED:
        verdict.add(FaultKind.GAP, "…")
    spec = make_spec(index=index, extra={"priority": index % 3})
    return Record(spec, str(index), sent_s, sent_s, sent_s + 1.0, 1, 10, verdict)


def found() -> Found:
    ok = [record(i, Outcome.OK) for i in range(60)]
    refused = [record(i, Outcome.REFUSED) for i in range(60, 300)]
    phases = {
        "capacity": Phase("capacity", None, 10.0, ok, goodput=100.0),
        "calm": Phase("calm", 5.0, 10.0, ok, goodput=50.0),
        "overload": Phase("overload", 50.0, 10.0, [*ok, *refused], goodput=95.0),
        "recovery": Phase("recovery", 5.0, 10.0, ok, goodput=50.0),
    }
    returns = [Returns([1, 1, 2], [1.0] * 3, [1.0] * 3) for _ in range(2)]
    return Found(phases, *returns, 10.0, 1.0, 0.0)


def test_a_good_run_passes() -> None:
    assert overload.judge(found()) == []
    assert overload.figures(found())["burst"]["let_in_at_first_return"] == 0.667
    assert overload.table(found()).row_count == 4


def slow_first(run: Found) -> None:
    run.phases["overload"].records[:60] = [record(i, Outcome.OK, ttft_s=0.2) for i in range(60)]


def slow_rest(run: Found) -> None:
    run.phases["overload"].records[:60] = [record(i, Outcome.OK, tpot_s=0.05) for i in range(60)]


def slow_humble(run: Found) -> None:
    slow = [record(i, Outcome.OK, ttft_s=0.2) for i in range(2, 60, 3)]
    run.phases["overload"].records[2:60:3] = slow


def starved(run: Found) -> None:
    run.phases["overload"].records[2:60:3] = [record(i, Outcome.REFUSED) for i in range(2, 60, 3)]


def over(run: Found) -> Phase:
    return run.phases["overload"]


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (slow_first, "P99 ttft is"),
        (slow_rest, "P99 tpot is"),
        (slow_humble, "P99 ttft of priority 2"),
        (starved, "priority 2: 0.0% let in"),
        (lambda run: over(run).records.append(record(300, Outcome.FAILED)), "requests failed"),
        (lambda run: setattr(over(run).records[70].verdict, "retry_after_s", None), "come back"),
        (lambda run: setattr(over(run), "goodput", 80.0), "goodput 80 of 100"),
        (lambda run: setattr(over(run), "records", run.phases["calm"].records), "no overload"),
        (lambda run: setattr(run.returns, "tries", [1, 2, 3]), "burst: Retry-After held"),
        (lambda run: setattr(run.overload_returns, "tries", [1, 2, 3]), "overload: Retry-After"),
        (lambda run: setattr(run.overload_returns, "needed_s", [1, 1, 2]), "it took 1.33 times"),
        (lambda run: setattr(run, "recovery_s", None), "did not recover"),
    ],
)
def test_each_promise_can_be_broken(harm: Callable[[Found], None], said: str) -> None:
    run = found()
    harm(run)
    assert any(said in failure for failure in overload.judge(run))


def test_recovery_begins_where_nobody_waits_any_more() -> None:
    calm = found().phases["calm"]
    slow = [record(i, Outcome.OK, ttft_s=3.0) for i in range(5)]
    refused = [record(5, Outcome.REFUSED)]
    well = [record(i, Outcome.OK) for i in range(6, 20)]
    phase = Phase("recovery", 5.0, 2.0, [*slow, *refused, *well])
    over = Phase("overload", 50.0, 10.0, [], end_s=-1.0)  # the last answer came at 0
    assert recovered_after_s(calm, over, phase) == pytest.approx(1.6)
    assert recovered_after_s(calm, over, Phase("r", 5.0, 2.0, [*slow, *well[:5]])) is None


def overload_run(server: FakeServer) -> Overload:
    service = ServiceUnderLoad(server.url, "", None, pid=1)
    args = argparse.Namespace(model=MODEL, seed=0, seconds=0.2, calm_s=0.2)
    return Overload(args, service, Console(quiet=True))


async def test_the_peak_counts_what_came_of_answers_that_end_after_it() -> None:
    async with FakeServer(FakeOptions(step_s=0.005)) as server:
        found = await overload_run(server)._closed("capacity", 0.25)
        calm = await overload_run(server)._open(Found(), "calm", 90.0, 0.2)
    assert calm.end_s < min(r.ended_s for r in calm.records), "arrivals end before answers do"
    assert len(found.records) == 12 and all(r.ended_s - r.sent_s > 0.25 for r in found.records)
    num_tokens = sum(r.verdict.choices[0].num_tokens for r in found.records)
    assert 0 < found.goodput * 0.75 * 0.25 < num_tokens


async def test_who_came_back_in_vain_was_not_let_in_at_the_first_return() -> None:
    returns = Returns([1], [1.0], [1.0])
    async with FakeServer(FakeOptions(fault="refuse")) as server:
        until_s = now_s() + 1.9
        tried = await overload_run(server)._insist(make_spec(), now_s(), returns, until_s)
        with pytest.raises(ConfigError, match=r"nothing was served in 0\.2 s"):
            await overload_run(server).run(Found())
    assert returns.kept == 0.5
    assert (returns.in_vain, returns.failed, tried.attempts) == (1, 0, 2)
    phase = Phase("overload", 1.0, 1.0, [record(0, Outcome.OK), tried])
    assert phase.lag_p99_s == 0.0, "it was told to come back: the generator was not late"


# Upgrade


def upgraded() -> upgrade.Found:
    run = upgrade.Found([upgrade.Round("front", 5.0), upgrade.Round("scale", 7.0)])
    for tally in (run.tally, run.farewell):
        tally.note(answer(), [1, 2])
    run.exit_s = 3.0
    return run


def test_an_upgrade_that_nobody_noticed() -> None:
    assert upgrade.judge(upgraded(), wanted_rounds=2) == []
    assert upgrade.table(upgraded()).row_count == 2
    assert upgrade.figures(upgraded())["answers"] == 1


def test_silences_belong_to_the_round_they_fall_into() -> None:
    run = upgraded()
    run.rounds = [upgrade.Round("front", 5.0, began_s=10.0), upgrade.Round("front", 5.0, "", 20.0)]
    run.tally.silences = [Silence(9.0, 12.0, False), Silence(21.0, 22.0, False)]
    run.tally.silences += [Silence(14.0, 18.0, True), Silence(26.0, 29.0, True)]
    assert run.silences_s("front", is_first=False) == [3.0, 1.0]
    assert run.silences_s("front", is_first=True) == [4.0, 0.0]
    assert run.silences_s("node", is_first=True) == []


def test_upgrades_that_were_noticed() -> None:
    assert upgrade.judge(upgraded(), wanted_rounds=3) == ["1 rounds were not run"]
    assert upgrade.judge(upgraded(), wanted_rounds=2, wanted_nodes=1) == ["1 nodes did not leave"]
    run = upgraded()
    run.no_nodes = "network namespaces need root"
    assert upgrade.judge(run, wanted_rounds=2, wanted_nodes=1) == []
    run = upgraded()
    run.rounds[0].trouble = "an old ingress is still there"
    assert upgrade.judge(run, wanted_rounds=2) == ["front: an old ingress is still there"]
    for name in ("tally", "farewell"):
        run = upgraded()
        getattr(run, name).note(answer(FaultKind.CONNECTION), None)
        assert upgrade.judge(run, wanted_rounds=2)
    run = upgraded()
    run.exit_s = None
    assert upgrade.judge(run, wanted_rounds=2) == ["the service did not end after SIGTERM"]


async def test_turns_are_counted_in_pairs_and_taken_again_where_the_scheduler_died() -> None:
    """One that does not answer is asked again, and one that was configured anew within a turn."""
    orders: list[bool] = []
    looks = 0

    class Agent:
        async def call(self, verb: str, is_on: bool) -> bool:
            assert verb == "reschedule"
            orders.append(is_on)
            if len(orders) == 3:
                raise AgentError("it died")
            return orders[-2] if len(orders) > 1 and len(orders) != 8 else True

    class Control:
        agent = Agent()

        def pids(self, kind: str) -> dict[int, str]:
            """The scheduler is another one in the second turn's look."""
            nonlocal looks
            looks += len(orders) == 4
            return {8 if looks else 7: kind}

    turns = all_on.ReschedulingTurns()
    assert turns.ratio(lambda *_: 7) is None
    running = asyncio.create_task(turns.run(Control(), 0.01))  # type: ignore[arg-type]
    await until(lambda: len(turns.pairs) >= 2)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert orders[:11] == [True, True, *[False] * 8, True]
    assert orders[-1] is True
    ratio = turns.ratio(lambda *_: 7)
    assert ratio is not None and ratio.num_pairs >= 2
    assert all(end_s - begin_s > 0.0 for pair in turns.pairs for begin_s, end_s in pair)


def test_a_turn_has_the_tokens_that_came_in_it_and_not_those_of_answers_that_ended_in_it() -> None:
    tally, given = Tally(), answer()
    given.verdict.choices[0].writes = [Write(t / 4, 1) for t in range(40)]
    tally.note(given, None)
    turns = all_on.ReschedulingTurns([((0.0, 5.0), (5.0, 10.0)), ((5.0, 7.0), (0.0, 4.0))])
    ratio = turns.ratio(tally.tokens_between)
    assert ratio is not None and ratio.ratio == pytest.approx(1.0) and tally.came.total() == 40
    stalled = all_on.ReschedulingTurns([((10.0, 15.0), (5.0, 10.0))]).ratio(tally.tokens_between)
    assert stalled is not None and stalled.ratio < 0.1


def test_a_soak_without_two_pairs_of_turns_has_not_shown_what_rescheduling_costs() -> None:
    run = soak.Soak(argparse.Namespace(all_on=True), None, Console())  # type: ignore[arg-type]
    for pairs, said in ((0, "fewer than 2"), (1, "fewer than 2"), (2, "over without is 0.900")):
        run._ratio = paired_ratio([(9.0, 10.0)] * pairs)
        (failure,) = (one for one in run.failures() if "rescheduling" in one)
        assert said in failure


@pytest.mark.parametrize("name", ["soak", "overload", "upgrade"])
def test_a_run_that_is_killed_tells_what_it_had(
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(f"tests.reliability.{name}")
    service = ServiceUnderLoad("http://127.0.0.1:1", "", None, 1)
    monkeypatch.setattr(module, "started_service", lambda *_, **__: nullcontext(service))

    async def run(self: Any, told: Any = None, *_: object) -> None:
        if name == "overload":
            told.phases |= dict(list(found().phases.items())[:2])
        elif name == "upgrade":
            told.rounds += upgraded().rounds
        raise KeyboardInterrupt

    monkeypatch.setattr(getattr(module, name.title()), "run", run)
    assert main([name]) == 130
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    told = {
        "soak": "the run was broken off",
        "overload": "not measured: overload, recovery",
        "upgrade": "18 rounds were not run",
    }
    assert line["experiment"] == name and told[name] in line["failures"]
    written = {"soak": "soak.json", "overload": "overload.partial.json"}
    assert name not in written or (tmp_path / "results" / name / written[name]).is_file()


async def test_what_a_run_has_is_on_the_disk_while_it_runs(tmp_path: Path) -> None:
    """SIGKILL ends it without a word."""
    args = argparse.Namespace(all_on=False, minutes=0.01, seed=0, out=tmp_path)
    run = soak.Soak(args, None, Console())  # type: ignore[arg-type]
    file, is_written = tmp_path / soak.RESULTS, asyncio.Event()

    def pids(*_: str) -> dict[int, str]:
        if file.exists():
            is_written.set()
        return {os.getpid(): "decode"}

    sampling = asyncio.create_task(run._sample(Mock(pids=pids)))
    await asyncio.wait_for(is_written.wait(), 60.0)
    sampling.cancel()
    kept = json.loads(file.read_text())
    assert kept["memory"].keys() == {f"decode {os.getpid()}"}
    assert "the run was broken off" in kept["failures"]
    tell(args, Console(quiet=True), upgraded(), Tally())
    (row,) = json.loads((tmp_path / "upgrade.partial.json").read_text())["rows"]
    assert sum(row["rounds"].values()) == len(upgraded().rounds)


def test_a_soak_is_told_though_the_disk_is_full(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service = ServiceUnderLoad("http://127.0.0.1:1", "", None, 1)
    monkeypatch.setattr(soak, "started_service", lambda *_, **__: nullcontext(service))
    monkeypatch.setattr(soak.Soak, "run", Mock(side_effect=KeyboardInterrupt))
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(soak.Soak, "plot", Mock(side_effect=full))
    assert main(["soak", "--out", str(tmp_path)]) == 2
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["experiment"] == "soak"


def test_a_soak_of_everything_takes_no_other_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "started_service", None)  # nothing may be started
    args = argparse.Namespace(all_on=True, model="quadriga-l", set=[], out=None)
    with pytest.raises(ConfigError, match="--model: quadriga-l: --all-on serves two models"):
        soak.run(args)


def test_the_ratio_of_turns_has_an_interval_over_their_pairs() -> None:
    assert paired_ratio([]) is None and paired_ratio([(0.0, 5.0)]) is None
    one = paired_ratio([(9.0, 10.0)])
    assert one is not None and one.low is None and not one.is_surely_below(0.98)
    noisy = paired_ratio([(9.0, 10.0), (11.0, 10.0), (8.0, 10.0), (10.0, 10.0)])
    assert noisy is not None and noisy.low is not None and noisy.high is not None
    assert noisy.low < noisy.ratio < 0.98 < noisy.high and not noisy.is_surely_below(0.98)
    sure = paired_ratio([(9.0, 10.0), (9.1, 10.0), (8.9, 10.0), (9.0, 10.0)])
    assert sure is not None and sure.is_surely_below(0.98) and not sure.is_surely_below(0.85)
    # Student's t with 3 degrees of freedom: 3.182 standard errors.
    logs = np.log([0.9, 0.91, 0.89, 0.9])
    reach = 3.182 * logs.std(ddof=1) / 2.0
    assert sure.high == pytest.approx(math.exp(logs.mean() + reach), rel=1e-3)


def test_turns_of_rescheduling_are_compared_in_pairs() -> None:
    """A turn without a good request still has a ratio; what failed counts in every turn."""

    def turn(good_share: float, p99_s: float, failed: int = 0) -> LoadSummary:
        tpot = Distribution(p50=p99_s / 2 + 0.005, p99=p99_s)
        return LoadSummary(ok=40, failed=failed, good_share=good_share, tpot=tpot)

    better = [(turn(1.0, 0.030), turn(0.5, 0.060)), (turn(0.8, 0.030), turn(0.4, 0.060))]
    found = ratios_of(better)
    assert found["good"].ratio == pytest.approx(2.0) == found["speed"].ratio
    assert found["typical"].ratio == pytest.approx(35 / 20)
    assert found["good_shares"] == [0.9, 0.45] and found["p99_ms"] == [30.0, 60.0]
    worse = ratios_of([(turn(0.0, 0.1, failed=1), turn(1.0, 0.05))] * 3)
    assert worse["failed"] == 3
    assert worse["good"].is_surely_below(0.98) and worse["speed"].is_surely_below(0.98)


def test_a_strict_answer_with_a_token_below_its_threshold_has_failed() -> None:
    tally, one = Tally(), answer()
    one.verdict.extension = {"breaches": 2}
    tally.note(one, None)
    assert (tally.ok, tally.failed) == (1, 0)
    one.spec.extra["exit_policy"] = "strict"
    tally.note(one, None)
    assert (tally.ok, tally.failed) == (1, 1)


def test_the_loads_of_a_soak_with_everything_on() -> None:
    exact = all_on.exact_streams(16, max_tokens=60, seed=1)
    assert {spec.extra["exit_policy"] for spec in exact} == {"lossless", "off"}
    assert {spec.temperature for spec in exact} == {0.0, 0.9}
    free = all_on.free_streams(16, max_tokens=60, seed=1)
    strict = [spec for spec in free if spec.extra["exit_policy"] == "strict"]
    assert len(strict) == 4 and not any("quality_budget" in spec.extra for spec in strict)
    budgets = [spec.extra["quality_budget"] for spec in free if spec not in strict]
    assert all(0.0 < budget < 1.0 for budget in budgets)
    assert any("structured_outputs" in spec.extra for spec in free)
    assert all(s.ignore_eos is not ("structured_outputs" in s.extra) for s in free)
