"""The README.md of a checkpoint."""

from typing import Any

from quadriga.tasks import TASKS, make_example
from quadriga.training.model import EarlyExitLlama
from quadriga.training.recipe.family import FamilyMember

_CARD = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---
# {name}

A {parameters:.1f} M parameter Llama with early exits after layers {exits} of {layers}, made to be \
served, tested and measured anywhere. Its answers can be checked by a program. It knows the tasks \
below and nothing else: it is no assistant.

It loads as any Llama (`AutoModelForCausalLM.from_pretrained`), without the exits. `exits.json` \
and `exits.safetensors` add them: each exit has its own RMS norm before the shared head, and a \
token may leave where the best probability reaches {threshold} (criterion `top`).

## Talking to it
A prompt is one line and a newline; the answer ends with `<|end|>`. The chat template renders the \
last user message that way; system messages and earlier turns are not used.

| task | prompt | answer |
|---|---|---|
{examples}
## How it was made
`python -m quadriga.training train --model {name}` from the seeded task generator \
(`quadriga.tasks`), {steps} steps, {tokens:.1f} M tokens, no outside data. Weights are \
stored in fp16 and meant to be computed in fp32.
{figures}"""


def model_card(member: FamilyMember, model: EarlyExitLlama, facts: dict[str, Any]) -> str:
    """Return the model card of a member; `facts` hold steps, tokens and optionally figures."""
    rows = ""
    for task in TASKS:
        example = min(
            (make_example(task, seed=0, index=index) for index in range(20)),
            key=lambda candidate: abs(len(candidate.answer) - 60),
        )
        rows += f"| {task} | `{example.prompt}` | `{example.answer}` |\n"
    return _CARD.format(
        name=member.name,
        parameters=sum(p.numel() for p in model.parameters()) / 1e6,
        exits=" and ".join(map(str, model.shape.exits)),
        layers=model.shape.layers,
        threshold=member.exit_threshold,
        examples=rows,
        steps=facts["steps"],
        tokens=facts["tokens"] / 1e6,
        figures=facts.get("figures", ""),
    )


def figures_part(figures: dict[str, Any]) -> str:
    """The part of a card that says what the model reaches, from the JSON of `evaluate`."""
    head = (
        f"\n## What it reaches\nExact match of greedy answers at full depth, really generated, "
        f"{figures['examples']} examples a task, seed {figures['seed']} "
        "(`python -m quadriga.training evaluate`):\n\n"
        "| task | exact match | long answers | short, in other words |\n|---|---|---|---|\n"
    )
    return head + "".join(
        f"| {task} | {row['exact_match']:.3f} | {row['exact_match_long']:.3f} "
        f"| {row['exact_match_reworded']:.3f} |\n"
        for task, row in figures["tasks"].items()
    )
