"""Commands say in one line what is wrong with their arguments, before anything starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import quadriga
from quadriga.config.loader import setting_names
from serve_app.__main__ import _parser, _with_admin_port, main
from serve_app.cli import demo


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The message on standard error about arguments that are refused."""
    try:
        status = main(list(words))
    except SystemExit as exc:
        status = int(exc.code or 0)
    assert status == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, "one line"
    return error


@pytest.mark.parametrize("port", ["abc", "-5", "0", "65536", ""])
@pytest.mark.parametrize("option", ["--http-port", "--port", "--grpc-port", "--https-port"])
def test_a_port_is_a_port(option: str, port: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = said(capsys, f"{option}={port}")
    assert option in error
    assert f": {port!r} is no port (1 to 65535)" in error


@pytest.mark.parametrize("port", ["abc", "0", "70000"])
def test_a_port_from_the_environment_is_one_too(
    port: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUADRIGA_HTTP_PORT", port)
    assert f"QUADRIGA_HTTP_PORT: {port!r} is no port" in said(capsys)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["modle=x"], "did you mean model?"),
        (["model="], "model: String should have at least 1 character (got '')"),
        (["decode_replicas"], "settings have the form key=value"),
        (["--config", "/nowhere.yaml"], "--config: /nowhere.yaml cannot be read"),
        (["--tls-cert", "x"], "--tls-cert and --tls-key are both needed"),
        (["--frobnicate"], "there is no option --frobnicate; see python -m serve_app --help"),
        (["--model", "x"], "there is no option --model; settings are written model=VALUE"),
        (["--decode-replicas=3"], "settings are written decode_replicas=3"),
        (["--max-model-len=9"], "settings are written engine.max_model_len=9"),
        (["--htp-port=1"], "there is no option --htp-port; did you mean --http-port"),
        (["--max-slot=4"], "did you mean decode.max_slots=4"),
        (["keys"], "--name"),
        (["keys", "--name", "two words"], "--name: 'two words' must be one word"),
        (["keys", "--name", ""], "--name: '' must be one word"),
        (["keys", "--name", "a", "--concurrency", "0"], "concurrency must be a whole number"),
    ],
)
def test_what_is_wrong_is_named(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in said(capsys, *words)


def test_port_is_the_http_port_and_settings_stand_anywhere() -> None:
    for words in (
        ["--port", "8123", "model=x", "--host", "127.0.0.2", "decode_replicas=2"],
        ["model=x", "--port=8123", "decode_replicas=2", "--host=127.0.0.2"],
    ):
        options = _parser().parse_with_settings(words, setting_names())
        assert options.http_port == 8123
        assert options.host == "127.0.0.2"
        assert options.settings == ["model=x", "decode_replicas=2"]


def test_a_taken_admin_port_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUADRIGA_ADMIN_PORT", raising=False)
    monkeypatch.setattr("serve_app.__main__.is_free", lambda port: False)
    arguments, note = _with_admin_port({})
    assert arguments["admin.port"] is None
    assert "port 8001 is taken" in note and "admin.port=PORT" in note
    assert _with_admin_port({"admin.port": 9}) == ({"admin.port": 9}, "")
    monkeypatch.setattr("serve_app.__main__.is_free", lambda port: True)
    assert _with_admin_port({}) == ({"admin.port": 8001}, "")
    arguments, note = _with_admin_port({}, {8001, 9000})
    assert arguments["admin.port"] is None and "port 8001 is taken by clients" in note


def test_http_on_the_default_admin_port_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Any] = []
    monkeypatch.setattr("serve_app.__main__._serve", lambda *given: served.append(given) or 0)
    monkeypatch.setattr("os.environ", dict(os.environ) | {"QUADRIGA_API_KEY": "x" * 32})
    assert main(["--http-port", "8001"]) == 0
    assert served[0][0].admin.port is None


def test_a_state_folder_that_cannot_be_made_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("os.environ", dict(os.environ) | {"XDG_STATE_HOME": f"{tmp_path}/file"})
    error = said(capsys)
    assert f"{tmp_path}/file/quadriga cannot hold" in error and "set XDG_STATE_HOME" in error


def test_help_shows_defaults_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "--http-port PORT, --port PORT OpenAI's API, /health, /docs (default: 8000)" in told
    assert "examples:" in told and "QUADRIGA_ADMIN_PORT" in told


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"quadriga {quadriga.__version__}\n"


@pytest.mark.parametrize("words", [["x"], ["decode_replicas=0"], ["model=/nowhere"]])
def test_the_demonstration_refuses_alike(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        demo.main(words)
    assert left.value.code == 2
    assert capsys.readouterr().err.startswith("quadriga: ")


@pytest.mark.parametrize("words", [["--help"], ["keys", "--help"]])
def test_help_shows_no_empty_defaults(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(words)
    help_text = capsys.readouterr().out
    assert "options:" in help_text and "(default: )" not in help_text
