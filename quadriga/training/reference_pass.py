"""Teacher-forced measurements: one pass over known answers gives what every exit would emit.

For a task with one right answer, "every token is the arg-max" is the same event as "greedy
generation is right", so this is also a cheap stand-in for generation while a model trains.
"""

import itertools
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from quadriga.tasks import DEFAULT_MIX, Example, make_example, make_reworded_example
from quadriga.training.model import EarlyExitLlama
from quadriga.training.recipe.data import encode, group_rows, pack

_TOKENS_PER_PASS = 8192
_THRESHOLD = 0.9
PROBE_SEED = 777_000


@dataclass(frozen=True, slots=True)
class Forced:
    """What every exit says at every answer position of a list of examples, in their order.

    Attributes:
        lengths: Answer tokens per example, end token included.
        targets: [num_tokens] int64.
        top_ids: [num_exits, num_tokens] int64, arg-max.
        top: [num_exits, num_tokens] fp32, probability of the arg-max.
        margin: [num_exits, num_tokens] fp32, probability of the first minus that of the second.
    """

    lengths: list[int]
    targets: Tensor
    top_ids: Tensor
    top: Tensor
    margin: Tensor


@torch.no_grad()
def force(model: EarlyExitLlama, tokenizer: Tokenizer, examples: list[Example]) -> Forced:
    """Run the examples through the model with their known answers."""
    device = model.embed.device
    rows = encode(tokenizer, examples)
    sizes = [len(row.prompt) + len(row.answer) - 1 for row in rows]
    pieces: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    for group in group_rows(sizes):
        per_pass = max(1, _TOKENS_PER_PASS // sizes[group[0]])
        for start in range(0, len(group), per_pass):
            chosen = group[start : start + per_pass]
            # One group in this order, so that positions come back in the order of `chosen`.
            batch = pack(
                [rows[index] for index in chosen], end_weight=1.0, num_tokens=0, next_index=0
            ).to(device)
            states = model(batch.tokens, batch.positions, batch.groups, batch.answers)
            firsts = []
            for index, state in enumerate(states):
                probabilities = model.logits(state, index).softmax(-1)
                values, ids = probabilities.topk(2)
                firsts.append((ids[:, 0], values[:, 0], values[:, 0] - values[:, 1]))
            ids, top, margin = (torch.stack(part).cpu() for part in zip(*firsts, strict=True))
            counts = [len(rows[index].answer) for index in chosen]
            parts = (torch.split(part, counts, 1) for part in (ids, top, margin))
            for index, *piece in zip(chosen, *parts, strict=True):
                pieces[index] = (piece[0], piece[1], piece[2])
    ordered = [pieces[index] for index in range(len(rows))]
    return Forced(
        [len(row.answer) for row in rows],
        torch.tensor([token for row in rows for token in row.answer]),
        *(torch.cat([piece[part] for piece in ordered], 1) for part in range(3)),
    )


def probe(model: EarlyExitLlama, tokenizer: Tokenizer, *, examples: int) -> dict[str, str]:
    """Return per task "exact match / token accuracy / share leaving at each exit", cheaply.

    "TASK, reworded" is the same for short questions in other words.
    """
    lines = {}
    makers = {"": make_example, ", reworded": make_reworded_example}
    for task, (kind, make) in itertools.product(DEFAULT_MIX, makers.items()):
        forced = force(
            model, tokenizer, [make(task, seed=PROBE_SEED, index=i) for i in range(examples)]
        )
        right = forced.top_ids[-1] == forced.targets
        exact = sum(bool(part.all()) for part in torch.split(right, forced.lengths)) / examples
        leave = (forced.top[:-1] >= _THRESHOLD).float().mean(1)
        exits = " ".join(f"{share:.2f}" for share in leave)
        lines[task + kind] = f"{exact:.2f} {right.float().mean():.3f} exits {exits}"
    return lines
