"""Every route and every RPC, without a key and with a wrong one: none is forgotten."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import grpc
import pytest
from starlette.routing import Route

from quadriga.observability.metrics import MetricsHub, parse_exposition
from quadriga.protos.quadriga.v1 import quadriga_pb2 as pb
from serve_app.auth.api_keys import ApiKeys
from serve_app.grpc.server import GrpcServer
from serve_app.http.server import HttpServer
from tests.unit.serve_app.conftest import MakeStand
from tests.unit.serve_app.test_grpc_server import Context
from tests.waiting import until

# These answer without a key, because they reveal nothing.
OPEN_ROUTES = {
    *("/health", "/ping", "/live", "/version", "/openapi.json", "/docs"),
    *("/docs/swagger-ui-bundle.js", "/docs/swagger-ui.css", "/docs/favicon.png"),
}
WRONG = (None, "", "Bearer", "Bearer wrong", "Basic secret", "secret")


@pytest.fixture
def keys() -> ApiKeys:
    return ApiKeys.of(["secret"])


async def test_every_route(make_stand: MakeStand, keys: ApiKeys) -> None:
    stand = await make_stand(keys=keys)
    guarded = 0
    for route in HttpServer(stand.engine).application().routes:
        assert isinstance(route, Route)
        path = route.path.replace("{model:path}", "quadriga-s")
        for method in (route.methods or set()) - {"HEAD"}:
            for value in WRONG:
                headers = {} if value is None else {"authorization": value}
                reply = await stand.http.request(method, path, headers=headers, content=b"{")
                if path in OPEN_ROUTES:
                    assert reply.status_code != 401, path
                else:
                    assert reply.status_code == 401, (method, path)
                    assert reply.headers["www-authenticate"] == "Bearer"
                    assert reply.headers["x-should-retry"] == "false"
                    guarded += 1
    assert guarded >= 7 * len(WRONG)


async def test_an_endpoint_picker_has_no_key(make_stand: MakeStand, keys: ApiKeys) -> None:
    path, good = "/metrics/endpoint", {"authorization": "Bearer secret"}
    closed = await make_stand(keys=keys)
    await until(lambda: bool(closed.engine._cluster_state.view.snapshots))
    assert (await closed.http.get(path)).status_code == 401
    page = await closed.http.get(path, headers=good)
    assert page.text.count("\nvllm:num_requests_waiting{") == 1
    opened = await make_stand(keys=keys, config={"ingress.open_endpoint_metrics": True})
    await until(lambda: bool(opened.engine._cluster_state.view.snapshots))
    assert (await opened.http.get(path)).text == page.text
    assert (await opened.http.get("/load")).status_code == 401
    opened.engine.drain(0.0)
    assert (await opened.http.get(path)).status_code == 503, "it is to be sent nothing more"


async def test_every_rpc(make_stand: MakeStand, keys: ApiKeys) -> None:
    stand = await make_stand(keys=keys)
    server = GrpcServer(stand.engine)
    methods = {
        "Generate": server.generate,
        "GenerateOnce": server.generate_once,
        "Embed": server.embed,
        "Cancel": server.cancel,
        "ListModels": server.list_models,
    }
    assert set(methods) == {m.name for m in pb.DESCRIPTOR.services_by_name["Quadriga"].methods}
    for name, method in methods.items():
        for value in WRONG:
            context = Context(value)
            called: Any = method(b"\xff not a message", context)
            if name == "Generate":
                assert [m.error.code async for m in called] == ["invalid_api_key"]
            else:
                await called
            assert context.code is grpc.StatusCode.UNAUTHENTICATED, name


async def test_nothing_is_read_before_the_key(make_stand: MakeStand, keys: ApiKeys) -> None:
    """A stranger's body costs nothing: 401 comes before 413."""
    stand = await make_stand(keys=keys, config={"ingress.max_body_bytes": 1024})
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        reply = await stand.http.post(path, content=b"x" * 5000)
        assert reply.status_code == 401
    good = {"authorization": "Bearer secret"}
    reply = await stand.http.post("/tokenize", content=b"x" * 5000, headers=good)
    assert reply.status_code == 413


async def test_headers_are_bounded(make_stand: MakeStand) -> None:
    stand = await make_stand(config={"ingress.max_headers": 20, "ingress.max_header_bytes": 2048})
    many = {f"x-{i}": "a" for i in range(20)}
    for headers in (many, {"x-long": "a" * 2048}):
        for path in ("/live", "/v1/models"):
            reply = await stand.http.get(path, headers=headers)
            assert reply.status_code == 431
            assert reply.json()["error"]["code"] == "headers_too_large"


async def test_labels_hold_nothing_a_client_chose(make_stand: MakeStand, keys: ApiKeys) -> None:
    stand = await make_stand(keys=keys)
    good = {"authorization": "Bearer secret"}
    for name in ("evil-model", 'evil"} 1\nevil_total{a="b', "e" * 512):
        for path in ("/v1/completions", f"/v1/models/{quote(name)}", f"/{quote(name)}"):
            await stand.http.post(
                path,
                json={"model": name, "prompt": "a", "user": "evil"},
                headers=good | {"user-agent": "evil", "x-request-id": "evil"},
            )
        context = Context("Bearer secret")
        request = pb.GenerateRequest(prompt="a", model=name, user="evil", request_id="evil")
        await GrpcServer(stand.engine).generate_once(request.SerializeToString(), context)
    await stand.complete()
    good_reply = await stand.http.post("/v1/completions", json={"prompt": "a"}, headers=good)
    assert good_reply.status_code == 200
    hub = MetricsHub()
    hub.push("ingress-0", stand.engine.metrics.registry.snapshot(), now_s=0.0)
    page = hub.exposition(now_s=0.0).decode()  # as the controller makes it
    series = parse_exposition(page)
    assert "evil" not in page
    models = {key.split('model_name="')[1].split('"')[0] for key in series if "model_name=" in key}
    assert models == {"quadriga-s"}
