"""From a request to its expectation, verdict and score."""

from __future__ import annotations

from loadgen.checker import Expectation, Outcome, Verdict, judge_http
from loadgen.load.workload import RequestSpec
from loadgen.runner import Record
from loadgen.target import Target
from loadgen.wire.capture import Capture, Transport


def expectation(spec: RequestSpec, target: Target, request_id: str) -> Expectation:
    """Return what a request entitles to."""
    return Expectation(
        endpoint=spec.endpoint,
        stream=spec.stream,
        max_tokens=spec.max_tokens,
        model=target.expected_model,
        num_choices=spec.num_choices,
        prompt_tokens=spec.prompt_tokens,
        ignore_eos=spec.ignore_eos,
        request_id=request_id if target.is_ours else None,
    )


class Judgement:
    """The runner's judge for one target."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def __call__(self, capture: Capture, spec: RequestSpec, request_id: str) -> Verdict:
        expect = expectation(spec, self.target, request_id)
        if capture.transport is Transport.GRPC:
            from loadgen.checker.grpc import judge_grpc

            return judge_grpc(capture, expect)
        return judge_http(capture, expect)


def score(records: list[Record]) -> None:
    """Fill in whether each answer is right; a failed or refused request gets no score.

    A task answer is judged by the task's own checker, any other by equality; of several choices
    the first counts.
    """
    for record in records:
        spec, verdict = record.spec, record.verdict
        if verdict.outcome is not Outcome.OK:
            continue
        text = verdict.choices[0].text.strip()
        if spec.task is not None and isinstance(spec.prompt, str):
            from quadriga.tasks import check

            record.score = check(spec.task, spec.prompt, text)
        elif spec.answer is not None:
            record.score = text == spec.answer.strip()
