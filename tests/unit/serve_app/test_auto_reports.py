"""Reports of requests whose model was chosen, and what their clients see of it."""

from __future__ import annotations

from typing import Any
from unittest.mock import AsyncMock

import pytest

from quadriga.core.grammar import Grammar
from quadriga.core.output import EngineOutput
from quadriga.core.replica import DepthClass
from quadriga.core.request import FinishReason, SamplingParams, SequenceState, TokenLogprob
from quadriga.core.routing import AutoReport
from quadriga.errors import ReplicaError
from quadriga.observability.metrics import parse_exposition
from quadriga.text import StopMatcher
from serve_app.grpc.messages import usage_message, whole_message
from serve_app.openai.models import ModelDirectory
from serve_app.openai.rendering import COMPLETION, usage
from serve_app.ops import auto_reports
from serve_app.ops.auto_reports import AutoReports
from serve_app.ops.metrics import IngressMetrics
from serve_app.request.request import Request
from serve_app.request.sequence_request import SequenceRequest
from serve_app.responses.body import ResponsesBody
from serve_app.responses.rendering import ResponsesFormat
from tests.fakes import FakeCluster
from tests.unit.serve_app.conftest import MODEL, MakeStand


def sequence(**sampling: Any) -> SequenceRequest:
    params = SamplingParams(max_tokens=8, **({"temperature": 0.0} | sampling))
    state = SequenceState("s", "r", "quadriga-s", [5, 6, 7], params, "i", 0.0, 9e9)
    made = SequenceRequest(0, state, MODEL.tokenizer.detokenizer(), StopMatcher(()))
    made.is_auto = True
    return made


def say(
    to: SequenceRequest, first: int, depth: int, layers: list[int], *, last: bool = False
) -> None:
    said = EngineOutput("s", 0, first, [20 + i for i in range(len(layers))], layers, depth=depth)
    said.logprobs = [TokenLogprob(token_id, -0.5) for token_id in said.token_ids]
    said.finish = FinishReason.LENGTH if last else None
    to.accept("decode", said)


def served(*, depths: tuple[int, int] = (4, 4), **sampling: Any) -> SequenceRequest:
    made = sequence(**sampling)
    made.replica, made.first_token_s, made.last_token_s = "decode", 11.0, 13.0
    say(made, 0, 8, [8])
    say(made, 1, depths[0], [2, 4, 4])
    say(made, 4, depths[1], [2], last=True)
    return made


async def sent(reports: AutoReports, cluster: FakeCluster) -> list[AutoReport]:
    await reports.send()
    return cluster.reports


async def test_a_finished_request() -> None:
    cluster = FakeCluster("quadriga-s", [1])
    reports, made = AutoReports(cluster, "i"), served()
    made.profile = "scout"
    reports.ended(made, 10.0)
    (report,) = await sent(reports, cluster)
    assert (report.kind, report.replica) == ("finished", "scout")
    assert report.depth_class == DepthClass("quadriga-s", 4), "the first token is prefill's"
    assert report.exit_tokens == {4: 3, 2: 2}
    assert (report.nll, report.scored_tokens) == (2.5, 5)
    assert (report.ttft_s, report.decode_s) == (1.0, 2.0)
    assert report.output_ids == tuple(made.state.output_ids), "the first greedy one is read again"
    assert made.state.logprobs == [], "the client did not ask for them"


@pytest.mark.parametrize(
    "sampling", [{"min_tokens": 2}, {"grammar": Grammar("regex", "a*")}, {"temperature": 1.0}]
)
async def test_what_was_forced_or_drawn_is_not_read_again(sampling: dict[str, Any]) -> None:
    cluster = FakeCluster("quadriga-s", [1])
    reports, made = AutoReports(cluster, "i"), served(**sampling)
    reports.ended(made, 10.0)
    (report,) = await sent(reports, cluster)
    assert report.kind == "finished" and not report.output_ids


async def test_what_was_served_at_two_depths_is_no_row_of_either() -> None:
    cluster = FakeCluster("quadriga-s", [1])
    reports, made = AutoReports(cluster, "i"), served(depths=(4, 8))
    reports.admitted(made, "scout")
    reports.ended(made, 10.0)
    kinds = [(r.kind, r.replica) for r in await sent(reports, cluster)]
    assert kinds == [("started", "scout"), ("lost", "scout")]


