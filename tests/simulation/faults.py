"""What goes wrong in a simulated cluster, and the orders that its operator and scheduler give."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from actors.rpc.lifecycle import scheduler_name
from quadriga.background import background
from quadriga.config.loader import load_config
from quadriga.core.migration import MigrationCause, MigrationOrder
from quadriga.core.replica import Role
from tests.simulation.plans import APP, Fault
from tests.simulation.processes import Process
from tests.simulation.ray_in_virtual_time import NODES, Actor
from tests.simulation.stand_ins import VirtualTransport

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster

MOVES_OF_AN_ORDER = 12
NODE_LEFT_S = (2.0, 20.0)


class Faults:
    """Carries out the faults of a plan."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._ray, self._wires = cluster.ray, cluster.wires

    def strike(self, fault: Fault) -> None:
        """Let one thing go wrong now."""
        rng = random.Random(fault.seed)
        kind, _, role = fault.kind.partition(" ")
        carried_out = getattr(self, f"_{kind.replace('-', '_')}")
        if kind in ("unanswered", "late"):
            carried_out(rng, role)
        elif role in ("", "node"):
            carried_out(rng)
        else:
            able = self._cluster.actors(role)
            if not able:
                self._note(f"{fault.kind}: there is none")
                return
            actor = rng.choice(able)
            assert actor.process is not None
            carried_out(rng, actor, actor.process)

    def _note(self, what: str) -> None:
        self._cluster.note(what)

    def _now_s(self) -> float:
        return self._cluster.loop.time()

    # Processes

    def _kill(self, rng: random.Random, actor: Actor, process: Process) -> None:
        self._note(f"kill {actor.name}")
        process.die()

    def _stop(self, rng: random.Random, actor: Actor, process: Process) -> None:
        seconds = rng.choice([0.5, 2.0, 6.0, 15.0, 30.0])
        self._note(f"{actor.name} stands still for {seconds} s")
        process.stop()
        self._cluster.loop.call_later(seconds, process.go_on)

    def _term(self, rng: random.Random, actor: Actor, process: Process) -> None:
        self._note(f"SIGTERM to {actor.name}")
        if process.asked_to_go is None:
            process.die()
        else:
            process.call(process.asked_to_go)

    def _fill(self, rng: random.Random, actor: Actor, process: Process) -> None:
        self._note(f"{actor.name} gets no more memory")
        process.is_full = True

    def _skew(self, rng: random.Random, actor: Actor, process: Process) -> None:
        process.skew_s = rng.uniform(-1.0, 1.0)
        self._note(f"the wall clock of {actor.name} is off by {process.skew_s:.2f} s")

    def _drift(self, rng: random.Random, actor: Actor, process: Process) -> None:
        process.drift = rng.uniform(-0.02, 0.02)
        process.drifts_from_s = self._now_s()
        self._note(f"the wall clock of {actor.name} drifts by {process.drift:.1%}")

    def _drain(self, rng: random.Random) -> None:
        node, left_s = rng.choice(NODES), rng.uniform(*NODE_LEFT_S)
        if self._ray.leaving:
            self._note("a node goes already")
            return
        self._note(f"{node} will go in {left_s:.1f} s")
        self._ray.leaving[node] = self._now_s() + left_s
        self._cluster.loop.call_later(left_s, self._ray.take_node, node)

    # Messages

    def _slow(self, rng: random.Random, actor: Actor, process: Process) -> None:
        seconds, by_s = rng.uniform(1.0, 10.0), rng.choice([0.05, 0.5, 3.0])
        self._note(f"{actor.name} sends up to {by_s} s late for {seconds:.1f} s")
        self._wires.slow_down(actor.name, self._now_s() + seconds, by_s)

    def _lose(self, rng: random.Random, actor: Actor, process: Process) -> None:
        seconds, share = rng.uniform(0.5, 5.0), rng.choice([0.1, 0.5])
        self._note(f"{share:.0%} of messages from and to {actor.name} lost for {seconds:.1f} s")
        self._wires.lose(actor.name, self._now_s() + seconds, share)

    def _unanswered(self, rng: random.Random, method: str) -> None:
        seconds = rng.uniform(0.2, 4.0)
        self._note(f"no answer of {method} arrives for {seconds:.1f} s")
        self._wires.lose_answers(method, self._now_s() + seconds)

    def _late(self, rng: random.Random, method: str) -> None:
        seconds, by_s = rng.uniform(0.2, 4.0), rng.choice([0.3, 3.0, 15.0])
        self._note(f"calls of {method} arrive up to {by_s} s late for {seconds:.1f} s")
        self._wires.delay_calls(method, self._now_s() + seconds, by_s)

    def _cut(self, rng: random.Random, *, one_way: bool = False) -> None:
        """Part the cluster in two for a while."""
        names = [a.name for a in self._cluster.actors("any")]
        apart = set(rng.sample(names, rng.randint(1, max(1, len(names) // 3))))
        seconds = rng.choice([0.5, 2.0, 5.0, 12.0])
        until_s = self._now_s() + seconds
        for a in sorted(apart):
            for b in names:
                if b not in apart:
                    self._wires.cut(a, b, until_s)
                    if not one_way:
                        self._wires.cut(b, a, until_s)
        how = "hears, but is not heard" if one_way else "is cut off"
        self._note(f"{', '.join(sorted(apart))} {how} for {seconds} s")

    def _half_cut(self, rng: random.Random) -> None:
        self._cut(rng, one_way=True)

    def _corrupt(self, rng: random.Random) -> None:
        VirtualTransport.corrupt_until_s = self._now_s() + rng.uniform(0.5, 3.0)
        self._note("parts of KV are corrupt for a while")

    def _break(self, rng: random.Random) -> None:
        """The connections of some clients break; their ingresses live."""
        alive = [(i, task) for i, task in self._cluster.connections if not task.done()]
        chosen = rng.sample(alive, (len(alive) + 1) // 2)
        self._note(f"{len(chosen)} connections break")
        for inbox, _ in chosen:
            inbox.put_nowait(None)

    # Orders

    def _move(self, rng: random.Random) -> None:
        """The scheduler orders what runs to other replicas, one after the other, at random."""
        self._note("running sequences are ordered elsewhere")
        self._move_one(rng, MOVES_OF_AN_ORDER)

    def _move_one(self, rng: random.Random, left: int) -> None:
        cluster = self._cluster
        scheduler = self._ray.actors.get(scheduler_name(APP))
        decodes = list(cluster.replicas(Role.DECODE))
        running = [
            (name, state.sequence_id)
            for name, decode in decodes
            for state in decode.engine.core.loop.running
        ]
        if running and len(decodes) > 1 and scheduler is not None and scheduler.instance:
            source, sequence_id = rng.choice(running)
            destination = rng.choice([name for name, _ in decodes if name != source])
            depth_class = dict(decodes)[source].spec.engine.depth_class
            order = MigrationOrder(
                sequence_id, depth_class, source, destination, MigrationCause.BALANCE, 0.1, 1, 1.0
            )
            rescheduling, process = scheduler.instance._rescheduling, scheduler.process

            def give() -> None:
                rescheduling.governor.moves.ordered(order, cluster.loop.time())
                background(rescheduling._carry_out(order))

            if process is not None:
                process.call(give)
        if left > 1:
            cluster.loop.call_later(rng.uniform(0.02, 0.4), self._move_one, rng, left - 1)

    def _configure(self, rng: random.Random) -> None:
        """The operator asks for something else: other numbers, or a setting of all replicas."""
        config = dict(self._cluster.plan.settings)
        if rng.random() < 0.5:
            config["decode_replicas"] = rng.randint(2, 4)
            config["prefill_replicas"] = rng.randint(1, 3)
            what = f"{config['prefill_replicas']} + {config['decode_replicas']} replicas"
        else:
            config["transport"] = {"lease_s": rng.choice([10.0, 20.0])}
            what = f"leases of {config['transport']['lease_s']} s: every replica anew"
        self._note(f"the configuration asks for {what}")
        self._cluster.configure(load_config(config))
