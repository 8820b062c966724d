"""NCCL's transport where NCCL is at its worst: peers that hang, die, share a GPU, and errors."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest
import torch

from quadriga.errors import KVTransportError
from quadriga.kv_transport import channel_ends, nccl_pair
from quadriga.kv_transport import nccl as nccl_module
from quadriga.kv_transport.channel import NO_ROUTE, TOO_LARGE, ChannelOffer
from quadriga.kv_transport.link import Listener, join_link
from quadriga.kv_transport.nccl import MAX_STUCK_PAIRS, NcclChannels, Staging
from quadriga.kv_transport.nccl_library import SHARE_VARIABLE, NcclLibrary, named
from quadriga.kv_transport.nccl_pair import NcclPair
from quadriga.kv_transport.pairs import Invite, PairTransport
from tests.contract.lines import WAIT_S, Rig, Sink, make_rig
from tests.contract.test_lines import localhost
from tests.fake_nccl import FakeNccl
from tests.waiting import wait_until

LONG_S = 15.0
"""A part's deadline that nothing here may have to wait for; less than `WAIT_S`."""
SOON_S = 10.0
"""Before that deadline, on a machine that stands still for some seconds."""
STAGING_BYTES = 1 << 20  # 2,048 tokens of a rig's parts


class Gpus:
    """Both sides' NCCL, and the rig that runs on them."""

    def __init__(self, gpu_a: str = "A", gpu_b: str = "B", *, is_network: bool = False) -> None:
        self.nccl = {
            name: FakeNccl(gpu, is_network=is_network) for name, gpu in (("a", gpu_a), ("b", gpu_b))
        }
        self.libraries = {name: nccl.library() for name, nccl in self.nccl.items()}

    def make(self, me: str, sink: Sink, invite: Invite) -> PairTransport:
        channels = NcclChannels(me, localhost, self.libraries[me], STAGING_BYTES)
        return PairTransport(me, sink, channels, invite)


