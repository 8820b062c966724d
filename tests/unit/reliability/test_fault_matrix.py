"""Every cell of the product is run or has a reason; filters; what the faults do to a transport."""

from __future__ import annotations

import asyncio
import io
import random
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from loadgen.__main__ import main
from quadriga.errors import ConfigError, KVTransportError
from quadriga.kv_transport.payload import checksum
from tests.reliability.chaos.cell_results import CellResult
from tests.reliability.chaos.command import choose
from tests.reliability.chaos.fault_matrix import (
    MATRIX,
    QUICK,
    QUICK_NEW,
    Cell,
    Fault,
    Moment,
    Stage,
    Victim,
)
from tests.reliability.chaos.report import not_run, table
from tests.reliability.cluster import actor_patches
from tests.waiting import until


def test_the_matrix_is_the_whole_product() -> None:
    assert len(MATRIX) == len(Fault) * len(Moment) * len(Victim) == len(set(MATRIX))
    assert {str(c) for c in MATRIX} == {
        f"{f} {v}, {m}" for f, m, v in product(Fault, Moment, Victim)
    }


def test_every_fault_moment_and_victim_is_run() -> None:
    run = [c for c in MATRIX if c.why_not is None]
    assert {c.fault for c in run} == {*Fault}
    assert {c.moment for c in run} == {*Moment}
    assert {c.victim for c in run} == {*Victim}
    assert {c.stage for c in run} == {*Stage}
    assert all(c.why_not is None for c in (*QUICK, *QUICK_NEW))
    quick = (*QUICK, *QUICK_NEW)
    assert {c.fault for c in quick} == {*Fault}
    assert {c.moment for c in quick} >= {*Moment} - {Moment.RESERVE, Moment.COPY}
    assert {c.stage for c in quick} == {*Stage} - {Stage.CHOOSING_NODES}


def test_a_choice_of_which_nothing_can_be_run_here_has_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("deploy.multinode.why_not_here", lambda: "no network namespaces")
    assert main(["chaos", "--quick", "--filter", f"stage={Stage.NODES}"]) == 1
    said = capsys.readouterr().out
    assert "no network namespaces" in said and "nothing was tested" in said


@pytest.mark.parametrize("moment", list(Moment))
def test_processes_die_and_stop_at_every_moment(moment: Moment) -> None:
    """Only the name of a decode replica depends on the moment."""
    is_move = moment in (Moment.RESERVE, Moment.COPY, Moment.COMMIT)
    absent = {Victim.DECODE} if is_move else {Victim.SOURCE, Victim.DESTINATION}
    for fault in (Fault.KILL, Fault.STOP, Fault.DISK):
        victims = {v for v in Victim if Cell(fault, moment, v).why_not is None}
        assert victims == {*Victim} - absent


def test_filters() -> None:
    cells = choose(filters=["fault=SIGKILL", "victim=source,destination"])
    assert {c.fault for c in cells} == {Fault.KILL}
    assert sum(c.why_not is None for c in cells) == 6
    assert len(choose(filters=["stage=plain"])) < len(choose()) == len(MATRIX)
    assert len(choose(is_quick=True)) == len(QUICK) + len(QUICK_NEW)
    for bad in ("fault=love", "colour=red", "victim"):
        with pytest.raises(ConfigError, match="--filter"):
            choose(filters=[bad])
    with pytest.raises(ConfigError, match="no cell that can be run"):
        choose(filters=["fault=KV corruption", "victim=scheduler"])
    with pytest.raises(ConfigError, match="no KV passes"):
        choose(["KV corruption scheduler, mid-stream"])


def test_what_is_not_run_is_listed_with_its_reason() -> None:
    console = Console(width=4000, record=True, file=io.StringIO())
    console.print(not_run(MATRIX))
    text = console.export_text()
    for cell in MATRIX:
        assert (f"{cell};" in text or f"{cell} " in text) == (cell.why_not is not None)
    assert table([CellResult(QUICK[0])]).row_count == 1


class Replica:
    """What the faults touch of one."""

    def __init__(self) -> None:
        self.transport = self
        self.sent: list[torch.Tensor] = []
        self.reserved: list[Any] = []

    async def send(self, peer: str, part: Any, kv: torch.Tensor, *, deadline_s: float) -> None:
        self.sent.append(kv)

    async def reserve(self, offer: Any) -> str:
        self.reserved.append(offer)
        return "row"


class Part:
    index = 0


async def test_one_part_in_twenty_loses_a_bit() -> None:
    replica, kv = Replica(), torch.randn(4, 2, 3)
    intact = kv.clone()
    actor_patches.harm_sending(replica, "corrupt", 5, 9.0)
    for _ in range(200):
        await replica.send("peer", Part(), kv, deadline_s=1.0)
    assert sum(checksum(sent) != checksum(kv) for sent in replica.sent) == 10
    assert torch.equal(kv, intact), "what the sender keeps is as it was"
    assert actor_patches.num_hits(replica) == actor_patches.be_well(replica) == 10
    await replica.send("peer", Part(), kv, deadline_s=1.0)
    assert checksum(replica.sent[-1]) == checksum(kv)


async def test_a_stalled_part_is_late_and_later_ones_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(monotonic=iter((0.0, 0.0, 0.1)).__next__)
    monkeypatch.setattr(actor_patches, "time", clock)
    replica, kv = Replica(), torch.zeros(2)
    actor_patches.harm_sending(replica, "stall", 0, 0.15)
    with pytest.raises(KVTransportError) as caught:
        await replica.send("peer", Part(), kv, deadline_s=0.02)
    assert caught.value.code == "timeout"
    assert replica.sent == []
    await replica.send("peer", Part(), kv, deadline_s=1.0)
    assert len(replica.sent) == 1, "it waited"
    assert actor_patches.be_well(replica) == 2


class Offer:
    def __init__(self, is_live: bool) -> None:
        self.is_live = is_live


async def test_a_step_is_held_once_and_for_migrations_only(tmp_path: Path) -> None:
    replica = Replica()
    actor_patches.hold(replica, "reserve", str(tmp_path), 5.0)
    assert await replica.reserve(Offer(is_live=False)) == "row"
    held = asyncio.ensure_future(replica.reserve(Offer(is_live=True)))
    await until((tmp_path / actor_patches.HELD).exists)
    assert len(replica.reserved) == 1, "it has not gone on"
    (tmp_path / actor_patches.GO).touch()
    assert await held == "row"
    assert await replica.reserve(Offer(is_live=True)) == "row"


async def test_what_nobody_lets_go_goes_on_by_itself(tmp_path: Path) -> None:
    replica = Replica()
    actor_patches.hold(replica, "reserve", str(tmp_path), 0.02)
    async with asyncio.timeout(60):
        assert await replica.reserve(Offer(is_live=True)) == "row"


def test_the_same_seed_hits_the_same_parts() -> None:
    hits = [actor_patches._stratified(random.Random(3)) for _ in range(2)]
    drawn = [[hit() for _ in range(100)] for hit in hits]
    assert drawn[0] == drawn[1]
    assert all(sum(drawn[0][i : i + 20]) == 1 for i in range(0, 100, 20))
