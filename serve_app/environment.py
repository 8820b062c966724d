"""What Ray and Serve read from the environment; the same on every node of a cluster."""

from __future__ import annotations

import os

HAPROXY_VARIABLE = "RAY_SERVE_ENABLE_HA_PROXY"


def haproxy_enabled() -> bool:
    """Whether Serve runs HAProxy instead of its own proxy."""
    return os.environ.get(HAPROXY_VARIABLE) == "1"


def prepare_environment(*, haproxy: bool = False) -> None:
    """Fill in what is not set yet; call before Ray is imported.

    With several ingresses, calls with the same idempotency key must reach the same one: Serve's
    own proxy and HAProxy are each told how.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray starts workers at niceness 15: anything else on the machine would starve the service.
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_SERVE_SESSION_ID_HEADER_KEY", "idempotency-key")
    # Requests without the header are spread in turn.
    os.environ.setdefault("RAY_SERVE_HAPROXY_BALANCE_ALGORITHM", "hdr(idempotency-key)")
    if haproxy:
        os.environ[HAPROXY_VARIABLE] = "1"
        os.environ.setdefault("RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", "0")
