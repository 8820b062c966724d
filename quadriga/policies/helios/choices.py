"""The two decisions: which plan serves after a profile, and what to do when confidence breaks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from quadriga.config.scheduling import HeliosConfig
from quadriga.core.replica import DepthClass
from quadriga.policies.helios.plans import Planner, PoolPlan
from quadriga.policies.helios.selection import (
    Cost,
    admissible,
    best_plan,
    change_cost,
    is_better,
    over_limit,
    shown,
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
        best = best_plan(plans, slo, slack)
        if best is None:
            reasons = refused.values() or ["no candidate could be profiled"]
            return ChoiceReason(None, "; ".join(reasons))
        chosen = best.plan
        missed = [why for p, why in refused.items() if is_better(p, chosen, slo, 0.0)]
        reason = "; ".join([best.reason, *missed])
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
        """Other models that could not become the choice, and why: a profile of them tells nothing.

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
            best = best_plan([current, fair], slo, slack)
            if best is not None and best.plan is current:
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
            return ChoiceReason(best.plan, f"{broken}; the rest of its layers cannot be loaded")
        more, switch = self._cost(full, now), self._cost(best.plan, now)
        is_switch = switch.total_s < (1.0 - self._config.margin) * more.total_s
        compared = (
            f"loading all {full.depth_class.depth} layers costs {more}, switching to "
            f"{best.plan.depth_class} {switch}"
        )
        return ChoiceReason(best.plan if is_switch else full, f"{broken}; {compared}")

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
