"""`paper ares-predictor`: remaining length from the model's own states, against other predictors.

Source: ARES, Table 1 (error, parameters, latency), figure 7 (error by tokens generated), §5.3 (how
often to predict). Every predictor sees the same requests, really generated, divided into training,
validation and test by request, anew by each of `--seeds`; encoders of several sizes are trained as
long as their error on validation falls, or until their time is up. What is gained is stated against
the best of them on validation, and against each at each seed.

Also in the form of ForeLen (the benchmark of "Predicting LLM Output Length via Entropy-Guided
Representations"): mean absolute error by scenario, of the whole answer's length said after the
prompt, and of what remains said while it is generated. Scenarios are our prompts' domains.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from loadgen.options import number, whole
from loadgen.paper.ares.length_contest import (
    ASK_EVERY,
    BATCHES,
    Contest,
    LengthPredictor,
    asked_of,
    averaged,
    hold,
    timed,
)
from loadgen.paper.ares.length_encoder import EncoderSize
from loadgen.paper.native import load_native
from loadgen.report.experiment import drawn, publish, table_of
from loadgen.report.figures import shown
from loadgen.report.output import add_out_argument
from loadgen.report.progress import Steps
from quadriga.checkpoint.folder import read_checkpoint
from quadriga.scheduling.calibration import Dummies
from quadriga.training.heads import collect, collected, load
from quadriga.tune.lengths import MEDIAN, LengthData, measure
from quadriga.tune.prompts import TASKS_NAME, TunePrompt, read_prompts

SWEEP = (EncoderSize(2, 64), EncoderSize(2, 128), EncoderSize(4, 128), EncoderSize(4, 256))
QUICK_SWEEP = (EncoderSize(2, 64), EncoderSize(2, 128))
INTERVALS = tuple(ASK_EVERY * 2**i for i in range(5))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "--checkpoint", default="quadriga-l", help="bundled or packaged name, or checkpoint folder"
    )
    parser.add_argument("--requests", type=whole(1), help="per task; default: 300, with --quick 40")
    parser.add_argument(
        "--prompts", metavar="FILE", help="of quadriga.tune, instead of the tasks' prompts"
    )
    parser.add_argument(
        "--work",
        type=Path,
        metavar="DIR/work",
        help="of a quadriga.tune with these --prompts: answers and states are taken from there",
    )
    parser.add_argument(
        "--encoder-s",
        type=number(0),
        help="processor seconds to train one size; default: 240, with --quick 45",
    )
    parser.add_argument("--seed", type=whole(0), default=0, help="the first, of everything random")
    parser.add_argument(
        "--seeds",
        type=whole(1),
        help="so many, with a split and predictors each; default: 3, with --quick 1",
    )
    parser.add_argument("--threads", type=whole(1), default=1, help="torch threads")
    parser.add_argument("--quick", action="store_true", help="fewer requests and sizes: 5 minutes")
    add_out_argument(parser, "results/paper")


def run(args: argparse.Namespace) -> int:
    """Run the experiment and print its tables; returns the exit status."""
    with tempfile.TemporaryDirectory() as work:
        return _run(args, Path(work))


def _run(args: argparse.Namespace, work: Path) -> int:
    """With a folder for the states."""
    torch.set_num_threads(args.threads)
    checkpoint = read_checkpoint(args.checkpoint)
    requests = args.requests or (40 if args.quick else 300)
    budget_s = args.encoder_s or (45.0 if args.quick else 240.0)
    sizes = QUICK_SWEEP if args.quick else SWEEP
    console = Console()
    source = args.prompts or f"{TASKS_NAME}{requests}"
    prompts = read_prompts(source)
    if args.work is not None:
        data = collected(args.work, prompts)
    else:
        data = _collect(args.checkpoint, prompts, work, args.threads)
    samples, count = len(data.remaining), len(data.token_ids)
    console.print(f"{checkpoint.id}: {samples:,} samples of {count:,} requests")
    contests: list[tuple[Contest, torch.Tensor]] = []
    for seed in range(args.seed, args.seed + (args.seeds or (1 if args.quick else 3))):
        console.print(f"seed {seed}")
        train, validation, test = data.split(seed=seed)
        parts = train, validation, asked_of(data, test)
        contest = hold(data, parts, sizes, checkpoint.vocab_size, budget_s, seed, console.print)
        contests.append((contest, parts[2]))
    first, test = contests[0]
    rows = [_row(p, data, test) for p in first.predictors]
    intervals = _by_interval(first.alone, data, test)
    _print(rows, intervals, console)
    gains = [gained(contest, data, part, sizes) for contest, part in contests]
    _print_gains(gains, console)
    domains = {prompt.id: prompt.domain for prompt in prompts}
    scenarios = by_scenario(first, data, test, domains)
    _print_scenarios(scenarios, console)
    ours = _row(first.ours, data, test)
    auxiliary = _row(first.encoders[first.best], data, test)
    headline = {
        "mae_reduction_vs_best_auxiliary": _mean(g["best"] for g in gains),
        "mae_reduction_each_answer_alone": _mean(g["best_alone"] for g in gains),
        "least_mae_reduction_of_any_size_and_seed": min(min(g["sizes"].values()) for g in gains),
        "seeds": len(gains),
        "whole_length_mae_after_prompt": scenarios[-1]["whole"]["head, each answer alone"],
        "parameter_reduction": round(1 - ours["parameters"] / auxiliary["parameters"], 4),
        "latency_ratio": round(ours["latency_ms"]["10"] / auxiliary["latency_ms"]["10"], 4),
        "step_overhead": _step_overhead(args.checkpoint, ours["latency_ms"]["10"] / 1e3),
    }
    _plot(rows, intervals, args.out / "ares-predictor.png")
    more = [{"intervals": intervals}, {"gains": gains}, {"scenarios": scenarios}]
    publish("ares-predictor", headline, [*rows, *more], args.out)
    return 0


def _mean(values: Iterable[float]) -> float:
    return round(statistics.fmean(values), 4)


def gained(
    contest: Contest, data: LengthData, test: torch.Tensor, sizes: Sequence[EncoderSize]
) -> dict[str, Any]:
    """By how much our error is less than the encoders', on one split's test part."""
    ours = _row(contest.ours, data, test)["mae"]
    alone = _row(contest.alone, data, test)["mae"]
    theirs = [_row(p, data, test)["mae"] for p in contest.encoders]
    each = _row(contest.encoders_alone[contest.best], data, test)["mae"]
    return {
        "ours": ours,
        "encoders": {size.name: mae for size, mae in zip(sizes, theirs, strict=True)},
        "sizes": {
            size.name: round(1 - ours / mae, 4) for size, mae in zip(sizes, theirs, strict=True)
        },
        "best_size": sizes[contest.best].name,
        "best": round(1 - ours / theirs[contest.best], 4),
        "best_alone": round(1 - alone / each, 4),
    }


def by_scenario(
    contest: Contest, data: LengthData, test: torch.Tensor, domains: Mapping[str, str]
) -> list[dict[str, Any]]:
    """ForeLen's form: by scenario and in all, error of the whole length and of what remains."""
    of_request = [domains[name] for name in data.ids]
    of_sample = [of_request[int(r)] for r in data.requests[test]]
    truth, at_start = data.remaining[test].float(), data.generated[test] == 0
    found = []
    for scenario in [*sorted(set(of_sample)), ""]:
        mine = torch.tensor([not scenario or name == scenario for name in of_sample])
        row: dict[str, Any] = {
            "scenario": scenario or "all",
            "requests": len(set(data.requests[test][mine].tolist())),
            "mean_tokens": round(float(truth[mine & at_start].mean()), 1),
        }
        for kind, chosen in (("whole", mine & at_start), ("remaining", mine)):
            row[kind] = {
                p.name: round(float((p.outputs[:, MEDIAN] - truth)[chosen].abs().mean()), 2)
                for p in contest.predictors
                if p.name not in ("oracle", "head, once", "encoder, once")
            }
        found.append(row)
    return found


