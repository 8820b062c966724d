"""A decode replica's side of a hand-over: what fails leaves nothing behind."""

from __future__ import annotations

import asyncio
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from actors.replica.decode import DecodeReplica
from actors.replica.replica import Replica
from quadriga.checkpoint.folder import read_checkpoint
from quadriga.clock import ManualClock
from quadriga.config.loader import load_config
from quadriga.config.resolve import Hardware
from quadriga.control.desired import resolve_on
from quadriga.core.grammar import Grammar
from quadriga.core.kv import TransferOffer
from quadriga.core.replica import ReplicaInfo, Role
from quadriga.errors import MigrationFailed, Overloaded, Unavailable
from quadriga.replica.spans import SequenceSpans
from quadriga.scheduling.transfer.handoff import check_numerics
from quadriga.text.grammar import MAX_KEPT, grammars_of
from tests.unit.actors.test_sequence_handoff import CLASS, FORM, a_state
from tests.waiting import settled


async def test_the_span_of_a_sequence_that_cannot_join_ends() -> None:
    async def fail(_: object) -> None:
        raise MigrationFailed("others run here", code="depth_changed")

    async def prepare(_: object) -> None:
        """Nothing is to be compiled."""

    replica: Any = SimpleNamespace(
        spans=SequenceSpans("d", ManualClock()),
        engine=SimpleNamespace(call=fail),
        departed=SimpleNamespace(come_back=lambda name: None),
        compile_grammar=prepare,
        _require_wanted=lambda name: None,
    )
    state = a_state(deadline_s=9.0)
    state.traceparent = "00-a-b-01"
    with pytest.raises(MigrationFailed):
        await DecodeReplica.join(replica, state, None, 4)
    assert not replica.spans.open


async def test_a_grammar_stays_compiled_as_long_as_its_sequence_is_here() -> None:
    """Compiled again on the engine's thread, it would hold up all sequences."""
    checkpoint = read_checkpoint("quadriga-s")
    replica: Any = Mock()
    replica.spec.engine.checkpoint = checkpoint
    held = [Grammar.choice([f"held {i}"]) for i in range(MAX_KEPT + 1)]
    for each in held:
        await DecodeReplica.compile_grammar(replica, each)
    first, compiled = ("lark", held[0].text), grammars_of(checkpoint)._compiled
    assert first in compiled
    held.clear()
    assert first not in compiled


async def test_behind_slow_grammars_no_other_work_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """KV is stored by the event loop's own threads."""
    may_end = threading.Event()
    slowly = Mock(prepare=lambda _: may_end.wait(600.0))
    monkeypatch.setattr("actors.replica.replica.grammars_of", lambda _: slowly)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    form = Grammar.choice(["a"])
    slow = [asyncio.create_task(DecodeReplica.compile_grammar(Mock(), form)) for _ in range(8)]
    try:
        await settled()
        async with asyncio.timeout(60):
            assert await asyncio.to_thread(lambda: "stored") == "stored"
    finally:
        may_end.set()
        await asyncio.gather(*slow)


async def test_the_destination_compiles_a_grammar_while_the_kv_is_on_its_way() -> None:
    receiver, ahead = Mock(reserve=AsyncMock(return_value=0)), AsyncMock()
    replica: Any = Mock(info_record=Mock(numerics=""), receiver=receiver, _compile_ahead=ahead)
    replica.leaving.return_value = ()
    offer = TransferOffer("t", "s", CLASS, "source", 1, 3, 32, 5.0, grammar=FORM)
    await DecodeReplica.reserve(replica, pickle.loads(pickle.dumps(offer)))
    await settled()
    ahead.assert_awaited_once_with(FORM)


async def test_a_running_sequence_is_promised_a_row_once_its_grammar_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It goes on at its source until then, and would stand still for it after its cutover."""
    receiver, may_end = Mock(reserve=AsyncMock(return_value=0)), asyncio.Event()

    async def slowly(grammar: Grammar | None) -> None:
        assert grammar == FORM
        await may_end.wait()

    replica: Any = Mock(info_record=Mock(numerics=""), receiver=receiver, compile_grammar=slowly)
    replica.leaving.return_value = ()
    replica._compile_before = partial(DecodeReplica._compile_before, replica)
    offer = TransferOffer("t", "s", CLASS, "source", 1, 3, 32, 5.0, is_live=True, grammar=FORM)
    reserving = asyncio.create_task(DecodeReplica.reserve(replica, offer))
    await settled()
    receiver.reserve.assert_not_awaited()
    replica.require_taking.side_effect = Unavailable("draining")
    may_end.set()
    with pytest.raises(Unavailable):
        await reserving
    replica.require_taking.side_effect = None
    await DecodeReplica.reserve(replica, offer)
    receiver.reserve.assert_awaited_once_with(offer)
    may_end.clear()
    monkeypatch.setattr("actors.replica.decode.COMPILE_WAIT_S", 0.01)
    with pytest.raises(Overloaded) as raised:  # the batch that it came with does not wait longer
        await DecodeReplica.reserve(replica, offer)
    assert raised.value.code == "busy"
    may_end.set()
    await settled()


@pytest.mark.parametrize("deterministic", [False, True])
def test_kv_of_other_weights_of_one_name_is_refused(deterministic: bool) -> None:
    """As of `org/name@one` while `org/name@two` takes its place: both are called `name`."""
    config = load_config({"deterministic": deterministic})
    first, *_ = resolve_on(config.model_dump(mode="json"), Hardware(8.0)).places.values()
    unknown = ReplicaInfo("r", Role.DECODE, first.engine.depth_class, "", "i", 8, 512)
    replica: Any = SimpleNamespace(config=config, spec=first, info_record=unknown, _news=Mock())
    replica.loaded = partial(DecodeReplica.loaded, replica)
    names = []
    for fingerprint in ("one", "one", "two"):
        weights = replace(first.engine.checkpoint, fingerprint=fingerprint)
        replica.loaded(replace(first.engine, checkpoint=weights), "float32 kernels of a CPU")
        names.append(replica.info_record.numerics)
        Replica.resized(replica, replica.spec.engine)
        assert replica.info_record.numerics == names[-1]
    assert ("kernels" in names[0]) is deterministic
    offer = TransferOffer("t", "s", CLASS, "source", 1, 3, 32, 5.0, numerics=names[0])
    check_numerics(offer, names[1])
    with pytest.raises(MigrationFailed, match="was computed with"):
        check_numerics(offer, names[2])
