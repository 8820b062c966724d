"""Types of fields that several sections of the configuration share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Auto = Literal["auto"]


Seconds = Annotated[float, Field(gt=0, le=86_400)]


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
