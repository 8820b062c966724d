"""What is told of a request once it is over, in the log and in its trace: never its text."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from quadriga.observability import tracing
from quadriga.observability.tracing import Attributes, Span
from serve_app.request.request import Request
from serve_app.request.spec import GenerateSpec

logger = logging.getLogger("quadriga.requests")


def trace_begun(spec: GenerateSpec) -> Span | None:
    """Open a request's span, below its client's if that named one; None where nobody traces it."""
    return tracing.begin("request", spec.traceparent, spec.arrival_unix_s)


@dataclass(frozen=True, slots=True)
class RequestLogRecord:
    """A request's sizes, times and result.

    Attributes:
        api_key: The name of the key at whose expense it was; the key itself is nowhere.
        result: Finish reasons, or the code of the error it ended in.
        replicas: Who spoke for its choices last.
        ttft_s: Of the first choice that had a token; None without one.
    """

    request_id: str
    api_key: str
    model: str
    result: str
    is_error: bool
    replicas: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_rebuilds: int
    took_s: float
    ttft_s: float | None

    @classmethod
    def of(cls, session: Request, *, api_key: str, ended_s: float) -> RequestLogRecord:
        """Look at a session that has just ended."""
        choices = session.choices
        errors = (e for e in (session.error, *(c.error for c in choices)) if e is not None)
        error = next(errors, None)
        firsts = [c.first_token_s for c in choices if c.first_token_s is not None]
        finishes = {c.finish.value for c in choices if c.finish is not None}
        return cls(
            request_id=session.spec.request_id,
            api_key=api_key,
            model=choices[0].state.model if choices else session.spec.model,
            result=error.code if error is not None else "+".join(sorted(finishes)),
            is_error=error is not None,
            replicas=" ".join(sorted({c.replica for c in choices if c.replica is not None})),
            num_prompt_tokens=session.num_prompt_tokens,
            num_output_tokens=session.num_output_tokens,
            num_rebuilds=sum(c.num_rebuilds for c in choices),
            took_s=ended_s - session.arrived_s,
            ttft_s=min(firsts) - session.arrived_s if firsts else None,
        )

    def log(self) -> None:
        """Write one line."""
        logger.info("request over", extra=self._fields())

    def end_span(self, span: Span, unix_s: float) -> None:
        """Close the request's span."""
        said: Attributes = {
            f"quadriga.{key}": value for key, value in self._fields().items() if value is not None
        }
        span.end(unix_s, said, self.result if self.is_error else None)

    def _fields(self) -> dict[str, str | int | float | None]:
        return {
            "request_id": self.request_id,
            "api_key": self.api_key,
            "model": self.model,
            "result": self.result,
            "replicas": self.replicas,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_output_tokens": self.num_output_tokens,
            "num_rebuilds": self.num_rebuilds,
            "took_s": self.took_s,
            "ttft_s": self.ttft_s,
        }
