"""The Performance History Table: what each (model, depth) did for the live requests, and its file.

All figures of a row are ratios of sums that forget: a request weighs 0.98 times as much with each
one after it, so a row describes the last fifty or so.

Source: HELIOS §3.3.2 (PHT); the columns beyond throughput, accuracy and exits are ours."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from quadriga.catalogue.records import EnergySource
from quadriga.core.replica import DepthClass
from quadriga.errors import ConfigError
from quadriga.files import write_atomically
from quadriga.policies.helios.messages import RequestFinished, UnchangedSampled

FORGETTING = 0.98
MAX_ROWS = 256

Size = Annotated[float, Field(ge=0.0)]
Count = Annotated[int, Field(ge=0)]


@dataclass(slots=True)
class HistoryRow:
    """One model at one depth.

    Attributes:
        exit_tokens: Layers run → tokens.
        sure_tokens: Layers after which a token could first have left → tokens of a sample.
        breaches: Tokens at the last loaded exit below their threshold.
        unchanged: Layers run → (tokens that full depth says too, tokens looked at), of answers
            served at this depth. Breaches are among those of the last exit.
        nll, scored: Sum of −log p, and tokens.
        requests, prompt_tokens, output_tokens, ttft_s, batch: Sums over requests.
        decode_s, decoded: Seconds, and tokens after the first ones.
        joules, joule_tokens: Energy, and the tokens it was for.
        num_requests: All there ever were; never forgotten.
        load_s: Seconds of the last start of a process at this depth; None where none was.
        weight_bytes, max_batch: As the replica reported them.
    """

    model: str
    depth: Annotated[int, Field(ge=1)]
    exit_tokens: dict[int, Size] = field(default_factory=dict)
    sure_tokens: dict[int, Size] = field(default_factory=dict)
    breaches: Size = 0.0
    unchanged: dict[int, tuple[Size, Size]] = field(default_factory=dict)
    nll: Size = 0.0
    scored: Size = 0.0
    requests: Size = 0.0
    prompt_tokens: Size = 0.0
    output_tokens: Size = 0.0
    ttft_sum_s: Size = 0.0
    batch_sum: Size = 0.0
    decode_s: Size = 0.0
    decoded: Size = 0.0
    joules: Size = 0.0
    joule_tokens: Size = 0.0
    energy_source: EnergySource | None = None
    num_requests: Count = 0
    load_s: Size | None = None
    weight_bytes: Count | None = None
    max_batch: Count | None = None

    def add(self, request: RequestFinished) -> None:
        """Take a served request in."""
        self._scale(FORGETTING)
        self._add_exits(request.exit_tokens, request.sure_tokens)
        self.breaches += request.breaches
        self.nll += request.nll
        self.scored += request.scored_tokens
        self.requests += 1.0
        self.num_requests += 1
        self.prompt_tokens += request.prompt_tokens
        self.output_tokens += request.output_tokens
        self.ttft_sum_s += request.ttft_s
        self.batch_sum += request.mean_batch
        if request.output_tokens > 1:
            self.decode_s += request.decode_s
            self.decoded += request.output_tokens - 1
        if request.joules is not None:
            self.joules += request.joules
            self.joule_tokens += request.output_tokens
            self.energy_source = request.energy_source

    def _add_exits(self, exits: Mapping[int, float], sure: Mapping[int, float]) -> None:
        for known, more in ((self.exit_tokens, exits), (self.sure_tokens, sure)):
            for layers, tokens in more.items():
                known[layers] = known.get(layers, 0.0) + tokens

    def _scale(self, factor: float) -> None:
        for name in _SUMS:
            setattr(self, name, factor * getattr(self, name))
        self.exit_tokens = {k: factor * n for k, n in self.exit_tokens.items()}
        self.sure_tokens = {k: factor * n for k, n in self.sure_tokens.items()}

    def forget_stream(self) -> None:
        """Drop what depends on the requests' kind; speeds stay. For a new profile's start.

        Changed tokens are rare and dear to find out: of them a fifth is forgotten, so that a depth
        that changed too many is tried again after a few profiles, not at the next.
        """
        self.exit_tokens, self.sure_tokens, self.breaches = {}, {}, 0.0
        self.nll = self.scored = 0.0
        self.unchanged = {k: (0.8 * same, 0.8 * n) for k, (same, n) in self.unchanged.items()}

    def merge(self, newer: HistoryRow) -> None:
        """Take in what another row of the same class counted after this one."""
        self._scale(FORGETTING**newer.num_requests)
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(newer, name))
        self._add_exits(newer.exit_tokens, newer.sure_tokens)
        self.num_requests += newer.num_requests
        self.energy_source = newer.energy_source or self.energy_source

    # Columns

    def coverage(self, exit_depth: int) -> float | None:
        """Share of tokens sure enough at or before an exit; None where no token was seen.

        A row at that very depth has no deeper tokens: there the breaches are what is left.
        """
        total = sum(self.exit_tokens.values())
        if total <= 0.0:
            return None
        seen = self.sure_tokens or self.exit_tokens
        early = sum(n for layers, n in seen.items() if layers <= exit_depth) / sum(seen.values())
        return early - (self.breaches / total if exit_depth >= self.depth else 0.0)

    @property
    def ttft_s(self) -> float | None:
        return self.ttft_sum_s / self.requests if self.requests > 0.0 else None

    @property
    def tpot_s(self) -> float | None:
        return self.decode_s / self.decoded if self.decoded > 0.0 else None

    @property
    def batch(self) -> float:
        """Sequences in the batch, on average."""
        return self.batch_sum / self.requests if self.requests > 0.0 else 1.0

    @property
    def tokens_per_s(self) -> float | None:
        """Of one replica."""
        return self.batch / self.tpot_s if self.tpot_s else None

    @property
    def perplexity(self) -> float | None:
        return math.exp(min(self.nll / self.scored, 700.0)) if self.scored > 0.0 else None

    @property
    def joules_per_token(self) -> float | None:
        return self.joules / self.joule_tokens if self.joule_tokens > 0.0 else None

    def columns(self) -> dict[str, Any]:
        """The row as people read it."""
        return {
            "model": self.model,
            "depth": self.depth,
            "requests": self.num_requests,
            "coverage": {
                k: round(self.coverage(k) or 0.0, 4)
                for k in sorted({*self.exit_tokens, *self.sure_tokens})
            },
            "breach_share": _ratio(self.breaches, sum(self.exit_tokens.values())),
            "unchanged": {k: round(same / seen, 4) for k, (same, seen) in self.unchanged.items()},
            "ttft_s": self.ttft_s,
            "tpot_s": self.tpot_s,
            "batch": self.batch,
            "tokens_per_s": self.tokens_per_s,
            "perplexity": self.perplexity,
            "joules_per_token": self.joules_per_token,
            "energy_source": self.energy_source,
            "weight_bytes": self.weight_bytes,
            "max_batch": self.max_batch,
            "load_s": self.load_s,
        }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0.0 else None


_SUMS = (
    "breaches",
    "nll",
    "scored",
    "requests",
    "prompt_tokens",
    "output_tokens",
    "ttft_sum_s",
    "batch_sum",
    "decode_s",
    "decoded",
    "joules",
    "joule_tokens",
)


class HistoryTable:
    """Rows by (model, depth), bounded: the row unused for longest goes first."""

    def __init__(self, rows: Iterable[HistoryRow] = ()) -> None:
        self._rows = {(row.model, row.depth): row for row in rows}

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[HistoryRow]:
        return iter(self._rows.values())

    def find(self, model: str, depth: int) -> HistoryRow | None:
        """The row, or None."""
        return self._rows.get((model, depth))

    def row(self, model: str, depth: int) -> HistoryRow:
        """The row, made where there is none; it counts as just used."""
        row = self._rows.pop((model, depth), None) or HistoryRow(model, depth)
        self._rows[model, depth] = row
        if len(self._rows) > MAX_ROWS:
            del self._rows[next(iter(self._rows))]
        return row

    def add(self, request: RequestFinished) -> None:
        """Note a served request."""
        self.row(request.depth_class.model, request.depth_class.depth).add(request)

    def install(self, profile: HistoryRow, serving: DepthClass | None = None) -> None:
        """Put a fresh profile in the place of the model's old one.

        What older rows of the model say of the stream is void; what they know of loading stays.

        Args:
            serving: Its row stays, and takes the profile in where it is the profile's: it was
                filled by the last fifty requests, and the profile by five.
        """
        key = (profile.model, profile.depth)
        kept = (serving.model, serving.depth) if serving is not None else None
        old = self.row(*key)
        for row in self:
            if row.model == profile.model and (row.model, row.depth) != kept:
                row.forget_stream()
        if key == kept:
            old.merge(profile)
            return
        for name in ("load_s", "weight_bytes", "max_batch"):
            if getattr(profile, name) is None:
                setattr(profile, name, getattr(old, name))
        profile.num_requests += old.num_requests
        profile.unchanged = profile.unchanged or old.unchanged
        self._rows[key] = profile

    def sampled(self, sample: UnchangedSampled, full_depth: int) -> None:
        """Note a teacher-forced sample, with the row of the depth that served it."""
        row = self.row(sample.model, full_depth if sample.depth is None else sample.depth)
        for layers, (same, seen) in sample.exits.items():
            before_same, before_seen = row.unchanged.get(layers, (0.0, 0.0))
            row.unchanged[layers] = (
                FORGETTING * before_same + same,
                FORGETTING * before_seen + seen,
            )

    def columns(self) -> list[dict[str, Any]]:
        """All rows as people read them, by model and depth."""
        return [self._rows[key].columns() for key in sorted(self._rows)]


MAX_BYTES = 16 << 20
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Saved:
    """What a file, or a key-value store, has of a table."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False
    )

    version: Literal[1]
    rows: Annotated[list[HistoryRow], Field(max_length=MAX_ROWS)]


