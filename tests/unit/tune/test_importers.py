"""Exits of other projects, on small checkpoints in their layouts."""

from __future__ import annotations

import argparse
import enum
import json
import os
import pickle
import random
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from quadriga.checkpoint.exits import EXITS_FILE, EXITS_WEIGHTS, ExitSpec, to_json
from quadriga.checkpoint.folder import Checkpoint, read_checkpoint
from quadriga.engine.model_runner import NativeRunner
from quadriga.engine.models.layers import rms_norm
from quadriga.errors import ConfigError
from quadriga.tune.folder import save_halves
from quadriga.tune.importers import import_exits
from quadriga.tune.importers.ee_llm import Unread, _load
from quadriga.tune.importers.split_layers import write_split
from quadriga.tune.states import run_passes
from tests.equivalence.models import make_spec
from tests.unit.tune.models import HIDDEN, LAYERS, VOCAB, save_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return read_checkpoint(str(save_model("llama", tmp_path_factory.mktemp("model"))))


class TheirHead(nn.Module):
    """A head of DSSD: norm or identity, and a linear layer without bias."""

    def __init__(self, has_norm: bool) -> None:
        super().__init__()
        self.norm: nn.Module = nn.RMSNorm(HIDDEN, eps=1e-6) if has_norm else nn.Identity()
        self.linear = nn.Linear(HIDDEN, VOCAB, bias=False)
        if has_norm:
            nn.init.uniform_(self.norm.weight, 0.5, 1.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.linear(self.norm(x))
        return logits


def served_logits(
    checkpoint: Checkpoint, spec: ExitSpec, tensors: dict[str, torch.Tensor], folder: Path
) -> dict[int, torch.Tensor]:
    """What the engine says at each exit of one and the same state."""
    for file in checkpoint.path.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / EXITS_FILE).write_text(json.dumps(to_json(spec)))
    save_halves(folder / EXITS_WEIGHTS, tensors)
    runner = NativeRunner.load(make_spec(folder, exits=spec))
    return {k: runner.model.decoder.logits(state(), k) for k in spec.layers}


def state() -> torch.Tensor:
    return torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(6))


@pytest.mark.parametrize("has_norm", [True, False])
def test_dssd_heads_say_what_they_said(
    checkpoint: Checkpoint, has_norm: bool, tmp_path: Path
) -> None:
    """`aux_heads.pt` is the state dict of a module list; indices count layers from 0."""
    torch.manual_seed(2)
    heads = nn.ModuleList([TheirHead(has_norm), TheirHead(has_norm)])
    torch.save(heads.state_dict(), tmp_path / "aux_heads.pt")
    (tmp_path / "config.json").write_text(json.dumps({"head_layer_indices": [0, 2]}))
    found = import_exits("dssd", tmp_path, checkpoint)
    spec, tensors = found.spec, found.tensors
    assert (spec.layers, spec.kind, spec.has_norm) == ((1, 3), "head", has_norm)
    folder = tmp_path / "served"
    folder.mkdir()
    said = served_logits(checkpoint, spec, tensors, folder)
    for depth, head in zip((1, 3), heads, strict=True):
        torch.testing.assert_close(said[depth], head(state()), atol=0.01, rtol=0.01)


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_a_linear_head_per_layer_is_read(
    checkpoint: Checkpoint, suffix: str, tmp_path: Path
) -> None:
    tensors = {f"heads.{i}.weight": torch.randn(VOCAB, HIDDEN) for i in range(LAYERS)}
    file = tmp_path / f"heads.{suffix}"
    save_file(tensors, file) if suffix == "safetensors" else torch.save(tensors, file)
    found = import_exits("linear", file, checkpoint)
    assert found.spec == ExitSpec((1, 2, 3), "head", has_norm=False)
    assert torch.equal(found.tensors["exits.2.head.weight"], tensors["heads.1.weight"])
    with pytest.raises(ConfigError, match=r"2 were named, .* holds 4 heads"):
        import_exits("linear", file, checkpoint, (1, 2))


