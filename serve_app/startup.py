"""What a fresh service says: what runs where, and a line to try."""

from __future__ import annotations

import asyncio
from typing import Any

from quadriga.config import QuadrigaConfig
from quadriga.errors import QuadrigaError

POLL_INTERVAL_S = 0.5
STATUS_TIMEOUT_S = 5.0


async def announce_when_ready(config: QuadrigaConfig) -> None:
    """Print the banner once every replica serves; for an ingress under `serve run`."""
    from actors.calls import call
    from actors.lifecycle import controller_name

    name = controller_name(config.name)
    while True:
        try:
            status = await call(name, "status", timeout_s=STATUS_TIMEOUT_S)
        except QuadrigaError:
            status = {}
        if status.get("is_ready"):
            print(describe(status, http_url="http://127.0.0.1:8000"), flush=True)
            return
        await asyncio.sleep(POLL_INTERVAL_S)


def describe(
    status: dict[str, Any], *, http_url: str, grpc_address: str | None = None, key_hint: str = ""
) -> str:
    """The banner: replicas, addresses and how to try them.

    Args:
        status: What the controller's `status` returned.
        key_hint: How to use the API key, where gRPC is on.
    """
    model = (status.get("models") or ["quadriga-auto"])[0]
    lines = ["", f"Quadriga serves {', '.join(status.get('models', []))}", ""]
    lines += [
        f"  {replica['role']:<8}{replica.get('depth_class') or '':<16}{replica['name']}  "
        f"on node {str(replica.get('node_id') or '?')[:8]}"
        for replica in status.get("replicas", [])
    ]
    lines += [
        "",
        f"  HTTP  {http_url}   (docs at {http_url}/docs)",
        f"""    curl {http_url}/v1/completions -H 'content-type: application/json' \\
      -d '{{"model": "{model}", "prompt": "sort: 7 3 9 1\\\\n", "max_tokens": 32}}'""",
    ]
    if grpc_address is not None:
        lines += [
            "",
            f"  gRPC  {grpc_address}   {key_hint}",
            f"""    from quadriga.client import Client
    with Client("{grpc_address}", api_key=KEY) as client:
        for piece in client.stream("sort: 7 3 9 1\\n", max_tokens=32):
            print(piece.text, end="")""",
        ]
    return "\n".join([*lines, ""])
