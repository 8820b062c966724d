"""Which replica shall hold what, and the one order that is under way.

There is one target for all serving replicas; profilers are apart. Strict requests never leave a
loaded exit below their threshold. While some are in flight that may need depth d of a model, one
decode replica keeps, or loads, that much of it; no order takes the last such replica away. A
prefill replica loads as much as strict requests wait for there, and keeps it while there are strict
requests."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from quadriga.core.replica import DepthClass, Role
from quadriga.policies.helios.messages import ChangeOrder, ReplicaReport, Resize, Switch

Depths = Mapping[str, tuple[int, ...]]
"""Model → depths it may be loaded to, ascending."""


def profilers(
    replicas: Mapping[str, ReplicaReport], scouts: frozenset[str], *, has_scouts: bool
) -> frozenset[str]:
    """The profiling replicas: living scouts; where none are meant, the first of each role."""
    if has_scouts:
        return scouts & set(replicas)
    first = {replica.role: name for name, replica in sorted(replicas.items(), reverse=True)}
    return frozenset(first.values())


def wanted_classes(
    replicas: Mapping[str, ReplicaReport],
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
        strict, waiting: See `ControllerTick`.
    """
    wanted = {
        name: aside.get(name) or target or replica.depth_class for name, replica in replicas.items()
    }
    decode = [n for n in sorted(replicas) if replicas[n].role is Role.DECODE]
    pool = [n for n in decode if n not in passing] or decode
    pinned: set[str] = set()
    for model, depth in sorted(strict.items()):
        if model not in depths or any(_serves(wanted[n], model, depth) for n in pool):
            continue
        if all(model not in (wanted[n].model, replicas[n].depth_class.model) for n in pool):
            continue  # in a profile alone, and `may_change` keeps its layers: nobody else gets it
        free = [n for n in pool if n not in pinned]
        able = [n for n in free if _serves(replicas[n].depth_class, model, depth)]
        if not free:
            break
        chosen = able[0] if able else free[-1]
        wanted[chosen] = replicas[chosen].depth_class if able else _at_least(model, depth, depths)
        pinned.add(chosen)
    _deepen_prefill(wanted, replicas, aside, strict, depths, waiting or {})
    return wanted


def _deepen_prefill(
    wanted: dict[str, DepthClass],
    replicas: Mapping[str, ReplicaReport],
    aside: Collection[str],
    strict: Mapping[str, int],
    depths: Depths,
    waiting: Mapping[str, int],
) -> None:
    """Give prefill replicas the layers that strict requests wait for; keep those in use."""
    prefill = {
        n: replicas[n].depth_class for n in sorted(replicas) if replicas[n].role is Role.PREFILL
    }
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
    name: str, new: DepthClass, replicas: Mapping[str, ReplicaReport], strict: Mapping[str, int]
) -> bool:
    """Whether a change leaves every strict need met that is met now."""
    replica = replicas[name]
    if replica.role is not Role.DECODE:
        return True
    for model, depth in strict.items():
        if not _serves(replica.depth_class, model, depth) or _serves(new, model, depth):
            continue
        if not any(
            other != name and m.role is Role.DECODE and _serves(m.depth_class, model, depth)
            for other, m in replicas.items()
        ):
            return False
    return True


def in_order(
    replicas: Mapping[str, ReplicaReport],
    wanted: Mapping[str, DepthClass],
    first: Sequence[str] = (),
) -> list[str]:
    """Replicas that do not hold what they shall, in the order in which to change them.

    Prefill may run deeper than decode, never shallower: it grows first and shrinks last.
    """

    def key(name: str) -> tuple[bool, bool, str]:
        now, then = replicas[name].depth_class, wanted[name]
        shrinks = now.model == then.model and then.depth < now.depth
        is_prefill = replicas[name].role is Role.PREFILL
        return name not in first, is_prefill is shrinks, name

    return sorted((n for n in replicas if replicas[n].depth_class != wanted[n]), key=key)


def _serves(held: DepthClass, model: str, depth: int) -> bool:
    return held.model == model and held.depth >= depth


MAX_BACKOFF_S = 3600.0
LATE = "no answer in time"


class PendingAction:
    """Writes orders and remembers the one under way.

    Args:
        timeout_s: An order without an answer by then has failed.
        retry_s: A replica is not asked again for what it failed to do for this long, doubling; for
            something else it is asked at once.

    Attributes:
        order: The one under way, or None.
    """

    def __init__(self, timeout_s: float, retry_s: float) -> None:
        self._timeout_s, self._retry_s = timeout_s, retry_s
        self._num_orders = 0
        self._failed: dict[tuple[str, DepthClass], tuple[float, float]] = {}  # until when, delay
        self.order: ChangeOrder | None = None

    def write(
        self, replica: str, now: DepthClass, then: DepthClass, reason: str, now_s: float
    ) -> ChangeOrder:
        """Order a change; there must be none under way."""
        assert self.order is None
        self._num_orders += 1
        kind: type[ChangeOrder] = Resize if now.model == then.model else Switch
        self.order = kind(self._num_orders, replica, then, now_s + self._timeout_s, reason)
        return self.order

    def take(self, order_id: int) -> ChangeOrder | None:
        """The order that an answer is about, which is over then; None for a stale answer."""
        order = self.order
        if order is None or order.order_id != order_id:
            return None
        self.order = None
        return order

    def is_late(self, now_s: float) -> bool:
        """Whether the one under way should have been answered."""
        return self.order is not None and now_s >= self.order.deadline_s

    def back_off(self, order: ChangeOrder, now_s: float, *, is_held_up: bool) -> float:
        """Do not ask for the same again for a while; returns for how long.

        Args:
            is_held_up: Requests were in the way, which says nothing of the next time.
        """
        key = (order.replica, order.depth_class)
        last_s = 0.0 if is_held_up else self._failed.get(key, (0.0, 0.0))[1]
        delay_s = max(self._retry_s, min(2.0 * last_s, MAX_BACKOFF_S))
        self._failed[key] = (now_s + delay_s, delay_s)
        return delay_s

    def succeeded(self, order: ChangeOrder) -> None:
        """The replica did as ordered."""
        self._failed.pop((order.replica, order.depth_class), None)

    def forget_failures(self) -> None:
        """Let everything be asked for at once."""
        self._failed.clear()

    def may_ask(self, replica: str, then: DepthClass, now_s: float) -> bool:
        """Whether a replica may be asked for a class now."""
        return now_s >= self._failed.get((replica, then), (now_s, 0.0))[0]
