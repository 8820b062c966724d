"""Which replica shall hold what: one target for all, a profiler aside, and a deep one in need.

Strict requests never leave a loaded exit below their threshold. While some are in flight that may
need depth d of a model, one decode replica keeps, or loads, that much of it; no order takes the
last such replica away. A prefill replica loads as much as strict requests wait for there, and keeps
it while there are strict requests.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from quadriga.core.replica import DepthClass, Role
from quadriga.policies.helios.messages import ReplicaReport

Depths = Mapping[str, tuple[int, ...]]
"""Model → depths it may be loaded to, ascending."""


def profilers(
    fleet: Mapping[str, ReplicaReport], scouts: frozenset[str], *, has_scouts: bool
) -> frozenset[str]:
    """Who profiles: the scouts that live; where none are meant, the first replica of each role."""
    if has_scouts:
        return scouts & set(fleet)
    first = {member.role: name for name, member in sorted(fleet.items(), reverse=True)}
    return frozenset(first.values())


def wanted_classes(
    fleet: Mapping[str, ReplicaReport],
    *,
    target: DepthClass | None,
    aside: Mapping[str, DepthClass],
    passing: Collection[str],
    strict: Mapping[str, int],
    depths: Depths,
    waiting: Mapping[str, int] | None = None,
) -> dict[str, DepthClass]:
    """What every replica shall hold.

    Args:
        target: For those that serve; None leaves them as they are.
        aside: Replicas that profile or sample, and what they hold for it.
        passing: Those of them that will soon hold another model: strict requests do not count on
            them unless there are no others.
        strict, waiting: See `Tick`.
    """
    wanted = {
        name: aside.get(name) or target or member.depth_class for name, member in fleet.items()
    }
    decode = [n for n in sorted(fleet) if fleet[n].role is Role.DECODE]
    pool = [n for n in decode if n not in passing] or decode
    pinned: set[str] = set()
    for model, depth in sorted(strict.items()):
        if model not in depths or any(_serves(wanted[n], model, depth) for n in pool):
            continue
        free = [n for n in pool if n not in pinned]
        able = [n for n in free if _serves(fleet[n].depth_class, model, depth)]
        if not free:
            break
        chosen = able[0] if able else free[-1]
        wanted[chosen] = fleet[chosen].depth_class if able else _at_least(model, depth, depths)
        pinned.add(chosen)
    _deepen_prefill(wanted, fleet, aside, strict, depths, waiting or {})
    return wanted


def _deepen_prefill(
    wanted: dict[str, DepthClass],
    fleet: Mapping[str, ReplicaReport],
    aside: Collection[str],
    strict: Mapping[str, int],
    depths: Depths,
    waiting: Mapping[str, int],
) -> None:
    """Give prefill replicas the layers that are waited for, and let them keep what is in use."""
    prefill = {n: fleet[n].depth_class for n in sorted(fleet) if fleet[n].role is Role.PREFILL}
    for model, depth in strict.items():
        able = [n for n in prefill if n not in aside and _serves(prefill[n], model, depth)]
        if able and not any(_serves(wanted[n], model, depth) for n in prefill):
            wanted[able[0]] = prefill[able[0]]
    for name in prefill:
        model, depth = prefill[name].model, waiting.get(name, 0)
        if depth and model in depths and not _serves(wanted[name], model, depth):
            wanted[name] = _at_least(model, depth, depths)


def _at_least(model: str, depth: int, depths: Depths) -> DepthClass:
    return DepthClass(model, next((d for d in depths[model] if d >= depth), depths[model][-1]))


def may_change(
    name: str, new: DepthClass, fleet: Mapping[str, ReplicaReport], strict: Mapping[str, int]
) -> bool:
    """Whether a change leaves every strict need met that is met now."""
    member = fleet[name]
    if member.role is not Role.DECODE:
        return True
    for model, depth in strict.items():
        if not _serves(member.depth_class, model, depth) or _serves(new, model, depth):
            continue
        if not any(
            other != name and m.role is Role.DECODE and _serves(m.depth_class, model, depth)
            for other, m in fleet.items()
        ):
            return False
    return True


def in_order(
    fleet: Mapping[str, ReplicaReport], wanted: Mapping[str, DepthClass], first: Sequence[str] = ()
) -> list[str]:
    """Replicas that do not hold what they shall, in the order in which to change them.

    Prefill may run deeper than decode, never shallower: it grows first and shrinks last.
    """

    def key(name: str) -> tuple[bool, bool, str]:
        now, then = fleet[name].depth_class, wanted[name]
        shrinks = now.model == then.model and then.depth < now.depth
        is_prefill = fleet[name].role is Role.PREFILL
        return name not in first, is_prefill is shrinks, name

    return sorted((n for n in fleet if fleet[n].depth_class != wanted[n]), key=key)


def _serves(held: DepthClass, model: str, depth: int) -> bool:
    return held.model == model and held.depth >= depth
