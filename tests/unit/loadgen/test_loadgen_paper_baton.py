"""`paper baton`: the sets, the book-keeping, and a tiny run of every contestant."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, PreTrainedModel

from loadgen.__main__ import main
from loadgen.paper.baton import experiment
from loadgen.paper.baton.contestants import CONTESTANTS, rows_needed
from loadgen.paper.baton.experiment import count_ties
from loadgen.paper.baton.inline import InlineRelay
from loadgen.paper.baton.queries import Query, brief_queries, mixed_queries, step_ceiling
from loadgen.paper.baton.record import QueryRecord
from loadgen.paper.baton.relay import Relay
from quadriga.clock import ManualClock
from quadriga.engine.baton.runner import BatonRunner
from quadriga.errors import ConfigError, InvariantViolation
from tests.equivalence.models import GATED, make_spec, save
from tests.equivalence.relay_models import GPT, VOCAB, build_relay, generate

BATCH = 3


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    config = LlamaConfig(**GATED) if request.param == "llama" else GPT2Config(**GPT)
    return build_relay(config)


@pytest.fixture(scope="module")
def path(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(model, tmp_path_factory.mktemp("model"))


@pytest.fixture
def runner(path: Path) -> BatonRunner:
    return BatonRunner.load(make_spec(path, runner="baton", num_rows=rows_needed(BATCH)))


def queries_of(*shapes: tuple[int, int]) -> list[Query]:
    """Queries of (input, output) tokens."""
    return [
        Query(i, tuple((7 * i + 3 * k) % VOCAB for k in range(num_input)), num_output)
        for i, (num_input, num_output) in enumerate(shapes)
    ]


SHAPES = ((4, 9), (30, 3), (2, 2), (11, 5), (3, 12), (17, 2), (9, 9), (40, 4))


@pytest.mark.parametrize("contestant", sorted(CONTESTANTS))
def test_every_contestant_says_what_generate_says(
    contestant: str, runner: BatonRunner, model: PreTrainedModel
) -> None:
    queries = queries_of(*SHAPES)
    record = QueryRecord(ManualClock().now_s)
    CONTESTANTS[contestant](runner, record, queries, BATCH)
    for query in queries:
        assert record.outputs[query.index] == generate(
            model, list(query.prompt_ids), query.num_output
        )
    assert set(record.done_s) == {q.index for q in queries}
    assert runner.memory().num_batch_rows == 0, "every row was given back"
    assert record.useful == sum(i + o - 1 for i, o in SHAPES)


def test_idle_rows_are_counted(runner: BatonRunner) -> None:
    """By hand: prompts of 4, 2, 6 tokens, padded to 6; then 4 steps of 3 rows.

    The first token comes from the prompt, so the rows need 1, 4 and 2 steps.
    """
    queries = queries_of((4, 2), (2, 5), (6, 3))
    record = QueryRecord(ManualClock().now_s)
    CONTESTANTS["run_to_completion"](runner, record, queries, BATCH)
    assert (record.steps, record.computed, record.useful) == (4, 3 * 6 + 4 * 3, 12 + 1 + 4 + 2)
    assert record.idle_share == pytest.approx(1 - 19 / 30)
    relay = QueryRecord(ManualClock().now_s)
    CONTESTANTS["baton"](runner, relay, queries, BATCH)
    # The prompt of 4 shares a pass with that of 6; that of 2 is too short for it.
    assert (relay.steps, relay.computed, relay.useful) == (4, 2 * 6 + 2 + 7, 19)


def test_a_prompt_that_joins_pads_all_rows(runner: BatonRunner) -> None:
    """By hand: two rows; the second ends after two tokens, and a prompt of 9 takes its place."""
    record = QueryRecord(ManualClock().now_s)
    relay = InlineRelay(runner, record, 2)
    queries = queries_of((5, 5), (3, 2), (9, 2))
    relay.step(queries[:2])
    assert (record.computed, record.useful) == (2 * 5, 8)
    relay.step([])
    assert relay.num_running == 1
    relay.step(queries[2:])
    assert (record.computed, record.useful) == (10 + 2 + 2 * 9, 8 + 2 + 1 + 9)
    while relay.num_running:
        relay.step([])
    assert {i: len(o) for i, o in record.outputs.items()} == {0: 5, 1: 2, 2: 2}


def test_memory_is_looked_at(runner: BatonRunner) -> None:
    record = QueryRecord(ManualClock().now_s)
    relay = Relay(runner, record)
    lives = [relay.start(query) for query in queries_of((6, 40), (12, 40))]
    relay.compute(lives)
    for _ in range(15):
        relay.run_batch(lives)
    first, last = record.memory[0], record.memory[-1]
    token = runner.geometry.values_per_token * 4
    assert first.live_bytes == (6 + 12 + 2 * 7) * token
    assert first.taken_bytes == 2 * (12 + 7) * token, "the short row is padded to the long one"
    assert last.taken_bytes - first.taken_bytes == 2 * 8 * token
    assert all(m.live_bytes <= m.taken_bytes <= m.allocated_bytes for m in record.memory)


def test_the_sets_have_the_papers_shape() -> None:
    made = mixed_queries(count=120, batch=8, scale=0.1, spread="pareto", seed=3, vocab_size=VOCAB)
    kinds = [(len(q.prompt_ids) >= 360, q.num_output >= 360) for q in made]
    assert [kinds.count(k) for k in ((True, False), (False, True), (False, False))] == [30, 30, 60]
    doubled = mixed_queries(
        count=120, batch=4, scale=0.1, spread="pareto", seed=3, vocab_size=VOCAB
    )
    for one, two in zip(made, doubled, strict=True):
        assert abs(two.num_output - 2 * one.num_output) <= 1
    brief = brief_queries(count=30, spread="uniform", seed=0, vocab_size=VOCAB)
    assert all(24 <= len(q.prompt_ids) <= 200 and 24 <= q.num_output <= 200 for q in brief)
    assert brief == brief_queries(count=30, spread="uniform", seed=0, vocab_size=VOCAB)
    with pytest.raises(ConfigError, match="1:1:2"):
        mixed_queries(count=10, batch=4, scale=0.1, spread="pareto", seed=0, vocab_size=VOCAB)


@pytest.mark.parametrize(
    ("outputs", "batch", "ceiling"),
    [((5, 5, 5, 5), 2, 1.0), ((9, 1, 9, 1), 2, 2.0), ((9, 1, 1, 1), 2, 1.0)],
)
def test_the_ceiling_of_steps(outputs: Sequence[int], batch: int, ceiling: float) -> None:
    queries = queries_of(*((3, n) for n in outputs))
    assert step_ceiling(queries, batch) == pytest.approx(ceiling)


def test_tokens_that_differ_without_a_tie_are_an_error(
    runner: BatonRunner, model: PreTrainedModel
) -> None:
    (query,) = queries_of((6, 4))
    wanted = {0: generate(model, list(query.prompt_ids), 4)}
    assert count_ties(runner, [query], wanted, wanted) == 0
    with torch.no_grad():
        logits = model(torch.tensor([list(query.prompt_ids)])).logits[0, -1]
    wrong = {0: [int(logits.argmin()), *wanted[0][1:]]}
    with pytest.raises(InvariantViolation, match="request 0 differs at output 0"):
        count_ties(runner, [query], wanted, wrong)
    with pytest.raises(InvariantViolation, match="request 0 differs at output 3"):
        count_ties(runner, [query], wanted, {0: wanted[0][:3]})


@pytest.mark.parametrize("model", ["gpt2"], indirect=True)
def test_the_command(
    path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Tiny sets: a table, six figures, everything in a file, and the headline as the last line."""
    words = ["--queries", "8", "3", "--batch-mixed", "2", "--batch-brief", "2", "--scale", "0.004"]
    words += ["--brief-words", "2", "9", "--rounds", "2", "--out", str(tmp_path)]
    words += ["--quick", "--contestant", *CONTESTANTS]  # the headline's alone, in one round
    monkeypatch.setattr(experiment, "_add", Mock(side_effect=KeyboardInterrupt))  # in round 2
    assert main(["paper", "baton", "--model", str(path), *words]) == 130
    assert len(json.loads((tmp_path / "baton.partial.json").read_text())["rows"]) > 2
    monkeypatch.undo()
    assert main(["paper", "baton", "--model", str(path), *words]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(result) == {"experiment", "headline", "commit", "machine"}
    assert result["experiment"] == "baton"
    headline = result["headline"]
    assert set(headline) == {"vs_orca_120", "vs_run_to_completion_120", "vs_run_to_completion_30"}
    assert all(set(ratios) == {"2"} and ratios["2"] > 0 for ratios in headline.values())
    whole = json.loads((tmp_path / "baton.json").read_text())
    assert whole["headline"] == headline
    found = {(row["set"], row["contestant"]) for row in whole["rows"]}
    assert found == {("mixed", name) for name in CONTESTANTS} | {
        ("brief", name) for name in ("run_to_completion", "baton")
    }
    assert all(len(row["seconds_by_round"]) == 2 for row in whole["rows"])
    assert len(list(tmp_path.glob("*.png"))) == 6
