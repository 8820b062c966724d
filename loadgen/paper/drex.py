"""`python -m loadgen paper drex`: rebatching against grouped exits and against no exits at all.

Every policy decodes the same task prompts on the real engine, one decode loop, one thread, with the
same slots. Rounds are interleaved and medians reported. No exits is the engine's fastest full
pass; DREX holds no more bytes than it (KV, kept hidden states and staging are counted).

Printed beside the throughput: the ceiling t_f / (t_s + (1 − p) t_d) from this machine's own pass
times with the heads in them, and the same comparison in the modelled time of a weight-bound device.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console

from loadgen import provenance
from loadgen.options import whole
from loadgen.paper.closed_loop import Outcome, Prompt, run_closed_loop
from loadgen.paper.drex_report import headline, print_table, write_plot
from loadgen.paper.judged import Decisions, JudgedRebatcher
from loadgen.paper.modelled import WEIGHT_BOUND, ModelledRunner
from quadriga.batching.calibration import calibrate
from quadriga.checkpoint import read_checkpoint
from quadriga.clock import Clock, ManualClock, SystemClock
from quadriga.engine.runner import NativeRunner
from quadriga.exits import ExitCounters
from quadriga.interfaces import ModelRunner
from quadriga.policies.drex import SegmentCosts
from quadriga.policies.rebatchers import POLICIES, make_rebatcher
from quadriga.policies.rebatching import Rebatcher
from quadriga.resolve import EngineSpec
from quadriga.text.tokenizer import TextTokenizer, load_tokenizer
from quadriga.training.tasks import TASKS, check, make_example

_JUDGE_EVERY = 2
_SEED = 4242


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--model", nargs="+", default=["quadriga-s", "quadriga-l"], metavar="ID")
    parser.add_argument("--batch", nargs="+", type=whole(1), default=[4, 8, 16, 32, 64])
    parser.add_argument("--threshold", nargs="+", type=float, default=[], metavar="T",
                        help="default: the model's own, and .8 and .95")  # fmt: skip
    parser.add_argument("--policy", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--prompts", type=whole(1), default=None,
                        help="task prompts in a run; default: 3 a slot, at least 64")  # fmt: skip
    parser.add_argument("--rounds", type=whole(1), default=3)
    parser.add_argument("--threads", type=whole(1), default=1)
    parser.add_argument("--max-tokens", type=whole(1), default=400)
    parser.add_argument("--quick", action="store_true", help="a few settings, within 5 minutes")
    parser.add_argument("--out", type=Path, default=Path("results/paper"), metavar="DIR")


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table, before it is measured."""

    model: str
    batch: int
    threshold: float
    policy: str
    device: str  # "cpu", or the name of the cost model


@dataclass(slots=True)
class Measured:
    """One row of the table: medians over the rounds, and what does not vary."""

    setting: Setting
    tokens_per_s: float
    gap_mean_s: float
    gap_p99_s: float
    request_s: float
    exact_match: float
    early_share: float
    involuntary_exits: int
    involuntary_stays: int
    peak_bytes: int
    ceiling: float | None = None
    decisions: Decisions | None = None


def run(args: argparse.Namespace) -> int:
    """Measure all settings; returns 0."""
    console = Console(stderr=True)
    if args.quick:
        args.batch, args.rounds = [8, 32], 1
    rows: list[Measured] = []
    for model in args.model:
        thresholds = args.threshold or _thresholds(model, args.quick)
        for batch in args.batch:
            bench = Bench.load(model, batch, args)
            for threshold, is_modelled in product(thresholds, (False, True)):
                if is_modelled and (args.quick and batch != max(args.batch)):
                    continue
                rows += bench.compare(threshold, args.policy, args.rounds, is_modelled, console)
    print_table(rows, Console(width=220))
    args.out.mkdir(parents=True, exist_ok=True)
    plot = write_plot(rows, args.out / "drex.png")
    console.print(f"plot: {plot}")
    result = {
        "experiment": "drex",
        "headline": headline(rows),
        "commit": provenance.commit(),
        "machine": provenance.machine(),
    }
    (args.out / "drex.json").write_text(json.dumps(result | {"rows": [_plain(r) for r in rows]}))
    print(json.dumps(result))
    sys.stdout.flush()
    return 0


