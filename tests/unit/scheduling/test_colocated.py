"""Both loops over one runner's rows: nobody's KV is mixed up, and every slot is given back."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quadriga.checkpoint.folder import read_checkpoint
from quadriga.clock import ManualClock
from quadriga.config.engine_spec import EngineSpec
from quadriga.core.output import EngineOutput
from quadriga.core.request import FinishReason, SamplingParams, SequenceState
from quadriga.errors import InvariantViolation
from quadriga.interrupts import held_back
from quadriga.scheduling.colocated import ColocatedLoop
from quadriga.scheduling.decode_batch import DecodeBatch
from quadriga.scheduling.decode_loop import DecodeLoop
from quadriga.scheduling.prefill_loop import PrefillLoop
from quadriga.scheduling.slots import SlotTable
from tests.fake_runner import EOS, FakeRunner, expected_output


def spec_of(runner: FakeRunner, **changes: int) -> EngineSpec:
    spec = EngineSpec(
        checkpoint=replace(read_checkpoint("quadriga-s"), eos_token_ids=(EOS,)),
        depth=runner.num_layers,
        device="cpu",
        dtype="float32",
        threads=1,
        compile="off",
        cache_dir=Path(),
        num_rows=runner.num_rows,
        row_capacity_tokens=runner.row_capacity_tokens,
        kv_capacity_tokens=runner.num_rows * runner.row_capacity_tokens,
    )
    return replace(spec, **changes)  # type: ignore[arg-type]


def state_of(name: str, prompt: Sequence[int], max_tokens: int, priority: int = 0) -> SequenceState:
    sampling = SamplingParams(max_tokens, temperature=0.0)
    return SequenceState(
        name, name, "m", list(prompt), sampling, "", 0.0, float("inf"), priority=priority
    )


def read(said: Sequence[EngineOutput]) -> dict[str, list[int]]:
    """Tokens by sequence, put together by index; a gap or a second end fails."""
    tokens: dict[str, list[int]] = {}
    ended: set[str] = set()
    for emission in said:
        mine = tokens.setdefault(emission.sequence_id, [])
        assert emission.first_index == len(mine) and emission.sequence_id not in ended
        mine += emission.token_ids
        if emission.finish is not None:
            ended.add(emission.sequence_id)
    assert ended == tokens.keys()
    return tokens


@pytest.mark.parametrize("reservation", ["longest", "used"])
@pytest.mark.parametrize("seed", range(4))
def test_every_sequence_says_what_it_says_alone(reservation: str, seed: int) -> None:
    rng = random.Random(seed)
    runner = FakeRunner(rng.randint(1, 5), row_capacity_tokens=160)
    loop = ColocatedLoop(
        runner,
        spec_of(runner, kv_capacity_tokens=rng.randint(160, 400)),
        clock=ManualClock(),
        chunk_tokens=rng.randint(1, 40),
        reservation=reservation,  # type: ignore[arg-type]
    )
    states = [
        state_of(str(i), [rng.randrange(50) for _ in range(rng.randint(1, 60))], rng.randint(1, 90))
        for i in range(20)
    ]
    wanted = {s.sequence_id: expected_output(s.prompt_ids, s.sampling.max_tokens) for s in states}
    said = []
    for news in loop.run(states):
        said += news
        loop.check()
    assert read(said) == wanted
    assert runner.attached == {} and loop.decode.slots.num_held == 0
    assert (
        reservation == "longest"
        or loop.decode.preemption.num_pauses == loop.decode.preemption.num_resumes
    )


def test_a_replica_computes_chunks_and_steps_in_turn() -> None:
    """Between two tokens of an answer lies one chunk of another's prompt, however long that is."""
    runner = FakeRunner(2)
    spec = spec_of(runner, kv_capacity_tokens=100)
    loop = ColocatedLoop(runner, spec, clock=ManualClock(), chunk_tokens=4)
    loop.submit(state_of("first", [5], 40))
    ((_, output),) = loop.step_prompts()
    assert output is not None
    said = [output]
    loop.submit(state_of("long", list(range(1, 33)), 4))
    loop.submit(state_of("waits for a row", [7, 8], 3))
    loop.submit(state_of("waits for all the others", [9], 80))
    order = []
    while loop.has_work:
        done = loop.step_prompts()
        order += [f"chunk {sequence.state.sequence_id}" for sequence, _ in done]
        said += [o for _, o in done if o is not None]
        news = [emission for _, emission in loop.decode.step()]
        order += [e.sequence_id for e in news]
        said += news
        loop.check()
    assert order.index("chunk long") == 7, "a step of the first for each of its chunks"
    assert order[:7] == ["first"] * 7
    assert read(said) == {
        "first": expected_output([5], 40),
        "long": expected_output(list(range(1, 33)), 4),
        "waits for a row": expected_output([7, 8], 3),
        "waits for all the others": expected_output([9], 80),
    }
    assert runner.attached == {} and loop.decode.slots.num_held == 0


