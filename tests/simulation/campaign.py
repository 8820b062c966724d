"""Many runs, one a seed: kept line by line, taken up again, and what fails made small."""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path

from tests.simulation.plans import Plan, plan

ROOT = Path(__file__).parents[2]
CHUNK = 10
MAX_ROUNDS = 4
"""Of shrinking; one that changes nothing ends it sooner."""


@dataclass(frozen=True, slots=True)
class Ran:
    """What one seed came to.

    Attributes:
        counts: See `Oracles`.
        cpu_s: Processor time.
    """

    seed: int
    failures: tuple[str, ...]
    digest: str
    num_calls: int
    counts: dict[str, int]
    virtual_s: float
    cpu_s: float


def run_seed(seed: int, fault: str | None = None) -> Ran:
    """Run one seed, with one of `PLANTED` where it is named; never raises for a run that breaks."""
    from tests.simulation.cluster import run
    from tests.simulation.planted import planted

    began_s = time.process_time()
    with planted(fault):
        result = run(plan(seed))
    return Ran(
        seed,
        tuple(result.failures),
        result.digest,
        result.num_calls,
        dict(result.counts),
        result.virtual_s,
        time.process_time() - began_s,
    )


def _run_seeds(seeds: Iterable[int], fault: str | None) -> list[Ran]:
    return [run_seed(seed, fault) for seed in seeds]


def run_seeds(seeds: Sequence[int], num_workers: int, fault: str | None = None) -> Iterator[Ran]:
    """Run all seeds, in order, on so many processes."""
    if num_workers == 1:
        for seed in seeds:
            yield run_seed(seed, fault)
        return
    chunks = [seeds[i : i + CHUNK] for i in range(0, len(seeds), CHUNK)]
    with ProcessPoolExecutor(num_workers) as pool:
        for ran in pool.map(partial(_run_seeds, fault=fault), chunks):
            yield from ran


def commit() -> str:
    """Of this checkout; marked where files were changed."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    return described.stdout.strip() or "unknown"


class Log:
    """A campaign's file: one JSON line a seed, appended as it is run.

    A seed is another run once the code has changed, so only lines of the same commit count.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._commit = commit()

    def add(self, ran: Ran) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"commit": self._commit, **asdict(ran)}) + "\n")

    def ran(self) -> dict[int, Ran]:
        """What this commit has run, by seed; a last line that was cut off is left out."""
        if not self._path.exists():
            return {}
        found = {}
        for line in self._path.read_text().splitlines():
            try:
                values = json.loads(line)
            except json.JSONDecodeError:
                continue
            if values.pop("commit") == self._commit:
                values["failures"] = tuple(values["failures"])
                found[values["seed"]] = Ran(**values)
        return found


def same_failure(failure: str) -> str:
    """A failure without the names and numbers that differ from run to run."""
    kept = []
    for word in failure.split():
        bare = word.strip("[](){},'\"")
        if ":" in bare and not bare.endswith(":"):  # sim:decode:0:1f2e…
            bare = ":".join(bare.split(":")[:2])
        kept.append("#" if any(c.isdigit() for c in bare) else bare)
    return " ".join(word for word, _ in groupby(kept))


def shrink(failing: Plan, failure: str) -> Plan:
    """Leave out faults and requests for as long as the same failure comes.

    It is done when a whole round leaves nothing out, or after `MAX_ROUNDS`.
    """
    from tests.simulation.cluster import run

    wanted = same_failure(failure)

    def is_wanted(one: str) -> bool:
        return same_failure(one) == wanted

    def fails(candidate: Plan) -> bool:
        return any(map(is_wanted, run(candidate, is_wanted).failures))

    smallest = failing
    for _ in range(MAX_ROUNDS):
        before = smallest
        for what in ("faults", "requests"):
            num_dropped = max(1, len(getattr(smallest, what)) // 2)
            while num_dropped:
                first = 0
                while first < len(kept := getattr(smallest, what)):
                    fewer = kept[:first] + kept[first + num_dropped :]
                    candidate = replace(smallest, **{what: fewer})
                    if fails(candidate):
                        smallest = candidate
                    else:
                        first += num_dropped
                num_dropped //= 2
        if smallest == before:
            break
    return smallest


def summary(done: Sequence[Ran]) -> dict[str, object]:
    """The figures of a campaign."""
    counts: Counter[str] = Counter()
    for ran in done:
        counts.update(ran.counts)
    cpu_s = sum(ran.cpu_s for ran in done)
    return {
        "runs": len(done),
        "failed": [ran.seed for ran in done if ran.failures],
        "runs_a_minute_a_core": round(60 * len(done) / max(cpu_s, 1e-9), 1),
        "calls": sum(ran.num_calls for ran in done),
        **counts,
    }
