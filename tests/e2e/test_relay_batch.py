"""An unmodified GPT-2 behind the API: prefill and decode apart, KV handed over, a relay batch."""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from quadriga.checkpoint.folder import ASSETS
from quadriga.ports import LOOPBACK, free_port
from tests.e2e.observe import wait_until_free
from tests.e2e.roles import argument

pytestmark = pytest.mark.slow  # a service of its own

START_TIMEOUT_S = 200.0
STOP_TIMEOUT_S = 60.0
NUM_REQUESTS = 12


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random GPT-2 with the bundled tokenizer."""
    from transformers import AutoTokenizer, GPT2Config

    from tests.equivalence.models import save
    from tests.equivalence.relay_models import build_relay

    path = tmp_path_factory.mktemp("models") / "tiny-gpt2"
    vocab_size = len(AutoTokenizer.from_pretrained(ASSETS / "quadriga-s"))
    config = GPT2Config(
        vocab_size=vocab_size,
        n_embd=64,
        n_layer=4,
        n_head=4,
        n_positions=256,
        bos_token_id=0,
        eos_token_id=0,
    )
    save(build_relay(config), path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ASSETS / "quadriga-s" / name, path / name)
    return path


@pytest.fixture(scope="module")
def url(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The service as a user starts it, in a process and a Ray of its own."""
    port = free_port()
    settings = [f"model={checkpoint}", argument(1), "prefill.chunk_tokens=48"]
    command = [sys.executable, "-m", "serve_app", "--http-port", str(port), "--no-grpc", *settings]
    log = tmp_path_factory.mktemp("log") / "output"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            address = f"http://{LOOPBACK}:{port}"
            await_health(address, process, log)
            yield address
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(STOP_TIMEOUT_S)
                raise


def await_health(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Return once the service is ready. Raises: AssertionError when it ends or takes too long."""
    give_up_s = time.monotonic() + START_TIMEOUT_S
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{address}/health", timeout=5).status_code == 200:
                return
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < give_up_s, log.read_text()
        time.sleep(0.2)


@pytest.mark.timeout(400)
def test_completions_equal_generate(url: str, checkpoint: Path) -> None:
    """Twelve at once, of several chunks and lengths; then nothing is held."""
    from transformers import AutoModelForCausalLM

    from tests.equivalence.relay_models import generate

    rng = random.Random(3)
    requests = [
        ([rng.randrange(5, 600) for _ in range(rng.randint(1, 120))], rng.choice([1, 7, 30, 60]))
        for _ in range(NUM_REQUESTS)
    ]
    with httpx.Client(base_url=url, timeout=120) as http:

        def complete(request: tuple[list[int], int]) -> dict[str, Any]:
            prompt, num_tokens = request
            body = {
                "model": "tiny-gpt2",
                "prompt": prompt,
                "max_tokens": num_tokens,
                "min_tokens": num_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            reply = http.post("/v1/completions", json=body)
            assert reply.status_code == 200, reply.text
            answer: dict[str, Any] = reply.json()
            return answer

        with ThreadPoolExecutor(NUM_REQUESTS) as pool:
            answers = list(pool.map(complete, requests))
        wait_until_free(http)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    for (prompt, num_tokens), answer in zip(requests, answers, strict=True):
        (choice,) = answer["choices"]
        assert choice["token_ids"] == generate(model, prompt, num_tokens)
        assert choice["finish_reason"] == "length"
    assert len({t for a in answers for t in a["choices"][0]["token_ids"]}) > 10, "a dull model"
