"""What tuning brought and what it costs: on answers that nothing was learned or chosen on."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from quadriga.checkpoint.exits import NEVER, ExitParams, ExitSpec
from quadriga.core.request import SamplingParams
from quadriga.engine.model_runner import NativeRunner
from quadriga.llm import LLM
from quadriga.tune.answers import OwnAnswer
from quadriga.tune.prompts import ALL
from quadriga.tune.states import run_passes
from quadriga.tune.thresholds import Verdicts, outcome

LEVELS = (0.8, 0.9, 0.97)
"""Thresholds that are reported, on the scale that requests name."""
BATCHES = (1, 8, 32)
WAYS: dict[str, ExitParams | None] = {
    "exits": None,
    "drafts": ExitParams(NEVER, "lossless"),
    "full": ExitParams(NEVER, "off"),
}
"""Tokens leave early; exits only draft, as a request is served that asks for nothing; neither."""
SPEED_TOKENS = 128
ROUNDS = 3


def raw_thresholds(spec: ExitSpec, level: float) -> dict[int, float]:
    """So sure must a token be at each exit to leave at a threshold that a request names."""
    return {k: spec.raw(k, level) for k in spec.layers}


def by_domain(
    verdicts: Verdicts, spec: ExitSpec, domains: Sequence[str], held_back: Sequence[str]
) -> list[dict[str, Any]]:
    """Rows of the report: domain × threshold.

    Args:
        domains: Of each token.
        held_back: Domains that nothing was learned on.
    """
    asked = verdicts.only(spec.layers)
    names = np.array(domains)
    rows = []
    for domain in [*sorted(set(domains)), ALL]:
        which = np.ones(len(names), dtype=bool) if domain == ALL else names == domain
        part = asked.part(which)
        rows += [
            {
                "domain": domain,
                "held_back": domain in held_back,
                "threshold": level,
                **outcome(part, raw_thresholds(spec, level)),
            }
            for level in LEVELS
        ]
    return rows


def measure_speed(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    *,
    batches: Sequence[int] = BATCHES,
    rounds: int = ROUNDS,
    clock: Callable[[], float] = time.perf_counter,
    advance: Callable[[int], object] = lambda _: None,
) -> tuple[list[dict[str, Any]], dict[str, list[OwnAnswer]]]:
    """Generate greedily in every one of `WAYS`, in turn, on this machine.

    Args:
        llm: With its exits.
        clock: In seconds.
        advance: Called with the number of runs done.

    Returns:
        Per batch size that there are prompts for tokens/s of each way and their ratio to full depth
        in the same round, medians over the rounds, and the share of early tokens and of drafts that
        agreed; and the answers of the last batch size.
    """
    full = llm.runner.spec.checkpoint.num_layers
    rows, answers = [], {}
    for batch in batches:
        some = [list(ids) for ids in prompts[:batch]]
        if len(some) < batch:
            break
        sampling = SamplingParams(SPEED_TOKENS, temperature=0.0)
        took: dict[str, list[float]] = {way: [] for way in WAYS}
        early, counters = 0.0, llm.loop.decode.counters
        before = counters.copy()
        for _ in range(rounds):
            for way, exits in WAYS.items():
                started_s = clock()
                outputs = llm.generate(some, sampling, exits=exits, progress=False)
                tokens = sum(len(output.token_ids) for output in outputs)
                took[way].append(tokens / (clock() - started_s))
                answers[way] = [
                    OwnAnswer(str(i), ids, output.checked().token_ids, False)
                    for i, (ids, output) in enumerate(zip(some, outputs, strict=True))
                ]
                if way == "exits":
                    left = sum(k < full for output in outputs for k in output.exit_layers)
                    early = left / max(1, tokens)
                advance(1)
        drafted = counters.drafted - before.drafted
        rows.append(
            {
                "batch": batch,
                **{way: statistics.median(values) for way, values in took.items()},
                "over_full": {
                    way: statistics.median(a / b for a, b in zip(values, took["full"], strict=True))
                    for way, values in took.items()
                },
                "early": early,
                "agreed": (counters.accepted - before.accepted) / drafted if drafted else None,
            }
        )
    return rows, answers


def compare_answers(
    runner: NativeRunner, answers: Mapping[str, Sequence[OwnAnswer]]
) -> dict[str, float]:
    """What whole answers lose: with everything that an early token does to those behind it.

    Args:
        runner: With no sequence in its rows.
        answers: As `measure_speed` returns them.

    Returns:
        `same`: share of answers that are the same to the last token; `loglik_exits` and
        `loglik_full`: log-likelihood of them under full depth, in nats a token.
    """
    pairs = zip(answers["exits"], answers["full"], strict=True)
    same = [mine.answer_ids == theirs.answer_ids for mine, theirs in pairs]
    return {
        "answers": len(same),
        "same": sum(same) / max(1, len(same)),
        "loglik_exits": log_likelihood(runner, answers["exits"]),
        "loglik_full": log_likelihood(runner, answers["full"]),
    }


@torch.inference_mode()
def log_likelihood(runner: NativeRunner, answers: Sequence[OwnAnswer]) -> float:
    """Of answers under full depth, in nats a token."""
    full = runner.num_layers
    total, count = 0.0, 0
    for seen in run_passes(runner, [answer.token_ids for answer in answers], [full]):
        begins = np.array([len(answer.prompt_ids) - 1 for answer in answers])[seen.owners]
        keep = np.flatnonzero(seen.positions >= begins)
        said = [
            answers[owner].answer_ids[position - begin]
            for owner, position, begin in zip(
                seen.owners[keep], seen.positions[keep], begins[keep], strict=True
            )
        ]
        states = seen.states[full]
        kept = torch.from_numpy(keep).to(states.device)
        logits = runner.model.decoder.logits(states.index_select(0, kept), full)
        scores = logits.log_softmax(-1).cpu().gather(1, torch.tensor(said)[:, None])
        total += float(scores.sum())
        count += len(said)
    return total / max(1, count)
