"""Which replicas may take a sequence, and how loaded each one is."""

from __future__ import annotations

from collections.abc import Sequence

from quadriga.core.replica import PARTS, DepthClass, ReplicaInfo, ReplicaSnapshot, Role
from quadriga.core.routing import PlaceRequest
from quadriga.errors import MigrationFailed, QuadrigaError, Unavailable
from quadriga.policies.slot_reservation import admitted_tokens, promised_tokens

STRANDED_S = 5.0
"""How long a prompt has waited, and replicas have reported, before others may begin it anew."""


def taking_work(
    snapshots: Sequence[ReplicaSnapshot], *, now_unix_s: float, max_age_s: float
) -> list[ReplicaSnapshot]:
    """Replicas that were heard of lately and are not draining."""
    return [s for s in snapshots if not s.draining and now_unix_s - s.taken_unix_s <= max_age_s]


def candidates(
    alive: Sequence[ReplicaSnapshot],
    *,
    role: Role,
    depth_class: DepthClass | None = None,
    model: str | None = None,
    numerics: str = "",
    exclude: Sequence[str] = (),
    num_tokens: int = 0,
) -> list[ReplicaSnapshot]:
    """Those of `taking_work` that do a part of it: of the class, and alike, where asked.

    Args:
        num_tokens: What a sequence may become; rows may be shorter on a node with less memory.
    """
    return [
        s
        for s in alive
        if s.info.role.does(role)
        and (depth_class is None or s.info.depth_class == depth_class)
        and (model is None or s.info.depth_class.model == model)
        and numerics in ("", s.info.numerics)
        and s.info.name not in exclude
        and num_tokens <= s.info.longest_sequence
    ]


def line_of(info: ReplicaInfo | PlaceRequest, *, any_depth: bool) -> str:
    """Name those that wait for the same replicas as a sequence at this one; see `admit`."""
    kind = info.depth_class.model if any_depth else info.depth_class
    return f"{kind} {info.numerics}".rstrip()


def decoders(
    request: PlaceRequest, alive: Sequence[ReplicaSnapshot], *, any_depth: bool
) -> list[ReplicaSnapshot]:
    """Those of `taking_work` that can go on with what was computed of a sequence.

    Args:
        any_depth: Replicas of other depths of the model can as well.
    """
    return candidates(
        alive,
        role=Role.DECODE,
        depth_class=None if any_depth else request.depth_class,
        model=request.depth_class.model,
        numerics=request.numerics,
        exclude=request.exclude,
        num_tokens=request.max_total_tokens,
    )


def nobody_decodes(
    request: PlaceRequest, known: Sequence[ReplicaSnapshot], *, any_depth: bool, known_s: float
) -> QuadrigaError:
    """Say why a sequence finds no `decoders`.

    MigrationFailed where none will come, as when the replicas of its depth, or with its weights,
    die or are exchanged, and others can have all of it anew: of no fewer layers, and with room for
    its length. One that is late, or that is draining, may still come back or be replaced.

    Args:
        known: All replicas that reported and are not known to be dead.
        known_s: For how long replicas have reported; at first some have not yet.
    """
    wanted = request.depth_class
    alike = [s for s in known if s.info.depth_class.model == wanted.model and not s.is_scout]
    able = [
        s
        for s in alike
        if not s.draining
        and s.info.depth_class.depth >= wanted.depth
        and s.info.longest_sequence >= request.max_total_tokens
    ]
    prefills, decodes = (
        {line_of(s.info, any_depth=any_depth) for s in able if s.info.role.does(part)}
        for part in PARTS
    )
    still = {line_of(s.info, any_depth=any_depth) for s in alike if s.info.role.does(Role.DECODE)}
    is_missed = line_of(request, any_depth=any_depth) not in still
    if min(request.waited_s, known_s) >= STRANDED_S and is_missed and prefills & decodes:
        return MigrationFailed(
            f"nobody decodes {request.depth_class} as {request.source} computes it any more, and "
            "others serve the model",
            code="stranded",
        )
    return Unavailable(
        f"no decode replica of {request.depth_class} with rows of "
        f"{request.max_total_tokens} tokens or more is taking sequences",
        retry_after_s=1.0,
    )


def tokens_wanted(snapshot: ReplicaSnapshot, request: PlaceRequest) -> int:
    """What a decode replica would promise the sequence."""
    if snapshot.info.reservation == "longest":
        return request.max_total_tokens
    return promised_tokens(
        request.num_tokens,
        request.max_total_tokens,
        upper_tokens=snapshot.upper_tokens,
        num_held=num_held(snapshot),
        prediction=request.prediction,
        by_forecast=request.by_forecast,
    )


def has_room(snapshot: ReplicaSnapshot, request: PlaceRequest) -> bool:
    """Whether a decode replica could take the sequence, by its last report."""
    return room(snapshot, request) > 0


def room(snapshot: ReplicaSnapshot, request: PlaceRequest) -> int:
    """How many sequences like this one a decode replica could take, by its last report.

    Where memory is promised by what is used, a more important one takes the place of the least
    important, and paused sequences come before all others: of them it is minus their number.
    """
    info, held = snapshot.info, num_held(snapshot)
    limit, least = info.kv_capacity_tokens, 0
    if info.reservation == "used":
        least = int(held == 0 or may_displace(snapshot, request))
        if snapshot.num_paused and not least:
            return -snapshot.num_paused
        limit = admitted_tokens(limit, info.num_slots, info.max_model_len) if held else limit
    free = (limit - snapshot.reserved_tokens) // max(1, tokens_wanted(snapshot, request))
    return max(least, min(info.num_slots - held, free))


def may_displace(snapshot: ReplicaSnapshot, request: PlaceRequest) -> bool:
    """Whether the sequence may take the place of a less important one at a decode replica."""
    priority, promised = snapshot.least_priority, snapshot.info.reservation
    return promised == "used" and priority is not None and request.priority < priority


def num_held(snapshot: ReplicaSnapshot) -> int:
    """Sequences that run at a replica, wait there, or are on their way to it."""
    return snapshot.num_running + snapshot.num_waiting


def decode_pressure(snapshot: ReplicaSnapshot) -> float:
    """The scarcer of slots and cache tokens, as the share in use; 1 is full, higher is busier."""
    slots = num_held(snapshot) / snapshot.info.num_slots
    tokens = snapshot.reserved_tokens / snapshot.info.kv_capacity_tokens
    return max(slots, tokens)
