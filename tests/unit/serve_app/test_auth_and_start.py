from __future__ import annotations

import os
import pickle
import stat
from pathlib import Path

import pytest

from quadriga.config import AuthConfig
from quadriga.errors import ConfigError, InvalidRequest, Unauthenticated
from serve_app.__main__ import _arguments, _own_key, main
from serve_app.auth import ANONYMOUS, KEY_VARIABLE, ApiKeys
from serve_app.sessions import check_key
from serve_app.startup import describe


@pytest.fixture(autouse=True)
def no_key_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


def test_without_keys_http_is_open_and_grpc_closed() -> None:
    keys = ApiKeys.load(AuthConfig())
    assert keys.http_owner(None) == ANONYMOUS
    with pytest.raises(Unauthenticated, match="keys to be on"):
        keys.grpc_owner("Bearer x")


def test_keys_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\none\n\n two \n")
    monkeypatch.setenv(KEY_VARIABLE, "three")
    keys = ApiKeys.load(AuthConfig(api_keys=("four",), api_keys_file=str(file)))
    owners = {keys.http_owner(f"Bearer {key}") for key in ("one", "two", "three", "four")}
    assert len(owners) == 4
    for wrong in (None, "", "Bearer", "Bearer ", "Bearer five", "Basic one", "Bearer # ours"):
        with pytest.raises(Unauthenticated):
            keys.http_owner(wrong)


def test_a_generated_key_leaves_http_open() -> None:
    keys = ApiKeys.of(["made"], is_http_open=True)
    assert keys.http_owner("Bearer none") == ANONYMOUS
    assert keys.grpc_owner("bearer made") != ANONYMOUS


def test_no_key_leaves_the_process() -> None:
    keys = ApiKeys.of(["very-secret"])
    assert b"very-secret" not in pickle.dumps(keys)
    assert "very-secret" not in repr(keys)


@pytest.mark.parametrize("content", [None, "", "# none\n", b"\xff"])
def test_unusable_key_files(tmp_path: Path, content: str | bytes | None) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match="api_keys_file"):
        ApiKeys.load(AuthConfig(api_keys_file=str(file)))


def test_an_empty_key_is_no_key() -> None:
    with pytest.raises(ConfigError):
        ApiKeys.of([" "])


@pytest.mark.parametrize("key", ["", "x" * 257, "ü", "a\nb"])
def test_bad_idempotency_keys(key: str) -> None:
    with pytest.raises(InvalidRequest):
        check_key(key, "idempotency-key")


def test_the_own_key_is_private_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    key, path = _own_key()
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert _own_key() == (key, path)
    assert len(key) >= 32


def test_settings_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: quadriga-l\ndecode_replicas: 3\n")
    assert _arguments(file, ["model=quadriga-s", "engine.compile=off"]) == {
        "model": "quadriga-s",
        "decode_replicas": 3,
        "engine.compile": "off",
    }
    file.write_text("applications:\n- name: q\n  args: {model: quadriga-l}\n")
    assert _arguments(file, []) == {"model": "quadriga-l"}


@pytest.mark.parametrize(
    "argv",
    [
        ["nonsense"],
        ["mdoel=quadriga-s"],
        ["decode_replicas=0"],
        ["--config", "/nowhere.yaml"],
        ["--host", "0.0.0.0"],
    ],
)
def test_start_up_errors_are_one_line(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("quadriga: ")
    assert err.count("\n") == 1


def test_the_banner_names_what_runs_and_how_to_try_it() -> None:
    status = {
        "models": ["quadriga-s"],
        "replicas": [
            {"role": "prefill", "depth_class": "quadriga-s@8", "name": "p0", "node_id": "abcdef"}
        ],
    }
    text = describe(status, http_url="http://h:1", grpc_address="h:2", key_hint="key: in f")
    for part in ("prefill", "quadriga-s@8", "curl http://h:1/v1/completions", "h:2", "key: in f"):
        assert part in text
