"""`make demo`: start the service, ask it a few things over both doors, show what ran, stop it."""

from __future__ import annotations

import json
import secrets
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TextIO

from quadriga.checkpoint import bundled_models, read_checkpoint
from quadriga.client import Client
from quadriga.config import load_config
from quadriga.errors import ConfigError, QuadrigaError
from quadriga.ports import free_port
from quadriga.training.tasks import LINE_END, TASKS, Example, check, make_example
from serve_app.arguments import ServeParser
from serve_app.auth import ApiKeys
from serve_app.launch import Addresses
from serve_app.local_run import Running, leave, run_local

NUM_TASKS = 40
CONCURRENCY = 8
MAX_TOKENS = 800
TIMEOUT_S = 60.0
EXIT_INTERRUPTED = 130
MIN_RIGHT_SHARE = 0.8
"""A bundled model answers at least so much of the tasks right; less is a fault of the service."""


@dataclass(frozen=True, slots=True)
class Score:
    """What became of the tasks.

    Attributes:
        ended: Answers that came with a finish reason.
        right: Answers that the task's checker accepts.
    """

    asked: int
    ended: int
    right: int
    tokens: int

    def faults(self, *, knows_tasks: bool) -> list[str]:
        """Return what is wrong with the service, one sentence each; empty where nothing is.

        Args:
            knows_tasks: The model was trained on the tasks, so that wrong answers are a fault.
        """
        found = []
        if self.ended < self.asked:
            found.append(f"{self.asked - self.ended} of {self.asked} streams had no finish reason")
        if knows_tasks and self.right < MIN_RIGHT_SHARE * self.asked:
            found.append(
                f"{self.right} of {self.asked} answers are right; this model gives at least "
                f"{MIN_RIGHT_SHARE:.0%}"
            )
        return found


def main(arguments: list[str] | None = None) -> int:
    """Run the demonstration; returns 0 when every stream ended and the answers are right."""
    parser = ServeParser(
        prog="python -m serve_app.demo", description="Start the service, ask it, stop it."
    )
    parser.add_argument("settings", nargs="*", metavar="key=value", help="as for serve_app")
    settings = parser.parse_args(arguments).settings
    try:
        if wrong := [text for text in settings if "=" not in text]:
            raise ConfigError(f"{wrong[0]!r}: settings have the form key=value", param=wrong[0])
        config = load_config(dict(text.split("=", 1) for text in settings))
        model = read_checkpoint(config.pools[0].model, cache_dir=config.engine.cache_dir).id
    except ConfigError as exc:
        parser.error(exc.message)
    key = secrets.token_urlsafe(16)
    addresses = Addresses(http_port=free_port(), grpc_port=free_port())
    print(f"starting {model}: 1 ingress, prefill and decode apart …", flush=True)
    keys = ApiKeys.of([key], is_http_open=True)

    def work(running: Running) -> int:
        out = running.output.terminal
        print(file=out)
        for replica in running.service.status()["replicas"]:
            print(f"  {replica['role']:<8}{replica['depth_class']:<16}{replica['name']}", file=out)
        chat_over_http(addresses.http_url, model, out)
        assert addresses.grpc_target is not None
        with Client(addresses.grpc_target, api_key=key, timeout_s=TIMEOUT_S) as client:
            stream_over_grpc(client, model, out)
            score = ask_tasks(client, model, out)
        faults = score.faults(knows_tasks=config.pools[0].model in bundled_models())
        print(*(f"quadriga: {fault}" for fault in faults), "", sep="\n", file=out, flush=True)
        return 1 if faults else 0

    try:
        return run_local(config, keys, addresses, work, interrupted_status=EXIT_INTERRUPTED)
    except QuadrigaError as exc:
        print(f"quadriga: {exc.message}", file=sys.stderr)
        return 2 if isinstance(exc, ConfigError) else 1


def chat_over_http(base_url: str, model: str, out: TextIO) -> str:
    """Print one streamed chat completion as it comes; return the answer."""
    question = "Count from 3 to 30."
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "stream": True,
    }
    request = urllib.request.Request(
        f"{base_url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    print(f"\nHTTP  {question}\n      ", end="", file=out)
    answer = ""
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                delta: dict[str, Any] = json.loads(line[6:])["choices"][0]["delta"]
                answer += (text := delta.get("content") or "")
                print(text, end="", flush=True, file=out)
    print(file=out)
    return answer


def stream_over_grpc(client: Client, model: str, out: TextIO) -> str:
    """Print one stream of the SDK as it comes; return the answer."""
    question = "Reverse: 5 6 7 8 9"
    print(f"\ngRPC  {question}\n      ", end="", file=out)
    answer = ""
    for piece in client.stream(question + LINE_END, model=model, max_tokens=64):
        answer += piece.text
        print(piece.text, end="", flush=True, file=out)
    print(file=out)
    return answer


def ask_tasks(client: Client, model: str, out: TextIO) -> Score:
    """Ask many tasks at once, print how it went and return it."""
    names = list(TASKS)
    examples = [make_example(names[i % len(names)], seed=1, index=i) for i in range(NUM_TASKS)]

    def ask(example: Example) -> tuple[bool, bool, int]:
        reply = client.generate(example.text, model=model, max_tokens=MAX_TOKENS)
        choice = reply.choices[0]
        right = check(example.task, example.prompt, choice.text)
        return choice.finish_reason is not None, right, reply.usage.completion_tokens

    print(f"\n{NUM_TASKS} tasks, {CONCURRENCY} at a time …", flush=True, file=out)
    started_s = time.monotonic()
    pool = ThreadPoolExecutor(CONCURRENCY)
    try:
        results = list(pool.map(ask, examples))
    finally:  # after Ctrl-C nobody waits for the others
        pool.shutdown(wait=False, cancel_futures=True)
    took_s = time.monotonic() - started_s
    ended, right, tokens = (sum(column) for column in zip(*results, strict=True))
    score = Score(NUM_TASKS, ended, right, tokens)
    print(
        f"      {score.ended} of {score.asked} streams ended well, {score.right} answers right, "
        f"{score.tokens} tokens in {took_s:.1f} s ({score.tokens / took_s:.0f} tokens/s)",
        file=out,
    )
    return score


if __name__ == "__main__":
    leave(main())
