"""The HELIOS experiment's pure parts: the stream, the books, the figures, who is told what."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest

from loadgen.__main__ import main
from loadgen.load.task_suite import TaskPrompt
from loadgen.paper.clocks import TurnClock
from loadgen.paper.helios.bench import DRAFTING, SINGLE, HeliosBench, HeliosPlan
from loadgen.paper.helios.control import NAME, READ_AGAIN, REPORT_TOKENS, LocalController
from loadgen.paper.helios.record import HeldMemory, ServedRequest, Shadow, StreamRun
from loadgen.paper.helios.replica import LocalReplica
from loadgen.paper.helios.report import (
    ALONE,
    FIXED,
    INTERVALS,
    LIMITS,
    HeliosRow,
    HeliosSetting,
    headline,
    plain,
    print_tables,
    summarise,
    write_plots,
)
from loadgen.paper.helios.stream import LISTS, STORIES, WAYPOINTS, drifting_suite, mix_at
from quadriga.checkpoint.folder import read_checkpoint
from quadriga.clock import ManualClock
from quadriga.core.replica import DepthClass
from quadriga.errors import ConfigError
from quadriga.policies.helios.machine import Helios
from quadriga.policies.helios.messages import (
    ChangeOrder,
    ControllerTick,
    Event,
    OrderDone,
    OrderFailed,
    Output,
    RequestFinished,
    RequestLost,
    RequestStarted,
    Resize,
    Routing,
    Switch,
    TokensServed,
    UnchangedSampled,
)
from quadriga.tasks import DEFAULT_MIX, TASKS, make_example

S4, S8, L12 = DepthClass("s", 4), DepthClass("s", 8), DepthClass("l", 12)
LAYERS = {"s": 8, "l": 12}
PROMPT = TaskPrompt(make_example("copy", seed=1, index=0), [1, 2, 3])


# The stream


def test_the_mix_drifts_from_one_waypoint_to_the_next() -> None:
    assert mix_at(0.0) == pytest.approx(dict.fromkeys(LISTS, 0.2))
    assert mix_at(1.0) == pytest.approx(dict(DEFAULT_MIX))
    assert mix_at(1 / 3) == pytest.approx({"story": 0.6, "repeat": 0.2, "copy": 0.2})
    halfway = mix_at(0.5, (LISTS, STORIES))
    assert halfway["story"] == pytest.approx(0.3) and halfway["count"] == pytest.approx(0.1)
    for where in (-1.0, 0.2, 0.5, 0.77, 2.0):
        assert sum(mix_at(where).values()) == pytest.approx(1.0)
    assert {task for mix in WAYPOINTS for task in mix} == set(TASKS)


def test_the_stream_is_a_function_of_its_seed() -> None:
    checkpoint = read_checkpoint("quadriga-s")
    first, again = (drifting_suite(checkpoint, 90, seed=3) for _ in range(2))
    assert [p.token_ids for p in first.prompts] == [p.token_ids for p in again.prompts]
    other = drifting_suite(checkpoint, 90, seed=4)
    assert [p.token_ids for p in first.prompts] != [p.token_ids for p in other.prompts]
    tasks = [p.example.task for p in first.prompts]
    assert "story" not in tasks[:2] and tasks[20:40].count("story") > 6
    assert tasks[55:65].count("story") < 3 < tasks[55:65].count("sort") + tasks[55:65].count("add")


# The books


def request(index: int = 0, *classes: DepthClass, **fields: Any) -> ServedRequest:
    values: dict[str, Any] = {
        "token_ids": [5, 6, 7],
        "exit_layers": [8, 2, 4],
        "breached": [0.0, 0.0, 1.0],
        "first_s": 1.0,
        "last_s": 2.0,
        "batch_sum": 2,
    } | fields
    return ServedRequest(index, PROMPT, 0.5, classes=list(classes) or [S8], **values)


def test_memory_is_weighed_by_time() -> None:
    memory = HeldMemory()
    memory.add(100, 10, 0.0)
    assert memory.mean_weight_bytes == 100.0  # no time has passed yet
    memory.add(100, 10, 3.0)
    memory.add(200, 50, 1.0)
    assert memory.mean_weight_bytes == pytest.approx(125.0)
    assert memory.mean_kv_bytes == pytest.approx(20.0)
    assert (memory.peak_weight_bytes, memory.peak_kv_bytes) == (200, 50)


def test_full_depth_judges_early_tokens_apart() -> None:
    shadow = Shadow()
    shadow.add(
        request(
            token_ids=[9, 5, 6, 7, 8],
            exit_layers=[4, 2, 4, 4, 8],
            breached=[0.0, 0.0, 1.0, 1.0, 0.0],
        ),
        [1, 5, 6, 0, 0],
        8,
    )  # the first token is prefill's, the last went all the way: neither counts
    assert (shadow.sure, shadow.sure_same) == (1, 1)
    assert (shadow.breached, shadow.breached_same) == (2, 1)
    assert shadow.sure_share == 1.0 and shadow.breached_share == 0.5
    assert Shadow().sure_share is None


def run_of(seconds: float, **fields: Any) -> StreamRun:
    values: dict[str, Any] = {
        "requests": [request(0, nll=0.4, num_scored=4), request(1, nll=9.0, num_scored=4)],
        "right": [True, False],
        "joules": 6.0,
        "energy_source": "estimate",
        "decoded": Counter({("s", 2): 2, ("s", 4): 1, ("s", 8): 1}),
        "held": Counter({S4: 3, S8: 1}),
        "breaches": 1,
        "peak_running": 3,
        "memory": HeldMemory(300.0, 30.0, 2.0, 200, 20),
    } | fields
    return StreamRun(seconds=seconds, **values)


def row_of(
    contestant: str, tokens_per_s: float, part: str = ALONE, clients: int = 1, **fields: Any
) -> HeliosRow:
    row = summarise(
        HeliosSetting(part, contestant, None, 150, clients), [run_of(6 / tokens_per_s)], LAYERS
    )
    for name, value in fields.items():
        setattr(row, name, value)
        if name in row.rounds:
            row.rounds[name] = [value]
    return row


def test_a_row_holds_medians_and_shares() -> None:
    runs = [run_of(1.0), run_of(3.0), run_of(2.0)]
    setting = HeliosSetting(ALONE, "helios-throughput", None, 150, 1)
    row = summarise(setting, runs, LAYERS)
    assert row.tokens_per_s == pytest.approx(3.0) and row.rounds["tokens_per_s"] == [6.0, 2.0, 3.0]
    assert row.ttft_s == pytest.approx(0.5) and row.tpot_s == pytest.approx(0.5)
    assert row.exact_match == 0.5
    assert row.perplexity == pytest.approx(math.exp(0.1)), "of every fourth, profile or not"
    assert row.exits == pytest.approx({"s@2": 0.5, "s@4": 0.25, "s@8": 0.25})
    assert row.held == pytest.approx({"s@4": 0.75, "s@8": 0.25})
    assert row.breach_share == pytest.approx(0.25)
    assert row.early_share == pytest.approx(0.5)  # three left early, one of them a breach
    assert row.weight_bytes == pytest.approx(150.0) and row.joules_per_token == pytest.approx(1.0)


def test_what_was_measured_is_there_though_the_run_is_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    setting = HeliosSetting(ALONE, "only-s", None, 150, 1)
    done = run_of(1.0, decoded=Counter({("quadriga-s", 2): 4}))
    monkeypatch.setattr(
        HeliosBench, "run_together", Mock(side_effect=[{setting: done}, KeyboardInterrupt])
    )
    monkeypatch.setattr(HeliosPlan, "settings", lambda *_: [setting, replace(setting, part=FIXED)])
    words = ["--quick", "--memory-mib", "99", "--out", str(tmp_path)]
    assert main(["paper", "helios", *words]) == 130
    (kept,) = json.loads((tmp_path / "helios.partial.json").read_text())["rows"]
    assert kept["contestant"] == "only-s" and kept["tokens_per_s"] == 6.0


def test_a_ratio_is_the_median_of_those_of_the_rounds() -> None:
    ours, other = (
        summarise(HeliosSetting(ALONE, name, None, 150, 1), [run_of(s) for s in seconds], LAYERS)
        for name, seconds in (("helios-throughput", (2.0, 0.5, 1.6)), ("only-s", (4.0, 1.0, 2.0)))
    )
    found = headline([ours, other])["throughput_ratio_vs_s"]
    assert found == pytest.approx(2.0), "of the medians it is 1.25"


def test_the_headline_compares_with_the_faster_form_of_each_model(tmp_path: Path) -> None:
    bounded = HeliosSetting(LIMITS, "helios-throughput", None, 150, 1, max_changed_share=0.01)
    rows = [
        row_of("only-s", 100.0, tpot_s=0.010, ttft_s=0.02, exact_match=0.85, weight_bytes=50.0),
        row_of(
            "only-s-adaptive", 120.0, tpot_s=0.008, ttft_s=0.02, exact_match=0.84, weight_bytes=50.0
        ),
        row_of("only-l", 60.0, tpot_s=0.016, ttft_s=0.06, exact_match=0.90, weight_bytes=200.0),
        row_of(
            "helios-throughput",
            150.0,
            tpot_s=0.006,
            ttft_s=0.01,
            exact_match=0.88,
            weight_bytes=40.0,
            switches=2,
            resizes=3,
            shadow=Shadow(100, 98, 10, 6),
        ),
        row_of("only-s", 300.0, FIXED, 64, peak_running=20),
        row_of("only-l", 100.0, FIXED, 64, peak_running=4),
        row_of("helios-throughput", 450.0, FIXED, 64, peak_running=50),
        row_of("helios-throughput", 1.0, INTERVALS),
        row_of("only-s", 200.0, LIMITS),
        row_of("helios-throughput", 150.0, LIMITS, setting=bounded),
    ]
    found = headline(rows)
    assert found["throughput_ratio_vs_s"] == pytest.approx(1.25)  # over 120, not over 100
    assert found["throughput_ratio_vs_l"] == pytest.approx(2.5)
    assert found["throughput_ratio_fixed_memory"] == pytest.approx(1.5)
    assert found["batch_ratio"] == pytest.approx(2.5)
    assert found["tpot_reduction_vs_l"] == pytest.approx(0.625)
    assert found["tpot_reduction_vs_s"] == pytest.approx(0.25)
    assert found["ttft_ratio_vs_s"] == pytest.approx(2.0)
    assert found["exact_match_delta_points"] == pytest.approx(-2.0)
    assert found["weight_memory_saving"] == pytest.approx(0.8)
    assert found["early_token_share"] == pytest.approx(0.5)
    assert found["breach_share"] == pytest.approx(0.25)
    assert found["unchanged_share"] == pytest.approx(0.98)
    assert (found["switches"], found["resizes"]) == (2, 3)
    assert plain(rows[0])["contestant"] == "only-s" and "setting" not in plain(rows[0])
    print_tables(rows)
    names = {path.name for path in write_plots(rows, tmp_path)}
    assert names == {"helios-alone.png", "helios-fixed.png", "helios-ri.png", "helios-changed.png"}


def test_parts_that_were_not_run_leave_the_headline_open() -> None:
    found = headline([row_of("helios-throughput", 10.0)])
    assert found["throughput_ratio_vs_s"] is None
    assert found["throughput_ratio_fixed_memory"] is found["batch_ratio"] is None
    assert found["exact_match_delta_points"] is None


def quick_plan(*, pair: tuple[str, str], parts: tuple[str, ...], requests: int) -> HeliosPlan:
    return HeliosPlan(
        pair=pair,
        catalogue=None,
        parts=parts,
        slos=("throughput",),
        requests=requests,
        rounds=1,
        interval=8,
        profile_requests=5,
        thresholds=(),
        intervals=(),
        batch=2,
        rows=2,
        memory_bytes=None,
        shadows=4,
        threads=1,
        seed=3,
    )


def test_the_plan_gives_all_contestants_the_same_terms() -> None:
    plan = replace(
        quick_plan(pair=("s", "l"), parts=(ALONE, FIXED, INTERVALS, LIMITS), requests=10),
        slos=("throughput", "energy"),
        interval=7,
        thresholds=(0.5,),
        intervals=(3, 4),
        batch=8,
        rows=16,
        limits=(1.0, 0.01),
    )
    settings = plan.settings(999)
    assert len(set(settings)) == len(settings)
    alone = [s for s in settings if s.part == ALONE]
    own = ["helios-throughput", "helios-energy"]
    drafting = [*DRAFTING, "helios-throughput-lossless"]
    assert [s.contestant for s in alone] == [*SINGLE, *own, *drafting]
    one = replace(plan, pair=("s",)).settings(999)
    assert not [s for s in one if "only-l" in s.contestant]
    assert {(s.clients, s.memory_bytes, s.interval) for s in alone} == {(1, None, 7)}
    fixed = [s for s in settings if s.part == FIXED]
    assert {(s.clients, s.memory_bytes, s.interval) for s in fixed} == {(16, 999, 128)}
    assert plan.num_requests(alone[0]) == 10 and plan.num_requests(fixed[0]) == 96
    assert [s.interval for s in settings if s.part == INTERVALS] == [3, 4]
    limits = {s.contestant: s.max_changed_share for s in settings if s.part == LIMITS}
    assert limits == dict.fromkeys(SINGLE) | {"helios-throughput": 0.01}
    assert {s.max_changed_share for s in settings if s.part != LIMITS} == {None}


def test_a_clock_runs_in_its_own_turns_only() -> None:
    wall = ManualClock()
    ours, other = TurnClock(wall), TurnClock(wall)
    with ours.turn():
        wall.advance(2.0)
        with ours.stopped():
            wall.advance(5.0)
        assert ours.now_s() == 2.0
    with other.turn():
        wall.advance(3.0)
    with ours.stopped():  # out of turn: it does not begin to run
        wall.advance(1.0)
    wall.advance(1.0)
    assert (ours.now_s(), other.now_s()) == (2.0, 3.0)


# Who is told what


@dataclass
class FakeReplica:
    """Holds a class, and changes it at once."""

    depth_class: DepthClass = S8
    has_work: bool = False
    refuses: bool = False
    held: Counter[DepthClass] = field(default_factory=Counter)
    breaches: int = 0
    num_running: int = 1
    used_tokens: int = 10
    weight_bytes: int = 1000
    max_batch: int | None = None
    ended: list[ServedRequest] = field(default_factory=list)
    says: list[int] | None = None

    @property
    def is_whole(self) -> bool:
        return self.depth_class in (S8, L12)

    def read_again(self, request: ServedRequest) -> list[int] | None:
        return self.says

    def admit(self, request: ServedRequest) -> bool:
        return True

    def resize(self, depth: int) -> tuple[float, list[ServedRequest]]:
        self._change(DepthClass(self.depth_class.model, depth))
        return 0.5, self.ended

    def switch(self, depth_class: DepthClass) -> float:
        self._change(depth_class)
        return 2.0

    def _change(self, depth_class: DepthClass) -> None:
        if self.refuses:
            raise ConfigError("no room")
        self.depth_class = depth_class


class FakeMachine:
    """Remembers what it is told, and answers an event's kind with what was prepared."""

    def __init__(self) -> None:
        self.told: list[Event] = []
        self.routing = Routing((S8,))
        self.answers: dict[type, list[Output]] = {}

    def handle(self, event: Event, now_s: float) -> list[Output]:
        self.told.append(event)
        answers = self.answers.get(type(event), [])
        return [answers.pop(0)] if answers else []

    def of(self, kind: type) -> list[Any]:
        return [e for e in self.told if isinstance(e, kind)]


