"""The scripts that run in the cluster: fetching models, and one completion."""

from __future__ import annotations

import json
import runpy
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest

from quadriga.config.engine import PoolConfig
from serve_app import fetched_models
from tests.deploy.charts import CHART

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own, of pydantic
    from serve_app import app


def script(name: str) -> Callable[[], int]:
    main: Callable[[], int] = runpy.run_path(str(CHART / "files" / name))["main"]
    return main


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A hub that has one model, and one repository that is none."""
    fetched: list[str] = []

    def snapshot_download(repo: str, *, revision: str, local_dir: Path, **_: Any) -> None:
        fetched.append(f"{repo}@{revision}")
        local_dir.mkdir(parents=True, exist_ok=True)
        (local_dir / ("config.json" if repo == "org/model" else "README.md")).write_text("{}")

    module = types.ModuleType("huggingface_hub")
    module.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return fetched


def tell(monkeypatch: pytest.MonkeyPatch, *models: dict[str, str]) -> None:
    monkeypatch.setenv("MODELS", json.dumps(models))
    monkeypatch.setenv("TIMEOUT_S", "0")


def test_a_model_is_fetched_once(
    tmp_path: Path, hub: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {"repo": "org/model", "revision": "main", "path": str(tmp_path / "model")}
    pool = PoolConfig(model=model["path"], fetched_from="org/model@main")
    tell(monkeypatch, model)
    assert not fetched_models.is_fetched(pool)
    assert script("download_models.py")() == 0
    assert script("download_models.py")() == 0
    assert hub == ["org/model@main"]
    assert fetched_models.is_fetched(pool)
    marker = Path(model["path"]) / fetched_models.FETCHED_FILE
    marker.write_text(marker.read_text() + "\n")  # as `echo` writes it
    assert fetched_models.is_fetched(pool)
    other = pool.model_copy(update={"fetched_from": "org/model@other"})
    assert not fetched_models.is_fetched(other)
    tell(monkeypatch, model | {"revision": "other"})
    assert script("download_models.py")() == 1, "nothing changes under a cluster that runs"
    assert fetched_models.is_fetched(pool)
    assert hub == ["org/model@main"]


def test_the_application_is_built_once_its_models_are_fetched(
    tmp_path: Path, hub: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "model")
    tell(monkeypatch, {"repo": "org/model", "revision": "main", "path": path})
    fetch = iter([lambda: None, script("download_models.py")])
    monkeypatch.setattr(fetched_models.time, "sleep", lambda _: next(fetch)())
    app.build({"model": path, "fetched_from": "org/model@main"})
    assert hub == ["org/model@main"] and next(fetch, None) is None


def test_what_is_no_model_is_never_called_complete(
    tmp_path: Path, hub: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tell(monkeypatch, {"repo": "org/else", "revision": "main", "path": str(tmp_path / "else")})
    assert script("download_models.py")() == 1
    assert not (tmp_path / "else" / fetched_models.FETCHED_FILE).exists()


def test_a_full_disk_leaves_no_half_marker(
    tmp_path: Path, hub: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tell(monkeypatch, {"repo": "org/model", "revision": "main", "path": str(tmp_path / "model")})
    monkeypatch.setattr("quadriga.files.os.fsync", Mock(side_effect=OSError(28, "no space")))
    with pytest.raises(OSError, match="no space"):
        script("download_models.py")()
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["config.json"]


class Service(BaseHTTPRequestHandler):
    """Answers as `answers` says, by path."""

    answers: ClassVar[dict[str, tuple[int, Any]]] = {}
    seen: ClassVar[list[tuple[str, str | None]]] = []

    def do_GET(self) -> None:
        self.seen.append((self.path, self.headers["authorization"]))
        status, body = self.answers[self.path]
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.do_GET()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Service]]:
    Service.seen = []
    Service.answers = {
        "/v1/models": (200, {"data": [{"id": "m"}]}),
        "/v1/completions": (200, {"usage": {"completion_tokens": 8}}),
    }
    server = HTTPServer(("127.0.0.1", 0), Service)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("TIMEOUT_S", "0")
    yield Service
    server.shutdown()
    thread.join()
    server.server_close()


def test_one_completion_passes(service: type[Service], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "secret\n")
    assert script("one_completion.py")() == 0
    assert service.seen == [("/v1/models", "Bearer secret"), ("/v1/completions", "Bearer secret")]


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize(
    "answer",
    [
        (200, {"usage": {"completion_tokens": 7}}),
        (200, {"error": "?"}),
        (401, {"error": {"message": "no"}}),
        (503, {"error": {"message": "not yet"}}),
    ],
)
def test_one_completion_fails(service: type[Service], answer: tuple[int, Any]) -> None:
    service.answers["/v1/completions"] = answer
    assert script("one_completion.py")() == 1
