"""The answer of POST /v1/embeddings, and the vectors in it."""

from __future__ import annotations

import base64
import math
import sys
from array import array
from typing import Any

from quadriga.errors import InvariantViolation
from quadriga.text import TextTokenizer
from serve_app.embeddings.body import EmbeddingsBody
from serve_app.openai.rendering import AnswerFormat
from serve_app.request.request import Request


class EmbeddingsFormat(AnswerFormat):
    """The answer to one body, whole."""

    def __init__(self, body: EmbeddingsBody) -> None:
        self._is_base64 = body.encoding_format == "base64"
        self._normalizes = bool(body.normalize)

    def whole(self, request: Request, tokenizer: TextTokenizer) -> dict[str, Any]:
        """The answer, as `EmbeddingsAnswer` describes it."""
        num_tokens = request.num_prompt_tokens
        return {
            "object": "list",
            "data": [
                {
                    "object": "embedding",
                    "index": index,
                    "embedding": _base64(vector) if self._is_base64 else vector.tolist(),
                }
                for index, vector in enumerate(vectors(request, normalize=self._normalizes))
            ],
            "model": request.model,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }


def vectors(request: Request, *, normalize: bool) -> list[array[float]]:
    """The embeddings of a request that is over, float32 [hidden] each, in the inputs' order.

    Args:
        normalize: Scale each to length 1; one of zeros stays.
    """
    found = []
    for sequence in request.sequences:
        vector = sequence.embedding
        if vector is None:
            raise InvariantViolation(f"sequence {sequence.state.sequence_id} has no embedding")
        if normalize:
            length = math.sqrt(math.fsum(x * x for x in vector)) or 1.0
            vector = array("f", (x / length for x in vector))
        found.append(vector)
    return found


def _base64(vector: array[float]) -> str:
    if sys.byteorder == "big":
        vector = array("f", vector)
        vector.byteswap()
    return base64.b64encode(vector.tobytes()).decode("ascii")
