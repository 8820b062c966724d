"""Limits of one ingress replica: what each API key may use, and how many calls may last at once.

Limits are counted in this process only: with several ingress replicas a key has its limits at each
of them.

Serve lets an ingress have so many calls at once and keeps all others waiting, without an end.
Generations are counted by `EngineClient`, and refused in time. Other calls that may last (health
watches, for which no key is needed, or bodies that are sent slowly) have a `ConcurrencyLimiter`
each, so that they never use up Serve's limit.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from quadriga.clock import Clock
from quadriga.errors import ConfigError, IngressFull, KeyLimitReached
from serve_app.auth.api_keys import ApiKeys, read_key_file
from serve_app.auth.keys import ApiKey, KeyLimits
from serve_app.ops.metrics import IngressMetrics

logger = logging.getLogger("quadriga.auth")

MAX_BODIES = 512
"""Requests at once whose body is not here yet."""
MAX_WATCHES = 64
"""Health watches at once; any more get the state once."""
MAX_READERS = 4
"""Connections at once that follow one request: one that broke may not be noticed at once."""
CONCURRENCY_RETRY_S = 1.0
SECONDS_PER_MINUTE = 60.0
FileMark = tuple[int, int, int]
NEVER_READ: FileMark = (0, 0, 0)


class Bucket:
    """Fills at a rate up to a size; may be overdrawn, and is then waited for.

    Args:
        per_s: Rate.
        size: Most it holds; full at first.
    """

    __slots__ = ("_at_s", "_level", "_per_s", "_size")

    def __init__(self, per_s: float, size: float, now_s: float) -> None:
        self._per_s = per_s
        self._size = size
        self._level = size
        self._at_s = now_s

    def wait_s(self, needed: float, now_s: float) -> float:
        """Seconds until it holds `needed`; 0 when it does."""
        self._level = min(self._size, self._level + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        return max(0.0, (needed - self._level) / self._per_s)

    def take(self, amount: float) -> None:
        self._level -= amount


class Meter:
    """What one key has used of its limits."""

    __slots__ = ("limits", "num_running", "requests", "tokens")

    def __init__(self, limits: KeyLimits, now_s: float) -> None:
        self.num_running = 0
        self.apply(limits, now_s)

    def apply(self, limits: KeyLimits, now_s: float) -> None:
        """Begin counting under these limits; generations that run still count."""
        self.limits = limits
        rate, tokens = limits.requests_per_s, limits.tokens_per_min
        self.requests = None if rate is None else Bucket(rate, max(1.0, rate), now_s)
        self.tokens = None if tokens is None else Bucket(tokens / SECONDS_PER_MINUTE, tokens, now_s)


class ConcurrencyLimiter:
    """A bounded number of calls of one kind at once.

    Args:
        what: What they do, for the refusal.
    """

    def __init__(self, limit: int, what: str) -> None:
        self._limit = limit
        self._what = what
        self.num_taken = 0

    @property
    def is_full(self) -> bool:
        return self.num_taken >= self._limit

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Hold one place. Raises: IngressFull."""
        if self.is_full:
            raise IngressFull(
                f"{self.num_taken} calls at once {self._what}, the limit; retry shortly",
                retry_after_s=CONCURRENCY_RETRY_S,
            )
        self.num_taken += 1
        try:
            yield
        finally:
            self.num_taken -= 1


class RateLimiter:
    """Checks keys and counts their use."""

    def __init__(self, keys: ApiKeys, clock: Clock, metrics: IngressMetrics) -> None:
        self.keys = keys
        self._clock = clock
        self._metrics = metrics
        self._meters: dict[str, Meter] = {}
        self._mark: FileMark | None = NEVER_READ  # it may have changed since the keys were made

    def http_caller(self, authorization: str | None, *, admin: bool = False) -> ApiKey:
        """As `ApiKeys.http_caller`, and count the call. Raises: KeyLimitReached as well."""
        return self._counted(self.keys.http_caller(authorization, admin=admin))

    def grpc_caller(self, authorization: str | None) -> ApiKey:
        """As `ApiKeys.grpc_caller`, and count the call. Raises: KeyLimitReached as well."""
        return self._counted(self.keys.grpc_caller(authorization))

    def begin(self, caller: ApiKey, num_prompt_tokens: int) -> None:
        """Admit a generation and charge its prompt; call `end` once when it is over.

        A key is admitted while it owes no tokens; the output of its generations is charged when
        they end, so it can overdraw by what it has running.

        Raises: KeyLimitReached.
        """
        meter = self._meter(caller)
        limits = meter.limits
        if limits.concurrency is not None and meter.num_running >= limits.concurrency:
            self._refuse(
                caller,
                "key_concurrency",
                f"its limit of {limits.concurrency} requests at once",
                CONCURRENCY_RETRY_S,
            )
        if meter.tokens is not None:
            wait_s = meter.tokens.wait_s(0.0, self._clock.now_s())
            if wait_s > 0:
                limit = f"its limit of {limits.tokens_per_min:g} tokens per minute"
                self._refuse(caller, "key_tokens", limit, wait_s)
            meter.tokens.take(num_prompt_tokens)
        meter.num_running += 1

    def end(self, key_name: str, num_output_tokens: int) -> None:
        """A generation is over: free its place, and charge its output.

        Args:
            num_output_tokens: Negative to give back what `begin` charged.
        """
        meter = self._meters[key_name]
        meter.num_running -= 1
        if meter.tokens is not None:
            meter.tokens.take(num_output_tokens)

    async def reload(self) -> None:
        """Read the key file again if it changed; one that is gone or broken changes nothing."""
        path = self.keys.file
        if path is None:
            return
        mark = await asyncio.to_thread(_mark, path)
        if mark == self._mark:
            return
        self._mark = mark
        if mark is None:
            logger.error("there is no key file %s here; the keys stay as they were", path)
            return
        try:
            self.keys = self.keys.with_file(await asyncio.to_thread(read_key_file, path))
        except ConfigError as exc:
            logger.error("the keys stay as they were: %s", exc.message)
            return
        names = {key.name for key in self.keys.all}
        self._meters = {
            name: meter
            for name, meter in self._meters.items()
            if name in names or meter.num_running > 0
        }
        logger.info("read %s again: %d keys", path, len(self.keys.from_file))

    def _counted(self, caller: ApiKey) -> ApiKey:
        meter = self._meter(caller)
        if meter.requests is not None:
            wait_s = meter.requests.wait_s(1.0, self._clock.now_s())
            if wait_s > 0:
                limit = f"its limit of {meter.limits.requests_per_s:g} requests per second"
                self._refuse(caller, "key_requests", limit, wait_s)
            meter.requests.take(1.0)
        return caller

    def _meter(self, caller: ApiKey) -> Meter:
        meter = self._meters.get(caller.name)
        if meter is None:
            meter = self._meters[caller.name] = Meter(caller.limits, self._clock.now_s())
        elif meter.limits != caller.limits:
            meter.apply(caller.limits, self._clock.now_s())
        return meter

    def _refuse(self, caller: ApiKey, reason: str, limit: str, wait_s: float) -> NoReturn:
        self._metrics.refused.labels(reason).inc()
        raise KeyLimitReached(
            f"the API key {caller.name!r} is at {limit}; retry in {wait_s:.1f} s",
            retry_after_s=wait_s,
        )


def _mark(path: str) -> FileMark | None:
    """What changes with a file, also where a mounted secret is exchanged under its name."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
