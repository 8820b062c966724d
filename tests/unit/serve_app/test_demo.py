"""The demonstration names what is wrong with a service, and ends with status 1."""

from __future__ import annotations

import io
import os
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from quadriga.checkpoint import packaged_models
from quadriga.config.loader import load_config
from quadriga.ports import free_port
from serve_app.auth.api_keys import ApiKeys
from serve_app.cli import demo
from serve_app.cli.demo import DemoAnswer, Score, _configuration, stream_over_http
from serve_app.cli.launch import Addresses, LocalService
from serve_app.cli.sample_request import sample_requests


def test_the_demonstration_names_what_is_wrong() -> None:
    mostly_wrong = Score(asked=40, ended=40, right=8, tokens=900)
    assert mostly_wrong.faults() == ["8 of 40 answers are right; this model gives at least 80%"]
    cut = Score(asked=40, ended=39, right=38, tokens=900)
    assert cut.faults() == ["1 of 40 streams had no finish reason"]


def test_a_shown_answer_needs_text_and_a_finish_reason() -> None:
    assert DemoAnswer("Paris.", "stop").faults("HTTP") == []
    assert DemoAnswer("Par", None).faults("HTTP") == ["the stream over HTTP had no finish reason"]
    assert DemoAnswer(" ", "length").faults("gRPC") == ["the answer over gRPC is empty"]


def test_a_model_with_checkable_answers_is_served_beside_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packaged_models, "DEFAULT_MODEL", "quadriga-l")
    models = [pool.model for pool in _configuration(["engine.compile=off"]).pools]
    assert models == ["quadriga-l", "quadriga-s"]
    monkeypatch.setattr(packaged_models, "DEFAULT_MODEL", "quadriga-s")
    assert [pool.model for pool in _configuration([]).pools] == ["quadriga-s"]


@pytest.mark.parametrize("setting", ["model=quadriga-l", "decode_replicas=3", "exits.layers=none"])
def test_settings_of_a_pool_leave_one_pool(setting: str) -> None:
    assert len(_configuration([setting]).pools) == 1


class Service(BaseHTTPRequestHandler):
    """A service that is well, and answers every request with one word."""

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers["content-length"] or 0))
        self.send_response(200)
        self.end_headers()
        choice = b'{"text": "Hi", "delta": {"content": "Hi"}, "finish_reason": "stop"}'
        self.wfile.write(b'data: {"choices": [' + choice + b"]}\n")

    do_POST = do_GET


def test_a_service_on_this_machine_is_asked_past_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")  # where nobody listens
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv(demo.NO_PROXY_VARIABLE, "")
    monkeypatch.setattr("urllib.request._opener", None)  # it would know the former environment
    monkeypatch.setattr(demo, "run_local", lambda *_, **__: 0)
    sample = sample_requests("quadriga-s").http
    with HTTPServer(("127.0.0.1", 0), Service) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        addresses = Addresses(http_port=server.server_port)
        assert LocalService(load_config({}), ApiKeys(), addresses)._is_healthy()
        answer = stream_over_http(addresses.http_url, "quadriga-s", sample, io.StringIO())
        server.shutdown()
    assert answer == DemoAnswer("Hi", "stop")
    assert demo.main(["model=quadriga-s"]) == 0
    assert os.environ[demo.NO_PROXY_VARIABLE] == "127.0.0.1"
