"""Answers of the HTTP API, as the OpenAPI page shows them.

They describe what `rendering` and the HTTP server write; a test validates real answers with them.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Answer(BaseModel):
    """Has no fields but those that are named."""

    model_config = ConfigDict(extra="forbid")


class Health(Answer):
    """GET /health."""

    status: Literal["ok"] = Field(description="Requests can be served.")
    models: list[str] = Field(description="Ids of the models served.")


class Alive(Answer):
    """GET /live."""

    status: Literal["alive"] = Field(description="The process answers.")


class Version(Answer):
    """GET /version."""

    version: str = Field(description="Of Quadriga.")


class LoadAnswer(Answer):
    """GET /load."""

    server_load: int = Field(description="Requests being answered by the ingress that was asked.")
    num_running: int | None = Field(
        description="Sequences in the batches of all replicas; null while the scheduler is away."
    )
    num_waiting: int | None = Field(description="Sequences queued at all replicas; as above.")


class ModelCard(Answer):
    """One model."""

    id: str = Field(description="What to name as `model`.")
    object: Literal["model"] = Field(description="Always `model`.")
    created: int = Field(description="When the ingress that answers was started, Unix seconds.")
    owned_by: str = Field(description="Always `quadriga`.")
    root: str = Field(description="The model behind an alias; else the same as `id`.")
    parent: str | None = Field(description="Of a LoRA adapter: the model it changes.")
    max_model_len: int = Field(description="Most tokens of prompt and answer together.")


class ModelList(Answer):
    """GET /v1/models."""

    object: Literal["list"] = Field(description="Always `list`.")
    data: list[ModelCard] = Field(description="The models, and the alias `quadriga-auto`.")


class TokenizeAnswer(Answer):
    """What POST /tokenize answers."""

    tokens: list[int] = Field(description="Token ids.")
    count: int = Field(description="How many.")
    max_model_len: int = Field(description="Most tokens of prompt and answer together.")
    token_strs: list[str] | None = Field(
        None, description="The text of each, with `return_token_strs`."
    )


class DetokenizeAnswer(Answer):
    """What POST /detokenize answers."""

    prompt: str = Field(description="The text.")


class DepthSpanAnswer(BaseModel):
    """Tokens in a row from one model at one depth."""

    model: str = Field(description="The model that was chosen.")
    depth: int = Field(description="Its layers that were loaded.")
    tokens: int = Field(description="How many.")


class PredictedTokensAnswer(Answer):
    """How long a choice was predicted to become."""

    choice: int = Field(description="Its index.")
    tokens: float = Field(description="Of the whole answer, as said when it began.")
    lower: float = Field(description="Nine in ten become longer.")
    upper: float = Field(description="Nine in ten stay shorter.")


class EtaAnswer(Answer):
    """How long a choice is predicted to go on."""

    tokens: float = Field(description="Still to come.")
    lower: float = Field(description="In nine of ten cases more.")
    upper: float = Field(description="In nine of ten cases fewer.")
    seconds: float | None = Field(None, description="To go, at the pace so far.")
    upper_seconds: float | None = Field(None, description="In nine of ten cases fewer.")


class QuadrigaUsage(BaseModel):
    """How the answer came about; more may be added."""

    exits: dict[str, int] = Field(description="Layers run to the number of tokens that left there.")
    rebuilds: int = Field(description="How often a choice was begun anew after a replica's loss.")
    migrations: int = Field(description="How often a choice moved to another replica.")
    pauses: int = Field(description="How often a choice waited in host memory.")
    breaches: int = Field(
        description="Tokens below their threshold at the deepest exit that was open to them."
    )
    lowered: int = Field(
        description="Tokens that left below their threshold within `quality_budget`."
    )
    depth_pools: list[str] | None = Field(
        None,
        description="`shallow`, `deep`: the replicas that the choices ended on, where sequences of "
        "either kind have their own.",
    )
    expected_layers: float | None = Field(
        None,
        description="Layers a token that the choices were expected to run when they began; `exits` "
        "says what came. Of tokens that may leave early.",
    )
    predicted: list[PredictedTokensAnswer] | None = Field(
        None, description="Of each choice whose length was predicted."
    )
    spans: list[DepthSpanAnswer] | None = Field(
        None, description="Where models and depths are chosen: who served which part, in order."
    )


class PromptTokensDetails(Answer):
    """Of the prompts."""

    cached_tokens: int = Field(description="Whose KV was there already: they were not computed.")


class UsageAnswer(Answer):
    """Token counts."""

    prompt_tokens: int = Field(description="Of all prompts, each counted once.")
    completion_tokens: int = Field(description="Of all choices.")
    total_tokens: int = Field(description="Both.")
    prompt_tokens_details: PromptTokensDetails = Field(description="Of the prompts.")
    quadriga: QuadrigaUsage | None = Field(
        None, description="With the final usage, not with the running one."
    )


class CompletionLogprobs(Answer):
    """Log-probabilities in the old form; lists run parallel."""

    tokens: list[str] = Field(description="Text of each token.")
    token_logprobs: list[float | None] = Field(description="Null for the first of a prompt.")
    top_logprobs: list[dict[str, float] | None] = Field(
        description="Texts of the most probable tokens, and of the token, to log-probabilities."
    )
    text_offset: list[int] = Field(description="Where each begins in the text, in characters.")


FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]
_FINISH = "stop: end token, stop token or stop string; length: `max_tokens`."
_CHAT_FINISH = f"{_FINISH[:-1]}; tool_calls: it asks for calls."
_ETA = "With `stream_options.include_eta`; null where nothing is predicted, and at the end."
_TOKEN_IDS = "The output's token ids, with `return_token_ids`."
_PROMPT_IDS = "The prompt's token ids, with `return_token_ids`; of a stream in the first chunk."
_STOP = "The stop string or stop token that ended it; null: the end token, or `max_tokens`."
StopReason = int | str | None


class CompletionChoice(Answer):
    """One continuation."""

    index: int = Field(description="Choice `k` of prompt `p` has index `p · n + k`.")
    text: str = Field(description="The continuation, after the prompt where `echo`.")
    logprobs: CompletionLogprobs | None = Field(description="With `logprobs`.")
    finish_reason: FinishReason = Field(description=_FINISH)
    stop_reason: StopReason = Field(None, description=_STOP)
    token_ids: list[int] | None = Field(None, description=_TOKEN_IDS)
    prompt_token_ids: list[int] | None = Field(None, description=_PROMPT_IDS)


class CompletionAnswer(Answer):
    """What POST /v1/completions answers."""

    id: str = Field(description="`cmpl-` and the request's id.")
    object: Literal["text_completion"] = Field(description="Always `text_completion`.")
    created: int = Field(description="Arrival, Unix seconds.")
    model: str = Field(description="The model that answered.")
    choices: list[CompletionChoice] = Field(description="In order of `index`.")
    usage: UsageAnswer = Field(description="Token counts.")


class CompletionChunkChoice(CompletionChoice):
    """News of one continuation."""

    finish_reason: FinishReason | None = Field(  # type: ignore[assignment]
        description=f"Set in the choice's last chunk. {_FINISH}"
    )
    eta: EtaAnswer | None = Field(None, description=_ETA)


class CompletionChunk(CompletionAnswer):
    """An event of a streamed completion."""

    choices: list[CompletionChunkChoice] = Field(  # type: ignore[assignment]
        description="One, or none in the chunk with the usage."
    )
    usage: UsageAnswer | None = Field(  # type: ignore[assignment]
        None, description="As `stream_options` asks for it."
    )


class TokenLogprobAnswer(Answer):
    """One token with its log-probability."""

    token: str = Field(description="Its text.")
    logprob: float | None = Field(description="Natural logarithm.")
    bytes: list[int] | None = Field(description="Its bytes, which may be part of a character.")


class ChatTokenLogprob(TokenLogprobAnswer):
    """One token of the answer, with alternatives."""

    top_logprobs: list[TokenLogprobAnswer] = Field(description="The most probable ones.")


class ChatLogprobs(Answer):
    """Log-probabilities of a chat's answer."""

    content: list[ChatTokenLogprob] = Field(description="One per token.")
    refusal: None = Field(description="Always null.")


