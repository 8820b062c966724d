"""Whatever dies, hangs or wakes, and whenever: every stream is the one of an undisturbed run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import serve_app.request.engine_client
import serve_app.request.output_poller
import serve_app.request.request_manager
from quadriga.config.loader import load_config
from quadriga.core.output import EngineOutput, PollReply
from quadriga.core.replica import Role
from quadriga.core.request import FinishReason, SamplingParams, SequenceState
from quadriga.errors import (
    Cancelled,
    DeadlineExceeded,
    MigrationFailed,
    QuadrigaError,
    ReplicaDied,
    ReplicaError,
)
from serve_app.auth.api_keys import ApiKeys
from serve_app.openai.models import ModelDirectory
from serve_app.ops.metrics import RECOVERY_RESULTS
from serve_app.request.engine_client import EngineClient
from serve_app.request.request import Request
from tests.simulation.virtual_time import run_virtually, virtual_clocks
from tests.unit.serve_app.conftest import MODEL
from tests.unit.serve_app.failing_cluster import FailingCluster, FailingReplica, expected
from tests.waiting import until

QUICK = {
    "ingress.poll_timeout_s": 0.05,
    "ingress.replica_silence_s": 0.15,
    "ingress.max_rebuilds": 8,
    "ingress.rebuild_patience_s": 5.0,
}


@pytest.fixture(autouse=True)
def quick_housekeeping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_app.request.engine_client, "HOUSEKEEPING_INTERVAL_S", 0.02)
    # Twice the interval: where this process stands still for longer, no replica was silent.
    monkeypatch.setattr(serve_app.request.output_poller, "MAX_LOOK_GAP_S", 0.04)
    monkeypatch.setattr(serve_app.request.request_manager, "AUDIT_AFTER_S", 0.3)
    monkeypatch.setattr(serve_app.request.request_manager, "AUDIT_PAUSE_S", 0.05)


@asynccontextmanager
async def client_over(cluster: FailingCluster, **config: Any) -> AsyncIterator[EngineClient]:
    client = EngineClient(
        load_config(QUICK | config),
        ModelDirectory([MODEL]),
        ApiKeys(),
        cluster,  # type: ignore[arg-type]  # what operators see is not here
        ingress_id="i",
    )
    client.start()
    try:
        yield client
    finally:
        await client.close()
        await cluster.close()


def ask(
    client: EngineClient,
    number: int,
    max_tokens: int,
    *,
    deadline_s: float = 20.0,
    num_logprobs: int | None = None,
) -> Request:
    now = time.time()
    prompt = [30 + number, 31, 32]
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, num_logprobs=num_logprobs)
    asked = Request(
        f"r{number}",
        "quadriga-s",
        [prompt],
        ["abc"],
        1,
        sampling,
        (),
        False,
        0,
        now,
        now + deadline_s,
    )
    return client.open(asked)


@asynccontextmanager
async def answering(
    max_tokens: int, **config: Any
) -> AsyncIterator[tuple[FailingCluster, EngineClient, Request]]:
    """A request whose answer has begun."""
    cluster = FailingCluster()
    async with client_over(cluster, **config) as client:
        request = ask(client, 0, max_tokens)
        await until(lambda: request.num_output_tokens > 5)
        yield cluster, client, request


async def read(request: Request) -> list[int]:
    """Read to the end as a client does; a token twice, or one missing, is an error."""
    tokens: list[int] = []
    num_first = 0
    reader = request.reader()
    finish: FinishReason | None = None
    while deltas := await reader.read():
        for delta in deltas:
            assert delta.first_index == len(tokens)
            tokens += delta.token_ids
            num_first += delta.is_first
            finish = delta.finish
    assert finish is FinishReason.LENGTH
    assert num_first == 1
    assert request.num_output_tokens == len(tokens)
    return tokens


async def all_well(client: EngineClient, cluster: FailingCluster, requests: list[Request]) -> None:
    got = await asyncio.gather(*(read(s) for s in requests))
    for request, tokens in zip(requests, got, strict=True):
        (sequence,) = request.sequences
        assert tokens == expected(sequence.state.prompt_ids, len(tokens))
        assert len(tokens) == sequence.state.sampling.max_tokens
        assert len(sequence.state.exit_layers) == len(tokens)
    assert cluster.num_doubled == 0, "a name was submitted twice"
    assert not client._request_manager.open_requests()


def owner(cluster: FailingCluster, request: Request) -> FailingReplica:
    name = request.sequences[0].replica
    assert name is not None
    return cluster.replicas[name]


def recoveries(client: EngineClient) -> dict[str, float]:
    return {r: client.metrics.recoveries.labels(r)._value.get() for r in RECOVERY_RESULTS}


async def test_a_stream_goes_on_when_its_owner_dies() -> None:
    cluster = FailingCluster()
    async with client_over(cluster) as client:
        request = ask(client, 0, 60)
        for _ in range(4):
            seen = request.num_output_tokens
            await until(lambda seen=seen: request.num_output_tokens > seen + 5)
            cluster.kill(owner(cluster, request))
        await all_well(client, cluster, [request])
        (sequence,) = request.sequences
        assert sequence.num_rebuilds >= 4
        names = [s.sequence_id for s in cluster.submitted]
        assert names[1:] == [f"{names[0]}.{k}" for k in range(1, len(names))]
        await until(lambda: bool(cluster.ended))
        assert (cluster.ended, cluster.lost) == (names[-1:], names[:-1])
        resumed = [len(s.output_ids) for s in cluster.submitted]
        assert resumed == sorted(resumed), "each goes on where the ingress was"
        assert [s.epoch for s in cluster.submitted] == sorted({s.epoch for s in cluster.submitted})


async def test_a_move_that_is_done_after_its_destination_died() -> None:
    """Nobody has the sequence any more, and nobody is asked for it: it is begun anew at once."""
    async with answering(60) as (cluster, client, request):
        (sequence,), manager, source = (
            request.sequences,
            client._request_manager,
            owner(cluster, request),
        )
        peer = next(r for r in cluster.of(Role.DECODE) if r is not source)
        begun = EngineOutput(
            sequence.state.sequence_id, sequence.state.epoch, 0, moved_to=peer.name
        )
        manager.deliver(source.name, [replace(begun, move="begun")])
        manager.deliver(peer.name, [EngineOutput(begun.sequence_id, begun.epoch + 1)])  # it speaks
        cluster.kill(peer)
        await until(lambda: sequence.owners == {source.name})
        manager.deliver(source.name, [replace(begun, move="done")])
        await all_well(client, cluster, [request])
        assert sequence.num_rebuilds == 1


class HastyCluster(FailingCluster):
    """A prefill replica dies with the first token unsaid, when the decode replica has taken over.

    That one says a few tokens and then waits for `may_end`.

    Args:
        announces: The ingress has heard where the sequence goes.

    Attributes:
        peer: The decode replica that took over; None before.
    """

    def __init__(self, *, announces: bool = True) -> None:
        super().__init__()
        self.peer: FailingReplica | None = None
        self.may_end = asyncio.Event()
        self._announces = announces

    async def _arrive(self, source: FailingReplica, state: SequenceState) -> None:
        if self.peer is not None:
            await super()._arrive(source, state)
            return
        self.submitted.append(replace(state, output_ids=list(state.output_ids)))
        self._running.append(state)
        source.own.add(state.sequence_id)
        self.peer = peer = self.of(Role.DECODE)[0]
        if self._announces:
            source.put(EngineOutput(state.sequence_id, state.epoch, moved_to=peer.name))
        await self._turns(source)  # the ingress hears of it
        self._say(source, state)
        source.own.discard(state.sequence_id)
        peer.own.add(state.sequence_id)
        state.epoch += 1
        self.kill(source)
        for _ in range(10):
            self._say(peer, state)
        await self.may_end.wait()
        await self._decode(peer, state)


@pytest.mark.parametrize("num_logprobs", [None, 0])
async def test_the_prefill_replica_dies_with_the_first_token(num_logprobs: int | None) -> None:
    """The beginning is fetched from the next owner before the answer ends."""
    cluster = HastyCluster()
    async with client_over(cluster) as client:
        request = ask(client, 0, 60, num_logprobs=num_logprobs)
        (sequence,) = request.sequences
        await until(lambda: len(sequence.state.output_ids) > 5)
        cluster.may_end.set()
        await all_well(client, cluster, [request])
        assert sequence.num_rebuilds == 0, "replicas keep log-probabilities, too"
        assert recoveries(client) == {"recovered": 1, "adopted": 0, "failed": 0}


async def test_an_unreported_next_owner_is_cancelled() -> None:
    """It holds a slot for an answer that is being given elsewhere."""
    cluster = HastyCluster(announces=False)
    async with client_over(cluster) as client:
        request = ask(client, 0, 40)
        await until(
            lambda: (
                cluster.peer is not None
                and cluster.submitted[0].sequence_id in cluster.peer.cancelled
            )
        )
        await all_well(client, cluster, [request])


async def test_the_prefill_replica_dies_before_the_first_token() -> None:
    cluster = FailingCluster(gap=50)
    async with client_over(cluster) as client:
        request = ask(client, 0, 10)
        await until(lambda: bool(cluster.submitted))
        cluster.kill(owner(cluster, request))
        await all_well(client, cluster, [request])
        assert request.sequences[0].num_rebuilds == 1


@pytest.mark.parametrize("gap", [0, 1, 3, 30])
@pytest.mark.parametrize("moment", ["announced", "committed"])
@pytest.mark.parametrize("victims", ["source", "peer", "both"])
async def test_deaths_around_a_hand_off(victims: str, moment: str, gap: int) -> None:
    """Before the commit and after it; before the ingress has heard of it, and after."""
    cluster = FailingCluster(gap=gap)
    moments = 0

    def strike(at: str, source: FailingReplica, peer: FailingReplica) -> None:
        nonlocal moments
        moments += at == moment
        if at == moment and moments <= 2:
            for victim in {"source": [source], "peer": [peer]}.get(victims, [source, peer]):
                cluster.kill(victim)

    cluster.on_move = strike
    async with client_over(cluster) as client:
        await all_well(client, cluster, [ask(client, 0, 12)])
        assert moments > 0


async def test_a_hung_replica_that_resumes_does_not_disturb_the_stream() -> None:
    async with answering(300) as (cluster, client, request):
        sleeper = owner(cluster, request)
        sleeper.awake.clear()
        await until(lambda: request.sequences[0].num_rebuilds == 1)
        await until(lambda: request.sequences[0].replica not in (None, sleeper.name))
        sleeper.awake.set()
        await all_well(client, cluster, [request])
        await until(lambda: not sleeper.own)
        assert request.sequences[0].num_rebuilds == 1


async def test_a_sequence_without_owner_is_rebuilt() -> None:
    """Its owner lives and has lost it: the ingress asks in the end, and begins it anew."""
    async with answering(100) as (cluster, client, request):
        owner(cluster, request).own.clear()
        await all_well(client, cluster, [request])
        assert request.sequences[0].num_rebuilds == 1


@pytest.mark.parametrize("error", [MigrationFailed("4 failed"), Cancelled("silent ingress")])
async def test_an_error_of_the_replica_does_not_end_the_sequence(error: QuadrigaError) -> None:
    async with answering(100) as (cluster, client, request):
        state = request.sequences[0].state
        replica = owner(cluster, request)
        replica.own.clear()
        replica.put(EngineOutput(state.sequence_id, state.epoch, 0, error=error))
        await all_well(client, cluster, [request])


async def test_a_poll_that_fails_is_repeated(caplog: pytest.LogCaptureFixture) -> None:
    """A poll that fails with an unexpected error does not end the polling of its replica."""
    cluster = FailingCluster()
    num_failed = 0
    poll = cluster.poll

    async def fails_once(replica: str, ingress_id: str, ack: int, timeout_s: float) -> PollReply:
        nonlocal num_failed
        if num_failed < 1 and ack > 3:
            num_failed += 1
            raise KeyError("a bug")
        return await poll(replica, ingress_id, ack, timeout_s)

    cluster.poll = fails_once  # type: ignore[method-assign]
    async with client_over(cluster, **{"ingress.replica_silence_s": 5.0}) as client:
        request = ask(client, 0, 60)
        async with asyncio.timeout(60):
            await all_well(client, cluster, [request])
        assert num_failed == 1
        assert request.sequences[0].num_rebuilds == 0
        assert "could not be fetched" in caplog.text


class LateVerdict(FailingCluster):
    """The first replica dies; its error about the submission comes when `may_come` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.may_come = asyncio.Event()
        self.victim: FailingReplica | None = None

    async def submit(self, replica: str, state: SequenceState) -> None:
        if self.victim is not None:
            return await super().submit(replica, state)
        self.victim = self.replicas[replica]
        await self.may_come.wait()
        raise DeadlineExceeded("it is too late")


