"""Ray that does not start or cannot be reached: one line, and nothing else on the terminal."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import ray

from quadriga.checkpoint.folder import ASSETS
from quadriga.config.loader import load_config
from quadriga.errors import ConfigError, Unavailable
from quadriga.ports import free_port
from serve_app.__main__ import main
from serve_app.auth.api_keys import ApiKeys
from serve_app.cli import launch, ray_errors
from serve_app.cli.launch import Addresses, LocalService
from serve_app.cli.ray_errors import explain, explain_in_serve_cli
from serve_app.cli.stdio_redirect import StdioRedirect

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Serve's own, of the libraries it uses
    from ray import serve


def start(*more: str) -> int:
    return main(["--http-port", str(free_port()), "--no-grpc", *more])


def the_line(capfd: pytest.CaptureFixture[str]) -> str:
    err = capfd.readouterr().err
    assert err.startswith("quadriga: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    "failure",
    [
        Exception("The current node timed out during startup. This could happen because …"),
        ConnectionError("Could not find any running Ray instance"),
        RuntimeError("first\nTraceback (most recent call last):\n  File x\nValueError: the end"),
        TimeoutError(),
    ],
)
def test_ray_that_does_not_start(
    failure: Exception, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        os.write(2, b"noise from below\n")
        os.write(1, b"noise from Ray\n")  # where `print` ends outside of a test
        raise failure

    monkeypatch.setattr(ray, "init", fail)
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    assert start() == 1
    assert handlers == [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    line = the_line(capfd)
    assert re.search(r"starting Ray on this machine failed after \d+ s: .*try again", line)
    assert (str(failure).splitlines() or ["TimeoutError"])[-1][:40] in line
    log = Path(line.rsplit("(log: ", 1)[1].rstrip(")\n"))
    assert log.read_text() == "noise from below\nnoise from Ray\n"
    log.unlink()


def test_serve_that_does_not_start(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("the proxy did not come up")

    monkeypatch.setattr(ray, "init", lambda *args, **kwargs: None)
    monkeypatch.setattr("actors.rpc.lookup.begin_cluster", lambda config: None)
    monkeypatch.setattr(serve, "start", fail)
    monkeypatch.setattr("serve_app.cli.launch.LocalService.log_folder", lambda self: tmp_path)
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", "/bin/true")
    monkeypatch.setattr("serve_app.http.haproxy.make_private", lambda: tmp_path)
    assert start("--proxy=haproxy") == 1
    assert not tmp_path.exists()
    line = the_line(capfd)
    assert "starting Ray Serve on http://127.0.0.1:" in line
    assert "the proxy did not come up; the reason is in " in line


@pytest.mark.parametrize("lack", ["pools.0.depth: 99 is beyond", "has no tokenizer.json"])
def test_what_serve_does_not_say_is_said(
    lack: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Of an ingress that fails, Serve tells that it does, and not why."""
    shutil.copytree(ASSETS / "quadriga-s", tmp_path / "model")
    is_found_later = "tokenizer" in lack
    if is_found_later:
        (tmp_path / "model" / "tokenizer.json").unlink()
    refuse = MagicMock(side_effect=None if is_found_later else ConfigError(lack))
    fail = MagicMock(side_effect=RuntimeError("Failed to update the deployments ['Ingress']"))
    for name in ("ray.init", "ray.serve.start", "actors.rpc.lookup.begin_cluster"):
        monkeypatch.setattr(name, MagicMock())
    monkeypatch.setattr("actors.rpc.lookup.ensure_cluster", refuse)
    monkeypatch.setattr(serve, "run", fail)
    monkeypatch.setattr(launch.LocalService, "log_folder", lambda self: tmp_path)
    assert start(f"model={tmp_path / 'model'}") == 2
    assert lack in the_line(capfd)
    assert fail.called == is_found_later


def test_adapters_that_are_not_there_are_named_before_ray_is_started(tmp_path: Path) -> None:
    config = load_config({"model": "quadriga-s", "adapters": str(tmp_path / "nope")})
    with pytest.raises(ConfigError, match=f"adapters: {tmp_path}/nope is no folder"):
        launch.find_models(config)


def test_why_replicas_fail_is_said_while_others_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    failures, said = iter(["", "d-1: no room", "d-1: no room", "d-2: no room"]), list[str]()
    loading = {"name": "q:decode:0:x", "role": "decode", "phase": "starting", "doing": "loads"}
    state: dict[str, Any] = {"num_ready": 0, "replicas": [loading], "error": None}
    monkeypatch.setattr(
        launch.LocalService, "status", lambda _: state | {"last_failure": next(failures)}
    )
    monkeypatch.setattr(launch, "POLL_INTERVAL_S", 0.0)
    monkeypatch.setattr(launch, "SAY_EVERY_S", 0.0)
    service = LocalService(load_config({}), ApiKeys(), Addresses(), progress=said.append)
    with pytest.raises(StopIteration):
        service._await_ready()
    assert said == ["decode 0: loads", "d-1: no room", "d-2: no room"]