Start = Callable[..., tuple[Gpus, Rig]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Makes rigs, and sees afterwards that every communicator whose ranks met was aborted."""
    open_rigs = []
    gpus = []

    def begin(*names: str, is_network: bool = False) -> tuple[Gpus, Rig]:
        side = Gpus(*names, is_network=is_network)
        gpus.append(side)
        manager = make_rig(side.make)
        open_rigs.append(manager)
        return side, manager.__enter__()

    yield begin
    for manager in open_rigs:
        manager.__exit__(None, None, None)
    made = [c for side in gpus for nccl in side.nccl.values() for c in nccl.communicators]
    for side in gpus:
        for nccl in side.nccl.values():
            nccl.is_frozen.clear()
    wait_until(lambda: all(c.is_aborted.is_set() for c in made if not c.is_alone))
    for side in gpus:
        for nccl in side.nccl.values():
            nccl.close()


def staging(rig: Rig) -> tuple[int, int]:
    """Bytes of staging memory taken at a and at b."""
    a, b = (end._channels.staging.taken_bytes for end in (rig.a, rig.b))  # type: ignore[attr-defined]
    return a, b


def freeze_in_mid_part(gpus: Gpus, rig: Rig, deadline_s: float = LONG_S) -> Future[None]:
    """A part whose header is accepted, and whose bytes b's GPU does not take."""
    rig.deliver(100)
    accept = rig.sink.accept

    def accept_and_freeze(source: str, part: object) -> None:
        accept(source, part)  # type: ignore[arg-type]
        gpus.nccl["b"].is_frozen.set()

    rig.sink.accept = accept_and_freeze  # type: ignore[method-assign]
    future: Future[None] = rig.send(rig.make(2000), deadline_s=deadline_s)
    wait_until(gpus.nccl["b"].is_frozen.is_set)
    rig.sink.accept = accept  # type: ignore[method-assign]
    return future


def test_two_replicas_on_one_gpu_are_told_so_at_once(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SHARE_VARIABLE, raising=False)
    gpus, rig = start("A", "A")
    with pytest.raises(KVTransportError, match="both are on GPU A") as refusal:
        rig.send(rig.make(100)).result(WAIT_S)
    assert refusal.value.code == NO_ROUTE
    assert not any(nccl.communicators for nccl in gpus.nccl.values())


def test_nccl_that_may_share_gpus_is_tried(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARE_VARIABLE, "1")
    _, rig = start("A", "A")
    with pytest.raises(KVTransportError) as refusal:  # this NCCL does not
        rig.send(rig.make(100)).result(WAIT_S)
    assert refusal.value.code != NO_ROUTE


def test_a_peer_that_hangs_while_the_pair_forms(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus, rig = start()
    with monkeypatch.context() as patch:
        patch.setattr(nccl_module, "OPEN_TIMEOUT_S", 0.5)
        gpus.nccl["b"].is_frozen.set()
        started_s = time.monotonic()
        with pytest.raises(KVTransportError):
            rig.send(rig.make(100), deadline_s=LONG_S).result(WAIT_S)
        assert time.monotonic() - started_s < SOON_S
    gpus.nccl["b"].is_frozen.clear()
    rig.deliver()
    assert rig.generation() == 2


def test_a_peer_that_hangs_in_mid_part(start: Start) -> None:
    """It costs a deadline; memory comes back when the device lets go of it."""
    gpus, rig = start()
    future = freeze_in_mid_part(gpus, rig, deadline_s=4.0)
    started_s = time.monotonic()
    with pytest.raises(KVTransportError):
        future.result(WAIT_S)
    assert time.monotonic() - started_s < SOON_S
    gpus.nccl["b"].is_frozen.clear()
    wait_until(lambda: staging(rig) == (0, 0))
    rig.deliver(2000)
    assert rig.generation() == 2


def test_an_abort_reaches_a_peer_whose_gpu_waits(start: Start) -> None:
    """B's receive is under way and gets nothing; the next pair does not wait for it."""
    gpus, rig = start()
    rig.deliver(100)
    gpus.nccl["a"].is_frozen.set()
    doomed = rig.send(rig.make(2000, "doomed"), deadline_s=LONG_S)
    wait_until(lambda: staging(rig)[1] > 0)
    rig.run(rig.a.abort("b", "doomed"))
    with pytest.raises(KVTransportError) as end:
        doomed.result(WAIT_S)
    assert end.value.code == "aborted"
    wait_until(lambda: staging(rig) == (0, 0), timeout_s=SOON_S)
    gpus.nccl["a"].is_frozen.clear()
    rig.deliver()


def test_a_peer_that_dies_is_noticed_though_nccl_says_nothing(start: Start) -> None:
    gpus, rig = start()
    future = freeze_in_mid_part(gpus, rig)
    started_s = time.monotonic()
    line = rig.b._receiving["a"]._channel
    assert isinstance(line, nccl_module.NcclChannel)
    line._link.shut()  # as the kernel does when a process ends
    with pytest.raises(KVTransportError):
        future.result(WAIT_S)
    assert time.monotonic() - started_s < SOON_S
    gpus.nccl["b"].is_frozen.clear()
    rig.deliver()


@pytest.mark.parametrize(("status", "said"), [(6, "REMOTE"), (7, "status 7")])
def test_an_asynchronous_error_ends_the_part_and_the_pair(
    start: Start, status: int, said: str
) -> None:
    """Also one whose status has no name."""
    gpus, rig = start()
    future = freeze_in_mid_part(gpus, rig)
    started_s = time.monotonic()
    gpus.nccl["a"].communicators[-1].fail(status)
    with pytest.raises(KVTransportError, match=said):
        future.result(WAIT_S)
    assert time.monotonic() - started_s < SOON_S
    gpus.nccl["b"].is_frozen.clear()
    rig.deliver()
    assert rig.generation() == 2


def test_a_status_without_a_name_is_an_error_like_the_others() -> None:
    def unknown() -> None:
        raise KeyError(7)  # as CuPy's NcclError does

    with pytest.raises(RuntimeError, match="status 7"):
        named(unknown)


def test_parts_wait_for_staging_memory(start: Start) -> None:
    """Two channels, memory for one part: the second is received when the first is stored."""
    gpus, rig = start()
    rig.deliver(100)
    rig.sink.gate.clear()
    rig.sink.has_begun.clear()
    first = rig.send(rig.make(1500))
    assert rig.sink.has_begun.wait(WAIT_S)
    assert staging(rig)[1] == 1500 * 512
    library = gpus.libraries["b"]
    other = Staging(library, STAGING_BYTES)
    other.take(STAGING_BYTES, time.monotonic())
    with pytest.raises(KVTransportError, match="came free in time"):
        other.take(1, time.monotonic() + 0.05)
    rig.sink.gate.set()
    first.result(WAIT_S)
    assert staging(rig) == (0, 0)


def test_a_refusal_for_lack_of_memory_leaves_the_line_in_order(start: Start) -> None:
    _, rig = start()
    rig.deliver(100)
    taken = rig.b._channels.staging  # type: ignore[attr-defined]
    taken.take(STAGING_BYTES, time.monotonic())
    with pytest.raises(KVTransportError, match="staging memory") as refusal:
        rig.send(rig.make(500), deadline_s=12.0).result(WAIT_S)
    assert refusal.value.code == "timeout"
    taken.give_back(STAGING_BYTES)
    rig.deliver()


def test_a_part_larger_than_staging_is_not_tried(start: Start) -> None:
    gpus, rig = start()
    with pytest.raises(KVTransportError, match="send smaller parts") as refusal:
        rig.send(rig.make(3000)).result(WAIT_S)
    assert refusal.value.code == TOO_LARGE
    assert rig.offers == []
    assert gpus.nccl["a"].communicators == []


def test_kv_in_host_memory_is_staged(start: Start) -> None:
    gpus, rig = start()
    piece = rig.make(1000)
    device = gpus.libraries["a"].device
    device.host.add(piece[1].data_ptr())  # type: ignore[attr-defined]
    before = device.num_taken  # type: ignore[attr-defined]
    rig.send(piece).result(WAIT_S)
    assert torch.equal(rig.sink.parts[-1][1], piece[1])
    assert device.num_taken == before + 2, "the pair's probe and the staged copy"  # type: ignore[attr-defined]
    assert staging(rig) == (0, 0)


def test_kv_on_the_gpu_is_sent_where_it_lies(start: Start) -> None:
    gpus, rig = start()
    rig.deliver(100)
    device = gpus.libraries["a"].device
    before = device.num_taken  # type: ignore[attr-defined]
    rig.deliver(2000)
    assert device.num_taken == before  # type: ignore[attr-defined]


def test_calls_into_nccl_are_made_on_threads_of_their_own(start: Start) -> None:
    gpus, rig = start()
    rig.deliver()
    rig.deliver(source="b")
    for library in gpus.libraries.values():
        users: set[str] = library.device.users  # type: ignore[attr-defined]
        assert users == {"nccl-rank-0", "nccl-rank-1"}


def test_an_idle_pair_is_given_up_and_made_again(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_ends, "PING_INTERVAL_S", 0.05)
    monkeypatch.setattr(channel_ends, "MAX_IDLE_S", 0.2)
    gpus, rig = start()
    rig.deliver()
    wait_until(lambda: rig.generation() == 0)
    made = [nccl.communicators[0] for nccl in gpus.nccl.values()]
    wait_until(lambda: all(communicator.is_aborted.is_set() for communicator in made))
    rig.deliver()
    assert rig.generation() == 2


def test_strangers_at_the_link_are_sent_away(start: Start) -> None:
    _, rig = start()
    plain = rig._invite
    strangers: list[socket.socket] = []

    async def visit(peer: str, offer: ChannelOffer) -> None:
        for greeting in (b"", b"\xff\xff\xff\xff", b"\x14\x00\x00\x00" + b'{"token": "guessed"}'):
            stranger = socket.create_connection((offer.host, offer.port))
            stranger.sendall(greeting)
            strangers.append(stranger)
        strangers[0].close()
        await plain(peer, offer)

    rig.a._invite = visit
    rig.deliver()
    for stranger in strangers:
        stranger.close()


def test_nccl_that_does_not_return_is_given_up(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pairs whose other rank never comes are left behind, but not without end."""
    monkeypatch.setattr(nccl_module, "OPEN_TIMEOUT_S", 0.1)
    monkeypatch.setattr(nccl_pair, "ABORT_TIMEOUT_S", 0.0)
    gpus, rig = start()
    gpus.nccl["a"].is_frozen.set()
    refusals = []
    # Where a thread comes late, the link breaks before there is a pair.
    while len(refusals) < 5 * MAX_STUCK_PAIRS and NO_ROUTE not in [r.code for r in refusals]:
        with pytest.raises(KVTransportError) as refusal:
            rig.send(rig.make(10)).result(WAIT_S)
        refusals.append(refusal.value)
    assert len(refusals) > MAX_STUCK_PAIRS
    # The other side waits for the frozen one, and may have as many of them first.
    said = rf"{MAX_STUCK_PAIRS} NCCL communicators of [ab] do not return"
    assert re.search(said, str(refusals[-1]))
    gpus.nccl["a"].is_frozen.clear()


Pairs = tuple[FakeNccl, FakeNccl, NcclPair, NcclPair]


@pytest.fixture
def pair() -> Iterator[Pairs]:
    side, far_side = FakeNccl("A"), FakeNccl("B")
    library = side.library()
    uid = library.unique_id()
    one, other = NcclPair(library, 0), NcclPair(far_side.library(), 1)
    in_parallel(lambda: one.open(uid, soon(), nothing), lambda: other.open(uid, soon(), nothing))
    yield side, far_side, one, other
    for end in (one, other):
        end.abort()
        assert end.is_quiet(WAIT_S)
    side.close()
    far_side.close()


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


def nothing() -> None:
    """A control link on which all is well."""


def in_parallel(*calls: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def run(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    if errors:
        raise errors[0]


def test_a_receive_of_more_bytes_than_come_ends_at_its_deadline(pair: Pairs) -> None:
    _, _, one, other = pair
    one.send(torch.ones(1000, dtype=torch.uint8), soon(), nothing)  # nobody counts
    started_s = time.monotonic()
    with pytest.raises(TimeoutError, match="take part"):
        other.receive(torch.empty(1001, dtype=torch.uint8), soon(0.2), nothing)
    assert 0.15 < time.monotonic() - started_s < SOON_S
    assert other.is_quiet(WAIT_S)


def test_a_transfer_that_an_abort_cut_short_is_an_error(pair: Pairs) -> None:
    """The stream looks idle then, as after a transfer."""
    _, _, _, other = pair
    threading.Timer(0.05, other.abort).start()
    with pytest.raises(RuntimeError, match="aborted"):
        other.receive(torch.empty(100, dtype=torch.uint8), soon(), nothing)
    with pytest.raises(RuntimeError, match="aborted"):
        other.receive(torch.empty(100, dtype=torch.uint8), soon(), nothing)
    assert other.is_quiet(WAIT_S)
    with pytest.raises(RuntimeError, match="aborted"):
        other.receive(torch.empty(100, dtype=torch.uint8), soon(), nothing)


def test_a_call_that_does_not_return_is_left_behind(pair: Pairs) -> None:
    """NCCL may keep a caller; memory stays until it is through."""
    _, frozen, _, other = pair
    frozen.is_frozen.set()
    with pytest.raises(TimeoutError):
        other.receive(torch.empty(100, dtype=torch.uint8), soon(0.2), nothing)
    given_back = threading.Event()
    other.when_unused(given_back.set)
    assert not other.is_quiet() or given_back.is_set()
    frozen.is_frozen.clear()
    assert given_back.wait(WAIT_S)
    assert other.is_quiet()


def test_memory_is_kept_while_the_device_may_use_it(pair: Pairs) -> None:
    _, _, one, _ = pair
    given_back = threading.Event()
    one.when_unused(given_back.set)
    assert given_back.is_set(), "nothing was broken off"
    hold = threading.Event()
    one.stream.launch(lambda: hold.wait(WAIT_S) and None)  # type: ignore[attr-defined]
    with pytest.raises(TimeoutError):
        one.send(torch.ones(100, dtype=torch.uint8), soon(0.1), nothing)
    still = threading.Event()
    one.when_unused(still.set)
    assert not still.wait(0.2)
    hold.set()
    assert still.wait(WAIT_S)


def test_the_links_check_ends_a_wait(pair: Pairs) -> None:
    _, _, _, other = pair

    def gone() -> None:
        raise ConnectionResetError("the peer closed its control link")

    with pytest.raises(ConnectionResetError):
        other.receive(torch.empty(100, dtype=torch.uint8), soon(), gone)


def test_an_offer_of_another_kind_is_no_route() -> None:
    side = FakeNccl("A")
    lines = NcclChannels("a", localhost, side.library())
    with pytest.raises(KVTransportError) as refusal:
        lines.check(ChannelOffer("b", "127.0.0.1", 1, 1))
    assert refusal.value.code == NO_ROUTE
    side.close()


def test_a_link_tells_of_its_other_end() -> None:
    listener = Listener("127.0.0.1")
    there = join_link("127.0.0.1", listener.port, listener.token, soon())
    here = listener.accept(soon())
    here.check()
    there.send_frame({"n": 1}, 1.0)
    assert here.receive_frame(1.0) == {"n": 1}
    with pytest.raises(TimeoutError):
        here.receive_frame(0.05)
    there.close()
    with pytest.raises(ConnectionResetError):
        here.check()
    here.close()
    listener.close()


def test_a_library_names_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SHARE_VARIABLE, raising=False)
    side = FakeNccl("boot/0000:01:00.0")
    library: NcclLibrary = side.library()
    assert library.why_not("boot/0000:02:00.0") is None
    assert "0000:01:00.0" in str(library.why_not("boot/0000:01:00.0"))
    side.close()
