"""API keys: held as hashes, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from quadriga.config import AuthConfig
from quadriga.errors import ConfigError, Unauthenticated

KEY_VARIABLE = "QUADRIGA_API_KEY"
ANONYMOUS = "anonymous"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """The accepted keys.

    Attributes:
        digests: SHA-256 of each key; only these travel to the ingress replicas.
        is_http_open: HTTP asks for no key; gRPC always does, as it listens on every interface.
    """

    digests: tuple[bytes, ...] = ()
    is_http_open: bool = True

    @classmethod
    def of(cls, keys: Iterable[str], *, is_http_open: bool = False) -> ApiKeys:
        """Raises: ConfigError when a key is empty."""
        given = list(dict.fromkeys(keys))
        if any(not key.strip() for key in given):
            raise ConfigError("auth.api_keys: an empty key is no key", param="auth.api_keys")
        return cls(tuple(_digest(key) for key in given), is_http_open or not given)

    @classmethod
    def load(cls, config: AuthConfig) -> ApiKeys:
        """Collect keys from configuration, file and environment; with any, HTTP asks for one.

        Raises: ConfigError when the file cannot be read or holds none, or a key is empty.
        """
        keys = list(config.api_keys)
        if config.api_keys_file is not None:
            keys += _read_keys(Path(config.api_keys_file).expanduser())
        if os.environ.get(KEY_VARIABLE):
            keys.append(os.environ[KEY_VARIABLE])
        return cls.of(keys)

    def http_owner(self, authorization: str | None) -> str:
        """Return who an HTTP caller is (a name that is no secret), from its header.

        Raises: Unauthenticated when HTTP asks for a key and this is none.
        """
        return ANONYMOUS if self.is_http_open else self._owner(authorization)

    def grpc_owner(self, authorization: str | None) -> str:
        """The same for gRPC, which never goes without keys."""
        if not self.digests:
            raise Unauthenticated(
                "gRPC needs API keys to be on: set auth.api_keys_file, auth.api_keys or "
                f"{KEY_VARIABLE} on the server",
                code="api_keys_off",
            )
        return self._owner(authorization)

    def _owner(self, authorization: str | None) -> str:
        scheme, _, key = (authorization or "").strip().partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthenticated("an API key is needed: send 'Authorization: Bearer KEY'")
        given = _digest(key.strip())
        # Every key is compared, so that the time taken tells nothing.
        if not sum(hmac.compare_digest(given, known) for known in self.digests):
            raise Unauthenticated("the API key is not known here")
        return given.hex()[:16]


def _read_keys(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(
            f"auth.api_keys_file: {path} cannot be read: {exc}", param="auth.api_keys_file"
        ) from exc
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"auth.api_keys_file: {path} holds no key", param="auth.api_keys_file")
    return keys
