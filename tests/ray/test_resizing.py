"""A replica's depth changes under load: no token of those whom it does not concern changes."""

from __future__ import annotations

import os
import time
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.rpc.lookup import controller_name, get_actor, scheduler_name
from quadriga.checkpoint.exits import ExitParams
from quadriga.core.replica import ResizeReport
from quadriga.core.request import FinishReason
from tests.random_drafter import draft_as_it_pays, draft_at_random
from tests.ray.apps import App, app_fixture, pids
from tests.ray.ingress import Ingress, Stream, call
from tests.ray.moves import free_memory, held, order, pause
from tests.waiting import wait_until

NUM_RESIZES = 42
"""Of the decode replica and of the prefill replica, together at least."""
NUM_HUNDREDS = 300
MAX_GROWTH_BYTES = 32 << 20
TIME_LIMIT_S = 150.0
LIMITED = ExitParams(0.99, "bounded", 4)
"""Never deeper than the four layers that are always there: the same tokens whatever comes."""
LIMITED_STRICT = ExitParams(0.99, "strict", 4)
FREE = ExitParams(0.99, "bounded", 0)
STRICT = ExitParams(0.99, "strict", 0)
WHOLE = ExitParams(1.0, "off")
LOSSLESS = ExitParams(1.0, "lossless")


resizing = app_fixture(
    "resizing",
    **{
        "decode_replicas": 2,
        "scheduler.ares.mode": "off",  # moves for balance would be counted with the others
        "decode.max_slots": 16,
        "decode.rebatching": "drex",
        "deterministic": True,
        "engine.max_model_len": 512,
        "engine.kv_memory_bytes": 2 << 20,
        "engine.compile": "wait",
        "helios.enabled": True,
        "helios.models": ["quadriga-s"],
        "lifecycle.orphan_timeout_s": 300.0,
    },
)
"""One prefill and two decode replicas that hold few sequences at full depth; and scouts.

The scouts wait for profiles that nobody asks for, so that no orders come but the test's own.
"""


def serving(app: App) -> tuple[list[str], str]:
    """Decode replicas and the prefill replica that are no scouts."""
    return sorted(app.replicas("decode"))[:2], min(app.replicas("prefill"))


def submit(ingress: Ingress, exits: ExitParams, seed: int, num_output: int) -> Stream:
    prompt = [20 + (seed * 7 + i * 3) % 300 for i in range(8 + seed % 20)]
    return ingress.submit(prompt, num_output, exits=exits, deadline_s=240.0)


def resize(replica: str, depth: int) -> ResizeReport:
    report: ResizeReport = call(replica, "resize", depth, 30.0)
    return report


@pytest.mark.timeout(400)
def test_up_and_down_under_load(resizing: App) -> None:
    reports = churn(resizing, undisturbed(resizing), NUM_RESIZES, TIME_LIMIT_S)
    decodes, _ = serving(resizing)
    capacity = {8: call(decodes[0], "info").kv_capacity_tokens}
    capacity |= {r.depth: r.kv_capacity_tokens for name, r in reports if name in decodes}
    assert capacity[4] > 1.9 * capacity[8], "layers that go leave their memory to the KV"


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_hundreds_of_resizes_leave_nothing_behind(resizing: App) -> None:
    """No request fails, no token changes that must not, and memory ends where it began."""
    app = resizing
    wanted = undisturbed(app)
    churn(app, wanted, 30, TIME_LIMIT_S)  # caches fill, and heaps settle
    before = memory_bytes(app)
    slots = {s.info.name: s.info.kv_capacity_tokens for s in app.snapshots()}
    reports = churn(app, wanted, NUM_HUNDREDS, 240.0)
    assert len(reports) >= NUM_HUNDREDS
    assert slots == {s.info.name: s.info.kv_capacity_tokens for s in app.snapshots()}
    grown = {name: now - before[name] for name, now in memory_bytes(app).items()}
    # A layer that stays behind at each of them would be some 300 MB.
    assert max(grown.values()) < MAX_GROWTH_BYTES, grown
    assert app.metric("quadriga_involuntary_exits_total") == 0
    print(f"{len(reports)} resizes; memory grew by {grown}")


def undisturbed(app: App) -> list[list[list[int]]]:
    """What each of six limited streams says while nothing changes: an answer for either depth at
    which the prefill replica may say the first token, which has no limit."""
    _, prefill = serving(app)
    wanted: list[list[list[int]]] = [[] for _ in range(6)]
    for depth in (4, 8):
        assert resize(prefill, depth).depth == depth
        alone = app.ingress()
        streams = [submit(alone, LIMITED, seed, 120) for seed in range(6)]
        alone.finish(*streams, timeout_s=100.0)
        for seed, stream in enumerate(streams):
            wanted[seed].append(stream.token_ids)
    return wanted


