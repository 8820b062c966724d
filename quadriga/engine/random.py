"""Counter-based randomness: a uniform number is a pure function of (seed, choice, position).

There is no generator state to keep, move or rebuild: whichever replica samples a position, in
whichever batch, draws the same number.

Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011), Philox4x32-10.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

LEAST_DIVISOR = 1e-30
"""Temperatures and penalties below count as this: float32 makes 0 of still smaller ones, and what
is divided by it stays finite, or is the −inf of what has no probability."""
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
_LOW = np.uint64(_MASK)
_SHIFT = np.uint64(32)
_ROUNDS = 10

Words = npt.NDArray[np.uint64]


def philox(counter: Words, key: Words) -> Words:
    """Philox4x32-10: scramble counters under keys.

    Args:
        counter: uint64 [n, 4], each value below 2^32.
        key: uint64 [n, 2], each value below 2^32.

    Returns:
        uint64 [n, 4] random words, each below 2^32.
    """
    c0, c1, c2, c3 = (counter[:, i].copy() for i in range(4))
    k0, k1 = key[:, 0].copy(), key[:, 1].copy()
    for _ in range(_ROUNDS):
        p0 = _MULTIPLIERS[0] * c0
        p1 = _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> _SHIFT) ^ c1 ^ k0, p1 & _LOW, (p0 >> _SHIFT) ^ c3 ^ k1, p0 & _LOW
        k0 = (k0 + np.uint64(_WEYL[0])) & _LOW
        k1 = (k1 + np.uint64(_WEYL[1])) & _LOW
    return np.stack((c0, c1, c2, c3), axis=1)


def uniforms(
    seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int]
) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (seed, choice, position), with 53 random bits.

    Args:
        seeds: Any int64; negative ones count as their two's complement.
        choices, positions: Non-negative, below 2^32.
    """
    key = np.array([(s & _MASK, (s >> 32) & _MASK) for s in map(int, seeds)], dtype=np.uint64)
    counter = np.array(
        [(p, c, 0, 0) for p, c in zip(positions, choices, strict=True)], dtype=np.uint64
    )
    words = philox(counter.reshape(-1, 4), key.reshape(-1, 2))
    bits = (words[:, 0] << np.uint64(21)) ^ (words[:, 1] >> np.uint64(11))
    return bits.astype(np.float64) * 2.0**-53
