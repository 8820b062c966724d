"""Loads for the simulator, and runs of it: shared by `simulate` and `paper ares`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadgen.load.arrivals import parse_arrivals
from loadgen.load.lengths import find_workload
from loadgen.load.traces import Trace
from quadriga.errors import ConfigError
from quadriga.policies.ares import AresSettings
from quadriga.sim.cluster import Simulation
from quadriga.sim.config import SimConfig
from quadriga.sim.policies import make_policy
from quadriga.sim.results import Run, Slo, Summary, summarise

SLO_TTFT_S = 5.0
SLO_TPOT_FACTOR = 1.5
"""Of the step at 50 % of the KV memory: what `paper ares` fixed beforehand."""


@dataclass(frozen=True, slots=True)
class SimLoad:
    """Requests in time.

    Attributes:
        arrivals_s: [num_requests], ascending.
        input_tokens, output_tokens: [num_requests].
    """

    name: str
    arrivals_s: NDArray[np.float64]
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.arrivals_s)

    @property
    def rate(self) -> float:
        """Mean requests per second."""
        return len(self) / max(float(self.arrivals_s[-1]), 1e-9)


def synthetic_load(name: str, *, rate: float, duration_s: float, seed: int) -> SimLoad:
    """Draw a workload's lengths, with Poisson arrivals over a time."""
    num_requests = max(1, round(rate * duration_s))
    arrivals = parse_arrivals(f"poisson:{rate!r}").times_s(num_requests, seed=seed)
    inputs, outputs = find_workload(name).draw(num_requests, seed=seed)
    return SimLoad(name, arrivals, inputs, outputs)


def trace_load(trace: Trace, *, arrivals: str, scale: float, seed: int) -> SimLoad:
    """A trace with its own arrivals or others, `scale` times as fast.

    Raises:
        ConfigError: Arrivals that a simulation cannot use, or none in the trace.
    """
    process = parse_arrivals(arrivals)
    if process.concurrency is not None:
        raise ConfigError("--arrivals: the simulator takes open loops only", param="arrivals")
    times = process.times_s(len(trace), seed=seed, trace_times_s=trace.arrivals_s)
    return SimLoad(trace.name, times / scale, trace.input_tokens, trace.output_tokens)


def standard_slo(config: SimConfig) -> Slo:
    """TTFT ≤ 5 s, TPOT ≤ 1.5 × the step at 50 % of the KV memory."""
    return Slo(SLO_TTFT_S, SLO_TPOT_FACTOR * config.profile.half_memory_step_s)


def run_policy(
    name: str,
    load: SimLoad,
    config: SimConfig,
    *,
    settings: AresSettings | None = None,
    on_tick: Callable[[float, int], None] | None = None,
    on_decision: Callable[..., None] | None = None,
) -> Run:
    """Simulate a load under a policy."""
    return Simulation(
        config,
        make_policy(name, settings, reservation=config.memory.reservation),
        load.arrivals_s,
        load.input_tokens,
        load.output_tokens,
        on_tick=on_tick,
        on_decision=on_decision,
    ).run()


def summary_of(
    run: Run, load: SimLoad, slo: Slo, *, from_s: float = 0.0, to_s: float = np.inf
) -> Summary:
    """Figures of the requests that arrived in a window."""
    return summarise(run, load.arrivals_s, load.output_tokens, slo, from_s=from_s, to_s=to_s)
