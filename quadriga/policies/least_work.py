"""Placement by the work that a replica is expected to have: the same on every replica's clock.

A sequence weighs the prompt it came with, and an answer as long as those that run have been so far,
on average over all replicas. KV tokens held would be the obvious measure; but a fast replica's
sequences are further along, so it holds more of them, and looks full because it is fast: it gets
less, is faster still, and of equal work ends with a third. How far its sequences are must not
count, nor how fast it steps.

Source: ours. `max_tokens` is no better guess of an answer's length: most requests name none, or far
too much, and then a replica with one of these would be left alone for dozens of short ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quadriga.core.forecast import LengthPrediction
from quadriga.core.replica import ReplicaSnapshot
from quadriga.core.routing import PlaceRequest
from quadriga.policies.load import has_room, num_held

LEAST_ANSWER_TOKENS = 256.0
"""What an answer is expected to be, at least: those that run have only begun, after a pause."""


def expected_answer_tokens(snapshots: Sequence[ReplicaSnapshot]) -> float:
    """Tokens that the sequences of all replicas have generated so far, on average.

    Where lengths are spread as answers' are, one that runs has about as much behind it as answers
    have in all.
    """
    count = sum(num_held(s) for s in snapshots)
    generated = sum(s.generated_tokens for s in snapshots)
    return max(LEAST_ANSWER_TOKENS, generated / max(1, count))


def expected_length(
    request: PlaceRequest, snapshots: Sequence[ReplicaSnapshot]
) -> LengthPrediction:
    """Tokens that a sequence will generate: as predicted, or else as answers have been lately.

    That is the median of those that ended. Those that run are mostly long ones: by their mean a
    newcomer would be placed by what is there when most of its kind are gone.
    """
    if request.prediction is not None:
        return request.prediction
    most = float(max(1, request.max_total_tokens - request.num_tokens))
    upper = max((s.upper_tokens for s in snapshots), default=1)
    usual = sum(s.usual_tokens for s in snapshots) / max(1, len(snapshots))
    mean = min(max(usual, 1.0), most)
    return LengthPrediction(mean, 0.0, min(max(float(upper), mean), most))


def least_work(
    snapshots: Sequence[ReplicaSnapshot], *, answer_tokens: float
) -> ReplicaSnapshot | None:
    """The replica with the least expected work; ties go to the fewest sequences, then by name."""
    return min(
        snapshots,
        key=lambda s: (expected_work(s, answer_tokens), num_held(s), s.info.name),
        default=None,
    )


def expected_work(snapshot: ReplicaSnapshot, answer_tokens: float) -> float:
    """Tokens of the prompts and the answers of all sequences at a replica that decodes."""
    return snapshot.prompt_tokens + answer_tokens * num_held(snapshot)


class LeastWork:
    """The least expected work; see the module."""

    def choose(self, request: PlaceRequest, snapshots: Sequence[ReplicaSnapshot]) -> str | None:
        """See `Placement.choose`."""
        able = [s for s in snapshots if has_room(s, request)]
        best = least_work(able, answer_tokens=expected_answer_tokens(snapshots))
        return None if best is None else best.info.name


class LeastWorkWithoutReports:
    """Least work by a last view that is not renewed, and what was placed since.

    What was placed elsewhere is not known: each of the others that place is taken to do as this one
    does. What ended since is not known either, so room is looked at as it was, and where there was
    none all are asked; a replica that has none refuses by itself.
    """

    def __init__(self) -> None:
        self._placed: dict[str, tuple[int, int]] = {}

    def renewed(self) -> None:
        """There is a new view: it shows what was placed before."""
        self._placed.clear()

    def choose(
        self,
        request: PlaceRequest,
        snapshots: Sequence[ReplicaSnapshot],
        *,
        num_placing: int,
        needs_room: bool = True,
    ) -> str | None:
        """See `Placement.choose`.

        Args:
            num_placing: Processes that place by such a view, this one included.
            needs_room: Only those that had room are asked.
        """
        seen = {s.info.name: self._with_placed(s, num_placing) for s in snapshots}
        able = [seen[s.info.name] for s in snapshots if not needs_room or has_room(s, request)]
        best = least_work(able, answer_tokens=expected_answer_tokens(list(seen.values())))
        if best is None:
            return None
        count, tokens = self._placed.get(best.info.name, (0, 0))
        self._placed[best.info.name] = count + 1, tokens + request.num_tokens
        return best.info.name

    def _with_placed(self, snapshot: ReplicaSnapshot, num_placing: int) -> ReplicaSnapshot:
        count, tokens = self._placed.get(snapshot.info.name, (0, 0))
        return replace(
            snapshot,
            num_waiting=snapshot.num_waiting + num_placing * count,
            prompt_tokens=snapshot.prompt_tokens + num_placing * tokens,
        )
