"""A templated story: free places and, without a number of days, a free length.

Every day the hero goes to a place other than the day before's and does there, with the friend of
the prompt, what is done at that place. Only the place (and a length that the prompt does not give)
is free, so a checker can decide whether a story is sound.
"""

import random
import re

from quadriga.tasks.lengths import LengthMix
from quadriga.tasks.words import DEEDS, FRIENDS, HEROES, PLACES

STORY_SIZE = (2, 40)  # days
# Days that a story may take when the prompt says it in a word.
STORY_WORDS: dict[str, tuple[int, int]] = {"short": (2, 3), "medium": (4, 8), "long": (10, 16)}
WORD_SHARE = 0.25
# Told stories stay away from the places of so many days before; the checker asks for one day only.
# "Not yesterday's place" alone is a rule too faint to be learned soon: it saves .1 nats a day.
_APART_DAYS = 3

_PROMPT = re.compile(
    r"Tell a (?:(?P<word>short|medium|long) story|story of (?P<days>\d+) days)"
    r" about (?P<hero>[A-Z][a-z]+) and the (?P<friend>[a-z]+)\."
)


def make_story(rng: random.Random, lengths: LengthMix) -> str:
    """Prompt for a story of a given number of days, or of a length said in a word."""
    about = f"about {rng.choice(HEROES)} and the {rng.choice(FRIENDS)}."
    size = lengths.sample(rng, *STORY_SIZE)
    fitting = [word for word, (lo, hi) in STORY_WORDS.items() if lo <= size <= hi]
    if fitting and rng.random() < WORD_SHARE:
        return f"Tell a {fitting[0]} story {about}"
    return f"Tell a story of {size} days {about}"


def tell_story(rng: random.Random, prompt: str) -> str:
    """One sound story for the prompt, its free choices drawn from `rng`."""
    match = _PROMPT.fullmatch(prompt)
    if match is None:
        raise ValueError(f"not a story prompt: {prompt!r}")
    hero, friend = match["hero"], match["friend"]
    days = int(match["days"]) if match["days"] else rng.randint(*STORY_WORDS[match["word"]])
    sentences: list[str] = []
    visited: list[str] = []
    for day in range(1, days + 1):
        place = rng.choice([other for other in PLACES if other not in visited[-_APART_DAYS:]])
        visited.append(place)
        sentences.append(
            f"Day {day}: {hero} went to the {place}. There {hero} {DEEDS[place]} with the {friend}."
        )
    return " ".join(sentences)


def check_story(prompt: str, answer: str) -> bool:
    """Whether `answer` is a sound story for the prompt: names, days, places, deeds, length."""
    match = _PROMPT.fullmatch(prompt)
    if match is None:
        return False
    hero, friend = match["hero"], match["friend"]
    sentence = re.compile(
        rf"Day (\d+): {hero} went to the ([a-z]+)\. "
        rf"There {hero} ([a-z]+) with the {friend}\.(?: |$)"
    )
    position, day, last_place = 0, 0, ""
    while position < len(answer):
        found = sentence.match(answer, position)
        if found is None:
            return False
        day, place = day + 1, found[2]
        if int(found[1]) != day or place == last_place or DEEDS.get(place) != found[3]:
            return False
        position, last_place = found.end(), place
    low, high = (
        STORY_WORDS[match["word"]] if match["word"] else (int(match["days"]), int(match["days"]))
    )
    return low <= day <= high and not answer.endswith(" ")
