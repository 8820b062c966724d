"""Whole clusters in virtual time under faults; `make simulate-faults SEEDS=0-99999` runs more."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from quadriga.scheduling.output_dispatcher import OutputDispatcher
from tests.simulation.campaign import Log, Ran, run_seed, same_failure, shrink
from tests.simulation.plans import Plan, idle, plan
from tests.simulation.planted import PLANTED, planted

ROOT = Path(__file__).parents[2]
PLANS = sorted((Path(__file__).parent / "plans").glob("*.json"))
"""Each broke a promise once: the smallest plan that did, before the product was mended."""
SEEDS = "0-99"
IDLE_SEED = "7"
"""One ingress, one prefill and two decode replicas; some requests have short deadlines."""
LEAST = {"moves": 150, "rebuilds": 40, "adoptions": 5, "suspends": 30, "pages": 30}
"""What the seeds are to be about happens in them, so often at least."""
FOUND_SOON = (
    "an abort keeps the row",
    "a row is not released when the hand-off ends",
    "KV is not compared with its checksum",
    "dead replicas are not replaced",
    "the source of a move goes on beside its destination",
    "the scheduler counts what is over as on its way",
    "an order to move that is over is kept",
    "acknowledged outputs are kept",
    "a request's place under its key is kept",
    "placement groups of dead replicas are kept",
    "the SDK does not keep deadlines",
    "a paused sequence does not come back",
)
"""Of `PLANTED`: within a few seeds. The others take up to thousands."""

pytestmark = pytest.mark.timeout(1800)  # of many runs, on a machine that does much else


def _run(*args: str) -> subprocess.CompletedProcess[str]:
    """Run a module as its users do."""
    return _python("-m", *args)


def _python(*args: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the order of sets that the seeds are meant for."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", *args],
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


def test_no_fault_loses_doubles_or_stops_a_stream_and_a_seed_is_the_same_run_each_time(
    tmp_path: Path,
) -> None:
    logs = [tmp_path / "all.jsonl", tmp_path / "one.jsonl"]
    ran, _ = (
        _run("tests.simulation", seeds, "--workers", "1", "--log", str(log))
        for seeds, log in zip((SEEDS, "7"), logs, strict=True)
    )
    report = json.loads(ran.stdout.splitlines()[-1])
    assert report["failed"] == [], ran.stdout
    assert ran.returncode == 0 and report["runs"] == 100
    assert {name: report.get(name, 0) >= least for name, least in LEAST.items()} == dict.fromkeys(
        LEAST, True
    ), report
    first, again = (Log(log).ran()[7] for log in logs)
    assert replace(first, cpu_s=again.cpu_s) == again


WATCHED = """
import threading, time, traceback
from tests.simulation.plans import plan

seen, is_running = [], False

def watched(function):
    def instead(*args, **options):
        if is_running:
            seen.append("".join(traceback.format_stack(limit=3)[:-1]))
        return function(*args, **options)
    return instead

for name in ("monotonic", "perf_counter", "time", "monotonic_ns", "perf_counter_ns", "time_ns"):
    setattr(time, name, watched(getattr(time, name)))
