"""How an ingress ends: what it refuses, what it lets end, and what it ends in an error."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from quadriga.config.loader import load_config
from quadriga.protos.quadriga.v1 import quadriga_pb2 as pb
from serve_app.auth.api_keys import ApiKeys
from serve_app.cli import local_run
from serve_app.cli import signals as stop_signals
from serve_app.cli.console import Console, drain_text
from serve_app.cli.launch import Addresses
from serve_app.cli.local_stop import Drain
from serve_app.cli.signals import StopSignals
from serve_app.cli.stdio_redirect import StdioRedirect
from serve_app.grpc.server import GrpcServer
from tests.unit.serve_app.conftest import MakeStand, Stand
from tests.unit.serve_app.test_engine_client import is_idle
from tests.unit.serve_app.test_grpc_server import KEYS, Context, wants
from tests.waiting import until


async def begun(stand: Stand, **fields: Any) -> asyncio.Task[httpx.Response]:
    """A request that has its first token and waits for more."""
    before = stand.engine._num_answering
    sent = asyncio.create_task(stand.complete(**fields))
    await until(lambda: stand.engine._num_answering > before)
    return sent


async def test_a_draining_ingress_refuses_new_requests_and_ends_old_ones(
    make_stand: MakeStand,
) -> None:
    gate = asyncio.Event()
    stand = await make_stand(gate=gate, keys=KEYS)
    running = await begun(stand, stream=True)
    assert stand.engine.drain(60.0) == 1
    for stream in (False, True):
        refused = await stand.complete(stream=stream)
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "unavailable"
    context = Context()
    (answer,) = [m async for m in GrpcServer(stand.engine).generate(wants(), context)]
    assert answer.error.code == "unavailable"
    assert context.code is not None and context.code.name == "UNAVAILABLE"
    once = await GrpcServer(stand.engine).generate_once(wants(), Context())
    assert once.error.code == "unavailable"
    gate.set()
    assert (await running).text.endswith("data: [DONE]\n\n")
    await until(lambda: stand.engine.drain(60.0) == 0)


async def test_what_outlasts_the_drain_ends_in_an_error(make_stand: MakeStand) -> None:
    stand = await make_stand(gate=asyncio.Event(), keys=KEYS)
    stream = await begun(stand, stream=True)
    whole = await begun(stand, stream=False)
    context = Context()
    messages: list[pb.GenerateResponse] = []

    async def follow() -> None:
        stream = GrpcServer(stand.engine).generate(wants(), context)
        messages.extend([message async for message in stream])

    following = asyncio.create_task(follow())
    await until(lambda: stand.engine._num_answering == 3)
    assert stand.engine.drain(0.01) == 3
    *_, last = (await stream).text.strip().split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "unavailable"
    assert (await whole).status_code == 503
    assert (await whole).headers["retry-after"] == "1"
    await following
    assert messages[-1].error.code == "unavailable"
    assert context.code is not None and context.code.name == "UNAVAILABLE"
    assert stand.engine.drain(0.0) == 0
    await is_idle(stand)


async def test_a_drain_is_brought_forward_and_never_put_off(make_stand: MakeStand) -> None:
    stand = await make_stand(gate=asyncio.Event())
    running = await begun(stand, stream=True)
    stand.engine.drain(60.0)
    assert stand.engine.drain(0.0) == 1  # its error is not written yet
    stand.engine.drain(60.0)
    assert '"error"' in (await running).text


async def test_an_ingress_that_serve_stops_takes_what_serve_still_sends(
    make_stand: MakeStand,
) -> None:
    stand = await make_stand()
    stand.engine.drain(60.0, refuses_new=False)
    assert (await stand.complete()).status_code == 200


async def test_a_health_watch_ends_with_the_drain(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serve waits for it as for any other call."""
    monkeypatch.setattr("serve_app.grpc.server.HEALTH_WATCH_INTERVAL_S", 0.001)
    watch = GrpcServer(stand.engine).watch("")
    await anext(watch)
    rest = asyncio.create_task(anext(watch, None))
    stand.engine.drain(60.0, refuses_new=False)
    await asyncio.wait_for(rest, 30.0)