class CalledFunction(Answer):
    """A function with its arguments."""

    name: str = Field(description="Of the function.")
    arguments: str = Field(description="JSON; the schema is kept to where a call must be made.")


class ToolCallAnswer(Answer):
    """A call that the answer asks for."""

    id: str = Field(description="By which the tool's message names it.")
    type: Literal["function"] = Field(description="Always `function`.")
    function: CalledFunction = Field(description="What to call.")


class AssistantMessage(Answer):
    """The answer of a chat."""

    role: Literal["assistant"] = Field(description="Always `assistant`.")
    content: str | None = Field(description="The text; null where there are calls alone.")
    tool_calls: list[ToolCallAnswer] | None = Field(None, description="Calls, where it asks so.")
    refusal: None = Field(description="Always null.")


class ChatChoice(Answer):
    """One answer."""

    index: int = Field(description="From 0 to `n` - 1.")
    message: AssistantMessage = Field(description="The answer.")
    logprobs: ChatLogprobs | None = Field(description="With `logprobs`.")
    finish_reason: ChatFinishReason = Field(description=_CHAT_FINISH)
    stop_reason: StopReason = Field(None, description=_STOP)
    token_ids: list[int] | None = Field(None, description=_TOKEN_IDS)


class ChatAnswer(Answer):
    """What POST /v1/chat/completions answers."""

    id: str = Field(description="`chatcmpl-` and the request's id.")
    object: Literal["chat.completion"] = Field(description="Always `chat.completion`.")
    created: int = Field(description="Arrival, Unix seconds.")
    model: str = Field(description="The model that answered.")
    choices: list[ChatChoice] = Field(description="In order of `index`.")
    prompt_token_ids: list[int] | None = Field(None, description=_PROMPT_IDS)
    usage: UsageAnswer = Field(description="Token counts.")


