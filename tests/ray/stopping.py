"""Replicas that stop, die, or lose an answer at a named point of a migration, once."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import ray

from actors.rpc.lookup import get_actor
from quadriga.core.request import SequenceState

SOURCE_POINTS = ("offer", "send", "committing", "acknowledged")
DESTINATION_POINTS = ("reserve", "store", "commit", "committed")
KNOWN_S = 20.0
"""Until an ingress has fetched word of a move, at most."""


def arm(replica: str, point: str, signal_number: int) -> None:
    """Let a replica send itself a signal when it comes to a point.

    Args:
        point: At the source, before it offers the sequence, sends its first KV, commits, or lets
            it go once the commit is acknowledged and the ingress knows of the move: of one that it
            never heard of the sequence dies with the source. At the destination, before it
            reserves, stores its first KV, takes the sequence over, or says that it has.
    """
    ray.get(get_actor(replica).__ray_call__.remote(_arm, point, signal_number), timeout=10)


def _arm(replica: Any, point: str, signal_number: int) -> None:
    """In the replica's process."""
    from actors.kv_transfer.migration import Migration
    from quadriga.scheduling.transfer.migration_copy import Copy

    is_due = [True]

    def strike() -> None:
        if is_due.pop() if is_due else False:
            os.kill(os.getpid(), signal_number)

    def before(owner: Any, name: str, wait: Any = None) -> None:
        original = getattr(owner, name)

        async def struck(*args: Any, **options: Any) -> Any:
            if wait is not None:
                await wait(replica, args[1])
            strike()
            return await original(*args, **options)

        setattr(owner, name, struck)

    def after(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        async def struck(*args: Any, **options: Any) -> Any:
            result = await original(*args, **options)
            strike()
            return result

        setattr(owner, name, struck)

    if point == "offer":
        before(replica.sender, "reserve")
    elif point == "send":
        before(Copy, "_send")
    elif point == "committing":
        before(Migration, "_commit")
    elif point == "acknowledged":
        before(Migration, "_let_go", _is_known)
    elif point == "reserve":
        before(replica, "reserve")
    elif point == "commit":
        before(replica.receiver, "commit")
    elif point == "committed":
        after(replica.receiver, "commit")
    elif point == "store":
        write_kv = replica.write_kv

        def struck_write(*args: Any) -> None:
            strike()
            write_kv(*args)

        replica.write_kv = struck_write
    else:
        raise AssertionError(point)


async def _is_known(replica: Any, state: SequenceState) -> None:
    """Wait until the ingress has fetched the word that a sequence is on its way."""
    give_up_s = time.monotonic() + KNOWN_S
    while time.monotonic() < give_up_s:
        pending = replica.mail.collect(state.ingress_id, 0).emissions
        if not any(e.move == "begun" and e.sequence_id == state.sequence_id for e in pending):
            return
        await asyncio.sleep(0.005)


def lose_answer(replica: str) -> None:
    """Let the first commit at a replica take effect and stay without an answer."""
    ray.get(get_actor(replica).__ray_call__.remote(_lose_answer), timeout=10)


def _lose_answer(replica: Any) -> None:
    commit = replica.receiver.commit

    async def unanswered(*args: Any, **options: Any) -> None:
        replica.receiver.commit = commit
        await commit(*args, **options)
        await asyncio.sleep(KNOWN_S)  # longer than a call may take

    replica.receiver.commit = unanswered


def has_lost_answer(replica: str) -> bool:
    """Whether a commit came since `lose_answer`; the next ones are answered in any case."""
    actor: Any = get_actor(replica)
    found: bool = ray.get(actor.__ray_call__.remote(_has_lost_answer), timeout=10)
    return found


def _has_lost_answer(replica: Any) -> bool:
    return bool(vars(replica.receiver).pop("commit").__name__ != "unanswered")


def go_on(pid: int) -> None:
    """Let a stopped process run again."""
    os.kill(pid, signal.SIGCONT)
