"""The chart rendered by Helm's own library, once for each set of values."""

from __future__ import annotations

import importlib.util
import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "quadriga"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
NAME = NAMESPACE = "quadriga"

needs_helm = pytest.mark.skipif(
    importlib.util.find_spec("helm_python") is None,
    reason="helm-python-sdk is not installed; it has no wheel for every platform",
)

Values = dict[str, Any]
Document = dict[str, Any]

EVERYTHING: Values = {
    "enabled": True,  # as a parent chart's `condition` passes it
    "commonLabels": {"team": "serving", "app.kubernetes.io/part-of": "platform"},
    "commonAnnotations": {"example.com/owner": "serving"},
    "image": {"digest": f"sha256:{'0' * 64}", "pullPolicy": "Always"},
    "imagePullSecrets": [{"name": "pull"}],
    "models": [
        {
            "model": "quadriga-s",
            "adapters": "/models/adapters",
            "prefill_replicas": 1,
            "decode_replicas": 1,
        },
        {
            "download": {"repo": "org/tiny", "revision": "0123abc"},
            "prefill_replicas": 1,
            "decode_replicas": 1,
        },
    ],
    "config": {
        "ingress": {"replicas": 2, "max_body_bytes": 4_000_000, "open_endpoint_metrics": True},
        "scheduler": {"placement": "round_robin"},
    },
    "apiKeys": {"existingSecret": "api-keys", "key": "lines"},
    "grpc": {"enabled": True},
    "tls": {"secretName": "certificate", "clientCaSecret": "ca"},
    "admin": {"enabled": True},
    "service": {
        "type": "LoadBalancer",
        "annotations": {"example.com/internal": "true"},
        "loadBalancerClass": "example.com/nlb",
        "loadBalancerSourceRanges": ["203.0.113.0/24", "2001:db8::/32"],
    },
    "modelDownload": {
        "env": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
        "envFrom": [{"configMapRef": {"name": "proxy"}}],
        "nodeSelector": {"pool": "system"},
        "tolerations": [{"operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
    },
    "modelStorage": {"enabled": True, "storageClassName": "fast"},
    "huggingFace": {"existingSecret": "hf"},
    "rayAuth": {"existingSecret": "ray-token"},
    "autoscaling": {"enabled": True},
    "upgradeStrategy": {"type": "None"},
    "gcsFaultTolerance": {
        "enabled": True,
        "redisAddress": "redis:6379",
        "redisPasswordSecret": {"name": "redis"},
        "externalStorageNamespace": "123",
    },
    "env": [{"name": "RAY_enable_timeline", "value": "1"}, {"name": "A", "value": "all pods'"}],
    "envFrom": [{"configMapRef": {"name": "proxy"}}],
    "network": {"interface": "eth0"},
    "head": {
        "nodeSelector": {"pool": "system"},
        "tolerations": [{"operator": "Exists"}],
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
        ],
        "labels": {"tier": "head"},
        "podLabels": {"mesh": "on"},
        "podAnnotations": {"example.com/note": "yes"},
        "podSpec": {"schedulerName": "volcano"},
    },
    "workerDefaults": {
        "priorityClassName": "serving",
        "runtimeClassName": "nvidia",
        "affinity": {"podAntiAffinity": {}},
        "volumes": [{"name": "cache", "emptyDir": {}}],
        "volumeMounts": [{"name": "cache", "mountPath": "/cache"}],
        "initContainers": [{"name": "first", "image": "busybox"}],
        "extraContainers": [{"name": "beside", "image": "busybox"}],
        "env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "envFrom": [{"secretRef": {"name": "more"}}],
        "podSpec": {"schedulerName": "volcano", "dnsConfig": {"options": [{"name": "ndots"}]}},
        "idleTimeoutSeconds": 60,
        "priority": 1_000_000,  # Helm's own figures are floats
    },
    "workerGroups": {"prefill": {"replicas": 2, "maxReplicas": 3}, "decode": {"maxReplicas": 4}},
    "ingress": {"enabled": True, "hosts": ["llm.example.com"], "tlsSecret": "web"},
    "inferencePool": {
        "enabled": True,
        "endpointPicker": {"name": "picker", "failureMode": "FailClose"},
    },
    "networkPolicy": {"egress": {"enabled": True, "extra": [{"ports": [{"port": 443}]}]}},
    "podDisruptionBudget": {"enabled": True},
    "podMonitor": {"enabled": True, "keySecret": {"name": "admin"}, "labels": {"release": "p"}},
    "prometheusRule": {"enabled": True},
    "grafanaDashboards": {"enabled": True},
    "otel": {"enabled": True, "endpoint": "http://otel:4317", "headersSecret": "otel"},
    "test": {
        "keySecret": {"name": "test"},
        "resources": {"requests": {"cpu": "100m"}},
        "nodeSelector": {"pool": "system"},
        "tolerations": [{"operator": "Exists"}],
    },
    "extraObjects": [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "{{ .Release.Name }}-x", "labels": {}},
        }
    ],
}
ODD_NAMES: Values = EVERYTHING | {
    "fullnameOverride": "true",
    "config": EVERYTHING["config"] | {"name": "null"},
    "apiKeys": {"existingSecret": "1", "key": "2"},
    "tls": {"secretName": "3", "clientCaSecret": "4"},
    "modelStorage": {"enabled": True, "existingClaim": "5", "mountPath": "/m,n"},
    "huggingFace": {"existingSecret": "6", "key": "7"},
    "serviceAccount": {"name": "8"},
    "rayAuth": {"existingSecret": "9"},
    "otel": {"enabled": True, "endpoint": "http://otel:4318", "headersSecret": "10"},
    "ingress": EVERYTHING["ingress"] | {"className": "11", "tlsSecret": "12"},
    "inferencePool": {"enabled": True, "endpointPicker": {"name": "13"}},
    "workerGroups": EVERYTHING["workerGroups"] | {"on": {"role": "any"}},
}
"""Legal names that YAML would take for something else."""
INCREMENTAL: Values = {
    "autoscaling": {"enabled": True},
    "upgradeStrategy": {"type": "NewClusterWithIncrementalUpgrade", "gatewayClassName": "envoy"},
}
ROCKSDB: Values = {"gcsFaultTolerance": {"enabled": True, "backend": "rocksdb"}}
BARE: Values = {
    "haproxy": {"enabled": False},
    "serviceAccount": {"create": False},
    "networkPolicy": {"enabled": False},
    "apiKeys": {"allowAnonymous": True},
    "rayAuth": {"mode": "disabled"},
}
CASES: dict[str, Values] = {
    "defaults": {},
    "everything": EVERYTHING,
    "odd names": ODD_NAMES,
    "incremental": INCREMENTAL,
    "rocksdb": ROCKSDB,
    "bare": BARE,
    **{path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in EXAMPLES},
}


