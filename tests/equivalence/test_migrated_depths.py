"""Live migration among replicas of different depth, whose depth changes, too."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from quadriga.checkpoint.exits import ExitParams, SkippedKV
from quadriga.core.request import SequenceState
from quadriga.engine.model_runner import NativeRunner
from quadriga.errors import MigrationFailed
from quadriga.scheduling.sequence import SequenceStatus
from tests.equivalence.early_exit_reference import LAYERS, build_deep, save_with_exits
from tests.equivalence.moving import Move, move
from tests.equivalence.paged import load_on_pages
from tests.equivalence.test_depth import EXITS, MODELS, Bench, check, reference, states

MAX_TURNS = 4000


@pytest.fixture(scope="module", autouse=True)
def llama(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = build_deep("llama")
    MODELS["llama"] = model, save_with_exits(model, tmp_path_factory.mktemp("deep"), EXITS)


def replicas(mode: SkippedKV, *depths: int, is_paged: bool = False) -> list[Bench]:
    path = MODELS["llama"][1]
    load = load_on_pages if is_paged else NativeRunner.load
    kept = {"replay_newest": 3 * (mode == "linear"), "keep_tokens": 5}
    return [Bench(path, depth, mode=mode, compile="wait", load=load, **kept) for depth in depths]


class Crowd:
    """Sequences that wander among replicas, piece by piece, while all of them step on.

    Attributes:
        done: How moves ended: "moved", "aborted", "over", or the code of a refusal.
    """

    def __init__(self, benches: list[Bench], todo: list[SequenceState], seed: int) -> None:
        self.benches, self.rng = benches, random.Random(seed)
        self.states = {state.sequence_id: state for state in todo}
        self.done: Counter[str] = Counter()
        self.waited = 0
        self._under_way: dict[str, Move] = {}
        for i, state in enumerate(todo):
            bench = benches[i % len(benches)]
            bench.join(state, depth=min(LAYERS, bench.runner.num_layers))

    def turn(self) -> bool:
        """Step a replica, begin a move, carry those under way on; False when all is over."""
        rng = self.rng
        busy = [b for b in self.benches if b.loop.has_work]
        if busy:
            rng.choice(busy).step()
        here = [(b, s.sequence_id) for b in self.benches for s in b.loop.running]
        if here and len(self._under_way) < 3:
            source, sequence_id = rng.choice(here)
            if sequence_id not in self._under_way:
                others = [b for b in self.benches if b is not source]
                try:
                    transfer = Move(source, rng.choice(others), sequence_id)
                    self._under_way[sequence_id] = transfer
                except MigrationFailed as exc:
                    self.done[exc.code] += 1
        for sequence_id, transfer in list(self._under_way.items()):
            ended = self._carry_on(sequence_id, transfer)
            if ended is not None:
                self.done[ended] += 1
                del self._under_way[sequence_id]
        return bool(here or self._under_way)

    def _carry_on(self, sequence_id: str, transfer: Move) -> str | None:
        try:
            is_ready = transfer.piece()
            if is_ready is False:
                return None
            rest = transfer.freeze() if is_ready else None
        except MigrationFailed as exc:
            transfer.abort()
            return exc.code
        if rest is None:
            transfer.abort()
            return "over"
        try:
            self.states[sequence_id] = transfer.finish(rest)
        except MigrationFailed as exc:
            assert transfer.source.loop.export.abort_cutover(sequence_id)
            transfer.abort()
            return exc.code
        assert transfer.resume is not None
        self.waited += transfer.resume.waited_at is not None
        return "moved"

    def run(self) -> list[SequenceState]:
        for _ in range(MAX_TURNS):
            if not self.turn():
                for bench in self.benches:
                    assert bench.loop.slots.num_held == bench.table.num_open == 0
                return list(self.states.values())
        raise AssertionError(f"somebody never ended: {self.done}")


@pytest.mark.parametrize("is_paged", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize("mode", ["replay", "linear"])
def test_strict_requests_say_what_they_say_at_full_depth(mode: SkippedKV, is_paged: bool) -> None:
    """Wherever they begin; they are parked, moved deeper, and refused where layers would go."""
    (alone,) = replicas(mode, LAYERS, is_paged=is_paged)
    wanted = states("llama", "strict", 30)
    for state in wanted:
        alone.join(state)
    alone.finish()
    benches = replicas(mode, 1, 3, LAYERS, LAYERS, is_paged=is_paged)
    crowd = Crowd(benches, states("llama", "strict", 30), seed=1)
    got = crowd.run()
    for state, other in zip(got, wanted, strict=True):
        assert state.output_ids == other.output_ids, state.sequence_id
        assert state.exit_layers == other.exit_layers, state.sequence_id
    assert {1, 3, LAYERS} == {k for s in got for k in s.exit_layers[1:]}
    assert crowd.done["moved"] > 10 and crowd.waited > 3
    assert crowd.done["wrong_depth"] > 5
    assert sum(b.counters.breaches for b in crowd.benches) == 0


@pytest.mark.parametrize("mode", ["replay", "project"])
def test_bounded_requests_lose_and_regain_layers(mode: SkippedKV) -> None:
    """Every token is the one of the exit it left at, over the KV that the record describes."""
    crowd = Crowd(replicas(mode, LAYERS, 3, LAYERS, 1), states("llama", "bounded", 40), seed=2)
    got = crowd.run()
    assert crowd.done["moved"] > 20 and crowd.done["wrong_depth"] == 0
    assert {3, LAYERS} <= {k for s in got for k in s.exit_layers[1:]}
    check(reference("llama", mode), got, LAYERS)
    assert sum(b.loop.depth.num_repayments for b in crowd.benches) > 0


@pytest.mark.parametrize("mode", ["copy", "alias"])
def test_what_keeps_no_states_moves_as_well(mode: SkippedKV) -> None:
    """Layers that were lost are read from the deepest that came, and nothing is run again."""
    crowd = Crowd(replicas(mode, LAYERS, 3, LAYERS, 1), states("llama", "bounded", 40), seed=2)
    got = crowd.run()
    assert crowd.done["moved"] > 20
    assert [len(s.output_ids) for s in got] == [40] * len(got)
    assert sum(b.loop.depth.num_repayments for b in crowd.benches) == 0


def test_replicas_change_their_depth_under_moves() -> None:
    """A move that such a change meets fails and leaves the sequence here, or follows it."""
    crowd = Crowd(replicas("replay", LAYERS, 3, LAYERS), states("llama", "bounded", 40), seed=3)
    depths = random.Random(4)
    for turn in range(MAX_TURNS):
        bench = crowd.benches[turn % 3]
        depth = depths.choice((1, 3, LAYERS))
        is_calm = (
            not bench.loop.batch.having(SequenceStatus.MOVING) and depth != bench.runner.num_layers
        )
        if turn % 6 == 0 and is_calm:
            bench.go(depth)
        if not crowd.turn():
            break
    else:
        raise AssertionError(f"somebody never ended: {crowd.done}")
    assert crowd.done["moved"] > 10
    assert crowd.done["depth_changed"] > 0
    check(reference("llama", "replay"), list(crowd.states.values()), LAYERS)
    assert all(b.loop.slots.num_held == b.table.num_open == 0 for b in crowd.benches)


def test_deterministic_answers_go_where_they_stay_the_same() -> None:
    deep, shallow, other = replicas("replay", LAYERS, 3, LAYERS)
    free, limited = states("llama", "bounded", 30)[:2]
    limited.exits = ExitParams(limited.exits.threshold, "bounded", max_depth=3)
    twin = replace(limited, sequence_id="twin", output_ids=[], exit_layers=[])
    for state in (free, limited):
        deep.join(state)
    deep.step(7)
    with pytest.raises(MigrationFailed, match=f"needs {LAYERS} layers or more and {LAYERS} at"):
        move(deep, shallow, free.sequence_id, deterministic=True)
    free, _ = move(deep, other, free.sequence_id, deterministic=True)
    limited, transfer = move(deep, shallow, limited.sequence_id, deterministic=True)
    assert transfer.resume is not None
    assert transfer.resume.extents[-1].stop_layer == 3
    shallow.step(5)
    limited, _ = move(shallow, other, limited.sequence_id, deterministic=True)
    other.finish()
    deep.join(twin)
    deep.finish()
    assert limited.output_ids == twin.output_ids
    assert limited.exit_layers == twin.exit_layers
