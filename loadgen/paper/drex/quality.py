"""`python -m loadgen paper drex --quality`: what leaving early costs in answers.

Every fill mode and threshold decodes the same task prompts, really generated, and is compared with
the same engine at full depth. Every exit is tested for every token and one that passes leaves, so
the table depends on the weights alone; load can only make tokens go deeper.

Where two answers part, their first different token tells what was to blame: one that left early
was judged wrongly by its exit; one that went to the end read skipped layers' KV that was made up.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

from loadgen.bench.engines.agreement import first_difference
from loadgen.load.task_suite import TaskSuite
from loadgen.paper.drex.closed_loop import ClosedLoopRun, run_closed_loop
from loadgen.paper.native import load_native
from loadgen.report.experiment import keep_rows, kept_rows, publish, say, show
from quadriga.checkpoint.exits import NEVER, SKIPPED_KV_WEIGHTS, ExitParams, SkippedKV
from quadriga.checkpoint.folder import read_checkpoint
from quadriga.clock import SystemClock
from quadriga.engine.model_runner import NativeRunner
from quadriga.policies.drex import DrexRebatcher, SegmentCosts
from quadriga.policies.rebatchers import make_rebatcher
from quadriga.tasks import TASKS

EXPERIMENT = "drex_quality"
FILL_MODES: tuple[SkippedKV, ...] = get_args(SkippedKV)
THRESHOLDS = (0.9, 0.95, 0.98, 0.99, 0.995)
_SLOTS = 32
_MAX_TOKENS = 720  # the longest answer, and room to see that one is longer
_SEED = 777
_POINT = 0.01


@dataclass(frozen=True, slots=True)
class Quality:
    """One line of the table.

    Attributes:
        threshold: `NEVER` is full depth.
        exact_match: Share of prompts answered rightly.
        delta: Against full depth.
        early_share: Tokens that left before the last layer.
        parted: Answers whose tokens are not those of full depth.
        parted_at: Layers run → answers whose first different token left there.
        lost, won: Answers that only full depth, or only this setting, has right.
        lost_by_task: Lost less won, of the tasks where they differ.
        step_ms: Mean time of a pass.
        copied_bytes: Hidden states kept for later fills, per token.
        filled: Positions × segments filled in, per token.
    """

    model: str
    mode: str
    threshold: float
    exact_match: float
    delta: float
    early_share: float
    parted: int
    parted_at: dict[int, int]
    lost: int
    won: int
    lost_by_task: dict[str, int]
    tokens_per_s: float
    step_ms: float
    copied_bytes: float
    filled: float


def run_quality(args: argparse.Namespace) -> int:
    """Measure all modes and thresholds; returns 0."""
    kept = kept_rows(args.out / f"{EXPERIMENT}.json", _parse) if args.keep else []
    rows: list[Quality] = []
    for model in args.model:
        rows += measure(
            model,
            modes=args.fill or FILL_MODES,
            thresholds=args.threshold or THRESHOLDS,
            per_task=args.per_task,
            replay_newest=args.replay_newest,
            threads=args.threads,
        )
        keep_rows(EXPERIMENT, [asdict(row) for row in rows], args.out)
    measured = {row.model for row in rows}
    rows += [row for row in kept if row.model not in measured]
    print_quality(rows)
    choices = {model: choose(rows, model) for model in {row.model: 0 for row in rows}}
    headline = {m: None if c is None else _choice(c) for m, c in choices.items()}
    publish(EXPERIMENT, headline, [asdict(r) for r in rows], args.out)
    return 0


def _parse(row: dict[str, Any]) -> Quality:
    return Quality(**row | {"parted_at": {int(k): n for k, n in row["parted_at"].items()}})


def measure(
    model: str,
    *,
    modes: Sequence[SkippedKV],
    thresholds: Sequence[float],
    per_task: int,
    replay_newest: int | None = None,
    threads: int,
) -> list[Quality]:
    """Full depth first, then every mode and threshold."""
    checkpoint = read_checkpoint(model)
    suite = TaskSuite.make(checkpoint, per_task * len(TASKS), seed=_SEED)
    rows: list[Quality] = []
    full: ClosedLoopRun | None = None
    for mode in modes:
        if mode == "linear" and not (checkpoint.heads_path / SKIPPED_KV_WEIGHTS).is_file():
            say(f"{model} has no fitted maps: linear is left out")
            continue
        native = load_native(
            checkpoint,
            num_rows=_SLOTS,
            threads=threads,
            skipped_kv=mode,
            replay_newest=replay_newest,
        )
        if full is None:
            full = _decode(native, suite, NEVER)
            rows.append(_row(native, suite, "", NEVER, full, full))
            say(_line(rows[-1]))
        for threshold in thresholds:
            outcome = _decode(native, suite, threshold)
            rows.append(_row(native, suite, mode, threshold, outcome, full))
            say(_line(rows[-1]))
    return rows


def choose(rows: Iterable[Quality], model: str) -> Quality | None:
    """Within a point of full depth the largest early share, then the fastest; None if none is."""
    good = [r for r in rows if r.model == model and r.threshold < NEVER and r.delta >= -_POINT]
    return max(good, key=lambda r: (round(r.early_share, 2), r.tokens_per_s), default=None)


def _decode(native: NativeRunner, suite: TaskSuite, threshold: float) -> ClosedLoopRun:
    num_segments = len(native.segment_ends)
    return run_closed_loop(
        suite.prompts,
        runner=native,
        native=native,
        clock=SystemClock(),
        make_rebatcher=lambda counters: (
            make_rebatcher("off", SegmentCosts(num_segments, _SLOTS), counters)
            if threshold >= NEVER
            else DrexRebatcher(
                SegmentCosts(num_segments, _SLOTS), counters=counters, deterministic=True
            )
        ),
        slots=_SLOTS,
        exits=ExitParams(threshold),
        max_tokens=_MAX_TOKENS,
    )


def _row(
    native: NativeRunner,
    suite: TaskSuite,
    mode: str,
    threshold: float,
    outcome: ClosedLoopRun,
    full: ClosedLoopRun,
) -> Quality:
    right, right_full = suite.right(outcome.outputs), suite.right(full.outputs)
    emitted = sum(outcome.counters.tokens.values())
    by_task: Counter[str] = Counter()
    for prompt, ours, theirs in zip(suite.prompts, right, right_full, strict=True):
        by_task[prompt.example.task] += theirs - ours
    parted_at = _parted_at(outcome, full)
    return Quality(
        model=native.spec.checkpoint.id,
        mode=mode,
        threshold=threshold,
        exact_match=sum(right) / len(right),
        delta=(sum(right) - sum(right_full)) / len(right),
        early_share=outcome.early_share(native.num_layers),
        parted=sum(parted_at.values()),
        parted_at=dict(sorted(parted_at.items())),
        lost=sum(f and not r for r, f in zip(right, right_full, strict=True)),
        won=sum(r and not f for r, f in zip(right, right_full, strict=True)),
        lost_by_task={task: count for task, count in sorted(by_task.items()) if count},
        tokens_per_s=outcome.tokens_per_s,
        step_ms=1e3 * outcome.seconds / outcome.steps,
        copied_bytes=outcome.copied_bytes / emitted,
        filled=outcome.filled_tokens / emitted,
    )


def _parted_at(outcome: ClosedLoopRun, full: ClosedLoopRun) -> Counter[int]:
    """Layers run for the first token that is not that of full depth → answers."""
    found: Counter[int] = Counter()
    for index, tokens in outcome.outputs.items():
        first = first_difference(tokens, full.outputs[index])
        if first is not None and first < min(len(tokens), len(full.outputs[index])):
            found[outcome.exit_layers[index][first]] += 1
    return found


def print_quality(rows: Sequence[Quality]) -> None:
    """Print one line a setting."""
    show(
        rows,
        {
            "model": lambda r: r.model,
            "fill": lambda r: r.mode or "full depth",
            "τ": lambda r: None if r.threshold >= NEVER else f"{r.threshold:g}",
            "exact": lambda r: f"{r.exact_match:.3f}",
            "points": lambda r: f"{100 * r.delta:+.1f}",
            "early": lambda r: f"{r.early_share:.3f}",
            "lost / won": lambda r: f"{r.lost} / {r.won}",
            "parted": lambda r: r.parted,
            "first at layer": lambda r: " ".join(f"{d}:{n}" for d, n in r.parted_at.items()),
            "tokens/s": lambda r: f"{r.tokens_per_s:,.0f}",
            "ms a pass": lambda r: f"{r.step_ms:.2f}",
            "bytes kept a token": lambda r: f"{r.copied_bytes:.0f}",
            "filled a token": lambda r: f"{r.filled:.2f}",
        },
        title="Answers at early exits, against full depth on the same prompts",
        left=("fill",),
    )


def _line(row: Quality) -> str:
    return (
        f"{row.model} {row.mode or 'full depth'} τ {row.threshold:g}: exact {row.exact_match:.3f} "
        f"({100 * row.delta:+.1f}), early {row.early_share:.3f}, parted {row.parted_at}, "
        f"lost {row.lost_by_task}"
    )


def _choice(row: Quality) -> dict[str, Any]:
    return {
        "fill": row.mode,
        "threshold": row.threshold,
        "exact_match_delta_points": round(100 * row.delta, 2),
        "early_token_share": round(row.early_share, 4),
    }
