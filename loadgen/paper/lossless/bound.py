"""`python -m loadgen paper draft-bound`: the most that exits which draft can gain, by agreement.

A model answers prompts greedily at full depth; the states of its tokens are stored at each exit,
and each exit says what it would have drafted. A draft is kept where it is full depth's token, so
the rounds of a draft length can be counted off the answers exactly, without running any.

Costs are in layers, where reading weights is all that counts: verifying many drafts costs as much
as verifying one, and nothing else costs anything. So what comes out is a bound, not a forecast. A
round that drafts k tokens runs the layers up to the exit k + 1 times, the exit's test k times, the
other layers once, and the head once. `adaptive` drafts as many as agree, which no policy can know.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console

from loadgen.options import number, whole
from loadgen.report.experiment import publish, table_of
from loadgen.report.output import add_out_argument
from quadriga.engine.model_runner import NativeRunner
from quadriga.errors import ConfigError
from quadriga.llm import LLM
from quadriga.tune.answers import generate_answers
from quadriga.tune.prompts import TASKS_NAME, read_prompts
from quadriga.tune.states import StateStore
from quadriga.tune.thresholds import judge

DRAFTS = (1, 2, 3, 4, 6, 8)
ADAPTIVE = "adaptive"
Ints = npt.NDArray[np.int64]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "--checkpoint", default="smollm2-135m-instruct", help="a name or folder with exits"
    )
    parser.add_argument(
        "--prompts", default=f"{TASKS_NAME}8", metavar="FILE", help="of quadriga.tune, or tasks:N"
    )
    parser.add_argument("--limit", type=whole(1), help="prompts, the first ones")
    parser.add_argument("--domain", nargs="+", default=[], help="of the prompts; default: all")
    parser.add_argument("--max-tokens", type=whole(2), default=96, help="of an answer")
    parser.add_argument(
        "--head-layers",
        type=number(0),
        default=8.0,
        help="what the head costs, and so an exit's test, in layers",
    )
    parser.add_argument("--threads", type=whole(1), default=1, help="torch threads")
    add_out_argument(parser, "results/paper")


def run(args: argparse.Namespace) -> int:
    """Generate, store, judge and count; prints a table and one JSON line."""
    prompts = read_prompts(args.prompts)
    prompts = [p for p in prompts if not args.domain or p.domain in args.domain][: args.limit]
    if not prompts:
        raise ConfigError("--domain: no prompt is of these; leave it out", param="domain")
    with (
        tempfile.TemporaryDirectory() as folder,  # what is there is taken up, whoever answered
        closing(LLM(args.checkpoint, **{"engine.threads": args.threads})) as llm,
    ):
        checkpoint, runner = llm.runner.spec.checkpoint, llm.runner
        layers = checkpoint.exits.layers
        if not layers or not isinstance(runner, NativeRunner):
            raise ConfigError(
                f"--checkpoint: {checkpoint.id} has no exits to draft with", param="checkpoint"
            )
        answers = generate_answers(
            llm,
            prompts,
            Path(folder),
            max_tokens=args.max_tokens,
            temperature=0.0,
            seed=0,
            advance=lambda _: None,
        )
        full = checkpoint.num_layers
        store = StateStore(Path(folder) / "states", checkpoint.hidden_size, (*layers, full), top=0)
        store.fill(runner, answers, lambda _: None)
        verdicts = judge(store, np.arange(store.num_tokens), runner)
        owners = np.array(store.owners, dtype=np.int64)
    rows = [
        bounds(depth, full, args.head_layers, ~changed, owners)
        for depth, changed in zip(verdicts.depths, verdicts.changed, strict=True)
    ]
    _print(rows, Console(width=160))
    best = max(rows, key=lambda row: row["best"])
    headline = {
        "best_speedup": best["best"],
        "best_exit": best["exit"],
        "best_drafts": best["best_drafts"],
        "adaptive_speedup": max(row["speedup"][ADAPTIVE] for row in rows),
        "adaptive_speedup_free_test": max(row["free_test"] for row in rows),
        "agreement": {str(row["exit"]): row["agreement"] for row in rows},
        "tokens": len(owners),
        "answers": len(set(owners.tolist())),
    }
    publish("draft-bound", headline, rows, args.out)
    return 0


def bounds(
    depth: int, full: int, head_layers: float, agrees: npt.NDArray[np.bool_], owners: Ints
) -> dict[str, Any]:
    """What drafts of one exit could gain at best.

    Args:
        depth, full: Layers before the exit, and of the model.
        head_layers: What the head costs; the exit's test costs as much.
        agrees: Whether the exit says full depth's token, in the order of the answers, [tokens].
        owners: The answer of each, [tokens].
    """
    whole_cost = full + head_layers
    follows = chains(agrees, owners)

    def speedup(most: int | None, test: float) -> float:
        layers = 0.0
        for drafted in rounds(follows, owners, most):
            layers += (drafted + 1) * depth + drafted * test + (full - depth) + head_layers
        return round(len(owners) * whole_cost / layers, 4)

    found = {str(k): speedup(k, head_layers) for k in DRAFTS}
    best = max(found, key=lambda k: found[k])
    return {
        "exit": depth,
        "agreement": round(float(agrees.mean()), 4),
        "tokens_per_round": {
            str(k): round(len(owners) / len(rounds(follows, owners, k)), 3) for k in DRAFTS
        },
        "speedup": found | {ADAPTIVE: speedup(None, head_layers)},
        "best": found[best],
        "best_drafts": int(best),
        "free_test": speedup(None, 0.0),
    }


def chains(agrees: npt.NDArray[np.bool_], owners: Ints) -> Ints:
    """How many drafts in a row agree from each token on, within its answer: [tokens]."""
    found = np.zeros(len(agrees), dtype=np.int64)
    for i in range(len(agrees) - 1, -1, -1):
        if agrees[i]:
            goes_on = i + 1 < len(agrees) and owners[i + 1] == owners[i]
            found[i] = 1 + (found[i + 1] if goes_on else 0)
    return found


def rounds(follows: Ints, owners: Ints, most: int | None) -> list[int]:
    """The drafts of each round that it takes to make all answers.

    Args:
        follows: See `chains`.
        most: Drafts of a round; None: as many as agree.
    """
    left = np.searchsorted(owners, owners, side="right") - np.arange(len(owners))
    made, at = [], 0
    while at < len(owners):
        # The last token of a round is the verification's own.
        agreeing = int(min(follows[at], left[at] - 1))
        drafted = agreeing if most is None else min(most, int(left[at]) - 1)
        made.append(drafted)
        at += min(agreeing, drafted) + 1
    return made


def _print(rows: list[dict[str, Any]], console: Console) -> None:
    columns: dict[str, Callable[[dict[str, Any]], object]] = {
        "exit after": lambda r: r["exit"],
        "agrees": lambda r: f"{r['agreement']:.3f}",
    }
    for k in (*map(str, DRAFTS), ADAPTIVE):
        columns[k if k == ADAPTIVE else f"{k} drafts"] = lambda r, k=k: f"{r['speedup'][k]:.2f}"  # type: ignore[misc]
    columns["adaptive, test free"] = lambda r: f"{r['free_test']:.2f}"
    console.print(table_of(rows, columns, title="Speed over full depth, at most"))
