"""Make docs/configuration.md from quadriga/config/: `python deploy/config_reference.py`."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from quadriga.config.engine import PoolConfig
from quadriga.config.loader import QuadrigaConfig

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
POOLS = "pools"
BOUNDS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
NAMES = {int: "whole number", float: "number", str: "text", bool: "`true`, `false`"}
PATTERNS = {  # regular expressions of the model, in words
    "cors_origins": "each `*` or `scheme://host[:port]`",
    "name": "lower-case letters, digits and `-`, at most 47",
    "labels": "at most 16, as Ray labels",
}

REPLACING = ("engine.", "prefill.", "decode.", "transport.", "lifecycle.", "exits.")
REPLACING_KEYS = frozenset(
    {
        *("model", "depth", "runner", "adapters", "prefill_labels", "decode_labels"),
        *("mixed_replicas", "mixed_labels"),
        *("deterministic", "helios.enabled", "helios.catalogue"),
        "scheduler.snapshot_interval_s",
        *("scheduler.ares.predict_every_tokens", "scheduler.ares.reference_step_s"),
    }
)
ADJUSTED = frozenset(
    {"engine.resources_cpus", "engine.resources_gpus", "engine.adapter_memory_share"}
)
"""What Ray reserves is no reason to replace a replica: it follows the cluster's size. The share of
adapters only says how many may be served."""

ENVIRONMENT = {
    "QUADRIGA_API_KEY": "one API key as it is, with `admin`",
    "QUADRIGA_API_KEYS": "key lines as in `auth.api_keys`, added to them",
    "QUADRIGA_ADMIN_PORT": "`admin.port` where the settings name none; 0: none. Only for "
    "`python -m serve_app` and `make serve`, which else take 8001 if it is free",
    "QUADRIGA_LOG_FORMAT": "how Serve's proxies log, `text` or `json`: `python -m serve_app` and "
    "the chart set it to `logging.format`",
    "QUADRIGA_READY_WITHIN_S": "an ingress starts once a replica of each role serves, and "
    "fails after this long; the chart sets 600",
    "QUADRIGA_HOST": "`--host` of `python -m serve_app`: 127.0.0.1",
    "QUADRIGA_HTTP_PORT": "its `--http-port`, and Serve's own port behind HAProxy: 8000",
    "QUADRIGA_GRPC_PORT": "its `--grpc-port`, and Serve's own port behind HAProxy: 9000",
    "QUADRIGA_TLS_CERT": "certificate with its chain, PEM; `--tls-cert`",
    "QUADRIGA_TLS_KEY": "its key, PEM; `--tls-key`",
    "QUADRIGA_TLS_CLIENT_CA": "clients must show a certificate of this CA; `--tls-client-ca`",
    "QUADRIGA_HTTPS_PORT": "8443; `--https-port`",
    "QUADRIGA_GRPC_TLS_PORT": "9443; `--grpc-tls-port`",
    "QUADRIGA_TLS_HOST": "address of the two ports, on nodes of a cluster; every one unless it is "
    "set. `python -m serve_app` sets it by `--host`",
}

HEAD = """\
# Configuration

<!-- Made by `python deploy/config_reference.py` from quadriga/config/; change texts there. -->

Everything is checked at the start: unknown keys, wrong types and values out of bounds are refused
with field, value and limit. The same tree goes to every way of starting the service:

| where | how a key is written |
|---|---|
| `python -m serve_app`, `make serve ARGS=…` | `decode.max_slots=64` |
| `serve run serve_app.app:build` | `decode.max_slots=64` |
| `python -m serve_app --config FILE`, and `args` of a Serve file | `decode: {max_slots: 64}` |
| Helm | `config: {decode: {max_slots: 64}}`; pools are `models` |

On a command line write numbers, words, `true` and `false`. Lists and tables (marked YAML) have no
form there; neither has "none", which is what holds where a key is left out (`null` in YAML). A
change of a key marked ↻ replaces the prefill or decode replicas that it concerns, one by one; see
[upgrade.md](upgrade.md).

```yaml
model: quadriga-s
decode_replicas: 3
engine: {threads: 2}
scheduler:
  max_wait_s: 1
  ares: {theta: 0.1}
```"""

POOL_TEXT = """\
One model, or several: with one, write these keys at the top; with several, each is an entry of
`pools`. The command line knows one.

```yaml
pools:
  - {model: quadriga-s, decode_replicas: 2}
  - {model: quadriga-l, decode_replicas: 1, exits: {threshold: 0.95}}
```
"""

TAIL = """\

## Environment