threading.Thread.start = watched(threading.Thread.start)
from tests.simulation import cluster
cluster._warm_up()
is_running = True
failures = cluster.run(plan(6)).failures
is_running = False
print(*failures, *sorted(set(seen)))
"""


def test_no_run_reads_the_clocks_of_the_machine_or_starts_a_thread() -> None:
    """Else a seed is another run where the machine is slow."""
    ran = _python("-c", WATCHED)
    assert ran.returncode == 0 and ran.stdout.strip() == "", ran.stdout + ran.stderr


def test_plans_that_once_failed_do_not_fail_again() -> None:
    ran = _run("tests.simulation", *map(str, PLANS))
    assert ran.returncode == 0, ran.stdout
    assert ran.stdout.count("got its") > len(PLANS)


def test_a_plan_is_the_same_behind_json() -> None:
    assert Plan.from_json(plan(3).to_json()) == plan(3)


def test_faults_in_the_code_are_found() -> None:
    assert set(FOUND_SOON) <= set(PLANTED)
    ran = _run("tests.simulation.planted", *FOUND_SOON, "--seeds", "50")
    missed = [name for name in FOUND_SOON if f"{name}: found after" not in ran.stdout]
    assert not missed, ran.stdout + ran.stderr


def test_an_idle_cluster_keeps_no_more_and_answers_as_before() -> None:
    """`make simulate-idle` does it for 48 hours."""
    ran = _run("tests.simulation", IDLE_SEED, "--idle-hours", "0.4")
    assert ran.returncode == 0, ran.stdout
    before, after = ran.stdout.split("nobody has asked for 1440 s")
    assert min(before.count("got its"), after.count("got its")) > 15, ran.stdout


def test_what_an_idle_cluster_keeps_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.simulation import cluster

    class Kept:
        """One of what a loop never lets go."""

    kept: list[Kept] = []
    hear = OutputDispatcher.hear

    def keeps(mail: OutputDispatcher, ingress_id: str) -> None:
        kept.append(Kept())
        hear(mail, ingress_id)

    monkeypatch.setattr(cluster, "FILLED_S", 20.0)
    monkeypatch.setattr(OutputDispatcher, "hear", keeps)
    silent = idle(plan(int(IDLE_SEED)), 120.0)
    failures = cluster.run(replace(silent, requests=silent.requests[:1])).failures
    assert any(failure.endswith("<locals>.Kept") for failure in failures), failures


def test_a_run_that_breaks_is_a_failure_and_the_next_one_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def breaks(*_: object) -> None:
        raise RuntimeError("the run waits for ever")

    with monkeypatch.context() as patched:
        patched.setattr("tests.simulation.cluster.Cluster.run", breaks)
        broken = run_seed(0)
    assert "RuntimeError" in broken.failures[0] and "breaks" in broken.failures[0]
    assert run_seed(0).failures == ()


def test_a_run_keeps_nothing_of_those_before_it() -> None:
    """Else every run takes longer than the last: all that is kept is looked at after each."""
    from tests.simulation.cluster import Cluster

    for seed in (20, 21, 22):
        run_seed(seed)
    assert sum(isinstance(one, Cluster) for one in gc.get_objects()) <= 1, "the last may be there"


def test_a_campaign_goes_on_where_it_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    log = Log(path)
    log.add(Ran(4, ("it broke",), "d", 1, {"moves": 2}, 3.0, 0.5))
    with path.open("a") as file:
        file.write(json.dumps({"commit": "another", "seed": 5}) + "\n" + '{"commit": "a')
    assert Log(path).ran() == {4: Ran(4, ("it broke",), "d", 1, {"moves": 2}, 3.0, 0.5)}


def test_a_failing_plan_is_shrunk_to_what_the_same_failure_needs() -> None:
    from tests.simulation.cluster import run

    with planted(FOUND_SOON[0]):
        seed, failure = next(
            (seed, ran.failures[0]) for seed in range(50) if (ran := run_seed(seed)).failures
        )
        smallest = shrink(plan(seed), failure)
        again = run(smallest).failures
    assert same_failure(failure) in map(same_failure, again)
    assert len(smallest.faults) < len(plan(seed).faults)
    assert len(smallest.requests) < len(plan(seed).requests) / 2
    assert run(smallest).failures == [], "without the fault the same plan is well"


def test_failures_are_the_same_but_for_names_and_numbers() -> None:
    one = same_failure("sim:decode:0:1f2e keeps rows of ['r3-0']")
    assert one == same_failure("sim:decode:1:aa77 keeps rows of ['r21-9']")
    assert one != same_failure("sim:prefill:0:1f2e keeps rows of ['r3-0']")
