"""`python -m loadgen bench grammar`: answers of a given form, whether they are, and what it costs.

1. Random schemas: one answer to each, at temperatures from 0 to 5, with early exits; an answer that
   ended by itself must be what `jsonschema` takes.
2. The cost of a token: full batches with and without a schema, in turns, drawn and greedy; greedy
   rows without a form have the fast path, so theirs is the larger cost. The headline is the larger
   share of a step that an ordinary form adds: (with − without) / without.
3. With `--suite`, a checkout of the JSON-Schema-Test-Suite: of the schemas that compile, no invalid
   instance may be allowed. Valid ones may be refused, as properties have one order here.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from decimal import Decimal
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import jsonschema  # type: ignore[import-untyped]

from loadgen.bench.random_schemas import random_schema
from loadgen.comparison.pairs import median_ratio
from loadgen.options import whole
from loadgen.report.experiment import print_line, show
from quadriga.core.grammar import Grammar
from quadriga.core.request import FinishReason, SamplingParams
from quadriga.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from quadriga.llm import LLM
    from quadriga.text.grammar import TokenGrammars

TEMPERATURES = (0.0, 0.5, 1.0, 2.0, 5.0)
PROMPT = "Answer with JSON: a list of words.\n"
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["person", "place", "thing"]},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
FORMS = {
    "records": {"type": "array", "items": RECORD, "minItems": 5000},
    "strings of 12 at most": {
        "type": "array",
        "items": {"type": "string", "maxLength": 12},
        "minItems": 5000,
    },
}
"""Forms whose answers do not end within a batch's tokens: an ordinary one, and one whose masks take
the parser long, as every token's length counts."""
MAX_TOKENS = 1500


@dataclass(slots=True)
class Answers:
    """What became of the answers to random schemas.

    Attributes:
        invalid: Seeds of those that a validator refuses.
        num_cut: Answers that the context ended.
        num_refused: Schemas that did not compile.
    """

    invalid: list[int]
    num_cut: int = 0
    num_refused: int = 0
    num_tokens: int = 0
    num_early: int = 0


@dataclass(frozen=True, slots=True)
class TokenCost:
    """What a form adds to a step of a full batch.

    Attributes:
        tokens: How they are chosen.
        plain_s, form_s: Seconds a step without and with the form.
        plain_cpu_s, form_cpu_s: Of processor time, which holds on a busy machine too.
        share, cpu_share: Of the step without it: medians of the rounds' own.
    """

    tokens: str
    form: str
    plain_s: float
    form_s: float
    plain_cpu_s: float
    form_cpu_s: float
    share: float
    cpu_share: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--model", default="quadriga-s", help="answers the schemas")
    parser.add_argument(
        "--cost-model", default="smollm2-135m-instruct", help="whose tokens are timed"
    )
    parser.add_argument("--schemas", type=whole(0), default=1000, help="random ones")
    parser.add_argument("--rows", type=whole(1), default=32, help="of a timed batch")
    parser.add_argument("--tokens", type=whole(2), default=64, help="of each row")
    parser.add_argument("--repeats", type=whole(1), default=5, help="of each batch")
    parser.add_argument("--suite", type=Path, help="checkout of the JSON-Schema-Test-Suite")


