"""Answers of POST /v1/responses, as the OpenAPI page shows them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from serve_app.openai.answers import Answer, PromptTokensDetails, QuadrigaUsage

Status = Literal["in_progress", "completed", "incomplete"]
_STATUS = "completed; incomplete: `max_output_tokens` cut it; in_progress in a stream."


class OutputText(Answer):
    """The text of a message."""

    type: Literal["output_text"] = Field(description="Always `output_text`.")
    text: str = Field(description="The text.")
    annotations: list[Any] = Field(description="Always empty.")
    logprobs: list[Any] = Field(description="Always empty.")


class MessageItem(Answer):
    """A message."""

    type: Literal["message"] = Field(description="Always `message`.")
    id: str = Field(description="Of the item.")
    status: Status = Field(description=_STATUS)
    role: Literal["assistant"] = Field(description="Always `assistant`.")
    content: list[OutputText] = Field(description="One text.")


class FunctionCallItem(Answer):
    """A call that the answer asks for."""

    type: Literal["function_call"] = Field(description="Always `function_call`.")
    id: str = Field(description="Of the item.")
    call_id: str = Field(description="By which its output names it.")
    name: str = Field(description="Of the function.")
    arguments: str = Field(description="JSON.")
    status: Status = Field(description=_STATUS)


class ReasoningTokens(Answer):
    """Of the output."""

    reasoning_tokens: int = Field(description="Always 0.")


class ResponseUsage(Answer):
    """Token counts."""

    input_tokens: int = Field(description="Of the prompt.")
    input_tokens_details: PromptTokensDetails = Field(description="Of them.")
    output_tokens: int = Field(description="Of the answer.")
    output_tokens_details: ReasoningTokens = Field(description="Of them.")
    total_tokens: int = Field(description="Both.")
    quadriga: QuadrigaUsage = Field(description="How the answer came about.")


class IncompleteDetails(Answer):
    """Why an answer is not whole."""

    reason: Literal["max_output_tokens"] = Field(description="Always `max_output_tokens`.")


class ResponsesAnswer(Answer):
    """What POST /v1/responses answers."""

    id: str = Field(description="`resp_` and the request's id.")
    object: Literal["response"] = Field(description="Always `response`.")
    created_at: int = Field(description="Arrival, Unix seconds.")
    status: Status = Field(description=_STATUS)
    error: None = Field(description="Always null: errors are answers of their own.")
    incomplete_details: IncompleteDetails | None = Field(description="With status incomplete.")
    model: str = Field(description="The model that answered.")
    output: list[MessageItem | FunctionCallItem] = Field(description="In order.")
    temperature: float = Field(description="What was used.")
    top_p: float = Field(description="What was used.")
    usage: ResponseUsage | None = Field(description="Token counts; null in a stream's beginning.")
    instructions: str | None = Field(description="Of the request.")
    max_output_tokens: int | None = Field(description="Of the request.")
    metadata: dict[str, str] = Field(description="Of the request.")
    parallel_tool_calls: bool = Field(description="Of the request.")
    previous_response_id: None = Field(description="Always null: nothing is stored.")
    store: Literal[False] = Field(description="Always false.")
    text: dict[str, Any] = Field(description="Of the request.")
    tool_choice: Any = Field(description="Of the request.")
    tools: list[dict[str, Any]] = Field(description="Of the request.")
    truncation: Literal["disabled"] = Field(description="Always `disabled`.")
