"""Judge the totals of a finished response, the same for every transport and form."""

from __future__ import annotations

from loadgen.checker.verdict import AnswerChoice, Expectation, FaultKind, Verdict


def conclude(expect: Expectation, verdict: Verdict) -> None:
    """Compare counted tokens, usage, lengths and finish reasons.

    A stream that ended in an error frame is not asked for totals: the error is the finding.
    """
    if any(fault.kind is FaultKind.ERROR_FRAME for fault in verdict.faults):
        return
    if verdict.counted_by is None:
        verdict.add(
            FaultKind.UNCOUNTED, "neither token ids nor continuous usage to count tokens by"
        )
        return
    # Without ids, the usage of several choices is one total: no telling whose the tokens are.
    by_choice = verdict.counted_by == "token_ids" or len(verdict.choices) == 1
    counted = sum(choice.num_tokens for choice in verdict.choices)
    reported = verdict.completion_tokens
    if reported is not None and reported != counted and (by_choice or counted):
        verdict.add(FaultKind.USAGE, f"completion_tokens is {reported}, {counted} were counted")
    prompt, sent = verdict.prompt_tokens, expect.prompt_tokens
    if prompt is not None and sent is not None and prompt != sent:
        verdict.add(FaultKind.USAGE, f"prompt_tokens is {prompt}, {sent} were sent")
    if by_choice:
        for index, choice in enumerate(verdict.choices):
            _check_length(index, choice, expect, verdict)
    elif expect.ignore_eos and reported is not None:
        wanted = expect.max_tokens * len(verdict.choices)
        if reported != wanted:
            verdict.add(FaultKind.LENGTH, f"{reported} tokens of all choices, {wanted} wanted")


def _check_length(index: int, choice: AnswerChoice, expect: Expectation, verdict: Verdict) -> None:
    num, limit, reason = choice.num_tokens, expect.max_tokens, choice.finish_reason
    if num > limit or (expect.ignore_eos and num != limit):
        wanted = "exactly" if expect.ignore_eos else "at most"
        verdict.add(FaultKind.LENGTH, f"choice {index}: {num} tokens, {wanted} {limit} wanted")
    if expect.ignore_eos and reason == "stop":
        verdict.add(FaultKind.FINISH_REASON, f"choice {index}: stop, though ignore_eos")
    if reason == "length" and num < limit:
        verdict.add(
            FaultKind.FINISH_REASON, f"choice {index}: length after {num} of {limit} tokens"
        )
