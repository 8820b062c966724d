"""The sequences of one request are let in together, or none, by what each of them needs."""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest

import actors.scheduler.scheduler
from actors.scheduler.scheduler import Scheduler
from quadriga.clock import ManualClock
from quadriga.control.model_routing import Route
from quadriga.core.replica import DepthClass, ReplicaInfo, ReplicaSnapshot, Role
from quadriga.core.request import AUTO_MODEL
from quadriga.core.routing import AdmitRequest
from quadriga.errors import InvalidRequest, Overloaded
from tests.unit.actors.test_scheduler import FULL, SMALL, plain

SLOTS = 16
IN_TIME: dict[str, Any] = {"scheduler.max_wait_s": 0.2}


def asked(name: str, num_prompt_tokens: int = 10, **fields: Any) -> AdmitRequest:
    return replace(AdmitRequest(name, "quadriga-s", num_prompt_tokens, 10, 0, 1e12), **fields)


class Service:
    """A scheduler that is told of replicas; who has a place runs for a second, on average."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        self.clock = ManualClock(1000.0)
        monkeypatch.setattr(actors.scheduler.scheduler, "SystemClock", lambda: self.clock)
        self.scheduler = Scheduler(plain(**settings))
        self.rng = random.Random(3)
        self.line: list[str] = []
        self.running: list[tuple[float, str]] = []
        self.num_ended = 0

    async def report(self, role: Role, of: DepthClass = FULL, **load: Any) -> None:
        name = f"{role}{of.depth}"
        info = ReplicaInfo(name, role, of, "n", name, SLOTS, 100_000, chunk_tokens=256)
        now_s = self.clock.now_s()
        one = ReplicaSnapshot(info, now_s, sent_s=now_s, loaded_s=now_s, **load)
        await self.scheduler.report(one, accepted=[*self.scheduler._inflight._sent.get(name, {})])

    async def busy(self, num_running: int, num_prompts: int = 0, **load: Any) -> None:
        """Replicas with so much to do report; answers take ten seconds."""
        await self.report(Role.PREFILL, num_running=num_prompts, **load)
        await self.report(Role.DECODE, num_running=num_running, step_time_s=1.0, upper_tokens=10)

    def wait(self, count: int, line: str = str(FULL)) -> None:
        """So many were let in before, and have no place."""
        for i in range(count):
            self.scheduler._waiting.admitted(asked(f"{line} {i}"), line, now_s=1000.0)

    async def run_to(self, now_s: float) -> None:
        """Let sequences end and others take their places until then, and report the loads."""
        while self.running and self.running[0][0] <= now_s:
            at_s, name = heapq.heappop(self.running)
            self.clock.advance(at_s - self.clock.now_s())
            await self.scheduler.finished([name])
            self.num_ended += 1
            self.place()
        self.clock.advance(now_s - self.clock.now_s())
        await self.report(Role.PREFILL, num_running=len(self.line))
        await self.report(Role.DECODE, num_running=len(self.running))

    def place(self) -> None:
        while self.line and len(self.running) < SLOTS:
            name = self.line.pop(0)
            self.scheduler._waiting.placed(name, now_s=self.clock.now_s())
            ends_s = self.clock.now_s() + self.rng.uniform(0.2, 1.8)
            heapq.heappush(self.running, (ends_s, name))

    async def told_s(self, *requests: AdmitRequest) -> float:
        """0 where they are let in, else when they are to come back."""
        try:
            await self.scheduler.admit(requests)
        except Overloaded as exc:
            return exc.retry_after_s or 0.0
        self.line += [one.sequence_id for one in requests]
        self.place()
        return 0.0

    @property
    def num_pending(self) -> int:
        return self.scheduler._waiting.num_pending(str(FULL))


@pytest.fixture
async def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    return Service(monkeypatch, **IN_TIME)


async def overload(service: Service, *, together: bool) -> list[float]:
    """Seconds until all four are in that come together, as one request or as four of one each.

    A fifth more comes than can be served, and everybody comes back when told.
    """
    rate, seconds = 1.2 * SLOTS, 40.0
    calls = [(1000.0 + i / rate, f"one-{i}", 1) for i in range(int(rate * seconds))]
    for i in range(12):
        fours = [(f"four-{i}-0", 4)] if together else [(f"four-{i}-{j}", 1) for j in range(4)]
        calls += [(1010.0 + i, name, count) for name, count in fours]
    num_tries, took_s = defaultdict[str, int](int), dict[str, float]()
    heapq.heapify(calls)
    while calls and calls[0][0] < 1000.0 + seconds:
        at_s, name, count = heapq.heappop(calls)
        await service.run_to(at_s)
        num_tries[name] += 1
        ids = [f"{name}-{num_tries[name]}-{i}" for i in range(count)]
        told_s = await service.told_s(*(asked(i, visitor=name) for i in ids))
        kind, number, *_ = name.split("-")
        if told_s:
            heapq.heappush(calls, (at_s + told_s, name, count))
        elif kind == "four":
            took_s[number] = at_s - 1010.0 - int(number)
    missing = {name.split("-")[1] for _, name, _ in calls if name[0] == "f"}
    assert service.num_ended >= 0.9 * SLOTS * seconds, "no place stays empty"
    return [took for number, took in took_s.items() if number not in missing]


async def test_under_lasting_overload_a_request_of_four_is_let_in_as_four_requests_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    apart = await overload(Service(monkeypatch, **IN_TIME), together=False)
    together = await overload(Service(monkeypatch, **IN_TIME), together=True)
    assert len(together) >= len(apart) - 1 >= 10
    assert sum(together) / len(together) <= 1.3 * sum(apart) / len(apart)


@pytest.mark.parametrize(
    ("prompts", "is_let_in"),
    [
        ((40, 10, 10, 40), True),
        ((10, 10, 10, 80), False),
        ((80, 10, 10, 10), False),
        ((10, 10, 10), True),
    ],
)
async def test_each_sequence_counts_with_its_own_size_and_none_is_let_in_without_the_others(
    prompts: tuple[int, ...], is_let_in: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queue has room for a hundred tokens more."""
    service = Service(monkeypatch, **{"prefill.max_queued_tokens": 200})
    marks = ((0, b"a"),)
    await service.report(Role.PREFILL, num_waiting=1, waiting_tokens=100)
    await service.report(Role.DECODE)
    before = await service.scheduler.loads()
    requests = [asked(str(i), size, prefix_marks=marks) for i, size in enumerate(prompts)]
    assert (await service.told_s(*requests) == 0.0) is is_let_in
    assert service.num_pending == (len(prompts) - min(SLOTS, len(prompts))) * is_let_in
    assert (await service.scheduler.loads() == before) is not is_let_in
    assert bool(service.scheduler._prefixes.cached_tokens(marks)) is is_let_in


