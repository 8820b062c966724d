"""The real service, started once for all end-to-end tests.

With `QUADRIGA_E2E_ROLES=mixed` it has two mixed replicas; see `roles`. `QUADRIGA_E2E_HTTP`,
`QUADRIGA_E2E_GRPC` and `QUADRIGA_E2E_KEY` point the suites at a service that runs already, which
must serve `quadriga-s` with a body time limit of a few seconds.
"""

from __future__ import annotations

import os
import ssl
import warnings
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
import pytest_asyncio
from transformers import AutoModelForCausalLM

from loadgen.bench.adapters import write_adapter
from quadriga.checkpoint.folder import read_checkpoint
from quadriga.client import AsyncClient, Client
from quadriga.config.loader import load_config
from quadriga.ports import free_port
from serve_app.auth.api_keys import ApiKeys
from serve_app.cli.environment import prepare_environment
from serve_app.cli.launch import Addresses, LocalService
from tests.e2e.roles import settings
from tests.order_of_tests import common_last
from tests.otlp import Collector

MODEL = "quadriga-s"
ADAPTER = "quadriga-s-adapted"
BODY_TIMEOUT_S = 6.0


@dataclass(frozen=True, slots=True)
class Service:
    """Where the service is, and the key that its gRPC port asks for.

    Attributes:
        admin_url, log_folder: Empty for a service that ran before.
        adapters: The folder with its one LoRA adapter, `ADAPTER`; empty for one that ran before.
        traces: Where it sends the traces that a client began; None for one that ran before.
    """

    base_url: str
    grpc_target: str
    key: str
    model: str = MODEL
    admin_url: str = ""
    log_folder: str = ""
    adapters: str = ""
    traces: Collector | None = None


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    common_last(items, Path(__file__).parent, ("service",))


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One prefill and two decode replicas, or two mixed ones, eager, with HTTP and gRPC."""
    if "QUADRIGA_E2E_HTTP" in os.environ:
        yield Service(
            os.environ["QUADRIGA_E2E_HTTP"],
            os.environ["QUADRIGA_E2E_GRPC"],
            os.environ["QUADRIGA_E2E_KEY"],
        )
        return
    with Collector() as collector, pytest.MonkeyPatch.context() as patched:
        patched.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        patched.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
        path = tmp_path_factory.mktemp("adapters")
        model = AutoModelForCausalLM.from_pretrained(read_checkpoint(MODEL).path)
        write_adapter(path / ADAPTER, model, strength=0.05)
        yield from _started(collector, str(path))


def _started(collector: Collector, adapters: str) -> Iterator[Service]:
    prepare_environment()
    config = load_config(
        {
            "model": MODEL,
            "adapters": adapters,
            **settings(2),
            "deterministic": True,  # early exits and all, the same answer every time
            "engine.compile": "off",
            "ingress.body_timeout_s": BODY_TIMEOUT_S,
            "ingress.orphan_request_s": 5.0,
            "ingress.replicas": 2,
            "admin.port": (admin_port := free_port()),
            "logging.format": "json",
        }
    )
    key = "e2e-key-0123456789"
    addresses = Addresses(http_port=free_port(), grpc_port=free_port())
    keys = ApiKeys.of([key], is_http_open=True)
    running = LocalService(config, keys, addresses, num_cpus=4, log_to_driver=False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray's own, of the libraries it uses
            running.start()
        assert addresses.grpc_target is not None
        yield Service(
            addresses.http_url,
            addresses.grpc_target,
            key,
            admin_url=f"http://127.0.0.1:{admin_port}",
            log_folder=str(running.log_folder()),
            adapters=adapters,
            traces=collector,
        )
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            running.stop()


@pytest.fixture(scope="session")
def own(service: Service) -> Service:
    """The service where this process started it, and reaches its logs and replicas."""
    if not service.admin_url:
        pytest.skip("the service was started by another process")
    return service


TLS = ssl.create_default_context()  # each client would read all authorities anew: .1 s


@pytest.fixture
def http(service: Service) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.base_url, timeout=60, verify=TLS) as client:
        yield client


@pytest.fixture
def client(service: Service, http: httpx.Client) -> openai.OpenAI:
    url = f"{service.base_url}/v1"
    return openai.OpenAI(base_url=url, api_key="none", timeout=600, max_retries=0, http_client=http)


@pytest_asyncio.fixture
async def ahttp(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=service.base_url, timeout=60, verify=TLS) as client:
        yield client


@pytest.fixture
def sdk(service: Service) -> Iterator[Client]:
    with Client(service.grpc_target, api_key=service.key, timeout_s=60) as client:
        yield client


@pytest_asyncio.fixture
async def async_sdk(service: Service) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(service.grpc_target, api_key=service.key, timeout_s=60) as client:
        yield client