# The command's terminal and signals.


def test_the_progress_line_shows_open_requests_and_time_left() -> None:
    drain = Drain(60.0)
    assert re.search(r"up to \d+ s for the running requests", drain_text(drain))
    drain.num_requests = 12
    assert "12 running requests" in drain_text(drain)
    assert "Ctrl-C again" in drain_text(drain)
    drain.num_requests = 1
    assert "1 running request;" in drain_text(drain)
    drain.end_now()
    assert drain_text(drain) == "stopping: ending 1 running request in an error"
    drain.num_requests = 0
    assert "no requests" in drain_text(drain)


def test_a_log_gets_a_line_at_the_first_and_the_last_report() -> None:
    out, drain = io.StringIO(), Drain(60.0)
    console = Console(out)
    for count in (None, 3, 3, 2, 1, 0, 0):
        drain.num_requests = count
        console.report(drain)
    assert [text.split(":")[0] for text in out.getvalue().splitlines()] == ["stopping"] * 2
    assert "no requests" in out.getvalue().splitlines()[-1]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_one_line_that_is_written_anew() -> None:
    out, drain = Terminal(), Drain(60.0)
    console = Console(out)
    console.say("ready")
    for count in (None, 3, 2, 0):
        drain.num_requests = count
        console.report(drain)
    console.progress("the actors did not stop in order")
    console.say("stopped")
    ready, drained, progress, stopped, rest = out.getvalue().split("\n")
    assert (ready, stopped, rest) == ("ready", "stopped", "")
    assert "2 running requests" in drained
    assert "no requests are running" in drained
    assert progress.endswith(" s  the actors did not stop in order")


def test_output_to_a_closed_terminal_is_dropped(capfd: pytest.CaptureFixture[str]) -> None:
    """The terminal was closed, or the reader of a pipe has ended: the service ends in order."""
    reader, writer = os.pipe()
    saved = os.dup(1)
    os.dup2(writer, 1)
    os.close(writer)
    try:
        with StdioRedirect() as output:
            console = Console(output.terminal)
            os.close(reader)
            console.say("ready")
            console.report(Drain(60.0))
            console.say("stopped")
    finally:
        os.dup2(saved, 1)
        os.close(saved)


@pytest.fixture
def signals() -> Iterator[StopSignals]:
    with StopSignals() as signals:
        yield signals


def interrupted() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5.0)
    pytest.fail("the signal did not interrupt")


def test_signals_interrupt_until_the_ordered_end_and_count_then(
    signals: StopSignals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_signals, "REPEAT_S", 0.0)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            interrupted()
    signals.interrupts = False
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals.num_requests == 3
    assert signals.exit_status == 143


def test_a_second_signal_ends_what_the_first_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_signals, "REPEAT_S", 0.0)

    def find_models(config: Any) -> Any:
        try:
            interrupted()
        finally:  # a download waits for its threads
            interrupted()

    monkeypatch.setattr(local_run, "find_models", find_models)
    assert local_run.run_local(load_config({}), ApiKeys(), Addresses(), lambda _: 0) == 130


def test_one_request_may_come_as_several_signals(signals: StopSignals) -> None:
    """As `timeout make serve` sends them: to make, to the group, and on from make."""
    signals.interrupts = False
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGTERM)
    assert signals.num_requests == 1


def test_a_hangup_counts_unless_it_is_ignored() -> None:
    earlier = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
        assert signals.num_requests == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with StopSignals() as signals:
            signals.interrupts = False
            os.kill(os.getpid(), signal.SIGHUP)
        assert signals.num_requests == 1
    finally:
        signal.signal(signal.SIGHUP, earlier)