def test_two_runs_share_the_batch_and_each_reads_its_own() -> None:
    runner = FakeRunner(3)
    loop = ColocatedLoop(runner, spec_of(runner), clock=ManualClock())
    prompts = {name: [[i, 7, ord(name)] for i in range(5)] for name in "ab"}
    runs = {
        name: loop.run([state_of(f"{name}{i}", p, 12) for i, p in enumerate(prompts[name])])
        for name in "ab"
    }
    said: dict[str, list[EngineOutput]] = {"a": [], "b": []}
    while runs:
        for name in list(runs):
            news = next(runs[name], None)
            if news is None:
                del runs[name]
            else:
                said[name] += news
    for name in "ab":
        assert read(said[name]) == {
            f"{name}{i}": expected_output(p, 12) for i, p in enumerate(prompts[name])
        }


def test_who_stops_reading_gives_everything_back() -> None:
    runner = FakeRunner(2)
    loop = ColocatedLoop(runner, spec_of(runner), clock=ManualClock())
    with closing(loop.run([state_of(str(i), [5, i], 40) for i in range(9)])) as said:
        for _ in range(7):
            next(said)
        assert runner.attached
    assert runner.attached == {} and not loop.has_work
    loop.check()
    (done,) = read([e for news in loop.run([state_of("next", [8], 6)]) for e in news]).values()
    assert done == expected_output([8], 6)


def test_one_that_is_released_ends_and_the_others_go_on() -> None:
    runner = FakeRunner(2)
    loop = ColocatedLoop(runner, spec_of(runner), clock=ManualClock())
    said: list[EngineOutput] = []
    for news in loop.run([state_of(str(i), [5, i], 9) for i in range(4)]):
        if any(emission.sequence_id == "1" for emission in news):
            loop.release("1")
            loop.release("1")  # nobody any more: no error
        said += [emission for emission in news if emission.sequence_id != "1"]
    assert read(said) == {str(i): expected_output([5, i], 9) for i in (0, 2, 3)}
    assert runner.attached == {}


def test_a_prompt_alone_and_a_sequence_too_long_end_at_once() -> None:
    runner = FakeRunner(1, row_capacity_tokens=32)
    loop = ColocatedLoop(runner, spec_of(runner), clock=ManualClock())
    scored = replace(state_of("scored", [3, 4], 0))
    long = state_of("long", [1] * 20, 20)
    said = {e.sequence_id: e for news in loop.run([long, scored]) for e in news}
    assert said["scored"].finish is FinishReason.LENGTH and not said["scored"].token_ids
    assert "40 tokens are more than the 32" in str(said["long"].error)
    assert loop.decode.slots.num_held == 0


def test_a_stall_is_an_error_and_no_endless_loop() -> None:
    runner = FakeRunner(1)
    loop = ColocatedLoop(runner, spec_of(runner, kv_capacity_tokens=16), clock=ManualClock())
    with pytest.raises(InvariantViolation, match="1 sequences wait, and nothing can run"):
        list(loop.run([state_of("wide", [1] * 20, 20)]))


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Ctrl-C is Python's own, whoever runs the tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("owner", "method"),
    [
        (SlotTable, "reserve"),
        (PrefillLoop, "hand_over"),
        (DecodeBatch, "_to_end"),
        (DecodeLoop, "_commit"),
        (DecodeBatch, "free_row"),
    ],
)
def test_an_interrupt_in_the_midst_of_a_pass_tears_nothing(
    interrupts: None, monkeypatch: pytest.MonkeyPatch, owner: type, method: str
) -> None:
    """Ctrl-C in a notebook: its call is over, another one's tokens are all there, all is free."""
    runner = FakeRunner(2)
    loop = ColocatedLoop(runner, spec_of(runner), clock=ManualClock())
    other = loop.run([state_of("other", [5], 20)])
    said = next(other)
    original, calls = getattr(owner, method), list[int]()

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        calls.append(0)
        if len(calls) == 1:
            signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(owner, method, interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(loop.run([state_of(str(i), [8, i], 3) for i in range(3)]))
    assert calls and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    loop.check()
    said += [emission for news in other for emission in news]
    assert read(said) == {"other": expected_output([5], 20)}
    (done,) = read([e for news in loop.run([state_of("next", [8], 6)]) for e in news]).values()
    assert done == expected_output([8], 6)
    assert runner.attached == {} and loop.decode.slots.num_held == 0


def test_a_second_interrupt_does_not_wait(interrupts: None) -> None:
    came = []

    def press_twice() -> None:
        with held_back(), held_back():
            signal.raise_signal(signal.SIGINT)
            came.append("the first waits")
            signal.raise_signal(signal.SIGINT)
            came.append("so does the second")

    with pytest.raises(KeyboardInterrupt):
        press_twice()
    assert came == ["the first waits"]
