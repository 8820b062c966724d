"""The body of POST /v1/embeddings, and the request that it is."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from quadriga.config.ingress import IngressConfig
from quadriga.core.request import Pooling, SamplingParams
from quadriga.errors import InvalidRequest
from serve_app.openai.bodies import ignored_fields
from serve_app.openai.models import ModelDirectory
from serve_app.openai.schema import INT32_MAX, PROMPT_FORMS, PROMPT_SCHEMA, RequestFields
from serve_app.openai.unsupported import EMBEDDINGS
from serve_app.openai.validation import check_context, read_deadline_s, read_prompts
from serve_app.request.request import Request, in_time

DEFAULT_POOLING: Pooling = "mean"


class EmbeddingsBody(RequestFields):
    """POST /v1/embeddings."""

    unsupported = EMBEDDINGS

    input: Any = Field(description=PROMPT_FORMS, json_schema_extra=PROMPT_SCHEMA)
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="Numbers, the default, or base64 of little-endian float32."
    )
    dimensions: int | None = Field(
        None, ge=1, le=INT32_MAX, description="Only the number that the model's vectors have."
    )
    pooling: Pooling | None = Field(
        None, description="Mean of the tokens' last hidden states, the default, or the last one."
    )
    normalize: bool | None = Field(
        None, description="Scale vectors to length 1, as OpenAI's are; default false."
    )


async def embedding_request(
    body: EmbeddingsBody,
    limits: IngressConfig,
    models: ModelDirectory,
    *,
    request_id: str,
    now_unix_s: float,
) -> Request:
    """Build the request of a call: a sequence for each input, which generates nothing.

    Vectors of two models cannot be compared, so `quadriga-auto` is always the first model.

    Raises: InvalidRequest, ContextTooLong, UnknownModel.
    """
    model = models.find(body.model)
    if model.is_auto:
        model = models.find(model.id)
    checkpoint = model.checkpoint
    if model.depth < checkpoint.num_layers:
        raise InvalidRequest(
            f"model: embeddings need all {checkpoint.num_layers} layers of {model.id}, which is "
            f"served with {model.depth}; name another model",
            param="model",
        )
    if body.dimensions not in (None, checkpoint.hidden_size):
        raise InvalidRequest(
            f"dimensions: vectors of {model.id} have {checkpoint.hidden_size}; shortened, which "
            "they were not trained for, they would lose their meaning; leave it out",
            param="dimensions",
            code="unsupported_parameter",
        )
    async with in_time(read_deadline_s(body, limits)):
        prompts, texts = await read_prompts(body.input, model, limits, models, field="input")
    check_context(max(map(len, prompts)), 0, model, "input", "input")
    return Request(
        request_id=request_id,
        model=model.id,
        prompts=prompts,
        prompt_texts=texts,
        n=1,
        sampling=SamplingParams(
            max_tokens=0, temperature=0.0, pooling=body.pooling or DEFAULT_POOLING
        ),
        stop=(),
        echo=False,
        priority=body.priority or 0,
        arrival_unix_s=now_unix_s,
        deadline_unix_s=now_unix_s + read_deadline_s(body, limits),
        ignored_fields=ignored_fields(body),
        cache_salt=body.cache_salt or "",
    )
