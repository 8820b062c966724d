"""The report at the end: a table for the terminal, a page, all figures as JSON, and plots."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from quadriga.checkpoint.exits import NEVER
from quadriga.errors import ConfigError
from quadriga.files import write_atomically
from quadriga.tune.outcome import BATCHES
from quadriga.tune.prompts import ALL
from quadriga.tune.thresholds import Verdicts

REPORT_FILE = "report.md"
FIGURES_FILE = "report.json"
PLOT_FILE = "report.png"
CUT_SHARE = 0.1
"""Of answers; where more are cut, what length heads learn is the cut."""
NEVER_WORSE = float("inf")


@contextmanager
def progress(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on standard error; yields what is called with the number that was done."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)


def check_plots() -> None:
    """Raises: ConfigError: The report's plots cannot be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "--parts: the report has plots, and matplotlib is not installed; in a checkout: "
            "pip install '.[tune]'; or leave `report` out"
        )


def write_report(folder: Path, figures: Mapping[str, Any], verdicts: Verdicts | None) -> str:
    """Write all three; returns the page."""
    page = page_of(figures)
    write_atomically(folder / REPORT_FILE, page.encode())
    write_atomically(folder / FIGURES_FILE, (json.dumps(figures, indent=1) + "\n").encode())
    if verdicts is not None and verdicts.confidence.shape[1]:
        plot(folder / PLOT_FILE, figures, verdicts)
    return page


def page_of(figures: Mapping[str, Any]) -> str:
    """All figures as Markdown."""
    parts = [f"# Exits of {figures['model']}\n"]
    if (spec := figures.get("exits")) and spec["layers"]:
        sure = ", ".join(f"{k}: {v:.3f}" for k, v in spec.get("sure_from", {}).items())
        parts.append(
            f"Kind `{spec['kind']}`, after layers {', '.join(map(str, spec['layers'])) or 'none'} "
            f"of {figures['num_layers']}; a token leaves by default when it is as sure as "
            f"{sure or spec['threshold']}.\n"
        )
    if given_up := figures.get("given_up"):
        parts.append("Given up: " + "; ".join(given_up) + ".\n")
    if rows := figures.get("domains"):
        parts.append("## Tokens of answers that nothing was learned on\n")
        parts.append(
            table(
                ["domain", "threshold", "tokens", "leave early", "agree", "changed", "loss, nats"],
                [
                    [
                        row["domain"] + (" (held back)" if row["held_back"] else ""),
                        f"{row['threshold']:g}",
                        f"{row['tokens']:,}",
                        f"{row['early']:.3f}",
                        f"{row['agreement']:.4f}",
                        f"{row['changed']:.4f}",
                        f"{row['loss']:.4f}",
                    ]
                    for row in rows
                ],
            )
        )
    if rows := figures.get("speed"):
        parts.append("## Speed on this machine, greedy, tokens/s\n")
        parts.append(
            table(
                ["batch", "full depth", "exits leave", "left early", "exits draft", "agreed"],
                [
                    [
                        str(row["batch"]),
                        f"{row['full']:.1f}",
                        f"{row['exits']:.1f} ({row['over_full']['exits']:.2f} ×)",
                        f"{row['early']:.3f}",
                        f"{row['drafts']:.1f} ({row['over_full']['drafts']:.2f} ×)",
                        "no drafts" if row["agreed"] is None else f"{row['agreed']:.3f}",
                    ]
                    for row in rows
                ],
            )
        )
    if whole := figures.get("answers"):
        parts.append(
            f"Whole answers with exits: {whole['same']:.0%} of {whole['answers']} are those of "
            f"full depth; log-likelihood under full depth {whole['loglik_exits']:.3f} a token "
            f"against {whole['loglik_full']:.3f}.\n"
        )
    if maps := figures.get("maps"):
        parts.append("## Maps for skipped KV: share of variance left unexplained\n")
        parts.append(table(["map", "share"], [[k, f"{v:.3f}"] for k, v in maps.items()]))
    if lengths := figures.get("lengths"):
        parts.append("## Length heads, on requests they have not seen\n")
        parts.append(
            table(
                ["behind layers", "samples", "MAE, tokens", "of the median", "mean still to come"],
                [
                    [
                        k,
                        str(v["samples"]),
                        f"{v['mae']:.2f}",
                        f"{v['mae_of_median']:.2f}" if "mae_of_median" in v else "",
                        f"{v['mean_remaining']:.1f}",
                    ]
                    for k, v in lengths.items()
                ],
            )
        )
    return "\n".join(parts)


