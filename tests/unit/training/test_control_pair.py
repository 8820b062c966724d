"""Pairs that are trained on other mixes than the stored one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quadriga.training.cli import main
from quadriga.training.recipe.family import FAMILY, at_rate, on_mix
from tests.unit.conftest import Refused


def test_a_mix_of_ones_own_names_what_comes() -> None:
    member = on_mix(FAMILY["quadriga-s"], {"sort": 2.0, "copy": 1.0})
    assert member.recipe.mix == {"sort": 2.0, "copy": 1.0}
    slow = at_rate(member, 0.25)
    assert slow.recipe.muon_lr == 0.25 * member.recipe.muon_lr
    assert slow.recipe.adam_lr == 0.25 * member.recipe.adam_lr
    assert replace(slow.recipe, muon_lr=0.0, adam_lr=0.0) == replace(
        member.recipe, muon_lr=0.0, adam_lr=0.0
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--mix", "dance=1", "--folder", "x"], "'dance' is no task; there are count"),
        (["--mix", "sort=-1", "--folder", "x"], "sort is -1; a weight is a number from 0 on"),
        (["--mix", "sort=nan", "--folder", "x"], "sort is nan"),
        (["--mix", "sort=0", "--folder", "x"], "one task at least"),
        (["--mix", "even", "--folder", "x"], "'even' is not own, equal or TASK=WEIGHT"),
        (["--mix", "sort=1"], "needs a --folder"),
        (["--rate", "0"], "--rate: 0 must be above 0"),
    ],
)
def test_a_mix_that_cannot_be_is_refused(words: list[str], said: str, refused: Refused) -> None:
    refused(main, ["train", "--model", "quadriga-s", "--steps", "1", *words], said)
