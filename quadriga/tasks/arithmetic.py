"""Column addition, written out digit by digit with its carries."""

import random
import re

from quadriga.tasks.lengths import LengthMix

ADD_SIZE = (1, 8)  # digits of each summand

_ADD = re.compile(r"Add ((?:\d )*\d) and ((?:\d )*\d)\.")


def make_add(rng: random.Random, lengths: LengthMix) -> str:
    """Prompt to add two numbers of equally many digits; digits stand apart."""
    size = lengths.sample(rng, *ADD_SIZE)
    rows = [[str(rng.randint(0, 9)) for _ in range(size)] for _ in range(2)]
    return f"Add {' '.join(rows[0])} and {' '.join(rows[1])}."


def solve_add(prompt: str) -> str | None:
    """Answer of an addition prompt, or None when the prompt is not one."""
    if (match := _ADD.fullmatch(prompt)) is None:
        return None
    top, bottom = match.group(1).split(), match.group(2).split()
    if len(top) != len(bottom):
        return None
    carry, digits, steps = 0, [], []
    for a, b in zip(reversed(top), reversed(bottom), strict=True):
        value = int(a) + int(b) + carry
        steps.append(f"{a} and {b} and {carry} is {value} write {value % 10} carry {value // 10};")
        digits.append(str(value % 10))
        carry = value // 10
    if carry:
        digits.append(str(carry))
    return f"Adding: {' '.join(steps)} total {' '.join(reversed(digits))}"
