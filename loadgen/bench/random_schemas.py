"""Seeded JSON schemas whose answers are bounded, with most of what schemas are written with."""

from __future__ import annotations

import random
from typing import Any

MAX_DEPTH = 3
WORDS = ("red", "green", "a b", 'quote "x"', "ümlaut", "", "0", "line\nbreak")
PATTERNS = ("^[a-z]{1,6}$", "^[A-Z][a-z]{2,5}-[0-9]{1,3}$", "^(yes|no|maybe)$", "^\\d{4}$")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email")


def random_schema(seed: int) -> dict[str, Any]:
    """The schema with this number: of an object, with `$defs` in every fourth."""
    rng = random.Random(seed)
    schema = _object(rng, 0)
    if seed % 4 == 0:
        schema["$defs"] = {"part": _scalar(rng)}
        schema["properties"]["referred"] = {"$ref": "#/$defs/part"}
        schema["required"].append("referred")
    return schema


def _any(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = ["scalar"] * 4
    if depth < MAX_DEPTH:
        kinds += ["object", "array", "anyOf"]
    kind = rng.choice(kinds)
    if kind == "object":
        return _object(rng, depth)
    if kind == "array":
        return _array(rng, depth)
    if kind == "anyOf":
        return {"anyOf": [_any(rng, depth + 1), {"type": "null"}]}
    return _scalar(rng)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = [f"{rng.choice(['id', 'name', 'größe', 'a-b', 'x y'])}_{i}" for i in range(4)]
    names = names[: rng.randint(1, 4)]
    required = [name for name in names if rng.random() < 0.7]
    return {
        "type": "object",
        "properties": {name: _any(rng, depth + 1) for name in names},
        "required": required,
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 2)
    schema: dict[str, Any] = {"type": "array", "minItems": least}
    schema["maxItems"] = least + rng.randint(0, 2)
    if rng.random() < 0.2:
        schema["prefixItems"] = [_scalar(rng)]
    return schema | {"items": _any(rng, depth + 1)}


def _scalar(rng: random.Random) -> dict[str, Any]:
    kind = rng.randrange(9)
    if kind == 0:
        return {"type": "boolean"}
    if kind == 1:
        return {"enum": rng.sample([*WORDS, 1, -2.5, None, True], rng.randint(1, 5))}
    if kind == 2:
        return {"const": rng.choice([*WORDS, 42, False])}
    if kind == 3:
        low = rng.randint(-1000, 1000)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 5000)}
    if kind == 4:
        low = rng.randint(-50, 50)
        return {"type": "number", "exclusiveMinimum": low, "maximum": low + rng.randint(1, 100)}
    if kind == 5:
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    if kind == 6:
        return {"type": "string", "format": rng.choice(FORMATS), "maxLength": 40}
    least = rng.randint(0, 4)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 12)}
