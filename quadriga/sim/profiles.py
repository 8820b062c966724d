"""What devices cost: step and prefill times, KV memory, links. Each figure with its source.

The devices' own figures are the vendor's, for dense matrices: data sheets print the tensor cores'
rates twice as high, for matrices of which half is zero.

    device            memory   memory bandwidth   8-bit integers   16-bit floats
    RTX 4090D         24 GB    1,008 GB/s         588 T/s          147 T/s
    H800 SXM          80 GB    3.35 TB/s          1,979 T/s        989 T/s
    A100 SXM, 80 GB   80 GB    2,039 GB/s         624 T/s          312 T/s

16-bit products are summed in 32 bits, as attention wants it; GeForce cards do that at half of the
rate that they have with 16-bit sums. Sources: NVIDIA Ada GPU Architecture whitepaper (RTX 4090:
660.6 and 165.2 T/s dense with 512 tensor cores at 2.52 GHz; the 4090D has 456 at the same clock;
its product page says 1,177 AI TOPS, which is the sparse rate); NVIDIA H100 Tensor Core GPU data
sheet, SXM (sparse 3,958 and 1,979; the H800 differs in NVLink and in 64-bit floats only); NVIDIA
A100 Tensor Core GPU data sheet, SXM 80 GB (sparse 1,248 and 624).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quadriga.config.pacing import PaceProfile
from quadriga.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CostProfile:
    """One model on one device.

    Attributes:
        step: A decode step.
        prefill_base_s, prefill_per_token_s, prefill_per_pair_s: A prefill pass over n tokens of
            one sequence takes `base + per_token · n + per_pair · n²`; passes share the base.
        prefill_budget_tokens: Prompt tokens that one pass takes together.
        kv_bytes_per_token: All layers.
        kv_capacity_tokens: Of one decode replica.
        num_slots: Sequences in one decode batch.
        max_tokens: Cap on the output, which preemption goes by.
        bandwidth_bytes_per_s: Between two replicas.
        round_trip_s: Control messages of one transfer.
        host_bandwidth_bytes_per_s: Between device and host memory, for paused sequences.
    """

    step: PaceProfile
    prefill_base_s: float
    prefill_per_token_s: float
    prefill_per_pair_s: float
    prefill_budget_tokens: int
    kv_bytes_per_token: int
    kv_capacity_tokens: int
    num_slots: int
    max_tokens: int
    bandwidth_bytes_per_s: float
    round_trip_s: float
    host_bandwidth_bytes_per_s: float

    @property
    def name(self) -> str:
        return self.step.name

    def prefill_s(self, lengths: list[int]) -> float:
        """Seconds of one prefill pass over sequences of these lengths."""
        linear = self.prefill_per_token_s * sum(lengths)
        return self.prefill_base_s + linear + self.prefill_per_pair_s * sum(n * n for n in lengths)

    @property
    def half_memory_step_s(self) -> float:
        """A step with half of the KV memory in use and few sequences: what ARES's SLO refers to."""
        return self.step.step_s(0, self.kv_capacity_tokens // 2)


@dataclass(frozen=True, slots=True)
class Delays:
    """Times on a request's way that no device profile knows, as measured on a cluster.

    Each is a row of evenly spaced quantiles, from the least to the greatest; one value alone is a
    constant.

    Attributes:
        ingress_s: The client's sending to the prefill queue, and the first token back to it.
        handoff_s: First token to the decode replica, which lets it in at its next step; None: what
            the profile's link takes.
        step_factor: What decode steps take over what the profile says, as other work on their
            machine comes and goes; each replica draws anew every second.
    """

    ingress_s: tuple[float, ...] = (0.0,)
    handoff_s: tuple[float, ...] | None = None
    step_factor: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        for name, least in (("ingress_s", 0.0), ("handoff_s", 0.0), ("step_factor", 0.01)):
            values = getattr(self, name)
            if values is None:
                continue
            if not values or values[0] < least or list(values) != sorted(values):
                raise ConfigError(
                    f"delays.{name}: {values!r:.80} must be quantiles, ascending from {least:g} or "
                    "more",
                    param=f"delays.{name}",
                )


NO_DELAYS = Delays()


def drawn(
    quantiles: tuple[float, ...], count: int, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Draw from a distribution given by evenly spaced quantiles: [count]."""
    at = np.linspace(0.0, 1.0, len(quantiles))
    return np.interp(rng.random(count), at, quantiles)


# DeepSeek-R1-Distill-Qwen-7B, W8A8 (ARES §6.1): 28 layers, 4 KV heads of 128, 16-bit cache:
# 28 · 2 · 4 · 128 · 2 = 57,344 bytes a token. 6.53 G weights of one byte in the layers, a head of
# 0.545 G in 16 bits: 7.62 GB are read by each step; with the embedding 8.71 GB are held. Of 90 % of
# a device's memory, less those and 1.5 GB of activations, the KV cache is made.
_KV_BYTES = 57_344
_READ_BYTES = 7.62e9
_HELD_BYTES = 8.71e9 + 1.5e9
_MAX_TOKENS = 32_768

# ARES §5.3: 18.23 ms a step with 50 % of the KV memory in use, which is then 113,000 tokens or
# 6.49 GB; with the weights 14.1 GB in 18.23 ms, or 77 % of the RTX 4090D's 1,008 GB/s. The same
# share is assumed of the other devices. §5.1 (Figure 8): linear in the number of batched tokens.
_SHARE_OF_BANDWIDTH = 0.768


def _gpu(
    name: str,
    *,
    memory_gib: float,
    bytes_per_s: float,
    int8_ops_per_s: float,
    fp16_ops_per_s: float,
    source: str,
) -> CostProfile:
    """A device by its data sheet: prefill at 35 % of its 8-bit rate, attention at 40 % of its
    16-bit rate (the cache is in 16 bits); both dense. The shares are assumptions."""
    rate = _SHARE_OF_BANDWIDTH * bytes_per_s
    capacity = (0.9 * memory_gib * 2**30 - _HELD_BYTES) / _KV_BYTES
    layer_ops = 2 * 6.53e9
    pair_ops = 0.5 * 4 * 3584 * 28  # causal: half of the pairs
    return CostProfile(
        step=PaceProfile(name, _READ_BYTES / rate, 0.0, _KV_BYTES / rate, source),
        prefill_base_s=_READ_BYTES / rate,
        prefill_per_token_s=layer_ops / (0.35 * int8_ops_per_s),
        prefill_per_pair_s=pair_ops / (0.4 * fp16_ops_per_s),
        prefill_budget_tokens=8192,
        kv_bytes_per_token=_KV_BYTES,
        kv_capacity_tokens=int(capacity) // 16 * 16,
        num_slots=256,
        max_tokens=_MAX_TOKENS,
        bandwidth_bytes_per_s=25e9 / 8,
        round_trip_s=0.005,
        host_bandwidth_bytes_per_s=12e9,
    )


RTX_4090D = _gpu(
    "rtx4090d-7b",
    memory_gib=24,
    bytes_per_s=1.008e12,
    int8_ops_per_s=588e12,
    fp16_ops_per_s=147e12,
    source="ARES §5.3 (18.23 ms at 50 % KV memory), §6.1 (W8A8, 25 Gbit/s), data sheet",
)
H800 = _gpu(
    "h800-7b",
    memory_gib=80,
    bytes_per_s=3.35e12,
    int8_ops_per_s=1979e12,
    fp16_ops_per_s=989e12,
    source="data sheet at the RTX 4090D's measured share of the bandwidth; ARES Figure 11",
)
A100 = _gpu(
    "a100-7b",
    memory_gib=80,
    bytes_per_s=2.039e12,
    int8_ops_per_s=624e12,
    fp16_ops_per_s=312e12,
    source="data sheet at the RTX 4090D's measured share of the bandwidth; ARES Figure 11",
)

# `python -m loadgen bench profile` on 2026-11-21: AMD EPYC (AVX2), one thread's processor time,
# float32, compiled kernels. Mean error of the fit: steps 3.1 %, prefill 5.1 %; batches of 2 to 32.
# KV: 12 layers · 2 · 64 values · 4 bytes; 32 rows of 2,048 tokens. gloo between two processes.
CPU = CostProfile(
    step=PaceProfile(
        "cpu", 4.224e-3, 0.1722e-3, 3.8e-7, "quadriga-l on one core, `loadgen bench profile`"
    ),
    prefill_base_s=4.601e-3,
    prefill_per_token_s=2.37e-4,
    prefill_per_pair_s=2.368e-7,
    prefill_budget_tokens=512,
    kv_bytes_per_token=6_144,
    kv_capacity_tokens=65_536,
    num_slots=32,
    max_tokens=1_024,
    bandwidth_bytes_per_s=1.7e9,
    round_trip_s=8e-3,
    host_bandwidth_bytes_per_s=5e9,
)

PROFILES: dict[str, CostProfile] = {p.name: p for p in (CPU, RTX_4090D, H800, A100)}


def find_profile(name: str) -> CostProfile:
    """Return a profile by name. Raises: ConfigError where there is none of it."""
    profile = PROFILES.get(name)
    if profile is None:
        raise ConfigError(
            f"--profile: {name!r} is not known; use one of {', '.join(sorted(PROFILES))}",
            param="profile",
        )
    return profile
