"""Calls over connections: answers and errors as over Ray, and nobody is heard without the key."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from actors.rpc import connections, ray_rpc
from actors.rpc.connections import CallAddress, Connection, DirectlyCalled, connect
from quadriga.errors import KVCacheExhausted, ReplicaDied, ReplicaError
from tests.waiting import settled

NODE = "here"
REQUEST = ContextVar("request", default="")
WAIT_S = 20.0


class Callee(DirectlyCalled):
    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.made: list[str] = []

    async def echo(self, *said: Any) -> Any:
        self.made.append("echo")
        return said[0] if len(said) == 1 else said

    async def fail(self, error: Exception) -> None:
        raise error

    async def wait(self) -> str:
        await self.gate.wait()
        return "open"

    async def unsendable(self) -> Any:
        return lambda: None

    async def _private(self) -> None:
        self.made.append("private")


class Unloading:
    """Pickles, and cannot be unpickled."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


@pytest.fixture(autouse=True)
def on_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(get_node_id=lambda: NODE, get_actor_id=lambda: "actor")
    stands_for_ray = SimpleNamespace(
        get_runtime_context=lambda: context,
        util=SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1"),
        cancel=lambda _: None,
    )
    monkeypatch.setattr(connections, "ray", stands_for_ray)
    monkeypatch.setattr(ray_rpc, "ray", stands_for_ray)
    monkeypatch.delenv("RAY_USE_TLS", raising=False)
    for name in ("_handles", "_used_s", "_connections", "_attempts"):
        monkeypatch.setattr(ray_rpc, name, {})


@pytest.fixture
async def callee() -> AsyncIterator[Callee]:
    callee = Callee()
    yield callee
    server = callee._call_server
    for listening in server._listening.values() if server is not None else ():
        listening.close()


async def address_of(callee: Callee) -> CallAddress:
    address = await callee.call_address(NODE)
    assert address is not None
    return address


@contextlib.asynccontextmanager
async def connected(callee: Callee) -> AsyncIterator[Connection]:
    connection = await connect("callee", await address_of(callee), WAIT_S)
    yield connection
    connection.close()
    await connection.lost


async def test_a_call_returns_what_the_method_does_be_it_megabytes(callee: Callee) -> None:
    async with connected(callee) as connection:
        said = (1, [2.5], {"a": secrets.token_bytes(5 << 20)})
        assert await connection.call("echo", *said, timeout_s=WAIT_S) == said


async def test_a_slow_call_keeps_no_other_waiting(callee: Callee) -> None:
    async with connected(callee) as connection:
        slow = asyncio.create_task(connection.call("wait", timeout_s=WAIT_S))
        assert await connection.call("echo", "first", timeout_s=WAIT_S) == "first"
        assert not slow.done()
        callee.gate.set()
        assert await slow == "open"


async def test_errors_of_ours_arrive_as_they_are(callee: Callee) -> None:
    error = KVCacheExhausted("full", retry_after_s=2.0)
    async with connected(callee) as connection:
        with pytest.raises(KVCacheExhausted) as raised:
            await connection.call("fail", error, timeout_s=WAIT_S)
    assert raised.value == error


@pytest.mark.parametrize(
    ("method", "args", "says"),
    [
        ("fail", (ValueError("a bug"),), "the call failed: ValueError"),
        ("unknown", (), "no attribute 'unknown'"),
        ("_private", (), "_private is not to be called"),
        ("unsendable", (), "what the call returned cannot be sent"),
        ("echo", (Unloading(),), "the call failed: ValueError"),
    ],
)
async def test_every_other_failure_is_an_error_of_the_replica(
    callee: Callee, method: str, args: tuple[Any, ...], says: str
) -> None:
    async with connected(callee) as connection:
        with pytest.raises(ReplicaError, match=says):
            await connection.call(method, *args, timeout_s=WAIT_S)
        assert await connection.call("echo", "after it", timeout_s=WAIT_S) == "after it"
    assert "private" not in callee.made


async def test_a_late_answer_is_an_error_and_harms_no_later_call(callee: Callee) -> None:
    async with connected(callee) as connection:
        with pytest.raises(ReplicaError, match=r"did not answer wait within 0\.0 s") as raised:
            await connection.call("wait", timeout_s=0.01)
        callee.gate.set()
        assert await connection.call("echo", "later", timeout_s=WAIT_S) == "later"
    assert raised.value.code == "timeout"


async def test_an_answer_that_cannot_be_read_is_an_error(callee: Callee) -> None:
    async def answer() -> Any:
        return Unloading()

    callee.echo = answer  # type: ignore[method-assign, assignment]
    async with connected(callee) as connection:
        with pytest.raises(ReplicaError, match="the answer of callee cannot be read"):
            await connection.call("echo", timeout_s=WAIT_S)