def control_of(
    *orders: ChangeOrder,
) -> tuple[FakeReplica, FakeMachine, LocalController, list[ServedRequest]]:
    replica, machine, served = FakeReplica(), FakeMachine(), list[ServedRequest]()
    machine.answers[ControllerTick] = list(orders)
    control = LocalController(
        cast(Helios, machine), cast(LocalReplica, replica), ManualClock(), served.extend
    )
    return replica, machine, control, served


def test_layers_change_at_once_and_models_when_nobody_is_left() -> None:
    replica, machine, control, served = control_of(Resize(1, NAME, S4, 9.0, "fewer"))
    replica.has_work, replica.ended = True, [request()]
    assert control.is_open
    control.obey()
    assert replica.depth_class == S4 and served == replica.ended
    assert machine.of(OrderDone) == [OrderDone(1, 0.5, 1000, None)]
    machine.answers[ControllerTick] = [Switch(2, NAME, L12, 9.0, "other")]
    control.report()
    control.obey()
    assert (control.is_open, replica.depth_class) == (False, S4)  # somebody is still served
    replica.has_work = False
    control.obey()
    assert (control.is_open, replica.depth_class) == (True, L12)
    assert machine.of(OrderDone)[-1] == OrderDone(2, 2.0, 1000, None, is_start=True)
    assert [what.split(":")[0] for _, what in control.log] == ["resize s@4", "switch l@12"]


