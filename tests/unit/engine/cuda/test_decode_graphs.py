"""Batches are padded, copied in and out, and recorded once per size and range."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from quadriga.engine.cuda import graphs
from quadriga.engine.cuda.graphs import DecodeGraphs, Looked, batch_sizes
from tests.equivalence.recording import TapeRecorder

PADDING_ROW, CAPACITY = 12, 96


class Layers:
    """Stands for the decoder: adds row, position and layers to what begins as the token's id."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, int, int]] = []
        self.seen: list[torch.Tensor] = []
        self.stored = torch.zeros(PADDING_ROW + 1, CAPACITY)

    def run_each(
        self, x: torch.Tensor | None, where: torch.Tensor, first: int, stop: int, longest: int
    ) -> torch.Tensor:
        x = where[2, :, None].repeat(1, 4).float() if x is None else x
        self.calls.append((len(x), first, stop, longest))
        self.seen.append(where[:2].clone())
        self.stored.index_put_((where[0], where[1]), torch.ones(where.shape[1]))
        return after(x, where[:2], first, stop)


def after(x: torch.Tensor, where: torch.Tensor, first: int, stop: int) -> torch.Tensor:
    return x * 2 + where.sum(0)[:, None] + stop - first


def run(
    made: DecodeGraphs, x: torch.Tensor, where: torch.Tensor, first: int, stop: int
) -> tuple[torch.Tensor, Looked | None]:
    """A pass of tokens with these states; from layer 0 they are their ids."""
    ids = x[:, 0].long() if not first else torch.zeros(len(x), dtype=torch.int64)
    tokens = torch.cat([where, ids[None]]).numpy()
    return made.run(x if first else None, tokens, first, stop)


def look(x: torch.Tensor, depth: int, logits: torch.Tensor, said: torch.Tensor) -> None:
    logits.copy_(x[:, :2] + depth)
    said.copy_(x[:, :3])


def make(max_rows: int = 12, max_tokens: int = 0) -> tuple[DecodeGraphs, Layers, TapeRecorder]:
    layers, recorder = Layers(), TapeRecorder()
    made = DecodeGraphs(
        layers.run_each,
        recorder,
        look=look,
        segment_ends=(2, 3, 6),
        max_rows=max_rows,
        max_tokens=max_tokens,
        hidden_size=4,
        vocab_size=2,
        dtype=torch.float32,
        device=torch.device("cpu"),
        capacity=CAPACITY,
        padding_row=PADDING_ROW,
    )
    return made, layers, recorder


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(1, (1,)), (2, (1, 2)), (8, (1, 2, 4, 8)), (12, (1, 2, 4, 8, 12)), (3, (1, 2, 3))],
)
def test_sizes(most: int, sizes: tuple[int, ...]) -> None:
    assert batch_sizes(most) == sizes


def test_every_batch_has_the_answer_of_its_own() -> None:
    """Of all sizes, one after the other, on the same buffers: nothing of the last one shows."""
    made, layers, recorder = make()
    generator = torch.Generator().manual_seed(0)
    for count in (5, 1, 12, 7, 3, 8, 2, 5, 1, 12):
        x = torch.randint(9, (count, 1), generator=generator).repeat(1, 4).float()
        where = torch.stack([torch.randperm(PADDING_ROW)[:count], torch.arange(count) + 20])
        first, stop = ((0, 2), (2, 6), (0, 6))[count % 3]
        got, _ = run(made, x, where, first, stop)
        assert torch.equal(got, after(x, where, first, stop))
    assert recorder.num_replays == 10
    assert made.num_recorded == len({(c[0], c[1], c[2]) for c in layers.calls}) == 6
    assert len(layers.calls) == 2 * 6, "once before and once while it is recorded"
    assert {c[3] for c in layers.calls} == {CAPACITY}


def test_a_pass_goes_on_from_what_the_last_one_left() -> None:
    made, _, _ = make()
    where = torch.tensor([[3, 4, 5], [7, 8, 9]])
    for _ in ("recorded", "replayed"):
        x = wanted = torch.ones(3, 4)
        for first, stop in ((0, 2), (2, 3), (3, 6)):
            x, _ = run(made, x, where, first, stop)
            wanted = after(wanted, where, first, stop)
            assert torch.equal(x, wanted)


