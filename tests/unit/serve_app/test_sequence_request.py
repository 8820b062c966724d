"""A sequence takes output in any order that a cluster can deliver them."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import replace

import pytest

from quadriga.checkpoint.exits import ExitParams
from quadriga.core.forecast import LengthPrediction
from quadriga.core.output import EngineOutput
from quadriga.core.request import FinishReason, SamplingParams, SequenceState, TokenLogprob
from quadriga.errors import Cancelled, InvariantViolation, ReplicaDied, ReplicaError
from quadriga.text import StopMatcher
from serve_app.openai.models import ServedModel
from serve_app.request import request as request_module
from serve_app.request.request import Request
from serve_app.request.resumption import MAX_KEPT_TOKENS, RequestStore
from serve_app.request.sequence_request import SequenceRequest


@pytest.fixture
def sequence(model: ServedModel) -> SequenceRequest:
    return make_choice(model)


def make_choice(model: ServedModel, *stops: str) -> SequenceRequest:
    state = SequenceState("s", "r", "quadriga-s", [5], SamplingParams(99), "i", 0.0, 1e12)
    made = SequenceRequest(0, state, model.tokenizer.detokenizer(), StopMatcher(stops))
    made.replica = "p"
    return made


def tokens(
    first: int, *ids: int, epoch: int = 0, finish: FinishReason | None = None
) -> EngineOutput:
    return EngineOutput("s", epoch, first, list(ids), [8] * len(ids), finish=finish)


def test_tokens_follow_each_other(sequence: SequenceRequest) -> None:
    assert sequence.accept("p", tokens(0, 40, 41)) == 2
    assert sequence.accept("p", tokens(2, 42)) == 1
    assert sequence.state.output_ids == [40, 41, 42]
    assert sequence.state.exit_layers == [8, 8, 8]


def test_duplicates_change_nothing(sequence: SequenceRequest) -> None:
    sequence.accept("p", tokens(0, 40, 41))
    assert sequence.accept("p", tokens(0, 40, 41)) == 0
    assert sequence.accept("p", tokens(1, 41, 42)) == 1
    assert sequence.state.output_ids == [40, 41, 42]


@pytest.mark.parametrize(
    "said",
    [
        tokens(0, 40, 99, epoch=1),
        tokens(1, 99, 42, 43, epoch=1),
        tokens(2, 99, 43, epoch=1, finish=FinishReason.LENGTH),
        tokens(0, 40, 41, epoch=1, finish=FinishReason.STOP),
        tokens(1, 99),
    ],
    ids=["told_again", "goes_on", "ends", "ends_before", "of_the_same_epoch"],
)
def test_contradicting_output_is_not_mixed_into_the_answer(
    sequence: SequenceRequest, said: EngineOutput
) -> None:
    sequence.accept("p", EngineOutput("s", 0, moved_to="d"))
    sequence.accept("p", tokens(0, 40, 41, 42))
    assert sequence.accept("d" if said.epoch else "p", said) == 0
    assert isinstance(sequence.failure, ReplicaError)
    assert sequence.failure.code == "contradicted"
    assert sequence.accept("d", tokens(3, 43, epoch=1)) == 0, "nor is its later output taken"
    assert sequence.state.output_ids == [40, 41, 42]
    assert len(sequence.pieces) == 3
    assert not sequence.done, "it can be begun anew from there"
    assert ("d" if said.epoch else "p") in sequence.owners, "where it is to be cancelled"


def test_output_that_overtook_is_compared_as_well(sequence: SequenceRequest) -> None:
    """It was kept until the tokens before it were here, and those are more than it goes on from."""
    sequence.accept("p", EngineOutput("s", 0, moved_to="d"))
    sequence.accept("d", tokens(1, 41, epoch=1))
    sequence.accept("d", tokens(2, 42, epoch=1))
    assert sequence.accept("p", tokens(0, 40, 51)) == 2
    assert sequence.failure is not None
    assert sequence.state.output_ids == [40, 51]


def test_a_gap_within_an_epoch_is_an_error(sequence: SequenceRequest) -> None:
    sequence.accept("p", tokens(0, 40))
    sequence.accept("p", tokens(2, 42))
    assert isinstance(sequence.error, InvariantViolation)
    assert "tokens 1 to 1" in sequence.error.message


def test_the_move_may_be_known_before_the_first_token(sequence: SequenceRequest) -> None:
    sequence.accept("p", EngineOutput("s", 0, moved_to="d"))
    assert sequence.owners == {"p", "d"}
    assert sequence.accept("d", tokens(1, 41, epoch=1)) == 0, "kept until token 0 is here"
    assert sequence.accept("d", tokens(1, 41, epoch=1)) == 0, "also when delivered twice"
    assert sequence.accept("p", tokens(0, 40)) == 2
    assert sequence.state.output_ids == [40, 41]
    assert (sequence.replica, sequence.next_owners) == ("d", {})


def test_a_move_that_failed_may_be_known_before_the_first_token(sequence: SequenceRequest) -> None:
    """Its source's tokens wait for those before them; it is not believed to be without a gap."""
    sequence.accept("d", tokens(1, 41, epoch=1))
    for move in ("begun", "failed"):
        sequence.accept("d", EngineOutput("s", 1, 2, moved_to="e", move=move))
    assert sequence.accept("d", tokens(2, 42, epoch=1)) == 0
    assert sequence.accept("p", tokens(0, 40)) == 3
    assert sequence.error is None and sequence.state.output_ids == [40, 41, 42]
    assert (sequence.replica, sequence.next_owners) == ("d", {})


