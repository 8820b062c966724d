"""One process of `bench depth`: an engine at one depth, or one whose depth changes.

Takes its order as JSON, prints its answer as one line of JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from loadgen.model_costs.engine import engine_spec, resident_bytes, sequence
from quadriga.checkpoint.exits import NEVER, ExitParams
from quadriga.checkpoint.folder import read_checkpoint
from quadriga.clock import SystemClock
from quadriga.config.engine_spec import EngineSpec
from quadriga.core.request import SamplingParams, SequenceState
from quadriga.engine.model_runner import NativeRunner
from quadriga.scheduling.colocated import ColocatedLoop

_FREE_TIMEOUT_S = 60.0


def make_spec(order: dict[str, Any], depth: int) -> EngineSpec:
    """An engine of all rows the order names, in as much KV memory as it says."""
    checkpoint = read_checkpoint(order["checkpoint"])
    capacity = order["prompt"] + 4 * order["steps"] + 1
    length = min(checkpoint.max_model_len, max(capacity, 256))
    plan = checkpoint.exits
    kv_bytes = order["kv_mib"] << 20
    room = kv_bytes // checkpoint.kv_bytes_per_token(depth, 4)
    return engine_spec(
        checkpoint,
        num_rows=max(order["rows"], 2 * room // length),
        row_capacity_tokens=length,
        depth=depth,
        threads=order["threads"],
        kv_capacity_tokens=room,
        exits=plan.cut(depth),
        exit_plan=plan,
        kv_memory_bytes=kv_bytes,
    )


class SteppedBatch:
    """Sequences that decode in step, every token through all that is loaded."""

    def __init__(self, runner: NativeRunner, order: dict[str, Any]) -> None:
        self.loop = ColocatedLoop(
            runner,
            runner.spec,
            clock=SystemClock(),
            kv_capacity_tokens=runner.num_rows * runner.row_capacity_tokens,
        )
        self._states = [
            _state(row, order["prompt"], order["steps"]) for row in range(order["rows"])
        ]
        for state in self._states:
            self.loop.submit(state)
        self.loop.compute_prompts()

    def step(self) -> float:
        """One token each; returns seconds."""
        started_s = time.perf_counter()
        self.loop.step()
        return time.perf_counter() - started_s

    def leave(self) -> None:
        for state in self._states:
            self.loop.release(state.sequence_id)


def _state(row: int, prompt: int, steps: int) -> SequenceState:
    return sequence(
        f"bench-{row}",
        [3 + (7 * row + 13 * i) % 97 for i in range(prompt)],
        SamplingParams(max_tokens=4 * steps, temperature=0.0, ignore_eos=True),
        exits=ExitParams(NEVER, "bounded"),
    )


def one_depth(order: dict[str, Any]) -> dict[str, Any]:
    """Load, and decode a full batch."""
    spec = make_spec(order, order["depth"])
    # The kernels are loaded before: their memory and time are every depth's.
    NativeRunner.load(replace(spec, depth=1, exits=spec.exits.cut(1))).close()
    before = resident_bytes()
    started_s = time.perf_counter()
    runner = NativeRunner.load(spec)
    load_s = time.perf_counter() - started_s
    loaded = resident_bytes() - before
    weights = runner.weights
    batch = SteppedBatch(runner, order)
    for _ in range(min(4, order["steps"])):
        batch.step()
    times = [batch.step() for _ in range(order["steps"])]
    return {
        "depth": spec.depth,
        "load_s": load_s,
        "memory_bytes": loaded,
        "weight_bytes": sum(layer.nbytes for layer in weights.layers) + weights.embed.nbytes,
        "kv_bytes_per_token": spec.checkpoint.kv_bytes_per_token(spec.depth, 4),
        "capacity_tokens": runner.kv_capacity_tokens,
        "tokens_per_s": order["rows"] * len(times) / sum(times),
        "median_step_ms": 1e3 * statistics.median(times),
    }


def changing(order: dict[str, Any]) -> dict[str, Any]:
    """Go down to the first exit and up again, a batch decoding all the while."""
    full = read_checkpoint(order["checkpoint"]).num_layers
    runner = NativeRunner.load(make_spec(order, full))
    shallow = runner.depths[0]
    changes = []
    for _ in range(order["changes"]):
        batch = SteppedBatch(runner, order)
        changes.append(_drop(runner, batch, shallow, order["steps"]))
        changes.append(_grow(runner, batch, full, order["steps"]))
        batch.leave()
    return {"changes": changes}


def _drop(runner: NativeRunner, batch: SteppedBatch, depth: int, steps: int) -> dict[str, Any]:
    times = [batch.step() for _ in range(steps // 2)]
    before, memory = runner.num_layers, resident_bytes()
    take_ms = _timed_ms(lambda: batch.loop.decode.drop_to(depth))
    runner.wait_freed(_FREE_TIMEOUT_S)
    return {
        "before": before,
        "after": depth,
        "load_s": None,
        "take_ms": take_ms,
        "step_ms": 1e3 * statistics.median(times),
        "longest_step_ms": 1e3 * max(times),
        "memory_change_bytes": resident_bytes() - memory,
    }


def _grow(runner: NativeRunner, batch: SteppedBatch, depth: int, steps: int) -> dict[str, Any]:
    """Load on another thread while this one decodes, as a replica does."""
    quiet = [batch.step() for _ in range(steps // 2)]
    before, memory = runner.num_layers, resident_bytes()
    made: list[Any] = []
    loader = threading.Thread(target=lambda: made.append(runner.prepare_depth(depth)), daemon=True)
    loader.start()
    busy: list[float] = []
    while loader.is_alive():
        if len(busy) < steps:
            busy.append(batch.step())
        else:
            loader.join(60.0)
    with made[0] as prepared:
        take_ms = _timed_ms(lambda: batch.loop.decode.take_depth(prepared))
        load_s = prepared.load_s
    return {
        "before": before,
        "after": depth,
        "load_s": load_s,
        "take_ms": take_ms,
        "step_ms": 1e3 * statistics.median(quiet),
        "longest_step_ms": 1e3 * max(busy, default=0.0),
        "memory_change_bytes": resident_bytes() - memory,
    }


def _timed_ms(call: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - started_s)


def main() -> None:
    """Do what the first argument says."""
    sys.setswitchinterval(0.0005)  # as in a replica
    order = json.loads(sys.argv[1])
    answer = changing(order) if "changes" in order else one_depth(order)
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
