"""Decode replicas that step together: against every step by itself, and against a plain loop."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quadriga.config.scheduling import ScalingConfig
from quadriga.errors import ConfigError
from quadriga.sim.config import Failure, SimConfig, SimScaling
from quadriga.sim.decode.lock_step import LockStep, LockStepReplica
from quadriga.sim.decode.vllm import VllmDecodeReplica
from quadriga.sim.records import PAUSE, RECOMPUTE, VLLM, VLLM_CACHED, Gaps, MemoryRules, Sequence
from tests.unit.sim.test_simulator import SMALL, check_conserved, load, simulate

ROOMY = replace(SMALL, kv_capacity_tokens=100_000)


@pytest.mark.parametrize("rules", [PAUSE, RECOMPUTE, VLLM, VLLM_CACHED])
@pytest.mark.parametrize("policy", ["round_robin", "current_load", "reschedule", "ares"])
def test_stretches_of_steps_equal_the_steps_one_by_one(policy: str, rules: MemoryRules) -> None:
    """In lock step who is the slowest is asked before each step; as vLLM, who is preempted."""
    is_vllm = rules.on_full == "vllm"
    kind: Any = VllmDecodeReplica if is_vllm else LockStepReplica

    class OneStepAtATime(kind):  # type: ignore[misc]
        def _event_steps(self) -> int:
            return min(1, super()._event_steps())

    num_full = num_moved = 0
    for seed in range(2):
        requests = load(seed, 100, 30.0) if is_vllm else load(seed, 80, 8.0)
        options: dict[str, Any] = {"memory": rules, "seed": seed, "lock_step": not is_vllm}
        stretched = simulate(policy, requests, **options)
        single = simulate(policy, requests, make_replica=OneStepAtATime, **options)
        check_conserved(stretched, requests)
        np.testing.assert_allclose(stretched.finished_s, single.finished_s, rtol=1e-9)
        assert stretched.num_full == single.num_full
        assert stretched.failures == single.failures
        num_full, num_moved = num_full + stretched.num_full, num_moved + len(stretched.migrations)
    assert num_full > 0
    assert (num_moved > 0) == (policy in ("reschedule", "ares"))


Held = list[tuple[int, int]]
"""Of one rank: KV tokens at the start and at the end of each sequence."""


def ends_by_events(held: list[Held]) -> tuple[dict[int, float], list[Gaps]]:
    """When each sequence ends, by index, and all gaps; everybody is there at the start."""
    gaps: list[Gaps] = []
    ranks = [LockStepReplica(f"d{i}", ROOMY, PAUSE, gaps.append) for i in range(len(held))]
    LockStep(ranks)
    index = 0
    for rank, mine in zip(ranks, held, strict=True):
        for tokens, final in mine:
            rank.join(Sequence(index, tokens, final, 1, 0.0), ready_s=0.0)
            index += 1
    ended: dict[int, float] = {}
    while (rank := min(ranks, key=lambda r: r.next_event_s())).next_event_s() < math.inf:
        now_s = rank.next_event_s()
        for sequence in rank.run_to_event(now_s).finished:
            ended[sequence.index] = now_s
    return ended, gaps


def ends_by_steps(held: list[Held]) -> dict[int, float]:
    """The same, one step after the other: each takes what the slowest rank's takes."""
    numbered = iter(range(1000))
    ranks = [[[next(numbered), tokens, final] for tokens, final in mine] for mine in held]
    now_s, ended = 0.0, {}
    while any(ranks):
        now_s += max(ROOMY.step.step_s(len(r), sum(s[1] for s in r)) for r in ranks if r)
        for rank in ranks:
            for sequence in list(rank):
                sequence[1] += 1
                if sequence[1] == sequence[2]:
                    ended[sequence[0]] = now_s
                    rank.remove(sequence)
    return ended


@pytest.mark.parametrize(
    "held",
    [
        [[(100, 500)], [(7_000, 7_300)]],
        # Eight that grow together overtake the long one, which ends before they do; one is idle.
        [[(2_400, 3_000)], [(20, 900)] * 8, []],
        [[(1_000, 1_400), (10, 700)], [(900, 1_700)], [(30, 60)] * 3],
    ],
)
def test_every_step_takes_as_long_as_the_slowest_ranks(held: list[Held]) -> None:
    ended, gaps = ends_by_events(held)
    assert ended == pytest.approx(ends_by_steps(held), rel=1e-9)
    made = sum(g.weight for g in gaps)
    assert made == sum(final - tokens for mine in held for tokens, final in mine)


@pytest.mark.parametrize(
    "options",
    [
        {"memory": VLLM},
        {"failures": (Failure(1.0, 0, 1.0),)},
        {"scaling": SimScaling(ScalingConfig())},
    ],
)
def test_ranks_neither_come_and_go_alone_nor_preempt_like_vllm(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="lock_step: not with"):
        SimConfig(SMALL, 3, 1, lock_step=True, **options)


def test_in_lock_step_balance_shortens_the_median_time_of_a_token() -> None:
    """Apart, only those beside long sequences are slow; in lock step everybody waits for them."""
    requests = load(5, 300, 6.0)
    median_s = {}
    for policy in ("round_robin", "ares"):
        for together in (False, True):
            run = simulate(
                policy, requests, memory=PAUSE, profile=ROOMY, lock_step=together, seed=5
            )
            tpot = (run.finished_s - run.first_token_s) / np.maximum(requests[2] - 1, 1)
            median_s[policy, together] = float(np.median(tpot))
    assert median_s["round_robin", True] > 1.02 * median_s["round_robin", False]
    assert median_s["ares", True] < 0.99 * median_s["round_robin", True]
