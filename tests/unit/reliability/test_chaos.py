"""What counts as lost, duplicated, differing or hung, and which processes are found."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loadgen.bench.cluster.process_cpu import service_processes
from loadgen.checker import Verdict
from loadgen.checker.verdict import AnswerChoice, FaultKind, Write
from loadgen.load.workload import RequestSpec
from loadgen.wire.capture import Capture, Transport
from tests.reliability.chaos import fault_injector, injection_points, trials
from tests.reliability.chaos.cell_results import CellResult
from tests.reliability.chaos.fault_matrix import QUICK, Cell, Fault, Moment, Victim
from tests.reliability.chaos.report import summary
from tests.reliability.cluster.stages import Process, in_threads
from tests.reliability.load.streams import StreamAnswer, StreamClients, make_streams

CELL = Cell(Fault.KILL, Moment.MID_STREAM, Victim.DECODE)
EARLY = Cell(Fault.STOP, Moment.BEFORE_FIRST_TOKEN, Victim.PREFILL)
WANTED = [5, 6, 7, 8]


def answer(*faults: FaultKind, tokens: list[int] | None = None, **extension: Any) -> StreamAnswer:
    verdict = Verdict(choices=[AnswerChoice(token_ids=WANTED if tokens is None else tokens)])
    verdict.choices[0].writes = [Write(t, 1) for t in (1.0, 1.1, 3.1, 3.2)]
    verdict.extension = extension
    for kind in faults:
        verdict.add(kind, "…")
    spec = make_streams(1, max_tokens=4, seed=0)[0]
    return StreamAnswer(spec, False, Capture(Transport.HTTP, sent_s=0.5), verdict)


def judged(*answers: StreamAnswer) -> CellResult:
    result = CellResult(CELL)
    result.add(answers, [WANTED], injected_s=1.05)
    return result


async def test_a_service_whose_start_is_cancelled_is_ended_when_it_is_there() -> None:
    done: list[str] = []
    context: Any = SimpleNamespace(__exit__=lambda *_: done.append("ended"))
    context.__enter__ = lambda: time.sleep(0.1) or done.append("started")
    starting = asyncio.ensure_future(in_threads(context).__aenter__())
    await asyncio.sleep(0.01)
    starting.cancel()
    await asyncio.wait([starting])
    assert done == ["started", "ended"]


def test_all_cells_are_different() -> None:
    assert len(set(QUICK)) == len(QUICK) == 16


@pytest.mark.parametrize(
    ("one", "column"),
    [
        (answer(FaultKind.TIMEOUT, FaultKind.LENGTH), "hung"),
        (answer(FaultKind.DUPLICATE), "duplicated"),
        (answer(FaultKind.GAP), "lost"),
        (answer(FaultKind.ERROR_FRAME), "lost"),
        (answer(FaultKind.CONNECTION), "lost"),
        (answer(tokens=[5, 6, 9, 8]), "differing"),
        (answer(tokens=[5, 6, 7]), "differing"),
    ],
)
def test_every_fault_has_its_column(one: StreamAnswer, column: str) -> None:
    result = judged(one, answer())
    counts = {c: getattr(result, c) for c in ("lost", "duplicated", "differing", "hung")}
    assert counts == dict.fromkeys(counts, 0) | {column: 1}
    assert not result.is_ok
    assert result.faults


def test_who_waited_for_a_first_token_is_counted() -> None:
    late = answer()
    late.verdict.choices[0].writes = [Write(2.0, 1)]
    silent = answer(FaultKind.LENGTH)
    silent.verdict.choices = [AnswerChoice()]
    assert judged(answer(), late, silent).waiting == 2


@pytest.mark.parametrize(
    ("waiting", "cell", "runs", "is_ok"),
    [
        ([0, 0, 3], EARLY, 3, True),
        ([0] * len(trials.STRUCK_WITHIN_S), EARLY, len(trials.STRUCK_WITHIN_S), False),
        ([0], CELL, 1, True),
    ],
)
def test_a_blow_that_came_too_late_is_struck_again_sooner_and_at_last_at_once(
    waiting: list[int], cell: Cell, runs: int, is_ok: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = CellResult(cell)
    within_s: list[float] = []

    async def run_once(_: Any, __: CellResult, seconds: float) -> None:
        within_s.append(seconds)
        result.waiting += waiting[result.runs]
        result.runs += 1

    monkeypatch.setattr(trials.Trials, "_run_once", run_once)
    made = trials.Trials(None, None, [], [], random.Random(0), Counter())  # type: ignore[arg-type]
    asyncio.run(made.run(result))
    assert (result.runs, result.done, result.is_ok) == (runs, int(is_ok), is_ok)
    assert bool(result.not_struck) is not is_ok
    assert within_s == sorted(within_s, reverse=True)
    assert is_ok or within_s[-1] == 0.0


def test_another_sequence_moves_where_the_scheduler_moves_the_first(tmp_path: Path) -> None:
    outcomes = ["refused under_way: it is on its way already", "moved"]

    async def call(verb: str, *_: Any) -> Any:
        if verb == "migrate" and len(outcomes) == 1:
            (tmp_path / injection_points.HELD).touch()
        found = {"serving": ["a", "b"], "running": [("s", 9)]}
        return outcomes.pop(0) if verb == "migrate" else found.get(verb)

    cell, at = Cell(Fault.KILL, Moment.COMMIT, Victim.SOURCE), injection_points.InjectionPoint()
    service: Any = SimpleNamespace(agent=SimpleNamespace(call=call))
    begun = injection_points._begin_migration(service, cell, at, random.Random(0), tmp_path, 0)
    asyncio.run(begun)
    assert not outcomes


@pytest.mark.parametrize("missed", ["", "the fault has met no part of any KV"])
def test_things_move_until_the_fault_meets_one(
    missed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = CellResult(Cell(Fault.CORRUPTION, Moment.COPY, Victim.SOURCE))
    injection = injection_points.InjectionPoint()
    meets = [True, True, False]
    again: list[injection_points.InjectionPoint] = []

    @asynccontextmanager
    async def at_injection_point(
        *_: Any, **__: Any
    ) -> AsyncIterator[injection_points.InjectionPoint]:
        yield injection

    def gives(value: Any) -> Any:
        async def call(*_: Any, **__: Any) -> Any:
            return value

        return call

    async def has_met_nothing(*_: Any) -> bool:
        return meets.pop(0)

    async def move(_: Any, __: Any, where: injection_points.InjectionPoint) -> None:
        again.append(where)

    injected = fault_injector.InjectedFault(result.cell, Process("decode", "d", 1, "n"))
    for name, part in {
        "prepare": gives(None),
        "inject": gives(injected),
        "has_met_nothing": has_met_nothing,
        "again": move,
        "until_it_may_wake": gives(None),
        "undo": gives(missed),
    }.items():
        monkeypatch.setattr(fault_injector, name, part)
    monkeypatch.setattr(trials, "at_injection_point", at_injection_point)
    monkeypatch.setattr(trials, "victim", gives(None))
    monkeypatch.setattr(trials.Trials, "_until_whole", gives(""))
    clients: Any = SimpleNamespace(send_all=lambda *_, **__: gives([answer()])())
    under_test: Any = SimpleNamespace(nodes=None)
    one = answer().spec
    made = trials.Trials(under_test, clients, [one], [WANTED], random.Random(0), Counter())
    asyncio.run(made.run(result))
    assert again == [injection, injection]
    assert (result.streams, result.not_restored) == (3, [])
    assert result.not_struck == ([missed] if missed else [])
    assert (result.done, result.is_ok) == (int(not missed), not missed)


def test_recovery_is_the_longest_silence_after_the_blow() -> None:
    result = judged(answer(rebuilds=1), answer(rebuilds=0))
    assert result.is_ok
    assert result.rebuilt == 1
    assert result.recovery_s == [pytest.approx(2.0)]


def test_what_was_skipped_or_stayed_broken_has_failed() -> None:
    assert not CellResult(CELL).is_ok, "no run"
    result = judged(answer())
    result.not_restored.append("processes are fewer")
    assert not result.is_ok
    last = json.loads(summary([result, CellResult(CELL)], seconds=1.0))
    assert len(last["failed"]) == 2


def test_streams_are_greedy_and_seeded_with_and_without_exits() -> None:
    streams = make_streams(12, max_tokens=9, seed=3)
    kinds = {(s.temperature > 0, s.extra["exit_threshold"]) for s in streams}
    assert len(kinds) == 6
    assert streams == make_streams(12, max_tokens=9, seed=3)


async def test_the_undisturbed_run_is_of_all_streams_at_once() -> None:
    together = asyncio.Barrier(3)

    async def send(spec: RequestSpec, *, is_grpc: bool) -> StreamAnswer:
        await together.wait()
        return answer(tokens=[spec.index])

    clients: Any = SimpleNamespace(send=send)
    async with asyncio.timeout(60.0):
        wanted = await StreamClients.reference(clients, make_streams(3, max_tokens=1, seed=0))
    assert wanted == [[0], [1], [2]]


def test_processes_are_found_by_their_titles() -> None:
    code = "import sys, time; sys.stdout.write('.'); sys.stdout.flush(); time.sleep(60)"
    with subprocess.Popen(
        ["ray::DecodeReplica", "-c", code], executable=sys.executable, stdout=subprocess.PIPE
    ) as child:
        try:
            assert child.stdout is not None
            child.stdout.read(1)
            assert service_processes(child.pid)["decode"] == [child.pid]
        finally:
            child.kill()
