"""The strict checker: judges the complete record of one response, and forgives nothing.

`judge(capture, expectation)` is pure. A broken stream is never a success: a missing `[DONE]`, a
lost or repeated token, a usage that differs from the tokens counted, half a character, a second
finish reason — each is a fault with its kind and the place, and one fault fails the request.
"""

from loadgen.checker.http import judge_http
from loadgen.checker.verdict import (
    AnswerChoice,
    Expectation,
    Fault,
    FaultKind,
    Outcome,
    Verdict,
    Write,
)

__all__ = [
    "AnswerChoice",
    "Expectation",
    "Fault",
    "FaultKind",
    "Outcome",
    "Verdict",
    "Write",
    "judge_http",
]
