"""What is compared in `paper helios`, and how: the same stream, processor and rounds for all."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from loadgen.load.task_suite import TaskSuite
from loadgen.model_costs.exits import read_again
from loadgen.paper.clocks import ProcessorClock, TurnClock
from loadgen.paper.helios.record import Shadow, StreamRun
from loadgen.paper.helios.replica import ReplicaLimits, TimedModel, weight_bytes
from loadgen.paper.helios.report import (
    ALONE,
    BATCHED,
    FIXED,
    HELIOS,
    LIMITS,
    LOSSLESS,
    THRESHOLDS,
    HeliosRow,
    HeliosSetting,
    summarise,
)
from loadgen.paper.helios.serve import Contestant, open_replica, serve_in_turns
from loadgen.paper.helios.stream import drifting_suite
from loadgen.paper.native import VALUE_BYTES, load_native, row_tokens
from quadriga.checkpoint.folder import Checkpoint, read_checkpoint
from quadriga.config.scheduling import HeliosConfig
from quadriga.core.replica import DepthClass
from quadriga.errors import ConfigError
from quadriga.llm import LLM
from quadriga.policies.helios.candidates import start_helios
from quadriga.policies.helios.machine import Helios
from quadriga.policies.helios.messages import ChosenDevice

PAPER_RULE = 1.0
"""`helios.max_changed_share`: breaches alone count."""
SINGLE = ("only-s", "only-l", "only-s-adaptive", "only-l-adaptive")
DRAFTING = ("only-s-lossless", "only-l-lossless")
_MANY = 8  # rounds of all clients between two assessments, in a fixed memory
_FULL_ROUNDS = 6  # of all clients, at least, there
_ROUND_SEEDS = 1000  # between the seeds of two rounds
_MEMORY_SHARE = 1.2  # of the larger model's weights, where no memory is given


@dataclass(frozen=True, slots=True)
class HeliosPlan:
    """What to measure.

    Attributes:
        pair: The small model and the large one, or one alone, whose depths are then all the choice
            there is: bundled ids or checkpoint folders.
        catalogue: Of both; None is the bundled family's.
        interval: Requests between two assessments.
        profile_requests: That each candidate gets in one.
        batch: Clients of the batched part.
        rows: Most sequences in a fixed memory, and clients there.
        memory_bytes: That memory; None: a fifth more than the larger model's weights.
        limits: Of `helios.max_changed_share`, in their own part; elsewhere it is the paper's rule.
    """

    pair: tuple[str, ...]
    catalogue: str | None
    parts: Sequence[str]
    slos: Sequence[str]
    requests: int
    rounds: int
    interval: int
    profile_requests: int
    thresholds: Sequence[float]
    intervals: Sequence[int]
    batch: int
    rows: int
    memory_bytes: int | None
    shadows: int
    threads: int
    seed: int
    limits: Sequence[float] = ()

    def settings(self, memory_bytes: int) -> list[HeliosSetting]:
        """All rows of all parts, in the order they are run in."""
        helios = [HELIOS + slo for slo in self.slos]
        main = helios[:1]
        single, drafting = (
            [name for name in names if len(self.pair) > 1 or "only-s" in name]
            for names in (SINGLE, DRAFTING)
        )
        drafting += [f"{name}{LOSSLESS}" for name in main]
        found: list[HeliosSetting] = []
        for part in self.parts:
            if part in (ALONE, BATCHED):
                clients = 1 if part == ALONE else self.batch
                found += [
                    HeliosSetting(part, name, None, self.interval, clients)
                    for name in (*single, *helios, *drafting)
                ]
            elif part == FIXED:
                rare = max(self.interval, _MANY * self.rows)  # or it would do little else
                found += [
                    HeliosSetting(part, name, None, rare, self.rows, memory_bytes)
                    for name in (*single, *main)
                ]
            elif part == THRESHOLDS:
                found += [
                    HeliosSetting(part, name, threshold, self.interval, 1)
                    for threshold in self.thresholds
                    for name in (*single[: len(self.pair)], *main)
                ]
            elif part == LIMITS:
                found += [HeliosSetting(part, name, None, self.interval, 1) for name in single]
                found += [
                    HeliosSetting(part, name, None, self.interval, 1, max_changed_share=limit)
                    for limit in self.limits
                    for name in main
                ]
            else:
                found += [
                    HeliosSetting(part, name, None, interval, 1)
                    for interval in self.intervals
                    for name in main
                ]
        return found

    def num_requests(self, setting: HeliosSetting) -> int:
        """Length of the stream: long enough that its beginning and end are a small part of it."""
        is_fixed = setting.part == FIXED
        return max(self.requests, _FULL_ROUNDS * setting.clients if is_fixed else 0)


class HeliosBench:
    """The models, the stream, and every contestant over it.

    Args:
        say: Called with a line for every run.
        on_done: Told now and then how many requests are done, outside every clock.
    """

    def __init__(
        self, plan: HeliosPlan, say: Callable[[str], None], on_done: Callable[[int], None]
    ) -> None:
        self._plan = plan
        self._say = say
        self._on_done = on_done
        self._clock = ProcessorClock(time.process_time)
        self._done = 0
        self._checkpoints = [read_checkpoint(name) for name in plan.pair]
        _check(self._checkpoints)
        self._suites: dict[tuple[int, int], TaskSuite] = {}
        self._measured: dict[int, tuple[TimedModel, ...]] = {}
        self.settings = plan.settings(plan.memory_bytes or self._memory_bytes())

    def measure(self, keep: Callable[[list[HeliosRow]], None] = lambda _: None) -> list[HeliosRow]:
        """Run everything: rounds outside, and inside a part all contestants in turns.

        Args:
            keep: Called with the rows there are yet, each time there are more.
        """
        plan = self._plan
        layers = {m.id: m.num_layers for m in self._checkpoints}
        runs: dict[HeliosSetting, list[StreamRun]] = {setting: [] for setting in self.settings}
        for number in range(plan.rounds):
            for together in self._groups():
                for setting, run in self.run_together(together, number).items():
                    runs[setting].append(run)
                    self._say(
                        f"round {number + 1}, {setting.part}: {setting.contestant} "
                        f"{run.tokens_per_s:,.0f} tokens/s"
                    )
                keep([summarise(s, found, layers) for s, found in runs.items() if found])
        rows = [summarise(s, found, layers) for s, found in runs.items()]
        alone = {s: found[0] for s, found in runs.items() if s.part == ALONE}
        shadows = self._shadow(alone)
        for row in rows:
            row.shadow = shadows.get(row.setting)
        return rows

    def _groups(self) -> list[list[HeliosSetting]]:
        """Settings that are measured together: a part, or one threshold of the sweep."""
        groups: dict[tuple[str, float | None], list[HeliosSetting]] = {}
        for setting in self.settings:
            groups.setdefault((setting.part, setting.threshold), []).append(setting)
        return list(groups.values())

    def run_together(
        self, settings: Sequence[HeliosSetting], number: int = 0
    ) -> dict[HeliosSetting, StreamRun]:
        """Serve the stream of a round once for every setting, in turns."""
        services = {setting: self._service(setting, number) for setting in settings}
        before = self._done

        def on_done(count: int) -> None:
            self._done = before + count
            self._on_done(self._done)

        serve_in_turns(list(services.values()), on_done=on_done)
        return {setting: service.result() for setting, service in services.items()}

    def _service(self, setting: HeliosSetting, number: int) -> Contestant:
        models = self._models(setting)
        room = ReplicaLimits(
            setting.clients,
            setting.memory_bytes,
            is_adaptive=setting.contestant.endswith("-adaptive"),
            drafts=setting.contestant.endswith(LOSSLESS),
        )
        machine: Helios | None = None
        if setting.contestant.startswith(HELIOS):
            machine, first = self._helios(setting)
        else:
            first = models["only-l" in setting.contestant].full
        clock = TurnClock(self._clock)
        replica = open_replica(models, first, room, clock, self._plan.threads)
        return Contestant(
            self._suite(setting, number), replica, clock, clients=setting.clients, machine=machine
        )

    def _helios(self, setting: HeliosSetting) -> tuple[Helios, DepthClass]:
        """A fresh machine, and what the replica holds when it begins."""
        limit = setting.max_changed_share
        config = HeliosConfig.model_validate(
            {
                "max_changed_share": PAPER_RULE if limit is None else limit,
                "enabled": True,
                "catalogue": self._plan.catalogue,
                "models": tuple(m.id for m in self._checkpoints),
                "slo": setting.contestant.removeprefix(HELIOS).removesuffix(LOSSLESS),
                "scout": False,
                "reassess_requests": setting.interval,
                "profile_share": 1.0,
                "profile_requests": self._plan.profile_requests,
            }
        )
        started = start_helios(
            config,
            ChosenDevice(setting.memory_bytes, VALUE_BYTES, setting.clients),
            context_tokens=min(row_tokens(m) for m in self._checkpoints),
        )
        best = started.picked.candidates[0]
        return started.machine, DepthClass(best.id, best.num_layers)

    def _suite(self, setting: HeliosSetting, number: int) -> TaskSuite:
        """The prompts of a round: each has its own, as a profile's five are a matter of luck."""
        key = (self._plan.num_requests(setting), number)
        if key not in self._suites:
            seed = self._plan.seed + _ROUND_SEEDS * number
            self._suites[key] = drifting_suite(self._checkpoints[0], key[0], seed=seed)
        return self._suites[key]

    def _models(self, setting: HeliosSetting) -> tuple[TimedModel, ...]:
        """The models, timed once for every number of rows."""
        if setting.clients not in self._measured:
            self._measured[setting.clients] = tuple(
                TimedModel.measure(
                    checkpoint,
                    num_rows=setting.clients,
                    threads=self._plan.threads,
                    clock=self._clock,
                )
                for checkpoint in self._checkpoints
            )
        models = self._measured[setting.clients]
        if setting.threshold is None:
            return models
        return tuple(replace(m, threshold=setting.threshold) for m in models)

    def _memory_bytes(self) -> int:
        """A fifth more than the larger model whole."""
        native = load_native(self._checkpoints[-1], num_rows=1, threads=self._plan.threads)
        return int(_MEMORY_SHARE * weight_bytes(native))

    def _shadow(self, runs: dict[HeliosSetting, StreamRun]) -> dict[HeliosSetting, Shadow]:
        """Read a sample of each run's answers again, with one engine a model."""
        shadows = {setting: Shadow() for setting in runs}
        for checkpoint in self._checkpoints:
            llm = LLM.over(load_native(checkpoint, num_rows=1, threads=self._plan.threads))
            for setting, run in runs.items():
                mine = [q for q in run.requests if {c.model for c in q.classes} == {checkpoint.id}]
                step = max(1, math.ceil(len(mine) / max(1, self._plan.shadows)))
                mine = mine[::step]
                again = read_again(
                    llm, [q.prompt.token_ids for q in mine], [q.token_ids for q in mine]
                )
                for request, said in zip(mine, again, strict=True):
                    shadows[setting].add(request, said, checkpoint.num_layers)
        return shadows


def _check(checkpoints: Sequence[Checkpoint]) -> None:
    """Raises: ConfigError: They cannot stand in for each other, or have no exits."""
    if len(checkpoints) > 2:
        raise ConfigError(f"--pair: {len(checkpoints)} models were named; name one or two")
    if len({checkpoint.id for checkpoint in checkpoints}) < len(checkpoints):
        raise ConfigError(
            f"--pair: both models are called {checkpoints[0].id!r}; rename one folder"
        )
    for checkpoint in checkpoints:
        if not checkpoint.exits.layers:
            raise ConfigError(f"--pair: {checkpoint.id} has no early exits; name models with some")