def _collect(model: str, prompts: list[TunePrompt], work: Path, threads: int) -> LengthData:
    llm = load(model, threads)
    with Steps(Console(stderr=True), "requests", len(prompts)) as steps:
        data = collect(llm, prompts, work, steps.advance)
    llm.close()
    return data


def _by_interval(
    alone: LengthPredictor, data: LengthData, test: torch.Tensor
) -> list[dict[str, Any]]:
    """Error where the head is asked only every k tokens, answers are averaged, and counted down in
    between."""
    at = {
        (int(r), int(g)): i
        for i, (r, g) in enumerate(zip(data.requests[test], data.generated[test], strict=True))
    }
    truth = data.remaining[test].float()
    found = []
    for k in INTERVALS:
        believed = averaged(alone.outputs, data, test, every=k)
        asked = data.generated[test] // k * k
        index = torch.tensor(
            [at[int(r), int(g)] for r, g in zip(data.requests[test], asked, strict=True)]
        )
        left = (believed[index, MEDIAN] - (data.generated[test] - asked)).clamp(min=0.0)
        found.append({"k": k, "mae": round(float((left - truth).abs().mean()), 3)})
    return found


def _row(predictor: LengthPredictor, data: LengthData, test: torch.Tensor) -> dict[str, Any]:
    figures = measure(predictor.outputs, data.generated[test], data.remaining[test])
    latency = predictor.latency_s
    return {
        "name": predictor.name,
        "parameters": predictor.parameters,
        "latency_ms": {str(n): round(1e3 * s, 4) for n, s in (latency or {}).items()},
    } | figures


