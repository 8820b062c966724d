"""`serve run serve_app.app:build model=quadriga-s decode_replicas=2`."""

from __future__ import annotations

from typing import Any

from ray import serve

from quadriga.config.loader import QuadrigaConfig, load_config
from serve_app.auth.api_keys import ApiKeys
from serve_app.cli.environment import haproxy_enabled
from serve_app.cli.ray_errors import explain_in_serve_cli
from serve_app.ingress import Ingress
from serve_app.ops.admin import check_admin

AFFINITY_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
INGRESS = "Ingress"
SERVE_SLACK = 1024
"""Calls that are no generations, or not yet; `concurrency_limiter` bounds those that may last."""
HEALTH_PERIOD_S = 3.0
HEALTH_TIMEOUT_S = 7.0


def build(args: dict[str, Any]) -> serve.Application:
    """Build the application from `key=value` arguments or the `args` of a YAML file.

    Raises:
        ConfigError: Naming every field at fault.
    """
    explain_in_serve_cli()
    config = load_config(args)
    if any(pool.fetched_from for pool in config.pools):
        from serve_app.fetched_models import await_models

        await_models(config.pools)
    if config.helios.enabled:  # what reads catalogues is loaded for it alone
        from quadriga.control.helios_setup import with_a_choice

        config = with_a_choice(config)
    keys = ApiKeys.load(config.auth)
    check_admin(config.admin, keys)
    return application(config, keys, announces=True)


def application(config: QuadrigaConfig, keys: ApiKeys, *, announces: bool) -> serve.Application:
    """The one deployment, bound to a configuration without secrets.

    Args:
        announces: The ingress prints what runs where once it is ready.
    """
    options: dict[str, Any] = {
        "name": INGRESS,
        "num_replicas": config.ingress.replicas,
        # EngineClient refuses with 429 at its limit; Serve must make no call wait before that.
        "max_ongoing_requests": config.ingress.max_ongoing_requests + SERVE_SLACK,
        "ray_actor_options": {"num_cpus": 0},
        # Requests are counted by result; a line for each costs as much as a few tokens.
        "logging_config": {"enable_access_log": False},
        # A replica that is exchanged takes nothing new and lets its streams end.
        "graceful_shutdown_timeout_s": config.lifecycle.drain_timeout_s,
        # A stopped ingress is replaced after three of these without an answer; its clients wait.
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": HEALTH_TIMEOUT_S,
        "graceful_shutdown_wait_loop_s": 0.5,
        "max_constructor_retry_count": 10**6,  # RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT decides
    }
    if config.ingress.replicas > 1 and not haproxy_enabled():
        # A resumption must reach the ingress that holds the request, so calls with the same
        # idempotency key go to the same one. (`launch` configures HAProxy so.)
        options["request_router_config"] = serve.config.RequestRouterConfig(
            request_router_class=AFFINITY_ROUTER,  # type: ignore[arg-type]  # import path
            # Where that one is gone, the next takes over what it held.
            request_router_kwargs={"num_fallback_replicas": 1},
        )
    deployment = serve.deployment(**options)(serve.ingress()(Ingress))
    plain = config.model_dump(mode="json", exclude={"auth"})
    return deployment.bind(plain, keys, announces)
