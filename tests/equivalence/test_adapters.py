"""A LoRA adapter computes what the model computes with it merged, whatever is in its batch."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from loadgen.bench.adapters import write_adapter
from quadriga import LLM, SamplingParams
from quadriga.catalogue.adapters import read_adapters
from quadriga.checkpoint.folder import read_checkpoint
from quadriga.engine.model_runner import NativeRunner
from quadriga.errors import UnknownModel
from quadriga.interfaces import PrefillChunk
from tests.equivalence.models import VOCAB, build, make_spec, make_state, save
from tests.lora import merged

LENGTH, DECODED = 30, 5
TOLERANCE = 1e-4
NAMES = ("", "all", "some", "scaled")
VARIANTS = ("llama", "llama-tied-biases", "qwen3", "opt-pre-norm", "opt-post-norm-projected")


def folder_of(variant: str, path: Path) -> tuple[Any, Path]:
    """A model, and a folder with three adapters of it."""
    model, folder = build(variant), path / "adapters"
    write_adapter(folder / "all", model, seed=1, strength=0.1)
    write_adapter(folder / "some", model, seed=2, targets=("q_proj", "v_proj"))
    write_adapter(folder / "scaled", model, seed=3, strength=0.05, use_rslora=True)
    return model, folder


def logprobs(
    runner: Any, names: tuple[str, ...], ids: torch.Tensor, size: int = VOCAB
) -> list[torch.Tensor]:
    """Of each row's tokens, all rows together: prompts in uneven chunks, then decode steps."""
    states = [
        make_state(row[: LENGTH - DECODED].tolist(), num_logprobs=size, num_prompt_logprobs=size)
        for row in ids
    ]
    got: list[list[dict[int, float]]] = [[] for _ in states]
    for row, (state, name) in enumerate(zip(states, names, strict=True)):
        state.adapter = name
        runner.attach(row, state)
    for start, stop in ((0, 7), (7, LENGTH - DECODED)):
        results = runner.prefill(
            [
                PrefillChunk(row, s.prompt_ids[start:stop], start, stop == LENGTH - DECODED)
                for row, s in enumerate(states)
            ]
        )
    for row, token in enumerate(results):
        got[row] += [dict(entry.top) for entry in token.prompt_logprobs[1:]]
        got[row].append(dict(token.logprob.top))
    for step in range(LENGTH - DECODED, LENGTH):
        for state, row_ids in zip(states, ids, strict=True):
            state.output_ids.append(int(row_ids[step]))
        for row, token in enumerate(runner.decode(list(range(len(states))))):
            got[row].append(dict(token.logprob.top))
    for row in range(len(states)):
        runner.detach(row)
    return [torch.tensor([[at[t] for t in range(size)] for at in rows]) for rows in got]


