"""`make demo`: start the service, send requests over HTTP and gRPC, show what ran, stop it.

Where no model is named, the default model is served, and a bundled one beside it, whose answers a
program can check.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TextIO

from quadriga.checkpoint.folder import bundled_models, read_checkpoint
from quadriga.checkpoint.packaged_models import FALLBACK_MODEL, default_model
from quadriga.client import Client
from quadriga.config.engine import PoolConfig
from quadriga.config.loader import QuadrigaConfig, load_config
from quadriga.errors import ConfigError, QuadrigaError
from quadriga.ports import LOOPBACK, free_port
from quadriga.tasks import TASKS, Example, check, make_example
from serve_app.auth.api_keys import ApiKeys
from serve_app.cli.arguments import ServeParser
from serve_app.cli.launch import Addresses, own_opener
from serve_app.cli.local_run import RunningService, leave, run_local
from serve_app.cli.sample_request import SampleRequest, sample_requests

NUM_TASKS = 40
CONCURRENCY = 8
MAX_TOKENS = 800
MAX_SHOWN_TOKENS = 128
TIMEOUT_S = 60.0
EXIT_INTERRUPTED = 130
NO_PROXY_VARIABLE = "no_grpc_proxy"
MIN_RIGHT_SHARE = 0.8
"""A bundled model answers at least so much of the tasks right; less is a fault of the service."""


@dataclass(frozen=True, slots=True)
class DemoAnswer:
    """What came of one stream.

    Attributes:
        finish_reason: None where the stream ended without one.
    """

    text: str
    finish_reason: str | None

    def faults(self, what: str) -> list[str]:
        """Return what is wrong with it, one sentence each; empty where nothing is."""
        found = []
        if self.finish_reason is None:
            found.append(f"the stream over {what} had no finish reason")
        if not self.text.strip():
            found.append(f"the answer over {what} is empty")
        return found


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

    def faults(self) -> list[str]:
        """Return what is wrong with the service, one sentence each; empty where nothing is."""
        found = []
        if self.ended < self.asked:
            found.append(f"{self.asked - self.ended} of {self.asked} streams had no finish reason")
        if self.right < MIN_RIGHT_SHARE * self.asked:
            found.append(
                f"{self.right} of {self.asked} answers are right; this model gives at least "
                f"{MIN_RIGHT_SHARE:.0%}"
            )
        return found


def main(arguments: list[str] | None = None) -> int:
    """Run the demonstration; returns 0 when every stream ended and the answers are right."""
    parser = ServeParser(
        prog="python -m serve_app.cli.demo", description="Start the service, ask it, stop it."
    )
    parser.add_argument("settings", nargs="*", metavar="key=value", help="as for serve_app")
    settings = parser.parse_args(arguments).settings
    try:
        config = _configuration(settings)
        models = [
            read_checkpoint(pool.model, cache_dir=config.engine.cache_dir).id
            for pool in config.pools
        ]
    except ConfigError as exc:
        parser.error(exc.message)
    key = secrets.token_urlsafe(16)
    addresses = Addresses(http_port=free_port(), grpc_port=free_port())
    os.environ[NO_PROXY_VARIABLE] = LOOPBACK  # gRPC would ask `http_proxy`, too
    print(f"starting {', '.join(models)}: 1 ingress, prefill and decode apart …", flush=True)
    if FALLBACK_MODEL in models and (lack := default_model().lack):
        print(f"  {lack}", flush=True)
    keys = ApiKeys.of([key], is_http_open=True)

    def work(running: RunningService) -> int:
        out = running.output.terminal
        print(file=out)
        for replica in running.service.status()["replicas"]:
            print(f"  {replica['role']:<8}{replica['depth_class']:<25}{replica['name']}", file=out)
        assert addresses.grpc_target is not None
        faults = []
        with Client(addresses.grpc_target, api_key=key, timeout_s=TIMEOUT_S) as client:
            for model in models:
                samples = sample_requests(model)
                print(f"\n{model}", file=out)
                answer = stream_over_http(addresses.http_url, model, samples.http, out)
                faults += answer.faults(f"HTTP of {model}")
                answer = stream_over_grpc(client, model, samples.grpc, out)
                faults += answer.faults(f"gRPC of {model}")
                if model in bundled_models():
                    faults += ask_tasks(client, model, out).faults()
        print(*(f"quadriga: {fault}" for fault in faults), "", sep="\n", file=out, flush=True)
        return 1 if faults else 0

    try:
        return run_local(config, keys, addresses, work, interrupted_status=EXIT_INTERRUPTED)
    except QuadrigaError as exc:
        print(f"quadriga: {exc.message}", file=sys.stderr)
        return 2 if isinstance(exc, ConfigError) else 1


def _configuration(settings: list[str]) -> QuadrigaConfig:
    """The settings; where none describes a pool, with one for each model that is shown.

    Raises: ConfigError.
    """
    if wrong := [text for text in settings if "=" not in text]:
        raise ConfigError(f"{wrong[0]!r}: settings have the form key=value", param=wrong[0])
    given: dict[str, Any] = dict(text.split("=", 1) for text in settings)
    if not any(name.partition(".")[0] in PoolConfig.model_fields for name in given):
        names = dict.fromkeys([default_model().name, FALLBACK_MODEL])
        given["pools"] = [{"model": name, "decode_replicas": 1} for name in names]
    return load_config(given)


def stream_over_http(base_url: str, model: str, sample: SampleRequest, out: TextIO) -> DemoAnswer:
    """Print one streamed answer as it comes, and return it."""
    request = urllib.request.Request(
        f"{base_url}{sample.path}",
        json.dumps({**sample.body(model), "max_tokens": MAX_SHOWN_TOKENS}).encode(),
        {"content-type": "application/json"},
    )
    print(f"  HTTP  {sample.text}\n        ", end="", flush=True, file=out)
    answer, reason = "", None
    with own_opener().open(request, timeout=TIMEOUT_S) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    text = choice["delta"].get("content") if sample.is_chat else choice["text"]
                    answer += text or ""
                    reason = choice["finish_reason"] or reason
                    print(text or "", end="", flush=True, file=out)
    print(file=out)
    return DemoAnswer(answer, reason)


def stream_over_grpc(client: Client, model: str, sample: SampleRequest, out: TextIO) -> DemoAnswer:
    """Print one stream of the SDK as it comes, and return its answer."""
    print(f"  gRPC  {sample.text}\n        ", end="", flush=True, file=out)
    answer, reason = "", None
    for piece in client.stream(sample.prompt, model=model, max_tokens=MAX_SHOWN_TOKENS):
        answer += piece.text
        reason = piece.finish_reason or reason
        print(piece.text, end="", flush=True, file=out)
    print(file=out)
    return DemoAnswer(answer, reason)


def ask_tasks(client: Client, model: str, out: TextIO) -> Score:
    """Ask many tasks at once, print how it went and return it."""
    names = list(TASKS)
    examples = [make_example(names[i % len(names)], seed=1, index=i) for i in range(NUM_TASKS)]

    def ask(example: Example) -> tuple[bool, bool, int]:
        reply = client.generate(example.text, model=model, max_tokens=MAX_TOKENS)
        choice = reply.choices[0]
        right = check(example.task, example.prompt, choice.text)
        return choice.finish_reason is not None, right, reply.usage.completion_tokens

    print(f"  {NUM_TASKS} tasks, {CONCURRENCY} at a time …", flush=True, file=out)
    started_s = time.monotonic()
    pool = ThreadPoolExecutor(CONCURRENCY)
    try:
        results = list(pool.map(ask, examples))
    finally:  # after Ctrl-C the others are not waited for
        pool.shutdown(wait=False, cancel_futures=True)
    took_s = time.monotonic() - started_s
    ended, right, tokens = (sum(column) for column in zip(*results, strict=True))
    score = Score(NUM_TASKS, ended, right, tokens)
    print(
        f"        {score.ended} of {score.asked} streams ended well, {score.right} answers right, "
        f"{score.tokens} tokens in {took_s:.1f} s ({score.tokens / took_s:.0f} tokens/s)",
        file=out,
    )
    return score


if __name__ == "__main__":
    leave(main())
