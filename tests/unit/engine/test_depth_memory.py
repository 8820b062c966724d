"""Layers that are let go give their memory back to the system: measured in a fresh process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from tests.equivalence.models import save

LAYERS, ROWS, TOKENS = 12, 4, 512
LAYER_BYTES = 4 * (4 * 256 * 256 + 3 * 256 * 1046)  # 4 MiB
KV_BYTES = ROWS * TOKENS * 2 * 256 * 4  # of a layer: 4 MiB

MEASURE = """
import json, os, sys
from dataclasses import replace
from pathlib import Path
import torch
from quadriga.engine.model_runner import NativeRunner
from tests.equivalence.models import make_spec, make_state

path, rows, tokens = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
spec = make_spec(path, num_rows=rows, compile="wait", skipped_kv="replay")
plan = spec.checkpoint.exits
runner = NativeRunner.load(replace(spec, exits=plan, exit_plan=plan))

def rss():
    assert runner.wait_freed(60.0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

def fill(first):
    for row in range(rows):
        kv = torch.ones(1, 2, 4, tokens, 64)
        for layer in range(first, runner.num_layers):
            runner.write_kv(row, layer, 0, kv)

def grow(depth):
    with runner.prepare_depth(depth) as prepared:
        runner.take_depth(prepared)

for row in range(rows):
    runner.attach(row, make_state([1] * (tokens - 1)))
fill(0)
seen = {"full": rss()}
runner.drop_to(3)
seen["shallow"] = rss()
seen["tokens_shallow"] = runner.kv_capacity_tokens
grow(12)
fill(3)
seen["full again"] = rss()
runner.drop_to(3)
for _ in range(10):
    grow(6); grow(12); runner.drop_to(3)
seen["early"] = rss()
for _ in range(40):
    grow(6); grow(12); runner.drop_to(3)
seen["late"] = rss()
print(json.dumps(seen), flush=True)
os._exit(0)  # PyTorch's threads now and then abort a process that ends in order
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_memory_comes_back(tmp_path: Path) -> None:
    """Nine of twelve layers go: at least 90 % of their bytes; 120 changes later it is the same.

    What differs is the heap that reading leaves behind, on a busy machine one or two layers: less
    than three, where a layer lost by each change would be 120.
    """
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=256,
        intermediate_size=1046,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        max_position_embeddings=TOKENS,
    )
    save(LlamaForCausalLM(config).half(), tmp_path)
    (tmp_path / "exits.json").write_text('{"kind": "shared", "layers": [3, 6, 9]}')
    python = [sys.executable, "-X", "faulthandler"]
    command = [*python, "-c", MEASURE, str(tmp_path), str(ROWS), str(TOKENS)]
    out = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert out.returncode == 0, out.stderr
    seen = json.loads(out.stdout.splitlines()[-1])
    gone = 9 * (LAYER_BYTES + KV_BYTES)
    assert gone > 70e6
    returned = seen["full"] - seen["shallow"]
    assert 0.9 * gone < returned < 1.1 * gone
    assert abs(seen["full again"] - seen["full"]) < 0.2 * gone
    assert seen["late"] - seen["early"] < gone / 3, "120 changes leak"
    assert seen["tokens_shallow"] == ROWS * TOKENS  # as many as the rows hold