def megatron(root: Path, *, ranks: int, stages: int, **flags: Any) -> dict[int, torch.Tensor]:
    """Write EE-LLM's layout with exits at layers 1 and 3; returns their whole heads by number."""
    torch.manual_seed(4)
    numbers = [1, 3]
    padded = VOCAB + (-VOCAB) % (8 * ranks)
    heads = {n: torch.randn(padded, HIDDEN) for n in numbers}
    norms = {n: torch.rand(HIDDEN) + 0.5 for n in numbers}
    said = argparse.Namespace(
        num_layers=LAYERS,
        exit_layer_nums=numbers,
        untie_exit_output_weights=True,
        params_dtype=torch.float16,
        data_path=None,
        **{"use_exit_norm": True, "use_exit_mlp": False, "pre_exit": False} | flags,
    )
    per_stage = LAYERS // stages
    for stage in range(stages):
        mine = [n for n in numbers if (n - 1) // per_stage == stage]
        for rank in range(ranks):
            encoder = {
                f"layers.{(n - 1) % per_stage}.exit_norm.weight": norms[n]
                for n in mine
                if said.use_exit_norm
            }
            output = {f"{j}.weight": heads[n].chunk(ranks)[rank] for j, n in enumerate(mine)}
            name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if stages > 1 else "")
            folder = root / "iter_0000007" / name
            folder.mkdir(parents=True)
            model = {"language_model": {"encoder": encoder, "exit_output_layer": output}}
            save_rank(said, model, folder / "model_optim_rng.pt")
    (root / "latest_checkpointed_iteration.txt").write_text("7")
    return {n: rms_norm(state(), norms[n], 1e-6) @ heads[n][:VOCAB].T for n in numbers}


def save_rank(said: argparse.Namespace, model: dict[str, Any], file: Path) -> None:
    """As EE-LLM's defaults save it: an enum of Megatron's, the optimizer, all random generators."""
    package, module = types.ModuleType("megatron"), types.ModuleType("megatron.enums")
    kinds = enum.Enum("ModelType", ["encoder_or_decoder"], module="megatron.enums")  # type: ignore[misc]
    vars(module)["ModelType"] = kinds
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    states = {
        "random_rng_state": random.Random(1).getstate(),
        "np_rng_state": np.random.RandomState(1).get_state(),
        "torch_rng_state": torch.Generator().get_state(),
        "rng_tracker_states": {"model-parallel-rng": torch.Generator().get_state()},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "megatron", package)
        patch.setitem(sys.modules, "megatron.enums", module)
        torch.save(
            {
                "args": argparse.Namespace(**vars(said), model_type=kinds(1)),
                "checkpoint_version": 3.0,
                "iteration": 7,
                "model": model,
                "optimizer": {"optimizer": optimizer.state_dict(), "scale": np.float32(2)},
                "opt_param_scheduler": {"max_lr": 1e-4, "num_steps": 2**40},
                "rng_state": [states],
            },
            file,
        )


@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (2, 2)])
def test_ee_llm_exits_say_what_they_said(
    checkpoint: Checkpoint, ranks: int, stages: int, tmp_path: Path
) -> None:
    expected = megatron(tmp_path / "theirs", ranks=ranks, stages=stages)
    found = import_exits("ee-llm", tmp_path / "theirs", checkpoint)
    spec, tensors = found.spec, found.tensors
    assert spec == ExitSpec((1, 3), "head")
    folder = tmp_path / "served"
    folder.mkdir()
    said = served_logits(checkpoint, spec, tensors, folder)
    for depth, logits in expected.items():
        torch.testing.assert_close(said[depth], logits, atol=0.05, rtol=0.01)


