"""One validated description of a generation, built alike from HTTP and from gRPC."""

from __future__ import annotations

from dataclasses import dataclass

from quadriga.checkpoint.exits import FULL_DEPTH, ExitParams
from quadriga.core.request import SamplingParams


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a request.

    Attributes:
        text: The prompt as text; decoded from the ids where the client sent ids and wants echo.
    """

    token_ids: list[int]
    text: str


@dataclass(frozen=True, slots=True)
class GenerateSpec:
    """A request that passed every check; nothing in it is "auto" or optional any more.

    Attributes:
        sampling: Shared by all choices; the choice's index tells their random keys apart.
        n: Choices per prompt; choice `k` of prompt `p` has index `p · n + k`.
        stop: Stop strings.
        echo: The answer begins with the prompt.
        ignored_fields: Fields of the request that mean nothing here.
        traceparent: The client's, where traces are written.
        is_auto: `model` is only the first choice: the cluster may take another.
    """

    request_id: str
    model: str
    prompts: tuple[Prompt, ...]
    n: int
    sampling: SamplingParams
    stop: tuple[str, ...]
    echo: bool
    priority: int
    arrival_unix_s: float
    deadline_unix_s: float
    exits: ExitParams = FULL_DEPTH
    ignored_fields: tuple[str, ...] = ()
    traceparent: str | None = None
    is_auto: bool = False
