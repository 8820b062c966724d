"""The stored checkpoints: plain transformers loads them and says what the trained model says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from quadriga.tasks import TASKS, check, make_example
from quadriga.training.checkpoint_io import load_checkpoint, save_checkpoint
from quadriga.training.cli import ASSETS, main
from quadriga.training.generate import greedy
from quadriga.training.model import EarlyExitLlama
from quadriga.training.recipe.family import FAMILY
from quadriga.training.tokenizer import build_tokenizer
from tests.unit.conftest import Refused

MAX_FAMILY_BYTES = 40e6
MIN_RIGHT = {"quadriga-s": 0.9, "quadriga-l": 0.9}  # of short answers


@pytest.mark.parametrize("name", FAMILY)
def test_transformers_says_what_we_say(name: str) -> None:
    folder = ASSETS / name
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    ours = load_checkpoint(folder)
    assert theirs.dtype == torch.float32
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for task in TASKS:
        example = make_example(task, seed=31, index=1)
        tokens = tokenizer(example.text + example.answer, return_tensors="pt").input_ids
        length = tokens.shape[1]
        every = torch.arange(length)
        with torch.no_grad():
            expected = theirs(tokens).logits[0]
            states = ours(tokens[0], every, [(1, length)], every)
            torch.testing.assert_close(ours.logits(states[-1], 2), expected, rtol=1e-3, atol=2e-3)
        prompt = tokenizer(example.text, return_tensors="pt")
        answer = theirs.generate(**prompt, max_new_tokens=16)[0, prompt.input_ids.shape[1] :]
        mine = greedy(ours, prompt.input_ids.tolist(), max_new_tokens=16)[0]
        assert [token for token in answer.tolist() if token != tokenizer.eos_token_id] == mine


@pytest.mark.parametrize("name", FAMILY)
def test_the_exits_are_described_and_stored(name: str) -> None:
    folder = ASSETS / name
    described = json.loads((folder / "exits.json").read_text())
    assert described["kind"] == "norm"
    assert described["layers"] == list(FAMILY[name].shape.exits)
    assert 0 < described["threshold"] < 1
    weights = load_file(folder / "exits.safetensors")
    assert set(weights) == {f"exits.{layer}.norm.weight" for layer in described["layers"]}
    assert all(weight.dtype == torch.float16 for weight in weights.values())


def test_the_family_is_small() -> None:
    files = [path for name in FAMILY for path in (ASSETS / name).iterdir()]
    size = sum(path.stat().st_size for path in files)
    assert size <= MAX_FAMILY_BYTES


@pytest.mark.parametrize("name", FAMILY)
def test_the_stored_models_answer(name: str) -> None:
    model, tokenizer = load_checkpoint(ASSETS / name), build_tokenizer()
    examples = [make_example(task, seed=77, index=index) for task in TASKS for index in range(3)]
    prompts = [tokenizer.encode(example.text).ids for example in examples]
    answers = greedy(model, prompts, max_new_tokens=120)
    right = [
        check(example.task, example.prompt, tokenizer.decode(answer))
        for example, answer in zip(examples, answers, strict=True)
        if len(tokenizer.encode(example.answer).ids) < 120
    ]
    assert sum(right) >= MIN_RIGHT[name] * len(right), f"{sum(right)} of {len(right)}"


def test_a_checkpoint_survives_saving_and_replaces_an_older_one(tmp_path: Path) -> None:
    member = FAMILY["quadriga-s"]
    model = EarlyExitLlama(member.shape, build_tokenizer().get_vocab_size(), seed=3)
    folder = tmp_path / member.name
    folder.mkdir()
    (folder / "stale").touch()
    save_checkpoint(model, member, folder, facts={"steps": 1, "tokens": 2})
    assert not (folder / "stale").exists()
    loaded = load_checkpoint(folder)
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight.half().float()), name


def test_a_foreign_vocabulary_is_refused(tmp_path: Path) -> None:
    for path in (ASSETS / "quadriga-s").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text()) | {"vocab_size": 7}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="vocab_size is 7"):
        load_checkpoint(tmp_path)


def test_training_needs_a_budget(refused: Refused) -> None:
    refused(main, ["train", "--model", "quadriga-s"], "budget")
