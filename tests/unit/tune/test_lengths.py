"""Length heads: what they learn from, what is stored, and what the engine makes of it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from quadriga.checkpoint.length_heads import (
    LENGTH_FILE,
    NUM_COUNTS,
    LengthHeadSpec,
    counts_of,
    read_length_heads,
)
from quadriga.engine.early_exit.length_head import Layers, LengthHeads, run_layers, to_tokens
from quadriga.engine.model_runner import NativeRunner
from quadriga.errors import ConfigError
from quadriga.tune import lengths
from quadriga.tune.answers import OwnAnswer
from quadriga.tune.lengths import (
    MAX_NEW_TOKENS,
    QUANTILES,
    LengthData,
    gather,
    measure,
    save_heads,
    train_head,
    train_heads,
)
from quadriga.tune.states import StateStore, run_passes
from tests.equivalence.models import make_spec
from tests.unit.tune.models import HIDDEN as MODEL_HIDDEN
from tests.unit.tune.models import LAYERS, VOCAB, save_model

HIDDEN = 12
DEPTHS = (1, 2, LAYERS)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> NativeRunner:
    folder = save_model("llama", tmp_path_factory.mktemp("model"))
    return NativeRunner.load(make_spec(folder))


@pytest.fixture(scope="module")
def data(runner: NativeRunner, tmp_path_factory: pytest.TempPathFactory) -> LengthData:
    generator = torch.Generator().manual_seed(4)

    def tokens(count: int) -> list[int]:
        found: list[int] = torch.randint(VOCAB, (count,), generator=generator).tolist()
        return found

    answers = [OwnAnswer(str(i), tokens(3 + i), tokens(8 + 3 * i), True) for i in range(16)]
    store = StateStore(tmp_path_factory.mktemp("states"), MODEL_HIDDEN, DEPTHS, top=0)
    store.fill(runner, answers, lambda _: None)
    return gather(store, answers)


def said(head: Layers, inputs: torch.Tensor) -> torch.Tensor:
    return to_tokens(run_layers(head, inputs))


def test_states_are_those_of_their_own_token(runner: NativeRunner, data: LengthData) -> None:
    """Against one pass per request, alone."""
    for request, (prompt, answer) in enumerate(data.token_ids):
        mine = torch.nonzero(data.requests == request).flatten()
        offsets = data.generated[mine]
        assert offsets.sort().values.tolist() == list(range(len(answer))), "the service asks at any"
        assert torch.equal(data.remaining[mine], len(answer) - 1 - offsets)
        (alone,) = run_passes(runner, [prompt + answer[:-1]], DEPTHS)
        for index, depth in enumerate(DEPTHS):
            expected = alone.states[depth][len(prompt) - 1 + offsets]
            found = data.inputs(index, mine)[:, :-NUM_COUNTS]
            torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)


def test_no_request_is_on_two_sides(data: LengthData) -> None:
    parts = data.split(seed=3)
    owners = [set(data.requests[part].tolist()) for part in parts]
    assert sum(len(part) for part in parts) == len(data.remaining)
    assert not owners[0] & owners[1] and not owners[0] & owners[2] and not owners[1] & owners[2]


def parts_of(first: int, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first samples to learn from, the others to stop by."""
    return torch.arange(first), torch.arange(first, total)


