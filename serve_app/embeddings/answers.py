"""The answer of POST /v1/embeddings, as the OpenAPI page shows it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from serve_app.openai.answers import Answer


class EmbeddingsUsage(Answer):
    """What was counted."""

    prompt_tokens: int = Field(description="Tokens of all inputs.")
    total_tokens: int = Field(description="The same.")


class EmbeddingAnswer(Answer):
    """The vector of one input."""

    object: Literal["embedding"] = Field(description="Always `embedding`.")
    index: int = Field(description="Place of the input.")
    embedding: list[float] | str = Field(
        description="The vector; with `encoding_format: base64`, base64 of little-endian float32."
    )


class EmbeddingsAnswer(Answer):
    """What POST /v1/embeddings answers."""

    object: Literal["list"] = Field(description="Always `list`.")
    data: list[EmbeddingAnswer] = Field(description="One for each input, in its order.")
    model: str = Field(description="The model that computed them.")
    usage: EmbeddingsUsage = Field(description="What was counted.")
