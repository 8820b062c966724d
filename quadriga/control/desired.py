"""What shall run: the configuration, resolved on the cluster's hardware."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quadriga.config.engine_spec import DTYPE_BYTES
from quadriga.config.kv_memory import describe_length
from quadriga.config.loader import load_config
from quadriga.config.pacing import find_profile
from quadriga.config.resolve import Deployment, Hardware, ReplicaSpec, resolve
from quadriga.control.replica_names import fingerprint
from quadriga.control.replica_record import PlaceKey
from quadriga.core.replica import ReplicaInfo, Role


@dataclass(frozen=True, slots=True)
class Desired:
    """What shall run: the configuration and a specification for every place.

    Attributes:
        hardware: What it was resolved on.
    """

    config: dict[str, Any]
    deployment: Deployment
    places: Mapping[PlaceKey, ReplicaSpec]
    hardware: Hardware
    _fingerprints: dict[int, tuple[ReplicaSpec, str]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def fingerprint(self, spec: ReplicaSpec) -> str:
        """See `replica_names.fingerprint`; made once for each specification, as turns are many."""
        found = self._fingerprints.get(id(spec))
        if found is None:
            found = self._fingerprints[id(spec)] = (spec, fingerprint(spec, self.config))
        return found[1]

    def why_so_long(self, info: ReplicaInfo) -> str | None:
        """How long a sequence may be at a replica, and why; None for a model not named here."""
        checkpoint = self.deployment.checkpoint(info.depth_class.model)
        engines = (s.engine for s in self.places.values() if s.role is info.role)
        spec = next((e for e in engines if e.checkpoint == checkpoint), None)
        if checkpoint is None or spec is None:
            return None
        depth = info.depth_class.depth or checkpoint.num_layers
        return describe_length(
            info.max_model_len,
            checkpoint.max_model_len,
            kv_tokens=info.kv_capacity_tokens,
            token_bytes=checkpoint.kv_bytes_per_token(depth, DTYPE_BYTES[spec.dtype]),
            is_auto=self.deployment.config.engine.max_model_len == "auto",
            runner=spec.runner,
        )

    @property
    def models(self) -> list[str]:
        return [c.id for c in self.deployment.checkpoints]


def resolve_on(config: dict[str, Any], hardware: Hardware) -> Desired:
    """Validate and fill in a configuration; reads checkpoint files. Raises: ConfigError."""
    loaded = load_config(config)
    plain = loaded.model_dump(mode="json", exclude={"auth"})
    if loaded.decode.pace is not None:
        find_profile(loaded.decode.pace)
    deployment = resolve(loaded, hardware)
    ordinals = dict.fromkeys(Role, 0)
    places: dict[PlaceKey, ReplicaSpec] = {}
    for spec in deployment.replicas:
        places[(spec.role, ordinals[spec.role])] = spec
        ordinals[spec.role] += 1
    return Desired(plain, deployment, places, hardware)
