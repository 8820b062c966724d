"""Telling a hung replica from a stalled machine."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from quadriga.policies.liveness import STALL_PATIENCE, is_stalled, patience_s, silence_limit_s

LIMIT_S = 8.0


@pytest.mark.parametrize(
    ("silences_s", "stalled"),
    [
        ([], False),
        ([100.0], False),  # the only one: nothing to compare with
        ([0.1, 100.0], False),
        ([0.1, 0.1, 100.0], False),
        ([5.0, 100.0], True),
        ([0.1, 5.0, 100.0], True),
        ([0.1, 0.2, 5.0, 100.0], True),  # exactly half
        ([0.1, 0.2, 0.3, 5.0, 100.0], False),
        ([4.0, 4.0, 4.0], False),  # half of the limit is not yet silence
        ([4.1, 4.1, 4.1], True),
    ],
)
def test_half_of_them_silent_is_a_stall(silences_s: Sequence[float], stalled: bool) -> None:
    assert is_stalled(silences_s, limit_s=LIMIT_S) is stalled
    assert patience_s(silences_s, limit_s=LIMIT_S) == LIMIT_S * (STALL_PATIENCE if stalled else 1)


def test_the_limit_follows_the_heartbeat() -> None:
    assert silence_limit_s(0.1) == 8.0
    assert silence_limit_s(2.0) == 20.0
