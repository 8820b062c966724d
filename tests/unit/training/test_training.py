"""The model, its data and the loop, on a toy shape."""

from __future__ import annotations

import dataclasses
import math
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from quadriga.errors import ConfigError
from quadriga.tasks import TASKS, LengthMix, make_example
from quadriga.training.evaluate import THRESHOLDS, complement, evaluate, exits_of, histogram
from quadriga.training.generate import greedy
from quadriga.training.hardware import fastest_dtype
from quadriga.training.model import EarlyExitLlama
from quadriga.training.recipe import optimizer
from quadriga.training.recipe.data import encode, group_rows, next_batch, pack
from quadriga.training.recipe.family import FAMILY, FamilyMember, ModelShape, at_rate
from quadriga.training.recipe.loop import Trainer, TrainingOptions, budget_name, resume, run
from quadriga.training.recipe.optimizer import orthogonalize
from quadriga.training.recipe.schedule import ramp
from quadriga.training.recipe.state import LATEST, STABLE, load, save_atomically
from quadriga.training.reference_pass import Forced, force
from quadriga.training.tokenizer import END_ID, build_tokenizer

TOKENIZER = build_tokenizer()
SHAPE = ModelShape(hidden=32, layers=4, heads=4, kv_heads=2, head_dim=8, ff=48, exits=(1, 2))


def toy_model(seed: int = 0) -> EarlyExitLlama:
    model = EarlyExitLlama(SHAPE, TOKENIZER.get_vocab_size(), seed=seed)
    with torch.no_grad():
        model.head.mul_(20)  # far-apart logits, so that arg-max has no ties
    return model


def toy_member() -> FamilyMember:
    small = FAMILY["quadriga-s"]
    return dataclasses.replace(small, shape=SHAPE)


def toy_options(folder: Path, *, steps: int) -> TrainingOptions:
    return TrainingOptions(
        folder=folder,
        device=torch.device("cpu"),
        dtype=torch.float32,
        steps=steps,
        deadline_s=None,
        tokens_per_step=512,
        probe_examples=1,
    )


def test_groups_hold_every_row_once_and_little_padding() -> None:
    lengths = [5, 90, 17, 16, 88, 3, 40]
    groups = group_rows(lengths)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    assert all(lengths[row] >= 0.82 * lengths[group[0]] for group in groups for row in group)


def test_a_batch_teaches_answers_only_and_fills_its_size() -> None:
    batch = next_batch(
        TOKENIZER,
        seed=1,
        start=7,
        mix=dict.fromkeys(TASKS, 1.0),
        lengths=LengthMix(),
        tokens_per_step=2048,
        end_weight=3.0,
    )
    assert batch.tokens.shape == batch.positions.shape == (2048,)
    used = sum(rows * length for rows, length in batch.groups)
    assert used <= 2048
    rows = sum(rows for rows, _ in batch.groups)
    assert batch.next_index == 7 + rows
    assert int((batch.targets == END_ID).sum()) == rows
    assert set(batch.weights[batch.targets == END_ID].tolist()) == {3.0}
    inner = batch.targets != END_ID
    # What is learned at a position is the token behind it.
    assert torch.equal(batch.tokens[batch.answers[inner] + 1], batch.targets[inner])


def test_a_row_does_not_see_its_neighbours() -> None:
    model = toy_model()
    rows = encode(TOKENIZER, [make_example(task, seed=1, index=0) for task in TASKS])
    together = pack(rows, end_weight=1.0, num_tokens=4096, next_index=0)
    states = model(together.tokens, together.positions, together.groups, together.answers)
    order = [
        row
        for group in group_rows([len(r.prompt) + len(r.answer) - 1 for r in rows])
        for row in group
    ]
    alone = []
    for row in order:
        batch = pack([rows[row]], end_weight=1.0, num_tokens=0, next_index=0)
        alone.append(model(batch.tokens, batch.positions, batch.groups, batch.answers)[-1])
    torch.testing.assert_close(states[-1], torch.cat(alone), rtol=1e-3, atol=1e-4)


def test_generation_equals_the_forced_pass() -> None:
    model = toy_model()
    prompts = [[5, 9, 200], [7], [300, 4, 5, 6, 7, 8]]
    answers = greedy(model, prompts, max_new_tokens=12)
    for prompt, answer in zip(prompts, answers, strict=True):
        text = prompt + answer
        tokens = torch.tensor(text)
        states = model(
            tokens,
            torch.arange(len(text)),
            [(1, len(text))],
            torch.arange(len(prompt) - 1, len(text)),
        )
        says = model.logits(states[-1], 2).argmax(-1).tolist()
        assert says[: len(answer)] == answer
        assert len(answer) == 12 or says[len(answer)] == END_ID