def test_a_controller_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    late = MagicMock(side_effect=ray.exceptions.GetTimeoutError("no answer yet"))
    monkeypatch.setattr("actors.rpc.ray_rpc.get_actor", MagicMock())
    monkeypatch.setattr(ray, "get", late)
    config = load_config({"lifecycle.replica_start_timeout_s": 0.1})
    with pytest.raises(Unavailable, match=r"replica_start_timeout_s: .*no answer yet"):
        LocalService(config, ApiKeys(), Addresses())._await_ready()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_start_ends_it_quietly(
    number: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ray's own handler of SIGTERM, which would end the process with status 1, is not taken."""

    def slow(*args: Any, **kwargs: Any) -> None:
        ray._private.utils.set_sigterm_handler(lambda *_: sys.exit(1))
        os.kill(os.getpid(), number)
        threading.Event().wait(20)

    monkeypatch.setattr(ray, "init", slow)
    # A shell's background job is born with SIGINT ignored.
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert start() == 0
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    out, err = capfd.readouterr()
    assert out.splitlines()[-1] == "stopped"
    assert err == ""


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_taken_port_is_named(host: str, capfd: pytest.CaptureFixture[str]) -> None:
    try:
        taken = socket.create_server((host, 0), family=socket.getaddrinfo(host, 0)[0][0])
    except OSError:
        if host != "::1":
            raise
        pytest.skip("this machine has no IPv6")
    with taken:
        port = taken.getsockname()[1]
        assert main(["--host", host, "--http-port", str(port), "--no-grpc"]) == 2
    assert f"--http-port: {port} is taken by another process" in the_line(capfd)


def test_a_missing_model_is_an_error_before_ray_starts(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ray, "init", lambda *args, **kwargs: pytest.fail("Ray was started"))
    assert start("model=nonsense") == 2
    assert "'nonsense' is neither bundled" in the_line(capfd)


def test_only_the_terminal_stream_reaches_the_terminal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with StdioRedirect() as output:
        os.write(1, b"a print of a library\n")
        output.move_to(tmp_path)
        os.write(1, b"native output\n")
        subprocess.run([sys.executable, "-c", "print('a child')"], check=True)
        print("ours", file=output.terminal)
    print("after")
    assert capfd.readouterr() == ("ours\nafter\n", "")
    assert output.path.parent == tmp_path
    assert output.path.read_text() == "a print of a library\nnative output\na child\n"


def test_a_quiet_run_leaves_no_file() -> None:
    with StdioRedirect() as output:
        pass
    assert not output.path.exists()


def test_reasons_are_short_and_one_line() -> None:
    error = explain("starting", RuntimeError("x" * 1000 + "\ny"), waited_s=2.4, remedy="do this")
    assert error.message.startswith("starting failed after 2 s: xxx")
    assert error.message.endswith("x; do this")
    assert len(error.message) < 400


def test_serve_run_reports_a_closed_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_errors, "CONNECT_PATIENCE_S", 0.1)
    port = free_port()
    monkeypatch.setattr(sys, "argv", ["/bin/serve", "run", "--address", f"127.0.0.1:{port}", "x:y"])
    with pytest.raises(SystemExit) as caught:
        explain_in_serve_cli()
    text = str(caught.value)
    for part in (f"connecting to Ray at 127.0.0.1:{port} failed after", "RAY_ADDRESS"):
        assert part in text


def test_serve_run_explains_what_ray_init_raised(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, exc, trace: earlier.append(exc))
    monkeypatch.setattr(sys, "argv", ["python", "-m", "serve_app"])
    explain_in_serve_cli()
    sys.excepthook(ValueError, ValueError("not ours"), None)
    assert len(earlier) == 1, "in other processes nothing changes"
    monkeypatch.setattr(sys, "argv", ["/bin/serve", "run", "serve_app.app:build"])
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    explain_in_serve_cli()
    scope = {"__name__": "ray._private.worker"}
    exec("def init():\n    raise ConnectionError('no cluster')", scope)
    try:
        scope["init"]()  # type: ignore[operator]
    except ConnectionError as exc:
        sys.excepthook(type(exc), exc, exc.__traceback__)
    err = capsys.readouterr().err
    assert re.match(r"quadriga: starting Ray on this machine failed after \d+ s: no cluster; ", err)
    assert err.count("\n") == 1
    sys.excepthook(ConfigError, ConfigError("elsewhere"), None)
    assert len(earlier) == 2, "what ray.init did not raise goes to the hook before"