def test_former_owners_are_ignored(sequence: SequenceRequest) -> None:
    sequence.accept("p", tokens(0, 40))
    sequence.accept("p", EngineOutput("s", 0, 1, moved_to="d"))
    sequence.accept("d", tokens(1, 41, epoch=1))
    assert sequence.accept("p", tokens(2, 99)) == 0
    sequence.accept("p", EngineOutput("s", 0, 2, error=ReplicaDied("late")))
    assert sequence.error is None
    assert sequence.state.output_ids == [40, 41]


def test_an_epoch_has_one_sender(sequence: SequenceRequest) -> None:
    """A dead replica may have taken over and sent tokens before the hand-off to another."""
    sequence.accept("p", EngineOutput("s", 0, moved_to="dead"))
    sequence.accept("p", tokens(0, 40))
    sequence.accept("dead", tokens(1, 41, epoch=1))
    sequence.accept("p", EngineOutput("s", 0, 1, moved_to="d"))
    assert sequence.accept("d", tokens(1, 51, 52, epoch=1)) == 0, "not shown"
    sequence.accept("d", EngineOutput("s", 1, 3, error=Cancelled("not wanted")))
    assert sequence.failure is sequence.error is None
    assert sequence.state.output_ids == [40, 41]
    assert sequence.lose("dead"), "begun anew from what is shown"


def test_the_ending_token_counts_and_is_not_shown(
    sequence: SequenceRequest, model: ServedModel
) -> None:
    ids = model.tokenizer.encode("ok")
    sequence.accept("p", tokens(0, *ids, 0, finish=FinishReason.STOP))
    assert sequence.finish is FinishReason.STOP
    assert "".join(sequence.pieces) + sequence.tail == "ok"
    assert len(sequence.state.output_ids) == len(ids) + 1


def test_a_length_finish_shows_the_last_token(
    sequence: SequenceRequest, model: ServedModel
) -> None:
    ids = model.tokenizer.encode("ok")
    sequence.accept("p", tokens(0, *ids, finish=FinishReason.LENGTH))
    assert "".join(sequence.pieces) + sequence.tail == "ok"


def test_a_stop_string_ends_before_the_replica_does(model: ServedModel) -> None:
    sequence = make_choice(model, "lo w")
    ids = model.tokenizer.encode("hello world")
    num_new = sequence.accept("p", tokens(0, *ids))
    assert "".join(sequence.pieces) == "hel"
    assert sequence.finish is FinishReason.STOP
    assert num_new == len(sequence.state.output_ids) < len(ids)


def test_a_stop_string_within_min_tokens_is_text(model: ServedModel) -> None:
    ids = model.tokenizer.encode("hello world")
    for least, shown in ((0, "hel"), (len(ids), "hello world")):
        sampling = SamplingParams(99, min_tokens=least)
        request = Request("r", "m", [[5]], ["x"], 1, sampling, ("lo w",), False, 0, 0.0, 1e12)
        request.make_sequences(model.tokenizer, "i", "m")
        (sequence,) = request.sequences
        sequence.accept("p", tokens(0, *ids, finish=FinishReason.LENGTH))
        assert "".join(sequence.pieces) + sequence.tail == shown


def test_held_back_text_comes_with_the_end(model: ServedModel) -> None:
    sequence = make_choice(model, "never")
    ids = model.tokenizer.encode("one nev")
    sequence.accept("p", tokens(0, *ids, finish=FinishReason.LENGTH))
    assert "".join(sequence.pieces) + sequence.tail == "one nev"
    assert sequence.tail


def request_of(sequence: SequenceRequest) -> Request:
    sampling = sequence.state.sampling
    request = Request("r", "quadriga-s", [[5]], ["x"], 1, sampling, (), False, 0, 0.0, 1e12)
    request.sequences.append(sequence)
    return request


