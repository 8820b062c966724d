"""The admin port: apart from the clients' port, on loopback or behind an admin's key."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from quadriga.config.loader import load_config
from quadriga.errors import ConfigError
from quadriga.ports import free_port
from serve_app.auth.api_keys import ApiKeys
from serve_app.auth.keys import ApiKey, digest
from serve_app.ops.admin import AdminServer, check_admin, serve_admin
from tests.unit.serve_app.conftest import MakeStand, Stand

KEYS = ApiKeys(
    (ApiKey("ops", digest("boss"), is_admin=True), ApiKey("app", digest("app"))), is_http_open=False
)

REPLICA = "quadriga:prefill:0:ab"


def client(stand: Stand, host: str) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(AdminServer(stand.engine).application())
    return httpx.AsyncClient(transport=transport, base_url=f"http://{host}")


def paths(stand: Stand) -> list[str]:
    needed = {"/cluster/moves": "?request=r", "/cluster/kv_events": f"?replica={REPLICA}"}
    return [path + needed.get(path, "") for path, _ in AdminServer(stand.engine).routes()]


async def test_on_loopback_every_route_is_open(make_stand: MakeStand) -> None:
    stand = await make_stand(keys=KEYS)
    for host in ("127.0.0.1:8001", "localhost", "[::1]:8001"):
        async with client(stand, host) as http:
            for path in paths(stand):
                assert (await http.get(path)).status_code == 200


async def test_its_root_shows_the_live_page(stand: Stand) -> None:
    async with client(stand, "127.0.0.1:8001") as http:
        page = await http.get("/")
        assert page.headers["content-type"].startswith("text/html")
        for path in ("/dashboard", "/dashboard/"):
            assert page.content == (await http.get(path)).content
        reply = await http.get("/cluster/")
        assert (reply.status_code, "location" in reply.headers) == (404, False)


async def test_a_query_of_too_many_fields_is_refused(stand: Stand) -> None:
    async with client(stand, "127.0.0.1:8001") as http:
        reply = await http.get("/cluster/moves?" + "&".join(f"a{i}=1" for i in range(33)))
    assert reply.status_code == 400 and "more than 32 fields" in reply.json()["error"]["message"]


async def test_what_has_no_events_says_why(stand: Stand) -> None:
    async with client(stand, "127.0.0.1:8001") as http:
        for query, status, param in (
            ("", 400, "replica"),
            ("?replica=quadriga:scheduler", 400, "replica"),
            (f"?replica={REPLICA}&after=-1", 400, "after"),
            (f"?replica={REPLICA}&after=9", 404, "replica"),  # the fake one keeps no blocks
            (f"?replica={REPLICA}&after=10", 404, "replica"),  # it is gone
            (f"?replica={REPLICA}&after=11", 404, "replica"),  # of the version before
        ):
            reply = await http.get(f"/cluster/kv_events{query}")
            assert (reply.status_code, reply.json()["error"]["param"]) == (status, param)


async def test_a_web_page_cannot_reach_it_under_its_own_name(stand: Stand) -> None:
    async with client(stand, "127.0.0.1:8001") as http:
        for path in (*paths(stand), "/dashboard"):
            reply = await http.get(path, headers={"host": "rebound.example:8001"})
            assert reply.status_code == 403
            assert reply.json()["error"]["param"] == "host"


async def test_elsewhere_every_route_asks_for_an_admins_key(make_stand: MakeStand) -> None:
    stand = await make_stand(keys=KEYS, config={"admin.host": "0.0.0.0", "admin.port": 8001})
    async with client(stand, "10.0.0.7:8001") as http:
        for path in paths(stand):
            for key, status in ((None, 401), ("wrong", 401), ("app", 403), ("boss", 200)):
                headers = {"authorization": f"Bearer {key}"} if key else {}
                reply = await http.get(path, headers=headers)
                assert reply.status_code == status, (path, key)
        error = (await http.get("/nothing")).json()["error"]
        assert error["code"] == "not_found" and error["message"].endswith("; try /dashboard")


async def test_on_the_clients_port_metrics_are_an_admins(make_stand: MakeStand) -> None:
    stand = await make_stand(keys=KEYS)
    for key, status in ((None, 401), ("app", 403), ("boss", 200)):
        headers = {"authorization": f"Bearer {key}"} if key else {}
        assert (await stand.http.get("/metrics", headers=headers)).status_code == status


async def test_one_of_several_has_the_port_and_another_takes_over(make_stand: MakeStand) -> None:
    port = free_port()
    stands = [await make_stand(config={"admin.port": port}) for _ in range(2)]
    tasks = [asyncio.ensure_future(serve_admin(stand.engine)) for stand in stands]

    async def until_it_answers() -> None:
        transport = httpx.AsyncHTTPTransport(retries=6)  # of the connection, with growing pauses
        async with httpx.AsyncClient(transport=transport) as http:
            assert (await http.get(f"http://127.0.0.1:{port}/live", timeout=60)).is_success

    try:
        await until_it_answers()
        tasks[0].cancel()
        await asyncio.wait(tasks[:1])
        await until_it_answers()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    async with httpx.AsyncClient() as http:
        with pytest.raises(httpx.ConnectError):
            await http.get(f"http://127.0.0.1:{port}/live")


async def test_a_port_that_cannot_be_opened_is_told_once(
    make_stand: MakeStand, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keys = ApiKeys((KEYS.all[0],), is_http_open=False)
    stand = await make_stand(config={"admin.host": "192.0.2.1", "admin.port": 8001}, keys=keys)
    monkeypatch.setattr("serve_app.ops.admin.RETRY_S", 0.0)
    task = asyncio.ensure_future(serve_admin(stand.engine))
    for _ in range(50):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    assert caplog.text.count("admin port: 192.0.2.1:8001 cannot be opened: ") == 1


@pytest.mark.parametrize(
    ("host", "keys", "is_fine"),
    [
        ("127.0.0.1", ApiKeys(), True),
        ("0.0.0.0", ApiKeys(), False),
        ("0.0.0.0", ApiKeys((ApiKey("app", digest("app")),), is_http_open=False), False),
        ("0.0.0.0", KEYS, True),
        ("admin.example", ApiKeys(), False),
    ],
)
def test_the_port_needs_a_key_off_loopback(host: str, keys: ApiKeys, is_fine: bool) -> None:
    config: Any = load_config({"admin.host": host, "admin.port": 8001}).admin
    if is_fine:
        check_admin(config, keys)
    else:
        with pytest.raises(ConfigError, match="not loopback"):
            check_admin(config, keys)
