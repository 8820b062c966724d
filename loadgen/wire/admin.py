"""The service's admin port as operators' commands ask it."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

from loadgen.options import api_key
from loadgen.wire.client_http import HttpClient
from quadriga.errors import ConfigError

REQUEST_TIMEOUT_S = 5.0


def add_admin_arguments(parser: argparse.ArgumentParser) -> None:
    """Add where the admin port is and how to reach it."""
    parser.add_argument("--url", default="http://127.0.0.1:8001", help="the admin port's base URL")
    parser.add_argument("--api-key", help="an admin's key, where the port is not on loopback")
    parser.add_argument("--api-key-file", type=Path, help="file with the key, instead")


def admin_client(args: argparse.Namespace) -> HttpClient:
    """Return a client of the admin port."""
    return HttpClient(args.url, timeout_s=REQUEST_TIMEOUT_S, api_key=api_key(args))


def fetch(client: HttpClient, url: str, path: str) -> dict[str, Any]:
    """Get one JSON document. Raises: ConfigError: There is no admin port, or no permission."""
    try:
        status, document = asyncio.run(client.fetch("GET", path))
    except ConnectionError as exc:
        raise _silent(url, exc) from exc
    if status != 200 or not isinstance(document, dict):
        error = document.get("error", {}) if isinstance(document, dict) else {}
        said = f"--url: {url} answered {status}: {error.get('message', '')}"
        raise ConfigError(said + "; is that the admin port?" * (status == 404))
    return document


def fetch_text(client: HttpClient, url: str, path: str) -> str:
    """Get one page of text. Raises: ConfigError: As `fetch`."""
    try:
        status, text = asyncio.run(client.fetch_text(path))
    except ConnectionError as exc:
        raise _silent(url, exc) from exc
    if status != 200:
        where = "; is that the admin port?" * (status == 404)
        raise ConfigError(f"--url: {url} answered {status}: {text[:500]}{where}")
    return text


def _silent(url: str, exc: ConnectionError) -> ConfigError:
    return ConfigError(
        f"--url: nothing answers at {url} ({exc}); start the service with admin.port=PORT"
    )