def test_what_cannot_be_done_is_said() -> None:
    replica, machine, control, _ = control_of(Switch(1, NAME, L12, 9.0, "other"))
    replica.refuses = True
    control.obey()
    assert machine.of(OrderFailed) == [OrderFailed(1, "no room")]
    assert control.is_open and replica.depth_class == S8


def test_an_order_may_bring_the_next_one() -> None:
    replica, machine, control, _ = control_of(Resize(1, NAME, S4, 9.0, "first"))
    machine.answers[OrderDone] = [Switch(2, NAME, L12, 9.0, "second")]
    control.obey()
    assert replica.depth_class == L12
    assert [e.order_id for e in machine.of(OrderDone)] == [1, 2]


def test_tokens_are_reported_in_portions() -> None:
    replica, machine, control, _ = control_of()
    replica.held, replica.breaches = Counter({S8: REPORT_TOKENS - 1}), 3
    control.stepped()
    assert machine.of(TokensServed) == []
    replica.held = Counter({S8: REPORT_TOKENS, S4: 4})
    control.stepped()
    assert machine.of(TokensServed) == [TokensServed(S8, REPORT_TOKENS + 4, 3, 1)]
    control.report()
    assert len(machine.of(TokensServed)) == 1  # nothing new


def test_the_whole_model_reads_the_newest_answers_of_a_part_again() -> None:
    replica, machine, control, _ = control_of()
    control.served(request(0, L12))
    for index in range(1, READ_AGAIN + 2):
        control.served(request(index, S4, exit_layers=[4, 2, 4]))
    control.served(request(99, S4, S8))  # of two depths
    replica.depth_class, replica.says = S4, [5, 6, 0]
    machine.answers[ControllerTick] = [Resize(1, NAME, DepthClass("s", 2), 9.0, "fewer")]
    control.report()
    control.obey()
    assert machine.of(UnchangedSampled) == [], "it is no more of a judge itself"
    machine.answers[ControllerTick] = [Resize(2, NAME, S8, 9.0, "more")]
    control.report()
    control.obey()
    found = machine.of(UnchangedSampled)
    assert found == [UnchangedSampled("s", {4: (1, 2), 2: (1, 1)}, 4)] * READ_AGAIN
    machine.answers[ControllerTick] = [Resize(3, NAME, S8, 9.0, "again")]
    control.report()
    control.obey()
    assert len(machine.of(UnchangedSampled)) == READ_AGAIN, "each once"


def test_requests_of_one_class_count_and_places_are_given_back() -> None:
    _, machine, control, _ = control_of()
    machine.routing = Routing((S8,), S8, NAME, 1)
    profiled, other = request(0, S8, S4), request(1, S8, breached=[0.0, 0.25, 0.125])
    assert control.admit(profiled)
    machine.routing = Routing((S8,))
    assert control.admit(other)
    assert [(r.is_profile, r.is_scored) for r in (profiled, other)] == [(True,) * 2, (False,) * 2]
    assert machine.of(RequestStarted) == [RequestStarted(NAME)]
    control.served(profiled)
    assert machine.of(RequestLost) == [RequestLost(NAME)]
    control.served(request(2, S8, S4))  # mixed, and no profile: nobody is told
    control.served(other)
    (finished,) = machine.of(RequestFinished)
    assert finished.depth_class == S8 and finished.exit_tokens == {8: 1, 2: 1, 4: 1}
    assert (finished.breaches, finished.decode_s, finished.ttft_s) == (0.375, 1.0, 0.5)
    assert finished.mean_batch == 1.0
