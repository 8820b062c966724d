"""The ingress process stays light: torch would cost it seconds and hundreds of megabytes."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
import serve_app.app, serve_app.ingress
from quadriga.config.loader import load_config
from serve_app.openai.models import ModelDirectory
import actors.controller.controller, actors.rpc.lookup, actors.scheduler.scheduler

models = ModelDirectory.load(load_config({"model": "quadriga-s"}))
tokenizer = models.find("quadriga-auto").tokenizer
tokenizer.render_chat([{"role": "user", "content": "a"}])
print(sorted({name.split(".")[0] for name in sys.modules} & {"torch", "safetensors"}))
"""


def test_an_ingress_loads_no_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1] == "[]"


def test_the_proxy_loads_only_the_protocol() -> None:
    """Serve's proxy imports the servicer functions; neither models nor TLS have a place there."""
    code = (
        "import sys, serve_app.grpc.messages; "
        "print(sorted(m for m in sys.modules if m.startswith(('serve_app.', 'ray'))), "
        "sys.modules.keys() & {'pydantic', 'cryptography'})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    loaded = ["serve_app.grpc", "serve_app.grpc.messages", "serve_app.http", "serve_app.http.tls"]
    loaded += ["serve_app.openai", "serve_app.openai.tool_output"]
    assert done.stdout.strip() == f"{loaded} set()"
