"""The banner of a service that has started: what runs where, and a command to try."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from quadriga.checkpoint.packaged_models import FALLBACK_MODEL, default_model
from quadriga.config.loader import QuadrigaConfig
from quadriga.errors import QuadrigaError
from serve_app.cli.sample_request import sample_requests

POLL_INTERVAL_S = 0.5
STATUS_TIMEOUT_S = 5.0


async def announce_when_ready(config: QuadrigaConfig, *, needs_key: bool) -> None:
    """Print the banner once every replica serves; for an ingress under `serve run`."""
    from actors.rpc.lifecycle import controller_name
    from actors.rpc.ray_rpc import call

    name = controller_name(config.name)
    while True:
        try:
            status = await call(name, "status", timeout_s=STATUS_TIMEOUT_S)
        except QuadrigaError:
            status = {}
        if status.get("is_ready"):
            url = await asyncio.to_thread(_http_url)
            print(describe(status, http_url=url, needs_key=needs_key), flush=True)
            return
        await asyncio.sleep(POLL_INTERVAL_S)


def _http_url() -> str:
    """Where Serve's proxy listens, from Serve's private client."""
    from ray.serve.context import _get_global_client

    client = _get_global_client()
    return str(client.root_url) if client is not None else "http://127.0.0.1:8000"


def describe(
    status: dict[str, Any],
    *,
    http_url: str,
    needs_key: bool = False,
    grpc_address: str | None = None,
    key_hint: str = "",
) -> str:
    """The banner: replicas, addresses and how to try them.

    Args:
        status: What the controller's `status` returned.
        needs_key: HTTP asks for the API key.
        key_hint: Where the API key is, as a line of Python or a comment, where gRPC is on.
    """
    models = status.get("models") or ["quadriga-auto"]
    samples = sample_requests(models[0])
    header = ' -H "authorization: Bearer $QUADRIGA_API_KEY"' if needs_key else ""
    lines = ["", f"Quadriga serves {', '.join(status.get('models', []))}"]
    if FALLBACK_MODEL in models and (lack := default_model().lack):
        lines.append(f"  {lack}")
    lines.append("")
    lines += [
        f"  {replica['role']:<8}{replica.get('depth_class') or '':<25}{replica['name']}  "
        f"on node {str(replica.get('node_id') or '?')[:8]}"
        for replica in status.get("replicas", [])
    ]
    json_type = "-H 'content-type: application/json'"
    lines += [
        f"  {name}: prompt and answer together {why}"
        for name, why in status.get("contexts", {}).items()
    ]
    lines += [
        "",
        f"  HTTP  {http_url}   (docs at {http_url}/docs)",
        f"""    curl -sN {http_url}{samples.http.path} {json_type}{header} \\
      -d '{json.dumps(samples.http.body(models[0]))}'""",
    ]
    if grpc_address is not None:
        tls = ", tls=True" if http_url.startswith("https:") else ""
        lines += [
            "",
            f"  gRPC  {grpc_address}",
            f"""    from quadriga.client import Client
    {key_hint}
    with Client("{grpc_address}", api_key=KEY{tls}) as client:
        for piece in client.stream({json.dumps(samples.grpc.prompt)}):
            print(piece.text, end="", flush=True)""",
        ]
    return "\n".join([*lines, ""])
