"""Whether runs can be compared, and what they differ in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loadgen.report.results import RunResults

_SLO = {"slo_ttft_s", "slo_tpot_s", "slo_share"}  # in a ramp they say where it stops
# Options that do not say what is sent, or when.
_NO_LOAD = _SLO | {
    "url",
    "grpc",
    "grpc_tls",
    "transport",
    "model",
    "max_model_len",
    "timeout_s",
    "warmup",
    "honour_retry_after",
    "verify_text",
    "output",
    "no_plots",
    "no_progress",
    "drain_s",
    "keep_going",
}
_MACHINE = ("cpu", "cores", "memory_gib", "system")
_MISSING = object()


def load_differences(runs: Sequence[RunResults]) -> list[str]:
    """Return why the runs are not comparable; empty where they all had the same load."""
    found = [reason for other in runs[1:] for reason in _load_differences(runs[0], other)]
    found += [f"{run.path} was interrupted" for run in runs if run.summary.was_interrupted]
    return list(dict.fromkeys(found))


def _load_differences(a: RunResults, b: RunResults) -> list[str]:
    one, other = a.header, b.header
    if one.kind != other.kind:
        return [f"a {one.kind} and a {other.kind}"]
    no_load = _NO_LOAD - (_SLO if one.kind == "ramp" else set())
    found = [
        f"{name}: {left} and {right}"
        for name, left, right in _changed(one.config, other.config)
        if name not in no_load
    ]
    if one.scenario != other.scenario and not found:
        found.append(f"load: {one.scenario} and {other.scenario}")
    shas = (one.load_sha256, other.load_sha256)
    if not found and None not in shas and shas[0] != shas[1]:
        found.append(
            "same options, other requests: the file changed, or the model has another tokenizer "
            "or context"
        )
    return found


def setting_differences(a: RunResults, b: RunResults) -> list[str]:
    """Return what else differs between the runs: what is compared, or what may disturb it."""
    found = [
        f"{name}: {left} → {right}"
        for name, left, right in _changed(a.header.config, b.header.config)
        if name in _NO_LOAD and name not in ("output", "no_plots", "no_progress")
    ]
    if a.header.commit != b.header.commit:
        found.append(f"commit: {a.header.commit:.12} → {b.header.commit:.12}")
    machines = ({name: r.header.machine.get(name) for name in _MACHINE} for r in (a, b))
    found += [f"machine, {name}: {left} → {right}" for name, left, right in _changed(*machines)]
    return found


def _changed(left: dict[str, Any], right: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    return [
        (name, left.get(name), right.get(name))
        for name in sorted(left.keys() | right.keys())
        if left.get(name, _MISSING) != right.get(name, _MISSING)
        and (left.get(name) is not None or right.get(name) is not None)
    ]
