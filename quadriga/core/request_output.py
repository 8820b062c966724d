"""What `quadriga.LLM` returns."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from quadriga.core.output import EngineOutput
from quadriga.core.request import FinishReason, TokenLogprob
from quadriga.errors import QuadrigaError


@dataclass(slots=True)
class RequestOutput:
    """What was generated for one prompt; in a stream, what is new of it.

    Attributes:
        index: Place of the prompt in the call.
        text: Without the token or the string that stopped it.
        token_ids: Every token generated, the stopping one included.
        exit_layers: Layers run for each of them.
        finish_reason: None while it goes on, and where it ended in an error.
        error: What the answer failed in, on its way; others are not touched.
        logprobs: Of each token, where `num_logprobs` asked for them.
        prompt_logprobs: Of the prompt's tokens, where `num_prompt_logprobs` asked for them.
        embedding: Where `pooling` asked for one: float32 [hidden].
        ttft_s: Seconds from the call of `generate` to the first token.
        cached_tokens: Prompt tokens whose KV was there already.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    exit_layers: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: QuadrigaError | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] | None = None
    embedding: array[float] | None = None
    ttft_s: float = 0.0
    cached_tokens: int = 0

    def checked(self) -> RequestOutput:
        """The output itself, for callers that want all of an answer or none. Raises: `error`."""
        if self.error is not None:
            raise self.error
        return self

    def add(self, emission: EngineOutput, text: str) -> None:
        """Take in what the loops said next."""
        self.text += text
        self.token_ids += emission.token_ids
        self.exit_layers += emission.exit_layers
        self.finish_reason, self.error = emission.finish, emission.error
        self.cached_tokens += emission.cached_tokens
        if emission.logprobs is not None:
            self.logprobs += emission.logprobs
        if emission.prompt_logprobs is not None:
            self.prompt_logprobs = emission.prompt_logprobs
        if emission.embedding is not None:
            self.embedding = emission.embedding
