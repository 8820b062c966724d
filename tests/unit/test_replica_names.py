"""Names, and what makes two specifications the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from quadriga.config.kv_memory import NodeMemory
from quadriga.config.resolve import Hardware
from quadriga.control.desired import resolve_on
from quadriga.control.replica_names import fingerprint, new_replica_name, parse_replica_name
from quadriga.core.adapters import Adapter
from quadriga.core.replica import DepthClass, ReplicaInfo, Role
from quadriga.errors import ConfigError

HARDWARE = Hardware(num_cpus=8)


def test_names_are_unique_and_can_be_read_back() -> None:
    names = {new_replica_name("app", Role.DECODE, 3) for _ in range(100)}
    assert len(names) == 100
    assert {parse_replica_name("app", name) for name in names} == {(Role.DECODE, 3)}


@pytest.mark.parametrize(
    "name",
    ["app:scheduler", "other:decode:0:ab", "app:decode:x:ab", "app:decode:0", "app:chef:0:ab"],
)
def test_other_actors_names_are_not_parsed(name: str) -> None:
    assert parse_replica_name("app", name) is None


def test_places_follow_the_pools() -> None:
    desired = resolve_on({"model": "quadriga-s", "decode_replicas": 3}, HARDWARE)
    assert list(desired.places) == [
        (Role.PREFILL, 0),
        (Role.DECODE, 0),
        (Role.DECODE, 1),
        (Role.DECODE, 2),
    ]
    assert desired.models == ["quadriga-s"]
    assert "auth" not in desired.config, "keys stay with the ingress"


def test_only_what_a_replica_cannot_change_makes_it_outdated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = {"model": "quadriga-s"}
    desired = resolve_on(base, HARDWARE)
    spec = desired.places[(Role.DECODE, 0)]
    same = fingerprint(spec, desired.config)
    assert fingerprint(replace(spec, num_cpus=0.5), desired.config) == same
    assert desired.fingerprint(spec) == same
    with monkeypatch.context() as patched:
        patched.setattr("quadriga.control.desired.fingerprint", None)
        assert desired.fingerprint(spec) == same, "made once"
    shallow = replace(spec, engine=replace(spec.engine, depth=4))
    assert fingerprint(shallow, desired.config) != same
    resizing = {
        fingerprint(replace(s, changes_depth=True), desired.config) for s in (spec, shallow)
    }
    assert len(resizing) == 1

    def changed(**settings: object) -> str:
        other = resolve_on(base | settings, HARDWARE)
        return fingerprint(other.places[(Role.DECODE, 0)], other.config)

    assert changed(decode_replicas=5) == same
    assert changed(**{"ingress.replicas": 4}) == same
    assert changed(**{"prefill.chunk_tokens": 64}) == same
    assert changed(**{"decode.max_slots": 4}) != same
    assert changed(decode_labels={"quadriga/role": "decode"}) != same
    assert changed(prefill_labels={"quadriga/role": "prefill"}) == same
    assert changed(**{"decode.pace": "steady-15ms"}) != same
    assert changed(**{"transport.kind": "object_store"}) != same
    assert changed(**{"engine.max_model_len": 512}) != same
    assert changed(**{"engine.kv_memory_bytes": 1 << 24}) != same


def test_files_count_by_what_is_in_them_and_not_by_where_a_node_has_them() -> None:
    """A controller that is started anew finds them where its own node has them."""
    desired = resolve_on({"model": "quadriga-s"}, HARDWARE)
    spec, there = desired.places[(Role.DECODE, 0)], Path("/another/node")

    def changed(**engine: object) -> str:
        return fingerprint(replace(spec, engine=replace(spec.engine, **engine)), desired.config)

    read, lora = spec.engine.checkpoint, Adapter("a", there, 4, 1.0, "digest", 8)
    read, elsewhere = (
        replace(read, path=path, heads_path=path, source=str(path)) for path in (Path("/a"), there)
    )
    assert changed(checkpoint=elsewhere) == changed(checkpoint=read)
    assert changed(cache_dir=there, shared_in=there) == changed()
    of_hub = {changed(checkpoint=replace(read, source=f"org/name@{commit}")) for commit in "ab"}
    assert len(of_hub) == 2, "of another commit the tokenizer may be another"
    assert changed(checkpoint=replace(read, fingerprint="of others")) != changed()
    adapted = changed(adapters=(lora,))
    assert changed(adapters=(replace(lora, path=there / "too"),)) == adapted != changed()
    assert changed(adapters=(replace(lora, digest="of others"),)) != adapted


def test_memory_that_nobody_named_makes_no_replica_outdated() -> None:
    """A node that joins may change what is left for each."""
    found = []
    for gib in (3, 4, 64):
        hardware = replace(HARDWARE, nodes=(NodeMemory(8.0, gib << 30),))
        desired = resolve_on({"model": "quadriga-s"}, hardware)
        spec = desired.places[(Role.DECODE, 0)]
        found.append((spec.engine.kv_capacity_tokens, fingerprint(spec, desired.config)))
    capacities, fingerprints = zip(*found, strict=True)
    assert len(set(capacities)) > 1 and len(set(fingerprints)) == 1


def test_a_replicas_length_is_told_with_its_reason() -> None:
    desired = resolve_on({"model": "quadriga-s", "engine.kv_memory_bytes": 1 << 24}, HARDWARE)
    engine = desired.places[(Role.DECODE, 0)].engine
    info = ReplicaInfo(
        "r", Role.DECODE, engine.depth_class, "n", "i", engine.num_rows, engine.kv_capacity_tokens
    )
    told = desired.why_so_long(replace(info, max_model_len=engine.row_capacity_tokens))
    assert told == "2048 tokens: all positions of the model"
    told = desired.why_so_long(replace(info, max_model_len=1024))
    assert told is not None and told.startswith("1024 of 2048 positions: half of 16 MiB")
    other = replace(info, depth_class=DepthClass("another", 8))
    assert desired.why_so_long(other) is None


def test_an_unknown_pace_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"decode\.pace"):
        resolve_on({"model": "quadriga-s", "decode.pace": "warp"}, HARDWARE)
