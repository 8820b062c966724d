"""What to ask a fresh service: in its banner, the demonstration, the documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quadriga.checkpoint.folder import bundled_models
from quadriga.checkpoint.packaged_models import PACKAGED_MODELS


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """A streamed request that shows what a model can do.

    Attributes:
        text: The question; of a completion, what is to be gone on with.
        is_chat: Asked as a conversation. A model of which nothing is known may have no chat
            template, and is given a text to go on with.
    """

    text: str
    is_chat: bool = True

    @property
    def path(self) -> str:
        """Of the HTTP API."""
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    def body(self, model: str) -> dict[str, Any]:
        """The JSON body for HTTP."""
        field = "messages" if self.is_chat else "prompt"
        return {"model": model, "stream": True, field: self.prompt}

    @property
    def prompt(self) -> str | list[dict[str, str]]:
        """What the SDK takes."""
        return [{"role": "user", "content": self.text}] if self.is_chat else self.text


@dataclass(frozen=True, slots=True)
class Samples:
    """A request for each of HTTP and gRPC."""

    http: SampleRequest
    grpc: SampleRequest


ENGLISH = Samples(
    SampleRequest("What is the capital of France?"), SampleRequest("Why is the sky blue?")
)
TASKS = Samples(SampleRequest("Sort: 42 7 19 3 88"), SampleRequest("Reverse: 5 6 7 8 9"))
"""The task that the bundled models were trained on; they do no other."""
UNKNOWN = Samples(
    SampleRequest("The capital of France is", is_chat=False),
    SampleRequest("The sky is blue because", is_chat=False),
)


def sample_requests(model: str) -> Samples:
    """What to ask the model of this name."""
    if model in bundled_models():
        return TASKS
    return ENGLISH if model in PACKAGED_MODELS else UNKNOWN
