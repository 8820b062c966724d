"""The control for the family's skewed mixes."""

from __future__ import annotations

from dataclasses import replace

from quadriga.training.family import FAMILY, on_equal_mix
from quadriga.training.tasks import TASKS


def test_the_control_differs_in_its_mix_alone() -> None:
    for member in FAMILY.values():
        control = on_equal_mix(member)
        assert control.recipe.mix == dict.fromkeys(TASKS, 1 / len(TASKS))
        assert member.recipe.mix != control.recipe.mix
        same = replace(control, recipe=replace(control.recipe, mix=member.recipe.mix))
        assert same == member
