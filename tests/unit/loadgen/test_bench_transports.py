"""`bench transports`: it sends whole parts by each transport, and ends in its line."""

from __future__ import annotations

import argparse
import json

import pytest

from loadgen.__main__ import main
from loadgen.bench import transports


async def test_the_end_of_the_other_process_is_seen_at_once() -> None:
    peer = transports._Peer("gloo")
    await peer.close()
    assert peer._pipe.poll(), "there is an end to read"


def test_the_command_ends_in_its_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [transports.torch.full_like(transports._part(n << 20)[1], 7) for n in (2, 1)]
    monkeypatch.setattr(transports.torch, "empty_like", lambda kv: made[2 - (kv.nbytes >> 20)])
    assert main(["bench", "transports", "--mib", "1", "2", "--repeats", "1"]) == 0
    assert all((one != 7).all() for one in made), "the floor is a copy to memory that is there"
    line = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert line["experiment"] == "transports"
    assert [(c["transport"], c["mib"]) for c in line["costs"]] == [
        ("gloo", 1),
        ("nixl", 1),
        ("gloo", 2),
        ("nixl", 2),
    ]
    assert all(c["gb_per_s"] > 0 and c["floor_gb_per_s"] > 0 for c in line["costs"])
    monkeypatch.setattr(transports, "PACKAGES", ("nowhere",))
    transports.add_arguments(parser := argparse.ArgumentParser())
    assert parser.parse_args([]).kinds == ["gloo"]
