"""Modelled devices: how long a decode step takes on hardware that is not here.

Several replicas paced by a profile behave, on a small machine, as on devices of their own, as
long as their real work stays well under the cores there are. Experiments on scheduling use it,
and say so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from quadriga.errors import ConfigError


class PacedDevice(Protocol):
    """A modelled device."""

    def pass_s(self, share: float, num_sequences: int, num_tokens: int, /) -> float:
        """Seconds of a pass through this share of the layers."""


@dataclass(frozen=True, slots=True)
class PaceProfile:
    """Modelled time of one decode step: `base_s + per_sequence_s · b + per_token_s · n`.

    Attributes:
        base_s: What a step costs at any load: reading the weights.
        per_sequence_s: For each of the b sequences in the batch.
        per_token_s: For each of the n context tokens in the batch: reading their KV.
        source: Where the numbers come from.
    """

    name: str
    base_s: float
    per_sequence_s: float
    per_token_s: float
    source: str

    def step_s(self, num_sequences: float, num_tokens: float) -> float:
        """Seconds one step takes for a batch of this size, counted by the layers that it runs."""
        return self.base_s + self.per_sequence_s * num_sequences + self.per_token_s * num_tokens

    def pass_s(self, share: float, num_sequences: int, num_tokens: int) -> float:
        """Seconds through this share of the layers."""
        return share * self.step_s(num_sequences, num_tokens)

    def slowed(self, factor: int) -> PaceProfile:
        """The profile of a device on which everything takes `factor` times as long."""
        return replace(
            self,
            name=f"{self.name}*{factor}",
            base_s=factor * self.base_s,
            per_sequence_s=factor * self.per_sequence_s,
            per_token_s=factor * self.per_token_s,
        )


# ARES §5.3 measures one point: 18.23 ms a step for DeepSeek-R1-Distill-Qwen-7B on an RTX 4090D
# with half of the KV memory in use; §5.1 (Figure 8) states that the time is linear in the number
# of batched tokens and gives no coefficients. The rest is arithmetic on public data. 15.2 GB of
# bf16 weights leave 0.9 · 24 − 15.2 = 6.4 GB for KV at 28 layers · 2 · 4 heads · 128 · 2 bytes =
# 57,344 bytes a token: 111,600 tokens, half of them 55,800. At 1,008 GB/s that half reads in
# 3.17 ms, so 18.23 − 3.17 = 15.06 ms is the base: the weights, which read in 15.1 ms.
ARES_4090D = PaceProfile(
    name="ares-qwen7b-4090d",
    base_s=15.06e-3,
    per_sequence_s=0.0,
    per_token_s=57_344 / 1.008e12,
    source="ARES §5.3 (18.23 ms at 50 % KV occupancy), Figure 8 (linear in batched tokens)",
)

SHORT_FACTOR = 64
ARES_4090D_SHORT = PaceProfile(
    name="ares-qwen7b-4090d-short",
    base_s=ARES_4090D.base_s,
    per_sequence_s=0.0,
    per_token_s=SHORT_FACTOR * ARES_4090D.per_token_s,
    source=f"{ARES_4090D.source}; a token weighs as {SHORT_FACTOR} do there, for models whose "
    f"answers are {SHORT_FACTOR} times as short: 111,600 / {SHORT_FACTOR} tokens fill its memory",
)
"""The same step times at the same occupancy, for the bundled models' lengths."""

SLOW_FACTOR = 4
ARES_4090D_SLOW = PaceProfile(
    name="ares-qwen7b-4090d-slow",
    base_s=SLOW_FACTOR * ARES_4090D_SHORT.base_s,
    per_sequence_s=0.0,
    per_token_s=SLOW_FACTOR**2 * ARES_4090D_SHORT.per_token_s,
    source=f"{ARES_4090D_SHORT.source}; and of a device {SLOW_FACTOR} times as slow, with answers "
    f"{SLOW_FACTOR} times as short again",
)
"""For machines whose cores could not do three replicas' work in the time of a short step: that is
a quarter of the work in the same time, and the same balance of what loads a step."""

STEADY_15MS = PaceProfile(
    name="steady-15ms",
    base_s=15e-3,
    per_sequence_s=0.05e-3,
    per_token_s=1e-6,
    source="round numbers: 15 ms empty, 20 ms at 32 sequences of 100 tokens and beyond",
)

STEADY_60MS = PaceProfile(
    name="steady-60ms",
    base_s=60e-3,
    per_sequence_s=0.05e-3,
    per_token_s=1e-6,
    source="round numbers: a large model's step, long against what a shared machine does by itself",
)

PROFILES: dict[str, PaceProfile] = {
    p.name: p for p in (ARES_4090D, ARES_4090D_SHORT, ARES_4090D_SLOW, STEADY_15MS, STEADY_60MS)
}


def find_profile(name: str) -> PaceProfile:
    """Return a profile by name; `NAME*5` is of a device five times as slow.

    Raises:
        ConfigError: There is none of this name.
    """
    known, times, slow = name.partition("*")
    profile = PROFILES.get(known)
    if profile is None or (times and not (slow.isdecimal() and int(slow))):
        raise ConfigError(
            f"decode.pace: {name!r} is not a known profile; use one of "
            f"{', '.join(sorted(PROFILES))}, with *5 behind it for a device five times as slow, "
            "or null for full speed",
            param="decode.pace",
        )
    return profile.slowed(int(slow)) if times else profile
