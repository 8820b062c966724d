"""Tuning on a device of its own: nothing of the host is mixed in, and it finds what a CPU finds."""

from __future__ import annotations

import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quadriga.checkpoint.exits import EXITS_FILE, ExitSpec, to_json
from quadriga.config.engine_spec import EngineSpec
from quadriga.engine.model_runner import NativeRunner
from quadriga.tune.answers import OwnAnswer
from quadriga.tune.distillation import Distiller, DistillOptions
from quadriga.tune.outcome import log_likelihood
from quadriga.tune.skipped_kv import fit_maps
from quadriga.tune.states import StateStore
from quadriga.tune.thresholds import judge
from tests.equivalence.models import make_spec
from tests.equivalence.paged import load_on_pages
from tests.fake_gpu import FakeGpu
from tests.unit.tune.models import HIDDEN, LAYERS, VOCAB, save_model

pytestmark = pytest.mark.timeout(900)  # each operation goes through Python several times
EXITS = ExitSpec((1, 2), "shared", threshold=0.0)
DEPTHS = (1, 2, LAYERS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_model("llama", tmp_path_factory.mktemp("model"))
    (path / EXITS_FILE).write_text(json.dumps(to_json(EXITS)))
    return path


def tuned(runner: NativeRunner, work: Path, device: str) -> dict[str, Any]:
    """What every part that runs the model, or trains, makes of the same answers."""
    work.mkdir()
    generator = torch.Generator().manual_seed(2)
    rows = torch.randint(VOCAB, (6, 20), generator=generator).tolist()
    answers = [OwnAnswer(str(i), row[:4], row[4:], True) for i, row in enumerate(rows)]
    store = StateStore(work / "states", HIDDEN, DEPTHS)
    store.fill(runner, answers, lambda _: None)
    every = np.arange(store.num_tokens)
    verdicts = judge(store, every, runner)
    maps, unexplained = fit_maps(runner, EXITS, answers)
    options = DistillOptions("mlp", width=8, epochs=1, batch_tokens=16, device=device)
    final = runner.weights.heads[LAYERS]
    trained = Distiller(store, every, runner.model.config, final, options, seed=0, work=work)
    trained.run(lambda _: None)
    heads = {n: t for k, head in trained.heads.items() for n, t in head.tensors(k).items()}
    # What was saved on the way is taken up again, to the bit, and nothing is left to do.
    begun: list[int] = []
    later = Distiller(store, every, runner.model.config, final, options, seed=0, work=work)
    later.run(begun.append)
    assert begun == [trained.num_steps] and later.loss == trained.loss
    resumed = {n: t for k, head in later.heads.items() for n, t in head.tensors(k).items()}
    assert all(torch.equal(heads[name].cpu(), resumed[name].cpu()) for name in heads)
    assert {tensor.device.type for tensor in heads.values()} == {torch.device(device).type}
    return {
        "states": {k: store.states(k, every) for k in DEPTHS},
        "verdicts": [torch.from_numpy(v) for v in (verdicts.confidence, verdicts.lost)],
        "maps": maps,
        "unexplained": unexplained,
        "likelihood": log_likelihood(runner, answers),
        "loss": trained.loss,
        "heads": {name: tensor.cpu() for name, tensor in heads.items()},
    }


def on_gpu(folder: Path, work: Path) -> dict[str, Any]:
    with FakeGpu() as gpu:
        runner = load_on_pages(spec_of(folder), device=gpu.device)
        found = tuned(runner, work, str(gpu.device))
    assert gpu.kernels
    return found


def spec_of(folder: Path) -> EngineSpec:
    return replace(make_spec(folder, exits=EXITS), compile="off")


def test_every_part_finds_what_it_finds_on_a_cpu(folder: Path, tmp_path: Path) -> None:
    """In a process of its own: gradients know no device that came after the first of them."""
    wanted = tuned(NativeRunner.load(spec_of(folder)), tmp_path / "cpu", "cpu")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        found = pool.submit(on_gpu, folder, tmp_path / "gpu").result(timeout=600)
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-3)
