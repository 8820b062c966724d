"""Bodies of the HTTP API, as the OpenAPI page shows them and as HTTP and gRPC validate them.

gRPC requests are turned into these same models, so that one set of bounds and messages holds.
Every bound that depends on the deployment (context length, `n`, stop lists) is checked in
`serve_app.openai.validation`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, PydanticKnownError

from quadriga.checkpoint.exits import ExitPolicy
from serve_app.openai.unsupported import (
    CHAT,
    COMPLETIONS,
    MESSAGE,
    RESPONSE_FORMAT,
    STRUCTURED_OUTPUTS,
    TOKENIZE,
    UnsupportedField,
)

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
MAX_TOKENS_LIMIT = 10_000_000
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_STOPS_READ = 1024
"""Longer lists of stop strings are refused unread; the deployment's own limit is lower."""
MAX_CHOICES_READ = 4096
MAX_TOOLS = 128
MAX_TEMPLATE_VARIABLES = 32
MAX_MESSAGES = 4096
MAX_PARTS = 4096
_DEFAULT = "default: that of the model's generation_config.json, unless set otherwise."

CACHE_SALT = "Computed prompts are shared with requests of the same key and salt alone."
CacheSalt = Annotated[str, Field(min_length=1, max_length=256)]
TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
Choices = Annotated[list[str], Field(max_length=MAX_CHOICES_READ, fail_fast=True)]
Stops = Annotated[list[str], Field(max_length=MAX_STOPS_READ, fail_fast=True)]


_TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
_TOKENS: dict[str, Any] = {
    "type": "array",
    "minItems": 1,
    "items": {"type": "integer", "minimum": 0, "maximum": INT32_MAX},
}


def _counted(fields: Any) -> Any:
    """Count an object's fields before each is looked at, which costs far more."""
    if isinstance(fields, dict) and len(fields) > MAX_LOGIT_BIAS:
        limits = {"field_type": "Dictionary", "max_length": MAX_LOGIT_BIAS}
        raise PydanticKnownError("too_long", limits | {"actual_length": len(fields)})
    return fields


COUNTED = BeforeValidator(_counted)


class RequestBody(BaseModel):
    """Strict about types, lenient about unknown fields (they are reported back as ignored).

    Validation of a list stops at its first wrong item: errors about all of them would take far
    longer than reading them.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    unsupported: ClassVar[Mapping[str, UnsupportedField]] = {}
    """Fields that are refused unless their value asks for nothing."""

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        tree = handler.resolve_ref_schema(handler(core_schema))
        fields = {name: field.schema for name, field in cls.unsupported.items()}
        tree.setdefault("properties", {}).update(fields)
        return tree


class StreamOptions(RequestBody):
    """What a stream carries beside the text; needs `stream: true`."""

    include_usage: bool | None = Field(None, description="One last chunk with the usage.")
    continuous_usage_stats: bool | None = Field(None, description="Usage so far in every chunk.")
    include_eta: bool | None = Field(
        None, description="Tokens and seconds to go in every chunk, as predicted."
    )


class JsonSchemaFormat(RequestBody):
    """A form by the name that its author gave it."""

    name: str | None = Field(None, max_length=512, description="Accepted; changes nothing.")
    description: str | None = Field(None, description="Accepted; changes nothing.")
    schema_: dict[str, Any] | None = Field(
        None, alias="schema", description="JSON Schema; any object where there is none."
    )
    strict: bool | None = Field(None, description="Accepted: every schema is kept to.")


class ResponseFormat(RequestBody):
    """The form of the answer, in OpenAI's words."""

    unsupported = RESPONSE_FORMAT

    type: Literal["text", "json_object", "json_schema"] = Field(description="Which form.")
    json_schema: JsonSchemaFormat | None = Field(None, description="With type json_schema.")


class StructuredOutputs(RequestBody):
    """The form of the answer, in vLLM's words: one of these."""

    unsupported = STRUCTURED_OUTPUTS

    json_: Any = Field(None, alias="json", description="JSON Schema, as an object or as text.")
    regex: str | None = Field(None, description="The whole answer matches; Rust's syntax.")
    choice: Choices | None = Field(None, description="One of these texts.")
    grammar: str | None = Field(None, description="Lark, or GBNF.")
    json_object: bool | None = Field(None, description="Any JSON object.")
    disable_any_whitespace: bool | None = Field(
        None, description="No blank between the parts of JSON; changes nothing of other forms."
    )


