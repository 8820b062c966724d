"""Bodies of the HTTP API, as the OpenAPI page shows them and as both doors validate them.

gRPC requests are turned into these same models, so that one set of bounds and messages holds.
Every bound that depends on the deployment (context length, `n`, stop lists) is checked in
`serve_app.validation`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
MAX_TOKENS_LIMIT = 10_000_000
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 128
_DEFAULT = "default: what the model's generation_config.json says, unless set otherwise."

TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]


class Body(BaseModel):
    """Strict about types, lenient about unknown fields (they are reported back as ignored)."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class StreamOptions(Body):
    include_usage: bool | None = Field(None, description="One last chunk with the usage.")
    continuous_usage_stats: bool | None = Field(None, description="Usage so far in every chunk.")


class ResponseFormat(Body):
    type: str = Field(description='Only "text".')


class GenerationFields(Body):
    """Fields that completions, chats and gRPC share."""

    model: str = Field(
        "quadriga-auto", max_length=512, description="Model id; `quadriga-auto` lets us choose."
    )
    max_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS_LIMIT)
    min_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS_LIMIT)
    temperature: float | None = Field(None, ge=0, le=2, description=f"0 is greedy; {_DEFAULT}")
    top_p: float | None = Field(None, gt=0, le=1, description=_DEFAULT)
    top_k: int | None = Field(
        None, ge=-1, le=INT32_MAX, description=f"0 and -1 are off; {_DEFAULT}"
    )
    min_p: float | None = Field(None, ge=0, le=1, description=_DEFAULT)
    repetition_penalty: float | None = Field(None, gt=0, le=10, description=_DEFAULT)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, Bias] | None = Field(
        None, max_length=MAX_LOGIT_BIAS, description="Token id (as text) to bias, -100 to 100."
    )
    seed: int | None = Field(None, ge=INT64_MIN, le=INT64_MAX)
    n: int | None = Field(None, ge=1, le=INT32_MAX, description="Choices; bounded by the server.")
    stop: str | list[str] | None = Field(None, description="Matched across token borders.")
    stop_token_ids: list[TokenId] | None = Field(None, max_length=MAX_STOP_TOKEN_IDS)
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = Field(
        None, description="`token_ids` of the output in every choice, chunks included."
    )
    priority: int | None = Field(
        None, ge=INT32_MIN, le=INT32_MAX, description="Lower is served first; default 0."
    )
    deadline_ms: int | None = Field(
        None, ge=1, le=INT32_MAX, description="Answer 504 when not done by then."
    )
    user: str | None = Field(None, max_length=4096)
    response_format: ResponseFormat | None = None
    exit_threshold: float | None = Field(
        None, ge=0, le=1, description="Confidence from which a token leaves early; 1: never."
    )
    exit_policy: Literal["bounded", "strict"] | None = Field(
        None,
        description="strict: no token may leave the deepest layers there are below the threshold.",
    )
    max_depth: int | None = Field(
        None, ge=1, le=INT32_MAX, description="Run no token through more layers than this."
    )
    sla_tbt_ms: float | None = Field(
        None, gt=0, le=3_600_000, description="Time between two tokens that batching may plan for."
    )


class CompletionBody(GenerationFields):
    """POST /v1/completions."""

    prompt: Any = Field(
        description="A string, a list of strings, token ids, or a list of lists of token ids.",
        json_schema_extra={
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": {"type": "integer", "minimum": 0}},
                {
                    "type": "array",
                    "items": {"type": "array", "items": {"type": "integer", "minimum": 0}},
                },
            ]
        },
    )
    echo: bool | None = Field(None, description="Begin the answer with the prompt.")
    logprobs: int | None = Field(
        None, ge=0, le=INT32_MAX, description="Alternatives to report per token."
    )
    best_of: int | None = Field(None, ge=1, le=INT32_MAX, description="Must equal `n`.")
    suffix: str | None = Field(None, description="Refused: not supported.")


class ContentPart(Body):
    type: str = Field(description='Only "text" (or "refusal").')
    text: str | None = None
    refusal: str | None = None


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    refusal: str | None = None


class ChatBody(GenerationFields):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=4096)
    max_completion_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS_LIMIT)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=INT32_MAX)
    tools: list[Any] | None = Field(None, description="Refused: not supported.")
    tool_choice: Any = Field(None, description='Only null, "none" or "auto".')
    functions: list[Any] | None = Field(None, description="Refused: not supported.")
    function_call: Any = Field(None, description='Only null, "none" or "auto".')
    modalities: list[str] | None = Field(None, description='Only ["text"].')
    audio: Any = Field(None, description="Refused: not supported.")


class TokenizeBody(Body):
    """POST /tokenize: give `prompt` or `messages`."""

    model: str = Field("quadriga-auto", max_length=512)
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1, max_length=4096)
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str = Field("quadriga-auto", max_length=512)
    tokens: list[TokenId] = Field(max_length=10_000_000)


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer that is not a success."""

    error: ErrorDetail
