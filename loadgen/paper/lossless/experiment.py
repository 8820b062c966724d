"""`python -m loadgen paper lossless`: exits that draft, against full depth, token for token.

Every contestant decodes the same task prompts greedily, one decode loop, one thread, each on an
engine of its own over the same kernels; prompts are computed outside the clock. They take short
turns, so that the machine's moods meet all alike, and the clock is the thread's processor time.

`off` runs every token through all layers. `lossless` is what the service does: rounds that draft or
full passes, by what it measured. `drafts` drafts in every round. `bounded` lets tokens leave early
(DREX, at the model's threshold): its answers differ, and it is shown for comparison. `smooth` is
`lossless` for requests that ask for gaps of 1.5 full passes (`sla_tbt_ms`): its gaps are those of
its tokens as the service passes them on, one by one. `asked` is `lossless` without the kernel that
drafts several tokens in a call.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import asdict, dataclass
from typing import Any

from loadgen.comparison.pairs import median_ratio
from loadgen.options import whole
from loadgen.paper.clocks import ProcessorClock
from loadgen.paper.drex.closed_loop import ClosedLoopRun
from loadgen.paper.lossless.lanes import (
    ASKED,
    BOUNDED,
    DRAFTS,
    LOSSLESS,
    OFF,
    SMOOTH,
    gap_p99_s,
    race,
)
from loadgen.report.experiment import keep_rows, publish, say, show
from loadgen.report.output import add_out_argument
from quadriga.checkpoint.folder import read_checkpoint
from quadriga.checkpoint.packaged_models import DEFAULT_MODEL

_WITH_EXITS = (OFF, LOSSLESS, ASKED, DRAFTS, BOUNDED, SMOOTH)
_WITHOUT = (OFF, LOSSLESS)


@dataclass(slots=True)
class LosslessRow:
    """One contestant with so many slots: medians over the rounds.

    Attributes:
        speedup: Over full depth in the same rounds.
        is_same: Every token of every answer is that of full depth.
        gap_p99: Over full depth's.
        tokens_per_round: Of a sequence, in rounds that drafted.
        accepted: Share of the verified drafts that agreed.
    """

    model: str
    slots: int
    mode: str
    tokens_per_s: float
    speedup: float
    is_same: bool
    gap_p99: float
    exact_match: float
    tokens_per_round: float
    accepted: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "--model",
        nargs="+",
        default=["quadriga-l", "quadriga-s", DEFAULT_MODEL],
        metavar="ID",
        help="bundled ids or checkpoint folders",
    )
    parser.add_argument(
        "--slots", nargs="+", type=whole(1), default=[1, 4, 8, 16, 32, 64], help="sequences at once"
    )
    parser.add_argument(
        "--prompts",
        type=whole(1),
        default=None,
        help="task prompts in a run; default: 6 a slot, at least 48",
    )
    parser.add_argument("--rounds", type=whole(1), help="default: 3, with --quick 1")
    parser.add_argument("--threads", type=whole(1), default=1, help="CPU threads of the engine")
    parser.add_argument("--max-tokens", type=whole(2), default=400, help="of an answer")
    parser.add_argument("--quick", action="store_true", help="one short round, within 5 minutes")
    add_out_argument(parser, "results/paper")


def run(args: argparse.Namespace) -> int:
    """Measure all settings; returns 0, or 1 where a token differs."""
    rows: list[LosslessRow] = []
    for model in args.model:
        has_exits = bool(read_checkpoint(model).exits.layers)
        for slots in args.slots:
            rows += _measure(args, model, slots, _WITH_EXITS if has_exits else _WITHOUT)
            keep_rows("lossless", [asdict(row) for row in rows], args.out)
    show(
        rows,
        {
            "model": lambda r: r.model,
            "slots": lambda r: r.slots,
            "mode": lambda r: r.mode,
            "tokens/s": lambda r: f"{r.tokens_per_s:,.0f}",
            "over off": lambda r: f"{r.speedup:.2f}",
            "same": lambda r: "yes" if r.is_same else "no",
            "P99 gap over off": lambda r: f"{r.gap_p99:.2f}",
            "exact match": lambda r: f"{r.exact_match:.3f}",
            "tokens a round": lambda r: f"{r.tokens_per_round:.2f}",
            "accepted": lambda r: f"{r.accepted:.3f}",
        },
    )
    line = headline(rows)
    publish("lossless", line, [asdict(row) for row in rows], args.out)
    return 0 if line["identical"] else 1


def _measure(
    args: argparse.Namespace, model: str, slots: int, names: tuple[str, ...]
) -> list[LosslessRow]:
    """All contestants of one setting."""
    rounds: list[dict[str, ClosedLoopRun]] = []
    least = max(12, 3 * slots) if args.quick else max(48, 6 * slots)
    for _ in range(args.rounds or (1 if args.quick else 3)):
        suite, runs = race(
            model,
            names,
            slots=slots,
            num_prompts=args.prompts or least,
            max_tokens=args.max_tokens,
            threads=args.threads,
            clock=ProcessorClock(),
            say=say,
        )
        rounds.append(runs)
    rows = []
    for name in names:
        ours, full = [r[name] for r in rounds], [r[OFF] for r in rounds]
        counters = ours[0].counters
        right = suite.right(ours[0].outputs)
        rows.append(
            LosslessRow(
                model=model,
                slots=slots,
                mode=name,
                tokens_per_s=statistics.median(o.tokens_per_s for o in ours),
                speedup=median_ratio(
                    [o.tokens_per_s for o in ours], [o.tokens_per_s for o in full]
                ),
                is_same=all(a.outputs == b.outputs for a, b in zip(ours, full, strict=True)),
                gap_p99=median_ratio([gap_p99_s(o) for o in ours], [gap_p99_s(o) for o in full]),
                exact_match=sum(right) / len(right),
                tokens_per_round=1.0 + counters.accepted / max(1, counters.verified * slots),
                accepted=counters.accepted / max(1, counters.drafted),
            )
        )
    return rows


def headline(rows: list[LosslessRow]) -> dict[str, Any]:
    """What the last line says."""
    by = {(r.model, r.slots, r.mode): r for r in rows}
    speedup: dict[str, dict[str, float]] = {}
    worst, gaps = [], []
    for (model, slots, mode), row in by.items():
        if mode != LOSSLESS:
            continue
        speedup.setdefault(model, {})[str(slots)] = round(row.speedup, 3)
        single = [by[model, slots, m].speedup for m in (OFF, DRAFTS) if (model, slots, m) in by]
        worst.append(row.speedup / max(single))
        if (model, slots, SMOOTH) in by:
            gaps.append(by[model, slots, SMOOTH].gap_p99)
    return {
        "identical": all(r.is_same for r in rows if r.mode != BOUNDED),
        "speedup": speedup,
        "worst_vs_best_mode": round(min(worst), 3),
        "p99_gap_paced": round(max(gaps), 3) if gaps else None,
    }