def pack_table(table: HistoryTable) -> bytes:
    """The table as JSON text, for a file or a key-value store."""
    return json.dumps(asdict(_Saved(1, list(table))), allow_nan=False).encode()


def unpack_table(raw: bytes) -> HistoryTable:
    """What `pack_table` gave.

    Raises:
        ConfigError: It is not that: another version, a field that is unknown or missing, a value
            that no row can have.
    """
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"history: {len(raw)} bytes, at most {MAX_BYTES} are read")
    try:
        saved = TypeAdapter(_Saved).validate_json(raw)
    except ValueError as exc:
        raise ConfigError(f"history: no table of this version: {exc}") from exc
    needed = {f.name for f in fields(HistoryRow)} - {"sure_tokens"}  # rows of before have none
    if not all(needed <= row.keys() for row in json.loads(raw)["rows"]):
        raise ConfigError(f"history: a row needs the fields {', '.join(sorted(needed))}")
    return HistoryTable(saved.rows)


def save_table(path: str | Path, table: HistoryTable) -> None:
    """Replace the file. Raises: OSError."""
    write_atomically(Path(path).expanduser(), pack_table(table))


def load_table(file: str | Path) -> HistoryTable:
    """Read the file; an empty table where there is none.

    A file that cannot be used is set aside as `<name>.corrupt` and warned of: the table starts
    anew and fills within one profile.
    """
    path = Path(file).expanduser()
    try:
        return unpack_table(path.read_bytes())
    except FileNotFoundError:
        return HistoryTable()
    except (ConfigError, OSError) as exc:
        aside = path.with_name(f"{path.name}.corrupt")
        _log.warning(
            "%s is not usable (%s); it is now %s, and profiles start anew", path, exc, aside
        )
        try:
            path.replace(aside)
        except OSError as problem:
            _log.warning("%s could not be set aside: %s", path, problem)
        return HistoryTable()
