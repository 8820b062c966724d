"""The tasks by name, and the two functions that make and judge examples."""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from quadriga.tasks import arithmetic, lists, story
from quadriga.tasks.lengths import FULL_LENGTHS, LengthMix
from quadriga.tasks.wordings import make_wording

LINE_END = "\n"


@dataclass(frozen=True, slots=True)
class Example:
    """One task instance: the model reads `text` and writes `continuation` and the end token.

    Attributes:
        prompt: The question in the task's own words, on one line; what `check` takes.
        answer: A right answer, without line ends.
        wording: The question as somebody else would put it, its line end included where it has
            one; empty where it is asked in the task's own words.
    """

    task: str
    prompt: str
    answer: str
    wording: str = ""

    @property
    def text(self) -> str:
        """What a completion sends: the question as it is asked, with its line end."""
        return self.wording or self.prompt + LINE_END

    @property
    def continuation(self) -> str:
        """What follows `text`: the answer, behind a line end where the question has none."""
        return self.answer if self.text.endswith(LINE_END) else LINE_END + self.answer


@dataclass(frozen=True, slots=True)
class _Task:
    """A task: `solve` is None where several answers are right and `check` decides."""

    make: Callable[[random.Random, LengthMix], str]
    size: tuple[int, int]
    solve: Callable[[str], str | None] | None


_REGISTRY: dict[str, _Task] = {
    "count": _Task(lists.make_count, lists.COUNT_SIZE, lists.solve_count),
    "repeat": _Task(lists.make_repeat, lists.REPEAT_SIZE, lists.solve_repeat),
    "copy": _Task(lists.make_copy, lists.COPY_SIZE, lists.solve_copy),
    "reverse": _Task(lists.make_reverse, lists.REVERSE_SIZE, lists.solve_reverse),
    "sort": _Task(lists.make_sort, lists.SORT_SIZE, lists.solve_sort),
    "transform": _Task(lists.make_transform, lists.TRANSFORM_SIZE, lists.solve_transform),
    "add": _Task(arithmetic.make_add, arithmetic.ADD_SIZE, arithmetic.solve_add),
    "story": _Task(story.make_story, story.STORY_SIZE, None),
}

TASKS: tuple[str, ...] = tuple(_REGISTRY)
# Share of each task in the load of examples: what load generators and the evaluation draw.
DEFAULT_MIX: Mapping[str, float] = {task: 1.0 / len(TASKS) for task in TASKS}


def make_example(task: str, *, seed: int, index: int, lengths: LengthMix = FULL_LENGTHS) -> Example:
    """Return example number `index` of a task's stream; a pure function of its arguments.

    Raises:
        KeyError: Unknown task.
    """
    entry = _REGISTRY[task]
    rng = random.Random(f"quadriga:{task}:{seed}:{index}")
    prompt = entry.make(rng, lengths)
    return Example(task, prompt, _answer(task, prompt, rng))


def _answer(task: str, prompt: str, rng: random.Random) -> str:
    """A right answer to a prompt in the task's own words."""
    solve = _REGISTRY[task].solve
    answer = story.tell_story(rng, prompt) if solve is None else solve(prompt)
    if answer is None:
        raise AssertionError(f"{task} cannot solve its own prompt {prompt!r}")
    return answer


def make_reworded_example(task: str, *, seed: int, index: int) -> Example:
    """Return example number `index` of a task's short questions in words other than its own.

    Raises:
        KeyError: Unknown task.
    """
    rng = random.Random(f"quadriga:reworded:{task}:{seed}:{index}")
    prompt, wording = make_wording(rng, task)
    return Example(task, prompt, _answer(task, prompt, rng), wording)


def sample_examples(
    *,
    seed: int,
    start: int = 0,
    mix: Mapping[str, float] = DEFAULT_MIX,
    lengths: LengthMix = FULL_LENGTHS,
    reworded_share: float = 0.0,
) -> Iterator[Example]:
    """Yield examples number `start`, `start + 1`, … of a mixed stream, without end.

    Args:
        seed: Names the stream.
        start: Index of the first example, so that a reader can resume.
        mix: Weight per task; they need not sum to 1.
        lengths: Size distribution inside each task's range.
        reworded_share: Share of short questions in other words.
    """
    names, weights = list(mix), list(mix.values())
    index = start
    while True:
        rng = random.Random(f"quadriga:mix:{seed}:{index}")
        task = rng.choices(names, weights)[0]
        if rng.random() < reworded_share:
            yield make_reworded_example(task, seed=seed, index=index)
        else:
            yield make_example(task, seed=seed, index=index, lengths=lengths)
        index += 1


def check(task: str, prompt: str, answer: str) -> bool:
    """Whether `answer` (without end token) is right for `prompt`; surrounding space is ignored.

    Raises:
        KeyError: Unknown task.
    """
    entry, prompt, answer = _REGISTRY[task], prompt.strip(), answer.strip()
    if entry.solve is None:
        return story.check_story(prompt, answer)
    return entry.solve(prompt) == answer


def size_of(task: str) -> tuple[int, int]:
    """Smallest and largest size of a task (items, repetitions, digits or days)."""
    return _REGISTRY[task].size
