"""Which plan serves after a profile, and what to do when its confidence breaks.

Whatever the objective, a plan that changes more tokens than allowed is out. Of the others:

    throughput   most tokens a second among those within 2 % of the best perplexity
    response     least TTFT, then TPOT
    accuracy     least perplexity; within 1 % of it the least energy, then the fastest
    energy       least joules a prompt among those within 2 % of the best perplexity

Source: HELIOS Algorithm 1 (BestModel, NextBestModel), §3.3.3, Appendix E; the figures compared
are ours, as the paper leaves them open."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from quadriga.config.scheduling import HeliosConfig
from quadriga.core.replica import DepthClass
from quadriga.policies.helios.messages import Objective
from quadriga.policies.helios.plans import Planner, PoolPlan

ACCURACY_TIE = 0.01
"""Perplexities closer than this share are the same."""


def admissible(plans: Sequence[PoolPlan], slo: Objective, slack: float) -> list[PoolPlan]:
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


def best_plan(plans: Sequence[PoolPlan], slo: Objective, slack: float) -> PoolPlan | None:
    """The best plan of all; None where there is none."""
    allowed = admissible(plans, slo, slack)
    by_energy = all(p.joules_per_prompt is not None for p in allowed)
    return min(
        allowed, key=lambda p: (*figures(p, slo, by_energy), str(p.depth_class)), default=None
    )


def is_better(new: PoolPlan, old: PoolPlan, slo: Objective, margin: float) -> bool:
    """Whether a plan beats another by enough to change for it."""
    by_energy = new.joules_per_prompt is not None and old.joules_per_prompt is not None
    return figures(new, slo, by_energy)[0] < (1.0 - margin) * figures(old, slo, by_energy)[0]


def figures(plan: PoolPlan, slo: Objective, by_energy: bool) -> tuple[float, ...]:
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


def shown(plan: PoolPlan, slo: Objective) -> str:
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
    prefill_s_per_token = plan.ttft_s / max(1.0, plan.prompt_tokens)
    return Cost(
        load_s=load_s,
        rebuild_s=in_flight_tokens * kv_debt * prefill_s_per_token,
        service_s=requests * each_s,
    )


@dataclass(frozen=True, slots=True)
class ChoiceReason:
    """What to do: change to a plan, or nothing where there is none; and why."""

    plan: PoolPlan | None
    reason: str


@dataclass(frozen=True, slots=True)
class Situation:
    """What both decisions look at besides the plans.

    Attributes:
        target: The class that serves; None before the first choice.
        since_change_s, dwell_s: Time since the last change, and how long it must last.
        barred: Classes that are not to be chosen until the next assessment.
        num_replicas: Decode replicas that serve.
        in_flight, in_flight_tokens: On all of them.
        requests_left: Until the next assessment, for all of them.
    """

    target: DepthClass | None
    since_change_s: float
    dwell_s: float
    barred: Collection[DepthClass]
    num_replicas: int = 1
    in_flight: int = 0
    in_flight_tokens: int = 0
    requests_left: int = 0

    @property
    def is_too_soon(self) -> bool:
        return self.since_change_s < self.dwell_s

    @property
    def demand(self) -> float:
        """Sequences there are for one replica."""
        return max(1.0, self.in_flight / max(1, self.num_replicas))


class Chooser:
    """Decides over the plans of a planner."""

    def __init__(self, planner: Planner, models: Sequence[str], config: HeliosConfig) -> None:
        self._planner, self._models, self._config = planner, models, config

    def after_profile(self, now: Situation) -> ChoiceReason:
        """BestModel over all plans, against the one that serves.

        Source: HELIOS Algorithm 1, Step 2; differs: a change must be worth it.
        """
        slo, slack, margin = self._config.slo, self._config.perplexity_slack, self._config.margin
        plans, refused = self._plans(now, lambda p: True)
        chosen = best_plan(plans, slo, slack)
        if chosen is None:
            reasons = refused.values() or ["no candidate could be profiled"]
            return ChoiceReason(None, "; ".join(reasons))
        best = f"{chosen.depth_class} is best for {slo}: {shown(chosen, slo)}"
        missed = [why for p, why in refused.items() if is_better(p, chosen, slo, 0.0)]
        reason = "; ".join([best, *missed])
        if chosen.depth_class == now.target:
            return ChoiceReason(None, f"{reason}; it serves already")
        current = next((p for p in plans if p.depth_class == now.target), None)
        if current is not None and current in admissible(plans, slo, slack):
            if not is_better(chosen, current, slo, margin):
                serving = f"{now.target}, which serves: {shown(current, slo)}"
                return ChoiceReason(None, f"{reason}; not by {margin:.0%} better than {serving}")
        if now.is_too_soon:
            ago = f"{now.target} came only {now.since_change_s:.3g} s ago"
            return ChoiceReason(None, f"{reason}; but {ago}, and stays {now.dwell_s:.3g} s")
        return ChoiceReason(chosen, reason)

    def broken(self, now: Situation) -> str | None:
        """Why the class that serves changes too many tokens to go on, or None."""
        plan = self._planner.plan(now.target, now.demand) if now.target is not None else None
        return over_limit(plan, self._limit(plan, now)) if plan is not None else None

    def hopeless(self, now: Situation) -> dict[str, str]:
        """Other models that could not become the choice, and why: a profile of them is of no use.

        Such a model would not be chosen if all of its tokens left at its first exit, and it were
        as accurate as the one that serves.
        """
        current = self._planner.plan(now.target, now.demand) if now.target is not None else None
        found: dict[str, str] = {}
        for model in self._models:
            if current is None or self.broken(now) or model == current.depth_class.model:
                continue
            plan = self._planner.at_best(model, now.demand)
            if plan is None:
                continue
            slo, slack = self._config.slo, self._config.perplexity_slack
            fair = replace(plan, perplexity=min(plan.perplexity, current.perplexity))
            if best_plan([current, fair], slo, slack) is current:
                serving = f"{current.depth_class}, which serves: {shown(current, slo)}"
                found[model] = (
                    f"{model} is not profiled: with all tokens at its first exit it would do "
                    f"{shown(plan, slo)}; {serving}"
                )
        return found

    def after_breaches(self, now: Situation, broken: str) -> ChoiceReason:
        """Load the rest, or switch to the next best partial model: whichever costs less.

        Loading more keeps what is in flight where it is, so a switch must be cheaper by the
        margin.

        Source: HELIOS Algorithm 1, Step 3; differs: costs in seconds, margin.
        """
        assert now.target is not None
        target = now.target
        mine, _ = self._plans(now, lambda p: p.is_full and p.depth_class.model == target.model)
        full = mine[0] if mine else None
        others, refused = self._plans(
            now, lambda p: not p.is_full and p.depth_class.model != target.model
        )
        best = best_plan(others, self._config.slo, self._config.perplexity_slack)
        if best is None:
            if full is None:
                why = "; ".join([broken, *refused.values()])
                return ChoiceReason(None, f"{why}; no other plan is at hand")
            why = "; ".join(refused.values()) or "no other model's exit would do"
            return ChoiceReason(full, f"{broken}; {why}")
        if full is None:
            return ChoiceReason(best, f"{broken}; the rest of its layers cannot be loaded")
        more, switch = self._cost(full, now), self._cost(best, now)
        is_switch = switch.total_s < (1.0 - self._config.margin) * more.total_s
        compared = (
            f"loading all {full.depth_class.depth} layers costs {more}, switching to "
            f"{best.depth_class} {switch}"
        )
        return ChoiceReason(best if is_switch else full, f"{broken}; {compared}")

    def _plans(
        self, now: Situation, wanted: Callable[[PoolPlan], bool]
    ) -> tuple[list[PoolPlan], dict[PoolPlan, str]]:
        """Plans that may be chosen, and those that change too many tokens, with the reason."""
        allowed: list[PoolPlan] = []
        refused: dict[PoolPlan, str] = {}
        for model in self._models:
            for plan in self._planner.plans(model, now.demand):
                if plan.depth_class in now.barred or not wanted(plan):
                    continue
                reason = over_limit(plan, self._limit(plan, now))
                if reason is None:
                    allowed.append(plan)
                else:
                    refused[plan] = reason
        return allowed, refused

    def _limit(self, plan: PoolPlan, now: Situation) -> float:
        """What serves may change more by the margin before it is given up."""
        is_serving = plan.depth_class == now.target
        return self._config.max_changed_share * (1.0 + self._config.margin * is_serving)

    def _cost(self, plan: PoolPlan, now: Situation) -> Cost:
        """Cost of a change for one serving replica."""
        assert now.target is not None
        replicas = max(1, now.num_replicas)
        stays = now.target.model == plan.depth_class.model
        held = now.target.depth if stays else 0
        return change_cost(
            plan,
            load_s=self._planner.load_s(plan.depth_class, held=held),
            in_flight_tokens=now.in_flight_tokens / replicas,
            kv_debt=1.0 - held / plan.depth_class.depth,
            requests=now.requests_left / replicas,
        )