async def test_what_is_rebuilt_was_let_in_before_and_takes_nobodys_reservation(
    service: Service,
) -> None:
    await service.busy(SLOTS)
    told_s = await service.told_s(asked("a", visitor="v"), asked("b", visitor="v"))
    assert told_s > 0.0
    service.clock.advance(told_s)
    again = asked("c.1", visitor="v", is_rebuild=True)
    assert await service.told_s(again) == 0.0
    assert len(service.scheduler._waiting.reservations(str(FULL))) == 2


@pytest.mark.parametrize(("full", "is_let_in"), [(SMALL, True), (FULL, False)])
async def test_replicas_of_another_depth_and_those_who_wait_for_them_do_not_count(
    full: DepthClass, is_let_in: bool, service: Service
) -> None:
    for of in (SMALL, FULL):
        num_running = 20 * (of == full)
        await service.report(Role.PREFILL, of, num_running=num_running)
        load = {"num_running": SLOTS * (of == full), "step_time_s": 1.0, "upper_tokens": 10}
        await service.report(Role.DECODE, of, **load)
    service.wait(20, str(full))
    strict = asked("strict", needs_depth=8)
    assert (await service.told_s(strict) == 0.0) is is_let_in


@pytest.mark.parametrize(("priority", "is_let_in"), [(0, False), (-1, True)])
async def test_less_important_ones_that_wait_are_not_before_a_request(
    priority: int, is_let_in: bool, service: Service
) -> None:
    await service.busy(SLOTS - 1, 40)
    service.wait(40)
    assert (await service.told_s(asked("a", priority=priority)) == 0.0) is is_let_in


async def test_a_request_of_more_than_all_places_keeps_no_more_than_those(service: Service) -> None:
    """It waits for its own sequences then; refused for ever, it would keep places for ever."""
    await service.busy(1)
    requests = [asked(str(i), visitor="large") for i in range(4 * SLOTS)]
    told_s = await service.told_s(*requests)
    assert told_s > 0.0
    assert len(service.scheduler._waiting.reservations(str(FULL))) == SLOTS
    await service.run_to(1000.0 + told_s)
    await service.report(Role.DECODE)
    assert await service.told_s(*requests) == 0.0
    assert not len(service.scheduler._waiting.reservations(str(FULL)))


