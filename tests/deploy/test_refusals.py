"""Bad values are refused, with a message that says what to do."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from quadriga.config.engine import PoolConfig
from quadriga.config.loader import QuadrigaConfig
from quadriga.config.resolve import num_replicas
from tests.deploy.charts import CASES, CHART, INCREMENTAL, ROCKSDB, needs_helm, render

pytestmark = needs_helm

KEYS = {"apiKeys": {"existingSecret": "keys"}}
ROUTE = {"enabled": True, "parentRefs": [{"name": "g"}], "hostnames": ["a.b"]}
REDIS = {"enabled": True, "redisAddress": "r:6379"}
ONE_POD = {"replicas": 1, "minReplicas": 1, "maxReplicas": 1}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    # The schema
    "unknown value": ({"modles": []}, "modles"),
    "unknown value in a group": ({"workerGroups": {"decode": {"replica": 2}}}, "decode"),
    "unknown field of our configuration": ({"config": {"engine": {"thread": 1}}}, "thread"),
    "out of bounds": ({"config": {"decode": {"max_slots": 0}}}, "max_slots"),
    "pools beside models": ({"config": {"pools": []}}, "pools"),
    "keys in clear": ({"config": {"auth": {"api_keys": ["k"]}}}, "api_keys"),
    "no model": ({"models": []}, "models"),
    "switched off without a parent chart": ({"enabled": False}, "enabled"),
    "not a quantity": ({"head": {"shmSize": "1 gig"}}, "shmSize"),
    "wrong enum": ({"upgradeStrategy": {"type": "Rolling"}}, "type"),
    "a name that is no label": ({"nameOverride": "my app"}, "nameOverride"),
    "long name": ({"fullnameOverride": "q" * 48}, "fullnameOverride"),
    "our own label": ({"head": {"podLabels": {"quadriga/role": "x"}}}, "head.podLabels"),
    "group name": ({"workerGroups": {"Decode_1": {}}}, "'Decode_1' does not match"),
    # Conflicts
    "gRPC without keys": ({"grpc": {"enabled": True}}, "grpc.enabled needs API keys"),
    "Ingress without keys": (
        {"ingress": {"enabled": True, "hosts": ["a.b"]}},
        "ingress.enabled needs API keys",
    ),
    "admin port without keys": ({"admin": {"enabled": True}}, "admin.enabled needs API keys"),
    "open to all": ({"networkPolicy": {"enabled": False}}, "apiKeys.allowAnonymous"),
    "open with keys": (
        {"apiKeys": {"existingSecret": "k", "allowAnonymous": True}},
        "exclude each other",
    ),
    "no host": (KEYS | {"ingress": {"enabled": True}}, "ingress.hosts"),
    "plaintext Ingress": (
        KEYS | {"ingress": {"enabled": True, "hosts": ["a.b"]}},
        "keys would travel in the clear",
    ),
    "no gateway": (
        KEYS | {"gateway": {"enabled": True, "hostnames": ["a.b"]}},
        "gateway.parentRefs",
    ),
    "no endpoint picker": (
        {"inferencePool": {"enabled": True}},
        "inferencePool.endpointPicker.name",
    ),
    "an endpoint picker without a key": (
        KEYS | {"inferencePool": {"enabled": True, "endpointPicker": {"name": "p"}}},
        "config.ingress.open_endpoint_metrics",
    ),
    "an endpoint picker that fails otherwise": (
        {"inferencePool": {"endpointPicker": {"failureMode": "Fail"}}},
        "failureMode",
    ),
    "one host for both routes": (
        KEYS | {"grpc": {"enabled": True}, "gateway": ROUTE | {"grpcHostnames": ["a.b"]}},
        "one kind of route",
    ),
    "TLS without HAProxy": (
        KEYS | {"tls": {"secretName": "t"}, "haproxy": {"enabled": False}},
        "tls.secretName needs haproxy.enabled",
    ),
    "load balancer without keys": (
        {"service": {"type": "LoadBalancer"}},
        "service.type needs API keys",
    ),
    "load balancer without TLS": (
        KEYS | {"service": {"type": "LoadBalancer"}},
        "API keys would travel in the clear",
    ),
    "no such service": (KEYS | {"service": {"type": "Headless"}}, "type"),
    "not a range": (KEYS | {"service": {"loadBalancerSourceRanges": ["anybody"]}}, "anybody"),
    "what another value sets": (
        {"workerDefaults": {"podSpec": {"tolerations": []}}},
        "workerDefaults.podSpec: tolerations is set by a value of its own",
    ),
    "what the chart sets": (
        {"workerGroups": {"decode": {"podSpec": {"containers": []}}}},
        "workerGroups.decode.podSpec: containers is set",
    ),
    "client CA without TLS": (KEYS | {"tls": {"clientCaSecret": "c"}}, "tls.clientCaSecret"),
    "metrics without a key": (KEYS | {"podMonitor": {"enabled": True}}, "podMonitor.keySecret"),
    "a scrape longer than its interval": (
        {"podMonitor": {"interval": "500ms", "scrapeTimeout": "1s"}},
        "podMonitor.scrapeTimeout is 1s",
    ),
    "one port twice": ({"http": {"port": 9000}}, "9000 is taken by"),
    "the port of the proxy behind HAProxy": ({"admin": {"port": 8500}}, "8500 is taken by Serve"),
    "a port of Ray's": ({"http": {"port": 8265}}, "8265 is taken by Ray"),
    "traces to nowhere": ({"otel": {"enabled": True}}, "otel.endpoint"),
    "download without a volume": (
        {"models": [{"download": {"repo": "a/b"}}]},
        "modelStorage.enabled",
    ),
    "model and download": (
        {
            "models": [{"model": "x", "download": {"repo": "a/b"}}],
            "modelStorage": {"enabled": True},
        },
        "exclude each other",
    ),
    "two models, one folder": (
        {
            "models": [{"download": {"repo": "a/b"}}, {"download": {"repo": "c/b"}}],
            "modelStorage": {"enabled": True},
        },
        "share the folder b",
    ),
    "streams cut": ({"drainSeconds": 60}, "drainSeconds is 60, less than"),
    "incremental without autoscaling": (
        {"upgradeStrategy": INCREMENTAL["upgradeStrategy"]},
        "needs autoscaling.enabled",
    ),
    "incremental without a class": (
        INCREMENTAL | {"upgradeStrategy": {"type": "NewClusterWithIncrementalUpgrade"}},
        "upgradeStrategy.gatewayClassName",
    ),
    "steps above surge": (
        INCREMENTAL
        | {
            "upgradeStrategy": INCREMENTAL["upgradeStrategy"]
            | {"stepSizePercent": 50, "maxSurgePercent": 20}
        },
        "more than maxSurgePercent",
    ),
    "incremental with an Ingress": (
        INCREMENTAL | KEYS | {"ingress": {"enabled": True, "hosts": ["a"], "tlsSecret": "t"}},
        "KubeRay's own Gateway",
    ),
    "incremental with a route": (INCREMENTAL | KEYS | {"gateway": ROUTE}, "KubeRay's own Gateway"),
    "no Redis": ({"gcsFaultTolerance": {"enabled": True}}, "gcsFaultTolerance.redisAddress"),
    "two Redises": (
        {"gcsFaultTolerance": REDIS, "env": [{"name": "RAY_REDIS_ADDRESS", "value": "r:6379"}]},
        "RAY_REDIS_ADDRESS",
    ),
    "Redis out of reach": (
        {"gcsFaultTolerance": REDIS, "networkPolicy": {"egress": {"enabled": True}}},
        "networkPolicy.egress.extra",
    ),
    "Kubernetes out of the autoscaler's reach": (
        {"autoscaling": {"enabled": True}, "networkPolicy": {"egress": {"enabled": True}}},
        "networkPolicy.egress.extra: let the pods reach the Kubernetes API",
    ),
    "shared keys": ({"gcsFaultTolerance": REDIS | {"externalStorageNamespace": "x"}}, "one place"),
    "a claim of both clusters": (
        {"gcsFaultTolerance": ROCKSDB["gcsFaultTolerance"] | {"storage": {"claimName": "x"}}},
        "one place for both clusters",
    ),
    "min above max": (
        {"workerGroups": {"decode": {"minReplicas": 3}}},
        "minReplicas is 3, more than maxReplicas (2)",
    ),
    "replicas outside": (
        {"workerGroups": {"decode": {"replicas": 1}}},
        "outside minReplicas..maxReplicas (2..2)",
    ),
    "a group called head": ({"workerGroups": {"head": {"role": "any"}}}, "workerGroups.head"),
    "device by chance": ({"config": {"engine": {"device": "auto"}}}, "say cpu or cuda"),
    "CPUs by chance": ({"config": {"engine": {"resources_cpus": "auto"}}}, "give a number"),
    "no group for the labels": (
        {"models": [{"decode_labels": {"pool": "x"}}]},
        'no worker group has the labels {"pool":"x"}',
    ),
    "too few pods": (
        {"models": [{"decode_replicas": 3}]},
        "3 replicas ask for nodes with the labels",
    ),
    "too few pods for what is not given": (
        {"models": [{"decode_replicas": "auto"}], "workerGroups": {"decode": ONE_POD}},
        '2 replicas ask for nodes with the labels {"quadriga/role":"decode"}',
    ),
    "too few pods for ranks": (
        {"config": {"engine": {"tensor_parallel": 2}}},
        '4 ranks of replicas ask for nodes with the labels {"quadriga/role":"decode"}',
    ),
    "no GPU in the pods": ({"config": {"engine": {"device": "cuda"}}}, "hold 0 of them"),
    "more requested than the limit": (
        {"workerGroups": {"decode": {"resources": {"requests": {"memory": "4Gi"}}}}},
        "workerGroups.decode.resources: requests.memory is 4Gi, more than its limit (3Gi)",
    ),
    "pods that nobody adds": (
        {"models": [{"decode_replicas": 3}], "workerGroups": {"decode": {"maxReplicas": 3}}},
        "decode hold 2 of them at most (config.engine.resources_cpus: 1, resources_gpus: 0): "
        "raise replicas",
    ),
    "two models in the places of one": (
        {
            "models": [{"decode_labels": {"pool": "x"}}, {}],
            "workerGroups": {"decode": {"labels": {"pool": "x"}}},
        },
        '4 replicas ask for nodes with the labels {"pool":"x"}',
    ),
    "no pod for a scout": (
        {"config": {"helios": {"catalogue": "/models/catalogue.yaml"}}},
        '3 replicas ask for nodes with the labels {"quadriga/role":"decode"}',
    ),
    "fewer CPUs for Ray than the pods have": (
        {
            "models": [{"decode_replicas": 4}],
            "workerDefaults": {
                "resources": {"limits": {"cpu": "2"}},
                "rayStartParams": {"num-cpus": "1"},
            },
        },
        "4 replicas ask for nodes",
    ),
}


@pytest.mark.parametrize("memory", ["3Gi", "64Gi"])
@pytest.mark.parametrize("shm", ["921Mi", "922Mi", "9.3Gi", "9.4Gi"])
def test_object_stores_on_the_disk_are_refused(
    memory: str, shm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asks Ray where it puts one on a pod with that limit, of which nothing is used yet."""
    from ray._private import services, utils

    size, room = (int(float(q[:-2]) * {"Mi": 2**20, "Gi": 2**30}[q[-2:]]) for q in (memory, shm))
    monkeypatch.setattr("ray._common.utils.get_system_memory", lambda: size)
    monkeypatch.setattr(utils, "get_shared_memory_bytes", lambda: room)
    store = utils.resolve_object_store_memory(size)
    pod = {"resources": {"limits": {"cpu": "1", "memory": memory}}, "shmSize": shm}
    if services.determine_plasma_store_config(store, "/tmp")[0] != "/dev/shm":
        with pytest.raises(Exception, match=r"workerGroups\.decode\.shmSize is"):
            render({"workerDefaults": pod})
        pod["rayStartParams"] = {"object-store-memory": "900000000"}
    render({"workerDefaults": pod})