def churn(
    app: App, wanted: list[list[list[int]]], num_resizes: int, time_limit_s: float
) -> list[tuple[str, ResizeReport]]:
    """Resize all three replicas up and down under load, as fast as they go; checks all streams.

    They end at full depth.
    """
    decodes, prefill = serving(app)
    depths = {name: call(name, "info").depth_class.depth for name in [*decodes, prefill]}
    ingress = app.ingress()
    reports: list[tuple[str, ResizeReport]] = []
    pending: dict[object, str] = {}
    limited: list[Stream] = []
    free: list[Stream] = []

    def collect() -> None:
        done, _ = ray.wait(list(pending), num_returns=len(pending), timeout=0)
        for ref in done:
            name, report = pending.pop(ref), ray.get(ref)
            reports.append((name, report))
            assert report.outcome == "resized", report

    give_up_s = time.monotonic() + time_limit_s
    while len(reports) < num_resizes:
        assert time.monotonic() < give_up_s, f"only {len(reports)} in {time_limit_s:.0f} s"
        if sum(not s.is_over for s in [*limited, *free]) < 6:
            exits = (LIMITED, LIMITED_STRICT)[len(limited) % 2]
            limited.append(submit(ingress, exits, len(limited) % 6, 120))
            free.append(submit(ingress, FREE, 50 + len(free), 100))
        for name in depths:
            if name not in pending.values():
                depths[name] = {8: 4, 4: 8}[depths[name]]
                ref = get_actor(name).resize.remote(depths[name], 30.0)
                pending[ref] = name
        ingress.poll(0.02)
        collect()
    while pending:
        assert time.monotonic() < give_up_s + 60.0, f"{pending} did not answer"
        ingress.poll(0.02)
        collect()
    ingress.finish(*limited, *free, timeout_s=100.0)
    for i, stream in enumerate(limited):
        assert stream.error is None and stream.finish is FinishReason.LENGTH
        assert stream.token_ids in wanted[i % 6], f"tokens of {i} have changed"
    assert [s.error for s in free] == [None] * len(free)
    assert all(len(s.token_ids) == 100 for s in free)
    app.until_idle()
    for name in depths:
        assert resize(name, 8).depth == 8
    return reports


def memory_bytes(app: App) -> dict[str, int]:
    """Resident memory of the replicas that change, once it is steady: a thread of its own gives
    it back."""
    decodes, prefill = serving(app)
    processes = pids(app.name)
    give_up_s = time.monotonic() + 20.0
    last: dict[str, int] = {}
    while True:
        found = {}
        for name in [*decodes, prefill]:
            pages = int(Path(f"/proc/{processes[name]}/statm").read_text().split()[1])
            found[name] = pages * os.sysconf("SC_PAGE_SIZE")
        if last and max(abs(found[name] - last[name]) for name in found) < 1 << 20:
            return found
        assert time.monotonic() < give_up_s, f"memory does not settle: {last}, {found}"
        last = found
        time.sleep(1.0)


@pytest.mark.timeout(400)
def test_strict_sequences_go_where_the_layers_are(resizing: App) -> None:
    """Layers are not dropped under them; where they lack, the controller moves the sequence."""
    app = resizing
    (first, second), prefill = serving(app)
    for name in (prefill, first, second):
        assert resize(name, 8).depth == 8
    ingress = app.ingress()
    with held((first, second)):
        strict = [submit(ingress, STRICT, seed, 300) for seed in range(4)]
        ingress.until(lambda: len(strict[0].tokens) > 2)
        report = call(strict[0].replica, "resize", 4, 0.02)
    ingress.finish(*strict, timeout_s=100.0)
    assert [s.error for s in strict] == [None] * 4
    assert report.outcome == "blocked" and report.depth == 8, report

    give_up_s = time.monotonic() + TIME_LIMIT_S
    while True:
        resize(first, 4)
        resize(second, 4)
        moved = call(controller_name(app.name), "history")["counters"]["escalated"]
        again = [submit(ingress, STRICT, seed, 300) for seed in range(4)]
        ingress.finish(*again, timeout_s=100.0)
        assert [s.error for s in again] == [None] * 4
        assert [s.token_ids for s in again] == [s.token_ids for s in strict]
        history = call(controller_name(app.name), "history")
        escalated = history["counters"]["escalated"] - moved
        # The first move of each is the one from the prefill replica.
        assert escalated == sum(len(s.moved_to) - 1 for s in again)
        # The controller may have had the layers loaded at once, for those that came before.
        if escalated:
            break
        assert time.monotonic() < give_up_s, "all had the layers at once"
    app.until_idle()


