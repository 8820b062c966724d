"""Loads for the simulator, and runs of it: shared by `simulate` and `paper ares`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from loadgen.load.arrivals import Arrivals, parse_arrivals
from loadgen.load.lengths import WORKLOADS
from loadgen.load.traces import MAX_ROWS, Trace
from quadriga.errors import ConfigError
from quadriga.policies.ares.settings import AresSettings
from quadriga.sim.cluster import Simulation
from quadriga.sim.config import SimConfig
from quadriga.sim.policies import make_policy
from quadriga.sim.results import RunSummary, SimulatedRun, Slo, summarise

SLO_TTFT_S = 5.0
SLO_TPOT_FACTOR = 1.5
"""Of the step at 50 % of the KV memory: what `paper ares` fixed beforehand."""
MAX_SPAN_S = 1e9
"""Of arrivals: beyond it a simulation's clock, a float, no longer tells one step from the next."""


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
        """Mean requests per second; NaN where all arrive at once."""
        span_s = float(self.arrivals_s[-1])
        return len(self) / span_s if span_s > 0.0 else np.nan

    def faster(self, factor: float) -> SimLoad:
        """Return the load arriving `factor` times as fast. Raises: ConfigError: Too slowly."""
        times = self.arrivals_s / factor
        if times[-1] > MAX_SPAN_S:
            raise ConfigError(
                f"--scale: at {factor:g} times its rate {self.name} would last {times[-1]:.3g} s; "
                f"at most {MAX_SPAN_S:.0e} s are simulated",
                param="scale",
            )
        return replace(self, arrivals_s=times)

    def fingerprint(self) -> str:
        """Return a hash of all times and lengths."""
        digest = hashlib.sha256()
        for column in (self.arrivals_s, self.input_tokens, self.output_tokens):
            digest.update(column.tobytes())
        return digest.hexdigest()


def synthetic_load(name: str, *, rate: float, duration_s: float, seed: int) -> SimLoad:
    """Draw a workload's lengths, with Poisson arrivals over a time.

    Raises:
        ConfigError: That would be too many requests.
    """
    if rate * duration_s > MAX_ROWS:
        raise ConfigError(
            f"--duration-s: {duration_s:g} s at {rate:g}/s are {rate * duration_s:.3g} requests; "
            f"at most {MAX_ROWS:,} are simulated",
            param="duration-s",
        )
    num_requests = max(1, round(rate * duration_s))
    arrivals = Arrivals("poisson", rate, cv=1.0).times_s(num_requests, seed=seed)
    inputs, outputs = WORKLOADS[name].draw(num_requests, seed=seed)
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
    return SimLoad(trace.name, times, trace.input_tokens, trace.output_tokens).faster(scale)


def standard_slo(config: SimConfig) -> Slo:
    """TTFT ≤ 5 s, TPOT ≤ 1.5 × the step at 50 % of the KV memory."""
    return Slo(SLO_TTFT_S, SLO_TPOT_FACTOR * config.profile.half_memory_step_s)


def make_simulation(
    name: str,
    load: SimLoad,
    config: SimConfig,
    *,
    settings: AresSettings | None = None,
    on_tick: Callable[[float, int], None] | None = None,
    stop: Callable[[float, SimulatedRun], bool] | None = None,
    on_decision: Callable[..., None] | None = None,
) -> Simulation:
    """Return a simulation of a load under a policy, not yet run; see `Simulation`."""
    return Simulation(
        config,
        make_policy(name, settings, reservation=config.memory.reservation),
        load.arrivals_s,
        load.input_tokens,
        load.output_tokens,
        on_tick=on_tick,
        stop=stop,
        on_decision=on_decision,
    )


def summary_of(
    run: SimulatedRun, load: SimLoad, slo: Slo, *, from_s: float = 0.0, to_s: float = np.inf
) -> RunSummary:
    """Figures of the requests that arrived in a window."""
    return summarise(run, load.arrivals_s, load.output_tokens, slo, from_s=from_s, to_s=to_s)
