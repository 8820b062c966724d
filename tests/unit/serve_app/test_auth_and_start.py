from __future__ import annotations

import ast
import contextlib
import hashlib
import hmac
import io
import os
import pickle
import shutil
import stat
import subprocess
import sys
import textwrap
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from quadriga.checkpoint.folder import ASSETS
from quadriga.config.ingress import AuthConfig
from quadriga.config.loader import load_config
from quadriga.errors import ConfigError, Forbidden, InvalidRequest, Unauthenticated, Unavailable
from quadriga.ports import free_port
from serve_app.__main__ import _arguments, _own_key, main
from serve_app.auth.api_keys import KEY_VARIABLE, LINES_VARIABLE, ApiKeys
from serve_app.auth.keys import ANONYMOUS, KeyLimits, parse_lines
from serve_app.cli.startup import describe
from serve_app.request.resumption import check_key


@pytest.fixture(autouse=True)
def no_key_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    monkeypatch.delenv(LINES_VARIABLE, raising=False)


def line_of(key: str, name: str, rest: str = "") -> str:
    return f"{name} sha256:{hashlib.sha256(key.encode()).hexdigest()} {rest}"


def test_without_keys_http_is_open_and_grpc_closed() -> None:
    keys = ApiKeys.load(AuthConfig())
    assert keys.http_caller(None) == ANONYMOUS
    with pytest.raises(Unauthenticated, match="keys to be on"):
        keys.grpc_caller("Bearer x")


def test_keys_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# ours\n{line_of('one', 'a')}\n\n {line_of('two', 'b', 'admin')} \n")
    monkeypatch.setenv(KEY_VARIABLE, "three")
    monkeypatch.setenv(LINES_VARIABLE, line_of("four", "d"))
    keys = ApiKeys.load(AuthConfig(api_keys=(line_of("five", "e"),), api_keys_file=str(file)))
    callers = [keys.http_caller(f"Bearer {k}") for k in ("one", "two", "three", "four", "five")]
    assert [c.name for c in callers] == ["a", "b", "environment", "d", "e"]
    assert [c.is_admin for c in callers] == [False, True, True, False, False]
    for wrong in (None, "", "Bearer", "Bearer ", "Bearer six", "Basic one", "Bearer # ours"):
        with pytest.raises(Unauthenticated):
            keys.http_caller(wrong)
    with pytest.raises(Forbidden):
        keys.http_caller("Bearer one", admin=True)


def test_a_generated_key_leaves_http_open() -> None:
    keys = ApiKeys.of(["made"], is_http_open=True)
    assert keys.http_caller("Bearer none") == ANONYMOUS
    assert keys.grpc_caller("bearer made") != ANONYMOUS


def test_no_key_leaves_the_process() -> None:
    keys = ApiKeys.of(["very-secret"])
    assert b"very-secret" not in pickle.dumps(keys)
    assert "very-secret" not in repr(keys)


