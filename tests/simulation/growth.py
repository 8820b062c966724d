"""What a cluster that does nothing keeps, and whether it becomes more."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections import Counter
from collections.abc import Iterator

from tests.simulation.virtual_time import VirtualLoop

NUM_LOOKS, LOOK_EVERY_S = 3, 0.37
"""What is under way at one moment is not at all of these."""
FEW = {"tasks": 2, "timers": 2, "objects": 20, "bytes": 1 << 14, "blocks": 2000}
"""What may be more by chance; the looks themselves are among it."""


async def least(loop: VirtualLoop) -> Counter[str]:
    """What is there at each of a few moments: tasks, timers, and objects by type."""
    found = _look(loop)
    for _ in range(NUM_LOOKS):
        await asyncio.sleep(LOOK_EVERY_S)
        found &= _look(loop)
    return found


def grown(before: Counter[str], after: Counter[str]) -> Iterator[str]:
    """What has become more."""
    for what, count in (after - before).items():
        kind = what.split()[0]
        if count > FEW.get(kind, FEW["objects"]):
            yield f"{count} more of {before[what]} {what}"


def _look(loop: VirtualLoop) -> Counter[str]:
    gc.collect()
    found = Counter({"blocks": sys.getallocatedblocks(), "timers": len(loop._later)})
    found["tasks"] = len(asyncio.all_tasks(loop))
    for one in gc.get_objects():
        kind = f"{type(one).__module__}.{type(one).__qualname__}"
        found[kind] += 1
        found[f"bytes of {kind}"] += sys.getsizeof(one)
    return found
