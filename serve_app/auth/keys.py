"""API keys as files hold them: a name, a hash, and limits; one line each.

    alice sha256:9f86d081… requests_per_s=5 tokens_per_min=60000 concurrency=8
    prometheus sha256:60303ae2… admin

A key is 256 random bits, so a plain SHA-256 of it cannot be searched; a slow hash would add nothing
but time to every request.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from quadriga.errors import ConfigError

ALGORITHM = "sha256"
KEY_PREFIX = "qk-"
MAX_NAME_CHARS = 64
REMEDY = "make one with `python -m serve_app keys --name NAME`"

_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._@-]{{0,{MAX_NAME_CHARS - 1}}}")
_HASH = re.compile(rf"{ALGORITHM}:([0-9a-f]{{64}})")


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """What one key may ask of one ingress replica; None is without limit.

    Attributes:
        requests_per_s: Calls, on average; a second's worth may come at once.
        tokens_per_min: Prompt and output tokens, on average; a minute's worth may come at once.
        concurrency: Generations at once.
    """

    requests_per_s: float | None = None
    tokens_per_min: float | None = None
    concurrency: int | None = None


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key, without the key.

    Attributes:
        name: The holder; no secret, appears in logs.
        digest: SHA-256 of the key.
        is_admin: It gives access to metrics and the admin port as well.
        cache_salt: Keys of the same share computed prompts; empty: this one shares with none.
    """

    name: str
    digest: bytes
    limits: KeyLimits = KeyLimits()
    is_admin: bool = False
    cache_salt: str = ""

    def salted(self, cache_salt: str) -> str:
        """The salt of a request of this key that names `cache_salt` itself.

        Keys share no computed prompts, and cannot tell by the time what others asked, unless they
        have one `cache_salt`.
        """
        return f"{'salt' if self.cache_salt else 'key'}:{self.cache_salt or self.name}:{cache_salt}"

    def line(self) -> str:
        """The key as a line of a key file."""
        limits = self.limits
        parts = [self.name, f"{ALGORITHM}:{self.digest.hex()}"]
        for field in ("requests_per_s", "tokens_per_min", "concurrency"):
            value = getattr(limits, field)
            if value is not None:
                parts.append(f"{field}={value:.15g}")
        if self.cache_salt:
            parts.append(f"cache_salt={self.cache_salt}")
        return " ".join([*parts, "admin"] if self.is_admin else parts)


ANONYMOUS = ApiKey("anonymous", b"")


def make_key() -> str:
    """A new key: 256 random bits."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def parse_lines(lines: Iterable[str], source: str) -> tuple[ApiKey, ...]:
    """Read key lines; empty ones and those that begin with # are skipped.

    Args:
        source: Where they come from, for messages; a line itself is never quoted.

    Raises: ConfigError naming the line at fault, or names and keys that are there twice.
    """
    keys = []
    for number, text in enumerate(lines, 1):
        line = text.strip()
        if line and not line.startswith("#"):
            keys.append(_parse(line, f"{source}, line {number}"))
    check_unique(keys, source)
    return tuple(keys)


def check_unique(keys: Iterable[ApiKey], source: str) -> None:
    """Raises: ConfigError when two keys share a name or a hash."""
    names: set[str] = set()
    digests: set[bytes] = set()
    for key in keys:
        if key.name in names:
            raise ConfigError(f"{source}: the name {key.name!r} is there twice", param=source)
        if key.digest in digests:
            raise ConfigError(
                f"{source}: {key.name!r} is another name's key; give each its own", param=source
            )
        names.add(key.name)
        digests.add(key.digest)


def _parse(line: str, where: str) -> ApiKey:
    parts = line.split()
    if len(parts) < 2 or not _NAME.fullmatch(parts[0]) or not (m := _HASH.fullmatch(parts[1])):
        raise ConfigError(
            f"{where}: a key line is `NAME {ALGORITHM}:HASH` and limits; {REMEDY}", param=where
        )
    found: dict[str, float] = {}
    is_admin, cache_salt = False, ""
    for option in parts[2:]:
        name, _, value = option.partition("=")
        if option == "admin":
            is_admin = True
        elif name == "cache_salt" and not cache_salt:
            if not _NAME.fullmatch(value):
                raise ConfigError(
                    f"{where}: cache_salt must be a name of at most {MAX_NAME_CHARS} letters, "
                    f"digits and ._@-, got {value[:20]!r}",
                    param=where,
                )
            cache_salt = value
        elif name in found or name not in KeyLimits.__dataclass_fields__:
            raise ConfigError(
                f"{where}: {name[:40]!r} is no option of a key, or is there twice; there are "
                f"{', '.join(KeyLimits.__dataclass_fields__)}, cache_salt and admin",
                param=where,
            )
        else:
            found[name] = _limit(name, value, where)
    limits = KeyLimits(
        found.get("requests_per_s"),
        found.get("tokens_per_min"),
        int(found["concurrency"]) if "concurrency" in found else None,
    )
    return ApiKey(parts[0], bytes.fromhex(m[1]), limits, is_admin, cache_salt)


def _limit(name: str, value: str, where: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number <= 1e12 or (name == "concurrency" and number != int(number)):
        kind = "a whole number" if name == "concurrency" else "a number"
        raise ConfigError(
            f"{where}: {name} must be {kind} above 0, got {value[:20]!r}", param=where
        )
    return number