async def test_a_late_error_of_a_former_submission_is_ignored() -> None:
    cluster = LateVerdict()
    async with client_over(cluster) as client:
        request = ask(client, 0, 200)
        await until(lambda: cluster.victim is not None)
        assert cluster.victim is not None
        cluster.kill(cluster.victim)
        await until(lambda: request.num_output_tokens > 5)
        cluster.may_come.set()
        await all_well(client, cluster, [request])
        assert request.sequences[0].num_rebuilds == 1


def contradict(cluster: FailingCluster, request: Request) -> FailingReplica:
    """Have a sequence moved to a replica that goes on from other tokens than the client has."""
    state, source = request.sequences[0].state, owner(cluster, request)
    peer = next(r for r in cluster.of(Role.DECODE) if r is not source)
    source.own.discard(state.sequence_id)
    source.put(
        EngineOutput(state.sequence_id, state.epoch, request.num_output_tokens, moved_to=peer.name)
    )
    peer.own.add(state.sequence_id)
    peer.put(EngineOutput(state.sequence_id, state.epoch + 1, 1, [7] * 500, [8] * 500))
    return peer


async def test_a_contradicting_replica_is_left_and_the_sequence_rebuilt() -> None:
    async with answering(100) as (cluster, client, request):
        name = request.sequences[0].state.sequence_id
        liar = contradict(cluster, request)
        await all_well(client, cluster, [request])
        assert request.sequences[0].num_rebuilds == 1
        assert name in liar.cancelled, "it does not run on"
        assert client.metrics.rebuilds.labels("contradicted")._value.get() == 1