def test_an_exit_before_its_layer_is_one_layer_earlier(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Before the first layer there is nothing to leave from."""
    megatron(tmp_path, ranks=1, stages=1, pre_exit=True, use_exit_norm=False)
    found = import_exits("ee-llm", tmp_path, checkpoint)
    assert found.spec == ExitSpec((2,), "head", has_norm=False)
    assert found.tensors.keys() == {"exits.2.head.weight"}


@pytest.mark.parametrize("ranks", [1, 2])
def test_mlp_exits_leave_in_the_middle_of_their_layer(
    checkpoint: Checkpoint, ranks: int, tmp_path: Path
) -> None:
    """Against transformers' own layers, with the exit's MLP in the place of the layer's."""
    megatron(tmp_path / "theirs", ranks=ranks, stages=1, use_exit_mlp=True)
    branches = add_branches(tmp_path / "theirs", checkpoint, ranks)
    found = import_exits("ee-llm", tmp_path / "theirs", checkpoint, out=tmp_path)
    # Layers 1 and 3 are divided: their middles are behind layers 1 and 4 of six.
    assert found.spec == ExitSpec((1, 4), "mlp", has_norm=True, own_head=True)
    folder = Path(found.model)
    (folder / EXITS_FILE).write_text(json.dumps(to_json(found.spec)))
    save_halves(folder / EXITS_WEIGHTS, found.tensors)
    runner = NativeRunner.load(make_spec(folder, exits=found.spec))
    ids = list(range(5, 17))
    (seen,) = run_passes(runner, [ids], (1, 4, LAYERS + 2))
    theirs = AutoModelForCausalLM.from_pretrained(checkpoint.path).eval()
    middles: dict[int, torch.Tensor] = {}
    for number in (1, 3):
        norm = theirs.model.layers[number - 1].post_attention_layernorm
        norm.register_forward_pre_hook(
            lambda _, inputs, number=number: middles.__setitem__(number, inputs[0][0])
        )
    with torch.inference_mode():
        logits = theirs(torch.tensor([ids])).logits[0]
        full = runner.model.decoder.logits(seen.states[LAYERS + 2], LAYERS + 2)
        torch.testing.assert_close(full, logits, atol=0.02, rtol=0.01)
        for depth, number in ((1, 1), (4, 3)):
            mlp, norm, head = branches[number]
            layer = theirs.model.layers[number - 1]
            r = middles[number]
            x = layer.post_attention_layernorm(r)
            gate, up = (mlp[0] @ x.T).T.chunk(2, dim=-1)
            left = r + (mlp[1] @ (nn.functional.silu(gate) * up).T).T
            expected = rms_norm(left, norm, 1e-6) @ head[:VOCAB].T
            said = runner.model.decoder.logits(seen.states[depth], depth)
            torch.testing.assert_close(said, expected, atol=0.1, rtol=0.02)


def test_layers_that_say_that_they_are_all_alike_are_divided(tmp_path: Path) -> None:
    model = read_checkpoint(str(save_model("qwen3", tmp_path / "model")))
    config = json.loads((file := tmp_path / "model" / "config.json").read_text())
    kinds = ["full_attention"] * LAYERS
    file.write_text(json.dumps(config | {"layer_types": kinds, "use_sliding_window": False}))
    made = json.loads((write_split(model, [1, 3], tmp_path / "new") / "config.json").read_text())
    assert made["layer_types"] == [*kinds, *kinds[:2]]
    file.write_text(json.dumps(config | {"layer_types": [*kinds[1:], "sliding_attention"]}))
    with pytest.raises(ConfigError, match="layer_types"):
        write_split(model, [1, 3], tmp_path / "new")


def add_branches(root: Path, checkpoint: Checkpoint, ranks: int) -> dict[int, Any]:
    """Give the exits at layers 1 and 3 MLPs; returns (up, down), norm and head of each."""
    own = load_file(checkpoint.path / "model.safetensors")
    width = 24
    mlps = {
        n: (0.2 * torch.randn(2 * width, HIDDEN), 0.2 * torch.randn(HIDDEN, width)) for n in (1, 3)
    }
    norms, heads = {}, {n: [] for n in (1, 3)}
    for rank in range(ranks):
        file = root / "iter_0000007" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
        data = _load(file)
        model = data["model"]["language_model"]
        for j, (n, (up, down)) in enumerate(mlps.items()):
            at = f"layers.{n - 1}"
            name = f"model.layers.{n - 1}.post_attention_layernorm.weight"
            model["encoder"][f"{at}.post_attention_norm.weight"] = own[name]
            gate_up = [half.chunk(ranks)[rank] for half in up.chunk(2)]
            model["encoder"][f"{at}.mlp.branch.dense_h_to_4h.weight"] = torch.cat(gate_up)
            model["encoder"][f"{at}.mlp.branch.dense_4h_to_h.weight"] = down.chunk(ranks, 1)[rank]
            norms[n] = model["encoder"][f"{at}.exit_norm.weight"]
            heads[n].append(model["exit_output_layer"][f"{j}.weight"])
        plain = {k: v for k, v in vars(data["args"]).items() if not isinstance(v, Unread)}
        save_rank(argparse.Namespace(**plain), data["model"], file.with_name("new"))
        file.with_name("new").replace(file)  # the tensors that were read lie in the old one
    return {n: (mlps[n], norms[n], torch.cat(heads[n])) for n in mlps}


def test_exits_that_are_whole_layers_are_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    megatron(tmp_path, ranks=1, stages=1, use_exit_block=True)
    with pytest.raises(ConfigError, match=r"use_exit_block.*not supported"):
        import_exits("ee-llm", tmp_path, checkpoint)


class Code:
    """What a pickled file may hold and nobody asked for: a call, when it is read."""

    def __init__(self, call: Callable[..., object], *words: object) -> None:
        self._made = (call, words)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self._made


def save_with(value: object, root: Path) -> None:
    """A checkpoint of Megatron whose optimizer is something else."""
    folder = root / "mp_rank_00"
    folder.mkdir()
    said = argparse.Namespace(num_layers=LAYERS, exit_layer_nums=[1])
    torch.save({"args": said, "model": {}, "optimizer": value}, folder / "model_optim_rng.pt")


@pytest.mark.parametrize("call", [os.mkdir, exec, Path.mkdir, pickle.loads])
def test_files_that_hold_code_are_refused(
    call: Callable[..., object], checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Whatever it calls, and wherever in the file it stands."""
    trace = tmp_path / "it ran"
    words: object = {
        exec: f"import os; os.mkdir({str(trace)!r})",
        pickle.loads: pickle.dumps(Code(os.mkdir, str(trace))),
        Path.mkdir: trace,
    }.get(call, str(trace))
    torch.save({"0.weight": Code(call, words)}, tmp_path / "heads.pt")
    with pytest.raises(ConfigError, match="tensors alone"):
        import_exits("linear", tmp_path / "heads.pt", checkpoint)
    save_with(Code(call, words), tmp_path)
    with pytest.raises(ConfigError, match="without running code"):
        import_exits("ee-llm", tmp_path, checkpoint)
    assert not trace.exists()


def test_what_calls_itself_megatrons_or_numpys_is_not_called(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where such a module is installed, and its function has that name."""
    called: list[object] = []

    def make(*words: object) -> object:
        called.append(words)
        return {}

    make.__module__, make.__qualname__ = "megatron.enums", "make"
    module = types.ModuleType("megatron.enums")
    vars(module)["make"] = make
    monkeypatch.setitem(sys.modules, "megatron", types.ModuleType("megatron"))
    monkeypatch.setitem(sys.modules, "megatron.enums", module)
    save_with(
        [Code(make, "x"), Code(np.memmap, str(tmp_path / "made"), "u1", "w+", 0, 4)], tmp_path
    )
    found = _load(tmp_path / "mp_rank_00" / "model_optim_rng.pt")
    assert vars(found["args"]) == {"num_layers": LAYERS, "exit_layer_nums": [1]}
    assert not called and not (tmp_path / "made").exists()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x80\x02}.", b"junk"])
def test_damaged_files_are_refused(content: bytes, checkpoint: Checkpoint, tmp_path: Path) -> None:
    save_with({}, tmp_path)
    (tmp_path / "mp_rank_00" / "model_optim_rng.pt").write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be read"):
        import_exits("ee-llm", tmp_path, checkpoint)
    (tmp_path / "heads.pt").write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be read"):
        import_exits("linear", tmp_path / "heads.pt", checkpoint)


def test_a_stage_whose_file_is_not_there(checkpoint: Checkpoint, tmp_path: Path) -> None:
    megatron(tmp_path, ranks=1, stages=2)
    shutil.rmtree(tmp_path / "iter_0000007" / "mp_rank_00_000")
    with pytest.raises(ConfigError, match="lacks the file of pipeline stage 0, which has"):
        import_exits("ee-llm", tmp_path, checkpoint)


def test_args_that_say_nothing_of_the_exits_are_refused(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = tmp_path / "mp_rank_00"
    folder.mkdir()
    torch.save({"args": argparse.Namespace(), "model": {}}, folder / "model_optim_rng.pt")
    with pytest.raises(ConfigError, match="do not say num_layers"):
        import_exits("ee-llm", tmp_path, checkpoint)


def test_heads_of_another_model_are_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    torch.save([torch.randn(VOCAB, HIDDEN + 1)], tmp_path / "heads.pt")
    with pytest.raises(ConfigError, match="hidden size of"):
        import_exits("linear", tmp_path / "heads.pt", checkpoint)
    heads = {"0.weight": torch.randn(VOCAB, HIDDEN), "0.norm.weight": torch.tensor(1.0)}
    torch.save(heads, tmp_path / "heads.pt")
    with pytest.raises(ConfigError, match="hidden size of"):
        import_exits("linear", tmp_path / "heads.pt", checkpoint)
    torch.save([torch.randn(VOCAB - 1, HIDDEN)], tmp_path / "heads.pt")
    with pytest.raises(ConfigError, match="vocabulary of"):
        import_exits("linear", tmp_path / "heads.pt", checkpoint)


def test_layerskip_is_a_preset_of_few_exits(checkpoint: Checkpoint) -> None:
    found = import_exits("layerskip", Path(), checkpoint)
    assert (found.spec, found.tensors) == (ExitSpec((1, 2, 3), "shared"), {})
    assert import_exits("layerskip", Path(), checkpoint, (2,)).spec.layers == (2,)
