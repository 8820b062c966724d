"""How fast the machine could be: bytes over measured bandwidth, operations over measured rate."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from loadgen.bench.engines.workloads import Workload

_BANDWIDTH_BYTES = 512 << 20
_MATMUL_SIZE = 1536
_REPEATS = 5


@dataclass(frozen=True, slots=True)
class MachineRates:
    """What this machine was measured to do with the given number of threads.

    Attributes:
        bytes_per_s: Reading 512 MiB of float32 once, as a sum.
        flops_per_s: A float32 matrix product of side 1536, two operations per multiply-add.
    """

    bytes_per_s: float
    flops_per_s: float

    def describe(self) -> str:
        """One line that says what was measured, and how."""
        return (
            f"{self.bytes_per_s / 1e9:.1f} GB/s (sum of {_BANDWIDTH_BYTES >> 20} MiB), "
            f"{self.flops_per_s / 1e9:.0f} GFLOP/s (float32 matmul of side {_MATMUL_SIZE}), "
            f"best of {_REPEATS}"
        )


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """What one model costs per step and token at full depth, float32.

    Attributes:
        weights: Values read by every step: layers and head.
        head: Those of the head, by which only output tokens are multiplied.
        kv_values: K and V values of one position, all layers.
        attention_flops: Operations of one token against one position, all layers.
    """

    weights: int
    head: int
    kv_values: int
    attention_flops: int


def measure_machine(threads: int) -> MachineRates:
    """Measure bandwidth and arithmetic rate; takes a second or two."""
    import torch

    torch.set_num_threads(threads)
    data = torch.ones(_BANDWIDTH_BYTES // 4)
    a = torch.ones(_MATMUL_SIZE, _MATMUL_SIZE)
    read_s = matmul_s = float("inf")
    for _ in range(_REPEATS):
        started_s = time.perf_counter()
        data.sum()
        read_s = min(read_s, time.perf_counter() - started_s)
        started_s = time.perf_counter()
        a @ a
        matmul_s = min(matmul_s, time.perf_counter() - started_s)
    return MachineRates(_BANDWIDTH_BYTES / read_s, 2 * _MATMUL_SIZE**3 / matmul_s)


def model_costs(checkpoint: Path) -> ModelCosts:
    """Count from the configuration. Raises: ConfigError when the family is not native."""
    from quadriga.checkpoint.model_config import read_model_config

    c = read_model_config(checkpoint)
    mlp = c.hidden_size * c.ffn_size * (3 if c.gated else 2)
    attention = c.hidden_size * (2 * c.q_size + 2 * c.kv_size)
    head = c.vocab_size * c.embed_size
    return ModelCosts(
        weights=c.num_layers * (attention + mlp) + head,
        head=head,
        kv_values=c.num_layers * 2 * c.kv_size,
        attention_flops=c.num_layers * 4 * c.q_size,
    )


def floor_s(workload: Workload, costs: ModelCosts, rates: MachineRates) -> float:
    """Least seconds for a workload, with reading and arithmetic fully overlapped.

    Weights are read once per step of the whole batch, and once for all prefill; a token reads the
    KV of its context.
    """
    prompt = sum(len(r.prompt) for r in workload.requests)
    output = workload.output_tokens
    steps = max(max(r.max_tokens for r in workload.requests), output / workload.concurrency)
    # Positions that the decode steps of each request read; its first token comes from prefill.
    sizes = ((len(r.prompt), r.max_tokens) for r in workload.requests)
    context = sum(sum(range(prompt + 1, prompt + output)) for prompt, output in sizes)
    num_bytes = 4 * (costs.weights * steps + costs.kv_values * context)
    prompt_context = sum(len(r.prompt) ** 2 // 2 for r in workload.requests)
    computed = prompt + output - len(workload.requests)  # nobody goes on from the last tokens
    flops = 2 * ((costs.weights - costs.head) * computed + costs.head * output)
    flops += costs.attention_flops * (context + prompt_context)
    return max(num_bytes / rates.bytes_per_s, flops / rates.flops_per_s)
