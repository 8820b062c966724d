"""The configuration as a whole: YAML, command line and environment all end here.

Everything is frozen, unknown keys are refused, and every field states its unit and bounds.
`"auto"` is filled in once, by `resolve`; nothing reads an unresolved configuration afterwards. The
model alone is named as soon as the configuration is read, so that every process, on whatever node,
means the same one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, Field, ValidationError, model_validator

from quadriga.checkpoint.folder import pinned
from quadriga.checkpoint.packaged_models import FALLBACK_MODEL, default_model
from quadriga.config.engine import (
    DecodeConfig,
    EngineConfig,
    PoolConfig,
    PrefillConfig,
    TransportConfig,
)
from quadriga.config.fields import Section
from quadriga.config.ingress import (
    AdminConfig,
    AuthConfig,
    IngressConfig,
    LifecycleConfig,
    LoggingConfig,
)
from quadriga.config.scheduling import HeliosConfig, SchedulerConfig
from quadriga.errors import ConfigError


class QuadrigaConfig(Section):
    """Everything `serve_app.app:build` takes.

    A deployment of one pool may write the fields of `PoolConfig` at the top, beside `engine` and
    the others; `pools` describes several, and excludes them.
    """

    deterministic: bool = Field(
        False,
        description="Take no choice that depends on load and changes an answer: greedy and seeded "
        "output equals that of a sequence alone.",
    )
    name: str = Field(
        "quadriga",
        pattern=r"^[a-z]([a-z0-9-]{0,45}[a-z0-9])?$",
        description="Of the application; two on one Ray cluster need different ones.",
    )
    pools: tuple[PoolConfig, ...] = Field(
        (PoolConfig(),), min_length=1, description="What is served: a pool for each model."
    )
    engine: EngineConfig = EngineConfig()
    prefill: PrefillConfig = PrefillConfig()
    decode: DecodeConfig = DecodeConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    transport: TransportConfig = TransportConfig()
    ingress: IngressConfig = IngressConfig()
    auth: AuthConfig = AuthConfig()
    admin: AdminConfig = AdminConfig()
    logging: LoggingConfig = LoggingConfig()
    lifecycle: LifecycleConfig = LifecycleConfig()
    helios: HeliosConfig = HeliosConfig()

    @model_validator(mode="before")
    @classmethod
    def _one_pool_shorthand(cls, data: Any) -> Any:
        """Turn the top-level shorthand into `pools`, so that nothing downstream knows of it."""
        if not isinstance(data, dict):
            return data
        given = {key: data[key] for key in PoolConfig.model_fields if key in data}
        if not given:
            return data
        if "pools" in data:
            raise ValueError(
                f"{', '.join(given)} describe a single pool and exclude `pools`; "
                "put them into the pool they are meant for"
            )
        return {k: v for k, v in data.items() if k not in given} | {"pools": [given]}


def load_config(data: dict[str, Any]) -> QuadrigaConfig:
    """Validate a plain dict, as YAML or `serve run key=value` gives it, and name every model.

    Raises:
        ConfigError: Naming every field at fault, its value and the limit it broke; or a hub id that
            cannot be looked up.
    """
    try:
        config = QuadrigaConfig.model_validate(expand_dotted(data))
    except ValidationError as exc:
        lines: list[str] = []
        said: dict[str, list[str]] = {}
        for error in exc.errors():
            if (
                error["type"] == "too_short"
                and len(exc.errors()) > 1
                and error["loc"] == ("pools",)
            ):
                continue  # pydantic counts a pool at fault as none
            # Of a field that takes "auto" or a number, pydantic says both: what it is not.
            place = [str(part) for part in error["loc"]]
            kinds = ("literal[", "constrained-", "tuple[")
            place = [part for part in place if not part.startswith(kinds)]
            if "pools" not in data and place[:2] == ["pools", "0"]:
                del place[:2]  # of the one pool, as it was written
            field = ".".join(place) or "(top level)"
            if error["type"] == "extra_forbidden":
                lines.append(f"{field}: there is no such setting{_similar(error['loc'])}")
                continue
            messages = said.setdefault(f"{field}: {{}} (got {error['input']!r:.80})", [])
            text = error["msg"].removeprefix("Value error, ")
            messages.append(text.replace("valid tuple", "list (YAML)"))
        lines += [text.replace("{}", ", or: ".join(found), 1) for text, found in said.items()]
        raise ConfigError("; ".join(lines), param=lines[0].split(":", 1)[0]) from exc
    pools = tuple(_with_model(pool, config.helios) for pool in config.pools)
    return config.model_copy(update={"pools": pools})


def _with_model(pool: PoolConfig, helios: HeliosConfig) -> PoolConfig:
    name = pinned(pool.model)
    if name == "auto":
        # HELIOS chooses among early-exit models, which the default model is none of.
        name = FALLBACK_MODEL if helios.enabled else default_model().name
    return pool.model_copy(update={"model": name})


def setting_names(model: type[BaseModel] | None = None, prefix: str = "") -> Iterator[str]:
    """Every key of a section and those in it, as a command line writes them; of all by default."""
    if model is None:
        yield from setting_names(PoolConfig)
        model = QuadrigaConfig
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from setting_names(inner, f"{prefix}{name}.")
        elif name != "pools":
            yield f"{prefix}{name}"


def _similar(place: tuple[int | str, ...]) -> str:
    """Settings called like one that there is not, in words; empty where there are none."""
    *parents, name = (str(part) for part in place if isinstance(part, str))
    models: list[type[BaseModel]] = (
        [PoolConfig] if "pools" in parents else [QuadrigaConfig, PoolConfig]
    )
    for parent in parents:
        inner = [m.model_fields[parent].annotation for m in models if parent in m.model_fields]
        models = [m for m in inner if isinstance(m, type) and issubclass(m, BaseModel)] or models
    known = sorted({field for model in models for field in model.model_fields})
    near = difflib.get_close_matches(name, known, n=2)
    if not (near or parents):  # its section was left out
        leaves = [key.rpartition(".")[2] for key in setting_names()]
        meant = difflib.get_close_matches(name, leaves, n=1)
        near = [key for key in setting_names() if key.rpartition(".")[2] in meant]
    return f"; did you mean {' or '.join(near)}?" if near else ""


def expand_dotted(data: dict[str, Any]) -> dict[str, Any]:
    """Turn `{"engine.threads": 2}` into `{"engine": {"threads": 2}}`, for the command line.

    Raises:
        ConfigError: A key is given both as a value and as a section.
    """
    tree: dict[str, Any] = {}
    for key, value in data.items():
        if not isinstance(key, str):
            raise ConfigError(f"{key!r:.80}: the names of settings are text", param="config")
        *parents, leaf = key.split(".")
        node = tree
        for parent in parents:
            if node.get(parent) is None:
                node[parent] = {}
            node = node[parent]
            if not isinstance(node, dict):
                raise ConfigError(f"{key}: {parent!r} is a value, not a section", param=key)
        if isinstance(value, dict) and isinstance(node.get(leaf), dict):
            node[leaf] = node[leaf] | value
        else:
            node[leaf] = value
    return tree