async def test_another_answer_where_nothing_may_be_begun_anew() -> None:
    async with answering(100, **{"ingress.max_rebuilds": 0}) as (cluster, client, request):
        liar = contradict(cluster, request)
        with pytest.raises(ReplicaError, match="another answer"):
            await read(request)
        assert 7 not in request.sequences[0].state.output_ids
        assert recoveries(client)["failed"] == 1
        await until(lambda: not liar.own)


async def test_a_destination_that_may_have_taken_over_is_cancelled() -> None:
    """The prefill replica got no answer and gave up: the decode replica runs it all the same."""
    cluster = FailingCluster(gap=50)
    next_owners: list[FailingReplica] = []

    def unanswered(at: str, source: FailingReplica, peer: FailingReplica) -> None:
        if at == "committed":
            next_owners.append(peer)
            if len(next_owners) == 1:
                first, error = cluster.submitted[0], MigrationFailed("it does not say")
                source.put(EngineOutput(first.sequence_id, first.epoch, 1, error=error))

    cluster.on_move = unanswered
    async with client_over(cluster) as client:
        request = ask(client, 0, 40)
        await until(
            lambda: (
                bool(next_owners) and cluster.submitted[0].sequence_id in next_owners[0].cancelled
            )
        )
        await all_well(client, cluster, [request])
        assert request.sequences[0].num_rebuilds == 1
        assert len(next_owners) == 2


