"""Prefill and decode apart, through the actors only; a test plays the ingress."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import ray

from actors.rpc.lookup import get_actor, scheduler_name
from quadriga.core.request import FinishReason
from quadriga.core.routing import AdmitRequest, ClusterView
from quadriga.errors import DeadlineExceeded, Overloaded, UnknownModel
from tests.ray.apps import App
from tests.ray.ingress import Stream, call
from tests.ray.moves import held

PREFILL_STEP_S = 0.6
"""Of each chunk of a prompt, at least, where its parts are looked at."""
NUM_LONG = 1_900
"""Tokens of a stream that does not end by itself while a test lasts: 28 s at `steady-15ms`."""


def prompts(count: int, *, seed: int = 0, longest: int = 120) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(5, 500) for _ in range(rng.randrange(1, longest))] for _ in range(count)]


@pytest.fixture(scope="module")
def reference() -> object:
    """The same weights in `transformers`."""
    import torch
    from transformers import AutoModelForCausalLM

    from quadriga.checkpoint.folder import locate

    model: Any = AutoModelForCausalLM.from_pretrained(locate("quadriga-s"), dtype=torch.float32)

    def generate(prompt: list[int], num_tokens: int) -> list[int]:
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        tokens: list[int] = output[0, len(prompt) :].tolist()
        return tokens

    return generate


def test_greedy_tokens_equal_transformers(app: App, reference: object) -> None:
    """Through one prefill and two decode replicas, twelve sequences at once."""
    assert callable(reference)
    ingress = app.ingress()
    # End tokens are banned on both sides, so that every stream has the same length.
    streams = [ingress.submit(p, 24, ignore_eos=False, min_tokens=24) for p in prompts(12)]
    ingress.finish(*streams)
    for stream in streams:
        assert stream.error is None
        assert stream.finish is FinishReason.LENGTH
        assert stream.token_ids == reference(stream.state.prompt_ids, 24)
        assert list(dict.fromkeys(stream.epochs)) == sorted({0, 1, *stream.epochs}), "in order"
    assert {s.replica for s in streams} == set(app.replicas("decode")), "both were used"
    app.until_idle()


def test_kv_is_on_its_way_before_the_first_token(app: App) -> None:
    """Placement by forecast does not wait for the end of the prompt."""
    view: dict[str, Any] = call(scheduler_name(app.name), "operators_view", timeout_s=10.0)
    assert view["placement"] == "ares"

    def watch(actor: Any) -> None:
        store, actor.parts_s = actor.receiver.store, []

        def noted(*args: Any) -> None:
            actor.parts_s.append(time.monotonic())
            store(*args)

        actor.receiver.store = noted

    def forget(actor: Any) -> list[float]:
        del actor.receiver.store
        return list(actor.parts_s)

    decodes = [get_actor(name) for name in app.replicas("decode")]
    ray.get([actor.__ray_call__.remote(watch) for actor in decodes], timeout=30)
    ingress = app.ingress()
    try:
        with held(app.replicas("prefill"), PREFILL_STEP_S):
            stream = ingress.submit([5 + i % 400 for i in range(1_200)], 12)
            ingress.finish(stream)
    finally:
        found = ray.get([actor.__ray_call__.remote(forget) for actor in decodes], timeout=30)
    assert stream.error is None and stream.first_token_s is not None
    first_part_s = min(at_s for parts in found for at_s in parts)
    assert first_part_s < stream.first_token_s - PREFILL_STEP_S / 2.0
    app.until_idle()


def test_prompts_of_several_chunks(app: App) -> None:
    """Parts of layer groups × chunks are put together in the right places."""
    ingress = app.ingress()
    rng = random.Random(5)
    prompt = [rng.randrange(5, 500) for _ in range(700)]
    alone = ingress.submit(prompt, 12)
    ingress.finish(alone)
    crowd = [ingress.submit(prompt if i == 3 else p, 12) for i, p in enumerate(prompts(8, seed=2))]
    ingress.finish(*crowd)
    assert crowd[3].token_ids == alone.token_ids
    app.until_idle()


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_sequences_that_end_in_prefill(app: App, max_tokens: int) -> None:
    ingress = app.ingress()
    stream = ingress.submit([5, 6, 7], max_tokens, num_prompt_logprobs=0)
    ingress.finish(stream)
    assert stream.finish is FinishReason.LENGTH
    assert len(stream.token_ids) == max_tokens
    assert stream.moved_to == []
    app.until_idle()


def test_cancelling_at_any_moment_frees_everything(app: App) -> None:
    """Queued, computing, reserving, copying, committing, running: delays of 0 to 60 ms."""
    ingress = app.ingress()
    rng = random.Random(7)
    for prompt in prompts(40, seed=8, longest=400):
        stream = ingress.submit(prompt, min(NUM_LONG, 2_000 - len(prompt)))
        pause_until = time.monotonic() + rng.random() * 0.06
        while time.monotonic() < pause_until:
            ingress.poll(0.0)
        ingress.cancel(stream)
    app.until_idle(5.0)


def test_cancelling_every_stage_of_a_full_service(full: App) -> None:
    """Two run, others wait for a slot with their rows held, the rest is queued."""
    ingress = full.ingress()
    streams = [ingress.submit([5] * 50, NUM_LONG) for _ in range(3)]
    ingress.until(lambda: all(s.first_token_s is not None for s in streams))
    streams += [ingress.submit([5] * 50, NUM_LONG) for _ in range(4)]
    ingress.until(lambda: sum(s.first_token_s is not None for s in streams) >= 5)
    loads = full.loads()
    assert sum(running for running, *_ in loads) >= 5
    ingress.cancel(*streams)
    full.until_idle()


def test_first_tokens_do_not_wait_for_a_slot(full: App) -> None:
    """All decode slots are taken: the first token goes out all the same."""
    ingress = full.ingress()
    holders = [ingress.submit([5] * 20, NUM_LONG) for _ in range(2)]
    ingress.until(lambda: all(len(s.tokens) > 3 for s in holders))
    waiting = ingress.submit([6] * 20, 4)
    ingress.until(lambda: waiting.first_token_s is not None, 10.0)
    assert len(waiting.tokens) == 1
    assert not any(s.is_over for s in holders)
    ingress.cancel(holders[0])
    ingress.finish(waiting, timeout_s=10.0)
    assert len(waiting.token_ids) == 4
    ingress.cancel(holders[1])
    full.until_idle()


def test_a_deadline_ends_the_wait_for_a_slot(full: App) -> None:
    ingress = full.ingress()
    holders = [ingress.submit([5] * 20, NUM_LONG) for _ in range(2)]
    ingress.until(lambda: all(len(s.tokens) > 3 for s in holders))
    late = ingress.submit([6] * 20, 4, deadline_s=5.0)
    ingress.finish(late, timeout_s=15.0)
    assert isinstance(late.error, DeadlineExceeded)
    assert len(late.tokens) == 1
    ingress.cancel(*holders)
    full.until_idle()


def test_overload_says_when_to_come_back(full: App) -> None:
    ingress = full.ingress()
    streams: list[Stream] = []

    def flood() -> None:
        while len(streams) < 40:
            streams.append(ingress.submit([5] * 50, NUM_LONG))

    with pytest.raises(Overloaded) as refusal:
        flood()
    assert refusal.value.retry_after_s is not None
    assert 0 < refusal.value.retry_after_s <= 60
    assert len(streams) >= 4, "the queue itself must be usable"
    ingress.cancel(*streams)
    full.until_idle()


def view_of(app: App) -> ClusterView:
    view: ClusterView = call(scheduler_name(app.name), "directory")
    return view


def test_admitted_requests_finish_under_load(full: App) -> None:
    ingress = full.ingress()
    # What the tests before have cancelled is in the scheduler's view until the next reports.
    ingress.until(lambda: not any(s.num_waiting for s in view_of(full).snapshots))
    streams = [ingress.submit([5 + i] * 30, 20) for i in range(3)]
    ingress.until(lambda: all(s.first_token_s is not None for s in streams))
    streams += [ingress.submit([8 + i] * 30, 20) for i in range(4)]
    ingress.finish(*streams)
    assert [len(s.token_ids) for s in streams] == [20] * 7
    assert not any(s.error for s in streams)
    full.until_idle()


def test_a_pace_is_kept(full: App) -> None:
    """`steady-15ms`: a step of one short sequence takes 15 ms and a little."""
    ingress = full.ingress()
    # From before the first token: this process may stand still, and see all of them at once.
    began_s = time.monotonic()
    stream = ingress.submit([5] * 10, 81)
    ingress.finish(stream)
    took_s = time.monotonic() - began_s
    assert took_s > 80 * 0.015


def test_requests_of_a_silent_ingress_are_cancelled(full: App) -> None:
    """Its orphan time is 8 s; the application lives on by another ingress's signs of life."""
    silent = full.ingress()
    silent.submit([5] * 20, NUM_LONG)
    silent.submit([5] * 20, NUM_LONG)
    other = full.ingress()
    other.until(lambda: all(load[0] == 0 for load in full.loads()), 18.0)
    full.until_idle()


def test_unknown_models_and_missing_replicas(app: App) -> None:
    scheduler = scheduler_name(app.name)
    request = AdmitRequest("s", "nobody", 3, 3, 0, time.time() + 9)
    with pytest.raises(UnknownModel, match="quadriga-s"):
        call(scheduler, "admit", [request])