async def test_the_address_is_loopback_on_the_same_node_alone(
    callee: Callee, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections.ray.util, "get_node_ip_address", lambda: "127.0.0.2")
    here, there = await address_of(callee), await callee.call_address("there")
    assert there is not None
    assert (here.host, there.host) == ("127.0.0.1", "127.0.0.2")
    assert here == await callee.call_address(NODE)
    assert str(here.key) not in repr(here), "no key is shown"


async def test_a_caller_without_the_key_is_not_heard(callee: Callee) -> None:
    address = replace(await address_of(callee), key=b"another one")
    with pytest.raises(OSError, match="closed the connection"):
        await connect("callee", address, WAIT_S)


async def test_a_call_before_the_greeting_is_not_made(callee: Callee) -> None:
    address = await address_of(callee)
    reader, writer = await asyncio.open_connection(address.host, address.port)
    content = pickle.dumps(("echo", ("a stranger's",)))
    writer.write(connections._HEAD.pack(len(content), 1) + content + bytes(64))
    said = await asyncio.wait_for(reader.read(), WAIT_S)
    writer.close()
    assert len(said) <= 2 * connections.GREETING_BYTES, "a greeting, and no answer"
    assert callee.made == []


@pytest.mark.parametrize(
    ("change", "num_made"),
    [
        (lambda data: data.replace(b"said", b"sold"), 1),
        (lambda data: data * (1 + (b"said" in data)), 2),
    ],
)
async def test_a_frame_that_somebody_changed_or_sends_again_is_not_read(
    callee: Callee, change: Callable[[bytes], bytes], num_made: int
) -> None:
    async with through_relay(callee, change) as connection:
        assert await connection.call("echo", "fine", timeout_s=WAIT_S) == "fine"
        calling = asyncio.create_task(connection.call("echo", "said", timeout_s=WAIT_S))
        await asyncio.wait_for(connection.lost, WAIT_S)
        calling.cancel()
    assert callee.made == ["echo"] * num_made


