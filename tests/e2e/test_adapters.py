"""A LoRA adapter of a running service: through prefill, hand-off and decoding, beside its model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import httpx
import openai
import pytest

from quadriga import LLM, SamplingParams
from quadriga.client import Client
from tests.e2e.conftest import ADAPTER, MODEL, Service

PROMPTS = ["Sort: 42 7 19 7 88\n", "Count from 3 to 20.\n" * 20, "Reverse: 5 6 7\n"]
MAX_TOKENS = 24


@pytest.fixture(autouse=True)
def _has_an_adapter(service: Service) -> None:
    if not service.adapters:
        pytest.skip("the service ran before, and has no adapter of ours")


def test_it_is_listed_and_another_is_not_found(http: httpx.Client, sdk: Client) -> None:
    card = http.get(f"/v1/models/{ADAPTER}").json()
    assert (card["id"], card["parent"]) == (ADAPTER, MODEL)
    assert {m.id: m.parent for m in sdk.models()}[ADAPTER] == MODEL
    reply = http.post("/v1/completions", json={"model": "no-adapter", "prompt": "a"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
    assert f'running_lora_adapters="{ADAPTER}"' in http.get("/metrics/endpoint").text


def test_both_models_in_one_batch(service: Service) -> None:
    """The tokens of the engine alone, for each, while all of them run together."""
    greedy = SamplingParams(MAX_TOKENS, temperature=0.0)
    settings: dict[str, Any] = {"deterministic": True, "engine.compile": "off"}
    with closing(LLM(MODEL, adapters=service.adapters, **settings)) as llm:
        wanted = {
            (name, prompt): output.text
            for name, adapter in ((MODEL, ""), (ADAPTER, ADAPTER))
            for prompt, output in zip(
                PROMPTS, llm.generate(PROMPTS, greedy, progress=False, adapter=adapter), strict=True
            )
        }
    assert any(wanted[MODEL, prompt] != wanted[ADAPTER, prompt] for prompt in PROMPTS)
    with openai.OpenAI(base_url=f"{service.base_url}/v1", api_key="none") as client:

        def ask(asked: tuple[str, str]) -> tuple[str, str]:
            answer = client.completions.create(
                model=asked[0], prompt=asked[1], max_tokens=MAX_TOKENS, temperature=0
            )
            return answer.model, answer.choices[0].text

        with ThreadPoolExecutor(len(wanted)) as threads:
            for _ in range(2):  # the second time prefixes are there, of each by itself
                for asked, got in zip(wanted, threads.map(ask, wanted), strict=True):
                    assert got == (asked[0], wanted[asked])