async def test_who_is_told_to_come_before_there_is_a_place_has_none_kept(service: Service) -> None:
    await service.busy(SLOTS, 400)
    service.wait(400)
    with pytest.raises(Overloaded, match=r"wait is above .* \(scheduler.max_wait_s\)") as refused:
        await service.scheduler.admit([asked("a", visitor="v")])
    assert refused.value.retry_after_s == service.scheduler._config.scheduler.max_retry_after_s
    assert not len(service.scheduler._waiting.reservations(str(FULL)))


async def test_a_request_that_is_sent_again_under_its_names_does_not_wait_for_itself(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "place", lambda: None)
    await service.busy(0)
    requests = [asked(str(i)) for i in range(SLOTS)]
    assert [await service.told_s(*requests) for _ in range(2)] == [0.0, 0.0]


async def test_the_places_of_a_refused_request_are_kept_in_all_its_lines_for_one_time(
    service: Service,
) -> None:
    """Given up in the line that has some, they would lack there when the other line has some."""

    async def report(*busy: DepthClass) -> None:
        for of in (FULL, SMALL):
            await service.report(Role.PREFILL, of, num_running=20 * (of in busy))
            load = {"num_running": SLOTS * (of in busy), "step_time_s": 1.0, "upper_tokens": 10}
            await service.report(Role.DECODE, of, **load)

    def kept() -> list[list[tuple[float, str]]]:
        return [service.scheduler._waiting.reservations(str(of))._line for of in (FULL, SMALL)]

    for of in (FULL, SMALL):
        service.wait(20, str(of))
    requests = [asked(str(i), visitor="v") for i in range(2)]
    for busy in ((FULL, SMALL), (FULL,), (SMALL,)):
        await report(*busy)
        told_s = await service.told_s(*requests)
        due_s = service.clock.now_s() + told_s
        assert kept() == [[(due_s, "v:2")]] * 2
        service.clock.advance(told_s)
    await report()
    assert await service.told_s(*requests) == 0.0
    assert kept() == [[], []]


async def test_a_refusal_names_the_model_that_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(monkeypatch, **IN_TIME | {"helios.enabled": True})
    await service.busy(SLOTS)
    await service.scheduler.set_route(Route((FULL,)))
    with pytest.raises(Overloaded, match="'quadriga-s' is busy"):
        await service.scheduler.admit([asked("one", model=AUTO_MODEL)])


async def test_those_that_end_with_their_first_token_ask_for_no_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for num_ending, is_let_in in ((0, False), (20, True)):
        service = Service(monkeypatch, **IN_TIME)
        await service.busy(0, 20, ending=(num_ending, 200))
        service.wait(20)
        assert (await service.told_s(asked("one")) == 0.0) is is_let_in


async def test_places_in_a_profile_are_given_back_where_the_request_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = Service(monkeypatch, **IN_TIME | {"helios.enabled": True})
    await service.busy(SLOTS)
    for role in (Role.PREFILL, Role.DECODE):
        await service.report(role, SMALL)
    profile = f"{Role.DECODE}{SMALL.depth}"
    scouts = frozenset({f"{Role.PREFILL}{SMALL.depth}", profile})
    route = Route((FULL,), scouts=scouts, profile=SMALL, profile_decode=profile, places=3)
    await service.scheduler.set_route(route)
    four = [asked(str(i), model=AUTO_MODEL) for i in range(4)]
    assert await service.told_s(*four) > 0.0
    (admission,) = await service.scheduler.admit([asked("one", model=AUTO_MODEL)])
    assert admission.profile == profile


@pytest.mark.parametrize(
    ("prompts", "is_final"),
    [
        ([50] * 8, False),
        ([50] * 9, True),
        ([1] * 17, True),
        ([900, 99, 99], False),
        ([999] * 3, True),
    ],
)
async def test_a_request_that_all_queues_could_never_hold_is_refused_for_good(
    prompts: list[int], is_final: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the replicas that there shall be: of two one is away. One long prompt may wait alone."""
    limits = {"prefill.max_queued_tokens": 200, "prefill.max_queued_sequences": 8}
    service = Service(monkeypatch, prefill_replicas=2, **limits)
    await service.busy(0)
    with pytest.raises(InvalidRequest if is_final else Overloaded):
        await service.scheduler.admit([asked(str(i), size) for i, size in enumerate(prompts)])