Strikes = st.lists(
    st.tuples(
        st.integers(0, 120),  # when: tokens that all streams have together
        st.sampled_from(["kill", "hang"]),
        st.sampled_from([Role.PREFILL, Role.DECODE]),
        st.integers(0, 9),  # which of the living
    ),
    max_size=7,
)


@settings(max_examples=40)
@given(strikes=Strikes, gap=st.integers(0, 12), num_streams=st.integers(1, 5))
def test_any_order_of_deaths_and_hangs(
    strikes: list[tuple[int, str, Role, int]], gap: int, num_streams: int
) -> None:
    with virtual_clocks():
        run_virtually(lambda: _survive(strikes, gap, num_streams))


async def _survive(strikes: list[tuple[int, str, Role, int]], gap: int, num_streams: int) -> None:
    cluster = FailingCluster(gap=gap)
    async with client_over(cluster) as client:
        requests = [ask(client, i, 40) for i in range(num_streams)]
        striking = asyncio.ensure_future(_strike(cluster, requests, sorted(strikes)))
        try:
            await all_well(client, cluster, requests)
        finally:
            striking.cancel()


async def _strike(
    cluster: FailingCluster, requests: list[Request], strikes: list[tuple[int, str, Role, int]]
) -> None:
    for at, action, role, which in strikes:
        while sum(s.num_output_tokens for s in requests) < at:  # noqa: ASYNC110
            await asyncio.sleep(0.0001)
        able = [r for r in cluster.of(role) if r.is_well]
        victim = able[which % len(able)]
        if action == "kill" or len(able) == 1:
            cluster.kill(victim)
        else:
            victim.awake.clear()
            asyncio.get_running_loop().call_later(0.4, victim.awake.set)


