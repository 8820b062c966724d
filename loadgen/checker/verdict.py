"""What is expected of a response, and what was found."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

MAX_FAULTS = 20  # kept per request; the first ones tell the story
MAX_DETAIL_CHARS = 300
DIGEST_CHARS = 16


class Outcome(StrEnum):
    """How a request ended. Refused (429) is neither a success nor a failure."""

    OK = "ok"
    REFUSED = "refused"
    FAILED = "failed"


class FaultKind(StrEnum):
    """What can be wrong with a response."""

    CONNECTION = "connection"  # refused, reset, closed early
    TIMEOUT = "timeout"  # not complete within the client's limit
    STATUS = "status"  # an error status, other than a refusal
    ERROR_FORMAT = "error_format"  # an error that is not in the documented form
    ERROR_FRAME = "error_frame"  # an error inside a stream
    HEADERS = "headers"  # content type, request id
    FRAMING = "framing"  # HTTP chunks or SSE frames malformed
    UTF8 = "utf8"  # not UTF-8, or half a character
    JSON = "json"  # payload is not the JSON it must be
    OBJECT = "object"  # wrong `object`, or fields missing or of wrong type
    IDENTITY = "identity"  # id, created or model changed, or is not what was asked
    CHOICE = "choice"  # index out of range, choices lacking
    ORDER = "order"  # role or usage frame at a wrong place
    GAP = "gap"  # tokens missing
    DUPLICATE = "duplicate"  # tokens delivered twice
    AFTER_FINISH = "after_finish"  # text or tokens after the finish reason
    FINISH_REASON = "finish_reason"  # missing, repeated, unknown, or contradicted by the length
    USAGE = "usage"  # differs from what was counted
    LENGTH = "length"  # not as many tokens as asked for
    DONE = "done"  # [DONE] missing, repeated or not last
    UNCOUNTED = "uncounted"  # nothing in the response to count tokens by
    TEXT = "text"  # text differs from its own token ids
    ANSWER = "answer"  # another answer than in the run that it was compared with


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing wrong, and where."""

    kind: FaultKind
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a request entitles to.

    Attributes:
        model: As asked for; None accepts any (an alias that lets the service choose).
        prompt_tokens: Exact, where known.
        max_tokens: Most output tokens per choice; exact with `ignore_eos`.
        request_id: What must be echoed; None: by another service, whose first delta may be a role.
    """

    endpoint: Literal["completions", "chat"]
    stream: bool
    max_tokens: int
    model: str | None = None
    num_choices: int = 1
    prompt_tokens: int | None = None
    ignore_eos: bool = False
    request_id: str | None = None


@dataclass(frozen=True, slots=True)
class Write:
    """Tokens that arrived together.

    Attributes:
        time_s: When, on the run's clock.
        num_tokens: How many.
    """

    time_s: float
    num_tokens: int


@dataclass(slots=True)
class AnswerChoice:
    """What one choice brought.

    Attributes:
        token_ids: As far as the service reports them.
        num_tokens: Counted: from token ids, else from the continuous usage.
        calls: Names and arguments of the functions it calls, one after the other.
    """

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    num_tokens: int = 0
    finish_reason: str | None = None
    has_role: bool = False
    calls: str = ""

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def digest(self) -> str:
        """What stands for the answer in a results file: of its text, and of how it ended."""
        content = f"{self.finish_reason}\n{self.text}{self.calls}"
        return hashlib.sha256(content.encode(errors="surrogatepass")).hexdigest()[:DIGEST_CHARS]


@dataclass(slots=True)
class Verdict:
    """The judgement of one response.

    Attributes:
        status: HTTP status, or gRPC status name.
        retry_after_s: From a refusal.
        cached_tokens: Of the prompts, that were not computed, as the service says.
        counted_by: What the output tokens were counted by; None when nothing allowed it.
        extension: The service's own `quadriga` object of the final usage.
    """

    outcome: Outcome = Outcome.OK
    faults: list[Fault] = field(default_factory=list)
    num_faults: int = 0
    status: int | str = 0
    retry_after_s: float | None = None
    response_id: str | None = None
    model: str | None = None
    choices: list[AnswerChoice] = field(default_factory=list)
    prompt_tokens: int | None = None
    cached_tokens: int = 0
    completion_tokens: int | None = None
    counted_by: Literal["token_ids", "usage"] | None = None
    extension: dict[str, Any] | None = None

    def add(self, kind: FaultKind, detail: str) -> None:
        """Record a fault; the request has failed."""
        self.outcome = Outcome.FAILED
        self.num_faults += 1
        if len(self.faults) < MAX_FAULTS:
            # A lone surrogate of what the service said could be neither printed nor written.
            shown = detail[:MAX_DETAIL_CHARS].encode(errors="backslashreplace").decode()
            self.faults.append(Fault(kind, shown))
