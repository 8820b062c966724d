"""Typed access to the JSON of a response: what is missing or of a wrong type becomes a fault."""

from __future__ import annotations

import json
from typing import Any, TypeGuard

from loadgen.checker.verdict import FaultKind, Verdict

FINISH_REASONS = ("stop", "length")


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


_decode = json.JSONDecoder(parse_constant=_refuse_constant).decode


def load_object(payload: bytes, where: str, verdict: Verdict) -> dict[str, Any] | None:
    """Parse a JSON object from strict UTF-8."""
    try:
        text = payload.decode("utf-8")
    except UnicodeDecodeError as exc:
        verdict.add(FaultKind.UTF8, f"{where}: {exc}")
        return None
    try:
        value = _decode(text)
    except ValueError as exc:
        verdict.add(FaultKind.JSON, f"{where}: {exc}: {text[:100]!r}")
        return None
    if not isinstance(value, dict):
        verdict.add(FaultKind.JSON, f"{where}: must be an object, is {text[:100]!r}")
        return None
    return value


def check_text(text: str, where: str, verdict: Verdict) -> None:
    """A lone surrogate is half a character that came in through a JSON escape."""
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            verdict.add(FaultKind.UTF8, f"{where}: lone surrogate in {text!r:.80}")


def check_error(error: Any, where: str, verdict: Verdict) -> str:
    """Check an OpenAI error object; return it in short."""
    if not isinstance(error, dict) or not isinstance(error.get("message"), str):
        verdict.add(FaultKind.ERROR_FORMAT, f"{where}: {error!r:.200} has no message")
        return repr(error)[:200]
    if missing := [name for name in ("type", "param", "code") if name not in error]:
        verdict.add(FaultKind.ERROR_FORMAT, f"{where}: error lacks {', '.join(missing)}")
    return f"{error.get('code')}: {error['message']}"


def is_count(value: Any) -> TypeGuard[int]:
    """A whole number of 0 or more; true is not a number."""
    return type(value) is int and value >= 0


def read_usage(usage: Any, where: str, verdict: Verdict) -> tuple[int, int] | None:
    """Return (prompt tokens, completion tokens) of a usage object that adds up."""
    if not isinstance(usage, dict):
        verdict.add(FaultKind.USAGE, f"{where}: usage is {usage!r:.100}")
        return None
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    prompt, completion, total = (usage.get(name) for name in names)
    if not (is_count(prompt) and is_count(completion) and is_count(total)):
        verdict.add(FaultKind.USAGE, f"{where}: usage is {usage!r:.200}")
        return None
    if prompt + completion != total:
        verdict.add(
            FaultKind.USAGE, f"{where}: {prompt} + {completion} is not total_tokens {total}"
        )
    details = usage.get("prompt_tokens_details")
    if details is not None:
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        if is_count(cached) and cached <= prompt:
            verdict.cached_tokens = cached
        else:
            verdict.add(FaultKind.USAGE, f"{where}: {cached!r:.50} of {prompt} tokens cached")
    return prompt, completion


def read_token_ids(value: Any, where: str, verdict: Verdict) -> list[int]:
    """Return a list of token ids; anything else is a fault and no tokens."""
    if isinstance(value, list) and all(is_count(token) for token in value):
        return value
    verdict.add(FaultKind.OBJECT, f"{where}: token_ids is {value!r:.100}")
    return []
