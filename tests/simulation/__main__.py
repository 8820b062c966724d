"""`python -m tests.simulation FIRST-LAST`: run the seeds of a range, and shrink what fails.

Every seed is a run of a whole cluster with at least 30 requests and 5 faults; see `cluster`. With
`--log FILE` every run is a line of it, and what the file has of this commit is not run again. The
last line is one JSON object. `--history SEED` prints what happened in one; `--idle-hours` leaves
out its faults, has nobody ask for so long after the requests, and sends them once more.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

HASH_SEED = "0"
"""Sets of texts are walked in an order that depends on it."""
MAX_SHRUNK = 3


def main(argv: Sequence[str] | None = None) -> None:
    """Run the seeds."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seeds", nargs="+", help="one seed, or FIRST-LAST, or files of plans")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--history", action="store_true", help="print what happened")
    parser.add_argument("--idle-hours", type=float, default=0.0, help="nobody asks for so long")
    parser.add_argument("--log", type=Path, help="append every run to this file, and go on there")
    parser.add_argument("--plans", type=Path, help="folder for the shrunk plans of what fails")
    parser.add_argument("--planted", metavar="NAME", help="one of the faults of `planted`")
    options = parser.parse_args(argv)
    if os.environ.get("PYTHONHASHSEED") != HASH_SEED:
        os.environ["PYTHONHASHSEED"] = HASH_SEED
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])
    from tests.simulation.campaign import Log, run_seeds, shrink, summary
    from tests.simulation.cluster import FILLED_S, run
    from tests.simulation.plans import Plan, idle, plan
    from tests.simulation.planted import planted

    if 0 < 3600 * options.idle_hours <= FILLED_S:
        parser.error(
            f"--idle-hours: {options.idle_hours:g} must be more than {FILLED_S / 3600:.2f}"
        )
    if options.history or options.idle_hours or options.seeds[0].endswith(".json"):
        has_failed = False
        for path in map(Path, options.seeds):
            chosen = Plan.from_json(path.read_text()) if path.suffix else plan(int(path.name))
            if options.idle_hours:
                chosen = idle(chosen, 3600 * options.idle_hours)
            with planted(options.planted):
                result = run(chosen)
            print("\n".join([*map(str, chosen.faults), *result.history]))
            has_failed |= bool(result.failures)
        sys.exit(int(has_failed))
    from tqdm import tqdm

    first, _, last = options.seeds[0].partition("-")
    seeds = range(int(first), int(last or first) + 1)
    log = Log(options.log) if options.log is not None else None
    known = {} if log is None else log.ran()
    done = [known[seed] for seed in seeds if seed in known]
    due = [seed for seed in seeds if seed not in known]
    runs = run_seeds(due, options.workers, options.planted)
    for ran in tqdm(runs, total=len(due), unit="run", disable=None):
        done.append(ran)
        if log is not None:
            log.add(ran)
        if ran.failures:
            tqdm.write(f"seed {ran.seed}: {ran.failures[0]}")
    failed = [ran for ran in done if ran.failures]
    for ran in failed[:MAX_SHRUNK]:
        with planted(options.planted):
            smallest = shrink(plan(ran.seed), ran.failures[0])
            result = run(smallest)
        print(f"\nseed {ran.seed}, shrunk to {len(smallest.requests)} requests:")
        print("\n".join([*map(str, smallest.faults), *result.history]))
        if options.plans is not None:
            options.plans.mkdir(parents=True, exist_ok=True)
            (options.plans / f"{ran.seed}.json").write_text(smallest.to_json())
    print(json.dumps(summary(done)))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
