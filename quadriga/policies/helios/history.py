"""The Performance History Table: what each (model, depth) did for the live requests, and its file.

All figures of a row are ratios of sums that forget: a request weighs 0.98 times as much with each
one after it, so a row describes the last fifty or so.

Source: HELIOS §3.3.2 (PHT); the columns beyond throughput, accuracy and exits are ours."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from quadriga.catalogue.records import EnergySource
from quadriga.core.replica import DepthClass
from quadriga.errors import ConfigError
from quadriga.files import write_atomically
from quadriga.policies.helios.messages import RequestFinished, UnchangedSampled

FORGETTING = 0.98
MAX_ROWS = 256
VERSION = 1


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
    depth: int
    exit_tokens: dict[int, float] = field(default_factory=dict)
    sure_tokens: dict[int, float] = field(default_factory=dict)
    breaches: float = 0.0
    unchanged: dict[int, tuple[float, float]] = field(default_factory=dict)
    nll: float = 0.0
    scored: float = 0.0
    requests: float = 0.0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    ttft_sum_s: float = 0.0
    batch_sum: float = 0.0
    decode_s: float = 0.0
    decoded: float = 0.0
    joules: float = 0.0
    joule_tokens: float = 0.0
    energy_source: EnergySource | None = None
    num_requests: int = 0
    load_s: float | None = None
    weight_bytes: int | None = None
    max_batch: int | None = None

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

    def __init__(self) -> None:
        self._rows: dict[tuple[str, int], HistoryRow] = {}

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

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {"version": VERSION, "rows": [asdict(row) for row in self]}

    @classmethod
    def from_dict(cls, data: Any) -> HistoryTable:
        """What `to_dict` gave, after a trip through JSON.

        Raises:
            ConfigError: It is not that: another version, an unknown field, a value that no row
                can have.
        """
        table = cls()
        if not isinstance(data, Mapping) or data.get("version") != VERSION:
            raise ConfigError(f"history: not a table of version {VERSION}")
        rows = data.get("rows")
        if not isinstance(rows, list) or len(rows) > MAX_ROWS:
            raise ConfigError(f"history: rows must be a list of at most {MAX_ROWS}")
        for entry in rows:
            row = _checked(entry)
            table._rows[row.model, row.depth] = row
        return table


_NUMBERS = frozenset(_SUMS)
_OPTIONAL = frozenset({"load_s", "weight_bytes", "max_batch"})
_NAMES = frozenset(f.name for f in fields(HistoryRow))


def _checked(entry: Any) -> HistoryRow:
    """A row from JSON. Raises: ConfigError."""
    if isinstance(entry, Mapping):
        entry = {"sure_tokens": {}} | dict(entry)  # rows of before have none
    if not isinstance(entry, Mapping) or set(entry) != _NAMES:
        raise ConfigError(f"history: a row has the fields {', '.join(sorted(_NAMES))}, no others")
    values = dict(entry)
    is_named = isinstance(values["model"], str) and type(values["depth"]) is int
    if not is_named or type(values["num_requests"]) is not int or values["depth"] < 1:
        raise ConfigError("history: a row needs model, depth and num_requests")
    for name in (*_NUMBERS, *_OPTIONAL):
        if not (_is_size(values[name]) or (name in _OPTIONAL and values[name] is None)):
            raise ConfigError(f"history: {name} is {values[name]!r}, no number from 0 on")
    if values["energy_source"] not in (None, "nvml", "rapl", "estimate"):
        raise ConfigError(f"history: energy_source {values['energy_source']!r} is not known")
    try:
        exits = {int(k): v for k, v in values["exit_tokens"].items()}
        sure = {int(k): v for k, v in values["sure_tokens"].items()}
        unchanged = {int(k): (pair[0], pair[1]) for k, pair in values["unchanged"].items()}
    except (AttributeError, TypeError, ValueError, IndexError) as exc:
        raise ConfigError(f"history: exits are no table of numbers: {exc}") from exc
    flat = [*exits.values(), *sure.values(), *(n for pair in unchanged.values() for n in pair)]
    if not all(_is_size(n) for n in flat):
        raise ConfigError("history: exits hold a value that is no number from 0 on")
    tables = {"exit_tokens": exits, "sure_tokens": sure, "unchanged": unchanged}
    return HistoryRow(**(values | tables))


def _is_size(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value >= 0


MAX_BYTES = 16 << 20
_log = logging.getLogger(__name__)


def pack_table(table: HistoryTable) -> bytes:
    """The table as JSON text, for a file or a key-value store."""
    return json.dumps(table.to_dict(), allow_nan=False).encode()


def unpack_table(raw: bytes) -> HistoryTable:
    """What `pack_table` gave. Raises: ConfigError when it is anything else."""
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"history: {len(raw)} bytes, at most {MAX_BYTES} are read")
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"history: no JSON: {exc}") from exc
    return HistoryTable.from_dict(data)


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