class RequestFields(RequestBody):
    """Fields of every request that a model computes."""

    model: str | None = Field(
        None,
        max_length=512,
        description="Id of the model; null, `quadriga-auto`: the first, or the one HELIOS chose.",
    )
    priority: int | None = Field(
        None, ge=INT32_MIN, le=INT32_MAX, description="Lower is served first; default 0."
    )
    deadline_ms: int | None = Field(
        None, ge=1, le=INT32_MAX, description="Answer 504 when not done by then."
    )
    user: str | None = Field(None, max_length=4096, description="Accepted; changes nothing.")
    cache_salt: CacheSalt | None = Field(None, description=CACHE_SALT)

    @model_validator(mode="before")
    @classmethod
    def _whole_numbers(cls, fields: Any) -> Any:
        """Read 16.0 as 16: JSON Schema, and so OpenAI's API, takes either for a whole number."""
        if not isinstance(fields, dict):
            return fields
        return {
            name: int(value) if isinstance(value, float) and value.is_integer() else value
            for name, value in fields.items()
        }


class GenerationFields(RequestFields):
    """Fields that completions, chats and gRPC share."""

    max_tokens: int | None = Field(
        None,
        ge=0,
        le=MAX_TOKENS_LIMIT,
        description="Most tokens of the answer; completions: 16 by default, 0 only with `echo`; "
        "chats: what is left of the context. With the prompt it must fit the context.",
    )
    max_completion_tokens: int | None = Field(
        None, ge=1, le=MAX_TOKENS_LIMIT, description="`max_tokens` by its newer name; wins over it."
    )
    min_tokens: int | None = Field(
        None,
        ge=0,
        le=MAX_TOKENS_LIMIT,
        description="No end, stop token or stop string within this many; at most `max_tokens`.",
    )
    temperature: float | None = Field(None, ge=0, le=2, description=f"0 is greedy; {_DEFAULT}")
    top_p: float | None = Field(
        None, gt=0, le=1, description=f"Share of probability to sample from; {_DEFAULT}"
    )
    top_k: int | None = Field(
        None,
        ge=-1,
        le=INT32_MAX,
        description=f"Sample from this many tokens; 0 and -1 are off; {_DEFAULT}",
    )
    min_p: float | None = Field(
        None,
        ge=0,
        le=1,
        description=f"Least probability, as a share of the most probable token's; {_DEFAULT}",
    )
    repetition_penalty: float | None = Field(
        None, gt=0, le=10, description=f"Above 1: tokens seen so far are less likely; {_DEFAULT}"
    )
    presence_penalty: float | None = Field(
        None, ge=-2, le=2, description="Off the logit of each token generated before; default 0."
    )
    frequency_penalty: float | None = Field(
        None, ge=-2, le=2, description="The same for each time it was generated; default 0."
    )
    logit_bias: Annotated[dict[str, Bias] | None, COUNTED] = Field(
        None,
        max_length=MAX_LOGIT_BIAS,
        description="Token id (as text) to bias, -100 to 100.",
        json_schema_extra={"propertyNames": {"pattern": "^[0-9]{1,10}$"}},
    )
    seed: int | None = Field(
        None,
        ge=INT64_MIN,
        le=INT64_MAX,
        description="The same seed gives the same random numbers: with `deterministic`, or without "
        "early exits, the same answer; drawn where absent.",
    )
    n: int | None = Field(None, ge=1, le=INT32_MAX, description="Choices; bounded by the server.")
    stop: str | Stops | None = Field(None, description="Matched across token borders.")
    stop_token_ids: list[TokenId] | None = Field(
        None, max_length=MAX_STOP_TOKEN_IDS, description="Tokens that end the answer; not shown."
    )
    ignore_eos: bool | None = Field(None, description="Go on after the end token.")
    stream: bool | None = Field(None, description="Answer as events, as it is generated.")
    stream_options: StreamOptions | None = Field(None, description="Only with `stream: true`.")
    return_token_ids: bool | None = Field(
        None,
        description="`token_ids` of the output in every choice, chunks included, and "
        "`prompt_token_ids`.",
    )
    response_format: ResponseFormat | None = Field(
        None, description="The form of the answer: JSON of any kind, or that a schema allows."
    )
    structured_outputs: StructuredOutputs | None = Field(
        None, description="The form of the answer, by schema, expression, choice or grammar."
    )
    guided_json: Any = Field(None, description="`structured_outputs.json` by its older name.")
    guided_regex: str | None = Field(None, description="`structured_outputs.regex`, the same.")
    guided_choice: Choices | None = Field(
        None, description="`structured_outputs.choice`, the same."
    )
    guided_grammar: str | None = Field(None, description="`structured_outputs.grammar`, the same.")
    exit_threshold: float | None = Field(
        None, ge=0, le=1, description="Confidence from which a token leaves early; 1: never."
    )
    exit_policy: ExitPolicy | None = Field(
        None,
        description="lossless: the whole model's answer, drafted by an exit; bounded: tokens leave "
        "early from the threshold on; strict: none may leave the deepest layers there are below "
        "it; off: none leaves early.",
    )
    max_depth: int | None = Field(
        None, ge=1, le=INT32_MAX, description="Run no token through more layers than this."
    )
    sla_tbt_ms: float | None = Field(
        None, gt=0, le=3_600_000, description="Time between two tokens that batching may plan for."
    )
    quality_budget: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Share of the tokens that may leave below the threshold while memory is nearly "
        "full, or tokens come later than `sla_tbt_ms`; 0: none. With bounded exits.",
    )