def test_padding_is_the_padding_row_at_its_start() -> None:
    made, layers, _ = make()
    run(made, torch.ones(5, 4), torch.tensor([[1, 2, 3, 4, 5], [9, 9, 9, 9, 9]]), 0, 6)
    assert layers.seen[0].tolist() == [[1, 2, 3, 4, 5, 12, 12, 12], [9] * 5 + [0] * 3]
    others = layers.stored.clone()
    others[1:6, 9] = 0
    others[PADDING_ROW, 0] = 0
    assert not others.any(), "nothing else is stored"


def test_what_is_covered() -> None:
    made, _, _ = make()
    assert made.covers(0, 6, 12) and made.covers(2, 3, 1)
    assert not made.covers(0, 6, 13), "more than the largest batch"
    assert not made.covers(0, 6, 0)
    assert not made.covers(1, 2, 1), "prefill goes layer by layer"


def test_the_exit_is_looked_up_for_as_many_as_there_are_rows() -> None:
    made, _, _ = make(max_rows=3, max_tokens=10)
    made.record_all()
    for count in (2, 3):
        x = torch.randn(count, 4, generator=torch.Generator().manual_seed(count))
        hidden, looked = run(made, x, torch.zeros(2, count, dtype=torch.int64), 3, 6)
        assert looked is not None and looked.depth == 6 and looked.hidden is hidden
        assert torch.equal(looked.logits, hidden[:, :2] + 6)
        assert torch.equal(looked.said, hidden[:, :3])
    assert run(made, torch.ones(5, 4), torch.zeros(2, 5, dtype=torch.int64), 3, 6)[1] is None


def test_tokens_go_along_through_later_segments_alone() -> None:
    made, _, _ = make(max_rows=3, max_tokens=10)
    assert made.covers(2, 6, 10) and not made.covers(2, 6, 11)
    assert made.covers(0, 6, 3) and not made.covers(0, 6, 4)


def test_their_number_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 2)
    made, _, _ = make()
    where = torch.zeros(2, 1, dtype=torch.int64)
    for first, stop in ((0, 2), (2, 3)):
        run(made, torch.ones(1, 4), where, first, stop)
    assert made.covers(0, 2, 1) and not made.covers(3, 6, 1) and not made.covers(0, 2, 2)


def test_recording_all_leaves_nothing_for_later() -> None:
    made, layers, _ = make(max_rows=3)
    made.record_all()
    assert made.num_recorded == 3 * 6, "sizes, and ranges between four borders"
    recorded = len(layers.calls)
    run(made, torch.ones(2, 4), torch.tensor([[0, 1], [5, 6]]), 2, 3)
    assert len(layers.calls) == recorded
    assert (
        not layers.stored[:PADDING_ROW].logical_and(torch.arange(PADDING_ROW)[:, None] > 1).any()
    ), "what was recorded for nobody stored for nobody"


def test_closed_graphs_cover_nothing_and_are_released() -> None:
    made, _, recorder = make()
    run(made, torch.ones(1, 4), torch.zeros(2, 1, dtype=torch.int64), 0, 6)
    made.close()
    assert recorder.is_closed and made.num_recorded == 0
    assert not made.covers(0, 6, 1)


@pytest.mark.parametrize("is_inference", [False, True])
def test_the_recorder_refuses_what_a_gpu_could_not_record(is_inference: bool) -> None:
    def asks_the_device(x: torch.Tensor) -> Callable[[], None]:
        def work() -> None:
            x.mul_(float(x.sum()))

        return work

    with torch.inference_mode(is_inference), pytest.raises(AssertionError, match="cannot be rec"):
        TapeRecorder().record(asks_the_device(torch.ones(2)))


def test_a_gpu_that_cannot_record_serves_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    """Graphs that are there stay; the answers are the same."""
    made, _, recorder = make()
    where = torch.tensor([[3, 4], [7, 8]])
    x = torch.tensor([[3.0], [8.0]]).repeat(1, 4)
    assert torch.equal(run(made, x, where, 0, 2)[0], after(x, where, 0, 2))

    def refuse(work: Callable[[], None]) -> Callable[[], None]:
        work()
        raise RuntimeError("operation not permitted when stream is capturing")

    recorder.record = refuse  # type: ignore[method-assign]
    got, _ = run(made, x, where, 2, 6)
    assert torch.equal(got, after(x, where, 2, 6))
    assert "not permitted" in caplog.text
    assert not made.covers(2, 6, 2) and not made.covers(0, 6, 1)
    assert made.covers(0, 2, 2)
    assert torch.equal(run(made, x, where, 0, 2)[0], after(x, where, 0, 2))
