"""When lengths are asked for, what is made of the answers, and what came of them."""

from __future__ import annotations

import numpy as np
import pytest

from quadriga.core.forecast import LengthOutcome, LengthPrediction
from quadriga.core.output import EngineOutput
from quadriga.core.request import FinishReason, SamplingParams, SequenceState, remaining_of
from quadriga.scheduling.forecasts import Answer, Asking, Outcomes, believed
from tests.sequences import make_sequence


def state(name: str = "s", *, produced: int = 5, **sampling: object) -> SequenceState:
    params = {"max_tokens": 100} | sampling
    return make_sequence(name, [1, 2], SamplingParams(**params), output_ids=[7] * produced)


def predicted(at: int = 5, *, mean: float, lower: float, upper: float, **more: object) -> object:
    made = state(**more)  # type: ignore[arg-type]
    made.prediction, made.predicted_at = LengthPrediction(mean, lower, upper), at
    return remaining_of(made)


class Heads:
    """Says of every sequence that left that ten times its tokens are to come."""

    def __init__(self) -> None:
        self.left: list[SequenceState] | None = []
        self.num_asked = 0
        self.num_read = 0

    def ask(self) -> tuple[list[SequenceState], Answer] | None:
        self.num_asked += 1
        if self.left is None:
            return None
        states = list(self.left)
        counts = [10.0 * len(s.output_ids) for s in states]

        def answer() -> list[LengthPrediction]:
            self.num_read += 1
            return [LengthPrediction(n, n - 1, n + 1) for n in counts]

        return states, answer


def test_what_is_known_comes_before_what_is_predicted() -> None:
    assert remaining_of(state()) is None
    assert remaining_of(state(ignore_eos=True)) == LengthPrediction(95, 95, 95)
    assert remaining_of(state(ignore_eos=True, stop_token_ids=(3,))) is None
    # Tokens generated since then are counted off; nothing goes beyond max_tokens.
    assert predicted(at=2, mean=40, lower=10, upper=300) == LengthPrediction(37, 7, 95)
    assert predicted(at=2, mean=40, lower=10, upper=60, min_tokens=30) == LengthPrediction(
        37, 25, 57
    )
    # Who outlives what was said goes on for a little.
    assert predicted(at=0, mean=2, lower=1, upper=4) == LengthPrediction(1, 0, 1)
    assert predicted(produced=100, mean=2, lower=1, upper=4) == LengthPrediction(0, 0, 0)


def test_all_are_asked_about_together_every_so_many_tokens() -> None:
    heads = Heads()
    asking = Asking(heads, every_tokens=20)
    heads.left = states = [state("a"), state("b")]
    for step in range(1, 41):
        for each in states:
            each.output_ids.append(7)
        asking.stepped(2, 2, 2)
        assert heads.num_asked == step // 20
        assert heads.num_read == (step - 1) // 20, "the answer is read after the next pass"
    assert [s.predicted_at for s in states] == [25, 25], "the second answer is not read yet"
    assert states[0].prediction == LengthPrediction(250, 249, 251)
    assert asking.num_predictions == 2
    asking.stepped(0, 0, 2)
    assert [s.predicted_at for s in states] == [45, 45]
    assert states[0].prediction == believed(state_of(250, 25), LengthPrediction(450, 449, 451), 45)


def state_of(mean: float, at: int) -> SequenceState:
    """A sequence of which this much, give or take one, was believed then."""
    made = state()
    made.prediction, made.predicted_at = LengthPrediction(mean, mean - 1, mean + 1), at
    return made


def test_an_answer_is_averaged_with_what_was_believed() -> None:
    said = LengthPrediction(100, 50, 200)
    assert believed(state(), said, 30) == said, "the first one stands alone"
    # 120 were to come when there were 10 tokens: 100 at 30. It agrees.
    after = believed(state_of(120, 10), said, 30)
    assert after.mean == pytest.approx(100)
    assert after.lower == pytest.approx(0.6 * 99 + 0.4 * 50)
    assert after.upper == pytest.approx(0.6 * 101 + 0.4 * 200)
    # Who outlived its prediction has none left to count down.
    assert believed(state_of(5, 10), said, 30).mean == pytest.approx(40)


def test_averaging_answers_that_err_apart_errs_less() -> None:
    rng = np.random.default_rng(0)
    alone = averaged = 0.0
    for _ in range(50):
        one, total = state(produced=0), 400
        for at in range(0, 300, 20):
            wrong = max(0.0, total - at + float(rng.normal(0.0, 60.0)))
            one.prediction = believed(one, LengthPrediction(wrong, wrong, wrong), at)
            one.predicted_at = at
            alone += abs(wrong - (total - at))
            averaged += abs(one.prediction.mean - (total - at))
    assert averaged < 0.7 * alone


def test_with_exits_passes_follow_until_all_were_asked_about() -> None:
    heads = Heads()
    asking = Asking(heads, every_tokens=4)
    groups = [[state("a"), state("b"), state("c")], [state("d")]]
    for turn in range(16):
        heads.left = groups[turn % 2]
        asking.stepped(len(heads.left), len(heads.left), 4)
    asking.stepped(0, 0, 4)
    everybody = [s for group in groups for s in group]
    assert all(s.prediction is not None for s in everybody)
    assert heads.num_asked == 2, "one question, in the two passes that had them all"


def test_tokens_of_drafts_bring_the_next_question_sooner() -> None:
    heads = Heads()
    heads.left = [state("a"), state("b")]
    asking = Asking(heads, every_tokens=20)
    for _ in range(10):
        asking.stepped(8, 2, 2)
    assert heads.num_asked == 2, "80 tokens of two sequences, 20 of each"


def test_a_pass_without_a_head_asks_nothing() -> None:
    heads = Heads()
    heads.left = None
    asking = Asking(heads, every_tokens=1)
    for _ in range(5):
        asking.stepped(1, 1, 1)
    assert asking.num_predictions == 0


@pytest.mark.parametrize(
    ("finish", "counts"), [(FinishReason.STOP, True), (FinishReason.LENGTH, False)]
)
def test_the_first_prediction_is_held_against_the_end(finish: FinishReason, counts: bool) -> None:
    outcomes = Outcomes()
    one = state("a", produced=1)
    first = LengthPrediction(10, 5, 20)
    one.prediction, one.predicted_at = first, 1
    outcomes.look([one])
    one.prediction, one.predicted_at = LengthPrediction(1, 1, 1), 11
    outcomes.look([one])
    outcomes.emitted([("i", EngineOutput("a", 0, 11, [7]))])
    outcomes.emitted([("i", EngineOutput("a", 0, 12, [0], finish=finish))])
    assert outcomes.take() == ([LengthOutcome(first, 12)] if counts else [])
    assert outcomes.take() == []


def test_who_moved_away_or_knew_its_length_says_nothing() -> None:
    outcomes = Outcomes()
    gone, sure = state("gone"), state("sure", ignore_eos=True)
    for each in (gone, sure):
        each.prediction = LengthPrediction(10, 5, 20)
    outcomes.look([gone, sure])
    outcomes.look([sure])
    for name in ("gone", "sure"):
        outcomes.emitted([("i", EngineOutput(name, 0, 9, [0], finish=FinishReason.STOP))])
    assert outcomes.take() == []
