"""The figures of `bench serve`, their table and their JSON line."""

from __future__ import annotations

import argparse
import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from loadgen.report import provenance
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
    """Microseconds per token that the service adds to the engine's own."""
    return 1e6 / rounds.median - 1e6 / engine.median


def print_table(measured: list[Rounds], args: argparse.Namespace) -> None:
    """Print speeds and shares, and where the CPU time goes; the engine comes first."""
    engine = measured[0]
    table = Table(
        title=f"{args.model}, {args.concurrency} at once, prompt {args.prompt_tokens}, "
        f"output {args.output_tokens}, {args.proxy} proxy, median of {args.rounds}"
    )
    for column in ("", "tokens/s", "of engine", "added µs", "TTFT ms", "per write", "generator µs"):
        table.add_column(column, justify="right", no_wrap=True)
    for rounds in measured:
        cells = [rounds.name, f"{rounds.median:,.0f}"]
        ttft_ms = f"{statistics.median(rounds.ttft_p50_s) * 1e3:,.0f}"
        if rounds is engine:
            cells += ["", "", ttft_ms, "", ""]
        else:
            cells += [
                f"{rounds.median / engine.median:.2f}",
                f"{overhead_us(rounds, engine):,.0f}",
                ttft_ms,
                f"{statistics.median(rounds.tokens_per_write):.2f}",
                f"{statistics.median(rounds.generator_us):.1f}",
            ]
        table.add_row(*cells)
    Console(width=TABLE_WIDTH).print(table)
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


def final_line(
    args: argparse.Namespace, checkpoint: Checkpoint, measured: list[Rounds]
) -> dict[str, Any]:
    """Return the final JSON line: configuration, origin, every round."""
    engine, results = measured[0], []
    for rounds in measured:
        row: dict[str, Any] = {"median_tokens_per_s": rounds.median, **asdict(rounds)}
        if rounds is not engine:
            row["ratio"] = rounds.median / engine.median
            row["overhead_us_per_token"] = overhead_us(rounds, engine)
        results.append(row)
    names = ("rounds", "requests", "concurrency", "prompt_tokens", "output_tokens", "threads")
    return {
        "benchmark": "serve",
        "checkpoint": checkpoint.id,
        "config": {"proxy": args.proxy if args.url is None else None}
        | {name: getattr(args, name) for name in (*names, "seed")},
        "warm_up": "one short pass over each transport and the engine, outside the clock",
        "results": results,
        "wanted_ratio": WANTED_RATIO,
        "commit": provenance.commit(),
        "machine": provenance.machine(),
        "versions": provenance.versions("torch", "ray", "grpcio", "uvloop"),
    }
