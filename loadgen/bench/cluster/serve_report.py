"""The figures of `bench serve`, their table and their JSON line."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from loadgen.report.experiment import print_line, show
from quadriga.checkpoint.folder import Checkpoint

WANTED_RATIO = 0.8
TABLE_WIDTH = 100


@dataclass(slots=True)
class Rounds:
    """Figures of one way to get the tokens, a value per round.

    Attributes:
        generator_us: CPU microseconds of the load generator per token; taken from the service
            where the machine has no core to spare.
        cpu_us: Part → CPU microseconds per token, a value per round. They tell what a busy
            machine hides in tokens/s. Only for the engine and a service started here.
    """

    name: str
    tokens_per_s: list[float] = field(default_factory=list)
    ttft_p50_s: list[float] = field(default_factory=list)
    generator_us: list[float] = field(default_factory=list)
    tokens_per_write: list[float] = field(default_factory=list)
    cpu_us: dict[str, list[float]] = field(default_factory=dict)

    @property
    def median(self) -> float:
        return statistics.median(self.tokens_per_s)


def overhead_us(rounds: Rounds, engine: Rounds) -> float:
    """Microseconds per token that the service adds to the engine's own: the rounds' median."""
    pairs = zip(rounds.tokens_per_s, engine.tokens_per_s, strict=True)
    return statistics.median(1e6 / a - 1e6 / b for a, b in pairs)


def share_of(rounds: Rounds, engine: Rounds) -> float:
    """Of the engine's speed: the median of the rounds' ratios."""
    pairs = zip(rounds.tokens_per_s, engine.tokens_per_s, strict=True)
    return statistics.median(a / b for a, b in pairs)


def print_table(measured: list[Rounds], args: argparse.Namespace) -> None:
    """Print speeds and shares, and where the CPU time goes; the engine comes first."""
    engine = measured[0]

    def over_engine(figure: Callable[[Rounds], str]) -> Callable[[Rounds], str | None]:
        return lambda rounds: None if rounds is engine else figure(rounds)

    show(
        measured,
        {
            "": lambda r: r.name,
            "tokens/s": lambda r: f"{r.median:,.0f}",
            "of engine": over_engine(lambda r: f"{share_of(r, engine):.2f}"),
            "added µs": over_engine(lambda r: f"{overhead_us(r, engine):,.0f}"),
            "TTFT ms": lambda r: f"{statistics.median(r.ttft_p50_s) * 1e3:,.0f}",
            "per write": over_engine(lambda r: f"{statistics.median(r.tokens_per_write):.2f}"),
            "generator µs": over_engine(lambda r: f"{statistics.median(r.generator_us):.1f}"),
        },
        title=f"{args.model}, {args.concurrency} at once, prompt {args.prompt_tokens}, "
        f"output {args.output_tokens}, {args.proxy} proxy, median of {args.rounds}",
        width=TABLE_WIDTH,
    )
    for rounds in measured:
        if rounds.cpu_us:
            medians = {part: statistics.median(us) for part, us in rounds.cpu_us.items()}
            parts = sorted(medians.items(), key=lambda item: -item[1])
            shown = ", ".join(f"{part} {us:,.0f}" for part, us in parts)
            total = sum(medians.values())
            print(f"{rounds.name}: {total:,.0f} CPU microseconds per token ({shown})")
    print(
        f"wanted: {WANTED_RATIO:g} of the engine; added and generator: microseconds per token; "
        "TTFT: P50, queueing included"
    )


def print_final_line(
    args: argparse.Namespace, checkpoint: Checkpoint, measured: list[Rounds]
) -> dict[str, Any]:
    """Print and return the last line: configuration, origin, every round."""
    engine, results = measured[0], []
    for rounds in measured:
        row: dict[str, Any] = {"median_tokens_per_s": rounds.median, **asdict(rounds)}
        if rounds is not engine:
            row["ratio"] = share_of(rounds, engine)
            row["overhead_us_per_token"] = overhead_us(rounds, engine)
        results.append(row)
    names = ("rounds", "requests", "concurrency", "prompt_tokens", "output_tokens", "threads")
    return print_line(
        "bench serve",
        checkpoint=checkpoint.id,
        config={"proxy": args.proxy if args.url is None else None}
        | {name: getattr(args, name) for name in (*names, "seed")},
        warm_up="one short pass over each transport and the engine, outside the clock",
        results=results,
        wanted_ratio=WANTED_RATIO,
        packages=("torch", "ray", "grpcio", "uvloop"),
    )
