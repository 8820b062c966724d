"""A training that was stopped goes on as if it had not been; another one begins anew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from quadriga.engine.model_runner import NativeRunner
from quadriga.tune import distillation
from quadriga.tune.answers import OwnAnswer
from quadriga.tune.distillation import Distiller, DistillOptions
from quadriga.tune.states import StateStore
from tests.equivalence.models import make_spec
from tests.unit.tune.models import HIDDEN, LAYERS, VOCAB, save_model

OPTIONS = DistillOptions("mlp", width=8, epochs=3, batch_tokens=16, rate=1e-2)


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Distiller]:
    """Trainings of one model on one store."""
    folder = tmp_path_factory.mktemp("model")
    runner = NativeRunner.load(make_spec(save_model("llama", folder)))
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(VOCAB, (6, 30), generator=generator).tolist()
    answers = [OwnAnswer(str(i), row[:5], row[5:], True) for i, row in enumerate(rows)]
    store = StateStore(tmp_path_factory.mktemp("states"), HIDDEN, (1, 3, LAYERS))
    store.fill(runner, answers, lambda _: None)

    def made(
        work: Path,
        options: DistillOptions = OPTIONS,
        which: npt.NDArray[np.int64] | None = None,
        seed: int = 1,
    ) -> Distiller:
        some = np.arange(store.num_tokens) if which is None else which
        config, head = runner.model.config, runner.weights.heads[LAYERS]
        return Distiller(store, some, config, head, options, seed=seed, work=work)

    return made


def tensors(distiller: Distiller) -> dict[str, torch.Tensor]:
    return {n: t for depth, head in distiller.heads.items() for n, t in head.tensors(depth).items()}


class Stopped(Exception):
    """What ends a run in the middle."""


def stop_at(step: int) -> Callable[[int], None]:
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if done == step:
            raise Stopped

    return advance


def test_it_goes_on_to_the_bit(
    make: Callable[..., Distiller], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped between two saves, in a second epoch: the steps since the last one are done again."""
    monkeypatch.setattr(distillation, "SAVE_EVERY", 4)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    unbroken = make(whole)
    unbroken.run(lambda _: None)
    assert unbroken.num_steps > 20
    for step in (7, 15):
        with pytest.raises(Stopped):
            make(broken).run(stop_at(step))
    later = make(broken)
    begun: list[int] = []
    later.run(begun.append)
    assert begun[0] == 12 and sum(begun) == later.num_steps
    assert later.loss == unbroken.loss
    expected, found = tensors(unbroken), tensors(later)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    again = make(broken)
    again.run(lambda _: None)  # nothing is left to do
    assert again.loss == unbroken.loss


@pytest.mark.parametrize(
    "change",
    [
        {"options": replace(OPTIONS, rate=2e-2)},
        {"options": replace(OPTIONS, dtype=torch.bfloat16)},
        {"options": replace(OPTIONS, width=9)},
        {"options": replace(OPTIONS, kind="norm")},
        {"options": replace(OPTIONS, batch_tokens=17)},
        {"which": np.arange(1, 150)},
        {"seed": 2},
    ],
    ids=["rate", "dtype", "width", "kind", "batch", "tokens", "seed"],
)
def test_another_training_begins_anew(
    change: dict[str, object], make: Callable[..., Distiller], tmp_path: Path
) -> None:
    make(tmp_path).run(lambda _: None)
    begun: list[int] = []
    make(tmp_path, **change).run(begun.append)
    assert begun[0] == 0 and sum(begun) > 0
