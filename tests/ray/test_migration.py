"""Sequences move between decode replicas under load: no token changes, nothing is left behind."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from quadriga.checkpoint.exits import ExitParams
from quadriga.core.grammar import Grammar
from quadriga.core.replica import DepthClass
from quadriga.core.request import FinishReason
from tests.random_drafter import draft_as_it_pays, draft_at_random, num_dropped_drafts
from tests.ray.apps import App
from tests.ray.ingress import Ingress, Stream, call
from tests.ray.moves import Mover, free_memory, held, hold, open_books, order, pause
from tests.waiting import wait_until

NUM_STREAMS = 10
NUM_OUTPUT = 220
NUM_LONG = 700  # so long that a stream can move several times
NUM_LONGEST = 1_900  # cancelled long before its end
NUM_MOVES = 200
TIME_LIMIT_S = 120.0  # 60 s where two cores are free


@pytest.fixture(
    scope="module", params=["gloo", pytest.param("object_store", marks=pytest.mark.slow)]
)
def moving(ray_cluster: None, request: pytest.FixtureRequest) -> Iterator[App]:
    """Three decode replicas of a model with exits, to the bit the same in any batch."""
    app = App.start(
        f"moving-{request.param.replace('_', '-')}",
        **{
            "decode_replicas": 3,
            "scheduler.ares.mode": "off",  # moves are ordered by the tests alone
            "decode.max_slots": 12,
            "decode.rebatching": "drex",
            "deterministic": True,
            "engine.compile": "wait",
            "transport.kind": request.param,
            "lifecycle.orphan_timeout_s": 300.0,
        },
    )
    yield app
    app.stop()


def submit(app: App, count: int, *, num_output: int = NUM_OUTPUT) -> tuple[Mover, list[Stream]]:
    """Streams greedy and seeded, with exits and without; the same for the same count."""
    ingress = app.ingress()
    rng = random.Random(5)
    streams = []
    for i in range(count):
        sampling: dict[str, Any] = (
            {"temperature": 0.0} if i % 2 else {"temperature": 0.8, "seed": i}
        )
        streams.append(
            ingress.submit(
                [rng.randrange(5, 500) for _ in range(rng.randrange(4, 60))],
                num_output - i,
                deadline_s=200.0,
                exits=ExitParams(threshold=0.9 if i % 3 else 1.0),
                num_logprobs=0 if i % 4 == 0 else None,
                **sampling,
            )
        )
    return Mover(ingress, app.replicas("decode"), random.Random(6)), streams


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_hundreds_of_moves_under_load(moving: App) -> None:
    mover, alone = submit(moving, NUM_STREAMS, num_output=NUM_LONG)
    mover.ingress.finish(*alone, timeout_s=100.0)
    moving.until_idle()

    num_rounds = most = 0
    give_up_s = time.monotonic() + TIME_LIMIT_S
    mover, streams = submit(moving, NUM_STREAMS, num_output=NUM_LONG)
    while mover.outcomes["moved"] < NUM_MOVES:
        assert time.monotonic() < give_up_s, f"only {mover.reasons} in {TIME_LIMIT_S:.0f} s"
        if all(s.is_over for s in streams):
            assert_same(streams, alone)
            num_rounds += 1
            most = max(most, *(len(s.moved_to) for s in streams))
            again, streams = submit(moving, NUM_STREAMS, num_output=NUM_LONG)
            mover.ingress = again.ingress
        mover.ingress.poll(0.01)
        mover.start_some(streams, at_once=2)
        mover.collect()
    mover.wait()
    mover.ingress.finish(*streams, timeout_s=60.0)
    assert_same(streams, alone)
    assert set(mover.outcomes) <= {"moved", "finished", "refused"}, mover.reasons
    most = max(most, *(len(s.moved_to) for s in streams))
    assert most > 3, "some moved again and again"
    moving.until_idle()
    assert [open_books(name) for name in mover.replicas] == [(0, 0)] * 3


def assert_same(streams: list[Stream], wanted: list[Stream]) -> None:
    assert [s.error for s in streams] == [None] * len(streams)
    assert {s.finish for s in streams} == {FinishReason.LENGTH}
    assert [s.token_ids for s in streams] == [s.token_ids for s in wanted]


@pytest.mark.timeout(120)
def test_what_is_refused(moving: App) -> None:
    with held(moving.replicas("decode")):
        mover, (stream,) = submit(moving, 1, num_output=NUM_LONG)
        ingress = mover.ingress
        ingress.until(lambda: len(stream.tokens) > 2)
        source = stream.replica
        assert pause(source, stream.state.sequence_id)  # else it ends while we ask
    other, third = (name for name in mover.replicas if name != source)
    made = order(stream, source, other)

    def refusal(at: str = source, **changes: Any) -> str:
        report = call(at, "migrate", replace(made, **changes))
        assert report.outcome == "refused"
        return str(report.reason.split(":")[0])

    assert refusal(sequence_id="nobody") == "not_running"
    assert refusal(at=third) == "not_running"
    assert refusal(destination=source) == "same_replica"
    assert refusal(depth_class=DepthClass("another", 3)) == "wrong_depth_class"
    assert refusal(destination=f"{moving.name}:decode:77:gone") == "replica_died"
    free_memory(source)
    ingress.finish(stream)
    assert stream.error is None
    assert refusal() == "not_running"
    moving.until_idle()


@pytest.mark.timeout(120)
def test_one_move_of_a_sequence_at_a_time_and_few_of_all(moving: App) -> None:
    with held(moving.replicas("decode")):
        mover, streams = submit(moving, NUM_STREAMS, num_output=400)
        ingress = mover.ingress
        until_speaking(ingress, streams)
        source = streams[0].replica
        here = [s for s in streams if s.replica == source]
        other = next(name for name in mover.replicas if name != source)
        hold(source, 2.0)  # the first move is not over when the last order comes
        for stream in (*here, *here):
            mover.start(stream, other)
        ingress.until(lambda: bool(mover.collect() or mover.reports))
    mover.wait()
    ingress.finish(*streams)
    assert [s.error for s in streams] == [None] * NUM_STREAMS
    assert mover.outcomes["moved"] >= 1
    assert mover.reasons["refused under_way"] + mover.reasons["refused busy"] >= 1
    moving.until_idle()


PERSON = Grammar.json_schema(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "minLength": 150}, "age": {"type": "integer"}},
        "required": ["name", "age"],
    }
)
WHOLE = ExitParams(1.0, "off")
POLICIES = (ExitParams(1.0, "lossless"), ExitParams(0.9, "bounded"), WHOLE)
FIELDS: tuple[dict[str, Any], ...] = (
    {"ignore_eos": True},
    {"temperature": 0.8, "top_p": 0.95, "ignore_eos": True},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "ignore_eos": True},
    {"temperature": 0.9, "presence_penalty": 0.5, "num_logprobs": 1, "ignore_eos": True},
    {"logit_bias": ((40, 3.0),), "num_logprobs": 0, "ignore_eos": True},
    {"temperature": 0.7, "grammar": PERSON, "ignore_eos": False},
    {"stop_token_ids": tuple(range(30, 400, 37)), "min_tokens": 120, "ignore_eos": False},
)


def submit_mixed(ingress: Ingress, *, drafts: bool = True) -> list[Stream]:
    """Streams of every kind of sampling that draft, beside some that leave early and some that do
    neither. Without drafts, those that would run at full depth: the same tokens are wanted."""
    streams = []
    for i in range(2 * len(FIELDS)):
        exits = POLICIES[max(0, i % 4 - 1)]
        if exits.policy == "lossless" and not drafts:
            exits = WHOLE
        prompt = [20 + (i * 7 + k * 3) % 300 for k in range(8 + i)]
        fields = {"seed": i} | FIELDS[i % len(FIELDS)]
        streams.append(ingress.submit(prompt, 300, deadline_s=200.0, exits=exits, **fields))
    return streams


def assert_alike(streams: list[Stream], wanted: list[Stream]) -> None:
    assert [s.error for s in streams] == [None] * len(streams)
    assert [s.finish for s in streams] == [s.finish for s in wanted]
    assert [s.token_ids for s in streams] == [s.token_ids for s in wanted]


@pytest.fixture
def drafting(moving: App) -> Iterator[App]:
    """The same replicas, which draft whenever they may and verify when they like."""
    for seed, name in enumerate(moving.replicas("decode")):
        draft_at_random(name, seed)
    yield moving
    for name in moving.replicas("decode"):
        draft_as_it_pays(name)


@pytest.mark.timeout(240)
def test_drafts_stay_behind_where_sequences_move_and_pause(drafting: App) -> None:
    """Whatever is asked of sampling, beside sequences that leave early: full depth's tokens."""
    alone = drafting.ingress()
    wanted = submit_mixed(alone, drafts=False)
    alone.finish(*wanted, timeout_s=60.0)
    assert any(s.finish is FinishReason.STOP for s in wanted), "forms and stop tokens end some"
    accepted = drafting.metric("quadriga_accepted_drafts_total")
    mover = Mover(alone, drafting.replicas("decode"), random.Random(6))
    num_paused = 0

    def is_enough() -> bool:
        dropped = sum(num_dropped_drafts(name) for name in mover.replicas)
        return dropped > 5 and mover.outcomes["moved"] > 5 and num_paused > 2

    give_up_s = time.monotonic() + TIME_LIMIT_S
    while not is_enough():
        assert time.monotonic() < give_up_s, "too few were taken out in the middle of drafts"
        mover.ingress = drafting.ingress()
        with held(mover.replicas, 0.02):
            streams = submit_mixed(mover.ingress)
            while not all(s.is_over for s in streams) and not is_enough():
                mover.ingress.poll(0.01)
                mover.start_some(streams, at_once=2)
                mover.collect()
                chosen = mover.rng.choice(streams)
                if num_paused < 5 and len(chosen.tokens) > 5 and chosen.replica in mover.replicas:
                    num_paused += pause(chosen.replica, chosen.state.sequence_id)
                    free_memory(chosen.replica)
        mover.wait()
        mover.ingress.finish(*streams)
        assert_alike(streams, wanted)
    wait_until(lambda: drafting.metric("quadriga_accepted_drafts_total") > accepted, 20.0)
    drafting.until_idle()