@pytest.mark.parametrize("mode", ["off", "wait"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_mixed_batch_equals_merged_weights(variant: str, mode: str, tmp_path: Path) -> None:
    model, folder = folder_of(variant, tmp_path)
    spec = make_spec(save(model, tmp_path), compile=mode, adapters=read_adapters(folder))
    runner = NativeRunner.load(spec)
    torch.manual_seed(4)
    ids = torch.randint(3, VOCAB, (1, LENGTH)).expand(len(NAMES), -1)
    mixed = logprobs(runner, NAMES, ids)
    for name, rows in zip(NAMES, mixed, strict=True):
        whole = merged(model, folder / name) if name else model
        with torch.inference_mode():
            exact = torch.log_softmax(whole(ids[:1]).logits[0], dim=-1)
        assert (rows - exact).abs().max() < TOLERANCE, name
    for i, name in enumerate(NAMES[1:], 1):
        assert (mixed[i] - mixed[0]).abs().max() > 0.1, f"{name} must change the answer"
    # What projects embeddings in is plain torch, and depends on the batch with or without adapters.
    if mode == "wait" and variant != "opt-post-norm-projected":
        for name, rows in zip(NAMES, mixed, strict=True):
            alone = logprobs(runner, (name,), ids[:1])[0]
            assert torch.equal(alone, rows), "a row's result depends on its neighbours"


def test_a_row_forgets_its_adapter(tmp_path: Path) -> None:
    model, folder = folder_of("llama", tmp_path)
    spec = make_spec(save(model, tmp_path), adapters=read_adapters(folder))
    runner, plain = NativeRunner.load(spec), NativeRunner.load(make_spec(tmp_path))
    ids = torch.arange(3, 3 + LENGTH)[None]
    wanted = logprobs(plain, ("",), ids)[0]
    logprobs(runner, ("all",), ids)
    assert torch.equal(logprobs(runner, ("",), ids)[0], wanted)


def test_a_suspended_row_goes_on_with_its_adapter_elsewhere(tmp_path: Path) -> None:
    """Pausing, hand-off and migration are all this: KV of a row, and `resume`."""
    model, folder = folder_of("llama", tmp_path)
    spec = make_spec(save(model, tmp_path), adapters=read_adapters(folder))
    there, here = NativeRunner.load(spec), NativeRunner.load(spec)
    prompt = list(range(3, 30))
    stays, goes = (make_state(prompt, max_tokens=8) for _ in range(2))
    for row, state in enumerate((stays, goes)):
        state.adapter = "some"
        there.attach(row, state)
    for row, state in enumerate((stays, goes)):
        token = there.prefill([PrefillChunk(row, prompt, 0, True)])[0]
        assert token is not None
        state.output_ids.append(token.token_id)
    here.restore(5, goes, there.suspend(1))
    for _ in range(6):
        stays.output_ids.append(there.decode([0])[0].token_id)
        goes.output_ids.append(here.decode([5])[0].token_id)
    assert goes.output_ids == stays.output_ids
    unknown = make_state(prompt)
    unknown.adapter = "gone"
    with pytest.raises(UnknownModel, match="'gone' is not loaded here"):
        here.attach(1, unknown)
    here.attach(1, make_state(prompt))  # the row is still free


@pytest.fixture(scope="module")
def adapted_s(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Adapters of quadriga-s, and a checkpoint of it with one of them merged; exits beside both."""
    path = tmp_path_factory.mktemp("adapted")
    base = read_checkpoint("quadriga-s").path
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    folder = write_adapter(path / "adapters" / "mine", model, strength=0.05).parent
    whole = path / "whole"
    shutil.copytree(base, whole)
    save(merged(model, folder / "mine"), whole)
    for name in ("config.json", "generation_config.json"):
        shutil.copy(base / name, whole / name)
    return folder, whole


def test_early_exits_take_adapters_along(adapted_s: tuple[Path, Path]) -> None:
    """Where tokens leave early, alone or beside the base model's: the same tokens and depths."""
    settings: dict[str, Any] = {
        "deterministic": True,
        "exits": {"threshold": 0.6},
        "engine.compile": "wait",
    }
    prompts = ["Sort: 42 7 19 3 88\n", "Count from 3 to 20.\n"]
    greedy = SamplingParams(24, temperature=0.0)
    with closing(LLM("quadriga-s", adapters=str(adapted_s[0]), **settings)) as llm:
        alone = llm.generate(prompts, greedy, progress=False, adapter="mine")
        beside = llm.stream(prompts, greedy)
        next(beside)
        again = llm.generate(prompts, greedy, progress=False, adapter="mine")
        beside.close()
    assert min(layer for output in alone for layer in output.exit_layers) < 8
    for first, second in zip(alone, again, strict=True):
        assert (first.token_ids, first.exit_layers) == (second.token_ids, second.exit_layers)


def test_drafts_and_prefixes_compose_with_adapters(adapted_s: tuple[Path, Path]) -> None:
    """The tokens of merged weights with the same exit heads; and the base model's are its own."""
    folder, whole = adapted_s
    exits = {"mode": "lossless"}
    settings: dict[str, Any] = {"deterministic": True, "exits": exits, "engine.compile": "wait"}
    prompts = ["Sort: 42 7 19 3 88 " * 30 + "\n", "Count from 3 to 20.\n"]
    greedy = SamplingParams(24, temperature=0.0)

    def answers(llm: LLM, **options: Any) -> list[Any]:
        return llm.generate(prompts, greedy, progress=False, **options)

    exact, alone = LLM(str(whole), **settings), LLM("quadriga-s", **settings)
    with closing(exact), closing(alone):
        wanted, plain = answers(exact), answers(alone)
    with closing(LLM("quadriga-s", adapters=str(folder), **settings)) as llm:
        before = answers(llm)
        mine = answers(llm, adapter="mine")
        again = answers(llm, adapter="mine")
        with pytest.raises(UnknownModel, match="loaded: mine"):
            answers(llm, adapter="other")
    assert [o.token_ids for o in before] == [o.token_ids for o in plain]
    for got in (mine, again):
        assert [o.token_ids for o in got] == [o.token_ids for o in wanted]
    assert mine[0].token_ids != plain[0].token_ids
    assert mine[0].cached_tokens == 0, "the base model's prefix is another"
    assert again[0].cached_tokens > 0


def test_layers_that_come_later_have_their_adapters(adapted_s: tuple[Path, Path]) -> None:
    path, exits = read_checkpoint("quadriga-s").path, read_checkpoint("quadriga-s").exits
    options: dict[str, Any] = {
        "adapters": read_adapters(adapted_s[0]),
        "exit_plan": exits,
        "row_capacity_tokens": 64,
    }
    grown = NativeRunner.load(make_spec(path, depth=4, exits=exits.cut(4), **options))
    with grown.prepare_depth(8) as prepared:
        grown.take_depth(prepared)
    whole = NativeRunner.load(make_spec(path, exits=exits, **options))
    size = whole.spec.checkpoint.vocab_size
    ids = torch.randint(3, VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    found, wanted, plain = (
        logprobs(runner, (name,), ids, size)[0]
        for runner, name in ((grown, "mine"), (whole, "mine"), (whole, ""))
    )
    assert torch.equal(found, wanted)
    assert not torch.equal(found, plain)