No other key is read from the environment. On a cluster set those that you use on every node, before
`ray start`.

| variable | |
|---|---|
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One key of the tree.

    Attributes:
        key: As on a command line.
        kind: Type, choices and bounds in words.
        is_yaml_only: A list or table, which a command line cannot say.
    """

    key: str
    kind: str
    default: str
    text: str
    is_yaml_only: bool

    @property
    def replaces(self) -> bool:
        """Whether running replicas are replaced when it is changed."""
        if self.key in ADJUSTED:
            return False
        return self.key.startswith(REPLACING) or self.key in REPLACING_KEYS


def rows(model: type[BaseModel], prefix: str = "") -> Iterator[Row]:
    """Every key of a section, those of the sections in it included."""
    for name, field in model.model_fields.items():
        inner = section(field)
        if inner is not None:
            yield from rows(inner, f"{prefix}{name}.")
        elif name != POOLS:
            yield row(f"{prefix}{name}", field)


def row(key: str, field: FieldInfo) -> Row:
    """One key. Raises: ValueError where the model says nothing about it."""
    if not field.description:
        raise ValueError(f"{key} has no description in quadriga/config/")
    parts = list(_parts(field.annotation, field.metadata))
    name = key.rpartition(".")[2]
    words = next((text for end, text in PATTERNS.items() if name.endswith(end)), None)
    kind = "; ".join(dict.fromkeys(part for part, _ in parts))
    return Row(
        key,
        f"{kind}: {words}" if words else kind,
        "see text" if field.default_factory is not None else _shown(field.default),
        field.description,
        all(is_yaml for _, is_yaml in parts),
    )


def section(field: FieldInfo) -> type[BaseModel] | None:
    """The section that a field holds; None for a plain value."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _parts(annotation: Any, bounds: list[Any]) -> Iterator[tuple[str, bool]]:
    """What a value may be, and whether only YAML can say so, for each member of a union."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        metadata = [m for a in inner[1:] for m in getattr(a, "metadata", [a])]
        yield from _parts(inner[0], metadata)
    elif origin in (Union, types.UnionType):
        for member in inner:
            yield from _parts(member, bounds)
    elif origin is Literal:
        yield ", ".join(f"`{value}`" for value in inner), False
    elif origin is tuple:
        [(member, _)] = _parts(inner[0], [])
        yield f"list (YAML) of {member}s{_limits(bounds, unit='long')}", True
    elif origin is dict:
        yield "table (YAML)", True
    elif annotation is type(None):
        yield "none", False
    else:
        unit = "characters" if annotation is str else ""
        yield NAMES[annotation] + _limits(bounds, unit=unit), False


def _limits(bounds: list[Any], *, unit: str) -> str:
    found = [
        f"{sign} {_number(getattr(bound, name))}"
        for bound in bounds
        for name, sign in BOUNDS.items()
        if getattr(bound, name, None) is not None
    ]
    found += [f"≥ {m} {unit}" for b in bounds if (m := getattr(b, "min_length", None))]
    found += [f"≤ {m} {unit}" for b in bounds if (m := getattr(b, "max_length", None))]
    return " " + ", ".join(found) if found else ""


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _shown(default: Any) -> str:
    if default is None:
        return "none"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, (tuple, dict)):
        return "empty"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def markdown() -> str:
    """Return docs/configuration.md."""
    top = [r for r in rows(QuadrigaConfig) if "." not in r.key]
    parts = [HEAD, *_table("The whole", QuadrigaConfig, top)]
    parts += ["\n## Models and their replicas\n", POOL_TEXT, *_rows(list(rows(PoolConfig)))]
    for name, field in QuadrigaConfig.model_fields.items():
        inner = section(field)
        if inner is not None:
            parts += _table(f"`{name}`", inner, list(rows(inner, f"{name}.")))
    parts += [TAIL + "\n".join(f"| `{name}` | {text} |" for name, text in ENVIRONMENT.items())]
    return "\n".join(parts) + "\n"


def _table(title: str, model: type[BaseModel], found: list[Row]) -> list[str]:
    text = (model.__doc__ or "").strip().partition("\n")[0]
    return [f"\n## {title}\n", f"{text}\n", *_rows(found)]


def _rows(found: list[Row]) -> list[str]:
    lines = [
        f"| `{r.key}`{' ↻' if r.replaces else ''} | {r.kind} | {r.default} | {r.text} |"
        for r in found
    ]
    return ["| key | value | default | |", "|---|---|---|---|", *lines]


if __name__ == "__main__":
    PAGE.write_text(markdown(), encoding="utf-8")
    print(f"wrote {PAGE}")
