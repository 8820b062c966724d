"""TLS: where the certificates are, and gRPC's secure port on Serve's own proxy.

Ray Serve serves HTTPS by itself (`http_options.ssl_certfile`, `ssl_keyfile`) but asks no client for
a certificate, and its gRPC port has no TLS. Serve's proxy calls our servicer function with its gRPC
server, so a second port with server credentials is opened there; the ingress then answers gRPC
calls only if they came over TLS. With HAProxy, TLS is HAProxy's (`serve_app.http.haproxy`).

The proxies are processes that Serve starts, so they read this from the environment of their node.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from quadriga.errors import ConfigError
from quadriga.ports import MAX_PORT, with_port

CERT_VARIABLE = "QUADRIGA_TLS_CERT"
KEY_VARIABLE = "QUADRIGA_TLS_KEY"
CLIENT_CA_VARIABLE = "QUADRIGA_TLS_CLIENT_CA"
HTTPS_PORT_VARIABLE = "QUADRIGA_HTTPS_PORT"
PLAIN_HTTP_PORT_VARIABLE = "QUADRIGA_HTTP_PORT"
PLAIN_GRPC_PORT_VARIABLE = "QUADRIGA_GRPC_PORT"
BINARY_VARIABLE = "RAY_SERVE_HAPROXY_BINARY_PATH"
GRPC_PORT_VARIABLE = "QUADRIGA_GRPC_TLS_PORT"
HOST_VARIABLE = "QUADRIGA_TLS_HOST"
DEFAULT_HTTPS_PORT = 8443
DEFAULT_GRPC_PORT = 9443
HAPROXY_VARIABLE = "RAY_SERVE_ENABLE_HA_PROXY"
PRIVATE_DOMAINS = frozenset({"localhost", "local", "internal", "svc"})
"""Last parts of names that nobody can register."""

logger = logging.getLogger("quadriga.tls")


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM, and the ports with TLS.

    Attributes:
        cert: The certificate with its chain.
        client_ca: Clients must show a certificate of it; None: they need none.
        host: Address to listen at; empty: every one.
    """

    cert: Path
    key: Path
    client_ca: Path | None = None
    https_port: int = DEFAULT_HTTPS_PORT
    grpc_port: int = DEFAULT_GRPC_PORT
    host: str = ""

    @classmethod
    def from_environment(cls) -> Tls | None:
        """Read the environment; None without a certificate. Raises: ConfigError."""
        cert, key = os.environ.get(CERT_VARIABLE), os.environ.get(KEY_VARIABLE)
        if not cert and not key:
            return None
        if not cert or not key:
            raise ConfigError(f"{CERT_VARIABLE} and {KEY_VARIABLE} go together; one is not set")
        client_ca = os.environ.get(CLIENT_CA_VARIABLE)
        return cls(
            Path(cert),
            Path(key),
            Path(client_ca) if client_ca else None,
            port_variable(HTTPS_PORT_VARIABLE, DEFAULT_HTTPS_PORT),
            port_variable(GRPC_PORT_VARIABLE, DEFAULT_GRPC_PORT),
            os.environ.get(HOST_VARIABLE, ""),
        )

    def to_environment(self) -> None:
        """Set the variables for the processes that are started from here."""
        os.environ[CERT_VARIABLE] = str(self.cert)
        os.environ[KEY_VARIABLE] = str(self.key)
        if self.client_ca is not None:
            os.environ[CLIENT_CA_VARIABLE] = str(self.client_ca)
        os.environ[HTTPS_PORT_VARIABLE] = str(self.https_port)
        os.environ[GRPC_PORT_VARIABLE] = str(self.grpc_port)
        os.environ[HOST_VARIABLE] = self.host

    def check(self) -> None:
        """Raises: ConfigError when a file cannot be read, or key and certificate do not match."""
        import ssl

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.cert, self.key)
        except (OSError, ssl.SSLError) as exc:
            raise ConfigError(
                f"TLS: {self.cert} and {self.key} are no certificate with its key: {exc}",
                param="tls",
            ) from exc
        if self.client_ca is not None:
            try:
                context.load_verify_locations(self.client_ca)
            except (OSError, ssl.SSLError) as exc:
                raise ConfigError(f"TLS: {self.client_ca} holds no CA: {exc}", param="tls") from exc

    def server_credentials(self) -> grpc.ServerCredentials:
        """For a gRPC server; a certificate that was exchanged is taken up with the next connection.

        Raises: ConfigError.
        """
        needs_client = self.client_ca is not None
        # The first configuration is read here, so a file that cannot be read fails the start.
        return grpc.dynamic_ssl_server_credentials(
            self._grpc_configuration(), _Watch(self), require_client_authentication=needs_client
        )

    def _grpc_configuration(self) -> Any:
        self.check()
        return grpc.ssl_server_certificate_configuration(
            [(self.key.read_bytes(), self.cert.read_bytes())],
            self.client_ca.read_bytes() if self.client_ca is not None else None,
        )

    def marks(self) -> tuple[int, ...]:
        """What changes when a file does. Raises: OSError."""
        files = (self.cert, self.key, *([self.client_ca] if self.client_ca else []))
        return tuple(path.stat().st_mtime_ns for path in files)


class _Watch:
    """gRPC calls it with every connection: a new configuration, or None to keep the last."""

    def __init__(self, tls: Tls) -> None:
        self._tls = tls
        self._marks = tls.marks()

    def __call__(self) -> Any:
        try:
            marks = self._tls.marks()
            if marks == self._marks:
                return None
            configuration = self._tls._grpc_configuration()
        except (OSError, ConfigError) as exc:
            logger.error("the certificate stays as it was: %s", exc)
            return None
        self._marks = marks
        return configuration


def grpc_tls_port() -> int | None:
    """The port on which Serve's own proxy takes gRPC over TLS, and only there; None: no TLS."""
    if os.environ.get(HAPROXY_VARIABLE) == "1":
        return None  # HAProxy ends TLS, and sends plain HTTP/2 to the replicas
    tls = Tls.from_environment()
    return None if tls is None else tls.grpc_port


def add_tls_port(server: grpc.Server) -> None:
    """Open the secure port on Serve's gRPC server, where the environment asks for one.

    Raises: ConfigError: A file is no good, or the port is taken.
    """
    if (port := grpc_tls_port()) is None:
        return
    tls = Tls.from_environment()
    assert tls is not None
    try:
        server.add_secure_port(with_port(tls.host or "::", port), tls.server_credentials())
    except RuntimeError as exc:
        raise ConfigError(f"{GRPC_PORT_VARIABLE}: {port} cannot be opened: {exc}") from exc


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address or name."""
    name = host.strip("[]")
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def hostname(place: str) -> str:
    """The host of an origin, or of a Host header."""
    return re.sub(r":\d+$", "", place.rpartition("://")[2])


def is_public_name(host: str) -> bool:
    """Whether somebody elsewhere may own a host's name, and have it resolve to any address."""
    name = host.strip("[]").rstrip(".").lower()
    try:
        ipaddress.ip_address(name)
    except ValueError:
        _, dot, last = name.rpartition(".")
        return bool(dot) and last not in PRIVATE_DOMAINS
    return False


def port_variable(variable: str, default: int, *, least: int = 1) -> int:
    """A port from the environment. Raises: ConfigError."""
    text = os.environ.get(variable) or str(default)
    if not (text.isdecimal() and least <= int(text) <= MAX_PORT):
        raise ConfigError(f"{variable}: {text[:20]!r} is no port ({least} to {MAX_PORT})")
    return int(text)
