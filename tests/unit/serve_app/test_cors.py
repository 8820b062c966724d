"""Web pages of allowed origins may call the API and read every answer; no others."""

from __future__ import annotations

import httpx
import pytest

from quadriga.config.loader import load_config
from quadriga.errors import ConfigError
from serve_app.auth.api_keys import ApiKeys
from tests.unit.serve_app.conftest import MakeStand, Stand

ALLOWED = "https://app.example"
CONFIG = {"ingress.cors_origins": f"{ALLOWED},http://localhost:3000"}
PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type, x-stainless-os",
}


async def preflight(stand: Stand, origin: str, **more: str) -> httpx.Response:
    headers = PREFLIGHT | {"origin": origin} | more
    return await stand.http.options("/v1/chat/completions", headers=headers)


async def test_it_is_off_by_default(stand: Stand) -> None:
    reply = await preflight(stand, ALLOWED)
    assert reply.status_code == 405
    assert not [name for name in reply.headers if name.startswith("access-control")]
    assert reply.json()["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize("origin", [ALLOWED, "http://localhost:3000"])
async def test_an_allowed_origin_may_ask(make_stand: MakeStand, origin: str) -> None:
    stand = await make_stand(config=CONFIG)
    reply = await preflight(stand, origin)
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == origin
    assert "POST" in reply.headers["access-control-allow-methods"]
    assert "x-stainless-os" in reply.headers["access-control-allow-headers"]


@pytest.mark.parametrize("origin", ["https://other.example", "null", "https://app.example.evil"])
async def test_another_origin_is_refused_in_openais_form(
    make_stand: MakeStand, origin: str
) -> None:
    stand = await make_stand(config=CONFIG)
    reply = await preflight(stand, origin)
    assert reply.status_code == 400
    assert "access-control-allow-origin" not in reply.headers
    assert reply.json()["error"]["code"] == "cors_refused"
    reply = await stand.http.get("/live", headers={"origin": origin})
    assert reply.status_code == 200, "the browser keeps it from the page"
    assert "access-control-allow-origin" not in reply.headers
    for form, status in (("text/plain", 400), ("", 400), ("Application/JSON; charset=utf-8", 200)):
        headers = {"origin": origin, "content-type": form}
        reply = await stand.http.post("/tokenize", content=b'{"prompt": "a"}', headers=headers)
        assert reply.status_code == status, "who sends it without asking is refused"


OPEN = "https://other.example"
"""A page that `CONFIG` does not name."""


@pytest.mark.parametrize(
    ("origin", "server", "config", "status"),
    [
        (OPEN, "127.0.0.1", {}, 403),
        (OPEN, "[::1]", CONFIG, 403),
        ("null", "127.0.0.1", {}, 403),
        ("http://localhost.example:8000", "127.0.0.1", {}, 403),
        ("http://localhost:3001", "127.0.0.1", {}, 200),
        ("http://[::1]", "127.0.0.1", {}, 200),
        (ALLOWED, "127.0.0.1", CONFIG, 200),
        (OPEN, "127.0.0.1", {"ingress.cors_origins": ["*"]}, 200),
        (OPEN, "10.0.0.7", {}, 200),
    ],
)
async def test_a_page_whose_name_resolves_to_loopback_reaches_no_open_service(
    make_stand: MakeStand, origin: str, server: str, config: dict[str, object], status: int
) -> None:
    url, headers = f"http://{server}:8000/v1/completions", {"origin": origin, "host": "a.example"}
    body = {"prompt": "hi", "max_tokens": 1}
    stand = await make_stand(config=config)
    reply = await stand.http.post(url, json=body, headers=headers)
    assert reply.status_code == status, reply.text
    if status == 403:
        assert "ingress.cors_origins" in reply.json()["error"]["message"]
        assert not stand.cluster.submitted
        stand = await make_stand(config=config, keys=ApiKeys.of(["k" * 32]))
        headers["authorization"] = f"Bearer {'k' * 32}"
        assert (await stand.http.post(url, json=body, headers=headers)).is_success


@pytest.mark.parametrize(
    ("host", "server", "config", "status"),
    [
        ("rebound.example:8000", "127.0.0.1", CONFIG, 403),
        ("127.0.0.1.rebound.example.", "[::1]", {}, 403),
        ("app.example", "127.0.0.1", CONFIG, 200),
        ("rebound.example", "127.0.0.1", {"ingress.cors_origins": ["*"]}, 200),
        ("rebound.example", "10.0.0.7", {}, 200),
        ("localhost:8000", "127.0.0.1", {}, 200),
        ("[::1]:8000", "[::1]", {}, 200),
        ("10.0.0.7:8000", "127.0.0.1", {}, 200),
        ("quadriga-serve:8000", "127.0.0.1", {}, 200),
        ("quadriga.default.svc.cluster.local", "127.0.0.1", {}, 200),
    ],
)
async def test_a_page_that_reads_from_its_own_name_reaches_no_open_service(
    make_stand: MakeStand, host: str, server: str, config: dict[str, object], status: int
) -> None:
    """Browsers send no Origin then."""
    stand = await make_stand(config=config)
    for path in ("/v1/models", "/load", "/metrics"):
        reply = await stand.http.get(f"http://{server}:8000{path}", headers={"host": host})
        assert reply.status_code == status, reply.text
        assert status == 200 or reply.json()["error"]["param"] == "host"


async def test_streams_and_errors_can_be_read_by_the_page(make_stand: MakeStand) -> None:
    stand = await make_stand(config=CONFIG)
    origin = {"origin": ALLOWED}
    body = {"prompt": "hi", "stream": True}
    for reply in (
        await stand.http.post("/v1/completions", json=body, headers=origin),
        await stand.http.post("/v1/completions", content=b"{", headers=origin),
        await stand.http.get("/nowhere", headers=origin),
        await stand.http.delete("/v1/models", headers=origin),
    ):
        assert reply.headers["access-control-allow-origin"] == ALLOWED, reply.status_code
        assert "content-type" not in reply.text, "which may be any"
        assert "retry-after" in reply.headers["access-control-expose-headers"]


async def test_all_origins(make_stand: MakeStand) -> None:
    stand = await make_stand(config={"ingress.cors_origins": ["*"]})
    reply = await stand.http.get("/live", headers={"origin": "https://any.example"})
    assert reply.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize(("text", "num"), [("", 0), (f"{ALLOWED},", 1), (f" {ALLOWED} , *", 2)])
def test_origins_as_one_text(text: str, num: int) -> None:
    assert len(load_config({"ingress.cors_origins": text}).ingress.cors_origins) == num


@pytest.mark.parametrize("origin", ["app.example", "https://app.example/path", "https://*.a", ""])
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="cors_origins"):
        load_config({"ingress.cors_origins": [origin]})