def test_forced_answers_come_back_in_order() -> None:
    model = toy_model()
    examples = [make_example("copy", seed=2, index=index) for index in range(9)]
    together = force(model, TOKENIZER, examples)
    alone = [force(model, TOKENIZER, [example]) for example in examples]
    assert together.lengths == [length for part in alone for length in part.lengths]
    assert torch.equal(together.targets, torch.cat([part.targets for part in alone]))
    torch.testing.assert_close(
        together.top, torch.cat([part.top for part in alone], 1), rtol=1e-3, atol=1e-4
    )


def forced(top: list[list[float]], ids: list[list[int]]) -> Forced:
    probabilities = torch.tensor(top)
    return Forced(
        [len(top[0])],
        torch.zeros(len(top[0])).long(),
        torch.tensor(ids),
        probabilities,
        probabilities - (1 - probabilities),
    )


def test_a_token_leaves_at_the_first_exit_that_passes() -> None:
    exits = exits_of(
        forced(
            [[0.95, 0.2, 0.3], [0.99, 0.96, 0.3], [0.5, 0.5, 0.5]],
            [[1, 1, 1], [1, 2, 1], [1, 3, 1]],
        )
    )
    row = THRESHOLDS.index(0.9)
    assert exits.leaves["top"][row].tolist() == [0, 1, 2]
    assert exits.agrees["top"][row].tolist() == [True, False, True]
    entry = histogram(exits, 3)["top"]["0.9"]
    assert entry["shares"] == pytest.approx([1 / 3] * 3)
    assert entry["agreement"] == pytest.approx(0.5)
    # margin = 2p − 1: only .95 and .96, .99 pass τ = .8 at their exits, .95 fails τ = .9
    assert exits.leaves["margin"][THRESHOLDS.index(0.8)].tolist() == [0, 1, 2]
    assert exits.leaves["margin"][THRESHOLDS.index(0.95)].tolist() == [1, 2, 2]


def test_the_complement_counts_what_one_or_the_other_finishes_early() -> None:
    ids = [[0] * 4] * 3
    small = exits_of(forced([[0.95, 0.95, 0.1, 0.1], [0.1] * 4, [0.1] * 4], ids))
    large = exits_of(forced([[0.95, 0.1, 0.95, 0.1], [0.1] * 4, [0.1] * 4], ids))
    entry = complement(small, large)["top"]["0.9"]
    assert entry["first_small"] == 0.5
    assert entry["first_large_given_not_small"] == 0.5
    assert entry["first_union"] == 0.75
    always = exits_of(forced([[0.95] * 4] * 3, ids))
    entry = complement(always, large)["top"]["0.9"]
    assert entry["first_large_given_not_small"] is None, "JSON has no NaN"


def test_orthogonalised_updates_have_even_singular_values() -> None:
    update = torch.randn(3, 24, 40, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalize(update, torch.float32))
    assert float(values.min()) > 0.4
    assert float(values.max()) < 1.4


def test_training_lowers_the_loss_and_ends_on_its_budget(tmp_path: Path) -> None:
    trainer = Trainer(toy_member(), toy_options(tmp_path, steps=30))
    lines: list[dict[str, Any]] = []
    run(trainer, lines.append)
    losses = [line["losses"][-1] for line in lines if "losses" in line]
    assert losses[0] < math.log(TOKENIZER.get_vocab_size())  # an even guess
    assert losses[-1] < losses[0] - 0.4
    assert trainer.progress.step == 30
    assert set(lines[-1]["probe"]) == {*TASKS, *(f"{task}, reworded" for task in TASKS)}
    assert (tmp_path / STABLE).exists()


def test_an_interrupted_run_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    whole = Trainer(toy_member(), toy_options(tmp_path / "whole", steps=6))
    for _ in range(6):
        whole.step(1.0)
    first = Trainer(toy_member(), toy_options(tmp_path / "cut", steps=6))
    for _ in range(3):
        first.step(1.0)
    first.save(LATEST)
    second = Trainer(toy_member(), toy_options(tmp_path / "cut", steps=6))
    resume(second, budget_name(second.options))
    for _ in range(3):
        second.step(1.0)
    assert second.progress == whole.progress
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, second.model.state_dict()[name]), name


