"""What the SDK takes and returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from quadriga.core.request import FinishReason, TokenLogprob

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that an answer asks to have called.

    Attributes:
        id: By which a tool's message names the call that it answers.
        arguments: JSON, as the model wrote it.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """News of one call.

    Attributes:
        index: Its place among the choice's calls.
        id, name: With its first news; then empty.
        arguments: More of the JSON.
    """

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    Attributes:
        tool_calls: Those that an assistant asked for.
        tool_call_id: Of the role tool: the call that it answers.
    """

    role: Role
    content: str
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True)
class DepthSpan:
    """Output tokens in a row that one model served at one depth.

    Attributes:
        depth: Layers of the model that were loaded.
    """

    model: str
    depth: int
    tokens: int


@dataclass(frozen=True, slots=True)
class PredictedTokens:
    """How long a choice was predicted to become when it began.

    Attributes:
        lower, upper: Quantiles of 10 % and 90 %.
    """

    choice: int
    tokens: float
    lower: float
    upper: float


@dataclass(frozen=True, slots=True)
class Eta:
    """How long a choice is predicted to go on.

    Attributes:
        tokens: Still to come.
        lower, upper: Quantiles of 10 % and 90 %.
        seconds, upper_seconds: Of `tokens` and `upper`, at the pace so far; None before the second.
    """

    tokens: float
    lower: float
    upper: float
    seconds: float | None
    upper_seconds: float | None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request.

    Attributes:
        exits: Layers run → output tokens that left there.
        rebuilds: How often a choice was begun anew after the loss of a replica.
        spans: Who served which part, in order, choice after choice; empty where the service does
            not choose models and depths.
        migrations: How often a choice moved to another replica.
        pauses: How often a choice waited in host memory.
        breaches: Tokens below their threshold at the deepest exit that was open to them.
        predicted: Of each choice whose length was predicted.
        cached_tokens: Prompt tokens whose KV was there already.
        lowered: Tokens that left below their threshold within `quality_budget`.
        depth_pools: "shallow" or "deep", where sequences of either kind run on replicas of their
            own: where the choices ended.
        expected_layers: Layers a token that the choices were expected to run when they began; None
            where their tokens could not leave early.
    """

    prompt_tokens: int
    completion_tokens: int
    exits: Mapping[int, int] = field(default_factory=dict)
    rebuilds: int = 0
    spans: tuple[DepthSpan, ...] = ()
    migrations: int = 0
    pauses: int = 0
    breaches: int = 0
    predicted: tuple[PredictedTokens, ...] = ()
    cached_tokens: int = 0
    lowered: int = 0
    depth_pools: tuple[str, ...] = ()
    expected_layers: float | None = None

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished answer.

    Attributes:
        text: Without the token or string that stopped it.
        token_ids: Every token generated, the stopping one included.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request."""

    request_id: str
    model: str
    choices: tuple[Choice, ...]
    usage: Usage

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.choices[0].text


@dataclass(frozen=True, slots=True)
class Piece:
    """News of one choice of a stream.

    Attributes:
        first_index: Output index of `token_ids[0]`.
        finish_reason: Set with the choice's last piece.
        usage: Set with the request's last piece.
        eta: With `include_eta`; None where nothing is predicted, and at the end.
    """

    request_id: str
    model: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    first_index: int
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    usage: Usage | None = None
    tool_calls: tuple[ToolCallDelta, ...] = ()
    eta: Eta | None = None


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Vectors of the inputs of one call.

    Attributes:
        model: That computed them; those of another cannot be compared with them.
        vectors: One for each input, in its order; float32 values.
        prompt_tokens: Of all inputs.
    """

    request_id: str
    model: str
    vectors: tuple[tuple[float, ...], ...]
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Model:
    """A model the service offers.

    Attributes:
        root: The model behind an alias.
        max_model_len: Most tokens of prompt plus answer.
        parent: Of a LoRA adapter: the model it changes; empty for any other.
    """

    id: str
    root: str
    max_model_len: int
    created_unix_s: int
    parent: str = ""
