"""The gRPC SDK: generate text on a Quadriga service; needs neither torch nor Ray.

    from quadriga.client import Client

    with Client("127.0.0.1:9000", api_key=key) as client:
        print(client.generate("Sort: 7 3 9 1\\n", max_tokens=32).text)
        for piece in client.stream("Sort: 7 3 9 1\\n", max_tokens=32):
            print(piece.text, end="")

Errors are those of `quadriga.errors`.
"""

from quadriga.client.aio import AsyncClient
from quadriga.client.results import (
    Choice,
    Completion,
    DepthSpan,
    Embeddings,
    Eta,
    Message,
    Model,
    Piece,
    PredictedTokens,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from quadriga.client.retries import RetryPolicy
from quadriga.client.sync import Client

__all__ = [
    "AsyncClient",
    "Choice",
    "Client",
    "Completion",
    "DepthSpan",
    "Embeddings",
    "Eta",
    "Message",
    "Model",
    "Piece",
    "PredictedTokens",
    "RetryPolicy",
    "ToolCall",
    "ToolCallDelta",
    "Usage",
]
