"""What Ray and Serve read from the environment; the same on every node of a cluster."""

from __future__ import annotations

import os
from typing import Literal

from serve_app.http.tls import BINARY_VARIABLE, HAPROXY_VARIABLE

Proxy = Literal["auto", "haproxy", "serve"]

MAX_GRPC_MESSAGE_BYTES = 64 << 20
"""Of one message, unpacked. `ingress.max_body_bytes` is the limit with a message of its own."""

HTTP_GUARD = "serve_app.http.header_limits.guard"
LOG_FORMAT_VARIABLE = "QUADRIGA_LOG_FORMAT"
"""For Serve's proxies, which know no configuration of ours."""
GRPC_SERVICERS = (
    "serve_app.grpc.messages.add_quadriga_to_server",
    "grpc_health.v1.health_pb2_grpc.add_HealthServicer_to_server",
)
"""What Serve's gRPC options name."""


def haproxy_enabled() -> bool:
    """Whether Serve runs HAProxy instead of its own proxy."""
    return os.environ.get(HAPROXY_VARIABLE) == "1"


def choose_proxy(proxy: Proxy = "auto", *, has_grpc: bool = True) -> None:
    """Choose what stands before a service on this machine; call before Ray is imported.

    Args:
        proxy: `auto` is what the environment says, else HAProxy where Ray's own is installed and
            runs: it passes a token on in a sixth of the time that Serve's proxy takes.
        has_grpc: Whether HAProxy is to take gRPC over TLS too, where there is TLS.

    Raises:
        ConfigError: HAProxy is wanted and cannot be had, or the certificate is no good.
    """
    if proxy == "auto" and HAPROXY_VARIABLE not in os.environ:
        from serve_app.http.haproxy import is_available

        proxy = "haproxy" if is_available() else "serve"
    if proxy != "auto":
        os.environ[HAPROXY_VARIABLE] = str(int(proxy == "haproxy"))
    if not haproxy_enabled():
        return
    os.environ.setdefault("RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", "0")
    os.environ.setdefault("RAY_SERVE_HAPROXY_NBTHREAD", str(min(4, os.cpu_count() or 1)))
    from serve_app.http.haproxy import HARD_STOP_S, HARD_STOP_VARIABLE, starter_script

    os.environ.setdefault(HARD_STOP_VARIABLE, str(HARD_STOP_S))
    if BINARY_VARIABLE not in os.environ:
        os.environ[BINARY_VARIABLE] = str(starter_script(has_grpc=has_grpc))


def prepare_environment() -> None:
    """Fill in what is not set yet; call before Ray is imported.

    With several ingresses, calls with the same idempotency key must reach the same one: Serve's
    own proxy and HAProxy each have a setting for it.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray starts workers at niceness 15: anything else on the machine would starve the service.
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_SERVE_SESSION_ID_HEADER_KEY", "idempotency-key")
    # Requests without the header are spread in turn.
    os.environ.setdefault("RAY_SERVE_HAPROXY_BALANCE_ALGORITHM", "hdr(idempotency-key)")
    # Our handlers never block, so they need no thread and event loop of their own: every piece of
    # every answer would have to change threads.
    os.environ.setdefault("RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD", "0")
    os.environ.setdefault("RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP", "0")
    # Serve would take 2 GiB in one gRPC message, from callers without a key too, and compressed.
    os.environ.setdefault("RAY_SERVE_GRPC_MAX_MESSAGE_SIZE", str(MAX_GRPC_MESSAGE_BYTES))
    # Serve would wait for ever for the end of a request's headers, and read any amount of them.
    os.environ.setdefault("RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", HTTP_GUARD)
    # Serve would kill a proxy that has not started within 5 s, which a busy machine may take, and
    # the start of the service with it.
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
    # A proxy that died is started anew after three of these; by default that takes half a minute.
    os.environ.setdefault("RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S", "2")
    # A record of every actor call, for a dashboard that shows them one by one.
    os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
    os.environ.setdefault("RAY_enable_timeline", "0")
