"""The whole service on this machine, from its start to its end."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quadriga.catalogue.adapters import read_adapters
from quadriga.checkpoint.folder import read_checkpoint
from quadriga.config.loader import QuadrigaConfig
from quadriga.config.resolve import runner_of
from quadriga.errors import ConfigError, QuadrigaError, ReplicaError, Unavailable
from quadriga.ports import LOOPBACK, RAY_ON_LOOPBACK, with_port
from serve_app.auth.api_keys import ApiKeys
from serve_app.cli.environment import (
    GRPC_SERVICERS,
    LOG_FORMAT_VARIABLE,
    choose_proxy,
    haproxy_enabled,
    prepare_environment,
)
from serve_app.cli.local_stop import Drain, LocalStop
from serve_app.cli.ray_errors import LOCAL_REMEDY, explain
from serve_app.cli.ray_processes import RayProcesses
from serve_app.http.tls import PLAIN_GRPC_PORT_VARIABLE, PLAIN_HTTP_PORT_VARIABLE, Tls, is_loopback
from serve_app.ops.admin import check_admin

DEFAULT_PLAIN_GRPC_PORT = 9000
OBJECT_STORE_BYTES = 256 << 20
POLL_INTERVAL_S = 0.2
SAY_EVERY_S = 5.0
"""Between two lines about replicas that are starting; a start that is over before has none."""
STATUS_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the service listens; with TLS, HAProxy or Serve's own proxy has it (`choose_proxy`).

    Attributes:
        host: Of everything but gRPC without TLS, which Serve's own proxy opens on every interface.
        http_port: Without TLS; not open where Serve's own proxy has TLS.
        grpc_port: Without TLS; None where gRPC is off.
        tls: Clients come over TLS; without it everything else is on loopback, or in a network
            that may read along.
    """

    host: str = LOOPBACK
    http_port: int = 8000
    grpc_port: int | None = None
    tls: Tls | None = None

    @property
    def http_url(self) -> str:
        if self.tls is None:
            return f"http://{with_port(self.host, self.http_port)}"
        return f"https://{with_port(self.host, self.tls.https_port)}"

    @property
    def grpc_target(self) -> str | None:
        if self.grpc_port is None:
            return None
        return with_port(self.host, self.grpc_port if self.tls is None else self.tls.grpc_port)

    @property
    def health_url(self) -> str:
        """Where this machine looks whether it is up; past HAProxy's TLS, which may ask for more."""
        options = self.http_options()
        scheme = "https" if "ssl_certfile" in options else "http"
        return f"{scheme}://{with_port(options['host'], options['port'])}"

    def http_options(self) -> dict[str, Any]:
        """Serve's options: where to listen, and how."""
        if self.tls is None:
            return {"host": self.host, "port": self.http_port}
        if haproxy_enabled():  # HAProxy's TLS stands before Serve's ports
            return {"host": LOOPBACK, "port": self.http_port}
        return {
            "host": self.host,
            "port": self.tls.https_port,
            "ssl_certfile": str(self.tls.cert),
            "ssl_keyfile": str(self.tls.key),
        }

    def to_environment(self) -> None:
        """Configure TLS for the proxies, which are processes of Serve.

        Raises: ConfigError: The certificate is no good.
        """
        if self.tls is not None:
            self.tls.check()
            self.tls.to_environment()
            os.environ[PLAIN_HTTP_PORT_VARIABLE] = str(self.http_port)
            os.environ[PLAIN_GRPC_PORT_VARIABLE] = str(self.grpc_port or DEFAULT_PLAIN_GRPC_PORT)

    def check(self) -> None:
        """Raises: ConfigError where clients would not be asked for what they should be."""
        client_ca = self.tls and self.tls.client_ca
        if client_ca is not None and not haproxy_enabled() and not is_loopback(self.host):
            raise ConfigError(
                "--tls-client-ca: Serve's own proxy asks HTTP clients for no certificate; use "
                "--proxy haproxy, or --host 127.0.0.1 to have gRPC only behind client certificates",
                param="tls-client-ca",
            )