async def test_reports_without_an_answer_are_told_again_under_their_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster, told = FakeCluster("quadriga-s", [1]), []

    async def no_answer(*said: Any) -> None:
        told.append(said)
        raise ReplicaError("no answer", code="timeout")

    with monkeypatch.context() as patch:
        patch.setattr(cluster, "auto_reports", no_answer)
        patch.setattr(auto_reports, "MAX_WAITING", 2)
        reports = AutoReports(cluster, "i")
        for replica in "abc":
            reports.admitted(sequence(), replica)
            with pytest.raises(ReplicaError):
                await reports.send()
    a, b, c = (AutoReport("started", replica) for replica in "abc")
    assert told == [("i", 0, [a]), ("i", 0, [a, b]), ("i", 1, [b, c])]
    assert [await sent(reports, cluster) for _ in range(2)] == [[b, c]] * 2


def request_of(sequence: SequenceRequest) -> Request:
    sampling = SamplingParams(8)
    request = Request("r", "quadriga-s", [[5]], [""], 1, sampling, (), False, 0, 0.0, 9e9)
    request.sequences.append(sequence)
    return request


async def test_spans_in_the_usage_and_nothing_where_depths_never_change() -> None:
    made = served(depths=(4, 8))
    spans = usage(request_of(made))["quadriga"]["spans"]
    assert [(s["depth"], s["tokens"]) for s in spans] == [(8, 1), (4, 3), (8, 1)]
    plain = sequence()
    plain.is_auto = False
    say(plain, 0, 0, [8], last=True)
    counts = usage(request_of(plain))
    assert "spans" not in counts["quadriga"]


def test_an_answer_names_the_model_that_began_it() -> None:
    request, metrics = request_of(sequence()), IngressMetrics("i")
    (made,) = request.sequences
    for first, made.state.model in enumerate(("quadriga-l", "quadriga-m")):
        say(made, first, 8, [8], last=first == 1)
        metrics.count_tokens(request, made, 1, 1.0)
    formats = (COMPLETION, ResponsesFormat(ResponsesBody(input="a")))
    shown = {answer.whole(request, MODEL.tokenizer)["model"] for answer in formats}
    assert shown | {whole_message(request).model, *metrics._series} == {"quadriga-l"}
    assert '"model":"quadriga-l"' in COMPLETION._head(request)


def test_auto_is_a_choice_only_with_helios() -> None:
    assert not ModelDirectory([MODEL]).find("quadriga-auto").is_auto
    directory = ModelDirectory([MODEL], chooses=True)
    assert directory.find("quadriga-auto").is_auto and not directory.find("quadriga-s").is_auto


def test_the_usage_names_the_side_that_a_choice_ended_on() -> None:
    made = sequence()
    request = request_of(made)
    assert "depth_pools" not in usage(request)["quadriga"]
    assert list(usage_message(request).depth_pools) == []
    made.state.depth_pool = "deep"
    assert usage(request)["quadriga"]["depth_pools"] == ["deep"]
    assert list(usage_message(request).depth_pools) == ["deep"]


def test_the_usage_says_how_many_layers_a_token_were_expected() -> None:
    """Of choices that were looked at, on average; over gRPC, too."""
    request = request_of(sequence())
    assert "expected_layers" not in usage(request)["quadriga"]
    assert not usage_message(request).HasField("expected_layers")
    request.sequences += [sequence(), sequence()]
    for made, layers in zip(request.sequences, (0.0, 3.0, 4.5), strict=True):
        made.state.expected_layers = layers
    assert usage(request)["quadriga"]["expected_layers"] == 3.75
    assert usage_message(request).expected_layers == 3.75


async def test_an_ingress_that_ends_tells_what_became_of_its_requests_and_its_counts(
    make_stand: MakeStand, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand = await make_stand(config={"helios.enabled": True})
    reports = stand.engine._reports
    assert reports is not None
    reports.admitted(sequence(), "decode:1")
    stand.engine.metrics.resumed.inc(7)
    await stand.engine.close()
    assert [(r.kind, r.replica) for r in stand.cluster.reports] == [("started", "decode:1")]
    counts = parse_exposition((await stand.cluster.metrics()).decode())
    assert counts['quadriga_requests_resumed_total{replica="ingress-0"}'] == 7
    monkeypatch.setattr(stand.cluster, "push_metrics", AsyncMock(side_effect=ReplicaError("gone")))
    await stand.engine.close()  # it ends all the same