def test_few_states_are_in_memory_at_a_time_and_the_head_is_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Up to the order of sums; every read is a part of the samples."""
    generator = torch.Generator().manual_seed(5)
    states = 3.0 + torch.randn(700, HIDDEN, generator=generator)
    remaining = torch.randint(0, 90, (700,), generator=generator)
    most, epochs = 0, 0

    def read(some: torch.Tensor) -> torch.Tensor:
        nonlocal most
        most = max(most, len(some))
        return states[some]

    def count(done: int) -> None:
        nonlocal epochs
        epochs += done

    monkeypatch.setattr(lengths, "BATCH", 32)
    monkeypatch.setattr(lengths, "MAX_EPOCHS", 4)
    whole = train_head(read, remaining, *parts_of(500, 700), seed=0, advance=count)
    assert (most, epochs) == (500, 4)
    most = 0
    monkeypatch.setattr(lengths, "AT_ONCE", 64)
    parts = train_head(read, remaining, *parts_of(500, 700), seed=0)
    assert most == 64
    torch.testing.assert_close(parts, whole, rtol=1e-3, atol=1e-4)


def test_a_head_learns_what_its_input_tells() -> None:
    generator = torch.Generator().manual_seed(1)
    remaining = torch.randint(0, 300, (1500,), generator=generator)
    states = torch.randn(1500, HIDDEN, generator=generator)
    states[:, 3] = 0.5 * torch.log1p(remaining.float()) - 2.0
    head = train_head(lambda some: states[some], remaining, *parts_of(1200, 1500), seed=0)
    outputs = said(head, states[1200:])
    figures = measure(outputs, torch.zeros(300, dtype=torch.long), remaining[1200:])
    blind = (remaining[1200:] - remaining[:1200].median()).abs().float().mean()
    assert figures["mae"] < 0.25 * float(blind)
    assert bool((outputs[:, 1:].diff(dim=1) >= 0).all()), "quantiles cross"


def test_calibration_counts_truths_below_each_quantile() -> None:
    outputs = torch.tensor([[5.0, 1.0, 5.0, 9.0]] * 10)
    figures = measure(outputs, torch.zeros(10, dtype=torch.long), torch.arange(10))
    assert [level for level, _ in figures["calibration"]] == list(QUANTILES)
    assert [share for _, share in figures["calibration"]] == [0.2, 0.6, 1.0]
    assert figures["mae"] == 2.5
    assert figures["mae_by_quarter"] == [2.5, None, None, None], "nothing was generated"


def test_errors_are_told_by_how_much_of_the_answer_there_is() -> None:
    generated = torch.arange(8)
    said = torch.full((8, 4), 3.0)
    figures = measure(said, generated, 7 - generated)
    assert figures["mae_by_quarter"] == [3.5, 1.5, 0.5, 2.5]


def test_the_engine_says_what_was_trained(data: LengthData, tmp_path: Path) -> None:
    spec, tensors, figures = train_heads(data, seed=0)
    save_heads(tmp_path, spec, tensors)
    assert read_length_heads(tmp_path) == spec
    assert set(figures) == {str(depth) for depth in DEPTHS}
    train, _, test = data.split(seed=0)
    totals = [len(data.token_ids[i][1]) - 1 for i in sorted(set(data.requests[train].tolist()))]
    middle = sorted(totals)[(len(totals) - 1) // 2]
    stands = zip(data.generated[test].tolist(), data.remaining[test].tolist(), strict=True)
    errors = [abs(max(0, middle - generated) - left) for generated, left in stands]
    assert figures[str(LAYERS)]["mae_of_median"] == pytest.approx(sum(errors) / len(errors), 1e-3)
    heads = LengthHeads.load(tmp_path, MODEL_HIDDEN, LAYERS)
    assert heads is not None and heads.depths == DEPTHS
    for index, depth in enumerate(data.depths):
        inputs = data.inputs(index, test)
        outputs = heads.predict(inputs[:, :-NUM_COUNTS], depth, inputs[:, -NUM_COUNTS:])
        found = measure(outputs, data.generated[test], data.remaining[test])
        assert found.items() <= figures[str(depth)].items(), "figures are of what is stored"


def test_an_input_that_never_varied_in_training_moves_no_forecast(tmp_path: Path) -> None:
    """Short answers are sampled at their first token alone, and prompts may have one length."""
    generator = torch.Generator().manual_seed(2)
    states = torch.randn(300, HIDDEN, generator=generator)
    data = LengthData(
        depths=(2,),
        states=lambda _, which: states[torch.from_numpy(which)],
        which=np.arange(300),
        generated=torch.zeros(300, dtype=torch.long),
        remaining=torch.randint(5, 20, (300,), generator=generator),
        prompt_lengths=torch.full((300,), 37),
        requests=torch.arange(300),
        token_ids=[([], [])] * 300,
        ids=[""] * 300,
    )
    spec, tensors, _ = train_heads(data, seed=0)
    save_heads(tmp_path, spec, tensors)
    heads = LengthHeads.load(tmp_path, HIDDEN, 2)
    assert heads is not None
    for prompt, generated in itertools.product((37, 500), (0, 1, 15, 300)):
        counts = torch.tensor([counts_of(prompt, generated)]).expand(300, -1)
        assert 3 < float(heads.predict(states, 2, counts)[:, 2].mean()) < 25


def test_errors_far_into_long_answers_are_counted() -> None:
    """Answers may be longer than those that heads are trained with by default."""
    generated = torch.tensor([0, 3 * MAX_NEW_TOKENS])
    figures = measure(torch.zeros(2, 4), generated, torch.tensor([4, 6]))
    assert [row[2:] for row in figures["mae_by_generated"]] == [[1, 4.0], [1, 6.0]]


def test_the_inputs_tell_where_a_token_stands(data: LengthData) -> None:
    """The prompt's length, and how many tokens were generated before its own."""
    everybody = torch.arange(len(data.remaining))
    for sample, row in enumerate(data.inputs(0, everybody)[:, -NUM_COUNTS:]):
        prompt, _ = data.token_ids[int(data.requests[sample])]
        wanted = counts_of(len(prompt), int(data.generated[sample]))
        assert row.tolist() == pytest.approx(wanted, abs=1e-6)


