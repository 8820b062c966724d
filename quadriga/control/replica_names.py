"""Names of replicas, and what tells whether one is what is wanted now."""

from __future__ import annotations

import hashlib
import json
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quadriga.config.resolve import ReplicaSpec
from quadriga.core.replica import PARTS, Role


def new_replica_name(app: str, role: Role, ordinal: int) -> str:
    """A name no earlier incarnation had; the placement group carries the same."""
    return f"{app}:{role.value}:{ordinal}:{uuid.uuid4().hex[:8]}"


def parse_replica_name(app: str, name: str) -> tuple[Role, int] | None:
    """(role, ordinal) of one of this application's replicas; None for any other name."""
    parts = name.split(":")
    if len(parts) != 4 or parts[0] != app or parts[1] not in tuple(Role):
        return None
    is_ordinal = parts[2].isdecimal() and len(parts[2]) < 10
    return (Role(parts[1]), int(parts[2])) if is_ordinal else None


def fingerprint(spec: ReplicaSpec, config: dict[str, Any]) -> str:
    """Hash of all that a replica was started with and cannot change while it lives.

    What Ray reserves for it, and what KV memory it has where that is not configured, are left out:
    these follow the cluster's size. So is the depth, where it changes while a replica lives, and
    where files are: each node may have them elsewhere, and a controller that is started anew on
    another node finds them there. Configuration and weights count by what is in them.
    """
    engine = asdict(spec.engine)
    engine |= dict.fromkeys(
        ("num_rows", "row_capacity_tokens", "kv_capacity_tokens", "kv_memory_bytes", "shared_in")
    )
    engine["cache_dir"] = config["engine"]["cache_dir"]
    engine["checkpoint"] |= dict.fromkeys(("path", "heads_path"))
    if Path(spec.engine.checkpoint.source).is_absolute():  # else a hub id, with its commit
        engine["checkpoint"]["source"] = None
    for adapter in engine["adapters"]:
        adapter["path"] = None
    engine["memory"] = [config["engine"][name] for name in ("max_model_len", "kv_memory_bytes")]
    if spec.changes_depth:
        engine |= dict.fromkeys(("depth", "exits"))
    own = [part.value for part in PARTS if spec.role.does(part)]
    sections = ("transport", "lifecycle", *own)
    facts = [engine, dict(spec.node_labels), *(config[section] for section in sections)]
    # Replicas of earlier versions, which name no weights, are exchanged.
    facts += [config["deterministic"], config["helios"]["enabled"], "numerics name the weights"]
    # The rest of the scheduler's section is the scheduler's alone, and may change at any time.
    scheduler = config["scheduler"]
    facts.append(scheduler["snapshot_interval_s"])
    facts += [scheduler["ares"][name] for name in ("predict_every_tokens", "reference_step_s")]
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def rank_name(replica: str, rank: int) -> str:
    """Of a tensor-parallel replica's rank behind the first: no replica is called so."""
    return f"{replica}:rank{rank}"
