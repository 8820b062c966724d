"""Random lives of sequences: no slot leaks, none is lost, none changes another."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.clock import ManualClock
from quadriga.core.output import EngineOutput
from quadriga.core.request import SamplingParams, SequenceState
from quadriga.errors import KVCacheExhausted
from quadriga.scheduling.output_dispatcher import OutputDispatcher
from quadriga.scheduling.sequence import RunningSequence
from tests.fake_runner import EOS, FakeRunner, expected_output
from tests.sequences import make_decode_loop, make_prefill_loop, make_sequence, make_slots

ROW_TOKENS = 64


class Pipeline:
    """A prefill loop and a decode loop, with the hand-off done by hand between them."""

    def __init__(self, *, prefill_rows: int, decode_rows: int, decode_tokens: int, chunk: int):
        self.clock = ManualClock()
        self.outputs = OutputDispatcher("r", self.clock, 2.0)
        self.ready: list[SequenceState] = []
        self.prefill_runner = FakeRunner(prefill_rows, ROW_TOKENS)
        self.prefill = make_prefill_loop(
            self.prefill_runner,
            make_slots(prefill_rows, ROW_TOKENS, prefill_rows * ROW_TOKENS),
            self.clock,
            chunk,
            eos_token_ids=(EOS,),
        )
        self.decode_runner = FakeRunner(decode_rows, ROW_TOKENS)
        self.decode = make_decode_loop(
            self.decode_runner,
            make_slots(decode_rows, ROW_TOKENS, decode_tokens),
            self.clock,
            eos_token_ids=(EOS,),
        )

    def emit(self, ingress_id: str, emission: EngineOutput) -> None:
        self.outputs.put([(ingress_id, emission)], wakes=False)

    def step(self) -> None:
        self.clock.advance(0.01)
        for sequence, output in self.prefill.step():
            assert output is not None and output.error is None
            self.emit("i", output)
            if output.finish is None:
                self.ready.append(sequence.state)
        still_waiting = []
        for state in self.ready:
            try:
                slot = self.decode.reserve(state.sequence_id, state.max_total_tokens)
            except KVCacheExhausted:
                still_waiting.append(state)
                continue
            self.decode_runner.write_kv(slot.row, 0, 0, list(state.prompt_ids))
            self.prefill.release(state.sequence_id)
            self.decode.join(state)
        self.ready = still_waiting
        for ingress_id, emission in self.decode.step():
            self.emit(ingress_id, emission)
        self.prefill.slots.check()
        self.decode.slots.check()

    def cancel(self, sequence_id: str) -> None:
        self.ready = [s for s in self.ready if s.sequence_id != sequence_id]
        self.prefill.release(sequence_id)
        self.decode.leave(sequence_id)

    @property
    def is_busy(self) -> bool:
        return self.prefill.has_work or bool(self.ready) or self.decode.has_work


lives = st.lists(
    st.tuples(
        st.integers(1, 20),  # prompt tokens
        st.integers(1, 30),  # max tokens
        st.integers(0, 30),  # step of arrival
        st.one_of(st.none(), st.integers(0, 40)),  # step of cancellation
        st.sampled_from([0, 2, 3, 5]),  # every n-th poll reply is lost; 0: none
    ),
    min_size=1,
    max_size=25,
)


@settings(max_examples=150)
@given(lives=lives, prefill_rows=st.integers(1, 4), decode_rows=st.integers(1, 5))
def test_random_lives(
    lives: list[tuple[int, int, int, int | None, int]], prefill_rows: int, decode_rows: int
) -> None:
    pipeline = Pipeline(
        prefill_rows=prefill_rows, decode_rows=decode_rows, decode_tokens=130, chunk=8
    )
    received: dict[str, list[int]] = {}
    finished: set[str] = set()
    ack = 0
    states: dict[str, SequenceState] = {}
    for step in range(2000):
        for number, (prompt, max_tokens, arrival, cancel, _) in enumerate(lives):
            name = f"s{number}"
            if arrival == step:
                states[name] = make_sequence(
                    name, [number + 1] * prompt, SamplingParams(max_tokens=max_tokens)
                )
                pipeline.prefill.submit(RunningSequence(states[name]))
            if cancel is not None and cancel == step:
                pipeline.cancel(name)
        pipeline.step()
        reply = pipeline.outputs.collect("i", ack)
        lose_every = lives[0][4]
        if lose_every and step % lose_every == 0:
            continue
        ack = reply.last_seq
        for emission in reply.emissions:
            known = received.setdefault(emission.sequence_id, [])
            assert emission.first_index <= len(known), "a gap"
            known[emission.first_index :] = emission.token_ids
            if emission.finish is not None:
                finished.add(emission.sequence_id)
        if step > 41 and not pipeline.is_busy and pipeline.outputs.num_pending == 0:
            break
    assert not pipeline.is_busy, "a sequence starved"
    assert pipeline.prefill.slots.num_held == pipeline.decode.slots.num_held == 0
    assert not pipeline.prefill_runner.attached
    assert not pipeline.decode_runner.attached
    for number, (prompt, max_tokens, _, cancel, _) in enumerate(lives):
        name = f"s{number}"
        expected = expected_output([number + 1] * prompt, max_tokens)
        if cancel is None:
            assert received[name] == expected
            assert name in finished
        else:
            assert received.get(name, []) == expected[: len(received.get(name, []))]