PROMPT_FORMS = "A string, a list of strings, token ids, or a list of lists of token ids."
PROMPT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        _TEXT,
        _TOKENS,
        {"type": "array", "minItems": 1, "items": _TEXT},
        {"type": "array", "minItems": 1, "items": _TOKENS},
    ]
}


class CompletionBody(GenerationFields):
    """POST /v1/completions."""

    unsupported = COMPLETIONS

    prompt: Any = Field(description=PROMPT_FORMS, json_schema_extra=PROMPT_SCHEMA)
    echo: bool | None = Field(None, description="Begin the answer with the prompt.")
    logprobs: int | None = Field(
        None, ge=0, le=INT32_MAX, description="Alternatives to report per token."
    )
    best_of: int | None = Field(None, ge=1, le=INT32_MAX, description="Must equal `n`.")


class ContentPart(RequestBody):
    """A part of a message's content."""

    type: str = Field(
        description='Only "text" (or "refusal"); the field of that name must be there.',
        json_schema_extra={"enum": ["text", "refusal"]},
    )
    text: str | None = Field(None, description="With type text.")
    refusal: str | None = Field(None, description="With type refusal.")


class FunctionCallBody(RequestBody):
    """What an assistant asked to have called."""

    name: str = Field(max_length=512, description="Of the function.")
    arguments: str = Field(description="JSON, as the answer had it.")


class ToolCallBody(RequestBody):
    """A call in an assistant's message."""

    id: str = Field(max_length=512, description="By which the tool's message names it.")
    type: Literal["function"] | None = Field(None, description="Always `function`.")
    function: FunctionCallBody = Field(description="What was called.")


class FunctionBody(RequestBody):
    """A function that the model may ask to have called."""

    name: str = Field(
        pattern=r"^[a-zA-Z0-9_.-]{1,64}$", description="Letters, digits, `_`, `-` and `.`."
    )
    description: str | None = Field(None, description="For the model.")
    parameters: dict[str, Any] | None = Field(
        None, description="JSON Schema of an object; none where it takes nothing."
    )
    strict: bool | None = Field(
        None, description="Arguments fit `parameters`; those of a call that must be made always do."
    )


class ToolBody(RequestBody):
    """One tool."""

    type: Literal["function"] = Field(description="Only functions.")
    function: FunctionBody = Field(description="The function.")


class NamedFunction(RequestBody):
    """A function by its name."""

    name: str = Field(max_length=512, description="One of `tools`.")


class NamedToolChoice(RequestBody):
    """The one function to call."""

    type: Literal["function"] = Field(description="Only functions.")
    function: NamedFunction = Field(description="Which.")


