"""All runs of a program in which at most so many things go wrong.

A run asks what happens at each point where something may go wrong; the first option is that
nothing does. `explore` runs the program again and again, each time with another set of points at
which another option is taken, the sets with fewest faults first: the first failure that is found
has no more faults than it needs. Every run is the same each time it is repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

Faults = tuple[tuple[int, str], ...]
"""(number of the point, the option taken there), ascending."""


@dataclass
class Choices:
    """What happens in one run.

    Attributes:
        points: The points passed so far: what was asked, and its options.
        states: What the world looked like at them.
    """

    faults: Faults = ()
    points: list[tuple[str, Sequence[str]]] = field(default_factory=list)
    states: set[Hashable] = field(default_factory=set)

    def pick(self, asked: str, options: Sequence[str], state: Hashable = None) -> str:
        """What happens here; the first option unless the run is to deviate at this point."""
        number = len(self.points)
        self.points.append((asked, options))
        self.states.add(state)
        return dict(self.faults).get(number, options[0])

    def deviations(self) -> Iterator[Faults]:
        """The same run with one more fault, later than those it had."""
        first = self.faults[-1][0] + 1 if self.faults else 0
        for number in range(first, len(self.points)):
            for option in self.points[number][1][1:]:
                yield (*self.faults, (number, option))

    def history(self) -> str:
        """The run as text: every point, and what went wrong there."""
        taken = dict(self.faults)
        return "\n".join(
            f"{number}: {asked}: {taken.get(number, options[0])}"
            for number, (asked, options) in enumerate(self.points)
        )


@dataclass
class Explored:
    """What an exploration has seen.

    Attributes:
        num_runs: Runs, all different.
        depth: Points of the longest.
        states: Different states of the world at the points.
    """

    num_runs: int = 0
    depth: int = 0
    states: set[Hashable] = field(default_factory=set)

    def __str__(self) -> str:
        return f"{self.num_runs} runs, {self.depth} points deep, {len(self.states)} states"


class FailedRun(AssertionError):
    """A run that broke a promise, with the fewest faults that do so."""

    def __init__(self, faults: Faults, history: str, explored: Explored) -> None:
        super().__init__(f"faults {faults}, after {explored}\n{history}")
        self.faults = faults
        self.explored = explored


def explore(run: Callable[[Choices], None], max_faults: int) -> Explored:
    """Make every run with at most `max_faults` faults.

    Raises:
        FailedRun: A run raised; from what it raised.
    """
    explored = Explored()
    due: list[Faults] = [()]
    for num_faults in range(max_faults + 1):
        following: list[Faults] = []
        for faults in due:
            choices = Choices(faults)
            try:
                run(choices)
            except Exception as exc:
                raise FailedRun(faults, choices.history(), explored) from exc
            explored.num_runs += 1
            explored.depth = max(explored.depth, len(choices.points))
            explored.states |= choices.states
            if num_faults < max_faults:
                following += choices.deviations()
        due = following
    return explored
