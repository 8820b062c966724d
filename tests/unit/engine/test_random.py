"""Counter-based randomness: the published vectors, and what a draw may depend on."""

from __future__ import annotations

import numpy as np
import pytest

from quadriga.engine.random import philox, uniforms

# Known answers of Philox4x32-10 from the authors' Random123 library.
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "wanted"), VECTORS)
def test_philox_known_answers(counter: tuple, key: tuple, wanted: tuple) -> None:
    got = philox(np.array([counter], dtype=np.uint64), np.array([key], dtype=np.uint64))
    assert tuple(int(w) for w in got[0]) == wanted


def test_a_draw_depends_on_its_own_key_alone() -> None:
    seeds, choices, positions = [7, -7, 2**63 - 1, -(2**63)], [0, 1, 2, 3], [0, 5, 9, 2**31]
    together = uniforms(seeds, choices, positions)
    alone = [uniforms([s], [c], [p])[0] for s, c, p in zip(seeds, choices, positions, strict=True)]
    assert together.tolist() == alone


def test_every_part_of_the_key_counts() -> None:
    base = uniforms([3], [1], [10])[0]
    others = [uniforms([s], [c], [p])[0] for s, c, p in [(4, 1, 10), (3, 2, 10), (3, 1, 11)]]
    others.append(uniforms([3 + 2**32], [1], [10])[0])
    assert base not in others
    assert len(set(others)) == len(others)


def test_uniform_over_positions() -> None:
    n = 20_000
    u = uniforms([11] * n, [0] * n, list(range(n)))
    assert u.min() >= 0.0
    assert u.max() < 1.0
    counts, _ = np.histogram(u, bins=20, range=(0, 1))
    chi2 = ((counts - n / 20) ** 2 / (n / 20)).sum()
    assert chi2 < 45.3  # 19 degrees of freedom, p = 0.0006
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.03
