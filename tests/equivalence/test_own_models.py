"""Models of the shapes people bring start with nothing set, and answer as `transformers` does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quadriga.config.kv_memory import NodeMemory
from quadriga.config.loader import load_config
from quadriga.config.resolve import Hardware, resolve
from quadriga.core.replica import Role
from quadriga.engine import load_runner
from tests.equivalence.models import make_state, randomise, save, whole_prompt
from tests.own_models import LLAMA_1B, LLAMA_8B, thin

GIB = 1 << 30
NUM_TOKENS = 12


@pytest.mark.parametrize("runner", ["native", "baton"])
@pytest.mark.parametrize("config", [LLAMA_1B, LLAMA_8B], ids=["Llama-3.2-1B", "Llama-3.1-8B"])
def test_a_model_of_that_shape_starts_and_answers(
    config: dict[str, Any], runner: str, tmp_path: Path
) -> None:
    """Two cores and 8 GiB: the specs that the service would start with, both roles."""
    torch.manual_seed(0)
    model = randomise(LlamaForCausalLM(LlamaConfig(**thin(config))).eval())
    path = save(model, tmp_path / "own")
    settings = {"model": str(path), "runner": runner}
    hardware = Hardware(num_cpus=2, nodes=(NodeMemory(2.0, 8 * GIB),))
    found = resolve(load_config(settings | {"engine.compile": "off"}), hardware)
    prompt = [(7 * i) % 500 + 3 for i in range(40)]
    wanted = model.generate(
        torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None
    )[0, len(prompt) :].tolist()
    for role in (Role.PREFILL, Role.DECODE):
        spec = next(r.engine for r in found.replicas if r.role is role)
        assert 2048 <= spec.row_capacity_tokens <= 131_072
        loaded = load_runner(replace(spec, shared_in=None))
        state = make_state(prompt, max_tokens=NUM_TOKENS)
        loaded.attach(0, state)
        token = loaded.prefill([whole_prompt(0, state)])[0]
        while token is not None and len(state.output_ids) < NUM_TOKENS:
            state.output_ids.append(token.token_id)
            token = loaded.decode([0])[0]
        assert state.output_ids == wanted, role