async def test_readers_are_independent_and_coalesce(sequence: SequenceRequest) -> None:
    request = request_of(sequence)
    quick, slow = request.reader(), request.reader()
    for i in range(5):
        sequence.accept("p", tokens(i, 40 + i))
        (delta,) = await quick.read()
        assert (delta.first_index, delta.token_ids) == (i, [40 + i])
    (delta,) = await slow.read()
    assert delta.token_ids == [40, 41, 42, 43, 44]
    late = request.reader([3])
    assert (await late.read())[0].token_ids == [43, 44]
    others = [request.reader() for _ in range(16)]
    assert list(request.readers) == [quick, slow, late, *others], "they wake in this order"


async def test_few_log_probabilities_are_read_at_once(sequence: SequenceRequest) -> None:
    sequence.accept("p", tokens(0, *[40] * 300, finish=FinishReason.LENGTH))
    sequence.state.logprobs = [TokenLogprob(40, -1.0)] * 300
    reader = request_of(sequence).reader()
    read = [(await reader.read())[0] for _ in range(2)]
    assert [(len(d.token_ids), d.finish) for d in read] == [(256, None), (44, FinishReason.LENGTH)]


async def test_a_waiting_reader_wakes(sequence: SequenceRequest) -> None:
    request = request_of(sequence)
    reader = request.reader()
    waiting = asyncio.ensure_future(reader.read())
    await asyncio.sleep(0)
    sequence.accept("p", tokens(0, 40, finish=FinishReason.LENGTH))
    request.wake()
    (delta,) = await waiting
    assert delta.finish is FinishReason.LENGTH
    assert await reader.read() == []


async def test_tokens_come_before_the_error(sequence: SequenceRequest) -> None:
    request = request_of(sequence)
    reader = request.reader()
    sequence.accept("p", tokens(0, 40))
    request.fail(ReplicaDied("gone"))
    assert (await reader.read())[0].token_ids == [40]
    with pytest.raises(ReplicaDied):
        await reader.read()


async def test_a_waiting_reader_ends_when_its_client_hangs_up(sequence: SequenceRequest) -> None:
    request = request_of(sequence)
    reader = request.reader()
    waiting = asyncio.ensure_future(reader.read())
    await asyncio.sleep(0)
    reader.hang_up()
    with pytest.raises(Cancelled):
        await waiting


