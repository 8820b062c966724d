"""Short questions to the fleet's book about one replica."""

from __future__ import annotations

from actors.controller.replica_manager import Key, ReplicaHandle, ReplicaPhase
from quadriga.core.replica import DepthClass


def place_name(key: Key) -> str:
    """What the machine calls the replica of a place."""
    return f"{key[0].value}:{key[1]}"


def class_of(member: ReplicaHandle) -> DepthClass:
    """What a replica holds; it must have answered once."""
    assert member.status is not None
    return member.status.info.depth_class


def is_ready(member: ReplicaHandle) -> bool:
    """Whether it serves."""
    return member.phase is ReplicaPhase.READY and member.status is not None


def num_held(member: ReplicaHandle) -> int:
    """Sequences it has."""
    assert member.status is not None
    return member.status.load.num_held


def has_room(member: ReplicaHandle, tokens: int) -> bool:
    """Whether it could take a sequence that may become so long."""
    assert member.status is not None
    info, load = member.status.info, member.status.load
    fits = load.reserved_tokens + tokens <= info.kv_capacity_tokens
    return load.num_held < info.num_slots and fits
