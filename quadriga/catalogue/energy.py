"""Energy by the best counter there is: the GPU's own, the processor package's, or an estimate.

A package counter counts everything that the machine does; who shares a machine divides by shares
of processor time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quadriga.catalogue.records import EnergySource

RAPL = Path("/sys/class/powercap")
DEFAULT_WATTS = 10.0
"""Of one busy core of a server, its share of the package included; for estimates."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Energy used since some moment of the past.

    Attributes:
        joules: Only differences of two readings mean something.
    """

    joules: float
    source: EnergySource


class EnergyMeter:
    """Reads one counter for its whole life.

    Args:
        device: `cuda` asks NVML for GPU 0 of those visible first.
        busy_s: Seconds that this process computed so far; for estimates.
        watts: While it computes; for estimates.
        rapl: Where the kernel shows package counters.
    """

    def __init__(
        self,
        device: str,
        busy_s: Callable[[], float],
        *,
        watts: float = DEFAULT_WATTS,
        rapl: Path = RAPL,
    ) -> None:
        self._busy_s, self._watts = busy_s, watts
        self._millijoules = _nvml_counter() if device == "cuda" else None
        self._packages = [] if self._millijoules else _rapl_packages(rapl)

    def read(self) -> Reading:
        """The counter now."""
        if self._millijoules is not None:
            return Reading(1e-3 * self._millijoules(), "nvml")
        if self._packages:
            return Reading(sum(p.joules() for p in self._packages), "rapl")
        return Reading(self._watts * self._busy_s(), "estimate")


class _Package:
    """One RAPL package counter, which starts again at 0 now and then."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "energy_uj"
        self._range = int((folder / "max_energy_range_uj").read_text())
        self._last = int(self._file.read_text())
        self._total = 0

    def joules(self) -> float:
        now = int(self._file.read_text())
        self._total += (now - self._last) % (self._range + 1)
        self._last = now
        return 1e-6 * self._total


def _rapl_packages(rapl: Path) -> list[_Package]:
    """The packages whose counters may be read; none in most containers and virtual machines."""
    packages = (f for f in sorted(rapl.glob("intel-rapl:*")) if f.name.count(":") == 1)
    try:
        return [_Package(folder) for folder in packages]
    except (OSError, ValueError):
        return []


def _nvml_counter() -> Callable[[], float] | None:
    """GPU 0's energy counter in millijoules, where NVML and a card that counts are there."""
    try:
        import pynvml  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except pynvml.NVMLError:
        return None
    return lambda: float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle))
