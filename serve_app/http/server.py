"""The HTTP server: OpenAI's API over the engine client, as one ASGI application."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from difflib import get_close_matches
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quadriga import __version__
from quadriga.errors import InvalidRequest, MethodNotAllowed, NotFound, QuadrigaError, Unavailable
from quadriga.observability.metrics import CONTENT_TYPE
from serve_app.http.call import Call, Endpoint, json_in_parts
from serve_app.http.cors import cors_middleware
from serve_app.http.generation import HttpGeneration
from serve_app.http.pages import docs_pages
from serve_app.openai.bodies import parse_body, parse_json
from serve_app.openai.errors import as_quadriga, error_headers, error_json
from serve_app.openai.schema import DetokenizeBody, TokenizeBody
from serve_app.openai.tools import tell_tools
from serve_app.openai.validation import check_token_ids, plain_messages
from serve_app.request.engine_client import EngineClient
from serve_app.request.request import in_time

TOKENIZE_CONTEXTS = 16
"""Texts that are only tokenised may be so many times as long as the model takes."""
TITLE = "Quadriga"


class HttpServer:
    """The routes of the API.

    Args:
        engine_client: Does the work; outlives the application.
    """

    def __init__(self, engine_client: EngineClient) -> None:
        self._engine_client = engine_client
        self._limits = engine_client.config.ingress

    def application(self) -> FastAPI:
        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            yield
            await self._engine_client.close()

        app = FastAPI(
            title=TITLE,
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,  # to http://, also for who came over TLS
            lifespan=lifespan,
            middleware=cors_middleware(self._limits.cors_origins),
        )
        generation = HttpGeneration(self._engine_client)
        for method, path, handler in (
            ("GET", "/health", self.health),
            ("GET", "/ping", self.ping),
            ("POST", "/ping", self.ping),
            ("GET", "/live", self.live),
            ("GET", "/version", self.version),
            ("GET", "/load", self.load),
            ("GET", "/metrics", self.metrics),
            ("GET", "/metrics/endpoint", self.endpoint_metrics),
            ("GET", "/v1/models", self.models),
            ("GET", "/v1/models/{model:path}", self.model),
            ("POST", "/v1/completions", generation.completions),
            ("POST", "/v1/chat/completions", generation.chat),
            ("POST", "/v1/responses", generation.responses),
            ("POST", "/v1/embeddings", generation.embeddings),
            ("POST", "/tokenize", self.tokenize),
            ("POST", "/detokenize", self.detokenize),
            *(("GET", path, page) for path, page in docs_pages(TITLE)),
        ):
            endpoint = Endpoint(self._engine_client, handler)
            app.router.routes.append(Route(path, endpoint, methods=[method]))
        app.add_exception_handler(HTTPException, routing_error)
        app.openapi = self._openapi  # type: ignore[method-assign]
        return app

    def _openapi(self) -> dict[str, Any]:
        from serve_app.openai.openapi import openapi_document  # for those who ask for the page

        needs_key = not self._engine_client.rate_limiter.keys.is_http_open
        return openapi_document(self._limits, needs_key=needs_key)

    async def health(self, call: Call) -> None:
        self._engine_client.check_ready()
        await call.answer_json({"status": "ok", "models": self._engine_client.models.ids()})

    async def ping(self, call: Call) -> None:
        """As `/health`, under the name and with the empty answer that SageMaker asks for."""
        self._engine_client.check_ready()
        await call.answer(b"", content_type=b"text/plain")

    async def live(self, call: Call) -> None:
        await call.answer_json({"status": "alive"})

    async def version(self, call: Call) -> None:
        await call.answer_json({"version": __version__})

    async def load(self, call: Call) -> None:
        self._check_caller(call)
        await call.answer_json(self._engine_client.load())

    async def metrics(self, call: Call) -> None:
        self._check_caller(call, admin=True)
        await answer_metrics(self._engine_client, call)

    async def endpoint_metrics(self, call: Call) -> None:
        """For a gateway's endpoint picker: the whole cluster is one model server."""
        if not self._limits.open_endpoint_metrics:
            self._check_caller(call)
        page = self._engine_client.endpoint_metrics_page()
        await call.answer(page, content_type=CONTENT_TYPE.encode())

    async def models(self, call: Call) -> None:
        self._check_caller(call)
        await call.answer_json(self._engine_client.models.listing())

    async def model(self, call: Call) -> None:
        self._check_caller(call)
        name, models = call.scope["path_params"]["model"], self._engine_client.models
        await call.answer_json(models.describe(name) if name else models.listing())

    async def tokenize(self, call: Call) -> None:
        self._check_caller(call)
        body = parse_body(TokenizeBody, parse_json(await call.read_body(self._engine_client)))
        model = self._engine_client.models.find(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("prompt: give either prompt or messages", param="prompt")
        if body.messages is not None:
            field, variables = "messages", body.chat_template_kwargs
            told = tell_tools(body.tools, model)[0] if body.tools else ()
            text = model.tokenizer.render_chat(plain_messages(body.messages), told, variables)
            special = bool(body.add_special_tokens)
        else:
            field, text = "prompt", body.prompt or ""
            special = body.add_special_tokens is not False
        models, most = self._engine_client.models, TOKENIZE_CONTEXTS * model.max_model_len
        async with in_time(self._limits.default_deadline_s):
            tokens = await models.tokenize(model, text, special, field=field, max_tokens=most)

            def render() -> bytes:
                answer: dict[str, Any] = {"tokens": tokens, "count": len(tokens)}
                answer["max_model_len"] = model.max_model_len
                if body.return_token_strs:
                    answer["token_strs"] = [model.tokenizer.token_text(t) for t in tokens]
                return json_in_parts(answer)

            data = await models.off_loop(len(tokens), render)
        await call.answer(data)

    async def detokenize(self, call: Call) -> None:
        self._check_caller(call)
        body = parse_body(DetokenizeBody, parse_json(await call.read_body(self._engine_client)))
        model = self._engine_client.models.find(body.model)
        await check_token_ids(body.tokens, "tokens", model)
        async with in_time(self._limits.default_deadline_s):
            text = await self._engine_client.models.detokenize(
                model, body.tokens, skip_special_tokens=bool(body.skip_special_tokens)
            )
        await call.answer_json({"prompt": text})

    def _check_caller(self, call: Call, *, admin: bool = False) -> None:
        """Raises: Unauthenticated, Forbidden, KeyLimitReached."""
        self._engine_client.rate_limiter.http_caller(call.headers.get("authorization"), admin=admin)


async def answer_metrics(engine_client: EngineClient, call: Call) -> None:
    """Answer with the whole cluster's metrics. Raises: Unavailable."""
    try:
        page = await engine_client.metrics_page()
    except QuadrigaError as exc:
        # Without the counters of other processes, counters would seem to have fallen.
        raise Unavailable(f"metrics cannot be gathered now: {exc.message}") from exc
    await call.answer(page, content_type=CONTENT_TYPE.encode())


async def routing_error(request: Request, exc: Exception) -> Response:
    """404 and 405, which the router raises itself, in the documented form."""
    status = exc.status_code if isinstance(exc, HTTPException) else 500
    error: QuadrigaError
    route = f"{request.method} {request.url.path}"[:200]
    if status == 404:
        paths = [known.path for known in request.app.routes]
        close = get_close_matches(request.url.path[:64], paths, n=1, cutoff=0.8)
        close += [page for page in ("/docs", "/dashboard") if page in paths]
        error = NotFound(f"there is no route {route}; try {close[0]}")
    elif status == 405:
        error = MethodNotAllowed(
            f"the route {request.url.path[:200]} does not take {request.method}"
        )
    else:
        error = as_quadriga(exc)
    headers = {name.decode(): value.decode() for name, value in error_headers(error)}
    allowed = (getattr(exc, "headers", None) or {}).get("Allow")
    if allowed:
        headers["allow"] = allowed
    return Response(
        error_json(error), error.http_status, headers=headers, media_type="application/json"
    )
