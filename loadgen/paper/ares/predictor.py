"""`paper ares-predictor`: remaining length from the model's own states, against other predictors.

Source: ARES, Table 1 (error, parameters, latency), figure 7 (error by tokens generated), §5.3 (how
often to predict). Every predictor sees the same requests, really generated, divided into training,
validation and test by request; the auxiliary encoder is the best on validation of a sweep of sizes,
each trained as long as it gains, or until its time is up.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from loadgen.options import number, whole
from loadgen.paper.ares.length_contest import (
    BATCHES,
    MEDIAN,
    LengthPredictor,
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
from quadriga.tune.lengths import SAMPLE_EVERY, LengthData, measure
from quadriga.tune.prompts import TASKS_NAME, read_prompts

SWEEP = (EncoderSize(2, 64), EncoderSize(2, 128), EncoderSize(4, 128), EncoderSize(4, 256))
QUICK_SWEEP = (EncoderSize(2, 64), EncoderSize(2, 128))
INTERVALS = (20, 40, 80, 160, 320)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "--checkpoint", default="quadriga-l", help="bundled or packaged name, or checkpoint folder"
    )
    parser.add_argument("--requests", type=whole(1), default=300, help="per task")
    parser.add_argument(
        "--prompts", metavar="FILE", help="of quadriga.tune, instead of the tasks' prompts"
    )
    parser.add_argument(
        "--work", type=Path, metavar="DIR/work",
        help="of a quadriga.tune with these --prompts: answers and states are taken from there",
    )  # fmt: skip
    parser.add_argument(
        "--encoder-s", type=number(0), default=240.0, help="processor seconds to train one size"
    )
    parser.add_argument("--seed", type=whole(0), default=0, help="of everything random")
    parser.add_argument("--threads", type=whole(1), default=1, help="torch threads")
    parser.add_argument("--quick", action="store_true", help="fewer requests and sizes: 5 minutes")
    add_out_argument(parser, "results/paper")


def run(args: argparse.Namespace) -> int:
    """Run the experiment and print its tables; returns the exit status."""
    torch.set_num_threads(args.threads)
    checkpoint = read_checkpoint(args.checkpoint)
    requests = min(args.requests, 40) if args.quick else args.requests
    budget_s = min(args.encoder_s, 45.0) if args.quick else args.encoder_s
    sizes = QUICK_SWEEP if args.quick else SWEEP
    console = Console()
    source = args.prompts or f"{TASKS_NAME}{requests}"
    if args.work is not None:
        data = collected(args.work, read_prompts(source))
    else:
        data = _collect(args.checkpoint, source, args.threads)
    train, validation, test = data.split(seed=args.seed)
    samples, count = len(data.remaining), len(data.token_ids)
    console.print(f"{checkpoint.id}: {samples:,} samples of {count:,} requests")
    contest = hold(
        data,
        (train, validation, test),
        sizes,
        checkpoint.vocab_size,
        budget_s,
        args.seed,
        console.print,
    )
    rows = [_row(p, data, test) for p in contest.predictors]
    intervals = _by_interval(contest.alone, data, test)
    _print(rows, contest.losses, intervals, console)
    ours, auxiliary = _row(contest.ours, data, test), _row(contest.auxiliary, data, test)
    alone = [_row(p, data, test)["mae"] for p in (contest.alone, contest.auxiliary_alone)]
    headline = {
        "mae_reduction_vs_best_auxiliary": round(1 - ours["mae"] / auxiliary["mae"], 4),
        "mae_reduction_each_answer_alone": round(1 - alone[0] / alone[1], 4),
        "parameter_reduction": round(1 - ours["parameters"] / auxiliary["parameters"], 4),
        "latency_ratio": round(ours["latency_ms"]["10"] / auxiliary["latency_ms"]["10"], 4),
        "step_overhead": _step_overhead(args.checkpoint, ours["latency_ms"]["10"] / 1e3),
    }
    _plot(rows, intervals, args.out / "ares-predictor.png")
    publish("ares-predictor", headline, [*rows, {"intervals": intervals}], args.out)
    return 0


def _collect(model: str, source: str, threads: int) -> LengthData:
    prompts, llm = read_prompts(source), load(model, threads)
    with Steps(Console(stderr=True), "requests", len(prompts)) as steps:
        data = collect(llm, prompts, steps.advance)
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
    """Share of decode time: one batched prediction in every 20 steps of ten sequences."""
    step_s = _step_s(checkpoint, batch=10)
    return round(predict_s / (SAMPLE_EVERY * step_s), 5)


def _step_s(checkpoint: str, *, batch: int) -> float:
    """Median time of a full-depth decode step of the engine, with 100 tokens of context."""
    threads = torch.get_num_threads()
    runner = load_native(read_checkpoint(checkpoint), num_rows=batch, threads=threads)
    with Dummies(runner, batch, 100) as dummies:
        return timed(dummies.decode)


def _print(
    rows: list[dict[str, Any]],
    losses: dict[str, float],
    intervals: list[dict[str, Any]],
    console: Console,
) -> None:
    columns: dict[str, Callable[[dict[str, Any]], object]] = {
        "predictor": lambda r: r["name"],
        "MAE": lambda r: f"{r['mae']:.2f}",
        "parameters": lambda r: f"{r['parameters']:,}",
    }
    columns |= {
        f"ms, batch {n}": lambda r, n=n: shown(r["latency_ms"].get(str(n)), ".3f")  # type: ignore[misc]
        for n in BATCHES
    }
    columns["below q90"] = lambda r: f"{r['calibration'][-1][1]:.2f}"
    title = "Remaining tokens, on requests that no predictor was trained on"
    console.print(table_of(rows, columns, title=title))
    sweep = ", ".join(f"{name}: {loss:.4f}" for name, loss in losses.items())
    console.print(f"auxiliary encoders, loss on validation: {sweep}")
    console.print("asked every k tokens: " + ", ".join(f"{i['k']}: {i['mae']}" for i in intervals))


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