def _unverified() -> ssl.SSLContext:
    """For a look at our own port by its address, for which no certificate need be made out."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def own_opener() -> urllib.request.OpenerDirector:
    """Return what opens URLs of this machine; no proxy that the environment names is asked."""
    return urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=_unverified())
    )


def find_models(config: QuadrigaConfig) -> QuadrigaConfig:
    """Look for every model, fetching and converting what this machine does not have yet.

    And for the models that may be chosen in the first one's place, and for LoRA adapters.

    Returns:
        The configuration, without HELIOS where there is nothing to choose.

    Raises:
        ConfigError: One cannot be found, or cannot be served, or its exits are another's.
    """
    cache_dir = config.engine.cache_dir
    found = [
        read_checkpoint(p.model, cache_dir=cache_dir, heads=p.exits.folder) for p in config.pools
    ]
    for index, (pool, checkpoint) in enumerate(zip(config.pools, found, strict=True)):
        runner_of(pool, index, checkpoint, pool.depth or checkpoint.num_layers)
        if pool.adapters is not None:
            read_adapters(pool.adapters)
    if config.helios.enabled:
        from quadriga.control.helios_setup import check_catalogue, with_a_choice

        config = with_a_choice(config)
        if config.helios.enabled:
            check_catalogue(config, found[0])
    return config


class LocalService:
    """Ray, Serve and the application on this machine, once.

    Args:
        keys: gRPC starts only where this holds a key.
        progress: Called with a line whenever the start has come a step further.
        ray_options: Further arguments of `ray.init`.
    """

    def __init__(
        self,
        config: QuadrigaConfig,
        keys: ApiKeys,
        addresses: Addresses,
        *,
        progress: Callable[[str], None] = lambda line: None,
        **ray_options: Any,
    ) -> None:
        self.config = config
        self.addresses = addresses
        self._progress = progress
        self._keys = keys
        self._ray_options = ray_options
        self._processes = RayProcesses()
        self._is_serving = False
        self._begun: object = None  # the actors' start
        self._proxy_folder: Path | None = None

    def start(self) -> None:
        """Start everything and return once all replicas serve.

        Raises:
            ConfigError: The configuration cannot be served here, or a port is taken.
            Unavailable: Ray or Serve did not start, or the replicas were not ready in time.
        """
        self.config = find_models(self.config)  # fails before Ray is started where one is not there
        self.addresses.to_environment()
        choose_proxy(has_grpc=self.addresses.grpc_port is not None)
        self.addresses.check()
        check_admin(self.config.admin, self._keys)
        self._check_ports()
        os.environ[LOG_FORMAT_VARIABLE] = self.config.logging.format
        prepare_environment()
        for name, value in (RAY_ON_LOOPBACK | {"RAY_AUTH_MODE": "token"}).items():
            os.environ.setdefault(name, value)
        if haproxy_enabled():
            from serve_app.http.haproxy import BUFFER_VARIABLE, buffer_bytes, make_private

            limits = self.config.ingress
            needed = buffer_bytes(limits.max_header_bytes, limits.max_headers)
            os.environ.setdefault(BUFFER_VARIABLE, str(needed))
            self._proxy_folder = make_private()
        self._start_ray()
        self._progress("Ray is up")
        self._start_serve()
        self._is_serving = True
        self._progress("HTTP and gRPC servers are up")
        self._await_ready()

    def _check_ports(self) -> None:
        where, admin = self.addresses, self.config.admin
        options = where.http_options()
        has_tls = "ssl_certfile" in options
        first = "--https-port" if has_tls else "--http-port"
        wanted = [(first, options["host"], options["port"])]
        if where.grpc_port is not None and self._keys.digests:
            # Serve's own proxy listens on every interface.
            address = options["host"] if haproxy_enabled() else ""
            wanted.append(("--grpc-port", address, where.grpc_port))
            if where.tls is not None:
                wanted.append(("--grpc-tls-port", where.host, where.tls.grpc_port))
        if where.tls is not None and haproxy_enabled():
            wanted.append(("--https-port", where.host, where.tls.https_port))
        if admin.port is not None:
            wanted.append(("admin.port", admin.host, admin.port))
        seen: dict[int, str] = {}
        for option, _, port in wanted:
            if (other := seen.setdefault(port, option)) != option:
                raise ConfigError(
                    f"{option}: {port} is also {other}; each needs a port of its own", param=option
                )
        for option, address, port in wanted:
            try:
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                with socket.socket(family) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind((address.strip("[]"), port))
            except OSError as exc:
                is_taken = exc.errno == errno.EADDRINUSE
                reason = "is taken by another process" if is_taken else f"cannot be used: {exc}"
                raise ConfigError(
                    f"{option}: {port} {reason}; choose another", param=option
                ) from exc

    def _start_ray(self) -> None:
        import ray

        options: dict[str, Any] = {
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
            "log_to_driver": False,
        }
        began_s = time.monotonic()
        try:
            with self._processes.starting():
                ray.init("local", **(options | self._ray_options))
        except Exception as exc:  # Ray has no common base for what fails here
            waited_s = time.monotonic() - began_s
            raise explain(
                "starting Ray on this machine", exc, waited_s=waited_s, remedy=LOCAL_REMEDY
            ) from exc

    def _start_serve(self) -> None:
        from ray import serve

        from actors.rpc.lookup import begin_cluster, ensure_cluster
        from serve_app.app import application

        grpc_options = None
        if self.addresses.grpc_port is not None and self._keys.digests:
            grpc_options = {
                "port": self.addresses.grpc_port,
                "grpc_servicer_functions": list(GRPC_SERVICERS),
            }
        began_s = time.monotonic()
        try:
            # Models are loaded while Serve starts.
            self._begun = begin_cluster(self.config)
            serve.start(
                proxy_location="HeadOnly",
                http_options=self.addresses.http_options(),
                grpc_options=grpc_options,
            )
            ensure_cluster(self.config)  # says what Serve would keep to itself
            serve.run(
                application(self.config, self._keys, announces=False),
                name=self.config.name,
                route_prefix="/",
            )
        except QuadrigaError:
            raise
        except Exception as exc:  # Serve has no common base for what fails here
            from serve_app.openai.models import ModelDirectory

            with suppress(OSError, ValueError):  # as above: an ingress reads tokenizers
                ModelDirectory.load(self.config)
            what = f"starting Ray Serve on {self.addresses.http_url}"
            waited_s = time.monotonic() - began_s
            remedy = f"the reason is in {self.log_folder()}"
            raise explain(what, exc, waited_s=waited_s, remedy=remedy) from exc

    def log_folder(self) -> Path:
        """Where Ray keeps the logs of all processes; once Ray was started."""
        from ray._private import worker

        node: Any = worker._global_node
        return Path(node.get_logs_dir_path())

    def status(self) -> dict[str, Any]:
        """What runs where, from the controller. Raises: ReplicaError: It does not answer."""
        import ray
        from ray.exceptions import RayError

        from actors.rpc.lifecycle import controller_name
        from actors.rpc.ray_rpc import from_ray, get_actor

        name = controller_name(self.config.name)
        controller: Any = get_actor(name)
        try:
            status: dict[str, Any] = ray.get(controller.status.remote(), timeout=STATUS_TIMEOUT_S)
        except RayError as exc:
            raise from_ray(name, "status", exc) from exc
        return status

    def stop(
        self,
        report: Callable[[Drain], None] = lambda drain: None,
        is_hurried: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Let requests end, then end actors, Serve and Ray in order; never raises, never hangs.

        Args:
            report: Called with the state of the drain, several times a second, by another thread.
            is_hurried: Asked several times a second whether to end the requests in an error now
                and wait for nothing any more.

        Returns:
            Whether all ended in order. Otherwise Ray's processes were killed, and what Ray runs
            in this one may hang: it should end by `os._exit`.
        """
        stop = LocalStop(self.config, self._processes, self._progress, drains=self._is_serving)
        try:
            return not self._processes.has_started or stop.run(report, is_hurried)
        finally:
            if self._proxy_folder is not None:
                shutil.rmtree(self._proxy_folder, ignore_errors=True)

    def lost_process(self) -> str:
        """Name of a process of Ray's that is gone and without which nothing works; else empty."""
        return self._processes.ended()

    def _await_ready(self) -> None:
        from serve_app.request.cluster_client import starting_text  # behind Ray's start

        deadline_s = time.monotonic() + self.config.lifecycle.replica_start_timeout_s
        num_ready, last, said, say_s = 0, "", "", time.monotonic() + SAY_EVERY_S
        while True:
            try:
                status = self.status()
            except ReplicaError as exc:  # Ray starts the controller anew
                status = {"num_ready": num_ready, "replicas": [], "error": exc.message}
            if status["num_ready"] != num_ready:
                num_ready = status["num_ready"]
                self._progress(f"{num_ready} of {status['num_desired']} replicas are ready")
            if status.get("is_ready") and self._is_healthy():
                return
            doing = starting_text(status)
            if doing and doing != said and time.monotonic() >= say_s:
                said, say_s = doing, time.monotonic() + SAY_EVERY_S
                self._progress(doing)
            failure = status.get("error") or status.get("last_failure")
            if failure and failure != last:
                last = failure
                self._progress(failure)
            if time.monotonic() > deadline_s:
                states = ", ".join(f"{r['name']} {r['phase']}" for r in status["replicas"])
                why = failure or doing or states
                raise Unavailable(
                    f"not ready within lifecycle.replica_start_timeout_s: "
                    f"{why or 'no replica was started'}"
                )
            time.sleep(POLL_INTERVAL_S)

    def _is_healthy(self) -> bool:
        try:
            url = f"{self.addresses.health_url}/health"
            with own_opener().open(url, timeout=5) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, OSError):
            return False
