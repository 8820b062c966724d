"""What a request is sampled with that does not say: over HTTP and gRPC alike."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from quadriga.checkpoint.folder import SamplingDefaults
from quadriga.client.wire import make_request
from quadriga.core.request import SamplingParams
from serve_app.auth.api_keys import ApiKeys
from serve_app.grpc.server import GrpcServer
from serve_app.openai.models import ModelDirectory, ServedModel
from tests.unit.serve_app.conftest import MakeStand, Stand
from tests.unit.serve_app.test_grpc_server import Context

RECOMMENDED = SamplingDefaults(0.6, 0.9, 20, 0.05, 1.1)
OPENAI = {"ingress.default_sampling": "openai"}


def defaults(params: SamplingParams) -> SamplingDefaults:
    return SamplingDefaults(
        params.temperature, params.top_p, params.top_k, params.min_p, params.repetition_penalty
    )


async def over_http(stand: Stand, fields: dict[str, Any]) -> SamplingDefaults:
    assert (await stand.complete(**fields)).status_code == 200
    return defaults(stand.cluster.submitted[-1].sampling)


async def over_http_chat(stand: Stand, fields: dict[str, Any]) -> SamplingDefaults:
    body = {"messages": [{"role": "user", "content": "hi"}]} | fields
    assert (await stand.http.post("/v1/chat/completions", json=body)).status_code == 200
    return defaults(stand.cluster.submitted[-1].sampling)


async def over_grpc(stand: Stand, fields: dict[str, Any]) -> SamplingDefaults:
    """As the SDK sends it."""
    request = make_request("hi", None, None, fields)  # type: ignore[arg-type]
    await GrpcServer(stand.engine).generate_once(request.SerializeToString(), Context())
    return defaults(stand.cluster.submitted[-1].sampling)


@pytest.fixture(params=[over_http, over_http_chat, over_grpc])
def ask(request: pytest.FixtureRequest) -> Any:
    return request.param


async def stand_with(
    make_stand: MakeStand, model: ServedModel, recommended: SamplingDefaults, **config: Any
) -> Stand:
    stand = await make_stand(keys=ApiKeys.of(["secret"], is_http_open=True), config=config)
    checkpoint = replace(model.checkpoint, sampling=recommended)
    stand.engine.models = ModelDirectory([replace(model, checkpoint=checkpoint)])
    return stand


async def test_the_bundled_models_are_greedy(make_stand: MakeStand, ask: Any) -> None:
    stand = await make_stand(keys=ApiKeys.of(["secret"], is_http_open=True))
    assert await ask(stand, {}) == SamplingDefaults(temperature=0.0)


async def test_the_checkpoint_fills_what_is_left_out(
    make_stand: MakeStand, model: ServedModel, ask: Any
) -> None:
    stand = await stand_with(make_stand, model, RECOMMENDED)
    assert await ask(stand, {}) == RECOMMENDED
    assert await ask(stand, {"top_p": 0.5}) == replace(RECOMMENDED, top_p=0.5)


async def test_what_is_named_counts_even_where_it_is_neutral(
    make_stand: MakeStand, model: ServedModel, ask: Any
) -> None:
    stand = await stand_with(make_stand, model, RECOMMENDED)
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    assert await ask(stand, neutral | {"repetition_penalty": 1.0}) == SamplingDefaults()
    assert (await ask(stand, {"temperature": 0.0})).temperature == 0.0


async def test_openai_defaults_by_configuration(
    make_stand: MakeStand, model: ServedModel, ask: Any
) -> None:
    stand = await stand_with(make_stand, model, RECOMMENDED, **OPENAI)
    assert await ask(stand, {}) == SamplingDefaults()
    assert await ask(stand, {"top_k": 3}) == SamplingDefaults(top_k=3)