async def test_rebuilding_ends() -> None:
    """A request that kills every replica that takes it is not rebuilt for ever."""
    cluster = FailingCluster(gap=20)

    def strike(at: str, source: FailingReplica, peer: FailingReplica) -> None:
        cluster.kill(source)
        cluster.kill(peer)

    cluster.on_move = strike
    async with client_over(cluster, **{"ingress.max_rebuilds": 2}) as client:
        request = ask(client, 0, 10)
        with pytest.raises(ReplicaDied):
            await read(request)
        assert request.sequences[0].num_rebuilds == 2
        assert recoveries(client)["failed"] == 1
        assert not client._request_manager.open_requests()


async def test_the_deadline_ends_a_rebuild() -> None:
    cluster = FailingCluster()
    async with client_over(cluster, **{"ingress.rebuild_patience_s": 60.0}) as client:
        request = ask(client, 0, 500, deadline_s=3.5)
        await until(lambda: request.num_output_tokens > 5)
        for replica in cluster.of(Role.PREFILL):
            replica.awake.clear()
        cluster.kill(owner(cluster, request))
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            await read(request)
        assert time.monotonic() - started < 50.0
        assert recoveries(client)["failed"] == 1
        assert not client._request_manager.open_requests()
        for replica in cluster.of(Role.PREFILL):
            replica.awake.set()
        await until(lambda: not any(r.own for r in cluster.replicas.values()))


async def test_a_failure_with_one_sequence_leaves_the_others_running() -> None:
    """They share the polls that bring their tokens."""
    cluster = FailingCluster()
    async with client_over(cluster) as client:
        good, bad = ask(client, 0, 60), ask(client, 1, 60)
        await until(lambda: bad.num_output_tokens > 3)

        def broken(*_: Any) -> int:
            raise KeyError("a bug")

        bad.sequences[0].accept = broken  # type: ignore[method-assign]
        with pytest.raises(QuadrigaError, match="internal error"):
            async with asyncio.timeout(60):
                await read(bad)
        await all_well(client, cluster, [good])
