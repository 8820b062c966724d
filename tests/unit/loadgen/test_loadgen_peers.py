"""The adapters of optional peers, over fakes of their engines."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from loadgen.bench.engines.peers import PEERS, PROBES
from loadgen.bench.engines.workloads import Request, Workload

WORKLOAD = Workload(
    "mixed",
    2,
    [Request([3, 4], 4), Request([5], 2), Request([6, 7, 8], 3)],
)


def load(monkeypatch: pytest.MonkeyPatch, peer: str, **fakes: ModuleType) -> Any:
    """Import a peer's adapter over fake engine modules."""
    for name, module in fakes.items():
        monkeypatch.setitem(sys.modules, name.replace("__", "."), module)
    where, cls = PEERS[peer]
    monkeypatch.delitem(sys.modules, where, raising=False)
    module = importlib.import_module(where)
    monkeypatch.delitem(sys.modules, where)
    return getattr(module, cls)


def test_every_peer_has_a_module_and_a_probe() -> None:
    assert PEERS.keys() == PROBES.keys()
    for module, _ in PEERS.values():
        assert importlib.util.find_spec(module), module


class FakeConverter:
    def __init__(self, checkpoint: str) -> None:
        self.checkpoint = checkpoint

    def convert(self, folder: str, *, quantization: str, force: bool) -> None:
        assert quantization == "float32"
        target = Path(folder)
        target.mkdir()
        (target / "vocabulary.json").write_text(json.dumps([f"<{i}>" for i in range(20)]))
        tokens = {"bos_token": None, "eos_token": "<0>", "unk_token": ""}
        (target / "config.json").write_text(json.dumps(tokens))
        (target / "model.bin").write_bytes(b"")


class FakeGenerator:
    """Counts on from the prompt's last token, as many steps as it is made to."""

    def __init__(self, folder: str, **options: Any) -> None:
        settings = json.loads((Path(folder) / "config.json").read_text())
        assert all(isinstance(v, str) for v in settings.values()), "the loader takes no null"
        assert (options["compute_type"], options["intra_threads"]) == ("float32", 3)
        self.widths: list[int] = []

    def generate_batch(self, prompts: list[list[str]], **options: Any) -> list[Any]:
        self.widths.append(len(prompts))
        steps = options["max_length"]
        assert (options["min_length"], options["beam_size"]) == (steps, 1)
        assert not options["include_prompt_in_result"]
        for _ in range(steps):
            assert options["callback"](None) is False, "going on"
        last = [int(p[-1].strip("<>")) for p in prompts]
        return [SimpleNamespace(sequences_ids=[[n + i + 1 for i in range(steps)]]) for n in last]


def test_ctranslate2(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    checkpoint = tmp_path / "model"
    checkpoint.mkdir()
    for name in ("config.json", "model.safetensors"):
        (checkpoint / name).write_text("{}")
    engine, converters = ModuleType("ctranslate2"), ModuleType("ctranslate2.converters")
    engine.Generator = FakeGenerator  # type: ignore[attr-defined]
    converters.TransformersConverter = FakeConverter  # type: ignore[attr-defined]
    peer_class = load(
        monkeypatch, "ctranslate2", ctranslate2=engine, ctranslate2__converters=converters
    )
    for _ in range(2):  # the second finds the converted model
        peer = peer_class(checkpoint, 3)
        done = peer.generate(WORKLOAD)
        assert done.token_ids == [[5, 6, 7, 8], [6, 7], [9, 10, 11]]
        assert peer._generator.widths == [2, 1]
        assert len(done.ttft_s) == 3
        assert 0 < done.ttft_s[0] <= done.ttft_s[2] <= done.seconds


class FakeEngine:
    """One token a step for every request in flight."""

    most_in_flight = 0

    @classmethod
    def from_engine_args(cls, arguments: Any) -> FakeEngine:
        assert (arguments.dtype, arguments.max_num_seqs, arguments.max_model_len) == (
            "float32",
            2,
            6,
        )
        return cls()

    def __init__(self) -> None:
        self.flying: dict[str, tuple[int, Any, list[int]]] = {}

    def add_request(self, name: str, prompt: dict[str, list[int]], params: Any) -> None:
        assert (params.temperature, params.ignore_eos) == (0.0, True)
        self.flying[name] = (prompt["prompt_token_ids"][-1], params, [])
        FakeEngine.most_in_flight = max(FakeEngine.most_in_flight, len(self.flying))

    def step(self) -> list[Any]:
        outputs = []
        for name, (last, params, tokens) in list(self.flying.items()):
            tokens.append(last + len(tokens) + 1)
            finished = len(tokens) == params.max_tokens
            if finished:
                del self.flying[name]
            one = SimpleNamespace(token_ids=list(tokens))
            outputs.append(SimpleNamespace(request_id=name, outputs=[one], finished=finished))
        return outputs


def test_vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    vllm, torch = ModuleType("vllm"), ModuleType("torch")
    vllm.EngineArgs = vllm.SamplingParams = SimpleNamespace  # type: ignore[attr-defined]
    vllm.LLMEngine = FakeEngine  # type: ignore[attr-defined]
    torch.set_num_threads = lambda threads: None  # type: ignore[attr-defined]
    peer = load(monkeypatch, "vllm", vllm=vllm, torch=torch)(tmp_path, 1)
    peer.prepare([WORKLOAD])
    done = peer.generate(WORKLOAD)
    assert done.token_ids == [[5, 6, 7, 8], [6, 7], [9, 10, 11]]
    assert FakeEngine.most_in_flight == 2
    assert all(0 < t <= done.seconds for t in done.ttft_s)