class _NoDoubles(yaml.CSafeLoader):
    """Refuses a key that is there twice, as Flux does and Helm does not."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        assert len(set(keys)) == len(keys), f"a key is there twice: {keys}"
        return super().construct_mapping(node, deep)


def render(
    values: Values | None = None,
    *,
    chart: Path = CHART,
    name: str = NAME,
    namespace: str = NAMESPACE,
) -> list[Document]:
    """All objects of the chart. Raises: helm_python.HelmError: With what the chart refuses."""
    return _render(json.dumps(values or {}), chart, name, namespace)


@cache
def _render(values: str, path: Path, release: str, namespace: str) -> list[Document]:
    import helm_python

    with helm_python.Chart.load(path) as chart:
        files = chart.render(json.loads(values), name=release, namespace=namespace)
    return [
        document
        for name, text in sorted(files.items())
        if not name.endswith("NOTES.txt")
        for document in yaml.load_all(text, Loader=_NoDoubles)
        if document
    ]


def one(documents: list[Document], kind: str) -> Document:
    """The only object of a kind."""
    [found] = [d for d in documents if d["kind"] == kind]
    return found


def pod_templates(documents: list[Document]) -> dict[str, Document]:
    """The Ray cluster's pod templates: the head's and each worker group's, by group name."""
    cluster = one(documents, "RayService")["spec"]["rayClusterConfig"]
    groups = {g["groupName"]: g["template"] for g in cluster["workerGroupSpecs"]}
    return {"head": cluster["headGroupSpec"]["template"], **groups}


def serve_config(documents: list[Document]) -> dict[str, Any]:
    """What Serve is told."""
    config: dict[str, Any] = yaml.safe_load(one(documents, "RayService")["spec"]["serveConfigV2"])
    return config


def kuberay_crd(name: str) -> Path:
    """KubeRay's definition of a resource; skips the test where there is none."""
    folder = Path(os.environ.get("KUBERAY_CRD_DIR", ROOT.parent / "shared" / "kuberay"))
    path = folder / f"ray.io_{name}.yaml"
    if not path.is_file():
        pytest.skip(f"{path.name} is not there: set KUBERAY_CRD_DIR to KubeRay's CRDs")
    return path
