"""Where a model's tokens leave, and what each of them takes: served whole, every exit tested.

One sequence at a time, with the service's engine and decode loop; processor time.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from loadgen.paper.helios_engine import Room, ServedModel
from loadgen.paper.helios_record import Request
from loadgen.paper.helios_serve import ProcessClock, TurnClock, open_replica
from loadgen.paper.task_suite import Prompt
from loadgen.profile_depth import AtExit
from quadriga.checkpoint.folder import Checkpoint


def served_exits(
    checkpoint: Checkpoint,
    prompts: Sequence[Prompt],
    threads: int,
    say: Callable[[dict[str, Any]], None],
) -> dict[int, AtExit]:
    """Serve the prompts one after the other; depth → what was seen of it."""
    clock = TurnClock(ProcessClock())
    model = ServedModel.measure(checkpoint, num_rows=1, threads=threads, clock=clock)
    replica = open_replica([model], model.full, Room(1), clock, threads)
    took_s: dict[int, list[float]] = {}
    with clock.turn():
        for index, prompt in enumerate(prompts):
            request = Request(index, prompt, clock.now_s())
            replica.admit(request)
            since_s, seen = clock.now_s(), len(request.token_ids)
            while not replica.is_over(request):
                replica.step()
                if len(request.token_ids) > seen:
                    now_s, seen = clock.now_s(), len(request.token_ids)
                    took_s.setdefault(request.exit_layers[-1], []).append(now_s - since_s)
                    since_s = now_s
            say({"done": 1})
    total = sum(len(times) for times in took_s.values())
    found = {}
    for depth in (*checkpoint.exits.layers, checkpoint.num_layers):
        times = took_s.get(depth)
        left = sum(len(t) for k, t in took_s.items() if k <= depth)
        found[depth] = AtExit(
            left / total if total and depth < checkpoint.num_layers else None,
            statistics.median(times) if times else None,
        )
    return found
