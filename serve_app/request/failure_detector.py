"""Whose silence means that they are gone: a stopped process raises nothing."""

from __future__ import annotations

from collections.abc import Mapping

from quadriga.core.routing import ClusterView
from quadriga.policies.liveness import is_stalled, patience_s


def gone(
    silences_s: Mapping[str, float],
    view: ClusterView,
    *,
    limit_s: float,
    doubt_s: float,
    max_age_s: float,
) -> list[str]:
    """Return the replicas that are to be given up.

    Two witnesses are enough: polls without an answer for `doubt_s`, and no report to the scheduler
    for `max_age_s`, or the controller has dropped it. One alone is believed after `limit_s`. Where
    half of the replicas are silent at once, the machine is stalled, not they, and it takes longer.

    Args:
        silences_s: Seconds since each polled replica last answered.
        view: What the scheduler last told; an old one says nothing new.
    """
    silences = list(silences_s.values())
    longest_s = patience_s(silences, limit_s=limit_s)
    ages_s = {s.info.name: view.taken_unix_s - s.taken_unix_s for s in view.snapshots}
    is_quiet = is_stalled(silences, limit_s=2 * doubt_s) or is_stalled(
        list(ages_s.values()), limit_s=2 * max_age_s
    )
    found = []
    for name, silence_s in silences_s.items():
        is_doubted = bool(ages_s) and ages_s.get(name, max_age_s + 1.0) > max_age_s
        if silence_s > longest_s or (silence_s > doubt_s and is_doubted and not is_quiet):
            found.append(name)
    return found
