"""`python -m loadgen bench profile`: a cost profile of this machine for the simulator.

Times decode steps over batch sizes and contexts, and prefill passes over lengths, on the real
engine with one thread, and fits `base + per sequence · b + per token · n` (steps of two sequences
and more) and `base + per token · n + per pair · n²` (prefill). Processor time of the engine's
thread counts, so that a busy machine does not spoil the fit. The numbers go into
`quadriga.sim.profiles`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadgen.model_costs.timing import decode_step_s, prefill_s
from loadgen.options import whole
from loadgen.report.experiment import print_line, show

BATCHES = (1, 2, 4, 8, 16, 32)
CONTEXTS = (16, 128, 384)
PROMPTS = (16, 64, 128, 256, 448)


@dataclass(frozen=True, slots=True)
class Fit:
    """Coefficients, none negative, and the mean of |fitted / measured − 1|."""

    coefficients: tuple[float, ...]
    mean_error: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--model", default="quadriga-l", help="bundled id, folder, GGUF file, or hub id"
    )
    parser.add_argument("--repeats", type=whole(1), default=5, help="of each timing")


def run(args: argparse.Namespace) -> int:
    """Measure and fit; prints a table and one JSON line."""
    from loadgen.model_costs.engine import engine_spec
    from quadriga.checkpoint.folder import read_checkpoint
    from quadriga.engine import load_runner

    checkpoint = read_checkpoint(args.model)
    rows = min(512, checkpoint.max_model_len)
    runner = load_runner(
        engine_spec(checkpoint, threads=1, num_rows=max(BATCHES), row_capacity_tokens=rows)
    )
    steps = [
        (b, b * n, decode_step_s(runner, b, n, args.repeats))
        for b in BATCHES
        for n in CONTEXTS
        if n < rows
    ]
    prefills = [(n, prefill_s(runner, n, args.repeats)) for n in PROMPTS if n < rows]
    batched = [s for s in steps if s[0] > 1]  # one sequence alone goes through other kernels
    step = fit(np.array([(1.0, b, n) for b, n, _ in batched]), np.array([s for *_, s in batched]))
    prefill = fit(
        np.array([(1.0, n, n * n) for n, _ in prefills]), np.array([s for _, s in prefills])
    )
    _print(steps, prefills, step, prefill)
    names = ("base_s", "per_sequence_s", "per_token_s"), ("base_s", "per_token_s", "per_pair_s")
    print_line(
        "bench profile",
        model=checkpoint.id,
        step=dict(zip(names[0], step.coefficients, strict=True)),
        prefill=dict(zip(names[1], prefill.coefficients, strict=True)),
        mean_error={"step": step.mean_error, "prefill": prefill.mean_error},
        steps=steps,
        prefills=prefills,
    )
    return 0


def fit(terms: NDArray[np.float64], seconds: NDArray[np.float64]) -> Fit:
    """Least squares on relative errors, with no coefficient below 0.

    Args:
        terms: [num_points, num_coefficients].
        seconds: [num_points].
    """
    weighted = terms / seconds[:, None]
    kept = list(range(terms.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(weighted[:, kept], np.ones(len(seconds)), rcond=None)
        if (found >= 0.0).all():
            break
        kept.pop(int(np.argmin(found)))
    coefficients = np.zeros(terms.shape[1])
    coefficients[kept] = found
    error = np.abs(terms @ coefficients / seconds - 1.0).mean()
    return Fit(tuple(float(f"{c:.4g}") for c in coefficients), float(round(error, 4)))


def _print(
    steps: list[tuple[int, int, float]], prefills: list[tuple[int, float]], step: Fit, prefill: Fit
) -> None:
    rows = [(str(b), n, s, np.dot((1.0, b, n), step.coefficients)) for b, n, s in steps]
    rows += [("prefill", n, s, np.dot((1.0, n, n * n), prefill.coefficients)) for n, s in prefills]
    show(
        rows,
        {
            "sequences": lambda r: r[0],
            "context tokens": lambda r: r[1],
            "measured": lambda r: f"{1e3 * r[2]:.2f}",
            "fitted": lambda r: f"{1e3 * r[3]:.2f}",
        },
        title="processor time of one thread, ms: measured / fitted",
    )