def run(args: argparse.Namespace) -> int:
    """Measure; prints tables and one JSON line. 1: an answer was invalid, or none was judged."""
    from quadriga.llm import LLM

    if args.suite is not None and not any(_groups(args.suite)):
        raise ConfigError(f"--suite: {args.suite} has no schemas in tests/draft2020-12")
    llm = LLM(args.model, decode={"max_slots": args.rows})
    answers = answer_schemas(llm, args.schemas)
    suite = try_suite(llm, args.suite) if args.suite is not None else None
    llm.close()
    timed = LLM(args.cost_model, decode={"max_slots": args.rows})
    costs = token_costs(timed, args.rows, args.tokens, args.repeats)
    timed.close()
    show(
        [answers],
        {
            "answers": lambda a: args.schemas - a.num_refused,
            "invalid": lambda a: len(a.invalid),
            "cut": lambda a: a.num_cut,
            "schemas refused": lambda a: a.num_refused,
            "tokens": lambda a: a.num_tokens,
            "left early": lambda a: a.num_early,
        },
    )
    show(
        costs,
        {
            "tokens are": lambda c: c.tokens,
            "form": lambda c: c.form,
            "plain ms/step": lambda c: f"{c.plain_s * 1e3:.2f}",
            "form ms/step": lambda c: f"{c.form_s * 1e3:.2f}",
            "cost": lambda c: f"{c.share:.1%}",
            "of processor time": lambda c: f"{c.cpu_share:.1%}",
        },
    )
    headline = {
        "invalid": len(answers.invalid),
        "schemas": args.schemas,
        "token_cost": round(max(c.share for c in costs if c.form == "records"), 4),
    }
    print_line(
        "grammar",
        headline=headline,
        model=args.model,
        cost_model=args.cost_model,
        rows=args.rows,
        invalid_seeds=answers.invalid,
        cut=answers.num_cut,
        refused=answers.num_refused,
        tokens=answers.num_tokens,
        left_early=answers.num_early,
        costs=[asdict(cost) for cost in costs],
        suite=suite,
    )
    is_silent = 0 < args.schemas == answers.num_refused + answers.num_cut
    is_silent |= suite is not None and suite["invalid"] == 0
    return 1 if is_silent or answers.invalid or (suite and suite["wrongly_allowed"]) else 0


def answer_schemas(llm: LLM, count: int) -> Answers:
    """Answer each schema once, and judge the answers."""
    found, schemas, sampling = Answers([]), list[tuple[int, Any]](), list[SamplingParams]()
    assert llm.tokenizer is not None
    grammars = _grammars(llm)
    deepest = llm.loop.decode.batch.ends[-1]
    room = min(MAX_TOKENS, llm.loop.decode.slots.row_capacity_tokens - 64)
    for seed in range(count):
        schema = random_schema(seed)
        grammar = Grammar.json_schema(schema)
        try:
            grammars.prepare(grammar)
        except InvalidRequest:
            found.num_refused += 1
            continue
        schemas.append((seed, schema))
        temperature = TEMPERATURES[seed % len(TEMPERATURES)]
        params = SamplingParams(room, temperature=temperature, seed=seed, grammar=grammar)
        sampling.append(params)
    outputs = llm.generate([PROMPT] * len(schemas), sampling, progress=None)
    for (seed, schema), output in zip(schemas, outputs, strict=True):
        found.num_tokens += len(output.token_ids)
        found.num_early += sum(layer < deepest for layer in output.exit_layers)
        if output.finish_reason is not FinishReason.STOP:
            found.num_cut += 1
        elif not is_valid(output.text, schema):
            found.invalid.append(seed)
    return found


