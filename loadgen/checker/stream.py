"""Judge the frames of one HTTP stream, in order."""

from __future__ import annotations

from typing import Any

from loadgen.checker.fields import (
    check_error,
    check_finish,
    check_text,
    load_object,
    read_calls,
    read_token_ids,
    read_totals,
    read_usage,
)
from loadgen.checker.identity import read_identity
from loadgen.checker.verdict import AnswerChoice, Expectation, FaultKind, Verdict, Write
from loadgen.wire.sse import Frame

DONE = b"[DONE]"


class StreamCheck:
    """State of one stream between two frames; every deviation goes into the verdict."""

    def __init__(self, expect: Expectation, verdict: Verdict) -> None:
        self.expect = expect
        self.verdict = verdict
        self.object = "chat.completion.chunk" if expect.endpoint == "chat" else "text_completion"
        self.number = -1
        self.identity: tuple[Any, Any, Any] | None = None
        self.done = False
        self.failed = False
        self.has_ended = False  # the usage of all came
        self.counted = 0  # output tokens so far, of all choices

    def frame(self, frame: Frame) -> None:
        """Judge the next frame."""
        self.number += 1
        where = f"frame {self.number}"
        if self.done:
            self.verdict.add(FaultKind.DONE, f"{where} comes after [DONE]: {frame.payload[:80]!r}")
            return
        if self.failed:
            self.verdict.add(FaultKind.ORDER, f"{where} comes after an error frame")
            return
        if frame.payload == DONE:
            self.done = True
            return
        document = load_object(frame.payload, where, self.verdict)
        if document is None:
            return
        if "error" in document:
            self.failed = True
            shown = check_error(document["error"], where, self.verdict)
            self.verdict.add(FaultKind.ERROR_FRAME, f"{where}: {shown}")
            return
        self._chunk(document, frame.time_s, where)

    def close(self) -> None:
        """Judge what only the end can show."""
        verdict = self.verdict
        if not self.done and not self.failed:
            verdict.add(FaultKind.DONE, f"no [DONE] after {self.number + 1} frames")
        if self.failed:
            return
        for index, choice in enumerate(verdict.choices):
            if choice.finish_reason is None:
                verdict.add(FaultKind.FINISH_REASON, f"choice {index}: none")
        if not self.has_ended:
            verdict.add(FaultKind.USAGE, "no final usage frame")

    def _chunk(self, document: dict[str, Any], time_s: float, where: str) -> None:
        verdict = self.verdict
        if self.has_ended:
            verdict.add(FaultKind.ORDER, f"{where} comes after the usage frame")
        if document.get("object") != self.object:
            found = document.get("object")
            verdict.add(FaultKind.OBJECT, f"{where}: object is {found!r}, not {self.object!r}")
        identity = (document.get("id"), document.get("created"), document.get("model"))
        if self.identity is None:
            self.identity = identity
            read_identity(document, self.expect, verdict, where)
        elif identity != self.identity:
            verdict.add(FaultKind.IDENTITY, f"{where}: {identity} after {self.identity}")
        choices = document.get("choices")
        if not isinstance(choices, list):
            verdict.add(FaultKind.CHOICE, f"{where}: choices is {choices!r:.80}")
        elif choices:
            for found in choices:
                self._choice(found, document.get("usage"), time_s, where)
        elif read_totals(document, where, verdict):
            self.has_ended = True
            if any(choice.finish_reason is None for choice in verdict.choices):
                verdict.add(FaultKind.ORDER, f"{where}: usage before the last finish_reason")

    def _choice(self, found: Any, usage: Any, time_s: float, where: str) -> None:
        verdict = self.verdict
        index = found.get("index") if isinstance(found, dict) else None
        if type(index) is not int or not 0 <= index < len(verdict.choices):
            verdict.add(FaultKind.CHOICE, f"{where}: index {index!r:.40}")
            return
        choice = verdict.choices[index]
        is_ours, had_role = self.expect.request_id is not None, choice.has_role
        had_calls = choice.calls
        text = self._text(found, choice, where)
        check_text(text, where, verdict)
        num_tokens = self._count(found, usage, choice, text, where)
        if choice.finish_reason is not None:
            what = "a second finish_reason" if found.get("finish_reason") else "more"
            verdict.add(FaultKind.AFTER_FINISH, f"{where}: {what} for choice {index}: {text!r:.60}")
            return
        if text:
            choice.texts.append(text)
        if num_tokens:
            choice.num_tokens += num_tokens
            choice.writes.append(Write(time_s, num_tokens))
        reason = found.get("finish_reason")
        if reason is not None:
            check_finish(choice, reason, where, verdict)
            choice.finish_reason = str(reason)
        elif text or num_tokens != 0 or choice.calls != had_calls:
            return
        elif choice.has_role is had_role or (is_ours and len(verdict.choices) == 1):
            verdict.add(FaultKind.ORDER, f"{where}: brings neither text, tokens nor an end")

    def _text(self, found: dict[str, Any], choice: AnswerChoice, where: str) -> str:
        if self.expect.endpoint == "completions":
            text = found.get("text")
            if isinstance(text, str):
                return text
            self.verdict.add(FaultKind.OBJECT, f"{where}: text is {text!r:.80}")
            return ""
        delta = found.get("delta")
        if not isinstance(delta, dict):
            self.verdict.add(FaultKind.OBJECT, f"{where}: delta is {delta!r:.80}")
            return ""
        role = delta.get("role")
        if not choice.has_role and role != "assistant":
            self.verdict.add(FaultKind.ORDER, f"{where}: first delta has role {role!r:.40}")
        elif choice.has_role and role not in (None, "assistant"):
            self.verdict.add(FaultKind.ORDER, f"{where}: role became {role!r:.40}")
        choice.has_role = True
        choice.calls += read_calls(delta, where, self.verdict)
        text = delta.get("content")
        if text is None:
            return ""
        if not isinstance(text, str):
            self.verdict.add(FaultKind.OBJECT, f"{where}: content is {text!r:.80}")
            return ""
        return text

    def _count(
        self, found: dict[str, Any], usage: Any, choice: AnswerChoice, text: str, where: str
    ) -> int | None:
        """Tokens this chunk brings: by its ids, cross-checked with the running usage.

        None where it has neither.

        The running usage says how many tokens, of all choices, the service has sent by now: above
        our count a token is missing; not above the last one, a token came twice.
        """
        verdict = self.verdict
        ids = found.get("token_ids")
        total = self._running_total(usage, where)
        if ids is not None:
            new_ids = read_token_ids(ids, where, verdict)
            choice.token_ids += new_ids
            verdict.counted_by = "token_ids"
            self.counted += len(new_ids)
            # With several choices one write brings several chunks under one total.
            if total is not None and len(verdict.choices) == 1 and total != self.counted:
                kind = FaultKind.GAP if total > self.counted else FaultKind.DUPLICATE
                verdict.add(kind, f"{where}: usage says {total} tokens, {self.counted} arrived")
            return len(new_ids)
        if total is None:
            return None
        verdict.counted_by = verdict.counted_by or "usage"
        new = total - self.counted
        is_repeated = new == 0 and bool(text) and len(verdict.choices) == 1
        if new < 0 or (is_repeated and not found.get("finish_reason")):
            verdict.add(
                FaultKind.DUPLICATE, f"{where}: usage went from {self.counted} to {total} with text"
            )
        self.counted = max(self.counted, total)
        return max(0, new)

    def _running_total(self, usage: Any, where: str) -> int | None:
        if usage is None:
            return None
        counts = read_usage(usage, where, self.verdict)
        return counts[1] if counts is not None else None
