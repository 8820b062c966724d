"""Layers that coming tokens will run, expected by position, prompt and past exits."""

from __future__ import annotations

import random

import pytest

from quadriga.checkpoint.exits import ExitParams
from quadriga.core.request import SamplingParams, SequenceState
from quadriga.policies.ares.expected_depth import KEPT_TOKENS, ExpectedDepth
from tests.sequences import make_sequence

EXITS = ExitParams(0.9, "bounded")
DEPTH = 8


def sequence(name: str, prompt: list[int], exits: ExitParams = EXITS) -> SequenceState:
    return make_sequence(
        name, prompt, SamplingParams(10_000), exits=exits, output_ids=[1], exit_layers=[DEPTH]
    )


def grow(state: SequenceState, layers: list[int]) -> None:
    state.output_ids += [1] * len(layers)
    state.exit_layers += layers


def teach(depths: ExpectedDepth, prompt: list[int], layers: list[int], times: int) -> None:
    """Let answers with such exits begin, be looked at on the way, and end."""
    for index in range(times):
        state = sequence(f"taught-{prompt[0]}-{index}", prompt)
        depths.look([state], [10.0])
        for start in range(0, len(layers), 20):
            grow(state, layers[start : start + 20])
            depths.look([state], [10.0])
    depths.look([], [])


def one(depths: ExpectedDepth, state: SequenceState, remaining: float = 50.0) -> float:
    return depths.look([state], [remaining])[0]


def test_before_anything_left_a_token_is_taken_to_run_all_layers() -> None:
    assert one(ExpectedDepth(DEPTH), sequence("a", [5, 6])) == DEPTH


def test_whose_tokens_may_not_leave_early_run_all_that_they_may() -> None:
    depths = ExpectedDepth(DEPTH)
    teach(depths, [5], [2] * 60, 5)
    asked = [
        ExitParams(),
        ExitParams(1.0, "lossless"),
        ExitParams(1.0, "bounded", 4),
        ExitParams(0.9, "bounded", 2),
    ]
    states = [sequence(f"s{i}", [5], exits) for i, exits in enumerate(asked)]
    assert depths.look(states, [50.0] * 4) == [8.0, 8.0, 4.0, pytest.approx(2.0, abs=0.1)]


def test_the_position_tells() -> None:
    """Beginnings leave early, and what comes after them does not."""
    depths = ExpectedDepth(DEPTH)
    teach(depths, [5], [2] * 30 + [8] * 90, 30)
    assert one(depths, sequence("a", [5]), 20.0) == pytest.approx(2.0, abs=0.7)
    assert one(depths, sequence("b", [5]), 400.0) > 7.0


def test_the_prompt_tells() -> None:
    """Two tasks that are told apart by one token, whatever else the prompts hold."""
    depths, rng = ExpectedDepth(DEPTH), random.Random(3)
    for index in range(200):
        task = index % 2
        teach(depths, [task, *rng.sample(range(10, 400), 6)], [2 if task else 8] * 40, 1)
    easy = one(depths, sequence("easy", [1, *rng.sample(range(10, 400), 6)]))
    hard = one(depths, sequence("hard", [0, *rng.sample(range(10, 400), 6)]))
    assert easy < 4.5 and hard > 5.5
    assert hard - easy > 1.5


def test_its_own_past_tells_and_the_recent_past_more() -> None:
    depths = ExpectedDepth(DEPTH)
    teach(depths, [5], [8] * 300, 20)
    state = sequence("other", [5])
    said = [one(depths, state)]
    for _ in range(6):
        grow(state, [2] * 20)
        said.append(one(depths, state))
    assert said[0] > 7.5 > said[1] > said[3] > said[-1], "the longer it goes on, the surer"
    assert said[-1] < 4.0
    for _ in range(6):
        grow(state, [8] * 20)
        changed = one(depths, state)
    assert changed > 7.0, f"the last {KEPT_TOKENS:g} tokens count"


def test_a_sequence_that_came_from_elsewhere_brings_its_past() -> None:
    """Its exits travel with it, so that another replica need not begin anew."""
    here = ExpectedDepth(DEPTH)
    teach(here, [5], [8] * 60, 20)
    state = sequence("moved", [5])
    grow(state, [2] * 100)
    assert one(here, state) < 5.5


def test_answers_of_mixed_depth_are_forecast_without_bias() -> None:
    """Each answer has a depth of its own: what is said half way is what comes, on average."""
    depths, rng = ExpectedDepth(DEPTH), random.Random(7)
    said: list[tuple[float, float]] = []
    for index in range(400):
        sure = rng.random()
        state = sequence(f"s{index}", [rng.randrange(50) for _ in range(5)])
        depths.look([state], [60.0])
        layers = [2 if rng.random() < sure else 8 for _ in range(80)]
        grow(state, layers[:30])
        expected = one(depths, state)
        grow(state, layers[30:])
        one(depths, state)
        if index >= 100:
            said.append((expected, sum(layers[30:]) / 50))
    said.sort()
    for tenth in range(10):
        part = said[tenth * 30 : (tenth + 1) * 30]
        forecast, actual = (sum(values) / len(part) for values in zip(*part, strict=True))
        assert forecast == pytest.approx(actual, abs=0.9)
    assert said[-1][0] - said[0][0] > 3.0, "it tells them apart"


def test_a_change_of_depth_keeps_what_was_learned() -> None:
    depths = ExpectedDepth(DEPTH)
    teach(depths, [5], [2] * 60, 20)
    depths.depth = 4
    assert one(depths, sequence("a", [5])) == pytest.approx(2.0, abs=0.2)
    teach(depths, [6], [8] * 60, 60)
    assert one(depths, sequence("b", [6])) == 4.0, "no more than is loaded"


def test_very_many_tokens_at_once_teach_no_more_than_they_say() -> None:
    depths, state = ExpectedDepth(DEPTH), sequence("long", [6])
    teach(depths, [5], [8] * 60, 200)
    grow(state, [2] * 20_000)
    one(depths, state)
    assert one(depths, sequence("other", [7]), 200_000.0) == pytest.approx(2.0, abs=0.3)


def test_forecasts_are_kept_beside_what_came_by_the_tenth_that_was_expected() -> None:
    """Of tokens that came after a forecast; those that may not leave early are not looked at."""
    depths = ExpectedDepth(DEPTH)
    whole = sequence("whole", [7], ExitParams())
    depths.look([whole], [10.0])
    grow(whole, [DEPTH] * 5)
    depths.look([whole], [10.0])
    assert depths.by_tenth == {} and whole.expected_layers == 0.0
    state = sequence("a", [5])
    assert one(depths, state) == state.expected_layers == DEPTH
    grow(state, [2] * 10)
    then = one(depths, state)
    assert then < DEPTH and state.expected_layers == DEPTH, "as said when it began"
    grow(state, [2] * 4)
    one(depths, state)
    first = depths.by_tenth.pop("1.0")
    assert (first.tokens, first.expected, first.run) == (10, 80.0, 20.0)
    ((tenth, second),) = depths.by_tenth.items()
    assert float(tenth) - 0.1 < then / DEPTH <= float(tenth)
    assert (second.tokens, second.run) == (4, 8.0)
    assert second.expected == pytest.approx(4 * then)
