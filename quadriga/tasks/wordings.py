"""Short task prompts in the words that people type, beside the one wording of each task's own.

`make_wording` draws a prompt of a task, short and mostly of small numbers, in the task's own words
(so that the task's solver and checker know it), and a text that asks the same in other words: lower
case, commas or brackets, no full stop or a needless one, a space too many, "Please" or "Can you",
and with or without the line end that the task's own prompts have.
"""

import random
from collections.abc import Callable, Sequence

from quadriga.tasks.lists import TRANSFORMS
from quadriga.tasks.story import STORY_WORDS
from quadriga.tasks.words import ADJECTIVES, FRIENDS, HEROES, NOUNS, WORDS

_MAX_ITEMS = 8
_NUMBER_RANGES = ((0, 9), (1, 9), (0, 20), (0, 99))
_SEPARATORS = {" ": 0.4, ", ": 0.33, ",": 0.07, " and ": 0.1, "[]": 0.1}
_POLITE = {
    "{}": 0.6,
    "Please {}": 0.16,
    "please {}": 0.04,
    "Can you {}": 0.12,
    "Could you please {}": 0.05,
    "Could you {}": 0.03,
}
_LINE_ENDS = {"\n": 0.55, "": 0.41, "\n\n": 0.04}


def make_wording(rng: random.Random, task: str) -> tuple[str, str]:
    """Return a prompt in the task's own words, and the whole text that asks for the same.

    Raises:
        KeyError: Unknown task.
    """
    prompt, phrase = _MAKERS[task](rng)
    if rng.random() < 0.15:
        phrase = prompt.removesuffix(".")
    polite = _choice(rng, _POLITE)
    if polite != "{}" or rng.random() < 0.4:
        phrase = phrase[0].lower() + phrase[1:]
    stop = _choice(rng, {"": 0.45, ".": 0.45, "!": 0.1})
    if polite.lower().startswith(("can", "could")):
        stop = rng.choice("??.")
    space = " " if rng.random() < 0.12 else ""
    return prompt, polite.format(phrase) + stop + space + _choice(rng, _LINE_ENDS)


def _choice(rng: random.Random, weights: dict[str, float]) -> str:
    return rng.choices(list(weights), list(weights.values()))[0]


def _numbers(rng: random.Random, low: int = 0, high: int = 99) -> list[str]:
    """Few numbers of [low, high], mostly small ones."""
    bottom, top = rng.choice(_NUMBER_RANGES)
    bottom, top = max(low, bottom), min(high, top)
    return [str(rng.randint(bottom, top)) for _ in range(_size(rng))]


def _size(rng: random.Random) -> int:
    return rng.randint(2, 5) if rng.random() < 0.8 else rng.randint(6, _MAX_ITEMS)


def _items(rng: random.Random) -> list[str]:
    """Few numbers or few words."""
    if rng.random() < 0.6:
        return _numbers(rng)
    return [rng.choice(WORDS) for _ in range(_size(rng))]


def _join(rng: random.Random, items: Sequence[str]) -> str:
    """The items as people write a list."""
    separator = _choice(rng, _SEPARATORS)
    # Words that no space stands before are no entries of the vocabulary.
    if not items[0].isdecimal() and separator in (",", "[]"):
        separator = ", "
    if separator == " and ":
        return f"{', '.join(items[:-1])} and {items[-1]}"
    if separator == "[]":
        return f"[{', '.join(items)}]"
    return separator.join(items)


def _list_maker(
    verb: str, headings: Sequence[str], draw: Callable[[random.Random], list[str]]
) -> Callable[[random.Random], tuple[str, str]]:
    def make(rng: random.Random) -> tuple[str, str]:
        items = draw(rng)
        heading = rng.choice(headings) + ("" if rng.random() < 0.3 else ":")
        return f"{verb}: {' '.join(items)}", f"{heading} {_join(rng, items)}"

    return make


def _count(rng: random.Random) -> tuple[str, str]:
    low = rng.choice((0, 1, 1, 1, rng.randint(2, 9), rng.randint(10, 79)))
    high = low + rng.randint(2, 20)
    if rng.random() < 0.35:
        prompt = f"Count down from {high} to {low}."
        return prompt, rng.choice(
            (
                f"Count down from {high} to {low}",
                f"Count from {high} to {low}",
                f"Count from {high} down to {low}",
            )
        )
    phrases = [f"Count from {low} to {high}"] * 3 + [f"Count to {high} from {low}"]
    phrases.append(f"Count from {low} up to {high}")
    if low == 1:
        phrases += [f"Count to {high}", f"Count up to {high}"]
    return f"Count from {low} to {high}.", rng.choice(phrases)


def _repeat(rng: random.Random) -> tuple[str, str]:
    noun, times = rng.choice(NOUNS), rng.randint(2, 12)
    phrase = noun if rng.random() < 0.7 else f"{rng.choice(ADJECTIVES)} {noun}"
    verb = rng.choice(("Repeat", "Write", "Say", "Repeat the word" if phrase == noun else "Repeat"))
    return f"Repeat {phrase} {times} times.", f"{verb} {phrase} {times} times"


def _transform(rng: random.Random) -> tuple[str, str]:
    instruction = rng.choice(list(TRANSFORMS))
    _, low, high = TRANSFORMS[instruction]
    items = _numbers(rng, low, high)
    heading = rng.choice((instruction, instruction, f"{instruction} number"))
    return f"{instruction}: {' '.join(items)}", f"{heading}: {_join(rng, items)}"


def _add(rng: random.Random) -> tuple[str, str]:
    a, b = (rng.randint(0, rng.choice((9, 9, 99))) for _ in range(2))
    digits = max(len(str(a)), len(str(b)))
    rows = [" ".join(str(value).zfill(digits)) for value in (a, b)]
    phrase = rng.choice((f"Add {a} and {b}", f"Add {a} and {b}", f"Add {a} + {b}"))
    return f"Add {rows[0]} and {rows[1]}.", phrase


def _story(rng: random.Random) -> tuple[str, str]:
    about = f"about {rng.choice(HEROES)} and the {rng.choice(FRIENDS)}"
    me = rng.choice(("", "me "))
    if rng.random() < 0.5:
        days = rng.randint(2, 6)
        prompt = f"Tell a story of {days} days {about}."
        return prompt, f"Tell {me}a story of {days} days {about}"
    word = rng.choice(("short", *STORY_WORDS))
    named = "" if word == "short" and rng.random() < 0.5 else f"{word} "
    return f"Tell a {word} story {about}.", f"Tell {me}a {named}story {about}"


_MAKERS: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    "count": _count,
    "repeat": _repeat,
    "copy": _list_maker("Copy", ("Copy", "Copy", "Copy the list", "Copy this list"), _items),
    "reverse": _list_maker(
        "Reverse", ("Reverse", "Reverse", "Reverse the list", "Reverse this list"), _items
    ),
    "sort": _list_maker(
        "Sort",
        ("Sort", "Sort", "Sort the numbers", "Sort these numbers", "Sort the list"),
        _numbers,
    ),
    "transform": _transform,
    "add": _add,
    "story": _story,
}
