"""Read request traces strictly, and scale them to the service under test.

A trace is CSV or gzip CSV with the header `arrival_s,input_tokens,output_tokens`, sorted by
arrival; a lengths file lacks `arrival_s` and must be paired with an arrival process. Empty lines
may follow the last row, and stand nowhere else.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from loadgen.load.packed import read_lines
from quadriga.errors import ConfigError

TRACE_HEADER = ("arrival_s", "input_tokens", "output_tokens")
LENGTHS_HEADER = ("input_tokens", "output_tokens")
MAX_ARRIVAL_S = 1e8  # three years
MAX_TOKENS = 10_000_000
MAX_ROWS = 20_000_000
MAX_LINE_BYTES = 200

_COUNT = re.compile(r"[0-9]{1,15}")
_SECONDS = re.compile(r"[0-9]{1,15}(\.[0-9]*)?([eE][+-]?[0-9]{1,3})?")


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests as lengths in time.

    Attributes:
        arrivals_s: float64 [num_requests], ascending from the first row's 0; None when the file
            holds lengths only.
        input_tokens: int64 [num_requests], each at least 1.
        output_tokens: int64 [num_requests], each at least 1.
    """

    name: str
    arrivals_s: NDArray[np.float64] | None
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.input_tokens)


def read_trace(path: Path, *, limit: int | None = None) -> Trace:
    """Read a trace or lengths file.

    Args:
        limit: Stop after this many rows; what follows is not looked at.

    Raises:
        ConfigError: Naming file, line, field, value and the limit it broke.
    """
    arrivals: list[float] = []
    inputs: list[int] = []
    outputs: list[int] = []
    lines = read_lines(path, param="trace", max_bytes=MAX_LINE_BYTES)
    header = tuple(next(lines, (1, ""))[1].split(","))
    if header not in (TRACE_HEADER, LENGTHS_HEADER):
        raise ConfigError(
            f"{path}, line 1: the header must be {','.join(TRACE_HEADER)!r}, or "
            f"{','.join(LENGTHS_HEADER)!r} for lengths without arrivals; got {header!r:.120}",
            param="trace",
        )
    with_arrivals = header == TRACE_HEADER
    empty: int | None = None
    for number, line in lines:
        where = f"{path}, line {number}"
        if not line.strip():
            empty = empty or number
            continue
        if empty is not None:
            raise ConfigError(
                f"{path}, line {empty}: empty, and rows follow in line {number}", param="trace"
            )
        values = line.split(",")
        if len(values) != len(header):
            raise ConfigError(
                f"{where}: {len(values)} fields where {','.join(header)} are wanted", param="trace"
            )
        if with_arrivals:
            arrival = _seconds(values[0], where)
            if arrivals and arrival < arrivals[-1]:
                raise ConfigError(
                    f"{where}: arrival_s {arrival} is before the line above ({arrivals[-1]}); "
                    "sort the file by arrival_s",
                    param="trace",
                )
            arrivals.append(arrival)
        inputs.append(_tokens(values[-2], "input_tokens", where))
        outputs.append(_tokens(values[-1], "output_tokens", where))
        if len(inputs) == limit:
            break
        if len(inputs) > MAX_ROWS:
            raise ConfigError(f"{where}: more than {MAX_ROWS} rows; use --limit", param="trace")
    if not inputs:
        raise ConfigError(f"{path}: no rows after the header", param="trace")
    times = np.asarray(arrivals, dtype=np.float64)
    return Trace(
        name=path.name.removesuffix(".gz").removesuffix(".csv"),
        arrivals_s=times - times[0] if with_arrivals else None,
        input_tokens=np.asarray(inputs, dtype=np.int64),
        output_tokens=np.asarray(outputs, dtype=np.int64),
    )


def scale_time(trace: Trace, factor: float) -> Trace:
    """Multiply the arrivals by `factor`: 0.5 doubles the rate, the burstiness stays."""
    if trace.arrivals_s is None:
        raise ConfigError(
            f"--time-scale: {trace.name} has lengths only; give --arrivals", param="time-scale"
        )
    return replace(trace, arrivals_s=trace.arrivals_s * factor)


def cap_lengths(trace: Trace, *, max_input: int | None, max_output: int | None) -> Trace:
    """Cut lengths above a cap down to it; rows stay."""
    return replace(
        trace,
        input_tokens=np.minimum(trace.input_tokens, max_input or MAX_TOKENS),
        output_tokens=np.minimum(trace.output_tokens, max_output or MAX_TOKENS),
    )


def scale_lengths(trace: Trace, factor: float) -> Trace:
    """Multiply both lengths by `factor`, rounded, never below 1."""
    if not (math.isfinite(factor) and factor > 0):
        raise ConfigError(f"--scale-lengths: {factor} must be above 0", param="scale-lengths")

    def scaled(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        whole: NDArray[np.float64] = np.clip(np.rint(lengths * factor), 1, MAX_TOKENS)
        return whole.astype(np.int64)

    return replace(
        trace, input_tokens=scaled(trace.input_tokens), output_tokens=scaled(trace.output_tokens)
    )


def context_factor(trace: Trace, max_model_len: int) -> float:
    """Return the largest factor, at most 1, at which 99 % of the rows fit the context.

    Scaling to the longest row would leave the others a few tokens each; the last percent is cut by
    `fit_context` instead.
    """
    totals = trace.input_tokens + trace.output_tokens
    return min(1.0, max_model_len / float(np.percentile(totals, 99)))


def fit_context(trace: Trace, max_model_len: int) -> Trace:
    """Cut rows to the context: output to half of it at most, then input to what is left."""
    if max_model_len < 2:
        raise ConfigError(f"context of {max_model_len} tokens holds no request", param="context")
    outputs = np.where(
        trace.input_tokens + trace.output_tokens > max_model_len,
        np.minimum(trace.output_tokens, max_model_len // 2),
        trace.output_tokens,
    )
    inputs = np.minimum(trace.input_tokens, max_model_len - outputs)
    return replace(trace, input_tokens=inputs, output_tokens=outputs)


def _seconds(text: str, where: str) -> float:
    if _SECONDS.fullmatch(text) is None or not (value := float(text)) <= MAX_ARRIVAL_S:
        raise ConfigError(
            f"{where}: arrival_s {text!r} must be a plain number in 0..{MAX_ARRIVAL_S:g}",
            param="trace",
        )
    return value


def _tokens(text: str, field: str, where: str) -> int:
    if _COUNT.fullmatch(text) is None or not 1 <= (value := int(text)) <= MAX_TOKENS:
        raise ConfigError(
            f"{where}: {field} {text!r} must be a whole number in 1..{MAX_TOKENS}", param="trace"
        )
    return value
