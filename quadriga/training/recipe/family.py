"""The two members of the bundled family: shapes, exits, training recipe."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from quadriga.errors import ConfigError
from quadriga.tasks import TASKS
from quadriga.training.tokenizer import MAX_POSITIONS


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Shape of an early-exit Llama. Exits are 1-based counts of layers run, without the last."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ff: int
    exits: tuple[int, ...]
    max_positions: int = MAX_POSITIONS
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a member is trained. Source: the measurements in docs/experiments/models.md.

    Attributes:
        mix: Weight per task in the stream of examples.
        reworded_share: Share of short questions in other words than the tasks' own, once the
            curriculum has come to full lengths.
        exit_weights: Loss weight of a non-final exit at the start and after `ramp_tokens`.
        curriculum: (tokens seen, share of the full length range from then on), ascending.
        ramp_tokens: Tokens over which the exits' weight rises.
        decay_share: Share of the run's time or steps in which the learning rate falls to zero.
    """

    mix: dict[str, float]
    tokens_per_step: int
    curriculum: tuple[tuple[int, float], ...]
    seed: int
    reworded_share: float = 0.5
    exit_weights: tuple[float, float] = (0.1, 0.3)
    ramp_tokens: int = 6_000_000
    muon_lr: float = 0.02
    adam_lr: float = 3e-3
    warmup_steps: int = 40
    decay_share: float = 0.35
    end_token_weight: float = 3.0
    clip_norm: float = 1.0


@dataclass(frozen=True, slots=True)
class FamilyMember:
    """A member of the family.

    Attributes:
        exit_threshold, replay_newest: What `exits.json` says: the least that keep the answers
            within a point of full depth.
    """

    name: Literal["quadriga-s", "quadriga-l"]
    shape: ModelShape
    recipe: Recipe
    exit_threshold: float
    replay_newest: int


def _mix(**weights: float) -> dict[str, float]:
    if set(weights) != set(TASKS):
        raise ValueError(f"a mix names every task once: {sorted(set(weights) ^ set(TASKS))}")
    return weights


# Both mixes lean to what needs layers, sorting above all, and differ little from each other (their
# shares by 3 % in all): that one model is sure where the other is not comes of their sizes.
FAMILY: dict[str, FamilyMember] = {
    "quadriga-s": FamilyMember(
        "quadriga-s",
        ModelShape(hidden=192, layers=8, heads=6, kv_heads=2, head_dim=32, ff=640, exits=(2, 4)),
        Recipe(
            mix=_mix(
                count=1.2,
                repeat=0.5,
                copy=1.8,
                reverse=1.8,
                sort=6.0,
                transform=1.2,
                add=0.8,
                story=0.4,
            ),
            tokens_per_step=4096,
            curriculum=((0, 0.2), (800_000, 0.5), (2_400_000, 1.0)),
            seed=11,
        ),
        exit_threshold=0.995,
        replay_newest=0,
    ),
    "quadriga-l": FamilyMember(
        "quadriga-l",
        ModelShape(hidden=320, layers=12, heads=10, kv_heads=2, head_dim=32, ff=896, exits=(3, 6)),
        Recipe(
            mix=_mix(
                count=1.2,
                repeat=0.4,
                copy=2.0,
                reverse=1.8,
                sort=6.0,
                transform=1.4,
                add=0.8,
                story=0.5,
            ),
            tokens_per_step=4096,
            curriculum=((0, 0.2), (500_000, 0.5), (1_300_000, 1.0)),
            seed=12,
            ramp_tokens=2_500_000,
            exit_weights=(0.1, 0.5),
        ),
        exit_threshold=0.98,
        replay_newest=2,
    ),
}


def on_mix(member: FamilyMember, mix: Mapping[str, float]) -> FamilyMember:
    """A member that sees tasks with other weights; those not named do not come.

    Raises:
        ConfigError: A task that there is not, a weight below 0, or no weight above it.
    """
    unknown = sorted(set(mix) - set(TASKS))
    if unknown:
        raise ConfigError(f"mix: {unknown[0]!r} is no task; there are {', '.join(TASKS)}")
    for task, weight in mix.items():
        if not (math.isfinite(weight) and weight >= 0.0):
            raise ConfigError(f"mix: {task} is {weight:g}; a weight is a number from 0 on")
    if not any(mix.values()):
        raise ConfigError("mix: one task at least needs a weight above 0")
    return replace(member, recipe=replace(member.recipe, mix=dict(mix)))


def with_reworded_share(member: FamilyMember, share: float) -> FamilyMember:
    """A member that sees another share of short questions in other words.

    Raises:
        ConfigError: No share.
    """
    if not 0.0 <= share <= 1.0:
        raise ConfigError(f"--reworded: {share:g} must be from 0 to 1")
    return replace(member, recipe=replace(member.recipe, reworded_share=share))


def at_rate(member: FamilyMember, rate: float) -> FamilyMember:
    """A member that learns at a part of its recipe's rates, to go on from finished weights."""
    recipe = member.recipe
    return replace(
        member, recipe=replace(recipe, muon_lr=rate * recipe.muon_lr, adam_lr=rate * recipe.adam_lr)
    )
