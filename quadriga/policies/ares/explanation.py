"""Why a running sequence was moved: what the decision saw, what it gained, and what else there was.

Made of the recorded tick, when a move is ordered, and kept with the order.
"""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quadriga.core.migration import MigrationCause, MigrationOrder
from quadriga.core.replica import ReplicaSnapshot
from quadriga.policies.ares.cluster import ClusterForecast, RoleWeights, alike, unpack, weights
from quadriga.policies.ares.forecast import (
    MOVES,
    REMAINING,
    REMAINING_LOWER,
    REMAINING_UPPER,
    SHARE,
    TOKENS,
    memory_rows,
    seconds_to_full,
    tokens_ahead,
)
from quadriga.policies.ares.settings import num_memory_points

if TYPE_CHECKING:
    from quadriga.policies.ares.recording import RecordedTick

MAX_ALTERNATIVES = 4


def explain(tick: RecordedTick, order: MigrationOrder) -> dict[str, Any]:
    """Describe one order of a tick as plain values.

    Returns:
        `by`: "forecast" or "present load". `sequence`: its KV tokens, the predicted remaining
        tokens (mean, 10 % and 90 %), its moves so far, and the share of the layers that its tokens
        are expected to run. `transfer_s`: what the move was taken to
        cost. `destinations`: the chosen one first, then the best others, each with the share of
        the variance that moving there removes (`gain`), the work of source and destination after
        it over the mean, and the destination's greatest forecast share of KV memory. `pools`: where
        shallow and deep sequences run apart, the layers up to which one is shallow, as a share, and
        the share of a token's time that this saves. `full_s`: seconds until the source's memory is
        forecast to be full; None where it is not. `text`: the same in a sentence. Empty where the
        tick does not show the sequence.
    """
    groups = alike(tick.snapshots)
    of_model = next((g for g in groups if order.source in {s.info.name for s in g}), [])
    taker = next((s for s in of_model if s.info.name == order.destination), None)
    is_across = taker is not None and taker.info.depth_class != order.depth_class
    cluster = unpack([s for s in of_model if is_across or s.info.depth_class == order.depth_class])
    if cluster is None or order.sequence_id not in cluster.sequence_ids:
        return {}
    row = list(cluster.sequence_ids).index(order.sequence_id)
    trusts = tick.predicts and cluster.has_predictions and not tick.load_only
    weigh = weights(tick.settings, load_only=not trusts)
    facts = cluster.rows[row]
    destinations = _destinations(cluster, weigh, row, tick)
    destinations.sort(key=lambda d: (d["name"] != order.destination, -d["gain"]))
    by = "forecast" if trusts else "present load"
    found = {
        "by": by,
        "sequence": {
            "tokens": int(facts[TOKENS]),
            "remaining": float(facts[REMAINING]),
            "remaining_lower": float(facts[REMAINING_LOWER]),
            "remaining_upper": float(facts[REMAINING_UPPER]),
            "moves": int(facts[MOVES]),
            "share_of_layers": float(facts[SHARE]),
        },
        "transfer_s": float(tick.costs.seconds(float(facts[TOKENS]))),
        "destinations": destinations[: 1 + MAX_ALTERNATIVES],
        "full_s": next((_full_s(s) for s in of_model if s.info.name == order.source), None),
    }
    pools = tick.pools.get(order.depth_class)
    if pools is not None and pools.is_on and not is_across:
        found["pools"] = {
            "cut": pools.cut,
            "gain": pools.gain,
            "source": pools.side_of(order.source),
            "destination": pools.side_of(order.destination),
        }
    return found | {"text": _text(order, found)}


def _full_s(source: ReplicaSnapshot) -> float | None:
    assert source.forecast is not None
    full_s = seconds_to_full(source.forecast, source.info.kv_capacity_tokens)
    return full_s if isfinite(full_s) else None


def _destinations(
    cluster: ClusterForecast, weigh: RoleWeights, row: int, tick: RecordedTick
) -> list[dict[str, Any]]:
    """All replicas but the source, with what moving the row there would come to."""
    source = int(cluster.owner[row])
    x: NDArray[np.float64] = cluster.row_load_s[row].astype(np.float64)
    work = cluster.load_s @ weigh.points
    mean = max(float(work.mean()), 1e-12)
    variance = float(cluster.load_s.var(axis=0) @ weigh.points)
    moved = float(x @ weigh.points)
    points = 1 if weigh.is_load_only else num_memory_points(tick.settings, cluster.grid_s)
    ahead = tokens_ahead(cluster.grid_s, cluster.step_s)
    found = []
    for index, name in enumerate(cluster.names):
        if index == source:
            continue
        own = cluster.load_s[source] - x - cluster.load_s[index]
        removed = 2.0 / len(cluster) * float((weigh.points * x) @ own)
        held = cluster.tokens[index] + memory_rows(
            cluster.rows[row, TOKENS : TOKENS + 1].astype(np.float64),
            cluster.rows[row, REMAINING_UPPER : REMAINING_UPPER + 1].astype(np.float64),
            ahead[index : index + 1],
        ).reshape(-1)
        found.append(
            {
                "name": name,
                "gain": removed / variance if variance > 0.0 else 0.0,
                "source_work": float(work[source]) / mean,
                "work": float(work[index]) / mean,
                "source_work_after": (float(work[source]) - moved) / mean,
                "work_after": (float(work[index]) + moved) / mean,
                "memory_share": float(held[:points].max() / cluster.capacity_tokens[index]),
                "free_slots": int(cluster.free_slots[index]),
            }
        )
    return found


def _when_full(full_s: float | None) -> str:
    if full_s is None:
        return "the source's KV memory is nearly full or forecast to be"
    return f"the source's KV memory is forecast to be full in {full_s:.0f} s"


def _text(order: MigrationOrder, found: dict[str, Any]) -> str:
    chosen, *others = found["destinations"]
    share, pools = found["sequence"]["share_of_layers"], found.get("pools")
    why = {
        MigrationCause.DEPTH: (
            f"its tokens are expected to run {share:.2f} of the layers, which makes it "
            f"{pools['destination']} (the cut is at {pools['cut']:.2f})"
            if pools
            else "its tokens run as many layers as those at the destination"
        ),
        MigrationCause.MEMORY: _when_full(found["full_s"]),
        MigrationCause.BALANCE: "the source had more work than the others",
    }.get(order.cause, order.cause.value)
    text = (
        f"{why}: by the {found['by']}, {chosen['source_work']:.2f} of the mean work there and "
        f"{chosen['work']:.2f} at the destination; after the move "
        f"{chosen['source_work_after']:.2f} and {chosen['work_after']:.2f}, "
        f"{100 * chosen['gain']:.0f} % of the variance less"
    )
    if others:
        text += f"; the next best, {others[0]['name']}: {100 * others[0]['gain']:.0f} %"
    return text