class SlowTime:
    """Goes on by 4 ms whenever it is asked."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        self.now_s += 0.004
        return self.now_s


@pytest.fixture
def paced(sequence: SequenceRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Request, SlowTime]:
    """A request that asks for gaps of 20 ms."""
    clock = SlowTime()
    monkeypatch.setattr(request_module, "time", clock)
    request = request_of(sequence)
    request.exits = ExitParams(1.0, "lossless", 0, 0.02)
    return request, clock


async def test_where_short_gaps_are_asked_for_tokens_are_read_one_by_one(
    model: ServedModel, sequence: SequenceRequest, paced: tuple[Request, SlowTime]
) -> None:
    request, clock = paced
    request.sequences.append(make_choice(model))  # it has no tokens yet
    reader = request.reader()
    sequence.accept("p", tokens(0, 40))
    assert [d.token_ids for d in await reader.read()] == [[40]]
    clock.now_s += 0.05
    sequence.accept("p", tokens(1, 41, 42, 43))
    began_s = clock.now_s
    for token_id in (41, 42, 43):
        assert [d.token_ids for d in await reader.read()] == [[token_id]]
    assert clock.now_s - began_s > 0.03, "the second and the third wait for their turn"
    sequence.accept("p", tokens(4, 44, 45, 46))
    assert [d.token_ids for d in await reader.read()] == [[44]]
    sequence.accept("p", tokens(7, 47, finish=FinishReason.LENGTH))
    (last,) = await reader.read()
    assert last.token_ids == [45, 46, 47] and last.finish is FinishReason.LENGTH
    clock.now_s += 1.0
    began_s, waiting = clock.now_s, asyncio.ensure_future(reader.read())
    for _ in range(50):
        await asyncio.sleep(0)
    assert clock.now_s - began_s < 0.02, "the reader sleeps until the other choice has tokens"
    waiting.cancel()


async def test_what_was_held_comes_before_an_error(
    sequence: SequenceRequest, paced: tuple[Request, SlowTime]
) -> None:
    request, clock = paced
    reader = request.reader()
    sequence.accept("p", tokens(0, 40))
    await reader.read()
    clock.now_s += 0.05
    sequence.accept("p", tokens(1, 41, 42, 43))
    assert (await reader.read())[0].token_ids == [41]
    request.fail(ReplicaDied("gone"))
    assert (await reader.read())[0].token_ids == [42, 43]
    with pytest.raises(ReplicaDied):
        await reader.read()


def kept(name: str, prompt: list[int], *, is_over: bool = True) -> Request:
    sampling = SamplingParams(max_tokens=0)
    request = Request(name, "m", [prompt], [""], 1, sampling, (), True, 0, 0.0, 1e12)
    request.key = ("anyone", name)
    if is_over:
        request.end(1.0)
    return request


def test_what_is_kept_for_a_resumption_is_bounded_by_its_tokens(sequence: SequenceRequest) -> None:
    """Requests that generate nothing cost nothing, but their prompts would fill the memory."""
    store = RequestStore(keep_s=30.0)
    prompt = [1] * 1_000_000
    runs = kept("runs", prompt, is_over=False)
    store.add(runs)
    for i in range(20):
        store.add(kept(f"r{i}", prompt))
    read = store.get(("anyone", "r0"))
    assert read is not None
    reader = read.reader()
    assert store.expire(2.0) == []
    assert len(store) == 2 + MAX_KEPT_TOKENS // len(prompt)
    left = [i for i in range(20) if store.get(("anyone", f"r{i}")) is not None]
    assert left == [0, *range(4, 20)], "the oldest went; not what is being read, or runs"
    assert store.get(("anyone", "runs")) is runs
    reader.close()
    store.expire(2.0)
    assert store.get(("anyone", "r0")) is None
    sequence.embedding = array("f", [0.5] * 4096)
    asked = request_of(sequence)
    asked.end(1.0)
    assert asked.num_kept_tokens == 1 + 512, "an embedding counts as tokens"


def test_what_became_of_a_sequence_goes_on_where_it_is_begun_anew(
    sequence: SequenceRequest,
) -> None:
    """It moved and was paused, was begun anew elsewhere, and was paused there again."""
    there = replace(sequence.state, num_moves=1, num_pauses=2, num_breaches=3, num_lowered=2)
    there.prediction, there.predicted_at = LengthPrediction(19.0, 9.0, 39.0), 1
    there.depth_pool, there.expected_layers = "deep", 5.5
    sequence.accept("p", replace(tokens(0, 40, 41), progress=there.progress()))
    assert sequence.state.progress() == there.progress()
    assert sequence.state.expected == LengthPrediction(20.0, 10.0, 40.0)
    sequence.rename()
    there = replace(sequence.state, num_pauses=sequence.state.num_pauses + 1, num_lowered=3)
    there.prediction, there.predicted_at = LengthPrediction(9.0, 9.0, 9.0), 3
    again = tokens(2, 42, epoch=1, finish=FinishReason.LENGTH)
    again.sequence_id = sequence.state.sequence_id
    sequence.accept("d", replace(again, progress=there.progress()))
    now = sequence.state
    assert (now.num_moves, now.num_pauses, now.num_breaches, now.num_lowered) == (1, 3, 3, 3)
    assert (now.depth_pool, now.expected_layers) == ("deep", 5.5)
    assert now.expected == LengthPrediction(20.0, 10.0, 40.0), "as it was said at first"


def test_seconds_to_go_follow_the_prediction_and_the_pace(sequence: SequenceRequest) -> None:
    sequence.accept("p", tokens(0, 40))
    assert sequence.eta is None, "nothing is predicted"
    there = replace(sequence.state, prediction=LengthPrediction(20.0, 10.0, 40.0), predicted_at=1)
    sequence.accept("p", replace(tokens(1, 41, 42), progress=there.progress()))
    assert sequence.eta is None, "nobody has noted when its tokens came"
    sequence.first_token_s, sequence.last_token_s = 10.0, 10.5
    assert sequence.eta is not None
    assert sequence.eta.plain() == {
        "tokens": 18.0,
        "lower": 8.0,
        "upper": 38.0,
        "seconds": 4.5,
        "upper_seconds": 9.5,
    }
    sequence.num_at_first = 2  # it was adopted with two
    assert sequence.eta.token_s == 0.5
    sequence.accept("p", tokens(3, 43, finish=FinishReason.LENGTH))
    assert sequence.eta is None


def test_a_place_that_is_kept_before_the_prompt_is_done_is_no_move(
    sequence: SequenceRequest,
) -> None:
    for owners, first_s, status in (({"d": 1}, None, "prefilling"), ({"d": 1}, 1.0, "moving")):
        sequence.next_owners, sequence.first_token_s = owners, first_s
        assert sequence.status == status
    sequence.next_owners = {}
    assert sequence.status == "running"
