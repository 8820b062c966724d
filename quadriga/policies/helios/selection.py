"""BestModel, by objective; and whether to load more or to switch when confidence breaks.

Whatever the objective, a plan that changes more tokens than allowed is out. Of the others:

    throughput   most tokens a second among those within 2 % of the best perplexity
    response     least TTFT, then TPOT
    accuracy     least perplexity; within 1 % of it the least energy, then the fastest
    energy       least joules a prompt among those within 2 % of the best perplexity

Source: HELIOS Algorithm 1 (BestModel, NextBestModel), §3.3.3, Appendix E; the figures compared
are ours, as the paper leaves them open.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quadriga.policies.helios.candidates import Slo
from quadriga.policies.helios.plans import PoolPlan

ACCURACY_TIE = 0.01
"""Perplexities closer than this share are the same."""


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """A plan, and why."""

    plan: PoolPlan
    reason: str


def admissible(plans: Sequence[PoolPlan], slo: Slo, slack: float) -> list[PoolPlan]:
    """The plans that are accurate enough for an objective."""
    best = min((p.perplexity for p in plans), default=1.0)
    if slo == "response":
        return list(plans)
    share = ACCURACY_TIE if slo == "accuracy" else slack
    return [p for p in plans if p.perplexity <= (1.0 + share) * best]


def over_limit(plan: PoolPlan, limit: float) -> str | None:
    """Why a plan changes too many tokens to be admissible for any objective, or None."""
    if plan.changed_share <= limit + 1e-9:
        return None
    return (
        f"{plan.changed_share:.2%} of the tokens of {plan.depth_class} are expected to be others "
        f"than the whole model's, {limit:.2%} at most are allowed"
    )


def best_plan(plans: Sequence[PoolPlan], slo: Slo, slack: float) -> ModelChoice | None:
    """The best plan of all; None where there is none."""
    allowed = admissible(plans, slo, slack)
    by_energy = all(p.joules_per_prompt is not None for p in allowed)
    best = min(
        allowed, key=lambda p: (*figures(p, slo, by_energy), str(p.depth_class)), default=None
    )
    if best is None:
        return None
    return ModelChoice(best, f"{best.depth_class} is best for {slo}: {shown(best, slo)}")


def is_better(new: PoolPlan, old: PoolPlan, slo: Slo, margin: float) -> bool:
    """Whether a plan beats another by enough to change for it."""
    by_energy = new.joules_per_prompt is not None and old.joules_per_prompt is not None
    return figures(new, slo, by_energy)[0] < (1.0 - margin) * figures(old, slo, by_energy)[0]


def figures(plan: PoolPlan, slo: Slo, by_energy: bool) -> tuple[float, ...]:
    """What decides among admissible plans: positive, lower is better, the first one first.

    Args:
        by_energy: Of all plans compared the energy is known; else the time it is spent over
            stands for it.
    """
    if slo == "throughput":
        return (1.0 / plan.tokens_per_s,)
    if slo == "response":
        return (plan.ttft_s, plan.tpot_s)
    joules = plan.joules_per_prompt if by_energy else None
    prompt = joules if joules is not None else plan.tpot_s * plan.tokens_per_request
    return (prompt if slo == "energy" else prompt / plan.tokens_per_request, plan.tpot_s)


def shown(plan: PoolPlan, slo: Slo) -> str:
    """The figures behind a choice, in words."""
    parts = [
        f"{plan.tokens_per_s:.4g} tokens/s at batch {plan.batch:.3g}",
        f"TTFT {1e3 * plan.ttft_s:.3g} ms",
        f"TPOT {1e3 * plan.tpot_s:.3g} ms",
        f"perplexity {plan.perplexity:.4g}",
    ]
    if plan.joules_per_prompt is not None:
        parts.append(f"{plan.joules_per_prompt:.3g} J a prompt")
    if not plan.is_full:
        parts.append(f"{plan.coverage:.0%} of tokens sure by then")
        parts.append(f"{plan.changed_share:.2%} of them changed")
    first = {"throughput": 0, "response": 1, "accuracy": 3, "energy": 4}[slo]
    ordered = [parts[min(first, len(parts) - 1)]]
    return ", ".join(ordered + [p for p in parts if p not in ordered])


@dataclass(frozen=True, slots=True)
class Cost:
    """What a change costs one replica until the next assessment, in seconds.

    Attributes:
        load_s: Reading layers.
        rebuild_s: KV of the sequences in flight: the missing layers, or all of it anew.
        service_s: The requests expected until then.
    """

    load_s: float
    rebuild_s: float
    service_s: float

    @property
    def total_s(self) -> float:
        return self.load_s + self.rebuild_s + self.service_s

    def __str__(self) -> str:
        parts = f"load {_short(self.load_s)}, rebuild {_short(self.rebuild_s)}"
        return f"{_short(self.total_s)} s ({parts}, serve {_short(self.service_s)})"


def _short(seconds: float) -> str:
    return f"{seconds:.3g}" if seconds < 100.0 else f"{seconds:.0f}"


def change_cost(
    plan: PoolPlan, *, load_s: float, in_flight_tokens: float, kv_debt: float, requests: float
) -> Cost:
    """Cost of a change to a plan.

    Args:
        load_s: As the planner says, for the layers that are missing.
        in_flight_tokens: On the replica.
        kv_debt: Share of a full recomputation that their KV needs.
        requests: Until the next assessment, for one replica.
    """
    each_s = plan.ttft_s + plan.tokens_per_request / plan.tokens_per_s
    return Cost(
        load_s=load_s,
        rebuild_s=in_flight_tokens * kv_debt * plan.prefill_s_per_token,
        service_s=requests * each_s,
    )
