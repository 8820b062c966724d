"""What is done inside the service's processes, over Ray's own `__ray_call__`: only who holds the
cluster can do it, and the product knows nothing of it.

Nothing here imports more than it must: it is loaded where the actors run.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import random
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HELD, GO = "held", "go"
LOOK_EVERY_S = 0.005
PARTS_PER_ERROR = 20
"""5 % of the parts: of each twenty that go one after the other, one, which is drawn."""
FILL_BYTES = 64 << 10
MAX_FILLS = 65_536

_state: dict[str, Any] = {}
"""Of this process: what was done to it, so that it can be undone."""


# Holding a protocol at one of its steps


async def _stop_here(folder: str, limit_s: float) -> None:
    """Say that the step is reached, and wait until it is let go on."""
    held = Path(folder)
    (held / HELD).touch()
    give_up_s = time.monotonic() + limit_s
    while not (held / GO).exists() and time.monotonic() < give_up_s:  # noqa: ASYNC110
        await asyncio.sleep(LOOK_EVERY_S)


def hold(replica: Any, point: str, folder: str, limit_s: float) -> None:
    """Hold the next migration, or resize, that comes to a point; once.

    Args:
        point: "reserve", "commit" (before it takes the sequence over) or "committed" (before it
            says that it has) at a destination; "copy" at a source; "change" at a replica that
            is about to change its depth.
        folder: Where the files `held` and `go` are the signals.
        limit_s: Longest time.
    """
    points: dict[str, tuple[str, Callable[[int, Any], bool], bool]] = {
        "reserve": ("reserve", lambda calls, args: args[0].is_live, False),
        "commit": ("commit", lambda calls, args: len(args) > 3 and args[3] is not None, False),
        "committed": ("commit", lambda calls, args: len(args) > 3 and args[3] is not None, True),
        "copy": ("send", lambda calls, args: True, False),
        "change": ("on_engine", lambda calls, args: calls > 1, False),
    }
    name, is_due, is_after = points[point]
    owners = {"copy": replica.transport}
    if point in ("commit", "committed"):
        owners[point] = replica.receiver  # calls of its own never pass the actor's attributes
    owner = owners.get(point, replica)
    original = getattr(owner, name)
    calls = itertools.count(1)

    async def held(*args: Any, **options: Any) -> Any:
        if not is_due(next(calls), args):
            return await original(*args, **options)
        setattr(owner, name, original)
        if is_after:
            result = await original(*args, **options)
            await _stop_here(folder, limit_s)
            return result
        await _stop_here(folder, limit_s)
        return await original(*args, **options)

    setattr(owner, name, held)


# Faults of the transport


def harm_sending(replica: Any, kind: str, seed: int, seconds: float) -> None:
    """Let KV that leaves here stall, from the next part on, or lose a bit in 5 % of its parts."""
    transport = replica.transport
    original = _state.setdefault("send", transport.send)
    end_s: float | None = None
    hit = _stratified(random.Random(seed))
    _state["hits"] = 0

    async def stalled(peer: str, part: Any, kv: Any, *, deadline_s: float) -> None:
        from quadriga.errors import KVTransportError

        nonlocal end_s
        end_s = end_s or time.monotonic() + seconds
        left_s = end_s - time.monotonic()
        if left_s > 0:
            _state["hits"] += 1
            await asyncio.sleep(min(left_s, deadline_s))
            if left_s >= deadline_s:
                raise KVTransportError(f"part {part.index} to {peer} is late", code="timeout")
        await original(peer, part, kv, deadline_s=deadline_s - max(0.0, left_s))

    async def corrupting(peer: str, part: Any, kv: Any, *, deadline_s: float) -> None:
        if hit():
            _state["hits"] += 1
            kv = kv.clone()
            flat = kv.view(-1).view(_bytes_type())
            flat[seed % flat.numel()] ^= 1 << (seed % 7)
        await original(peer, part, kv, deadline_s=deadline_s)

    transport.send = {"stall": stalled, "corrupt": corrupting}[kind]


def harm_receiving(replica: Any, seconds: float) -> None:
    """Let the KV that arrives here wait before it is stored, from the next part on."""
    original = _state.setdefault("write_kv", replica.write_kv)
    end_s: float | None = None
    _state["hits"] = 0

    def write_kv(*args: Any) -> None:
        nonlocal end_s
        end_s = end_s or time.monotonic() + seconds
        _state["hits"] += 1
        time.sleep(max(0.0, end_s - time.monotonic()))  # on a thread of the transport's
        original(*args)

    replica.write_kv = write_kv


def be_well(replica: Any) -> int:
    """Undo what was done to the transport. Returns how many parts it has met."""
    if "send" in _state:
        replica.transport.send = _state.pop("send")
    if "write_kv" in _state:
        replica.write_kv = _state.pop("write_kv")
    return int(_state.pop("hits", 0))


def num_hits(replica: Any) -> int:
    """How many parts were met so far."""
    return int(_state.get("hits", 0))


def _bytes_type() -> Any:
    import torch

    return torch.uint8


def _stratified(rng: random.Random) -> Callable[[], bool]:
    """Whether the next part is hit: one of each `PARTS_PER_ERROR`, at a random place."""

    def draws() -> Any:
        while True:
            chosen = rng.randrange(PARTS_PER_ERROR)
            yield from (i == chosen for i in range(PARTS_PER_ERROR))

    made = draws()
    return lambda: bool(next(made))


def rest_channels(_: Any) -> None:
    """Give up a channel that nobody has used for seconds, not for a minute."""
    from quadriga.kv_transport import channel_ends

    vars(channel_ends)["MAX_IDLE_S"] = 1.0


# Disk and memory


def fill_logs(actor: Any) -> int:
    """Let all files this process logs to be on a full disk. Returns how many they are."""
    full = os.open("/dev/full", os.O_WRONLY)
    saved: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        if "/logs/" in target:
            saved[number] = os.dup(number)
            os.dup2(full, number)
    os.close(full)
    _state["logs"] = saved
    _shout()
    return len(saved)


def empty_logs(actor: Any) -> None:
    """There is room again."""
    _shout()
    for number, kept in _state.pop("logs", {}).items():
        os.dup2(kept, number)
        os.close(kept)


def _shout() -> None:
    for _ in range(20):
        logging.getLogger("quadriga.chaos").warning("this is said to be written to a log")


def eat(actor: Any) -> int:
    """Let this process have no more memory than now, and take what it has left of that.

    Returns:
        How many bytes were left.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(), hard))
    eaten: list[bytearray] = []
    with contextlib.suppress(MemoryError):
        eaten.extend(bytearray(FILL_BYTES) for _ in range(MAX_FILLS))
    _state["eaten"] = eaten
    return len(eaten) * FILL_BYTES


def digest(actor: Any) -> None:
    """Give it back."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    _state.pop("eaten", None)


def reschedule(scheduler: Any, is_on: bool) -> bool:
    """Let the scheduler place and move by forecast, or place by least work and move nothing, until
    it is configured anew. Returns whether it did by forecast until now."""
    config = scheduler._config
    was_on = bool(config.scheduler.ares.mode == "ares")
    section = config.scheduler.model_copy(
        update={
            "ares": config.scheduler.ares.model_copy(update={"mode": "ares" if is_on else "off"}),
            "placement": "ares" if is_on else "least_work",
        }
    )
    scheduler._config = config.model_copy(update={"scheduler": section})
    scheduler._rescheduling.configure(scheduler._config)
    scheduler._placement = scheduler._make_placement()
    return was_on
