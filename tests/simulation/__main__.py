"""`python -m tests.simulation FIRST-LAST`: run the seeds of a range, and shrink what fails.

Every seed is a run of a whole cluster with at least 30 requests and 5 faults; see `cluster`. The
last line is one JSON object. `--history SEED` prints what happened in one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

HASH_SEED = "0"
"""Sets of texts are walked in an order that depends on it."""
CHUNK = 10


@dataclass(frozen=True, slots=True)
class Ran:
    """What one seed came to.

    Attributes:
        cpu_s: Processor time.
    """

    seed: int
    failures: tuple[str, ...]
    digest: str
    num_calls: int
    virtual_s: float
    cpu_s: float


def run_seed(seed: int) -> Ran:
    """Run one seed."""
    from tests.simulation.cluster import plan, run

    began_s = time.process_time()
    result = run(plan(seed))
    return Ran(
        seed,
        tuple(result.failures),
        result.digest,
        result.num_calls,
        result.virtual_s,
        time.process_time() - began_s,
    )


def _run_seeds(seeds: Iterable[int]) -> list[Ran]:
    return [run_seed(seed) for seed in seeds]


def run_seeds(first: int, last: int, num_workers: int) -> Iterator[Ran]:
    """Run all seeds from `first` to `last`, in order, on so many processes."""
    seeds = range(first, last + 1)
    if num_workers == 1:
        for seed in seeds:
            yield run_seed(seed)
        return
    chunks = [seeds[i : i + CHUNK] for i in range(0, len(seeds), CHUNK)]
    with ProcessPoolExecutor(num_workers) as pool:
        for ran in pool.map(_run_seeds, chunks):
            yield from ran


def shrink(seed: int) -> list[str]:
    """Return the history of a failing seed with as few faults and requests as still fail."""
    from tests.simulation.cluster import plan, run

    smallest = plan(seed)
    for what in ("faults", "requests"):
        kept = list(getattr(smallest, what))
        for one in list(kept):
            fewer = [k for k in kept if k is not one]
            shorter = replace(smallest, **{what: tuple(fewer)})
            if run(shorter).failures:
                kept, smallest = fewer, shorter
    result = run(smallest)
    return [*map(str, smallest.faults), *result.history]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the seeds."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seeds", help="one seed, or FIRST-LAST")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--history", action="store_true", help="print what happened")
    options = parser.parse_args(argv)
    if os.environ.get("PYTHONHASHSEED") != HASH_SEED:
        os.environ["PYTHONHASHSEED"] = HASH_SEED
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])
    first, _, last = options.seeds.partition("-")
    if options.history:
        from tests.simulation.cluster import plan, run

        print("\n".join(run(plan(int(first))).history))
        return
    from tqdm import tqdm

    seeds = int(first), int(last or first)
    failed: list[Ran] = []
    cpu_s, num_calls, num_runs = 0.0, 0, 0
    for ran in tqdm(
        run_seeds(*seeds, options.workers), total=seeds[1] - seeds[0] + 1, unit="run", disable=None
    ):
        num_runs += 1
        cpu_s += ran.cpu_s
        num_calls += ran.num_calls
        if ran.failures:
            failed.append(ran)
            tqdm.write(f"seed {ran.seed}: {ran.failures[0]}")
    for ran in failed[:3]:
        print(f"\nseed {ran.seed}, shrunk:")
        print("\n".join(shrink(ran.seed)))
    print(
        json.dumps(
            {
                "runs": num_runs,
                "failed": [ran.seed for ran in failed],
                "runs_a_minute_a_core": round(60 * num_runs / cpu_s, 1),
                "calls": num_calls,
            }
        )
    )
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
