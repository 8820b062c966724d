"""What the stored checkpoints reach: exact match, exits by threshold, how the members complement.

Exact match is taken on greedy answers, really generated at full depth. Exits are read from one pass
over the reference answers, so that both members are asked about the same tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from quadriga.tasks import (
    LONG_LENGTHS,
    TASKS,
    Example,
    check,
    make_example,
    make_reworded_example,
)
from quadriga.training.generate import greedy
from quadriga.training.model import EarlyExitLlama
from quadriga.training.recipe.data import encode
from quadriga.training.reference_pass import Forced, force

CRITERIA = ("top", "margin")
THRESHOLDS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
_ROWS = 64  # generated at once
_SPARE_TOKENS = 80  # an answer this much longer than the reference is wrong or a longer story

Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class TaskExits:
    """Exit behaviour of one model on one task's tokens.

    Attributes:
        leaves: {criterion: int64 [num_thresholds, num_tokens]}, index of the exit a token leaves
            at; the last exit is full depth.
        agrees: {criterion: bool [num_thresholds, num_tokens]}, whether the token emitted there is
            the full-depth token.
    """

    leaves: dict[str, Tensor]
    agrees: dict[str, Tensor]


def generated_right(
    model: EarlyExitLlama, tokenizer: Tokenizer, examples: list[Example], advance: Advance
) -> list[bool]:
    """Return whether each greedy answer is right; calls `advance(num_done)` as they finish."""
    rows = encode(tokenizer, examples)
    order = sorted(range(len(rows)), key=lambda row: len(rows[row].answer))
    right = [False] * len(rows)
    for start in range(0, len(order), _ROWS):
        chosen = order[start : start + _ROWS]
        answers = greedy(
            model,
            [rows[row].prompt for row in chosen],
            max_new_tokens=_SPARE_TOKENS + max(len(rows[row].answer) for row in chosen),
        )
        for row, answer in zip(chosen, answers, strict=True):
            example = examples[row]
            right[row] = check(example.task, example.prompt, tokenizer.decode(answer))
        advance(len(chosen))
    return right


def exits_of(forced: Forced) -> TaskExits:
    """Return where every token leaves, for every criterion and threshold."""
    last = forced.top.shape[0] - 1
    leaves, agrees = {}, {}
    for criterion in CRITERIA:
        rows_leave, rows_agree = [], []
        for threshold in THRESHOLDS:
            passes = _passes(forced, criterion, threshold)
            passes[last] = True
            exit_index = passes.int().argmax(0)  # first exit that passes
            emitted = forced.top_ids.gather(0, exit_index[None])[0]
            rows_leave.append(exit_index)
            rows_agree.append(emitted == forced.top_ids[last])
        leaves[criterion] = torch.stack(rows_leave)
        agrees[criterion] = torch.stack(rows_agree)
    return TaskExits(leaves, agrees)


def _passes(forced: Forced, criterion: str, threshold: float) -> Tensor:
    """Return bool [num_exits, num_tokens]: whether each exit would let the token go."""
    return forced.top >= threshold if criterion == "top" else forced.margin > threshold


def merge(parts: list[TaskExits]) -> TaskExits:
    """Return the exits of all parts' tokens together."""
    return TaskExits(
        {name: torch.cat([part.leaves[name] for part in parts], 1) for name in CRITERIA},
        {name: torch.cat([part.agrees[name] for part in parts], 1) for name in CRITERIA},
    )


def histogram(exits: TaskExits, num_exits: int) -> dict[str, dict[str, dict[str, Any]]]:
    """Return {criterion: {threshold: {"shares", "agreement"}}}.

    "shares" are the tokens' shares by exit, full depth last; "agreement" is the share of early
    tokens that equal the full-depth token, None where no token leaves early.
    """
    table: dict[str, dict[str, dict[str, Any]]] = {}
    for criterion in CRITERIA:
        table[criterion] = {}
        for row, threshold in enumerate(THRESHOLDS):
            leaves = exits.leaves[criterion][row]
            early = leaves < num_exits - 1
            table[criterion][str(threshold)] = {
                "shares": [_share(leaves == index) for index in range(num_exits)],
                "agreement": _share(exits.agrees[criterion][row][early]),
            }
    return table


def _share(those: Tensor) -> float | None:
    """How many are true; None of no tokens: JSON has no NaN."""
    return float(those.float().mean()) if len(those) else None


def complement(small: TaskExits, large: TaskExits) -> dict[str, dict[str, dict[str, Any]]]:
    """Return how the two members complement each other, per criterion and threshold.

    "first": an early token is one that leaves at its model's first exit; "any": at any exit but
    the last. `large_given_not_small` is P(large leaves early | small does not), None where small
    always does; `union` the share of tokens on which at least one does.
    """
    table: dict[str, dict[str, dict[str, Any]]] = {}
    for criterion in CRITERIA:
        table[criterion] = {}
        for row, threshold in enumerate(THRESHOLDS):
            entry: dict[str, float | None] = {}
            small_row, large_row = small.leaves[criterion][row], large.leaves[criterion][row]
            for name, below in (("first", 1), ("any", 2)):
                small_early, large_early = small_row < below, large_row < below
                entry[f"{name}_small"] = _share(small_early)
                entry[f"{name}_large"] = _share(large_early)
                entry[f"{name}_large_given_not_small"] = _share(large_early[~small_early])
                entry[f"{name}_union"] = _share(small_early | large_early)
            table[criterion][str(threshold)] = entry
    return table


def evaluate(
    models: dict[str, EarlyExitLlama],
    tokenizer: Tokenizer,
    *,
    examples: int,
    seed: int,
    advance: Advance,
) -> dict[str, Any]:
    """Return every figure of the family; JSON can hold it.

    Args:
        models: By name; the complement is of the first (small) and the second (large).
        tokenizer: The family's.
        examples: Per task, in its own words and in other words; half as many long ones on top.
        seed: Of the examples; training uses other streams.
        advance: Called with the number of answers just generated.
    """
    report: dict[str, Any] = {"examples": examples, "seed": seed, "models": {}}
    exits: dict[str, dict[str, TaskExits]] = {}
    for name, model in models.items():
        tasks: dict[str, Any] = {}
        exits[name] = {}
        for task in TASKS:
            usual = [make_example(task, seed=seed, index=index) for index in range(examples)]
            long = [
                make_example(task, seed=seed, index=1_000_000 + index, lengths=LONG_LENGTHS)
                for index in range(max(1, examples // 2))
            ]
            reworded = [make_reworded_example(task, seed=seed, index=i) for i in range(examples)]
            right = generated_right(model, tokenizer, usual + long + reworded, advance)
            right_usual, right_long, right_reworded = (
                right[: len(usual)],
                right[len(usual) : -len(reworded)],
                right[-len(reworded) :],
            )
            exits[name][task] = exits_of(force(model, tokenizer, usual))
            tasks[task] = {
                "exact_match": sum(right_usual) / len(usual),
                "exact_match_long": sum(right_long) / len(long),
                "exact_match_reworded": sum(right_reworded) / len(reworded),
                "answer_tokens": exits[name][task].leaves["top"].shape[1],
                "exits": histogram(exits[name][task], len(model.exits)),
            }
        report["models"][name] = {
            "exit_layers": list(model.exits),
            "tasks": tasks,
            "all": histogram(merge(list(exits[name].values())), len(model.exits)),
        }
    if len(models) == 2:
        small, large = exits.values()
        report["complement"] = {
            "tasks": {task: complement(small[task], large[task]) for task in TASKS},
            "all": complement(merge(list(small.values())), merge(list(large.values()))),
        }
    return report