@contextlib.asynccontextmanager
async def through_relay(
    callee: Callee, change: Callable[[bytes], bytes]
) -> AsyncIterator[Connection]:
    """A connection on whose way somebody changes what the caller sends."""
    address = await address_of(callee)

    async def pump(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, change: Callable[[bytes], bytes]
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(change(data))
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(address.host, address.port)
        await asyncio.gather(
            pump(reader, there_writer, change), pump(there_reader, writer, lambda data: data)
        )

    async with await asyncio.start_server(relay, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        connection = await connect("callee", replace(address, port=port), WAIT_S)
        yield connection
        connection.close()
        await connection.lost
        await asyncio.sleep(0.05)


async def test_who_echoes_the_greeting_has_not_proved_anything(callee: Callee) -> None:
    address = await address_of(callee)
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(2 * await reader.readexactly(connections.GREETING_BYTES))
    assert await asyncio.wait_for(reader.read(), WAIT_S) == b"", "nor is it shown any proof"
    writer.close()


@pytest.mark.parametrize(
    ("num_bytes", "within_s", "error"),
    [(2 * connections.GREETING_BYTES, WAIT_S, ConnectionError), (0, 0.05, TimeoutError)],
)
async def test_a_server_without_the_key_or_without_a_word_is_given_up(
    callee: Callee, num_bytes: int, within_s: float, error: type[Exception]
) -> None:
    address = await address_of(callee)

    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes(num_bytes))
        await reader.read()
        writer.close()

    async with await asyncio.start_server(impostor, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(error):
            await connect("callee", replace(address, port=port), within_s)


async def test_strangers_are_few_and_have_little_time(
    callee: Callee, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_STRANGERS", 2)
    address = await address_of(callee)
    found = [await asyncio.open_connection(address.host, address.port) for _ in range(2)]
    async with connected(callee) as connection:  # the oldest stranger makes room
        assert await connection.call("echo", "a friend", timeout_s=WAIT_S) == "a friend"
    assert len(await asyncio.wait_for(found[0][0].read(), WAIT_S)) == connections.GREETING_BYTES
    monkeypatch.setattr(connections, "GREETING_TIMEOUT_S", 0.01)
    late, _ = found[1]
    await late.readexactly(connections.GREETING_BYTES)
    found.append(await asyncio.open_connection(address.host, address.port))
    assert len(await asyncio.wait_for(found[2][0].read(), WAIT_S)) == connections.GREETING_BYTES
    assert not late.at_eof()
    for _, writer in found:
        writer.close()


async def test_a_call_that_is_too_large_is_refused_alone(
    callee: Callee, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connected(callee) as connection:
        monkeypatch.setattr(connections, "MAX_FRAME_BYTES", 100)
        with pytest.raises(ReplicaError, match="too many for one call") as raised:
            await connection.call("echo", bytes(200), timeout_s=WAIT_S)
        assert await connection.call("echo", "small", timeout_s=WAIT_S) == "small"
    assert raised.value.code == "too_large"


async def test_a_frame_beyond_the_limit_ends_the_connection(callee: Callee) -> None:
    async with connected(callee) as connection:
        calling = asyncio.create_task(connection.call("wait", timeout_s=WAIT_S))
        await settled()
        head = connections._HEAD.pack(connections.MAX_FRAME_BYTES + 1, 0)
        connection._transport.write(head + bytes(16))  # type: ignore[union-attr]
        await asyncio.wait_for(connection.lost, WAIT_S)
        connection.fail(ReplicaDied("over"))
        with pytest.raises(ReplicaDied, match="over"):
            await calling


@pytest.mark.parametrize("cause", ["an answer", "the connection"])
async def test_want_of_memory_here_is_no_answer_from_there(
    callee: Callee, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ingress that has none ends itself where nobody seems to answer."""

    def no_memory(*_: Any) -> Any:
        raise MemoryError

    async with connected(callee) as connection:
        calling = asyncio.create_task(connection.call("wait", timeout_s=WAIT_S))
        await settled()
        await connection.call("echo", "it is there", timeout_s=WAIT_S)
        if cause == "an answer":
            monkeypatch.setattr(pickle, "loads", no_memory)
        else:
            monkeypatch.setattr(connection, "_take", no_memory)
        callee.gate.set()
        with pytest.raises(MemoryError):
            await calling


async def test_a_method_that_is_cancelled_fails_its_caller(callee: Callee) -> None:
    async with connected(callee) as connection:
        with pytest.raises(ReplicaError, match="the call failed: CancelledError"):
            await connection.call("fail", asyncio.CancelledError(), timeout_s=WAIT_S)


async def test_the_wait_for_an_actors_end_ends_with_the_connection(callee: Callee) -> None:
    async with connected(callee) as connection:
        waiting = asyncio.create_task(callee.wait_while_connected(connection.nonce))
        await connection.call("echo", "it waits", timeout_s=WAIT_S)
        assert not waiting.done()
    await asyncio.wait_for(waiting, WAIT_S)
    await asyncio.wait_for(callee.wait_while_connected(b"unknown"), WAIT_S)


async def test_a_peer_out_of_reach_is_noticed_by_the_system(callee: Callee) -> None:
    async with connected(callee) as connection:
        sock = connection._transport.get_extra_info("socket")  # type: ignore[union-attr]
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 3


class Method:
    """Of an actor handle."""

    def __init__(self, made: Any) -> None:
        self.remote = made


class Handle:
    """As Ray gives one; counts the calls that go through it."""

    def __init__(self, callee: Callee) -> None:
        self.callee = callee
        self.through_ray: list[str] = []
        self.contexts: dict[str, str] = {}
        self.is_watched = asyncio.Event()
        self.death: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __getattr__(self, name: str) -> Any:
        if name == "new_call":  # of a later version
            raise AttributeError(name)

        async def made(*args: Any) -> Any:
            self.through_ray.append(name)
            self.contexts[name] = REQUEST.get()
            if name == "wait_while_connected":
                self.is_watched.set()
                return await self.death
            return await getattr(self.callee, name)(*args)

        return Method(made)


async def until_connected(handle: Handle) -> None:
    ray_rpc.remember_handle("callee", handle)  # type: ignore[arg-type]
    assert await ray_rpc.call("callee", "echo", "by Ray", timeout_s=WAIT_S) == "by Ray"
    await asyncio.wait_for(handle.is_watched.wait(), WAIT_S)
    handle.through_ray.clear()


async def drop() -> None:
    """Break the connection."""
    ray_rpc._connections["callee"]._transport.abort()  # type: ignore[union-attr]
    await settled()


async def test_the_first_call_goes_through_ray_and_later_ones_do_not(callee: Callee) -> None:
    handle = Handle(callee)
    REQUEST.set("first")
    await until_connected(handle)
    assert await ray_rpc.call("callee", "echo", "directly", timeout_s=WAIT_S) == "directly"
    assert handle.through_ray == []
    # Ray would end the watch with the request.
    assert handle.contexts == {"echo": "first", "call_address": "", "wait_while_connected": ""}
    first = ray_rpc._connections["callee"]
    second = await connect("callee", await address_of(callee), WAIT_S)
    await ray_rpc._keep("callee", handle, second)  # type: ignore[arg-type]
    assert ray_rpc._connections["callee"] is first and not second.is_usable
    ray_rpc.forget_actor("callee")


@pytest.mark.parametrize("is_connected", [False, True])
async def test_what_an_older_actor_cannot_be_asked(callee: Callee, is_connected: bool) -> None:
    await until_connected(Handle(callee))
    if not is_connected:
        await drop()
    with pytest.raises(ReplicaError, match="may be of another version") as raised:
        await ray_rpc.call("callee", "new_call", timeout_s=WAIT_S)
    assert raised.value.code == "unknown_method"
    ray_rpc.forget_actor("callee")


@pytest.mark.parametrize("is_broken_first", [False, True])
async def test_a_call_under_way_fails_as_ray_says_that_the_actor_died(
    callee: Callee, is_broken_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_rpc, "VERDICT_S", WAIT_S)
    handle = Handle(callee)
    await until_connected(handle)
    waiting = asyncio.create_task(ray_rpc.call("callee", "wait", timeout_s=WAIT_S))
    await settled()
    if is_broken_first:
        await drop()
    handle.death.set_exception(RayActorError())
    with pytest.raises(ReplicaDied, match="callee died") as raised:
        await waiting
    assert raised.value.code == ReplicaDied.default_code
    assert "callee" not in ray_rpc._connections
    assert "callee" not in ray_rpc._handles


async def test_a_broken_connection_to_an_actor_that_lives_leaves_calls_to_ray(
    callee: Callee, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_rpc, "VERDICT_S", 0.05)
    handle = Handle(callee)
    await until_connected(handle)
    waiting = asyncio.create_task(ray_rpc.call("callee", "wait", timeout_s=WAIT_S))
    await settled()
    await drop()
    with pytest.raises(ReplicaDied, match="the connection to callee broke") as raised:
        await waiting
    assert raised.value.code == "unreachable"
    assert await ray_rpc.call("callee", "echo", "by Ray", timeout_s=WAIT_S) == "by Ray"
    assert handle.through_ray == ["echo"]


async def test_a_connection_that_cannot_be_had_is_tried_for_ever_more_rarely(
    callee: Callee, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(ray_rpc.time, "monotonic", lambda: now_s)

    async def refuse(*_: Any) -> Any:
        raise OSError("no route")

    monkeypatch.setattr(ray_rpc, "connect", refuse)
    handle = Handle(callee)
    ray_rpc.remember_handle("callee", handle)  # type: ignore[arg-type]
    tried_s = []
    for _ in range(60):
        asked = handle.through_ray.count("call_address")
        await ray_rpc.call("callee", "echo", "by Ray", timeout_s=WAIT_S)
        await settled()
        if handle.through_ray.count("call_address") > asked:
            tried_s.append(now_s - 1000.0)
        now_s += 1.0
    assert tried_s == [0.0, 6.0, 16.0, 36.0], "the call after each pause"


@pytest.mark.parametrize(
    ("tls", "actor_id", "num_asked"),
    [("1", "actor", 1), ("true", "actor", 1), ("True", "actor", 1), ("", None, 0)],
)
async def test_calls_that_ray_encrypts_or_no_actor_makes_go_through_ray(
    callee: Callee, tls: str, actor_id: str | None, num_asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_USE_TLS", tls)
    monkeypatch.setattr(ray_rpc.ray.get_runtime_context(), "get_actor_id", lambda: actor_id)
    monkeypatch.setattr(ray_rpc, "CONNECT_AGAIN_S", (0.0, 0.0))
    handle = Handle(callee)
    ray_rpc.remember_handle("callee", handle)  # type: ignore[arg-type]
    for _ in range(3):
        await ray_rpc.call("callee", "echo", "by Ray", timeout_s=WAIT_S)
        await settled()
    assert sorted(handle.through_ray) == ["call_address"] * num_asked + ["echo"] * 3


async def test_an_idle_handle_goes_with_its_connection_and_a_busy_one_stays(
    callee: Callee, monkeypatch: pytest.MonkeyPatch
) -> None:
    await until_connected(Handle(callee))
    connection = ray_rpc._connections["callee"]
    calling = asyncio.create_task(ray_rpc.call("callee", "wait", timeout_s=WAIT_S))
    await settled()
    monkeypatch.setattr(ray_rpc, "IDLE_S", -1.0)
    ray_rpc.remember_handle("another", Handle(callee))  # type: ignore[arg-type]
    assert "callee" in ray_rpc._handles
    callee.gate.set()
    await calling
    ray_rpc.remember_handle("another", Handle(callee))  # type: ignore[arg-type]
    await asyncio.wait_for(connection.lost, WAIT_S)
    assert "callee" not in ray_rpc._handles
