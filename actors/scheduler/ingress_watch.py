"""Ingresses that hang: their clients wait, and nobody else would end it soon.

Serve finds a stopped replica and starts another one, but lets the old one be until its drain is
over; as long as its process is there, its clients' connections stay open and silent.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import ray
from ray.actor import ActorHandle

from actors.rpc.ray_rpc import RAY_FAILED
from quadriga.policies.liveness import patience_s

logger = logging.getLogger(__name__)

SILENCE_S = 10.0
"""An ingress that sends no heartbeat for so long is ended; Serve starts another one."""
STALL_S = 2.0
"""Who looks after them comes by more often, unless the process stands still."""
SERVE_NAMESPACE = "serve"


class IngressWatch:
    """When each ingress was last heard of; those that send no name are not watched."""

    def __init__(self) -> None:
        self._heard_s: dict[str, float] = {}
        self._looked_s: float | None = None
        self.is_looking = False
        """Whether Ray is being asked who of the silent is still there."""

    def hear(self, actor: str, now_s: float) -> None:
        """A sign of life of the ingress in an actor of Serve's."""
        if actor:
            self._heard_s[actor] = now_s

    def forget(self, actor: str) -> None:
        """It is no more; another one, of another name, took its place."""
        self._heard_s.pop(actor, None)

    def silent(self, now_s: float) -> list[str]:
        """Actors that are missed already: those that were replaced are among them."""
        return [a for a, heard_s in self._heard_s.items() if now_s - heard_s > SILENCE_S / 2]

    def hung(self, now_s: float) -> list[str]:
        """Actors that were silent for too long; each is named once.

        Where half of them are silent at once, the machine is stalled, not they: that takes longer.
        """
        stood_still_s = now_s - (now_s if self._looked_s is None else self._looked_s) - STALL_S
        self._looked_s = now_s
        if stood_still_s > 0:  # their heartbeats may lie there unread
            self._heard_s = {a: t + stood_still_s for a, t in self._heard_s.items()}
        silences_s = {a: now_s - heard_s for a, heard_s in self._heard_s.items()}
        longest_s = patience_s(list(silences_s.values()), limit_s=SILENCE_S)
        silent = [a for a, silence_s in silences_s.items() if silence_s > longest_s]
        for actor in silent:
            del self._heard_s[actor]
        return silent


async def forget_gone(watch: IngressWatch, now_s: float) -> None:
    """Forget who is silent because it was stopped: it says nothing about the others' machine.

    Returns at once while an earlier call is still at it.
    """
    if watch.is_looking:
        return
    watch.is_looking = True
    try:
        for actor in watch.silent(now_s):
            if await _find(actor) is None:
                watch.forget(actor)
    except RAY_FAILED as exc:
        logger.info("nobody tells which ingresses are gone: %s", exc)
    finally:
        watch.is_looking = False


async def end(watch: IngressWatch, actor: str, now_s: float) -> None:
    """End an ingress's process, if it is there: one that was stopped in order is gone already.

    Where Ray does not do it, the ingress is watched again, and is soon ended again.
    """
    try:
        handle = await _find(actor)
        if handle is not None:
            logger.warning("%s hangs; it is ended", actor)
            await asyncio.to_thread(ray.kill, handle, no_restart=True)
    except RAY_FAILED as exc:
        logger.warning("%s was not ended: %s", actor, exc)
        watch.hear(actor, now_s - SILENCE_S / 2)


async def _find(actor: str) -> ActorHandle[Any] | None:
    try:
        return await asyncio.to_thread(ray.get_actor, actor, namespace=SERVE_NAMESPACE)
    except ValueError:
        return None
