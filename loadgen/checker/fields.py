"""Typed access to the JSON of a response: what is missing or of a wrong type becomes a fault."""

from __future__ import annotations

import json
from typing import Any, TypeGuard

from loadgen.checker.verdict import AnswerChoice, FaultKind, Verdict


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
    except (ValueError, RecursionError) as exc:
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


def read_calls(message: dict[str, Any], where: str, verdict: Verdict) -> str:
    """Return names and arguments of the calls in a message, or of news of them in a delta."""
    calls = message.get("tool_calls")
    try:
        functions = [call["function"] for call in calls or ()]
        parts = [one.get(key) or "" for one in functions for key in ("name", "arguments")]
        text = "".join(parts)
    except (AttributeError, KeyError, TypeError):
        verdict.add(FaultKind.OBJECT, f"{where}: tool_calls is {calls!r:.100}")
        return ""
    check_text(text, where, verdict)
    return text


def check_finish(choice: AnswerChoice, reason: Any, where: str, verdict: Verdict) -> None:
    """An answer ends in `tool_calls` where it has some, and nowhere else."""
    if reason not in ("stop", "length") and not (reason == "tool_calls" and choice.calls):
        verdict.add(FaultKind.FINISH_REASON, f"{where}: {reason!r:.80}")


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


def read_totals(document: dict[str, Any], where: str, verdict: Verdict) -> bool:
    """Keep the final usage of a document; False where it has no usable one."""
    usage = read_usage(document.get("usage"), where, verdict)
    if usage is None:
        return False
    verdict.prompt_tokens, verdict.completion_tokens = usage
    extension = document["usage"].get("quadriga", document.get("quadriga"))
    verdict.extension = extension if isinstance(extension, dict) else None
    return True


def read_token_ids(value: Any, where: str, verdict: Verdict) -> list[int]:
    """Return a list of token ids; anything else is a fault and no tokens."""
    if isinstance(value, list) and all(is_count(token) for token in value):
        return value
    verdict.add(FaultKind.OBJECT, f"{where}: token_ids is {value!r:.100}")
    return []
