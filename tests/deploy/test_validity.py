"""Whatever the values, what is rendered is valid: for Kubernetes, KubeRay, Serve and ourselves."""

from __future__ import annotations

import copy
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft7Validator

from quadriga.config.loader import load_config
from quadriga.config.resolve import Hardware, resolve
from quadriga.core.replica import Role
from tests.deploy.charts import (
    CASES,
    CHART,
    EVERYTHING,
    EXAMPLES,
    NAME,
    NAMESPACE,
    ROOT,
    Document,
    kuberay_crd,
    needs_helm,
    one,
    render,
    serve_config,
)
from tests.deploy.strict import strict_schema

pytestmark = needs_helm

KUBERNETES_VERSIONS = ("1.29", "1.33", "1.37")
CUSTOM_GROUPS = (
    "ray.io",
    "monitoring.coreos.com",
    "gateway.envoyproxy.io",
    "gateway.networking.k8s.io",
    "inference.networking.k8s.io",
)
every_case = pytest.mark.parametrize("case", CASES)


@pytest.fixture(scope="module")
def rayservice_schema() -> Draft7Validator:
    return Draft7Validator(strict_schema(kuberay_crd("rayservices")))


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
@every_case
def test_core_objects_are_valid(case: str, version: str) -> None:
    import kubernetes_validate

    kinds = set()
    for document in render(CASES[case]):
        if document["apiVersion"].split("/")[0] not in CUSTOM_GROUPS:
            kubernetes_validate.validate(copy.deepcopy(document), version, strict=True)
            kinds.add(document["kind"])
    assert kinds, "nothing was looked at"


@every_case
def test_rayservice_is_valid(case: str, rayservice_schema: Draft7Validator) -> None:
    service = one(render(CASES[case]), "RayService")
    errors = [f"{e.json_path}: {e.message}" for e in rayservice_schema.iter_errors(service)]
    assert not errors


def test_the_strict_schema_finds_an_unknown_field(rayservice_schema: Draft7Validator) -> None:
    service = copy.deepcopy(one(render({}), "RayService"))
    service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["dnsPolice"] = "x"
    assert [e.message for e in rayservice_schema.iter_errors(service)]


@pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince20")  # in Ray's schema
@every_case
def test_serve_and_our_own_configuration_take_it(case: str) -> None:
    from ray.serve.schema import ServeDeploySchema

    told = serve_config(render(CASES[case]))
    schema = ServeDeploySchema.parse_obj(told)
    [application] = schema.applications
    assert application.import_path == "serve_app.app:build"
    config = load_config(told["applications"][0]["args"])
    assert config.engine.resources_cpus != "auto"
    assert config.engine.resources_gpus != "auto"
    assert told["applications"][0]["name"] == config.name


@pytest.mark.parametrize("case", ["defaults", "cpu", "several-models", "rocksdb", "bare"])
def test_bundled_models_resolve_on_what_the_groups_have(case: str) -> None:
    documents = render(CASES[case])
    groups = one(documents, "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    cpus = sum(
        g["replicas"] * float(g["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"])
        for g in groups
    )
    args = serve_config(documents)["applications"][0]["args"]
    deployment = resolve(load_config(args), Hardware(num_cpus=cpus))
    for replica in deployment.replicas:
        places = [g for g in groups if replica.node_labels.items() <= g["labels"].items()]
        assert places, f"no group has {replica.node_labels}"
    assert {r.role for r in deployment.replicas} == {Role.PREFILL, Role.DECODE}


def test_gpu_nodes_may_join_after_the_application(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(ROOT / "quadriga" / "assets" / "quadriga-s", model)
    args = serve_config(render(CASES["many-gpus"]))["applications"][0]["args"]
    args["pools"][0]["model"] = str(model)
    args["engine"].pop("max_model_len")
    deployment = resolve(load_config(args), Hardware(num_cpus=4, num_gpus=0))
    assert {r.num_gpus for r in deployment.replicas} == {1.0}


@pytest.mark.parametrize("num_gpus", [0, 1, 8])
def test_there_are_as_many_replicas_whichever_gpus_joined_first(num_gpus: int) -> None:
    pods = {"resources": {"limits": {"nvidia.com/gpu": 1}}}
    values = {"config": {"engine": {"device": "cuda"}}, "workerDefaults": pods}
    args = serve_config(render(values | {"models": [{"model": "quadriga-s"}]}))
    config = load_config(args["applications"][0]["args"])
    roles = [r.role for r in resolve(config, Hardware(num_cpus=4, num_gpus=num_gpus)).replicas]
    assert roles == [Role.PREFILL, Role.DECODE, Role.DECODE]


@every_case
def test_notes_tell_how_to_reach_it(case: str) -> None:
    import helm_python

    with helm_python.Chart.load(CHART) as chart:
        notes = chart.render(CASES[case], name=NAME, namespace=NAMESPACE)
    text = notes["quadriga/templates/NOTES.txt"]
    values = CASES[case]
    if values.get("ingress", {}).get("enabled") or values.get("gateway", {}).get("enabled"):
        assert "https://llm.example.com" in text
    elif case == "incremental":
        assert "gateway/quadriga-gateway" in text and "helm test" not in text
    else:
        assert "port-forward service/quadriga-serve-svc 8000" in text
    assert ("There are no API keys" in text) == (
        not values.get("apiKeys", {}).get("existingSecret")
    )
    assert "<no value>" not in text


def test_notes_tell_what_operators_look_at() -> None:
    import helm_python

    with helm_python.Chart.load(CHART) as chart:
        notes = chart.render(EVERYTHING, name=NAME, namespace=NAMESPACE)
        values = {k: v for k, v in EVERYTHING.items() if k != "ingress"}
        without = chart.render(values, name=NAME, namespace=NAMESPACE)
    assert "9600/dashboard" in notes["quadriga/templates/NOTES.txt"]
    assert "patch raycluster" in notes["quadriga/templates/NOTES.txt"]
    assert "describe rayservice quadriga" in notes["quadriga/templates/NOTES.txt"]
    text = without["quadriga/templates/NOTES.txt"]
    assert "HTTPS: port 8443" in text and "gRPC: port 9443" in text
    assert "get service/quadriga-api" in text


def test_a_helm_on_the_path_renders_the_same() -> None:
    helm = shutil.which("helm")
    if helm is None:
        pytest.skip("there is no helm on the PATH")
    for path in EXAMPLES:
        command = [helm, "template", NAME, str(CHART), "--namespace", NAMESPACE]
        done = subprocess.run(
            [*command, "--values", str(path), "--kube-version", "1.33.0"],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        theirs = [d for d in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader) if d]
        assert _by_name(theirs) == _by_name(render(CASES[path.stem]))


def _by_name(documents: list[Document]) -> dict[tuple[str, str], Document]:
    return {(d["kind"], d["metadata"]["name"]): d for d in documents}


def test_large_numbers_stay_numbers() -> None:
    args = serve_config(render(EVERYTHING))["applications"][0]["args"]
    assert args["ingress"]["max_body_bytes"] == 4_000_000