def _thresholds(model: str, quick: bool) -> list[float]:
    default = read_checkpoint(model).exits.threshold
    return [default] if quick else sorted({default, 0.8, 0.95})


def _plain(row: Measured) -> dict[str, Any]:
    setting = row.setting
    plain: dict[str, Any] = {
        "model": setting.model,
        "batch": setting.batch,
        "threshold": setting.threshold,
        "policy": setting.policy,
        "device": setting.device,
        "tokens_per_s": row.tokens_per_s,
        "gap_mean_s": row.gap_mean_s,
        "gap_p99_s": row.gap_p99_s,
        "request_s": row.request_s,
        "exact_match": row.exact_match,
        "early_share": row.early_share,
        "involuntary_exits": row.involuntary_exits,
        "involuntary_stays": row.involuntary_stays,
        "peak_bytes": row.peak_bytes,
        "ceiling": row.ceiling,
    }
    if row.decisions is not None:
        plain |= {
            "decisions": row.decisions.count,
            "decisions_right": row.decisions.share_right,
            "decisions_tied": row.decisions.ties,
            "regret": row.decisions.regret_s / max(row.decisions.best_s, 1e-12),
        }
    return plain


class Bench:
    """A model with so many slots, its prompts, and what its passes cost."""

    def __init__(
        self, native: NativeRunner, prompts: Sequence[Prompt], batch: int, max_tokens: int
    ) -> None:
        self.native, self.prompts = native, prompts
        self.batch, self.max_tokens = batch, max_tokens

    @classmethod
    def load(cls, model: str, batch: int, args: argparse.Namespace) -> Bench:
        """Load the engine and make the prompts."""
        checkpoint = read_checkpoint(model)
        native = NativeRunner.load(
            EngineSpec(
                checkpoint=checkpoint,
                depth=checkpoint.num_layers,
                device="cpu",
                dtype="float32",
                threads=args.threads,
                compile="wait",
                cache_dir=Path("~/.cache/quadriga").expanduser(),
                num_rows=batch,
                row_capacity_tokens=1024,
                kv_capacity_tokens=batch * 1024,
                exits=checkpoint.exits,
            )
        )
        native.wait_compiled(300.0)
        count = args.prompts or max(64, 3 * batch)
        tokenizer = load_tokenizer(checkpoint.path, checkpoint.id)
        examples = [
            make_example(task, seed=_SEED, index=i)
            for i in range(-(-count // len(TASKS)))
            for task in TASKS
        ][:count]
        random.Random(_SEED).shuffle(examples)
        prompts = [
            Prompt(e, tokenizer.encode(e.prompt + "\n", add_special_tokens=False)) for e in examples
        ]
        bench = cls(native, prompts, batch, args.max_tokens)
        bench._tokenizer = tokenizer
        return bench

    _tokenizer: TextTokenizer

    def compare(
        self,
        threshold: float,
        policies: Sequence[str],
        rounds: int,
        is_modelled: bool,
        console: Console,
    ) -> Iterator[Measured]:
        """Run every policy `rounds` times, interleaved, and yield a row for each."""
        outcomes: dict[str, list[Outcome]] = {policy: [] for policy in policies}
        costs: SegmentCosts | None = None
        for round_ in range(1 if is_modelled else rounds):
            for policy in policies:
                outcome, costs = self._run(policy, threshold, is_modelled)
                outcomes[policy].append(outcome)
                console.print(
                    f"{self.native.spec.checkpoint.id} batch {self.batch} τ {threshold} "
                    f"{'modelled ' if is_modelled else ''}{policy} round {round_ + 1}: "
                    f"{outcome.tokens_per_s:,.0f} tokens/s"
                )
        decisions = None
        if "drex" in policies and not is_modelled:
            decisions = self._judge(threshold)
        for policy in policies:
            row = self._row(policy, threshold, is_modelled, outcomes[policy])
            if policy == "drex" and costs is not None:
                row.ceiling = self._ceiling(costs, outcomes[policy][0].counters)
                row.decisions = decisions
            yield row

    def _run(
        self, policy: str, threshold: float, is_modelled: bool
    ) -> tuple[Outcome, SegmentCosts]:
        clock: Clock = SystemClock()
        runner: ModelRunner = self.native
        if is_modelled:
            manual = ManualClock()
            clock, runner = manual, ModelledRunner(self.native, manual, WEIGHT_BOUND)
        costs = calibrate(runner, clock, max_rows=self.batch)
        fresh = calibrate(runner, clock, max_rows=self.batch) if is_modelled else costs
        outcome = self._loop(runner, clock, threshold, lambda c: make_rebatcher(policy, costs, c))
        return outcome, fresh

    def _judge(self, threshold: float) -> Decisions:
        """Run DREX once more, with both branches of its decisions; its throughput is not used."""
        clock = SystemClock()
        costs = calibrate(self.native, clock, max_rows=self.batch)
        made: list[JudgedRebatcher] = []

        def make(counters: ExitCounters) -> Rebatcher:
            made.append(
                JudgedRebatcher(
                    costs, counters=counters, native=self.native, clock=clock, every=_JUDGE_EVERY
                )
            )
            return made[0]

        self._loop(self.native, clock, threshold, make)
        return made[0].decisions

    def _loop(self, runner: ModelRunner, clock: Clock, threshold: float, make: Any) -> Outcome:
        return run_closed_loop(
            self.prompts,
            runner=runner,
            native=self.native,
            clock=clock,
            make_rebatcher=make,
            slots=self.batch,
            threshold=threshold,
            max_tokens=self.max_tokens,
            criterion=self.native.spec.exits.criterion,
        )

    def _row(
        self, policy: str, threshold: float, is_modelled: bool, outcomes: Sequence[Outcome]
    ) -> Measured:
        device = WEIGHT_BOUND.name if is_modelled else "cpu"
        first = outcomes[0]
        gaps = [sorted(o.gaps_s) for o in outcomes]
        full = self.native.num_layers
        tokens = first.counters.tokens
        eos = set(self.native.spec.checkpoint.eos_token_ids)
        right = sum(
            check(p.example.task, p.example.prompt, self._text(first.outputs[i], eos))
            for i, p in enumerate(self.prompts)
        )
        return Measured(
            setting=Setting(self.native.spec.checkpoint.id, self.batch, threshold, policy, device),
            tokens_per_s=statistics.median(o.tokens_per_s for o in outcomes),
            gap_mean_s=statistics.median(statistics.fmean(g) for g in gaps),
            gap_p99_s=statistics.median(g[int(0.99 * len(g))] for g in gaps),
            request_s=statistics.median(statistics.fmean(o.request_s) for o in outcomes),
            exact_match=right / len(self.prompts),
            early_share=1.0 - tokens.get(full, 0) / max(1, sum(tokens.values())),
            involuntary_exits=max(o.counters.involuntary_exits for o in outcomes),
            involuntary_stays=first.counters.involuntary_stays,
            peak_bytes=max(o.peak_bytes for o in outcomes),
        )

    def _text(self, token_ids: Sequence[int], eos: set[int]) -> str:
        return self._tokenizer.decode([t for t in token_ids if t not in eos]).strip()

    def _ceiling(self, costs: SegmentCosts, counters: ExitCounters) -> float:
        """t_f / (t_s + (1 − p) t_d) at this batch, for all exits: every stage at full batch size.

        The shares are those of the tokens that really left; the context is the prompts' mean.
        """
        ends, b = self.native.segment_ends, self.batch
        mean_tokens = statistics.fmean(len(p.token_ids) for p in self.prompts)
        n = b * mean_tokens
        last = len(ends) - 1
        full_s = costs.forecast_s(0, last + 1, b, n, tests=False)
        best_s = full_s
        total = max(1, sum(counters.tokens.values()))
        for exits in product((False, True), repeat=last):
            used = [i for i, is_used in enumerate(exits) if is_used]
            seconds, first, reach = 0.0, 0, 1.0
            for stop in [*(i + 1 for i in used), last + 1]:
                seconds += reach * costs.forecast_s(first, stop, b, n, tests=stop <= last)
                left = sum(counters.tokens.get(end, 0) for end in ends[:stop])
                reach, first = 1.0 - left / total, stop
            best_s = min(best_s, seconds)
        return full_s / best_s
