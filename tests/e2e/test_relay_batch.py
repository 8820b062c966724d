"""An unmodified GPT-2 behind the API: prefill and decode apart, KV handed over, a relay batch."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from quadriga.checkpoint.folder import ASSETS
from tests.e2e.observe import wait_until_free
from tests.e2e.serve_command import ServeCommand, serve_command

pytestmark = pytest.mark.slow  # a service of its own

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
def relay_service(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServeCommand]:
    words = (f"model={checkpoint}", "prefill.chunk_tokens=48")
    with serve_command(tmp_path_factory.mktemp("state"), *words) as command:
        yield command


@pytest.mark.timeout(400)
def test_completions_equal_generate(relay_service: ServeCommand, checkpoint: Path) -> None:
    """Twelve at once, of several chunks and lengths; then nothing is held."""
    from transformers import AutoModelForCausalLM

    from tests.equivalence.relay_models import generate

    rng = random.Random(3)
    requests = [
        ([rng.randrange(5, 600) for _ in range(rng.randint(1, 120))], rng.choice([1, 7, 30, 60]))
        for _ in range(NUM_REQUESTS)
    ]
    with relay_service.http() as http:

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