def is_valid(text: str, schema: Any) -> bool:
    """Whether a text is JSON that the schema allows.

    Its numbers count as they are written: 39.0000000000000004 is above 39, and a float is not.
    """
    try:
        value = json.loads(text, parse_float=Decimal)
        jsonschema.Draft202012Validator(schema).validate(value)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def token_costs(llm: LLM, rows: int, num_tokens: int, repeats: int) -> list[TokenCost]:
    """Time full batches without and with a form; medians of runs in turns."""

    def batch(temperature: float, form: Grammar | None) -> Callable[[], tuple[float, float]]:
        params = [
            SamplingParams(
                num_tokens, temperature=temperature, seed=row, grammar=form, ignore_eos=form is None
            )
            for row in range(rows)
        ]
        firsts = [replace(one, max_tokens=1) for one in params]

        def timed() -> tuple[float, float]:
            prompts_cpu_s = -time.process_time()
            llm.generate([PROMPT] * rows, firsts, progress=False)
            prompts_cpu_s += time.process_time()
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            outputs = llm.generate([PROMPT] * rows, params, progress=False)
            cpu_s, took_s = time.process_time() - began_cpu_s, time.perf_counter() - began_s
            first_s = max(output.ttft_s for output in outputs)
            assert all(len(output.token_ids) == num_tokens for output in outputs)
            steps = num_tokens - 1  # the pass over the prompts brings the first token
            return (took_s - first_s) / steps, (cpu_s - prompts_cpu_s) / steps

        return timed

    forms = {"none": None} | {name: Grammar.json_schema(form) for name, form in FORMS.items()}
    contestants = {
        (tokens, name): batch(temperature, form)
        for tokens, temperature in (("drawn", 0.8), ("greedy", 0.0))
        for name, form in forms.items()
    }
    seconds: dict[tuple[str, str], list[tuple[float, float]]] = {key: [] for key in contestants}
    for timed in contestants.values():
        timed()  # compiles, and fills caches
    for _ in range(repeats):
        for key, timed in contestants.items():
            seconds[key].append(timed())
    costs = []
    for (tokens, name), of_form in seconds.items():
        if name != "none":
            (plain, plain_cpu), (form, form_cpu) = (
                zip(*of, strict=True) for of in (seconds[tokens, "none"], of_form)
            )
            middle = [median(of) for of in (plain, form, plain_cpu, form_cpu)]
            middle += [median_ratio(form, plain) - 1.0, median_ratio(form_cpu, plain_cpu) - 1.0]
            costs.append(TokenCost(tokens, name, *middle))
    return costs


def try_suite(llm: LLM, folder: Path) -> dict[str, Any]:
    """Try the instances of the suite against the schemas that compile."""
    from quadriga.text.grammar import TokenGrammars

    assert llm.tokenizer is not None
    checkpoint = llm.runner.spec.checkpoint
    grammars = TokenGrammars(
        llm.tokenizer.definition(), checkpoint.vocab_size, checkpoint.eos_token_ids
    )
    counts = dict.fromkeys(
        ("schemas", "compiled", "valid", "allowed", "invalid", "wrongly_allowed"), 0
    )
    wrong = []
    for path, group in _groups(folder):
        counts["schemas"] += 1
        if not isinstance(group["schema"], dict):
            continue
        grammar = Grammar.json_schema(group["schema"])
        try:
            grammars.prepare(grammar)
        except InvalidRequest:
            continue
        counts["compiled"] += 1
        for test in group["tests"]:
            text = json.dumps(test["data"], ensure_ascii=False)
            is_allowed = allows(
                grammars, grammar, llm.tokenizer.encode(text, add_special_tokens=False)
            )
            if test["valid"]:
                counts["valid"] += 1
                counts["allowed"] += is_allowed
            else:
                counts["invalid"] += 1
                counts["wrongly_allowed"] += is_allowed
                if is_allowed:
                    wrong.append(f"{path}: {group['description']}: {test['description']}")
    show(counts.items(), {"of the suite": lambda row: row[0], "count": lambda row: row[1]})
    return counts | {"wrong": wrong}


def allows(grammars: TokenGrammars, grammar: Grammar, token_ids: list[int]) -> bool:
    """Whether an answer may be exactly these tokens."""
    matcher = grammars.matcher(grammar)
    for count, token_id in enumerate(token_ids):
        if matcher.banned_after(token_ids[:count])[token_id]:
            return False
    banned = matcher.banned_after(token_ids)
    return any(not banned[end] for end in grammars.end_ids)


def _groups(folder: Path) -> Iterator[tuple[str, Any]]:
    for path in sorted((folder / "tests" / "draft2020-12").glob("*.json")):
        yield from zip(itertools.repeat(path.stem), json.loads(path.read_text()), strict=False)


def _grammars(llm: LLM) -> TokenGrammars:
    from quadriga.text.grammar import grammars_of

    return grammars_of(llm.runner.spec.checkpoint)
