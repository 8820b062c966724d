"""How other processes find the actors, and how an application is created."""

from __future__ import annotations

import time
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import RayActorError, RayError, RayTaskError

from actors.rpc.lifecycle import controller_name, create_or_get, scheduler_name
from actors.rpc.ray_rpc import NAMESPACE, forget_actor, from_ray, get_actor
from quadriga.config.loader import QuadrigaConfig, load_config
from quadriga.errors import Unavailable

__all__ = [
    "NAMESPACE",
    "begin_cluster",
    "controller_name",
    "ensure_cluster",
    "forget_actor",
    "get_actor",
    "scheduler_name",
]

ENSURE_TIMEOUT_S = 120.0


def ensure_cluster(config: QuadrigaConfig | dict[str, Any]) -> None:
    """Make sure that scheduler and controller live and know the desired state; idempotent.

    Blocks until the controller has accepted the configuration (it may have to download a
    checkpoint), not until the replicas are ready. API keys never leave the caller.

    Raises:
        ConfigError: The configuration cannot be served on this cluster.
        Unavailable: The actors did not come up in time.
    """
    loaded = config if isinstance(config, QuadrigaConfig) else load_config(config)
    plain = loaded.model_dump(mode="json", exclude={"auth"})
    give_up_s = time.monotonic() + ENSURE_TIMEOUT_S
    while True:
        try:
            ray.get(_begin(loaded.name, plain), timeout=give_up_s - time.monotonic())
            return
        except RayTaskError as exc:
            raise from_ray(controller_name(loaded.name), "ensure", exc) from exc
        except RayActorError as exc:
            # An application that is just ending: make a new one when the old is gone.
            forget_actor(controller_name(loaded.name))
            if time.monotonic() + 1.0 > give_up_s:
                raise Unavailable(
                    f"the controller does not come up: {exc}; Ray's logs on its node say why",
                    retry_after_s=5.0,
                ) from exc
            time.sleep(0.2)
        except RayError as exc:
            raise Unavailable(
                f"the controller did not answer in {ENSURE_TIMEOUT_S:.0f} s: {exc}; where it "
                "fetches a model, as its log says, it goes on: start again when that is there",
                retry_after_s=5.0,
            ) from exc


def begin_cluster(config: QuadrigaConfig) -> ObjectRef[Any]:
    """Have scheduler, controller and replicas start, and do not wait: `ensure_cluster` tells.

    Returns:
        To be kept until then: of a failure that nobody can ask for any more Ray prints a trace.
    """
    return _begin(config.name, config.model_dump(mode="json", exclude={"auth"}))


def _begin(app: str, config: dict[str, Any]) -> ObjectRef[Any]:
    """Have an application's controller accept a configuration; missing actors are created."""
    from actors.controller.controller import Controller
    from actors.scheduler.scheduler import Scheduler

    create_or_get(Scheduler, scheduler_name(app), config)
    controller: Any = create_or_get(Controller, controller_name(app), app, config)
    begun: ObjectRef[Any] = controller.ensure.remote(config)
    return begun
