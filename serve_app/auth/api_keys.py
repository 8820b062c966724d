"""API keys from configuration, file and environment, compared in constant time."""

from __future__ import annotations

import hmac
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from quadriga.config.ingress import AuthConfig
from quadriga.errors import ConfigError, Forbidden, Unauthenticated
from serve_app.auth.keys import ANONYMOUS, ApiKey, check_unique, digest, parse_lines

KEY_VARIABLE = "QUADRIGA_API_KEY"
LINES_VARIABLE = "QUADRIGA_API_KEYS"
MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """The accepted keys; a value that travels to the ingress replicas and holds only hashes.

    Attributes:
        fixed: From configuration and environment.
        from_file: From `file`, as it was when it was read.
        file: Read again when it changes.
        is_http_open: HTTP asks for no key; gRPC always does, as it has ports on every interface.
    """

    fixed: tuple[ApiKey, ...] = ()
    from_file: tuple[ApiKey, ...] = ()
    file: str | None = None
    is_http_open: bool = True

    @classmethod
    def of(cls, keys: Iterable[str], *, is_http_open: bool = False) -> ApiKeys:
        """Keys as they are, named in order. Raises: ConfigError when one is empty."""
        given = list(dict.fromkeys(keys))
        if any(not key.strip() for key in given):
            raise ConfigError("an empty API key is no key", param="auth.api_keys")
        fixed = tuple(ApiKey(f"key-{i}", digest(key), is_admin=True) for i, key in enumerate(given))
        return cls(fixed, is_http_open=is_http_open or not given)

    @classmethod
    def load(cls, config: AuthConfig) -> ApiKeys:
        """Collect what is configured; with any key, or a file for them, HTTP asks for one.

        Raises: ConfigError when the file cannot be read, or a line is no key line.
        """
        fixed = list(parse_lines(config.api_keys, "auth.api_keys"))
        fixed += parse_lines(os.environ.get(LINES_VARIABLE, "").splitlines(), LINES_VARIABLE)
        if own := os.environ.get(KEY_VARIABLE):
            if not own.strip():
                raise ConfigError(f"{KEY_VARIABLE}: an empty API key is no key")
            fixed.append(ApiKey("environment", digest(own.strip()), is_admin=True))
        path = config.api_keys_file
        from_file: tuple[ApiKey, ...] = ()
        if path is not None:
            path = str(Path(path).expanduser())
            from_file = read_key_file(path)
            if not from_file:
                raise ConfigError(
                    f"auth.api_keys_file: {path} holds no key", param="auth.api_keys_file"
                )
        check_unique([*fixed, *from_file], "auth.api_keys")
        return cls(tuple(fixed), from_file, path, is_http_open=not fixed and path is None)

    @property
    def all(self) -> tuple[ApiKey, ...]:
        return self.fixed + self.from_file

    @property
    def digests(self) -> tuple[bytes, ...]:
        """Hashes of all keys; none: gRPC stays closed."""
        return tuple(key.digest for key in self.all)

    def with_file(self, from_file: tuple[ApiKey, ...]) -> ApiKeys:
        """The same with the file's new content. Raises: ConfigError on doubles."""
        check_unique([*self.fixed, *from_file], "auth.api_keys_file")
        return replace(self, from_file=from_file)

    def http_caller(self, authorization: str | None, *, admin: bool = False) -> ApiKey:
        """Return the key of an HTTP caller, from its header.

        Args:
            admin: Only keys with `admin` will do.

        Raises: Unauthenticated when HTTP asks for a key and this is none; Forbidden.
        """
        if self.is_http_open:
            return ANONYMOUS
        return self.admin_caller(authorization) if admin else self._caller(authorization)

    def admin_caller(self, authorization: str | None) -> ApiKey:
        """The same where a key is needed whatever is open. Raises: Unauthenticated, Forbidden."""
        caller = self._caller(authorization)
        if not caller.is_admin:
            raise Forbidden(f"the API key {caller.name!r} is not an admin's")
        return caller

    def grpc_caller(self, authorization: str | None) -> ApiKey:
        """The same for gRPC, which never goes without keys. Raises: Unauthenticated."""
        if not self.fixed and self.file is None:
            raise Unauthenticated(
                f"gRPC needs API keys to be on: set auth.api_keys_file, {LINES_VARIABLE} or "
                f"{KEY_VARIABLE} on the server",
                code="api_keys_off",
            )
        return self._caller(authorization)

    def _caller(self, authorization: str | None) -> ApiKey:
        scheme, _, key = (authorization or "").strip().partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthenticated("an API key is needed: send 'Authorization: Bearer KEY'")
        given = digest(key.strip())
        found = None
        for known in self.all:  # all of them, so that the time taken reveals nothing
            if hmac.compare_digest(given, known.digest):
                found = known
        if found is None:
            raise Unauthenticated("the API key is not known here")
        return found


def read_key_file(path: str) -> tuple[ApiKey, ...]:
    """The keys of a file. Raises: ConfigError when it cannot be read or is no key file."""
    name = "auth.api_keys_file"
    try:
        with open(path, "rb") as handle:
            data = handle.read(MAX_FILE_BYTES + 1)
        text = data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{name}: {path} cannot be read: {exc}", param=name) from exc
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{name}: {path} is above {MAX_FILE_BYTES} bytes", param=name)
    return parse_lines(text.splitlines(), f"{name} {path}")