def test_what_steps_depend_on_stays_the_same(tmp_path: Path) -> None:
    """But for the type of products, which is of each run."""
    half = dataclasses.replace(toy_options(tmp_path, steps=6), dtype=torch.bfloat16)
    Trainer(toy_member(), half).save(LATEST)
    other = Trainer(at_rate(toy_member(), 0.5), toy_options(tmp_path, steps=6))
    with pytest.raises(ConfigError, match="another --rate; give the same"):
        resume(other, budget_name(other.options))
    seen: list[torch.dtype] = []
    again = Trainer(toy_member(), toy_options(tmp_path, steps=6))
    resume(again, budget_name(again.options))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            optimizer, "orthogonalize", lambda update, dtype: seen.append(dtype) or update
        )
        again.step(1.0)
    assert set(seen) == {torch.float32}
    saved = load(tmp_path / LATEST)
    del saved["progress"]["options"]  # as an earlier release saved it
    save_atomically(saved, tmp_path / LATEST)
    resume(other, budget_name(other.options))


def test_a_state_that_cannot_be_written_is_an_error_of_the_disk_and_leaves_the_old_one(
    tmp_path: Path,
) -> None:
    """Of which torch says "unexpected pos" alone."""
    save_atomically({"step": torch.tensor(1)}, tmp_path / LATEST)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(OSError, match=f"File too large: '.*{LATEST}'"):
            save_atomically({"step": torch.zeros(1 << 16)}, tmp_path / LATEST)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert load(tmp_path / LATEST)["step"] == 1
    assert [path.name for path in tmp_path.iterdir()] == [LATEST]


def test_weights_that_were_trained_before_are_no_tokens_of_this_training(tmp_path: Path) -> None:
    first = Trainer(toy_member(), toy_options(tmp_path, steps=1))
    first.save(LATEST)
    later = Trainer(toy_member(), toy_options(tmp_path, steps=1))
    later.start_from(tmp_path / LATEST)
    later.step(1.0)
    assert later.progress.tokens_seen == 512
    recipe = later.member.recipe
    assert ramp(recipe.exit_weights, recipe.ramp_tokens, later.progress.scheduled_tokens) == 0.3


def test_another_budget_goes_on_from_before_the_decay(tmp_path: Path) -> None:
    trainer = Trainer(toy_member(), toy_options(tmp_path, steps=4))
    run(trainer, lambda record: None)
    again = Trainer(toy_member(), toy_options(tmp_path, steps=8))
    resume(again, budget_name(again.options))
    assert again.progress.step < 4
    assert not again.progress.decaying


def test_minutes_go_on_when_they_are_asked_for_again_and_are_spent_once(tmp_path: Path) -> None:
    begun_s = time.time()
    asked = dataclasses.replace(toy_options(tmp_path, steps=2), deadline_s=begun_s + 300, minutes=5)
    run(Trainer(toy_member(), asked), lambda record: None)
    again = Trainer(toy_member(), dataclasses.replace(asked, deadline_s=begun_s + 400))
    resume(again, budget_name(again.options))
    assert (again.progress.step, again.progress.deadline_s) == (2, begun_s + 300)
    assert again.progress.budget == budget_name(again.options), "another moment, the same budget"
    again.options = dataclasses.replace(again.options, steps=None)
    again.progress.budget, again.progress.deadline_s = budget_name(again.options), begun_s
    with pytest.raises(ConfigError, match="is spent at step 2"):
        run(again, lambda record: None)


def test_evaluation_covers_every_task(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []
    few = {"max_new_tokens": 2}  # how long answers may be changes nothing here
    monkeypatch.setattr("quadriga.training.evaluate.greedy", lambda *of, **_: greedy(*of, **few))
    report = evaluate(
        {"s": toy_model(1), "l": toy_model(2)}, TOKENIZER, examples=2, seed=1, advance=done.append
    )
    assert sum(done) == 2 * len(TASKS) * 5
    assert set(report["models"]["s"]["tasks"]) == set(TASKS)
    assert set(report["complement"]["all"]) == {"top", "margin"}


def test_the_number_type_is_measured() -> None:
    assert fastest_dtype(torch.device("cpu")) in (torch.float32, torch.bfloat16)