def table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(heading) + " |", "|" + "---|" * len(heading)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def plot(file: Path, figures: Mapping[str, Any], verdicts: Verdicts) -> None:
    """Each exit alone: how many leave and how many of them agree, by threshold; and the loss."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4))
    left, right = figure.subplots(1, 2)
    for row, depth in enumerate(verdicts.depths):
        order = np.argsort(-verdicts.confidence[row], kind="stable")
        count = np.arange(1, len(order) + 1)
        share = count / len(order)
        agree = 1 - np.cumsum(verdicts.changed[row, order]) / count
        loss = np.cumsum(verdicts.lost[row, order]) / len(order)
        skip = max(1, len(order) // 400)
        left.plot(share[::skip], agree[::skip], label=f"after {depth} layers")
        right.plot(share[::skip], loss[::skip], label=f"after {depth} layers")
    chosen = [r for r in figures.get("domains", []) if r["domain"] == ALL]
    for row in chosen:
        left.plot(row["early"], row["agreement"], "k+")
        right.plot(row["early"], row["loss"], "k+")
    left.set(xlabel="share that leaves early", ylabel="of them as at full depth", ylim=(0.5, 1.01))
    right.set(xlabel="share that leaves early", ylabel="log-likelihood lost, nats a token")
    left.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=110, metadata={"Software": None})


def given_up(figures: Mapping[str, Any], wanted: Sequence[int]) -> list[str]:
    """What the user should know is missing.

    Args:
        wanted: Exits that were asked for.
    """
    found = []
    if unanswered := figures.get("unanswered"):
        found.append(
            f"{unanswered} prompts: too long for the model with --max-tokens behind them, or their "
            "answers failed; nothing was learned of them"
        )
    spec = figures.get("exits") or {}
    gone = [k for k in wanted if k not in spec.get("layers", [])]
    if spec and gone:
        found.append(
            f"exits after {', '.join(map(str, gone))}: too few tokens leave there within the budget"
        )
    never = [k for k, v in spec.get("sure_from", {}).items() if v >= NEVER]
    if never:
        found.append(f"exits after {', '.join(never)} are never left by default")
    has_maps = {name.split(".")[1] for name in figures.get("maps") or ()}
    last = figures["num_layers"] - 1  # its KV is never skipped
    bare = [str(k) for k in spec.get("layers", []) if k < last and str(k) not in has_maps]
    if bare:
        found.append(
            f"maps for exits after {', '.join(bare)}: not fitted, so the layers' own projections "
            "stand in; do the part maps"
        )
    heads = figures.get("lengths") or {}
    if (cut := figures.get("cut", 0.0)) > CUT_SHARE and heads:
        found.append(
            f"length heads: {cut:.0%} of the answers were cut at --max-tokens and count as ended "
            "there; allow more"
        )
    if blind := [k for k, v in heads.items() if v["mae"] >= v.get("mae_of_median", NEVER_WORSE)]:
        found.append(
            f"length heads behind {', '.join(blind)} layers: no better than the answers' median "
            "length; give more prompts"
        )
    if (there := figures.get("speed_prompts")) is not None:
        speed = figures.get("speed") or []
        untimed = [str(n) for n in BATCHES if n > there]
        if untimed:
            found.append(
                f"speed at batch {', '.join(untimed)}: not measured, {there} prompts of the test "
                "part were used (--speed-prompts)"
            )
        if unused := [str(r["batch"]) for r in speed if not r["early"]]:
            found.append(
                f"exits at batch {', '.join(unused)}: the engine found that leaving early does not "
                "pay there, and no token did"
            )
        if undrafted := [str(r["batch"]) for r in speed if r["agreed"] is None]:
            found.append(
                f"drafts at batch {', '.join(undrafted)}: the engine found that they do not pay "
                "there, and made none"
            )
        for way, what in (("exits", "leaving early"), ("drafts", "drafting")):
            if slow := [
                str(r["batch"]) for r in speed if _is_used(r, way) and r["over_full"][way] < 1
            ]:
                found.append(f"speed of {what} at batch {', '.join(slow)}: full depth is faster")
    return found


def _is_used(row: Mapping[str, Any], way: str) -> bool:
    return bool(row["early"]) if way == "exits" else row["agreed"] is not None
