"""The parts of tuning: prompts, states, the shortlist, thresholds."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from quadriga.checkpoint.exits import NEVER, ExitSpec
from quadriga.engine.model_runner import NativeRunner
from quadriga.errors import ConfigError
from quadriga.tune.answers import ANSWERS_FILE, OwnAnswer, read_answers
from quadriga.tune.distillation import shortlist
from quadriga.tune.outcome import raw_thresholds
from quadriga.tune.prompts import distinct, read_prompts
from quadriga.tune.states import StateStore, run_passes
from quadriga.tune.thresholds import QualityBudget, Verdicts, choose, outcome
from tests.equivalence.models import make_spec
from tests.unit.tune.models import HIDDEN, LAYERS, VOCAB, save_model


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> NativeRunner:
    folder = save_model("qwen3", tmp_path_factory.mktemp("qwen3"))
    return NativeRunner.load(make_spec(folder, num_rows=3))


def ids(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    found: list[int] = torch.randint(VOCAB, (count,), generator=generator).tolist()
    return found


def test_states_are_those_of_each_sequence_alone(runner: NativeRunner) -> None:
    """Packed, cut into chunks, and in rows that others used."""
    sequences = [ids(n, seed=n) for n in (5, 1, 40, 7, 12, 3)]
    depths = (1, 3, LAYERS)
    found: dict[tuple[int, int], dict[int, torch.Tensor]] = {}
    for seen in run_passes(runner, sequences, depths, tokens_per_pass=16):
        for i, where in enumerate(zip(seen.owners.tolist(), seen.positions.tolist(), strict=True)):
            assert where not in found
            found[where] = {k: x[i] for k, x in seen.states.items()}
    assert len(found) == sum(map(len, sequences))
    for index, sequence in enumerate(sequences):
        alone = next(run_passes(runner, [sequence], depths))
        for position in range(len(sequence)):
            for depth in depths:
                torch.testing.assert_close(
                    found[index, position][depth],
                    alone.states[depth][position],
                    rtol=1e-4,
                    atol=1e-4,
                )


def test_a_store_goes_on_where_a_run_stopped(runner: NativeRunner, tmp_path: Path) -> None:
    answers = [OwnAnswer(str(i), ids(4 + i, i), ids(3 + i, 50 + i), True) for i in range(5)]
    whole = StateStore(tmp_path / "whole", HIDDEN, (2, LAYERS), top=4)
    whole.fill(runner, answers, lambda _: None)
    broken = StateStore(tmp_path / "broken", HIDDEN, (2, LAYERS), top=4)
    broken.fill(runner, answers[:2], lambda _: None)
    for file in (tmp_path / "broken").glob("depth-*"):
        with file.open("ab") as handle:
            handle.write(b"half a token")
    later = StateStore(tmp_path / "broken", HIDDEN, (2, LAYERS), top=4)
    later.fill(runner, answers, lambda _: None)
    assert later.num_tokens == whole.num_tokens == sum(len(a.answer_ids) for a in answers)
    everything = slice(0, later.num_tokens)
    for depth in (2, LAYERS):
        torch.testing.assert_close(
            later.states(depth, everything), whole.states(depth, everything), rtol=0, atol=1e-3
        )
    assert np.array_equal(later.owners, whole.owners)
    assert np.array_equal(later.top_ids, whole.top_ids)
    best = runner.model.decoder.logits(whole.states(LAYERS, everything), LAYERS).argmax(-1)
    assert (best.numpy() == whole.top_ids[:, 0]).mean() > 0.9
    with pytest.raises(ConfigError, match="holds states of exits"):
        StateStore(tmp_path / "whole", HIDDEN, (1, LAYERS))


def test_a_store_of_other_answers_begins_anew(runner: NativeRunner, tmp_path: Path) -> None:
    """A prompt that was too long is answered now: it stands among those that were read before."""
    answers = [OwnAnswer(str(i), ids(4, i), ids(3 + i, 50 + i), True) for i in range(3)]
    for some in (answers[::2], answers):
        store = StateStore(tmp_path, HIDDEN, (2, LAYERS), top=4)
        store.fill(runner, some, lambda _: None)
    assert np.bincount(store.owners.astype(np.int64)).tolist() == [3, 4, 5]


def test_an_answer_that_was_cut_off_does_not_count(tmp_path: Path) -> None:
    file = tmp_path / ANSWERS_FILE
    line = json.dumps({"id": "a", "prompt_ids": [1], "answer_ids": [2], "has_ended": True})
    file.write_text(f'{line}\n{{"id": "b", "prom')
    assert list(read_answers(file)) == ["a"]
    assert file.read_text() == f"{line}\n"


def test_prompts_are_read_from_text_json_and_tasks(tmp_path: Path) -> None:
    text, lines = tmp_path / "p.txt", tmp_path / "p.jsonl.gz"
    text.write_text("What is 2+2?\n\nWhy?\n", encoding="utf-8-sig")  # the mark is no prompt's
    with gzip.open(lines, "wt") as file:
        file.write(json.dumps({"id": "x", "domain": "d", "prompt": "go on"}) + "\n")
        chat = {"messages": [{"role": "user", "content": "hi"}], "id": None, "domain": None}
        file.write(json.dumps(chat) + "\n")
    assert [p.content[0]["content"] for p in read_prompts(str(text))] == ["What is 2+2?", "Why?"]  # type: ignore[index]
    first, second = read_prompts(str(lines))
    assert (first.id, first.domain, first.content) == ("x", "d", "go on")
    assert second.content == ({"role": "user", "content": "hi"},)
    assert (second.id, second.domain) == ("2", "prompts"), "null is as if it were not there"
    text.write_text("Why?\nWhat?\nWhy?\n")
    assert [p.id for p in distinct(read_prompts(str(text)))] == ["1", "2"], "each content once"
    tasks = read_prompts("tasks:2")
    assert len({p.id for p in tasks}) == len(tasks) == 16
    parts = [p.part(["sort"]) for p in read_prompts("tasks:200") if p.domain != "sort"]
    assert 0.65 < parts.count("train") / len(parts) < 0.75
    assert all(p.part(["sort"]) == "test" for p in tasks if p.domain == "sort")


DAMAGED = gzip.compress(b"{}")[:10] + b"\xff" * 20


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"prompt": 3}\n',
        b"[]\n",
        b"no json\n",
        b'{"id": 1, "prompt": "a"}\n' * 2,
        b'{"prompt": "a", "domain": "all"}',
        b"[" * 100_000,
        DAMAGED,
    ],
    ids=range(8),
)
def test_files_that_hold_no_prompts_are_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / ("prompts.jsonl.gz" if content is DAMAGED else "prompts.jsonl")
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="prompts"):
        read_prompts(str(file))


def test_the_shortlist_estimates_the_softmax_of_the_whole_vocabulary() -> None:
    generator = torch.Generator().manual_seed(1)
    vocab = 30_000
    logits = torch.randn(64, vocab, generator=generator)
    best = logits.topk(8, dim=-1).indices
    listed, places, weight = shortlist(best, vocab, seed=0)
    assert listed is not None and weight is not None and len(listed) < 4000
    assert torch.equal(listed[places], best)
    estimated = (logits[:, listed] + weight).logsumexp(-1)
    torch.testing.assert_close(estimated, logits.logsumexp(-1), atol=0.1, rtol=0)
    assert shortlist(best, 5000, seed=0)[0] is None
    assert not shortlist(torch.arange(9000)[None], 9000, seed=0)[2].any()  # type: ignore[union-attr]


def random_verdicts(count: int = 4000) -> Verdicts:
    """Exits whose confidence says how often they are right, the deeper the better."""
    rng = np.random.default_rng(3)
    confidence = np.stack([rng.random(count) ** power for power in (1.5, 0.5)])
    changed = rng.random((2, count)) > confidence
    return Verdicts((2, 5), confidence, changed, changed * rng.exponential(2.0, (2, count)))


@pytest.mark.parametrize("budget", [QualityBudget("changed", 0.02), QualityBudget("loss", 0.05)])
def test_thresholds_keep_the_budget_and_use_it(budget: QualityBudget) -> None:
    verdicts = random_verdicts()
    found = outcome(verdicts, choose(verdicts, budget))
    assert 0.8 * budget.amount < found[budget.measure] <= budget.amount
    assert found["early"] > 0.05
    assert sum(found["at"].values()) == pytest.approx(found["early"])


def test_no_budget_lets_nothing_leave_that_is_wrong() -> None:
    verdicts = random_verdicts()
    found = outcome(verdicts, choose(verdicts, QualityBudget("changed", 0.0)))
    assert found["changed"] == 0


def test_a_calibrated_confidence_is_on_the_scale_of_thresholds() -> None:
    spec = ExitSpec((2, 5, 6), sure_from=((2, 0.6), (5, NEVER)), calibrated_at=0.9)
    assert spec.calibrated(2, [0.0, 0.6, 1.0]) == [0.0, 0.9, 1.0]
    assert spec.calibrated(2, [0.3])[0] == pytest.approx(0.45)
    assert spec.calibrated(2, [0.5999999])[0] < 0.9
    assert spec.calibrated(5, [1.0])[0] < 0.9
    assert spec.calibrated(6, [0.7]) == [0.7]
    for level in (0.5, 0.9, 0.95):
        raw = raw_thresholds(spec, level)[2]
        assert spec.calibrated(2, [raw])[0] == pytest.approx(level)
    never = [raw_thresholds(spec, level)[5] for level in (0.8, 0.9, 0.97)]
    assert spec.calibrated(5, never)[0] == pytest.approx(0.8), "below .9 tokens leave there, too"
    assert min(never[1:]) >= NEVER
    assert raw_thresholds(replace(spec, sure_from=()), 0.8) == dict.fromkeys((2, 5, 6), 0.8)
