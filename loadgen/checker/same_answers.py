"""`run --same-as RUN`: every answer must be the one that an earlier run of the same load got."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from loadgen.checker import FaultKind, Outcome
from loadgen.report.results import read_results
from loadgen.runner import Record
from quadriga.errors import ConfigError


@dataclass(frozen=True, slots=True)
class EarlierAnswers:
    """The answers of an earlier run.

    Attributes:
        digests: By the request's index: of each choice; only of requests that passed every check.
    """

    path: Path
    load_sha256: str | None
    model: str
    digests: Mapping[int, Sequence[str]]

    @classmethod
    def read(cls, path: Path) -> EarlierAnswers:
        """Read a results file, or the one in a folder.

        Raises:
            ConfigError: It cannot be read, or keeps no answers.
        """
        results = read_results(path)
        if not results.answers:
            raise ConfigError(
                f"--same-as: {results.path} keeps no answers; make that run again", param="same-as"
            )
        model = str(results.header.config.get("model"))
        return cls(results.path, results.header.load_sha256, model, results.answers)

    def check(self, load_sha256: str, model: str) -> None:
        """Raises: ConfigError where the earlier run sent another load, or to another model."""
        if model != self.model:
            raise ConfigError(
                f"--same-as: {self.path} asked {self.model}, this run asks {model}", param="same-as"
            )
        if load_sha256 != self.load_sha256:
            raise ConfigError(
                f"--same-as: {self.path} sent another load; give both runs the same prompts, "
                "--seed, --max-tokens and form of requests",
                param="same-as",
            )

    def compare(self, records: Sequence[Record]) -> int:
        """Fail each request that got another answer, or has none to be compared with.

        Returns:
            How many answers were the same.
        """
        num_same = 0
        for record in records:
            verdict = record.verdict
            if verdict.outcome is not Outcome.OK:
                continue
            earlier = self.digests.get(record.spec.index)
            if earlier is None:
                verdict.add(FaultKind.ANSWER, f"{self.path} has no answer to compare with")
                continue
            now = [choice.digest for choice in verdict.choices]
            if now != list(earlier):
                pairs = zip_longest(now, earlier)
                first = next(i for i, (new, old) in enumerate(pairs) if new != old)
                verdict.add(FaultKind.ANSWER, f"choice {first}: another answer than in {self.path}")
                continue
            num_same += 1
        return num_same