@pytest.mark.timeout(200)
def test_layers_do_not_go_in_the_middle_of_a_draft(resizing: App) -> None:
    """They stay while answers need them; what drafts meanwhile, and after they came, is whole."""
    app = resizing
    (first, second), prefill = serving(app)
    for name in (prefill, first, second):
        assert resize(name, 8).depth == 8
    alone = app.ingress()
    wanted = [submit(alone, WHOLE, seed, 300) for seed in range(4)]
    alone.finish(*wanted, timeout_s=100.0)
    drafted = app.metric("quadriga_drafted_tokens_total")
    for name in (first, second):
        draft_at_random(name, 3)
    ingress = app.ingress()
    with held((first, second)):
        lossless = [submit(ingress, LOSSLESS, seed, 300) for seed in range(4)]
        ingress.until(lambda: len(lossless[0].tokens) > 2)
        report = call(lossless[0].replica, "resize", 4, 0.02)
        free = submit(ingress, FREE, 60, 60)
    ingress.finish(*lossless, free, timeout_s=100.0)
    assert [s.error for s in (*lossless, free)] == [None] * 5
    assert [s.token_ids for s in lossless] == [s.token_ids for s in wanted]
    for name in (first, second):
        assert resize(name, 4).depth == 4
        assert resize(name, 8).depth == 8
    assert report.outcome == "blocked" and report.depth == 8, report
    again = [submit(ingress, LOSSLESS, seed, 300) for seed in range(4)]
    ingress.finish(*again, timeout_s=100.0)
    assert [s.token_ids for s in again] == [s.token_ids for s in wanted]
    wait_until(lambda: app.metric("quadriga_drafted_tokens_total") > drafted, 20.0)
    for name in (first, second):
        draft_as_it_pays(name)
    app.until_idle()


@pytest.mark.timeout(400)
def test_sequences_move_between_depths(resizing: App) -> None:
    """Down and up with the layers both have; who would say something else there is refused."""
    app = resizing
    (deep, shallow), prefill = serving(app)
    for name, depth in ((prefill, 8), (deep, 8), (shallow, 4)):
        assert resize(name, depth).depth == depth
    ingress = app.ingress()
    alone = submit(ingress, LIMITED, 3, 470)
    ingress.finish(alone)
    with held((deep, shallow)):
        # Down and up again, or up and down: it is where it was, and goes on.
        stream = submit(ingress, LIMITED, 3, 470)
        # With its second token it is at a decode replica.
        ingress.until(lambda: len(stream.tokens) > 1)
        source = stream.replica
        assert source in (deep, shallow)
        destination = shallow if source == deep else deep
        for one, other in ((source, destination), (destination, source)):
            ingress.until(lambda n=one: stream.replica == n)  # type: ignore[misc]
            report = call(one, "migrate", order(stream, one, other))
            assert report.outcome == "moved", report
    ingress.finish(stream)
    assert stream.error is None and stream.token_ids == alone.token_ids

    # The controller heard of strict sequences before, and may have layers loaded until it forgets.
    give_up_s = time.monotonic() + TIME_LIMIT_S
    while True:
        for name, depth in ((deep, 8), (shallow, 4)):
            assert resize(name, depth).depth == depth
        with held((deep, shallow)):
            free = submit(ingress, FREE, 5, 300)
            ingress.until(lambda s=free: len(s.tokens) > 5)  # type: ignore[misc]
            destination = shallow if free.replica == deep else deep
            report = call(free.replica, "migrate", order(free, free.replica, destination))
            depths = [call(n, "info").depth_class.depth for n in (deep, shallow)]
        ingress.finish(free)
        assert free.error is None
        if depths == [8, 4]:
            break
        assert time.monotonic() < give_up_s, depths
    assert (report.outcome, report.reason.split(":")[0]) == ("refused", "wrong_depth"), report
    app.until_idle()


@pytest.mark.timeout(200)
def test_rescue_goes_on_while_a_replica_has_fewer_layers_and_scouts_get_nothing(
    resizing: App,
) -> None:
    """The class is split in two of one replica each, and a paused sequence has its only room in the
    other one; a scout of its own depth would have some, too."""
    app = resizing
    app.ensure(**{"scheduler.ares.mode": "ares", "scheduler.ares.interval_s": 0.5})
    (source, other), _ = serving(app)
    scouts = set(app.replicas("decode")) - {source, other}
    assert scouts
    ingress = app.ingress()
    with held((source, other), 0.1):
        streams = [submit(ingress, LIMITED, seed, 250) for seed in range(6)]
        ingress.until(lambda: all(len(s.tokens) > 2 for s in streams), 60.0)
        assert resize(other, 4).depth == 4
        paused: list[Stream] = []

        def pause_one() -> bool:
            # One that is on its way between the two cannot be paused.
            there = (s for s in streams if s.replica == source)
            paused.extend(islice((s for s in there if pause(source, s.state.sequence_id)), 1))
            return bool(paused)

        ingress.until(pause_one, 60.0)
        (standing,) = paused
        ingress.until(lambda: standing.replica == other, 60.0)
        free_memory(source)
    assert resize(other, 8).depth == 8
    ingress.finish(*streams, timeout_s=100.0)
    assert [s.error for s in streams] == [None] * len(streams)
    assert all(len(s.token_ids) == 250 for s in streams)
    view: dict[str, Any] = call(scheduler_name(app.name), "operators_view", timeout_s=10.0)
    # The replica that is a scout now may have been none in an earlier test.
    mine = {s.state.sequence_id for s in streams}
    orders = [d for d in view["recent"] if d["sequence_id"] in mine]
    its = [d for d in orders if d["sequence_id"] == standing.state.sequence_id]
    *_, rescue = [d for d in its if d["cause"] == "memory"]
    assert rescue["destination"] == other
    assert not scouts & {d[end] for d in orders for end in ("source", "destination")}
    app.ensure(**{"scheduler.ares.mode": "off"})
    app.until_idle()