def _step_overhead(checkpoint: str, predict_s: float) -> float:
    """Share of decode time: one batched prediction in so many steps of ten sequences."""
    step_s = _step_s(checkpoint, batch=10)
    return round(predict_s / (ASK_EVERY * step_s), 5)


def _step_s(checkpoint: str, *, batch: int) -> float:
    """Median time of a full-depth decode step of the engine, with 100 tokens of context."""
    threads = torch.get_num_threads()
    runner = load_native(read_checkpoint(checkpoint), num_rows=batch, threads=threads)
    with Dummies(runner, batch, 100) as dummies:
        return timed(dummies.decode)


def _print(rows: list[dict[str, Any]], intervals: list[dict[str, Any]], console: Console) -> None:
    columns: dict[str, Callable[[dict[str, Any]], object]] = {
        "predictor": lambda r: r["name"],
        "MAE": lambda r: f"{r['mae']:.2f}",
        "parameters": lambda r: f"{r['parameters']:,}",
    }
    columns |= {
        f"ms, batch {n}": lambda r, n=n: shown(r["latency_ms"].get(str(n)), ".3f")  # type: ignore[misc]
        for n in BATCHES
    }
    columns["by quarter of the answer"] = lambda r: ", ".join(
        shown(mae, ".1f") for mae in r["mae_by_quarter"]
    )
    columns["below q90"] = lambda r: f"{r['calibration'][-1][1]:.2f}"
    title = "Remaining tokens, on requests that no predictor was trained on"
    console.print(table_of(rows, columns, title=title))
    console.print("asked every k tokens: " + ", ".join(f"{i['k']}: {i['mae']}" for i in intervals))


def _print_gains(gains: list[dict[str, Any]], console: Console) -> None:
    columns: dict[str, Callable[[int], object]] = {
        "split": lambda i: i,
        "head, averaged": lambda i: f"{gains[i]['ours']:.2f}",
    }
    columns |= {
        name: lambda i, name=name: (
            f"{gains[i]['encoders'][name]:.2f} ({-gains[i]['sizes'][name]:+.1%})"
        )
        for name in gains[0]["encoders"]
    }
    columns["best on validation"] = lambda i: gains[i]["best_size"]
    title = "MAE of the head and of each encoder, and what ours is less, by split"
    console.print(table_of(range(len(gains)), columns, title=title))


def _print_scenarios(scenarios: list[dict[str, Any]], console: Console) -> None:
    columns: dict[str, Callable[[dict[str, Any]], object]] = {
        "scenario": lambda r: r["scenario"],
        "requests": lambda r: r["requests"],
        "mean tokens": lambda r: r["mean_tokens"],
    }
    columns |= {
        name: lambda r, name=name: f"{r['whole'][name]:.1f} / {r['remaining'][name]:.1f}"
        for name in scenarios[0]["whole"]
    }
    title = "ForeLen's form: MAE of the whole length after the prompt / of what remains"
    console.print(table_of(scenarios, columns, title=title))


def _plot(rows: list[dict[str, Any]], intervals: list[dict[str, Any]], file: Path) -> None:
    """Error by tokens generated and by interval, and our head's calibration."""
    with drawn(file, 3, size=(5.0, 4.2)) as axes:
        left, middle, right = axes[0]
        for row in rows:
            if row["name"] != "oracle":
                bins = [mae for *_, mae in row["mae_by_generated"]]
                left.plot(range(len(bins)), bins, marker="o", label=row["name"], linewidth=1.5)
        labels = [f"{a}–{b}" for a, b, *_ in rows[0]["mae_by_generated"]]
        left.set_xticks(range(len(labels)), labels, rotation=30)
        left.set(xlabel="tokens generated", ylabel="mean absolute error, tokens", yscale="log")
        left.legend(fontsize=7)
        middle.plot([i["k"] for i in intervals], [i["mae"] for i in intervals], marker="o")
        middle.set(xlabel="asked every k tokens", ylabel="mean absolute error, tokens")
        ours = rows[0]["calibration"]
        right.plot([0, 1], [0, 1], color="0.7", linewidth=1)
        right.plot([level for level, _ in ours], [share for _, share in ours], marker="o")
        right.set(xlabel="quantile predicted", ylabel="share of truths at or below it")