@pytest.mark.parametrize(
    "content",
    [None, "", "# none\n", b"\xff", "a-plain-key\n", "x" * ((1 << 20) + 1)],
    ids=["absent", "empty", "comment", "bytes", "plain", "huge"],
)
def test_unusable_key_files(tmp_path: Path, content: str | bytes | None) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match="api_keys_file"):
        ApiKeys.load(AuthConfig(api_keys_file=str(file)))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("secret-key-as-it-is", "key line is"),
        ("name secret-key-as-it-is", "key line is"),
        ("name sha256:abc", "key line is"),
        (line_of("k", "n", "colour=red"), "no option"),
        (line_of("k", "n", "concurrency=1.5"), "whole number"),
        (line_of("k", "n", "requests_per_s=0"), "above 0"),
        (line_of("k", "n", "tokens_per_min=nan"), "above 0"),
        (line_of("k", "n", "concurrency=2 concurrency=3"), "twice"),
        (line_of("k", "n", "cache_salt=a cache_salt=a"), "twice"),
        (line_of("k", "n", "cache_salt="), "cache_salt must be a name"),
    ],
)
def test_a_bad_key_line_is_named_and_not_quoted(line: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        ApiKeys.load(AuthConfig(api_keys=(line_of("good", "good"), line)))
    assert "line 2" in caught.value.message
    assert "secret-key-as-it-is" not in caught.value.message


def test_keys_share_prompts_only_where_they_have_one_salt() -> None:
    lines = [line_of("k", "a"), line_of("l", "b", "cache_salt=team"), line_of("m", "team")]
    a, b, team = parse_lines(lines, "a test")
    c = replace(a, name="c", cache_salt="team")
    assert b.salted("x") == c.salted("x") != b.salted("")
    assert len({key.salted("x") for key in (a, b, team, ANONYMOUS)}) == 4
    assert parse_lines([b.line()], "a test") == (b,)


def test_names_and_keys_are_there_once() -> None:
    for lines in ((line_of("k", "a"), line_of("l", "a")), (line_of("k", "a"), line_of("k", "b"))):
        with pytest.raises(ConfigError):
            ApiKeys.load(AuthConfig(api_keys=lines))


def test_the_command_makes_a_key_that_opens(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--requests-per-s", "2.5", "--tokens-per-min", "1234567", "--concurrency", "3"]
    assert main(["keys", "--name", "alice", "--admin", *options]) == 0
    printed = capsys.readouterr()
    key = printed.err.removeprefix("key: ").strip()
    keys = ApiKeys.load(AuthConfig(api_keys=(printed.out,)))
    caller = keys.http_caller(f"Bearer {key}", admin=True)
    assert caller.limits == KeyLimits(2.5, 1234567, 3)
    assert key not in printed.out
    assert caller.line() == printed.out.strip()


def test_the_command_hashes_a_key_there_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("k" * 40 + "\n"))
    assert main(["keys", "--name", "bob", "--stdin"]) == 0
    assert capsys.readouterr().out.strip() == line_of("k" * 40, "bob").strip()
    monkeypatch.setattr("sys.stdin", io.StringIO("short\n"))
    assert main(["keys", "--name", "bob", "--stdin"]) == 2
    assert main(["keys", "--name", "two words"]) == 2


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
    file.write_text("http_options: {port: 80}\napplications:\n- args: {model: quadriga-l}\n")
    with pytest.raises(ConfigError, match="a file of Ray Serve's goes to `serve run`"):
        _arguments(file, [])


@pytest.mark.parametrize(
    "argv",
    [
        ["nonsense"],
        ["mdoel=quadriga-s"],
        ["decode_replicas=0"],
        ["--config", "/nowhere.yaml"],
        ["--host", "0.0.0.0"],
        ["--tls-cert", "/nowhere.pem"],
        ["--tls-cert", "/nowhere.pem", "--tls-key", "/nowhere.key"],
        ["keys", "--name", "a/b"],
    ],
)
def test_start_up_errors_are_one_line(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("quadriga: ")
    assert err.count("\n") == 1


def test_ones_own_model_is_not_mixed_with_the_bundled_ones(tmp_path: Path) -> None:
    """The whole command: it ends with the reason, before it starts anything."""
    shutil.copytree(ASSETS / "quadriga-s", tmp_path / "mine")
    words = [f"model={tmp_path / 'mine'}", "helios.enabled=true"]
    ended = subprocess.run(
        [sys.executable, "-m", "serve_app", "--http-port", str(free_port()), "--no-grpc", *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert f"{tmp_path / 'mine'} is not in the catalogue of helios.enabled" in ended.stderr
    assert "name a catalogue with it in helios.catalogue" in ended.stderr
    assert "Ray is up" not in ended.stdout


def test_the_banner_names_what_runs_and_how_to_try_it() -> None:
    status = {
        "models": ["quadriga-s"],
        "replicas": [
            {"role": "prefill", "depth_class": "quadriga-s@8", "name": "p0", "node_id": "abcdef"}
        ],
    }
    text = describe(status, http_url="http://h:1", grpc_address="h:2", key_hint='KEY = "k"')
    for part in ("prefill", "quadriga-s@8", "curl -sN http://h:1/v1/chat/"):
        assert part in text
    program = ast.parse(textwrap.dedent(text.split("  gRPC  h:2\n")[1]))
    assert isinstance(program.body[1], ast.Assign), "what is pasted knows its key"
    assert 'Client("h:2", api_key=KEY) as' in text
    text = describe(status, http_url="https://h:1", grpc_address="h:2")
    assert 'Client("h:2", api_key=KEY, tls=True) as' in text


@pytest.mark.parametrize("given", ["key-0", "key-31", "key-63", "wrong", "k", "key-0" * 1000, "é"])
def test_every_key_costs_the_same_comparisons(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever key it is, or none: each known one is compared, in full, as a digest."""
    keys = ApiKeys.of([f"key-{i}" for i in range(64)])
    compared: list[tuple[bytes, bytes]] = []
    compare = hmac.compare_digest

    def counted(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return compare(a, b)

    monkeypatch.setattr("serve_app.auth.api_keys.hmac.compare_digest", counted)
    for check in (keys.http_caller, keys.grpc_caller, keys.admin_caller):
        compared.clear()
        with contextlib.suppress(Unauthenticated):
            check(f"Bearer {given}")
        assert [known for _, known in compared] == list(keys.digests)
        assert {len(part) for pair in compared for part in pair} == {32}


@pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince20")  # in Ray's schema
async def test_an_ingress_starts_once_the_cluster_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    from serve_app import app, ingress

    for name in ("EngineClient", "ModelDirectory", "ClusterClient", "serve_admin", "tracing"):
        monkeypatch.setattr(ingress, name, MagicMock())
    monkeypatch.setattr(ingress, "configure_logging", MagicMock())
    monkeypatch.setattr("actors.rpc.lookup.ensure_cluster", MagicMock())
    monkeypatch.setattr("quadriga.replica.gc_tuning.settle", MagicMock())
    monkeypatch.setattr(ingress, "LOOK_INTERVAL_S", 0.001)
    start = partial(ingress.Ingress.__init__, MagicMock(), {}, ApiKeys(), announces=False)
    check_ready = ingress.EngineClient.return_value.check_ready
    check_ready.side_effect = lacks = Unavailable("no decode replica is ready")
    await start()
    monkeypatch.setenv("QUADRIGA_READY_WITHIN_S", "0.01")
    with pytest.raises(Unavailable, match="no decode replica"):
        await start()
    check_ready.side_effect = [lacks, lacks, None]
    await start()
    made = app.application(load_config({}), ApiKeys(), announces=False)._bound_deployment
    assert made._deployment_config.max_constructor_retry_count > 1000  # the chart says how many