def test_a_partial_model_has_the_heads_of_its_depth(data: LengthData, tmp_path: Path) -> None:
    spec, tensors, _ = train_heads(data, seed=0)
    save_heads(tmp_path, spec, tensors)
    heads = LengthHeads.load(tmp_path, MODEL_HIDDEN, 2)
    assert heads is not None and heads.depths == (1, 2)


def test_a_checkpoint_without_heads_has_none(tmp_path: Path) -> None:
    assert LengthHeads.load(tmp_path, HIDDEN, 4) is None


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        "[",
        json.dumps({"depths": [2, 1], "num_layers": 2, "quantiles": [0.5]}),
        json.dumps({"depths": [1], "num_layers": 2, "quantiles": [0.5, 1.5]}),
        json.dumps({"depths": [1], "num_layers": 99, "quantiles": [0.5]}),
        json.dumps({"depths": [1], "num_layers": 2, "quantiles": [0.5], "has_counts": "no"}),
    ],
)
def test_a_file_that_cannot_be_right_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / LENGTH_FILE).write_text(content)
    with pytest.raises(ConfigError, match=r"length_heads\.json"):
        read_length_heads(tmp_path)


def test_misshapen_tensors_are_refused(tmp_path: Path) -> None:
    spec = LengthHeadSpec((2,), 1, (0.5,))
    tensors = {"length.2.0.weight": torch.zeros(2, HIDDEN + 1), "length.2.0.bias": torch.zeros(2)}
    save_heads(tmp_path, spec, tensors)
    with pytest.raises(ConfigError, match="layer 0 of the head behind 2 layers"):
        LengthHeads.load(tmp_path, HIDDEN, 4)


def test_the_range_holds_its_share_of_what_was_not_trained_on() -> None:
    """Whatever was over-learnt: on the validation part each quantile has its share below it."""
    generator = torch.Generator().manual_seed(3)
    states = torch.randn(600, HIDDEN, generator=generator)
    remaining = torch.randint(0, 500, (600,), generator=generator)  # nothing to be learnt
    head = train_head(lambda some: states[some], remaining, *parts_of(60, 600), seed=0)
    outputs = said(head, states[60:])
    truth = remaining[60:].float()
    for i, level in enumerate(QUANTILES, 1):
        share = float((truth <= outputs[:, i] + 0.5).float().mean())
        assert share == pytest.approx(level, abs=0.02)
