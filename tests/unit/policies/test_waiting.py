"""Who would wait for too long is refused, and told when to come back."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import Mock

import pytest

from quadriga.config.engine import PrefillConfig
from quadriga.config.scheduling import SchedulerConfig
from quadriga.core.replica import DepthClass, ReplicaInfo, ReplicaSnapshot, Role
from quadriga.core.routing import AdmitRequest, PlaceRequest
from quadriga.errors import Overloaded
from quadriga.policies import admission
from quadriga.policies.admission import admit, check_room, find_room
from quadriga.policies.load import has_room, line_of
from quadriga.policies.wait_estimator import (
    LATE_S,
    WaitEstimator,
    decode_supply,
    prefill_supply,
    queue_supply,
)

CLASS = DepthClass("m", 8)
SLOTS = 16
SERVICE_S = 1.0
LIMIT_S = 0.2
USUAL, SCHEDULER = SchedulerConfig(), SchedulerConfig(max_wait_s=LIMIT_S)
PREFILL = PrefillConfig()


def snapshot(role: Role, **load: Any) -> ReplicaSnapshot:
    info = ReplicaInfo(role.value, role, CLASS, "node", "i", SLOTS, 100_000, chunk_tokens=256)
    return ReplicaSnapshot(info, taken_unix_s=0.0, **load)


def request(name: str = "s", **fields: object) -> AdmitRequest:
    made = AdmitRequest(name, "m", 10, 10, 0, 1e9)
    return replace(made, **fields)  # type: ignore[arg-type]


LINE = line_of(snapshot(Role.DECODE).info, any_depth=False)


def let_in(
    asked: AdmitRequest,
    snapshots: Sequence[ReplicaSnapshot],
    book: WaitEstimator,
    *,
    now_s: float = 0.0,
    now_unix_s: float = 0.0,
    scheduler: SchedulerConfig = USUAL,
    prefill: PrefillConfig = PREFILL,
    is_overloaded: bool = False,
) -> None:
    """What the scheduler does about a request of one sequence. Raises: Overloaded."""
    common: dict[str, Any] = {"scheduler": scheduler, "prefill": prefill}
    admitted = admit(asked, snapshots, checks_queue=False, now_unix_s=0.0, **common)
    times = {"now_s": now_s, "now_unix_s": now_unix_s}
    room = find_room(
        asked, admitted, snapshots, book, LINE, is_overloaded=is_overloaded, **common, **times
    )
    check_room([asked], {LINE: [room]}, book, model="m", now_s=now_s, scheduler=scheduler)


def test_a_prefill_replica_whose_report_grows_old_meanwhile_is_found() -> None:
    decode = replace(snapshot(Role.DECODE), taken_unix_s=9.0)
    snapshots = [snapshot(Role.PREFILL), decode]
    with pytest.raises(Overloaded):
        let_in(request(), snapshots, WaitEstimator(), scheduler=SCHEDULER, now_unix_s=9.0)


def test_room_is_looked_for_where_rows_are_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    supply = Mock(side_effect=admission.decode_supply)
    monkeypatch.setattr(admission, "decode_supply", supply)
    long = snapshot(Role.DECODE)
    short = replace(long, info=replace(long.info, name="short", max_model_len=15))
    let_in(request(), [snapshot(Role.PREFILL), long, short], WaitEstimator(), scheduler=SCHEDULER)
    assert supply.call_args.args[1] == [long]


@dataclass
class Cluster:
    """`SLOTS` places; whoever has one keeps it for a random time.

    Attributes:
        waits_s: From admission to a place.
        returned: Refused callers who came back when told: whether they were let in.
    """

    rng: random.Random
    book: WaitEstimator = field(default_factory=WaitEstimator)
    now_s: float = 0.0
    running: list[tuple[float, str]] = field(default_factory=list)
    line: list[tuple[float, str]] = field(default_factory=list)
    num_ended: int = 0
    waits_s: list[float] = field(default_factory=list)
    told_s: list[float] = field(default_factory=list)

    def run_to(self, now_s: float) -> None:
        while self.running and self.running[0][0] <= now_s:
            self.now_s, name = heapq.heappop(self.running)
            self.book.ended([name], now_s=self.now_s)
            self.num_ended += 1
            self._place()
        self.now_s = now_s

    def arrive(self, name: str, **fields: object) -> bool:
        """One caller. Returns whether it was let in."""
        snapshots = [
            snapshot(Role.PREFILL, num_running=len(self.line)),
            snapshot(Role.DECODE, num_running=len(self.running)),
        ]
        asked = request(name, **fields)
        try:
            let_in(asked, snapshots, self.book, now_s=self.now_s, scheduler=SCHEDULER)
        except Overloaded as exc:
            self.told_s.append(exc.retry_after_s or 0.0)
            return False
        self.book.admitted(asked, LINE, now_s=self.now_s)
        self.line.append((self.now_s, name))
        self._place()
        return True

    def _place(self) -> None:
        while self.line and len(self.running) < SLOTS:
            since_s, name = self.line.pop(0)
            self.waits_s.append(self.now_s - since_s)
            self.book.placed(name, now_s=self.now_s)
            heapq.heappush(
                self.running, (self.now_s + self.rng.uniform(0.2, 1.8) * SERVICE_S, name)
            )


@pytest.mark.parametrize("seed", range(3))
def test_five_times_the_capacity(seed: int) -> None:
    """Nobody who is let in waits long, and no place stays empty for it."""
    rng = random.Random(seed)
    cluster = Cluster(rng)
    rate, seconds = 5 * SLOTS / SERVICE_S, 60.0
    at_s = 0.0
    index = num_in = 0
    while at_s < seconds:
        cluster.run_to(at_s)
        num_in += cluster.arrive(str(index))
        index += 1
        at_s += rng.expovariate(rate)
    assert cluster.num_ended >= 0.9 * SLOTS / SERVICE_S * seconds
    steady = cluster.waits_s[SLOTS * 5 :]
    assert sorted(steady)[int(0.99 * len(steady))] <= 3 * LIMIT_S
    assert num_in < 0.3 * index
    assert min(cluster.told_s) > 0.0
    assert max(cluster.told_s) <= SCHEDULER.max_retry_after_s


def test_whoever_comes_back_when_told_is_let_in() -> None:
    """A burst of five times what fits; each comes back at the time that it was told."""
    rng = random.Random(4)
    cluster = Cluster(rng)
    calls = [(0.2 * i, f"before-{i}", 0) for i in range(100)]  # it learns how long they run
    burst_s = 30.0
    calls += [(burst_s + 0.01 * i, f"burst-{i}", 0) for i in range(5 * SLOTS)]
    heapq.heapify(calls)
    tries: Counter[str] = Counter()
    while calls:
        at_s, name, attempt = heapq.heappop(calls)
        cluster.run_to(at_s)
        tries[name] += 1
        if not cluster.arrive(f"{name}-{attempt}", visitor=name):
            heapq.heappush(calls, (at_s + cluster.told_s[-1], name, attempt + 1))
    refused = [count for name, count in tries.items() if name.startswith("burst") and count > 1]
    assert len(refused) > 2 * SLOTS
    assert sum(count == 2 for count in refused) >= 0.7 * len(refused)
    assert max(refused) <= 5


def test_a_long_overload_in_which_one_in_ten_comes_back() -> None:
    """What is kept for them does not add up: places are used, and the last are told what the
    first were."""
    rng = random.Random(5)
    cluster = Cluster(rng)
    rate, seconds = 5 * SLOTS / SERVICE_S, 240.0
    calls = [(rng.uniform(0.0, seconds), f"caller-{i}", 0) for i in range(int(rate * seconds))]
    heapq.heapify(calls)
    told_s: list[tuple[float, float]] = []
    while calls and calls[0][0] < seconds:
        at_s, name, attempt = heapq.heappop(calls)
        cluster.run_to(at_s)
        if not cluster.arrive(f"{name}-{attempt}", visitor=name):
            told_s.append((at_s, cluster.told_s[-1]))
            if attempt or name.endswith("7"):
                heapq.heappush(calls, (at_s + cluster.told_s[-1], name, attempt + 1))
    assert cluster.num_ended >= 0.9 * SLOTS / SERVICE_S * seconds
    early = [told for at_s, told in told_s if 20.0 <= at_s < 60.0]
    late = [told for at_s, told in told_s if at_s >= 180.0]
    assert sum(late) / len(late) <= 2.0 * sum(early) / len(early)


def experienced_book() -> WaitEstimator:
    """After 40 s with ten at any time, for a second each."""
    book = WaitEstimator()
    for i in range(400):  # ten at any time, for a second each
        book.admitted(request(str(i)), "m", now_s=0.1 * i)
        book.placed(str(i), now_s=0.1 * i)
        if i >= 10:
            book.ended([str(i - 10)], now_s=0.1 * i)
    return book


def test_the_rate_is_that_of_all_places_also_where_some_are_kept() -> None:
    book = experienced_book()
    for num_running in (SLOTS // 2, SLOTS):
        decode = snapshot(Role.DECODE, num_running=num_running)
        supply = decode_supply(request(), [decode], book, num_pending=0, line="m", now_s=40.0)
        assert supply.free == SLOTS - num_running
        assert supply.per_s == pytest.approx(SLOTS, rel=0.1)


def test_the_rate_is_learned_and_follows_the_load() -> None:
    book = experienced_book()
    assert book.ends_per_s("m", 10, now_s=40.0) == pytest.approx(10.0, rel=0.1)
    assert book.ends_per_s("m", 40, now_s=40.0) == pytest.approx(40.0, rel=0.1)
    book.ended([str(i) for i in range(390, 400)], now_s=40.0)
    assert book.ends_per_s("m", 10, now_s=1000.0) > 5.0, "idle time says nothing"


def test_with_nothing_learned_yet_hope_falls_with_time() -> None:
    book = WaitEstimator()
    for i in range(8):
        book.admitted(request(str(i)), "m", now_s=0.0)
        book.placed(str(i), now_s=0.0)
    rates = [book.ends_per_s("m", 8, now_s=t) for t in (0.01, 0.5, 5.0)]
    assert rates[0] > 50 > rates[1] > rates[2]


@pytest.mark.parametrize("usual_tokens", [100, 400])
def test_with_nothing_seen_a_request_lasts_as_long_as_usual_or_as_it_may(usual_tokens: int) -> None:
    decode = snapshot(Role.DECODE, num_running=SLOTS, upper_tokens=usual_tokens)
    decode.step_time_s = 0.02
    asked = request(max_tokens=200)
    supply = decode_supply(asked, [decode], WaitEstimator(), num_pending=0, line="m", now_s=0.0)
    assert supply.per_s == pytest.approx(SLOTS / (2.0 if usual_tokens == 100 else 4.0))


def test_whoever_is_on_the_way_to_a_place_ends_too() -> None:
    decode = snapshot(Role.DECODE, upper_tokens=100)
    decode.step_time_s = 0.02
    asked = request(max_tokens=100)
    supply = decode_supply(asked, [decode], WaitEstimator(), num_pending=20, line="m", now_s=0.0)
    assert supply.free == SLOTS - 20
    assert supply.per_s == pytest.approx(SLOTS / 2.0)


def test_the_default_limit_lets_a_second_burst_wait_that_comes_before_the_first_has_ended() -> None:
    """All answers of the first take 10 s; after 8 s none has ended, and as many come again."""
    book = WaitEstimator()
    for i in range(SLOTS):
        book.admitted(request(str(i)), LINE, now_s=0.0)
        book.placed(str(i), now_s=0.0)
    assert USUAL.max_wait_s == 30.0
    decode = snapshot(Role.DECODE, num_running=SLOTS, upper_tokens=64)
    decode.step_time_s = 0.05

    def num_admitted(now_s: float) -> int:
        for number in range(10 * SLOTS):
            asked = request(f"{now_s}-{number}", max_tokens=2000)
            snapshots = [snapshot(Role.PREFILL, num_running=number), decode]
            try:
                let_in(asked, snapshots, book, now_s=now_s)
            except Overloaded:
                return number
            book.admitted(asked, LINE, now_s=now_s)
        return 10 * SLOTS

    num_waiting = num_admitted(8.0)
    assert SLOTS <= num_waiting < 10 * SLOTS, "those at the end of the line would wait for minutes"


def test_those_of_whose_end_nobody_tells_are_forgotten() -> None:
    book = WaitEstimator()
    book.admitted(request("lost", deadline_unix_s=100.0), "m", now_s=0.0)
    assert book.num_pending("m") == 1
    book.forget_late(now_s=1.0, now_unix_s=100.0 + LATE_S - 1)
    assert book.num_pending("m") == 1
    book.forget_late(now_s=1.0, now_unix_s=100.0 + LATE_S + 1)
    assert book.num_pending("m") == 0
    book.placed("lost", now_s=2.0)
    book.ended(["lost", "never known"], now_s=2.0)
    assert book.num_pending("m") == 0
    book.admitted(request("late", deadline_unix_s=100.0), "m", now_s=2.0)
    book.placed("late", now_s=2.0)
    before = book.ends_per_s("m", 8, now_s=3.0)
    book.forget_late(now_s=3.0, now_unix_s=100.0 + LATE_S + 1)
    assert book.ends_per_s("m", 8, now_s=3.0) == before, "nobody knows when it ended"


def test_what_a_dead_ingress_leaves_behind_counts_while_replicas_hold_it() -> None:
    book = WaitEstimator()
    for i in range(20):
        book.admitted(request(str(i)), "m", now_s=0.0)
        book.placed(str(i), now_s=0.0)
    assert book.ends_per_s("m", 20, now_s=1.0) == pytest.approx(20 * 1 / 20, rel=0.1)
    held = book.ends_per_s("m", 0, now_s=1.0)
    assert held == 0.0
    before = book.ends_per_s("m", 1, now_s=1.0)
    assert book.ends_per_s("m", 1, now_s=3.0) == pytest.approx(before, rel=0.2)


@pytest.mark.parametrize("is_renamed", [False, True])
def test_after_a_replicas_death_others_are_not_thought_to_end_sooner(is_renamed: bool) -> None:
    """Half of 64 sequences are lost and let in again; none has ended."""
    book, names = WaitEstimator(), [str(i) for i in range(64)]
    for name in names:
        book.admitted(request(name), "m", now_s=0.0)
        book.placed(name, now_s=0.0)
    before = book.ends_per_s("m", 64, now_s=5.0)
    for name in names[:32]:
        if is_renamed:
            book.lost([name], now_s=5.0)
        again = f"{name}.1" if is_renamed else name
        book.admitted(request(again, is_rebuild=True), "m", now_s=5.0)
        book.placed(again, now_s=5.0)
    assert book.ends_per_s("m", 64, now_s=5.0) <= before


def test_room_is_slots_and_memory() -> None:
    book = WaitEstimator()
    for i in range(100):  # everybody runs for 8 s
        book.admitted(request(str(i)), "m", now_s=0.5 * i)
        book.placed(str(i), now_s=0.5 * i)
        book.ended([str(i - SLOTS)], now_s=0.5 * i)

    def wait(asked: AdmitRequest, *decodes: ReplicaSnapshot, pending: int = 0) -> float:
        supply = decode_supply(asked, decodes, book, num_pending=pending, line="m", now_s=50.0)
        return supply.wait_s

    empty = snapshot(Role.DECODE)
    assert wait(request(), empty, pending=SLOTS - 1) == 0.0
    assert wait(request(), empty, pending=SLOTS) == pytest.approx(0.5, rel=0.05)
    full = snapshot(Role.DECODE, num_running=SLOTS)
    assert wait(request(), full) == pytest.approx(0.5, rel=0.05)
    assert wait(request(), full, pending=3) == pytest.approx(2.0, rel=0.05)
    assert wait(request(), full, empty) == 0.0
    no_memory = snapshot(Role.DECODE, num_running=1, reserved_tokens=50_000)
    assert wait(request(max_tokens=90_000), no_memory) == pytest.approx(8.0, rel=0.05)


@pytest.mark.parametrize(("reserved_tokens", "free"), [(89_989, 1), (89_990, 0)])
def test_admission_sees_room_where_placement_does(reserved_tokens: int, free: int) -> None:
    decode, book = snapshot(Role.DECODE, num_running=9), WaitEstimator()
    decode.reserved_tokens, decode.info = reserved_tokens, replace(decode.info, reservation="used")

    def free_for(priority: int, *decodes: ReplicaSnapshot) -> float:
        asked = request(priority=priority)
        assert has_room(decode, PlaceRequest("s", CLASS, 10, 20, priority=priority)) is (free > 0)
        return decode_supply(asked, decodes, book, num_pending=0, line="m", now_s=0.0).free

    assert free_for(5, decode) == free
    decode.num_paused, decode.least_priority, free = 3, 5, -3
    assert free_for(5, decode) == free, "they wait ahead of newcomers that are no more important"
    assert free_for(5, decode, snapshot(Role.DECODE)) == SLOTS
    free = 1
    assert free_for(4, decode) == free


def test_prompts_ahead_are_counted_in_chunks() -> None:
    first = snapshot(Role.PREFILL, waiting_tokens=1024)
    first.step_time_s = 0.1
    supply = prefill_supply(request(), first, num_replicas=2)
    assert supply.wait_s == pytest.approx(0.4)
    assert supply.per_s == pytest.approx(2 * 256 / 10 / 0.1)
    first.waiting_by_priority = ((0, 256), (5, 768))
    for priority, wait_s in ((0, 0.1), (5, 0.4)):
        supply = prefill_supply(request(priority=priority), first, num_replicas=1)
        assert supply.wait_s == pytest.approx(wait_s), "less important ones come behind"


def test_room_in_queues_is_sequences_and_tokens() -> None:
    config = PrefillConfig(max_queued_sequences=4, max_queued_tokens=100)
    queue = snapshot(Role.PREFILL, num_waiting=2, waiting_tokens=50)
    queue.tokens_per_s = 20.0
    assert queue_supply(request(), [queue], config).free == 2
    assert queue_supply(request(), [queue, queue], config).per_s == pytest.approx(4.0)
    assert queue_supply(request(num_prompt_tokens=30), [queue], config).free == 1
    assert queue_supply(request(num_prompt_tokens=60), [queue], config).free == 0
    empty = snapshot(Role.PREFILL)
    assert queue_supply(request(num_prompt_tokens=900), [empty], config).free == 1


def ask_a_full_queue(name: str, *, num_waiting: int, now_s: float, book: WaitEstimator) -> float:
    """0 where it is let in, else when to come back."""
    queue = snapshot(Role.PREFILL, num_waiting=num_waiting, waiting_tokens=10 * num_waiting)
    queue.tokens_per_s = 40.0
    snapshots = [queue, snapshot(Role.DECODE)]
    settings = PrefillConfig(max_queued_sequences=4)
    try:
        let_in(request(name, visitor=name), snapshots, book, now_s=now_s, prefill=settings)
    except Overloaded as exc:
        return exc.retry_after_s or 0.0
    return 0.0


@pytest.mark.parametrize(("num_held", "is_let_in"), [(SLOTS // 2 - 1, True), (SLOTS // 2, False)])
def test_newcomers_are_refused_while_half_of_the_prefill_rows_hold_long_answers(
    num_held: int, is_let_in: bool
) -> None:
    book, decode = WaitEstimator(), snapshot(Role.DECODE, num_running=SLOTS, upper_tokens=64)
    decode.step_time_s = 0.05
    snapshots = [snapshot(Role.PREFILL, num_running=num_held, num_unplaced=num_held), decode]
    for i in range(num_held):
        book.admitted(request(str(i)), LINE, now_s=0.0)
    if is_let_in:
        let_in(request(), snapshots, book, is_overloaded=True)
        return
    with pytest.raises(Overloaded, match=f"{num_held} sequences wait for a decode replica") as exc:
        let_in(request(), snapshots, book, is_overloaded=True)
    assert 0.0 < (exc.value.retry_after_s or 0.0) <= USUAL.max_retry_after_s


@pytest.mark.parametrize(("reserved_tokens", "is_let_in"), [(99_990, True), (99_991, False)])
def test_newcomers_are_refused_while_held_sequences_leave_no_memory_for_another_prompt(
    reserved_tokens: int, is_let_in: bool
) -> None:
    book = WaitEstimator()
    first = snapshot(Role.PREFILL, reserved_tokens=reserved_tokens, num_unplaced=1)
    snapshots = [first, snapshot(Role.DECODE)]
    let_in(request(), snapshots, book)
    if is_let_in:
        let_in(request(), snapshots, book, is_overloaded=True)
        return
    with pytest.raises(Overloaded, match="prefill replicas have memory for no more"):
        let_in(request(), snapshots, book, is_overloaded=True)


def test_a_prompt_goes_where_memory_is_left_for_it() -> None:
    full = snapshot(Role.PREFILL, reserved_tokens=99_995)
    busy = snapshot(Role.PREFILL, waiting_tokens=500)
    busy.info = replace(busy.info, name="busy")
    snapshots = [full, busy, snapshot(Role.DECODE)]
    chosen = admit(request(), snapshots, now_unix_s=0.0, scheduler=USUAL, prefill=PREFILL)
    assert chosen.prefill_replica == "busy"


@pytest.mark.parametrize(
    ("role", "max_tokens", "is_let_in"),
    [(Role.PREFILL, 1, True), (Role.PREFILL, 2, False), (Role.MIXED, 1, False)],
)
def test_who_ends_with_its_first_token_waits_for_no_decode_replica(
    role: Role, max_tokens: int, is_let_in: bool
) -> None:
    step_s = 1.0 if role is Role.MIXED else 0.01
    first = snapshot(role, num_running=SLOTS, step_time_s=step_s, chunk_time_s=0.01)
    decode = snapshot(Role.DECODE, num_running=SLOTS, step_time_s=1.0)
    snapshots, book = [first] if role is Role.MIXED else [first, decode], WaitEstimator()
    for i in range(10):
        book.admitted(request(str(i)), LINE, now_s=0.0)
    with nullcontext() if is_let_in else pytest.raises(Overloaded):
        let_in(request(max_tokens=max_tokens), snapshots, book, scheduler=SCHEDULER)


@pytest.mark.parametrize(
    "load",
    [
        {"reserved_tokens": 60_000, "used_tokens": 10_000, "waiting_tokens": 50_000},  # under way
        {"reserved_tokens": 60_000, "waiting_tokens": 60_000},  # just sent there
        {"reserved_tokens": 90_000, "used_tokens": 20_000, "waiting_tokens": 40_000},  # mixed
    ],
)
def test_a_prompt_takes_memory_once_whatever_is_known_of_it(load: dict[str, int]) -> None:
    snapshots = [snapshot(Role.PREFILL, num_unplaced=1, **load), snapshot(Role.DECODE)]
    let_in(request(), snapshots, WaitEstimator(), is_overloaded=True)


def test_full_queues_too_tell_everybody_another_time_and_keep_the_place() -> None:
    book = WaitEstimator()
    told = [ask_a_full_queue(n, num_waiting=4, now_s=0.0, book=book) for n in ("a", "b", "c")]
    assert told[0] > 0.2
    assert told[2] - told[1] > 0.1
    assert told[1] - told[0] > 0.1
    assert ask_a_full_queue("d", num_waiting=3, now_s=told[0], book=book) > 0.0
    assert ask_a_full_queue("a", num_waiting=4, now_s=told[0], book=book) > 0.0, "no room at all"
    assert ask_a_full_queue("b", num_waiting=3, now_s=told[1], book=book) == 0.0
    assert ask_a_full_queue("e", num_waiting=0, now_s=told[2], book=book) == 0.0


def test_without_a_limit_nobody_is_refused_for_it() -> None:
    snapshots = [snapshot(Role.PREFILL), snapshot(Role.DECODE, num_running=SLOTS)]
    let_in(request(), snapshots, WaitEstimator(), scheduler=SchedulerConfig(max_wait_s=None))
