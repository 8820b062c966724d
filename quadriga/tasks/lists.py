"""List tasks: count, repeat, copy, reverse, sort, transform. The answer follows from the prompt."""

import random
import re
from collections.abc import Callable

from quadriga.tasks.lengths import LengthMix
from quadriga.tasks.words import ADJECTIVES, NOUNS, WORDS

# Sizes [lo, hi] per task, in items.
COUNT_SIZE = (2, 98)
REPEAT_SIZE = (2, 99)
COPY_SIZE = (2, 32)
REVERSE_SIZE = (2, 24)
SORT_SIZE = (2, 20)
TRANSFORM_SIZE = (2, 24)

# Instruction → (operation, largest operand).
TRANSFORMS: dict[str, tuple[Callable[[int], int], int, int]] = {
    "Add 1 to each": (lambda x: x + 1, 0, 98),
    "Take 1 from each": (lambda x: x - 1, 1, 99),
    "Add 10 to each": (lambda x: x + 10, 0, 89),
    "Double each": (lambda x: 2 * x, 0, 49),
}
DUPLICATE_SHARE = 0.3  # of the lists draw from a small pool, so that items repeat


def _items(rng: random.Random, size: int, pool: list[str]) -> list[str]:
    """Draw `size` items; in a share of the lists from few values, so that they repeat."""
    if rng.random() < DUPLICATE_SHARE:
        pool = rng.sample(pool, min(len(pool), max(2, (2 * size) // 3)))
    return [rng.choice(pool) for _ in range(size)]


def _mixed_pool(rng: random.Random) -> list[str]:
    kind = rng.random()
    if kind < 0.4:
        return [str(value) for value in range(100)]
    return list(WORDS) if kind < 0.9 else [*WORDS, *(str(value) for value in range(100))]


def make_count(rng: random.Random, lengths: LengthMix) -> str:
    """Prompt to count from one number to another, up or down."""
    size = lengths.sample(rng, *COUNT_SIZE)
    low = rng.randint(0, 100 - size)
    high = low + size - 1
    if rng.random() < 0.35:
        return f"Count down from {high} to {low}."
    return rng.choice([f"Count from {low} to {high}.", f"Count to {high} from {low}."])


def make_repeat(rng: random.Random, lengths: LengthMix) -> str:
    """Prompt to repeat a phrase of one to three words."""
    size = lengths.sample(rng, *REPEAT_SIZE)
    words = rng.choices((1, 2, 3), (0.5, 0.3, 0.2))[0]
    phrase = " ".join([*rng.sample(ADJECTIVES, words - 1), rng.choice(NOUNS)])
    return rng.choice([f"Repeat {phrase} {size} times.", f"Write {phrase} {size} times."])


def make_copy(rng: random.Random, lengths: LengthMix) -> str:
    """Prompt to copy a list of words, numbers or both."""
    items = _items(rng, lengths.sample(rng, *COPY_SIZE), _mixed_pool(rng))
    return f"{rng.choice(['Copy', 'Copy the list'])}: {' '.join(items)}"


def make_reverse(rng: random.Random, lengths: LengthMix) -> str:
    """Prompt to reverse a list."""
    items = _items(rng, lengths.sample(rng, *REVERSE_SIZE), _mixed_pool(rng))
    return f"{rng.choice(['Reverse', 'Reverse the list'])}: {' '.join(items)}"


def make_sort(rng: random.Random, lengths: LengthMix) -> str:
    """Prompt to sort numbers, duplicates included."""
    items = _items(rng, lengths.sample(rng, *SORT_SIZE), [str(value) for value in range(100)])
    return f"{rng.choice(['Sort', 'Sort the numbers'])}: {' '.join(items)}"


def make_transform(rng: random.Random, lengths: LengthMix) -> str:
    """Prompt to apply one operation to each number."""
    size = lengths.sample(rng, *TRANSFORM_SIZE)
    instruction = rng.choice(list(TRANSFORMS))
    _, low, high = TRANSFORMS[instruction]
    items = _items(rng, size, [str(value) for value in range(low, high + 1)])
    return f"{instruction}: {' '.join(items)}"


_COUNT = re.compile(r"Count (?P<down>down )?(?:from (\d+) to (\d+)|to (\d+) from (\d+))\.")
_REPEAT = re.compile(r"(?:Repeat|Write) (.+) (\d+) times\.")
_LIST = re.compile(r"([A-Z][a-z0-9 ]*): (.+)")


def solve_count(prompt: str) -> str | None:
    """Answer of a count prompt, or None when the prompt is not one."""
    if (match := _COUNT.fullmatch(prompt)) is None:
        return None
    _, first, last, last_2, first_2 = match.groups()
    start, end = int(first or first_2), int(last or last_2)
    step = 1 if end >= start else -1
    return "Counting: " + " ".join(str(value) for value in range(start, end + step, step))


def solve_repeat(prompt: str) -> str | None:
    """Answer of a repeat prompt: every repetition says how many are left."""
    if (match := _REPEAT.fullmatch(prompt)) is None:
        return None
    phrase, times = match.group(1), int(match.group(2))
    return "Repeating: " + ", ".join(f"{phrase} {left} left" for left in range(times)[::-1])


def _list_of(prompt: str, verb: str) -> list[str] | None:
    match = _LIST.fullmatch(prompt)
    if match is None or not match.group(1).startswith(verb):
        return None
    return match.group(2).split()


def solve_copy(prompt: str) -> str | None:
    """Answer of a copy prompt."""
    items = _list_of(prompt, "Copy")
    return None if items is None else "Copied: " + " ".join(items)


def solve_reverse(prompt: str) -> str | None:
    """Answer of a reverse prompt."""
    items = _list_of(prompt, "Reverse")
    return None if items is None else "Reversed: " + " ".join(reversed(items))


def solve_sort(prompt: str) -> str | None:
    """Answer of a sort prompt, ascending."""
    items = _list_of(prompt, "Sort")
    if items is None or not all(item.isdecimal() for item in items):
        return None
    return "Sorted: " + " ".join(sorted(items, key=int))


def solve_transform(prompt: str) -> str | None:
    """Answer of a transform prompt: every operand stands before its result."""
    match = _LIST.fullmatch(prompt)
    if match is None or match.group(1) not in TRANSFORMS:
        return None
    operation = TRANSFORMS[match.group(1)][0]
    items = match.group(2).split()
    if not all(item.isdecimal() for item in items):
        return None
    return "Result: " + ", ".join(f"{item} is {operation(int(item))}" for item in items)
