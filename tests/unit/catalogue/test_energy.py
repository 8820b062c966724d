"""Energy by counter or by estimate."""

from __future__ import annotations

from pathlib import Path

import pytest

from quadriga.catalogue.energy import EnergyMeter


def package(folder: Path, name: str, microjoules: int) -> Path:
    place = folder / name
    place.mkdir()
    (place / "energy_uj").write_text(f"{microjoules}\n")
    (place / "max_energy_range_uj").write_text("999999\n")
    return place


def test_package_counters_add_up_and_start_again(tmp_path: Path) -> None:
    first = package(tmp_path, "intel-rapl:0", 900_000)
    second = package(tmp_path, "intel-rapl:1", 100)
    package(tmp_path, "intel-rapl:0:0", 5)  # a part of the first package
    meter = EnergyMeter("cpu", lambda: 0.0, rapl=tmp_path)
    (first / "energy_uj").write_text("100000")  # past its end
    (second / "energy_uj").write_text("500100")
    reading = meter.read()
    assert reading.source == "rapl"
    assert reading.joules == pytest.approx(0.2 + 0.5)
    assert meter.read().joules == pytest.approx(0.7), "nothing happened since"


@pytest.mark.parametrize("damage", ["none", "text", "gone"])
def test_without_a_counter_it_is_an_estimate_and_says_so(tmp_path: Path, damage: str) -> None:
    if damage != "none":
        place = package(tmp_path, "intel-rapl:0", 1)
        (place / "energy_uj").write_text("what?")
        if damage == "gone":
            (place / "energy_uj").unlink()
    busy_s = 0.0
    meter = EnergyMeter("cpu", lambda: busy_s, watts=20.0, rapl=tmp_path)
    before = meter.read()
    busy_s = 3.0
    assert (meter.read().joules - before.joules, before.source) == (60.0, "estimate")
