"""Speed and latencies of the last ten minutes, sampled from the metrics hub.

The owner of the hub samples it every `INTERVAL_S`; a point describes what was counted between two
samples. The history has a fixed number of points, and goes through `dump` and `restore` to a
successor of the process. A time without a sample is a gap, and stays one.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from quadriga.observability.metrics import Family, MetricsHub

INTERVAL_S = 5.0
NUM_POINTS = 120
TOKENS = "vllm:generation_tokens_total"
TTFT = "vllm:time_to_first_token_seconds"
TOKEN_TIME = "vllm:inter_token_latency_seconds"
OPEN_REQUESTS = "quadriga_ingress_open_requests"
RUNNING = "quadriga_running_sequences"
DECODE_MARKS = (":decode:", ":mixed:")
"""Parts of the names of replicas that generate."""

Buckets = dict[float, float]
"""Upper bound → observations at or below it."""


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """One interval of the whole service; a value is None where there was nothing to measure.

    Attributes:
        number: Unix time of its end, in intervals.
        tokens_per_s: Tokens received by the ingresses.
        open_requests, decoding: Requests under way, and sequences in a decode batch, at its end.
        ttft_p50_s, ttft_p99_s: Of the first tokens in it.
        token_p50_s, token_p99_s: Of the times between two tokens of a sequence in it.
    """

    number: int
    tokens_per_s: float | None = None
    open_requests: float | None = None
    decoding: float | None = None
    ttft_p50_s: float | None = None
    ttft_p99_s: float | None = None
    token_p50_s: float | None = None
    token_p99_s: float | None = None


VALUES = tuple(f.name for f in fields(LoadPoint) if f.name != "number")


@dataclass(frozen=True, slots=True)
class _Counted:
    """What one source had counted when it was last heard of."""

    seen_s: float
    tokens: float
    ttft: Buckets
    token_time: Buckets


class LoadHistory:
    """The newest `NUM_POINTS` points; owned by one process, not thread-safe."""

    def __init__(self) -> None:
        self._points: deque[LoadPoint] = deque(maxlen=NUM_POINTS)
        self._before: dict[str, _Counted] = {}

    def sample(self, hub: MetricsHub, *, now_s: float, now_unix_s: float) -> None:
        """Append a point of what was counted since the last sample.

        A source's first appearance is only what the next sample is compared with: a hub that
        begins anew does not take all that was ever counted for the work of one interval.

        Args:
            now_s: By the clock that the hub's pushes are dated with.
        """
        number = math.floor(now_unix_s / INTERVAL_S)
        while self._points and self._points[-1].number > number:
            self._points.pop()  # the machine's clock was set back
        if self._points and self._points[-1].number == number:
            return
        now = _counted(hub)
        pairs = [(c, self._before[name]) for name, c in now.items() if name in self._before]
        self._before = now
        ttft = _quantiles((c.ttft, b.ttft) for c, b in pairs)
        token = _quantiles((c.token_time, b.token_time) for c, b in pairs)
        open_requests = hub.present(OPEN_REQUESTS, now_s=now_s)
        running = hub.present(RUNNING, now_s=now_s)
        self._points.append(
            LoadPoint(
                number,
                sum(_rate(c, b) for c, b in pairs) if pairs else None,
                _total(open_requests),
                _total(
                    {n: f for n, f in running.items() if any(mark in n for mark in DECODE_MARKS)}
                ),
                *ttft,
                *token,
            )
        )

    def columns(self, *, now_unix_s: float) -> dict[str, Any]:
        """Return the last ten minutes as JSON values.

        Returns:
            `interval_s`; `ended_unix_s`, the end of the newest interval; and per value of `Point` a
            list of `NUM_POINTS` numbers, the oldest first, None in gaps.
        """
        last = math.floor(now_unix_s / INTERVAL_S) - 1  # the newest one may not be sampled yet
        if self._points:
            last = max(last, self._points[-1].number)
        known = {point.number: point for point in self._points}
        shown = [known.get(number) for number in range(last - NUM_POINTS + 1, last + 1)]
        columns: dict[str, Any] = {"interval_s": INTERVAL_S, "ended_unix_s": last * INTERVAL_S}
        for name in VALUES:
            columns[name] = [None if p is None else _short(getattr(p, name)) for p in shown]
        return columns

    def dump(self) -> bytes:
        """Pack the points for a successor of this process."""
        return json.dumps([asdict(point) for point in self._points]).encode()

    def restore(self, data: bytes) -> None:
        """Take over what an earlier process dumped, before the first sample.

        Raises: ValueError when the bytes are not a dump; nothing is taken then.
        """
        try:
            points = [LoadPoint(**values) for values in json.loads(data)]
        except (ValueError, TypeError) as exc:
            raise ValueError(f"not a dump of a load history: {exc}") from exc
        self._points = deque(sorted(points, key=lambda p: p.number), maxlen=NUM_POINTS)


def quantile(buckets: Mapping[float, float], share: float) -> float | None:
    """Return a quantile of observations by upper bound (not cumulative); None without any.

    Between two bounds the observations are taken as evenly spread over the logarithm, as the bounds
    are; above the largest finite bound that bound is returned.
    """
    total = sum(buckets.values())
    if total <= 0:
        return None
    wanted, below, low = share * total, 0.0, 0.0
    for bound, count in sorted(buckets.items()):
        if count > 0 and below + count >= wanted:
            if math.isinf(bound):
                return low
            part = (wanted - below) / count
            return bound * part if low == 0.0 else low * (bound / low) ** part
        below += count
        low = bound if not math.isinf(bound) else low
    return low


def _counted(hub: MetricsHub) -> dict[str, _Counted]:
    """What each ingress has counted, by its name."""
    ttft, token_time = hub.family(TTFT), hub.family(TOKEN_TIME)
    seen_s = hub.seen_s()
    return {
        name: _Counted(
            seen_s[name],
            sum(family.samples.values()),
            _buckets(ttft.get(name)),
            _buckets(token_time.get(name)),
        )
        for name, family in hub.family(TOKENS).items()
    }


def _buckets(family: Family | None) -> Buckets:
    """Cumulative buckets of a histogram, all labels but the bound added up."""
    found: Buckets = {}
    for (sample, labels), value in family.samples.items() if family is not None else ():
        if sample.endswith("_bucket"):
            bound = float(dict(labels)["le"])
            found[bound] = found.get(bound, 0.0) + value
    return found


def _rate(now: _Counted, before: _Counted) -> float:
    """Tokens a second of one source, by when it was heard of: pushes do not come in step."""
    passed_s = now.seen_s - before.seen_s
    return max(0.0, now.tokens - before.tokens) / passed_s if passed_s > 0 else 0.0


def _quantiles(pairs: Iterable[tuple[Buckets, Buckets]]) -> tuple[float | None, float | None]:
    """P50 and P99 of what was observed since, by all sources."""
    grown: Buckets = {}
    for now, before in pairs:
        below = 0.0
        for bound in sorted(now):
            more = max(0.0, now[bound] - before.get(bound, 0.0))  # cumulative
            grown[bound] = grown.get(bound, 0.0) + max(0.0, more - below)
            below = max(below, more)
    return quantile(grown, 0.5), quantile(grown, 0.99)


def _total(families: Mapping[str, Family]) -> float | None:
    """The sum over sources; None where none is heard of."""
    if not families:
        return None
    return sum(value for family in families.values() for value in family.samples.values())


def _short(value: float | None) -> float | None:
    """A chart shows no more than four figures."""
    return None if value is None else float(f"{value:.4g}")
