"""Start the whole service on this machine, and stop it again without a trace."""

from __future__ import annotations

import socket
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from quadriga.config import QuadrigaConfig
from quadriga.errors import QuadrigaError, Unavailable
from serve_app.auth import ApiKeys
from serve_app.environment import prepare_environment

LOOPBACK = "127.0.0.1"
OBJECT_STORE_BYTES = 256 << 20
POLL_INTERVAL_S = 0.2
STOP_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the service listens.

    Attributes:
        grpc_port: None where gRPC is off.
    """

    host: str = LOOPBACK
    http_port: int = 8000
    grpc_port: int | None = None

    @property
    def http_url(self) -> str:
        return f"http://{self.host}:{self.http_port}"

    @property
    def grpc_target(self) -> str | None:
        return None if self.grpc_port is None else f"{self.host}:{self.grpc_port}"


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


class LocalService:
    """Ray, Serve and the application on this machine; a context manager.

    Args:
        keys: gRPC starts only where this holds a key.
        ray_options: Further arguments of `ray.init`.
    """

    def __init__(
        self,
        config: QuadrigaConfig,
        keys: ApiKeys,
        addresses: Addresses,
        **ray_options: Any,
    ) -> None:
        self.config = config
        self.addresses = addresses
        self._keys = keys
        self._ray_options = ray_options

    def start(self) -> None:
        """Start everything and return once all replicas serve.

        Raises:
            ConfigError: The configuration cannot be served here.
            Unavailable: It was not ready in time.
        """
        prepare_environment()
        import ray
        from ray import serve

        from serve_app.app import GRPC_SERVICERS, application

        options: dict[str, Any] = {
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
            "configure_logging": True,
            "_node_ip_address": LOOPBACK,
        }
        ray.init("local", **(options | self._ray_options))
        grpc_options = None
        if self.addresses.grpc_port is not None and self._keys.digests:
            grpc_options = {
                "port": self.addresses.grpc_port,
                "grpc_servicer_functions": list(GRPC_SERVICERS),
            }
        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": self.addresses.host, "port": self.addresses.http_port},
            grpc_options=grpc_options,
        )
        serve.run(
            application(self.config, self._keys, announces=False),
            name=self.config.name,
            route_prefix="/",
        )
        self._await_ready()

    def status(self) -> dict[str, Any]:
        """What runs where, from the controller."""
        import ray

        from actors.lifecycle import controller_name
        from actors.lookup import get_actor

        controller: Any = get_actor(controller_name(self.config.name))
        status: dict[str, Any] = ray.get(controller.status.remote(), timeout=STOP_TIMEOUT_S)
        return status

    def stop(self) -> None:
        """End actors, Serve and Ray; never raises, never hangs."""
        import ray
        from ray import serve

        from actors.lifecycle import controller_name
        from actors.lookup import get_actor

        if not ray.is_initialized():
            return
        try:
            controller: Any = get_actor(controller_name(self.config.name))
            serve.delete(self.config.name)
            ray.get(controller.stop.remote(), timeout=STOP_TIMEOUT_S)
            self._await_gone(controller_name(self.config.name))
        except (QuadrigaError, ray.exceptions.RayError, RuntimeError) as exc:
            print(f"the actors did not stop in order: {exc}")
        finally:
            serve.shutdown()  # type: ignore[no-untyped-call]
            ray.shutdown()

    def __enter__(self) -> LocalService:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _await_ready(self) -> None:
        deadline_s = time.monotonic() + self.config.lifecycle.replica_start_timeout_s
        while True:
            status = self.status()
            if status.get("is_ready") and self._is_healthy():
                return
            if time.monotonic() > deadline_s:
                states = ", ".join(f"{r['name']} {r['phase']}" for r in status["replicas"])
                raise Unavailable(
                    f"not ready within lifecycle.replica_start_timeout_s: "
                    f"{status.get('error') or states or 'no replica was started'}"
                )
            time.sleep(POLL_INTERVAL_S)

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.addresses.http_url}/health", timeout=5) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _await_gone(self, actor: str) -> None:
        import ray

        from actors.lookup import NAMESPACE

        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        while time.monotonic() < deadline_s:
            try:
                ray.get_actor(actor, namespace=NAMESPACE)
            except ValueError:
                return
            time.sleep(POLL_INTERVAL_S)
