"""Prompts and answers that end exactly where the context does: prefill, hand-off and decode."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quadriga.clock import SystemClock
from quadriga.core.output import EngineOutput
from quadriga.core.replica import Reservation
from quadriga.core.request import FinishReason, SequenceState
from quadriga.engine.model_runner import NativeRunner
from quadriga.scheduling.prefill_loop import PrefillOutput
from quadriga.scheduling.sequence import RunningSequence
from quadriga.scheduling.slots import SlotTable
from tests.equivalence.models import build, make_spec, make_state, save
from tests.sequences import make_decode_loop, make_prefill_loop, make_slots

CONTEXT = 96
CHUNK = 32


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama")


@pytest.fixture(scope="module")
def runner(model: Any, tmp_path_factory: pytest.TempPathFactory) -> NativeRunner:
    return NativeRunner.load(make_spec(save(model, tmp_path_factory.mktemp("llama")), num_rows=4))


def slots(runner: NativeRunner, reservation: Reservation = "longest") -> SlotTable:
    return make_slots(2, CONTEXT, CONTEXT, reservation=reservation)


def prefilled(
    runner: NativeRunner, state: SequenceState
) -> tuple[EngineOutput, torch.Tensor | None]:
    """Compute a prompt in chunks; returns its output, and the KV if the sequence goes on."""
    loop = make_prefill_loop(runner, slots(runner), SystemClock(), CHUNK)
    loop.submit(RunningSequence(state))
    outputs: list[PrefillOutput] = []
    while not outputs:
        outputs = loop.step()
    ((_, told),) = outputs
    assert told is not None
    slot = loop.slots.get(state.sequence_id)
    kv = None
    if slot is not None:
        kv = runner.read_kv(slot.row, 0, runner.num_layers, 0, len(state.prompt_ids))
        loop.release(state.sequence_id)
    loop.check()
    assert not loop.slots.num_held
    return told, kv


def answer(model: Any, prompt: list[int], count: int) -> list[int]:
    """What the model itself says, greedily, one whole pass a token."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("reservation", ["longest", "used"])
@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(95, 1), (94, 2), (90, 6), (64, 32)])
def test_an_answer_that_fills_the_context(
    runner: NativeRunner, model: Any, num_prompt: int, max_tokens: int, reservation: Reservation
) -> None:
    prompt = torch.randint(
        3, 130, (num_prompt,), generator=torch.Generator().manual_seed(num_prompt)
    )
    state = make_state(prompt.tolist(), max_tokens=max_tokens)
    told, kv = prefilled(runner, state)
    if max_tokens == 1:
        assert told.finish is FinishReason.LENGTH
        assert kv is None
    else:
        assert kv is not None
        loop = make_decode_loop(runner, slots(runner, reservation), SystemClock())
        slot = loop.reserve("s", state.max_total_tokens, state.num_tokens)
        runner.write_kv(slot.row, 0, 0, kv)
        loop.join(state)
        finish, paused = None, 0
        while finish is None:
            if len(state.output_ids) in (max_tokens // 2, max_tokens - 1):
                paused += loop.preemption.pause("s")  # it comes back by itself
            for _, emission in loop.step():
                finish = emission.finish
        assert finish is FinishReason.LENGTH
        assert loop.preemption.num_resumes == paused > 0
        loop.check()
        assert not loop.slots.num_held
    assert state.output_ids == answer(model, state.prompt_ids, max_tokens)


def test_a_prompt_that_fills_the_context_is_scored_to_its_end(
    runner: NativeRunner, model: Any
) -> None:
    prompt = torch.randint(3, 130, (CONTEXT,), generator=torch.Generator().manual_seed(5))
    state = make_state(prompt.tolist(), max_tokens=0, num_logprobs=2, num_prompt_logprobs=2)
    told, kv = prefilled(runner, state)
    assert (told.finish, kv, state.output_ids) == (FinishReason.LENGTH, None, [])
    assert told.prompt_logprobs is not None
    assert [t.token_id for t in told.prompt_logprobs] == prompt.tolist()
    with torch.no_grad():
        logprobs = model(prompt[None]).logits[0].log_softmax(-1)
    assert told.prompt_logprobs[0].logprob is None
    for i, told_one in enumerate(told.prompt_logprobs[1:]):
        assert told_one.logprob == pytest.approx(float(logprobs[i, prompt[i + 1]]), abs=1e-4)
        assert [t for t, _ in told_one.top] == logprobs[i].topk(2).indices.tolist()