class CalledFunctionNews(Answer):
    """What is new of a function's call."""

    name: str | None = Field(None, description="With the first news.")
    arguments: str = Field(description="More of the JSON.")


class ToolCallChunk(Answer):
    """What is new of a call."""

    index: int = Field(description="Among the answer's calls.")
    id: str | None = Field(None, description="With the first news.")
    type: Literal["function"] | None = Field(None, description="With the first news.")
    function: CalledFunctionNews = Field(description="What is new.")


class ChatDelta(Answer):
    """What is new of a message."""

    role: Literal["assistant"] | None = Field(
        None, description="With the first text; before it where there are several choices."
    )
    content: str | None = Field(description="More text; null with news of calls alone.")
    tool_calls: list[ToolCallChunk] | None = Field(None, description="News of calls.")


class ChatChunkChoice(Answer):
    """News of one answer."""

    index: int = Field(description="From 0 to `n` - 1.")
    delta: ChatDelta = Field(description="What is new.")
    logprobs: ChatLogprobs | None = Field(description="With `logprobs`, of the new tokens.")
    finish_reason: ChatFinishReason | None = Field(
        description=f"Set in the choice's last chunk. {_CHAT_FINISH}"
    )
    stop_reason: StopReason = Field(None, description=f"With `finish_reason`. {_STOP}")
    token_ids: list[int] | None = Field(None, description=_TOKEN_IDS)
    eta: EtaAnswer | None = Field(None, description=_ETA)


class ChatChunk(Answer):
    """An event of a streamed chat."""

    id: str = Field(description="`chatcmpl-` and the request's id.")
    object: Literal["chat.completion.chunk"] = Field(description="Always `chat.completion.chunk`.")
    created: int = Field(description="Arrival, Unix seconds.")
    model: str = Field(description="The model that answers.")
    choices: list[ChatChunkChoice] = Field(description="One, or none in the chunk with the usage.")
    prompt_token_ids: list[int] | None = Field(None, description=_PROMPT_IDS)
    usage: UsageAnswer | None = Field(None, description="As `stream_options` asks for it.")