def until_speaking(ingress: Ingress, streams: list[Stream]) -> None:
    ingress.until(lambda: all(len(s.tokens) > 2 for s in streams))


@pytest.mark.timeout(300)
def test_cancelled_on_the_way(moving: App) -> None:
    """Wherever the cancellation meets it, both ends let go."""
    for tries in range(12):
        mover, streams = submit(moving, 4, num_output=NUM_LONGEST)
        ingress = mover.ingress
        until_speaking(ingress, streams)
        mover.start_some(streams, at_once=2)
        time.sleep(0.004 * tries)  # not to pass: to meet it at another moment
        ingress.cancel(*streams)
        mover.wait()
        moving.until_idle()
        assert set(mover.outcomes) <= {"moved", "finished", "refused", "failed"}


@pytest.mark.timeout(120)
def test_out_of_host_memory(moving: App) -> None:
    """Paused where there is no room for them, two sequences go where there is."""
    mover, alone = submit(moving, 3, num_output=600)
    mover.ingress.finish(*alone)
    before, resumed = (moving.metric(f"quadriga_{n}_total") for n in ("pauses", "resumes"))
    with held(moving.replicas("decode")):
        mover, streams = submit(moving, 3, num_output=600)
        ingress = mover.ingress
        until_speaking(ingress, streams)
        paused = {s.state.sequence_id: s.replica for s in streams[:2]}
        assert all(pause(source, sequence_id) for sequence_id, source in paused.items())
    other = next(n for n in mover.replicas if n not in paused.values())
    for stream in streams[:2]:
        source = paused[stream.state.sequence_id]
        report = call(source, "migrate", order(stream, source, other))
        assert report.outcome == "moved", report
    for source in set(paused.values()):
        free_memory(source)
    ingress.finish(*streams, timeout_s=60.0)
    assert [s.replica for s in streams[:2]] == [other, other]
    assert_same(streams, alone)
    wait_until(lambda: moving.metric("quadriga_pauses_total") >= before + 2, 20.0)
    assert moving.metric("quadriga_resumes_total") == resumed
    moving.until_idle()


@pytest.mark.timeout(120)
def test_metrics(moving: App) -> None:
    before = moving.metric("quadriga_migrations_total")
    with held(moving.replicas("decode")):
        mover, streams = submit(moving, 2, num_output=NUM_LONG)
        until_speaking(mover.ingress, streams)
        mover.start_some(streams, at_once=2)
        mover.wait()
    mover.ingress.finish(*streams)
    assert mover.outcomes["moved"] >= 1
    count = len(mover.reports)
    wait_until(lambda: moving.metric("quadriga_migrations_total") >= before + count, 20.0)
    for name in ("bytes", "seconds", "stall_seconds", "rounds"):
        assert moving.metric(f"quadriga_migration_{name}_sum") > 0
    moving.until_idle()