class ChatMessage(RequestBody):
    """One turn of a conversation."""

    unsupported = MESSAGE

    role: Literal["system", "developer", "user", "assistant", "tool", "function"] = Field(
        description="The author; `developer` is read as `system`."
    )
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = Field(
        None, description="Text, or text parts, which are joined."
    )
    name: str | None = Field(None, description="Passed on to the chat template.")
    tool_calls: Annotated[list[ToolCallBody], Field(fail_fast=True)] | None = Field(
        None, max_length=MAX_TOOLS, description="Calls that an assistant asked for."
    )
    tool_call_id: str | None = Field(
        None, max_length=512, description="Of a tool's message: the call that it answers."
    )
    reasoning_content: str | None = Field(None, description="Passed on to the chat template.")
    reasoning: str | None = Field(None, description="The same by vLLM's newer name.")
    refusal: str | None = Field(None, description="The content where there is no other.")


def _bounded_parts(messages: Any) -> Any:
    """Count the parts of all messages before each is looked at, which costs far more."""
    if isinstance(messages, list) and len(messages) <= MAX_MESSAGES:
        contents = [m.get("content") for m in messages if isinstance(m, dict)]
        count = sum(len(content) for content in contents if isinstance(content, list))
        if count > MAX_PARTS:
            raise PydanticCustomError(
                "too_many_parts",
                "all contents together should have at most {most} parts, not {count}",
                {"most": MAX_PARTS, "count": count},
            )
    return messages


Messages = Annotated[
    list[ChatMessage],
    Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
    BeforeValidator(_bounded_parts),
]


TemplateVariables = Annotated[dict[str, Any], Field(max_length=MAX_TEMPLATE_VARIABLES)]
TEMPLATE_VARIABLES = "Variables of the chat template, such as `enable_thinking`; it ignores others."


class ChatBody(GenerationFields):
    """POST /v1/chat/completions."""

    unsupported = CHAT

    messages: Messages = Field(
        description=f"The conversation so far; {MAX_PARTS:,} content parts at most."
    )
    tools: Annotated[list[ToolBody], Field(fail_fast=True)] | None = Field(
        None, max_length=MAX_TOOLS, description="Functions that the model may ask to have called."
    )
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = Field(
        None, description="Whether it calls, must call, or must call this one; default auto."
    )
    parallel_tool_calls: bool | None = Field(
        None, description="False: an answer has one call at most; later ones are left out."
    )
    chat_template_kwargs: TemplateVariables | None = Field(None, description=TEMPLATE_VARIABLES)
    logprobs: bool | None = Field(None, description="Log-probabilities of the answer's tokens.")
    top_logprobs: int | None = Field(
        None, ge=0, le=INT32_MAX, description="Alternatives per token; needs `logprobs: true`."
    )


class TokenizeBody(RequestBody):
    """POST /tokenize: give `prompt` or `messages`."""

    unsupported = TOKENIZE

    model: str | None = Field(None, max_length=512, description="Whose tokenizer; null: the first.")
    prompt: str | None = Field(
        None,
        description="Text of at most 16 times the tokens that the model takes; not together with "
        "`messages`.",
    )
    messages: Messages | None = Field(None, description="A conversation, put in the chat template.")
    tools: Annotated[list[ToolBody], Field(fail_fast=True)] | None = Field(
        None, max_length=MAX_TOOLS, description="Functions that the template is told of."
    )
    chat_template_kwargs: TemplateVariables | None = Field(None, description=TEMPLATE_VARIABLES)
    add_special_tokens: bool | None = Field(
        None, description="By default with `prompt`, not with `messages`."
    )
    return_token_strs: bool | None = Field(None, description="The text of each token as well.")


class DetokenizeBody(RequestBody):
    """POST /detokenize."""

    model: str | None = Field(None, max_length=512, description="Whose tokenizer; null: the first.")
    tokens: list[Any] = Field(
        max_length=10_000_000,
        description="Each inside the model's vocabulary.",
        json_schema_extra={"items": _TOKENS["items"]},
    )
    skip_special_tokens: bool | None = Field(
        None, description="Leave out special tokens, which the text of answers does not show."
    )


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str = Field(description="One sentence: field, value, limit and remedy.")
    type: str = Field(description="The kind of error, in OpenAI's words.")
    param: str | None = Field(description="The field at fault.")
    code: str | None = Field(description="The reason, for programs.")


class ErrorBody(BaseModel):
    """The body of every answer that is not a success."""

    error: ErrorDetail
