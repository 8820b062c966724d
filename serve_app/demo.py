"""`make demo`: start the service, ask it a few things over both doors, show what ran, stop it."""

from __future__ import annotations

import json
import secrets
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TextIO

from quadriga.checkpoint import read_checkpoint
from quadriga.client import Client
from quadriga.config import load_config
from quadriga.errors import ConfigError
from quadriga.ports import free_port
from quadriga.training.tasks import TASKS, Example, check, make_example
from serve_app.arguments import ServeParser
from serve_app.auth import ApiKeys
from serve_app.launch import Addresses, LocalService
from serve_app.quiet import QuietOutput

NUM_TASKS = 40
CONCURRENCY = 8
TIMEOUT_S = 60.0


def main(arguments: list[str] | None = None) -> int:
    """Run the demonstration. Returns 0 when every stream ended well."""
    parser = ServeParser(
        prog="python -m serve_app.demo", description="Start the service, ask it, stop it."
    )
    parser.add_argument("settings", nargs="*", metavar="key=value", help="as for serve_app")
    settings = parser.parse_args(arguments).settings
    try:
        if wrong := [text for text in settings if "=" not in text]:
            raise ConfigError(f"{wrong[0]!r}: settings have the form key=value", param=wrong[0])
        config = load_config(dict(text.split("=", 1) for text in settings))
        model = read_checkpoint(config.pools[0].model).id
    except ConfigError as exc:
        parser.error(exc.message)
    key = secrets.token_urlsafe(16)
    addresses = Addresses(http_port=free_port(), grpc_port=free_port())
    print(f"starting {model}: 1 ingress, prefill and decode apart …", flush=True)
    started_s = time.monotonic()
    keys = ApiKeys.of([key], is_http_open=True)
    with QuietOutput() as output, LocalService(config, keys, addresses) as service:
        out = output.terminal
        print(f"ready in {time.monotonic() - started_s:.0f} s\n", file=out)
        for replica in service.status()["replicas"]:
            print(f"  {replica['role']:<8}{replica['depth_class']:<16}{replica['name']}", file=out)
        _ask_over_http(addresses.http_url, model, out)
        assert addresses.grpc_target is not None
        with Client(addresses.grpc_target, api_key=key, timeout_s=TIMEOUT_S) as client:
            _ask_over_grpc(client, model, out)
            is_good = _ask_many(client, model, out)
        print("\nstopping …", flush=True, file=out)
    return 0 if is_good else 1


def _ask_over_http(base_url: str, model: str, out: TextIO) -> None:
    """One streamed chat completion, printed as it comes."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Count from 3 to 30."}],
        "stream": True,
    }
    request = urllib.request.Request(
        f"{base_url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    print(f"\nHTTP  {body['messages'][0]['content']}\n      ", end="", file=out)  # type: ignore[index]
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                delta: dict[str, Any] = json.loads(line[6:])["choices"][0]["delta"]
                print(delta.get("content") or "", end="", flush=True, file=out)
    print(file=out)


def _ask_over_grpc(client: Client, model: str, out: TextIO) -> None:
    """One stream through the SDK, printed as it comes."""
    prompt = "Reverse: 5 6 7 8 9"
    print(f"\ngRPC  {prompt}\n      ", end="", file=out)
    for piece in client.stream(prompt + "\n", model=model, max_tokens=64):
        print(piece.text, end="", flush=True, file=out)
    print(file=out)


def _ask_many(client: Client, model: str, out: TextIO) -> bool:
    """Many tasks at once, scored. Returns whether every stream ended with a finish reason."""
    names = list(TASKS)
    examples = [make_example(names[i % len(names)], seed=1, index=i) for i in range(NUM_TASKS)]

    def ask(example: Example) -> tuple[bool, bool, int]:
        reply = client.generate(example.prompt, model=model, max_tokens=800)
        choice = reply.choices[0]
        right = check(example.task, example.prompt, choice.text)
        return choice.finish_reason is not None, right, reply.usage.completion_tokens

    print(f"\n{NUM_TASKS} tasks, {CONCURRENCY} at a time …", flush=True, file=out)
    started_s = time.monotonic()
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        results = list(pool.map(ask, examples))
    took_s = time.monotonic() - started_s
    tokens = sum(count for _, _, count in results)
    print(
        f"      {sum(ended for ended, _, _ in results)} of {NUM_TASKS} streams ended well, "
        f"{sum(right for _, right, _ in results)} answers right, "
        f"{tokens} tokens in {took_s:.1f} s ({tokens / took_s:.0f} tokens/s)",
        file=out,
    )
    return all(ended for ended, _, _ in results)


if __name__ == "__main__":
    sys.exit(main())
