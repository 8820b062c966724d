"""What the rendered objects promise: hardened pods, stable selectors, upgrades that cut nothing."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from quadriga.config.loader import load_config
from serve_app.http.haproxy import BUFFER_VARIABLE, buffer_bytes
from tests.deploy.charts import (
    BARE,
    CASES,
    CHART,
    EVERYTHING,
    ODD_NAMES,
    ROCKSDB,
    Document,
    needs_helm,
    one,
    pod_templates,
    render,
    serve_config,
)

pytestmark = needs_helm

every_case = pytest.mark.parametrize("case", CASES)


@every_case
def test_pods_are_hardened(case: str) -> None:
    for group, template in pod_templates(render(CASES[case])).items():
        pod = template["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is (
            group == "head" and CASES[case].get("autoscaling", {}).get("enabled", False)
        )
        ours = {"ray-head", "ray-worker", "haproxy-starter"}
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            if container["name"] in ours:
                context = container["securityContext"]
                assert context["readOnlyRootFilesystem"] is True
                assert context["allowPrivilegeEscalation"] is False
                assert context["capabilities"]["drop"] == ["ALL"]
                assert {"cpu", "memory"} <= container["resources"]["limits"].keys(), "for a quota"
        assert "livenessProbe" not in pod["containers"][0], "probes are KubeRay's"


def test_everything_that_can_be_written_to_is_a_volume() -> None:
    for template in pod_templates(render(EVERYTHING)).values():
        ray = template["spec"]["containers"][0]
        mounts = {m["mountPath"] for m in ray["volumeMounts"]}
        assert {"/tmp", "/home/quadriga", "/dev/shm"} <= mounts
        volumes = {v["name"] for v in template["spec"]["volumes"]}
        for container in [*template["spec"]["containers"], *template["spec"]["initContainers"]]:
            assert {m["name"] for m in container.get("volumeMounts", [])} <= volumes


def test_another_chart_version_changes_no_pod(tmp_path: Path) -> None:
    other = tmp_path / "quadriga"
    shutil.copytree(CHART, other)
    facts = yaml.safe_load((other / "Chart.yaml").read_text())
    facts["version"] = "9.9.9"
    (other / "Chart.yaml").write_text(yaml.safe_dump(facts))
    for values in (CASES["defaults"], EVERYTHING):
        old, new = (one(render(values, chart=c), "RayService") for c in (CHART, other))
        assert (
            old["metadata"]["labels"]["helm.sh/chart"] != new["metadata"]["labels"]["helm.sh/chart"]
        )
        assert old["spec"] == new["spec"]


def test_another_configuration_changes_no_pod() -> None:
    """It is applied in place; KubeRay starts another cluster only when pods change."""
    download = EVERYTHING["models"][1]
    values = {"models": [download], "modelStorage": {"enabled": True}}
    spec = one(render(values), "RayService")["spec"]
    changed = {
        "models": [{"download": {"repo": "org/other"}, "decode_replicas": 2}],
        "config": {"decode": {"max_slots": 4}},
        "modelDownload": {"timeoutSeconds": 60},
    }
    other = one(render(values | changed), "RayService")["spec"]
    assert spec["serveConfigV2"] != other["serveConfigV2"]
    assert spec["rayClusterConfig"] == other["rayClusterConfig"]


def test_other_tolerations_change_pods() -> None:
    """KubeRay compares pods without their tolerations, so something else must differ."""
    pods = ({"tolerations": [{"key": key}]} for key in "ab")
    first, second = (pod_templates(render({"head": p, "workerDefaults": p})) for p in pods)
    assert all(first[group]["metadata"] != second[group]["metadata"] for group in first)


def test_nothing_selects_on_a_generated_name() -> None:
    stable = {"quadriga/release", "quadriga/group", "ray.io/node-type", "ray.io/serve"}
    num_seen = 0
    for document in render(EVERYTHING):
        spec = document.get("spec", {})
        selector = spec.get("podSelector") or spec.get("selector")
        if selector and document["kind"] != "Job":
            labels = selector.get("matchLabels", selector)
            assert set(labels) <= stable, document["kind"]
            num_seen += 1
    assert num_seen >= 6
    for template in pod_templates(render(EVERYTHING)).values():
        assert template["metadata"]["labels"]["quadriga/release"] == "quadriga"


def test_a_cluster_is_one_endpoint_of_an_inference_pool() -> None:
    """Its head alone, on the port at which Serve listens; a route of the chart leads there."""
    picker = {"name": "picker", "port": 9003}
    values = {
        "apiKeys": {"existingSecret": "keys"},
        "config": {"ingress": {"open_endpoint_metrics": True}},
        "gateway": {"enabled": True, "parentRefs": [{"name": "g"}], "hostnames": ["a.b"]},
        "inferencePool": {"enabled": True, "endpointPicker": picker},
    }
    documents = render(values)
    pool = one(documents, "InferencePool")
    assert pool["apiVersion"] == "inference.networking.k8s.io/v1"
    spec = pool["spec"]
    assert spec["endpointPickerRef"] == {
        "name": "picker",
        "port": {"number": 9003},
        "failureMode": "FailOpen",
    }
    head = pod_templates(documents)["head"]
    labels = {"quadriga/release": head["metadata"]["labels"]["quadriga/release"]}
    # KubeRay gives the others: to the head alone, and while its proxy answers.
    kuberay: dict[str, Any] = {"ray.io/node-type": "head", "ray.io/serve": "true"}
    assert spec["selector"]["matchLabels"] == labels | kuberay
    ports = {p["name"]: p["containerPort"] for p in head["spec"]["containers"][0]["ports"]}
    assert spec["targetPorts"] == [{"number": ports["serve"]}]
    [rule] = one(documents, "HTTPRoute")["spec"]["rules"]
    assert rule["backendRefs"] == [
        {
            "group": "inference.networking.k8s.io",
            "kind": "InferencePool",
            "name": pool["metadata"]["name"],
        }
    ]
    shared = {"inferencePool": values["inferencePool"] | {"matchLabels": {"fleet": "chat"}}}
    several = one(render(values | shared), "InferencePool")["spec"]["selector"]["matchLabels"]
    assert several == {"fleet": "chat"} | kuberay


@every_case
def test_named_ports_are_ports_of_the_pods(case: str) -> None:
    documents = render(CASES[case])
    ports = pod_templates(documents)["head"]["spec"]["containers"][0]["ports"]
    named = set()
    for document in documents:
        spec = document.get("spec", {})
        if document["kind"] == "NetworkPolicy":
            named |= {p["port"] for rule in spec["ingress"] for p in rule.get("ports", [])}
        if document["kind"] == "Service":
            named |= {p["targetPort"] for p in spec["ports"]}
        if document["kind"] == "PodMonitor":
            named |= {endpoint["port"] for endpoint in spec["podMetricsEndpoints"]}
    assert named <= {p["name"] for p in ports}


@every_case
def test_grace_covers_the_longest_request(case: str) -> None:
    documents = render(CASES[case])
    told = serve_config(documents)["applications"][0]
    longest_s = load_config(told["args"]).ingress.max_deadline_s
    [ingress] = told["deployments"]
    assert ingress["graceful_shutdown_timeout_s"] >= longest_s
    assert ingress["max_surge_percent"] == 100, "one ingress starts before another stops"
    spec = one(documents, "RayService")["spec"]
    assert spec["rayClusterDeletionDelaySeconds"] >= longest_s
    for template in pod_templates(documents).values():
        grace_s = template["spec"]["terminationGracePeriodSeconds"]
        ray = template["spec"]["containers"][0]
        drain_s = float(_env(ray, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"))
        assert grace_s > drain_s >= longest_s
        if CASES[case].get("haproxy", {}).get("enabled", True):
            assert float(_env(ray, "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S")) >= longest_s


@pytest.mark.parametrize(
    "ingress", [{}, {"max_header_bytes": 1024}, {"max_header_bytes": 65_536}, {"max_headers": 900}]
)
def test_headers_that_are_allowed_fit_into_haproxys_buffer(ingress: dict[str, int]) -> None:
    """Where Serve's own 16 KiB do, pods are left as they are."""
    documents = render({"config": {"ingress": ingress}})
    allowed = load_config(serve_config(documents)["applications"][0]["args"]).ingress
    for template in pod_templates(documents).values():
        env = {e["name"]: e.get("value") for e in template["spec"]["containers"][0]["env"]}
        needed = buffer_bytes(allowed.max_header_bytes, allowed.max_headers)
        assert int(env.get(BUFFER_VARIABLE, 16_384)) == needed
        assert (BUFFER_VARIABLE in env) is (needed > 16_384)


@pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince20")  # of Serve's own models
def test_on_a_node_that_goes_another_ingress_starts_before_its_own_stops() -> None:
    """Asks Serve what it does with a replica there, when another one has been starting for 30 s."""
    from ray.serve._private.deployment_state import DeploymentState

    documents = render({})
    [ingress] = serve_config(documents)["applications"][0]["deployments"]
    [ray] = pod_templates(documents)["decode"]["spec"]["containers"]
    left_s = float(_env(ray, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S")) - 30
    actor = SimpleNamespace(graceful_shutdown_timeout_s=ingress["graceful_shutdown_timeout_s"])
    replica = SimpleNamespace(actor_node_id="node", _actor=actor)
    stops, _ = DeploymentState._partition_groups_to_stop(
        DeploymentState, [[replica]], {"node": 1e3 * (time.time() + left_s)}, 0
    )
    assert not stops


def test_logs_leave_room_in_the_scratch_volume() -> None:
    """Of ten processes with two files each, which Ray would keep whole otherwise."""
    for template in pod_templates(render({})).values():
        [ray] = template["spec"]["containers"]
        kept = 1 + int(_env(ray, "RAY_ROTATION_BACKUP_COUNT"))
        most_gib = 10 * 2 * kept * int(_env(ray, "RAY_ROTATION_MAX_BYTES")) / 2**30
        [scratch] = [v for v in template["spec"]["volumes"] if v["name"] == "scratch"]
        assert most_gib < int(scratch["emptyDir"]["sizeLimit"].removesuffix("Gi"))


def test_pods_have_the_environment_that_the_service_prepares(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import os

    from serve_app.cli.environment import prepare_environment

    for name in list(os.environ):
        if name.startswith("RAY_"):
            monkeypatch.delenv(name)
    before = set(os.environ)
    prepare_environment()
    prepared = {name: os.environ[name] for name in set(os.environ) - before}
    for name in prepared:
        monkeypatch.delenv(name)
    assert len(prepared) >= 5
    env = pod_templates(render({}))["head"]["spec"]["containers"][0]["env"]
    assert prepared.items() <= {e["name"]: e.get("value") for e in env}.items()


def test_a_variable_is_never_given_twice_and_the_users_wins() -> None:
    for template in pod_templates(render(EVERYTHING)).values():
        env = template["spec"]["containers"][0]["env"]
        assert len({e["name"] for e in env}) == len(env)
        assert {"name": "RAY_enable_timeline", "value": "1"} in env
    given = {
        group: next(e for e in template["spec"]["containers"][0]["env"] if e["name"] == "A")
        for group, template in pod_templates(render(EVERYTHING)).items()
    }
    assert given["head"]["value"] == "all pods'"
    assert "fieldRef" in given["decode"]["valueFrom"], "the pod's own"


GATEWAY: dict[str, Any] = {
    "apiKeys": {"existingSecret": "1"},
    "grpc": {"enabled": True},
    "modelStorage": {"enabled": True, "storageClassName": "2"},
    "gateway": {
        "enabled": True,
        "className": "3",
        "tlsSecret": "4",
        "hostnames": ["a.b"],
        "grpcHostnames": ["c.d"],
    },
    "gcsFaultTolerance": ROCKSDB["gcsFaultTolerance"] | {"storage": {"storageClassName": "5"}},
}


@pytest.mark.parametrize("values", [ODD_NAMES, GATEWAY])
def test_names_stay_texts(values: dict[str, Any]) -> None:
    """Also those that YAML takes for a number or a truth value; Kubernetes would refuse these."""

    def names(node: Any) -> Iterator[Any]:
        if isinstance(node, dict):
            for key, value in node.items():
                yield from value.values() if key in ("labels", "matchLabels") else names(value)
                if key in ("name", "namespace", "key", "value", "image", "mountPath", "groupName"):
                    yield value
                if key.endswith(("secretName", "claimName", "ClassName", "AccountName")):
                    yield value
        elif isinstance(node, list):
            for item in node:
                yield from names(item)

    documents = render(values | {"fullnameOverride": "true"}, name="123", namespace="404")
    found = [name for document in documents for name in names(document)]
    assert {"true", "123", "404"} <= set(map(str, found))
    assert [name for name in found if not isinstance(name, str)] == []
    named = "null" if values is ODD_NAMES else "quadriga"
    assert serve_config(documents)["applications"][0]["name"] == named


def test_the_application_waits_for_downloads() -> None:
    """Pods do not: where an upgrade changes none, nothing else would."""
    documents = render(EVERYTHING)
    job = one(documents, "Job")
    downloads = json.loads(_env(job["spec"]["template"]["spec"]["containers"][0], "MODELS"))
    assert downloads == [
        {"path": "/models/0123abc/tiny", "repo": "org/tiny", "revision": "0123abc"}
    ]
    pools = serve_config(documents)["applications"][0]["args"]["pools"]
    assert [p["model"] for p in pools] == ["quadriga-s", "/models/0123abc/tiny"]
    assert [p.get("fetched_from") for p in pools] == [None, "org/tiny@0123abc"]


def test_another_download_makes_another_job(tmp_path: Path) -> None:
    """Its pod cannot be changed; what failed for lack of time gets another try."""
    chart = tmp_path / "quadriga"
    shutil.copytree(CHART, chart)
    (chart / "files" / "download_models.py").write_text("other")
    changes: list[dict[str, Any]] = [
        {},
        {"models": [{"download": {"repo": "org/tiny", "revision": "other"}}]},
        {"huggingFace": {"existingSecret": "other"}},
        {"huggingFace": {"key": "other"}},
        {"imagePullSecrets": [{"name": "other"}]},
        {"serviceAccount": {"name": "other"}},
        {"image": {"pullPolicy": "Never"}},
        {"nameOverride": "other", "fullnameOverride": "quadriga"},
        {"workerDefaults": {"podSecurityContext": {"fsGroup": 2000}}},
        {"workerDefaults": {"securityContext": {"privileged": False}}},
        {"modelDownload": {"timeoutSeconds": 60}},
    ]
    jobs = [one(render(EVERYTHING | changed), "Job") for changed in changes]
    jobs.append(one(render(EVERYTHING, chart=chart), "Job"))
    assert len({json.dumps(job["spec"]) for job in jobs}) == len(jobs)
    assert len({job["metadata"]["name"] for job in jobs}) == len(jobs)


def test_the_helm_test_needs_a_key_where_the_service_does() -> None:
    def hooks(values: dict[str, Any]) -> list[Document]:
        return [d for d in render(values) if "helm.sh/hook" in d["metadata"].get("annotations", {})]

    [hook] = hooks({})
    assert hook["metadata"]["annotations"]["helm.sh/hook"] == "test"
    [hook] = hooks(EVERYTHING)
    key = [e for e in hook["spec"]["containers"][0]["env"] if e["name"] == "API_KEY"]
    assert key[0]["valueFrom"]["secretKeyRef"]["name"] == "test"
    assert not hooks({"apiKeys": {"existingSecret": "k"}})
    assert not hooks(CASES["incremental"])


def test_every_pod_can_be_placed() -> None:
    """On clusters whose nodes are all tainted the job and the test must find a node, too."""
    documents = render(EVERYTHING)
    job = one(documents, "Job")["spec"]["template"]["spec"]
    assert job["restartPolicy"] == "Never", "or the log would go with the last failure"
    [hook] = [d for d in documents if d["kind"] == "Pod"]
    for pod in (job, hook["spec"], pod_templates(documents)["head"]["spec"]):
        assert pod["nodeSelector"] == {"pool": "system"}
        assert pod["tolerations"] == [{"operator": "Exists"}]
    assert job["affinity"] == {"nodeAffinity": {}}
    [download] = job["containers"]
    for container in (download, *hook["spec"]["containers"]):
        assert {"cpu", "memory"} <= container["resources"]["limits"].keys(), "for a quota"
    assert {"name": "HTTPS_PROXY", "value": "http://proxy:3128"} in download["env"]
    assert download["envFrom"] == [{"configMapRef": {"name": "proxy"}}]
    assert hook["spec"]["containers"][0]["resources"]["requests"]["cpu"] == "100m"
    for template in pod_templates(documents).values():
        assert template["spec"]["schedulerName"] == "volcano"
    assert "schedulerName" not in pod_templates(render({}))["head"]["spec"]
    spread = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
    given = spread | {"labelSelector": {"matchLabels": {"a": "b"}}}
    head = pod_templates(render({"head": {"topologySpreadConstraints": [spread, given]}}))["head"]
    own, users = head["spec"]["topologySpreadConstraints"]
    assert own["labelSelector"]["matchLabels"]["quadriga/group"] == "head"
    assert users == given, "word for word"


def test_clients_outside_can_have_a_load_balancer() -> None:
    service = one(render(EVERYTHING), "Service")
    assert service["metadata"]["annotations"]["example.com/internal"] == "true"
    assert service["spec"]["type"] == "LoadBalancer"
    assert service["spec"]["loadBalancerClass"] == "example.com/nlb"
    assert service["spec"]["loadBalancerSourceRanges"] == ["203.0.113.0/24", "2001:db8::/32"]
    assert "clusterIP" not in service["spec"]
    keys = {"apiKeys": {"existingSecret": "keys"}, "tls": {"secretName": "certificate"}}
    assert one(render(keys), "Service")["spec"]["clusterIP"] == "None"
    node_port = one(render(keys | {"service": {"type": "NodePort"}}), "Service")["spec"]
    assert node_port["type"] == "NodePort"
    assert "loadBalancerClass" not in node_port


def test_tls_at_the_pods() -> None:
    template = pod_templates(render(EVERYTHING))["head"]["spec"]
    assert _env(template["containers"][0], "QUADRIGA_TLS_CERT") == "/etc/quadriga/tls/tls.crt"
    [starter] = [c for c in template["initContainers"] if c["name"] == "haproxy-starter"]
    assert _env(starter, "QUADRIGA_TLS_CLIENT_CA") == "/etc/quadriga/client-ca/ca.crt"
    assert _env(template["containers"][0], "RAY_SERVE_HAPROXY_BINARY_PATH") in starter["args"][0]
    assert "--no-grpc" not in starter["args"][0]
    without = pod_templates(render(EVERYTHING | {"grpc": {"enabled": False}}))["head"]["spec"]
    [starter] = [c for c in without["initContainers"] if c["name"] == "haproxy-starter"]
    assert "serve_app.http.haproxy --no-grpc)" in starter["args"][0]


def test_without_haproxy_nothing_starts_it() -> None:
    for template in pod_templates(render(BARE)).values():
        assert "initContainers" not in template["spec"]
        names = {e["name"] for e in template["spec"]["containers"][0]["env"]}
        assert not any(name.startswith("RAY_SERVE_HAPROXY_BINARY") for name in names)


def test_the_budget_is_the_heads() -> None:
    spec = one(render(EVERYTHING), "PodDisruptionBudget")["spec"]
    assert spec["minAvailable"] == 1
    assert spec["selector"]["matchLabels"]["quadriga/group"] == "head"


def test_keys_in_redis_are_removed_once_the_head_has_ended() -> None:
    service = one(render(EVERYTHING), "RayService")
    assert service["metadata"]["annotations"]["ray.io/gcs-ft-deletion-timeout"] == str(630 + 600)
    options = service["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
    assert options["externalStorageNamespace"] == "123", "a text"
    assert "annotations" not in one(render({}), "RayService")["metadata"]
    account = one(render(EVERYTHING), "ServiceAccount")["metadata"]
    assert account["annotations"]["helm.sh/resource-policy"] == "keep", "the job that removes them"
    assert "annotations" not in one(render(ROCKSDB), "ServiceAccount")["metadata"]


def test_traffic_moves_to_a_cluster_that_serves() -> None:
    for template in pod_templates(render({})).values():
        [ray] = template["spec"]["containers"]
        within_s = float(_env(ray, "QUADRIGA_READY_WITHIN_S"))
        assert within_s * int(_env(ray, "RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT")) > 7200


def test_streams_of_grpc_outlast_the_default_of_envoy() -> None:
    documents = render(CASES["many-gpus"])
    policy = one(documents, "BackendTrafficPolicy")["spec"]
    assert policy["targetRefs"][0]["name"] == one(documents, "GRPCRoute")["metadata"]["name"]
    assert policy["timeout"]["http"]["requestTimeout"] == "1830s"


def test_bodies_that_the_service_takes_pass_the_ingress_controller() -> None:
    documents = render(CASES["several-models"])
    most = one(documents, "Ingress")["metadata"]["annotations"][
        "nginx.ingress.kubernetes.io/proxy-body-size"
    ]
    told = serve_config(documents)["applications"][0]["args"]
    mib = load_config(told).ingress.max_body_bytes / 2**20
    assert most == f"{math.ceil(mib)}m"


def test_dashboards_and_alerts_of_the_chart_are_shipped(tmp_path: Path) -> None:
    chart = tmp_path / "quadriga"
    shutil.copytree(CHART, chart)
    for folder in ("dashboards", "alerts"):
        shutil.rmtree(chart / folder, ignore_errors=True)
        (chart / folder).mkdir()
    page = {"title": "{{ not a template }}", "templating": {"list": [{"name": "job"}]}}
    (chart / "dashboards" / "one_page.json").write_text(json.dumps(page))
    asked = 'sum by (model_name) (rate(vllm:a_total[5m])) / absent(quadriga_b{code=~"5.."})'
    rule = {"alert": "A", "expr": asked, "annotations": {"summary": "{{ $labels.pod }}"}}
    for name in ("a", "b"):
        groups = {"groups": [{"name": name, "rules": [rule]}]}
        (chart / "alerts" / f"{name}.yaml").write_text(yaml.safe_dump(groups))
    documents = render(EVERYTHING, chart=chart)
    [shipped] = [d for d in documents if d["metadata"]["name"] == "quadriga-one-page"]
    assert shipped["metadata"]["labels"]["grafana_dashboard"] == "1"
    shown = json.loads(shipped["data"]["quadriga.quadriga.one_page.json"])
    assert shown["title"] == "{{ not a template }} (quadriga/quadriga)"
    assert shown["templating"]["list"][0]["current"]["value"] == ["quadriga/quadriga"]
    groups = one(documents, "PrometheusRule")["spec"]["groups"]
    assert [g["name"] for g in groups] == ["a", "b"]
    for is_read, label, value in ((1, "job", "quadriga/quadriga"), (0, "namespace", "quadriga")):
        # Two releases do not hide each other's, nor in Alertmanager.
        values = EVERYTHING | {"podMonitor": EVERYTHING["podMonitor"] | {"enabled": bool(is_read)}}
        here = f'{label}="{value}"'
        expr = asked.replace("a_total", f"a_total{{{here}}}").replace("{code", f"{{{here},code")
        groups = one(render(values, chart=chart), "PrometheusRule")["spec"]["groups"]
        assert groups[0]["rules"] == [rule | {"expr": expr, "labels": {label: value}}]


def test_dashboards_of_two_releases_fit_one_grafana() -> None:
    values = {"grafanaDashboards": {"enabled": True}}
    files: dict[str, Any] = {}
    for release in ({}, {"fullnameOverride": "other"}):
        maps = [d["data"] for d in render(values | release) if d["kind"] == "ConfigMap"]
        files |= {name: json.loads(text) for data in maps for name, text in data.items()}
    assert [len({page[key] for page in files.values()}) for key in ("uid", "title")] == [10, 10]
    assert all(len(page["uid"]) <= 40 for page in files.values())


def _env(container: Document, name: str) -> str:
    [value] = [e["value"] for e in container["env"] if e["name"] == name]
    return str(value)
