"""Read a results file back: the inverse of `report.write_results`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, NonNegativeInt, ValidationError

from loadgen.checker import AnswerChoice, Outcome, Verdict, Write
from loadgen.load.json_lines import read_objects
from loadgen.load.workload import RequestSpec
from loadgen.report.run_report import RESULTS_FILE
from loadgen.runner import Record
from quadriga.errors import ConfigError

MAX_REQUESTS = 5_000_000
MAX_LINE_BYTES = 64 << 20
_PARAM = "run"


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Header(_Line):
    """The first line.

    Attributes:
        load_sha256: Hash of all that was to be sent; None in files from before there was one.
    """

    kind: Literal["run", "ramp"]
    scenario: str
    config: dict[str, Any]
    seed: int
    load_sha256: str | None = None
    commit: str = "unknown"
    machine: dict[str, Any] = Field(default_factory=dict)


class _RequestLine(_Line):
    index: NonNegativeInt
    stream: bool
    scheduled_s: FiniteFloat
    sent_s: FiniteFloat
    ended_s: FiniteFloat
    outcome: Outcome
    writes: list[list[tuple[FiniteFloat, NonNegativeInt]]]
    answers: list[str] = Field(default_factory=list)
    score: bool | None = None

    def record(self) -> Record:
        """Return the request as the runner kept it, as far as comparisons ask."""
        spec = RequestSpec(self.index, arrival_s=0.0, prompt="", max_tokens=1, stream=self.stream)
        choices = [
            AnswerChoice(
                writes=[Write(time_s, num) for time_s, num in writes],
                num_tokens=sum(num for _, num in writes),
            )
            for writes in self.writes
        ]
        verdict = Verdict(outcome=self.outcome, choices=choices)
        times = self.scheduled_s, self.sent_s, self.ended_s
        return Record(spec, "", *times, attempts=1, num_bytes=0, verdict=verdict, score=self.score)


class _SloLine(_Line):
    ttft_s: FiniteFloat | None = None
    tpot_s: FiniteFloat | None = None


class SummaryLine(_Line):
    """What the last line says that the requests do not."""

    was_interrupted: bool = False
    generator_is_slow: bool = False
    slo: _SloLine = _SloLine()


class StepSpan(_Line):
    """Where a step of a ramp lies; seconds from the start of the run."""

    level: FiniteFloat
    counted_from_s: FiniteFloat
    to_s: FiniteFloat


class StepLine(_Line):
    """A step, and how many of its requests were given up; `records` lacks them."""

    step: StepSpan
    unfinished: NonNegativeInt = 0


class CapacityLine(_Line):
    """What a ramp found."""

    unit: Literal["rate", "concurrency"]
    kept: FiniteFloat | None
    broken: FiniteFloat | None


@dataclass(frozen=True, slots=True)
class RunResults:
    """One run, as it was written down; times are seconds from its start.

    Attributes:
        steps, capacity: Of a ramp; empty and None otherwise.
        answers: Of each request that passed every check, by its index: what stands for the answer
            of each choice; empty in files from before these were kept.
    """

    path: Path
    header: Header
    records: list[Record]
    summary: SummaryLine
    steps: list[StepLine]
    capacity: CapacityLine | None
    answers: dict[int, list[str]]


def read_results(path: Path) -> RunResults:
    """Read a results file, or the one in a folder.

    Raises:
        ConfigError: Naming file, line and field; or the file ends before its summary.
    """
    file = path / RESULTS_FILE if path.is_dir() else path
    header: Header | None = None
    summary: SummaryLine | None = None
    capacity: CapacityLine | None = None
    records: list[Record] = []
    steps: list[StepLine] = []
    answers: dict[int, list[str]] = {}
    lines = read_objects(file, param=_PARAM, max_rows=MAX_REQUESTS, max_line_bytes=MAX_LINE_BYTES)
    for where, row in lines:
        try:
            match row.get("kind"):
                case "run" | "ramp" if header is None:
                    header = Header.model_validate(row)
                case "request" if header is not None:
                    request = _RequestLine.model_validate(row)
                    records.append(request.record())
                    if request.outcome is Outcome.OK and request.answers:
                        answers[request.index] = request.answers
                case "step" if header is not None:
                    steps.append(StepLine.model_validate(row))
                case "capacity" if header is not None:
                    capacity = CapacityLine.model_validate(row)
                case "summary" if header is not None:
                    summary = SummaryLine.model_validate(row)
                case kind:
                    raise ConfigError(
                        f"{where}: kind {kind!r:.80} has no place here: not a results file of "
                        "`run` or `ramp`",
                        param=_PARAM,
                    )
        except ValidationError as exc:
            first = exc.errors()[0]
            field = ".".join(map(str, first["loc"]))
            raise ConfigError(
                f"{where}: {field}: {first['msg']}; got {first['input']!r:.80}", param=_PARAM
            ) from exc
    if header is None or summary is None:
        raise ConfigError(f"{file}: cut off: it has no summary line", param=_PARAM)
    if len({record.spec.index for record in records}) != len(records):
        raise ConfigError(f"{file}: a request index comes twice", param=_PARAM)
    return RunResults(file, header, records, summary, steps, capacity, answers)
