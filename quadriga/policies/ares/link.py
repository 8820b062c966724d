"""What a transfer between two decode replicas takes, by what the last ones took."""

from __future__ import annotations

from quadriga.policies.ares.settings import TransferCosts

FIRST_BANDWIDTH_BYTES_PER_S = 100e6
"""Until a move was measured."""
ROUND_TRIP_S = 0.01
MIN_MEASURED_BYTES = 65_536
_RATE = 0.2


class LinkMeter:
    """Learns the bandwidth from the moves that are made.

    Attributes:
        bytes_per_s: As far as is known.
    """

    def __init__(self) -> None:
        self.bytes_per_s = FIRST_BANDWIDTH_BYTES_PER_S

    def moved(self, num_bytes: float, took_s: float) -> None:
        """A sequence has moved; one that was small says nothing."""
        if num_bytes >= MIN_MEASURED_BYTES:
            measured = num_bytes / max(took_s - ROUND_TRIP_S, 1e-4)
            self.bytes_per_s += _RATE * (measured - self.bytes_per_s)

    def costs(self, bytes_per_token: float) -> TransferCosts:
        """What a move is thought to cost."""
        return TransferCosts(bytes_per_token, self.bytes_per_s, ROUND_TRIP_S)
