"""`bench transports`: it sends whole parts by each transport, and ends in its line."""

from __future__ import annotations

import json

import pytest

from loadgen.__main__ import main


def test_the_command_ends_in_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "transports", "--mib", "1", "2", "--repeats", "1"]) == 0
    line = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert line["experiment"] == "transports"
    assert [(c["transport"], c["mib"]) for c in line["costs"]] == [
        ("gloo", 1), ("nixl", 1), ("gloo", 2), ("nixl", 2),
    ]  # fmt: skip
    assert all(c["gb_per_s"] > 0 and c["floor_gb_per_s"] > 0 for c in line["costs"])