def test_what_finds_its_place_is_taken() -> None:
    scouted = {"catalogue": "/models/catalogue.yaml"}
    for helios in (scouted | {"scout": False}, scouted | {"enabled": False}):
        render({"config": {"helios": helios}})
    grown = {"autoscaling": {"enabled": True}, "models": [{"decode_replicas": 3}]}
    render(grown | {"workerGroups": {"decode": {"maxReplicas": 3}}})


@pytest.mark.parametrize("case", REFUSED)
def test_bad_values_are_refused(case: str) -> None:
    import helm_python

    values, message = REFUSED[case]
    with pytest.raises(helm_python.HelmError) as refused:
        render(values)
    assert message in str(refused.value)


def test_the_defaults_that_templates_assume_are_ours() -> None:
    import helm_python

    with pytest.raises(helm_python.HelmError) as refused:
        render({"config": {"ingress": None}})
    longest_s = QuadrigaConfig().ingress.max_deadline_s
    assert f"config.ingress.max_deadline_s ({longest_s:.0f})" in str(refused.value)
    pool = PoolConfig()
    models = [{"prefill_labels": {}, "decode_labels": {}}]
    fits = sum(num_replicas(pool).values())
    render({"models": models, "workerGroups": _one_group(fits)})
    with pytest.raises(helm_python.HelmError, match=f"{fits} replicas ask for nodes"):
        render({"models": models, "workerGroups": _one_group(fits - 1)})


def _one_group(num_pods: int) -> dict[str, Any]:
    pods = {"role": "any", "replicas": num_pods, "minReplicas": 1, "maxReplicas": num_pods}
    return {"prefill": None, "decode": None, "all": pods}


def test_a_release_that_begins_with_a_digit_is_refused() -> None:
    import helm_python

    with (
        helm_python.Chart.load(CHART) as chart,
        pytest.raises(helm_python.HelmError, match="begin with a letter"),
    ):
        chart.render({}, name="1st", namespace="x")


def test_a_long_release_name_is_cut_to_what_kuberay_takes() -> None:
    import helm_python

    with helm_python.Chart.load(CHART) as chart:
        files = chart.render({}, name="q" * 53, namespace="x")
    assert f'name: "{"q" * 47}"\n' in files["quadriga/templates/rayservice.yaml"]


@pytest.mark.parametrize("case", CASES)
def test_helm_lint_finds_nothing(case: str) -> None:
    import helm_python

    found = helm_python.lint(CHART, copy.deepcopy(CASES[case]), strict=True, quiet=True)
    assert not [m for m in found.get("messages", []) if "icon is recommended" not in str(m)], found
