"""Types of fields that several sections of the configuration share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Auto = Literal["auto"]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]

LabelKey = Annotated[
    str,
    Field(
        pattern=r"^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?"
        r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$"
    ),
]


LabelValue = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$", max_length=63)
]


Origin = Annotated[str, Field(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/\s*]+)$")]


NodeLabels = Annotated[dict[LabelKey, LabelValue], Field(max_length=16)]


class Section(BaseModel):
    """A part of the tree: frozen, and strict about unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _none_is_empty(cls, keys: Any) -> Any:
        """YAML has a section as null where all of its lines are comments."""
        if not isinstance(keys, dict):
            return keys
        kinds = {name: field.annotation for name, field in cls.model_fields.items()}
        sections = {n for n, k in kinds.items() if isinstance(k, type) and issubclass(k, Section)}
        return {n: {} if v is None and n in sections else v for n, v in keys.items()}
